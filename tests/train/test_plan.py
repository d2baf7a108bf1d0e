"""The plan of a synchronous epoch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as some

from offbeat.errors import RequestError
from offbeat.train.sample_plan import Pass, cut, speeds_to_shares, updates


def test_an_update_is_cut_by_learner_and_then_by_pass() -> None:
    first, second = updates(20, 16, 1, (0.5, 0.5), 2)
    assert first == (16, 16, (Pass(8, 12), Pass(12, 16)))
    assert second == (4, 20, (Pass(18, 19), Pass(19, 20)))


def test_an_end_in_which_somebody_would_have_nothing_is_joined_to_the_update_before() -> None:
    assert [update.samples for update in updates(19, 8, 0, (1, 1, 1, 1), 1)] == [8, 11]
    assert [update.samples for update in updates(20, 8, 0, (1, 1, 1, 1), 1)] == [8, 8, 4]


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(RequestError, match="an epoch has 3 samples, too few for 2 learners in 2 passes"):
        next(updates(3, 8, 0, (1, 1), 2))


@given(
    samples=some.integers(1, 200),
    per_learner=some.integers(1, 20),
    shares=some.lists(some.floats(0.05, 1), min_size=1, max_size=5),
    passes=some.integers(1, 3),
)
def test_every_position_is_computed_once(samples: int, per_learner: int, shares: list[float], passes: int) -> None:
    if samples < len(shares) * passes:
        return
    seen: list[int] = []
    plans = [
        list(updates(samples, per_learner * passes * len(shares), learner, shares, passes))
        for learner in range(len(shares))
    ]
    for plan in plans:
        for update in plan:
            for one in update.passes:
                assert one.start < one.end, "nobody is idle"
                seen += range(one.start, one.end)
    assert sorted(seen) == list(range(samples))
    assert len({tuple((update.samples, update.end) for update in plan) for plan in plans}) == 1


@given(samples=some.integers(12, 200), cut_at=some.integers(0, 10))
def test_a_plan_that_is_begun_in_the_middle_is_the_rest_of_the_whole(samples: int, cut_at: int) -> None:
    whole = list(updates(samples, 12, 1, (3, 1, 2), 2))
    at = min(cut_at, len(whole))
    begin = whole[at - 1].end if at else 0
    assert list(updates(samples, 12, 1, (3, 1, 2), 2, begin)) == whole[at:]


def test_pieces_are_in_proportion() -> None:
    assert cut(64, (3, 1)) == [48, 16]
    assert cut(10, (1, 1, 1)) == [4, 3, 3]
    assert cut(8, (100, 1, 1), least=2) == [4, 2, 2]


def test_a_learner_that_takes_three_times_as_long_gets_a_third() -> None:
    assert speeds_to_shares((1.0, 3.0), (32, 32)) == (0.75, 0.25)
    assert speeds_to_shares((0.5, 0.5), (48, 16)) == (0.75, 0.25)
