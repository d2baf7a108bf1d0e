"""Pipeline schedules: proved over all sizes, planted bugs caught, prices beside closed forms, text and pictures."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

import offbeat
from offbeat import pipelines, topology
from offbeat.cli import main
from offbeat.errors import RequestError, ScheduleError
from offbeat.pipelines import (
    PIPELINES,
    Action,
    PipelineAlgorithm,
    PipelineSchedule,
    StageCosts,
    Unit,
    build,
    closed_form,
    diagram,
    equal_costs,
    price,
    prove,
    svg,
    with_messages,
    without_messages,
)
from offbeat.pipelines.model_graph import GraphNode
from offbeat.pipelines.pipeline_messages import with_early_receives
from offbeat.pipelines.pipeline_ranking import advised_pipeline, costs_for, rank_pipelines

EQUAL = Unit()
INTERLEAVED = ("interleaved-1f1b:2", "interleaved-1f1b:3", "interleaved-1f1b:4")
LINES = ("gpipe", "1f1b", *INTERLEAVED, "zb-h1", "zb-v", "dualpipe-v")
SIZES = tuple(product(range(1, 9), range(1, 17)))


def defined(line: str) -> Iterator[PipelineSchedule]:
    for stages, microbatches in SIZES:
        try:
            yield build(line, stages=stages, microbatches=microbatches)
        except RequestError:
            continue


def equal_price(schedule: PipelineSchedule, unit: Unit = EQUAL) -> pipelines.PipelinePrice:
    costs = equal_costs(schedule.ranks, forward_s=unit.forward, input_s=unit.input, weight_s=unit.weight)
    return price(schedule, costs_for(schedule, costs))


# --- every schedule, every size -------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", LINES)
def test_every_pipeline_is_proved_for_all_sizes_for_which_it_is_defined(line: str) -> None:
    sizes = {(schedule.ranks, schedule.microbatches) for schedule in defined(line) if prove(schedule)}
    always = {"gpipe", "1f1b", "zb-h1", "zb-v"}
    if line in always:
        assert sizes == set(SIZES)
    elif line == "dualpipe-v":
        assert sizes == {(p, m) for p, m in SIZES if m >= 2 * p}
    else:  # whole rounds of p or more, or one round
        assert sizes == {(p, m) for p, m in SIZES if m < p or m % (m // p) == 0}


@pytest.mark.parametrize("line", LINES)
def test_receives_may_be_posted_one_computation_early(line: str) -> None:
    for schedule in list(defined(line))[::9]:
        early = with_early_receives(schedule)
        before, after = prove(schedule), prove(early)
        assert after.buffers <= before.buffers and after.peak_activations == before.peak_activations
        assert without_messages(early) == without_messages(schedule)


@pytest.mark.parametrize("line", LINES)
def test_a_table_with_messages_says_the_same_and_needs_as_many_buffers(line: str) -> None:
    for schedule in defined(line):
        if schedule.ranks in (1, 4) and schedule.microbatches in (3, 8):
            whole = with_messages(schedule)
            assert prove(whole) == prove(schedule)
            assert without_messages(whole) == schedule
            assert equal_price(whole) == equal_price(schedule)


@pytest.mark.parametrize("unit", [Unit(), Unit(1.0, 1.2, 0.8), Unit(1.5, 1.0, 1.0)])
@pytest.mark.parametrize("line", LINES)
def test_bubble_shares_are_those_of_the_closed_forms(line: str, unit: Unit) -> None:
    compared = 0
    for schedule in defined(line):
        wanted = closed_form(line, stages=schedule.ranks, microbatches=schedule.microbatches, unit=unit)
        if wanted is not None:
            assert equal_price(schedule, unit).bubble_share == pytest.approx(wanted, abs=1e-9)
            compared += 1
    assert compared >= 10 or line in ("zb-v", "dualpipe-v")


def test_activations_held_are_those_of_the_literature() -> None:
    p, m = 4, 8
    peaks = {line: equal_price(build(line, stages=p, microbatches=m)).peak_activations for line in LINES}
    assert peaks["gpipe"] == (m,) * p
    assert peaks["1f1b"] == (4, 3, 2, 1)
    assert peaks["interleaved-1f1b:2"][0] == p + (p - 1) / 2
    assert peaks["interleaved-1f1b:4"][0] == pytest.approx(p + (p - 1) / 4, abs=0.3)
    assert peaks["zb-h1"] == (p,) * p
    assert max(peaks["zb-v"]) == p
    assert max(peaks["dualpipe-v"]) == (2 * p + 1) / 2  # 2p + 1 stages, two of which are a rank's part


def test_zb_h1_idles_a_third_of_what_1f1b_idles() -> None:
    idle = {
        line: (made := equal_price(build(line, stages=6, microbatches=12))).seconds - made.busy_s[0]
        for line in ("1f1b", "zb-h1")
    }
    assert idle["zb-h1"] == pytest.approx(idle["1f1b"] / 3)


def test_in_zb_v_no_rank_waits_once_it_has_begun_if_all_passes_take_the_same() -> None:
    for stages in range(1, 9):
        made = equal_price(build("zb-v", stages=stages, microbatches=16))
        assert made.inside_idle_s == pytest.approx((0.0,) * stages, abs=1e-9)
    uneven = equal_price(build("zb-v", stages=4, microbatches=16), Unit(1.0, 1.5, 0.5))
    assert max(uneven.inside_idle_s) > 0.1


# --- planted bugs ---------------------------------------------------------------------------------------------------

Rows = list[list[str]]


def words_of(line: str, stages: int = 3, microbatches: int = 4) -> Rows:
    return [list(map(str, row)) for row in with_messages(build(line, stages=stages, microbatches=microbatches)).rows]


def schedule_of(rows: Rows) -> PipelineSchedule:
    return PipelineSchedule.from_csv("planted", "\n".join(",".join(row) for row in rows))


def swap(rows: Rows, rank: int, one: str, other: str) -> None:
    row = rows[rank]
    at, there = row.index(one), row.index(other)
    row[at], row[there] = row[there], row[at]


def move(rows: Rows, rank: int, word: str, before: str) -> None:
    rows[rank].remove(word)
    rows[rank].insert(rows[rank].index(before), word)


PLANTED: dict[str, tuple[str, Callable[[Rows], object], str]] = {
    "a backward pass before its forward pass": ("1f1b", lambda r: swap(r, 2, "2F0", "2B0"), "'2B0' comes before 2F0"),
    "two actions of neighbours swapped": (
        "1f1b",
        lambda r: swap(r, 1, "1F0", "1F1"),
        "'1F1' needs the result of stage 0",
    ),
    "a lost receive": (
        "1f1b",
        lambda r: r[1].remove("1RECV_F2"),
        "'1F2' needs the result of stage 0, but comes before '1RECV_F2'",
    ),
    "a lost send": ("1f1b", lambda r: r[0].remove("0SEND_F3"), "'1RECV_F3' waits for a message that is never sent"),
    "a lost forward pass": ("gpipe", lambda r: r[2].remove("2F3"), "'2B3' comes before 2F3"),
    "a lost backward pass": ("gpipe", lambda r: r[0].remove("0B3"), "stage 0 is updated after 3 of 4"),
    "a lost gradient of weights": ("zb-h1", lambda r: r[1].remove("1W2"), "stage 1 is updated after 3 of 4"),
    "a forward pass twice": ("1f1b", lambda r: r[0].insert(1, "0F0"), "'0F0' repeats work that '0F0' has already done"),
    "both forms of a backward pass": ("1f1b", lambda r: r[2].insert(5, "2I0"), "repeats work"),
    "weights before inputs": ("zb-h1", lambda r: swap(r, 0, "0I1", "0W1"), "'0W1' comes before 0I1"),
    "a send before its computation": (
        "1f1b",
        lambda r: swap(r, 0, "0F0", "0SEND_F0"),
        "before the result that it sends",
    ),
    "a receive after its use": ("1f1b", lambda r: swap(r, 1, "1RECV_F0", "1F0"), "before '1RECV_F0'"),
    "a receive twice": ("1f1b", lambda r: r[1].insert(1, "1RECV_F0"), "'1RECV_F0' comes twice"),
    "a send twice": ("1f1b", lambda r: r[0].insert(2, "0SEND_F0"), "'0SEND_F0' comes twice"),
    "a stage on two ranks": ("1f1b", lambda r: r[2].append("0F3"), "stage 0 is on rank 0 already"),
    "an update before the last gradient": (
        "zb-h1",
        lambda r: move(r, 1, "1REDUCE_GRAD", "1W3"),
        "stage 1 is updated after 3 of 4 microbatches",
    ),
    "a weight used after its update": ("1f1b", lambda r: r[0].append("0F1"), "after their update"),
    "an update twice": ("1f1b", lambda r: r[0].append("0REDUCE_GRAD"), "stage 0 is updated twice"),
    "an update forgotten": ("1f1b", lambda r: r[0].remove("0REDUCE_GRAD"), "stage 0 is never updated"),
    "a message to the stage itself": ("zb-v", lambda r: r[2].insert(1, "2SEND_F0"), "both stages are on this rank"),
    "weights that are not gathered": (
        "1f1b",
        lambda r: r[0].__setitem__(slice(None), ["0UNSHARD", "0F0", "0SEND_F0", "0RESHARD", *r[0][2:]]),
        "uses weights that are not gathered",
    ),
}


def _crossed() -> Rows:
    rows = words_of("gpipe", stages=2, microbatches=2)
    return [["0F0", "0SEND_F0", "0RECV_B0", "0B0", "0F1", "0SEND_F1", "0RECV_B1", "0B1", "0REDUCE_GRAD"], rows[1]]


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_caught(name: str) -> None:
    line, plant, says = PLANTED[name]
    rows = words_of(line)
    prove(schedule_of(rows))
    plant(rows)
    with pytest.raises(ScheduleError, match=re.escape(says)) as caught:
        prove(schedule_of(rows))
    assert "✗" in caught.value.grid


def test_ranks_that_wait_for_each_other_are_a_deadlock() -> None:
    """Rank 0 wants the gradients of microbatch 0 before it computes 1; rank 1 has both forward passes first."""
    with pytest.raises(ScheduleError, match="deadlock however many buffers it has: rank 0 at '0B0', rank 1 at '1F1'"):
        prove(schedule_of(_crossed()))


def test_one_buffer_too_few_is_a_deadlock() -> None:
    tried = 0
    for line in LINES:
        schedule = build(line, stages=4, microbatches=8)
        needed = prove(schedule).buffers
        prove(schedule, buffers=needed)
        if needed:
            tried += 1
            with pytest.raises(ScheduleError, match=f"deadlock with {needed - 1} buffer"):
                prove(schedule, buffers=needed - 1)
    assert tried >= 3


# --- price ----------------------------------------------------------------------------------------------------------


def test_with_unequal_stages_the_slowest_paces_all() -> None:
    costs = StageCosts(forward_s=(1, 2, 1), input_s=(1, 2, 1), weight_s=(1, 2, 1))
    made = price(build("gpipe", stages=3, microbatches=10), costs)
    assert made.seconds == (3 + 6 + 3) + 9 * 6  # sum over the stages + (m - 1) x the slowest
    assert made.busy_s == (30, 60, 30)
    assert made.bubble_share == pytest.approx(1 - 120 / (3 * made.seconds))
    assert 60 < price(build("1f1b", stages=3, microbatches=10), costs).seconds <= made.seconds


def test_halves_of_a_backward_pass_take_what_they_take_apart() -> None:
    """Two stages of two layers. The inputs of the first are data, so its second half is the whole pass."""
    measured = GraphNode("layer", 1.0, 2.0, input_s=1.5, weight_s=1.0)
    costs = StageCosts.of((measured,) * 4, (0, 0, 1, 1))
    assert (costs.input_s, costs.weight_s, costs.backward_s) == ((0.0, 3.0), (4.0, 2.0), (4.0, 4.0))
    assert [costs.seconds(Action.parse(text)) for text in ("0F0", "0B0", "1B0", "0I0", "0W0", "1I0", "1W0")] == [
        2.0, 4.0, 4.0, 0.0, 4.0, 3.0, 2.0
    ]  # fmt: skip
    assert costs.cut(2).seconds(Action.parse("3B0")) == 2.0
    unmeasured = StageCosts.of((GraphNode("layer", 1.0, 2.0),) * 4, (0, 0, 1, 1))
    assert (unmeasured.input_s, unmeasured.weight_s) == ((0.0, 2.0), (4.0, 2.0))
    whole, split = (price(build(line, stages=2, microbatches=4), costs).busy_s for line in ("1f1b", "zb-h1"))
    assert whole == (24.0, 24.0) and split == (24.0, 28.0)


def test_messages_take_their_time_on_the_links() -> None:
    machine = topology.build("ring:bandwidth=1MB/s,latency=100ms", ranks=2)
    schedule = build("gpipe", stages=2, microbatches=1)
    made = price(schedule, equal_costs(2, activation_bytes=500_000), machine)
    assert made.seconds == pytest.approx(6 + 2 * (0.1 + 0.5))
    assert made.sent_bytes == (500_000, 500_000)
    # One message at a time on a link: with short passes the second waits for the first.
    quick = equal_costs(2, forward_s=0.1, input_s=0, weight_s=0, activation_bytes=500_000)
    made = price(build("gpipe", stages=2, microbatches=2), quick, machine)
    starts = [span.start_s for span in made.spans if span.rank == 1 and span.action.kind == "F"]
    assert starts == pytest.approx([0.1 + 0.6, 0.1 + 0.5 + 0.6])


def test_ranks_and_stages_must_fit() -> None:
    with pytest.raises(RequestError, match="has 4 stages, but times are given for 3"):
        price(build("1f1b", stages=4, microbatches=2), equal_costs(3))
    with pytest.raises(RequestError, match="has 4 ranks, topology 'ring' has 3"):
        price(build("1f1b", stages=4, microbatches=2), equal_costs(4), topology.build("ring", ranks=3))


def test_the_ranking_is_by_time_and_says_what_is_not_defined() -> None:
    ranking, refused = rank_pipelines(equal_costs(4), 6)
    times = [one.price.seconds for one in ranking]
    assert times == sorted(times)
    assert {one.line for one in ranking} | set(refused) == {line for row in PIPELINES.values() for line in row.lines}
    assert refused["dualpipe-v"] == "4 stages need at least 8 microbatches; got 6"
    assert advised_pipeline(ranking).line == "zb-v"


# --- text and pictures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["2F0", "1I3", "1W3", "0B2", "(0F3;7B2)OVERLAP_F_B", "1SEND_F0", "10RECV_B12", "3REDUCE_GRAD", "0UNSHARD"]
)
def test_an_action_reads_back_as_it_was_written(text: str) -> None:
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "F0", "2X0", "2F", "2F-1", "0REDUCE_GRAD1", "(0F3)OVERLAP_F_B", "(0F3;1B2)", "2F0x"]
)
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="an action is written like 2F0"):
        Action.parse(text)


def test_a_schedule_reads_back_as_it_was_written() -> None:
    for line in LINES:
        schedule = build(line, stages=4, microbatches=8)
        for one in (schedule, with_messages(schedule)):
            assert PipelineSchedule.from_csv(line, one.csv()) == one


def test_a_wrong_cell_is_named() -> None:
    with pytest.raises(RequestError, match=r"pipeline 'x', rank 1, step 2: an action is written .* got '1Q0'"):
        PipelineSchedule.from_csv("x", "0F0,0B0\n1F0,1Q0\n")


def test_the_text_diagram_is_to_scale() -> None:
    schedule = build("1f1b", stages=3, microbatches=3)
    assert diagram(schedule, equal_price(schedule)).splitlines() == [
        "rank 0  F0 F1 F2             B0---    B1---    B2---",
        "rank 1     F0 F1       B0--- F2 B1---    B2---",
        "rank 2        F0 B0--- F1 B1--- F2 B2---",
    ]


def test_the_picture_has_a_box_for_every_action() -> None:
    for line in ("1f1b", "zb-v", "dualpipe-v"):
        schedule = build(line, stages=4, microbatches=8)
        root = ET.fromstring(svg(schedule, equal_price(schedule)))
        boxes = [one.text for one in root.iter("{http://www.w3.org/2000/svg}title")]
        actions = [str(single) for _, _, action in schedule.places() for single in action.singles]
        assert sorted(filter(None, boxes)) == sorted(actions)


# --- the command, rows of one's own ---------------------------------------------------------------------------------


def test_the_command_prints_json_and_writes_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, picture = tmp_path / "a.csv", tmp_path / "a.svg"
    words = ["pipeline", "1f1b", "--stages", "4", "--microbatches", "8", "--json"]
    assert main([*words, "--csv", str(table), "--svg", str(picture)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {key: told[key] for key in ("name", "stages", "microbatches", "steps", "seconds")} == {
        "name": "1f1b", "stages": 4, "microbatches": 8, "steps": 22, "seconds": 33.0,
    }  # fmt: skip
    assert told["bubble_share"] == pytest.approx(3 / 11, abs=1e-9) and told["peak_activations"] == [4, 3, 2, 1]
    assert picture.read_text().startswith("<svg")
    assert main(["pipeline", str(table), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert {**again, "name": "1f1b", "closed_form": told["closed_form"]} == told


def test_the_command_ranks_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "--stages", "4", "--microbatches", "8"]) == 0
    out = capsys.readouterr().out
    assert all(line in out for row in PIPELINES.values() for line in row.lines) and "use zb-v" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["1f1c"], "unknown pipeline '1f1c'; did you mean '1f1b'?"),
        (["dualpipe-v", "--stages", "8"], "8 stages need at least 16 microbatches; got 8"),
        (
            ["interleaved-1f1b", "--microbatches", "9"],
            "9 microbatches cannot be divided into equal rounds of 4 or more; use 8 or 12",
        ),
        (["1f1b", "--forward", "1s,2s"], "give one time, or one for each of 4 stages; got 2"),
        (["1f1b", "--activation", "1MB"], "--activation needs a --topology"),
        (["--svg", "x.svg"], "--svg, --csv and --buffers need a schedule"),
        (["nothere.csv"], "cannot read nothere.csv: No such file or directory"),
        (["1f1b", "--weight", "3s"], "--weight is a part of --backward"),
    ],
)
def test_a_wrong_request_is_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", *words]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0," + "x" * 200_000, "pipeline 'table' cannot be read as CSV: field larger than field limit"),
        ("0F0,0B0\n\n1F0,1B0\n", "pipeline 'table': rank 1 has no actions; each line is the row of a rank"),
        ("\n", "pipeline 'table' needs at least 1 rank and 1 microbatch"),
    ],
)
def test_a_file_that_is_no_table_is_one_line(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "table.csv"
    file.write_text(text)
    assert main(["pipeline", str(file)]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_a_table_from_a_file_has_no_formula_whatever_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interleaved table with 4 stages on a rank, in a file that is called like the one with 2."""
    file = tmp_path / "interleaved-1f1b.csv"
    assert main(["pipeline", "interleaved-1f1b:4", "--stages", "2", "--csv", str(file), "--json"]) == 0
    named = json.loads(capsys.readouterr().out)
    assert named["closed_form"] == pytest.approx(named["bubble_share"])
    file.write_text("\ufeff" + file.read_text())  # as a spreadsheet saves it
    assert main(["pipeline", str(file), "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert read["closed_form"] is None and read["seconds"] == named["seconds"]


def test_ranks_of_a_table_may_have_unequal_numbers_of_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "table.csv"
    file.write_text("0F0,1F0,1B0,0B0\n2F0,2B0\n")
    assert main(["pipeline", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds"] == 9.0


def test_too_few_buffers_are_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "1f1b", "--buffers", "0"]) == 1
    assert "deadlock with 0 buffers" in capsys.readouterr().err


def own_row(**changes: object) -> PipelineAlgorithm:
    def rows(ranks: int, microbatches: int) -> list[list[Action]]:
        """One microbatch at a time."""
        return [
            [Action(rank, kind, microbatch) for microbatch in range(microbatches) for kind in "FB"]
            for rank in range(ranks)
        ]

    fields = {"name": "one-by-one", "summary": "", "rows": rows, "lines": ("one-by-one",), "examples": ("one-by-one",)}
    return PipelineAlgorithm(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_row_of_ones_own_is_ranked_with_the_others() -> None:
    offbeat.register_pipeline(own_row())
    try:
        ranking, _ = rank_pipelines(equal_costs(4), 8)
        assert ranking[-1].line == "one-by-one" and ranking[-1].price.bubble_share == pytest.approx(0.75)
        with pytest.raises(RequestError, match="'one-by-one' already exists"):
            offbeat.register_pipeline(own_row())
    finally:
        del PIPELINES["one-by-one"]


def test_a_row_that_is_wrong_is_refused_and_leaves_nothing() -> None:
    def wrong(ranks: int, microbatches: int) -> list[list[Action]]:
        return [[Action(rank, kind, m) for m in range(microbatches) for kind in "BF"] for rank in range(ranks)]

    with pytest.raises(ScheduleError, match="'0B0' comes before 0F0"):
        offbeat.register_pipeline(own_row(rows=wrong))
    assert "one-by-one" not in PIPELINES
