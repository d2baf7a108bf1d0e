"""A Lightning trainer as a learner: `Trainer(strategy=OffbeatStrategy(), devices=1, ...)`, under `offbeat run`.

    offbeat run --learners 4 --sync k-async:2 script.py

Training data is leased: all learners together go through each epoch once. Every learner validates on all the data that
it is given. A minibatch that the policy cancels ends inside `training_step`, and Lightning goes on with the next.
Checkpoints hold the servers' weights and optimizer state; `trainer.fit(ckpt_path=...)` goes on from them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from offbeat.errors import RequestError
from offbeat.server.learner.interface import Learner
from offbeat.server.learner.join import join
from offbeat.server.learner.served_learner import ServedLearner


class OffbeatStrategy(SingleDeviceStrategy):
    """One learner of a run; see the module's text. `sync` counts where `offbeat run` has said nothing."""

    strategy_name = "offbeat"
    is_distributed = True  # Lightning then asks `reduce` where a value is logged with sync_dist

    def __init__(self, sync: str | None = None, *, device: torch.device | str = "cpu", **more: Any) -> None:
        super().__init__(device=device, **more)
        self.learner = join(sync)
        self.global_rank = self.local_rank = self.learner.number
        self.world_size = self.learner.learners
        self._serves = isinstance(self.learner, ServedLearner)
        rank_zero_only.rank = self.global_rank
        self._batches: _Batches | None = None  # of the training, once it is prepared
        self._saved: dict[str, Any] | None = None  # of a checkpoint that is being put together
        self._in_step = False  # whether all learners are where this one is, so that they can call each other
        self._has_finished = False

    @property
    def is_global_zero(self) -> bool:
        return self.learner.number == 0

    # --- training ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        trainer._accelerator_connector.use_distributed_sampler = False  # data is leased, or shared by the learner
        if trainer.state.fn != "fit":
            return
        if self._has_finished:
            raise RequestError(
                "this learner has finished its training; a run has only one trainer.fit, so start a new run"
            )
        if self._serves and trainer.enable_validation and not _is_once_an_epoch(trainer.val_check_interval):
            raise RequestError(
                "val_check_interval is shorter than an epoch, but learners of a parameter server validate only at the "
                "end of an epoch; remove it, or use check_val_every_n_epoch"
            )
        if not any(isinstance(one, _Around) for one in trainer.callbacks):
            trainer.callbacks.insert(0, _Around(self))

    def process_dataloader(self, dataloader: Any) -> Any:
        """The training loader, the first time it is asked for: what was loaded from a checkpoint is loaded by then."""
        trainer = self.lightning_module.trainer
        if not trainer.training or self._batches is not None:
            return dataloader
        if len(self.optimizers) != 1:
            raise RequestError(f"offbeat supports one optimizer; configure_optimizers returned {len(self.optimizers)}")
        over_versions = [one.scheduler for one in self.lr_scheduler_configs if one.interval == "step"]
        if len(over_versions) > 1:
            raise RequestError(f"offbeat supports one scheduler with interval='step'; got {len(over_versions)}")
        optimizer = self.optimizers[0]
        given = self.learner.prepare(self.lightning_module, optimizer, dataloader, *over_versions)
        self.model, loader = given[0], given[2]
        self._batches = _Batches(loader, self.learner)
        if isinstance(self.learner, ServedLearner):
            self.learner.accumulate(lambda: self._step_with_the_rest(optimizer))
        return self._batches

    def _step_with_the_rest(self, optimizer: torch.optim.Optimizer) -> None:
        """What was accumulated and is waited for; clipped like any other."""
        self.precision_plugin._after_closure(self.lightning_module, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **more: Any) -> Any:
        with self.learner.minibatch() as minibatch:

            def computed() -> Any:
                loss = closure()
                minibatch.loss = loss.detach() if isinstance(loss, Tensor) else loss
                return loss

            return super().optimizer_step(optimizer, computed, model, **more)
        if getattr(closure, "_result", self) is None:  # it was cancelled: Lightning looks for what it computed
            closure.__dict__["_result"] = ClosureResult(closure_loss=None)
        return None

    def on_train_end(self) -> None:
        super().on_train_end()
        if self._batches is not None:
            self.learner.finish()
            self._has_finished = self._serves

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._batches is None or not self._serves or not self.is_global_zero:
            return super().lightning_module_state_dict()
        self._saved = self.learner.state_dict()
        return dict(self._saved["model"])

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if self._batches is not None and self._serves and not self.is_global_zero:
            return {}  # only the first learner writes
        saved, self._saved = self._saved, None
        return dict(super().optimizer_state(optimizer)) if saved is None else saved["optimizer"]

    # --- the other learners -----------------------------------------------------------------------------------------

    def _can_call(self) -> bool:
        return self._batches is not None and self._in_step and not self._has_finished

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean over the learners, at the end of an epoch; within one the learner's own: they are not in step."""
        if not self._can_call() or not isinstance(tensor, Tensor):
            return tensor
        name = str(reduce_op or "mean").lower().rpartition(".")[2]
        op = {"avg": "mean"}.get(name, name)
        return self.learner.all_reduce(tensor, op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if not self._can_call():
            return decision
        votes = self.learner.gather(bool(decision))
        return min(votes) if all else max(votes)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if not self._can_call():
            return tensor
        return torch.stack([one.to(tensor.device) for one in self.learner.gather(tensor)])


class _Batches:
    """The training loader as Lightning iterates it; after each minibatch it is asked whether another will come.

    Which minibatch is the last of an epoch is known only when the others are done too: it may not be asked before the
    one at hand is pushed.
    """

    def __init__(self, loader: Any, learner: Learner) -> None:
        self._loader = loader
        self._served = learner if isinstance(learner, ServedLearner) else None
        self._iterator: Iterator[Any] = iter(())
        self._next: list[Any] = []
        self._has_started = False

    def __iter__(self) -> _Batches:
        self.leave()
        self._iterator = iter(self._loader)
        return self

    def __next__(self) -> Any:
        return self._next.pop() if self._next else next(self._iterator)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def start(self, epoch: int) -> None:
        """The next iteration is of this epoch: a run that goes on does not begin with the first.

        Leased epochs count themselves: one that `limit_train_batches` has left goes on in the next iteration.
        """
        if hasattr(self._loader, "epoch") and not (self._served is not None and self._has_started):
            self._loader.epoch = epoch
        self._has_started = True

    def has_ended(self) -> bool:
        """Whether there is no more of this epoch."""
        if self._served is not None and not self._next:
            self._next = [batch for batch in (next(self._iterator, self),) if batch is not self]
        return self._served is not None and not self._next

    def leave(self) -> None:
        """This iteration is over, perhaps before the epoch is: nobody may wait for what this learner has of it."""
        if isinstance(self._iterator, Generator):
            self._iterator.close()  # gives back what was fetched ahead
        self._iterator = iter(())
        if self._next and self._served is not None:
            self._served._discard_batch()
        self._next = []


class _Around(Callback):
    """What a strategy is not told of."""

    def __init__(self, strategy: OffbeatStrategy) -> None:
        self._strategy = strategy
        self._computed = 0  # minibatches of this epoch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._strategy._serves and _is_once_an_epoch(trainer.val_check_interval):
            trainer.val_check_batch = float("inf")  # at the last minibatch, whichever that will be

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._computed = 0
        self._strategy._in_step = False
        if self._strategy._batches is not None:
            self._strategy._batches.start(trainer.current_epoch)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._computed += 1
        self._strategy._in_step = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        strategy, loop = self._strategy, trainer.fit_loop
        strategy._in_step = not strategy._serves
        if strategy._batches is None or loop._data_fetcher.done:  # limit_train_batches: no look at the next one
            return
        if strategy._batches.has_ended():
            loop.epoch_loop.batch_progress.is_last_batch = True
            loop._data_fetcher.done = True
            loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._end_epoch()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_epoch()

    def _end_epoch(self) -> None:
        """The learners are in step again, if all have computed something: who has not neither logs nor validates."""
        strategy = self._strategy
        if strategy._serves and strategy._batches is not None and not strategy._in_step and self._computed >= 0:
            strategy._batches.leave()
            strategy._in_step = all(strategy.learner.gather(self._computed > 0))
            self._computed = -1  # asked, once an epoch


def _is_once_an_epoch(interval: Any) -> bool:
    return isinstance(interval, float) and interval == 1.0
