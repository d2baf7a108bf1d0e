"""Learners that keep step: DDP on an all-reduce of any schedule, or one learner alone.

An update is one batch of samples that stand behind each other in the epoch's permutation; each learner computes its
piece (`plan`). Its mean loss is weighted by how much of the batch it has, so that DDP's mean over learners is the mean
over the samples, however they are split. With one learner that accumulates, the same pieces are computed one after the
other.
"""

from __future__ import annotations

import copy
import inspect
import math
import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, Store
from torch._utils import _flatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from offbeat.collectives.backend import group_of, stats
from offbeat.collectives.momentum import momentum_of
from offbeat.collectives.options import Options
from offbeat.errors import OffbeatError, RequestError
from offbeat.number_format import format_size
from offbeat.processes.slowness import Slowness
from offbeat.processes.watchdog import Phase
from offbeat.runs.log import LogWriter, Span
from offbeat.schedules.coding import LEAST_BYTES
from offbeat.server.learner.leased_loader import SampleOrder, seed_of
from offbeat.server.learner.reduced_learner import gather_bytes
from offbeat.spec import parse
from offbeat.strategy import AUTO, NATIVE, PEERS, family_of, with_shape
from offbeat.train.checkpoint import Checkpoint
from offbeat.train.compute_ladder import (
    EAGER,
    MEASURED,
    Rung,
    choose,
    price_of,
    rungs_of,
    told,
    try_rung,
    worth_compiling,
)
from offbeat.train.config import shares_of
from offbeat.train.device_clock import DeviceClock, Mark
from offbeat.train.device_input import AHEAD, input_of
from offbeat.train.device_step import DeviceStep, Loss, clone_of, compiled_loss, leaves_of, repeated
from offbeat.train.host_facts import HostClocks, network_facts
from offbeat.train.learner_snapshot import (
    LearnerSnapshot,
    Traffic,
    decode,
    load_optimizer,
    optimizer_tensors,
    snapshot_of,
)
from offbeat.train.learning_rate import step_of
from offbeat.train.norms import synchronise
from offbeat.train.out_of_memory import is_out_of_memory, release
from offbeat.train.sample_plan import Pass, Update, speeds_to_shares, updates
from offbeat.train.tasks import collate_of
from offbeat.train.trainer import PROGRESS_S, Standing, Trainer, settle_cudnn
from offbeat_autoload import register

WORTH_TELLING = 0.1  # of a device's time: more waiting for samples than that is told
MOST_AHEAD = 4  # updates that the host may be ahead of the device
FIRST_LOOK, LOOK_EVERY = 4, 20  # updates until speeds are measured, for --split auto
WORTH = 0.03  # a share must change by that much of the whole for a new split
TRIED = 64  # samples that are read to try larger minibatches, which repeat them
FIRST_S = 10.0  # that a first update may take, in which libraries choose their algorithms
SMALL = 65_536  # parameters: up to here the norm of one flat copy takes half of the time of all norms
MEASURED_S = 1.0  # for which updates are measured, if that many are slow
_KINDS = ("compute", "wait", "apply", "evaluate")


class ReducedTrainer(Trainer):
    """See the module's text."""

    reduces_gradients = True  # else each learner steps by itself, and a subclass says what is exchanged

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        config = self.config
        self._together = self.processes > 1
        self.members = tuple(range(self.processes))  # the learner of each rank
        if self._together and not dist.is_initialized():
            join_group(group_line(config.sync), self.number, self.processes, self.device)
        self._coded = self.reduces_gradients and self._together and "codec" in dict(parse(config.sync).options)
        slow = config.slow
        self._slowness = Slowness(slow, learner=self.number, learners=self.learners, seed=config.seed) if slow else None
        if config.train.batch_norm == "synchronised" and self._together:
            self.model, _ = synchronise(self.model)
            self._norms = ()  # they know of the others' samples
        self._steps_here = self._can_step_on_device()
        by_ddp = self.reduces_gradients and self._together and not self._steps_here and not config.parallel
        self.wrapped = _in_ddp(self.model, unused=self.unused) if by_ddp else self.model
        if by_ddp and self._coded:
            _tell_shapes(self.wrapped, momentum_of(self.optimizer, clips=config.train.clip_norm > 0))
        if self.checkpoint is not None:
            if (self.learners > 2 or self._coded) and self.at.update and by_ddp:
                self._arrange_buckets()
            self._load_residuals(self.checkpoint)
            self.load_own(self.checkpoint)  # again: DDP has made all buffers those of the first
            self.load_optimizer(self.checkpoint.files["optimizer"])
        size = sum(parameter.nbytes for parameter in self.model.parameters() if parameter.requires_grad)
        if self._coded and size <= LEAST_BYTES and self.number == 0:
            least = format_size(LEAST_BYTES)
            self.note(f"gradients of {format_size(size)} are sent without a codec, which is used above {least}")
        wanted = shares_of(config.train.split) or (1,) * self.learners
        self._shares = tuple(share / sum(wanted) for share in wanted)
        if config.train.split == "auto" and len(self.at.shares) == self.learners:
            self._shares = self.at.shares  # found before the checkpoint
        self._order = SampleOrder(config.seed, self.samples)
        self._make_update = step_of(self.optimizer, self.device)
        self._trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        is_small = sum(map(torch.numel, self._trained)) <= SMALL and len({p.dtype for p in self._trained}) == 1
        # What is clipped has the bits of a sum of norms, which stages compute too.
        self._is_small = is_small and not config.train.clip_norm
        follows = (self._together and not config.parallel) or self._slowness is not None
        watched = self._trained if follows else []
        self._grads = _LastGradient(watched, self._on_last_gradient)
        self._input = input_of(
            self.task.train,
            self.device,
            self.moved,
            place=config.data.place,
            workers=config.data.workers,
            learners=self.processes,
        )
        self._reads = True  # samples: a stage between the first and the last needs none
        self._step_on_device: DeviceStep | None = None
        self._compiled: Loss | None = None
        self._lost = 0  # samples of updates that were left out, as far as they are counted
        self._clock_there = DeviceClock(self.device)
        self._under_way: deque[_Marks] = deque()  # updates that the device may not have finished
        self._ended_s: float | None = None  # when the last one ended there, if the next follows it at once
        self._busy_s = self._idle_s = 0.0  # of the device, in this epoch
        self._is_last_pass = True
        self._update_s = self._began_s = 0.0  # when the update began, and the pass that is computed
        self._since_s = 0.0  # the end of the last pause
        self._spans: list[tuple[float, float, float, float]] = []
        self._log: LogWriter | None = None
        self._clocks = HostClocks(self.hosts, self.number)
        self._start_s = self._common_start()
        self._computed: list[Pass] = []  # in this epoch
        self._told_others_s = 0.0
        self._measured: list[tuple[float, int]] = []  # seconds and samples, since the last look at speeds
        self._looks = 0
        self._standings = _Standings(self.number, self.processes)

    def traffic(self) -> Traffic | None:
        if not self._together:
            return Traffic()
        if self.config.sync == NATIVE:  # torch's own does not count
            return None
        counted = stats()
        return Traffic(counted.sent_bytes, counted.received_bytes)

    def slow_links(self) -> list[str]:
        alone = not self._together or self.config.sync == NATIVE
        names = list(dict.fromkeys(self.hosts))
        return [] if alone else [link.told(names) for link in stats().slow_links]

    def sent_to(self) -> tuple[int, ...]:
        return stats().sent if self.hosts and self.config.sync != NATIVE else ()

    def network_facts(self, parts: Mapping[int, LearnerSnapshot]) -> dict[str, Any]:
        if not self.hosts:
            return {}
        sent_to = {learner: part.sent_to for learner, part in parts.items()}
        counted = None if self.config.sync == NATIVE else stats()
        return network_facts(self.hosts, sent_to, counted, self._clocks)

    def _host_numbers(self) -> list[int]:
        """Of each process."""
        names = list(dict.fromkeys(self.hosts))
        return [names.index(host) for host in self.hosts] or [0] * self.processes

    def _arrange_buckets(self) -> None:
        """Let DDP see a backward: it arranges gradients anew after its first, and in which order three or more of them
        are added depends on where they lie. A run that goes on has made its first update long ago."""
        many = min(self.config.train.batch_size, self.samples)
        loader: DataLoader[Any] = DataLoader(self.task.train, batch_size=many, collate_fn=collate_of(self.task.train))
        inputs, targets = self.moved(next(iter(loader)))
        self.loss_of(inputs, targets).backward()  # type: ignore[no-untyped-call] # torch's own
        self.optimizer.zero_grad(set_to_none=True)

    def _load_residuals(self, checkpoint: Checkpoint) -> None:
        """What this learner had not sent yet. DDP arranges its gradients anew after the first update, and what was
        left of that is given up, in a run that goes on as in one that was never ended. A learner that was not there
        has what all of them had alike."""
        if not self._coded:
            return
        residuals = group_of(None).residuals
        residuals.clear()
        if self.part is not None and self.at.update > 1:
            residuals.load(self.part.residuals)
        elif "learner-0" in checkpoint.files and self.at.update > 1:
            residuals.load(snapshot_of(checkpoint.files["learner-0"]).residuals, own=False)
        self.note_lost_residuals(checkpoint)

    def own_part(self) -> LearnerSnapshot:
        part = super().own_part()
        if self._coded:
            part.residuals = group_of(None).residuals.state()
        return part

    # --- the loop ---------------------------------------------------------------------------------------------------

    def fit(self) -> None:
        config = self.config
        try:
            if self.number == 0:
                self.tell_beginning()
                self._open_log()
            if self._steps_here:
                self._choose_compute()
            self._since_s = time.monotonic()
            while self.at.epoch < config.train.epochs:
                if self._train_epoch():
                    break
            if self._together:
                self.beat(Phase.WAITING)
                self._standings.end()
                dist.barrier()
        finally:
            if self._log is not None:
                try:
                    self._log.close()
                except OSError as error:
                    self._tell_unwritten(error)
            if self._together and dist.is_initialized():
                dist.destroy_process_group()

    def _open_log(self) -> None:
        """By who writes it."""
        facts = {
            "strategy": with_shape(self.config.sync, Counter(self._host_numbers()).values()),
            "expect": self.processes,
            "learners": self.processes,
            **({"names": list(self.names)} if self.names else {}),
            **({"hosts": list(self.hosts), "clocks": self._clocks.as_json()} if self.hosts else {}),
            "simulated": False,
            "seed": self.config.seed,
            "name": self.config.name,
        }
        self._log = LogWriter(self.run.log(self.segment), facts)

    def _train_epoch(self) -> bool:
        """One epoch, or what is left of it; whether the run is to end."""
        every = self.config.save.every_updates
        while self.at.offset < self.samples:
            for update, batches in self._stretch():
                if self._is_to_stop():
                    return self._pause(epoch_end=False, halt=True)
                (self._update if self._step_on_device is None else self._update_on_device)(update, batches)
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
        if self.hosts:
            loss = self._losses[-1][0] if self._losses and self.device.type == "cpu" else math.nan  # no GPU waits
            mine = Standing(self.seen, self.compute_s, self.wait_s, float(loss))
            stops, standings = self._standings.next(self.stop_wanted, mine)
            self._tell_others(standings)
            return stops
        if self.stop_wanted:
            self.run.ask_to_stop(self.at.update)
        elif not self._together:
            return False
        last = self.run.stops_after()
        return last is not None and self.at.update > last

    def _tell_others(self, standings: list[Standing]) -> None:
        """By the first learner, which alone is heard: how far those are that compute on other hosts or beside it."""
        now_s = time.monotonic()
        if self.number or not standings[0].samples or now_s - self._told_others_s < PROGRESS_S:
            return
        self._told_others_s = now_s
        for learner, one in list(enumerate(standings))[1:]:
            self.tell_standing(learner, max(0, self.at.update - 2), one)  # told one update ago, of the one before

    def _stretch(self) -> Iterator[tuple[Update, list[tuple[Pass, Any]]]]:
        """The updates that are left of this epoch, each with its batches."""
        train = self.config.train
        batch = train.batch_size * train.accumulate * self.learners
        passes = train.accumulate * self.layout.microbatches
        plan = list(updates(self.samples, batch, self.replica, self._shares, passes, begin=self.at.offset))
        wanted = [self._samples_of(one) for update in plan for one in update.passes] if self._reads else []
        chance = torch.Generator().manual_seed(seed_of(self.config.seed, self.at.epoch))
        batches = self._input.batches(wanted, chance)
        for update in plan:
            self._update_s = time.monotonic()
            self.beat(Phase.READING)
            read = []
            for one in update.passes:
                self.set_chance(self.at.epoch, one.start)
                read.append((one, next(batches) if self._reads else None))
            yield update, read

    def _update(self, update: Update, batches: list[tuple[Pass, Any]]) -> None:
        began_s = self._update_s  # reading the samples belongs to it
        mine = 0
        losses = []
        for at, (one, batch) in enumerate(batches):
            self.set_chance(self.at.epoch, one.start)
            inputs, targets = batch
            many = one.end - one.start
            self._is_last_pass = at == len(batches) - 1
            with self._apart(is_last=self._is_last_pass):
                self.beat(Phase.COMPUTING)
                self._began_s = time.monotonic() if at else began_s
                self._grads.begin()
                loss = self.loss_of(inputs, targets)
                weight = many * self.learners / update.samples
                self.backward(loss if weight == 1 else loss * weight)
                self._grads.end()
            losses.append((loss.detach(), many))
            mine += many
            self._computed.append(one)
        self.beat(Phase.READING)  # nobody is waited for any more
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
        mean = losses[0][0] if len(losses) == 1 else torch.stack([loss * many for loss, many in losses]).sum() / mine
        self.count(mean, mine)
        if finite:
            self.at.applied += update.samples
        else:
            self.at.dropped["not finite"] = self.at.dropped.get("not finite", 0) + update.samples
        self.tell_progress(self.at.update, mean)

    # --- on a device that is not waited for ---------------------------------------------------------------------------

    def _can_step_on_device(self) -> bool:
        """Whether steps are decided on the device; a note where that was asked for and cannot be."""
        config, train = self.config, self.config.train
        if train.compute in ("auto", "eager") and self.device.type != "cuda":
            return False
        if train.compute == "eager" and self._together:
            return False  # DDP reduces while backward is running
        if "graph" in train.compute and self.device.type != "cuda":
            raise RequestError(
                f"--compute {train.compute} needs a GPU, but the device is {self.device.type}; use compile"
            )
        why = ""
        if train.optimizer not in ("sgd", "adam", "adamw"):
            why = f"{train.optimizer} makes decisions on the host"
        elif config.slow:
            why = "artificial delays act inside the backward pass"
        elif train.batch_norm == "synchronised" and self._together:
            why = "synchronised batch norm communicates inside the forward pass"
        if why and train.compute not in ("auto", "eager"):
            self.note(f"compute mode eager instead of {train.compute}: {why}")
        return not why

    def _choose_compute(self) -> None:
        """Try the rungs of the ladder and take the fastest that is right; all learners take the same."""
        train = self.config.train
        if self._together:
            for tensor in self.model.state_dict().values():
                dist.broadcast(tensor, 0)
        rungs = rungs_of(train.compute, device=self.device.type)
        if self.config.deterministic and train.compute == "auto" and self.device.type == "cuda":
            rungs = rungs_of("graph", device=self.device.type)
        priced = self.config.deterministic and self.device.type == "cuda"
        if len(rungs) == 1 and not priced:
            self._step_on_device = self._make_step(rungs[0])
            return
        batches, updates = self._first_batches(), self.pace.per_epoch * train.epochs
        seconds: dict[str, float] = {}
        failed: dict[str, str] = {}
        for rung in rungs:
            if rung.compiled and self._compiled is None:
                if train.compute == "auto" and not worth_compiling(updates, seconds):
                    break
                if self.number == 0:
                    told_first = "compiling, which takes about a minute (--compute graph avoids it)"
                    self.report({"kind": "note", "text": told_first})
                self._compiled = compiled_loss(self.model, self.task.loss, self.precision)
            if self._together and rung.compiled and self.number:
                dist.barrier()  # the first compiles, the others find what it has compiled
            tried = try_rung(self._make_step, rung, batches, proved=True)
            if self._together and rung.compiled and not self.number:
                dist.barrier()
            took = torch.tensor([tried.seconds], dtype=torch.float64)
            if self._together:
                dist.all_reduce(took, op=dist.ReduceOp.MAX)
            seconds[rung.name] = float(took)
            if float(took) == math.inf:
                failed[rung.name] = tried.why or "another learner cannot"
        if seconds[EAGER.name] == math.inf and not is_out_of_memory(failed[EAGER.name]):
            raise OffbeatError(f"no step can be computed: {failed[EAGER.name]}")
        if min(seconds.values()) == math.inf:  # trying keeps copies: a step by itself may still fit
            release()
            self._step_on_device = self._make_step(EAGER)
            self.note("compute mode eager: there is too little memory to try other modes")
            return
        chosen = choose(seconds) if train.compute == "auto" and not self.config.deterministic else rungs[0].name
        chosen = EAGER.name if seconds[chosen] == math.inf else chosen
        rung = next(rung for rung in rungs if rung.name == chosen)
        if priced:
            self._tell_price(rung, seconds[chosen], batches)
        release()
        self._step_on_device = self._make_step(rung)
        if self.number == 0:
            self.note(told(chosen, seconds, failed))

    def _tell_price(self, rung: Rung, seconds: float, batches: list[Any]) -> None:
        """What the same bits cost: the same step is timed without this promise, on a copy."""

        def free(rung: Rung) -> DeviceStep:
            return self._make_step(rung, benchmark=True)

        settle_cudnn(deterministic=False)
        torch.use_deterministic_algorithms(False)
        try:
            tried = try_rung(free, rung, batches, proved=False)
        finally:
            settle_cudnn(deterministic=True)
        if self.number == 0 and tried.seconds < math.inf:
            self.note(price_of(seconds, tried.seconds))

    def time_update(self, sizes: Sequence[int], rung: Rung, *, most_s: float = math.inf) -> float:
        """Seconds of an update with passes of the first size, as `rung` computes them; infinite if above `most_s`.

        What a run needs beside it is there too: passes of all sizes, minibatches read ahead, a second pass where
        gradients are accumulated, an evaluation.
        """
        self._step_on_device = self._make_step(rung) if self._steps_here else None
        passes = min(self.config.train.accumulate, 2)
        few = min(TRIED, self.samples)
        first = next(iter(self._input.batches([torch.arange(few)])))
        if any(len(one) != few for one in leaves_of(first)):  # of a form of its own: read as many as are asked for
            first = next(iter(self._input.batches([torch.arange(sizes[0]) % self.samples])))
            sizes = sizes[:1]
        ahead = [clone_of(repeated(first, sizes[0])) for _ in range(AHEAD)] if self.device.type == "cuda" else []

        def update(size: int, times: int = 1) -> float:
            one = Pass(0, size)
            batches = [(one, repeated(first, size))] * passes
            began_s = time.monotonic()
            for _ in range(times):
                step = self._update if self._step_on_device is None else self._update_on_device
                step(Update(size * passes, size, (one,) * passes), batches)
            self._finish_all()
            return (time.monotonic() - began_s) / times

        if update(sizes[0]) > max(most_s, FIRST_S):
            return math.inf
        for size in sizes[1:]:
            update(size)
        if self.device.type == "cuda":
            twin = copy.deepcopy(self.model).eval()
            inputs, targets = repeated(first, min(sizes[0], TRIED))
            with torch.no_grad(), self.precision.computing():
                self.task.loss(twin(inputs), targets)
        retries = _allocator_retries(self.device)
        once_s = update(sizes[0])
        if once_s > most_s:
            return math.inf
        took_s = update(sizes[0], max(2, min(MEASURED, int(MEASURED_S / max(once_s, 1e-9)))))
        del ahead
        if _allocator_retries(self.device) > retries:
            raise torch.OutOfMemoryError("out of memory: the allocator had to free cached memory to continue")
        return took_s

    def _make_step(self, rung: Rung, *, benchmark: bool | None = None) -> DeviceStep:
        return DeviceStep(
            self.model,
            self.optimizer,
            self.task.loss,
            self.precision,
            clip_norm=self.config.train.clip_norm,
            forward=self._compiled if rung.compiled else None,
            captured=rung.captured,
            other=self.loss_of,
            reduced=self._together,
            benchmark=not self.config.deterministic if benchmark is None else benchmark,
        )

    def _first_batches(self) -> list[Any]:
        """Two of the size that most have."""
        many = min(self.config.train.batch_size, self.samples)
        wanted = [torch.arange(start, start + many) % self.samples for start in (0, many)]
        return list(self._input.batches(wanted))

    def _update_on_device(self, update: Update, batches: list[tuple[Pass, Any]]) -> None:
        step, clock = self._step_on_device, self._clock_there
        assert step is not None
        began, mine = clock.mark(), 0
        self.beat(Phase.COMPUTING)
        total: Tensor | float = 0.0
        for at, (one, (inputs, targets)) in enumerate(batches):
            self.set_chance(self.at.epoch, one.start)
            many = one.end - one.start
            total = total + step.add(inputs, targets, weight=many / update.samples, first=at == 0) * many
            mine += many
            self._computed.append(one)
        computed = clock.mark()
        if self._together:
            dist.all_reduce(step.gradient)
        reduced = clock.mark()
        step.update(self.pace.rate(self.at.update + self.shift), samples=update.samples)
        self._under_way.append(_Marks(self.at.update, mine, (began, computed, reduced, clock.mark())))
        mean = torch.as_tensor(total / mine)
        self.count(mean, mine)
        self.at.applied += update.samples
        while len(self._under_way) > MOST_AHEAD:
            self._finish_oldest()
        self.tell_progress(self.at.update, mean)

    def _finish_oldest(self) -> None:
        """Wait for the oldest update under way, and take down when its parts began and ended."""
        version, samples, marks = self._under_way.popleft()
        began_s, computed_s, reduced_s, ended_s = times = self._clock_there.seconds(marks)
        self.compute_s += computed_s - began_s + ended_s - reduced_s
        self.wait_s += reduced_s - computed_s
        self._busy_s += ended_s - began_s
        self._idle_s += 0.0 if self._ended_s is None else max(0.0, began_s - self._ended_s)
        self._ended_s = ended_s
        self._measured.append((computed_s - began_s, samples))
        self._spans += [(float(at), times[at], times[at + 1], float(version)) for at in range(3)]

    def _tell_idle(self) -> None:
        """At the end of an epoch: whether the device has waited for samples, and what helps."""
        share = self._idle_s / max(self._idle_s + self._busy_s, 1e-9)
        self._busy_s = self._idle_s = 0.0
        if share >= WORTH_TELLING and self._input.remedy and self.number == 0:
            self.note(f"the device waited {100 * share:.0f} % of the time for data: {self._input.remedy}")

    def _finish_all(self) -> None:
        """Before a pause: nothing is under way, and updates that were left out are counted as such."""
        while self._under_way:
            self._finish_oldest()
        self._ended_s = None
        if self._step_on_device is not None:
            lost = self._step_on_device.lost
            if lost > self._lost:
                self.at.applied -= lost - self._lost
                self.at.dropped["not finite"] = self.at.dropped.get("not finite", 0) + lost - self._lost
                self._lost = lost

    def scale_state(self) -> dict[str, float | int]:
        return super().scale_state() if self._step_on_device is None else self._step_on_device.scale_state()

    def _apart(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Gradients of all passes but the last stay here."""
        if is_last or not isinstance(self.wrapped, DistributedDataParallel):
            return nullcontext()
        return self.wrapped.no_sync()

    def _step(self, update: Update) -> bool:
        """One step of the optimizer, unless a gradient is not finite: then all leave it out, since all see the sum."""
        gradients = [p.grad for p in self._trained if p.grad is not None]
        scaler, train = self.precision.scaler, self.config.train
        finite = True
        if scaler is not None:
            finite = self.agree(scaler.unscale(gradients))
            scaler.update(finite)
        norm = self.norm_of(gradients)
        finite = finite and math.isfinite(norm)
        if finite:
            if train.clip_norm:
                nn.utils.clip_grads_with_norm_(self._trained, train.clip_norm, norm)
            self.set_rate(self.at.update)
            self._make_update()
        for parameter in self._trained:  # as zero_grad does, which takes 15 us more
            parameter.grad = None
        return finite

    def agree(self, finite: bool) -> bool:
        """What all learners find: without stages each has seen the sum of all gradients."""
        return finite

    def norm_of(self, gradients: list[Tensor]) -> Tensor:
        """Of the whole model's gradient."""
        if self._is_small and gradients:
            flat: Tensor = _flatten_dense_tensors(gradients)  # type: ignore[no-untyped-call] # torch's own
            norm: Tensor = torch.linalg.vector_norm(flat)
            return norm
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))) if gradients else torch.zeros(())

    def _on_last_gradient(self) -> None:
        """A slow learner would have taken longer until now, reading samples too. What is left of the last pass is to
        wait for the others' gradients.
        """
        if self._slowness is not None:
            self._slowness.act(time.monotonic() - self._began_s, lambda: False)
        if self._together and self._is_last_pass:
            self.beat(Phase.WAITING)

    # --- unequal machines -------------------------------------------------------------------------------------------

    def _has_new_shares(self) -> bool:
        """Measure all, now and then; whether the rest of the epoch is to be split anew."""
        is_soon = len(self._measured) < (LOOK_EVERY if self._looks else FIRST_LOOK)
        if self.config.train.split != "auto" or not self._together or is_soon:
            return False
        recent = self._measured[1:]  # the first of a stretch warms up
        self._measured = []
        self._looks += 1
        self.beat(Phase.WAITING)
        mine = torch.tensor([sum(took for took, _ in recent), float(sum(many for _, many in recent))]).double()
        all_of_them = [torch.zeros_like(mine) for _ in range(self.learners)]
        dist.all_gather(all_of_them, mine)
        shares = speeds_to_shares([float(one[0]) for one in all_of_them], [int(one[1]) for one in all_of_them])
        if max(abs(new - old) for new, old in zip(shares, self._shares, strict=True)) < WORTH:
            return False
        self._shares = shares
        if self.number == 0:
            told = ":".join(f"{100 * share:.0f}" for share in shares)
            by_host: defaultdict[str, float] = defaultdict(float)
            for host, share in zip(self.hosts, shares, strict=False):
                by_host[host] += share
            hosts = ", ".join(f"{host} {100 * share:.0f} %" for host, share in by_host.items())
            beside = f" ({hosts})" if hosts else ""
            self.note(f"samples of an update are now split {told} % between the learners{beside}, by measured speed")
        return True

    # --- the books --------------------------------------------------------------------------------------------------

    def _samples_of(self, one: Pass) -> Tensor:
        return self._order.stretch(self.at.epoch, one.start, one.end - one.start)

    def _check_ledger(self) -> None:
        """At an epoch's end: all learners together have computed every sample once, or those that were left of it when
        the run was resumed, by however many learners."""
        self.beat(Phase.WAITING)
        computed = torch.cat([self._samples_of(one) for one in self._computed] or [torch.zeros(0, dtype=torch.int64)])
        mine = torch.tensor([len(computed), int(computed.sum())])
        if self._together:
            dist.all_reduce(mine)
        count, total = mine.tolist()
        before = {} if self.checkpoint is None else self.checkpoint.state["standing"]
        done = before.get("offset", 0) if before.get("epoch") == self.at.epoch else 0  # before the run was resumed
        left = self._order.stretch(self.at.epoch, done, self.samples - done)
        if count != len(left) or total != int(left.sum()):
            raise OffbeatError(
                f"epoch {self.at.epoch}: {count} of {len(left)} samples, or some are missing or repeated"
            )
        self._computed.clear()

    # --- pauses -----------------------------------------------------------------------------------------------------

    def _pause(self, *, epoch_end: bool, halt: bool) -> bool:
        """All stand still; the first looks, saves and says whether the run ends."""
        self._finish_all()
        self.beat(Phase.WAITING)
        if epoch_end:
            self._tell_idle()
        began_s = time.monotonic()
        self.at.seconds += began_s - self._since_s  # of training: not of pauses
        self.at.epoch_end, self.at.halt, self.at.shares = epoch_end, halt, self._shares
        part = self.own_part()
        part.spans = torch.tensor(self._spans, dtype=torch.float64).reshape(-1, 4)
        self._spans = []
        gathered = gather_bytes(part.encode()) if self._together else [part.encode()]
        parts = dict(zip(self.members, gathered, strict=True))
        self.gather_model()
        self._clocks.measure()
        stop = torch.zeros(1, dtype=torch.int64)
        if self._log is not None:  # this is the first learner
            self._write_spans(self._log, parts)
            stop += self.evaluate_and_save(self.at, parts)
            self._spans.append((3.0, began_s, time.monotonic(), float(self.at.update)))
        if self._together:
            dist.all_reduce(stop)
        if epoch_end:
            self.forget_losses()
        self._since_s = time.monotonic()
        return bool(stop)

    def _write_spans(self, log: LogWriter, parts: Mapping[int, bytes]) -> None:
        try:
            for learner, data in parts.items():
                for kind, start_s, end_s, version in decode(data).spans.tolist():
                    start, end = (self._clocks.here(learner, at_s) - self._start_s for at_s in (start_s, end_s))
                    what, label = self.kind_of(int(kind))
                    log.span(Span(learner, what, max(0.0, start), max(0.0, end), int(version), label=label))
            log.flush()
        except OSError as error:
            self._tell_unwritten(error)

    def kind_of(self, kind: int) -> tuple[str, str]:
        """What a span is, by the number that it has in memory, and its label."""
        return _KINDS[kind], ""

    def _tell_unwritten(self, error: OSError) -> None:
        """Training goes on without its log; what could be written of it stays."""
        told = f"cannot write {self.run.log(self.segment)}: {error.strerror}"
        if told not in self.notes:
            self.note(told)

    def gather_model(self) -> None:
        """By all, before the first learner evaluates or saves: it gets what others have of the model."""

    def load_optimizer(self, state: Mapping[str, Tensor]) -> None:
        """From a checkpoint's, which is that of the whole model."""
        load_optimizer(self.optimizer, state)

    def load_weights(self, twin: nn.Module) -> None:
        twin.load_state_dict(self.model.state_dict())

    def optimizer_files(self) -> dict[str, dict[str, Tensor]]:
        return {"optimizer": optimizer_tensors(self.optimizer)}

    def _common_start(self) -> float:
        """The moment from which spans are counted, on the first learner's clock: when the first of all came here."""
        came = [torch.zeros(1, dtype=torch.float64) for _ in range(self.processes)]
        came[self.number].fill_(time.monotonic())
        if self._together:
            dist.all_gather(came, came[self.number].clone())
        if self.number and self.hosts:
            return 0.0  # it writes no spans
        return min(self._clocks.here(learner, float(at_s)) for learner, at_s in enumerate(came))


def _allocator_retries(device: torch.device) -> int:
    """How often memory was found only after what was cached had been given back: then nearly all is taken."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)) if device.type == "cuda" else 0


class _Standings:
    """What learners of several hosts, who have no folder in common, tell each other: whether one wants to stop, and how
    far each is. It is told at the start of an update and known, the same to all, at the start of the next. Nobody
    waits for it: it is gathered, in one step, while gradients are computed. (By the all-reduce of the run it would take
    that one's steps, and the gradients would wait for the last of them.)
    """

    def __init__(self, learner: int, learners: int) -> None:
        self._mine = torch.zeros(1 + len(Standing._fields), dtype=torch.float64)
        self._all = [torch.zeros_like(self._mine) for _ in range(learners)]
        self._under_way: dist.Work | None = None

    def next(self, wants_to_stop: bool, standing: Standing) -> tuple[bool, list[Standing]]:
        """What all have told at the last update: whether somebody wants to stop, and the standing of each."""
        self.end()
        known = [one.tolist() for one in self._all]
        self._mine.copy_(torch.tensor([float(wants_to_stop), *standing], dtype=torch.float64))
        self._under_way = dist.all_gather(self._all, self._mine, async_op=True)
        return any(stops for stops, *_ in known), [Standing(*row) for _, *row in known]

    def end(self) -> None:
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None


class _Marks(NamedTuple):
    """An update under way: its number, this learner's samples of it, and its four moments."""

    version: int
    samples: int
    marks: tuple[Mark, Mark, Mark, Mark]


class _LastGradient:
    """When the last gradient of a backward was there, before it is reduced; then `act` is called."""

    def __init__(self, trained: Sequence[nn.Parameter], act: Callable[[], None]) -> None:
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


def group_line(line: str) -> str:
    """The all-reduce of the group that learners of a strategy form: peers use it for means alone."""
    return AUTO if family_of(line) == PEERS else line


def join_group(line: str, rank: int, ranks: int, device: torch.device, store: Store | None = None) -> None:
    """Make the default group of all ranks, who meet in a store, or in the file of learners that were forked."""
    register()  # for whoever has no entry points: a tree that is on the path and not installed
    if device.type == "cuda":
        torch.cuda.set_device(device)
    options = replace(Options.of_environment(), strategy=line)
    limit = timedelta(minutes=30)
    if store is None:  # learners were started from here: no store listens
        store = FileStore(os.environ["OFFBEAT_STORE"], ranks)
    dist.init_process_group("offbeat", store=store, rank=rank, world_size=ranks, timeout=limit, pg_options=options)


def _in_ddp(model: nn.Module, *, unused: bool) -> DistributedDataParallel:
    """Without buffers that all take over from the first in every forward: statistics are each learner's own."""
    new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters  # torch's word since 2.13
    options: dict[str, Any] = {"forward_sync_buffers" if new else "broadcast_buffers": False}
    return DistributedDataParallel(model, find_unused_parameters=unused, **options)


def _tell_shapes(wrapped: nn.Module, momentum: float) -> None:
    """Have a codec know which tensors DDP's flat buckets are made of, and the optimizer's momentum."""
    assert isinstance(wrapped, DistributedDataParallel)

    def reduce(bucket: Any) -> Any:
        whole = bucket.buffer()
        kept = group_of(None).residuals.of(whole)
        kept.shapes, kept.momentum = tuple(tuple(one.shape) for one in bucket.gradients()), momentum
        work = dist.all_reduce(whole.div_(dist.get_world_size()), async_op=True)
        assert work is not None
        return work.get_future().then(lambda _: whole)

    wrapped.register_comm_hook(None, lambda _, bucket: reduce(bucket))  # DDP refuses the annotations of a def
