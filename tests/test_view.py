"""Exact lines for short stories, and the live part at several widths. The clock is turned by hand."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from draw_view import draw, state_after, story
from offbeat.commands.progress import Progress
from offbeat.commands.view import (
    View,
    evaluation_line,
    heading_lines,
    live_lines,
    sparkline,
    summary,
    to_text,
    view_for,
)

BEGIN: dict[str, Any] = {
    "kind": "begin",
    "name": "digits-cnn",
    "strategy": "k-async:2",
    "learners": 4,
    "servers": 1,
    "epochs": 12,
    "epoch": 0,
    "samples": 1000,
    "parameters": 12345,
    "device": "cpu",
    "precision": "fp32",
    "run_dir": "runs/digits",
    "notes": ["learning rate 0.05 x 2 = 0.1"],
    "resumed": None,
}
EVALUATED: dict[str, Any] = {
    "kind": "evaluated",
    "epoch": 3,
    "update": 270,
    "accuracy": 0.953,
    "loss": 0.15,
    "train_loss": 0.21,
    "seconds": 4.2,
    "samples_per_s": 5400.0,
    "wait_share": 0.12,
    "staleness": 1.03,
    "rate": 0.1,
}
END: dict[str, Any] = {
    "kind": "end",
    "accuracy": 0.951,
    "loss": 0.07,
    "seconds": 9.8,
    "updates": 1540,
    "samples_per_s": 5321.0,
    "staleness_mean": 1.0,
    "wait_share": 0.1,
    "run_dir": "runs/digits",
    "strategy": "k-async:2",
    "learners": 4,
    "stopped": False,
    "why": None,
}
EVALUATION_LINE = (
    "epoch  3/12  update 270  loss 0.1500  accuracy 95.3 %  5,400 samples/s  waiting 12 %  staleness 1.03  4.2 s"
)


def progress(learner: int, samples: int, **more: Any) -> dict[str, Any]:
    told = {"epoch": 0, "loss": 0.5, "compute_s": samples / 100, "wait_s": samples / 300, "version": 1}
    return {"kind": "progress", "learner": learner, "samples": samples, **told, **more}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Told:
    """A plain view and what it wrote."""

    def __init__(self, *, quiet: bool = False, encoding: str = "utf-8") -> None:
        self.clock = Clock()
        self.bytes = io.BytesIO()
        self.stream = io.TextIOWrapper(self.bytes, encoding=encoding)
        self.view = view_for(self.stream, live=False, quiet=quiet, clock=self.clock)

    def hear(self, *records: dict[str, Any]) -> list[str]:
        for record in records:
            self.view.hear(record)
        return self.lines()

    def lines(self) -> list[str]:
        return self.bytes.getvalue().decode(self.stream.encoding).splitlines()


# --- plain lines --------------------------------------------------------------------------------------------------


def test_a_run_in_plain_lines() -> None:
    told = Told()
    told.hear(BEGIN, progress(0, 10), EVALUATED, {"kind": "saved", "update": 270, "path": "runs/digits/update-270"})
    told.hear({"kind": "note", "text": "slow disk"}, {"kind": "died", "learner": 1, "text": "killed"})
    told.view.print_line("learner 2", "hello\n")
    told.hear(END)
    told.view.close()
    told.view.close()
    assert told.lines() == [
        "digits-cnn  k-async:2  4 learners  1 server  cpu fp32  12,345 parameters  12 epochs of 1,000 samples  "
        "runs/digits",
        "note: learning rate 0.05 x 2 = 0.1",
        EVALUATION_LINE,
        "note: slow disk",
        "learner 1 died: killed",
        "learner 2 | hello",
        "accuracy   95.1 %, best 95.3 % after epoch 3",
        "loss       0.0700",
        "time       9.8 s, 1,540 updates",
        "speed      5,321 samples/s",
        "waiting    10 % of the learners' time",
        "staleness  1.00 on average",
        "saved      update 270, runs/digits/update-270",
        "run        runs/digits",
    ]


def test_a_long_epoch_says_at_most_every_ten_seconds_how_far_it_is() -> None:
    told = Told()
    told.hear(BEGIN)
    for _ in range(100):  # 25 s
        told.clock.now += 0.25
        for learner in range(4):
            told.hear(progress(learner, int((told.clock.now - 100) * 5)))
    assert told.lines()[2:] == [
        "epoch  1/12  at 19 %  loss 0.5000  20 samples/s  waiting 25 %  left 9:56",
        "epoch  1/12  at 39 %  loss 0.5000  20 samples/s  waiting 25 %  left 9:43",
    ]


def test_an_evaluation_puts_off_the_next_progress_line() -> None:
    told = Told()
    told.hear(BEGIN)
    told.clock.now += 9
    told.hear(EVALUATED)
    told.clock.now += 9
    assert told.hear(progress(0, 10, epoch=3))[2:] == [EVALUATION_LINE]


def test_numbers_that_are_missing_are_left_out() -> None:
    told = Told()
    bare = {**EVALUATED, "accuracy": None, "staleness": None}
    del bare["wait_share"]
    assert told.hear(BEGIN, bare)[-1] == "epoch  3/12  update 270  loss 0.1500  5,400 samples/s  4.2 s"
    told.hear({**END, "accuracy": None, "staleness_mean": None, "samples_per_s": None, "wait_share": None})
    told.view.close()
    assert [line.split()[0] for line in told.lines()[3:]] == ["loss", "time", "run"]


def test_quiet_leaves_what_learners_say_deaths_and_the_summary() -> None:
    told = Told(quiet=True)
    told.hear(BEGIN, EVALUATED, {"kind": "note", "text": "x"}, {"kind": "died", "learner": 1, "text": "killed"})
    told.view.print_line("learner 0", "mine")
    told.hear({**END, "accuracy": 0.96})
    told.view.close()
    assert told.lines()[:3] == ["learner 1 died: killed", "learner 0 | mine", "accuracy   96.0 %"]


def test_a_run_that_broke_off_says_how_far_it_came() -> None:
    told = Told()
    told.hear(BEGIN, progress(0, 10, epoch=4))
    told.clock.now += 7
    told.view.close()
    assert told.lines()[2:] == ["stopped  in epoch 5 of 12, after 7.0 s", "run      runs/digits"]


def test_a_view_that_heard_nothing_says_nothing() -> None:
    told = Told()
    told.view.close()
    assert told.lines() == []


def test_why_a_run_was_stopped_comes_first() -> None:
    told = Told()
    told.hear(BEGIN, {**END, "stopped": True, "why": "Ctrl-C"})
    told.view.close()
    assert told.lines()[2] == "stopped    Ctrl-C"
    assert told.lines()[-1] == "resume     offbeat train --resume runs/digits"


def test_what_cannot_be_encoded_is_escaped() -> None:
    told = Told(encoding="ascii")
    told.view.print_line("learner 0", "α")
    assert told.lines() == ["learner 0 | \\u03b1"]


def test_of_a_bar_drawn_over_and_over_only_the_last_state_is_printed() -> None:
    told = Told()
    told.view.print_line("learner 0", " 10 %\r 20 %\r 30 %\r\n")
    assert told.lines() == ["learner 0 |  30 %"]


def test_names_of_learners_are_as_wide_as_the_widest() -> None:
    told = Told()
    told.hear({**BEGIN, "learners": 12})
    told.view.print_line("learner 2", "x")
    assert told.lines()[-1] == "learner 2  | x"


def test_a_resumed_run_says_from_where() -> None:
    assert "resumed from update-00000120" in Told().hear({**BEGIN, "epoch": 6, "resumed": "update-00000120"})[0]


# --- the state ----------------------------------------------------------------------------------------------------


def test_rates_and_shares_are_those_of_the_last_seconds() -> None:
    clock = Clock()
    state = Progress(clock)
    state.hear(BEGIN)
    state.hear(progress(0, 0, compute_s=0.0, wait_s=0.0))
    clock.now += 20
    state.hear(progress(0, 20, compute_s=20.0, wait_s=0.0))
    clock.now += 5
    state.hear(progress(0, 70, compute_s=21.0, wait_s=4.0))
    assert state.samples_per_s == 10.0
    assert state.wait_share == 0.8
    clock.now += 6
    assert state.samples_per_s == 0.0, "nothing was heard for longer than the window"


def test_the_loss_goes_half_way_in_a_half_life_and_a_nan_is_forgotten() -> None:
    clock = Clock()
    state = Progress(clock)
    state.hear(BEGIN)
    state.hear(progress(0, 1, loss=1.0))
    clock.now += 0.5
    state.hear(progress(0, 2, loss=0.0))
    assert state.loss == 0.5
    state.hear(progress(0, 3, loss=float("nan")))
    assert str(state.loss) == "nan"
    state.hear(progress(0, 4, loss=0.25))
    assert state.loss == 0.25


def test_what_is_done_keeps_to_the_bounds_of_the_epoch_and_never_falls() -> None:
    state = Progress(Clock())
    state.hear({**BEGIN, "epochs": 4})
    seen = []
    for record in (
        progress(0, 600),
        progress(1, 900),  # 1500 computed, 500 of them for nothing
        {**EVALUATED, "epoch": 1},
        progress(0, 800, epoch=1),
        progress(0, 5, epoch=1),  # it was started again
        {**END, "stopped": False},
    ):
        state.hear(record)
        seen.append(round(state.done * 4000))
    assert seen == [600, 1000, 1000, 1200, 1205, 4000]


def test_a_resumed_run_begins_where_it_was_and_reckons_the_rest_from_its_own_pace() -> None:
    clock = Clock()
    state = Progress(clock)
    state.hear({**BEGIN, "epoch": 6})
    assert (state.done, state.epoch, state.left_s) == (0.5, 7, None)
    state.hear(progress(0, 0, epoch=6))
    clock.now += 10
    state.hear(progress(0, 500, epoch=6))
    assert state.left_s == 110.0


def test_a_learner_that_died_is_alive_again_when_it_tells_something() -> None:
    state = Progress(Clock())
    state.hear(BEGIN)
    state.hear({"kind": "died", "learner": 1, "text": "killed"})
    assert state.rows[1].died
    state.hear(progress(1, 5))
    assert not state.rows[1].died


def test_the_trail_of_the_loss_stays_short() -> None:
    state = state_after(story(11.5))
    assert 32 <= len(state.trail) < 128
    assert state.trail[0] > state.trail[-1]


def test_kinds_that_are_not_known_are_passed_over() -> None:
    assert len(Told().hear(BEGIN, {"kind": "weather"})) == 2


def test_the_sparkline_falls_with_the_loss() -> None:
    assert sparkline([8.0, 4.0, 2.0, 1.0], 4) == "█▆▃▁"
    assert sparkline([4.0, 4.0, 1.0, 1.0], 2) == "█▁"
    assert sparkline([1.0, 1.0], 9) == "▁▁"
    assert sparkline([1.0], 9) == ""


# --- the live part ------------------------------------------------------------------------------------------------


def drawn(state: Progress, width: int, height: int = 50) -> list[str]:
    return [to_text(line, width).plain for line in live_lines(state, width, height)]


def state_of(*records: dict[str, Any]) -> Progress:
    state = Progress(Clock())
    for record in records:
        state.hear(record)
    return state


@pytest.mark.parametrize("width", [1, 20, 40, 59, 60, 80, 100, 120, 250])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    for learners in (0, 1, 4, 12):
        huge = [progress(learner, 10**12, loss=1e30) for learner in range(learners)]
        records = [{**BEGIN, "learners": learners, "name": "深層学習" * 9}, *huge, EVALUATED]
        for state in (Progress(Clock()), state_of(*records), state_of(*records, END), state_after(story(1.5))):
            lines = [to_text(line, width) for line in live_lines(state, width, 50)]
            lines += [to_text(line, width) for line in heading_lines(state.begin, width)]
            assert all(line.cell_len <= width for line in lines)
            # rich, too, makes one line of each.
            console = Console(width=width, file=io.StringIO(), force_terminal=True)
            assert len(console.render_lines(view_of(state), pad=False)) <= max(len(lines), 1)


def view_of(state: Progress) -> Any:
    class Drawn:
        def __rich_console__(self, console: Console, options: Any) -> Any:
            yield from (to_text(line, options.max_width) for line in live_lines(state, options.max_width, 50))

    return Drawn()


def test_at_eighty_columns_everything_that_matters_is_there() -> None:
    text = "\n".join(drawn(state_after(story()), 80))
    for word in ("63 %", "epoch  8/12", "left", "accuracy", "best", "samples/s", "waiting", "staleness", "share"):
        assert word in text, word
    assert [line.split()[0] for line in text.splitlines()[-6:]] == ["2", "3", "4", "5", "6", "7"]


def test_what_was_sent_stands_beside_the_accuracy() -> None:
    sent = {**EVALUATED, "sent_bytes": 3_000_000}
    assert evaluation_line(sent, 12) == EVALUATION_LINE.replace("4.2 s", "sent 3 MB  4.2 s")
    text = "\n".join(drawn(state_of(BEGIN, progress(0, 5), sent), 120))
    assert "sent" in text and "3 MB" in text
    assert "sent" not in "\n".join(drawn(state_of(BEGIN, progress(0, 5), {**EVALUATED, "sent_bytes": None}), 120))


def test_a_narrow_terminal_keeps_what_matters_most() -> None:
    text = "\n".join(drawn(state_after(story()), 40))
    assert "accuracy" in text
    assert "samples/s" in text
    assert "staleness" not in text


def test_of_many_learners_eight_are_shown() -> None:
    lines = drawn(state_of({**BEGIN, "learners": 12}, *(progress(learner, 5) for learner in range(12))), 80)
    rows = [line.split()[0] for line in lines if re.match(r" +\d+  [━┅]", line)]
    assert rows == [str(learner) for learner in range(8)]
    assert "and 4 more" in lines


@pytest.mark.parametrize("height", [12, 16, 24, 30])
def test_on_a_low_terminal_the_lists_are_shorter(height: int) -> None:
    state = state_of({**BEGIN, "learners": 12}, *(progress(learner, 5) for learner in range(12)), *[EVALUATED] * 9)
    assert len(drawn(state, 80, height)) < height
    assert any("accuracy" in line for line in drawn(state, 80, height))


def test_one_learner_has_no_share() -> None:
    lines = drawn(state_of({**BEGIN, "learners": 1}, progress(0, 5)), 100)
    assert not any("share" in line for line in lines)
    assert sum("━" in line for line in lines) == 2, "the title of the bar, and the learner"


def test_columns_without_any_number_are_left_out() -> None:
    text = "\n".join(drawn(state_of(BEGIN, progress(0, 5), {**EVALUATED, "accuracy": None, "staleness": None}), 120))
    for word in ("accuracy", "best", "staleness", "None"):
        assert word not in text, word
    assert "train loss" in text


def test_a_bar_shows_the_share_of_waiting_without_colours() -> None:
    line = next(line for line in drawn(state_of(BEGIN, progress(2, 300)), 120) if line.startswith("      2"))
    assert line.count("━") == 30
    assert line.count("┅") == 10


# --- the live view on a terminal ----------------------------------------------------------------------------------


def terminal(width: int = 80, encoding: str = "utf-8") -> tuple[View, io.BytesIO]:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding=encoding, write_through=True)
    console = Console(file=stream, force_terminal=True, width=width, height=40, highlight=False, color_system=None)
    return view_for(console, live=True, clock=Clock()), written


def plain(written: io.BytesIO, encoding: str = "utf-8") -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.getvalue().decode(encoding)).replace("\r", "")


def test_after_the_close_heading_evaluations_and_summary_remain() -> None:
    shown, written = terminal()
    shown.hear(BEGIN)
    shown.hear(progress(0, 100))
    shown.print_line("learner 0", "mine")
    shown.hear(EVALUATED)
    shown.hear(END)
    before = len(written.getvalue())
    shown.close()
    shown.close()
    left = written.getvalue()[before:].decode()
    after = left[left.rindex("\x1b[2K") :]  # the live part was erased up to here
    for text in ("digits-cnn  k-async:2", "accuracy  samples/s", "95.3 %", "5,321 samples/s", "runs/digits"):
        assert text in after, text
    assert "elapsed" not in after
    assert left.count("5,321 samples/s") == 1
    assert "\x1b[?25h" in left, "the cursor is back"


@pytest.mark.parametrize("width", [40, 80, 120])
def test_text_of_the_user_is_no_markup(width: int) -> None:
    shown, written = terminal(width)
    shown.hear({**BEGIN, "name": "[red]x[/red]", "notes": ["[bold]y"], "run_dir": "[/]"})
    shown.print_line("learner 2", "[bold]z[/bold] [/nothing] :smile:")
    shown.hear({"kind": "note", "text": "[blink]n"})
    shown.hear({"kind": "died", "learner": 1, "text": "[/oops]"})
    shown.hear({**END, "stopped": True, "why": "[link=w]", "run_dir": "[/]"})
    shown.close()
    text = plain(written)
    for said in ("[red]x[/red]", "[bold]y", "learner 2 | [bold]z[/bold] [/nothing] :smile:", "[blink]n", "[link=w]"):
        assert said in text, said
    assert "learner 1 died: [/oops]" in text


def test_what_would_move_the_cursor_is_not_passed_on() -> None:
    shown, written = terminal()
    shown.hear({**BEGIN, "name": "a\nb\x1b[2J"})
    shown.print_line("learner 0", "\x1b[5Aup\x07")
    shown.hear({"kind": "died", "learner": 1, "text": "Traceback:\n  \x1b[2Jline 1"})
    shown.close()
    assert b"\x1b[5A" not in written.getvalue()
    assert b"\x1b[2J" not in written.getvalue()
    assert "learner 0 | up" in plain(written)
    assert "learner 1 died: Traceback:\n  line 1\n" in plain(written)


def test_a_terminal_without_unicode_gets_letters() -> None:
    shown, written = terminal(encoding="ascii")
    shown.hear({**BEGIN, "name": "α"})
    shown.hear(progress(0, 300))
    shown.print_line("learner 0", "β")
    shown.close()
    text = plain(written, "ascii")
    assert "\\u03b1" in text
    assert "learner 0 | \\u03b2" in text


def test_a_stream_serves_as_well_as_a_console(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    shown = view_for(stream, live=True)
    shown.hear(BEGIN)
    shown.hear(EVALUATED)
    shown.close()
    assert "95.3 %" in stream.getvalue()
    console = Console(file=io.StringIO(), width=30)
    lines = view_for(console, live=False)
    lines.hear(BEGIN)
    assert isinstance(console.file, io.StringIO)
    assert cell_len(console.file.getvalue().splitlines()[0]) > 30, "plain lines stay whole"


def test_the_picture_loads_nothing_and_is_the_same_each_time() -> None:
    svg = draw(state_after(story()), "a title")
    assert "font-face" not in svg
    assert "url(http" not in svg
    assert "k-async:2" in svg
    assert svg == draw(state_after(story()), "a title")


def test_joules_are_in_the_summary_when_they_were_measured() -> None:
    def last_lines(joules: float | None, *missing: str) -> list[str]:
        told = Told()
        sources = [{"name": "package-0", "kind": "rapl", "joules": joules}] if joules is not None else []
        told.hear(BEGIN, END, {"kind": "energy", "joules": joules, "sources": sources, "not_measured": missing})
        told.view.close()
        return [line for line in told.lines() if line.startswith("energy")]

    assert last_lines(None, "RAPL") == []
    assert last_lines(0.0) == ["energy     0.0 J by package-0"]
    assert last_lines(812.4) == ["energy     812 J by package-0"]
    assert last_lines(1234.0, "GPUs") == ["energy     1.2 kJ by package-0, not measured: GPUs"]
    assert last_lines(25.26e6) == ["energy     25.3 MJ by package-0"]


def test_who_leaves_a_view_sees_no_summary() -> None:
    told = Told()
    told.hear(BEGIN, END)
    before = told.lines()
    told.view.close(leaving=True)
    told.view.close()
    assert told.lines() == before


@pytest.mark.parametrize("late", [False, True], ids=["all-reduce", "hosts that have joined servers"])
def test_rows_are_by_host_with_the_links_between_them_and_the_slow_one(late: bool) -> None:
    links = [{"source": "a", "target": "b", "bytes": 3_000_000, "share": 0.75}]
    slow = ["b receives at 7 MB/s, the others at 36 MB/s"]
    hosts = ["a", "b", "a"]
    begin = {**BEGIN, "learners": 3} | ({} if late else {"hosts": hosts})
    state = state_of(begin, *(progress(learner, 10) for learner in range(3)))
    state.hear({**EVALUATED, "links": links, "slow_links": slow} | ({"learner_hosts": hosts} if late else {}))
    drawn = [to_text(line).plain for line in live_lines(state, 100, 40)]
    at = next(number for number, line in enumerate(drawn) if line.split()[:2] == ["host", "learner"])
    assert [line.split()[:2] for line in drawn[at + 1 : at + 4]] == [["a", "0"], ["a", "2"], ["b", "1"]]
    assert "a to b 3 MB (75 %)" in drawn and slow[0] in drawn
    state.hear(END)
    assert {("links", "a to b 3 MB (75 %)"), ("slow link", slow[0])} <= set(summary(state))
