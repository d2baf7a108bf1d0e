"""A rank with the right key that sends whatever it likes: mutated frames on authenticated connections.

Each frame is one that would be right now, with bits flipped, fields drawn anew, cut off, lengthened, or said before:

    pieces     of collectives (`network.streams`), on one stream and on two
    words      of blame, waiting and rates (`collectives.remote`)
    messages   (`collectives.messages`), each in a group of its own, since the first wrong one ends a group

A frame is taken only if its header is the right one, bit for bit; any other ends in one of the errors that users are
told in one line. Nothing else is raised, nothing waits for ever, and the process does not grow.

    cd tests && ../.venv/bin/python -m collectives.frame_fuzz --frames 100000
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import socket
import struct
import sys
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta

import torch

from network.meeting import KEY, connected_pairs
from offbeat.collectives import memory
from offbeat.collectives.calls import Flat
from offbeat.collectives.messages import Messages
from offbeat.collectives.remote import RemoteRanks
from offbeat.collectives.transport import BLAME, WAITS_FOR, SharedMemory, control_bytes
from offbeat.errors import PeerError
from offbeat.network.addresses import Address
from offbeat.network.streams import HEADER_BYTES, TAG_BYTES, ClosedError, Link, MismatchError
from offbeat.network.tls import Stream

MARKER = b"the end of this frame, and more."
MOST_BYTES = 4096  # of a piece here
WHOLE = (0, 1, 2, 7, 63, 64, 65, 2**16, 2**20, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
GROWTH_BYTES = 128 * 2**20  # of the process, at most, however many frames
SHARES = {"pieces": 0.6, "words": 0.38, "messages": 0.02}


def mutated(right: bytes, fields: struct.Struct, rng: random.Random, said: list[bytes]) -> bytes:
    """A frame that begins with these fields, changed in one way or several; sometimes left as it is."""
    frame = bytearray(right)
    for _ in range(rng.choice((0, *[1] * 12, 2, 2, 2, 5, 5))):
        way = rng.randrange(7)
        end = min(len(frame), rng.choice((fields.size, fields.size, fields.size, len(frame))))  # mostly in its fields
        if way == 0 and frame:
            frame[rng.randrange(end)] ^= 1 << rng.randrange(8)
        elif way == 1 and len(frame) >= fields.size:
            values = list(fields.unpack(frame[: fields.size]))
            at = rng.randrange(len(values))
            values[at] = rng.randbytes(len(values[at])) if isinstance(values[at], bytes) else rng.choice(WHOLE)
            with suppress(struct.error):
                frame[: fields.size] = fields.pack(*values)
        elif way == 2:
            del frame[rng.randrange(end + 1) :]
        elif way == 3:
            frame += rng.randbytes(rng.choice((1, 16, 100, 2000)))
        elif way == 4 and said:
            frame = bytearray(rng.choice(said))
        elif way == 5 and frame:
            at = rng.randrange(end)
            frame[at:at] = rng.randbytes(rng.choice((1, 8)))
        elif way == 6:
            frame = bytearray(rng.randbytes(rng.choice((1, 40, 64, 200))))
    return bytes(frame)


def drain(one: Stream) -> None:
    """Everything up to the marker."""
    came = b""
    end_s = time.monotonic() + 30
    while not came.endswith(MARKER):
        assert time.monotonic() < end_s, "the stream has lost its end"
        with suppress(BlockingIOError):
            came = came[-len(MARKER) :] + one.recv(1 << 16, socket.MSG_DONTWAIT)


def fuzz_pieces(frames: int, rng: random.Random) -> Counter[str]:
    """A link for each frame, on connections that stay."""
    header = struct.Struct(f"<4sIQQ{TAG_BYTES}s")
    assert header.size == HEADER_BYTES
    pairs = connected_pairs(2, KEY)
    said: list[bytes] = []
    found: Counter[str] = Counter()

    def out_of_patience() -> None:
        raise TimeoutError

    for number in range(frames):
        used = rng.choice((1, 1, 2))
        link = Link([victim for _, victim in pairs[:used]])
        tag, size = rng.randbytes(TAG_BYTES), rng.randrange(1, MOST_BYTES)
        right = header.pack(b"obp1", size, 0, 0, tag) + rng.randbytes(size)
        frame = mutated(right, header, rng, said)
        stream = rng.randrange(used)
        # What comes behind a frame that is too short belongs to it, as far as its reader knows.
        pairs[stream][0].sendmsg([frame + bytes(2 * MOST_BYTES) + MARKER])
        got = bytearray(size)
        try:
            link.receive(tag, 0, memoryview(got), out_of_patience)
            sent = (frame + bytes(2 * MOST_BYTES))[: HEADER_BYTES + size]
            assert sent == right[:HEADER_BYTES] + got, f"frame {number} was taken for another"
            found["taken"] += 1
        except (MismatchError, ClosedError):
            assert not frame.startswith(right[:HEADER_BYTES]), f"frame {number} is right, and was refused"
            found["refused"] += 1
        except TimeoutError:  # of two streams one may bring what is wanted later: the group's timeout ends that
            assert used == 2 and frame[:4] == right[:4] and frame[8:24] != right[8:24]
            found["refused"] += 1
        drain(pairs[stream][1])
        said = [*said[-20:], right]
    for pair in pairs:
        for one in pair:
            one.close()
    return found


def transport_with(far: list[Stream], ranks: int = 2) -> SharedMemory:
    """Rank 0, alone on its host; the only other one that is connected is rank 1."""
    size_bytes = control_bytes(ranks) + 4096
    own, descriptor = memory.create(size_bytes, "rank 0")
    os.close(descriptor)
    remote = RemoteRanks(Address(address="127.0.0.1"), range(ranks), {1: far}, {1: "there"}, control_bytes(ranks))
    return SharedMemory(0, range(ranks), own, [], 10.0, 4096, remote)


def fuzz_words(frames: int, rng: random.Random) -> Counter[str]:
    """What a rank says of itself, followed by questions that are answered from it."""
    fields = struct.Struct("<7Q")
    pairs = connected_pairs(3, KEY)
    transport = transport_with([victim for _, victim in pairs])
    assert transport.remote is not None
    one = transport.remote._ranks[1]
    said: list[bytes] = []
    found: Counter[str] = Counter()
    for _ in range(frames):
        right = fields.pack(rng.randrange(3), rng.randrange(3), rng.randrange(3), rng.randrange(9), 5, 0, 10**9)
        frame = mutated(right, fields, rng, said)
        if frame:
            pairs[0][0].sendmsg([frame])
        transport._call = rng.randrange(10)
        gone: tuple[int, ...] = ()
        transport.remote.gone()
        assert len(one.heard) < fields.size or one.ended_s is not None
        words = transport.sides[1].words
        assert words[BLAME] <= 2 and words[WAITS_FOR] <= 2
        assert transport._late(1) in (0, 1)
        transport.send_rates()
        if one.ended_s is not None:
            found["refused"] += 1
            gone = (1,)
        else:
            found["taken"] += 1
        for words_at in (gone, (1,)):
            transport.broken = None
            transport.remote._closed = True  # nothing is sent away here
            with suppress(PeerError):
                if words_at:
                    transport.blame(words_at)
            transport.remote._closed = False
        transport.broken, one.ended_s, one.heard = None, None, b""
        transport.own.words[BLAME] = 0
        said = [*said[-20:], right]
    transport.close()
    for hostile, _ in pairs:
        hostile.close()
    return found


def fuzz_messages(frames: int, rng: random.Random) -> Counter[str]:
    """A receive that waits for a message, in a group for each frame."""
    header = struct.Struct("<qq")
    said: list[bytes] = []
    found: Counter[str] = Counter()
    for number in range(frames):
        pairs = connected_pairs(3, KEY)
        transport = transport_with([victim for _, victim in pairs])
        messages = Messages(transport)
        size, tag = rng.randrange(1, 3000), rng.choice((0, 7, 2**40))
        into = torch.zeros(size, dtype=torch.uint8)
        work = messages.receive(Flat(into), rng.choice((1, 1, None)), tag)
        right = header.pack(tag, size) + rng.randbytes(size)
        frame = mutated(right, header, rng, said)
        if frame:
            pairs[1][0].sendmsg([frame])
        for hostile, _ in pairs:
            hostile.close()
        try:
            work.wait(timedelta(seconds=20))
            assert right[16:] in frame or bytes(into.tolist()) in frame, f"message {number} was taken for another"
            found["taken"] += 1
        except PeerError as error:
            assert "did not complete within 20 s" not in str(error), f"message {number} was waited for"
            found["refused"] += 1
        messages.close()
        transport.close()
        said = [*said[-20:], right]
    return found


def grown_bytes(before: int) -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


def run(frames: int, seed: int) -> dict[str, Counter[str]]:
    """How many of each kind were taken and refused. `AssertionError` for anything that must not be."""
    rng = random.Random(seed)
    for fuzz in (fuzz_pieces, fuzz_words, fuzz_messages):
        fuzz(3, rng)
    before = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {
        kind: fuzz(max(1, int(SHARES[kind] * frames)), rng)
        for kind, fuzz in (("pieces", fuzz_pieces), ("words", fuzz_words), ("messages", fuzz_messages))
    }
    assert grown_bytes(before) < GROWTH_BYTES, f"the process has grown by {grown_bytes(before) >> 20} MiB"
    found["grown"] = Counter(MiB=grown_bytes(before) >> 20)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    since = time.monotonic()
    found = run(given.frames, given.seed)
    grown = found.pop("grown")["MiB"]
    for kind, counts in found.items():
        print(f"{kind:<9} {sum(counts.values()):>7} frames: {counts['refused']} refused, {counts['taken']} taken")
    print(f"no other error, no wait without end, {grown} MiB grown, in {time.monotonic() - since:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
