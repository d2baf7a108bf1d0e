"""The learner's interface: what `offbeat.join` returns, whatever the strategy.

`ServedLearner` (parameter server) and `ReducedLearner` (all-reduce in DDP) have all of it; a type checker compares them
with it where `join` returns them. The types of `prepare` are written here only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, overload

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from offbeat.server.learner.learner_collectives import TIMEOUT_S, Number

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741 - beside M, L and S
L = TypeVar("L", bound=Iterable[Any])
S = TypeVar("S", bound=LRScheduler)


class OpenMinibatch(Protocol):
    """One minibatch, as `with learner.minibatch() as minibatch` gives it.

        with learner.minibatch() as minibatch:
            optimizer.zero_grad()
            loss = loss_fn(model(inputs), targets)
            loss.backward()
            minibatch.loss = loss.detach()
            minibatch.samples = len(inputs)
            optimizer.step()
        if minibatch.cancelled:
            ...  # it was interrupted, and nothing of it counts

    Both attributes are optional, and are read by `optimizer.step()`: set them before it.

    loss       The loss as a number or a detached tensor. Policies such as adaptive K use it, and so does the warning at
               the end of a run that has not learned. None: unknown.
    samples    How many samples the gradient is of. A shared loader knows it; set it where data comes from elsewhere.
               None: as many as the loader handed out, or 1.
    cancelled  After the block: True if the strategy interrupted it. Under an all-reduce it is always False.
    """

    loss: float | torch.Tensor | None
    samples: int | None

    @property
    def cancelled(self) -> bool:
        """After the block: whether it was interrupted. The model is then as it was before the block.

        False does not say that its gradient was applied. A push that comes too late, after the update that it was
        computed for, is dropped on the servers without `cancelled` being set; a shared loader hands its samples out
        again.
        """


class Learner(Protocol):
    """A learner of a run, as `offbeat.join()` returns it. The calls are the same for every strategy.

        learner = offbeat.join()
        model, optimizer, loader = learner.prepare(model, optimizer, loader)
        for inputs, targets in loader:
            with learner.minibatch():
                optimizer.zero_grad()
                loss_fn(model(inputs), targets).backward()
                optimizer.step()
        learner.finish()

    `prepare` is called once, before the loop. `help(offbeat)` has a complete program.
    """

    @property
    def strategy(self) -> str:
        """The strategy of the run, as one line: "k-sync:3"."""

    @property
    def number(self) -> int:
        """This learner's number, from 0. Print, evaluate and save where it is 0."""

    @property
    def learners(self) -> int:
        """How many learners the run has."""

    @property
    def version(self) -> int:
        """The version of the weights that the model has now: the number of updates that this run has made so far."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What `prepare` had to do differently from what you may expect, one sentence each."""

    @overload
    def prepare(
        self,
        model: M,
        optimizer: O,
        loader: None = None,
        scheduler: None = None,
        *,
        clip_norm: float | None = None,
        gradients: str | None = None,
        in_place: bool = False,
    ) -> tuple[M, O]: ...

    @overload
    def prepare(
        self,
        model: M,
        optimizer: O,
        loader: L,
        scheduler: None = None,
        *,
        clip_norm: float | None = None,
        gradients: str | None = None,
        in_place: bool = False,
    ) -> tuple[M, O, L]: ...

    @overload
    def prepare(
        self,
        model: M,
        optimizer: O,
        loader: None = None,
        *,
        scheduler: S,
        clip_norm: float | None = None,
        gradients: str | None = None,
        in_place: bool = False,
    ) -> tuple[M, O, S]: ...

    @overload
    def prepare(
        self,
        model: M,
        optimizer: O,
        loader: None,
        scheduler: S,
        *,
        clip_norm: float | None = None,
        gradients: str | None = None,
        in_place: bool = False,
    ) -> tuple[M, O, S]: ...

    @overload
    def prepare(
        self,
        model: M,
        optimizer: O,
        loader: L,
        scheduler: S,
        *,
        clip_norm: float | None = None,
        gradients: str | None = None,
        in_place: bool = False,
    ) -> tuple[M, O, L, S]: ...

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Iterable[Any] | None = None,
        scheduler: LRScheduler | None = None,
        *,
        clip_norm: float | None = None,
        gradients: str | None = None,
        in_place: bool = False,
    ) -> tuple[Any, ...]:
        """Join the run with this model, and return what was given, in the same order; use what it returns.

        Waits until all learners are there. The weights of learner 0 become those of all. Load weights before this call.

        model       Under an all-reduce what is returned is a DistributedDataParallel around it: reach methods and
                    attributes of your own through `model.module`. With a parameter server it is the model itself.
        optimizer   SGD, Adagrad, Adam or AdamW with a parameter server, where the servers make the updates; any
                    torch optimizer under an all-reduce. From now on `optimizer.step()` does what the strategy says.
        loader      Optional. A DataLoader over a map-style data set is shared: each sample of an epoch goes to one
                    learner. Any other iterable is each learner's own. What is returned is iterated in the same way,
                    and has the loader's attributes; it is not an instance of its class.
        scheduler   Optional. With a parameter server it is stepped over versions: however often `step` is called, it
                    stands where the version of the weights is.
        clip_norm   Clip the mean gradient of each update to this norm.
        gradients   Parameter server: the type in which gradients are sent, "bfloat16" or "float16".
        in_place    Parameter server: the model's parameters are the servers' memory, so that a fetch copies nothing;
                    a program that writes to a parameter itself is then killed.

        Type checkers see the types that were given. A `RequestError` says what cannot be trained, and why.
        """

    def minibatch(self) -> AbstractContextManager[OpenMinibatch]:
        """One minibatch, as a block: forward, backward, `optimizer.step()`.

            with learner.minibatch() as minibatch:
                optimizer.zero_grad()
                loss = loss_fn(model(inputs), targets)
                minibatch.loss = loss.detach()  # optional
                loss.backward()
                optimizer.step()

        minibatch.loss       Optional: the loss, a number or a detached tensor, for policies that use it and for the
                             warning that a run does not learn. Set it before `optimizer.step()`.
        minibatch.samples    Optional: how many samples the gradient is of, where `loader` does not know it.
        minibatch.cancelled  After the block: whether the strategy interrupted it.

        K-sync and some other strategies cancel minibatches that are not waited for any more. The block then ends at
        the next module or parameter, without an error; the model is as it was before, `minibatch.cancelled` is True,
        and a shared loader hands the samples out again. A push that comes too late, because the cancel came after
        `optimizer.step()`, is dropped by the servers without `cancelled` being set; its samples come again too.

        A block without `optimizer.step()` accumulates gradients. A loop without the block works too, and is never
        interrupted; what it pushes too late is dropped.
        """

    def finish(self) -> None:
        """Wait until all learners are done, and load the final weights. Call it once, after the last epoch."""

    def all_reduce(self, value: Number, op: str = "mean", *, timeout_s: float = TIMEOUT_S) -> Number:
        """The mean of a number or a tensor over the learners, on all of them. `op`: "mean", "sum", "min" or "max".

        This and the next three are calls of all learners: each makes them in the same order, between minibatches, where
        every learner comes (after an epoch; within one, learners need not have the same number of minibatches). Who has
        left is not waited for. `PeerError` after `timeout_s` seconds, on all. Values are small: kilobytes, not weights.
        (Under an all-reduce the process group's own time limit counts instead.)
        """

    def gather(self, value: Any, *, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """What each learner gives, in the order of their numbers, on all: numbers, strings, lists, dicts, tensors."""

    def broadcast(self, value: Any = None, source: int = 0, *, timeout_s: float = TIMEOUT_S) -> Any:
        """What learner `source` gives, on all."""

    def barrier(self, *, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until all learners are here."""

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer state, version and epoch, as the servers have them now: for `torch.save`.

        One learner asks, between minibatches; the others stand still for a moment. (`optimizer.state_dict()` gives the
        servers' state too.) Any strategy can go on from it.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave. Before `prepare`, on all learners."""

    def close(self) -> None:
        """Leave the run without waiting for the others. It is called by itself at the end of the program."""
