"""A schedule as a grid of text: a column a rank, a row a step, in each cell what arrives there.

    step  rank 0   rank 1
       1  +c1 <1   +c0 <0       rank 0 adds chunk 1 that comes from rank 1
       2  =c0 <1   =c1 <0       rank 0 overwrites its chunk 0 with rank 1's
       3  +c1 <1 int8           rank 0 decodes chunk 1 that comes from rank 1 as int8, and adds it

What does not fit is cut with a line that says so; a marked place is always inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from offbeat.schedules.ir import Schedule

MARK = "✗"


class Highlight(NamedTuple):
    """A place to point at; `step` may be the number of steps, which is the end. `note` replaces the cell."""

    step: int
    rank: int
    note: str = ""


def grid(schedule: Schedule, *, mark: Highlight | None = None, max_ranks: int = 8, max_steps: int = 16) -> str:
    """The grid as lines of text, at most so many columns and rows of it."""
    total = len(schedule.steps) + (mark is not None and mark.step == len(schedule.steps))
    steps = _window(total, max_steps, mark.step if mark else 0)
    ranks = _window(schedule.ranks, max_ranks, mark.rank if mark else 0)
    rows = [["step", *(f"rank {rank}" for rank in ranks)]]
    for step in steps:
        cells = _cells(schedule, step, ranks) if step < len(schedule.steps) else ["." for _ in ranks]
        if mark is not None and mark.step == step:
            place = ranks.index(mark.rank)
            cells[place] = f"{MARK} {mark.note or cells[place]}"
        rows.append([str(step + 1) if step < len(schedule.steps) else "end", *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].rjust(widths[0]), *(cell.ljust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    if not len(schedule.steps):
        lines.append("(nothing to do)")
    lines += _cut("step", steps, total) + _cut("rank", ranks, schedule.ranks)
    return "\n".join(line.rstrip() for line in lines)


def _window(total: int, most: int, around: int) -> range:
    first = max(0, min(around - most // 2, total - most))
    return range(first, min(total, first + most))


def _cut(what: str, shown: range, total: int) -> list[str]:
    if len(shown) == total:
        return []
    shift = 1 if what == "step" else 0  # steps are counted from 1, ranks are names
    return [f"({what}s {shown.start + shift} to {shown.stop - 1 + shift} of {total})"]


def _cells(schedule: Schedule, step: int, ranks: range) -> list[str]:
    arrivals: dict[int, dict[tuple[int, bool, str], list[int]]] = {rank: {} for rank in ranks}
    for source, target, chunk, reduce, codec in schedule.steps[step]:
        if target in arrivals:
            arrivals[target].setdefault((source, reduce, codec), []).append(chunk)
    return [_cell(arrivals[rank]) for rank in ranks]


def _cell(arrivals: dict[tuple[int, bool, str], list[int]]) -> str:
    """Sources that send the same chunks in the same way share a word: `+c0 <1,2,3`."""
    alike: dict[tuple[bool, str, tuple[int, ...]], list[int]] = {}
    for (source, reduce, codec), chunks in arrivals.items():
        alike.setdefault((reduce, codec, tuple(chunks)), []).append(source)
    words = [
        f"{'+' if reduce else '='}c{_ranges(c)} <{_ranges(s)}{f' {codec}' if codec else ''}"
        for (reduce, codec, c), s in alike.items()
    ]
    if len(words) > 3:
        words = [*words[:2], f"and {len(words) - 2} more"]
    return " ".join(words) or "."


def _ranges(numbers: Sequence[int]) -> str:
    """`0-3,7`; a double is kept, since it matters."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    return ",".join(words) if len(words) <= 4 else f"{','.join(words[:3])},..{words[-1]}"
