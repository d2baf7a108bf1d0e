"""Whether a calibration is of a training: what decides how long a minibatch takes must be the same."""

from __future__ import annotations

from offbeat.errors import RequestError
from offbeat.machine import machine_facts
from offbeat.predict.calibration import Calibration
from offbeat.train.config import Config
from offbeat.train.trainer import device_of

MACHINE = ("cores", "processor")


def check(calibration: Calibration, config: Config) -> None:
    """The times of one model say nothing of another: `RequestError`, with the first thing that differs."""
    measured = calibration.settings or {}
    for key, now in settings_of(config).items():
        if key in measured and measured[key] != now:
            raise RequestError(
                f"the calibration was measured with {key} {measured[key]!r}, but this training run has {now!r}; "
                "run offbeat calibrate again for this recipe"
            )


def settings_of(config: Config) -> dict[str, object]:
    """What of a configuration decides how long a minibatch takes, beside its size."""
    train = config.train
    return {
        "model": config.model.name,
        "model options": dict(config.model.options),
        "data": config.data.name,
        "data options": dict(config.data.options),
        "workers": config.data.workers,
        "precision": train.precision,
        "optimizer": train.optimizer,
        "batch norm": train.batch_norm,
        "loss": train.loss,
        "threads": train.threads,
        "device": device_of(config.device, 0).type,
        "servers": config.servers,
    }


def of_another_machine(calibration: Calibration) -> str:
    """In words what differs between the machine that was measured and this one; empty where nothing does."""
    here = machine_facts()
    told = [
        f"{calibration.machine[key]} ({key}) instead of {here[key]}"
        for key in MACHINE
        if key in calibration.machine and calibration.machine[key] != here[key]
    ]
    return f"the calibration was measured on another machine: {', '.join(told)}" if told else ""
