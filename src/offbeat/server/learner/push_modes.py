"""What a learner pushes, and when. The strategy chooses one of three modes.

    PushGradient     every policy but those below: the servers make the steps, and the learner waits for their weights
    PushDelta        local-sgd and DiLoCo: H steps of the learner's own optimizer, then by how much the weights moved;
                     with `overlap` it computes on while that is answered
    AsyncPushFetch   Downpour: own steps all the time; one thread pushes, one fetches, and computing waits for neither

A push: `gradient_hooks` copies gradients into the learner's slot (`fill`), `optimizer.step()` calls `step`, that calls
`push`, which says so on the connection; `take_go` waits for the answer and loads the weights that it names.
"""

from __future__ import annotations

import math
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from offbeat.codecs.feedback import Feedback
from offbeat.errors import OffbeatError
from offbeat.leases import Lease
from offbeat.policies import LearnerRule
from offbeat.server.arena import Pieces
from offbeat.server.device_copies import are_finite
from offbeat.server.learner.connection import Connection, ConnectionState
from offbeat.server.learner.gradient_hooks import GradientSink
from offbeat.server.parameter_layout import DTYPES, ModelTensors, views, write_tensors
from offbeat.server.wire import Go, Hyper, Weights


class PushReport(NamedTuple):
    """What is told of a minibatch, or of several that are pushed as one."""

    hyper: tuple[Hyper, ...]
    samples: int
    loss: float | None
    leases: tuple[int, ...]
    began_s: float

    def after(self, earlier: PushReport | None) -> PushReport:
        """Together with what was computed before and not pushed."""
        if earlier is None:
            return self
        samples, leases = earlier.samples + self.samples, earlier.leases + self.leases
        return self._replace(samples=samples, leases=leases, began_s=earlier.began_s)


class PushMode(GradientSink):
    """What all have in common: the connection, the model, the batch at hand, and taking what a Go says."""

    def __init__(
        self, connection: Connection, tensors: ModelTensors, rule: LearnerRule, local_step: Callable[[], object]
    ) -> None:
        self.connection, self.tensors, self.rule, self.local_step = connection, tensors, rule, local_step
        self.state, self.arena = connection.state, connection.arena
        self.version = 0  # of the weights that the model has
        self.sent_bytes = self.received_bytes = 0  # gradients, and weights
        self._told_bytes = 0  # of those received, as the coordinator knows
        self.loaded = (0, 0)  # incarnation and pin under which it got them: later ones are larger
        self.resumed: Mapping[str, Tensor] | None = None  # what the run goes on from, if this learner is asked for it
        self.feedback: Feedback | None = None
        if rule.codec is not None:
            items, learners = self.arena.table.items, self.arena.setting.learners
            self.feedback = Feedback(rule.codec, items, self.state.learner, learners, undoes=True)
        self._coded: tuple[int, int] | None = None  # incarnation and seq of the push that was coded last
        self.leases: tuple[Lease, ...] = ()  # of what the loader has handed out since the last step
        self.leased_to = 0  # the incarnation that they belong to; 0: no leases
        self._start_s = connection.accepted.start_s
        if any(parameter.device.type == "cuda" for parameter in tensors.trained):
            self.arena.pin()

    def take_leases(self) -> tuple[int, ...]:
        """The numbers of the leases at hand, which are answered for now."""
        numbers = tuple(lease.number for lease in self.leases)
        self.leases, self.leased_to = (), 0
        return numbers

    # --- called by the hooks ------------------------------------------------------------------------------------------

    def fill(self, index: int, gradient: Tensor) -> None:
        """A gradient is there."""

    def is_cancelled(self) -> bool:
        """Whether the minibatch is not wanted any more, or its samples are those of another."""
        return self.connection.is_cancelled() or self._has_lost_leases()

    def _has_lost_leases(self) -> bool:
        return self.leased_to not in (0, self.state.incarnation)

    # --- weights ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Wait for the beginning, and take what all begin with."""
        self.take_go(extra=True)

    def begin(self) -> None:
        """A minibatch is about to be computed: on what is wanted now, not on what was cancelled while data was read."""
        while not self.state.working or self.connection.is_cancelled():
            if self.state.working:
                self.step_aside()
            self.take_go()

    def take_go(self, *, extra: bool = False) -> None:
        """Wait for the word to go on, and load the weights that it names.

        What was read is thrown away if by then the minibatch was cancelled or this incarnation given up: only until
        then is the buffer safe from being written.
        """
        while True:
            go = self.wait_for_go()
            incarnation = self.state.incarnation
            if go.pieces:
                self.load(self.arena.awaited(go.pieces, incarnation, go.pin), extra=extra)
                self.loaded = (incarnation, go.pin)
                if not self.arena.setting.in_place:  # else the buffer is its own until its next push
                    self.connection.say(ConnectionState.fetched, go.pin)
            self.version = go.version
            if not self.connection.is_cancelled() and not self.connection.is_fenced(incarnation):
                if go.pieces:
                    self.arena.confirm(self.tensors)
                return
            self.connection.say(ConnectionState.stop)

    def wait_for_go(self) -> Go:
        """The word to go on, with which a minibatch begins; a learner may first be asked for the initial weights."""
        while True:
            go = self.connection.wait(ConnectionState.begun_or_seed, "permission to continue", pauses=True)
            if isinstance(go, Go):
                self.connection.minibatch_begun()
                self._settle()
                return go
            self.arena.seed(self.tensors, self.resumed)
            self.connection.say(ConnectionState.seeded)

    def _settle(self) -> None:
        """What was coded for a push that is not used stays to be sent. It is sent for good if nobody can tell."""
        coded, self._coded = self._coded, None
        if self.feedback is not None and coded is not None:
            incarnation, seq = coded
            if incarnation == self.state.incarnation and seq in self.state.unused:
                self.feedback.put_back()

    def load(self, pieces: Pieces, *, extra: bool, exact: bool = False) -> None:
        """Weights, into the model; with `extra` what is not trained too. `exact`: as the servers have them."""
        self.received_bytes += self.arena.fetch(self.tensors, pieces, extra=extra, exact=exact)

    def load_last(self) -> None:
        """The weights at the end of the run, when nobody changes them any more."""
        pieces = self.arena.last()
        self.load(pieces, extra=False, exact=True)
        self.version = min(version for _, version in pieces)
        self.detach()

    def epoch_ended(self) -> None:
        """Who knows what the user does now: the model must have weights that stay."""

    def detach(self) -> None:
        """The run goes on without this learner: what the model has must be its own."""

    # --- pushing ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def step(self, report: PushReport, absent: tuple[int, ...]) -> None:
        """`optimizer.step()`: the gradients are there, but for parameters that are `absent`."""

    def flush(self) -> None:
        """Push what was computed and not pushed."""
        self.arena.filled()  # it may leave now, and others have the slot

    def push(
        self,
        report: PushReport,
        *,
        absent: tuple[int, ...] = (),
        version: int | None = None,
        finite: bool | None = None,
        delay: int | None = None,
    ) -> None:
        """The slot is full: say so. What is not finite is not applied, so it is not coded either."""
        self.arena.filled()
        finite = self.arena.is_finite(self.state.slot) if finite is None else finite
        if self.feedback is not None:
            absent = ()  # something that is left of an earlier gradient may be sent for them
            if finite:
                self.arena.encode(self.state.slot, self.feedback)
                self._coded = self.state.incarnation, self.state.seq
        by_row = bool(self.arena.row_tables)
        size_bytes = self.arena.push_bytes(self.state.slot)
        self.sent_bytes += size_bytes if by_row else self.rule.push_bytes(size_bytes)
        self.arena.deliver(self.state.slot)
        self.connection.say(
            ConnectionState.push,
            samples=report.samples,
            version=version,
            loss=report.loss,
            finite=finite,
            hyper=report.hyper,
            leases=report.leases,
            absent=absent,
            sent_bytes=size_bytes if by_row else 0,
            received_bytes=self.received_bytes - self._told_bytes if by_row else 0,
            began_s=report.began_s - self._start_s,
            ended_s=time.monotonic() - self._start_s,
            delay=delay,
        )
        self._told_bytes = self.received_bytes

    def cancel(self, began_s: float) -> None:
        """The open minibatch, computed since `began_s`, was cancelled: its samples go back."""
        self._stop(self._forget_computed() + self.take_leases(), began_s)

    def step_aside(self) -> None:
        """It was cancelled or given up between two minibatches, and writes nothing now: it may join again."""
        self._stop(self._forget_computed())

    def _stop(self, leases: tuple[int, ...], began_s: float | None = None) -> None:
        self.arena.filled()  # others may have the slot next
        if self.connection.is_cancelled():
            ended_s = time.monotonic()
            times = () if began_s is None else (began_s - self._start_s, ended_s - self._start_s)
            self.connection.say(ConnectionState.stop, leases, *times)

    def _forget_computed(self) -> tuple[int, ...]:
        """Leave out what was computed before the batch at hand and was not pushed; its leases."""
        return ()


class PushGradient(PushMode):
    """Every gradient is pushed, and the servers make the step."""

    def __init__(
        self, connection: Connection, tensors: ModelTensors, rule: LearnerRule, local_step: Callable[[], object]
    ) -> None:
        super().__init__(connection, tensors, rule, local_step)
        self._squares = [0.0] * len(tensors.trained)  # of the norms of what is in the slot
        self._copied: dict[int, Tensor] = {}  # gradients that are copied from a GPU, and not looked at yet

    def begin(self) -> None:
        self._copied.clear()
        super().begin()

    def fill(self, index: int, gradient: Tensor) -> None:
        square = self.arena.fill(self.state.slot, index, gradient, stays=True)
        self._squares[index] = square or 0.0
        if square is None:
            self._copied[index] = gradient

    def is_unchanged(self, index: int, gradient: Tensor) -> bool:
        """By its norm, as it was summed when it was filled. On a GPU it is not checked: that would take long."""
        square = self.arena.square(gradient)
        return square is None or square == self._squares[index]

    def step(self, report: PushReport, absent: tuple[int, ...]) -> None:
        self.arena.filled()  # else a copy could come after what is cleared
        self.arena.clear(self.state.slot, absent)
        for index in absent:
            self._squares[index] = 0.0
            self._copied.pop(index, None)
        copied, self._copied = self._copied, {}
        finite = math.isfinite(sum(self._squares)) and are_finite(copied.values(), self.arena.slots[0].dtype)
        self.push(report, absent=absent, finite=finite)
        self.take_go()


class PushGradientInPlace(PushGradient):
    """The same, with the servers' memory as the model's parameters: a fetch copies nothing."""

    def start(self) -> None:
        self._views: dict[int, list[Tensor]] = {}  # by buffer
        super().start()
        self.arena.protect()

    def load(self, pieces: Pieces, *, extra: bool, exact: bool = False) -> None:
        trained, buffer = self.tensors.trained, pieces[0][0]
        if buffer not in self._views:
            self._views[buffer] = views(self.arena.weights[buffer], trained)
        for parameter, view in zip(trained, self._views[buffer], strict=True):
            parameter.data = view
        if extra:
            write_tensors(self.arena.extra, self.tensors.extra)

    def epoch_ended(self) -> None:
        self.begin()

    def detach(self) -> None:
        for parameter in self.tensors.trained:
            parameter.data = parameter.data.clone()


class PushDelta(PushMode):
    """H steps of its own, then a push of by how much they moved the weights.

    With `rule.overlaps` it goes on from its own weights x after a push. d steps later, where d is within
    `rule.delays`, it takes the new weights w', and with them its own change since the push: w' + (x - x at the push).
    The next push is by how much all H steps moved the weights, those d included. With d = 0 that is the plain form.
    Where nothing may be in the air (the end of an epoch, a pause, a call to the others) it waits for the new weights.
    """

    def __init__(
        self, connection: Connection, tensors: ModelTensors, rule: LearnerRule, local_step: Callable[[], object]
    ) -> None:
        super().__init__(connection, tensors, rule, local_step)
        # The weights that it was given last, or, while a push is not answered, its own at that push.
        self._before = [torch.empty_like(p) for p in tensors.trained]
        self._steps = 0  # since the last push
        self._computed: PushReport | None = None  # in these steps
        self._awaits = False  # the new weights, and computes meanwhile
        self._pushed_as = 0  # the incarnation that awaits them
        self._delay: int | None = None  # steps between the last push and the new weights

    def is_cancelled(self) -> bool:
        """While new weights are awaited there is no minibatch to cancel: only its incarnation can be given up."""
        if self._awaits:
            return self._pushed_as != self.state.incarnation or self._has_lost_leases()
        return super().is_cancelled()

    def begin(self) -> None:
        if self._awaits and self._pushed_as != self.state.incarnation:
            self._forget_computed()
        self._take_if_due()
        if not self._awaits:
            super().begin()

    def load(self, pieces: Pieces, *, extra: bool, exact: bool = False) -> None:
        moved: list[Tensor] = []
        with torch.no_grad():
            if self._awaits and self._steps and self._pushed_as == self.state.incarnation:
                moved = [p - before for p, before in zip(self.tensors.trained, self._before, strict=True)]
            super().load(pieces, extra=extra, exact=exact)
            for before, parameter in zip(self._before, self.tensors.trained, strict=True):
                before.copy_(parameter)
            for parameter, change in zip(self.tensors.trained, moved, strict=False):
                parameter.add_(change)

    def step(self, report: PushReport, absent: tuple[int, ...]) -> None:
        self.local_step()
        self._steps += 1
        self._computed = report.after(self._computed)
        self._take_if_due()
        if self._steps == self.rule.push_every:
            self._push_moved()

    def flush(self) -> None:
        """Nothing is in the air after it: the model has the weights that answer all that it has computed."""
        if self._awaits:
            self._take()
        if self._computed is not None and self.state.working:
            self._push_moved(waits=True)

    def _push_moved(self, *, waits: bool = False) -> None:
        computed = self._computed
        assert computed is not None
        if self.connection.is_cancelled():
            self._stop(self._forget_computed(), computed.began_s)
            return
        with torch.no_grad():
            for index, (before, parameter) in enumerate(zip(self._before, self.tensors.trained, strict=True)):
                self.arena.fill(self.state.slot, index, before - parameter)
                if self.rule.overlaps:
                    before.copy_(parameter)
        delay, self._delay = self._delay, None
        pushed_as = self.state.incarnation
        self.push(computed, delay=delay)
        self._forget_computed()
        self._awaits, self._pushed_as = True, pushed_as
        if waits:
            self._take()
        else:
            self._take_if_due()

    def _take_if_due(self) -> None:
        """The new weights, as soon as they are there, but within the delays of the rule."""
        least, most = self.rule.delays
        if self._awaits and self._steps >= least and (self._steps >= most or self._have_come()):
            self._take()

    def _have_come(self) -> bool:
        """Whether the new weights are here; or whether it is called to a pause, or the run is over: then it waits."""
        state = self.connection.read_pending()
        go = state.go
        if state.pause is not None or state.over or self.connection.end_wanted:
            return True
        return go is not None and self.arena.is_here(go.pieces, go.incarnation, go.pin)

    def _take(self) -> None:
        if self._pushed_as != self.state.incarnation:
            self._forget_computed()
        began_s = time.monotonic()
        self.take_go()
        if self._computed is not None:  # this was no computing
            waited_s = time.monotonic() - began_s
            self._computed = self._computed._replace(began_s=self._computed.began_s + waited_s)
        if self._pushed_as == self.state.incarnation:
            self._delay = self._steps if self._awaits and self.rule.overlaps else None
            self._awaits = False
        else:  # it was given up meanwhile, and has joined again: what it had computed is computed again by others
            self._forget_computed()

    def cancel(self, began_s: float) -> None:
        if self._awaits and not self.state.incarnation:  # given up, and not welcome again yet
            self._forget_computed()
            self.take_leases()
        else:
            super().cancel(began_s)

    def _forget_computed(self) -> tuple[int, ...]:
        leases = () if self._computed is None else self._computed.leases
        self._steps, self._computed, self._awaits = 0, None, False
        return leases


class _GradientSum(NamedTuple):
    """Gradients added up, on their way to the thread that pushes."""

    vector: Tensor
    version: int  # of the oldest weights that they were computed on
    report: PushReport
    incarnation: int  # that computed them: their samples are those of nobody else


class _StagedWeights(NamedTuple):
    """Weights that were read beside the model, for the next minibatch to begin with."""

    vector: Tensor
    version: int
    loaded: tuple[int, int]  # as `PushMode.loaded`


class AsyncPushFetch(PushMode):
    """Own steps all the time. What is pushed is the sum of the gradients since the last push."""

    def __init__(
        self, connection: Connection, tensors: ModelTensors, rule: LearnerRule, local_step: Callable[[], object]
    ) -> None:
        super().__init__(connection, tensors, rule, local_step)
        items, dtype = self.arena.table.items, DTYPES[self.arena.table.gradients]
        self._sum = torch.zeros(items, dtype=dtype)
        self._spare: Tensor | None = torch.zeros(items, dtype=dtype)  # to add up in while the other is pushed
        self._computed: PushReport | None = None  # what is in the sum
        self._first_version = 0
        self._minibatches = 0
        self._computes_as = 0  # the incarnation in which the minibatch began
        self._changed = threading.Condition()  # of all below, and of `_spare`
        self._outgoing: _GradientSum | None = None
        self._under_way = 0  # sums that are handed over, and not answered yet
        self._error: OffbeatError | None = None
        self._wanted = threading.Event()  # weights are
        self._staged: _StagedWeights | None = None
        self._reading: Tensor | None = None  # what is being copied into the model
        self._staging = [torch.empty_like(self.arena.weights[0]) for _ in range(3)]
        self._stages = threading.Lock()  # one thread at a time

    def is_cancelled(self) -> bool:
        """Only with its incarnation: what that computed is computed again, by others."""
        return self._computes_as != self.state.incarnation or self._has_lost_leases()

    def start(self) -> None:
        super().start()
        self._computes_as = self.state.incarnation
        for body in (self._push_all, self._fetch_all):
            threading.Thread(target=self._guarded, args=(body,), name=f"offbeat {body.__name__}", daemon=True).start()

    def begin(self) -> None:
        """On newer weights, if some have come meanwhile."""
        if self._error is not None:
            raise self._error
        if not self._under_way:  # else it goes on by itself; but not where it waited for the end of an epoch
            super().begin()
        if self._computes_as != self.state.incarnation:
            self._start_sum()
            self._computes_as = self.state.incarnation
        with self._changed:
            staged, self._staged = self._staged, None
            self._reading = None if staged is None else staged.vector
        if staged is not None and staged.loaded > self.loaded:
            self.version, self.loaded = staged.version, staged.loaded
            with torch.no_grad():
                write_tensors(staged.vector, self.tensors.trained)
        self._reading = None

    def step(self, report: PushReport, absent: tuple[int, ...]) -> None:
        if self._computed is None:
            self._first_version = self.version
        for offset, parameter in zip(self.arena.offsets, self.tensors.trained, strict=True):
            if parameter.grad is not None:
                place = self._sum[offset : offset + parameter.numel()].view(parameter.shape)
                place.add_(parameter.grad.to(place.device))
        self.local_step()
        self._minibatches += 1
        self._computed = report.after(self._computed)
        if self._minibatches % self.rule.push_every == 0:
            self._hand_over()
        if self._minibatches % self.rule.fetch_every == 0:
            self._wanted.set()

    def _hand_over(self) -> None:
        """To the thread that pushes: computing waits only if the push before has not even begun."""
        if self._computed is None:
            return
        with self._changed:
            while self._spare is None:
                failed = self._error or self.connection.failed
                if failed is not None:
                    raise failed
                self._changed.wait(0.2)
            self._outgoing = _GradientSum(self._sum, self._first_version, self._computed, self._computes_as)
            self._under_way += 1
            self._sum, self._spare = self._spare, None
            self._changed.notify_all()
        self._start_sum()

    def _start_sum(self) -> None:
        self._sum.zero_()
        self._computed = None

    def flush(self) -> None:
        self._hand_over()
        with self._changed:
            while self._under_way and self._error is None and self.connection.failed is None:
                self._changed.wait(0.2)

    def step_aside(self) -> None:
        with self._changed:
            if self._under_way:  # the thread that pushes joins again by itself
                self._changed.wait(0.05)
                return
        super().step_aside()

    # --- threads ----------------------------------------------------------------------------------------------------

    def _guarded(self, body: Callable[[], None]) -> None:
        try:
            body()
        except OffbeatError as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _push_all(self) -> None:
        while not self.connection.closed:
            with self._changed:
                outgoing, self._outgoing = self._outgoing, None
                if outgoing is None:
                    self._changed.wait(0.5)
                    continue
            wanted = outgoing.incarnation == self.state.incarnation
            if wanted:
                self.arena.put(self.state.slot, outgoing.vector)
            with self._changed:
                self._spare = outgoing.vector
                self._changed.notify_all()
            if wanted:
                self.push(outgoing.report, version=outgoing.version)
                go = self.wait_for_go()
                if go.pieces:  # it was given up or away, and has joined again
                    self._stage(go)
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def _fetch_all(self) -> None:
        while not self.connection.closed:
            if not self._wanted.wait(0.5):
                continue
            self._wanted.clear()
            self.connection.wait(ConnectionState.joined, "joining again")
            self.connection.say(ConnectionState.request_weights)
            found = self.connection.wait(lambda state: state.answer_or_again(Weights), "weights")
            if isinstance(found, Weights):
                self._stage(found)
            else:  # it was given up meanwhile
                self._wanted.set()

    def _stage(self, told: Go | Weights) -> None:
        """Copy the weights that it names beside, for the next minibatch to begin with."""
        incarnation, pin = told.incarnation, told.pin
        with self._stages:
            with self._changed:
                taken = (self._reading, None if self._staged is None else self._staged.vector)
                vector = next(one for one in self._staging if all(one is not other for other in taken))
            self.arena.rounded(self.arena.gather(self.arena.awaited(told.pieces, incarnation, pin), out=vector))
            self.received_bytes += self.rule.fetch_bytes(vector.nbytes)
            self.connection.say(ConnectionState.fetched, pin)
            with self._changed:
                newer = self._staged is None or (incarnation, pin) > self._staged.loaded
                if newer and not self.connection.is_fenced(incarnation):
                    self._staged = _StagedWeights(vector, told.version, (incarnation, pin))
