"""Anonymous memory that processes share: made here, mapped there, gone with the last of them.

A segment is a memfd: it has no name in any directory, so nothing can be left behind. Its pages are taken when it
is made, so that a lack of memory is an error then and not a crash later, and its size is sealed, so that nobody can
take pages away from under the others.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import resource
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from offbeat.errors import OffbeatError
from offbeat.number_format import format_size

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value


class Segment:
    """A mapped piece of shared memory. It lives as long as anything made from it, and keeps no descriptor open.

    (Python's own `mmap` keeps one for each mapping; with a few hundred tensors a process would run out of them.)
    """

    __slots__ = ("address", "map", "size_bytes", "words")

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.address = _map(None, descriptor, size_bytes, mmap.MAP_SHARED)
        self.size_bytes = size_bytes
        owner = (ctypes.c_char * size_bytes).from_address(self.address)
        weakref.finalize(owner, _libc.munmap, self.address, size_bytes).atexit = False
        self.map = memoryview(owner).cast("B")
        self.words = self.map[: size_bytes // 8 * 8].cast("Q")

    def tensor(self, dtype: torch.dtype, items: int, offset_bytes: int) -> torch.Tensor:
        """A flat view of so many items at a place."""
        if items == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.map, dtype=dtype, count=items, offset=offset_bytes)


def _map(address: int | None, descriptor: int, size_bytes: int, flags: int) -> int:
    found = _libc.mmap(address, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if found == _FAILED or found is None:
        number = ctypes.get_errno()
        raise OffbeatError(f"cannot map {format_size(size_bytes)} of shared memory: {os.strerror(number)}")
    return int(found)


def make_private(address: int, descriptor: int, size_bytes: int) -> None:
    """From now on this process writes to copies: of memory that it shares with others at this address."""
    _map(address, descriptor, size_bytes, mmap.MAP_PRIVATE | _MAP_FIXED)


def protect(address: int, size_bytes: int) -> None:
    """This process can read these pages from now on, and not write them."""
    if _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size_bytes), mmap.PROT_READ):
        raise OffbeatError(f"cannot protect shared memory: {os.strerror(ctypes.get_errno())}")


Span = tuple[int, int]  # of a segment: where it begins, and its size in bytes


def create(size_bytes: int, what: str, spans: Sequence[Span] | None = None) -> tuple[Segment, int]:
    """A new segment and its descriptor, which the caller closes. `OffbeatError` where the memory is not to be had.

    With `spans`, only their pages are taken now; those of the rest when they are first written.
    """
    descriptor = new_file()
    try:
        return fill(descriptor, size_bytes, what, spans), descriptor
    except OffbeatError:
        os.close(descriptor)
        raise


def new_file() -> int:
    """A segment without size yet (`fill`)."""
    return os.memfd_create("offbeat", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def fill(descriptor: int, size_bytes: int, what: str, spans: Sequence[Span] | None = None) -> Segment:
    """Give a new file its size, as `create` does."""
    taken = [(0, size_bytes)] if spans is None else [span for span in spans if span[1]]
    needed, free = sum(size for _, size in taken), free_bytes()
    if free is not None and free < needed:
        raise OffbeatError(f"{what} needs {format_size(needed)} of shared memory, but only {format_size(free)} is free")
    try:
        os.ftruncate(descriptor, size_bytes)
        for start, size in taken:
            os.posix_fallocate(descriptor, start, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return Segment(descriptor, size_bytes)
    except OSError as error:
        raise OffbeatError(f"{what} needs {format_size(needed)} of shared memory: {error.strerror}") from None


def receive(descriptor: int, size_bytes: int, *, sealed: bool) -> Segment:
    """Map what a peer sent, and close its descriptor. Refused unless it really is so large and stays so."""
    try:
        if os.fstat(descriptor).st_size < size_bytes:
            raise OffbeatError("a peer sent less memory than it announced")
        if sealed and fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OffbeatError("a peer sent memory that is not sealed")
        return Segment(descriptor, size_bytes)
    finally:
        os.close(descriptor)


def free_bytes() -> int | None:
    """What this process may still take: of the machine, and of its control group. None where nobody says."""
    meminfo = _read("/proc/meminfo").splitlines()
    limits = [int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:")]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        most, now = _read(limit).strip(), _read(used).strip()
        if most.isdigit() and now.isdigit():
            limits.append(int(most) - int(now))
    return max(0, min(limits)) if limits else None


def free_in_dev_shm() -> int:
    """What torch may still take when it moves a storage into shared memory."""
    try:
        there = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return there.f_bavail * there.f_frsize


def descriptors_are_scarce() -> bool:
    """Whether this process has opened half of the files that it may: each moved tensor takes one while it lives."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return len(os.listdir("/proc/self/fd")) > soft // 2  # noqa: PTH208 - a count, no paths


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError):
        return ""
