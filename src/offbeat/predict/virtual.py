"""A recipe trained in virtual time: the real model, data, optimizer, rates and policies, on a simulated clock.

    outcome = train_virtually(config, Clock(cluster=Cluster(learners=30, law=parse_law("gamma:1,0.25"))), task=task)

Records and the run's folder are those of a real run (`trainer`, `run_folder`), with simulated seconds. Nothing here
starts a process. `train_again` has the clock of a run that was: it computes what that run computed, from its log.

Laws: the same arguments give the same bits; how many minibatches are computed at a time (`width`) changes the weights
by rounding only, and no time at all.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offbeat import plugins, topology
from offbeat.errors import OffbeatError, ReplayError, RequestError
from offbeat.number_format import finite_or_none
from offbeat.policies import create
from offbeat.policies.base import coded_bytes
from offbeat.policies.peers import rule_of
from offbeat.policies.sentences import mean_age
from offbeat.predict.arithmetic import Arithmetic
from offbeat.predict.calibration_match import check as check_calibration
from offbeat.predict.machines import Clock, Machines
from offbeat.predict.peer_training import PeerReplicas, PeerTimeline
from offbeat.predict.race import Contender, TrainingCurve
from offbeat.predict.timelines import (
    LoggedTimeline,
    Minibatch,
    ReducedTimeline,
    ServedTimeline,
    Timeline,
    TimeSpent,
    Update,
    WriteDecision,
    train,
)
from offbeat.runs.log import RunLog, read_log, write_chrome_trace, write_log
from offbeat.runs.metrics import highest_reached, reached_at
from offbeat.runs.run_folder import TARGET, RunDir
from offbeat.schedules import build, price
from offbeat.server.parameter_layout import model_tensors
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.collective import Rounds
from offbeat.simulate.diagnosis import describe_machines
from offbeat.simulate.sample_source import Batch, Epochs, Stream, batches_of_updates
from offbeat.strategy import PEERS, SERVER, family_of, simulated_family_of
from offbeat.train.checkpoint import write_weights
from offbeat.train.config import Config, shares_of
from offbeat.train.config_files import changed, read_config
from offbeat.train.launch import check_device
from offbeat.train.learner_snapshot import load_buffers
from offbeat.train.learning_rate import correction_of, optimizer_of, pace_of
from offbeat.train.results import end_record
from offbeat.train.run_summary import summary_of
from offbeat.train.sample_plan import cut, speeds_to_shares, updates
from offbeat.train.tasks import Task, check, task_of
from offbeat.train.trainer import Report, Trainer, evaluate

WIDTH = 128  # minibatches that are computed at a time, at most
MOST_BYTES = 1_000_000_000  # of gradients and weights that are computed at a time: the width is lowered to it
ALL = 10**12  # spans of all versions
OptimizerOf = Callable[[nn.Module], torch.optim.Optimizer]
STREAM = "a stream"  # what the log says of epochs that have no ends
EVALUATE_EVERY = 0.25  # epochs


class Evaluation(NamedTuple):
    """One look at the test set."""

    seconds: float
    update: int
    samples: int  # applied
    loss: float | None
    accuracy: float | None
    train_loss: float | None  # since the look before
    test_samples: int | None  # that the accuracy is a share of
    sent_bytes: int = 0  # of gradients and weights, by learners and servers together, up to then


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualRun:
    """What came of it."""

    config: Config
    points: tuple[Evaluation, ...]
    spent: TimeSpent
    staleness: Mapping[int, int]  # how many gradients were so old
    dropped: Mapping[str, int]  # samples, by reason
    end: Mapping[str, Any]  # as a real run tells it
    weights: Mapping[str, Tensor]
    notes: tuple[str, ...]
    how: str  # the gradients were computed

    @property
    def staleness_mean(self) -> float:
        return mean_age(self.staleness)

    @property
    def best(self) -> float | None:
        """The highest accuracy that was reached after the beginning (`metrics.highest_reached`)."""
        return highest_reached([point.accuracy for point in self.points[1:] if point.accuracy is not None])

    def curve(self, target: float | None) -> TrainingCurve:
        """What a race is told of a run."""
        reached = None if target is None else reached_by(self.points, target)
        known = [one for one in self.points if one.accuracy is not None]
        last = self.points[-1]
        return TrainingCurve(
            seed=self.config.seed,
            points=tuple((one.seconds, one.accuracy or 0.0) for one in known),
            sent_bytes=tuple(one.sent_bytes for one in known),
            reached_s=None if reached is None else reached.seconds,
            reached_updates=None if reached is None else reached.update,
            reached_samples=None if reached is None else reached.samples,
            reached_bytes=None if reached is None else reached.sent_bytes,
            accuracy=last.accuracy,
            test_samples=last.test_samples,
            best=highest_reached([one.accuracy for one in known if one.accuracy is not None]),
            seconds=last.seconds,
            updates=last.update,
            samples=last.samples,
            staleness=self.staleness_mean,
            waste_share=self.spent.waste_share,
            wait_share=self.spent.wait_share,
            warning=self.end.get("warning") or "",
        )


def reached_by(points: Iterable[Evaluation], target: float) -> Evaluation | None:
    """The evaluation at which the accuracy had reached the target (`metrics.reached_at`)."""
    known = [point for point in points if point.accuracy is not None]
    at = reached_at([point.accuracy for point in known if point.accuracy is not None], target)
    return None if at is None else known[at]


@contextmanager
def running_user_code(name: str) -> Iterator[None]:
    """What a model or data set of the user's own prints goes to stderr; what it raises is told in a line."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (OffbeatError, OSError, MemoryError):
        raise
    except Exception as error:  # the user's own code may raise anything
        raise OffbeatError(f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error


def prepare_task(config: Config) -> Task:
    """Data and model, tried once: what is wrong with them is told before anything runs."""
    check_device(config.device)
    torch.set_num_threads(config.train.threads)
    with redirect_stdout(sys.stderr):  # what modules of one's own print when they are loaded
        task = task_of(config)
        check(task)
    return task


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeTraining:
    """A recipe that is trained in virtual time, under any strategy on the same machines."""

    recipe: Config
    machines: Machines
    ends_of_epochs: bool = False
    width: int = 0
    every: float = EVALUATE_EVERY

    def config(self, contender: Contender, seed: int) -> Config:
        simulated_family_of(contender.strategy)  # refuses what cannot be simulated, by its name
        run = {"sync": contender.strategy, "learners": contender.cluster.learners, "seed": seed, "slow": ()}
        try:
            return changed(self.recipe, run | ({"train": {"split": contender.split}} if contender.split else {}))
        except RequestError as error:
            raise RequestError(str(error).removeprefix("sync: ")) from None

    def for_task(self, task: Task) -> RecipeTraining:
        """With the size of its model, where that is sent."""

        def size_bytes() -> int:
            with torch.random.fork_rng(devices=[]), redirect_stdout(sys.stderr):
                trained = [one for one in task.build().parameters() if one.requires_grad]
            return sum(one.numel() * one.element_size() for one in trained)

        return replace(self, machines=self.machines.for_model(size_bytes))

    def clock(self, contender: Contender, seed: int) -> Clock:
        config = self.config(contender, seed)
        if self.machines.calibration is not None:
            check_calibration(self.machines.calibration, config)
        batch = config.train.batch_size * config.train.accumulate
        cluster = replace(contender.cluster, seed=seed)
        return self.machines.clock(config.sync, cluster, batch=batch, ends_of_epochs=self.ends_of_epochs)

    def check(self, contender: Contender, seed: int, task: Task) -> None:
        """`RequestError` where the strategy cannot be trained on these machines."""
        samples = len(task.train)  # type: ignore[arg-type]  # a map-style set has a length
        timeline_of(self.config(contender, seed), self.clock(contender, seed), samples)

    def fits(self, contender: Contender, seed: int, task: Task) -> bool:
        """Whether it can run, on so few learners or with work for some of them."""
        try:
            self.check(contender, seed, task)
        except RequestError:
            return False
        return True

    def train(
        self, contender: Contender, seed: int, hear: Report, *, task: Task | None = None, run: RunDir | None = None
    ) -> VirtualRun:
        config, clock = self.config(contender, seed), self.clock(contender, seed)
        task = task or prepare_task(config)
        with running_user_code(config.name):
            return train_virtually(config, clock, task=task, run=run, hear=hear, width=self.width, every=self.every)


def train_virtually(
    config: Config,
    clock: Clock,
    *,
    task: Task | None = None,
    run: RunDir | None = None,
    hear: Report = lambda record: None,
    width: int = 0,
    every: float = EVALUATE_EVERY,
) -> VirtualRun:
    """Train in virtual time. `every`: epochs from look to look. `width` 1: one minibatch after the other; 0: `WIDTH`.

    With `run` its folder gets what a real run leaves, but for checkpoints.
    """
    if config.learners != clock.cluster.learners:
        config = changed(config, {"learners": clock.cluster.learners})
    trainer = VirtualTrainer(config, task or task_of(config), clock, run=run, report=hear, width=width, every=every)
    trainer.fit()
    return trainer.outcome()


def train_again(
    run: Path,
    *,
    task: Task | None = None,
    optimizer: OptimizerOf | None = None,
    shuffled: bool = True,
    hear: Report = lambda record: None,
    width: int = 1,
) -> VirtualRun:
    """Train as a run with a parameter server did, by its log: with `width` 1, on such a machine, to the same bits.

    `run` is its folder, in which nothing is changed; `task` is its task, where the config does not say it. With
    `optimizer`, which makes that of a model, `run` is the log of a script, whose task must be given; `shuffled` says
    whether its loader shuffled. `RequestError` where the log does not tell all that was computed, or where there are
    several; `ReplayError` where the policy does not say what the log has.
    """
    folder = RunDir(run)
    config = Config() if optimizer else read_config(folder)
    if not optimizer and family_of(config.sync) != SERVER:
        raise RequestError(
            f"'{config.sync}' is an all-reduce; only runs with a parameter server can be repeated from logs"
        )
    if config.train.precision == "fp16":
        raise RequestError(f"{run} was computed in fp16, and the loss scale of each learner is not in the log")
    if not optimizer and folder.next_segment() > 2:
        raise RequestError(f"{run} was resumed; only runs without a resume can be repeated")
    log = read_log(run if optimizer else folder.log(1))
    timeline = LoggedTimeline(log)
    if optimizer:
        if not any("hyper" in decision for decision in log.decisions):
            raise ReplayError("the log does not have the hyperparameters of the optimizer")
        train = {"clip_norm": log.run.get("clip_norm", 0.0)}
        config = changed(config, {"sync": timeline.line, "seed": log.run.get("seed", 0), "train": train})
    config = changed(config, {"learners": timeline.expect})
    trainer = VirtualTrainer(
        config, task or task_of(config), timeline, run=None, report=hear, width=width, optimizer=optimizer
    )
    trainer.arithmetic.orders.shuffled = shuffled
    trainer.fit()
    return trainer.outcome()


def has_ends(config: Config, clock: Clock) -> bool:
    """Whether learners wait for each other at the ends of epochs.

    They always do where they push every H minibatches: at an end they push what they have, so that without ends a run
    in which H minibatches are more than an epoch has would be another one.
    """
    served = family_of(config.sync) == SERVER
    return clock.ends_of_epochs or (served and create(config.sync, expect=config.learners).rule.push_every > 1)


def timeline_of(config: Config, clock: Clock, samples: int, *, write: WriteDecision | None = None) -> Timeline:
    """When a training happens. With `write` it is told every decision, and all spans are kept."""
    train, cluster, learners = config.train, clock.cluster, config.learners
    size = train.batch_size * train.accumulate
    spans = 0 if write is None else ALL
    if family_of(config.sync) == PEERS:
        if clock.ends_of_epochs:
            raise RequestError(f"'{config.sync}' is trained in virtual time without ends of epochs")
        stream = Stream(samples=samples, sizes=(size,) * learners, epochs=train.epochs)
        return PeerTimeline(config.sync, cluster, stream, keep_spans=spans)
    if family_of(config.sync) == SERVER:
        kind = Epochs if has_ends(config, clock) else Stream
        again = config.cancelled == "again"
        source = kind(samples=samples, sizes=(size,) * learners, epochs=train.epochs, again=again)
        correction = correction_of(config, learners)
        return ServedTimeline(config.sync, cluster, source, keep_spans=spans, write=write, **correction)
    simulated_family_of(config.sync)  # refuses what only a running group decides
    shares = _shares(train.split, cluster)
    sizes = (size,) * learners
    if shares:  # the time of a minibatch is in proportion to its samples
        sizes = tuple(cut(size * learners, shares, least=1))
        faster = tuple(speed * size / piece for speed, piece in zip(cluster.all_speeds, sizes, strict=True))
        cluster = replace(cluster, speeds=faster)
    rounds = Rounds(
        config.sync,
        cluster,
        clock.topology or topology.build("uniform:latency=0s", ranks=learners),
        clock.layers,
        bucket_bytes=clock.bucket_bytes,
        keep_spans=spans,
        reduce_s=clock.reduce_s,
    )
    if clock.ends_of_epochs:
        return ReducedTimeline(rounds, _planned(config, samples, shares or (1.0,) * learners))
    return ReducedTimeline(rounds, batches_of_updates(Stream(samples=samples, sizes=sizes, epochs=train.epochs)))


def _planned(config: Config, samples: int, shares: tuple[float, ...]) -> Iterator[tuple[Batch, ...]]:
    """As in a real run: the last update of an epoch is a smaller one, or part of the one before."""
    train, learners = config.train, config.learners
    batch = train.batch_size * train.accumulate * learners
    for epoch in range(train.epochs):
        plans = [updates(samples, batch, one, shares, train.accumulate) for one in range(learners)]
        for parts in zip(*plans, strict=True):
            stretches = [(one.passes[0].start, one.passes[-1].end) for one in parts]
            yield tuple(((epoch, start, end - start),) for start, end in stretches)


def _shares(split: str, cluster: Cluster) -> tuple[float, ...]:
    """Of an update's samples, where they are not equal; `auto` knows how fast the learners are on average."""
    if split == "auto":
        return speeds_to_shares(describe_machines(cluster).mean_s, [1] * cluster.learners)
    return tuple(float(share) for share in shares_of(split))


@cache
def _reduced_bytes(line: str, learners: int, size_bytes: int) -> int:
    """What all learners together send in an all-reduce."""
    return price(build(line, ranks=learners), topology.build("uniform", ranks=learners), size_bytes).bytes_total


class VirtualTrainer(Trainer):
    """All learners of a run, in one process; see the module's text."""

    def __init__(
        self,
        config: Config,
        task: Task,
        clock: Clock | LoggedTimeline,
        *,
        run: RunDir | None,
        report: Report,
        width: int = 0,
        every: float = EVALUATE_EVERY,
        optimizer: OptimizerOf | None = None,
    ) -> None:
        if not 0 < every < math.inf:
            raise RequestError(f"epochs between evaluations must be above 0; got {every}")
        super().__init__(config, task, run or RunDir(Path()), number=0, learners=config.learners, report=report)
        self._optimizer_of = optimizer or (lambda model: optimizer_of(model, config.train))
        self.optimizer = self._optimizer_of(self.model)
        log = clock.log if isinstance(clock, LoggedTimeline) else RunLog(run={})
        ends = has_ends(config, clock) if isinstance(clock, Clock) else log.run.get("epochs") != STREAM
        self._streams = not ends
        if self._streams:
            self.pace = pace_of(
                config.train, line=config.sync, learners=self.learners, samples=self.samples, ends=False
            )
        self._law = clock.cluster.law.text if isinstance(clock, Clock) else ""
        self._writes = run is not None
        self._decisions: list[dict[str, Any]] = []
        self._family = family_of(config.sync)
        kind = PeerReplicas if self._family == PEERS else Arithmetic
        self.arithmetic = kind(self, alone=width == 1, gradients=log.run.get("gradients"))
        of_each = 4 * 6 * self.arithmetic.replica.table.items  # weights, gradients, and what lies between them
        self._width = width or max(1, min(WIDTH, MOST_BYTES // of_each))
        if not self.arithmetic.together:  # nothing is gained ahead of time, and buffers would be ahead of the looks
            self._width = min(self._width, 1)
        self._every = max(1, round(every * self.samples))
        self._next_evaluation = self._every
        write = self._add_decision if self._writes else None
        self.timeline: Timeline = (
            clock if isinstance(clock, LoggedTimeline) else timeline_of(config, clock, self.samples, write=write)
        )
        self.points: list[Evaluation] = []
        self._taken = 0  # samples of updates: applied, or not finite
        self._through = 0  # and those that were dropped
        self._staleness: Counter[int] = Counter()  # of gradients
        self._sent_bytes = self._received_bytes = 0
        self._minibatches = 0  # that were applied: a gradient may be of several
        self._late: Mapping[str, int] = {}  # samples that were not applied, by reason
        self._spent = TimeSpent(0.0, 0.0, 0.0, 0.0)
        self._evaluations: list[dict[str, Any]] = []
        self._chance: float | None = None
        self._stops = False
        self._ended: dict[str, Any] = {}

    # --- the loop -----------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        self.tell_beginning()
        self._evaluate_now()
        if isinstance(self.timeline, PeerTimeline) and isinstance(self.arithmetic, PeerReplicas):
            self.timeline.replicas = self.arithmetic
            any(self._after(update) for update in self.timeline.stream())
        else:
            train(self.timeline, self.arithmetic, width=self._width, after=self._after)
        if isinstance(self.timeline, ServedTimeline) and not self._stops:
            self._late = self.timeline.source.dropped
        if self.points[-1].update != self.at.update:
            self._evaluate_now()
        self._end_here()

    def _after(self, update: Update) -> bool:
        at = self.at
        at.update, at.seconds = update.version, update.at_s
        self._taken += update.samples
        self._through = self._taken + sum(update.dropped.values())
        at.applied = self._taken - self.arithmetic.not_finite
        self._spent = update.spent
        ages = [update.version - 1 - work.version for work in update.works]
        self._staleness.update(ages)
        self._count_traffic(update)
        self._minibatches += sum(len(work.computed) for work in update.works)
        old = (at.staleness or 0.0) * at.gradients + sum(ages)
        at.gradients += len(ages)
        at.staleness = old / at.gradients
        at.epoch = self._through // self.samples
        self._late = update.dropped
        if self._through < self._next_evaluation:
            return False
        self._next_evaluation = (self._through // self._every + 1) * self._every
        self._evaluate_now()
        wanted = self.config.train.stop_at
        self._stops = bool(wanted and reached_by(self.points[1:], wanted))
        return self._stops

    def _count_traffic(self, update: Update) -> None:
        """Pushes and fetches of whole vectors, or of rows; in an all-reduce, what its schedule sends."""
        size_bytes = self.arithmetic.replica.current.nbytes
        if self._family == PEERS:
            peers = rule_of(self.config.sync)
            sent = received = coded_bytes(peers.codec, size_bytes) * (self.learners - 1) * peers.sends
        elif self.arithmetic.reduced_bytes is not None:
            sent = received = self.arithmetic.reduced_bytes - self._sent_bytes
        elif self._family != SERVER:
            sent = received = _reduced_bytes(self.config.sync, self.learners, size_bytes)
        else:
            rule = self.arithmetic.rule
            whole, by_row = rule.push_bytes(size_bytes), self.arithmetic.replica.push_bytes
            if rule.codec is not None or rule.delta or rule.fetch_every:  # these push all of it
                by_row.clear()
            sent = sum(by_row.pop(work.number, whole) for work in update.works)
            fetches = sum(step.fetched >= 0 for work in update.works for step in work.steps)
            received = fetches * rule.fetch_bytes(size_bytes)
        self._sent_bytes += sent
        self._received_bytes += received

    def _evaluate_now(self) -> None:
        """Evaluate, and tell."""
        at, arithmetic = self.at, self.arithmetic
        if isinstance(arithmetic, PeerReplicas):
            arithmetic.show_mean()
        trained = model_tensors(self.twin, self._optimizer_of(self.twin))[0].trained
        arithmetic.replica.write_model(arithmetic.replica.current, trained)
        load_buffers(self.twin, arithmetic.mean_buffers())
        loss, accuracy, tests, self._chance = evaluate(self.twin, self.task, self.precision, self.moved)
        told = arithmetic.loss_sum / arithmetic.loss_of if arithmetic.loss_of else None
        arithmetic.loss_sum, arithmetic.loss_of = 0.0, 0
        point = Evaluation(
            at.seconds, at.update, at.applied, finite_or_none(loss), accuracy, finite_or_none(told), tests,
            self._sent_bytes + (self._received_bytes if self._family == SERVER else 0),
        )  # fmt: skip
        self.points.append(point)
        if not at.update:
            return
        self._write_last()
        self.last = {
            "kind": "evaluated",
            "epoch": round(self._through / self.samples, 4),
            "update": at.update,
            "accuracy": point.accuracy,
            "test_samples": point.test_samples,
            "chance": self._chance,
            "loss": point.loss,
            "train_loss": point.train_loss,
            "start_loss": self.points[0].loss,
            "seconds": at.seconds,
            "samples": at.applied,
            "samples_per_s": at.applied / at.seconds if at.seconds else 0.0,
            "wait_share": self._spent.wait_share,
            "sent_bytes": self._sent_bytes,
            "received_bytes": self._received_bytes,
            "staleness": at.staleness,
            "rate": self.pace.rate(max(0, at.update - 1)),
            "dropped": self._dropped(),
            "simulated": True,
        }
        self.look_for_trouble(self._evaluations, ended=False)
        self._evaluations.append(self.last)
        self.report(self.last)

    def _write_last(self) -> None:
        """An evaluation is written when the next one is made, or at the end, when all is known of it."""
        if self._writes and self._evaluations:
            self._add_metrics()

    def _dropped(self) -> dict[str, int]:
        bad = self.arithmetic.not_finite
        return {**self._late, **({"not finite": bad} if bad else {})}

    # --- the end ------------------------------------------------------------------------------------------------------

    def _add_decision(self, record: dict[str, Any], work: Minibatch | None) -> None:
        if work is not None:
            record["hyper"] = self.arithmetic.hyper_at(work.latest)
        self._decisions.append(record)

    def _end_here(self) -> None:
        if not self._stops:
            self.at.epoch = self.config.train.epochs
        if "sign" not in self.last:
            self.look_for_trouble(self._evaluations[:-1], ended=True)
        self._write_last()
        self._ended = end_record(self.config, self.run, self.at, self.last, why=TARGET if self._stops else "")
        self._ended["simulated"] = True
        if self._writes:
            self._write_log()
            write_weights(self.run.weights, dict(self.twin.state_dict()), update=self.at.update)
            self.run.summary.write_text(summary_of(self.config, self._ended, self.run.read_metrics()), encoding="utf-8")
        self.report(self._ended)

    def _write_log(self) -> None:
        """What the timeline has simulated beyond the last update is no part of the run."""
        end_s, timeline = self.at.seconds, self.timeline
        spans = tuple(span for span in timeline.result().spans if span.end_s <= end_s)
        decisions = self._decisions
        if isinstance(timeline, ServedTimeline):  # at one moment much may happen: seconds do not tell
            of_spans, of_decisions = timeline.logged[self.at.update]
            spans, decisions = spans[:of_spans], decisions[:of_decisions]
        facts = {
            "strategy": self.config.sync,
            "expect": self.learners,
            "learners": self.learners,
            "staleness": self.config.staleness,
            "scaling": correction_of(self.config, self.learners)["scaling"],
            "simulated": True,
            "seed": self.config.seed,
            "name": self.config.name,
            "compute": self._law,
            "clip_norm": self.config.train.clip_norm,
            "epochs": STREAM if self._streams else "one after the other",
            **plugins.facts(),
        }
        write_log(self.run.log(1), RunLog(run=facts, spans=spans, decisions=tuple(decisions)))
        write_chrome_trace(self.run.trace, spans, name=self.config.name)

    def outcome(self) -> VirtualRun:
        return VirtualRun(
            config=self.config,
            points=tuple(self.points),
            spent=self._spent,
            staleness=dict(sorted(self._staleness.items())),
            dropped=self._dropped(),
            end=self._ended,
            weights={name: one.clone() for name, one in self.twin.state_dict().items()},
            notes=tuple(self.begun_with),
            how=self._how(),
        )

    def _how(self) -> str:
        many, arithmetic = self._minibatches, self.arithmetic
        if arithmetic.together and arithmetic.as_one and self._width > 1:
            return f"{many:,} minibatches, up to {self._width} at a time"
        why = f" ({arithmetic.why_alone})" if arithmetic.why_alone else ""
        return f"{many:,} minibatches, one by one{why}"
