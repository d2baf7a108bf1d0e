"""The dumb way to run a schedule: plain Python, one transfer after the other, no arrays.

It shares no code with `proof` and `cost`, so that a mistake would have to be made twice.
"""

from __future__ import annotations

from collections import Counter

from offbeat.schedules import Schedule

Place = tuple[int, int]  # rank, chunk


def run_symbolically(schedule: Schedule) -> dict[Place, Counter[int]] | None:
    """What every place holds at the end, or None where a step is illegal or counts somebody twice."""
    held = {(rank, chunk): Counter([rank]) for rank in range(schedule.ranks) for chunk in range(schedule.chunks)}
    for step in schedule.steps:
        before = {place: Counter(counts) for place, counts in held.items()}
        written: Counter[Place] = Counter()
        overwritten: set[Place] = set()
        for source, target, chunk, reduce, _ in step:
            place = (target, chunk)
            written[place] += 1
            if not reduce:
                overwritten.add(place)
            if source == target or (place in overwritten and written[place] > 1):
                return None
            arriving = before[source, chunk]
            held[place] = held[place] + arriving if reduce else Counter(arriving)
        if any(count > 1 for counts in held.values() for count in counts.values()):
            return None
    return held


def is_correct(schedule: Schedule) -> bool:
    """Whether the schedule does what its collective promises."""
    held = run_symbolically(schedule)
    if held is None:
        return False
    ranks, everybody = range(schedule.ranks), Counter(range(schedule.ranks))
    for chunk in range(schedule.chunks):
        owner = chunk * schedule.ranks // schedule.chunks
        match schedule.collective:
            case "all-reduce":
                due = dict.fromkeys(ranks, everybody)
            case "reduce-scatter":
                due = {owner: everybody}
            case "all-gather":
                due = {rank: Counter([owner]) for rank in ranks}
            case "broadcast":
                due = {rank: Counter([schedule.root]) for rank in ranks}
            case "reduce":
                due = {schedule.root: everybody}
            case "gather":
                due = {schedule.root: Counter([owner])}
            case "scatter":
                due = {owner: Counter([schedule.root])}
            case "all-to-all":
                due = {chunk % schedule.ranks: Counter([chunk // schedule.ranks])}
            case other:
                raise AssertionError(other)
        if any(held[rank, chunk] != counts for rank, counts in due.items()):
            return False
    return True


def all_reduce(schedule: Schedule, vectors: list[list[float]]) -> list[list[float]]:
    """Run an all-reduce on numbers, with chunks cut by the law [c*L//C, (c+1)*L//C)."""
    length = len(vectors[0])
    held = [list(vector) for vector in vectors]
    for step in schedule.steps:
        before = [list(vector) for vector in held]
        for source, target, chunk, reduce, _ in step:
            for i in range(chunk * length // schedule.chunks, (chunk + 1) * length // schedule.chunks):
                held[target][i] = before[source][i] + (held[target][i] if reduce else 0.0)
    return held


def bytes_sent(schedule: Schedule, items: int) -> list[int]:
    """By each rank, for items of one byte."""
    sent = [0] * schedule.ranks
    for step in schedule.steps:
        for source, _, chunk, _, _ in step:
            sent[source] += (chunk + 1) * items // schedule.chunks - chunk * items // schedule.chunks
    return sent
