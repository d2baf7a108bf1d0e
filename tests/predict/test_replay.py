"""Real runs, small ones, replayed: their structure is exact, their durations are a shared machine's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.cli import main
from offbeat.errors import RequestError
from offbeat.machine import machine_facts
from offbeat.predict.calibration import Calibration, Probe, as_json
from offbeat.predict.calibration_match import settings_of
from offbeat.predict.recorded_run import Computed, Recorded, read_recorded
from offbeat.predict.replay import (
    FinishedRun,
    Replay,
    ReplayedStrategy,
    TargetReached,
    notes_of,
    read_run,
    usual_others,
)
from offbeat.predict.replay_advice import advice_on, doubts_on, is_trusted
from offbeat.predict.virtual import train_virtually
from offbeat.runs.log import RunLog, Span
from train.runs import config_of, small_task, trained

SAMPLES = 96
SLOW = ("exp:0.003",)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By strategy, of 4 epochs with 24 minibatches each."""
    folder = tmp_path_factory.mktemp("runs")
    return {line: trained(folder, sync=line, learners=3, slow=SLOW).run.path for line in ("ring", "async", "k-sync:2")}


def replay_of(path: Path, **options: object) -> tuple[FinishedRun, Replay]:
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
    assert any("did not measure communication of an all-reduce" in note for note in ring.notes) and not full.notes
    own_steps = replay("local-sgd:5")  # 24 minibatches an epoch, 15 an update: what is left is pushed at the end
    assert (own_steps.updates, own_steps.samples) == (4 * 2, run.samples) and not own_steps.notes


def test_a_calibration_says_what_the_other_family_takes(runs: dict[str, Path]) -> None:
    probes = [Probe(line, many, 1.0, (0.1,), 2.0, 1.0) for line in ("ring", "async") for many in (1, 3)]
    measured = Calibration(recipe="small", batch=4, size_bytes=8, machine={}, probes=tuple(probes))
    _, replay = replay_of(runs["async"], calibration=measured)
    ring = replay("ring")
    assert 32 * 3.0 < ring.seconds < 32 * 3.0 + replay("full-sync").seconds
    assert ring.notes == (
        "the run did not measure this communication, so the calibration is used: ring takes 3 s per update",
    )
    _, replay = replay_of(runs["ring"], calibration=measured)
    assert 32 * 3.0 < replay("full-sync").seconds < 32 * 3.0 + replay("ring").seconds
    assert "a round trip to the server takes 3 s" in replay("async").notes[0]


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
    with pytest.raises(RequestError, match=r"has no log\.jsonl: the run is still running"):
        read_run(path)
    config = path / "config.json"
    config.write_text(config.read_text().replace('"async"', '"ring"').replace('"equal"', '"3:1"'), encoding="utf-8")
    with pytest.raises(RequestError, match=r"used --train\.split 3:1"):
        read_run(path)
    _, replay = replay_of(runs["ring"])
    with pytest.raises(RequestError, match=r"^'k-sync:9'"):
        replay("k-sync:9")
    with pytest.raises(RequestError, match="did you mean 'async'"):
        replay("asink")


def test_the_command_tells_it_in_a_table_and_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "run")
    words = ["digits-softmax", "--sync", "k-sync:2", "--learners", "3", "--slow", "exp:0.002", "--epochs", "2"]
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
    assert "k-sync:2, the run" in out and "k-sync:2, replayed" in out and "measured" in out
    assert main(["replay", folder, "--no-accuracy", "--target", "0.5"]) == 2
    assert main(["replay", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_the_advice_is_as_sure_as_the_runs_own_replay(runs: dict[str, Path]) -> None:
    run, replay = replay_of(runs["async"])
    own, ring = replace(replay("async"), staleness=run.staleness), replay("ring")
    half, same = replace(ring, seconds=run.seconds / 2), replace(ring, seconds=run.seconds * 0.97)
    near = advice_on(run, own, [half, same], 0.02, None)
    assert "+2.0 %" in near[0] and len(near) == 2
    assert near[1].startswith("ring would have needed")
    assert near[1].endswith(
        "the replay of the run's own strategy differs from the run by 2.0 %, and ring communicates differently"
    )
    assert "would have been at least 5 % faster than async" in advice_on(run, own, [same], 0.02, None)[1]
    off = advice_on(run, own, [half], -0.3, None)
    assert (
        off[-1]
        == "the replay of the run's own strategy differs from the run by 30 %; expect at least this error in the other "
        "numbers"
    )
    assert "at least 60 % faster" in advice_on(run, own, [half], -0.6, None)[1]
    unknown = advice_on(run, own, [half], None, None)
    assert "unknown" in unknown[0] and not any("really ran" in line for line in unknown)
    never = replace(ring, reached=TargetReached(None, 0.5))
    assert advice_on(run, own, [never], 0.02, 0.9)[1:] == [
        "no other strategy would have got to 90.0 % in as many epochs, with this seed"
    ]


def test_a_virtual_run_is_sent_to_the_simulator(runs: dict[str, Path], tmp_path: Path) -> None:
    from offbeat.predict.machines import Clock
    from offbeat.runs.run_folder import RunDir
    from offbeat.simulate.cluster import Cluster
    from offbeat.simulate.compute import parse_law
    from offbeat.train.config_files import write_config

    config = read_run(runs["async"]).config
    run = RunDir(tmp_path)
    write_config(run, config)
    train_virtually(config, Clock(cluster=Cluster(learners=3, law=parse_law("exp:1"))), task=small_task(), run=run)
    with pytest.raises(RequestError, match="use offbeat simulate"):
        read_run(tmp_path)


# --- runs that were written by hand: durations are exact -------------------------------------------------------------


def made(
    line: str, *rows: list[float], back_s: float = 0.0, numbers: tuple[int, ...] = (), cut: tuple[int, ...] = (),
    seconds: float = 100.0, active_s: float = 1e9, **last: float,
) -> FinishedRun:  # fmt: skip
    """Of learners with these minibatches; those of the positions in `cut` were all cancelled."""
    learners = []
    for place, row in enumerate(rows):
        times = np.array(row)
        ways = np.full(len(row), back_s)
        learners.append(Computed(ways, times, (place in cut,) * len(row), ways, np.zeros(1)))
    recorded = Recorded(
        learners=tuple(learners), numbers=numbers or tuple(range(len(rows))), there_s=0.0, active_s=active_s,
        stretches=4, wait_share=0.0, waste_share=0.0, reduces=line == "ring",
    )  # fmt: skip
    metrics = {"update": 48, "samples": 4 * SAMPLES, "seconds": seconds, "staleness": 0.0, "accuracy": 0.914, **last}
    return FinishedRun(config=config_of(sync=line, learners=len(rows)), recorded=recorded, metrics=(metrics, metrics))


def test_the_ends_of_epochs_are_in_every_time() -> None:
    run = made("ring", [1.0], [1.0], back_s=0.5, seconds=100.0, active_s=70.0)
    replay = Replay(run=run, samples=SAMPLES)
    ends_s = 100.0 - 70.0 - 4 * 0.5
    own = replay("ring")
    assert own.seconds == pytest.approx(48 * 1.5 + ends_s)
    reached = replay.train(own, small_task(), 0.01).reached
    assert reached is not None and reached.seconds == pytest.approx(12 * 1.5 + ends_s / 4)  # after one epoch of four


def test_a_way_for_several_minibatches_is_one_for_each_where_each_is_reduced() -> None:
    decisions: list[dict[str, Any]] = [
        {"event": "joined 0 @0.0", "commands": []},
        {"event": "joined 1 @0.0", "commands": ["send 0", "send 1"]},
        {"event": "pushed 0 t1 v0 n16 @4.75", "commands": [], "batch": [[0, 4 * part, 4] for part in range(4)]},
        {"event": "pushed 1 t2 v0 n16 @4.75", "commands": [], "batch": [[0, 4 * part, 4] for part in range(4, 8)]},
    ]
    spans = (Span(0, "compute", 0.5, 4.5, 0), Span(1, "compute", 0.5, 4.5, 0))
    facts = {"strategy": "local-sgd:4", "expect": 2, "simulated": False}
    recorded = read_recorded(RunLog(run=facts, spans=spans, decisions=tuple(decisions)))
    run = replace(made("local-sgd:4", [1.0], [1.0], seconds=1.0), recorded=recorded)
    ring = Replay(run=run, samples=SAMPLES)("ring")
    assert ring.seconds == pytest.approx(48 * (1.0 + 0.5 + 0.25))
    assert any(
        ("assumed to take as long as the run's own communication, 750 ms on average") in note for note in ring.notes
    )


def test_a_learner_of_which_nothing_came_is_named() -> None:
    run = made("async", [1.0], [1.0])
    assert not any("reached the server" in note for note in notes_of(run))
    first, second = run.recorded.learners
    silent = replace(run.recorded, learners=(first, replace(second, sends_s=np.zeros(0))))
    assert any(
        "no gradient of learner 1 reached the server" in note for note in notes_of(replace(run, recorded=silent))
    )
    assert Replay(run=replace(run, recorded=silent), samples=SAMPLES)("async").seconds > 0


def test_one_learner_reduces_with_nobody_and_it_is_said() -> None:
    run = made("ring", [1.0], [2.0], back_s=0.5)
    alone = Replay(run=run, samples=SAMPLES, learners=1)
    ring = alone("ring")
    assert ring.seconds == pytest.approx(96 * 1.0) and ring.wait_share == 0.0
    assert ring.notes == ("an all-reduce with 1 learner is replayed without communication",)
    assert alone("async").seconds == pytest.approx(96 * 1.5)
    itself = made("ring", [1.0], back_s=0.5)  # it had been one: what it took between minibatches is its own
    assert Replay(run=itself, samples=SAMPLES, learners=1)("ring").seconds == pytest.approx(96 * 1.5)
    served = made("async", [1.0], [2.0], back_s=0.5)
    assert Replay(run=served, samples=SAMPLES, learners=1)("ring").seconds == pytest.approx(96 * 1.0)
    for many, expected in ((1, 96 * (1.0 + 0.75)), (2, 96 * 1.0)):
        measured = Calibration(
            recipe="small", batch=4, size_bytes=8, machine={}, probes=(Probe("ring", many, 1.0, (0.1,), 0.5, 0.25),)
        )
        replay = Replay(run=served, samples=SAMPLES, learners=1, calibration=measured)
        assert replay("ring").seconds == pytest.approx(expected)


def test_whose_times_fewer_learners_take_is_said_by_number() -> None:
    run = made("async", [4.0], [1.0], [1.0], numbers=(0, 2, 5))
    (note,) = notes_of(run, 1)
    assert note.startswith(
        "the times of learner 0 are used, whose minibatches took 2.00 times the average, those of learners 2, 5 are not"
    )
    (note,) = notes_of(made("async", [1.0], [1.0], [1.0]), 2)
    assert note.startswith("the times of learners 0, 1 are used, those of learner 2 are not")
    assert not notes_of(run, 3)
    cut = made("k-sync:1", [4.0], [1.0], [1.0], numbers=(0, 2, 5), cut=(1, 2))
    assert any("most minibatches of learners 2, 5 were cancelled" in note for note in notes_of(cut))


def test_learners_that_fetch_beside_computing_have_no_ways_and_it_is_said() -> None:
    told = "the time to wait for weights was not recorded"
    assert any(told in note for note in notes_of(made("downpour:push=1,fetch=2", [1.0])))
    assert not any(told in note for note in notes_of(made("local-sgd:2", [1.0])))


def played(line: str, seconds: float, reached: TargetReached | None = None, staleness: float = 3.0) -> ReplayedStrategy:
    return ReplayedStrategy(
        strategy=line, learners=4, seconds=seconds, updates=48, samples=384, staleness=staleness, wait_share=0.0,
        waste_share=0.0, reached=reached,
    )  # fmt: skip


def test_accuracies_are_no_advice_where_the_runs_own_replay_has_another() -> None:
    run = made("async", [1.0], seconds=1.0, staleness=3.0)
    other = played("k-async:2", 0.95, TargetReached(0.5, 0.92))
    there, not_there = played("async", 1.0, TargetReached(1.0, 0.914)), played("async", 1.0, TargetReached(None, 0.894))
    assert doubts_on(run, there, 0.914) == [] and is_trusted(run, there, 0.0, 0.914)
    assert advice_on(run, there, [other], 0.0, 0.914)[1].startswith(
        "k-async:2 would have needed 500 ms to 91.4 % instead of 1 s"
    )
    (why,) = doubts_on(run, not_there, 0.914)
    assert why.startswith("the replay of the run's own strategy reached 89.4 %, but the run reached 91.4 %")
    assert not is_trusted(run, not_there, 0.0, 0.914) and is_trusted(run, not_there, 0.0, None)
    advice = advice_on(run, not_there, [other], 0.0, 0.914)
    assert advice[1] == "no other strategy would have been at least 5 % faster than async for 384 samples"
    faster = replace(other, seconds=0.8)
    assert "needed 800 ms for 384 samples instead of 1 s" in advice_on(run, not_there, [faster], 0.0, 0.914)[1]
    assert doubts_on(run, there, 0.95) == []  # neither got there
    (why,) = doubts_on(run, played("async", 1.0, TargetReached(0.9, 0.951)), 0.95)  # only the replay did
    assert "reached 95.1 %, but the run reached 91.4 %" in why


@pytest.mark.parametrize(
    ("was", "replayed", "sure"),
    [(3.0, 3.7, True), (3.0, 4.9, False), (3.0, 2.0, False), (0.2, 0.6, True), (0.0, 0.6, False)],
)
def test_accuracies_are_no_advice_where_gradients_are_otherwise_old(was: float, replayed: float, sure: bool) -> None:
    run = made("async", [1.0], seconds=1.0, staleness=was)
    own = played("async", 1.0, TargetReached(1.0, 0.914), replayed)
    assert is_trusted(run, own, 0.0, 0.914) == is_trusted(run, own, 0.0, None) == sure
    told = f"the replay of the run's own strategy has a staleness of {replayed:.1f}, but the run had {was:.1f}: "
    assert doubts_on(run, own, 0.914) == ([] if sure else [told + "accuracies are not compared"])
    advice = advice_on(run, own, [played("ring", 0.95, TargetReached(0.5, 0.92))], 0.0, 0.914)
    assert ("to 91.4 %" in advice[1]) == sure and ("for 384 samples" in advice[1]) != sure


def test_a_time_to_an_accuracy_is_as_sure_as_that_of_the_runs_own_replay() -> None:
    run = made("async", [1.0], seconds=1.0, staleness=3.0)
    own, other = played("async", 1.0, TargetReached(0.6, 0.914)), played("ring", 0.95, TargetReached(0.7, 0.92))
    assert advice_on(run, own, [other], 0.0, 0.914)[1].endswith("at least 40 % faster than async to 91.4 %")
    assert not is_trusted(run, own, 0.11, 0.914) and not is_trusted(run, own, None, 0.914)


def test_half_a_point_below_an_accuracy_is_about_there() -> None:
    run = made("async", [1.0], seconds=1.0, staleness=3.0)
    own = played("async", 1.0, TargetReached(None, 0.909))
    assert doubts_on(run, own, 0.914) == []
    near, far = played("ring", 0.9, TargetReached(None, 0.91)), played("k-sync:2", 0.9, TargetReached(None, 0.908))
    assert advice_on(run, own, [near, far], 0.0, 0.914)[1:] == [
        "no other strategy would have got to 91.4 % in as many epochs, with this seed",
        "within half a point of 91.4 %, with one seed: async (90.9 %), ring (91.0 %)",
    ]
    there = played("k-async:2", 0.5, TargetReached(0.5, 0.92))
    advice = advice_on(run, played("async", 1.0, TargetReached(1.0, 0.92)), [near, there], 0.0, 0.914)
    assert advice[1].startswith("k-async:2 would have needed 500 ms") and advice[2].endswith("seed: ring (91.0 %)")


def test_no_line_that_is_left_to_choose_is_another_one_by_another_name() -> None:
    assert usual_others("ssp:1", 1) == ["ring", "full-sync", "async"]
    assert usual_others("ssp:1", 2) == ["ring", "full-sync", "k-batch-sync:2", "k-batch-async:2", "async"]
    for learners, k in ((3, 2), (4, 2), (8, 4)):
        with_k = [f"{name}:{k}" for name in ("k-sync", "k-batch-sync", "k-async", "k-batch-async")]
        assert usual_others("async", learners) == ["ring", "full-sync", *with_k]


def test_a_strategy_that_does_not_fit_fewer_learners_is_left_out_and_it_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = digits(tmp_path, capsys)
    assert main(["replay", folder, "--learners", "1", "--sync", "async", "--no-accuracy", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["strategy"] for one in told["replayed"]] == ["async"]
    assert told["error"] is None and told["trusted"] is False
    assert any(note.startswith("k-sync:2, the strategy of the run, is not replayed") for note in told["notes"])
    assert told["advice"][1].startswith("async would have needed ") and told["advice"][1].endswith(" samples")
    assert main(["replay", folder, "--learners", "1", "--sync", "async", "full-sync", "--target", "0.01"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "k-sync:2, the run" in out and "k-sync:2, replayed" not in out and "the fastest of these" in out
    assert "each accuracy is from one training with one seed, on 359 test samples" in out
    assert main(["replay", folder, "--learners", "1", "--sync", "k-sync:2", "--no-accuracy"]) == 2
    assert "k-sync:2" in capsys.readouterr().err


def test_a_calibration_is_of_what_the_run_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = digits(tmp_path, capsys)
    probes = tuple(Probe(line, 1, 1.0, (0.1,), 0.5, 0.25) for line in ("ring", "async"))
    settings = settings_of(read_run(Path(folder)).config)
    measured = Calibration(
        recipe="digits-softmax", batch=32, size_bytes=8, machine=machine_facts(), probes=probes, settings=settings
    )
    path = tmp_path / "calibration.json"
    words = ["replay", folder, "--sync", "async", "--no-accuracy", "--json", "--calibration", str(path)]

    def write(one: Calibration) -> None:
        path.write_text(json.dumps(as_json(one)), encoding="utf-8")

    write(measured)
    assert main(words) == 0
    assert not any("another machine" in note for note in json.loads(capsys.readouterr().out)["notes"])
    write(replace(measured, machine={**measured.machine, "cores": 4321}))
    assert main(words) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any("the calibration was measured on another machine: 4321 (cores)" in note for note in notes)
    write(replace(measured, settings={**settings, "model": "resnet"}))
    assert main(words) == 2
    assert "the calibration was measured with model 'resnet'" in capsys.readouterr().err


def digits(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The folder of a run of two epochs, k-sync:2 with 3 learners."""
    words = ["digits-softmax", "--sync", "k-sync:2", "--learners", "3", "--slow", "exp:0.002", "--epochs", "2"]
    assert main(["train", *words, "--run-dir", str(folder / "run"), "--quiet"]) == 0
    capsys.readouterr()
    return str(folder / "run")
