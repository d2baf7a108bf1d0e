"""A learner on another host that has the key and sends whatever it likes: mutated frames through its road process.

    cd tests && ../.venv/bin/python -m server.remote_fuzz --frames 1000000

Each frame is one that would be right now, with bytes changed, fields drawn anew, cut off or said again; it goes through
the code of the road process (`RoadProcess`), whose connections are memory here. Laws: nothing is raised but the errors
that end a connection; of the servers' memory only the slot that the learner was granted changes; what is passed on to
the coordinator is for its gate, and no longer than a message; the process does not grow.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from offbeat.collectives import memory
from offbeat.network.streams import ClosedError
from offbeat.server.arena import Arena, ArenaLayout, stamp
from offbeat.server.parameter_layout import ParameterLayout
from offbeat.server.remote.frames import HEADER_BYTES, PIECE_BYTES, Channel, FrameError, Header, Kind, Region
from offbeat.server.remote.road_process import HeartbeatLimit, RoadOptions, RoadProcess, bytes_of
from offbeat.server.run_setting import RunSetting
from offbeat.server.wire import MOST_BYTES, Fetched, Go, Hello, Push, Stop, Welcome, encode

LEARNER, INCARNATION, SLOT = 1, 3, 2
TABLE = ParameterLayout(
    sizes=(40, 24),
    groups=(0, 0),
    extra=5,
    dtype="float32",
    gradients="float32",
    rule="sgd",
    states=("momentum_buffer",),
    clip_norm=0.0,
    in_place=False,
    digest="d",
)


class Feed:
    """A connection whose bytes are known in advance."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def recvmsg_into(self, parts: Sequence[memoryview], *_: object) -> tuple[int]:
        (into,) = parts
        size = min(len(into), len(self._data))
        into[:size] = self._data[:size]
        self._data = self._data[size:]
        return (size,)


class Gate:
    """What the coordinator would be given."""

    def __init__(self) -> None:
        self.longest = 0

    def send(self, data: bytes) -> None:
        self.longest = max(self.longest, len(data))


class Victim:
    """A road process without its connections, in the middle of a minibatch."""

    def __init__(self) -> None:
        setting = RunSetting(line="k-sync:2", learners=3)
        size = ArenaLayout(TABLE, setting).size_bytes
        segment, self._descriptor = memory.create(size, "a test")
        self.arena = Arena(segment, TABLE, setting)
        for vector in (*self.arena.weights, *self.arena.slots, self.arena.extra, *self.arena.states[0].values()):
            vector.copy_(torch.arange(vector.numel()))
        self.gate = Gate()
        self.parts = 0

    def road(self, data: bytes, channel: Channel) -> RoadProcess:
        def hand_in(pause: int, learner: int, part: bytes) -> None:
            self.parts += 1

        options = RoadOptions(learner=LEARNER, coordinator="", token="", hand_in=hand_in, tell=lambda text: None)
        feeds: dict[Channel, Any] = {channel: Feed(data)}
        road = RoadProcess(options, feeds)
        road.arena, road.start_s = self.arena, time.monotonic()
        road.coordinator = self.gate  # type: ignore[assignment]  # all that is used of it is `send`
        road._map()
        road._beats = HeartbeatLimit(time.monotonic())
        road.state.heard(Hello(LEARNER, 7, "d"))
        road.state.told(Welcome(LEARNER, 7, INCARNATION))
        road.state.told(Go(LEARNER, INCARNATION, 4, 9, SLOT, 1, ((0, 9),)))
        return road

    def untouched(self) -> tuple[bytes, ...]:
        """All memory that this learner must not change."""
        arena = self.arena
        slots = [slot for number, slot in enumerate(arena.slots) if number != SLOT]
        kept = (*arena.weights, *slots, arena.extra, *arena.states[0].values(), arena.steps[0][0])
        words = [word.get() for learner in (0, 2) for word in arena.learner_words[learner]]
        return (*(bytes(bytes_of(vector)) for vector in kept), bytes(str(words), "ascii"))


def honest(chance: random.Random) -> tuple[Channel, bytes]:
    """A frame that would be right, or nearly so."""
    number = stamp(INCARNATION, chance.choice((3, 4, 4, 5)))
    size = chance.choice((0, 1, 64, 256))
    message = encode(
        chance.choice(
            (
                Push(LEARNER, INCARNATION, 4, 9),
                Stop(LEARNER, INCARNATION, 3),
                Fetched(LEARNER, INCARNATION, 1),
                Hello(LEARNER, 8, "d", INCARNATION),
            )
        )
    )
    frames = (
        (Channel.UP_DATA, Header(Kind.WRITE, Region.GRADIENT, 0, size, number, chance.choice((0, 64, 192, 2**40)))),
        (Channel.UP_DATA, Header(Kind.WRITE, chance.choice(list(Region)), chance.randrange(3), size, INCARNATION, 0)),
        (Channel.UP_DATA, Header(Kind.PART, which=chance.randrange(2), size=size, number=1, offset=0)),
        (Channel.UP_DATA, Header(Kind.MESSAGE, size=len(message))),
        (Channel.UP_CONTROL, Header(Kind.MESSAGE, size=len(message))),
        (Channel.UP_CONTROL, Header(Kind.BEAT)),
        (Channel.UP_CONTROL, Header(Kind.READ, which=chance.randrange(4), number=1)),
    )
    channel, header = chance.choice(frames)
    payload = message if header.kind is Kind.MESSAGE else chance.randbytes(header.size)
    return channel, header.pack() + payload


def mutated(data: bytes, chance: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(chance.randrange(3)):
        how = chance.random()
        if how < 0.6:
            out[chance.randrange(min(len(out), HEADER_BYTES + 8))] = chance.randrange(256)
        elif how < 0.8:
            del out[chance.randrange(len(out)) :]
            out = out or bytearray(b"\0")
        else:
            out += chance.randbytes(chance.randrange(1, 40))
    return bytes(out)


def fuzz(frames: int, seed: int) -> Counter[str]:
    """How the frames ended; `AssertionError` where a law does not hold."""
    chance, victim, ends = random.Random(seed), Victim(), Counter[str]()
    before = victim.untouched()
    sent = 0
    while sent < frames:
        channel, first = honest(chance)
        data = mutated(first, chance)
        sent += 1
        while chance.random() < 0.3:
            other, more = honest(chance)
            data += mutated(more, chance) if other is channel else b""
            sent += other is channel
        road = victim.road(data, channel)
        try:
            (road._receive_data if channel is Channel.UP_DATA else road._receive_control)()
        except ClosedError:
            ends["taken"] += 1
        except FrameError:
            ends["refused"] += 1
        if sent % 64 == 0:
            assert victim.untouched() == before, f"memory of others was changed, seed {seed}"
    assert victim.untouched() == before, f"memory of others was changed, seed {seed}"
    assert victim.gate.longest <= MOST_BYTES
    return ends


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(words)
    fuzz(1000, given.seed + 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ends = fuzz(given.frames, given.seed)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{given.frames} frames: {ends['taken']} connections read to their end, {ends['refused']} refused")
    print(f"the process grew by {grown} kB; memory of others is unchanged")
    assert grown < 64 * PIECE_BYTES // 1024
    return 0


if __name__ == "__main__":
    sys.exit(main())
