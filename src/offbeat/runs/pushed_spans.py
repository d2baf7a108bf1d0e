"""Which span of computing made each gradient that was pushed, and how many minibatches such a span holds.

A log has both, and does not say which belongs to which: a push is of the last minibatch that its learner had finished
when it arrived, and that no push before it was of.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from offbeat.policies.events import Pushed
from offbeat.policies.replay import Decision
from offbeat.runs.log import Span


def pushed_spans(spans: Sequence[Span], pushes: Iterable[Pushed]) -> dict[int, int]:
    """By ticket, the place of the span. A push of which no minibatch is in the log is left out."""
    ends: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
    for place, span in enumerate(spans):
        if span.what == "compute" and not span.cancelled:
            ends[span.learner].append((span.end_s, place))
    for some in ends.values():
        some.sort()
    found: dict[int, int] = {}
    taken = set()
    for push in pushes:
        at = bisect_right(ends[push.learner], (push.at_s, len(spans))) - 1
        while at >= 0 and ends[push.learner][at][1] in taken:
            at -= 1
        if at >= 0:
            found[push.ticket] = ends[push.learner][at][1]
            taken.add(found[push.ticket])
    return found


def minibatches_by_span(spans: Sequence[Span], decisions: Iterable[Decision], push_every: int) -> Mapping[int, int]:
    """By the place of a span that was pushed, how many minibatches it holds, where learners push after several.

    It is as many as the push has stretches of samples: the last one of an epoch may hold fewer.
    """
    stretches = {one.event: len(one.batch) for one in decisions if isinstance(one.event, Pushed)}
    places = pushed_spans(spans, stretches)
    return {
        places[push.ticket]: min(push_every, many) or push_every
        for push, many in stretches.items()
        if push.ticket in places
    }
