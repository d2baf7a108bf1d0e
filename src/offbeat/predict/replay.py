"""A real run, replayed in virtual time: under its own strategy, and under others.

    run = read_run(Path("runs/digits"))
    play = Replay(run=run, samples=len(task.train))
    own, other = play(run.config.sync), play("k-async:2")

The machine is the run's own: each learner's minibatches take what they took, in their order, and so do the ways between
them (`simulate.rerun`). A replay computes nothing; `Replay.train` does, to say when an accuracy would have been there.
What a replay of the run's own strategy is off by, in time and in staleness, says how far the others are to be trusted.

Laws: the folder of the run is only read. The same arguments give the same numbers. Evaluation is no part of any time.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from offbeat import spec as grammar
from offbeat.errors import LogError, RequestError
from offbeat.number_format import format_seconds
from offbeat.policies import create
from offbeat.predict.calibration import Calibration, Probe
from offbeat.predict.recorded_run import MOSTLY, Recorded, filled, law_of, read_recorded, starts_of
from offbeat.predict.timelines import Answer, Minibatch, ServedTimeline, Update
from offbeat.predict.virtual import Clock, reached_by, timeline_of, train_virtually
from offbeat.runs.log import read_log
from offbeat.runs.metrics import highest_reached, time_to_accuracy
from offbeat.simulate.cluster import Cluster, Wires
from offbeat.simulate.compute import Law
from offbeat.spec import count_of
from offbeat.strategy import ALL_REDUCE, AUTO, NATIVE, family_of
from offbeat.train.config import Config
from offbeat.train.config_files import changed
from offbeat.train.rundir import Evaluated, RunDir
from offbeat.train.tasks import Task
from offbeat.train.trainer import Report

PLENTY = 8  # times the run's epochs: what drops much needs more of them for as many applied samples
STANDS_FOR = "ring"  # an all-reduce that only a running group chooses
OLDER, OLDER_SHARE = 0.5, 0.25  # versions, and of the run's staleness: a replay that is off by more is of another run
RECORDED, CALIBRATED, NONE = "recorded", "calibrated", "none"  # where communication is from
UNLIKE = 0.05  # by which a learner's times differ from those of all before it is told


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RealRun(Evaluated):
    """What a run left."""

    config: Config
    recorded: Recorded
    metrics: tuple[Mapping[str, Any], ...]  # an evaluation each

    @property
    def staleness(self) -> float:
        return float(self.metrics[-1].get("staleness") or 0.0)

    def reached_s(self, target: float) -> float | None:
        """When the accuracy had reached the target."""
        return time_to_accuracy(((float(one["seconds"]), one["accuracy"]) for one in self._known), target)

    @property
    def highest_reached(self) -> float | None:
        return highest_reached([float(one["accuracy"]) for one in self._known])

    @property
    def _known(self) -> list[Mapping[str, Any]]:
        return [one for one in self.metrics if one.get("accuracy") is not None]

    @property
    def ends_s(self) -> float:
        """What the ends of epochs took, for each applied sample: all replays have as many of both."""
        return self.recorded.ends_s(self.seconds) / self.samples


def read_run(path: Path) -> RealRun:
    """`RequestError`, in a line, where the folder is not that of one real run from its beginning to its end."""
    folder = RunDir(path)
    config = folder.read_config()
    if folder.next_leg() > 2:
        raise RequestError(f"{path} was resumed, and has a log for each part; only runs of one part are replayed")
    if config.train.split != "equal":
        raise RequestError(f"{path} split updates by '{config.train.split}'; replayed are runs with equal minibatches")
    if not folder.log(1).exists():
        raise RequestError(f"{path} has no log.jsonl: the run has not ended, or was killed")
    metrics = folder.read_metrics()
    if not metrics or not metrics[-1].get("samples") or not metrics[-1].get("seconds"):
        raise RequestError(f"{path} has no evaluation in metrics.jsonl after which samples were applied")
    try:
        recorded = read_recorded(read_log(folder.log(1)))
    except LogError as error:
        raise RequestError(str(error)) from None
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from None
    config = changed(config, {"learners": config.learners or len(recorded.learners)})
    return RealRun(config=config, recorded=recorded, metrics=tuple(metrics))


class Reached(NamedTuple):
    """Of a training in virtual time: when it had reached the target, if it ever had, and the highest it reached."""

    seconds: float | None
    best: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What a strategy would have given, for as many applied samples as the run had."""

    strategy: str
    learners: int
    seconds: float
    updates: int
    samples: int
    staleness: float
    wait_share: float
    waste_share: float
    notes: tuple[str, ...] = ()
    foreign: bool = False  # its communication was not in the recording
    reached: Reached | None = None  # None: not trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """See the module's text. `samples`: of the training set; `learners` 0: as many as the run had."""

    run: RealRun
    samples: int
    learners: int = 0
    seed: int = 0
    calibration: Calibration | None = None
    _laws: dict[str, Law] = field(default_factory=dict)  # since filling in what was cancelled takes a while

    def __call__(self, line: str) -> Played:
        """Replay it without computing. `RequestError` where the line cannot be replayed with so many learners."""
        config, clock, notes = self._set_up(line)
        timeline = timeline_of(_longer(config, PLENTY), clock, self.samples)
        if isinstance(timeline, ServedTimeline) and timeline.lock_step:
            timeline.ask = _same
            notes = (*notes, f"{line} asks for losses or weights: replayed as if neither changed")
        applied = gradients = ages = 0
        last: Update | None = None
        for update in timeline.stream():
            last = update
            applied += update.samples
            gradients += len(update.works)
            ages += sum(update.version - 1 - work.version for work in update.works)
            if applied >= self.run.samples:
                break
        if last is None or applied < self.run.samples:
            raise RequestError(
                f"'{line}' drops so much that {self.run.samples:,} samples are not applied in {PLENTY} times the epochs"
            )
        spent = last.spent
        whole = spent.compute_s + spent.send_s + spent.wait_s or 1.0
        wait_s = spent.send_s + spent.wait_s
        if clock.cluster.starts is None and self._source(line) == RECORDED:  # its minibatches have them
            wait_s += self.run.recorded.back_s * gradients
        return Played(
            strategy=line,
            learners=config.learners,
            seconds=last.at_s + self.run.ends_s * applied,
            updates=last.version,
            samples=applied,
            staleness=ages / max(1, gradients),
            wait_share=min(1.0, wait_s / whole),
            waste_share=spent.waste_s / whole,
            notes=notes,
            foreign=not self._is_like_the_run(line),
        )

    def train(self, played: Played, task: Task, target: float, hear: Report = lambda record: None) -> Played:
        """The same, trained in virtual time until an epoch ends with the target."""
        config, clock, _ = self._set_up(played.strategy)
        config = changed(config, {"train": {"stop_at": target}})
        outcome = train_virtually(config, clock, task=task, hear=hear, every=1.0)
        there = reached_by(outcome.points[1:], target)
        seconds = None if there is None else there.seconds + self.run.ends_s * there.samples
        best = highest_reached([point.accuracy for point in outcome.points[1:] if point.accuracy is not None])
        return replace(played, reached=Reached(seconds, best or 0.0))

    def _set_up(self, line: str) -> tuple[Config, Clock, tuple[str, ...]]:
        """The training, its clock, and what is to be said of it."""
        family = family_of(line)
        simulated = STANDS_FOR if grammar.parse(line).name in (AUTO, NATIVE) else line
        learners = self.learners or self.run.config.learners
        changes = {"sync": simulated, "learners": learners, "slow": (), "train": {"stop_at": 0.0}}
        try:
            config = changed(self.run.config, changes)
        except RequestError as error:
            raise RequestError(str(error).removeprefix("sync: ")) from None
        beside_s = self._beside_s(simulated)
        notes = self._way_notes(line, beside_s)
        cluster = Cluster(learners=learners, law=self._law("computed"), seed=self.seed)
        if family == ALL_REDUCE:
            if self._source(line) == RECORDED:
                cluster = replace(cluster, law=self._law("with ways"))
            return (
                config,
                Clock(cluster=cluster, bucket_bytes=None, reduce_s=lambda size: beside_s, ends_of_epochs=True),
                notes,
            )
        starts = self._law("ways") if self._source(line) == RECORDED else None
        cluster = replace(cluster, wires=Wires(size_bytes=0, latency_s=beside_s / 2), starts=starts)
        return config, Clock(cluster=cluster, ends_of_epochs=True), notes

    def _law(self, what: str) -> Law:
        if what not in self._laws:
            recorded = self.run.recorded
            self._laws[what] = (
                starts_of(recorded) if what == "ways" else law_of(recorded, seed=self.seed, ways=what == "with ways")
            )
        return self._laws[what]

    # --- what lies between minibatches --------------------------------------------------------------------------------

    def _is_like_the_run(self, line: str) -> bool:
        return self.run.recorded.reduces == (family_of(line) == ALL_REDUCE)

    def _probe(self, line: str) -> Probe | None:
        """Of the calibration, where the run was of another family and has nothing better."""
        if self.calibration is None or self._is_like_the_run(line):
            return None
        learners = self.learners or self.run.config.learners
        return min(self.calibration.of(family_of(line)), key=lambda one: abs(one.learners - learners))

    def _source(self, line: str) -> str:
        """Where communication is from. One learner has nobody to reduce with: there is none, unless measured."""
        alone = self.learners == 1 < self.run.config.learners and family_of(line) == ALL_REDUCE
        probe = self._probe(line)
        if alone and (probe is None or probe.learners > 1):
            return NONE
        return RECORDED if probe is None else CALIBRATED

    def _beside_s(self, line: str) -> float:
        """What the way of a gradient takes beside the way back."""
        source, probe = self._source(line), self._probe(line)
        if source == NONE:
            return 0.0
        if self.calibration is None or probe is None:
            return self.run.recorded.there_s
        learners = self.learners or self.run.config.learners
        family = family_of(line)
        factor = self.calibration.reduction_factor(line, learners) if family == ALL_REDUCE else 1.0
        return probe.there_s * factor + probe.back_s

    def _way_notes(self, line: str, beside_s: float) -> tuple[str, ...]:
        """The same for all lines of a family, so that it is told once."""
        source = self._source(line)
        if source == NONE:
            return ("an all-reduce with 1 learner has nobody to reduce with: it is replayed without communication",)
        if self._is_like_the_run(line):
            return ()
        reduces = family_of(line) == ALL_REDUCE
        if source == CALIBRATED:
            took = format_seconds(beside_s)
            told = (
                f"{line} takes {took} an update" if reduces else f"a gradient's way to the server and back takes {took}"
            )
            return (f"communication was not in the recording, and is by the calibration: {told}",)
        took = format_seconds(self.run.recorded.there_s + self.run.recorded.back_s)
        return (
            f"communication {'by an all-reduce' if reduces else 'with a server'} was not in the recording: taken as "
            f"long as what it took in the run, {took} on average; a --calibration says it better",
        )


def _longer(config: Config, times: int) -> Config:
    return changed(config, {"train": {"epochs": config.train.epochs * times}})


def _same(work: Minibatch) -> Answer:
    return Answer(1.0, 1.0)  # a loss that does not fall, and weights that do not move


def is_as_stale(run: RealRun, own: Played) -> bool:
    """Whether the replay of the run's own strategy has gradients about as old as they were."""
    return abs(own.staleness - run.staleness) <= max(OLDER, OLDER_SHARE * run.staleness)


def notes_of(run: RealRun, learners: int = 0) -> list[str]:
    """What is to be known of the recording before its replays are believed."""
    recorded, notes = run.recorded, []
    if recorded.cancelled:
        notes.append(
            f"{recorded.cancelled:,} of {recorded.minibatches:,} minibatches were cancelled: each is given a time "
            "drawn from its learner's longer ones (Kaplan-Meier), or what it had taken, where none was longer"
        )
        pairs = zip(recorded.numbers, recorded.learners, strict=True)
        mostly = [number for number, one in pairs if one.share_cancelled > MOSTLY]
        if mostly:
            notes.append(f"most minibatches of {_who(mostly)} were cancelled: what they would have taken is uncertain")
    rule = None if recorded.reduces else create(run.config.sync, expect=run.config.learners).rule
    if rule is not None and rule.push_every > 1:
        notes.append("of several minibatches that were pushed together each is given an equal part of their time")
    if rule is not None and rule.fetch_every > 0:
        notes.append("learners fetched beside computing: what waiting for weights takes is not in the recording")
    many, learners = len(recorded.learners), learners or run.config.learners
    if learners < many:
        notes.append(_fewer(recorded, learners))
    if learners > many:
        notes.append(
            f"{count_of(many, 'learner')} were recorded: the others take their times in turn, each copy from another "
            "minibatch on, and ways between minibatches as they were"
        )
    return notes


def _fewer(recorded: Recorded, learners: int) -> str:
    """Whose times are used, and how these differ from those of all."""
    used, left = recorded.numbers[:learners], recorded.numbers[learners:]
    means = [float(row.mean()) for row in filled(recorded.learners, seed=0)]
    ratio = statistics.fmean(means[:learners]) / statistics.fmean(means)
    unlike = (
        f", which took {ratio:.2f} times as long for a minibatch as all on average" if abs(ratio - 1) > UNLIKE else ""
    )
    return (
        f"the times of {_who(used)} are used{unlike}, and those of {_who(left)} are not; ways between minibatches, "
        f"if any, are as they were with {count_of(len(recorded.numbers), 'learner')}"
    )


def _who(numbers: Sequence[int]) -> str:
    return f"learner{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"
