"""A learner's way to the host of one shard: a connection to send on and one to read from, made again when they break.

What is sent and read may be sent and read again: a gradient goes to a slot that only the latest grant writes, and what
is read is pinned. So a connection that broke is not told to the learner. `deliver` sends all again that may be lost,
and returns when the other side has said that it is there; `read` asks again. Both give up after `LIMIT_S`, or when what
they do is not wanted any more.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from offbeat.errors import PeerError
from offbeat.network.connections import AnyConnection, Place
from offbeat.network.keys import RunKey
from offbeat.network.port import dial, format_place, raw_of, receive_all, send_all, shut
from offbeat.network.streams import ClosedError
from offbeat.server.remote.frames import (
    HEADER_BYTES,
    Channel,
    FrameError,
    Greeting,
    Header,
    Kind,
    Region,
    unpack,
)
from offbeat.server.remote.outgoing import Outgoing, Pace, close_in_children
from offbeat.server.remote.road_process import pieces_of

LIMIT_S = 60.0  # for a host that cannot be reached
_DIAL_S = 5.0
_AGAIN_S = 0.1
_GLANCE_S = 0.005  # between two looks whether it is still wanted
_AHEAD = 16  # pieces that are asked for and have not come
_BROKEN = (OSError, ClosedError, PeerError, FrameError)


@dataclass(slots=True)
class _Reading:
    """Regions that are to be read, each into its memory."""

    parts: Sequence[tuple[Region, int, memoryview]]
    is_wanted: Callable[[], bool]
    done: threading.Event = field(default_factory=threading.Event)
    error: PeerError | None = None


class ShardLink:
    """See the module's text. `cancelled` gives the latest grant whose gradient is not wanted any more."""

    def __init__(
        self, place: Place, key: RunKey | None, learner: int, host: bytes, cancelled: Callable[[], int]
    ) -> None:
        self._place, self._key, self._learner, self._host = place, key, learner, host
        self._cancelled = cancelled
        self._out, self._pace, self._readings = Outgoing(), Pace(), SimpleQueue[_Reading | None]()
        self._connections: dict[Channel, AnyConnection] = {}
        self._changed = threading.Condition()  # of these:
        self._breaks = self._flushed = 0
        self._whole = 0  # breaks up to which nothing is missing
        self._asked = 0  # flushes
        self.closed = False
        close_in_children(self)
        for body in (self._send_all, self._read_all):
            threading.Thread(target=body, name=f"offbeat {body.__name__}", daemon=True).start()

    @property
    def host(self) -> bytes:
        """The name that the shard's host gave its places."""
        return self._host

    # --- what the learner does --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Nothing of what is sent from now on was lost."""
        with self._changed:
            self._whole = self._breaks

    def write(self, header: Header, data: memoryview) -> None:
        self._out.write(header, data)

    def say(self, header: Header) -> None:
        self._out.add(header, b"")

    def ask(self) -> None:
        """Let the other side say when all is there (`deliver`)."""
        self._asked += 1
        self.say(Header(Kind.FLUSH, number=self._asked))

    def deliver(self, send_again: Callable[[], None], is_wanted: Callable[[], bool]) -> None:
        """After `ask`: until all is there. `PeerError` where the host cannot be reached."""
        end_s = time.monotonic() + LIMIT_S
        while is_wanted():
            with self._changed:
                breaks = self._breaks
                if breaks == self._whole and self._flushed >= self._asked:
                    return
                if breaks == self._whole:
                    self._changed.wait(_GLANCE_S)
            if breaks != self._whole:
                if time.monotonic() > end_s:
                    raise PeerError(f"cannot send to the server at {format_place(self._place)} for {LIMIT_S:g} s")
                self._whole = breaks
                send_again()
                self.ask()

    def start_reading(
        self, parts: Sequence[tuple[Region, int, memoryview]], is_wanted: Callable[[], bool]
    ) -> Callable[[], None]:
        """Fill these with regions of the shard; what is returned waits until that is done."""
        reading = _Reading(parts, is_wanted)
        self._readings.put(reading)

        def wait() -> None:
            reading.done.wait()
            if reading.error is not None:
                raise reading.error

        return wait

    def close(self) -> None:
        self.closed = True
        self._readings.put(None)
        for one in tuple(self._connections.values()):
            shut(one)

    def drop(self) -> None:
        """In a forked child: the connections are the parent's."""
        self.closed = True
        for one in self._connections.values():
            with contextlib.suppress(OSError):
                os.close(raw_of(one).fileno())

    # --- connections ------------------------------------------------------------------------------------------------

    def _connection(self, channel: Channel) -> AnyConnection:
        if channel not in self._connections:
            greeting = Greeting(channel, self._learner, self._host, secrets.token_bytes(16))
            one = dial(self._place, self._key, greeting.pack(), _DIAL_S)
            # Bytes that were lost on the way leave the rest unreadable, so an answer does not come.
            raw_of(one).setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(LIMIT_S), 0))
            if channel is Channel.SHARD_UP:
                self._pace.begin(raw_of(one))
            self._connections[channel] = one
        return self._connections[channel]

    def _disconnect(self, channel: Channel) -> None:
        one = self._connections.pop(channel, None)
        if one is not None:
            raw_of(one).close()
        if not self.closed:
            time.sleep(_AGAIN_S)

    # --- threads ----------------------------------------------------------------------------------------------------

    def _send_all(self) -> None:
        room = memoryview(bytearray(HEADER_BYTES))
        while not self.closed:
            frame = self._out.next(self._cancelled(), self._pace.piece_bytes)
            if frame is None:
                continue
            header, parts = frame
            try:
                one, began_s = self._connection(Channel.SHARD_UP), time.monotonic()
                send_all(one, [header.pack(), *parts])
                self._pace.sent(header.size, time.monotonic() - began_s)
                if header.kind is Kind.FLUSH:
                    receive_all(one, room)
                    with self._changed:
                        self._flushed = max(self._flushed, unpack(room, Channel.SHARD_UP).number)
                        self._changed.notify_all()
            except _BROKEN:
                self._disconnect(Channel.SHARD_UP)
                with self._changed:
                    self._breaks += 1
                    self._changed.notify_all()

    def _read_all(self) -> None:
        while not self.closed:
            reading = self._readings.get()
            if reading is None:
                return
            end_s = time.monotonic() + LIMIT_S
            while reading.is_wanted() and not self.closed:
                try:
                    self._read(reading, self._connection(Channel.SHARD_DOWN))
                    break
                except _BROKEN as error:
                    self._disconnect(Channel.SHARD_DOWN)
                    if time.monotonic() > end_s:
                        where = format_place(self._place)
                        reading.error = PeerError(f"cannot read from the server at {where}: {error}")
                        break
            reading.done.set()

    def _read(self, reading: _Reading, one: AnyConnection) -> None:
        """Some pieces are asked for ahead of those that come. What is not wanted any more is not asked for."""
        asked = [
            (Header(Kind.READ, region, which, 0, end - start, start), into[start:end])
            for region, which, into in reading.parts
            for start, end in pieces_of(len(into))
        ]
        room = memoryview(bytearray(HEADER_BYTES))
        sent = 0
        for come, (header, into) in enumerate(asked):
            if sent - come <= _AHEAD // 2:
                more = asked[sent : come + _AHEAD] if reading.is_wanted() else []
                if more:
                    send_all(one, [b"".join(request.pack() for request, _ in more)])
                sent += len(more)
            if come == sent:
                return
            receive_all(one, room)
            if unpack(room, Channel.SHARD_DOWN)[:2] != (Kind.DATA, header.region):
                raise FrameError("an answer to another request")
            receive_all(one, into)
