"""Steps on a device, tried and proved: here on the CPU, eagerly and compiled, and with planted faults."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.nn import functional

from offbeat.train import compute_ladder
from offbeat.train.compute_ladder import (
    EAGER,
    LADDER,
    Finding,
    Rung,
    Trial,
    choose,
    price_of,
    prove,
    rungs_of,
    told,
    try_rung,
    worth_compiling,
)
from offbeat.train.device_step import DeviceStep, compiled_loss, settled
from offbeat.train.precision import Precision

CPU = torch.device("cpu")


def small(dropout: float = 0.5) -> nn.Module:
    torch.manual_seed(0)
    first = [nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*first, nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def batches(many: int = 16) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(many, 8), torch.randint(4, (many,))) for _ in range(3)]


def step_of(model: nn.Module, *, optimizer: str = "sgd", **named: Any) -> DeviceStep:
    precision = Precision(named.pop("precision", "fp32"), CPU)
    return DeviceStep(model, optimizer_of(model, optimizer), functional.cross_entropy, precision, **named)


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.01)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, *, clip: float, steps: int) -> Tensor:
    for number, (inputs, targets) in enumerate(batches()[:steps]):
        torch.manual_seed(number)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call] # torch's own
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (number + 1)
        optimizer.step()
    return weights(model)


@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_step_is_what_a_loop_of_ones_own_does(optimizer: str, clip: float) -> None:
    model = small()
    right = plain(model, optimizer_of(model, optimizer), clip=clip, steps=3)
    step = step_of(small(), optimizer=optimizer, clip_norm=clip)
    for number, batch in enumerate(batches()):
        torch.manual_seed(number)
        step.add(*batch)
        step.update(0.1 / (number + 1))
    torch.testing.assert_close(weights(step.model), right, rtol=1e-5, atol=1e-6)


def test_passes_of_any_size_add_up_to_the_gradient_of_all_their_samples() -> None:
    step = step_of(nn.Linear(8, 4))
    inputs, targets = batches()[0]
    step.add(inputs, targets)
    whole = step.gradient.clone()
    step.add(inputs[:10], targets[:10], weight=10 / 16)
    step.add(inputs[10:], targets[10:], weight=6 / 16, first=False)
    torch.testing.assert_close(step.gradient, whole)


def test_parameters_without_a_gradient_have_zeros_in_it() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            out: Tensor = self.used(inputs)
            return out

    step = step_of(Half())
    step.gradient.fill_(7.0)
    step.add(*batches()[0])
    assert step.gradient[:36].abs().sum() > 0
    assert step.gradient[36:].abs().sum() == 0


def test_a_gradient_stays_where_it_was_computed_unless_something_else_lies_there() -> None:
    parameters = [torch.zeros(4, 3) for _ in range(6)]
    own, twice, batch = torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 3)
    other_layout = torch.randn(3, 4).t()
    gradients = [own, twice, twice, batch, other_layout, None]
    places = settled(gradients, parameters, [*parameters, batch])
    for place, gradient in zip(places, gradients, strict=True):
        assert torch.equal(place, torch.zeros(4, 3) if gradient is None else gradient)
    assert places[0] is own
    assert len({one.untyped_storage().data_ptr() for one in [*places, twice, batch, other_layout]}) == 9
    assert all(place.stride() == (3, 1) for place in places)


def test_a_gradient_that_is_read_and_written_is_the_same() -> None:
    step = step_of(small())
    step.add(*batches()[0])
    flat = step.read_gradient()
    assert torch.equal(flat, step.gradient)
    step.write_gradient(2 * flat)
    assert torch.equal(step.gradient, 2 * flat)


def test_an_update_that_is_not_finite_is_left_out_and_halves_the_loss_scale() -> None:
    step = step_of(small(), precision="fp16")
    before, scale = weights(step.model), float(step.scale)
    step.add(*batches()[0])
    step.gradient[3] = math.inf
    step.update(0.1, samples=5)
    assert step.lost == 5
    assert torch.equal(weights(step.model), before)
    assert step.scale_state() == {"scale": scale / 2, "good": 0}
    step.gradient.zero_()
    step.update(0.1)
    assert step.scale_state() == {"scale": scale / 2, "good": 1}
    assert not torch.equal(weights(step.model), before)  # decay


def test_what_is_tried_leaves_no_trace() -> None:
    model = small()
    step = step_of(model)
    step.add(*batches()[0])
    step.update(0.1)
    before = [one.detach().clone() for one in step.tensors()]
    drawn = torch.get_rng_state()
    with step.kept():
        for batch in batches():
            step.add(*batch)
            step.update(0.3)
    assert all(torch.equal(one, was) for one, was in zip(step.tensors(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), drawn)


# --- the proof ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_an_eager_step_is_proved_right(optimizer: str, precision: str) -> None:
    model = small()
    made = step_of(model, optimizer=optimizer, precision=precision)
    other = DeviceStep(model, made.optimizer, made.loss, made.precision)
    found = prove(other, made, batches())
    assert len(found) == 9
    assert [str(one) for one in found if not one.holds] == []


@pytest.fixture
def own_cache_key() -> Iterator[None]:
    with torch.compiler.config.patch(cache_key_tag=""):  # type: ignore[attr-defined] # torch's stubs lack it
        yield


@pytest.fixture
def quickly_compiled() -> Iterator[None]:
    """By this process, and without vector instructions, for each kind of which torch first compiles a program to see
    whether they work here; `make test-matrix` has them."""
    quick: dict[str, Any] = {} if os.environ.get("OFFBEAT_MATRIX") else {"compile_threads": 1, "cpp.vec_isa_ok": False}
    with torch._inductor.config.patch(quick):
        yield


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules
def test_torchs_cache_of_compiled_code_is_another_for_each_precision(own_cache_key: None) -> None:
    """torch 2.11 gave code that was compiled for bf16 to fp16."""
    keys = set()
    for name in ("fp32", "bf16", "fp16"):
        compiled_loss(small(), nn.functional.cross_entropy, Precision(name, torch.device("cpu")))
        keys.add(torch.compiler.config.cache_key_tag)
    assert len(keys) == 3


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("c++") is None, reason="there is no compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own modules
def test_compiled_code_is_proved_right_dropout_and_norm_included(own_cache_key: None, quickly_compiled: None) -> None:
    model = small()
    eager = step_of(model)
    forward = compiled_loss(model, eager.loss, eager.precision)
    compiled = DeviceStep(model, eager.optimizer, eager.loss, eager.precision, forward=forward)
    assert [str(one) for one in prove(compiled, eager, batches()) if not one.holds] == []


class OtherRounding(DeviceStep):
    """Its inputs are off by one rounding of float32."""

    def add(self, inputs: Any, targets: Any, *, weight: float = 1.0, first: bool = True) -> Tensor:
        return super().add(inputs * (1 + self.off), targets, weight=weight, first=first)

    off = 2.0**-23


class WrongInputs(OtherRounding):
    off = 1e-2


@pytest.mark.parametrize("kind", [OtherRounding, WrongInputs])
def test_a_unit_at_the_edge_of_its_relu_may_be_on_either_side(kind: type[DeviceStep]) -> None:
    torch.manual_seed(0)
    first = nn.Linear(8, 16, bias=False)
    model, given = nn.Sequential(first, nn.ReLU(), nn.Linear(16, 4)), batches()
    with torch.no_grad():
        found = first(given[1][0][:1])  # the sample whose outputs are then just below and above nothing
        first.weight.sub_(found.T @ given[1][0][:1] / given[1][0][0].square().sum())
    eager = step_of(model)
    other = kind(model, eager.optimizer, eager.loss, eager.precision)
    wrong = [one.what for one in prove(other, eager, given) if not one.holds]
    assert bool(wrong) == (kind is WrongInputs), wrong


class FrozenRate(DeviceStep):
    def update(self, lr: float, *, samples: int = 1) -> None:
        self.first_lr = getattr(self, "first_lr", lr)
        super().update(self.first_lr, samples=samples)


class FrozenDecay(DeviceStep):
    def update(self, lr: float, *, samples: int = 1) -> None:
        for group in self.optimizer.param_groups:
            group["weight_decay"] = 0.01
        super().update(lr, samples=samples)


class FrozenDropout(DeviceStep):
    def add(self, inputs: Any, targets: Any, *, weight: float = 1.0, first: bool = True) -> Tensor:
        torch.manual_seed(1)
        return super().add(inputs, targets, weight=weight, first=first)


class StaleInput(DeviceStep):
    def add(self, inputs: Any, targets: Any, *, weight: float = 1.0, first: bool = True) -> Tensor:
        self.kept_batch = getattr(self, "kept_batch", (inputs, targets))
        return super().add(*self.kept_batch, weight=weight, first=first)


class FrozenScale(DeviceStep):
    def add(self, inputs: Any, targets: Any, *, weight: float = 1.0, first: bool = True) -> Tensor:
        self.scale.fill_(1.0)
        return super().add(inputs, targets, weight=weight, first=first)


class AppliesInfinities(DeviceStep):
    def _update(self) -> None:
        self.gradient.clamp_(-1, 1)
        super()._update()


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (FrozenRate, "learning rate"),
        (FrozenDecay, "weight decay"),
        (FrozenDropout, "gradient with other random numbers"),
        (StaleInput, "gradient of another minibatch"),
        (FrozenScale, "gradient with another loss scale"),
        (AppliesInfinities, "update that is not finite"),
    ],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_planted_fault_is_found(kind: type[DeviceStep], what: str, precision: str) -> None:
    model = small()
    eager = step_of(model, precision=precision)
    wrong = kind(model, eager.optimizer, eager.loss, eager.precision)
    assert what in [one.what for one in prove(wrong, eager, batches()) if not one.holds]


class OwnDropout(nn.Module):
    """Draws in the precision of what it is given: a wider one draws other numbers, as a GPU does."""

    def forward(self, values: Tensor) -> Tensor:
        return values * (torch.rand_like(values) > 0.03) if self.training else values


@pytest.mark.parametrize(
    ("kind", "what"),
    [(FrozenDropout, "gradient with other random numbers"), (StaleInput, "gradient of another minibatch")],
)
def test_a_planted_fault_is_found_where_a_wider_precision_draws_other_numbers(
    kind: type[DeviceStep], what: str
) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), OwnDropout(), nn.Linear(16, 4))
    eager = step_of(model)
    made = {one: one(model, eager.optimizer, eager.loss, eager.precision) for one in (DeviceStep, kind)}
    assert [str(one) for one in prove(made[DeviceStep], eager, batches()) if not one.holds] == []
    assert what in [one.what for one in prove(made[kind], eager, batches()) if not one.holds]
    assert all(one.training for one in model.modules())


# --- the choice -----------------------------------------------------------------------------------------------------


def test_the_fastest_rung_is_taken_or_the_first_of_those_nearly_as_fast() -> None:
    assert choose({"graph+compile": 1.02, "graph": 1.5, "compile": 1.0, "eager": 2.0}) == "graph+compile"
    assert choose({"graph+compile": 1.04, "graph": 1.5, "compile": 1.0, "eager": 2.0}) == "compile"
    assert choose({"graph+compile": math.inf, "graph": math.inf, "eager": 2.0}) == "eager"


def test_which_rungs_are_tried() -> None:
    assert rungs_of("auto", device="cpu") == (EAGER,)
    assert [one.name for one in rungs_of("auto", device="cuda")] == ["graph", "eager", "graph+compile", "compile"]
    assert [one.name for one in rungs_of("compile", device="cpu")] == ["compile", "eager"]
    assert rungs_of("eager", device="cuda") == (EAGER,)


def test_compiling_is_for_runs_that_are_long_without_it() -> None:
    assert worth_compiling(275, {"graph": 0.17, "eager": 0.2})  # 47 s
    assert not worth_compiling(1440, {"graph": 0.001, "eager": 0.002})  # 1.4 s, however many updates
    assert worth_compiling(10, {"graph": math.inf, "eager": math.inf})  # it may need less memory


def test_the_choice_is_told_with_its_reason() -> None:
    text = told("graph", {"graph": 0.0071, "eager": 0.0213, "compile": math.inf}, {"compile": "no compiler"})
    assert text == "compute mode graph: 7.1 ms per step (eager 21.3); compile was skipped: no compiler"


def test_a_rung_that_fails_is_a_reason_and_no_error() -> None:
    def broken(rung: Rung) -> DeviceStep:
        raise RuntimeError("capture is not possible\nand more")

    assert try_rung(broken, LADDER[1], batches(), proved=True) == Trial(
        math.inf, "RuntimeError: capture is not possible"
    )


def test_a_rung_that_is_wrong_is_left_out_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small()
    eager = step_of(model)

    def made(kind: type[DeviceStep]) -> Callable[[Rung], DeviceStep]:
        return lambda rung: (DeviceStep if rung is EAGER else kind)(model, eager.optimizer, eager.loss, eager.precision)

    before = weights(model)
    monkeypatch.setattr(compute_ladder, "MEASURED", 1)
    assert "minibatch" in try_rung(made(StaleInput), LADDER[2], batches(), proved=True).why
    assert try_rung(made(DeviceStep), LADDER[2], batches(), proved=True).seconds < math.inf
    assert torch.equal(weights(model), before)


def test_a_proof_for_which_there_is_too_little_memory_is_of_fewer_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_ladder, "MEASURED", 1)
    is_proving = False
    sizes: list[tuple[bool, int]] = []

    class Narrow(DeviceStep):
        """Memory suffices for one step, and not for the several that a proof holds."""

        def add(self, inputs: Any, targets: Any, *, weight: float = 1.0, first: bool = True) -> Tensor:
            if is_proving and len(targets) > 4:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            sizes.append((is_proving, len(targets)))
            return super().add(inputs, targets, weight=weight, first=first)

    def prove_in_it(*given: Any) -> list[Finding]:
        nonlocal is_proving
        is_proving = True
        try:
            return prove(*given)
        finally:
            is_proving = False

    monkeypatch.setattr(compute_ladder, "prove", prove_in_it)
    model = small()
    optimizer = optimizer_of(model, "sgd")

    def make(rung: Rung) -> DeviceStep:
        return Narrow(model, optimizer, functional.cross_entropy, Precision("fp32", CPU))

    trial = try_rung(make, LADDER[1], batches(), proved=True)
    assert trial.why == ""
    assert set(sizes) == {(True, 4), (False, 16)}


def test_the_price_of_the_same_bits_is_told() -> None:
    assert price_of(0.0126, 0.01) == "--deterministic: 12.6 ms per step, 10 without it: 26 % slower"
    assert price_of(0.01, 0.01).endswith("not slower")
