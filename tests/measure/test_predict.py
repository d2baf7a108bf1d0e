"""Predictions from a made-up calibration, and what probes read out of a run's log: round numbers by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offbeat.errors import OffbeatError, RequestError
from offbeat.machine import machine_facts
from offbeat.measure.calibration_bench import MOST_TIMES, probe_of
from offbeat.measure.predictions_bench import PredictionsRequest, order_of, prediction_row, predictions_result
from offbeat.measure.training_bench import Trained
from offbeat.predict.calibration import Calibration, Probe
from offbeat.predict.calibration_match import check, of_another_machine, settings_of
from offbeat.predict.from_calibration import foresee_accuracy, predict
from offbeat.report.benchmark_fields import Row
from offbeat.runs.log import RunLog, Span
from offbeat.simulate.compute import Draws, parse_law
from offbeat.train.config import Config
from offbeat.train.config_files import changed, override, read_recipe
from predict.made_up import MADE_UP
from predict.test_network_calibration import FREE

DIGITS = 1438
EVEN = replace(
    MADE_UP,
    machine={"cores": 8},
    settings=None,
    probes=(
        Probe("ring", 1, 0.011, (0.010,), 0.0, 0.001),
        Probe("ring", 2, 0.013, (0.010,), 0.002, 0.001),
        Probe("async", 1, 0.013, (0.010,), 0.0015, 0.0015),
    ),
)


def config(line: str, learners: int, slow: tuple[str, ...] = (), **train: Any) -> Config:
    base = override(read_recipe("digits-mlp"), {"device": "cpu"})
    return changed(base, {"sync": line, "learners": learners, "slow": slow, "train": {"epochs": 3, **train}})


def test_an_all_reduce_is_predicted_with_its_samples() -> None:
    found = predict(EVEN, config("ring", 2), DIGITS)
    assert found.updates == 3 * 23
    assert found.seconds_per_update == pytest.approx(0.013)
    assert found.samples_per_s == pytest.approx(DIGITS / (23 * 0.013), rel=1e-6)


def test_one_learner_alone_is_predicted_without_a_reduction() -> None:
    found = predict(EVEN, config("ring", 1), DIGITS)
    assert found.seconds_per_update == pytest.approx(0.011)
    assert found.last[2] == 3 * DIGITS


@pytest.mark.parametrize("line", ["async", "k-batch-async:2", "softsync:2"])
def test_where_nobody_waits_learners_work_all_the_time(line: str) -> None:
    found = predict(EVEN, config(line, 4), DIGITS)
    assert found.samples_per_s == pytest.approx(4 * 32 / 0.013, rel=0.12)  # at the ends of epochs they do wait
    assert 0 <= 3 * DIGITS - found.last[2] < 2 * 32  # what is held at the very end is not applied


@pytest.mark.parametrize("line", ["full-sync", "k-sync:2", "k-batch-sync:2", "k-async:2", "adaptive-k:2", "local-sgd:4",
                                  "local-sgd:4,overlap", "downpour:push=2,fetch=2", "async:rate=drift:1",
                                  "halving-doubling"])  # fmt: skip
def test_every_kind_of_strategy_is_predicted(line: str) -> None:
    found = predict(EVEN, config(line, 4), DIGITS)
    assert found.updates > 8 and 0.001 < found.seconds_per_update < 0.1


@pytest.mark.parametrize(("line", "seconds"), [("full-sync", 0.24 + 0.006), ("local-sgd:30", 0.24 + 30 * 0.0031)])
def test_a_training_on_hosts_is_predicted_with_their_links(line: str, seconds: float) -> None:
    """4 MB over 100 MB/s: pushes of three learners share the link of the servers' host, and so do their weights."""
    calibration = replace(EVEN, network=FREE)
    found = predict(calibration, config(line, 4, batch_size=4), DIGITS, hosts=4)
    assert found.seconds_per_update == pytest.approx(seconds, rel=0.05)
    assert predict(calibration, config(line, 4, batch_size=4), DIGITS, hosts=4, spread=True).seconds < found.seconds


def test_delays_are_of_the_same_law_and_not_the_runs_own() -> None:
    own = Draws(parse_law("exp:0.02"), 2, 0)
    foreseen = predict(EVEN, config("ring", 2, ("exp:0.02",)), DIGITS).machine.cluster.draws()
    assert own.take(0) != foreseen.take(0)
    first = predict(EVEN, config("ring", 2, ("exp:0.02",)), DIGITS)
    assert first.seconds == predict(EVEN, config("ring", 2, ("exp:0.02",)), DIGITS).seconds
    assert first.seconds_per_update == pytest.approx(0.013 + 0.03, rel=0.2)
    slow = predict(EVEN, config("ring", 2, ("learner=1,factor=3",)), DIGITS)
    assert slow.seconds_per_update == pytest.approx(0.033)


def test_the_first_epoch_is_left_out_of_what_is_measured() -> None:
    found = trained([])
    assert found.seconds_per_update == pytest.approx(0.1) and found.samples_per_s == pytest.approx(320)
    alone = Trained(config=found.config, log=found.log, metrics=found.metrics[:1], energy=None)
    assert alone.seconds_per_update == pytest.approx(0.1) and alone.samples_per_s == pytest.approx(320)
    later = Trained(config=found.config, log=found.log, energy=None, metrics=(
        {**found.metrics[0], "seconds": 2.5}, found.metrics[1]))  # fmt: skip
    assert later.seconds_per_update == pytest.approx(0.025)


def test_the_first_epoch_is_left_out_as_in_what_is_measured() -> None:
    found = predict(EVEN, config("ring", 2), DIGITS)
    assert found.first[0] == pytest.approx(23 * 0.013) and found.first[1:] == (23, DIGITS)
    alone = predict(EVEN, config("ring", 2, epochs=1), DIGITS)
    assert alone.first == (0.0, 0, 0)


def test_times_of_one_model_say_nothing_of_another() -> None:
    measured = replace(EVEN, settings=settings_of(config("ring", 2)))
    check(measured, config("async", 4))
    for change in ({"servers": 2}, {"data": {"workers": 1}}, {"model": {"options": {"width": 5}}}):
        with pytest.raises(RequestError, match="run offbeat calibrate again"):
            check(measured, changed(config("async", 4), change))
    with pytest.raises(
        RequestError, match="the calibration was measured with precision 'fp32', but this training run has 'bf16'"
    ):
        check(measured, config("async", 4, precision="bf16"))


def test_a_calibration_of_another_machine_is_told() -> None:
    here = machine_facts()
    assert of_another_machine(replace(EVEN, machine=here)) == ""
    told = of_another_machine(replace(EVEN, machine={**here, "cores": here["cores"] + 1}))
    assert (
        told
        == f"the calibration was measured on another machine: {here['cores'] + 1} (cores) instead of {here['cores']}"
    )


def test_the_time_to_an_accuracy_is_foreseen_in_virtual_time() -> None:
    asked = config("ring", 2, epochs=4)
    seconds = foresee_accuracy(EVEN, asked, 0.5)
    assert seconds is not None and seconds == pytest.approx(round(seconds / (23 * 0.013)) * 23 * 0.013)
    assert foresee_accuracy(EVEN, asked, 1.0) is None


# --- probes ------------------------------------------------------------------------------------------


def trained(spans: list[Span]) -> Trained:
    metrics = ({"seconds": 1.0, "update": 10, "samples": 320, "accuracy": 0.5},
               {"seconds": 3.0, "update": 30, "samples": 960, "accuracy": 0.6})  # fmt: skip
    return Trained(config=config("ring", 2), log=RunLog(run={}, spans=tuple(spans)), metrics=metrics, energy=None)


def test_a_probe_of_an_all_reduce_reads_the_reduction_off_who_came_last() -> None:
    spans = []
    for version in range(10):
        start = 0.1 * version
        for learner, computed in ((0, 0.05), (1, 0.06)):
            spans += [
                Span(learner, "compute", start, start + computed, version),
                Span(learner, "wait", start + computed, start + 0.07, version),
                Span(learner, "apply", start + 0.07, start + 0.1, version),
            ]
    found = probe_of(trained(spans), "ring", 2)
    assert found.there_s == pytest.approx(0.01) and found.back_s == pytest.approx(0.03)
    assert sorted(set(found.compute_s))[0] == pytest.approx(0.05) and len(found.compute_s) == 20
    assert found.update_s == pytest.approx(0.1)


def test_a_probe_with_a_server_leaves_out_waits_at_a_rest() -> None:
    spans = [
        Span(0, "compute", 0.0, 1.0, 0),  # before the first evaluation: all is slower there
        Span(0, "wait", 1.0, 2.0, 0),
        Span(0, "evaluate", 2.0, 2.5, 0),
        Span(0, "compute", 2.5, 2.6, 1),
        Span(0, "wait", 2.6, 2.62, 1),
        Span(0, "compute", 2.62, 2.72, 2),
        Span(0, "wait", 2.72, 3.5, 2),
        Span(0, "evaluate", 3.5, 4.0, 2),
        Span(0, "compute", 4.0, 4.1, 3),
    ]
    found = probe_of(trained(spans), "async", 1)
    assert found.there_s + found.back_s == pytest.approx(0.02)
    assert found.compute_s == pytest.approx((0.1, 0.1, 0.1))


def test_a_probe_with_a_server_counts_sending_and_updating_as_the_way_there_and_back() -> None:
    spans = [
        Span(0, "compute", 0.0, 0.1, 0),
        Span(0, "send", 0.1, 0.11, 1),
        Span(0, "wait", 0.11, 0.12, 1),
        Span(0, "apply", 0.12, 0.13, 1),
        Span(0, "wait", 0.13, 0.14, 1),
        Span(0, "compute", 0.14, 0.24, 1),
        Span(0, "wait", 0.24, 0.3, 2),  # others evaluate
        Span(0, "wait", 0.9, 1.0, 2),
        Span(0, "compute", 1.0, 1.1, 2),
    ]
    found = probe_of(trained(spans), "async", 1)
    assert found.there_s + found.back_s == pytest.approx(0.04)


def test_many_times_are_thinned_to_the_same_law() -> None:
    spans = [Span(0, "compute", 0.1 * at, 0.1 * at + 0.00001 * (at + 1), at) for at in range(2000)]
    spans += [Span(0, "wait", span.end_s, 0.1 * span.version + 0.1, span.version) for span in spans]
    found = probe_of(trained(spans), "ring", 1)
    assert len(found.compute_s) == MOST_TIMES
    assert sum(found.compute_s) / MOST_TIMES == pytest.approx(0.00001 * 1000.5)


def test_a_probe_that_computed_nothing_says_so() -> None:
    with pytest.raises(OffbeatError, match="finished no minibatch"):
        probe_of(trained([Span(0, "wait", 0.0, 1.0, 0)]), "async", 1)


# --- predictions ------------------------------------------------------------------------------------------


def row(measured_s: float, predicted_s: float, probe: bool = False) -> Row:
    return prediction_row(config("ring", 2), (measured_s,), predicted_s, probe=probe)


def test_what_was_a_probe_does_not_count() -> None:
    rows = (row(1.0, 1.1), row(1.0, 1.3), row(1.0, 9.0, probe=True))
    found = predictions_result("digits-mlp", {}, 3, rows).json
    assert found["mean_error"] == pytest.approx(0.2) and found["worst_error"] == pytest.approx(0.3)
    assert (found["pairs"], found["pairs_in_order"]) == (0, 0) and found["rows"][0]["probe"] is True


def test_only_pairs_that_differ_enough_have_an_order() -> None:
    rows = [row(1.0, 1.1), row(1.1, 0.9), row(2.0, 1.05)]
    pairs, wrong = order_of(rows)
    assert pairs == 2
    assert wrong == [(rows[0], rows[2])]


def test_a_configuration_for_each_strategy_number_and_delay() -> None:
    base = override(read_recipe("digits-mlp"), {"device": "cpu"})
    request = PredictionsRequest(config=base, calibration=Calibration(
        recipe="x", batch=32, size_bytes=4, machine={}, probes=EVEN.probes))  # fmt: skip
    assert len(list(request.configurations())) == 18
    assert request.calibration.has("ring", 2, True) and not request.calibration.has("ring", 2, False)
    assert request.calibration.has("k-async:1", 1, True) and not request.calibration.has("k-async:2", 4, True)
    with pytest.raises(RequestError, match="nothing to predict"):
        replace(request, lines=("ring",), learners=(2,), slow=("none",))
    with pytest.raises(RequestError, match="twice"):
        replace(request, lines=("ring", "ring"))
    with pytest.raises(RequestError, match="k-sync:4"):
        replace(request, lines=("k-sync:4",))
