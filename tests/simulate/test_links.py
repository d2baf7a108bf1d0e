"""A link shared fairly, against a dumb simulation in small steps of time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.simulate.links import FairLink

Transfer = tuple[float, float, float]  # start, size, cap


def ends(transfers: list[Transfer], bytes_per_s: float) -> list[float]:
    """When each ends, by events on a `FairLink`."""
    link = FairLink(bytes_per_s)
    waiting = sorted(range(len(transfers)), key=lambda i: transfers[i][0])
    found = [math.nan] * len(transfers)
    while waiting or link.next_end_s() < math.inf:
        if waiting and transfers[waiting[0]][0] <= link.next_end_s():
            one = waiting.pop(0)
            link.start(transfers[one][0], one, transfers[one][1], transfers[one][2])
        else:
            now = link.next_end_s()
            for one in link.finish(now):
                found[one] = now
    return found


def dumb_ends(transfers: list[Transfer], bytes_per_s: float) -> list[float]:
    """The same, by water-filling over every open transfer, from change to change."""
    left = {i: size for i, (_, size, _) in enumerate(transfers)}
    found = [math.nan] * len(transfers)
    now = 0.0
    while left:
        open_ = [i for i in left if transfers[i][0] <= now + 1e-12]
        rates: dict[int, float] = {}
        rest = bytes_per_s
        for count, i in enumerate(sorted(open_, key=lambda i: transfers[i][2])):
            rates[i] = min(transfers[i][2], rest / (len(open_) - count))
            rest -= rates[i]
        events = [now + left[i] / rates[i] for i in open_]
        events += [transfers[i][0] for i in left if transfers[i][0] > now + 1e-12]
        after = min(events)
        for i in open_:
            left[i] -= rates[i] * (after - now)
            if left[i] <= 1e-6:
                found[i] = after
        left = {i: rest for i, rest in left.items() if math.isnan(found[i])}
        now = after
    return found


@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(1, 50), st.sampled_from([1.0, 3.0, 100.0])), min_size=1, max_size=8
    ),
    st.sampled_from([1.0, 5.0, 40.0]),
)
@settings(max_examples=300)
def test_transfers_end_when_max_min_fairness_says(some: list[tuple[int, int, float]], bytes_per_s: float) -> None:
    transfers = [(float(start), float(size), cap) for start, size, cap in some]
    assert ends(transfers, bytes_per_s) == pytest.approx(dumb_ends(transfers, bytes_per_s), rel=1e-2, abs=1e-2)


def test_two_that_share_take_twice_as_long() -> None:
    assert ends([(0, 1e9, math.inf), (0, 1e9, math.inf)], 1e9) == pytest.approx([2.0, 2.0])
    assert ends([(0, 1e9, math.inf), (1.0, 1e9, math.inf)], 1e9) == pytest.approx([1.0, 2.0])


def test_what_a_slow_one_leaves_goes_to_the_others() -> None:
    assert ends([(0, 1e9, 0.25e9), (0, 1.5e9, math.inf)], 1e9) == pytest.approx([4.0, 2.0])


def test_bytes_are_not_lost_to_rounding_at_late_times() -> None:
    link = FairLink(1e10)
    late = 1e9
    link.start(late, 1, 1e8)
    end = link.next_end_s()
    assert end == pytest.approx(late + 0.01, abs=1e-6)
    assert link.finish(end) == [1]
    assert link.next_end_s() == math.inf
