"""`train()`: what `offbeat train` does, from Python."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.errors import OffbeatError
from offbeat.processes.torchrun_rank import torchrun_rank
from offbeat.train.config import Config
from offbeat.train.launch import launch, prepare
from offbeat.train.tasks import Task
from offbeat.train.torchrun_learner import learn
from offbeat.train.trainer import Report


def train(
    config: Config,
    task: Task | None = None,
    *,
    run_dir: Path | str | None = None,
    resume: Path | str | None = None,
    hear: Report | None = None,
) -> dict[str, Any]:
    """Train with any strategy, from Python: what `offbeat train` does, with model and data that this program has made.

        from offbeat.train import Config, Task, TrainConfig, train

        task = Task(train=train_set, test=test_set, build=lambda: nn.Linear(4, 2), loss=nn.CrossEntropyLoss())
        config = Config(name="sums", sync="k-sync:2", learners=3, train=TrainConfig(epochs=5, batch_size=32, lr=0.1))
        result = train(config, task)
        print(result["accuracy"], result["run_dir"])

    config      What to train and how. `Config(sync=, learners=, seed=, device=, train=TrainConfig(...), ...)`, or
                `read_recipe("digits-cnn")`; `override(config, {"train.epochs": "5"})` changes fields. `offbeat recipes
                digits-cnn` prints every field, with a line on each.
    task        Data, model and loss; None: those that the configuration names. `build` makes the model, with the same
                weights for the same seed of torch; `loss` gives the mean over the samples.
    run_dir     The output directory; by default a new one under runs/. It must be empty or not exist.
    resume      The directory of an earlier run: go on from its newest checkpoint.
    hear        Called with every record, a mapping with "kind": "progress", "evaluated", "note", "end", ... By default
                one line is printed for each evaluation.

    Returns what `offbeat train --json` prints: "accuracy" and "loss" on the test set, "updates", "epochs", "seconds" of
    training, "samples_per_s", "staleness_mean", "wait_share", "run_dir", "stopped" (whether a signal ended it), ...

    The learners are forked from this process, so model, data and loss may be anything that it has made; do not use
    CUDA before. Under torchrun this process is one of the learners, and all but the first get an empty answer. A
    `RequestError` says what is wrong before anything is started; an `OffbeatError` who failed, and how to go on.
    """
    hear = hear or _print_evaluation
    where, before = (None if one is None else Path(one) for one in (run_dir, resume))
    if torchrun_rank() is not None:
        result = learn(lambda: config, run_dir=where, resume=before, report=hear, task=task)
    else:
        start = prepare(config, run_dir=where, resume=before, task=task, tell=print)
        result = launch(start, hear, lambda name, line: print(f"{name} | {line}", flush=True))
    if result.failed:
        raise OffbeatError(result.failed)
    return result.end


def _print_evaluation(record: Mapping[str, Any]) -> None:
    if record["kind"] == "evaluated":
        right = "" if record["accuracy"] is None else f", accuracy {100 * record['accuracy']:.1f} %"
        print(f"epoch {record['epoch']}: loss {record['loss']}{right}", flush=True)
    elif record["kind"] == "note":
        print(record["text"], flush=True)
