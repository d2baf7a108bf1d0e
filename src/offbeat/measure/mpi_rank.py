"""A rank of `offbeat bench allreduce` under Open MPI: `COMM_WORLD.Allreduce(MPI.IN_PLACE, buffer)` on numpy arrays.

Only rank 0 hears the parent (mpirun gives standard input to it alone) and passes each request on as four whole numbers.
The others would burn their core in a blocking MPI call, so they poll every few milliseconds and sleep in between.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import OffbeatError
from offbeat.measure.child_requests import CHECK_PERIOD, Answer, Request, error_text, serve
from offbeat.processes.child import die_with_parent

_POLL_S = 0.005
_REQUESTS = ("stop", "warm", "time")

Floats = NDArray[np.float32]


class MpiRank:
    """The buffer of one rank."""

    def __init__(self, mpi: Any, world: Any) -> None:
        self._mpi, self._world = mpi, world
        self.buffer: Floats = np.zeros(0, dtype=np.float32)

    def lead(self, request: Request) -> Answer:
        """On rank 0: have all ranks do it."""
        keys = ("size_bytes", "untimed", "iterations")
        return self._together([_REQUESTS.index(request["do"]), *(request.get(key, 0) for key in keys)])

    def follow(self) -> None:
        """On the other ranks: do what rank 0 says, until it says stop."""
        while not self._together([0, 0, 0, 0]).get("stopped"):
            pass

    def _together(self, numbers: list[int]) -> Answer:
        order = np.array(numbers, dtype=np.int64)
        broadcast = self._world.Ibcast(order)
        while not broadcast.Test():
            time.sleep(_POLL_S)
        what, size_bytes, untimed, iterations = (int(number) for number in order)
        match _REQUESTS[what]:
            case "warm":
                self.buffer = np.zeros(0, dtype=np.float32)  # first, so that two sizes are never held at once
                self.buffer = np.zeros(size_bytes // 4, dtype=np.float32)
                self.check()
                self._reduce(iterations)
                if iterations:
                    self.check()
                self.buffer.fill(0)
                return {"done": True}
            case "time":
                return {"seconds": self._time(untimed, iterations)}
        return {"stopped": True}

    def _reduce(self, times: int) -> None:
        for _ in range(times):
            self._world.Allreduce(self._mpi.IN_PLACE, self.buffer)

    def _time(self, untimed: int, iterations: int) -> float:
        """Seconds of one all-reduce of the slowest rank."""
        self._reduce(untimed)
        self._world.Barrier()
        start = time.perf_counter()
        self._reduce(iterations)
        slowest = np.array([(time.perf_counter() - start) / iterations])
        self._world.Allreduce(self._mpi.IN_PLACE, slowest, op=self._mpi.MAX)
        return float(slowest[0])

    def check(self) -> None:
        """As `torch_rank.AllReduceRank` does."""
        rank, ranks = self._world.Get_rank(), self._world.Get_size()
        values = np.resize(np.arange(CHECK_PERIOD, dtype=np.float32), self.buffer.size)
        np.multiply(values, rank + 1, out=self.buffer)
        self._reduce(1)
        right = values * (ranks * (ranks + 1) // 2)
        if not np.array_equal(self.buffer, right):
            place = int(np.flatnonzero(self.buffer != right)[0])
            found, expected = self.buffer[place], right[place]
            raise OffbeatError(f"mpi: wrong sum: element {place} is {found:g}, expected {expected:g}")


def main() -> int:
    die_with_parent()
    mpi: Any = importlib.import_module("mpi4py.MPI")  # no dependency: the parent has checked that it is installed
    world = mpi.COMM_WORLD
    rank = MpiRank(mpi, world)
    try:
        if world.Get_rank():
            rank.follow()
        else:
            facts = {"mpi": mpi.Get_library_version().partition(",")[0], "ranks": world.Get_size()}
            if serve(lambda request: (facts, {"warm": rank.lead, "time": rank.lead})):
                world.Abort(1)
            rank.lead({"do": "stop"})
    except Exception as error:
        # The exit code does not reach the others, who would wait for ever.
        print(json.dumps({"error": error_text(error)}), flush=True)
        world.Abort(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
