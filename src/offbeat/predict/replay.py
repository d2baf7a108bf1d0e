"""A real run, replayed in virtual time: under its own strategy, and under others.

    run = read_run(Path("runs/digits"))
    play = Replay(run=run, samples=len(task.train))
    own, other = play(run.config.sync), play("k-async:2")

The machine is the run's own: each learner's minibatches take what they took, in their order, and so do the ways between
them (`recorded_run`). A replay computes nothing; `Replay.train` does, to say when an accuracy would have been there.
What a replay of the run's own strategy is off by, in time and in staleness, says how far the others are to be trusted.

Laws: the folder of the run is only read. The same arguments give the same numbers. Evaluation is no part of any time.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from offbeat import spec as grammar
from offbeat.errors import LogError, RequestError
from offbeat.number_format import format_seconds
from offbeat.policies import create
from offbeat.predict.calibration import Calibration
from offbeat.predict.calibration_match import check, of_another_machine
from offbeat.predict.machines import Clock
from offbeat.predict.recorded_run import MOSTLY, Recorded, filled, law_of, read_recorded, sends_of, starts_of
from offbeat.predict.replay_advice import POINTS, advice_on, doubts_on, is_trusted
from offbeat.predict.timelines import Update, untrained
from offbeat.predict.virtual import prepare_task, reached_by, running_user_code, timeline_of, train_virtually
from offbeat.runs.log import read_log
from offbeat.runs.metrics import highest_reached, time_to_accuracy
from offbeat.runs.run_folder import Evaluated, RunDir
from offbeat.simulate.cluster import Cluster, Wires
from offbeat.simulate.compute import Law
from offbeat.spec import count_of, format_learners
from offbeat.strategy import ALL_REDUCE, AUTO, NATIVE, family_of, line_up
from offbeat.train.config import Config
from offbeat.train.config_files import changed, read_config
from offbeat.train.tasks import Task
from offbeat.train.trainer import Report

PLENTY = 8  # times the run's epochs: what drops much needs more of them for as many applied samples
STANDS_FOR = "ring"  # an all-reduce that only a running group chooses
UNLIKE = 0.05  # by which a learner's times differ from those of all before it is told


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FinishedRun(Evaluated):
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

    def as_json(self, target: float | None) -> dict[str, Any]:
        recorded = self.recorded
        return {
            "strategy": self.config.sync,
            "learners": self.config.learners,
            "seconds": self.seconds,
            "target_seconds": None if target is None else self.reached_s(target),
            "accuracy": self.accuracy,
            "updates": self.updates,
            "staleness_mean": self.staleness,
            "wait_share": recorded.wait_share,
            "waste_share": recorded.waste_share,
            "minibatches": recorded.minibatches,
            "cancelled": recorded.cancelled,
            "there_s": recorded.there_s,
            "back_s": recorded.back_s,
            "epoch_ends_s": self.ends_s * self.samples,
        }


def read_run(path: Path) -> FinishedRun:
    """`RequestError`, in a line, where the folder is not that of one real run from its beginning to its end."""
    folder = RunDir(path)
    config = read_config(folder)
    if folder.next_segment() > 2:
        raise RequestError(f"{path} was resumed; replay works only for runs without a resume")
    if config.train.split != "equal":
        raise RequestError(f"{path} used --train.split {config.train.split}; replay works only for equal minibatches")
    if not folder.log(1).exists():
        raise RequestError(f"{path} has no log.jsonl: the run is still running or was killed")
    metrics = folder.read_metrics()
    if not metrics or not metrics[-1].get("samples") or not metrics[-1].get("seconds"):
        raise RequestError(f"{path} has no evaluation in metrics.jsonl, so its training time is unknown")
    try:
        recorded = read_recorded(read_log(folder.log(1)))
    except LogError as error:
        raise RequestError(str(error)) from None
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from None
    config = changed(config, {"learners": config.learners or len(recorded.learners)})
    return FinishedRun(config=config, recorded=recorded, metrics=tuple(metrics))


class TargetReached(NamedTuple):
    """Of a training in virtual time: when it had reached the target, if it ever had, and the highest it reached."""

    seconds: float | None
    best: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStrategy:
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
    reached: TargetReached | None = None  # None: not trained

    def as_json(self, run: FinishedRun) -> dict[str, Any]:
        return {
            "strategy": self.strategy,
            "learners": self.learners,
            "seconds": self.seconds,
            "against_run": self.seconds / run.seconds - 1,
            "target_seconds": None if self.reached is None else self.reached.seconds,
            "best_accuracy": None if self.reached is None else self.reached.best,
            "updates": self.updates,
            "samples": self.samples,
            "staleness_mean": self.staleness,
            "wait_share": self.wait_share,
            "waste_share": self.waste_share,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """See the module's text. `samples`: of the training set; `learners` 0: as many as the run had."""

    run: FinishedRun
    samples: int
    learners: int = 0
    seed: int = 0
    calibration: Calibration | None = None
    _laws: dict[str, Law] = field(default_factory=dict)  # since filling in what was cancelled takes a while

    def __call__(self, line: str) -> ReplayedStrategy:
        """Replay it without computing. `RequestError` where the line cannot be replayed with so many learners."""
        config, clock, ways = self._set_up(line)
        notes = ways.notes
        epochs = {"train": {"epochs": config.train.epochs * PLENTY}}
        timeline = untrained(timeline_of(changed(config, epochs), clock, self.samples))
        if timeline.lock_step:
            notes = (*notes, f"{line} depends on losses or weights, which are assumed constant in the replay")
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
                f"'{line}' drops too many gradients: it does not apply {self.run.samples:,} samples "
                f"within {PLENTY} times the run's epochs"
            )
        spent = last.spent
        wait_s = spent.send_s + spent.wait_s
        if clock.cluster.starts is None and ways.is_recorded:  # its minibatches have them
            wait_s += self.run.recorded.back_s * gradients
        return ReplayedStrategy(
            strategy=line,
            learners=config.learners,
            seconds=last.at_s + self.run.ends_s * applied,
            updates=last.version,
            samples=applied,
            staleness=ages / max(1, gradients),
            wait_share=min(1.0, wait_s / spent.whole_s),
            waste_share=spent.waste_share,
            notes=notes,
            foreign=ways.foreign,
        )

    def train(
        self, played: ReplayedStrategy, task: Task, target: float, hear: Report = lambda record: None
    ) -> ReplayedStrategy:
        """The same, trained in virtual time until an epoch ends with the target."""
        config, clock, _ = self._set_up(played.strategy)
        config = changed(config, {"train": {"stop_at": target}})
        outcome = train_virtually(config, clock, task=task, hear=hear, every=1.0)
        there = reached_by(outcome.points[1:], target)
        seconds = None if there is None else there.seconds + self.run.ends_s * there.samples
        return replace(played, reached=TargetReached(seconds, outcome.best or 0.0))

    def _set_up(self, line: str) -> tuple[Config, Clock, _Communication]:
        """The training and its clock."""
        learners = self.learners or self.run.config.learners
        changes = {"sync": _simulated(line), "learners": learners, "slow": (), "train": {"stop_at": 0.0}}
        try:
            config = changed(self.run.config, changes)
        except RequestError as error:
            raise RequestError(str(error).removeprefix("sync: ")) from None
        ways = self._communication(line)
        if family_of(line) == ALL_REDUCE:
            law = self._law("with ways" if ways.is_recorded else "computed")
            cluster = Cluster(learners=learners, law=law, seed=self.seed)
            reduce_s = ways.beside_s
            clock = Clock(cluster=cluster, bucket_bytes=None, reduce_s=lambda size: reduce_s, ends_of_epochs=True)
            return config, clock, ways
        own = ways.is_recorded and not ways.foreign
        cluster = Cluster(
            learners=learners,
            law=self._law("computed"),
            seed=self.seed,
            wires=None if own else Wires(size_bytes=0, latency_s=ways.beside_s / 2),
            starts=self._law("starts") if ways.is_recorded else None,
            sends=self._law("sends") if own else None,
        )
        return config, Clock(cluster=cluster, ends_of_epochs=True), ways

    def _law(self, what: str) -> Law:
        if what not in self._laws:
            recorded = self.run.recorded
            if what in ("starts", "sends"):
                self._laws[what] = (starts_of if what == "starts" else sends_of)(recorded)
            else:
                self._laws[what] = law_of(recorded, seed=self.seed, ways=what == "with ways")
        return self._laws[what]

    def _communication(self, line: str) -> _Communication:
        """Of a strategy's family. One learner has nobody to reduce with: there is none, unless measured."""
        run, recorded, family = self.run.config, self.run.recorded, family_of(line)
        learners, reduces = self.learners or run.learners, family == ALL_REDUCE
        foreign, probe = recorded.reduces != reduces, None
        if foreign and self.calibration is not None:  # the run was of another family, and has nothing better
            probe = min(self.calibration.of(family), key=lambda one: abs(one.learners - learners))
        if reduces and self.learners == 1 < run.learners and (probe is None or probe.learners > 1):
            note = "an all-reduce with 1 learner is replayed without communication"
            return _Communication(0.0, False, foreign, (note,))
        if not foreign:
            return _Communication(recorded.there_s, True, foreign, ())
        if self.calibration is not None and probe is not None:
            factor = self.calibration.reduction_factor(_simulated(line), learners) if reduces else 1.0
            beside_s = probe.there_s * factor + probe.back_s
            took = format_seconds(beside_s)
            way = f"{line} takes {took} per update" if reduces else f"a round trip to the server takes {took}"
            note = f"the run did not measure this communication, so the calibration is used: {way}"
            return _Communication(beside_s, False, foreign, (note,))
        took = format_seconds(recorded.there_s + recorded.back_s)
        note = (
            f"the run did not measure communication {'of an all-reduce' if reduces else 'with a server'}, "
            f"so it is assumed to take as long as the run's own communication, {took} on average; "
            "--calibration FILE is more accurate"
        )
        return _Communication(recorded.there_s, True, foreign, (note,))


class _Communication(NamedTuple):
    """What a replay takes communication to be."""

    beside_s: float  # what the way of a gradient takes beside the way back
    is_recorded: bool  # and not measured otherwise, or none
    foreign: bool  # the run was of another family
    notes: tuple[str, ...]  # the same for all lines of a family, so that they are told once


def _simulated(line: str) -> str:
    """An all-reduce that only a running group chooses is simulated as another."""
    return STANDS_FOR if grammar.parse(line).name in (AUTO, NATIVE) else line


def notes_of(run: FinishedRun, learners: int = 0) -> list[str]:
    """What is to be known of the recording before its replays are believed."""
    recorded, notes = run.recorded, []
    if recorded.cancelled:
        notes.append(
            f"{recorded.cancelled:,} of {recorded.minibatches:,} minibatches were cancelled; their full times "
            "are estimated from longer minibatches of the same learner (Kaplan-Meier)"
        )
        pairs = zip(recorded.numbers, recorded.learners, strict=True)
        mostly = [number for number, one in pairs if sum(one.cancelled) > MOSTLY * len(one.cancelled)]
        if mostly:
            notes.append(
                f"most minibatches of {format_learners(mostly)} were cancelled, so their full times are uncertain"
            )
    unsent = [number for number, one in zip(recorded.numbers, recorded.learners, strict=True) if not len(one.sends_s)]
    if unsent and not recorded.reduces:
        notes.append(
            f"no gradient of {format_learners(unsent)} reached the server, so sending is assumed to take as long as "
            "for the others; on a slower link it takes longer"
        )
    rule = None if recorded.reduces else create(run.config.sync, expect=run.config.learners).rule
    if rule is not None and rule.push_every > 1:
        notes.append("minibatches that were pushed together are assumed to have taken equal times")
    if rule is not None and rule.fetch_every > 0:
        notes.append("learners fetched weights while computing; the time to wait for weights was not recorded")
    many, learners = len(recorded.learners), learners or run.config.learners
    if learners < many:
        notes.append(_fewer_learners_note(recorded, learners))
    if learners > many:
        notes.append(
            f"{count_of(many, 'learner')} were recorded; additional learners reuse their times, starting at another "
            "minibatch, with communication as recorded"
        )
    return notes


def _fewer_learners_note(recorded: Recorded, learners: int) -> str:
    """Whose times are used, and how these differ from those of all."""
    used, left = recorded.numbers[:learners], recorded.numbers[learners:]
    means = [float(row.mean()) for row in filled(recorded.learners, seed=0)]
    ratio = statistics.fmean(means[:learners]) / statistics.fmean(means)
    unlike = f", whose minibatches took {ratio:.2f} times the average" if abs(ratio - 1) > UNLIKE else ""
    return (
        f"the times of {format_learners(used)} are used{unlike}, those of {format_learners(left)} are not; "
        f"communication is as recorded with {count_of(len(recorded.numbers), 'learner')}"
    )


# --- a whole replay ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayReport:
    """What the replays of a run say. `own`: of its own strategy, if that fits so many learners."""

    run: FinishedRun
    learners: int
    target: float | None  # None: only times
    own: ReplayedStrategy | None
    others: tuple[ReplayedStrategy, ...]
    further_notes: tuple[str, ...]

    @property
    def replayed(self) -> list[ReplayedStrategy]:
        return [*([] if self.own is None else [self.own]), *self.others]

    @property
    def measured(self) -> bool:
        """Whether the run had as many learners; else its own strategy was never run so."""
        return self.learners == self.run.config.learners

    @property
    def error(self) -> float | None:
        """Of the run's own replay."""
        return self.own.seconds / self.run.seconds - 1 if self.measured and self.own is not None else None

    @property
    def advice(self) -> list[str]:
        return advice_on(self.run, self.own, self.others, self.error, self.target)

    @property
    def notes(self) -> list[str]:
        doubts = doubts_on(self.run, self.own, self.target) if self.own is not None and self.measured else []
        return [*doubts, *self.further_notes]

    def as_json(self) -> dict[str, Any]:
        return {
            "samples": self.run.samples,
            "target": self.target,
            "run": self.run.as_json(self.target),
            "error": self.error,
            "trusted": is_trusted(self.run, self.own, self.error, self.target),
            "replayed": [one.as_json(self.run) for one in self.replayed],
            "advice": self.advice,
            "notes": self.notes,
        }


def usual_others(own: str, learners: int) -> list[str]:
    """Some strategies of each kind, and none that is another by another name."""
    return [line for line in line_up("replay", learners) if line != own]


def replay_run(
    run: FinishedRun,
    strategies: Sequence[str] = (),
    *,
    learners: int = 0,
    seed: int = 0,
    calibration: Calibration | None = None,
    target: float | None = None,
    accuracy: bool = True,
    tell: Callable[[str], Report] = lambda strategy: lambda record: None,
) -> ReplayReport:
    """Replay a run under its own strategy and others. With `accuracy` they are trained in virtual time to the target.

    `tell` is called when the training of a strategy begins, and gives who hears of its evaluations.
    """
    if calibration is not None:
        check(calibration, run.config)
    run = replace(run, config=changed(run.config, {"device": "auto"}))  # the run's own may be another machine's
    task, line = prepare_task(run.config), run.config.sync
    many = learners or run.config.learners
    train_set, test_set = len(task.train), len(task.test)  # type: ignore[arg-type]  # map-style sets have a length
    replay = Replay(run=run, samples=train_set, learners=learners, seed=seed, calibration=calibration)
    lines = [one for one in dict.fromkeys(strategies or usual_others(line, many)) if one != line]
    own, notes = None, []
    try:
        own = replay(line)
    except RequestError as error:  # it may not fit another number of learners
        if many == run.config.learners or not lines:
            raise
        notes.append(f"{line}, the strategy of the run, is not replayed: {error}")
    others = sorted((replay(one) for one in lines), key=lambda one: one.seconds)
    target = (target or run.highest_reached) if accuracy else None
    if target is not None:

        def trained(one: ReplayedStrategy, target: float = target) -> ReplayedStrategy:
            hear = tell(one.strategy)
            with running_user_code(one.strategy):
                return replay.train(one, task, target, hear)

        own = own and trained(own)
        others = [trained(one) for one in others]
    notes += notes_of(run, many)
    notes += [of_another_machine(calibration)] if calibration is not None and of_another_machine(calibration) else []
    notes += dict.fromkeys(note for one in ([own, *others] if own else others) for note in one.notes)
    if target is not None:
        notes.append(
            f"each accuracy is from one training with one seed, on {count_of(test_set, 'test sample')}; another seed "
            f"may differ by {POINTS}"
        )
    elif accuracy:
        why = "has a loss but no accuracy" if run.accuracy is None else "has one evaluation, too few for an accuracy"
        notes.append(f"{run.config.name} {why}, so only the times for the same number of samples are compared")
    if others:
        notes.append("another strategy would load the machine differently, which a replay does not model")
    return ReplayReport(
        run=run, learners=many, target=target, own=own, others=tuple(others), further_notes=tuple(notes)
    )
