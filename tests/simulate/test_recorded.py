"""Compute times of a recorded run: each learner its own, and what was cancelled counted for what it says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]  # it has no types of its own

from offbeat.errors import RequestError
from offbeat.runs.log import RunLog, Span, write_log
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.compute import Draws, parse_law
from offbeat.simulate.recorded import product_limit, read_recording

TIMES = st.lists(st.integers(1, 9), max_size=12)  # few values, so that there are ties


def computed(learner: int, seconds: float, *, cancelled: bool = False) -> Span:
    return Span(learner, "compute", 0.0, seconds, 0, cancelled)


def write(path: Path, *spans: Span) -> Path:
    write_log(path, RunLog(run={}, spans=spans))
    return path


def drawn(draws: Draws, learner: int, count: int = 1000) -> list[float]:
    return [draws.take(learner) for _ in range(count)]


def masses(finished: Sequence[float], cancelled: Sequence[float] = ()) -> dict[float, float]:
    """The probability of each time."""
    curve = product_limit(finished, cancelled)
    found: dict[float, float] = {}
    for time, mass in zip(curve.times_s.tolist(), np.diff(curve.reached, prepend=0.0).tolist(), strict=True):
        found[time] = found.get(time, 0.0) + mass
    return found


def test_five_times_by_hand() -> None:
    """2 was cut off with 3 longer ones, each of which gets a third of its fifth; 7 is the longest of all.

    F(1) = 1/5. F(3): 3 are left, 4/5 * 1/3 = 4/15 finishes. F(5): 2 are left, another 4/15. 7 has the rest.
    """
    assert masses([5, 1, 3], [7, 2]) == pytest.approx({1: 3 / 15, 3: 4 / 15, 5: 4 / 15, 7: 4 / 15})
    curve = product_limit([5, 1, 3], [7, 2])
    assert curve.mean_s == pytest.approx((3 * 1 + 4 * 3 + 4 * 5 + 4 * 7) / 15)
    chances = np.array([0.001, 0.199, 0.201, 7 / 15 - 0.001, 7 / 15 + 0.001, 11 / 15 - 0.001, 11 / 15 + 0.001, 0.999])
    assert curve.at(chances).tolist() == [1, 1, 3, 3, 5, 5, 7, 7]


def test_what_was_cut_off_at_the_moment_another_finished_would_have_taken_longer() -> None:
    assert masses([2, 3], [2]) == pytest.approx({2: 1 / 3, 3: 2 / 3})
    assert masses([2], [2]) == pytest.approx({2: 1})


def test_mass_beyond_the_last_that_finished_is_at_the_longest_that_was_seen() -> None:
    assert masses([1], [4, 6]) == pytest.approx({1: 1 / 3, 6: 2 / 3})


@given(finished=TIMES.filter(bool), cancelled=TIMES)
def test_the_estimate_is_the_one_of_scipy(finished: list[int], cancelled: list[int]) -> None:
    """scipy leaves open what is beyond the last that finished; here the rest is at the longest that was seen."""
    oracle = stats.ecdf(stats.CensoredData(uncensored=finished, right=cancelled)).cdf
    found = masses(finished, cancelled)
    assert sum(found.values()) == pytest.approx(1) and min(found.values()) > 0
    longest = max(*finished, *cancelled, 0)
    for time in {*finished, *cancelled} - {longest}:
        below = sum(mass for other, mass in found.items() if other <= time)
        assert below == pytest.approx(float(oracle.evaluate(time)))


@given(finished=st.lists(st.floats(0.001, 1000), min_size=1, max_size=40))
@settings(max_examples=50)
def test_without_cancelled_ones_each_time_is_as_likely_as_any_other(finished: list[float]) -> None:
    curve = product_limit(finished)
    count = len(finished)
    middles = (np.arange(count) + 0.5) / count
    for chances in (middles, middles - 0.499 / count, middles + 0.499 / count):
        assert curve.at(chances).tolist() == sorted(finished)
    assert curve.mean_s == pytest.approx(np.mean(finished))


def test_the_times_under_k_sync_come_back_although_half_of_them_were_cancelled(tmp_path: Path) -> None:
    """4 learners, exp:1, k-sync:2. Those that finished are far too fast: they are the fastest two of four.

    So many rounds since the tail is seen only when 3 of 4 are slow at once, and its end is cut off: with 4000 the mean
    is 4 % too small by Efron's convention alone, with 16000 2 %.
    """
    times = np.random.default_rng(1).exponential(size=(16_000, 4))
    ends = np.sort(times, axis=1)[:, 1:2]
    spans = [
        computed(learner, min(time, end), cancelled=time > end)
        for row, (end,) in zip(times.tolist(), ends.tolist(), strict=True)
        for learner, time in enumerate(row)
    ]
    assert np.mean([span.end_s for span in spans if not span.cancelled]) < 0.45
    law = parse_law(f"trace:{write(tmp_path / 'log.jsonl', *spans)}")
    draws = Draws(law, 4, 1)
    found = np.array([drawn(draws, learner, 10_000) for learner in range(4)])
    assert found.mean() == pytest.approx(1.0, rel=0.05)
    assert law.mean_s == pytest.approx(1.0, rel=0.05)
    for row in found:  # each of them, where none of the tail is missing: the mean of what is cut at 2
        assert np.minimum(row, 2).mean() == pytest.approx(1 - np.exp(-2), rel=0.05)


def test_a_slow_learner_stays_slow_whoever_else_is_there(tmp_path: Path) -> None:
    times = np.random.default_rng(2).uniform(1, 1.5, 200).tolist()
    spans = [computed(learner, time * (3 if learner == 1 else 1)) for time in times for learner in (0, 1)]
    law = parse_law(f"trace:{write(tmp_path / 'log.jsonl', *spans)}")
    assert law.mean_s == pytest.approx(2 * np.mean(times))
    cluster = Cluster(learners=5, law=law, seed=4)
    draws, fewer = cluster.draws(), cluster.without(0).draws()
    rows = [drawn(draws, learner) for learner in range(5)]
    for learner, row in enumerate(rows):  # more than were recorded: in turn
        slowness = 3 if learner % 2 == 1 else 1
        assert min(row) >= slowness and max(row) <= 1.5 * slowness
    assert len({tuple(row) for row in rows}) == 5
    assert [drawn(fewer, learner) for learner in range(4)] == rows[1:]


def test_each_learner_takes_its_own_times_and_one_that_was_not_there_those_of_all(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", computed(3, 9.0), computed(2, 2.0), Span(0, "wait", 0, 5, 0), computed(1, 4.0))
    draws = Draws(parse_law(f"trace:{log}"), 8, 0)
    assert [set(drawn(draws, learner)) for learner in (1, 2, 3)] == [{4.0}, {2.0}, {9.0}]
    assert set(drawn(draws, 0)) == {2.0, 4.0, 9.0}
    assert [set(drawn(draws, learner)) for learner in (5, 6, 7)] == [{4.0}, {2.0}, {9.0}]


def test_a_learner_that_never_finished_takes_the_times_of_all(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", computed(0, 2.0), computed(0, 4.0), computed(1, 7.0, cancelled=True))
    law = parse_law(f"trace:{log}")
    draws = Draws(law, 2, 0)
    assert set(drawn(draws, 0)) == {2.0, 4.0}
    assert set(drawn(draws, 1)) == {2.0, 4.0, 7.0}
    assert law.mean_s == pytest.approx((3 + 13 / 3) / 2)


def test_a_sample_without_learners_is_of_all_together(tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", computed(0, 1.0), computed(1, 3.0))
    law = parse_law(f"trace:{log}")
    assert law.sample(lambda _: np.array([[0.25, 0.75]])).tolist() == [[1.0, 3.0]]
    assert parse_law("exp:1").by_learner is None


def test_a_folder_gives_the_times_of_all_legs_and_of_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "log.jsonl", computed(0, 1.0), Span(0, "evaluate", 0, 50, 0), Span(0, "apply", 0, 60, 0))
    write(tmp_path / "log.2.jsonl", computed(0, 2.0), computed(0, 0.0), computed(0, 0.0, cancelled=True))
    write(tmp_path / "log.10.jsonl", computed(0, 10.0))
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "log.11.jsonl.unfinished").write_text("{")
    assert read_recording(tmp_path).pooled.times_s.tolist() == [1.0, 2.0, 10.0]
    assert set(drawn(Draws(parse_law(f"trace:{tmp_path}"), 1, 0), 0)) == {1.0, 2.0, 10.0}
    one_leg = parse_law(f"trace:{tmp_path / 'log.2.jsonl'}")
    assert set(drawn(Draws(one_leg, 1, 0), 0, 50)) == {2.0}


def test_a_file_of_numbers_is_one_pool_for_all(tmp_path: Path) -> None:
    (tmp_path / "times").write_text("20ms\n0.5\n0\n")
    law = parse_law(f"trace:{tmp_path / 'times'}")
    draws = Draws(law, 3, 0)
    assert [set(drawn(draws, learner)) for learner in range(3)] == [{0.02, 0.5}] * 3
    assert law.mean_s == pytest.approx(0.26)


def test_a_wrong_recording_is_named_in_one_line(tmp_path: Path) -> None:
    for folder in ("bare", "broken", "cancelled", "waits"):
        (tmp_path / folder).mkdir()
    (tmp_path / "broken" / "log.jsonl").write_text('{"kind":"run","format":1}\n{"kind":"spam"}\n')
    write(tmp_path / "cancelled" / "log.jsonl", computed(0, 1.0, cancelled=True))
    write(tmp_path / "waits" / "log.jsonl", Span(0, "wait", 0, 1, 0))
    (tmp_path / "words").write_text("soon\n")
    for name, says in {
        "nowhere": "cannot read the samples .*nowhere: No such file",
        "bare": "bare holds no log.jsonl: expected the folder of a run",
        "broken": "log.jsonl, line 2: expected a line of kind",
        "cancelled": "cancelled holds no compute times",
        "waits": "waits holds no compute times",
        "words": "soon",
    }.items():
        with pytest.raises(RequestError, match=says) as caught:
            parse_law(f"trace:{tmp_path / name}")
        assert "\n" not in str(caught.value)
