"""Tensors that come back are moved into shared memory once, in place; after that nothing is copied.

The storage keeps its identity and all its views (torch moves it: `_share_fd_cpu_`), so a gradient bucket of DDP
stays what it was for autograd. Whoever holds the *address* of the old memory would be left with nothing, so a storage
is moved only if nobody can:

- it is a bucket that DDP's reducer handed over: only torch's own views lead to it;
- or this one tensor is all that refers to it (no view, no numpy array, nothing exported), and torch allocated it (not
  numpy, not a file).

It is moved when it is seen for the second time: what never comes back is staged, which costs two copies. Memory
for it comes from /dev/shm; where that is too small, it is staged for ever. A moved storage cannot be resized any more,
and a forked child sees a copy of it, as of any other.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from offbeat.collectives import memory
from offbeat.collectives.binding import Place
from offbeat.collectives.transport import BUFFER, FORGET, SharedMemory

SMALLEST_BYTES = 16 * 1024  # below, staging costs less than looking
_SPARE_BYTES = 16 * 1024 * 1024  # of /dev/shm, left for others
_ALONE = 2  # references to a storage: its one tensor's, and the one we hold to ask
_OFTEN = 64  # calls after which the dead are looked for
_AT_ONCE = 32
_MANY = 512  # storages remembered before the dead among them are looked for


@dataclass(slots=True)
class _Seen:
    weak: StorageWeakRef
    number: int | None = None
    address: int = 0
    size_bytes: int = 0


class Placements:
    """Which storages of this process lie in memory that the ranks of a group share."""

    def __init__(self, transport: SharedMemory, *, move: bool) -> None:
        self.move = move
        self.moved = 0
        self.refused_bytes = 0  # that /dev/shm had no room for
        self._asked = 0
        self._transport = transport
        self._seen: dict[int, _Seen] = {}  # a weak reference keeps the number from being given again
        self._next = 1

    def place(self, tensor: Tensor, *, bucket: bool) -> Place | None:
        """Where a contiguous CPU tensor lies in shared memory; one that comes back is moved there.

        To be called by whoever runs the group's calls, when it is this tensor's turn: no call of the group is under
        way on it. `bucket`: DDP's reducer handed it over.
        """
        self._asked += 1
        if self._asked % _OFTEN == 0:
            self._sweep(0)
        storage = tensor.untyped_storage()
        seen = self._seen.get(storage._cdata)
        if seen is None:
            if self.move and tensor.nbytes >= SMALLEST_BYTES and tensor.nbytes == storage.nbytes():
                self._sweep(_MANY)
                self._seen[storage._cdata] = _Seen(StorageWeakRef(storage))  # type: ignore[no-untyped-call] # torch's
            return None
        if seen.number is not None:
            if (storage.data_ptr(), storage.nbytes()) == (seen.address, seen.size_bytes):
                return seen.number, int(tensor.storage_offset()) * tensor.itemsize
            self._forget(seen)
        if tensor.nbytes != storage.nbytes() or not self._may_move(storage, bucket):
            return None
        return self._move(storage, seen)

    def _may_move(self, storage: torch.UntypedStorage, bucket: bool) -> bool:
        if not self.move or storage.is_shared() or not storage.resizable() or storage.is_pinned():
            return False
        if not bucket and torch._C._storage_Use_Count(storage._cdata) != _ALONE:
            return False
        if memory.free_in_dev_shm() < storage.nbytes() + _SPARE_BYTES or memory.descriptors_are_scarce():
            self.refused_bytes = max(self.refused_bytes, storage.nbytes())
            return False
        return True

    def _move(self, storage: torch.UntypedStorage, seen: _Seen) -> Place | None:
        self._sweep(0)
        try:
            descriptor, size_bytes = storage._share_fd_cpu_()  # the descriptor stays torch's
        except RuntimeError:  # others took the last of /dev/shm; not again, since torch leaves a file each time
            self.refused_bytes = max(self.refused_bytes, storage.nbytes())
            self.move = False
            return None
        _moved[storage._cdata] = seen.weak
        # torch crashes when it resizes a shared storage; that numpy has seen it makes it refuse to.
        torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        seen.number, seen.address, seen.size_bytes = self._next, storage.data_ptr(), storage.nbytes()
        self._next += 1
        self.moved += 1
        transport = self._transport
        transport.own.buffers[seen.number] = memory.Segment(descriptor, size_bytes)
        transport.announce(BUFFER, seen.number, size_bytes, descriptor, transport.near)
        return seen.number, 0

    def _forget(self, seen: _Seen) -> None:
        if seen.number is not None:
            self._transport.own.buffers.pop(seen.number, None)
            self._transport.announce(FORGET, seen.number, 0, None, self._transport.near)
            self._transport.forgot = True
            seen.number = None

    def _sweep(self, many: int) -> None:
        """Forget the storages that are gone."""
        if len(self._seen) > many:
            dead = [key for key, seen in self._seen.items() if seen.weak.expired()]  # type: ignore[no-untyped-call] # torch's
            for key in dead[:_AT_ONCE]:  # the others read what they are told when their next call comes
                self._forget(self._seen.pop(key))
                _moved.pop(key, None)

    def close(self) -> None:
        self._seen.clear()
        for key in [key for key, weak in _moved.items() if weak.expired()]:  # type: ignore[no-untyped-call] # torch's
            del _moved[key]


_moved: dict[int, StorageWeakRef] = {}  # by all groups of this process, also those that are gone


def _make_private() -> None:
    """In a forked child: what it writes to a moved tensor is its own affair, as with any other tensor."""
    for weak in _moved.values():
        storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
        if storage is not None and storage.is_shared():
            descriptor, size_bytes = storage._share_fd_cpu_()
            memory.make_private(storage.data_ptr(), descriptor, size_bytes)


os.register_at_fork(after_in_child=_make_private)
