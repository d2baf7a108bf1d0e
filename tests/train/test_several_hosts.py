"""`offbeat train` on several hosts: as on one, to the same weights, and without a file system in common.

OFFBEAT_MATRIX=1 adds strategies. Each start of torchrun takes its time.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
import safetensors.torch

from lab.fixture import StartLab, wait_for
from offbeat.cli import main
from offbeat.errors import RequestError
from offbeat.processes.torchrun_rank import torchrun_rank
from offbeat.report.build import build
from offbeat.report.page_model import Table, TimelineChart
from offbeat.runs.log import read_log
from offbeat.runs.run_folder import RunDir
from offbeat.runs.run_record import read_run
from offbeat.train.config import Config
from offbeat.train.config_files import as_json, changed, override, read_recipe
from offbeat.train.tasks import task_of
from offbeat.train.torchrun_learner import check_code, check_hosts, check_ranks, check_trust, host_names
from train.oracle import Recipe, distance, expected, sgd
from train.programs import left_files, offbeat, resume_words, weights
from train.runs import trained
from train.several_hosts import finish, folder_of, start, wait_for_file, words_for

OPEN = {"OFFBEAT_NETWORK_TRUST": "open"}
AHEAD_S = 1000  # of which the clock of host 1 is
MATRIX = bool(os.environ.get("OFFBEAT_MATRIX"))


def with_key(folder: Path) -> dict[str, str]:
    main(["keys", str(folder / "run.key")])
    return {"OFFBEAT_KEY": str(folder / "run.key")}


def tracebacks(told: Sequence[str]) -> list[str]:
    """Those of ours: torchrun's agents, which do not wait for each other when they end, log their own."""
    lines = [line for text in told for line in text.splitlines() if "Traceback" in line]
    return [line for line in lines if "torch/distributed/elastic" not in line]


@pytest.mark.parametrize("sync", ["hierarchical", *(["ring", "halving-doubling", "native"] if MATRIX else [])])
def test_two_hosts_train_as_one_process_on_the_union_batch(start_lab: StartLab, sync: str, tmp_path: Path) -> None:
    """Everything is written once, on the first host, and on its clock: that of host 1 is ahead. There is a key, but for
    Gloo."""
    lab = start_lab(hosts=2)
    given = OPEN if sync == "native" else with_key(tmp_path)
    options = {"train.epochs": 4, "train.scaling": "none", "train.lr": 0.1, "save.every-updates": 0}
    words = words_for(sync, **options, **{"model.name": "softmax"})
    told = finish(start(lab, tmp_path, words, given, before={1: ["unshare", "--time", "--monotonic", str(AHEAD_S)]}))
    assert not tracebacks(told)
    assert len(re.findall(r"^accuracy ", told[0], re.MULTILINE)) == 1 and "accuracy" not in told[1]
    assert list(folder_of(tmp_path, 1).iterdir()) == []
    assert left_files(folder_of(tmp_path, 0)) == []

    task = task_of(override(read_recipe("digits-softmax"), {}))
    recipe = Recipe(batch=4 * 64, epochs=4, seed=0, least=4, rate=lambda update: 0.1, optimizer=sgd())
    alone, updates = expected(task, recipe)
    assert f"{updates} updates" in told[0] and updates >= 20
    ours = safetensors.torch.load_file(folder_of(tmp_path, 0) / "run" / "weights.safetensors")
    assert distance(ours, alone) < 1e-6
    check_hosts_are_told(folder_of(tmp_path, 0) / "run", counted=sync != "native")


def test_three_hosts_send_their_updates_to_each_other(start_lab: StartLab, tmp_path: Path) -> None:
    lab = start_lab(hosts=3)
    options = {"train.epochs": 3, "save.every-updates": 0, "model.name": "softmax"}
    told = finish(start(lab, tmp_path, words_for("all-to-all:async", **options), with_key(tmp_path), ranks=1))
    assert not tracebacks(told)
    last = RunDir(folder_of(tmp_path, 0) / "run").read_metrics()[-1]
    assert last["samples"] == 3 * 1438 and not last["dropped"]
    assert last["consensus"]["mean"] > 0 and last["staleness"] > 0
    assert last["accuracy"] > 0.8


@pytest.mark.skipif(not MATRIX, reason="another start of torchrun: make test-matrix")
def test_a_slow_host_gets_fewer_samples_and_the_weights_are_those_of_one_process(
    start_lab: StartLab, tmp_path: Path
) -> None:
    lab = start_lab(hosts=2)
    options = {"train.epochs": 4, "train.scaling": "none", "train.lr": 0.1, "save.every-updates": 0}
    slow = [word for learner in (2, 3) for word in ("--slow", f"learner={learner},factor=5")]
    words = [*words_for("ring", **options, **{"model.name": "softmax"}), "--train.split", "auto", *slow]
    told = finish(start(lab, tmp_path, words, OPEN))[0]
    share = re.search(r"% between the learners \(host0 (\d+) %, host1 (\d+) %\), by measured speed", told)
    assert share is not None and int(share[1]) > int(share[2]), told
    task = task_of(override(read_recipe("digits-softmax"), {}))
    alone, _ = expected(task, Recipe(batch=4 * 64, epochs=4, seed=0, least=4, rate=lambda update: 0.1, optimizer=sgd()))
    ours = safetensors.torch.load_file(folder_of(tmp_path, 0) / "run" / "weights.safetensors")
    assert distance(ours, alone) < 1e-6


def check_hosts_are_told(run: Path, *, counted: bool) -> None:
    """In the log, the metrics, the trace and the report."""
    log = read_log(RunDir(run).log(1))
    assert log.run["hosts"] == ["host0", "host0", "host1", "host1"]
    clock = log.run["clocks"]["host1"]
    assert 0 < clock["uncertainty_s"] < 5 and abs(clock["offset_s"] - AHEAD_S) <= clock["uncertainty_s"]
    ends: defaultdict[int, list[float]] = defaultdict(list)  # an all-reduce ends on all at about the same time
    for span in log.spans:
        if span.what == "wait":
            ends[span.version].append(span.end_s)
    assert len(ends) >= 20 and all(len(some) == 4 and max(some) - min(some) < 5 for some in ends.values())
    last = RunDir(run).read_metrics()[-1]
    assert [(host["name"], host["learners"]) for host in last["hosts"]] == [("host0", 2), ("host1", 2)]
    if counted:
        assert {(link["source"], link["target"]) for link in last["links"]} == {("host0", "host1"), ("host1", "host0")}
        assert all(link["bytes"] > 0 for link in last["links"]) and sum(link["share"] for link in last["links"]) == 1
    trace = json.loads(RunDir(run).trace.read_text())["traceEvents"]
    assert [one["args"]["name"] for one in trace if one["name"] == "process_name"] == [
        "digits-softmax, host0",
        "digits-softmax, host1",
    ]
    record = read_run(run)
    rows = [item for section in build([record]).sections for item in section.items if isinstance(item, TimelineChart)]
    assert rows[0].learners == ("host0: learner 0", "host0: learner 1", "host1: learner 2", "host1: learner 3")
    assert "times of other hosts are right to" in rows[0].note
    section = next(section for section in build([record]).sections if section.key == "hosts")
    tables = {item.key: item.rows for item in section.items if isinstance(item, Table)}
    assert [row[1:3] for row in tables["hosts"]] == [("host0", 2), ("host1", 2)]
    assert len(tables.get("links", ())) == (2 if counted else 0)


def test_a_killed_host_ends_the_run_and_resumed_it_comes_to_the_same_bits(start_lab: StartLab, tmp_path: Path) -> None:
    """The same as forked learners on one host that nobody has disturbed."""
    lab = start_lab(hosts=2)
    key = with_key(tmp_path)
    marker = tmp_path / "reached"
    model = {"model.name": "train.several_hosts:waits"}
    words = [*words_for("ring", **model), "--set", f"model.options.marker={marker}"]
    job = start(lab, tmp_path, words, key)
    wait_for_file(marker)
    lab.kill(1)
    assert job[0].wait(timeout_s=60) != 0
    assert re.search(r"rank [01]: other learners are gone: .*rank [23] \(host1, 10.0.0.2\)", job[0].output), job[
        0
    ].output
    lab.restore(1)
    resumed = finish(start(lab, tmp_path, resume_words(), key))
    assert "resumed from update-00000003" in resumed[0], resumed[0]
    assert list(folder_of(tmp_path, 1).iterdir()) == []

    (tmp_path / "forked").mkdir()
    forked = [*words[:2], "--learners", "4", *words[2:]]
    assert offbeat(tmp_path / "forked", *forked).code == 0
    assert weights(folder_of(tmp_path, 0)) == weights(tmp_path / "forked")


@pytest.mark.skipif(not MATRIX, reason="torchrun waits half a minute for a host that is lost: make test-matrix")
@pytest.mark.parametrize("fault", ["kill", "cut"])
def test_a_lost_host_is_done_without_and_every_sample_of_the_epoch_counts(
    start_lab: StartLab, fault: str, tmp_path: Path
) -> None:
    """In the first epoch, after a checkpoint; within 90 s training goes on, with the two learners that are left."""
    lab = start_lab(hosts=2)
    marker = tmp_path / "reached"
    words = words_for("ring", **{"model.name": "train.several_hosts:waits"})
    words += ["--set", f"model.options.marker={marker}"]
    job = start(lab, tmp_path, words, with_key(tmp_path), elastic="1:2")
    wait_for_file(marker)
    lost_s = time.monotonic()
    (lab.kill if fault == "kill" else lab.cut)(1)
    wait_for(job[0], "resumed from update-00000003", 90)
    assert time.monotonic() - lost_s < 90
    finish(job[:1])
    assert "the run continues with 2 learners instead of 4" in job[0].output, job[0].output
    metrics = RunDir(folder_of(tmp_path, 0) / "run").read_metrics()
    assert [one["samples"] for one in metrics] == [1438, 2 * 1438] and metrics[-1]["dropped"] == {}
    # 3 updates of 4 learners, then those of 2 for the rest of the epoch
    assert metrics[0]["update"] == 3 + math.ceil((1438 - 3 * 4 * 64) / (2 * 64))


@pytest.mark.skipif(not MATRIX, reason="torchrun takes its time to end: make test-matrix")
def test_a_signal_on_one_host_saves_and_ends_all(start_lab: StartLab, tmp_path: Path) -> None:
    """Rank 1 signals its torchrun, which asks the learners of host 0 to end; those of host 1 are not asked."""
    lab = start_lab(hosts=2)
    key = with_key(tmp_path)
    strikes = [f"model.options.marker={tmp_path / 'struck'}", "model.options.signal_to_parent=15"]
    words = words_for("ring", **{"model.name": "train.programs:strikes", "train.epochs": 4})
    job = start(lab, tmp_path, [*words, *(word for one in strikes for word in ("--set", one))], key)
    assert job[0].wait(timeout_s=120) != 0 and job[1].wait(timeout_s=120) == 0  # torchrun's own codes
    assert "stopped   asked to stop" in job[0].output, job[0].output
    finish(start(lab, tmp_path, resume_words(), key))
    (tmp_path / "forked").mkdir()
    forked = [*words[:2], "--learners", "4", *words[2:], "--set", strikes[0]]
    assert offbeat(tmp_path / "forked", *forked).code == 0
    assert weights(folder_of(tmp_path, 0)) == weights(tmp_path / "forked")


@pytest.mark.parametrize("there", [None, *(["100"] if MATRIX else [])])
def test_a_host_without_the_data_is_named_by_all(start_lab: StartLab, there: str | None, tmp_path: Path) -> None:
    lab = start_lab(hosts=2)
    (folder_of(tmp_path, 0) / "points.txt").touch()
    if there is not None:
        (folder_of(tmp_path, 1) / "points.txt").write_text(there)
    data = {"data.name": "train.several_hosts:local_points", "model.name": "train.runs:mlp"}
    words = words_for("ring", **data)
    told = finish(start(lab, tmp_path, words, OPEN, ranks=1), code=1)
    missing = "host1: data 'train.several_hosts:local_points' failed when called with no options"
    other = "rank 1 has 100 training samples on host1, rank 0 has 96 on host0; put the same data on every host"
    for text in told:
        assert (missing if there is None else other) in text, text


# --- without hosts --------------------------------------------------------------------------------------------------


def test_what_cannot_be_across_hosts_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OFFBEAT_KEY", "OFFBEAT_SECRET", "OFFBEAT_NETWORK_TRUST"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(RequestError, match="'k-sync:3' uses a parameter server, which torchrun cannot start"):
        check_hosts("k-sync:3")
    with pytest.raises(RequestError, match="there is no key: run 'offbeat keys FILE'"):
        check_trust()
    with pytest.raises(RequestError, match="Gloo, which neither encrypts nor checks who connects"):
        check_hosts("native")
    monkeypatch.setenv("OFFBEAT_NETWORK_TRUST", "open")
    check_trust()
    check_hosts("ring")
    check_hosts("native")


def test_what_ranks_of_torchrun_cannot_be_is_refused_with_what_to_do() -> None:
    check_ranks(changed(Config(), {"learners": 4}), 4)
    with pytest.raises(RequestError, match="torchrun started 4 learners; remove --learners 2"):
        check_ranks(changed(Config(), {"learners": 2}), 4)
    with pytest.raises(RequestError, match=r"'stages=2' does not run under torchrun; start .* by itself on one host"):
        check_ranks(changed(Config(), {"parallel": "stages=2", "learners": 2}), 4)


def test_what_nobody_has_signed_does_not_say_which_code_is_executed() -> None:
    def absent() -> Config:
        raise RequestError("no such folder")

    own = override(read_recipe("digits-mlp"), {"data.name": "my:data", "train.loss": "my:loss"})
    check_code(as_json(own), lambda: own)
    check_code(as_json(read_recipe("digits-mlp")), absent)
    evil = changed(own, {"data": {"name": "os:system", "options": {"command": "true"}}})
    for settings in (lambda: own, absent):
        with pytest.raises(RequestError, match="which the command of this host does not name; use a key"):
            check_code(as_json(evil), settings)


def test_on_one_host_hierarchical_without_a_shape_has_that_of_its_learners(tmp_path: Path) -> None:
    outcome = trained(tmp_path, sync="hierarchical", train={"epochs": 1})
    assert outcome.end["strategy"] == "hierarchical:1x2,inner=direct,parts=4"


def test_hosts_of_one_name_have_numbers() -> None:
    cards = [{"host": host, "hostname": name} for host, name in (("x", "a"), ("x", "a"), ("y", "b"), ("z", "b"))]
    assert host_names(cards) == ("a", "a", "b-1", "b-2")


def test_what_torchrun_says_is_read_once() -> None:
    assert torchrun_rank({"RANK": "0", "WORLD_SIZE": "2"}) is None
    told = {
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "2",
    }
    found = torchrun_rank(told)
    assert found is not None and found == (3, 4, 2, 2, 0)
