"""What learners of a real run do in tests. The last rank is the supervisor; the others are learners, forked like it.

Each program is `name(rank, ranks, store, ...)`, run by the nursery on every rank; the supervisor's rank gives back the
summary of the run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from offbeat.server.learner.connection import RunOverError
from offbeat.server.learner.gradient_hooks import Hooks
from offbeat.server.learner.served_learner import ServedLearner
from offbeat.server.run_setting import RunSetting
from offbeat.server.supervisor import ServerPlan, Supervisor
from offbeat.server.wire import EnterPause

SAMPLES, FEATURES, CLASSES = 96, 12, 3
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.05),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
}


def data() -> TensorDataset:
    chance = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, FEATURES, generator=chance)
    return TensorDataset(x, (x @ torch.randn(FEATURES, CLASSES, generator=chance)).argmax(1))


ROWS, WIDTH, ACTIVE = 3000, 8, 4


def bags() -> TensorDataset:
    """Bags of features, of which most are in no other."""
    chance = torch.Generator().manual_seed(8)
    x = torch.randint(ROWS, (SAMPLES, ACTIVE), generator=chance)
    x[:, 0] %= CLASSES  # which are in many
    return TensorDataset(x, x[:, 0])


def bag_model_of(seed: int = 0, *, sparse: bool = True) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.EmbeddingBag(ROWS, WIDTH, sparse=sparse), nn.Linear(WIDTH, CLASSES))


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """With two groups: biases learn at half the rate."""
    optimizer = OPTIMIZERS[name](
        [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() == 1]},
        ]
    )
    optimizer.param_groups[1]["lr"] /= 2
    return optimizer


def loss_of(model: nn.Module, indices: Any) -> torch.Tensor:
    x, y = data().tensors
    return nn.functional.cross_entropy(model(x[indices]), y[indices])


def weights_of(model: nn.Module) -> list[float]:
    flat: list[float] = torch.cat([p.detach().double().flatten() for p in model.parameters()]).tolist()
    return flat


class NowhereSink:
    """Takes gradients and does nothing with them."""

    def fill(self, index: int, gradient: torch.Tensor) -> None:
        pass

    def is_unchanged(self, index: int, gradient: torch.Tensor) -> bool:
        return True

    def is_cancelled(self) -> bool:
        return False


def warm_up() -> None:
    """Whatever torch loads when it is first used, before anything is forked: it takes seconds."""
    torch.set_num_threads(1)
    model = model_of()
    optimizer = optimizer_of("adam", model)
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=4)
    Hooks(model, list(model.parameters()), NowhereSink(), keeps_buffers=True)
    for parameter in model.parameters():  # by hand: where there is a GPU, backward starts threads
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


# --- the family ----------------------------------------------------------------------------------------------------


def family(
    rank: int,
    ranks: int,
    store: str,
    body: Callable[[ServedLearner], Any],
    *,
    line: str,
    servers: int = 1,
    log: str | None = None,
    again: bool = True,
    start_by_s: float | None = None,
    slow: tuple[str, ...] = (),
    within_s: float = 25,
    **pauses: Any,
) -> Any:
    """One learner of a run, or, for the last rank, its supervisor."""
    learners = ranks - 1
    address = Path(f"{store}.address")
    if rank == learners:
        setting = RunSetting(line=line, learners=learners, shards=servers, again=again, start_by_s=start_by_s, **pauses)
        return _supervise(store, setting, log, within_s)
    end = time.monotonic() + within_s
    while not address.exists() and time.monotonic() < end:
        time.sleep(0.005)
    listener, token = json.loads(address.read_text())
    torch.set_num_threads(1)
    learner = ServedLearner(line=line, number=rank, learners=learners, listener=listener, token=token, slow=slow)
    try:
        return body(learner)
    finally:
        learner.close()
        Path(f"{store}.done.{rank}").touch()


def _supervise(store: str, setting: RunSetting, log: str | None, within_s: float) -> dict[str, Any]:
    supervisor = Supervisor(ServerPlan(setting=setting, log=Path(log) if log else None), lambda name, line: None)
    try:
        supervisor.start()
        unfinished = Path(f"{store}.unfinished")
        unfinished.write_text(json.dumps([supervisor.address, supervisor.token]))
        unfinished.rename(f"{store}.address")
        end = time.monotonic() + within_s
        waited = [Path(f"{store}.done.{rank}") for rank in range(setting.learners)]
        while not all(path.exists() for path in waited) and time.monotonic() < end:
            supervisor.poll()
        summary: dict[str, Any] = json.loads(supervisor.finish() or "{}")
        return summary
    finally:
        supervisor.close()


# --- programs ------------------------------------------------------------------------------------------------------


def serve_training(
    rank: int,
    ranks: int,
    store: str,
    *,
    optimizer: str = "sgd",
    epochs: int = 2,
    batch: int = 8,
    shuffle: bool = False,
    clip_norm: float | None = None,
    gradients: str | None = None,
    halved: bool = False,
    in_place: bool = False,
    sparse: bool | None = None,
    **run: Any,
) -> Any:
    """Train the small model; each learner gives back the last weights and what it has seen.

    With `sparse` it is the model of bags of features, whose embedding has sparse gradients or not.
    """

    def body(learner: ServedLearner) -> Any:
        seed = learner.number  # those of the first learner count
        model = model_of(seed) if sparse is None else bag_model_of(seed, sparse=sparse)
        inner = optimizer_of(optimizer, model)
        scheduler = torch.optim.lr_scheduler.StepLR(inner, step_size=4, gamma=0.5) if halved else None
        loader: Any = DataLoader(data() if sparse is None else bags(), batch_size=batch, shuffle=shuffle)
        options: Any = {"clip_norm": clip_norm, "gradients": gradients, "in_place": in_place}
        given = learner.prepare(model, inner, loader, **options)
        model, inner, loader = given
        seen = cancelled = 0
        for _ in range(epochs):
            for x, y in loader:
                with learner.minibatch() as minibatch:
                    inner.zero_grad()
                    loss = nn.functional.cross_entropy(model(x), y)
                    minibatch.loss = loss.detach()
                    loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
                    inner.step()
                    if scheduler is not None:
                        scheduler.step()
                seen += 1
                cancelled += minibatch.cancelled
        learner.finish()
        told = {"seen": seen, "cancelled": cancelled, "version": learner.version, "notes": learner.notes}
        return {**told, "weights": weights_of(model), "sent_bytes": learner.sent_bytes}

    return family(rank, ranks, store, body, **run)


def serve_local_steps(rank: int, ranks: int, store: str, *, minibatches: int, at_once: bool, **run: Any) -> Any:
    """Own data, so that the result does not depend on who is faster. `at_once`: no minibatch begins before its learner
    has been answered. Each learner gives back the last weights and when its delays were."""

    def body(learner: ServedLearner) -> Any:
        model = model_of()
        inner = optimizer_of("momentum", model)
        learner.prepare(model, inner)
        assert learner._connection is not None
        for number in range(minibatches):
            while at_once and not learner._connection.state.working and learner._connection.read_pending().go is None:
                time.sleep(0.0005)
            with learner.minibatch():
                inner.zero_grad()
                loss_of(model, local_batch(learner.number, number)).backward()  # type: ignore[no-untyped-call]  # torch has no types for it
                inner.step()
        learner.finish()
        return weights_of(model)

    return family(rank, ranks, store, body, **run)


def local_batch(learner: int, number: int) -> slice:
    start = (learner * 40 + number * 4) % SAMPLES
    return slice(start, start + 4)


def serve_hammer(rank: int, ranks: int, store: str, *, items: int, pushes: int, **run: Any) -> Any:
    """All weights are alike in every version: a fetch that mixes two versions is seen at once."""

    def body(learner: ServedLearner) -> Any:
        model = nn.Linear(items, 4, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        learner.prepare(model, optimizer)
        ones = torch.ones_like(model.weight)
        torn = 0
        for _ in range(pushes):
            with learner.minibatch():
                model.weight.grad = ones
                optimizer.step()
            low, high = model.weight.min().item(), model.weight.max().item()
            torn += low != high
        learner.finish()
        return {"torn": torn, "last": model.weight[0, 0].item()}

    return family(rank, ranks, store, body, **run)


def serve_in_place(rank: int, ranks: int, store: str, *, items: int, pushes: int, **run: Any) -> Any:
    """As `serve_hammer`, on the servers' own memory: what a minibatch computes on must not change under it."""

    def body(learner: ServedLearner) -> Any:
        model = nn.Linear(items, 4, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        learner.prepare(model, optimizer, in_place=True)
        ones = torch.ones_like(model.weight)
        changed = 0
        for _ in range(pushes):
            with learner.minibatch():
                before = model.weight[0, 0].item()
                time.sleep(0.0005 * (1 + rank))
                changed += model.weight.min().item() != before or model.weight.max().item() != before
                model.weight.grad = ones
                optimizer.step()
        learner.finish()
        with torch.no_grad():
            model.weight.add_(0.0)  # its own again
        return {"changed": changed, "last": model.weight[0, 0].item()}

    return family(rank, ranks, store, body, **run)


def serve_pausing(
    rank: int,
    ranks: int,
    store: str,
    *,
    optimizer: str = "sgd",
    in_place: bool = False,
    stop_at: int | None = None,
    halt_after: int | None = None,
    kept: dict[str, list[float]] | None = None,
    **run: Any,
) -> Any:
    """Train the small model for two epochs, with pauses: who leads looks at the weights twice, and saves them.

    The run is ended by who leads at version `stop_at`, or by the last learner after so many minibatches.
    """

    def body(learner: ServedLearner) -> Any:
        model = model_of(seed=learner.number)
        inner = optimizer_of(optimizer, model)
        led: list[dict[str, Any]] = []
        saved: dict[str, Any] = {}
        pauses = seen = 0

        def on_pause(pause: EnterPause) -> bool:
            nonlocal pauses
            if not pause.lead:
                pauses += 1
                return False
            facts, first = json.loads(pause.facts), learner.snapshot()
            time.sleep(0.02)
            second, other = learner.snapshot(), model_of(seed=99)
            learner.load_current(other, optimizer_of(optimizer, other))
            same = all(torch.equal(first[name], second[name]) for name in first)
            found = sorted(weights_of(other)) == sorted(first["weights"].double().tolist())
            led.append({"version": facts["version"], "epoch_end": facts["epoch_end"], "still": same and found})
            saved.update(facts, kept={name: vector.tolist() for name, vector in first.items()})
            return bool(facts["version"] == stop_at)

        learner.on_pause = on_pause
        vectors = {
            name: torch.tensor(values, dtype=torch.int64 if name == "steps" else torch.float32)
            for name, values in (kept or {}).items()
        }
        learner.server_state = vectors or None
        loader: Any = DataLoader(data(), batch_size=8, shuffle=True)
        model, inner, loader = learner.prepare(model, inner, loader, in_place=in_place)
        over = False
        try:
            for _ in range(2):
                for x, y in loader:
                    with learner.minibatch():
                        inner.zero_grad()
                        nn.functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]  # as above
                        inner.step()
                    seen += 1
                    if halt_after == seen and rank == ranks - 2:
                        learner.request_end()
            learner.finish()
        except RunOverError:
            over = True
        return {"weights": weights_of(model), "led": led, "pauses": pauses, "saved": saved, "over": over, "seen": seen}

    return family(rank, ranks, store, body, **run)
