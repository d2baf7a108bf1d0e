"""The learner's interface, and what learners of every strategy share: `prepare`, state, notes, calls of all learners.

`offbeat.join` returns a `Learner`: a `ServedLearner` (parameter server) or a `ReducedLearner` (all-reduce in DDP). Each
says how it attaches a model, shares a loader, what its state is, and how values get from all learners to all
(`_exchange`). The types of `prepare` are written here only. Values that learners exchange are plain (numbers, strings,
bytes, lists, dictionaries) or tensors, and small.
"""

from __future__ import annotations

import atexit
import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import reduce
from numbers import Integral, Real
from typing import Any, TypeVar, overload

import msgspec
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from offbeat.errors import RequestError, unknown
from offbeat.processes.slowness import Slowness
from offbeat.server.learner.leased_loader import LoaderWrapper

TIMEOUT_S = 300.0
_TENSOR = 1  # the extension of msgpack that a tensor travels as
Number = TypeVar("Number", float, Tensor)
M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741 - beside M, L and S
L = TypeVar("L", bound=Iterable[Any])
S = TypeVar("S", bound=LRScheduler)


@dataclass(slots=True)
class OpenMinibatch:
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
    cancelled  After the block: True if the strategy interrupted it: the model is then as it was before the block. Under
               an all-reduce it is always False.

    False in `cancelled` does not say that its gradient was applied. A push that comes too late, after the update that
    it was computed for, is dropped on the servers without `cancelled` being set; a shared loader hands its samples out
    again.
    """

    began_s: float
    loss: float | Tensor | None = None
    samples: int | None = None
    cancelled: bool = False


class Learner(ABC):
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

    def __init__(self, strategy: str, number: int, learners: int, *, slow: Sequence[str], seed: int) -> None:
        self._strategy, self._number, self._learners = strategy, number, learners
        self._notes: tuple[str, ...] = ()
        self.says_notes = False  # when it is prepared
        self._unsaid: tuple[str, ...] = ()  # notes that are kept, and not said
        self._slowness = Slowness(slow, learner=number, learners=learners, seed=seed) if slow else None
        self._loaded: Mapping[str, Any] | None = None  # by `load_state_dict`, until `prepare`
        self._trains: tuple[nn.Module, torch.optim.Optimizer] | None = None
        self._loader: LoaderWrapper | None = None
        self._open: OpenMinibatch | None = None
        atexit.register(self.close)

    @property
    def strategy(self) -> str:
        """The strategy of the run, as one line: "k-sync:3"."""
        return self._strategy

    @property
    def number(self) -> int:
        """This learner's number, from 0. Print, evaluate and save where it is 0."""
        return self._number

    @property
    def learners(self) -> int:
        """How many learners the run has."""
        return self._learners

    @property
    @abstractmethod
    def version(self) -> int:
        """The version of the weights that the model has now: the number of updates that this run has made so far."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What `prepare` had to do differently from what you may expect, one sentence each."""
        return self._notes

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
        if self._trains is not None:
            raise RequestError("learner.prepare was already called; a run trains one model")
        if clip_norm is not None and not 0 < clip_norm < float("inf"):
            raise RequestError(f"clip_norm must be above 0; got {clip_norm}")
        if self._loaded is not None:
            model.load_state_dict(self._loaded["model"])
            optimizer.load_state_dict(self._loaded["optimizer"])
        returned: list[Any] = [self._attach(model, optimizer, clip_norm, gradients, in_place=in_place), optimizer]
        if loader is not None:
            shared = self._share(loader)
            if isinstance(shared, LoaderWrapper):
                self._loader = shared
                self._notes += shared.notes
                shared.epoch = shared.epoch if self._loaded is None else self._loaded["epoch"]
            returned.append(shared)
        if scheduler is not None:
            returned.append(self._follow_version(scheduler))
        self._loaded = None
        for note in self.notes if self.says_notes else ():
            if note not in self._unsaid:
                print(f"offbeat: note: {note}", file=sys.stderr)
        return tuple(returned)

    @abstractmethod
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

    @abstractmethod
    def finish(self) -> None:
        """Wait until all learners are done, and load the final weights. Call it once, after the last epoch."""

    def all_reduce(self, value: Number, op: str = "mean", *, timeout_s: float = TIMEOUT_S) -> Number:
        """The mean of a number or a tensor over the learners, on all of them. `op`: "mean", "sum", "min" or "max".

        This and the next three are calls of all learners: each makes them in the same order, between minibatches, where
        every learner comes (after an epoch; within one, learners need not have the same number of minibatches). Who has
        left is not waited for. `PeerError` after `timeout_s` seconds, on all. Values are small: kilobytes, not weights.
        (Under an all-reduce the process group's own time limit counts instead.)
        """
        if op not in _REDUCTIONS:
            raise unknown("reduction", op, _REDUCTIONS)
        if not isinstance(value, (Real, Tensor)):
            raise RequestError(f"all_reduce takes a number or a tensor; got {type(value).__name__}")
        of = f" of {value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        plain = value if isinstance(value, Tensor) else int(value) if isinstance(value, Integral) else float(value)
        found = self._all(f"all_reduce {op}{of}", plain, timeout_s)
        reduced: Number = _REDUCTIONS[op]([found[learner] for learner in sorted(found)])
        return reduced.to(value.device) if isinstance(reduced, Tensor) and isinstance(value, Tensor) else reduced

    def gather(self, value: Any, *, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """What each learner gives, in the order of their numbers, on all: numbers, strings, lists, dicts, tensors."""
        found = self._all("gather", value, timeout_s)
        return [found[learner] for learner in sorted(found)]

    def broadcast(self, value: Any = None, source: int = 0, *, timeout_s: float = TIMEOUT_S) -> Any:
        """What learner `source` gives, on all."""
        found = self._all(f"broadcast from {source}", value if self.number == source else None, timeout_s)
        if source not in found:
            raise RequestError(f"broadcast: learner {source} is not in the run; its learners are {sorted(found)}")
        return found[source]

    def barrier(self, *, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until all learners are here."""
        self._all("barrier", None, timeout_s)

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer state, version and epoch, as the servers have them now: for `torch.save`.

        One learner asks, between minibatches; the others stand still for a moment. (`optimizer.state_dict()` gives the
        servers' state too.) Any strategy can go on from it.
        """
        version, weights, optimizer_state = self._current_state()
        return {
            "strategy": self.strategy,
            "version": version,
            "epoch": 0 if self._loader is None else self._loader.epoch,
            "model": {
                name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in weights.items()
            },
            **optimizer_state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave. Before `prepare`, on all learners."""
        if self._trains is not None:
            raise RequestError("call load_state_dict before learner.prepare")
        missing = {"model", "optimizer", "version", "epoch"} - state.keys()
        if missing:
            raise RequestError(f"expected the result of learner.state_dict(); missing: {', '.join(sorted(missing))}")
        self._loaded = state

    def close(self) -> None:
        """Leave the run without waiting for the others. It is called by itself at the end of the program."""
        atexit.unregister(self.close)

    def _trained(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        if self._trains is None:
            raise RequestError("call learner.prepare(model, optimizer, loader) first")
        return self._trains

    def _be_slow(
        self, began_s: float, is_cancelled: Callable[[], bool], sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Slowness on purpose, for a minibatch that was computed since `began_s`."""
        if self._slowness is not None:
            self._slowness.act(time.monotonic() - began_s, is_cancelled, sleep)

    def _all(self, what: str, value: Any, timeout_s: float) -> dict[int, Any]:
        found = self._exchange(what, encode(value), timeout_s)
        return {learner: decode(data) for learner, data in found.items()}

    # --- what differs -------------------------------------------------------------------------------------------------

    @abstractmethod
    def _attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None,
        gradients: str | None,
        *,
        in_place: bool,
    ) -> nn.Module:
        """Join with the model, replace `optimizer.step`, and set `_trains`; the model to be used."""

    @abstractmethod
    def _share(self, loader: Any) -> Any:
        """The loader with this learner's share of each epoch; as it is where that cannot be."""

    def _follow_version(self, scheduler: Any) -> Any:
        """The scheduler; it counts versions, where its own steps do not."""
        return scheduler

    @abstractmethod
    def _current_state(self) -> tuple[int, Mapping[str, Any], dict[str, Any]]:
        """The version, the model's state, and what is kept of the optimizer, by the names in `state_dict`."""

    @abstractmethod
    def _exchange(self, what: str, data: bytes, timeout_s: float) -> dict[int, bytes]:
        """What every member of a call of all learners has given, by learner."""


def replace_step(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> None:
    """`optimizer.step` is this from now on; a scheduler, made before or after, finds what it looks for."""
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # as torch marks the steps it has wrapped
    optimizer.step = step  # type: ignore[method-assign]  # the point of it


# --- what learners exchange ------------------------------------------------------------------------------------------


def _extreme(values: Sequence[Any], of_numbers: Callable[..., Any], of_tensors: Callable[..., Any]) -> Any:
    """The smallest or largest. `min` and `max` keep a NaN that comes first, as torch does wherever it comes."""
    if isinstance(values[0], Tensor):
        return reduce(of_tensors, values)
    return of_numbers(sorted(values, key=math.isnan, reverse=True))


_REDUCTIONS: dict[str, Callable[[Sequence[Any]], Any]] = {
    "mean": lambda values: sum(values[1:], start=values[0]) / len(values),
    "sum": lambda values: sum(values[1:], start=values[0]),
    "min": lambda values: _extreme(values, min, torch.minimum),
    "max": lambda values: _extreme(values, max, torch.maximum),
}


def encode(value: Any) -> bytes:
    """RequestError where it is neither plain nor a tensor."""
    try:
        return msgspec.msgpack.encode(value, enc_hook=_packed)
    except (TypeError, OverflowError) as error:
        raise RequestError(f"learners can exchange only plain values and tensors: {error}") from None


def decode(data: bytes) -> Any:
    return msgspec.msgpack.decode(data, ext_hook=_unpacked)


def _packed(value: Any) -> msgspec.msgpack.Ext:
    if not isinstance(value, Tensor):
        raise TypeError(f"got a {type(value).__name__}")
    flat = value.detach().cpu().contiguous()
    raw = flat.reshape(-1).view(torch.uint8).numpy().tobytes()
    return msgspec.msgpack.Ext(_TENSOR, msgspec.msgpack.encode((str(flat.dtype)[6:], tuple(flat.shape), raw)))


def _unpacked(code: int, data: memoryview) -> Any:
    kind, shape, raw = msgspec.msgpack.decode(data)
    dtype = getattr(torch, kind)
    flat = torch.frombuffer(bytearray(raw), dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.reshape(shape)
