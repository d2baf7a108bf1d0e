"""A learner of a parameter server, for people who keep their own loop.

    learner = offbeat.join()
    model, optimizer, loader = learner.prepare(model, optimizer, loader)
    for inputs, targets in loader:
        with learner.minibatch() as minibatch:
            optimizer.zero_grad()
            loss_fn(model(inputs), targets).backward()
            optimizer.step()  # pushes, waits as the policy says, fetches

What the user's optimizer says (its kind, its groups, their learning rates now) is what the servers do; its own state
stays unused. A minibatch that is cancelled ends where it is, quietly: `minibatch.cancelled` tells.

The walk of a push: `optimizer.step()` is `ServedLearner._step`; `gradient_hooks` has filled the learner's slot by then;
the `PushMode` pushes it over the `Connection`, waits, and loads the weights that come back.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from offbeat.errors import OffbeatError, PeerError, RequestError
from offbeat.leases import Answer, Lease
from offbeat.policies import create
from offbeat.server.coordinator.group_calls import GAVE_UP
from offbeat.server.handshake import Road
from offbeat.server.learner import leased_loader
from offbeat.server.learner.connection import A, Again, Connection, ConnectionState
from offbeat.server.learner.gradient_hooks import Cancelled, Hooks
from offbeat.server.learner.interface import Learner, OpenMinibatch, replace_step
from offbeat.server.learner.push_modes import (
    AsyncPushFetch,
    PushDelta,
    PushGradient,
    PushGradientInPlace,
    PushMode,
    PushReport,
)
from offbeat.server.parameter_layout import (
    DTYPES,
    layout_of,
    model_tensors,
    row_parameters,
    state_from_vectors,
    state_to_vectors,
    write_tensors,
)
from offbeat.server.remote.remote_road import RemoteRoad, road_to
from offbeat.server.remote.spread_arena import SpreadArena
from offbeat.server.shard import optimizers
from offbeat.server.wire import MOST_DATA_BYTES, EnterPause, Granted, GroupCallAnswer, Hyper, Message


class LeaseHook(Protocol):
    """Called when the loader begins to wait for samples, and when it has some to read."""

    def __call__(self, *, waits: bool) -> None: ...


class ServedLearner(Learner):
    """A learner of a parameter server, as `offbeat.join()` returns it for a policy such as "k-sync:3".

        model, optimizer, loader = learner.prepare(model, optimizer, loader)
        for inputs, targets in loader:
            with learner.minibatch() as minibatch:
                optimizer.zero_grad()
                loss_fn(model(inputs), targets).backward()
                optimizer.step()  # pushes the gradient, waits as the policy says, fetches the weights
        learner.finish()

    `help(offbeat.Learner)` describes the calls that every strategy has. Attributes: `strategy` (the line), `number` (of
    this learner, from 0), `learners` (how many), `version` (of the weights), `notes` (what `prepare` did differently).
    """

    def __init__(
        self,
        *,
        line: str,
        number: int,
        learners: int,
        listener: str,
        token: str,
        slow: Sequence[str] = (),
        seed: int = 0,
        at_end: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(line, number, learners, slow=slow, seed=seed)
        self._listener, self._token = listener, token
        self._at_end = at_end
        self._policy = create(line, expect=learners)
        self.on_pause: Callable[[EnterPause], bool] | None = None  # what is to be done in a pause; True ends the run
        self.on_lease: LeaseHook = _ignore_lease  # told when the loader waits for samples, and when it has some
        self.server_state: Mapping[str, Tensor] | None = None  # set before `prepare`: a `snapshot` to go on from
        self._road: Road | None = None
        self._connection: Connection | None = None
        self._mode: PushMode | None = None
        self._hooks: Hooks | None = None
        self._outer_hyper: tuple[Hyper, ...] | None = None  # of the servers' own optimizer, if it is another
        self._told_hyper: tuple[Hyper, ...] = ()  # that was last found to be one that servers can make a step with
        self._end_wanted = self._has_begun = False
        self._wants_state = False  # in the pause that it leads
        self._state: tuple[dict[str, Tensor], int] | None = None  # of the servers, and its version
        self._calls = 0  # to the other learners
        self._last_cancelled = False
        self.pushed_s = 0.0  # when it has last pushed, by the monotonic clock
        self._has_entered = False  # `with learner.minibatch()`, ever
        self._step_with_accumulated: Callable[[], object] | None = None  # by trainers that step after several batches
        self._since_s = 0.0  # when the last step ended
        self._pid = os.getpid()

    # --- preparing --------------------------------------------------------------------------------------------------

    def _attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None,
        gradients: str | None,
        *,
        in_place: bool,
    ) -> nn.Module:
        delta, fetches = self._policy.rule.delta, self._policy.rule.fetch_every > 0
        if in_place and (delta or fetches):
            raise RequestError(f"in_place does not work with '{self.strategy}', whose learners take local steps")
        own = self._policy.rule
        if in_place and own.down is not None:
            raise RequestError(f"in_place does not work with '{self.strategy}': rounded weights need their own memory")
        tensors, groups = model_tensors(model, optimizer)
        rule, hypers = optimizers.describe(optimizer)
        by_row = row_parameters(model, tensors)
        if by_row and (delta or fetches or own.codec is not None):
            why = "a codec codes the whole vector" if own.codec is not None else "learners take local steps"
            self._notes += (f"gradients of sparse embeddings are pushed whole with '{self.strategy}': {why}",)
            by_row = frozenset()
        if delta:
            rule, hypers = "sgd", optimizers.outer_of(self._policy.outer_optimizer, optimizer)
        layout = layout_of(
            model,
            tensors,
            groups,
            rule=rule,
            states=optimizers.state_names(rule, hypers),
            gradients=gradients,
            clip_norm=clip_norm or 0.0,
            in_place=in_place,
            rows=by_row,
        )
        if (own.codec or own.down) and (layout.dtype, layout.gradients) != ("float32", "float32"):
            raise RequestError(
                f"'{self.strategy}': codecs are for float32; the model has {layout.dtype} weights and "
                f"{layout.gradients} gradients"
            )
        road = self._road = road_to(self._listener, self._token, self.number)
        connection = self._connection = Connection(road, self._token, self.number, layout, self._in_pause)
        self._trains = model, optimizer
        plain = PushGradientInPlace if in_place else PushGradient
        kind = PushDelta if delta else AsyncPushFetch if fetches else plain
        mode = self._mode = kind(connection, tensors, self._policy.rule, optimizer.step)
        corrects = mode.arena.setting.corrects
        if fetches and corrects:
            mode.local_step = optimizers.without_velocity(optimizer)
        mode.resumed = self._resumed_state(mode, optimizer)
        if mode.resumed is not None:
            mode.arena.check_kept(mode.resumed)
        if delta and corrects:
            hypers = optimizers.outer_of(self._policy.outer_optimizer, optimizer, corrects=True)
            note = optimizers.outer_note(self._policy.outer_optimizer, hypers)
            self._notes += (note,) if note else ()
        self._outer_hyper = tuple(hypers) if delta else None
        self._hooks = Hooks(
            model, tensors.trained, mode, keeps_buffers=self._policy.cancels, rows=mode.arena.row_tables
        )
        self._notes += (*self._hooks.notes, *optimizers.notes_of(optimizer))
        self._unsaid = () if self._policy.cancels else self._hooks.notes  # those are about cancelling
        mode.start()
        self._has_begun = True
        connection.end_wanted = self._end_wanted
        self._since_s = time.monotonic()
        self._replace_methods(optimizer, tensors.trained)
        return model

    def _resumed_state(self, mode: PushMode, optimizer: torch.optim.Optimizer) -> Mapping[str, Tensor] | None:
        """What the servers begin with, if not with fresh state: what is given, or the state that the optimizer has."""
        if self.server_state is not None:
            return self.server_state
        table, trained = mode.arena.table, mode.tensors.trained
        if self._policy.rule.delta:
            outer = (self._loaded or {}).get("outer")
            if outer is None:
                return None
            return {**state_to_vectors(trained, {}, (), DTYPES[table.dtype]), **outer}
        if not any(optimizer.state.values()):
            return None
        found = state_to_vectors(trained, optimizer.state, table.states, DTYPES[table.dtype])
        if not self._policy.rule.fetch_every:
            optimizer.state.clear()  # from now on it is the servers'
        return found

    def _replace_methods(self, optimizer: torch.optim.Optimizer, trained: Sequence[nn.Parameter]) -> None:
        """The optimizer's step and state are those of the servers from now on."""

        def step(closure: Callable[[], Any] | None = None) -> Any:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler looks at
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            now = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            if len(now) != len(trained) or any(one is not other for one, other in zip(now, trained, strict=True)):
                raise RequestError("the parameters of the optimizer changed after learner.prepare; call prepare last")
            for hook in optimizer._optimizer_step_pre_hooks.values():
                hook(optimizer, (), {})
            self._step()
            for hook in optimizer._optimizer_step_post_hooks.values():
                hook(optimizer, (), {})
            return loss

        replace_step(optimizer, step)
        if not self._policy.rule.delta:  # there the learner's own optimizer is the one that counts
            # The servers have the state.
            optimizer.state_dict = lambda: self._as_optimizer_state(  # type: ignore[method-assign] # of this one optimizer
                self._state_of_servers()[0]
            )
        optimizer.load_state_dict = _refuse_to_load  # type: ignore[method-assign, assignment]  # likewise

    def _share(self, loader: Any) -> leased_loader.LoaderWrapper:
        connection, _, _ = self._ready()
        source = _CoordinatorLeases(self)
        wrapped = leased_loader.wrap(loader, source, seed=connection.accepted.seed)
        source.epoch_samples = wrapped.samples if isinstance(wrapped, leased_loader.LeasedLoader) else 0
        return wrapped

    def _follow_version(self, scheduler: Any) -> Any:
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise RequestError("ReduceLROnPlateau follows your own metric, not versions; do not pass it to prepare")
        return follow(scheduler, lambda: self.version)

    # --- the loop ---------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version of the weights that the model has now: the number of updates that this run has made so far."""
        return 0 if self._mode is None else self._mode.version

    @contextmanager
    def minibatch(self) -> Iterator[OpenMinibatch]:
        """One minibatch, as a `with` block: forward, backward, `optimizer.step()`.

        A cancelled one ends where it is, without an error; `minibatch.cancelled` is then True.
        """
        _, mode, hooks = self._ready()
        if self._open is None:
            mode.begin()
            self._last_cancelled = False
        minibatch = OpenMinibatch(time.monotonic() if self._open is None else self._open.began_s)
        self._open = minibatch
        self._has_entered = True
        hooks.begin()
        try:
            yield minibatch  # without a step it goes on with the next batch: gradients are accumulated
        except Cancelled:
            if self._open is minibatch:
                minibatch.cancelled = True
                self._give_up(minibatch)
        except BaseException:  # of the user's own. If the program ends by it others compute its samples
            if self._open is minibatch:
                self._open = None
                hooks.end()
            raise
        finally:
            hooks.interrupts = False

    def accumulate(self, step: Callable[[], object]) -> None:
        """For trainers that take batches without `with learner.minibatch()` and step after several of them.

        The batches since the last step belong to the next. `step` is called where samples are waited for while some
        were computed and not pushed: others may wait for them.
        """
        self._step_with_accumulated = step

    def _ready(self) -> tuple[Connection, PushMode, Hooks]:
        if self._connection is None or self._mode is None or self._hooks is None:
            raise RequestError("call learner.prepare(model, optimizer, loader) first")
        if self._connection.state.left:
            raise RequestError("this learner has finished and left the run")
        return self._connection, self._mode, self._hooks

    def _give_up(self, minibatch: OpenMinibatch) -> None:
        """The open minibatch is not wanted: the model is as it was before it, and its samples go back."""
        _, mode, hooks = self._ready()
        self._last_cancelled = True
        hooks.abandon()
        mode.cancel(minibatch.began_s)
        self._open = None

    def _discard_batch(self) -> None:
        """Samples that were handed out and that the user had no use for; they do not come again."""
        connection, mode, _ = self._ready()
        leases = mode.take_leases()
        if leases:
            connection.say(ConnectionState.give_back, leases, unused=True)

    def _step(self) -> None:
        """What `optimizer.step()` does now."""
        _, mode, hooks = self._ready()
        if self._open is None:  # a loop without `with learner.minibatch()`: it is never interrupted
            self._open = OpenMinibatch(self._since_s)
        minibatch = self._open
        try:
            self._push(minibatch)
            self._open = None
            self._last_cancelled = False
        except Cancelled:
            if hooks.interrupts:
                raise
            self._give_up(minibatch)  # too late: what it has computed is dropped
            mode.begin()
        self._since_s = time.monotonic()

    def _push(self, minibatch: OpenMinibatch) -> None:
        connection, mode, hooks = self._ready()
        self._be_slow(minibatch.began_s, mode.is_cancelled, connection.sleep)
        if mode.is_cancelled():
            raise Cancelled
        absent = hooks.finish()
        samples = minibatch.samples or sum(lease.count for lease in mode.leases) or 1
        loss = None if minibatch.loss is None else float(minibatch.loss)
        hyper = self._outer_hyper
        if hyper is None:
            hyper = tuple(optimizers.describe(self._trained()[1])[1])
            if hyper != self._told_hyper:
                fault = optimizers.hyper_fault(mode.arena.table, hyper)
                if fault:
                    raise RequestError(f"the servers cannot make this step: {fault}")
                self._told_hyper = hyper
        self.pushed_s = time.monotonic()
        mode.step(PushReport(hyper, samples, loss, mode.take_leases(), minibatch.began_s), absent)

    # --- the servers' state -----------------------------------------------------------------------------------------

    def _current_state(self) -> tuple[int, Mapping[str, Any], dict[str, Any]]:
        kept, version = self._state_of_servers()
        model, optimizer = self._trained()
        assert self._mode is not None
        weights = {id(p): p.detach().clone() for p in self._mode.tensors.trained}
        write_tensors(kept["weights"], list(weights.values()))
        found = model.state_dict()
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) in weights and name in found:
                found[name] = weights[id(parameter)]
        if not self._policy.rule.delta:
            return version, found, {"optimizer": self._as_optimizer_state(kept)}
        outer = {name: vector for name, vector in kept.items() if name != "weights"}
        return version, found, {"optimizer": optimizer.state_dict(), "outer": outer}

    def _as_optimizer_state(self, kept: Mapping[str, Tensor]) -> dict[str, Any]:
        """The servers' state as torch's own optimizer would give it."""
        _, optimizer = self._trained()
        assert self._mode is not None
        own = dict(optimizer.state)
        counts = not isinstance(optimizer, torch.optim.SGD)
        try:
            optimizer.state.clear()
            optimizer.state.update(state_from_vectors(self._mode.tensors.trained, kept, counts=counts))
            return type(optimizer).state_dict(optimizer)
        finally:
            optimizer.state.clear()
            optimizer.state.update(own)

    def _state_of_servers(self) -> tuple[dict[str, Tensor], int]:
        """Weights and state of the servers, and their version, in a pause that this learner asks for and leads."""
        if self._connection is not None and self._connection.state.left:  # nobody changes it any more
            return self._connection.arena.current(), self.version
        connection, mode, _ = self._ready()
        if self._open is not None:
            raise RequestError("state_dict must be called between minibatches, not inside one")
        mode.flush()
        self._wants_state = True
        while True:
            self._state = None
            connection.say(ConnectionState.request_pause)
            connection.wait(ConnectionState.led_or_fenced, "all learners to pause", pauses=True)
            state: tuple[dict[str, Tensor], int] | None = self._state  # `_in_pause` has set it meanwhile
            if state is not None and not self.is_given_up:
                self._wants_state, self._state = False, None
                return state
            mode.step_aside()
            connection.wait(ConnectionState.joined, "joining again")

    # --- the other learners -----------------------------------------------------------------------------------------

    def _exchange(self, what: str, data: bytes, timeout_s: float) -> dict[int, bytes]:
        connection, mode, _ = self._ready()
        if self._open is not None:
            raise RequestError(f"{what} must be called between minibatches, not inside one")
        most = MOST_DATA_BYTES // self.learners
        if len(data) > most:
            raise RequestError(
                f"{what}: {len(data)} bytes; each of the {self.learners} learners may send at most {most}"
            )
        mode.flush()
        self._calls += 1
        number = self._calls
        waits_for = f"the other learners at call {number} ({what})"
        try:
            answer = self._ask(GroupCallAnswer, waits_for, lambda state: state.call(number, what, data), timeout_s)
        except PeerError:
            connection.say(ConnectionState.call, number, "", b"")
            raise
        if not self._has_entered:  # the next minibatch begins without a word
            mode.begin()
        if answer.error:
            raise (PeerError if GAVE_UP in answer.error else RequestError)(answer.error)
        return dict(answer.data)

    def _ask(
        self,
        kind: type[A],
        what: str,
        request: Callable[[ConnectionState], list[Message]],
        timeout_s: float = math.inf,
        *,
        pauses: bool = True,
    ) -> A:
        """Ask until it is answered: a learner that was given up meanwhile joins again, and asks again."""
        connection, mode, _ = self._ready()
        end_s = time.monotonic() + timeout_s
        while True:
            connection.wait(ConnectionState.joined, "joining again")
            connection.say(request)
            left_s = max(0.0, end_s - time.monotonic())
            answer: A | Again = connection.wait(lambda state: state.answer_or_again(kind), what, left_s, pauses=pauses)
            if not isinstance(answer, str):
                return answer
            if connection.state.fenced and self._open is not None:
                self._give_up(self._open)
            elif connection.state.fenced:
                mode.step_aside()

    # --- pauses -------------------------------------------------------------------------------------------------------

    def _in_pause(self, pause: EnterPause) -> bool:
        if pause.lead and self._wants_state:
            self._state = self.snapshot(), self._ready()[0].arena.committed[0][0].get()
        return self.on_pause is not None and self.on_pause(pause)

    @property
    def paused_s(self) -> float:
        """How long it has stood still in pauses."""
        return 0.0 if self._connection is None else self._connection.paused_s

    @property
    def sent_bytes(self) -> int:
        """Of gradients, as they travel."""
        return 0 if self._mode is None else self._mode.sent_bytes

    @property
    def received_bytes(self) -> int:
        """Of weights; none where the model's parameters are the servers' memory."""
        return 0 if self._mode is None else self._mode.received_bytes

    def residuals(self) -> dict[str, Tensor]:
        """Of error feedback, for a checkpoint: what this learner has not sent yet. Nothing without a codec."""
        return {} if self._mode is None or self._mode.feedback is None else self._mode.feedback.state()

    def load_residuals(self, state: Mapping[str, Tensor]) -> None:
        """What `residuals` gave, after `prepare` and before the first minibatch."""
        if state and self._mode is not None and self._mode.feedback is not None:
            self._mode.feedback.load(state)

    @property
    def batch_position(self) -> tuple[int, int]:
        """Epoch and position of the first sample of the batch that was handed out last; of a lease."""
        leases = () if self._mode is None else self._mode.leases
        return (leases[0].epoch, leases[0].start) if leases else (0, 0)

    @property
    def is_given_up(self) -> bool:
        """Whether the run goes on without this learner, as far as is known: what it has read may be torn."""
        connection = self._ready()[0]
        incarnation = connection.state.incarnation
        return not incarnation or connection.is_fenced(incarnation)

    def request_end_soon(self) -> None:
        """As `request_end`, from a signal handler: said when it next waits for anything, once the run has begun."""
        self._end_wanted = True
        if self._has_begun and self._connection is not None:
            self._connection.end_wanted = True

    def request_end(self) -> None:
        """Ask for the end of the run: after a last pause, learners that wait for anything are told `RunOverError`."""
        self._ready()[0].say(ConnectionState.request_end)

    def snapshot(self) -> dict[str, Tensor]:
        """Weights and optimizer state of the servers, in a pause that this learner leads; see `server_state`."""
        return self._ready()[0].arena.current()

    def load_current(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """The servers' weights, in a pause that this learner leads, into a model of the same kind."""
        arena = self._ready()[0].arena
        write_tensors(arena.current()["weights"], model_tensors(model, optimizer)[0].trained)

    @property
    def host_number(self) -> str:
        """What tells its host from others: nothing where it is the run's own."""
        return self._token if isinstance(self._road, RemoteRoad) else ""

    @property
    def server_hosts(self) -> tuple[str, ...]:
        """The host of each server, in the same way."""
        arena = None if self._connection is None else self._connection.arena
        return arena.server_hosts if isinstance(arena, SpreadArena) else ("",)

    def hand_in(self, pause: int, part: bytes) -> None:
        """From another host: what the one who leads a pause is to have of this learner."""
        if isinstance(self._road, RemoteRoad):
            self._road.hand_in(pause, part)

    # --- the end ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until all learners are done, and load the final weights. Call it once, after the last epoch."""
        if self._connection is not None and self._connection.state.left:
            return
        connection, mode, _ = self._ready()
        self._discard_batch()
        mode.flush()
        connection.say(ConnectionState.bye)
        while not connection.arena.quiet_word.get():
            if connection.failed is not None:
                raise connection.failed
            time.sleep(0.01)
        mode.load_last()

    def close(self) -> None:
        """Leave the run without waiting for the others. It is called by itself at the end of the program."""
        super().close()
        if os.getpid() != self._pid:  # a child that was forked off: the learner is its parent
            return
        connection, mode = self._connection, self._mode
        if connection is not None:
            if mode is not None and connection.failed is None and not connection.state.left:
                with suppress(OffbeatError, Cancelled):  # nobody is left to hear of a run that is gone
                    mode.flush()
                mode.detach()
            connection.close()
        if self._at_end is not None:
            self._at_end()
            self._at_end = None


def follow(scheduler: Any, progress: Callable[[], int]) -> Any:
    """The scheduler: from now on it stands where `progress` is, however often its `step` is called.

    It becomes one of a class of its own: an attribute would be a part of what its `state_dict` gives. Its steps are
    counted here, since not all schedulers count theirs (ChainedScheduler).
    """
    kind, made = type(scheduler), 0

    def step(self: Any, *given: Any) -> None:
        nonlocal made
        while made < progress():
            made += 1
            kind.step(self, *given)

    scheduler.__class__ = type(kind.__name__, (kind,), {"step": step})
    return scheduler


def _ignore_lease(*, waits: bool) -> None:
    """Nobody watches."""


def _refuse_to_load(*_: Any) -> None:
    raise RequestError("the servers got their state in learner.prepare; call load_state_dict before it")


class _CoordinatorLeases:
    """The coordinator, as a loader asks it for leases (`LeaseSource`)."""

    def __init__(self, learner: ServedLearner) -> None:
        self.learner = learner
        self.epoch_samples = 0

    def take(self, epoch: int, count: int, *, wait: bool) -> Lease | Answer:
        learner = self.learner
        _, mode, _ = learner._ready()
        learner.on_lease(waits=True)
        if wait:
            if learner._step_with_accumulated is not None and mode.leases:
                learner._step_with_accumulated()
            learner._discard_batch()
            mode.flush()  # what was computed and not pushed would be waited for
        answer = learner._ask(
            Granted,
            "samples",
            lambda state: state.request_samples(epoch=epoch, count=count, of=self.epoch_samples, wait=wait),
            pauses=wait,
        )
        learner.on_lease(waits=False)
        if answer.answer == Answer.ENDED.value:
            mode.epoch_ended()
        return Lease(*answer.lease) if answer.lease is not None else Answer(answer.answer)

    def begin(self, leases: Sequence[Lease]) -> None:
        learner = self.learner
        _, mode, _ = learner._ready()
        if learner._open is None and learner._step_with_accumulated is None:
            learner._discard_batch()
        mode.leases += tuple(leases)
        mode.leased_to = mode.state.incarnation if leases else 0

    def give_back(self, leases: Sequence[Lease]) -> None:
        connection = self.learner._connection
        if connection is not None and not connection.closed:
            connection.say(ConnectionState.give_back, tuple(lease.number for lease in leases))

    def was_cancelled(self) -> bool:
        return self.learner._last_cancelled
