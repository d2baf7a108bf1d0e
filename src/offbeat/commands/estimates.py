"""What a request will cost, before it is begun: seconds and memory, as far as its numbers say.

A request above `MOST_S` or `MOST_BYTES` is refused in one line that has the estimate, unless it was confirmed
(`--yes-large`); one that this machine's memory cannot hold is refused in any case. The rates below were measured on two
cores; estimates are meant to be right within a factor of 3. They know nothing of what is computed.
"""

from __future__ import annotations

from typing import NamedTuple

from offbeat.errors import RequestError
from offbeat.machine import available_bytes
from offbeat.number_format import format_seconds, format_size

MOST_S = 30.0
MOST_BYTES = 1_000_000_000
CONFIRM = "--yes-large"


class Estimate(NamedTuple):
    """Of a piece of work: `what` names it, with its numbers."""

    what: str
    seconds: float = 0.0
    memory_bytes: float = 0.0

    def __str__(self) -> str:
        parts = [format_seconds(self.seconds)] if self.seconds >= 1 else []
        parts += [f"{format_size(self.memory_bytes)} of memory"] if self.memory_bytes >= 1e6 else []
        return f"{self.what} takes about {' and '.join(parts) or 'no time'}"


def check(estimate: Estimate, *, confirmed: bool) -> None:
    """`RequestError` for what is too large, or large and not confirmed."""
    here = available_bytes()
    if here is not None and estimate.memory_bytes > here:
        raise RequestError(f"{estimate}, and {format_size(here)} are free; ask for less")
    if not confirmed and (estimate.seconds > MOST_S or estimate.memory_bytes > MOST_BYTES):
        raise RequestError(f"{estimate}; ask for less, or confirm it with {CONFIRM}")
