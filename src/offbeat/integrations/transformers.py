"""Hugging Face's Trainer as a learner: `trainer.add_callback(OffbeatCallback(trainer))`, under `offbeat run`.

    offbeat run --learners 4 --sync k-async:2 script.py

With a parameter server, training data is leased: all learners together go through each epoch once, and the trainer's
steps, and with them the learning rate, count the gradients that all of them have given. A minibatch that the policy
cancels is computed to its end, and left out. Each learner evaluates by itself; the first one writes checkpoints, with
the servers' optimizer state, and `trainer.train(resume_from_checkpoint=...)` goes on from them. With an all-reduce the
trainer's own DDP runs on the backend `offbeat`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

from offbeat.collectives.options import mark_joined
from offbeat.errors import RequestError
from offbeat.policies import create
from offbeat.server.learner.join import DEFAULT, join
from offbeat.server.learner.served_learner import ServedLearner, follow
from offbeat.strategy import ALL_REDUCE, family_of


class OffbeatCallback(TrainerCallback):
    """Makes a trainer a learner; see the module's text. `sync` counts where `offbeat run` has said nothing."""

    def __init__(self, trainer: Trainer, sync: str | None = None) -> None:
        self.learner: ServedLearner | None = None
        if family_of(os.environ.get("OFFBEAT_SYNC") or sync or DEFAULT) == ALL_REDUCE:
            mark_joined()
            return
        learner = join(sync)
        assert isinstance(learner, ServedLearner)
        self.learner = learner
        self._before = self._an_epoch = 0  # steps of a run that this one goes on from, and of an epoch
        self._shown = 0  # the step that was told last
        self._trainer = trainer
        self._loader = _Loader(learner, trainer)
        trainer.get_train_dataloader = lambda: self._loader
        trainer.is_world_process_zero = lambda: learner.number == 0
        self._learns_only = learner.number > 0  # the first one writes
        if self._learns_only:
            trainer._save_checkpoint = lambda *_: None  # also not the best one, which the trainer decides by itself

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The model and the optimizer, with whatever was loaded from a checkpoint."""
        if self.learner is None:
            return
        optimizer = getattr(given["optimizer"], "optimizer", given["optimizer"])  # inside of Accelerate's
        scheduler = getattr(given["lr_scheduler"], "scheduler", given["lr_scheduler"])
        self._before = self._shown = state.global_step
        self._an_epoch = max(1, -(-len(self._loader) // args.gradient_accumulation_steps))
        epoch, within = divmod(state.global_step, self._an_epoch)
        if within and not args.ignore_data_skip:
            raise RequestError(
                f"this checkpoint was saved in the middle of an epoch (step {within} of {self._an_epoch}); "
                "resume from a checkpoint at the end of an epoch (save_strategy='epoch' writes such "
                "checkpoints), or set ignore_data_skip=True to train the whole epoch again"
            )
        state.is_world_process_zero = self.learner.number == 0
        self._loader.prepare(given["model"], optimizer, scheduler, epoch=epoch)

    def on_substep_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.learner is not None:
            self._loader.computed += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.learner is None:
            return
        self._loader.computed += 1
        made = self._before + self._loader.progress()
        most = max(0, (self._loader.epoch + 1) * self._an_epoch - 2)  # it adds one, and ends where all are made
        self._show(min(made, most, state.max_steps), args, state, control)
        if made >= state.max_steps and state.max_steps % self._an_epoch:  # else the epoch's end is the end
            control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.learner is None:
            return
        if not self._loader.computed:  # others were faster and have taken all of it: that is no reason to stop
            control.should_training_stop = False
        self._show(min((self._loader.epoch + 1) * self._an_epoch, state.max_steps), args, state, control)

    def _show(self, step: int, args: Any, state: Any, control: Any) -> None:
        """Steps count the gradients of all learners, and come in leaps: what is due at one that was leapt is due."""
        last, step = self._shown, max(self._shown, step)
        self._shown = state.global_step = step
        state.epoch = step / self._an_epoch
        ends = step >= state.max_steps > last

        def is_due(every: float) -> bool:
            return step > last and (ends or step // every > last // every)

        if args.logging_strategy == "steps":
            first = args.logging_first_step and last == self._before < step
            control.should_log = first or is_due(state.logging_steps)
        if args.eval_strategy == "steps":
            control.should_evaluate = is_due(state.eval_steps) and args.eval_delay <= step
        if args.save_strategy == "steps":
            control.should_save = state.save_steps > 0 and is_due(state.save_steps)
        if self._learns_only:
            control.should_save = False

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if self.learner is None:
            return
        loads_best = args.load_best_model_at_end
        if loads_best:  # the one of the learner that has written it
            told = self.learner.broadcast([state.best_model_checkpoint, state.best_metric, state.best_global_step])
            state.best_model_checkpoint, state.best_metric, state.best_global_step = told
        self.learner.finish()
        if loads_best and state.best_model_checkpoint is not None:
            self._trainer._load_best_model()


class _TakenError(Exception):
    """Nothing is free, and what this learner has is not computed yet."""


class _Loader:
    """The trainer's data, leased from the time on that the learner is prepared.

    `len` is the minibatches of an epoch over all learners: no learner has more, and schedules are made of it.
    """

    def __init__(self, learner: ServedLearner, trainer: Trainer) -> None:
        args, data = trainer.args, trainer.train_dataset
        if data is None or not hasattr(data, "__len__"):
            raise RequestError("OffbeatCallback needs a trainer with a train_dataset that has a length")
        if hasattr(data, "set_format"):  # of the package `datasets`
            data = trainer._remove_unused_columns(data, description="training")
        self.dataset, self.batch_size = data, args.train_batch_size
        self.computed = 0  # minibatches of this epoch
        self._handed = 0  # the same, given to the trainer
        self._learner, self._trainer = learner, trainer
        self._own_steps = 0
        self._plain: DataLoader[Any] = DataLoader(
            data,
            batch_size=args.train_batch_size,
            shuffle=True,
            collate_fn=trainer.data_collator,
            num_workers=args.dataloader_num_workers,
            drop_last=args.dataloader_drop_last,
        )
        policy = create(learner.strategy, expect=learner.learners)
        self._steps_alone = policy.rule.delta  # learners make steps of their own, and all of them count
        self._gradients = policy.gradients_per_update(learner.learners)
        self.epoch = 0
        self._loader: Any = None
        self._batches: Iterator[Any] | None = None

    def prepare(self, model: Any, optimizer: Any, scheduler: Any, *, epoch: int) -> None:
        self._loader = self._learner.prepare(model, optimizer, self._plain)[2]
        self.set_epoch(epoch)
        follow(scheduler, self.progress)
        optimizer.register_step_post_hook(self._count_step)
        trainer = self._trainer

        def step() -> None:
            if self._handed > self.computed:
                raise _TakenError
            trainer.accelerator.gradient_state._set_sync_gradients(True)
            if trainer.args.max_grad_norm > 0:
                trainer._clip_grad_norm(trainer.model)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()

        self._learner.accumulate(step)

    def _count_step(self, *_: object) -> None:
        self._own_steps += 1

    def progress(self) -> int:
        """How many gradients all learners have given, as far as this one knows."""
        learner = self._learner
        return self._own_steps * learner.learners if self._steps_alone else learner.version * self._gradients

    def set_epoch(self, epoch: int) -> None:
        """The trainer says which one it iterates next."""
        self.epoch = self._loader.epoch = epoch

    def __len__(self) -> int:
        return len(self._plain)

    def __iter__(self) -> Iterator[Any]:
        self._handed = self.computed = 0
        self._batches = None
        return self

    def __next__(self) -> Any:
        """StopIteration may be for now only: what was handed out is to be computed before there is more."""
        if self._batches is None:
            self._batches = iter(self._loader)
        try:
            batch = next(self._batches)
        except _TakenError:
            self._batches = None
            raise StopIteration from None
        self._handed += 1
        return batch
