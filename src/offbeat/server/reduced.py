"""The same learner's interface for all-reduce strategies: DDP on the offbeat backend. Only the line changes."""

from __future__ import annotations

import atexit
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore, TCPStore
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from offbeat.collectives.backend import stats
from offbeat.learning import sign_of_losses, warning_of_losses
from offbeat.server.slowness import Slowness
from offbeat.strategy import NATIVE


class Round:
    """One minibatch of an all-reduce: it is never cancelled. `loss` may be set, for the warning about trainings that
    do not learn."""

    cancelled = False

    def __init__(self) -> None:
        self.loss: float | torch.Tensor | None = None
        self.samples: int | None = None
        self.began_s = time.monotonic()


class ReducedLearner:
    """A rank of a process group in DDP, as `offbeat.join()` returns it for an all-reduce such as "ring".

    `help(offbeat.Learner)` describes the calls that every strategy has. Attributes: `strategy` (the line), `number` (of
    this rank), `learners` (how many), `version` (updates made so far), `notes` (what `prepare` did differently).
    """

    def __init__(self, line: str, *, slow: Sequence[str] = (), seed: int = 0) -> None:
        self.strategy = line
        self.number = int(os.environ.get("RANK", "0"))
        self.learners = int(os.environ.get("WORLD_SIZE", "1"))
        self.version = 0
        self.notes: tuple[str, ...] = ()
        self._slowness = Slowness(slow, learner=self.number, learners=self.learners, seed=seed) if slow else None
        self._seed = seed
        self._now: Round | None = None
        self._losses: list[float | torch.Tensor] = []
        self._busy_s = 0.0  # in minibatches, with what they wait for
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            os.environ.setdefault("OFFBEAT_STRATEGY", line)
            alone = "MASTER_ADDR" not in os.environ
            store = HashStore() if alone else None
            dist.init_process_group(
                "gloo" if line == NATIVE else "offbeat", rank=self.number, world_size=self.learners, store=store
            )
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
        """The model in DDP, the optimizer as it is, the loader with this rank's share of each epoch."""
        if gradients is not None or in_place:
            self.notes += ("gradients= and in_place= are for a parameter server: DDP has its own communication hooks",)
        wrapped = nn.parallel.DistributedDataParallel(model)
        own_step = optimizer.step

        def step(closure: Any = None) -> Any:
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            if self._slowness is not None and self._now is not None:
                self._slowness.act(time.monotonic() - self._now.began_s, lambda: False)
            self.version += 1
            return own_step(closure) if closure is not None else own_step()

        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # as torch marks the steps it has wrapped
        optimizer.step = step  # type: ignore[method-assign]  # the point of it
        given: list[Any] = [wrapped, optimizer]
        if loader is not None:
            given.append(self._share(loader))
        if scheduler is not None:
            given.append(scheduler)
        return tuple(given)

    def _share(self, loader: Any) -> Any:
        if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
            self.notes += ("every learner goes through its own data: it is no DataLoader over a map-style data set",)
            return loader
        return _Shared(loader, self._seed)

    @contextmanager
    def minibatch(self) -> Iterator[Round]:
        """One minibatch, as a `with` block: forward, backward, `optimizer.step()`."""
        self._now = now = Round()
        try:
            yield now
        finally:
            self._now = None
            self._busy_s += time.monotonic() - now.began_s
            if now.loss is not None:
                self._losses.append(now.loss.detach() if isinstance(now.loss, torch.Tensor) else now.loss)

    def finish(self) -> None:
        """Wait until all learners are done; they have the same weights. Call it once, after the last epoch."""
        dist.barrier()
        key = os.environ.get("OFFBEAT_SUMMARY")  # `offbeat run` reads it
        if key is None or not self._owns_group:
            return
        summary = self._summary()
        if self.number == 0:
            store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
            store.set(key, json.dumps(summary))

    def _summary(self) -> dict[str, Any]:
        """What all ranks have done together. Waiting: for ranks that came later, as far as this backend sees it."""
        counted = None if self.strategy == NATIVE else stats()
        sent, received, waited = (
            (0, 0, 0.0) if counted is None else (counted.sent_bytes, counted.received_bytes, counted.waited_s)
        )
        sign = sign_of_losses([float(loss) for loss in self._losses], 1)
        mine = [sent, received, waited, self._busy_s, sign is not None]
        total = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(total)
        sent, received, waited, busy, warned = total.tolist()
        return {
            "updates": self.version,
            "sent_bytes": None if counted is None else int(sent),
            "received_bytes": None if counted is None else int(received),
            "wait_share": None if counted is None or not busy else min(1.0, waited / busy),
            "warning": warning_of_losses(sign) if sign is not None and warned > self.learners / 2 else None,
        }

    def close(self) -> None:
        """Leave the process group, where `join` made it. It is called by itself at the end of the program."""
        atexit.unregister(self.close)
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()


class _Shared:
    """A loader with this rank's share, another order each epoch if the user's shuffles."""

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        shuffles = isinstance(loader.sampler, RandomSampler)
        self.epoch = 0
        self._sampler: DistributedSampler[Any] = DistributedSampler(
            loader.dataset, shuffle=shuffles, seed=seed, drop_last=loader.drop_last
        )
        self._loader: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            sampler=self._sampler,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            drop_last=loader.drop_last,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    def __iter__(self) -> Iterator[Any]:
        self._sampler.set_epoch(self.epoch)
        yield from self._loader
        self.epoch += 1

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)
