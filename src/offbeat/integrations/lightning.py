"""A Lightning trainer as a learner: `Trainer(strategy=OffbeatStrategy(), devices=1, ...)`, under `offbeat run`.

    offbeat run --learners 4 --sync k-async:2 script.py

Training data is leased: all learners together go through each epoch once. Every learner validates on all the data that
it is given. A minibatch that the policy cancels ends inside `training_step`, and Lightning goes on with the next.
Checkpoints hold the servers' weights and optimizer state; `trainer.fit(ckpt_path=...)` goes on from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor

from offbeat.errors import RequestError
from offbeat.server.learner.join import join
from offbeat.server.learner.leased_loader import LoaderWrapper
from offbeat.server.learner.served_learner import ServedLearner


class OffbeatStrategy(SingleDeviceStrategy):
    """One learner of a run; see the module's text. `sync` counts where `offbeat run` has said nothing."""

    strategy_name = "offbeat"

    def __init__(self, sync: str | None = None, *, device: torch.device | str = "cpu", **more: Any) -> None:
        super().__init__(device=device, **more)
        self.learner = join(sync)
        self.global_rank = self.local_rank = self.learner.number
        self.world_size = self.learner.learners
        self._is_served = isinstance(self.learner, ServedLearner)
        self._batches: _Batches | None = None  # of the training, once it is prepared
        self._saved: dict[str, Any] | None = None  # of a checkpoint that is being put together
        self._in_batch = False

    @property
    def is_global_zero(self) -> bool:
        return self.learner.number == 0

    # --- training ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == "fit" and not any(isinstance(one, _LoopCallback) for one in trainer.callbacks):
            trainer.callbacks.insert(0, _LoopCallback(self))

    def process_dataloader(self, dataloader: Any) -> Any:
        """The training loader, the first time it is asked for: what was loaded from a checkpoint is loaded by then."""
        trainer = self.lightning_module.trainer
        if not trainer.training or self._batches is not None:
            return dataloader
        if len(self.optimizers) != 1:
            raise RequestError(f"offbeat trains with one optimizer; configure_optimizers has {len(self.optimizers)}")
        over_versions = [one.scheduler for one in self.lr_scheduler_configs if one.interval == "step"]
        if len(over_versions) > 1:
            raise RequestError(f"offbeat steps one scheduler over versions; there are {len(over_versions)}")
        given = self.learner.prepare(self.lightning_module, self.optimizers[0], dataloader, *over_versions)
        self.model, loader = given[0], given[2]
        self._batches = _Batches(loader, reads_ahead=self._is_served)
        if isinstance(self.learner, ServedLearner):
            self.learner.accumulate()
        return self._batches

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

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._batches is None or not self._is_served or not self.is_global_zero:
            return super().lightning_module_state_dict()
        self._saved = self.learner.state_dict()
        return dict(self._saved["model"])

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if self._batches is not None and self._is_served and not self.is_global_zero:
            return {}  # only the first learner writes
        saved, self._saved = self._saved, None
        return dict(super().optimizer_state(optimizer)) if saved is None else saved["optimizer"]

    # --- the other learners -----------------------------------------------------------------------------------------

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean over the learners, between minibatches; inside one the learner's own: learners are not in step."""
        if self._batches is None or self._in_batch or not isinstance(tensor, Tensor):
            return tensor
        name = str(reduce_op or "mean").lower().rpartition(".")[2]
        op = {"avg": "mean"}.get(name, name)
        return self.learner.all_reduce(tensor, op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._batches is None or self._in_batch:
            return decision
        votes = self.learner.gather(bool(decision))
        return min(votes) if all else max(votes)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if self._batches is None or self._in_batch:
            return tensor
        return torch.stack([one.to(tensor.device) for one in self.learner.gather(tensor)])


class _Batches(LoaderWrapper):
    """The training loader as Lightning iterates it; after each minibatch it is asked whether another will come.

    Which minibatch is the last of an epoch is known only when the others are done too: it may not be asked before the
    one at hand is pushed.
    """

    def __init__(self, loader: Any, *, reads_ahead: bool) -> None:
        super().__init__(loader)
        self._reads_ahead = reads_ahead
        self._iterator: Iterator[Any] = iter(())
        self._next: list[Any] = []

    def __iter__(self) -> _Batches:
        self._iterator, self._next = iter(self._loader), []
        return self

    def __next__(self) -> Any:
        return self._next.pop() if self._next else next(self._iterator)

    def start(self, epoch: int) -> None:
        """The next iteration is of this epoch: a run that goes on does not begin with the first."""
        if hasattr(self._loader, "epoch"):
            self._loader.epoch = epoch

    def has_ended(self) -> bool:
        """Whether there is no more of this epoch."""
        if self._reads_ahead and not self._next:
            self._next = [batch for batch in (next(self._iterator, self),) if batch is not self]
        return self._reads_ahead and not self._next


class _LoopCallback(Callback):
    """What a strategy is not told of."""

    def __init__(self, strategy: OffbeatStrategy) -> None:
        self._strategy = strategy

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.val_check_interval == 1.0 and self._strategy._is_served:
            trainer.val_check_batch = float("inf")  # at the last minibatch, whichever that will be

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._strategy._batches is not None:
            self._strategy._batches.start(trainer.current_epoch)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._strategy._in_batch = True

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        strategy, loop = self._strategy, trainer.fit_loop
        strategy._in_batch = False
        if strategy._batches is not None and strategy._batches.has_ended():
            loop.epoch_loop.batch_progress.is_last_batch = True
            loop._data_fetcher.done = True
