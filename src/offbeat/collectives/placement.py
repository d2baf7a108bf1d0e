"""Tensors that come back are moved into shared memory once, in place; after that nothing is copied.

The storage keeps its identity and all its views (torch moves it: `_share_fd_cpu_`), so a gradient bucket of DDP
stays what it was for autograd. Whoever holds the *address* of the old memory would be left with nothing, so a storage
is moved only if nobody can:

- inside a backward pass it is DDP's bucket; only torch's own views lead to it;
- elsewhere only if this one tensor is all that refers to it (no view, no numpy array, nothing exported), and torch
  allocated it (not numpy, not a file).

It is moved when it is seen for the second time: what never comes back is staged, which costs two copies. Memory
for it comes from /dev/shm; where that is too small, it is staged for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from offbeat.collectives import memory
from offbeat.collectives.transport import BUFFER, FORGET, SharedMemory

SMALLEST_BYTES = 16 * 1024  # below, staging costs less than looking
_SPARE_BYTES = 16 * 1024 * 1024  # of /dev/shm, left for others
_ALONE = 2  # references to a storage: its one tensor's, and the one we hold to ask
_OFTEN = 64  # calls after which the dead are looked for
_MANY = 512  # storages remembered before the dead among them are looked for


@dataclass(slots=True)
class _Seen:
    weak: StorageWeakRef
    times: int = 0
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

    def place(self, tensor: Tensor) -> tuple[int, int] | None:
        """Buffer and bytes into it of a contiguous CPU tensor in shared memory; one that comes back is moved there."""
        self._asked += 1
        if self._asked % _OFTEN == 0:
            self._sweep(0)
        storage = tensor.untyped_storage()
        seen = self._seen.get(storage._cdata)
        address, size_bytes = storage.data_ptr(), storage.nbytes()
        if seen is None:
            if self.move and tensor.nbytes >= SMALLEST_BYTES and 2 * tensor.nbytes >= size_bytes:
                self._sweep(_MANY)
                self._seen[storage._cdata] = _Seen(StorageWeakRef(storage), 1)  # type: ignore[no-untyped-call]
            return None
        if seen.number is not None:
            if (address, size_bytes) == (seen.address, seen.size_bytes):
                return seen.number, int(tensor.storage_offset()) * tensor.itemsize
            self._forget(seen)
        seen.times += 1
        if not self._may_move(storage):
            return None
        self._sweep(0)
        self._move(storage, seen)
        assert seen.number is not None
        return seen.number, int(tensor.storage_offset()) * tensor.itemsize

    def _may_move(self, storage: torch.UntypedStorage) -> bool:
        if storage.is_shared() or not storage.resizable() or storage.is_pinned():
            return False
        inside_backward = torch._C._current_graph_task_id() >= 0
        if not inside_backward and torch._C._storage_Use_Count(storage._cdata) != _ALONE:
            return False
        if memory.free_in_dev_shm() < storage.nbytes() + _SPARE_BYTES:
            self.refused_bytes = max(self.refused_bytes, storage.nbytes())
            return False
        return True

    def _move(self, storage: torch.UntypedStorage, seen: _Seen) -> None:
        descriptor, size_bytes = storage._share_fd_cpu_()  # the descriptor stays torch's
        seen.number, seen.address, seen.size_bytes = self._next, storage.data_ptr(), storage.nbytes()
        self._next += 1
        self.moved += 1
        transport = self._transport
        transport.own.buffers[seen.number] = memory.Segment(descriptor, size_bytes)
        transport.announce(BUFFER, seen.number, size_bytes, descriptor, transport.others)

    def _forget(self, seen: _Seen) -> None:
        if seen.number is not None:
            self._transport.own.buffers.pop(seen.number, None)
            self._transport.announce(FORGET, seen.number, 0, None, self._transport.others)
            self._transport.forgot = True
            seen.number = None

    def _sweep(self, many: int) -> None:
        """Forget the storages that are gone."""
        if len(self._seen) > many:
            for key in [key for key, seen in self._seen.items() if seen.weak.expired()]:  # type: ignore[no-untyped-call]
                self._forget(self._seen.pop(key))

    def close(self) -> None:
        self._seen.clear()
