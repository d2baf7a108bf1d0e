"""Learners that keep step: DDP on an all-reduce of any schedule, or one learner alone.

An update is one batch of samples that stand behind each other in the epoch's permutation; each learner computes its
piece (`plan`). Its mean loss is weighted by how much of the batch it has, so that DDP's mean over learners is the mean
over the samples, however they are split. With one learner that accumulates, the same pieces are computed one after the
other.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from offbeat.collectives.backend import stats
from offbeat.collectives.options import Options
from offbeat.errors import OffbeatError
from offbeat.processes.slowness import Slowness
from offbeat.runs.log import LogWriter, Span
from offbeat.server.learner.leased_loader import SampleOrder, seed_of
from offbeat.server.learner.reduced_learner import gather_bytes
from offbeat.strategy import NATIVE
from offbeat.train.config import shares_of
from offbeat.train.learner_snapshot import Traffic, decode, load_optimizer, optimizer_tensors
from offbeat.train.norms import synchronise
from offbeat.train.sample_plan import Pass, Update, speeds_to_shares, updates
from offbeat.train.tasks import collate_of
from offbeat.train.trainer import Trainer
from offbeat_autoload import register

FIRST_LOOK, LOOK_EVERY = 4, 20  # updates until speeds are measured, for --split auto
WORTH = 0.03  # a share must change by that much of the whole for a new split
_KINDS = ("compute", "wait", "apply", "evaluate")


class ReducedTrainer(Trainer):
    """See the module's text."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        config = self.config
        self._together = self.learners > 1
        if self._together:
            _join_group(config.sync, self.number, self.learners, self.device)
        slow = config.slow
        self._slowness = Slowness(slow, learner=self.number, learners=self.learners, seed=config.seed) if slow else None
        if config.train.batch_norm == "synchronised" and self._together:
            self.model, _ = synchronise(self.model)
            self._norms = ()  # they know of the others' samples
        self.wrapped = _in_ddp(self.model, unused=self.unused) if self._together else self.model
        if self.checkpoint is not None:
            if self.learners > 2 and self.at.update:
                self._arrange_buckets()
            self.load_own(self.checkpoint)  # again: DDP has made all buffers those of the first
            load_optimizer(self.optimizer, self.checkpoint.files["optimizer"])
        wanted = shares_of(config.train.split) or (1,) * self.learners
        self._shares = tuple(share / sum(wanted) for share in wanted)
        if config.train.split == "auto" and len(self.at.shares) == self.learners:
            self._shares = self.at.shares  # found before the checkpoint
        self._order = SampleOrder(config.seed, self.samples)
        self._grads = _LastGradient(self.model, self._be_slow)
        self._update_s = self._began_s = 0.0  # when the update began, and the pass that is computed
        self._since_s = 0.0  # the end of the last pause
        self._spans: list[tuple[float, float, float, float]] = []
        self._log: LogWriter | None = None
        self._start_s = self._common_start()
        self._ledger = (0, 0)  # samples of this epoch, and the sum of their numbers
        self._measured: list[tuple[float, int]] = []  # seconds and samples, since the last look at speeds
        self._looks = 0

    def traffic(self) -> Traffic | None:
        if not self._together:
            return Traffic()
        if self.config.sync == NATIVE:  # torch's own does not count
            return None
        counted = stats()
        return Traffic(counted.sent_bytes, counted.received_bytes)

    def _arrange_buckets(self) -> None:
        """Let DDP see a backward: it arranges gradients anew after its first, and in which order three or more of them
        are added depends on where they lie. A run that goes on has made its first update long ago."""
        many = min(self.config.train.batch_size, self.samples)
        loader: DataLoader[Any] = DataLoader(self.task.train, batch_size=many, collate_fn=collate_of(self.task.train))
        inputs, targets = self.moved(next(iter(loader)))
        self.loss_of(inputs, targets).backward()  # type: ignore[no-untyped-call] # torch's own
        self.optimizer.zero_grad(set_to_none=True)

    # --- the loop ---------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        config = self.config
        try:
            if self.number == 0:
                self.tell_beginning()
                facts = {
                    "strategy": config.sync,
                    "expect": self.learners,
                    "learners": self.learners,
                    "simulated": False,
                    "seed": config.seed,
                    "name": config.name,
                }
                self._log = LogWriter(self.run.log(self.segment), facts)
            self._since_s = time.monotonic()
            while self.at.epoch < config.train.epochs:
                if self._train_epoch():
                    break
            if self._together:
                dist.barrier()
        finally:
            if self._log is not None:
                self._log.close()
            if self._together and dist.is_initialized():
                dist.destroy_process_group()

    def _train_epoch(self) -> bool:
        """One epoch, or what is left of it; whether the run is to end."""
        every = self.config.save.every_updates
        while self.at.offset < self.samples:
            for update, batches in self._stretch():
                if self._is_to_stop():
                    return self._pause(epoch_end=False, halt=True)
                self._update(update, batches)
                self.at.offset = update.end
                self.at.update += 1
                if every and self.at.update % every == 0 and self.at.offset < self.samples:
                    self._pause(epoch_end=False, halt=False)
                if self._has_new_shares():
                    break
        self._check_ledger()
        self.at.epoch += 1
        self.at.offset = 0
        return self._pause(epoch_end=True, halt=False)

    def _is_to_stop(self) -> bool:
        """Whether all stop before this update. Nobody can be further: an update needs everybody."""
        if self.stop_wanted:
            self.run.ask_to_stop(self.at.update)
        last = self.run.stops_after()
        return last is not None and self.at.update > last

    def _stretch(self) -> Iterator[tuple[Update, list[tuple[Pass, Any]]]]:
        """The updates that are left of this epoch, each with its batches."""
        train = self.config.train
        batch = train.batch_size * train.accumulate * self.learners
        plan = list(updates(self.samples, batch, self.number, self._shares, train.accumulate, begin=self.at.offset))
        wanted = [self._samples_of(one) for update in plan for one in update.passes]
        loader: DataLoader[Any] = DataLoader(
            self.task.train,
            batch_sampler=wanted,
            num_workers=self.config.data.workers,
            collate_fn=collate_of(self.task.train),
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator().manual_seed(seed_of(self.config.seed, self.at.epoch)),
        )
        batches = iter(loader)
        for update in plan:
            self._update_s = time.monotonic()
            passes = []
            for one in update.passes:
                self.set_chance(self.at.epoch, one.start)
                passes.append((one, next(batches)))
            yield update, passes

    def _update(self, update: Update, batches: list[tuple[Pass, Any]]) -> None:
        began_s = self._update_s  # reading the samples belongs to it
        mine = 0
        total = torch.zeros((), device=self.device)
        for at, (one, batch) in enumerate(batches):
            self.set_chance(self.at.epoch, one.start)
            inputs, targets = self.moved(batch)
            many = one.end - one.start
            with self._apart(is_last=at == len(batches) - 1):
                self._began_s = time.monotonic() if at else began_s
                self._grads.begin()
                loss = self.loss_of(inputs, targets)
                self.backward(loss * (many * self.learners / update.samples))
                self._grads.end()
            total += loss.detach() * many
            mine += many
            computed = self._samples_of(one)
            self._ledger = self._ledger[0] + len(computed), self._ledger[1] + sum(computed)
        reduced_s = time.monotonic()
        computed_s = min(self._grads.last_s or reduced_s, reduced_s)
        finite = self._step(update)
        ended_s = time.monotonic()
        self.compute_s += computed_s - began_s + ended_s - reduced_s
        self.wait_s += reduced_s - computed_s
        self._measured.append((computed_s - began_s, mine))
        version = float(self.at.update)
        times = (began_s, computed_s, reduced_s, ended_s)
        self._spans += [(float(at), times[at], times[at + 1], version) for at in range(3)]
        mean = total / mine
        self.count(mean, mine)
        if finite:
            self.at.applied += update.samples
        else:
            self.at.dropped["not finite"] = self.at.dropped.get("not finite", 0) + update.samples
        self.tell_progress(self.at.update, mean)

    def _apart(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Gradients of all passes but the last stay here."""
        if is_last or not isinstance(self.wrapped, DistributedDataParallel):
            return nullcontext()
        return self.wrapped.no_sync()

    def _step(self, update: Update) -> bool:
        """One step of the optimizer, unless a gradient is not finite: then all leave it out, since all see the sum."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        scaler, train = self.precision.scaler, self.config.train
        finite = True
        if scaler is not None:
            finite = scaler.unscale(gradients)
            scaler.update(finite)
        norm = nn.utils.get_total_norm(gradients) if gradients else torch.zeros(())
        finite = finite and bool(norm.isfinite())
        if finite:
            if train.clip_norm:
                nn.utils.clip_grads_with_norm_(self.model.parameters(), train.clip_norm, norm)
            self.set_rate(self.at.update)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return finite

    def _be_slow(self) -> None:
        """When the last gradient is there: a slow learner would have taken longer until now, reading samples too."""
        if self._slowness is not None:
            self._slowness.act(time.monotonic() - self._began_s, lambda: False)

    # --- unequal machines -------------------------------------------------------------------------------------------

    def _has_new_shares(self) -> bool:
        """Measure all, now and then; whether the rest of the epoch is to be split anew."""
        is_soon = len(self._measured) < (LOOK_EVERY if self._looks else FIRST_LOOK)
        if self.config.train.split != "auto" or not self._together or is_soon:
            return False
        recent = self._measured[1:]  # the first of a stretch warms up
        self._measured = []
        self._looks += 1
        mine = torch.tensor([sum(took for took, _ in recent), float(sum(many for _, many in recent))]).double()
        all_of_them = [torch.zeros_like(mine) for _ in range(self.learners)]
        dist.all_gather(all_of_them, mine)
        shares = speeds_to_shares([float(one[0]) for one in all_of_them], [int(one[1]) for one in all_of_them])
        if max(abs(new - old) for new, old in zip(shares, self._shares, strict=True)) < WORTH:
            return False
        self._shares = shares
        if self.number == 0:
            told = ":".join(f"{100 * share:.0f}" for share in shares)
            self.note(f"samples of an update are now split {told} % between the learners, by measured speed")
        return True

    # --- the books --------------------------------------------------------------------------------------------------

    def _samples_of(self, one: Pass) -> list[int]:
        return self._order.indices([(self.at.epoch, one.start, one.end - one.start)])

    def _check_ledger(self) -> None:
        """At an epoch's end: all learners together have computed every sample once."""
        mine = torch.tensor(self._ledger)
        if self._together:
            dist.all_reduce(mine)
        count, total = mine.tolist()
        before = {} if self.checkpoint is None else self.checkpoint.state["standing"]
        resumed_inside = before.get("epoch") == self.at.epoch and before.get("offset", 0) > 0
        if not resumed_inside and (count != self.samples or total != self.samples * (self.samples - 1) // 2):
            raise OffbeatError(
                f"epoch {self.at.epoch}: {count} samples were computed, of {self.samples}, or not each of them once"
            )
        self._ledger = (0, 0)

    # --- pauses -----------------------------------------------------------------------------------------------------

    def _pause(self, *, epoch_end: bool, halt: bool) -> bool:
        """All stand still; the first looks, saves and says whether the run ends."""
        began_s = time.monotonic()
        self.at.seconds += began_s - self._since_s  # of training: not of pauses
        self.at.epoch_end, self.at.halt, self.at.shares = epoch_end, halt, self._shares
        part = self.own_part()
        part.spans = torch.tensor(self._spans, dtype=torch.float64).reshape(-1, 4)
        self._spans = []
        parts = gather_bytes(part.encode()) if self._together else [part.encode()]
        stop = torch.zeros(1, dtype=torch.int64)
        if self._log is not None:  # this is the first learner
            self._write_spans(self._log, parts)
            stop += self.evaluate_and_save(self.at, dict(enumerate(parts)))
            self._spans.append((3.0, began_s, time.monotonic(), float(self.at.update)))
        if self._together:
            dist.all_reduce(stop)
        if epoch_end:
            self.forget_losses()
        self._since_s = time.monotonic()
        return bool(stop)

    def _write_spans(self, log: LogWriter, parts: list[bytes]) -> None:
        for learner, data in enumerate(parts):
            for kind, start_s, end_s, version in decode(data).spans.tolist():
                start, end = start_s - self._start_s, end_s - self._start_s
                log.span(Span(learner, _KINDS[int(kind)], max(0.0, start), max(0.0, end), int(version)))

    def load_weights(self, twin: nn.Module) -> None:
        twin.load_state_dict(self.model.state_dict())

    def optimizer_files(self) -> dict[str, dict[str, Tensor]]:
        return {"optimizer": optimizer_tensors(self.optimizer)}

    def _common_start(self) -> float:
        """The moment from which spans are counted, the same for all: on one host the clock is."""
        start = torch.tensor([time.monotonic()], dtype=torch.float64)
        if self._together:
            dist.all_reduce(start, op=dist.ReduceOp.MIN)
        return float(start)


class _LastGradient:
    """When the last gradient of a backward was there, before it is reduced; then `act` is called."""

    def __init__(self, model: nn.Module, act: Callable[[], None]) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.last_s = 0.0
        self._all = self._left = len(trained)
        self._act = act
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._hook)  # type: ignore[no-untyped-call] # torch's own

    def begin(self) -> None:
        self._left = self._all

    def end(self) -> None:
        """After a backward: parameters without a gradient were waited for in vain."""
        if self._left > 0:
            self._act()
            self.last_s = time.monotonic()

    def _hook(self, _: Tensor) -> None:
        self._left -= 1
        if self._left == 0:
            self._act()
        if self._left <= 0:
            self.last_s = time.monotonic()


def _join_group(line: str, rank: int, ranks: int, device: torch.device) -> None:
    register()  # for whoever has no entry points: a tree that is on the path and not installed
    if device.type == "cuda":
        torch.cuda.set_device(device)
    options = replace(Options.of_environment(), strategy=line)
    limit = timedelta(minutes=30)
    dist.init_process_group("offbeat", rank=rank, world_size=ranks, timeout=limit, pg_options=options)


def _in_ddp(model: nn.Module, *, unused: bool) -> DistributedDataParallel:
    """Without buffers that all take over from the first in every forward: statistics are each learner's own."""
    new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters  # torch's word since 2.13
    options: dict[str, Any] = {"forward_sync_buffers" if new else "broadcast_buffers": False}
    return DistributedDataParallel(model, find_unused_parameters=unused, **options)
