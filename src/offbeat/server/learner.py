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

from offbeat.errors import OffbeatError, RequestError
from offbeat.leases import Answer, Lease
from offbeat.policies import LearnerRule, create
from offbeat.server import data, optimizers
from offbeat.server.client import Client
from offbeat.server.hooks import Cancelled, Hooks
from offbeat.server.link import Link
from offbeat.server.modes import Delta, Free, Mode, Report, Whole
from offbeat.server.slowness import Slowness
from offbeat.server.table import parts_of, table_of
from offbeat.server.wire import Granted, Rest


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


class ServedLearner:
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
        self.notes: tuple[str, ...] = ()
        self._door, self._token = door, token
        self._at_end = at_end
        policy = create(line, expect=learners)
        self._rule: LearnerRule = policy.rule
        self._cancels = policy.cancels
        self._outer = policy.outer_optimizer
        self._slowness = Slowness(slow, learner=number, learners=learners, seed=seed) if slow else None
        self.at_rest: Callable[[Rest], bool] | None = None  # what is to be done in a rest; True ends the run
        self._link: Link | None = None
        self._halt_wanted = self._has_begun = False
        self._mode: Mode | None = None
        self._hooks: Hooks | None = None
        self._now: Minibatch | None = None  # that is open
        self._batch: _Batch = _Batch((), 0)
        self._last_cancelled = False
        self.pushed_s = 0.0  # when it has last pushed, by the monotonic clock
        self._inside = False  # `with learner.minibatch()`
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
        parts, groups = parts_of(model, optimizer)
        rule, hypers = optimizers.describe(optimizer)
        if self._rule.delta:
            hypers = optimizers.outer_of(self._outer, optimizer)
            rule = "sgd"
        table = table_of(
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
        kind = Delta if self._rule.delta else Free if self._rule.fetch_every else Whole
        mode = self._mode = kind(link, parts, self._rule, local_step)
        if self._rule.fetch_every and mode.arena.setting.corrects:
            mode.local_step = optimizers.without_velocity(optimizer)
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
        self.notes += self._hooks.notes
        if optimizer.state and kept is None and not self._rule.delta and not self._rule.fetch_every:
            self.notes += ("the optimizer's state is not taken over: the servers begin without any",)
        mode.come()
        self._has_begun = True
        link.halt_wanted = self._halt_wanted
        self._since_s = time.monotonic()
        self._replace_step(optimizer, local_step, parts.trained)
        given: list[Any] = [model, optimizer]
        if loader is not None:
            source = _Source(self)
            wrapped = data.wrap(loader, source, seed=link.admission.seed)
            source.of = wrapped.samples if isinstance(wrapped, data.LeasedLoader) else 0
            self.notes += wrapped.notes
            given.append(wrapped)
        if scheduler is not None:
            self._over_versions(scheduler)
            given.append(scheduler)
        return tuple(given)

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

    def _over_versions(self, scheduler: Any) -> None:
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise RequestError("ReduceLROnPlateau counts what you measure, not versions: keep it out of prepare")
        one_step = scheduler.step

        def step(*given: Any) -> None:
            while scheduler.last_epoch < self.version:
                one_step(*given)

        scheduler.step = step

    # --- the loop ---------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The version of the weights that the model has now: the number of updates made so far."""
        return 0 if self._mode is None else self._mode.version

    def minibatch(self) -> Minibatch:
        """One minibatch, as a `with` block: forward, backward, `optimizer.step()`.

        A cancelled one ends where it is, without an error; `minibatch.cancelled` is then True.
        """
        return Minibatch(self)

    def _ready(self) -> tuple[Link, Mode, Hooks]:
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
        self._inside = True
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

    # --- rests --------------------------------------------------------------------------------------------------------

    def _rest(self, rest: Rest) -> bool:
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
            arena._walk(arena.current()["weights"], parts_of(model, optimizer)[0].trained, into_vector=False)

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


class _Source:
    """The coordinator, as a loader asks it."""

    def __init__(self, learner: ServedLearner) -> None:
        self.learner = learner
        self.of = 0  # samples in an epoch

    def take(self, epoch: int, count: int, *, wait: bool) -> Lease | Answer:
        link, mode, _ = self.learner._ready()
        if wait:
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
        if self.learner._now is None:
            self.learner._put_aside()
        kept = self.learner._batch.leases if self.learner._now is not None else ()
        self.learner._batch = _Batch((*kept, *leases), mode.incarnation if leases else 0)

    def give_back(self, leases: Sequence[Lease]) -> None:
        link = self.learner._link
        if link is not None and not link.closed:
            link.say(lambda client: client.give_back(tuple(lease.number for lease in leases)))

    def was_cancelled(self) -> bool:
        return self.learner._last_cancelled
