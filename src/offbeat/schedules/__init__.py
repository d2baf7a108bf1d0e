"""Collectives as data: built, proved, priced and drawn. numpy and the standard library only."""

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
