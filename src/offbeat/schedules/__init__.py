"""Collectives as data: built, proved, priced and drawn. numpy and the standard library only."""

from offbeat.schedules.algorithms import ALGORITHMS, COLLECTIVES, Algorithm, algorithms, build
from offbeat.schedules.cost import Price, lower_bound_s, price
from offbeat.schedules.draw import svg
from offbeat.schedules.grid import grid
from offbeat.schedules.ir import Schedule, Transfer
from offbeat.schedules.proof import verify
from offbeat.schedules.rings import Rings, find_rings

__all__ = [
    "ALGORITHMS",
    "COLLECTIVES",
    "Algorithm",
    "Price",
    "Rings",
    "Schedule",
    "Transfer",
    "algorithms",
    "build",
    "find_rings",
    "grid",
    "lower_bound_s",
    "price",
    "svg",
    "verify",
]
