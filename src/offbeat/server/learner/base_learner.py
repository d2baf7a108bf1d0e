"""What learners of a parameter server and of an all-reduce have in common: `prepare`, state, notes, open minibatch."""

from __future__ import annotations

import atexit
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offbeat.errors import RequestError
from offbeat.processes.slowness import Slowness
from offbeat.server.learner.learner_collectives import LearnerCollectives
from offbeat.server.learner.leased_loader import LoaderWrapper


@dataclass(slots=True)
class MinibatchBlock:
    """What `with learner.minibatch() as minibatch` gives: `loss`, `samples`, `cancelled`; see `offbeat.OpenMinibatch`.

    Set `loss` for policies that use it, and `samples` where the loader cannot know how many there are. After the block
    `cancelled` says whether it was interrupted.
    """

    began_s: float
    loss: float | Tensor | None = None
    samples: int | None = None
    cancelled: bool = False


class BaseLearner(LearnerCollectives):
    """See the module's text. A kind of learner says how it attaches a model, shares a loader, and what its state is."""

    def __init__(self, strategy: str, number: int, learners: int, *, slow: Sequence[str], seed: int) -> None:
        self.strategy = strategy
        self.number = number  # from 0
        self.learners = learners
        self.notes: tuple[str, ...] = ()  # what is done otherwise than one might think, and why
        self.says_notes = False  # when it is prepared
        self._slowness = Slowness(slow, learner=number, learners=learners, seed=seed) if slow else None
        self._loaded: Mapping[str, Any] | None = None  # by `load_state_dict`, until `prepare`
        self._trains: tuple[nn.Module, torch.optim.Optimizer] | None = None
        self._loader: LoaderWrapper | None = None
        self._open: MinibatchBlock | None = None
        atexit.register(self.close)

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
    ) -> tuple[Any, ...]:
        """Join the run with this model, and return what was given, to be used instead; see `offbeat.Learner`."""
        if self._trains is not None:
            raise RequestError("this learner was prepared before: a run has one model")
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
                self.notes += shared.notes
                shared.epoch = shared.epoch if self._loaded is None else self._loaded["epoch"]
            returned.append(shared)
        if scheduler is not None:
            self._follow_version(scheduler)
            returned.append(scheduler)
        self._loaded = None
        for note in self._notes_to_say() if self.says_notes else ():
            print(f"offbeat: note: {note}", file=sys.stderr)
        return tuple(returned)

    def state_dict(self) -> dict[str, Any]:
        """What a run goes on from: weights, optimizer state, version and epoch.

        With a parameter server one learner is enough to ask: all others pause for a moment. Any strategy can go on
        from it, with `load_state_dict` before `prepare`.
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
        """Go on from what `state_dict` gave, of this strategy or another. Before `prepare`, on all learners alike."""
        if self._trains is not None:
            raise RequestError("the learner is prepared: load what was saved before learner.prepare")
        missing = {"model", "optimizer", "version", "epoch"} - state.keys()
        if missing:
            raise RequestError(f"this is not what learner.state_dict() gave: {', '.join(sorted(missing))} is missing")
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

    def _follow_version(self, scheduler: Any) -> None:
        """Make a scheduler count versions, where its own steps do not."""

    def _notes_to_say(self) -> Sequence[str]:
        return self.notes

    @abstractmethod
    def _current_state(self) -> tuple[int, Mapping[str, Any], dict[str, Any]]:
        """The version, the model's state, and what is kept of the optimizer, by the names in `state_dict`."""


def replace_step(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> None:
    """`optimizer.step` is this from now on; a scheduler, made before or after, finds what it looks for."""
    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # as torch marks the steps it has wrapped
    optimizer.step = step  # type: ignore[method-assign]  # the point of it
