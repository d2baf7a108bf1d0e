"""Messages that nobody honest would send: made from the structure of those of `wire`, from ones that were said, and
from bytes.

    generated    a message of a random kind, each field drawn from what would fit now, what nearly fits, and the absurd
    mutated      one that was said, with some fields drawn anew
    replayed     one that was said before, by whomever, in any order
    bytes        a frame with bits flipped, cut off, joined with another, or with another's head; checksum right or not
"""

from __future__ import annotations

import math
import random
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, get_args

import msgspec
from msgspec import structs

from offbeat.server.wire import INPUT, Message, encode

KINDS: tuple[type[Message], ...] = get_args(INPUT)
FIELDS = {kind: structs.fields(kind) for kind in KINDS}
WHOLE = (0, 1, 2, -1, 7, 63, 64, 65, 255, 2**16, 2**20, 2**23 - 1, 2**23, 2**31, 2**32, 2**40, 2**53, 2**63, -(2**63))
REAL = (0.0, -0.0, 1.0, -1.0, 0.5, math.nan, math.inf, -math.inf, 1e12, -1e12, 1e308, 5e-324, 1e-3)
NAMES = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "beta1", "", "lr\0", "x" * 100)
ODD: tuple[Any, ...] = (
    None,
    True,
    "",
    "é" * 50,
    b"",
    b"\xff" * 9,
    [],
    {},
    [[]],
    {"a": 1},
    [0] * 99,
    2**70 - 2**70,
    1.5,
)
_body = msgspec.msgpack.Encoder().encode
Suited = Callable[[type[Message], str], Any]  # a value for a field that would fit now, or None


class Mutator:
    """Frames from a seed. `suited` gives values that would fit: only with these does one get past the gate."""

    def __init__(self, seed: object, suited: Suited) -> None:
        self.rng = random.Random(f"mutations of {seed}")
        self.suited = suited
        self.said: deque[Message] = deque(maxlen=200)

    def note(self, message: Message) -> None:
        """One that was said, by whomever."""
        self.said.append(message)

    def frame(self, kinds: tuple[type[Message], ...] = KINDS) -> bytes:
        """The next one."""
        draw = self.rng.random()
        if draw < 0.5 or not self.said:
            return self._generated(self.rng.choice(kinds))
        message = self.rng.choice(self.said)
        if draw < 0.65:
            return self._mutated(message)
        if draw < 0.75:
            return encode(message)
        return self._torn(encode(message))

    # --- by structure -------------------------------------------------------------------------------------------------

    def _generated(self, kind: type[Message]) -> bytes:
        wild = self.rng.choice((0.0, 0.0, 0.05, 0.3))
        values = [self._value(kind, field.name, wild) for field in FIELDS[kind]]
        return self._frame([kind.__name__, *values])

    def _mutated(self, message: Message) -> bytes:
        kind = type(message)
        values = list(structs.astuple(message))
        for place in self.rng.sample(range(len(values)), min(len(values), self.rng.randint(1, 2))):
            values[place] = self._value(kind, FIELDS[kind][place].name, 0.7)
        if self.rng.random() < 0.05:  # too few, too many
            values = values[: self.rng.randrange(len(values) + 1)] + [0] * self.rng.choice((0, 1))
        return self._frame([kind.__name__ if self.rng.random() < 0.95 else self.rng.choice(KINDS).__name__, *values])

    def _value(self, kind: type[Message], name: str, wild: float) -> Any:
        draw = self.rng.random()
        fits = self.suited(kind, name)
        if fits is not None and draw >= wild:
            return fits
        if draw < wild * 0.1:
            return self.rng.choice(ODD)
        if isinstance(fits, int) and not isinstance(fits, bool) and draw < wild * 0.6:
            return fits + self.rng.choice((-2, -1, 1, 2, 1000))
        if name in ("led", "stop", "wait", "finite", "unused"):
            return self.rng.random() < 0.5
        if name in ("loss", "began_s", "ended_s"):
            return self.rng.choice((*REAL, None) if name == "loss" else REAL)
        if name in ("leases", "absent"):
            return [self.rng.choice(WHOLE[:6]) for _ in range(self.rng.choice((0, 1, 3, 70)))]
        if name == "sums":
            return [self.rng.choice(REAL) for _ in range(self.rng.choice((0, 1, 3)))] * self.rng.choice((1, 1, 2000))
        if name == "hyper":
            groups = [
                {self.rng.choice(NAMES): self.rng.choice(REAL) for _ in range(self.rng.randint(0, 7))}
                for _ in range(self.rng.choice((0, 1, 1, 2)))
            ]
            return groups * 1000 if self.rng.random() < 0.05 else groups
        if name in ("table", "what", "why"):
            return self.rng.choice(("", "table", "barrier", "x" * 5000, "\0"))
        if name == "data":
            return self.rng.choice((b"", b"x", b"x" * 70_000))
        return self.rng.choice(WHOLE)

    def _frame(self, values: list[Any]) -> bytes:
        try:
            body = _body(values)
        except OverflowError:
            body = b"\xc1"
        return zlib.crc32(body).to_bytes(4, "little") + body

    # --- by bytes -----------------------------------------------------------------------------------------------------

    def _torn(self, frame: bytes) -> bytes:
        rng, body = self.rng, bytearray(frame[4:])
        for _ in range(rng.choice((1, 1, 2, 8))):
            what = rng.randrange(5)
            place = rng.randrange(len(body) + 1)
            if what == 0 and body:
                body[place % len(body)] ^= 1 << rng.randrange(8)
            elif what == 1:
                del body[place:]
            elif what == 2:
                body[place:place] = rng.randbytes(rng.choice((1, 4, 100)))
            elif what == 3:
                body += encode(rng.choice(self.said))[4:]
            else:
                del body[place : place + rng.randint(1, 8)]
        data = bytes(body)
        checksum = zlib.crc32(data) if rng.random() < 0.7 else rng.getrandbits(32)
        return (checksum.to_bytes(4, "little") + data)[: None if rng.random() < 0.95 else rng.randrange(8)]
