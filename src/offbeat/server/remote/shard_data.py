"""The bytes of one shard, where shards are spread over hosts: its host takes gradients in and gives weights out.

    learner  ==SHARD_UP====>  WRITE, TAKE into a slot; FLUSH is answered when all before it is done
             ==SHARD_DOWN==>  READ is answered with DATA

A learner on another host sends what belongs to this shard. One on this host has it in staging memory that both share,
and says TAKE. Offsets are within the shard. The coordinator is elsewhere: it hears of a gradient only after a FLUSH was
answered, and pins what learners read, so nothing here waits for it.

Laws. Of two that write to one slot the one with the later grant wins: the other's connection is closed, and what it
still sends is thrown away. Every push writes the whole shard, so nothing of an earlier one is left. Initial weights and
state are taken only before the first update. Nothing received sizes an allocation.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from offbeat.network.connections import AnyConnection
from offbeat.network.keys import RunKey
from offbeat.network.port import Guest, Port, raw_of, receive_all, send_all, shut
from offbeat.network.streams import ClosedError
from offbeat.server.arena import Arena
from offbeat.server.remote.frames import (
    GREETING_BYTES,
    HEADER_BYTES,
    PIECE_BYTES,
    Channel,
    FrameError,
    Header,
    Kind,
    Region,
    unpack,
    unpack_greeting,
)
from offbeat.server.remote.road_process import bytes_of

_POLL_S = 1.0
_CONNECTIONS_EACH = 8  # of a learner: it has two, and those before may not be closed yet


class SlotGuard:
    """Who may write to a slot now; see the laws of the module. For several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._newest: dict[int, int] = {}  # slot -> the latest grant that has written there
        self._writers: dict[int, Callable[[], None]] = {}  # slot -> what stops the one that is writing

    @contextlib.contextmanager
    def writing(self, slot: int, grant: int, stop: Callable[[], None]) -> Iterator[bool]:
        """Whether these bytes may go to the slot; nobody else writes there meanwhile."""
        with self._changed:
            may = grant >= self._newest.get(slot, 0)
            if may:
                self._newest[slot] = grant
                while slot in self._writers:
                    self._writers[slot]()
                    self._changed.wait(_POLL_S)
                may = grant >= self._newest[slot]
            if may:
                self._writers[slot] = stop
        try:
            yield may
        finally:
            if may:
                with self._changed:
                    del self._writers[slot]
                    self._changed.notify_all()


class ShardRegions:
    """The parts of an arena that belong to one shard, by their names in frames."""

    def __init__(self, arena: Arena, shard: int) -> None:
        self.arena, self.shard = arena, shard
        self.part = slice(*arena.table.shard(shard, arena.setting.shards))

    def tensor(self, region: Region, which: int) -> Tensor:
        """`which`: the slot or buffer; of STEPS the copy; of STATE twice its number, plus the copy."""
        arena = self.arena
        if region is Region.GRADIENT and which < len(arena.slots):
            return arena.slots[which][self.part]
        if region is Region.WEIGHTS and which < len(arena.weights):
            return arena.weights[which][self.part]
        if region is Region.STATE and which // 2 < len(arena.table.states):
            return arena.states[which % 2][arena.table.states[which // 2]][self.part]
        if region is Region.STEPS and which < 2:
            return arena.steps[self.shard][which]
        if region is Region.EXTRA:
            return arena.extra
        raise FrameError(f"there is no region {region.name} {which}")

    def bytes(self, header: Header, size: int) -> memoryview:
        """So many bytes of a region, from the header's offset on."""
        data = bytes_of(self.tensor(header.region, header.which))
        if header.offset + size > len(data):
            raise FrameError(f"bytes beyond the end of {header.region.name}")
        return data[header.offset : header.offset + size]

    @property
    def is_fresh(self) -> bool:
        """Whether no update was made yet."""
        return not self.arena.shard_words[self.shard].get()


class ShardData:
    """See the module's text."""

    def __init__(self, regions: ShardRegions, listener: socket.socket, key: RunKey | None) -> None:
        self._regions, self._guard = regions, SlotGuard()
        self._port = Port(listener, key, GREETING_BYTES)
        self._count = threading.Semaphore(_CONNECTIONS_EACH * (regions.arena.setting.learners + 1))

    def serve(self) -> None:
        """Until the process ends, which it does with this."""
        try:
            torch.set_num_threads(1)
            while True:
                for guest in self._port.poll(_POLL_S):
                    if self._count.acquire(blocking=False):
                        threading.Thread(target=self._attend, args=(guest,), daemon=True).start()
                    else:
                        raw_of(guest.connection).close()
        except BaseException:
            sys.stderr.write(traceback.format_exc())
            os._exit(1)

    def _attend(self, guest: Guest) -> None:
        bodies = {Channel.SHARD_UP: self._take_up, Channel.SHARD_DOWN: self._give_out}
        try:
            with contextlib.suppress(OSError, ClosedError, FrameError):
                body = bodies.get(unpack_greeting(guest.greeting).channel)
                if body is not None:
                    body(guest.connection)
        finally:
            raw_of(guest.connection).close()
            self._count.release()

    def _take_up(self, one: AnyConnection) -> None:
        room, scratch = memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(PIECE_BYTES))
        while True:
            receive_all(one, room)
            header = unpack(room, Channel.SHARD_UP)
            if header.kind is Kind.FLUSH:
                send_all(one, [header.pack()])
            elif header.kind is Kind.TAKE:
                self._take_staged(one, header)
            elif header.region is Region.GRADIENT:
                place = self._regions.bytes(header, header.size)
                with self._guard.writing(header.which, header.number, lambda: shut(one)) as may:
                    receive_all(one, place if may else scratch[: header.size])
            else:
                place = self._regions.bytes(header, header.size)
                receive_all(one, place if self._regions.is_fresh else scratch[: header.size])

    def _take_staged(self, one: AnyConnection, header: Header) -> None:
        """What a learner of this host has computed."""
        staging = self._regions.arena.staging
        if header.offset >= len(staging):
            raise FrameError(f"there is no staging memory of learner {header.offset}")
        place = self._regions.tensor(Region.GRADIENT, header.which)
        with self._guard.writing(header.which, header.number, lambda: shut(one)) as may:
            if may:
                place.copy_(staging[header.offset][self._regions.part])

    def _give_out(self, one: AnyConnection) -> None:
        room = memoryview(bytearray(HEADER_BYTES))
        while True:
            receive_all(one, room)
            header = unpack(room, Channel.SHARD_DOWN)
            if header.kind is not Kind.READ or header.number > PIECE_BYTES:
                raise FrameError(f"a request for {header.number} bytes at once")
            data = self._regions.bytes(header, header.number)
            answer = header._replace(kind=Kind.DATA, size=header.number)
            send_all(one, [answer.pack(), data])
