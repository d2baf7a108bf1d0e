"""offbeat evaluate: the weights of a run, on its test set."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from offbeat.commands.base import Command, answer, facts, option
from offbeat.errors import RequestError
from offbeat.processes.loading import loading
from offbeat.runs.metrics import format_accuracy
from offbeat.runs.run_folder import RunDir


def _run(given: argparse.Namespace) -> None:
    from offbeat.train.config_files import read_config

    run = RunDir(given.run)
    config = read_config(run)
    with loading():
        import torch

        from offbeat.train.checkpoint import load, read_weights
        from offbeat.train.launch import check_device
        from offbeat.train.precision import Precision
        from offbeat.train.tasks import task_of
        from offbeat.train.trainer import device_of, evaluate, mover

    name = given.device or config.device
    check_device(name)
    device = device_of(name, 0)
    task = task_of(config)
    if given.checkpoint is not None:
        names = sorted(path.name for path in run.checkpoints.glob("update-*"))
        if given.checkpoint not in names:
            raise RequestError(
                f"{run.path} has no checkpoint '{given.checkpoint}'; it has {', '.join(names) or 'none'}"
            )
        weights = load(run.checkpoints / given.checkpoint).files["weights"]
    elif run.weights.exists():
        weights = read_weights(run.weights)
        _check_newest(run)
    else:
        raise RequestError(
            f"{run.path} has no weights.safetensors: the run has not ended; finish it with offbeat train --resume "
            f"{run.path}, or choose a checkpoint with --checkpoint"
        )
    model = task.build()
    try:
        model.load_state_dict(dict(weights))
    except RuntimeError as error:
        raise RequestError(f"the weights do not fit the model of {run.path}: {str(error).splitlines()[0]}") from None
    torch.set_num_threads(config.train.threads)  # as the run had: other sums have other last bits
    precision = Precision(config.train.precision, device)
    loss, accuracy, tests, _ = evaluate(model.to(device), task, precision, mover(device), workers=config.data.workers)
    samples = len(task.test)  # type: ignore[arg-type]  # a map-style set has a length: the task was checked
    known_loss = loss if math.isfinite(loss) else None
    told = {"run_dir": str(run.path), "samples": samples, "loss": known_loss, "accuracy": accuracy}
    right = [] if accuracy is None else [("accuracy", format_accuracy(accuracy, tests))]
    answer(given, told, lambda out: facts(out, [*right, ("loss", f"{loss:.4f}"), ("samples", f"{samples:,}")]))


def _check_newest(run: RunDir) -> None:
    """A word where there are checkpoints of later updates than the weights."""
    from offbeat.train.checkpoint import update_of_weights

    update = update_of_weights(run.weights)
    found = [int(path.name.removeprefix("update-")) for path in run.checkpoints.glob("update-" + "[0-9]" * 8)]
    if update is not None and found and max(found) > update:
        print(
            f"offbeat: the weights are of update {update}, but the newest checkpoint is of update {max(found)}: the "
            f"run was not finished; offbeat train --resume {run.path} finishes it",
            file=sys.stderr,
        )


COMMAND = Command(
    summary="evaluate the weights of a finished run on its test set",
    about="""Load the final weights of a run, or one of its checkpoints, and evaluate them on the test set.""",
    examples=("evaluate runs/digits",),
    options=(
        option("run", read=Path, metavar="RUN", help="folder of the run"),
        option(
            "--checkpoint",
            metavar="NAME",
            help="checkpoint to evaluate, like update-00000120 (default: the final weights)",
        ),
        option("--device", default="", metavar="DEVICE", help="device: cpu or cuda (default: as in the run)"),
    ),
    run=_run,
)
