"""Learners that send their updates to each other and apply what comes, or train apart: no server, and nobody in step.

A learner takes the next minibatch of the epoch that nobody has taken, computes its gradient on its own replica, applies
the updates of others that have come meanwhile, steps its own optimizer, and sends by how much that moved the weights to
all others. Every `average` updates, at the ends of epochs and when the run is to stop, learners *meet*: they wait for
all updates that are under way, and take the mean of their replicas.

A learner that is lost is noticed by the others, which form a new group, take the mean of their replicas, and go on
(where they were forked from one process; torchrun starts all learners again). What it had not sent is counted as lost.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from offbeat.collectives.peer_exchange import PeerExchange
from offbeat.errors import OffbeatError, PeerError, RequestError
from offbeat.policies.peers import Peer, rule_of
from offbeat.processes.torchrun_rank import torchrun_rank
from offbeat.processes.watchdog import Phase
from offbeat.spec import count_of
from offbeat.train.config_files import changed
from offbeat.train.learner_snapshot import LearnerSnapshot, Traffic, load_optimizer, optimizer_tensors
from offbeat.train.reduced_trainer import ReducedTrainer, group_line, join_group
from offbeat.train.trainer import TrainingState, built_on

NOTED_S = 30.0  # until the loss of a learner is known, after the first sign of it
_IDLE_S = 0.0005  # between two looks at what has come, of one who waits
_LOST = "lost with its learner"
_MADE, _DONE, _HALT, _AGES, _APPLIED, _BAD, _VERSION = range(7)  # what each learner tells when they meet


class PeerTrainer(ReducedTrainer):
    """See the module's text."""

    reduces_gradients = False

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.rule = rule_of(self.config.sync)
        if any(parameter.dtype != torch.float32 for parameter in self._trained):
            raise RequestError(f"'{self.config.sync}' needs a model whose parameters are float32")
        self._replica = _as_one(self._trained)
        self._base = self.at.update  # updates before the learners of now
        self._store: Store | None = _get_default_store() if self._together else None
        self._own = 0  # samples that this learner has taken alone, without a store
        self._computed_by: Counter[int] = Counter()  # samples of this epoch, by learner, as far as it is known here
        self._ages = self._ages_of = self._bad = 0  # staleness and how many it is the sum of; samples not finite
        self._applied_before = self.at.applied
        self._distances: list[tuple[float, float]] = []  # consensus distance at each meeting: mean and largest
        self._traffic_of_groups = Traffic()
        self._mean: Tensor | None = None  # of the replicas, where learners keep their own
        self._ended_pause: tuple[tuple[int, int, bool], bool] | None = None
        residual = None
        if self.part is not None:
            load_optimizer(self.optimizer, self.part.optimizer)
            residual = self.part.residuals.get("update")
            if "replica" in self.part.residuals:
                self._replica.copy_(self.part.residuals["replica"])
        if self.checkpoint is not None:
            self.note_lost_residuals(self.checkpoint)
        self._begin_exchange(None if residual is None else residual.clone())

    def build_trained(self) -> nn.Module:
        own = rule_of(self.config.sync).start == "own"
        config = changed(self.config, {"seed": self.config.seed + self.number}) if own else self.config
        return built_on(self.device, self.task, config)

    def _can_step_on_device(self) -> bool:
        return False

    def _begin_exchange(self, residual: Tensor | None) -> None:
        rank = self.members.index(self.number)
        self._peer = Peer(rank, range(len(self.members)), window=self.rule.window)
        sends = self.rule.sends and self._together
        self._exchange = PeerExchange(len(self._replica), self.rule.codec, residual) if sends else None

    # --- an epoch -----------------------------------------------------------------------------------------------------

    def _train_epoch(self) -> bool:
        begin = self.at.offset
        left = self.samples - begin
        while True:
            try:
                ended, halts = self._stretch_of_updates(begin)
            except PeerError as error:
                self._go_on_without(error)
                continue
            self._count_samples()
            if halts:
                taken = self._take_number(0) * self.config.train.batch_size
                self.at.offset = min(self.samples, begin + taken)
                self._drop(self.at.offset - begin)
                return self._pause(epoch_end=False, halt=True)
            if ended:
                break
        self._drop(left)
        self.at.epoch += 1
        self.at.offset = 0
        stops = self._pause(epoch_end=True, halt=False)
        self._begin_epoch()
        return stops

    def _begin_epoch(self) -> None:
        self._applied_before = self.at.applied
        self._computed_by.clear()
        self._own = self._bad = 0

    def _stretch_of_updates(self, begin: int) -> tuple[bool, bool]:
        """Minibatches until the next meeting, and the meeting; whether the epoch has ended, and whether all stop."""
        meets_at = self._peer.version + self.rule.average
        done = halts = False
        while not (done or halts) and (not self.rule.sends or self._peer.version < meets_at):
            self._update_s = time.monotonic()
            if not self._wait_for_window():
                halts = True
                break
            place = begin + self._take_number(1) * self.config.train.batch_size
            done = place >= self.samples
            if not done:
                self._compute(place, min(self.samples, place + self.config.train.batch_size))
            halts = self._wants_to_stop()
        return self._meet(done=done, halts=halts)

    def _take_number(self, count: int) -> int:
        """The number of the next minibatch of this epoch, which nobody else has; with 0, how many are taken."""
        if self._store is None:
            self._own += count
            return self._own - count
        return int(self._store.add(f"minibatches of epoch {self.at.epoch}", count)) - count

    def _wants_to_stop(self) -> bool:
        if self.stop_wanted and not self.hosts:
            self.run.ask_to_stop(0)
        return self.stop_wanted or (not self.hosts and self._together and self.run.stops_after() is not None)

    def _wait_for_window(self) -> bool:
        """Until another minibatch may be begun; False where all are to stop."""
        began_s = time.monotonic()
        self._apply_arrivals()
        while not self._peer.may_begin:
            self.beat(Phase.WAITING)
            if self._wants_to_stop():
                return False
            time.sleep(_IDLE_S)
            self._apply_arrivals()
        self.wait_s += time.monotonic() - began_s
        return True

    def _compute(self, start: int, end: int) -> None:
        """One minibatch, and the update that it makes."""
        began_s, many = self._update_s, end - start
        self.beat(Phase.READING)
        indices = self._order.stretch(self.at.epoch, start, many)
        inputs, targets = next(iter(self._input.batches([indices])))
        seen = dict(self._peer.applied)
        self.set_chance(self.at.epoch, start)
        self.beat(Phase.COMPUTING)
        self._began_s = began_s
        self._grads.begin()
        loss = self.loss_of(inputs, targets)
        self.backward(loss)
        self._grads.end()
        computed_s = time.monotonic()
        self._apply_arrivals()
        self._apply_own(many, seen)
        ended_s = time.monotonic()
        self.compute_s += ended_s - began_s
        version = float(self._base + self._peer.version)
        self._spans += [(0.0, began_s, computed_s, version), (2.0, computed_s, ended_s, version)]
        self._computed_by[self.number] += many
        self.count(loss.detach(), many)
        self.tell_progress(int(version), loss.detach())

    def _apply_own(self, samples: int, seen: dict[int, int]) -> None:
        """Step the optimizer, and send by how much the weights moved; all replicas move by what others decode."""
        gradients = [p.grad for p in self._trained if p.grad is not None]
        norm = self.norm_of(gradients)
        if math.isfinite(norm):
            if self.config.train.clip_norm:
                nn.utils.clip_grads_with_norm_(self._trained, self.config.train.clip_norm, norm)
            self.set_rate(self._base + self._updates_so_far())
            before = self._replica.clone()
            self._make_update()
            if self._exchange is not None:
                update = (self._replica - before).cpu()
                self._exchange.send(update, samples, seen)
                self._replica.copy_(before.add_(update.to(self.device)))
            self._count_age(self._peer.make(seen))
        else:
            self._bad += samples
        for parameter in self._trained:
            parameter.grad = None

    def _updates_so_far(self) -> int:
        """Of all learners; where they train apart each takes the others to be as far as itself."""
        version = self._peer.version
        return version if self.rule.sends else version * len(self.members)

    def _apply_arrivals(self) -> None:
        if self._exchange is None:
            if len(self.members) > 1:  # they train apart: nobody has to confirm anything
                for other in self._peer.confirmed:
                    self._peer.confirm(other, self._peer.applied[self._peer.me])
            return
        on_cpu = self.device.type == "cpu"
        into = self._replica if on_cpu else torch.zeros(len(self._replica))
        for arrival in self._exchange.arrivals(into):
            self._count_age(self._peer.receive(arrival.source, arrival.number, arrival.seen))
            self._computed_by[self.members[arrival.source]] += arrival.samples
        if not on_cpu:
            self._replica.add_(into.to(self.device))
        for other, count in self._exchange.confirmations():
            self._peer.confirm(other, count)

    def _count_age(self, age: int) -> None:
        self._ages += age
        self._ages_of += 1

    # --- meetings -----------------------------------------------------------------------------------------------------

    def _meet(self, *, done: bool, halts: bool) -> tuple[bool, bool]:
        """All updates that were made are applied everywhere, and replicas become their mean."""
        began_s = time.monotonic()
        self.beat(Phase.WAITING)
        mine = torch.zeros(7 + self.learners, dtype=torch.float64)
        made = self._peer.applied[self._peer.me]
        told = (made, done, halts, self._ages, self._ages_of, self._bad, self._base + self._updates_so_far())
        mine[:7] = torch.tensor([float(one) for one in told])
        here = self._replica.clone()
        all_of_them = [torch.zeros_like(mine) for _ in self.members] if self._together else [mine]
        if self._together:
            gathering = dist.all_gather(all_of_them, mine, async_op=True)
            assert gathering is not None
            while not gathering.is_completed():
                self._apply_arrivals()
                time.sleep(_IDLE_S)
            gathering.wait()
        table = torch.stack(all_of_them)
        if self._exchange is not None:
            totals = {rank: int(count) for rank, count in enumerate(table[:, _MADE].tolist())}
            while not self._peer.has_all(totals):
                self._apply_arrivals()
                time.sleep(_IDLE_S)
        if self.rule.sends:
            self._measure_apart(here)
            self._take_mean()
            self.at.update = self._base + self._peer.version
        else:
            self.at.update = self._base + int(table[:, _MADE].sum())
        ages, of = float(table[:, _AGES].sum()), int(table[:, _APPLIED].sum())
        if of and self.rule.sends:
            old = (self.at.staleness or 0.0) * self.at.gradients
            self.at.gradients += of
            self.at.staleness = (old + ages) / self.at.gradients
        self._ages = self._ages_of = 0
        bad = int(table[:, _BAD].sum())
        if bad:
            self.at.dropped["not finite"] = self.at.dropped.get("not finite", 0) + bad
        self._bad = 0
        self.wait_s += time.monotonic() - began_s
        return bool(table[:, _DONE].all()), bool(table[:, _HALT].any())

    def _measure_apart(self, here: Tensor) -> None:
        """The consensus distance: how far replicas were from their mean when they came, of the norm of the mean."""
        if not self._together:
            return
        mean = self._mean_of(here)
        mine = torch.zeros(len(self.members), dtype=torch.float64)
        size = float(torch.linalg.vector_norm(mean)) or 1.0
        mine[self._peer.me] = float(torch.linalg.vector_norm(here.cpu() - mean)) / size
        dist.all_reduce(mine)
        self._distances.append((float(mine.mean()), float(mine.max())))

    def _mean_of(self, replica: Tensor) -> Tensor:
        total = replica.cpu().clone()
        if self._together:
            dist.all_reduce(total)
        return total.div_(len(self.members))

    def _take_mean(self) -> None:
        self._replica.copy_(self._mean_of(self._replica))

    def _count_samples(self) -> None:
        """All that were applied in this epoch: what one learner knows of a lost one, the others may not."""
        known = torch.zeros(self.learners, dtype=torch.int64)
        for learner, many in self._computed_by.items():
            known[learner] = many
        if self._together:
            dist.all_reduce(known, op=dist.ReduceOp.MAX)
        self.at.applied = self._applied_before + int(known.sum()) - self.at.dropped.get("not finite", 0)

    def _drop(self, taken: int) -> None:
        """Of so many samples, those that went with a learner."""
        bad = self.at.dropped.get("not finite", 0)
        missing = taken - (self.at.applied + bad - self._applied_before)
        if missing and len(self.members) == self.learners:
            raise OffbeatError(f"epoch {self.at.epoch}: {taken - missing} of {taken} samples were applied")
        if missing:
            self.at.dropped[_LOST] = self.at.dropped.get(_LOST, 0) + missing

    # --- a learner is lost --------------------------------------------------------------------------------------------

    def _go_on_without(self, error: PeerError) -> None:
        """Form a group of those that are left; `error` where nobody is known to be lost."""
        if torchrun_rank() is not None:
            raise error
        end_s = time.monotonic() + NOTED_S
        while not self.run.lost() & set(self.members):
            self.beat(Phase.WAITING)
            if time.monotonic() > end_s:
                raise error
            time.sleep(0.02)
        before = set(self.members)
        self._traffic_of_groups = self.traffic()
        residual = None if self._exchange is None else self._exchange.residual
        self._base += self._updates_so_far()
        dist.destroy_process_group()
        store = self._wait_for_members()
        self._together = len(self.members) > 1
        if self._together:
            join_group(
                group_line(self.config.sync), self.members.index(self.number), len(self.members), self.device, store
            )
            furthest = torch.tensor([self._base])
            dist.all_reduce(furthest, op=dist.ReduceOp.MAX)
            self._base = int(furthest)
        self._begin_exchange(residual)
        if self.rule.sends:
            self._take_mean()
        if self.number == self.members[0]:
            names = ", ".join(map(str, sorted(before - set(self.members))))
            self.note(f"learner {names} is gone; {count_of(len(self.members), 'learner')} go on from their mean")
            if self._log is None:
                self.segment = self.run.next_segment()
                self._open_log()

    def _wait_for_members(self) -> Store:
        """Until all that are not lost have come here; where they meet. Others may be lost meanwhile."""
        assert self._store is not None
        while True:
            lost = self.run.lost()
            self.members = tuple(one for one in self.members if one not in lost)
            store = PrefixStore(f"without {sorted(lost)}", self._store)
            store.set(f"here {self.number}", "")
            wanted = [f"here {one}" for one in self.members]
            while self.run.lost() == lost:
                if store.check(wanted):
                    return store
                self.beat(Phase.WAITING)
                time.sleep(_IDLE_S)

    # --- pauses -------------------------------------------------------------------------------------------------------

    def _pause(self, *, epoch_end: bool, halt: bool) -> bool:
        while True:
            try:
                return super()._pause(epoch_end=epoch_end, halt=halt)
            except PeerError as error:
                self._go_on_without(error)

    def evaluate_and_save(self, at: TrainingState, parts: Mapping[int, bytes]) -> bool:
        """Once for each pause, also where a learner is lost in the middle of it."""
        which = at.update, at.epoch, at.halt
        if self._ended_pause is None or self._ended_pause[0] != which:
            self._ended_pause = which, super().evaluate_and_save(at, parts)
        return self._ended_pause[1]

    def gather_model(self) -> None:
        """Where learners train apart, the mean of their weights is what is evaluated."""
        self._mean = None if self.rule.sends else self._mean_of(self._replica)

    def load_weights(self, twin: nn.Module) -> None:
        super().load_weights(twin)
        if self._mean is not None:
            wanted = [parameter for parameter in twin.parameters() if parameter.requires_grad]
            start = 0
            with torch.no_grad():
                for parameter in wanted:
                    parameter.copy_(self._mean[start : start + parameter.numel()].view(parameter.shape))
                    start += parameter.numel()

    def own_part(self) -> LearnerSnapshot:
        part = super().own_part()
        part.optimizer = optimizer_tensors(self.optimizer)
        if self._exchange is not None and self._exchange.residual is not None:
            part.residuals["update"] = self._exchange.residual
        if not self.rule.sends:
            part.residuals["replica"] = self._replica
        return part

    def traffic(self) -> Traffic:
        """Updates; the means, which are few, are not counted."""
        before = self._traffic_of_groups
        if self._exchange is None:
            return before
        return Traffic(before.sent + self._exchange.sent_bytes, before.received + self._exchange.received_bytes)

    def network_facts(self, parts: Mapping[int, LearnerSnapshot]) -> dict[str, Any]:
        facts = super().network_facts(parts)
        if self._distances:
            means, most = zip(*self._distances, strict=True)
            facts["consensus"] = {"mean": sum(means) / len(means), "most": max(most)}
        return facts


def _as_one(trained: list[nn.Parameter]) -> Tensor:
    """The parameters as one vector, of which they are views from now on."""
    whole = torch.cat([parameter.detach().reshape(-1) for parameter in trained])
    start = 0
    for parameter in trained:
        parameter.data = whole[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    return whole
