"""What a run leaves when it ends: weights, trace and summary, all of the update of its last checkpoint.

They are written after that checkpoint, the summary last: where it is, all are. A run that is resumed has none of them
until it ends again. One that was killed in between is finished from its checkpoint, without training.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from offbeat.errors import LogError, OffbeatError
from offbeat.runs.disk import replace_file
from offbeat.runs.log import names_in, stream_spans, write_chrome_trace
from offbeat.runs.metrics import mean_delay, reached_at
from offbeat.runs.run_folder import TARGET, RunDir
from offbeat.train.checkpoint import Checkpoint, tidy, update_of_weights, write_weights
from offbeat.train.config import Config
from offbeat.train.run_summary import summary_of

if TYPE_CHECKING:
    from offbeat.train.trainer import TrainingState


def end_record(
    config: Config, run: RunDir, at: TrainingState, last: Mapping[str, Any], *, why: str, failed: str = ""
) -> dict[str, Any]:
    """The last record of a run. `last` is its latest evaluation, `why` it ended before its last epoch, if it did."""
    return {
        "kind": "end",
        "name": config.name,
        "accuracy": last.get("accuracy"),
        "test_samples": last.get("test_samples"),
        "loss": last.get("loss"),
        "warning": last.get("warning"),
        "strategy": config.sync,
        "learners": config.learners,
        "updates": at.update,
        "samples_per_s": last.get("samples_per_s", 0.0),
        "seconds": at.seconds,
        "staleness_mean": at.staleness,
        "delay_mean": mean_delay(at.delays),
        "delays": at.delays,
        "consensus": last.get("consensus"),
        "wait_share": last.get("wait_share", 0.0),
        "sent_bytes": last.get("sent_bytes"),
        "received_bytes": last.get("received_bytes"),
        "epochs": at.epoch,
        "run_dir": str(run.path),
        "lost": run.read_losses(),
        "stopped": bool(why),
        "why": why,
        "failed": failed,  # what makes it a failure all the same
        "process": os.getpid(),
    }


def why_ended(config: Config, checkpoint: Checkpoint, run: RunDir) -> str | None:
    """Whether a run has nothing left to train after this checkpoint, and why; None: it goes on."""
    at = checkpoint.state["standing"]
    if at["epoch"] >= config.train.epochs:
        return ""
    found = [one.get("accuracy") for one in run.read_metrics() if one.get("update", 0) <= checkpoint.update]
    known = [accuracy for accuracy in found if accuracy is not None]
    reached = config.train.stop_at > 0 and reached_at(known, config.train.stop_at) is not None
    return TARGET if reached and at["epoch_end"] else None


def are_complete(run: RunDir, update: int) -> bool:
    """Whether the results are there, and of this update (older weights do not say of which they are)."""
    return run.summary.is_file() and run.weights.is_file() and update_of_weights(run.weights) in (None, update)


def finish(config: Config, run: RunDir, checkpoint: Checkpoint, at: TrainingState, why: str) -> dict[str, Any]:
    """Write the results of a run that was killed after its last checkpoint; its last record."""
    last = checkpoint.state["last"]
    tidy(run.checkpoints, checkpoint.update, config.save.keep)
    write_weights(run.weights, checkpoint.files["weights"], update=checkpoint.update)
    if last and all(one.get("update") != checkpoint.update for one in run.read_metrics()):
        run.add_metrics(last)
    end = end_record(config, run, at, last, why=why)
    conclude(config, run, end)
    return end


def conclude(config: Config, run: RunDir, end: Mapping[str, Any]) -> None:
    """Write the trace and the summary; `OffbeatError` if one of them cannot be."""
    logs = run.logs()
    wrong: OffbeatError | None = None
    if logs and logs[-1].finished:
        try:
            path = logs[-1].path
            learners, hosts = names_in(path), names_in(path, "hosts")
            write_chrome_trace(run.trace, stream_spans(path), name=config.name, learners=learners, hosts=hosts)
        except LogError as error:
            wrong = error
        except OSError as error:
            wrong = OffbeatError(f"cannot write {run.trace}: {error.strerror}")
    try:
        replace_file(run.summary, summary_of(config, end, run.read_metrics()).encode(), durable=True)
    except OSError as error:
        raise OffbeatError(f"cannot write {run.summary}: {error.strerror}") from None
    run.tidy()
    if wrong is not None:
        raise wrong
