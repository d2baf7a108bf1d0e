"""Learners that do what learners may: odd models, odd gradients, odd loops. See `programs` for how they are run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from offbeat.errors import OffbeatError
from offbeat.server.learner.served_learner import ServedLearner
from server.programs import FEATURES, data, family, loss_of, model_of, weights_of


def is_cancelled(learner: ServedLearner) -> bool:
    return learner._mode is not None and learner._mode.is_cancelled()


def train(learner: ServedLearner, model: nn.Module, optimizer: Any, batches: int, x: torch.Tensor | None = None) -> int:
    """So many minibatches on the same samples; how many were cancelled."""
    cancelled = 0
    for _ in range(batches):
        with learner.minibatch() as minibatch:
            optimizer.zero_grad()
            loss = loss_of(model, slice(0, 16)) if x is None else model(x).square().mean()
            loss.backward()
            optimizer.step()
        cancelled += minibatch.cancelled
    return cancelled


def serve_cancelled(rank: int, ranks: int, store: str, *, updates: int, **run: Any) -> Any:
    """The last learner sleeps in its third layer until it is cancelled; which layers does it still enter?"""

    class Layer(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number
            self.inner = nn.Linear(FEATURES, FEATURES)
            self.norm = nn.BatchNorm1d(FEATURES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            entered.append(self.number)
            if slow and self.number == 2:
                end = time.monotonic() + 5.0
                while not is_cancelled(learner_) and time.monotonic() < end:
                    time.sleep(0.001)
            out: torch.Tensor = self.norm(self.inner(x)).relu()
            return out

    entered: list[int] = []
    slow = rank == ranks - 2
    learner_: ServedLearner

    def body(learner: ServedLearner) -> Any:
        nonlocal learner_
        learner_ = learner
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer(number) for number in range(6)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = learner.prepare(model, optimizer)
        x = data().tensors[0][:16]
        norm: Any = model[0].norm
        cancelled = after = 0
        dirty = False
        while learner.version < updates:
            entered.clear()
            before = norm.running_mean.clone()
            with learner.minibatch() as minibatch:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            if minibatch.cancelled:
                cancelled += 1
                after = max(after, entered[-1] - 2 if entered else 0)
                dirty |= not torch.equal(before, norm.running_mean)
                dirty |= any(p.grad is not None for p in model.parameters())
        learner.finish()
        return {"cancelled": cancelled, "layers_after": after, "dirty": dirty, "weights": weights_of(model)}

    return family(rank, ranks, store, body, **run)


def serve_bad_gradients(rank: int, ranks: int, store: str, *, value: float, times: int, pushes: int, **run: Any) -> Any:
    """The last learner's first gradients are no numbers."""

    def body(learner: ServedLearner) -> Any:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        learner.prepare(model, optimizer)
        bad = times if rank == ranks - 2 else 0
        try:
            for number in range(pushes):
                with learner.minibatch():
                    optimizer.zero_grad()
                    loss_of(model, slice(0, 16)).backward()  # type: ignore[no-untyped-call]  # torch has no types for it
                    if number < bad:
                        next(model.parameters()).grad[0, 0] = value  # type: ignore[index]  # there is one
                    optimizer.step()
            learner.finish()
        except OffbeatError as error:
            return str(error)
        return weights_of(model)

    return family(rank, ranks, store, body, **run)


def serve_parts(rank: int, ranks: int, store: str, **run: Any) -> Any:
    """A model with a frozen layer, a buffer, and a branch that only every other minibatch uses."""

    def body(learner: ServedLearner) -> Any:
        torch.manual_seed(rank)
        model = nn.ModuleDict({name: nn.Linear(FEATURES, FEATURES) for name in ("frozen", "used", "seldom")})
        model["frozen"].requires_grad_(False)
        model.register_buffer("scale", torch.full((2,), float(rank + 1)))
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
        learner.prepare(model, optimizer)
        x = data().tensors[0][:16]
        for number in range(6):
            with learner.minibatch():
                optimizer.zero_grad()
                out = model["used"](model["frozen"](x))
                if number % 2:
                    out = model["seldom"](out)
                out.square().mean().backward()
                optimizer.step()
        learner.finish()
        scale = model.scale.tolist()  # type: ignore[operator]  # a buffer
        return {"weights": weights_of(model), "scale": scale}

    return family(rank, ranks, store, body, **run)


def serve_loop(rank: int, ranks: int, store: str, *, kind: str, **run: Any) -> Any:
    """Loops as people write them."""

    def body(learner: ServedLearner) -> Any:
        model: Any = model_of()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = data().tensors
        loss: Any = nn.functional.cross_entropy
        if kind == "accumulated":  # two backwards to a step
            learner.prepare(model, optimizer)
            for start in range(0, 96, 32):
                optimizer.zero_grad()
                for half in (start, start + 16):
                    with learner.minibatch():
                        (loss(model(x[half : half + 16]), y[half : half + 16]) / 2).backward()
                optimizer.step()
        elif kind == "plain":  # without `with learner.minibatch()`
            learner.prepare(model, optimizer)
            for start in range(0, 96, 32):
                optimizer.zero_grad()
                loss(model(x[start : start + 32]), y[start : start + 32]).backward()
                optimizer.step()
        elif kind == "clipped":  # gradients changed after backward
            learner.prepare(model, optimizer)
            for start in range(0, 96, 32):
                with learner.minibatch():
                    optimizer.zero_grad()
                    loss(model(x[start : start + 32]), y[start : start + 32]).backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
        elif kind == "closure":
            learner.prepare(model, optimizer)

            def closure() -> Any:
                optimizer.zero_grad()
                found = loss(model(x[:32]), y[:32])
                found.backward()
                return found

            with learner.minibatch():
                optimizer.step(closure)
        elif kind == "compiled":
            compiled: Any = torch.compile(model, backend="eager")
            learner.prepare(compiled, optimizer)
            for start in range(0, 96, 32):
                with learner.minibatch():
                    optimizer.zero_grad()
                    loss(compiled(x[start : start + 32]), y[start : start + 32]).backward()
                    optimizer.step()
        learner.finish()
        return {"weights": weights_of(model), "notes": learner.notes, "version": learner.version}

    return family(rank, ranks, store, body, **run)


def serve_schedule(rank: int, ranks: int, store: str, *, pushes: int, **run: Any) -> Any:
    """A scheduler over versions: its rate follows the version of the weights, not the learner's own steps."""

    def body(learner: ServedLearner) -> Any:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda version: 1.0 / (1 + version))
        learner.prepare(model, optimizer, None, scheduler)
        rates = []
        for _ in range(pushes):
            with learner.minibatch():
                optimizer.zero_grad()
                loss_of(model, slice(0, 16)).backward()  # type: ignore[no-untyped-call]  # torch has no types for it
                optimizer.step()
                scheduler.step()
            rates.append((learner.version, optimizer.param_groups[0]["lr"]))
        learner.finish()
        return rates

    return family(rank, ranks, store, body, **run)


def serve_refused(rank: int, ranks: int, store: str, *, pushes: int, **run: Any) -> Any:
    """The last learner has another model."""

    def body(learner: ServedLearner) -> Any:
        model = model_of() if rank < ranks - 2 else nn.Sequential(nn.Linear(FEATURES, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if rank == ranks - 2:
            time.sleep(0.3)  # so that the others' model is that of the run
        try:
            learner.prepare(model, optimizer)
            train(learner, model, optimizer, pushes)
            return learner.version
        except OffbeatError as error:
            return str(error)

    return family(rank, ranks, store, body, **run)


def serve_local_data(rank: int, ranks: int, store: str, **run: Any) -> Any:
    """Every learner goes through its own data, some of which is cancelled and comes again."""

    def body(learner: ServedLearner) -> Any:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [(number, torch.full((4, FEATURES), float(number))) for number in range(8)]
        _, _, loader = learner.prepare(model, optimizer, batches)
        done, tries = [], 0
        for number, x in loader:
            with learner.minibatch() as minibatch:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            tries += 1
            if not minibatch.cancelled:
                done.append(number)
        learner.finish()
        wrapped: Any = loader
        return {"done": done, "tries": tries, "notes": wrapped.notes}

    return family(rank, ranks, store, body, **run)


def serve_skipping(rank: int, ranks: int, store: str, **run: Any) -> Any:
    """A loop that has no use for some batches, with workers that load them."""

    def body(learner: ServedLearner) -> Any:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: Any = DataLoader(data(), batch_size=8, num_workers=1 if rank == 0 else 0)
        _, _, loader = learner.prepare(model, optimizer, loader)
        used = 0
        for _ in range(2):
            for x, y in loader:
                if float(x[0, 0]) < 0:
                    continue
                with learner.minibatch():
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]  # torch has no types
                    optimizer.step()
                used += 1
        learner.finish()
        return used

    return family(rank, ranks, store, body, **run)


def serve_late_step(rank: int, ranks: int, store: str, *, inside: bool, **run: Any) -> Any:
    """The last learner waits between backward and step until the others are far ahead: what it has is too late."""

    def body(learner: ServedLearner) -> Any:
        model = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _, _, loader = learner.prepare(model, optimizer, [torch.full((4, FEATURES), float(n)) for n in range(8)])
        seen: list[float] = []
        cancelled = 0
        computes = Path(f"{store}-computes")  # that one does, so that it is not cancelled before

        def late() -> None:
            end = time.monotonic() + 5.0
            if rank == ranks - 2:
                computes.touch()
            while not computes.exists() and time.monotonic() < end:
                time.sleep(0.001)
            while rank == ranks - 2 and not is_cancelled(learner) and time.monotonic() < end and not seen:
                time.sleep(0.001)

        for x in loader:
            if inside:
                with learner.minibatch() as minibatch:
                    optimizer.zero_grad()
                    model(x).square().mean().backward()
                    late()
                    optimizer.step()
                cancelled += minibatch.cancelled
            else:
                optimizer.zero_grad()
                model(x).square().mean().backward()
                late()
                optimizer.step()
            if not learner._last_cancelled:
                seen.append(float(x[0, 0]))
        counted = int(model[1].num_batches_tracked)  # type: ignore[arg-type]  # a tensor
        learner.finish()
        return {"seen": seen, "cancelled": cancelled, "counted": counted}

    return family(rank, ranks, store, body, **run)


def serve_touched(rank: int, ranks: int, store: str, **run: Any) -> Any:
    """Gradients changed behind torch's back; then a step after the end."""

    def body(learner: ServedLearner) -> Any:
        model = nn.Linear(1000, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        learner.prepare(model, optimizer)
        x = torch.full((1, 1000), 0.1)
        x[0, 7] = 100.0
        with learner.minibatch():
            model(x).sum().backward()
            assert model.weight.grad is not None
            model.weight.grad.data.clamp_(-1.0, 1.0)
            optimizer.step()
        moved = model.weight[0, 7].item()
        learner.finish()
        learner.finish()
        try:
            optimizer.step()
        except OffbeatError as error:
            return {"moved": moved, "after": str(error)}
        return None

    return family(rank, ranks, store, body, **run)


def serve_free_hammer(rank: int, ranks: int, store: str, *, minibatches: int, **run: Any) -> Any:
    """Downpour, with weights that are alike in every version: what a minibatch begins on is one version of a shard."""

    def body(learner: ServedLearner) -> Any:
        model = nn.Linear(50_000, 4, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        learner.prepare(model, optimizer)
        torn = 0
        for _ in range(minibatches):
            with learner.minibatch():
                low, high = model.weight.min().item(), model.weight.max().item()
                torn += low != high
                model.weight.grad = torch.ones_like(model.weight)
                optimizer.step()
        learner.finish()
        return {"torn": torn, "last": model.weight[0, 0].item()}

    return family(rank, ranks, store, body, **run)
