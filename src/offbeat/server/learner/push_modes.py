"""What a learner does with its gradients: push each (Whole), push what several steps have moved (Delta), or push and
fetch beside its own steps (Free).

    Whole   every policy but those below: the servers make the steps, and the learner waits for their weights
    Delta   local-sgd and DiLoCo: H steps of the learner's own optimizer, then by how much the weights have moved
    Free    Downpour: own steps all the time; one thread pushes, one fetches, and computing waits for neither
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from offbeat.errors import OffbeatError
from offbeat.policies import LearnerRule
from offbeat.server.learner.client import Client
from offbeat.server.learner.connection import Link
from offbeat.server.learner.gradient_hooks import Cancelled
from offbeat.server.parameter_layout import DTYPES, ModelTensors, write_tensors
from offbeat.server.wire import Go, Hyper, Lease, Message, Weights

T = TypeVar("T")


class Report(NamedTuple):
    """What is told of a minibatch when it is pushed."""

    hyper: tuple[Hyper, ...]
    samples: int
    loss: float | None
    leases: tuple[Lease, ...]
    began_s: float


def _next(client: Client) -> Go | str | None:
    if client.must_seed:
        return "seed"
    return client.begin() if client.go is not None and not client.working else None


class PushMode:
    """What all have in common: the line, the model, and taking what a Go says."""

    def __init__(self, link: Link, parts: ModelTensors, rule: LearnerRule, local_step: Callable[[], Any]) -> None:
        self.link, self.parts, self.rule, self.local_step = link, parts, rule, local_step
        self.arena = link.arena
        self.version = 0  # of the weights that the model has
        self.sent_bytes = self.received_bytes = 0  # gradients, and weights
        self.loaded = (0, 0)  # incarnation and pin under which it got them: later ones are larger
        self.start_s = link.admission.start_s
        self.kept: Mapping[str, Tensor] | None = None  # what the run goes on from, if this learner is asked for it

    @property
    def incarnation(self) -> int:
        return self.link.client.incarnation

    def fill(self, index: int, gradient: Tensor) -> None:
        """A gradient is there."""

    def unchanged(self, index: int, gradient: Tensor) -> bool:
        """Whether a gradient is what was filled."""
        return True

    def is_cancelled(self) -> bool:
        return self.link.is_cancelled()

    def come(self) -> None:
        """Wait for the beginning, and take what all begin with."""
        self.take_go(extra=True)

    def await_go(self) -> Go:
        """The word to go on; whoever waits may first be asked for the initial weights."""
        while True:
            go = self.link.wait(_next, "the word to go on", rests=True)
            if isinstance(go, Go):
                return go
            self.arena.seed(self.parts, self.kept)
            self.link.say(lambda client: client.seeded())

    def take_go(self, *, extra: bool = False) -> None:
        """Wait for the word to go on, and load the weights that it names.

        What was read is thrown away if by then the minibatch was cancelled or this incarnation given up: only until
        then is the buffer safe from being written.
        """
        link = self.link
        while True:
            go = self.await_go()
            incarnation = link.client.incarnation
            link.opened()
            if go.pieces:
                self.load(go.pieces, extra=extra)
                self.loaded = (incarnation, go.pin)
                link.say(lambda client, pin=go.pin: client.fetched(pin))  # type: ignore[misc]  # mypy has no defaults of lambdas
            self.version = go.version
            if not link.is_cancelled() and not link.is_fenced(incarnation):
                return
            link.say(lambda client: client.stop())

    def load(self, pieces: tuple[tuple[int, int], ...], *, extra: bool) -> None:
        self.received_bytes += self.arena.weights[0].nbytes
        self.arena.fetch(self.parts, pieces, extra=extra)

    def load_last(self) -> None:
        """The weights at the end of the run, when nobody changes them any more."""
        lanes = self.arena.setting.shards if self.arena.setting.independent else 1
        words = [self.arena.committed(lane) for lane in range(lanes)]
        self.load(tuple((buffer.get(), version.get()) for version, buffer in words), extra=False)
        self.version = min(version.get() for version, _ in words)
        self.part()

    def begin(self) -> None:
        """A minibatch is about to be computed: on what is wanted now, not on what was cancelled while data was read."""
        link = self.link
        while not link.client.working or link.is_cancelled():
            if link.client.working:
                link.say(lambda client: client.stop())
            self.take_go()

    def step(self, absent: tuple[int, ...], report: Report) -> None:
        raise NotImplementedError

    def push(
        self, absent: tuple[int, ...], report: Report, *, version: int | None = None, finite: bool | None = None
    ) -> None:
        """The slot is full: say so."""
        link = self.link
        self.sent_bytes += self.arena.slots[0].nbytes
        if finite is None:
            finite = self.arena.is_finite(link.client.slot)
        ended_s = time.monotonic()

        def say(client: Any) -> list[Message]:
            client.leases = report.leases
            said: list[Message] = client.push(
                samples=report.samples,
                version=version,
                loss=report.loss,
                finite=finite,
                hyper=report.hyper,
                absent=absent,
                began_s=report.began_s - self.start_s,
                ended_s=ended_s - self.start_s,
            )
            return said

        link.say(say)

    def cancel(self, leases: tuple[Lease, ...], began_s: float) -> None:
        """The minibatch was cancelled: its samples go back."""
        link = self.link
        ended_s = time.monotonic()

        def say(client: Any) -> list[Message]:
            client.leases = leases
            said: list[Message] = client.stop(began_s=began_s - self.start_s, ended_s=ended_s - self.start_s)
            return said

        if link.is_cancelled():
            link.say(say)

    def step_aside(self) -> None:
        """It was given up between two minibatches, and writes nothing now: it may come again."""
        self.cancel((), time.monotonic())

    def flush(self) -> None:
        """Push what was computed and not pushed."""

    def rest(self) -> None:
        """An epoch has ended, and who knows what the user does now: the model must have weights that stay."""

    def part(self) -> None:
        """The run goes on without this learner: what the model has must be its own."""


class PushGradient(PushMode):
    """Every gradient is pushed, and the servers make the step."""

    def __init__(self, link: Link, parts: ModelTensors, rule: LearnerRule, local_step: Callable[[], Any]) -> None:
        super().__init__(link, parts, rule, local_step)
        self._squares = [0.0] * len(parts.trained)  # of the norms of what is in the slot
        self._views: dict[int, list[Tensor]] = {}  # of each buffer, where the model's parameters are in place

    def come(self) -> None:
        super().come()
        if self.arena.table.in_place:
            self.arena.protect()

    def load(self, pieces: tuple[tuple[int, int], ...], *, extra: bool) -> None:
        if not self.arena.table.in_place:
            super().load(pieces, extra=extra)
            return
        buffer = pieces[0][0]
        if buffer not in self._views:
            self._views[buffer] = self.arena.views(buffer, self.parts.trained)
        for parameter, view in zip(self.parts.trained, self._views[buffer], strict=True):
            parameter.data = view
        if extra:
            self.arena.fetch_extra(self.parts)

    def rest(self) -> None:
        if self.arena.table.in_place:
            self.begin()

    def part(self) -> None:
        if self.arena.table.in_place:
            for parameter in self.parts.trained:
                parameter.data = parameter.data.clone()

    def fill(self, index: int, gradient: Tensor) -> None:
        self._squares[index] = self.arena.fill(self.link.client.slot, index, gradient)

    def unchanged(self, index: int, gradient: Tensor) -> bool:
        """By its norm, as it was summed when it was filled. What is on a GPU is not looked at: that would take long."""
        square = self.arena.square(gradient)
        return square is None or square == self._squares[index]

    def step(self, absent: tuple[int, ...], report: Report) -> None:
        self.arena.clear(self.link.client.slot, absent)
        for index in absent:
            self._squares[index] = 0.0
        self.push(absent, report, finite=math.isfinite(sum(self._squares)))
        self.take_go()


class PushDelta(PushMode):
    """H steps of its own, then a push of by how much they moved the weights."""

    def __init__(self, link: Link, parts: ModelTensors, rule: LearnerRule, local_step: Callable[[], Any]) -> None:
        super().__init__(link, parts, rule, local_step)
        self._before = [torch.empty_like(p) for p in parts.trained]
        self._steps = 0
        self._leases: tuple[Lease, ...] = ()
        self._samples = 0
        self._report: Report | None = None

    def load(self, pieces: tuple[tuple[int, int], ...], *, extra: bool) -> None:
        super().load(pieces, extra=extra)
        with torch.no_grad():
            for before, parameter in zip(self._before, self.parts.trained, strict=True):
                before.copy_(parameter)

    def step(self, absent: tuple[int, ...], report: Report) -> None:
        if self.is_cancelled():
            self._leases += report.leases
            raise Cancelled
        self.local_step()
        self._steps += 1
        self._leases += report.leases
        self._samples += report.samples
        began_s = report.began_s if self._report is None else self._report.began_s
        self._report = report._replace(began_s=began_s)
        if self._steps == self.rule.push_every:
            self.flush()

    def flush(self) -> None:
        if self._report is None or not self.link.client.working:
            return
        if self.is_cancelled():
            self.cancel((), self._report.began_s)
            return
        with torch.no_grad():
            for index, (before, parameter) in enumerate(zip(self._before, self.parts.trained, strict=True)):
                self.arena.fill(self.link.client.slot, index, before - parameter)
        self.push((), self._report._replace(leases=self._leases, samples=self._samples))
        self._forget()
        self.take_go()

    def cancel(self, leases: tuple[Lease, ...], began_s: float) -> None:
        super().cancel((*self._leases, *leases), began_s)
        self._forget()

    def _forget(self) -> None:
        self._steps = self._samples = 0
        self._leases, self._report = (), None


class _Accrued(NamedTuple):
    """Gradients added up, on their way to the thread that pushes."""

    vector: Tensor
    version: int  # of the oldest weights that they were computed on
    report: Report
    incarnation: int  # that computed them: their samples are those of nobody else


class AsyncPushFetch(PushMode):
    """Own steps all the time. What is pushed is the sum of the gradients since the last push."""

    def __init__(self, link: Link, parts: ModelTensors, rule: LearnerRule, local_step: Callable[[], Any]) -> None:
        super().__init__(link, parts, rule, local_step)
        travels = DTYPES[self.arena.table.gradients]
        self._vectors = [torch.zeros(self.arena.table.items, dtype=travels) for _ in range(2)]
        self._accrued = self._vectors.pop()
        self._leases: tuple[Lease, ...] = ()
        self._samples = self._minibatches = 0
        self._first_version = 0
        self._stay = 0  # incarnation in which the minibatch began
        self._report: Report | None = None
        self._outbox: queue.Queue[_Accrued] = queue.Queue(maxsize=1)
        self._back: queue.Queue[Tensor] = queue.Queue()
        self._pushed = threading.Condition()
        self._under_way = 0
        self._wanted = threading.Event()
        self._staged: tuple[Tensor, int, tuple[int, int]] | None = None  # weights, their version, and as `loaded`
        self._reading: Tensor | None = None  # what is being copied into the model
        self._staging = [torch.empty_like(self.arena.weights[0]) for _ in range(3)]
        self._lock = threading.Lock()
        self._stages = threading.Lock()  # one thread at a time
        self._error: OffbeatError | None = None

    def is_cancelled(self) -> bool:
        return False

    def come(self) -> None:
        super().come()
        self._back.put(self._vectors.pop())
        for body in (self._push_all, self._fetch_all):
            threading.Thread(target=self._guarded, args=(body,), name=f"offbeat {body.__name__}", daemon=True).start()

    def begin(self) -> None:
        """On newer weights, if some have come meanwhile."""
        if self._error is not None:
            raise self._error
        if not self._under_way:  # else it goes on by itself; but not where it waited for the end of an epoch
            super().begin()
        if self._stay != self.incarnation:  # what was computed before is computed again, by others
            self._forget()
            self._stay = self.incarnation
        with self._lock:
            staged, self._staged = self._staged, None
            self._reading = None if staged is None else staged[0]
        if staged is not None and staged[2] > self.loaded:
            vector, self.version, self.loaded = staged
            with torch.no_grad():
                write_tensors(vector, self.parts.trained)
        self._reading = None

    def step(self, absent: tuple[int, ...], report: Report) -> None:
        if self._stay != self.incarnation:
            raise Cancelled
        if self._report is None:
            self._first_version = self.version
        for offset, parameter in zip(self.arena.offsets, self.parts.trained, strict=True):
            if parameter.grad is not None:
                place = self._accrued[offset : offset + parameter.numel()].view(parameter.shape)
                place.add_(parameter.grad.to(place.device))
        self.local_step()
        self._minibatches += 1
        self._leases += report.leases
        self._samples += report.samples
        began_s = report.began_s if self._report is None else self._report.began_s
        self._report = report._replace(began_s=began_s)
        if self._minibatches % self.rule.push_every == 0:
            self._hand_over()
        if self._minibatches % self.rule.fetch_every == 0:
            self._wanted.set()

    def _hand_over(self) -> None:
        """To the thread that pushes: computing waits only if the push before has not even begun."""
        if self._report is None:
            return
        report = self._report._replace(leases=self._leases, samples=self._samples)
        item = _Accrued(self._accrued, self._first_version, report, self._stay)
        with self._pushed:
            self._under_way += 1
        self._patiently(lambda: self._outbox.put(item, timeout=0.2))
        self._accrued = self._patiently(lambda: self._back.get(timeout=0.2))
        self._forget()

    def _patiently(self, take: Callable[[], T]) -> T:
        """As long as there is somebody to wait for."""
        while True:
            try:
                return take()
            except (queue.Full, queue.Empty):
                failed = self._error or self.link.failed
                if failed is not None:
                    raise failed from None

    def _forget(self) -> None:
        self._accrued.zero_()
        self._leases, self._samples, self._report = (), 0, None

    def flush(self) -> None:
        self._hand_over()
        with self._pushed:
            while self._under_way and self._error is None and self.link.failed is None:
                self._pushed.wait(0.2)

    def step_aside(self) -> None:
        with self._pushed:
            if self._under_way:  # the thread that pushes comes again by itself
                self._pushed.wait(0.05)
                return
        super().step_aside()

    # --- threads ----------------------------------------------------------------------------------------------------

    def _guarded(self, body: Callable[[], None]) -> None:
        try:
            body()
        except OffbeatError as error:
            self._error = error
            with self._pushed:
                self._pushed.notify_all()

    def _push_all(self) -> None:
        link = self.link
        while not link.closed:
            try:
                item = self._outbox.get(timeout=0.5)
            except queue.Empty:
                continue
            if item.incarnation != self.incarnation:
                self._back.put(item.vector)
                self._is_through()
                continue
            self.arena.slots[link.client.slot].copy_(item.vector)
            self._back.put(item.vector)
            self.push((), item.report, version=item.version)
            go = self.await_go()
            link.opened()
            if go.pieces:  # it was given up or away, and has come again
                self._stage(go.pieces, go.version, go.pin)
            self._is_through()

    def _is_through(self) -> None:
        with self._pushed:
            self._under_way -= 1
            self._pushed.notify_all()

    def _fetch_all(self) -> None:
        link = self.link
        while not link.closed:
            if not self._wanted.wait(0.5):
                continue
            self._wanted.clear()
            link.wait(lambda client: client.incarnation or None, "joining again")
            link.say(lambda client: client.ask() if client.incarnation else [])
            found = link.wait(lambda client: client.weights if client.asks else "again", "weights")
            if isinstance(found, Weights):
                self._stage(found.pieces, found.version, found.pin)
            else:  # it was given up meanwhile
                self._wanted.set()

    def _stage(self, pieces: tuple[tuple[int, int], ...], version: int, pin: int) -> None:
        """Copy the weights beside, for the next minibatch to begin with."""
        incarnation = self.link.client.incarnation
        with self._stages:
            with self._lock:
                taken = (self._reading, None if self._staged is None else self._staged[0])
                vector = next(one for one in self._staging if all(one is not other for other in taken))
            self.arena.gather(pieces, out=vector)
            self.received_bytes += vector.nbytes
            self.link.say(lambda client: client.fetched(pin))
            with self._lock:
                newer = self._staged is None or (incarnation, pin) > self._staged[2]
                if newer and not self.link.is_fenced(incarnation):
                    self._staged = (vector, version, (incarnation, pin))
