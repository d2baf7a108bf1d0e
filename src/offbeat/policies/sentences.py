"""The sentence that explains a simulated result: where the learners' time went, and what their gradients were worth.

A policy chooses its own sentence (`Policy.explain`). `in_general` is true of every policy, and is the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from offbeat.number_format import whole_percent as percent


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What is read of a simulated result; shares are of the learners' time. By default nothing was lost."""

    updates: int = 1
    applied: int = 1  # minibatches
    cancelled: int = 0
    dropped: int = 0
    failed: int = 0
    staleness: Mapping[int, int] = field(default_factory=dict)  # of the gradients applied, how many were so old
    waste_share: float = 0.0
    send_share: float = 0.0
    wait_share: float = 0.0
    fetch_share: float = 0.0  # part of wait_share: weights are on their way

    @property
    def staleness_mean(self) -> float:
        return mean_age(self.staleness)


def mean_age(staleness: Mapping[int, int]) -> float:
    """Of gradients of which so many were so old."""
    count = sum(staleness.values())
    return sum(age * many for age, many in staleness.items()) / count if count else 0.0


def for_others(result: Outcome) -> float:
    """The share of the time in which learners wait for each other, and not for the network."""
    return max(0.0, result.wait_share - result.fetch_share)


def on_the_way(result: Outcome) -> str:
    """What the network takes, where it takes time."""
    if result.send_share + result.fetch_share <= 0.005:
        return ""
    return f", {percent(result.send_share)} sending gradients, {percent(result.fetch_share)} receiving weights"


def in_general(result: Outcome) -> str:
    """Numbers alone."""
    waits = f"{percent(for_others(result))} of the time waiting" if for_others(result) > 0.005 else "no learner waits"
    parts = [f"{waits}{on_the_way(result)}"]
    if result.cancelled or result.dropped:
        per_update = (result.cancelled + result.dropped) / max(1, result.updates)
        parts.append(f"{per_update:.1f} minibatches per update cancelled or dropped")
    if result.waste_share > 0.005:
        parts.append(f"{percent(result.waste_share)} of the time thrown away")
    return f"{'; '.join(parts)}; {ages(result)}"


def ages(result: Outcome) -> str:
    return f"gradients are {result.staleness_mean:.2f} versions old on average"


def barrier(result: Outcome) -> str:
    lost = "no work is lost" if not result.failed else f"{percent(result.waste_share)} of the time is lost to failures"
    waits = f"{percent(for_others(result))} of the time{on_the_way(result)}"
    return f"all learners wait for the slowest: {waits}; {lost}, staleness 0"


def partial_barrier(result: Outcome, instead: str = "does not wait for the slowest") -> str:
    per_update = (result.cancelled + result.dropped) / max(1, result.updates)
    if not per_update:
        return barrier(result)  # all were waited for
    return (
        f"{instead}; {per_update:.1f} minibatches per update are cancelled, "
        f"{percent(result.waste_share)} of the time thrown away, {percent(for_others(result))} waiting"
        f"{on_the_way(result)}; staleness 0"
    )


def nobody_waits(result: Outcome) -> str:
    return f"no learner waits for others{on_the_way(result)}; in exchange, {ages(result)}"


def some_wait(result: Outcome) -> str:
    return (
        f"learners that have pushed wait for the others of their update: {percent(for_others(result))} of the time"
        f"{on_the_way(result)}; {ages(result)}"
    )


def leash(result: Outcome) -> str:
    return (
        f"learners too far ahead wait for the slowest: {percent(for_others(result))} of the time{on_the_way(result)}; "
        f"{ages(result)}"
    )


def drops(result: Outcome) -> str:
    share = result.dropped / max(1, result.dropped + result.applied)
    age = f"{result.staleness_mean:.2f} versions old"
    return (
        f"no learner waits for others{on_the_way(result)}, but {percent(share)} of the gradients are too old and "
        "dropped; "
        f"the rest are {age} on average"
    )
