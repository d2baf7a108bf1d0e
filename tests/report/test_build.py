"""Which sections a page has, what it leaves out and says so, and who is ranked against whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offbeat.charts import BarChart, LineChart, ShareChart
from offbeat.report import run_sections
from offbeat.report.build import build
from offbeat.report.inputs import read_inputs
from offbeat.report.page import render
from offbeat.report.page_model import Item, Page, Table, TimelineChart
from offbeat.runs.run_record import read_run
from report.handmade import any_run, config, decision, evaluation, span, write_result, write_run


def page_of(*paths: Path, **more: Any) -> Page:
    inputs = read_inputs(paths)
    return build(inputs.runs, inputs.results, problems=inputs.problems, **more)


def items_of(page: Page) -> dict[str, Item]:
    """By kind and key: a chart and its table may have the same key."""
    found = [item for section in page.sections for item in section.items]
    assert len({(type(item), item.key) for item in found}) == len(found)
    return {item.key: item for item in found}


def table(page: Page, key: str) -> Table:
    found = next(
        item for section in page.sections for item in section.items if isinstance(item, Table) and item.key == key
    )
    assert all(len(row) == len(found.columns) for row in found.rows)
    return found


def test_a_section_is_there_only_when_it_has_something_to_show(tmp_path: Path) -> None:
    page = page_of(any_run(tmp_path / "a"))
    assert [section.key for section in page.sections] == [
        "timeline", "error", "staleness", "time", "communication", "runs", "configuration", "definitions",
    ]  # fmt: skip
    bare = page_of(write_run(tmp_path / "b", config=config("ring", 2)))
    assert [section.key for section in bare.sections] == ["runs", "configuration", "definitions"]
    rows = [{"strategy": "ring", "learners": 1}]
    result = page_of(write_result(tmp_path / "s.json", "scaling", rows))
    assert [section.key for section in result.sections] == ["scaling", "definitions"]
    assert result.subtitle == "1 benchmark" and page.subtitle == "1 run"


def test_a_slow_link_is_named_on_the_page_as_a_link(tmp_path: Path) -> None:
    told = "host 2 receives at 12 MB/s, the others at 118 MB/s"
    slow = evaluation(4, 3.0, 0.5, slow_links=[told, 7, ""])
    page = page_of(write_run(tmp_path / "a", config=config("ring", 4), metrics=[slow]))
    assert [note for note in page.notes if "host" in note] == [f"a: {told}"]
    assert told in render(page)
    assert not page_of(write_run(tmp_path / "b", config=config("ring", 4), metrics=[evaluation(4, 3.0, 0.5)])).notes


def test_learners_of_a_parameter_server_are_grouped_by_the_host_that_they_were_on_last(tmp_path: Path) -> None:
    hosts = [{"name": "a", "learners": 1, "sent_bytes": 500_000, "received_bytes": 2_000_000}, {"name": "b"}]
    links = [{"source": "b", "target": "a", "bytes": 2_000_000, "share": 0.8}]
    last = evaluation(4, 3.0, 0.5, learner_hosts=["a", "b"], hosts=hosts, links=links)
    page = page_of(write_run(tmp_path / "run", config=config("async", 2), metrics=[last]))
    assert [row[1:3] for row in table(page, "hosts").rows] == [("a", 1), ("b", None)]
    assert table(page, "links").rows == (("run", "b", "a", 2.0, 0.8),)


def test_a_price_or_an_energy_file_makes_the_section_of_energy(tmp_path: Path) -> None:
    run = any_run(tmp_path / "a")
    assert "energy" in [section.key for section in page_of(run, price=0.0).sections]
    write_run(run, energy={"seconds": 1.0, "joules": None, "not_measured": ["no counter"]})
    energy = table(page_of(run), "energy")
    assert energy.rows[0][3] == "not measured: no counter" and energy.rows[0][1] is None


# --- what is too much ---------------------------------------------------------------------------------------------


def test_of_too_many_bars_the_earliest_are_shown_and_the_note_says_so(tmp_path: Path) -> None:
    many = [span(at % 2, "compute", float(at // 2), at // 2 + 1.0, at) for at in range(100)]
    page = page_of(any_run(tmp_path / "a", log=many), any_run(tmp_path / "b"), limit=25)
    first, second = (item for item in items_of(page).values() if isinstance(item, TimelineChart))
    assert len(second.bars) == 5 and "Shown" not in second.note  # what the small one leaves is for the large one
    assert len(first.bars) == 20 and max(bar[2] for bar in first.bars) == 9.0
    assert "Only the first 20 of 100 bars are shown." in first.note


def test_bars_of_a_learner_never_overlap_and_come_in_order(tmp_path: Path) -> None:
    log = [
        span(1, "compute", 5.0, 6.0), span(0, "compute", 4.0, 7.0), span(0, "wait", 1.0, 4.5),
        span(0, "wait", 5.0, 6.0), span(0, "apply", 6.5, 8.0), span(0, "apply", 1.0, 1.0),
    ]  # fmt: skip
    line = next(item for item in items_of(page_of(any_run(tmp_path / "a", log=log))).values()
                if isinstance(item, TimelineChart))  # fmt: skip
    mine = [(start, end) for who, _, start, end, *_ in line.bars if who == 0]
    assert mine == [(0.0, 3.5), (3.5, 6.0), (6.0, 7.0)]
    assert "2 bars hidden" in line.note and min(bar[2] for bar in line.bars) == 0.0


def test_the_legs_of_a_run_stand_one_after_the_other(tmp_path: Path) -> None:
    folder = any_run(tmp_path / "a", log=[span(0, "compute", 2.0, 3.0)])
    write_run(folder, log=[span(0, "compute", 1.0, 3.0)], segment=".2")
    assert [(one.start_s, one.end_s) for one in run_sections.one_clock(read_run(folder))] == [(0.0, 1.0), (1.0, 3.0)]


def test_a_long_tail_of_staleness_is_one_column(tmp_path: Path) -> None:
    """98 gradients of staleness 0 to 1, and two that are 50 and 60 versions old."""
    ages = [0, 1] * 49 + [50, 60]
    log = []
    for at, age in enumerate(ages):
        version = at - min(age, at)
        log.append(decision(f"pushed 0 t{at + 1} v{version} n8 @{at}.0", f"apply t{at + 1}"))
    page = page_of(any_run(tmp_path / "a", learners=16, log=log))
    chart = items_of(page)["staleness-1"]
    assert isinstance(chart, BarChart) and chart.categories[-1].startswith(">=")
    assert len(chart.categories) <= run_sections.MOST_AGES
    measured = [value or 0.0 for value in chart.series[0].values]
    assert sum(measured) == pytest.approx(1) and measured[-1] == 0.02
    assert sum(value or 0.0 for value in chart.series[1].values) == pytest.approx(1)  # the law's tail is there, too
    assert sum(int(row[2] or 0) for row in table(page, "staleness-shares").rows) == 100


def test_a_very_long_curve_is_thinned_out_and_keeps_its_best_and_last_point(tmp_path: Path) -> None:
    curve = [evaluation(at, float(at), 0.9 if at == 1001 else 0.5, loss=1.0) for at in range(5000)]
    page = page_of(any_run(tmp_path / "a", metrics=curve))
    rows = table(page, "evaluations").rows
    assert len(rows) <= run_sections.MOST_POINTS + 2 and rows[-1][2] == 4999 and 1001 in [row[2] for row in rows]
    assert table(page, "evaluations").note == "Thinned out: a."


@pytest.mark.parametrize(("codec", "log"), [(2_000_000, False), (100_000, True)])
def test_the_error_is_drawn_against_what_was_sent_and_widely_where_runs_differ_much(
    tmp_path: Path, codec: int, log: bool
) -> None:
    def curve(sent: int) -> list[dict[str, Any]]:
        return [evaluation(at, float(at), 0.2 * at, sent_bytes=at * sent) for at in (1, 3)]

    page = page_of(any_run(tmp_path / "a", metrics=curve(5_000_000)), any_run(tmp_path / "b", metrics=curve(codec)))
    chart = items_of(page)["error-sent"]
    assert isinstance(chart, LineChart) and chart.x_log == log and chart.x_label == "sent by learners and servers (MB)"
    assert [one.points[-1][0] for one in chart.series] == [15.0, 3 * codec / 1e6]
    assert [row[3] for row in table(page, "evaluations").rows][:2] == [5.0, 15.0]
    assert " log" in render(page).partition('data-x="')[2] or not log


def test_a_run_that_did_not_count_its_bytes_has_no_chart_of_them(tmp_path: Path) -> None:
    assert "error-sent" not in items_of(page_of(any_run(tmp_path / "a", metrics=[evaluation(1, 1.0, 0.5)])))


def test_without_an_accuracy_the_loss_is_drawn(tmp_path: Path) -> None:
    page = page_of(any_run(tmp_path / "a", metrics=[evaluation(1, 1.0, None, loss=2.0), evaluation(2, 2.0, None)]))
    chart = items_of(page)["error-seconds"]
    assert isinstance(chart, LineChart) and chart.y_label == "test loss" and chart.series[0].points == ((1.0, 2.0),)
    assert any("reached" not in sentence for sentence in page.summary)


def test_a_timeline_has_a_bounded_number_of_rows_and_says_who_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_sections.MOST_LEARNERS == 256
    monkeypatch.setattr(run_sections, "MOST_LEARNERS", 3)
    log = [span(learner, "compute", 0.0, 1.0) for learner in (9, 2, 4, 7, 5)]
    page = page_of(any_run(tmp_path / "a", log=log), any_run(tmp_path / "b", log=log[:3]))
    first, second = (item for item in items_of(page).values() if isinstance(item, TimelineChart))
    assert first.learners == ("learner 2", "learner 4", "learner 5") and len(first.bars) == 3
    assert "Only the first 3 of 5 learners are shown." in first.note and "bars" not in first.note
    assert len(second.learners) == 3 and "left out" not in second.note


# --- energy, time and machines ------------------------------------------------------------------------------------


def measured(joules: float, *sources: str, missing: tuple[str, ...] = ()) -> dict[str, Any]:
    told = [{"name": name, "kind": "rapl", "joules": joules / len(sources)} for name in sources]
    return {"seconds": 3.0, "joules": joules, "sources": told, "not_measured": list(missing)}


def test_energy_of_different_sources_is_compared_neither_in_words_nor_in_a_chart(tmp_path: Path) -> None:
    one = any_run(tmp_path / "a", energy=measured(8.0, "package-0"))
    other = any_run(tmp_path / "b", strategy="ring", energy=measured(900.0, "package-0", "GPU 0"))
    page = page_of(one, other)
    charts = [item for key, item in items_of(page).items() if key.startswith("energy-runs")]
    assert [item.categories for item in charts if isinstance(item, BarChart)] == [("a",), ("b",)]
    said = "Energy cannot be compared: it was measured by different sources (package-0 and GPU 0 + package-0)."
    assert said in page.summary
    assert [row[2] for row in table(page, "energy").rows] == ["package-0", "GPU 0, package-0"]
    alike = page_of(one, any_run(tmp_path / "c", strategy="ring", energy=measured(9.0, "package-0")))
    (chart,) = (item for item in items_of(alike).values() if item.key.startswith("energy-runs"))
    assert isinstance(chart, BarChart) and chart.categories == ("a", "c")
    assert not any("cannot be compared" in sentence for sentence in alike.summary)


def test_what_was_not_measured_is_always_said(tmp_path: Path) -> None:
    page = page_of(any_run(tmp_path / "a", energy=measured(8.0, "package-0", missing=("GPUs: no package",))))
    assert table(page, "energy").rows[0][1:4] == (8.0, "package-0", "in part, without: GPUs: no package")
    assert any("it used 8 J or more (not measured: GPUs: no package)" in sentence for sentence in page.summary)
    whole = page_of(any_run(tmp_path / "b", energy=measured(8.0, "package-0")))
    assert table(whole, "energy").rows[0][3] == "" and any("it used 8 J." in one for one in whole.summary)


def test_what_a_log_never_has_is_a_dash_and_in_no_chart(tmp_path: Path) -> None:
    """A real server's learners log computing and waiting only."""
    page = page_of(any_run(tmp_path / "a"))
    row = dict(zip((one.name for one in table(page, "learners").columns), table(page, "learners").rows[1], strict=True))
    parts = ("sending (s)", "updating (s)", "sending: share", "updating: share")
    assert [row[name] for name in parts] == [None] * 4 and row["waiting (s)"] == 0.5
    chart = items_of(page)["shares-1"]
    assert isinstance(chart, ShareChart) and chart.parts == ("computing", "thrown away", "waiting")
    assert all(len(values) == 3 for values in chart.values)
    bars = items_of(page)["communication-runs"]
    assert isinstance(bars, BarChart) and [one.name for one in bars.series] == ["waiting"]
    assert table(page, "communication").rows[0][1::2] == (None, None)
    said = [section.about for section in page.sections if run_sections.INSIDE_WAITING in section.about]
    assert len(said) == 2
    spans = [span(0, "compute", 0.0, 1.0), span(0, "send", 1.0, 1.5), span(1, "apply", 1.0, 2.0)]
    other = page_of(any_run(tmp_path / "b", log=spans))
    assert [row[4] for row in table(other, "learners").rows] == [0.5, 0.0]  # it has some: nothing is 0 then
    assert not any(run_sections.INSIDE_WAITING in section.about for section in other.sections)


def joined(page: Page) -> list[tuple[str, tuple[tuple[float, float], ...]]]:
    chart = items_of(page).get("machines-1")
    return [(one.name, one.points) for one in chart.series] if isinstance(chart, LineChart) else []


def test_only_runs_that_differ_in_nothing_but_learners_are_joined(tmp_path: Path) -> None:
    two = any_run(tmp_path / "a", config=config("async", 2, rate=0.1) | {"name": "x"})
    four = any_run(tmp_path / "b", learners=4, config=config("async", 4, rate=0.1))
    other = any_run(tmp_path / "c", learners=8, config=config("async", 8, rate=0.2))
    assert joined(page_of(two, four)) == [("async", ((2.0, 3.0), (4.0, 3.0)))]
    assert joined(page_of(two, other)) == []
    assert joined(page_of(two, four, other)) == [
        ("async (a)", ((2.0, 3.0), (4.0, 3.0))), ("async (c)", ((8.0, 3.0),)),
    ]  # fmt: skip


# --- who is ranked ------------------------------------------------------------------------------------------------


def ranking(page: Page) -> list[str]:
    return [sentence for sentence in page.summary if "first to reach" in sentence or "Not ranked" in sentence]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"config": config("ring", 2, precision="bf16")}, "train.precision (fp32, bf16)"),
        ({"config": config("ring", 2, batch_size=64)}, "train.batch_size (8, 64)"),
        ({"config": config("ring", 2, accumulate=4)}, "train.accumulate (1, 4)"),
        ({"config": config("ring", 2) | {"model": {"name": "cnn"}}}, "model (mlp, cnn)"),
        ({"config": config("ring", 2) | {"data": {"name": "text"}}}, "data.name (digits, text)"),
        ({"head": {"simulated": True}}, "simulated (no, yes)"),
    ],
)
def test_runs_that_are_not_alike_are_not_ranked(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    page = page_of(any_run(tmp_path / "a"), any_run(tmp_path / "b", strategy="ring", **change))
    (said,) = ranking(page)
    assert said.startswith("Not ranked against each other: async ") and says in said
    assert all(row[7] is None for row in table(page, "accuracy").rows)  # no target in common


def test_other_learners_and_machines_are_named_and_do_not_hinder_a_ranking(tmp_path: Path) -> None:
    page = page_of(
        any_run(tmp_path / "a", machine={"processor": "x"}),
        any_run(tmp_path / "b", strategy="ring", learners=4, machine={"processor": "y"}),
    )
    said = "They also differ in learners (2, 4), machine.processor (x, y), which explains part of the difference."
    assert len(ranking(page)) == 1 and said in page.summary


def test_runs_of_the_same_strategy_are_called_by_their_folders(tmp_path: Path) -> None:
    page = page_of(any_run(tmp_path / "a"), any_run(tmp_path / "b"))
    assert ranking(page)[0].startswith("async (a) and async (b) were first to reach 50.0 %, after 3 s and 3 s")


def test_hostile_text_is_text_in_every_place_of_a_page(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>\u202e\x00"
    run = any_run(tmp_path / "<img src=x>", config=config(bad, 2) | {bad: {bad: [bad, {"a": bad}]}}, machine={bad: bad})
    page = page_of(run)
    texts = [cell for row in table(page, "configuration").rows for cell in row if isinstance(cell, str)]
    assert "<script>alert(1)</script>��" in texts and "<img src=x>" in texts
    assert not any("\x00" in text or "\u202e" in text for text in [*texts, *page.summary])


def test_fields_that_differ_come_first(tmp_path: Path) -> None:
    page = page_of(any_run(tmp_path / "a"), any_run(tmp_path / "b", config=config("ring", 2, rate=0.5)))
    rows = [(row[0], row[1]) for row in table(page, "configuration").rows]
    assert rows[:4] == [("run", ""), ("sync", "yes"), ("train.lr", "yes"), ("name", "")]


# --- benchmarks ---------------------------------------------------------------------------------------------------


def test_what_a_benchmark_did_not_rank_is_in_its_table_and_in_no_chart(tmp_path: Path) -> None:
    row = {"strategy": "ring", "learners": 2, "seconds": 1.0, "speedup": 1.5, "overhead_s": 0.5}
    path = write_result(tmp_path / "s.json", "scaling", [row | {"ranked": False, "why_not": "too much load"}])
    page = page_of(path)
    assert not [item for item in items_of(page).values() if not isinstance(item, Table)]
    assert table(page, "scaling").rows[0][-1] == "too much load"


def test_notes_of_a_benchmark_and_its_machine_are_sentences_below_its_table(tmp_path: Path) -> None:
    rows = [{"strategy": "ring", "learners": 2}]
    notes = ["the load was high", "Measure again."]
    path = write_result(tmp_path / "s.json", "scaling", rows, notes=notes, machine={"cores": 2, "load": 1.23456})
    said = "the load was high. Measure again. Machine: cores 2, load 1.235."
    assert table(page_of(path), "scaling").note == said


def test_predictions_come_worst_first_and_an_error_that_is_missing_is_computed(tmp_path: Path) -> None:
    rows = [
        {"strategy": "ring", "learners": 2, "measured_s": 1.0, "predicted_s": 1.5},
        {"strategy": "ring", "learners": 4, "measured_s": None, "predicted_s": 1.0},
        {"strategy": "async", "learners": 2, "measured_s": 1.0, "predicted_s": 0.25, "error": -0.75},
        {"strategy": "async", "learners": 2, "measured_s": 1.0, "predicted_s": None},
    ]
    page = page_of(write_result(tmp_path / "p.json", "predictions", rows))
    assert [row[-1] for row in table(page, "predictions").rows] == [-0.75, 0.5, None]


def test_the_page_starts_with_a_table_and_five_sentences_at_most(tmp_path: Path) -> None:
    page = page_of(any_run(tmp_path / "a"), any_run(tmp_path / "b", strategy="ring", learners=4), price=2.0)
    assert page.overview is not None
    names = [column.name for column in page.overview.columns]
    assert names == [
        "strategy", "time to 50.0 % (s)", "accuracy", "samples/s", "waiting", "thrown away", "staleness",
        "sent and received", "cost (at 2 per device hour)",
    ]  # fmt: skip
    assert [row[0] for row in page.overview.rows] == ["async with 2 learners", "ring with 4 learners"]
    text = render(page)
    start, end = text.index('id="summary"'), text.index("</section>")
    assert text.index("<table>") < text.index("<p><bdi>") and start < text.index("<table>") < end
    before_fold = text[start:end].partition("more findings")[0]
    assert len(page.summary) > 5 and before_fold.count("<p><bdi>") == 5
    alone = page_of(any_run(tmp_path / "c"))
    assert alone.overview is not None and alone.overview.columns[1].name == "training time (s)"
    assert alone.overview.columns[-1].name == "cost (device hours)"
