"""Strategies from a file outside the package: no other edit, and every reader has them.

`own_strategies.py` has three policies (one names nothing `k`, one uses a timer and cancels, one holds more gradients
than there are learners) and recursive doubling.
"""

from __future__ import annotations

import ast
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat import cli, plugins, schedules
from offbeat.errors import RequestError, ScheduleError
from offbeat.policies import PolicyRow, create, replay
from offbeat.predict.virtual import train_again
from offbeat.runs.log import read_log
from offbeat.runs.run_folder import RunDir
from offbeat.schedules import Algorithm, auto_lines
from offbeat.simulate import server
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.compute import parse_law
from offbeat.simulate.diagnosis import why
from offbeat.strategy import line_up, register_policy, register_schedule, strategies
from offbeat.train.checkpoint import read_weights
from plugins.loading import OWN, untouched
from process.forked_scripts import fork_scripts
from process.test_run import SCRIPT as DIGITS
from schedules.oracle import bytes_sent, is_correct
from train.programs import Blow, Ended, left_files, offbeat, resume_words, train_words

PLUGIN = ("--plugin", str(OWN))
POLICY_LINES = ("pool:6", "metronome:5ms", "hoard:3")
REDUCE = "recursive-doubling"


@pytest.fixture
def loaded() -> Iterator[None]:
    with untouched():
        plugins.add(str(OWN))
        yield


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(list(words))
    said = capsys.readouterr()
    return code, said.out, said.err


# --- listed, proved, simulated, explained ---------------------------------------------------------------------------


def test_each_is_under_60_lines() -> None:
    for node in ast.parse(OWN.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            assert node.end_lineno is not None and node.end_lineno - node.lineno < 60, node.name


def test_a_plugin_is_loaded_by_every_command_and_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with untouched():
        code, out, err = printed(capsys, "strategies", "--json", *PLUGIN)
        rows = {row["name"]: row for row in json.loads(out)["strategies"]}
        assert (code, err) == (0, "")
        assert {"pool", "metronome", "hoard", REDUCE} <= rows.keys()
        assert rows["pool"]["family"] == "parameter server" and rows[REDUCE]["family"] == "all-reduce"
        assert rows["pool"]["examples"] == ["pool:6", "pool:2"]
    assert "pool" not in strategies()


@pytest.mark.usefixtures("loaded")
def test_an_all_reduce_is_proved_priced_ranked_and_considered_by_auto(capsys: pytest.CaptureFixture[str]) -> None:
    for ranks in (1, 2, 3, 5, 8, 12):
        schedule = schedules.build(REDUCE, ranks=ranks)
        schedules.verify(schedule)
        assert is_correct(schedule)
        row = schedules.algorithms()[REDUCE]
        assert row.total_bytes is not None and sum(bytes_sent(schedule, 100)) == row.total_bytes(ranks, 100)
    assert sum(bytes_sent(schedules.build(REDUCE, ranks=8), 100)) > 2 * 100 * 7  # more than the fewest, and legal
    assert REDUCE in auto_lines()
    code, out, _ = printed(capsys, "schedule", "--ranks", "8", "--json")
    assert code == 0 and REDUCE in {row["name"] for row in json.loads(out)["ranking"]}
    code, out, _ = printed(capsys, "simulate", REDUCE, "--learners", "8", "--size", "1MB", "--json")
    assert code == 0 and json.loads(out)["updates"] == 1000


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("line", ["pool:6", "pool:2", "metronome:300ms", "hoard:3"])
def test_a_policy_is_simulated_by_every_loop_and_explained_truly(line: str) -> None:
    cluster = Cluster(learners=4, law=parse_law("exp:1"))
    logs: list[list[dict[str, Any]]] = [[], []]
    quick, plain = (server.Simulation(line, cluster, 100, 0, log.append) for log in logs)
    assert quick.is_plain
    quick.go()
    for _ in plain.turns():
        pass
    assert logs[0] == logs[1] and len(logs[0]) >= 100
    result = plain.result()
    said = why(result)
    assert f"gradients are {result.staleness_mean:.2f} versions old on average" in said
    if line.startswith("pool"):
        assert "no learner waits" in said and result.wait_share == 0
    else:
        assert f"{100 * result.wait_share:.0f} % of the time waiting" in said
    policy = create(line, expect=4)
    assert result.applied / result.updates >= policy.gradients_per_update(4)
    replay({"strategy": line, "expect": 4}, logs[0])


@pytest.mark.usefixtures("loaded")
def test_a_row_joins_the_line_up_that_it_names() -> None:
    assert "pool:4" in line_up("compare", 8) and "pool:4" not in line_up("race", 8)


def test_virtual_training_has_it(tmp_path: Path) -> None:
    words = ["simulate", "pool:6", "--recipe", "digits-softmax", "--learners", "3", "--epochs", "2", "--target", "0.5"]
    ended = offbeat(tmp_path, *words, "--run-dir", "run", "--json", *PLUGIN)
    assert (ended.code, ended.left) == (0, []), ended.err
    assert ended.result["staleness_mean"] == pytest.approx(2 / 6, abs=0.15)


# --- for real -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [*POLICY_LINES, REDUCE])
def test_offbeat_run_has_it_in_every_process(line: str, tmp_path: Path) -> None:
    words = ("run", "--learners", "3", "--sync", line, "--staleness", "keep", *PLUGIN, str(DIGITS), "--epochs", "1")
    code, out, err, left = offbeat(tmp_path, *words, before=fork_scripts)
    assert (code, err, left) == (0, "", [])
    assert "learner 0 | accuracy" in out
    if line != REDUCE:
        assert "45 received, 45 applied" in out or "dropped" in out


def words_of(line: str, *more: str) -> list[str]:
    return [*train_words(line, 3), "--save.every-updates", "2", *PLUGIN, *more]


@pytest.mark.parametrize("line", POLICY_LINES)
def test_it_is_trained_killed_resumed_and_made_again_from_its_log_to_the_same_bits(line: str, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    ended = offbeat(tmp_path / "whole", *words_of(line, "--json"))
    assert (ended.code, ended.left) == (0, []), ended.err
    run = RunDir(tmp_path / "whole" / "run")
    with untouched():
        plugins.add(str(OWN))
        log = read_log(run.log(1))
        assert log.run["plugins"] == [str(OWN)]
        replay(log.run, log.decisions)
        again, weights = train_again(run.path), read_weights(run.weights)
        assert all(torch.equal(again.weights[name], weights[name]) for name in weights)
    (tmp_path / "killed").mkdir()
    blow = Blow(point="served", count=6, learner=1)
    killed = offbeat(tmp_path / "killed", *words_of(line), blow=blow)
    assert killed.code == -signal.SIGKILL and killed.left == []
    goes_on = offbeat(tmp_path / "killed", *resume_words("run", "--json"))  # its folder says which plugin it needs
    assert (goes_on.code, goes_on.left) == (0, []), goes_on.err
    assert goes_on.result["epochs"] == 2 and left_files(tmp_path / "killed") == []


@pytest.mark.parametrize("line", POLICY_LINES)
def test_a_learner_of_it_that_dies_comes_back(line: str, tmp_path: Path) -> None:
    ended = offbeat(tmp_path, *words_of(line, "--json"), blow=Blow(point="served", count=3, learner=1, whom="self"))
    assert (ended.code, ended.left) == (0, []), ended.err
    assert "learner 1 died (SIGKILL) and is restarted" in ended.err


@pytest.mark.parametrize("line", POLICY_LINES)
def test_it_is_stopped_by_a_signal_and_saved(line: str, tmp_path: Path) -> None:
    blow = Blow(point="served", count=4, learner=0, what=signal.SIGTERM, whom="supervisor")
    ended = offbeat(tmp_path, *words_of(line), blow=blow)
    assert (ended.code, ended.left) == (143, []), ended.err
    goes_on = offbeat(tmp_path, *resume_words("run", "--json"))
    assert goes_on.code == 0 and goes_on.result["epochs"] == 2


def cancelled_in(run: RunDir) -> int:
    return sum(command.startswith("cancel") for one in read_log(run.log(1)).decisions for command in one["commands"])


def test_a_late_learner_is_really_cancelled(tmp_path: Path) -> None:
    words = words_of("metronome:5ms", "--slow", "learner=2,factor=20", "--json")
    ended = offbeat(tmp_path, *words)
    assert (ended.code, ended.left) == (0, []), ended.err
    assert cancelled_in(RunDir(tmp_path / "run")) > 0


# --- without it -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """A run with a copy of the plugin, which is gone since."""
    folder = tmp_path_factory.mktemp("moved")
    copy = folder / "mine.py"
    copy.write_text(OWN.read_text(encoding="utf-8"), encoding="utf-8")
    ended = offbeat(folder, *train_words("pool:2", 2), "--plugin", "mine.py", "--json")
    copy.unlink()
    return folder, ended


def test_what_needs_it_says_so_in_one_line(trained: tuple[Path, Ended], tmp_path: Path) -> None:
    folder, ended = trained
    assert ended.code == 0, ended.err
    gone = folder / "mine.py"
    for words in (["replay", str(folder / "run")], ["train", "--resume", str(folder / "run"), "--train.epochs", "3"]):
        refused = offbeat(tmp_path, *words)
        assert refused.code == 2 and refused.err.count("\n") == 1, refused.err
        assert f"plugin '{gone}' cannot be loaded: no such file: {gone}" in refused.err
    log = read_log(RunDir(folder / "run").log(1))
    with pytest.raises(RequestError, match=f"unknown policy 'pool'.*; the run was made with --plugin {gone}"):
        replay(log.run, log.decisions)


def test_a_plugin_that_has_moved_may_be_named(trained: tuple[Path, Ended], tmp_path: Path) -> None:
    folder, _ = trained
    words = ["replay", str(folder / "run"), "--no-accuracy", "--json", *PLUGIN]
    ended = offbeat(tmp_path, *words)
    assert ended.code == 0, ended.err


def test_a_report_of_such_a_run_needs_no_plugin(trained: tuple[Path, Ended], tmp_path: Path) -> None:
    folder, _ = trained
    ended = offbeat(tmp_path, "report", str(folder / "run"), "-o", "page.html")
    assert ended.code == 0 and (tmp_path / "page.html").stat().st_size > 10_000, ended.err


# --- what cannot be registered ----------------------------------------------------------------------------------------


def pool_row(**changes: Any) -> PolicyRow:
    with untouched():
        plugins.add(str(OWN))
        from offbeat.policies import POLICIES

        row = POLICIES["pool"]
    fields = {name: getattr(row, name) for name in ("name", "summary", "create", "params", "examples")}
    return PolicyRow(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "ring", "examples": ("ring",)}, "the strategy 'ring' already exists"),
        ({"name": "auto", "examples": ("auto",)}, "the strategy 'auto' already exists"),
        ({"name": "Pool"}, "lower-case letters"),
        ({"examples": ()}, "has no examples"),
        ({"examples": ("async",)}, "names another strategy"),
        ({"examples": ("pool:0",)}, "size: expected a whole number from 1"),
        ({"create": lambda **options: object()}, "which is not an offbeat.policies.Policy"),
    ],
)
def test_a_row_that_is_wrong_is_refused_and_leaves_nothing(changes: dict[str, Any], says: str) -> None:
    row = pool_row(**changes)
    before = set(strategies())
    with untouched(), pytest.raises(RequestError, match=says):
        register_policy(row)
    assert set(strategies()) == before


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kept_over_restart": ("nothing",)}, "must be in extra_state too"),
        ({"extra_state": ("size", "seen"), "seen": {1, 2}}, "must hold JSON data"),
        ({"extra_state": ("seen",), "seen": {1: 2}}, "must hold JSON data"),
        ({"rule": (1, 0)}, "not a LearnerRule"),
        ({"same_timing_as": lambda self, learners: "nonsense"}, "unknown policy 'nonsense'"),
        ({"max_held": lambda self, learners: 0}, "must be 1 or more"),
    ],
)
def test_a_policy_that_says_what_cannot_be_is_refused(changes: dict[str, Any], says: str) -> None:
    row = pool_row()
    kind = type(row.create(size=2, expect=2))
    wrong = pool_row(create=type("Wrong", (kind,), changes))
    with untouched(), pytest.raises(RequestError, match=says):
        register_policy(wrong)


def test_a_policy_that_does_not_say_what_it_holds_is_refused(tmp_path: Path) -> None:
    text = OWN.read_text(encoding="utf-8").replace("def max_held", "def something_else", 1)
    broken = tmp_path / "broken.py"
    broken.write_text(text, encoding="utf-8")
    with untouched(), pytest.raises(RequestError, match=r"NotImplementedError: Pool does not say how many gradients"):
        plugins.add(str(broken))


def test_an_all_reduce_that_is_wrong_is_refused() -> None:
    with untouched():
        plugins.add(str(OWN))
        row = schedules.algorithms()[REDUCE]
    name = "half-doubling"
    common: dict[str, Any] = {"name": name, "summary": "wrong", "chunks": row.chunks, "examples": (name,)}
    before = set(strategies())
    with pytest.raises(ScheduleError):
        register_schedule(Algorithm(phase=lambda ranks, chunks: row.phase(ranks, chunks)[:-1], **common))
    with pytest.raises(RequestError, match="its row claims"):
        register_schedule(Algorithm(phase=row.phase, total_bytes=lambda ranks, size: 1 + size, **common))
    assert set(strategies()) == before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
        ("x = 1 / 0", r"ZeroDivisionError: division by zero \(.*mine.py:1\)"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit('enough')", "SystemExit: enough"),
    ],
)
def test_a_file_that_does_not_load_is_told_with_its_line(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    with untouched(), pytest.raises(RequestError, match=says):
        plugins.add(str(tmp_path / "mine.py"))


def test_a_path_that_cannot_be_handed_on_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a:b.py").write_text("", encoding="utf-8")
    with untouched(), pytest.raises(RequestError, match="cannot contain ':'"):
        plugins.add(str(tmp_path / "a:b.py"))


def test_a_plugin_is_loaded_once() -> None:
    with untouched():
        plugins.add(str(OWN))
        plugins.add(str(OWN))
        plugins.load_known()
        assert plugins.named() == (str(OWN),)


def test_an_installed_package_is_found_by_its_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "offbeat_plugin_installed.py").write_text(OWN.read_text(encoding="utf-8"), encoding="utf-8")
    about = tmp_path / "installed-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1.0\n", encoding="utf-8")
    points = "[offbeat.strategies]\nmine = offbeat_plugin_installed\nbroken = offbeat_plugin_missing\n"
    (about / "entry_points.txt").write_text(points, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with untouched():
        assert create("pool:2", expect=2).max_held(2) == 2


def test_what_an_installed_package_breaks_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    about = tmp_path / "installed-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1.0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text("[offbeat.strategies]\nmine = offbeat_plugin_gone\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with untouched():
        code, out, err = printed(capsys, "strategies", "k-async")
    assert code == 0 and "k-async" in out
    assert err == "offbeat: entry point 'mine' (offbeat_plugin_gone): No module named 'offbeat_plugin_gone'\n"
