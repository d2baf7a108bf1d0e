"""Which samples each learner computes in a synchronous epoch: a function of whole numbers alone.

An epoch's permutation is cut into updates of `batch` samples, one behind the other; an update is cut into one piece for
each learner by its share, and a piece into passes. What is left at the end is an update of its own, unless somebody
would have nothing to do in it: then it is joined to the update before.

Law: the pieces of an epoch cover every position once. All learners compute the same plan, so nobody has to ask.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from offbeat.errors import RequestError


class Pass(NamedTuple):
    """Positions `start` up to `end` of the permutation, for one forward and backward."""

    start: int
    end: int


class Update(NamedTuple):
    """What one learner computes for one update of `samples` samples, which ends at position `end`."""

    samples: int
    end: int
    passes: tuple[Pass, ...]


def cut(count: int, shares: Sequence[float], *, least: int = 0) -> list[int]:
    """`count` things in pieces in the proportion of the shares; rounding goes to the largest remainders.

    Each piece has at least `least`, as far as there are enough.
    """
    total = sum(shares)
    exact = [count * share / total for share in shares]
    pieces = [int(one) for one in exact]
    order = sorted(range(len(shares)), key=lambda at: (pieces[at] - exact[at], at))
    for at in order[: count - sum(pieces)]:
        pieces[at] += 1
    while count >= least * len(pieces) and min(pieces) < least:
        pieces[pieces.index(min(pieces))] += 1
        pieces[pieces.index(max(pieces))] -= 1
    return pieces


def updates(
    samples: int, batch: int, learner: int, shares: Sequence[float], passes: int, begin: int = 0
) -> Iterator[Update]:
    """The updates of an epoch of `samples`, from position `begin` on, as `learner` computes them."""
    least = len(shares) * passes
    if samples - begin < least and begin < samples:
        what = "an epoch has" if begin == 0 else "the rest of this epoch has"
        raise RequestError(
            f"{what} {samples - begin} samples, too few for {len(shares)} learners in {passes} passes "
            "(train.accumulate)"
        )
    cuts: dict[int, list[Pass]] = {}
    start = begin
    while start < samples:
        end = min(start + batch, samples)
        if samples - end < least:
            end = samples
        if end - start not in cuts:  # the same for all but the last
            cuts[end - start] = _passes(end - start, learner, shares, passes)
        yield Update(end - start, end, tuple(Pass(start + one.start, start + one.end) for one in cuts[end - start]))
        start = end


def _passes(samples: int, learner: int, shares: Sequence[float], passes: int) -> list[Pass]:
    """Those of a learner, from the beginning of an update on."""
    pieces = cut(samples, shares, least=passes)
    at = sum(pieces[:learner])
    mine: list[Pass] = []
    for size in cut(pieces[learner], [1.0] * passes, least=1):
        mine.append(Pass(at, at + size))
        at += size
    return mine


def speeds_to_shares(seconds: Sequence[float], counts: Sequence[int]) -> tuple[float, ...]:
    """Shares in proportion to the speeds: samples a second of each learner. They sum to 1."""
    speeds = [count / max(took, 1e-9) for took, count in zip(seconds, counts, strict=True)]
    total = sum(speeds)
    return tuple(speed / total for speed in speeds)
