"""A learner of a parameter server, for people who keep their own loop.

    learner = offbeat.join()
    model, optimizer, loader = learner.prepare(model, optimizer, loader)
    for inputs, targets in loader:
        with learner.minibatch() as minibatch:
            optimizer.zero_grad()
            loss_fn(model(inputs), targets).backward()
            optimizer.step()  # pushes, waits as the policy says, fetches

What the user's optimizer says (its kind, its groups, their rates now) is what the servers do; its own state stays
unused. A minibatch that is cancelled ends where it is, quietly: `minibatch.cancelled` tells.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from offbeat.errors import OffbeatError, PeerError, RequestError
from offbeat.leases import Answer, Lease
from offbeat.policies import LearnerRule, create
from offbeat.processes.slowness import Slowness
from offbeat.server.arena import Arena
from offbeat.server.coordinator.group_calls import GAVE_UP, MOST_DATA_BYTES
from offbeat.server.learner import leased_loader, optimizer_state
from offbeat.server.learner.client import Client
from offbeat.server.learner.connection import Link
from offbeat.server.learner.gradient_hooks import Cancelled, Hooks
from offbeat.server.learner.learner_collectives import LearnerCollectives
from offbeat.server.learner.push_modes import AsyncPushFetch, PushDelta, PushGradient, PushMode, Report
from offbeat.server.parameter_layout import DTYPES, ModelTensors, ParameterLayout, layout_of, model_tensors
from offbeat.server.shard import optimizers
from offbeat.server.wire import Called, EnterPause, Granted


class Minibatch:
    """One minibatch, as a `with` block. Afterwards `cancelled` says whether the servers did not want it any more.

    Set `loss` for policies that use it, and `samples` where the loader cannot know how many there are.
    """

    def __init__(self, learner: ServedLearner) -> None:
        self._learner = learner
        self.cancelled = False
        self.loss: float | torch.Tensor | None = None
        self.samples: int | None = None
        self.began_s = 0.0

    def __enter__(self) -> Self:
        self._learner._enter(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._learner._leave(self, kind)
        return kind is not None and issubclass(kind, Cancelled)


class ServedLearner(LearnerCollectives):
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
        door: str,
        token: str,
        slow: Sequence[str] = (),
        seed: int = 0,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        self.strategy = line
        self.number = number  # of this learner, from 0
        self.learners = learners
        self._door, self._token = door, token
        self._at_end = at_end
        policy = create(line, expect=learners)
        self._rule: LearnerRule = policy.rule
        self._cancels = policy.cancels
        self._outer = policy.outer_optimizer
        self._slowness = Slowness(slow, learner=number, learners=learners, seed=seed) if slow else None
        self.at_rest: Callable[[EnterPause], bool] | None = None  # what is to be done in a rest; True ends the run
        self._in_pause: Callable[[], object] | None = None  # what is to be done in one that this learner asked for
        self._given: Mapping[str, Any] | None = None  # by `load_state_dict`, until `prepare`
        self._trains: tuple[nn.Module, torch.optim.Optimizer, ModelTensors] | None = None
        self._loader: leased_loader.LeasedLoader | leased_loader.LocalLoader | None = None
        self._calls = 0  # to the other learners
        self._link: Link | None = None
        self._halt_wanted = self._has_begun = False
        self._mode: PushMode | None = None
        self._hooks: Hooks | None = None
        self._now: Minibatch | None = None  # that is open
        self._batch: _Batch = _Batch((), 0)
        self._last_cancelled = False
        self.pushed_s = 0.0  # when it has last pushed, by the monotonic clock
        self._inside = False  # `with learner.minibatch()`
        self._has_entered = False  # one of these, ever
        self._before_waiting: Callable[[], object] | None = None  # steps with what was accumulated
        self._since_s = 0.0  # when the last step ended
        self._pid = os.getpid()
        self._describe: Callable[[], tuple[optimizers.Hyper, ...]] = tuple
        atexit.register(self.close)

    # --- preparing --------------------------------------------------------------------------------------------------

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Any = None,
        scheduler: Any = None,
        *,
        clip_norm: float | None = None,
        gradients: str | None = None,
        in_place: bool = False,
        kept: Mapping[str, Tensor] | None = None,
    ) -> tuple[Any, ...]:
        """Join with this model: its weights become those of the run, and its optimizer that of the servers.

        Gives back what it was given, to be used instead. A `scheduler` that is given is stepped over versions: however
        often `step` is called, it stands where the version of the weights is. `clip_norm` clips the mean gradient of an
        update, on the servers. `gradients` is the type in which they travel: "bfloat16" and "float16" halve the bytes.
        With `in_place` the model's parameters *are* the servers' memory: a fetch copies nothing, and a program that
        writes to a parameter itself is ended by the kernel. `kept` is what `snapshot` gave in an earlier run: the
        servers go on with its weights and optimizer state.
        """
        if self._link is not None:
            raise RequestError("this learner was prepared before: a run has one model")
        if clip_norm is not None and not 0 < clip_norm < float("inf"):
            raise RequestError(f"clip_norm is above 0; got {clip_norm}")
        if in_place and (self._rule.delta or self._rule.fetch_every):
            raise RequestError(f"in_place is not for '{self.strategy}': its learners make steps of their own")
        if self._given is not None:
            model.load_state_dict(self._given["model"])
            optimizer.load_state_dict(self._given["optimizer"])
        parts, groups = model_tensors(model, optimizer)
        rule, hypers = optimizers.describe(optimizer)
        if self._rule.delta:
            hypers = optimizers.outer_of(self._outer, optimizer)
            rule = "sgd"
        table = layout_of(
            model,
            parts,
            groups,
            rule=rule,
            states=optimizers.state_names(rule, hypers),
            gradients=gradients,
            clip_norm=clip_norm or 0.0,
            in_place=in_place,
        )
        link = self._link = Link(self._door, self._token, self.number, table, self._rest)
        local_step = optimizer.step
        kind = PushDelta if self._rule.delta else AsyncPushFetch if self._rule.fetch_every else PushGradient
        mode = self._mode = kind(link, parts, self._rule, local_step)
        if self._rule.fetch_every and mode.arena.setting.corrects:
            mode.local_step = optimizers.without_velocity(optimizer)
        kept = self._kept(kept, parts, optimizer, table)
        if kept is not None:
            mode.arena.check_kept(kept)
            mode.kept = kept
        if self._rule.delta and mode.arena.setting.corrects:
            hypers = optimizers.outer_of(self._outer, optimizer, corrects=True)
            told = optimizers.outer_note(self._outer, hypers)
            self.notes += (told,) if told else ()
        fixed = tuple(hypers)
        self._describe = (lambda: fixed) if self._rule.delta else lambda: tuple(optimizers.describe(optimizer)[1])
        self._hooks = Hooks(
            model,
            parts.trained,
            fill=mode.fill,
            unchanged=mode.unchanged,
            cancelled=self._is_cancelled_here,
            keeps_buffers=self._cancels,
        )
        self.notes += (*self._hooks.notes, *optimizers.notes_of(optimizer))
        self._trains = model, optimizer, parts
        mode.come()
        self._has_begun = True
        link.halt_wanted = self._halt_wanted
        self._since_s = time.monotonic()
        self._replace_step(optimizer, local_step, parts.trained)
        given: list[Any] = [model, optimizer]
        if loader is not None:
            source = _Source(self)
            wrapped = leased_loader.wrap(loader, source, seed=link.admission.seed)
            source.of = wrapped.samples if isinstance(wrapped, leased_loader.LeasedLoader) else 0
            self.notes += wrapped.notes
            if self._given is not None:
                wrapped.epoch = self._given["epoch"]
            self._loader = wrapped
            given.append(wrapped)
        if scheduler is not None:
            self._over_versions(scheduler)
            given.append(scheduler)
        self._given = None
        self._say_notes(but=() if self._cancels else self._hooks.notes)  # those are about cancelling
        return tuple(given)

    def _kept(
        self,
        kept: Mapping[str, Tensor] | None,
        parts: ModelTensors,
        optimizer: torch.optim.Optimizer,
        table: ParameterLayout,
    ) -> Mapping[str, Tensor] | None:
        """What the servers begin with, if not with fresh state: what is given, or the state that the optimizer has."""
        if kept is not None:
            return kept
        if self._rule.delta:
            outer = (self._given or {}).get("outer")
            return (
                None
                if outer is None
                else {**optimizer_state.to_vectors(parts.trained, {}, (), DTYPES[table.dtype]), **outer}
            )
        if not any(optimizer.state.values()):
            return None
        found = optimizer_state.to_vectors(parts.trained, optimizer.state, table.states, DTYPES[table.dtype])
        if not self._rule.fetch_every:
            optimizer.state.clear()  # from now on it is the servers'
        return found

    def _replace_step(self, optimizer: torch.optim.Optimizer, local_step: Any, trained: Sequence[nn.Parameter]) -> None:
        """`optimizer.step` is ours from now on; a scheduler, made before or after, finds what it looks for."""

        def step(closure: Callable[[], Any] | None = None) -> Any:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # what a scheduler looks at
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            now = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            if len(now) != len(trained) or any(one is not other for one, other in zip(now, trained, strict=True)):
                raise RequestError("the optimizer trains other parameters than when it was prepared: prepare it last")
            for hook in optimizer._optimizer_step_pre_hooks.values():
                hook(optimizer, (), {})
            self._step()
            for hook in optimizer._optimizer_step_post_hooks.values():
                hook(optimizer, (), {})
            return loss

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # as torch marks the steps it has wrapped
        optimizer.step = step  # type: ignore[method-assign]  # the point of it
        if not self._rule.delta:  # there the learner's own optimizer is the one that counts
            optimizer.state_dict = self._state_of_servers  # type: ignore[method-assign]
        optimizer.load_state_dict = _too_late  # type: ignore[method-assign, assignment]

    def _over_versions(self, scheduler: Any) -> None:
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise RequestError("ReduceLROnPlateau counts what you measure, not versions: keep it out of prepare")
        follow(scheduler, lambda: self.version)

    # --- the loop ---------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version of the weights that the model has now: the number of updates that this run has made so far."""
        return 0 if self._mode is None else self._mode.version

    def minibatch(self) -> Minibatch:
        """One minibatch, as a `with` block: forward, backward, `optimizer.step()`.

        A cancelled one ends where it is, without an error; `minibatch.cancelled` is then True.
        """
        return Minibatch(self)

    def accumulate(self, step: Callable[[], object]) -> None:
        """For trainers that take batches without `with learner.minibatch()` and step after several of them.

        The batches since the last step belong to the next. `step` is called where samples are waited for while some
        were computed and not pushed: others may wait for them.
        """
        self._before_waiting = step

    def _ready(self) -> tuple[Link, PushMode, Hooks]:
        if self._link is None or self._mode is None or self._hooks is None:
            raise RequestError("call learner.prepare(model, optimizer, loader) first")
        if self._link.client.gone:
            raise RequestError("this learner has finished, and left the run")
        return self._link, self._mode, self._hooks

    def _is_cancelled(self) -> bool:
        assert self._mode is not None
        return self._mode.is_cancelled() or self._batch.incarnation not in (0, self._mode.incarnation)

    def _is_cancelled_here(self) -> bool:
        """For hooks: outside of `with learner.minibatch()` nothing is interrupted."""
        return self._inside and self._is_cancelled()

    def _enter(self, minibatch: Minibatch) -> None:
        _, mode, hooks = self._ready()
        if self._now is None:
            mode.begin()
            self._last_cancelled = False
        minibatch.began_s = self._now.began_s if self._now is not None else time.monotonic()
        self._now = minibatch
        self._inside = self._has_entered = True
        hooks.begin()

    def _leave(self, minibatch: Minibatch, kind: type[BaseException] | None) -> None:
        self._inside = False
        if kind is None or self._now is not minibatch:
            return  # without a step it goes on with the next batch: gradients are accumulated
        if issubclass(kind, Cancelled):
            minibatch.cancelled = True
            self._give_up(minibatch)
        else:  # of the user's own. If the program ends by it others compute its samples, else they were not used
            self._now = None
            self._ready()[2].rest()

    def _give_up(self, minibatch: Minibatch) -> None:
        """The open minibatch is not wanted: the model is as it was before it, and its samples go back."""
        _, mode, hooks = self._ready()
        self._last_cancelled = True
        hooks.abandon()
        mode.cancel(self._take_leases(), minibatch.began_s)
        self._now = None

    def _take_leases(self) -> tuple[tuple[int, int, int, int], ...]:
        leases, self._batch = self._batch.leases, _Batch((), 0)
        return tuple((one.number, one.epoch, one.start, one.count) for one in leases)

    def _put_aside(self) -> None:
        """Samples that were handed out and that the user had no use for; they do not come again."""
        numbers = tuple(lease[0] for lease in self._take_leases())
        if numbers and self._link is not None:
            self._link.say(lambda client: client.give_back(numbers, unused=True))

    def _step(self) -> None:
        """What `optimizer.step()` does now."""
        _, mode, _ = self._ready()
        if self._now is None:  # a loop without `with learner.minibatch()`: it is never interrupted
            self._now = Minibatch(self)
            self._now.began_s = self._since_s
        minibatch = self._now
        try:
            self._push(minibatch)
            self._now = None
            self._last_cancelled = False
        except Cancelled:
            if self._inside:
                raise
            self._give_up(minibatch)  # too late: what it has computed is dropped
            mode.begin()
        self._since_s = time.monotonic()

    def _push(self, minibatch: Minibatch) -> None:
        link, mode, hooks = self._ready()
        computed_s = time.monotonic() - minibatch.began_s
        if self._slowness is not None:
            self._slowness.act(computed_s, self._is_cancelled, link.nap)
        if self._is_cancelled():
            raise Cancelled
        absent = hooks.finish()
        leased = sum(lease.count for lease in self._batch.leases)
        samples = minibatch.samples or leased or self._batch.samples or 1
        loss = None if minibatch.loss is None else float(minibatch.loss)
        batch = self._batch
        report = Report(self._describe(), samples, loss, self._take_leases(), minibatch.began_s)
        self.pushed_s = time.monotonic()
        try:
            mode.step(absent, report)
        except Cancelled:
            self._batch = batch
            raise

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a run goes on from, as the servers have it now: weights, optimizer state, version and epoch.

        One learner is enough to ask: all others stand still for a moment. Any line can go on from it, with
        `load_state_dict` before `prepare`.
        """
        kept, version = self._current()
        model, optimizer, parts, arena = self._trained()
        weights = {id(p): p.detach().clone() for p in parts.trained}
        arena._walk(kept["weights"], list(weights.values()), into_vector=False)
        named = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
        whole = model.state_dict()
        for name, identity in named.items():
            if identity in weights and name in whole:
                whole[name] = weights[identity]
        found = {
            "strategy": self.strategy,
            "version": version,
            "epoch": 0 if self._loader is None else self._loader.epoch,
            "model": {
                name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in whole.items()
            },
            "optimizer": optimizer.state_dict() if self._rule.delta else self._packed(kept),
        }
        if self._rule.delta:
            found["outer"] = {name: vector for name, vector in kept.items() if name != "weights"}
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, of this line or another. Before `prepare`, on all learners alike."""
        if self._link is not None:
            _too_late()
        missing = {"model", "optimizer", "version", "epoch"} - state.keys()
        if missing:
            raise RequestError(f"this is not what learner.state_dict() gave: {', '.join(sorted(missing))} is missing")
        self._given = state

    def _state_of_servers(self) -> dict[str, Any]:
        """What `optimizer.state_dict()` gives now."""
        return self._packed(self._current()[0])

    def _packed(self, kept: Mapping[str, Tensor]) -> dict[str, Any]:
        """The servers' state as torch's own optimizer would pack it."""
        _, optimizer, parts, _ = self._trained()
        own = dict(optimizer.state)
        counts = not isinstance(optimizer, torch.optim.SGD)
        try:
            optimizer.state.clear()
            optimizer.state.update(optimizer_state.from_vectors(parts.trained, kept, counts=counts))
            return type(optimizer).state_dict(optimizer)
        finally:
            optimizer.state.clear()
            optimizer.state.update(own)

    def _current(self) -> tuple[dict[str, Tensor], int]:
        """Weights and state of the servers, and their version, in a rest that this learner asks for and leads."""
        if self._link is not None and self._link.client.gone:  # nobody changes it any more
            return self._link.arena.current(), self.version
        link, mode, _ = self._ready()
        if self._now is not None:
            raise RequestError("the servers' state is asked for between minibatches, not inside one")
        mode.flush()
        found: list[tuple[dict[str, Tensor], int]] = []
        self._in_pause = lambda: found.append((self.snapshot(), link.arena.committed(0)[0].get()))
        while True:
            link.say(lambda client: client.pause())
            link.wait(lambda client: True if found or client.fenced else None, "all to stand still", rests=True)
            if found and not self.is_given_up:
                self._in_pause = None
                return found[0]
            found.clear()
            mode.step_aside()
            link.wait(lambda client: client.incarnation or None, "joining again")

    def _trained(self) -> tuple[nn.Module, torch.optim.Optimizer, ModelTensors, Arena]:
        assert self._trains is not None and self._link is not None
        return *self._trains, self._link.arena

    # --- the other learners -----------------------------------------------------------------------------------------

    def _exchange(self, what: str, data: bytes, timeout_s: float) -> dict[int, bytes]:
        link, mode, _ = self._ready()
        if self._now is not None:
            raise RequestError(f"{what} is called between minibatches, not inside one")
        most = MOST_DATA_BYTES // self.learners
        if len(data) > most:
            raise RequestError(f"{what}: {len(data)} bytes; each of {self.learners} learners may give {most}")
        mode.flush()
        self._calls += 1
        number, end_s = self._calls, time.monotonic() + timeout_s
        try:
            while True:
                link.wait(lambda client: client.incarnation or None, "joining again")
                link.say(lambda client: client.call(number, what, data))
                left_s = max(0.0, end_s - time.monotonic())
                answer = link.wait(
                    _called_or_again, f"the other learners at call {number} ({what})", left_s, rests=True
                )
                if isinstance(answer, Called):
                    break
                if link.client.fenced:
                    mode.step_aside()
        except PeerError:
            link.say(lambda client: client.call(number, "", b""))
            raise
        if not self._has_entered:  # the next minibatch begins without a word
            mode.begin()
        if answer.error:
            raise (PeerError if GAVE_UP in answer.error else RequestError)(answer.error)
        return dict(answer.data)

    # --- rests --------------------------------------------------------------------------------------------------------

    def _rest(self, rest: EnterPause) -> bool:
        if rest.lead and self._in_pause is not None:
            self._in_pause()
        return self.at_rest is not None and self.at_rest(rest)

    @property
    def rested_s(self) -> float:
        """How long it has stood still in rests."""
        return 0.0 if self._link is None else self._link.rested_s

    @property
    def sent_bytes(self) -> int:
        """Of gradients, as they travel."""
        return 0 if self._mode is None else self._mode.sent_bytes

    @property
    def received_bytes(self) -> int:
        """Of weights; none where the model's parameters are the servers' memory."""
        return 0 if self._mode is None else self._mode.received_bytes

    @property
    def place(self) -> tuple[int, int]:
        """Epoch and position of the first sample of the batch that was handed out last; of a lease."""
        leases = self._batch.leases
        return (leases[0].epoch, leases[0].start) if leases else (0, 0)

    @property
    def is_given_up(self) -> bool:
        """Whether the run goes on without this learner, as far as is known: what it has read may be torn."""
        link = self._ready()[0]
        return not link.client.incarnation or link.is_fenced(link.client.incarnation)

    def halt_soon(self) -> None:
        """As `halt`, from a signal handler: said when it next waits for anything, once the run has begun."""
        self._halt_wanted = True
        if self._has_begun and self._link is not None:
            self._link.halt_wanted = True

    def halt(self) -> None:
        """Ask for the end of the run: after a last rest, learners that wait for anything are told `RunOverError`."""
        self._ready()[0].say(lambda client: client.halt())

    def snapshot(self) -> dict[str, Tensor]:
        """Weights and optimizer state of the servers, in a rest that this learner leads; `prepare` takes it."""
        return self._ready()[0].arena.current()

    def load_current(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """The servers' weights, in a rest that this learner leads, into a model of the same kind."""
        arena = self._ready()[0].arena
        with torch.no_grad():
            arena._walk(arena.current()["weights"], model_tensors(model, optimizer)[0].trained, into_vector=False)

    # --- the end ----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait until all learners are done, and load the final weights. Call it once, after the last epoch."""
        if self._link is not None and self._link.client.gone:
            return
        link, mode, _ = self._ready()
        self._put_aside()
        mode.flush()
        link.say(lambda client: client.bye())
        word = link.arena.quiet_word()
        while not word.get():
            if link.failed is not None:
                raise link.failed
            time.sleep(0.01)
        mode.load_last()

    def close(self) -> None:
        """Leave the run without waiting for the others. It is called by itself at the end of the program."""
        atexit.unregister(self.close)
        if os.getpid() != self._pid:  # a child that was forked off: the learner is its parent
            return
        if self._link is not None:
            if self._mode is not None and self._link.failed is None and not self._link.client.gone:
                with _quietly():
                    self._mode.flush()
                self._mode.part()
            self._link.close()
        if self._at_end is not None:
            self._at_end()
            self._at_end = None


class _quietly:  # noqa: N801 - reads as a word: `with _quietly():`
    """At the end of a program nobody is left to hear of a run that is gone."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        return kind is not None and issubclass(kind, (OffbeatError, Cancelled))


class _Batch:
    """What the loader handed out last: its leases, and the incarnation that they belong to (0: nobody's)."""

    def __init__(self, leases: tuple[Lease, ...], incarnation: int, samples: int = 0) -> None:
        self.leases, self.incarnation, self.samples = leases, incarnation, samples


def _grant_or_again(client: Client) -> Granted | str | None:
    """An answer to what it wants; or that it has to ask again, since it was given up."""
    return "again" if client.fenced or not client.wants else client.granted


def follow(scheduler: Any, progress: Callable[[], int]) -> None:
    """From now on the scheduler stands where `progress` is, however often its `step` is called.

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


def _called_or_again(client: Client) -> Called | str | None:
    """The same of a call to the other learners."""
    return "again" if client.fenced or not client.calls else client.called


def _too_late(*_: Any) -> None:
    raise RequestError("the servers have their state since learner.prepare: load what was saved before it")


class _Source:
    """The coordinator, as a loader asks it."""

    def __init__(self, learner: ServedLearner) -> None:
        self.learner = learner
        self.of = 0  # samples in an epoch

    def take(self, epoch: int, count: int, *, wait: bool) -> Lease | Answer:
        link, mode, _ = self.learner._ready()
        if wait:
            if self.learner._before_waiting is not None and self.learner._batch.leases:
                self.learner._before_waiting()
            self.learner._put_aside()
            mode.flush()  # what was computed and not pushed would be waited for
        while True:
            link.wait(lambda client: client.incarnation or None, "joining again")
            link.say(lambda client: client.want(epoch=epoch, count=count, of=self.of, wait=wait))
            answer = link.wait(_grant_or_again, "samples", rests=wait)
            if isinstance(answer, Granted):
                if answer.answer == Answer.ENDED.value:
                    mode.rest()
                return Lease(*answer.lease) if answer.lease is not None else Answer(answer.answer)
            if link.client.fenced:
                if self.learner._now is not None:
                    self.learner._give_up(self.learner._now)
                else:
                    mode.step_aside()

    def begin(self, leases: Sequence[Lease]) -> None:
        _, mode, _ = self.learner._ready()
        accumulates = self.learner._now is not None or self.learner._before_waiting is not None
        if not accumulates:
            self.learner._put_aside()
        kept = self.learner._batch.leases if accumulates else ()
        self.learner._batch = _Batch((*kept, *leases), mode.incarnation if leases else 0)

    def give_back(self, leases: Sequence[Lease]) -> None:
        link = self.learner._link
        if link is not None and not link.closed:
            link.say(lambda client: client.give_back(tuple(lease.number for lease in leases)))

    def was_cancelled(self) -> bool:
        return self.learner._last_cancelled
