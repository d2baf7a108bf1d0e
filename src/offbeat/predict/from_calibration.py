"""What a calibration says of a training before it is run: the same configuration, on the simulated machine.

Prediction and training have one description: the epochs, with their ends at which learners wait for each other, the
sizes of minibatches, the delays that were asked for, drawn anew. Nothing is computed; only
`foresee_accuracy` trains, in virtual time. Start-up and evaluation are no part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.predict.calibration import Calibration, Delays, Machine, machine_of
from offbeat.predict.calibration_match import check
from offbeat.predict.machines import Clock
from offbeat.predict.timelines import untrained
from offbeat.predict.virtual import Evaluation, reached_by, timeline_of, train_virtually
from offbeat.processes.slowness import parse as parse_slowness
from offbeat.train.config import Config
from offbeat.train.tasks import task_of

OTHER = 1_000_003  # a prediction draws delays of its own: those of the run are chance, and chance is not foreseen


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Of a whole training. As in what was measured (`Trained`), rates are over what comes after the first epoch."""

    first: tuple[float, int, int]  # seconds, updates and samples applied, after the first epoch
    last: tuple[float, int, int]
    machine: Machine

    @property
    def seconds(self) -> float:
        return self.last[0]

    @property
    def updates(self) -> int:
        return self.last[1]

    @property
    def seconds_per_update(self) -> float:
        return (self.last[0] - self.first[0]) / max(1, self.last[1] - self.first[1])

    @property
    def samples_per_s(self) -> float:
        return (self.last[2] - self.first[2]) / (self.last[0] - self.first[0])


def delays_of(config: Config) -> Delays:
    law, factors = parse_slowness(config.slow, config.learners)
    return Delays(law, tuple(factors.get(learner, 1.0) for learner in range(config.learners)))


def predict(
    calibration: Calibration, config: Config, samples: int, *, hosts: int = 1, spread: bool = False
) -> Predicted:
    """`samples`: of the training set. `RequestError` where the calibration is of something else.

    Learners are spread evenly over so many hosts of the measured network; `spread`: a server is on each of them.
    """
    check(calibration, config)
    machine = machine_of(
        calibration,
        config.sync,
        config.learners,
        delays=delays_of(config),
        batch=config.train.batch_size * config.train.accumulate,
        seed=config.seed + OTHER,
        hosts=hosts,
        spread=spread,
    )
    clock = Clock.calibrated(machine, config.sync, ends_of_epochs=True)
    timeline = untrained(timeline_of(config, clock, samples))
    marks = [(0.0, 0, 0)]  # seconds, updates and samples, after each
    for update in timeline.stream():
        _, updates, applied = marks[-1]
        marks.append((update.at_s, updates + 1, applied + update.samples))
    return Predicted(first=_first(marks, samples), last=marks[-1], machine=machine)


def _first(marks: list[tuple[float, int, int]], samples: int) -> tuple[float, int, int]:
    """The first update at which an epoch was applied; the beginning, where that is the end too."""
    found = next((mark for mark in marks if mark[2] >= samples), marks[-1])
    return marks[0] if found is marks[-1] else found


def foresee_evaluations(calibration: Calibration, config: Config, *, hosts: int = 1) -> list[Evaluation]:
    """A training in virtual time on the predicted machine, as it is evaluated at the end of each epoch."""
    task = task_of(config)
    predicted = predict(calibration, config, len(task.train), hosts=hosts)  # type: ignore[arg-type] # a map-style set has a length
    clock = Clock.calibrated(predicted.machine, config.sync, ends_of_epochs=True)
    return list(train_virtually(config, clock, task=task, every=1.0).points[1:])


def foresee_accuracy(calibration: Calibration, config: Config, target: float, *, hosts: int = 1) -> float | None:
    """Seconds until an epoch ends with the accuracy reached, in virtual time on the predicted machine; or None."""
    point = reached_by(foresee_evaluations(calibration, config, hosts=hosts), target)
    return None if point is None else point.seconds
