"""Gradients of a GPU, copied into a slot beside backward, and host memory that such copies need not wait for.

A copy begins on a stream of its own when the kernels queued before it are done; neither the host nor the GPU waits for
it. Whoever uses the slot calls `finish` first. A gradient that changes is copied again, and the last copy counts.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

Arrived = Callable[[], None]


class DeviceCopies:
    """See the module's text. For several threads: autograd calls from its own for each device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._arrivals: queue.SimpleQueue[tuple[torch.cuda.Event, Arrived]] = queue.SimpleQueue()
        self._changed = threading.Condition()  # of these two:
        self._expected = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self, place: Tensor, gradient: Tensor, arrived: Arrived | None = None) -> None:
        """Copy into host memory; `arrived` is called by a thread when it is there, in the order of the calls."""
        device = gradient.device
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch's
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            place.copy_(gradient, non_blocking=True)
        gradient.record_stream(stream)  # its memory is not given to others before
        if arrived is not None:
            with self._changed:
                self._expected += 1
                if self._thread is None:
                    self._thread = threading.Thread(target=self._wait_for_arrivals, name="offbeat copies", daemon=True)
                    self._thread.start()
            self._arrivals.put((stream.record_event(), arrived))

    def finish(self) -> None:
        """Until all that was begun has arrived."""
        for stream in self._streams.values():
            stream.synchronize()
        with self._changed:
            self._changed.wait_for(lambda: not self._expected)
            error, self._error = self._error, None
        if error is not None:
            raise error

    def _wait_for_arrivals(self) -> None:
        while True:
            event, arrived = self._arrivals.get()
            error: BaseException | None = None
            try:
                event.synchronize()
                arrived()
            except BaseException as caught:  # `finish` raises it
                error = caught
            with self._changed:
                self._expected -= 1
                self._error = self._error or error
                self._changed.notify_all()


def are_finite(gradients: Iterable[Tensor], dtype: torch.dtype) -> bool:
    """Whether the squared norm of each, as it is pushed in this type, is a number; with one answer from each GPU."""
    groups: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault(gradient.device, []).append(gradient.detach().to(dtype))
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    norms = [torch.stack(torch._foreach_norm(group, 2, wide)) for group in groups.values()]
    return all(bool(norm.isfinite().all()) for norm in norms)


def pin(owner: object, spans: Sequence[tuple[int, int]]) -> None:
    """Register host memory (address and bytes each) with CUDA as long as its owner lives. Without it copies work, and
    the host waits for each."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call] # torch's
    pinned = [address for address, size in spans if size and int(runtime.cudaHostRegister(address, size, 0)) == 0]
    # Memory that is given back while it is registered, and mapped anew, would be written to by nobody's copies.
    weakref.finalize(owner, _unpin, runtime, pinned).atexit = False


def _unpin(runtime: Any, pinned: Sequence[int]) -> None:
    for address in pinned:
        runtime.cudaHostUnregister(address)
