"""A calibration that was made up: what the machine that is made of it must be like."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offbeat.errors import RequestError
from offbeat.predict.calibration import (
    Calibration,
    Delays,
    Probe,
    as_json,
    fit_server_work,
    from_json,
    machine_of,
    read_calibration,
)
from offbeat.simulate import collective, server
from offbeat.simulate.collective import Model
from offbeat.simulate.compute import parse_law
from offbeat.strategy import SERVER
from offbeat.topology import build as topology
from predict.made_up import MADE_UP, TIMES


def mean_s(calibration: Calibration, line: str, learners: int, batch: int = 32) -> float:
    cluster = machine_of(calibration, line, learners, batch=batch).cluster
    assert cluster.cores is not None
    return cluster.cores.law.mean_s


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(as_json(MADE_UP)), encoding="utf-8")
    assert read_calibration(path) == replace(MADE_UP)


def test_a_learner_computes_as_in_the_probe_with_most_that_had_a_core_each() -> None:
    assert mean_s(MADE_UP, "ring", 1) == pytest.approx(0.010)
    assert mean_s(MADE_UP, "ring", 2) == pytest.approx(0.011)
    assert mean_s(MADE_UP, "ring", 8) == pytest.approx(0.011)  # beyond the cores they wait for them, and are no slower
    assert MADE_UP.nearest(SERVER, 4).learners == 1  # the server needs the other core
    assert replace(MADE_UP, machine={"cores": 5}).nearest(SERVER, 4).learners == 4
    assert replace(MADE_UP, machine={"cores": 1}).nearest(SERVER, 4).learners == 1


def test_a_minibatch_of_another_size_takes_what_computing_takes_more_or_less() -> None:
    assert mean_s(MADE_UP, "async", 2, batch=64) == pytest.approx(0.018)
    assert mean_s(MADE_UP, "async", 2, batch=16) == pytest.approx(0.006)
    assert mean_s(MADE_UP, "async", 2, batch=128) == pytest.approx(0.034)
    assert 0 < mean_s(MADE_UP, "async", 2, batch=1) < 0.006


@pytest.mark.parametrize(("learners", "update_s"), [(1, 0.011), (2, 0.014), (4, 0.026)])
def test_a_simulated_probe_takes_as_long_as_it_took(learners: int, update_s: float) -> None:
    machine = machine_of(MADE_UP, "ring", learners)
    found = collective.run(
        "ring",
        machine.cluster,
        topology("uniform", ranks=learners),
        Model.even(layers=1, size_bytes=MADE_UP.size_bytes, forward_share=1 / 3),
        updates=300,
        reduce_s=lambda size: machine.reduce_s,
    )
    assert found.seconds_per_update == pytest.approx(update_s, rel=0.01)


def test_between_probes_an_all_reduce_takes_what_lies_between() -> None:
    two, three, four, five = (machine_of(MADE_UP, "ring", learners).reduce_s for learners in (2, 3, 4, 5))
    assert three == pytest.approx((two + four) / 2)
    assert five == pytest.approx(four + (four - two) / 2)


def test_links_are_fitted_to_the_reductions() -> None:
    rate, latency_s = MADE_UP.port()
    assert rate == pytest.approx(1e9, rel=1e-6)
    assert latency_s == pytest.approx(1e-4, rel=1e-6)
    assert MADE_UP.topology(4).ranks == 4


def test_another_all_reduce_is_priced_against_the_ring() -> None:
    assert MADE_UP.reduction_factor("ring", 4) == 1.0
    assert MADE_UP.reduction_factor("central", 4) > 1.5  # sends 2(P-1) times the gradient through one port
    assert machine_of(MADE_UP, "central", 4).reduce_s > machine_of(MADE_UP, "ring", 4).reduce_s + 0.001


def test_a_gradients_way_with_a_server_is_that_of_the_probe_with_one_learner() -> None:
    cluster = machine_of(replace(MADE_UP, server_work=0.0), "async", 1).cluster
    assert server.run("async", cluster, updates=400).seconds_per_update == pytest.approx(0.013, rel=0.01)


def test_how_much_of_the_way_is_work_is_what_fits_the_crowded_probe() -> None:
    def simulate(tried: Calibration, crowded: Probe) -> float:
        cluster = machine_of(tried, "async", crowded.learners).cluster
        return server.run("async", cluster, updates=300).seconds_per_update

    fitted = fit_server_work(MADE_UP, simulate)
    assert fitted.server_work == pytest.approx(1.0, abs=0.11)  # 10 + 3 ms of work on two cores: 6.5 ms an update
    crowded = Probe("async", 4, 0.0095, TIMES, 0.006, 0.006)
    busier = fit_server_work(replace(MADE_UP, probes=(*MADE_UP.probes[:4], crowded)), simulate)
    assert busier.server_work == pytest.approx(3.0, abs=0.11)  # 10 + 9 ms: the rest goes on behind it


def test_work_for_gradients_is_told_from_work_for_updates_by_the_probe_that_has_fewer() -> None:
    true = replace(MADE_UP, server_work=1.0, update_work=1.0)

    def simulate(tried: Calibration, crowded: Probe) -> float:
        cluster = machine_of(tried, crowded.line, crowded.learners).cluster
        return server.run(crowded.line, cluster, updates=40).seconds_per_update

    made = [probe._replace(update_s=simulate(true, probe)) for probe in (
        MADE_UP.probes[4], Probe("full-sync", 4, 1.0, TIMES, 0.0, 0.0))]  # fmt: skip
    fitted = fit_server_work(replace(MADE_UP, probes=(*MADE_UP.probes[:4], *made)), simulate)
    assert (fitted.server_work, fitted.update_work) == (1.0, 1.0)


def test_delays_are_beside_the_computing() -> None:
    delays = Delays(parse_law("constant:0.1"), (1.0, 3.0))
    cluster = machine_of(MADE_UP, "full-sync", 2, delays=delays).cluster
    slow = server.run("full-sync", cluster, updates=50).seconds_per_update
    assert slow == pytest.approx(0.3 + 0.03 + 0.003, rel=0.02)


def test_learners_share_gpus_where_there_are_some() -> None:
    assert MADE_UP.cores == 2
    assert replace(MADE_UP, machine={"cores": 16, "gpus": 1}).cores == 1


def changed(**changes: Any) -> dict[str, Any]:
    return json.loads(json.dumps(as_json(MADE_UP))) | changes  # type: ignore[no-any-return] # JSON has no types


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "not a calibration"),
        ({"measured": "scaling"}, "not a calibration"),
        (changed(calibration=2), "format 2"),
        (changed(probes=[]), "has no training runs"),
        (changed(probes=changed()["probes"][:1] * 2), "twice"),
        (changed(machine={"cores": "many"}), "whole number"),
        (changed(reductions=[{"learners": 2, "size_bytes": 4, "seconds": 0}]), "above 0"),
        (changed(reductions=[{"learners": 1, "size_bytes": 4, "seconds": 1}]), "with one learner"),
        (changed(overlap_slowdown=10**400), "wrong type"),
        (changed(batch="32"), "whole number of 1 or more"),
        (changed(batch=True), "whole number of 1 or more"),
        (changed(layers=7), "wrong type"),
        (changed(copy=None), "wrong type"),
        (changed(overlap_slowdown=-1), "0 or more"),
        (changed(probes=[{"line": "rumour"}]), "rumour"),
        ({key: value for key, value in changed().items() if key != "pushes"}, "'pushes'"),
    ],
)
def test_what_is_no_calibration_is_refused_with_the_reason(data: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        from_json(data)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"nowhere\.json.*offbeat calibrate"):
        read_calibration(tmp_path / "nowhere.json")


def test_a_family_that_was_not_probed_cannot_be_predicted() -> None:
    with pytest.raises(RequestError, match="no training run with a parameter server"):
        machine_of(replace(MADE_UP, probes=MADE_UP.probes[:3]), "async", 2)


def test_times_scatter_as_they_were_measured() -> None:
    cluster = machine_of(MADE_UP, "async", 1).cluster
    works = cluster.works()
    assert works is not None
    drawn = [works.take(0) for _ in range(2000)]
    assert set(drawn) <= set(TIMES)
    assert statistics.fmean(drawn) == pytest.approx(0.010, rel=0.01)
