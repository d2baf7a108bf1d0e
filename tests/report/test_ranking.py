"""Who is ranked against whom, by which target, and what is said of it; verdicts of benchmarks are repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offbeat.report.build import build
from offbeat.report.inputs import read_inputs
from offbeat.report.page_model import Page, Table
from report.handmade import any_run, config, evaluation, write_result

CHANCE = "There is one run of each, so a difference may be chance."


def page_of(*paths: Path, **more: Any) -> Page:
    inputs = read_inputs(paths)
    return build(inputs.runs, inputs.results, problems=inputs.problems, **more)


def ranking(page: Page) -> list[str]:
    """What comes before the sentences of single runs, and what is said of the ranking."""
    words = (" first to reach ", "ranked", "reached 80", "one run of", "reach ", "No run")
    return [one for one in page.summary if any(word in one for word in words) and "applied per second" not in one]


def targets(page: Page) -> list[Any]:
    tables = [item for section in page.sections for item in section.items if isinstance(item, Table)]
    return [row[7] for row in next(table for table in tables if table.key == "accuracy").rows]


def run(folder: Path, *points: tuple[float, float], line: str = "async", **more: Any) -> Path:
    """A run with an evaluation at each of these seconds and accuracies; one more, of a moment later, holds the last."""
    held = [(points[-1][0] + 0.01, points[-1][1])] if points else []
    curve = [evaluation(at, *point) for at, point in enumerate([*points, *held], start=1)]
    return any_run(folder, **({"strategy": line, "metrics": curve} | more))


def test_the_target_is_the_highest_accuracy_that_all_who_are_ranked_have_reached(tmp_path: Path) -> None:
    fast = run(tmp_path / "a", (1.0, 0.6), (2.0, 0.905))
    slow = run(tmp_path / "b", (4.0, 0.5), (8.0, 0.9), line="ring")
    page = page_of(fast, slow)
    assert ranking(page) == ["async was first to reach 90.0 %, after 2 s; ring took 8 s, 4.00x as long.", CHANCE]
    assert targets(page) == [0.9, 0.9]


def test_a_run_that_failed_neither_sets_the_target_nor_wins(tmp_path: Path) -> None:
    failed = run(tmp_path / "a", (0.5, 0.529), line="downpour")
    good = run(tmp_path / "b", (4.0, 0.5), (8.0, 0.942), line="ring")
    also = run(tmp_path / "c", (1.0, 0.6), (2.0, 0.935))
    page = page_of(failed, good, also)
    assert ranking(page) == [
        "async was first to reach 93.5 %, after 2 s; ring took 8 s, 4.00x as long.",
        "downpour is not ranked: its accuracy 52.9 % is 41.3 points below that of ring.",
        CHANCE,
    ]
    alone = page_of(failed, good)
    assert ranking(alone) == ["downpour is not ranked: its accuracy 52.9 % is 41.3 points below that of ring."]
    assert targets(alone) == [None, None]


def test_a_point_below_is_ranked_and_more_is_not(tmp_path: Path) -> None:
    best = run(tmp_path / "a", (1.0, 0.9))
    assert targets(page_of(best, run(tmp_path / "b", (2.0, 0.89), line="ring"))) == [0.89, 0.89]
    assert targets(page_of(best, run(tmp_path / "c", (2.0, 0.889), line="ring"))) == [None, None]


def test_what_counts_is_the_accuracy_at_the_end_and_not_the_best(tmp_path: Path) -> None:
    """It was at 95 % and fell apart."""
    broken = run(tmp_path / "a", (1.0, 0.95), (2.0, 0.2), line="downpour")
    page = page_of(broken, run(tmp_path / "b", (3.0, 0.94)), run(tmp_path / "c", (9.0, 0.94), line="ring"))
    said = "downpour is not ranked: its accuracy 20.0 % is 74.0 points below that of async."
    assert said in page.summary and targets(page) == [0.94] * 3
    assert ranking(page)[0].startswith("async and ring were first to reach 94.0 %, after 3 s and 9 s")


def test_by_a_target_that_is_given_all_who_reached_it_are_ranked_and_who_ended_worse_is_named(tmp_path: Path) -> None:
    worse = run(tmp_path / "a", (1.0, 0.5), (2.0, 0.85))
    best = run(tmp_path / "b", (4.0, 0.5), (8.0, 0.9), line="ring")
    never = run(tmp_path / "c", (4.0, 0.5), (8.0, 0.6), line="downpour")
    page = page_of(worse, best, never, target=0.8)
    assert ranking(page) == [
        "async was first to reach 80.0 %, after 2 s; ring took 8 s, 4.00x as long.",
        "downpour did not reach 80.0 %.",
        "async is ranked by the given target, but its accuracy 85.0 % is 5.0 points below that of ring.",
        CHANCE,
    ]
    assert ranking(page_of(worse, best, target=0.99)) == ["No run reached 99.0 %."]
    one = page_of(worse, never, target=0.8)
    assert ranking(one)[:2] == ["async was first to reach 80.0 %, after 2 s.", "downpour did not reach 80.0 %."]
    assert CHANCE not in one.summary


@pytest.mark.parametrize(
    ("slow", "says"),
    [
        ([(4.0, 0.5), (5.0, 0.9)], "async and ring were first to reach 90.0 %, after 3.5 s and 5 s, within one "
                                   "evaluation of each other."),
        ([(4.0, 0.5), (5.5, 0.9)], "async was first to reach 90.0 %, after 3.5 s; ring took 5.5 s, 1.57x as long."),
        ([(3.0, 0.5), (5.5, 0.9)], "async and ring were first to reach 90.0 %, after 3.5 s and 5.5 s, within one "
                                   "evaluation of each other."),
        ([(5.25, 0.9)], "async and ring were first to reach 90.0 %, after 3.5 s and 5.25 s, within one evaluation "
                        "of each other."),
    ],
)  # fmt: skip
def test_times_within_one_evaluation_are_alike(tmp_path: Path, slow: list[tuple[float, float]], says: str) -> None:
    """The interval of async is 2 s: it looked at 1.5 s and at 3.5 s. The larger one of both counts."""
    page = page_of(run(tmp_path / "a", (1.5, 0.6), (3.5, 0.9)), run(tmp_path / "b", *slow, line="ring"))
    assert ranking(page)[0] == says


def test_who_come_later_may_be_alike_too(tmp_path: Path) -> None:
    page = page_of(
        run(tmp_path / "a", (1.0, 0.5), (2.0, 0.9)),
        run(tmp_path / "b", (7.0, 0.5), (8.0, 0.9), line="ring"),
        run(tmp_path / "c", (7.5, 0.5), (8.5, 0.9), line="native"),
    )
    assert ranking(page)[0] == (
        "async was first to reach 90.0 %, after 2 s; ring and native took 8 s and 8.5 s, 4.00x and 4.25x as long, "
        "within one evaluation of each other."
    )


def test_runs_that_were_repeated_are_not_called_one_run_each(tmp_path: Path) -> None:
    runs = [run(tmp_path / name, (1.0, 0.9)) for name in ("a", "b")]
    assert not any("chance" in one for one in page_of(*runs).summary)
    mixed = page_of(*runs, run(tmp_path / "c", (9.0, 0.9), line="ring"))
    assert "There is only one run of ring, so a difference may be chance." in mixed.summary


def test_a_run_that_is_not_finished_neither_sets_the_target_nor_is_ranked(tmp_path: Path) -> None:
    first, second = run(tmp_path / "a", (2.0, 0.9)), run(tmp_path / "b", (8.0, 0.9), line="ring")
    going = run(tmp_path / "c", (1.0, 0.95), line="downpour")
    (going / "log.jsonl").rename(going / "log.jsonl.unfinished")
    early = run(tmp_path / "d", line="native", config=config("native", 2, epochs=100),
                metrics=[evaluation(1, 1.0, 0.4, epoch=16)])  # fmt: skip
    page = page_of(first, second, going, early)
    said = ranking(page)
    assert "downpour is not ranked: it is unfinished." in said and targets(page) == [0.9] * 4
    assert "native is not ranked: it was stopped after epoch 16 of 100." in said and "95" not in said[0]
    assert any("ended at 95.0 % after 1.01 s (2 updates) so far" in one for one in page.summary)
    assert any("(1 update), stopped after epoch 16 of 100" in one for one in page.summary)
    kinds = [row[4] for section in page.sections if section.key == "runs" for item in section.items
             if isinstance(item, Table) for row in item.rows]  # fmt: skip
    assert kinds == ["real", "real", "real, unfinished", "real, stopped after epoch 16 of 100"]


def test_a_run_without_an_accuracy_is_left_out_and_named(tmp_path: Path) -> None:
    runs = [run(tmp_path / "a", (2.0, 0.9)), run(tmp_path / "b", (8.0, 0.9), line="ring")]
    page = page_of(*runs, any_run(tmp_path / "c", strategy="native", metrics=[]))
    assert "native is not ranked: it has no accuracy." in page.summary and targets(page)[0] == 0.9


# --- benchmarks ---------------------------------------------------------------------------------------------------

RACE = [
    {"strategy": "ring", "learners": 2, "seeds": 3, "reached": 3, "seconds_to_target": 4.0},
    {"strategy": "async", "learners": 2, "seeds": 3, "reached": 1, "seconds_to_target": 2.0},
]
SCALE = [{"strategy": "ring", "learners": 2, "seconds": 1.0, "speedup": 1.5}]


def test_the_page_repeats_the_verdict_of_a_benchmark_and_makes_none_of_its_own(tmp_path: Path) -> None:
    own = ["first at 80.0 %: ring (4 s)", "async: not ranked: 1 of 3 seeds reached 80.0 %"]
    race = write_result(tmp_path / "r.json", "accuracy", RACE, recipe="tiny", target=0.8, ranking=[*own, 7, None, " "])
    scale = write_result(tmp_path / "s.json", "scaling", SCALE, kind="strong", ranking=["nothing can be ranked"])
    assert page_of(race, scale).summary == (
        f"In the accuracy benchmark of tiny: {own[0]}; {own[1]}.",
        "In the strong scaling benchmark: nothing can be ranked.",
    )


@pytest.mark.parametrize("ranking", [None, [], "ring", {"a": 1}, [1]])
def test_in_an_old_file_who_reached_the_target_with_fewer_seeds_is_not_first(tmp_path: Path, ranking: Any) -> None:
    race = write_result(tmp_path / "r.json", "accuracy", RACE, target=0.8, ranking=ranking)
    assert page_of(race).summary == (
        "In the accuracy benchmark, ring with 2 learners was the first to reach 80.0 %, after 4 s.",
    )


def test_a_very_long_verdict_is_cut_and_says_so(tmp_path: Path) -> None:
    race = write_result(tmp_path / "r.json", "accuracy", RACE, ranking=[f"then x{at}" for at in range(20)])
    assert page_of(race).summary[0].endswith("then x11; 8 more.")
