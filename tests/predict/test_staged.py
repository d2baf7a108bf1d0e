"""Learners in stages, predicted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from offbeat.cli import main
from offbeat.errors import RequestError
from offbeat.pipelines.model_graph import GraphNode
from offbeat.predict.calibration import Layer, as_json, machine_of
from offbeat.predict.machines import Machines
from offbeat.predict.staged import stage_learner
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.compute import parse_law
from offbeat.simulate.setup import Network
from offbeat.train.layout import layout_of
from predict.made_up import MADE_UP

EIGHT = [GraphNode("layer", 1.0, 2.0, 100)] * 8


def test_a_pipeline_takes_its_share_of_one_process_and_its_bubbles() -> None:
    found = stage_learner(layout_of("stages=2,microbatches=8"), EIGHT)
    assert found.time_share == pytest.approx(9 / 16)  # half of the work, and (p-1)/m of that in bubbles
    assert (found.layers, found.size_share) == ((4, 4), 0.5)
    assert stage_learner(layout_of("stages=1"), EIGHT).time_share == pytest.approx(1.0)


def test_auto_takes_the_fastest_schedule() -> None:
    fastest = stage_learner(layout_of("stages=4,schedule=auto,microbatches=8"), EIGHT)
    plain = stage_learner(layout_of("stages=4,microbatches=8"), EIGHT)
    assert fastest.time_share < plain.time_share
    with pytest.raises(RequestError, match="has 9 stages, but the model has 8 layers"):
        stage_learner(layout_of("stages=9"), EIGHT)


def test_stages_without_cores_of_their_own_take_turns() -> None:
    layout = layout_of("stages=4,microbatches=64")
    assert stage_learner(layout, EIGHT, cores=2).time_share == 0.5
    assert stage_learner(layout, EIGHT, slower=1.2).time_share > stage_learner(layout, EIGHT).time_share


def test_simulated_updates_take_the_time_of_the_pipeline_and_of_the_largest_part() -> None:
    cluster = Cluster(learners=2, law=parse_law("constant:1"))
    network = Network(size_bytes=80_000_000, layers=8, topology="uniform:bandwidth=100MB/s,latency=0s")
    machines = Machines(cluster=cluster, network=network)
    staged = machines.in_stages(layout_of("stages=2,microbatches=8"))
    result = staged.setup("ring").run(10)
    assert result.seconds_per_update == pytest.approx(9 / 16 + 0.4)  # half of 80 MB, once out and once in
    assert machines.setup("ring").run(10).seconds_per_update > result.seconds_per_update
    with pytest.raises(RequestError, match="--parallel needs an all-reduce like ring; 'async'"):
        staged.setup("async")


def test_a_calibration_knows_the_layers_and_what_small_microbatches_cost() -> None:
    """Of the made-up machine: 32 samples take 10 ms, 16 take 6 ms; layers of 3 and 5 ms, with 1 and 3 MB."""
    calibration = replace(MADE_UP, layers=(*MADE_UP.layers, Layer("4", 0.0, 0.0, 0)))
    assert calibration.slower_by(2) == pytest.approx(1.2)
    machines = Machines(cluster=Cluster(learners=1, law=parse_law("constant:1")), network=Network())
    machines = replace(machines, calibration=calibration)
    staged = machines.in_stages(layout_of("stages=2,schedule=gpipe,microbatches=2")).staged
    assert staged is not None
    assert staged.time_share == pytest.approx(1.2 * (3 + 5 + 5) / 2 / 8)  # both of two microbatches, the slower twice
    assert staged.size_share == 0.75
    plain, ours = (machine_of(calibration, "ring", 1, staged=one) for one in (None, staged))
    assert plain.cluster.cores is not None and ours.cluster.cores is not None
    assert ours.cluster.cores.law.mean_s == pytest.approx(staged.time_share * plain.cluster.cores.law.mean_s)
    assert (plain.cluster.cores.count, ours.cluster.cores.count) == (2, 1)
    assert ours.reduce_s == pytest.approx(0.75 * plain.reduce_s)


def test_the_commands_predict_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "made-up.json"
    path.write_text(json.dumps(as_json(MADE_UP)), encoding="utf-8")
    words = ["simulate", "ring", "--learners", "1", "--parallel", "stages=2,microbatches=2", "--calibration", str(path)]
    assert main([*words, "--updates", "20", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["parallel"]["schedule"] == "1f1b" and told["parallel"]["layers"] == [1, 1]
    assert main(["compare", "--learners", "2", "--compute", "constant:1", "--parallel", "stages=2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["strategy"] for one in told["strategies"]] == ["ring"]
    assert told["parallel"]["microbatches"] == 8
    assert main(["simulate", "ring", "--activation", "1MB"]) == 2
    assert "--activation needs --parallel" in capsys.readouterr().err
