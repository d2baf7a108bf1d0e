"""A learner of an all-reduce strategy: DDP on the offbeat backend, with the interface of every learner."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore, HashStore, Store
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from offbeat.collectives.backend import stats
from offbeat.collectives.options import Options
from offbeat.errors import RequestError
from offbeat.runs.learning import sign_of_losses, warning_of_losses
from offbeat.server.learner.interface import Learner, OpenMinibatch, decode, encode, replace_step
from offbeat.server.learner.leased_loader import LoaderWrapper, rebuilt, why_local
from offbeat.strategy import NATIVE


class ReducedLearner(Learner):
    """A rank of a process group in DDP, as `offbeat.join()` returns it for an all-reduce such as "ring".

    `help(offbeat.Learner)` describes the calls that every strategy has. Attributes: `strategy` (the line), `number` (of
    this rank), `learners` (how many), `version` (updates made so far), `notes` (what `prepare` did differently).
    """

    def __init__(self, line: str, *, slow: Sequence[str] = (), seed: int = 0) -> None:
        rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        super().__init__(line, rank, ranks, slow=slow, seed=seed)
        self._version = 0
        self._seed = seed
        self._losses: list[float | torch.Tensor] = []
        self._busy_s = 0.0  # in minibatches, with what they wait for
        self._began_s: float | None = None  # the first forward
        self._forwards = 0  # of the model in DDP, since the last step
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            store = _store(ranks)
            options = replace(Options.of_environment(), strategy=line)
            dist.init_process_group("offbeat", rank=rank, world_size=ranks, store=store, pg_options=options)

    @property
    def version(self) -> int:
        """How many updates this run has made so far."""
        return self._version

    def _attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        clip_norm: float | None,
        gradients: str | None,
        *,
        in_place: bool,
    ) -> nn.Module:
        """The model in DDP, and the optimizer as it is."""
        if gradients is not None or in_place:
            self._notes += ("gradients= and in_place= are ignored with an all-reduce; use DDP communication hooks",)
        self._trains = model, optimizer
        wrapped = nn.parallel.DistributedDataParallel(model)
        wrapped.register_forward_pre_hook(self._count_forward)
        own_step = optimizer.step

        def check_and_clip() -> None:
            if not self._forwards:
                raise RequestError(
                    "the model that learner.prepare returned was not used in this step, so no gradient was "
                    "averaged; write: model, optimizer, loader = learner.prepare(model, optimizer, loader)"
                )
            self._forwards = 0
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            if self._open is not None:
                self._be_slow(self._open.began_s, lambda: False)

        def step(closure: Any = None) -> Any:
            def computed() -> Any:
                loss = closure()
                check_and_clip()
                return loss

            if closure is None:
                check_and_clip()
            self._version += 1
            return own_step(computed) if closure is not None else own_step()

        replace_step(optimizer, step)
        return wrapped

    def _count_forward(self, *_: object) -> None:
        """Gradients are averaged by the model that `prepare` returns, and by no other."""
        self._forwards += 1
        if self._began_s is None:
            self._began_s = time.monotonic()

    def _share(self, loader: Any) -> Any:
        own = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        why = why_local(loader)
        if own and isinstance(loader.sampler, DistributedSampler):
            self._notes += ("the loader already has a DistributedSampler, which is kept",)
            return loader
        if not own or "overrides iteration" in why:
            self._notes += (f"every learner reads its own data, since {why}",)
            return loader
        if why:
            self._notes += (f"the order of the loader is kept, since {why}; each learner takes its share of it",)
        return RankLoader(loader, self._seed, plain=not why)

    def _current_state(self) -> tuple[int, Mapping[str, Any], dict[str, Any]]:
        model, optimizer = self._trained()
        return self.version, model.state_dict(), {"optimizer": optimizer.state_dict()}

    # --- the other learners -------------------------------------------------------------------------------------------

    def _exchange(self, what: str, data: bytes, timeout_s: float) -> dict[int, bytes]:
        """By the process group; it has a time limit of its own."""
        kinds = [one.decode() for one in gather_bytes(what.encode())]
        for learner, theirs in enumerate(kinds):
            if theirs != kinds[0]:
                raise RequestError(
                    f"learner 0 called {kinds[0]} while learner {learner} called {theirs}; all learners must make the "
                    "same calls in the same order"
                )
        return dict(enumerate(gather_bytes(data)))

    # --- the loop -----------------------------------------------------------------------------------------------------

    @contextmanager
    def minibatch(self) -> Iterator[OpenMinibatch]:
        """One minibatch, as a `with` block: forward, backward, `optimizer.step()`. It is never cancelled."""
        self._open = minibatch = OpenMinibatch(time.monotonic())
        try:
            yield minibatch
        finally:
            self._open = None
            self._busy_s += time.monotonic() - minibatch.began_s
            loss = minibatch.loss
            if loss is not None:
                self._losses.append(loss.detach() if isinstance(loss, torch.Tensor) else loss)

    def finish(self) -> None:
        """Wait until all learners are done; they have the same weights. Call it once, after the last epoch."""
        dist.barrier()
        path = os.environ.get("OFFBEAT_SUMMARY")  # `offbeat run` reads it
        if path is None or not self._owns_group:
            return
        summary = self._summary()
        if self.number == 0:
            Path(path).write_text(json.dumps(summary), encoding="utf-8")

    def _summary(self) -> dict[str, Any]:
        """What all ranks have done together. Waiting: for ranks that came later, as far as this backend sees it."""
        counted = None if self.strategy == NATIVE else stats()
        sent, received, waited = (
            (0, 0, 0.0) if counted is None else (counted.sent_bytes, counted.received_bytes, counted.waited_s)
        )
        seconds = 0.0 if self._began_s is None else time.monotonic() - self._began_s
        sign = sign_of_losses([float(loss) for loss in self._losses], 1)
        mine = [sent, received, waited, self._busy_s, sign is not None]
        total = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(total)
        sent, received, waited, busy, warned = total.tolist()
        return {
            "updates": self.version,
            "seconds": seconds,
            "seconds_per_update": seconds / self.version if self.version else None,
            "sent_bytes": None if counted is None else int(sent),
            "received_bytes": None if counted is None else int(received),
            "wait_share": None if counted is None or not busy else min(1.0, waited / busy),
            "warning": warning_of_losses(sign) if sign is not None and warned > self.learners / 2 else None,
        }

    def close(self) -> None:
        """Leave the process group, where `join` made it. It is called by itself at the end of the program."""
        super().close()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()


def _store(ranks: int) -> Store | None:
    """Where the ranks meet: in a file of `offbeat run`; None for the store that torch finds by the environment."""
    path = os.environ.get("OFFBEAT_STORE")
    if path is not None:
        return FileStore(path, ranks)
    return None if "MASTER_ADDR" in os.environ else HashStore()  # alone


def gather_bytes(data: bytes) -> list[bytes]:
    """What each rank of the process group gives, on all."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    longest = max(1, *(int(size) for size in sizes))
    mine = torch.zeros(longest, dtype=torch.uint8)
    mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else mine[:0]
    found = [torch.empty_like(mine) for _ in sizes]
    dist.all_gather(found, mine)
    return [one[: int(size)].numpy().tobytes() for one, size in zip(found, sizes, strict=True)]


class RankLoader(LoaderWrapper):
    """A loader with this rank's share, another order each epoch if the user's shuffles."""

    def __init__(self, loader: DataLoader[Any], seed: int, *, plain: bool) -> None:
        batches: Any = loader.batch_sampler
        own = batches is not None and type(batches) is not BatchSampler
        given = batches if own else loader.sampler if batches is None else batches.sampler
        drop_last = batches is not None and not own and batches.drop_last
        self._sampler: DistributedSampler[Any] | _EveryNthSampler
        if plain:
            shuffles = isinstance(given, RandomSampler)
            self._sampler = DistributedSampler(loader.dataset, shuffle=shuffles, seed=seed, drop_last=drop_last)
        else:
            self._sampler = _EveryNthSampler(given, drop_last=drop_last)
        order: dict[str, Any] = {"batch_sampler": self._sampler}
        if not own:
            size = None if batches is None else batches.batch_size
            order = {"sampler": self._sampler, "batch_size": size, "drop_last": drop_last}
        super().__init__(rebuilt(loader, persistent_workers=loader.persistent_workers, **order))

    def __iter__(self) -> Iterator[Any]:
        self._sampler.set_epoch(self.epoch)
        yield from self._loader
        self.epoch += 1


class _EveryNthSampler:
    """A sampler (or batch sampler) of the user's own, shared out: rank i takes what comes i-th of every P.

    What the first rank's gives is taken on all, so that nothing comes twice, however each is seeded; what does not
    divide evenly is filled up from the beginning, or dropped. One without a length is taken as it comes: it must give
    the same on all ranks.
    """

    def __init__(self, given: Any, *, drop_last: bool) -> None:
        self._given, self._drop_last = given, drop_last
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._given, "set_epoch"):
            self._given.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        if not hasattr(self._given, "__len__"):
            return islice(iter(self._given), self._rank, None, self._ranks)
        order = decode(gather_bytes(encode(list(self._given)) if self._rank == 0 else b"")[0])
        share = self._share_of(len(order))
        return islice(cycle(order), self._rank, share * self._ranks, self._ranks)

    def __len__(self) -> int:
        return self._share_of(len(self._given))

    def _share_of(self, many: int) -> int:
        return many // self._ranks if self._drop_last else -(-many // self._ranks)
