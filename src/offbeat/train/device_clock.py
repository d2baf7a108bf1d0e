"""When things began and ended on a device: a GPU's own events, or this process's clock.

The host of a GPU only queues work: what it reads off its own clock then is when work was queued, not when it was done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

Mark = torch.cuda.Event | float


class DeviceClock:
    """Marks in the queue of a device, read later as seconds of `time.monotonic()`."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._base: tuple[torch.cuda.Event, float] | None = None

    def mark(self) -> Mark:
        """This moment in the queue."""
        if not self._cuda:
            return time.monotonic()
        if self._base is None:
            first = self._event()
            first.synchronize()
            self._base = first, time.monotonic()
        return self._event()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch's own
        event.record()
        return event

    def seconds(self, marks: Sequence[Mark]) -> list[float]:
        """When these were, in the order of their time; waits until the last of them is there."""
        if not self._cuda:
            return [float(mark) for mark in marks]  # type: ignore[arg-type] # on a CPU they are numbers
        assert self._base is not None
        marks[-1].synchronize()  # type: ignore[union-attr] # on a GPU they are events
        base, at_s = self._base
        times = [at_s + base.elapsed_time(mark) / 1e3 for mark in marks]  # type: ignore[arg-type] # events
        self._base = marks[-1], times[-1]  # type: ignore[assignment] # events count in few digits: from near by
        return times
