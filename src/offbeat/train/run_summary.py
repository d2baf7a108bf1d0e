"""A run's summary in words, for a person who opens its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offbeat.number_format import format_seconds
from offbeat.runs.metrics import format_accuracy, format_traffic, told_consensus, told_delays
from offbeat.runs.run_folder import resume_command
from offbeat.spec import count_of
from offbeat.strategy import SERVER, family_of
from offbeat.train.config import Config


def summary_of(config: Config, end: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> str:
    """Some sentences. What is not known is not said."""
    stages = f" in {count_of(config.layout.stages, 'stage')}" if config.parallel else ""
    strategy = f"{count_of(config.learners, 'learner')}{stages} under '{config.sync}'"
    if family_of(config.sync) == SERVER:
        strategy += f" with {count_of(config.servers, 'server')}"
    lines = [f"{config.name}: {config.model.name} on {config.data.name}, {strategy}, {config.train.precision}."]
    seconds = end.get("seconds", 0.0)
    done = f"{count_of(end.get('epochs', 0), 'epoch')} and {count_of(end.get('updates', 0), 'update')}"
    kind = "simulated training" if end.get("simulated") else "training (evaluation left out)"
    lines.append(f"It completed {done} in {format_seconds(seconds)} of {kind}.")
    accuracy, loss = end.get("accuracy"), end.get("loss")
    if accuracy is not None:
        told = "that is not a finite number" if loss is None else f"of {loss:.4f}"
        right = format_accuracy(accuracy, end.get("test_samples"))
        lines.append(f"Its accuracy on the test set is {right}, with a loss {told}.")
        best = max(metrics, key=lambda record: record.get("accuracy") or 0.0, default=None)
        if best is not None and (best.get("accuracy") or 0.0) > accuracy:
            lines.append(f"The best was {100 * best['accuracy']:.2f} %, after epoch {best['epoch']}.")
    elif loss is not None:
        lines.append(f"On the test set the loss is {loss:.4f}.")
    lines.append(f"It applied {end.get('samples_per_s', 0.0):,.0f} samples per second; learners spent")
    lines[-1] += f" {100 * end.get('wait_share', 0.0):.1f} % of the time waiting."
    if end.get("sent_bytes") is not None:
        told = format_traffic(end["sent_bytes"], end.get("received_bytes") or 0, end.get("wait_share"))
        lines.append(f"Learners {told}.")
    staleness = end.get("staleness_mean")
    if staleness is not None:
        lines.append(f"Gradients were {staleness:.2f} versions old on average when they were applied.")
    delay = told_delays(end.get("delays") or {})
    if delay:
        lines.append(f"Learners computed on while pushes were answered: {delay}.")
    consensus = metrics[-1].get("consensus") if metrics else None
    if consensus is not None:
        lines.append(f"Replicas were {told_consensus(consensus)} before their means were taken.")
    dropped = metrics[-1].get("dropped") if metrics else None
    if dropped:
        told = ", ".join(f"{many} ({why})" for why, many in dropped.items())
        lines.append(f"Samples that were not applied: {told}.")
    for loss in end.get("lost") or ():
        at_least = "" if loss["exact"] else "at least "
        many = at_least + count_of(loss["updates"], "update")
        lines.append(f"A host was lost ({loss['why']}): {many} after update {loss['update']} were lost with it.")
    if end.get("warning"):
        lines.append(f"Warning: {end['warning']}.")
    if end.get("stopped"):
        lines.append(f"It ended before the last epoch: {end.get('why')}.")
        if not end.get("simulated"):
            lines.append(f"Continue with: {resume_command(end.get('run_dir', ''), end.get('why') or '')}")
    return "\n".join(lines) + "\n"
