"""How a learner on another host reaches its run: four TCP connections to the run's port, and a `RemoteArena`.

The learner's `Connection` speaks over one end of a socket pair, as it would to a coordinator on its own host. Threads
of the `Link` carry its messages to the road process beside the servers and back. Those that say what was written
before (Push, Seeded, Paused) follow it on the same connection; all others overtake it.

Gradients are sent from the slot while backward goes on, in pieces, by a thread; when their minibatch is cancelled, what
is left of them is not sent. When a connection breaks, the incarnation is over: the learner stops where it is, connects
again and joins as a new one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time

from msgspec import structs

from offbeat.errors import PeerError, RequestError
from offbeat.network import keys
from offbeat.network.connections import AnyConnection, Place
from offbeat.network.keys import RunKey
from offbeat.network.port import RefusedError, check_trust, dial, parse_place, raw_of, receive_all, send_all, shut
from offbeat.network.streams import ClosedError
from offbeat.server import handshake
from offbeat.server.arena import Arena
from offbeat.server.remote.frames import (
    HEADER_BYTES,
    IDLE_S,
    LEARNER_CHANNELS,
    WORDS_BYTES,
    Channel,
    FrameError,
    Greeting,
    Header,
    Kind,
    Reading,
    Silence,
    unpack,
    unpack_words,
)
from offbeat.server.remote.outgoing import LEAST_BYTES, Outgoing, Pace, close_in_children
from offbeat.server.remote.remote_arena import RemoteArena
from offbeat.server.remote.spread_arena import SpreadArena
from offbeat.server.wire import MOST_BYTES, Paused, Push, Seeded, Welcome, WireError, decode_input, decode_output

SCHEME = "tcp://"
GATEWAY = "OFFBEAT_GATEWAY"  # where a learner on the host of the run finds out where its servers are
BEAT_S = 0.2
HOST_LETTERS = 32  # of the token of a learner on another host: the name of its host; then that of the run
ANSWER_S = 15.0  # for the road process to say whether the learner is in; after that it tries again
_DRAIN_S = 1.0  # at the end, for what was not sent yet
AFTER_DATA = Push | Seeded | Paused


class Link:
    """The connections of one session; see the module's text."""

    def __init__(self, connections: dict[Channel, AnyConnection], arena: RemoteArena) -> None:
        self.arena = arena
        self.broken = False
        self._connections = connections
        self._out = Outgoing()
        self._local: socket.socket | None = None
        self._saying = threading.Lock()  # of UP_CONTROL
        self._closing = threading.Lock()
        self._cancel, _, self._beat = arena.learner_words[0]
        self._pace = Pace()
        self._pace.begin(raw_of(connections[Channel.UP_DATA]))
        self._carrier: threading.Thread | None = None
        self._silence = Silence(Channel.DOWN_CONTROL, Channel.DOWN_DATA, time.monotonic())
        close_in_children(self)

    def start(self) -> None:
        self.arena.connected(self)
        for body in (self._receive_control, self._receive_data, self._send_data):
            threading.Thread(target=self._guarded, args=(body,), name=f"offbeat {body.__name__}", daemon=True).start()

    def attach(self) -> socket.socket:
        """The learner's end of a new socket pair."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, int(1e6 * BEAT_S)))
        self._local = theirs
        self._carrier = threading.Thread(
            target=self._guarded, args=(lambda: self._carry_up(theirs),), name="offbeat carry", daemon=True
        )
        self._carrier.start()
        return mine

    def _guarded(self, body: object) -> None:
        """A thread's life: with any of them the connection ends, whatever it was that ended the thread."""
        try:
            assert callable(body)
            body()
        except (ClosedError, OSError, FrameError, WireError, ValueError):
            self.end()
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """The connections are gone, or not to be used any more: whoever waits for them is told."""
        with self._closing:
            if self.broken:
                return
            self.broken = True
        for one in self._connections.values():
            shut(one)
        self.arena.lost()
        if self._local is not None:
            with contextlib.suppress(OSError):
                self._local.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """When the learner has closed its end: what it has said is sent first."""
        if self._carrier is not None and self._carrier is not threading.current_thread():
            self._carrier.join(2 * _DRAIN_S)
        self.end()
        for one in self._connections.values():
            raw_of(one).close()

    def drop(self) -> None:
        """In a forked child: the connections are the parent's."""
        self.broken = True
        for one in self._connections.values():
            with contextlib.suppress(OSError):
                os.close(raw_of(one).fileno())

    # --- up ---------------------------------------------------------------------------------------------------------

    def write(self, header: Header, data: memoryview) -> None:
        self._out.write(header, data)

    def read(self, number: int, reading: Reading) -> None:
        with contextlib.suppress(OSError):
            self._say(Header(Kind.READ, which=reading, number=number))

    def hand_in(self, pause: int, part: bytes) -> None:
        """What the learner gives to the one who leads a pause; before it says that it pauses."""
        for at in range(0, len(part), LEAST_BYTES):
            piece = part[at : at + LEAST_BYTES]
            last = int(at + len(piece) == len(part))
            self._out.add(Header(Kind.PART, which=last, size=len(piece), number=pause, offset=at), piece)

    def _say(self, header: Header, payload: bytes = b"") -> None:
        with self._saying:
            send_all(self._connections[Channel.UP_CONTROL], [header.pack(), payload])

    def _carry_up(self, local: socket.socket) -> None:
        """What the learner says; and a sign of life, as long as its own thread gives one."""
        inbox, beat, beat_s = handshake.Inbox(), -1, 0.0
        with local:
            while local is self._local:
                now_s = time.monotonic()
                if now_s - beat_s >= BEAT_S and self._beat.get() != beat:
                    beat, beat_s = self._beat.get(), now_s
                    self._say(Header(Kind.BEAT))
                try:
                    data = inbox.receive(local)
                except BlockingIOError:
                    continue
                if not data:
                    break
                header = Header(Kind.MESSAGE, size=len(data))
                if isinstance(decode_input(data), AFTER_DATA):
                    self._out.add(header, data)
                else:
                    self._say(header, data)
        if local is self._local:  # the learner has left
            self._out.drain(_DRAIN_S)
            self.end()

    def _send_data(self) -> None:
        one, pace, sent_s = self._connections[Channel.UP_DATA], self._pace, 0.0
        while not self.broken:
            frame = self._out.next(self._cancel.get(), pace.piece_bytes)
            began_s = time.monotonic()
            if frame is None and began_s - sent_s < IDLE_S:
                continue
            header, parts = frame or (Header(Kind.BEAT), ())
            send_all(one, [header.pack(), *parts])
            sent_s = time.monotonic()
            pace.sent(header.size, sent_s - began_s)
            del frame, parts  # they may be all that holds a gradient

    # --- down -------------------------------------------------------------------------------------------------------

    def _receive_header(self, channel: Channel, room: memoryview) -> Header:
        receive_all(self._connections[channel], room)
        header = unpack(room, channel)
        self._silence.heard(channel, time.monotonic())
        return header

    def _receive_control(self) -> None:
        one, room, small = self._connections[Channel.DOWN_CONTROL], _room(HEADER_BYTES), _room(MOST_BYTES)
        while True:
            header = self._receive_header(Channel.DOWN_CONTROL, room)
            payload = small[: header.size]
            receive_all(one, payload)
            if header.kind is Kind.WORDS:
                self.arena.set_words(unpack_words(payload))
            elif header.kind is Kind.AGAIN:
                self._detach()
            elif header.kind is not Kind.BEAT:
                data = bytes(payload)
                message = decode_output(data)
                if isinstance(message, Welcome):
                    self.arena.welcome(message.incarnation)
                if self._local is not None:
                    with contextlib.suppress(OSError):  # it is closing its end
                        self._local.send(data)

    def _detach(self) -> None:
        """The learner sees its socket closed, asks for another, and says again what was not answered."""
        local, self._local = self._local, None
        if local is not None:
            local.shutdown(socket.SHUT_RDWR)

    def _receive_data(self) -> None:
        one, room, words = self._connections[Channel.DOWN_DATA], _room(HEADER_BYTES), _room(WORDS_BYTES)
        while True:
            header = self._receive_header(Channel.DOWN_DATA, room)
            if header.kind is Kind.DATA:
                receive_all(one, self.arena.place(header))
                continue
            if header.kind is Kind.BEAT:
                continue
            receive_all(one, words)
            self.arena.set_words(unpack_words(words))
            if header.kind is Kind.END:
                self.arena.ended(header.offset, header.number, whole=bool(header.which))


def _room(size_bytes: int) -> memoryview:
    return memoryview(bytearray(size_bytes))


class RemoteRoad:
    """A run on another host. `host` names this one's places there (`remote.gateway`); `run` is its name."""

    def __init__(self, place: Place, key: RunKey | None, learner: int, host: bytes, run: str = "") -> None:
        self._place, self._key, self._learner, self._host, self._run = place, key, learner, host, run
        self._link: Link | None = None
        self._arena: RemoteArena | None = None
        self._accepted: handshake.Accept | None = None

    def connect(
        self, own: handshake.Handshake, timeout_s: float
    ) -> tuple[socket.socket, handshake.Accept, RemoteArena]:
        """By the connections that there are, or by new ones."""
        link = self._link
        if link is None or link.broken or self._accepted is None:
            if link is not None:
                link.close()
            link = self._link = self._dial(own, timeout_s)
            link.start()
        assert self._accepted is not None
        return link.attach(), self._accepted, link.arena

    def _dial(self, own: handshake.Handshake, timeout_s: float) -> Link:
        end_s = time.monotonic() + min(timeout_s, ANSWER_S)
        session = os.urandom(16)
        opened: dict[Channel, AnyConnection] = {}
        try:
            for channel in LEARNER_CHANNELS:
                greeting = Greeting(channel, self._learner, self._host, session).pack()
                opened[channel] = dial(self._place, self._key, greeting, max(0.1, end_s - time.monotonic()))
            data = handshake.encode_handshake(structs.replace(own, token=self._run))
            header = Header(Kind.MESSAGE, size=len(data))
            send_all(opened[Channel.UP_CONTROL], [header.pack(), data])
            asked_s = time.monotonic()
            accepted = self._answer(opened[Channel.DOWN_CONTROL], end_s)
            half_s = (time.monotonic() - asked_s) / 2
            if accepted.refused:
                kind = handshake.PlaceTakenError if accepted.taken else RequestError
                raise kind(f"the run refused this learner: {accepted.refused}")
            if accepted.setting is None or own.table is None:
                raise PeerError("the run's answer was incomplete")
            self._accepted = structs.replace(accepted, start_s=time.monotonic() - half_s - accepted.start_s)
            if self._arena is None and accepted.setting.spread:
                self._arena = SpreadArena(own.table, accepted.setting, self._learner, self._place, self._key)
            elif self._arena is None:
                self._arena = RemoteArena(own.table, accepted.setting, self._learner)
            return Link(opened, self._arena)
        except BaseException as error:
            for one in opened.values():
                raw_of(one).close()
            if isinstance(error, RefusedError):
                raise handshake.RunGoneError(str(error)) from None
            if isinstance(error, ClosedError | OSError | FrameError):
                raise PeerError(f"cannot reach the run: {error}") from None
            raise

    def _answer(self, one: AnyConnection, end_s: float) -> handshake.Accept:
        raw = raw_of(one)
        left_s = max(0.1, end_s - time.monotonic())
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", int(left_s), int(left_s % 1 * 1e6)))
        room = _room(HEADER_BYTES)
        receive_all(one, room)
        header = unpack(room, Channel.DOWN_CONTROL)
        payload = _room(MOST_BYTES)[: header.size]
        receive_all(one, payload)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 0))
        return handshake.decode_accept(bytes(payload))

    def hand_in(self, pause: int, part: bytes) -> None:
        """See `Link.hand_in`; where the connection is broken the pause goes on without this learner."""
        if self._link is not None:
            self._link.hand_in(pause, part)

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
        if isinstance(self._arena, SpreadArena):
            self._arena.close()


class LocalRoad:
    """A run on this host, whose servers may be on others."""

    def __init__(self, name: str, learner: int) -> None:
        self._road, self._learner = handshake.LocalRoad(name), learner
        self._spread: SpreadArena | None = None

    def connect(self, own: handshake.Handshake, timeout_s: float) -> tuple[socket.socket, handshake.Accept, Arena]:
        one, accepted, arena = self._road.connect(own, timeout_s)
        if not arena.setting.spread:
            return one, accepted, arena
        if self._spread is None:
            run = parse_place(os.environ[GATEWAY], GATEWAY)
            self._spread = SpreadArena(arena.table, arena.setting, self._learner, run, keys.key_of(), arena)
        return one, accepted, self._spread

    def close(self) -> None:
        if self._spread is not None:
            self._spread.close()


def road_to(listener: str, token: str, learner: int) -> handshake.Road:
    """To a run on this host by the name of its listener, or to `tcp://ADDRESS:PORT` with the key of the environment."""
    if not listener.startswith(SCHEME):
        return LocalRoad(listener, learner)
    place, key = parse_place(listener.removeprefix(SCHEME), "the run's address"), keys.key_of()
    check_trust(place, key, is_open=keys.is_open(), what="the run's address")
    return RemoteRoad(place, key, learner, bytes.fromhex(token[:HOST_LETTERS]), token[HOST_LETTERS:])
