"""Strangers at the port of a run: so many connections at once, of those that have no business there.

    python -m process.port_strangers ADDRESS:PORT KEY COUNT SEED

    silent     connects, and says nothing
    slow       sends a byte now and then
    random     sends random bytes
    garbage    has the key and greets as a learner's connection would, then sends random bytes
    oversize   the same, then a header that announces more than a frame may have

Those that stay hold their connection until all have come. It prints how many were answered with more than TLS says to
anybody: "got in: 0".
"""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import struct
import sys
import time
from pathlib import Path

from offbeat.errors import OffbeatError
from offbeat.network.connections import AnyConnection
from offbeat.network.keys import read
from offbeat.network.port import dial, parse_place, raw_of, receive_all, send_all
from offbeat.network.streams import ClosedError
from offbeat.server.remote.frames import Channel, Greeting, Header, Kind

WAYS = ("silent", "slow", "random", "garbage", "oversize")
ANSWER_S = 2.0


def main(words: list[str]) -> int:
    place, key, rng = parse_place(words[0], "the run"), read(Path(words[1])), random.Random(words[3])
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 65536), most))
    held: list[socket.socket] = []
    slow: list[socket.socket] = []
    known: list[AnyConnection] = []
    inside = 0
    for number in range(int(words[2])):
        way = WAYS[number % len(WAYS)]
        with contextlib.suppress(OSError, OffbeatError, ClosedError):
            if way in ("garbage", "oversize"):
                greeting = Greeting(
                    rng.choice((Channel.UP_DATA, Channel.DOWN_CONTROL)), 1, bytes(16), rng.randbytes(16)
                )
                one = dial(place, key, greeting.pack(), ANSWER_S)
                known.append(one)
                frame = bytearray(Header(Kind.WRITE, size=1).pack())
                struct.pack_into("<I", frame, 8, 2**32 - 1)  # its size
                send_all(one, [bytes(frame) if way == "oversize" else rng.randbytes(100)])
                continue
            plain = socket.create_connection(place, ANSWER_S)
            (slow if way == "slow" else held).append(plain)
            if way == "random":
                plain.sendall(rng.randbytes(rng.randrange(1, 3000)))
        for other in slow[-20:]:
            with contextlib.suppress(OSError):
                other.sendall(b"\x16")
    time.sleep(0.5)
    for plain in (*held, *slow):
        plain.settimeout(0.0)
        with contextlib.suppress(OSError):
            said = plain.recv(100)
            inside += bool(said) and said[:1] not in (b"\x15", b"\x16")
    for one in known:
        raw_of(one).settimeout(0.001)
        with contextlib.suppress(OSError, ClosedError):
            receive_all(one, memoryview(bytearray(1)))
            inside += 1
    print(f"came: {len(held) + len(slow) + len(known)}, got in: {inside}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
