"""Words in memory that processes share, and how one waits for them.

A word is 64 bits at an aligned place, written by one process and read by many; its values only grow. It is read and
written through a memoryview, which is one machine instruction each. On x86-64 that is all it takes: stores are seen in
the order they were made. Elsewhere `fence` puts a full barrier between the data and the word.

Waiting goes through three stages, since nobody knows how long it will take: spin (the other is at it on a core of its
own: under a microsecond), yield (more ranks than cores: let it run), sleep on a futex (it is late: cost nothing). The
sleep is in slices, after each of which `look` may raise: a peer that died wakes nobody.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

_FUTEX_NUMBER = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_FUTEX_WAIT, _FUTEX_WAKE, _EVERYBODY = 0, 1, 2**31 - 1
SLICE_S = 0.02  # how long a sleep lasts before one looks around


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_SLICE = _Timespec(0, int(SLICE_S * 1e9))
_libc = ctypes.CDLL(None)  # calls through it let other threads run
_sched_yield = _libc.sched_yield
_futex_number = _FUTEX_NUMBER.get(platform.machine())
_futex = _libc.syscall
_futex.argtypes = (
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.POINTER(_Timespec),
    ctypes.c_void_p,
    ctypes.c_uint32,
)

_turnstile = threading.Lock()
_turnstile.acquire()


def fence() -> None:
    """Everything written before is seen before anything written after."""
    _turnstile.release()  # a release and then an acquisition: nothing passes both
    _turnstile.acquire()


if platform.machine() in ("x86_64", "AMD64"):

    def fence() -> None:
        """Everything written before is seen before anything written after."""


class Word:
    """One word: `view[index]`, at `address`."""

    __slots__ = ("address", "index", "view")

    def __init__(self, view: memoryview, index: int, address: int) -> None:
        self.view = view
        self.index = index
        self.address = address + 8 * index

    def get(self) -> int:
        value: int = self.view[self.index]
        return value

    def set(self, value: int) -> None:
        """Publish: what was written before is there for whoever sees the value. Wakes the sleepers."""
        fence()
        self.view[self.index] = value
        if _futex_number is not None:
            _futex(_futex_number, self.address, _FUTEX_WAKE, _EVERYBODY, None, None, 0)

    def write(self, value: int) -> None:
        """As `set`, for a word that nobody sleeps on: without a system call."""
        fence()
        self.view[self.index] = value

    def sleep(self, seen: int, most_s: float = SLICE_S) -> None:
        """Until the word is no longer what was seen, or a slice of time has passed, or for no reason."""
        if _futex_number is None:
            time.sleep(min(most_s, 0.0005))
        else:
            slice_ = _SLICE if most_s >= SLICE_S else _Timespec(0, int(most_s * 1e9))
            _futex(_futex_number, self.address, _FUTEX_WAIT, seen & 0xFFFFFFFF, ctypes.byref(slice_), None, 0)


class Patience(NamedTuple):
    """How long to spin and to yield before sleeping."""

    spins: int
    yield_s: float

    @classmethod
    def of(cls, ranks: int) -> Patience:
        """With a core for each rank, spin; without, let the others run at once."""
        cores = len(os.sched_getaffinity(0))
        if ranks <= cores:
            return cls(spins=400, yield_s=0.001)
        return cls(spins=0, yield_s=0.0002)  # longer, and the kernel keeps a bad distribution over the cores


BACKGROUND = Patience(spins=0, yield_s=0.00005)  # beside somebody's backward: out of the way quickly


def wait(word: Word, target: int, patience: Patience, look: Callable[[Word, int], None]) -> None:
    """Until the word has come to the target. `look(word, target)` is called between the slices of a sleep."""
    view, index = word.view, word.index
    for _ in range(patience.spins):
        if view[index] >= target:
            return
    end = time.perf_counter() + patience.yield_s
    while view[index] < target:
        if time.perf_counter() > end:
            break
        _sched_yield()
    while (seen := view[index]) < target:
        look(word, target)
        word.sleep(seen)
    fence()
