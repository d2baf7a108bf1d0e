"""Collectives as data: built, proved, priced and drawn. numpy and the standard library only.

    schedule = schedules.build("torus:4x8", ranks=32)
    schedules.verify(schedule)  # a ScheduleError shows the wrong place in a grid
    machine = topology.build("uniform:bandwidth=10Gbit/s,latency=4us", ranks=32)
    print(schedules.price(schedule, machine, size_bytes=100_000_000).why())

A `Schedule` is steps of `Transfer`s: rank a sends chunk c to rank b, which adds or overwrites. `Schedule.parse` reads
one from text; `grid` and `svg` draw it. The backend runs the same objects on tensors.
"""

from offbeat.schedules.algorithms import ALGORITHMS, BASELINE, COLLECTIVES, Algorithm, algorithms, auto_lines, build
from offbeat.schedules.cost import Price, lower_bound_s, price
from offbeat.schedules.draw import svg
from offbeat.schedules.grid import grid
from offbeat.schedules.ir import Schedule, Transfer
from offbeat.schedules.proof import verify
from offbeat.schedules.rings import Rings, find_rings

__all__ = [
    "ALGORITHMS",
    "BASELINE",
    "COLLECTIVES",
    "Algorithm",
    "Price",
    "Rings",
    "Schedule",
    "Transfer",
    "algorithms",
    "auto_lines",
    "build",
    "find_rings",
    "grid",
    "lower_bound_s",
    "price",
    "svg",
    "verify",
]
