"""What the requests of several benchmarks have in common: numbers that are refused, in one line that says why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offbeat.errors import RequestError, unknown
from offbeat.machine import available_bytes
from offbeat.number_format import format_size

OURS = "offbeat"
MOST_PROCESSES = 64
ITEM_BYTES = 4  # float32


def check_processes(option: str, numbers: Iterable[int], least: int = 1) -> None:
    for number in numbers:
        if not least <= number <= MOST_PROCESSES:
            raise RequestError(f"bench: {option}: expected a number from {least} to {MOST_PROCESSES}; got {number}")


def check_least(option: str, number: int, least: int = 1) -> None:
    if number < least:
        raise RequestError(f"bench: {option} is {least} or more; got {number}")


def check_above_zero(option: str, *numbers: float) -> None:
    if min(numbers) <= 0:
        raise RequestError(f"bench: {option}: expected more than 0")


def check_distinct(option: str, values: Sequence[object], noun: str) -> None:
    if len(set(values)) < len(values):
        raise RequestError(f"bench: {option} names a {noun} twice: {', '.join(map(str, values))}")


def check_against(systems: Sequence[str], known: Iterable[str], ours: Sequence[str] = (OURS,)) -> None:
    """The systems that offbeat is compared with."""
    for name in systems:
        if name in ours:
            raise RequestError(f"bench: {OURS} is always measured; --against names the others")
        if name not in known:
            raise RequestError(f"bench: --against: {unknown('system', name, known)}")
    check_distinct("--against", systems, "system")


def check_memory(what: str, needed_bytes: int, remedy: str = "") -> None:
    available = available_bytes()
    if available is not None and needed_bytes > available:
        raise RequestError(
            f"bench: {what} need about {format_size(needed_bytes)} of memory, and {format_size(available)} is "
            f"available{remedy}"
        )
