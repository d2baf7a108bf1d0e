"""Real runs, small ones, replayed: their structure is exact, their durations are a shared machine's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from offbeat.cli import main
from offbeat.commands.replay import advice_on
from offbeat.errors import RequestError
from offbeat.simulate.calibration import Calibration, Probe
from offbeat.train.replayed import Reached, RealRun, Replay, notes_of, read_run
from offbeat.train.virtual import train_virtually
from train.runs import small_task, trained

SAMPLES = 96
SLOW = ("exp:0.003",)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By strategy, of 4 epochs with 24 minibatches each."""
    folder = tmp_path_factory.mktemp("runs")
    return {line: trained(folder, sync=line, learners=3, slow=SLOW).run.path for line in ("ring", "async", "k-sync:2")}


def replay_of(path: Path, **options: object) -> tuple[RealRun, Replay]:
    run = read_run(path)
    return run, Replay(run=run, samples=SAMPLES, **options)  # type: ignore[arg-type]  # of a test, by name


@pytest.mark.parametrize("line", ["ring", "async", "k-sync:2"])
def test_a_run_replayed_under_its_own_strategy_is_nearly_itself(runs: dict[str, Path], line: str) -> None:
    run, replay = replay_of(runs[line])
    own = replay(line)
    assert run.samples == 4 * SAMPLES
    assert own.samples == run.samples and own.learners == 3
    assert own.updates == run.updates or line == "k-sync:2"  # which epoch's last minibatches meet is chance
    assert 0.5 < own.seconds / run.seconds < 1.5
    assert replay(line) == own
    assert not own.notes


def test_other_strategies_need_what_their_rules_say(runs: dict[str, Path]) -> None:
    run, replay = replay_of(runs["async"])
    assert run.updates == 96
    full, ring, batches = (replay(line) for line in ("full-sync", "ring", "k-batch-async:2"))
    assert full.updates == ring.updates == 4 * 8 and batches.updates == 48
    assert full.staleness == ring.staleness == 0.0 and batches.staleness > 0
    assert full.seconds > batches.seconds  # nobody waits there
    assert full.wait_share > batches.wait_share
    assert any("all-reduce was not in the recording" in note for note in ring.notes) and not full.notes
    assert any("not simulated" in note for note in replay("local-sgd:2").notes)


def test_a_calibration_says_what_the_other_family_takes(runs: dict[str, Path]) -> None:
    probes = [Probe(line, many, 1.0, (0.1,), 2.0, 1.0) for line in ("ring", "async") for many in (1, 3)]
    measured = Calibration(recipe="small", batch=4, size_bytes=8, machine={}, probes=tuple(probes))
    _, replay = replay_of(runs["async"], calibration=measured)
    ring = replay("ring")
    assert 32 * 3.0 < ring.seconds < 32 * 3.0 + replay("full-sync").seconds
    assert ring.notes == (
        "communication was not in the recording, and is by the calibration: ring takes 3 s an update",
    )
    _, replay = replay_of(runs["ring"], calibration=measured)
    assert 32 * 3.0 < replay("full-sync").seconds < 32 * 3.0 + replay("ring").seconds
    assert "a gradient's way to the server and back takes 3 s" in replay("async").notes[0]


def test_more_learners_take_the_recorded_ones_in_turn_and_it_is_said(runs: dict[str, Path]) -> None:
    run, replay = replay_of(runs["async"], learners=6)
    own = replay("async")
    assert own.learners == 6 and own.updates == run.updates
    assert own.seconds < 0.9 * replay_of(runs["async"])[1]("async").seconds
    assert any("3 learners were recorded" in note for note in notes_of(run, 6)) and not notes_of(run)


def test_what_was_cancelled_is_told_and_drawn_by_the_seed(runs: dict[str, Path]) -> None:
    run, replay = replay_of(runs["k-sync:2"])
    assert run.recorded.cancelled > 0
    assert notes_of(run)[0].startswith(
        f"{run.recorded.cancelled} of {run.recorded.minibatches} minibatches were cancelled"
    )
    assert replay("async").waste_share == 0.0 < replay("k-sync:2").waste_share
    other = Replay(run=run, samples=SAMPLES, seed=1)
    assert other("full-sync").seconds != replay("full-sync").seconds


def test_the_time_to_an_accuracy_is_that_of_a_training_on_the_same_clock(runs: dict[str, Path]) -> None:
    run, replay = replay_of(runs["ring"])
    task = small_task()
    own = replay.train(replay("ring"), task, 0.01)
    assert own.reached is not None and own.reached.seconds is not None
    whole = replay("ring").seconds
    assert 0 < own.reached.seconds < 0.6 * whole  # the first of four epochs has it
    never = replay.train(replay("async"), task, 1.0).reached
    assert never is not None and never.seconds is None and 0 < never.best < 1
    assert run.reached_s(0.0) == run.metrics[0]["seconds"] and run.reached_s(1.1) is None


def test_what_cannot_be_replayed_is_refused_in_a_line(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no config\.json"):
        read_run(tmp_path)
    path = trained(tmp_path, sync="async", train={"epochs": 1}).run.path
    log = path / "log.jsonl"
    text = log.read_text(encoding="utf-8")
    (path / "log.2.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(RequestError, match="was resumed"):
        read_run(path)
    (path / "log.2.jsonl").unlink()
    log.write_text(text.replace('"simulated":false', '"simulated":true'), encoding="utf-8")
    with pytest.raises(RequestError, match=r"virtual time.*offbeat simulate"):
        read_run(path)
    log.write_text("nonsense", encoding="utf-8")
    with pytest.raises(RequestError, match="not JSON"):
        read_run(path)
    log.unlink()
    with pytest.raises(RequestError, match=r"has no log\.jsonl: the run has not ended"):
        read_run(path)
    config = path / "config.json"
    config.write_text(config.read_text().replace('"async"', '"ring"').replace('"equal"', '"3:1"'), encoding="utf-8")
    with pytest.raises(RequestError, match="split updates by '3:1'"):
        read_run(path)
    _, replay = replay_of(runs["ring"])
    with pytest.raises(RequestError, match=r"^'k-sync:9'"):
        replay("k-sync:9")
    with pytest.raises(RequestError, match="did you mean 'async'"):
        replay("asink")


def test_the_command_tells_it_in_a_table_and_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "run")
    words = ["digits-softmax", "--sync", "k-sync:2", "--learners", "3", "--slow", "exp:0.002", "--epochs", "1"]
    assert main(["train", *words, "--run-dir", folder, "--quiet"]) == 0
    capsys.readouterr()
    assert main(["replay", folder, "--sync", "async", "ring", "--target", "0.2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["replayed"][0]["strategy"] == "k-sync:2"
    assert {one["strategy"] for one in told["replayed"]} == {"k-sync:2", "async", "ring"}
    assert told["error"] == pytest.approx(told["replayed"][0]["seconds"] / told["run"]["seconds"] - 1)
    assert all(one["target_seconds"] is not None for one in told["replayed"])
    assert told["run"]["cancelled"] > 0 and any("Kaplan-Meier" in note for note in told["notes"])
    assert main(["replay", folder, "--no-accuracy"]) == 0
    out = capsys.readouterr().out
    assert "k-sync:2, as it was" in out and "k-sync:2, replayed" in out and "measured" in out
    assert main(["replay", folder, "--no-accuracy", "--target", "0.5"]) == 2
    assert main(["replay", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_the_advice_is_as_sure_as_the_runs_own_replay(runs: dict[str, Path]) -> None:
    run, replay = replay_of(runs["async"])
    own, ring = replay("async"), replay("ring")
    half, same = replace(ring, seconds=run.seconds / 2), replace(ring, seconds=run.seconds * 0.97)
    near = advice_on(run, own, [half, same], 0.02, None)
    assert "+2.0 %" in near[0] and len(near) == 2
    assert near[1].startswith("ring would have needed")
    assert near[1].endswith("the replay of what really ran is 2.0 % off, but had other communication")
    assert "none of the others would have been clearly faster than async" in advice_on(run, own, [same], 0.02, None)[1]
    off = advice_on(run, own, [half], -0.3, None)
    assert off[-1] == "the run's own replay is 30 % off: do not trust the other numbers further than that"
    assert "clearly faster" in advice_on(run, own, [half], -0.6, None)[1]
    unknown = advice_on(run, own, [half], None, None)
    assert "not known" in unknown[0] and not any("really ran" in line for line in unknown)
    never = replace(ring, reached=Reached(None, 0.5))
    assert advice_on(run, own, [never], 0.02, 0.9)[1] == "none of the others would have got to 90.0 % in as many epochs"


def test_a_virtual_run_is_sent_to_the_simulator(runs: dict[str, Path], tmp_path: Path) -> None:
    from offbeat.simulate.cluster import Cluster
    from offbeat.simulate.compute import parse_law
    from offbeat.train.rundir import RunDir
    from offbeat.train.virtual import Clock

    config = read_run(runs["async"]).config
    run = RunDir(tmp_path)
    run.write_config(config)
    train_virtually(config, Clock(cluster=Cluster(learners=3, law=parse_law("exp:1"))), task=small_task(), run=run)
    with pytest.raises(RequestError, match="offbeat simulate gives it exactly"):
        read_run(tmp_path)
