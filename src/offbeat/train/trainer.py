"""What all strategies share in training: the model, one forward and backward, evaluation, records, checkpoints.

    reduced_trainer.py   learners that keep step: DDP on an all-reduce, or one learner alone
    served_trainer.py    learners of a parameter server

Laws. What a minibatch draws at random (dropout) depends on the seed and on its place in the epoch, and on nothing else:
so a run that goes on from a checkpoint draws the same, whoever computes it. Evaluation is on a second model, which
nobody trains: looking changes nothing. Its time is no training time.

In a pause all learners hand in their parts; the one who leads evaluates and saves, and the others wait.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offbeat.number_format import finite_or_none, format_size
from offbeat.policies.damping import CORRECT
from offbeat.processes.watchdog import Phase
from offbeat.runs.learning import Sign, sign_of, warning_of
from offbeat.runs.metrics import mean_delay, reached_at
from offbeat.runs.run_folder import TARGET, RunDir
from offbeat.server.learner.leased_loader import seed_of
from offbeat.spec import count_of
from offbeat.strategy import SERVER, family_of
from offbeat.train.checkpoint import Checkpoint, CheckpointError, Saver, write_weights
from offbeat.train.config import Config
from offbeat.train.device_input import input_of, tensors_of
from offbeat.train.learner_snapshot import LearnerSnapshot, Traffic, buffers_of, decode, load_buffers, snapshot_of
from offbeat.train.learning_rate import optimizer_of, pace_of, staleness_note, zero_last_norms
from offbeat.train.memory_limit import check_use, limit_of, used_bytes
from offbeat.train.norms import average_buffers
from offbeat.train.out_of_memory import is_out_of_memory, release
from offbeat.train.precision import Precision
from offbeat.train.results import end_record
from offbeat.train.tasks import Task, count_right
from offbeat.train.tensorboard import write_scalars, writer_class

Report = Callable[[Mapping[str, Any]], None]
PROGRESS_S = 0.25  # between two records of a learner's progress
EVALUATED = 256  # samples at a time
_VERY_STALE = 30  # versions: with steps so short, a training that does not move is no sign of a rate too high


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """Where a run stands, in a pause."""

    epoch: int = 0  # that runs, or comes next
    offset: int = 0  # samples of it that are done, where learners keep step
    update: int = 0
    seconds: float = 0.0  # of training
    applied: int = 0  # samples
    dropped: dict[str, int] = field(default_factory=dict)  # samples by reason
    held: int = 0  # samples of epochs that are over, computed, whose update is not full yet
    staleness: float | None = None
    gradients: int = 0  # over how many that is the mean
    delays: dict[str, int] = field(default_factory=dict)  # minibatches from a push to its answer, and how often
    epoch_end: bool = False
    halt: bool = False
    shares: tuple[float, ...] = ()
    server: dict[str, Any] | None = None  # what the coordinator needs to go on

    def drop_held(self, why: str) -> None:
        """The update of what is held will not come."""
        if self.held:
            self.dropped = self.dropped | {why: self.dropped.get(why, 0) + self.held}
            self.held = 0


class Standing(NamedTuple):
    """How far a learner is."""

    samples: float = 0.0  # that it has computed
    compute_s: float = 0.0
    wait_s: float = 0.0
    loss: float = 0.0


def device_of(name: str, learner: int) -> torch.device:
    """The device of a learner: GPUs are handed out in turn."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        return torch.device("cuda", learner % max(1, torch.cuda.device_count()))
    return torch.device(name)


def settle_cudnn(*, deterministic: bool) -> None:
    """The same bits every time, if that is asked for. Algorithms are tried only by who uses them often."""
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)


def mover(device: torch.device) -> Callable[[Any], Any]:
    """Puts a batch on a device, whatever it is made of."""

    def moved(batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return batch.to(device, non_blocking=True)
        if isinstance(batch, (list, tuple)):
            return _like(batch, [moved(one) for one in batch])
        if isinstance(batch, dict):
            return {name: moved(one) for name, one in batch.items()}
        return batch

    return moved


def built_on(device: torch.device, task: Task, config: Config) -> nn.Module:
    """The model with its first weights, laid out as the device convolves fastest."""
    torch.manual_seed(config.seed)
    model = task.build()
    if config.train.zero_last_norm:
        zero_last_norms(model)
    convolves = any(isinstance(one, nn.Conv2d) for one in model.modules())
    model = model.to(device)
    if convolves and device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch's stubs lack it
    return model


class Trainer:
    """One learner of a training; see the module's text."""

    def __init__(
        self,
        config: Config,
        task: Task,
        run: RunDir,
        *,
        number: int,
        learners: int,
        report: Report,
        checkpoint: Checkpoint | None = None,
        segment: int = 1,
        unused: bool = False,
        hosts: tuple[str, ...] = (),
    ) -> None:
        train = config.train
        torch.set_num_threads(train.threads)
        self.memory_limit = limit_of(config)
        self.config, self.task, self.run, self.report = config, task, run, report
        self.number, self.learners, self.segment = number, learners, segment
        self.layout = config.layout
        self.processes = learners * self.layout.stages  # this is `number` of them
        self.names: tuple[str, ...] = ()  # of the processes, where they are stages
        self.hosts = hosts  # of each learner, where there are several
        self.replica, self.rank = divmod(number, self.layout.stages)  # which this is part of, and its rank in there
        self.unused = unused  # some parameters get no gradient
        self.device = device_of(config.device, number)
        self.samples = len(task.train)  # type: ignore[arg-type]  # a map-style set has a length: the task was checked
        self.moved = mover(self.device)
        if self.device.type == "cuda":
            settle_cudnn(deterministic=config.deterministic)
        self.model = self.wrapped = self.build_trained()
        self._norms = tuple(one for one in self.model.modules() if isinstance(one, nn.modules.batchnorm._BatchNorm))
        self.optimizer = optimizer_of(self.model, train)
        self.precision = Precision(train.precision, self.device)
        self.pace = pace_of(
            train, line=config.sync, learners=self.learners, samples=self.samples, parts=self.layout.microbatches
        )
        self.checkpoint = checkpoint
        same = checkpoint is not None and checkpoint.state.get("stages", 1) == self.layout.stages
        own = checkpoint.files.get(f"learner-{number}") if checkpoint is not None and same else None
        self.part = None if own is None else snapshot_of(own)  # what this learner had for itself, if it was there
        self.at = TrainingState() if checkpoint is None else TrainingState(**checkpoint.state["standing"])
        self.at.epoch_end = self.at.halt = False
        self.shift = self._shift_of(checkpoint)
        self.notes: list[str] = []
        self.begun_with: list[str] = []  # what was told at the beginning
        self.stop_wanted = False  # somebody has sent a signal
        self.beat: Callable[[Phase], None] = lambda phase: None  # notes what is done now, for who watches
        self.compute_s = self.wait_s = 0.0
        self.seen = 0  # samples that this learner has computed
        self._traffic_before = Traffic()  # of the parts of the run before this one
        self._first_loss: Tensor | float | None = None
        self._losses: list[tuple[Tensor | float, int]] = []  # since the last pause, with their samples
        self._loss_sum, self._loss_of = 0.0, 0
        self._told_s = 0.0
        self.saver = Saver(run.checkpoints, keep=config.save.keep, tell=self.note, on_saved=self._tell_saved)
        has_board = config.save.tensorboard and number == 0
        self._board = writer_class()(str(run.path / "tensorboard")) if has_board else None
        self.last: dict[str, Any] = {}  # the latest evaluation
        if checkpoint is not None:
            self.load_trained(checkpoint.files["weights"])
            self.load_own(checkpoint)
        if self.part is not None:
            self.compute_s, self.wait_s = self.part.compute_s, self.part.wait_s
            self._traffic_before = self.part.traffic or Traffic()

    # --- the model --------------------------------------------------------------------------------------------------

    def ask_to_stop(self) -> None:
        """Somebody has sent a signal: save and end at the next minibatch. Called from a signal handler."""
        self.stop_wanted = True

    @cached_property
    def twin(self) -> nn.Module:
        """A second model, which nobody trains: it is evaluated."""
        return self._build().eval()

    def _build(self) -> nn.Module:
        return built_on(self.device, self.task, self.config)

    def build_trained(self) -> nn.Module:
        """What this learner trains."""
        return self._build()

    def load_trained(self, weights: Mapping[str, Tensor]) -> None:
        """From those of the whole model."""
        self.model.load_state_dict(weights)

    def count_parameters(self) -> int:
        """Of the whole model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def note_lost_residuals(self, checkpoint: Checkpoint) -> None:
        """Those of learners that are not in the run any more."""
        gone = [
            name
            for name, tensors in checkpoint.files.items()
            if name.startswith("learner-")
            and int(name[8:]) >= self.learners * self.layout.stages
            and any(one == "residual.update" or one.endswith(".residual") for one in tensors)  # of peers; of others
        ]
        if gone and self.number == 0:
            self.note(f"the residuals of {count_of(len(gone), 'learner')} that are gone are lost")

    def load_own(self, checkpoint: Checkpoint) -> None:
        """What each learner has for itself."""
        part = self.part
        if part is None:  # there were fewer: it has the mean of their buffers, and the scale of the first
            load_buffers(self.model, checkpoint.files["weights"])
            first = checkpoint.files.get("learner-0")
            part = LearnerSnapshot() if first is None else snapshot_of(first)
        else:
            load_buffers(self.model, part.buffers)
        if self.precision.scaler is not None and part.scaler:
            self.precision.scaler.load(part.scaler)

    def loss_of(self, inputs: Any, targets: Any) -> Tensor:
        """One forward: the mean loss of these samples."""
        alone = self._norms if size_of(targets) == 1 else ()
        for norm in alone:  # one sample has no spread of its own: it is seen as in evaluation
            norm.eval()
        try:
            with self.precision.computing():
                return self.task.loss(self.wrapped(inputs), targets)
        finally:
            for norm in alone:
                norm.train()

    def backward(self, loss: Tensor) -> None:
        scaler = self.precision.scaler
        with self.precision.differentiating():
            (loss if scaler is None else loss * scaler.scale).backward()  # type: ignore[no-untyped-call] # torch's own

    def _shift_of(self, checkpoint: Checkpoint | None) -> int:
        """From the updates that were made to those of the pace: it differs where an epoch had more or fewer before."""
        if checkpoint is None:
            return 0
        before = checkpoint.state["pace"]
        if before["per_epoch"] == self.pace.per_epoch:
            return int(before["shift"])
        return round((self.at.epoch + self.at.offset / self.samples) * self.pace.per_epoch) - self.at.update

    def set_rate(self, update: int) -> None:
        rate = self.pace.rate(update + self.shift)
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def set_chance(self, epoch: int, place: int) -> None:
        """What is drawn from now on is this minibatch's."""
        # Not torch.manual_seed: without a GPU it keeps a stack trace for each call, which takes 0.7 ms.
        seed = seed_of(self.config.seed, epoch) ^ (place + 1)
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    # --- progress ---------------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.report({"kind": "note", "text": text, "learner": self.number})

    def count(self, loss: Tensor, samples: int) -> None:
        """A minibatch was computed; its loss is read later, so that a GPU need not be waited for."""
        if len(self._losses) > 64:
            self._read_losses()
        self.seen += samples
        self._first_loss = loss.detach() if self._first_loss is None else self._first_loss
        self._losses.append((loss.detach(), samples))

    def forget(self, samples: int) -> None:
        """The minibatch that was counted last was cancelled."""
        self.seen -= samples
        if self._losses:  # else a pause was told of it meanwhile
            self._losses.pop()

    def forget_losses(self) -> None:
        """An epoch begins."""
        self._losses.clear()
        self._loss_sum, self._loss_of = 0.0, 0

    def _read_losses(self) -> None:
        values = torch.stack([torch.as_tensor(loss) for loss, _ in self._losses]).tolist() if self._losses else []
        for loss, (_, samples) in zip(values, self._losses, strict=True):
            self._loss_sum += loss * samples
            self._loss_of += samples
        self._losses.clear()

    def tell_progress(self, update: int, loss: Tensor) -> None:
        check_use(self.memory_limit)
        now = time.monotonic()
        if now - self._told_s >= PROGRESS_S:
            self._told_s = now
            standing = Standing(self.seen, self.compute_s, self.wait_s, float(loss))
            self.tell_standing(self.number, update, standing)

    def tell_standing(self, learner: int, update: int, standing: Standing) -> None:
        """How far a learner is."""
        self.report(
            {
                "kind": "progress",
                "learner": learner,
                "epoch": self.at.epoch,
                "samples": int(standing.samples),
                "loss": finite_or_none(standing.loss),
                "compute_s": standing.compute_s,
                "wait_s": standing.wait_s,
                "version": update,
            }
        )

    def tell_beginning(self) -> None:
        """By the first learner, when all is ready."""
        config = self.config
        told = self.pace.words(config.train, line=config.sync, learners=self.learners)
        stale = staleness_note(config, self.learners, self.optimizer)
        notes = self.begun_with = [*([told] if told else []), *([stale] if stale else []), *self.notes]
        self.report(
            {
                "kind": "begin",
                "name": config.name,
                "strategy": config.sync,
                "learners": self.learners,
                "names": list(self.names),
                "hosts": list(self.hosts),
                "servers": config.servers if family_of(config.sync) == SERVER else 0,
                "epochs": config.train.epochs,
                "epoch": self.at.epoch,
                "samples": self.samples,
                "parameters": self.count_parameters(),
                "device": str(self.device),
                "precision": config.train.precision,
                "run_dir": str(self.run.path),
                "notes": notes,
                "resumed": None if self.checkpoint is None else self.checkpoint.path.name,
            }
        )

    def own_part(self) -> LearnerSnapshot:
        """What is this learner's own, now."""
        self._read_losses()
        return LearnerSnapshot(
            compute_s=self.compute_s,
            wait_s=self.wait_s,
            loss=self._loss_sum / self._loss_of if self._loss_of else 0.0,
            samples=self._loss_of,
            traffic=self._traffic_before.plus(self.traffic()),
            sent_to=self.sent_to(),
            scaler=self.scale_state(),
            buffers={name: buffer.clone() for name, buffer in buffers_of(self.model).items()},
            used_bytes=used_bytes() if self.memory_limit else 0,
        )

    def scale_state(self) -> dict[str, float | int]:
        """Of the loss scale, where there is one."""
        return {} if self.precision.scaler is None else dict(self.precision.scaler.state())

    def traffic(self) -> Traffic | None:
        """What this process has sent and received for the training; None: it cannot tell."""
        return None

    def slow_links(self) -> list[str]:
        """Links between hosts that hold the training up, in words."""
        return []

    def sent_to(self) -> tuple[int, ...]:
        """Bytes to each learner, where there are several hosts."""
        return ()

    def network_facts(self, parts: Mapping[int, LearnerSnapshot]) -> dict[str, Any]:
        """What is known of the hosts and links, where there are several."""
        return {}

    # --- a pause, as the one who leads -------------------------------------------------------------------------------

    def load_weights(self, twin: nn.Module) -> None:
        """The trained weights of the run, as they are now, into another model."""
        raise NotImplementedError

    def optimizer_files(self) -> dict[str, dict[str, Tensor]]:
        """For a checkpoint: what the next update needs beside the weights."""
        raise NotImplementedError

    def still_leads(self) -> bool:
        """Whether what was read is whole: one that was given up while it read may have seen others go on."""
        return True

    def evaluate_and_save(self, at: TrainingState, parts: Mapping[int, bytes]) -> bool:
        """Evaluate, save, tell; whether the run is to end now. Meanwhile all learners stand still."""
        self.report({"kind": "halted", "now": True})
        self.beat(Phase.LEADING)
        over = self._evaluate_and_save(at, parts)
        self.beat(Phase.WAITING)
        if not over:
            self.report({"kind": "halted", "now": False})
        return over

    def _evaluate_and_save(self, at: TrainingState, parts: Mapping[int, bytes]) -> bool:
        config = self.config
        is_last = at.epoch >= config.train.epochs
        mine = {learner: decode(data) for learner, data in sorted(parts.items())}
        self.load_weights(self.twin)
        load_buffers(self.twin, self._mean_buffers(mine))
        kept = self.optimizer_files()
        if not self.still_leads():
            return False
        stop, failed = at.halt, ""
        if at.epoch_end or is_last or at.halt:
            before = self.run.read_metrics()  # also of learners that led before this one
            try:
                self.last = self._evaluate(at, mine, before)
            except Exception:
                if self.still_leads():
                    self._save(at, parts, kept)  # the epoch is not lost with a test sample that cannot be read
                raise
            found = [one["accuracy"] for one in (*before, self.last) if one["accuracy"] is not None]
            target = config.train.stop_at
            stop = stop or (target > 0 and reached_at(found, target) is not None and not is_last)
            if is_last or stop:
                at.drop_held("the run ended before its update was full")
            self.last |= {"dropped": at.dropped, "held": at.held}
            self.look_for_trouble(before, ended=is_last or stop)
            self.last |= self.network_facts(mine)
            self._name_slow_links(before)
            failed = self._why_in_vain(at, mine)
            stop = stop or bool(failed)
            if not self.still_leads():
                return False
            self._add_metrics()
            if self._board is not None:
                write_scalars(self._board, self.last)
            self.report(self.last)
        every = config.save.every_epochs
        due = not at.epoch_end or is_last or stop or (every > 0 and at.epoch % every == 0)
        if due and self.still_leads():
            self._save(at, parts, kept)
        if (is_last or stop) and self.memory_limit:
            used = ", ".join(format_size(part.used_bytes) for part in mine.values())
            self.report({"kind": "note", "text": f"memory that learners used at most: {used}", "learner": self.number})
        if is_last or stop:
            why = "" if is_last else "asked to stop" if at.halt else "nothing was applied" if failed else TARGET
            self._end(at, why, failed)
        return stop or is_last

    def _mean_buffers(self, parts: Mapping[int, LearnerSnapshot]) -> dict[str, Tensor]:
        """Over the replicas, of each stage."""
        found: dict[str, Tensor] = {}
        for rank in range(self.layout.stages):
            own = [part.buffers for learner, part in parts.items() if learner % self.layout.stages == rank]
            some = [buffers for buffers in own if buffers]
            found |= average_buffers(some) if some else {}
        return found or buffers_of(self.model)

    def look_for_trouble(self, before: Sequence[Mapping[str, Any]], *, ended: bool) -> None:
        """Says what the latest evaluation says, if the training does not learn; once, until it says something else."""
        sign = sign_of([*before, self.last], ended=ended)
        if sign is None:
            return
        self.last["sign"] = sign.name
        self.last["warning"] = warning_of(sign, self._remedy(sign))
        if not before or before[-1].get("sign") != sign.name:
            self.report({"kind": "note", "text": self.last["warning"], "warns": True})

    def _name_slow_links(self, before: Sequence[Mapping[str, Any]]) -> None:
        """In the metrics, and as a note when they are others than before."""
        slow = self.slow_links()
        if slow:
            self.last["slow_links"] = slow
        if slow and not (before and before[-1].get("slow_links")):
            self.report({"kind": "note", "text": "; ".join(slow), "learner": self.number})

    def _why_in_vain(self, at: TrainingState, parts: Mapping[int, LearnerSnapshot]) -> str:
        """Why this training cannot go on: every update of an epoch was left out, and no loss scale is being found."""
        bad = self.last.get("sign") == "nothing applied" and at.epoch_end and at.dropped.get("not finite")
        if not bad or at.held or self.precision.scaler is not None:
            return ""
        names = [str(learner) for learner, part in parts.items() if not math.isfinite(part.loss)]
        who = f"the loss of learner{'s' if len(names) > 1 else ''} {', '.join(names)} is" if names else "gradients are"
        remedy = self._remedy(Sign("nothing applied", ""))
        return f"no update of epoch {at.epoch} was applied, since {who} not finite; try {remedy}"

    def _remedy(self, sign: Sign) -> str:
        config, rate = self.config, self.config.train.lr
        if config.staleness != CORRECT and (self.last.get("staleness") or 0) >= 0.5:
            return "--staleness correct, since gradients are stale"
        if (self.last.get("staleness") or 0) >= _VERY_STALE:
            return "more epochs, or a strategy with less staleness: stale gradients take shorter steps"
        lower = f"--train.lr {rate / 10:g} (now {rate:g})"
        if config.train.momentum > 0.95 and config.train.optimizer in ("sgd", "lars"):
            lower += f", --train.momentum 0.9 (now {config.train.momentum:g})"
        if config.train.precision == "fp16" and sign.name in ("nothing applied", "not finite"):
            lower += ", --train.precision bf16"
        return f"{lower}, and check that the labels match the inputs"

    def _add_metrics(self) -> None:
        try:
            self.run.add_metrics(self.last)
        except OSError as error:  # training goes on
            self.note(f"cannot write {self.run.metrics}: {error.strerror}")

    def _evaluate(
        self, at: TrainingState, parts: Mapping[int, LearnerSnapshot], before: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        loss, accuracy, tests, chance = evaluate(
            self.twin,
            self.task,
            self.precision,
            self.moved,
            workers=self.config.data.workers,
            beat=lambda: self.beat(Phase.LEADING),
            at_once=self._evaluated_at_once(),
        )
        self.beat(Phase.LEADING)
        busy = sum(part.compute_s for part in parts.values())
        waited = sum(part.wait_s for part in parts.values())
        counted = sum(part.samples for part in parts.values())
        losses = sum(part.loss * part.samples for part in parts.values())
        moved = [part.traffic for part in parts.values() if part.traffic is not None]
        first_loss = None if self._first_loss is None else finite_or_none(float(self._first_loss))
        return {
            "kind": "evaluated",
            "epoch": at.epoch,
            "update": at.update,
            "accuracy": accuracy,
            "test_samples": tests,
            "chance": chance,
            "loss": finite_or_none(loss),
            "train_loss": finite_or_none(losses / counted) if counted else None,
            "start_loss": before[0].get("start_loss") if before else first_loss,  # of the first minibatch
            "seconds": at.seconds,
            "samples": at.applied,
            "samples_per_s": at.applied / at.seconds if at.seconds else 0.0,
            "wait_share": waited / (busy + waited) if busy + waited else 0.0,
            "sent_bytes": sum(one.sent for one in moved) if moved else None,
            "received_bytes": sum(one.received for one in moved) if moved else None,
            "staleness": at.staleness,
            "delay": mean_delay(at.delays),
            "rate": self.pace.rate(max(0, at.update - 1 + self.shift)),
        }

    def _evaluated_at_once(self) -> int:
        """With a limit of memory no more samples than are trained on at once."""
        trained = self.config.train.batch_size // self.layout.microbatches
        return EVALUATED if self.memory_limit is None else max(1, min(EVALUATED, trained))

    def _save(self, at: TrainingState, parts: Mapping[int, bytes], kept: Mapping[str, Mapping[str, Tensor]]) -> None:
        files: dict[str, Mapping[str, Tensor] | bytes] = {"weights": dict(self.twin.state_dict()), **kept}
        files |= {f"learner-{learner}": data for learner, data in parts.items()}
        state = {
            "standing": asdict(at),
            "learners": self.learners,
            "stages": self.layout.stages,
            "processes": self.processes,
            "sync": self.config.sync,
            "last": self.last,
            "optimizer": self.config.train.optimizer,
            "samples": self.samples,
            "pace": {"per_epoch": self.pace.per_epoch, "shift": self.shift},
        }
        self.saver.save(at.update, state, files)
        self.beat(Phase.LEADING)

    def _tell_saved(self, update: int) -> None:
        """Only now: it is on disk."""
        self.report({"kind": "saved", "update": update, "path": str(self.run.checkpoints)})

    def _end(self, at: TrainingState, why: str, failed: str) -> None:
        """The results come after the checkpoint that they are of. What cannot be written is a failure of the run."""
        self.saver.wait()
        self.beat(Phase.LEADING)
        unsaved = self.saver.failure
        try:
            write_weights(self.run.weights, dict(self.twin.state_dict()), update=at.update)
        except CheckpointError as error:
            unsaved = unsaved or str(error)
        if unsaved:
            failed = failed or f"update {at.update}, the last one, was not saved: {unsaved}"
        self.report(end_record(self.config, self.run, at, self.last, why=why, failed=failed))

    def fit(self) -> None:
        """Train, from where the checkpoint stands to the end."""
        raise NotImplementedError


class ModelScore(NamedTuple):
    """What a model is worth on a test set."""

    loss: float  # the mean
    accuracy: float | None  # the share that is right, where that has a meaning
    samples: int | None  # that the accuracy is a share of
    chance: float | None  # the accuracy of always naming the most frequent target


def evaluate(
    model: nn.Module,
    task: Task,
    precision: Precision,
    moved: Callable[[Any], Any],
    *,
    workers: int = 0,
    beat: Callable[[], None] = lambda: None,
    at_once: int = EVALUATED,
) -> ModelScore:
    """On the whole test set; `workers` read it, unless it is in memory. Where memory is too small beside a training's,
    fewer samples are taken at a time than `at_once`. `beat` is called for each batch."""
    while True:
        try:
            return _evaluate_by(at_once, model, task, precision, moved, workers, beat)
        except Exception as error:
            if at_once == 1 or not is_out_of_memory(error):
                raise
        at_once //= 4
        release()


def _evaluate_by(
    at_once: int,
    model: nn.Module,
    task: Task,
    precision: Precision,
    moved: Callable[[Any], Any],
    workers: int,
    beat: Callable[[], None],
) -> ModelScore:
    """So many samples at a time."""
    device = next(model.parameters()).device
    wanted = torch.arange(len(task.test)).split(at_once)  # type: ignore[arg-type,no-untyped-call] # map-style
    samples = input_of(task.test, device, moved, workers=workers if tensors_of(task.test) is None else 0)
    total, right, judged, seen = 0.0, 0, 0, 0
    targeted: Counter[int] = Counter()
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for inputs, targets in samples.batches(wanted):
            beat()
            with precision.computing():
                outputs = model(inputs)
                loss = task.loss(outputs, targets)
            many = size_of(targets)
            total += float(loss) * many
            seen += many
            found = count_right(outputs, targets)
            if found is not None:
                right, judged = right + found[0], judged + found[1]
                named, times = targets[targets >= 0].unique(return_counts=True)
                targeted.update(dict(zip(named.tolist(), times.tolist(), strict=True)))
    model.train(was_training)
    if not judged:
        return ModelScore(total / max(seen, 1), None, None, None)
    return ModelScore(total / seen, right / judged, judged, max(targeted.values()) / judged)


def size_of(batch: Any) -> int:
    """How many samples are in a batch."""
    if isinstance(batch, Tensor):
        return int(batch.shape[0]) if batch.dim() else 1
    if isinstance(batch, dict):
        return size_of(next(iter(batch.values())))
    return size_of(batch[0]) if _has_columns(batch) else len(batch)


def piece_of(batch: Any, start: int, end: int) -> Any:
    """Samples `start` up to `end` of a batch."""
    if isinstance(batch, Tensor):
        return batch[start:end]
    if isinstance(batch, dict):
        return {name: piece_of(one, start, end) for name, one in batch.items()}
    return _like(batch, [piece_of(one, start, end) for one in batch]) if _has_columns(batch) else batch[start:end]


def _has_columns(batch: Any) -> bool:
    """Whether this is a list of parts of samples, not of samples (such as texts, which torch leaves in a list)."""
    return isinstance(batch, (list, tuple)) and isinstance(batch[0], (Tensor, dict, list, tuple))


def _like(batch: Any, items: list[Any]) -> Any:
    """A list or tuple of the same kind; one with names takes them one by one."""
    return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
