"""Laws of compute time, and draws that nothing else can shuffle."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats  # type: ignore[import-untyped]  # it has no types of its own

from offbeat.errors import RequestError
from offbeat.runs.log import RunLog, Span, write_log
from offbeat.simulate.compute import LAWS, Draws, Failures, SlowPeriods, failure_times, parse_law
from offbeat.simulate.engine import uniforms

ORACLES = {
    "uniform:1,3": stats.uniform(1, 2),
    "exp:2": stats.expon(scale=2),
    "shifted-exp:1,0.5": stats.expon(loc=1, scale=0.5),
    "pareto:3,2": stats.pareto(3, scale=2),
    "gamma:2,0.25": stats.gamma(16, scale=2 / 16),
    "gamma:1,2": stats.gamma(0.25, scale=4),
    "lognormal:3,0.5": stats.lognorm(np.sqrt(np.log(1.25)), scale=3 / np.sqrt(1.25)),
    "weibull:1.5,2": stats.weibull_min(1.5, scale=2),
}


def sample(law: str, count: int = 20_000, seed: int = 5) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    draws = Draws(parse_law(law), 10, seed)
    return np.array([draws.take(i % 10) for i in range(count)])


@pytest.mark.parametrize("law", ORACLES)
def test_a_law_is_the_one_of_its_name(law: str) -> None:
    """Kolmogorov and Smirnov: with this seed, no reason to doubt."""
    assert stats.kstest(sample(law), ORACLES[law].cdf).pvalue > 0.01
    assert parse_law(law).mean_s == pytest.approx(ORACLES[law].mean(), rel=1e-12)


def test_the_laws_without_a_density() -> None:
    assert set(sample("constant:20ms").tolist()) == {0.02}
    two = sample("bimodal:1,10,0.1")
    assert set(two.tolist()) == {1.0, 10.0} and np.mean(two == 10) == pytest.approx(0.1, abs=0.01)
    assert parse_law("pareto:1,1").mean_s == float("inf")


def test_a_trace_gives_the_times_of_a_real_run(tmp_path: Path) -> None:
    log, plain = tmp_path / "run.jsonl", tmp_path / "times.txt"
    spans = (
        Span(0, "compute", 1.0, 3.0, 0),
        Span(0, "wait", 3.0, 9.0, 0),
        Span(1, "compute", 0.0, 7.0, 0, cancelled=True),
    )
    write_log(log, RunLog(run={}, spans=spans))
    plain.write_text("20ms\n0.5\n")
    assert set(sample(f"trace:{log}", 50).tolist()) == {2.0, 7.0}  # what was cancelled after 7 s takes longer than 2 s
    assert set(sample(f"trace:{plain}", 50).tolist()) == {0.02, 0.5}


def test_uniforms_are_uniform_and_independent_in_every_direction() -> None:
    numbers = uniforms(7, np.arange(200)[:, None], np.arange(200)[None, :], 0)
    assert numbers.min() > 0 and numbers.max() < 1
    assert stats.kstest(numbers.ravel(), "uniform").pvalue > 0.01
    other = uniforms(7, np.arange(200)[:, None], np.arange(200)[None, :], 1)
    for one, two in ((numbers[:-1], numbers[1:]), (numbers[:, :-1], numbers[:, 1:]), (numbers, other)):
        assert abs(np.corrcoef(one.ravel(), two.ravel())[0, 1]) < 0.02


@pytest.mark.parametrize("law", ["exp:1", "gamma:1,0.25", "gamma:1,2", "lognormal:1,1", "pareto:2,1"])
def test_a_ninth_learner_leaves_the_draws_of_the_first_eight_unchanged(law: str) -> None:
    slow = SlowPeriods(factor=5, enter=0.1, leave=0.3)
    eight, nine, many = (Draws(parse_law(law), count, 3, slow=slow) for count in (8, 9, 20_000))
    for learner in range(8):
        first = [eight.take(learner) for _ in range(600)]
        assert first == [nine.take(learner) for _ in range(600)] == [many.take(learner) for _ in range(600)]


def test_draws_depend_on_the_seed_and_on_the_learner() -> None:
    one, other = Draws(parse_law("exp:1"), 2, 1), Draws(parse_law("exp:1"), 2, 2)
    firsts = [one.take(0), one.take(1), other.take(0), other.take(1)]
    assert len(set(firsts)) == 4
    borrowed = Draws(parse_law("exp:1"), 1, 1, ids=(1,))
    assert borrowed.take(0) == firsts[1]


def test_speeds_and_slow_periods_stretch_the_times() -> None:
    plain = Draws(parse_law("exp:1"), 1, 4)
    half = Draws(parse_law("exp:1"), 1, 4, speeds=(0.5,))
    assert [half.take(0) for _ in range(300)] == [2 * plain.take(0) for _ in range(300)]
    slow = Draws(parse_law("constant:1"), 1, 4, slow=SlowPeriods(factor=3, enter=0.1, leave=0.2))
    times = [slow.take(0) for _ in range(30_000)]
    assert set(times) == {1.0, 3.0}
    assert np.mean(np.array(times) == 3) == pytest.approx(0.1 / 0.3, abs=0.02)  # the stationary share
    runs = "".join("s" if time == 3 else "." for time in times).split(".")
    lengths = [len(run) for run in runs if run]
    assert np.mean(lengths) == pytest.approx(1 / 0.2, rel=0.1)


def test_failures_have_their_means() -> None:
    failures = Failures(mean_up_s=100, mean_down_s=10)
    times = [failure_times(failures, 1, learner, number) for learner in range(50) for number in range(40)]
    assert np.mean([up for up, _ in times]) == pytest.approx(100, rel=0.1)
    assert np.mean([down for _, down in times]) == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize(
    ("law", "says"),
    [
        ("expo:1", "did you mean 'exp'"),
        ("exp:-1", "0 or more"),
        ("exp:0", "must be above 0"),
        ("exp", "MEAN is missing"),
        ("uniform:3,1", "exceeds HIGH"),
        ("gamma:1,0", "from 0.001 to 10"),
        ("gamma:1,nan", "from 0.001 to 10"),
        ("gamma:1,1e-200", "from 0.001 to 10"),
        ("weibull:0.001,1", "from 0.1 to 1000"),
        ("pareto:0.001,1", "from 0.1 to 1000"),
        ("constant:1e300", "too large"),
        ("bimodal:1,2,1.5", "share-slow: expected a number from 0 to 1; got .1.5."),
        ("trace:/no/such/file", "cannot read the samples /no/such/file: No such file"),
        ("trace:/proc/self/mem", "cannot read the samples"),
    ],
)
def test_a_wrong_law_is_named(law: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        parse_law(law)
    assert len(LAWS) == 10


def test_a_trace_without_compute_times_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "waits").write_text("")
    write_log(tmp_path / "waits", RunLog(run={}, spans=(Span(0, "wait", 0, 1, 0),)))
    (tmp_path / "broken").write_text("{")
    for name, says in (
        ("empty", "holds no compute times"),
        ("waits", "holds no compute times"),
        ("broken", "not JSON"),
    ):
        with pytest.raises(RequestError, match=says):
            parse_law(f"trace:{tmp_path / name}")
