"""A rank of `offbeat bench allreduce` under Open MPI: `COMM_WORLD.Allreduce(MPI.IN_PLACE, buffer)` on numpy arrays.

Only rank 0 has the line to the parent (mpirun gives standard input to it alone) and passes each question on as three
whole numbers. The others would burn their core in a blocking MPI call, so they look every few milliseconds and sleep.
"""

from __future__ import annotations

import importlib
import sys
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import OffbeatError
from offbeat.measure.rank_messages import CHECK_PERIOD, Wire, require, serve
from offbeat.processes.child import die_with_parent

_LOOK_S = 0.005
_STOP, _WARM, _TIME = range(3)
_NUMBERS = {"warm": _WARM, "time": _TIME}

Floats = NDArray[np.float32]


def _work(wire: Wire) -> None:
    die_with_parent()
    mpi: Any = importlib.import_module("mpi4py.MPI")  # not a dependency: the parent has looked whether it is there
    world = mpi.COMM_WORLD
    try:
        _serve(wire, mpi, world)
    except Exception as error:
        # The exit code does not reach the others, who would wait for ever.
        wire.answer(error=str(error).partition("\n")[0])
        world.Abort(1)


def _serve(wire: Wire, mpi: Any, world: Any) -> None:
    buffer: Floats = np.zeros(0, dtype=np.float32)
    order = np.zeros(4, dtype=np.int64)
    questions = wire.questions()
    if world.Get_rank() == 0:
        require(next(questions), "join")
        wire.answer(mpi=mpi.Get_library_version().partition(",")[0], ranks=world.Get_size())
    while True:
        if world.Get_rank() == 0:
            question = next(questions, None)
            if question is None:
                order[0] = _STOP
            else:
                keys = ("size_bytes", "untimed", "iterations")
                order[:] = [_NUMBERS[question["do"]], *(question.get(key, 0) for key in keys)]
        request = world.Ibcast(order)
        while not request.Test():
            time.sleep(_LOOK_S)
        what, size_bytes, untimed, iterations = (int(number) for number in order)
        if what == _STOP:
            return
        if what == _WARM:
            buffer = np.zeros(0, dtype=np.float32)
            buffer = np.zeros(size_bytes // 4, dtype=np.float32)
            _check(mpi, world, buffer)
            for _ in range(iterations):
                world.Allreduce(mpi.IN_PLACE, buffer)
            _check(mpi, world, buffer)
            buffer.fill(0)
            if world.Get_rank() == 0:
                wire.answer(done=True)
        else:
            seconds = _time(mpi, world, buffer, untimed, iterations)
            if world.Get_rank() == 0:
                wire.answer(seconds=seconds)


def _time(mpi: Any, world: Any, buffer: Floats, untimed: int, iterations: int) -> float:
    """Seconds of one all-reduce of the slowest rank."""
    for _ in range(untimed):
        world.Allreduce(mpi.IN_PLACE, buffer)
    world.Barrier()
    start = time.perf_counter()
    for _ in range(iterations):
        world.Allreduce(mpi.IN_PLACE, buffer)
    slowest = np.array([(time.perf_counter() - start) / iterations])
    world.Allreduce(mpi.IN_PLACE, slowest, op=mpi.MAX)
    return float(slowest[0])


def _check(mpi: Any, world: Any, buffer: Floats) -> None:
    rank, ranks = world.Get_rank(), world.Get_size()
    values = np.resize(np.arange(CHECK_PERIOD, dtype=np.float32), buffer.size)
    np.multiply(values, rank + 1, out=buffer)
    world.Allreduce(mpi.IN_PLACE, buffer)
    right = values * (ranks * (ranks + 1) // 2)
    if not np.array_equal(buffer, right):
        place = int(np.flatnonzero(buffer != right)[0])
        raise OffbeatError(f"mpi: wrong sum: element {place} is {buffer[place]:g}, and {right[place]:g} is right")


if __name__ == "__main__":
    sys.exit(serve(_work))
