"""The servers' memory as a learner has it where each shard is on another host (`--place spread`).

The gradient and the weights are in memory of the learner's own. Each shard's part is sent to the host that holds it
(`shard_link`) while backward goes on, and read from there. Where that host is the learner's own, the gradient is in
memory that it shares with the server (staging), and weights are read from the server's memory.

Laws. A push is said only when every host has said that its part is there. A fetch is one version: its buffer is pinned
on all hosts, and after the last byte the words are looked at again, so that what was unpinned meanwhile is known to be
cancelled. The words are those of the coordinator's memory on its own host, and elsewhere copies that it sends.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.errors import PeerError
from offbeat.network.connections import Place
from offbeat.network.keys import RunKey
from offbeat.server.arena import Arena, Pieces
from offbeat.server.parameter_layout import DTYPES, ModelTensors, ParameterLayout
from offbeat.server.remote.frames import Header, Kind, Reading, Region
from offbeat.server.remote.remote_arena import RemoteArena
from offbeat.server.remote.road_process import bytes_of
from offbeat.server.remote.server_host import memory_here
from offbeat.server.remote.server_places import FIRST_HOST, ask_servers
from offbeat.server.remote.shard_data import ShardRegions
from offbeat.server.remote.shard_link import ShardLink
from offbeat.server.run_setting import RunSetting

Part = tuple[Region, int, Tensor]  # of a shard: what it is, which one, and the learner's memory for it


class _Shard(NamedTuple):
    """One shard, as this learner reaches it."""

    part: slice
    link: ShardLink
    home: ShardRegions | None  # where it is on this host


class _EarlyRead(NamedTuple):
    """Weights that are read before they are awaited."""

    pin: tuple[int, int]  # incarnation and pin
    thread: threading.Thread
    found: list[Pieces]  # one, when they are here


class SpreadArena(RemoteArena):
    """See the module's text. `beside` is the coordinator's memory, of a learner on its host."""

    def __init__(
        self,
        table: ParameterLayout,
        setting: RunSetting,
        learner: int,
        run: Place,
        key: RunKey | None,
        beside: Arena | None = None,
    ) -> None:
        super().__init__(table, setting, learner)
        self._run, self._key, self._beside = run, key, beside
        self._begun = (0, 0)  # minibatch and grant
        self._shards: list[_Shard] = []
        self._connecting = threading.Lock()
        self._buffers_of: dict[int, int] = {}  # thread -> its buffer of weights
        self._has_extra = False
        self._early: _EarlyRead | None = None  # weights that are read beside computing
        groups = setting.shards if setting.independent else 1
        self._where = torch.zeros(2 * groups, dtype=torch.int64)  # version and buffer of each
        self._home = (FIRST_HOST, beside) if beside is not None else memory_here(table, setting)
        if beside is not None:
            self.quiet_word, self.committed = beside.quiet_word, beside.committed
            self.learner_words = beside.learner_words
        if self._home is not None:
            self._use_slot(self._home[1].staging[learner])

    def _use_slot(self, slot: Tensor) -> None:
        self.slots = [slot] * self.setting.slots
        self._slot_bytes = bytes_of(slot)

    def _reached(self) -> list[_Shard]:
        """All shards, connected when they are first needed: until then their hosts may still have to come."""
        with self._connecting:
            if not self._shards:
                places = ask_servers(self._run, self._key, lambda: self._beside is None and self._broken)
                for number, place in enumerate(places):
                    link = ShardLink(
                        Place(place.address, place.port), self._key, self._learner, place.host, self._cancelled
                    )
                    is_here = self._home is not None and place.host == self._home[0]
                    home = ShardRegions(self._home[1], number) if is_here and self._home is not None else None
                    part = slice(*self.table.shard(number, self.setting.shards))
                    self._shards.append(_Shard(part, link, home))
            return self._shards

    @property
    def server_hosts(self) -> tuple[str, ...]:
        """The host of each shard by the name of its places, as hexadecimal digits; nothing for the run's own."""
        hosts = [shard.link.host for shard in self._reached()]
        return tuple("" if host == FIRST_HOST else host.hex() for host in hosts)

    # --- gradients --------------------------------------------------------------------------------------------------

    def minibatch_begun(self, minibatch: int, grant: int) -> None:
        self.filled()
        self._begun = minibatch, grant
        for shard in self._reached():
            shard.link.begin()

    def _cancelled(self) -> int:
        """The latest grant whose gradient is not wanted."""
        minibatch, grant = self._begun
        return grant if self.learner_words[self._learner][0].get() >= minibatch else grant - 1

    def _is_wanted(self) -> bool:
        return self._cancelled() < self._begun[1]

    def fill(self, slot: int, index: int, gradient: Tensor, *, stays: bool = False) -> float | None:
        """Always copied: what a broken connection has lost is sent again from the slot."""
        return super().fill(slot, index, gradient)

    def _send_gradient(self, slot: int, start: int, items: int) -> None:
        for shard in self._shards:
            first, last = max(start, shard.part.start), min(start + items, shard.part.stop)
            if first < last and shard.home is None:
                self._send_part(shard, slot, first, last)

    def _send_part(self, shard: _Shard, slot: int, first: int, last: int) -> None:
        data = self._slot_bytes[first * self._item : last * self._item]
        offset = (first - shard.part.start) * self._item
        shard.link.write(Header(Kind.WRITE, Region.GRADIENT, slot, len(data), self._begun[1], offset), data)

    def _send_whole(self, shard: _Shard, slot: int) -> None:
        if shard.home is None:
            self._send_part(shard, slot, shard.part.start, shard.part.stop)
        else:
            shard.link.say(Header(Kind.TAKE, which=slot, number=self._begun[1], offset=self._learner))

    def deliver(self, slot: int) -> None:
        for shard in self._shards:
            if shard.home is not None:
                self._send_whole(shard, slot)
            shard.link.ask()
        for shard in self._shards:
            shard.link.deliver(lambda shard=shard: self._send_whole(shard, slot), self._is_wanted)  # type: ignore[misc]

    # --- weights ----------------------------------------------------------------------------------------------------

    def seed(self, parts: ModelTensors, kept: Mapping[str, Tensor] | None = None) -> None:
        self._make_room()
        Arena.seed(self, parts, kept)
        reached = self._reached()
        for number, shard in enumerate(reached):
            shard.link.begin()
            self._send_initial(number, shard, whole=kept is not None)
            shard.link.ask()
        for number, shard in enumerate(reached):
            shard.link.deliver(
                lambda number=number, shard=shard: self._send_initial(number, shard, whole=kept is not None),  # type: ignore[misc]
                lambda: True,
            )

    def _send_initial(self, number: int, shard: _Shard, *, whole: bool) -> None:
        regions: list[Part] = [(Region.WEIGHTS, 0, self.weights[0][shard.part])]
        if number == 0:
            regions.append((Region.EXTRA, 0, self.extra))
        if whole:
            states = enumerate(self.states[0].values())
            regions += [(Region.STATE, 2 * index, vector[shard.part]) for index, vector in states]
            regions.append((Region.STEPS, 0, self.steps[0][0]))
        for region, which, vector in regions:
            data = bytes_of(vector)
            if len(data):
                shard.link.write(Header(Kind.WRITE, region, which, len(data)), data)

    def is_here(self, pieces: Pieces, incarnation: int, pin: int) -> bool:
        """Asked again and again, they are read meanwhile, by a thread."""
        early = self._early
        if early is None or early.pin != (incarnation, pin):
            fence = self.learner_words[self._learner][1]
            found: list[Pieces] = []
            owner = threading.get_ident()

            def read() -> None:
                with contextlib.suppress(PeerError):  # `awaited` tries again, and says it
                    found.append(self._fetched(pieces, lambda: fence.get() < incarnation, owner))

            early = self._early = _EarlyRead((incarnation, pin), threading.Thread(target=read, daemon=True), found)
            early.thread.start()
        return not early.thread.is_alive()

    def awaited(self, pieces: Pieces, incarnation: int, pin: int) -> Pieces:
        fence = self.learner_words[self._learner][1]
        early, self._early = self._early, None
        if early is not None:
            early.thread.join()
        if early is not None and early.pin == (incarnation, pin) and early.found:
            found = early.found[0]
        else:
            found = self._fetched(pieces, lambda: fence.get() < incarnation)
        if self._beside is None and fence.get() < incarnation:
            with contextlib.suppress(PeerError):  # then this incarnation was given up, which the words say by now
                self._committed()
        return found

    def _fetched(self, pieces: Pieces, is_wanted: Callable[[], bool], owner: int | None = None) -> Pieces:
        """Read what is at these places, into a buffer of this thread's own, or of the thread that it is read for."""
        with self._connecting:
            buffer = self._buffers_of.setdefault(owner or threading.get_ident(), len(self._buffers_of))
            if buffer == len(self.weights):
                self.weights.append(torch.zeros_like(self.weights[0]))
        vector = self.weights[buffer]
        wanted: list[list[Part]] = [
            [(Region.WEIGHTS, pieces[number % len(pieces)][0], vector[shard.part])]
            for number, shard in enumerate(self._reached())
        ]
        if not self._has_extra and self.extra.numel():
            wanted[0].append((Region.EXTRA, 0, self.extra))
        self._collect(wanted, is_wanted)
        self._has_extra = True
        return tuple((buffer, version) for _, version in pieces)

    def _collect(self, wanted: Sequence[Sequence[Part]], is_wanted: Callable[[], bool]) -> None:
        """From all shards at once."""
        waits = []
        for shard, parts in zip(self._reached(), wanted, strict=True):
            if shard.home is None:
                asked = [(region, which, bytes_of(into)) for region, which, into in parts]
                waits.append(shard.link.start_reading(asked, is_wanted))
        for shard, parts in zip(self._reached(), wanted, strict=True):
            for region, which, into in parts if shard.home is not None else ():
                assert shard.home is not None
                into.copy_(shard.home.tensor(region, which))
        for wait in waits:
            wait()

    def _committed(self) -> Pieces:
        """Buffer and version of each commit group, as the coordinator has them."""
        if self._beside is not None:
            return self._beside.last()
        self._read(Reading.COMMITTED)
        found: list[int] = self._where.tolist()
        return tuple(zip(found[1::2], found[::2], strict=True))

    def last(self) -> Pieces:
        return self._fetched(self._committed(), lambda: True)

    def current(self) -> dict[str, Tensor]:
        pieces, table = self._committed(), self.table
        vectors = {name: torch.empty(table.items, dtype=DTYPES[table.dtype]) for name in ("weights", *table.states)}
        steps = torch.empty(len(table.sizes), dtype=torch.int64)
        wanted: list[list[Part]] = []
        for number, shard in enumerate(self._reached()):
            buffer, version = pieces[number % len(pieces)]
            parts: list[Part] = [(Region.WEIGHTS, buffer, vectors["weights"][shard.part])]
            parts += [
                (Region.STATE, 2 * index + version % 2, vectors[name][shard.part])
                for index, name in enumerate(table.states)
            ]
            wanted.append(parts)
        wanted[0].append((Region.STEPS, pieces[0][1] % 2, steps))
        self._collect(wanted, lambda: True)
        kept = {"weights": vectors.pop("weights"), "steps": steps}
        return kept | {f"state.{name}": vector for name, vector in vectors.items()}

    def place(self, header: Header) -> memoryview:
        if header.region is Region.COMMITTED and header.offset + header.size <= self._where.nbytes:
            return bytes_of(self._where)[header.offset : header.offset + header.size]
        return super().place(header)

    def close(self) -> None:
        """The learner has left."""
        for shard in self._shards:
            shard.link.close()
