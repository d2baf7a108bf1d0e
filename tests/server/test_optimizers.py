"""A shard's update against torch.optim itself, stepping whole parameters in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offbeat.errors import RequestError
from offbeat.server.shard import optimizers
from offbeat.server.shard.optimizers import RULES, describe, notes_of, state_names, update
from offbeat.server.wire import Hyper

Options = dict[str, Any]
Case = tuple[str, Options]
Cut = Callable[[int], list[tuple[int, int]]]  # a length -> its pieces, in the order they are updated

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {name: rule.optimizer for name, rule in RULES.items()}
DTYPES = [torch.float32, torch.float64]
NAN = float("nan")


def cases() -> Iterator[Case]:
    how: Options
    for maximize, weight_decay in product((False, True), (0, 0.03)):
        common = {"maximize": maximize, "weight_decay": weight_decay}
        for momentum, dampening, nesterov in ((0, 0, False), (0.9, 0, False), (0.8, 0.3, False), (0.9, 0, True)):
            how = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
            yield "sgd", {"lr": 0.07, **how, **common}
        for lr_decay, start, eps in product((0, 0.1), (0, 0.3), (1e-10, 1e-3)):
            how = {"lr_decay": lr_decay, "initial_accumulator_value": start, "eps": eps}
            yield "adagrad", {"lr": 0.07, **how, **common}
        for betas, amsgrad, eps in product(((0.9, 0.999), (0.3, 0.6)), (False, True), (1e-8, 1e-2)):
            how = {"betas": betas, "amsgrad": amsgrad, "eps": eps}
            yield "adam", {"lr": 0.01, **how, **common}
            yield "adam", {"lr": 0.01, "decoupled_weight_decay": True, **how, **common}
            yield "adamw", {"lr": 0.01, **how, **common}


CASES = list(cases())


def spell(case: Any) -> str:
    rule, options = case
    return f"{rule}-" + ",".join(f"{name}={value}" for name, value in options.items() if value)


def values(count: int, dtype: torch.dtype, random: torch.Generator) -> Tensor:
    """Numbers of many sizes and both signs, with some of either zero."""
    sizes = 10.0 ** torch.randint(-6, 3, (count,), generator=random).to(dtype)
    zeros = torch.rand(count, generator=random) < 0.1
    return torch.randn(count, dtype=dtype, generator=random) * sizes * ~zeros


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal, and of one sign where both are zero; a NaN equals itself."""
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


class Shards:
    """The optimizer's parameters as a server has them: flat, double-buffered, and updated in pieces."""

    def __init__(self, optimizer: torch.optim.Optimizer, cut: Cut) -> None:
        self.cut = cut
        self.parameters = [(n, p) for n, group in enumerate(optimizer.param_groups) for p in group["params"]]
        self.weights = [p.detach().flatten().clone() for _, p in self.parameters]
        names = state_names(*describe(optimizer))
        # Nothing was ever kept: what lies in the memory of the state must not matter.
        self.state = [{name: torch.full_like(w, NAN) for name in names} for w in self.weights]
        self.steps = 0

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps += 1
        rule, hypers = describe(optimizer)
        for i, (group, parameter) in enumerate(self.parameters):
            assert parameter.grad is not None
            new = self._updated(rule, hypers[group], self.weights[i], parameter.grad.flatten(), self.state[i])
            self.weights[i], self.state[i] = new

    def _updated(
        self, rule: str, hyper: Hyper, weights: Tensor, gradient: Tensor, state: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        out = torch.full_like(weights, NAN)
        new_state = {name: torch.full_like(vector, NAN) for name, vector in state.items()}
        scratch = torch.full((weights.numel() + 3,), NAN, dtype=weights.dtype)
        read_only = [weights, gradient, *state.values()]
        before = [vector.clone() for vector in read_only]
        for start, end in self.cut(weights.numel()):
            update(
                rule,
                hyper,
                self.steps,
                weights[start:end],
                gradient[start:end],
                out[start:end],
                {name: vector[start:end] for name, vector in state.items()},
                {name: vector[start:end] for name, vector in new_state.items()},
                scratch,
            )
        assert all(map(same_bits, read_only, before))
        return out, new_state


def check_bits(
    optimizer: torch.optim.Optimizer, shards: Shards, same: Callable[[Tensor, Tensor], bool] = same_bits
) -> None:
    for (_, parameter), weights, state in zip(shards.parameters, shards.weights, shards.state, strict=True):
        assert same(parameter.detach().flatten(), weights)
        theirs = optimizer.state[parameter]
        kept = {name for name, vector in theirs.items() if name != "step" and vector is not None}
        assert kept <= state.keys()
        for name in kept:
            assert same(theirs[name].flatten(), state[name]), name
        for name in state.keys() - kept:
            assert not state[name].any(), f"{name} is not used in this group, and not zeros"


def run_both(
    rule: str,
    groups: Sequence[Options],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    cut: Cut,
    *,
    steps: int = 4,
    seed: int = 0,
    rate: float = 0.7,
    same: Callable[[Tensor, Tensor], bool] = same_bits,
    **defaults: Any,
) -> None:
    """Steps torch's optimizer and shards side by side, under a changing lr, and compares all bits after each step."""
    random = torch.Generator().manual_seed(seed)

    def parameter(shape: tuple[int, ...]) -> torch.nn.Parameter:
        return torch.nn.Parameter(values(torch.Size(shape).numel(), dtype, random).reshape(shape))

    optimizer = OPTIMIZERS[rule](
        [{"params": [parameter(shape) for shape in shapes], **options} for options in groups],
        **{"foreach": False, "fused": False, **defaults},
    )
    shards = Shards(optimizer, cut)
    for _ in range(steps):
        for _, p in shards.parameters:
            p.grad = values(p.numel(), dtype, random).reshape(p.shape)
        shards.step(optimizer)
        optimizer.step()
        check_bits(optimizer, shards, same)
        for group in optimizer.param_groups:
            group["lr"] *= rate


def every(size: int) -> Cut:
    """Pieces of one size, the last first."""
    return lambda count: [(start, min(start + size, count)) for start in range(0, count, size)][::-1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=spell)
def test_pieces_have_the_bits_of_torchs_whole_parameter(case: Case, dtype: torch.dtype) -> None:
    rule, options = case
    run_both(rule, [options], [(1037,)], dtype, every(113))


@given(data=st.data())
def test_pieces_may_be_cut_anywhere_and_updated_in_any_order(data: st.DataObject) -> None:
    rule = data.draw(st.sampled_from(list(RULES)))
    of_rule = [options for name, options in CASES if name == rule]
    defaults: Options = {}
    if rule == "adagrad":
        defaults["initial_accumulator_value"] = data.draw(st.sampled_from([0.0, 0.3]))

    def cut(count: int) -> list[tuple[int, int]]:
        inner = data.draw(st.sets(st.integers(1, count - 1), max_size=6)) if count > 1 else set()
        ends = [0, *sorted(inner), count]
        return data.draw(st.permutations(list(pairwise(ends))))

    run_both(
        rule,
        data.draw(st.lists(st.sampled_from(of_rule), min_size=1, max_size=3)),
        data.draw(st.lists(st.sampled_from([(1,), (5,), (300,), (17, 9), (2, 3, 41)]), min_size=1, max_size=2)),
        data.draw(st.sampled_from(DTYPES)),
        cut,
        steps=data.draw(st.integers(1, 5)),
        seed=data.draw(st.integers(0, 1000)),
        rate=data.draw(st.sampled_from([1.0, 0.7])),
        **defaults,
    )


@pytest.mark.parametrize("rule", ["adam", "adamw"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adam_without_a_mean_differs_in_the_sign_of_zeros_at_most(rule: str, dtype: torch.dtype) -> None:
    # lerp_ of weight 1 gives -0.0 another sign in the last elements of a tensor than before them.
    for amsgrad in (False, True):
        run_both(rule, [{"betas": (0.0, 0.9), "amsgrad": amsgrad}], [(1037,)], dtype, every(113), same=torch.equal)


@pytest.mark.parametrize("rule", RULES)
def test_a_large_parameter_has_the_same_bits_on_several_threads(rule: str) -> None:
    options = next(options for name, options in CASES if name == rule and options["weight_decay"])
    run_both(rule, [options], [(300, 701)], torch.float32, every(1 << 16), steps=2)


@pytest.mark.parametrize("rule", RULES)
def test_foreach_is_accepted_since_it_gives_the_same_bits(rule: str) -> None:
    for name, options in CASES:
        if name == rule:
            run_both(rule, [options], [(33, 7), (50,)], torch.float32, every(64), steps=3, foreach=True)


@pytest.mark.parametrize("rule", RULES)
def test_many_steps_keep_the_bits(rule: str) -> None:
    options = next(options for name, options in CASES if name == rule and options["weight_decay"])
    run_both(rule, [options], [(70,)], torch.float32, every(33), steps=300, rate=0.99)


@pytest.mark.parametrize("case", CASES, ids=spell)
def test_an_update_that_was_killed_in_the_middle_is_done_again(case: Case) -> None:
    rule, options = case
    optimizer = OPTIMIZERS[rule]([torch.nn.Parameter(torch.zeros(9))], **options)
    name, (hyper,) = describe(optimizer)
    names = state_names(name, [hyper])
    random = torch.Generator().manual_seed(3)
    weights, gradient = torch.randn(9, generator=random), torch.randn(9, generator=random)
    state = {vector: torch.rand(9, generator=random) for vector in names}

    def results(leftover: float) -> list[Tensor]:
        out, scratch = torch.full((9,), leftover), torch.full((9,), leftover)
        new_state = {vector: torch.full((9,), leftover) for vector in names}
        update(name, hyper, 7, weights, gradient, out, state, new_state, scratch)
        return [out, *new_state.values()]

    assert all(map(same_bits, results(NAN), results(5.0)))


def test_momentum_in_one_group_only_keeps_zeros_in_the_other() -> None:
    groups = [{"momentum": 0.9}, {"momentum": 0.0}]
    run_both("sgd", [{"lr": 0.1, **group} for group in groups], [(40,)], torch.float64, every(7))


def test_amsgrad_in_one_group_only_keeps_zeros_in_the_other() -> None:
    groups = [{"amsgrad": True}, {"amsgrad": False}]
    run_both("adam", [{"lr": 0.1, **group} for group in groups], [(40,)], torch.float64, every(7))


@pytest.mark.parametrize("schedule", [(0.0, 0.9, 0.8), (0.9, 0.0, 0.9), (0.0, 0.0, 0.5, 0.0, 0.9)], ids=str)
def test_momentum_that_is_switched_off_and_on_goes_on_as_torchs(schedule: tuple[float, ...]) -> None:
    always, changing = (torch.nn.Parameter(torch.randn(50, dtype=torch.float64)) for _ in range(2))
    groups: list[Options] = [{"params": [always], "momentum": 0.9}, {"params": [changing]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    shards = Shards(optimizer, every(13))
    for momentum in schedule:
        optimizer.param_groups[1]["momentum"] = momentum
        for p in (always, changing):
            p.grad = torch.randn_like(p)
        shards.step(optimizer)
        optimizer.step()
        check_bits(optimizer, shards)


def test_adagrad_starts_each_group_with_the_constructors_value_as_torch_does() -> None:
    groups: list[Options] = [{"initial_accumulator_value": 5.0}, {}]
    run_both("adagrad", groups, [(40,)], torch.float32, every(7), initial_accumulator_value=0.5)


def test_a_description_is_plain_numbers_as_they_are_now() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.AdamW(
        [{"params": [parameters[0]], "lr": 1}, {"params": [parameters[1]], "amsgrad": True}], betas=(0.5, 0.75)
    )
    common = {"beta1": 0.5, "beta2": 0.75, "eps": 1e-8, "weight_decay": 0.01}
    flags = {"maximize": 0.0, "decoupled_weight_decay": 1.0}
    rule, hypers = describe(optimizer)
    assert rule == "adamw"
    assert hypers == [{"lr": 1.0, "amsgrad": 0.0, **common, **flags}, {"lr": 1e-3, "amsgrad": 1.0, **common, **flags}]
    assert all(type(number) is float for hyper in hypers for number in hyper.values())
    optimizer.param_groups[0]["lr"] = 0.25
    assert describe(optimizer)[1][0]["lr"] == 0.25


@pytest.mark.parametrize("rule", RULES)
def test_a_tensor_as_lr_is_read_as_its_number(rule: str) -> None:
    optimizer = OPTIMIZERS[rule]([torch.nn.Parameter(torch.zeros(2))], lr=torch.tensor(0.125))
    name, (hyper,) = describe(optimizer)
    assert (name, hyper["lr"], type(hyper["lr"])) == (rule, 0.125, float)


@pytest.mark.parametrize(
    ("rule", "options", "names"),
    [
        ("sgd", [{}, {}], ()),
        ("sgd", [{}, {"momentum": 0.9}], ("momentum_buffer",)),
        ("adagrad", [{}], ("sum",)),
        ("adam", [{}], ("exp_avg", "exp_avg_sq")),
        ("adamw", [{}], ("exp_avg", "exp_avg_sq")),
        ("adamw", [{"amsgrad": True}, {}], ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
    ],
)
def test_state_is_what_any_group_needs(rule: str, options: list[Options], names: tuple[str, ...]) -> None:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2))], **group} for group in options]
    assert state_names(*describe(OPTIMIZERS[rule](groups))) == names


CAN = "; SGD, Adagrad, Adam and AdamW can"
OTHERS = [
    kind
    for kind in (getattr(torch.optim, name) for name in torch.optim.__all__)
    if isinstance(kind, type) and kind not in (torch.optim.Optimizer, *OPTIMIZERS.values())
]


@pytest.mark.parametrize("kind", OTHERS, ids=lambda kind: kind.__name__)
def test_torchs_other_optimizers_are_refused_by_name(kind: Any) -> None:
    with pytest.raises(RequestError) as refusal:
        describe(kind([torch.nn.Parameter(torch.zeros(2, 2))]))
    assert str(refusal.value).startswith(f"{kind.__name__} cannot run on shards of the parameters, since ")
    assert str(refusal.value).endswith(CAN)


def test_lbfgs_is_told_why() -> None:
    why = "evaluates the loss several times in a step"
    with pytest.raises(RequestError, match=f"^LBFGS cannot run on shards of the parameters, since it {why}"):
        describe(torch.optim.LBFGS([torch.nn.Parameter(torch.zeros(2))]))


def test_a_subclass_is_refused_by_its_name() -> None:
    class Lookahead(torch.optim.AdamW):
        pass

    with pytest.raises(RequestError) as refusal:
        describe(Lookahead([torch.nn.Parameter(torch.zeros(2))]))
    who = "Lookahead, a subclass of AdamW, cannot run on shards of the parameters"
    assert str(refusal.value) == f"{who}, since it may compute something else than its parent class{CAN}"


@pytest.mark.parametrize(
    ("rule", "option"),
    [*product(RULES, ["differentiable"]), *product(["adam", "adamw"], ["capturable"])],
)
def test_an_option_that_shards_cannot_keep_is_refused_by_name(rule: str, option: str) -> None:
    groups: list[Options] = [
        {"params": [torch.nn.Parameter(torch.zeros(2))]},
        {"params": [torch.nn.Parameter(torch.zeros(2))], option: True},
    ]
    optimizer = OPTIMIZERS[rule](groups)
    name = type(optimizer).__name__
    with pytest.raises(RequestError, match=f"^{name} cannot run .* with {option}=True, since .*; leave {option} out$"):
        describe(optimizer)


@pytest.mark.parametrize("rule", RULES)
def test_a_fused_optimizer_runs_by_its_plain_rule_with_a_note(rule: str) -> None:
    plain, fused = (OPTIMIZERS[rule]([{"params": [torch.nn.Parameter(torch.zeros(2))]}]) for _ in range(2))
    fused.param_groups[0]["fused"] = True
    assert describe(fused) == describe(plain)
    assert notes_of(plain) == () and "they run the unfused update" in notes_of(fused)[0]


def test_an_unknown_rule_is_refused_with_the_nearest() -> None:
    with pytest.raises(RequestError, match="unknown update rule 'adamv'; did you mean 'adam"):
        state_names("adamv", [])


def test_a_damped_sgd_lowers_its_momentum_first_and_then_its_rate() -> None:
    hyper = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0}
    assert optimizers.damped("sgd", hyper, 1.0) == hyper
    assert optimizers.damped("sgd", hyper, 0.25) == pytest.approx(hyper | {"momentum": 0.6})
    assert optimizers.damped("sgd", hyper, 0.05) == pytest.approx(hyper | {"lr": 0.05, "momentum": 0.0})
    for damping in (0.5, 0.1, 0.03):
        damped = optimizers.damped("sgd", hyper, damping)
        assert damped["lr"] / (1 - damped["momentum"]) == pytest.approx(damping * 1.0)
    assert optimizers.damped("adam", {"lr": 0.1, "beta1": 0.9}, 0.25) == pytest.approx({"lr": 0.1, "beta1": 0.6})
    assert optimizers.damped("adagrad", {"lr": 0.1}, 0.25) == {"lr": 0.1}


@pytest.mark.parametrize("damping", [0.5, 0.25, 0.05])
@pytest.mark.parametrize(("momentum", "dampening"), [(0.0, 0.0), (0.9, 0.0), (0.5, 0.5), (0.9, 0.9)])
def test_one_gradient_moves_a_damped_sgd_as_far_as_it_says(momentum: float, dampening: float, damping: float) -> None:
    """By torch's own SGD: one gradient, then none, and how far the weight is in the end."""

    def way(hyper: Mapping[str, float]) -> float:
        weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        sgd = torch.optim.SGD([weight], lr=hyper["lr"], momentum=hyper["momentum"], dampening=hyper["dampening"])
        for step in range(400):
            weight.grad = torch.full_like(weight, float(step == 1))  # the first step has no dampening in torch
            sgd.step()
        return -float(weight.detach())

    hyper = {"lr": 0.1, "momentum": momentum, "dampening": dampening}
    assert way(optimizers.damped("sgd", hyper, damping)) == pytest.approx(damping * way(hyper), rel=1e-6)


def test_a_momentum_that_never_fades_is_left_and_its_rate_damped() -> None:
    hyper = {"lr": 0.1, "momentum": 1.0, "dampening": 0.0}
    assert optimizers.damped("sgd", hyper, 0.5) == {"lr": 0.05, "momentum": 1.0, "dampening": 0.0}
    weights = [torch.nn.Parameter(torch.zeros(1))]
    outer = {"lr": 0.7, "momentum": 0.9, "nesterov": 1.0}
    assert optimizers.outer_of(outer, torch.optim.SGD(weights, lr=0.1, momentum=1.0), corrects=True)


def test_two_momenta_do_not_multiply() -> None:
    outer = {"lr": 0.7, "momentum": 0.9, "nesterov": 1.0}
    weights = [torch.nn.Parameter(torch.zeros(1))]

    def step_of(optimizer: torch.optim.Optimizer, *, corrects: bool) -> float:
        (hyper,) = optimizers.outer_of(outer, optimizer, corrects=corrects)
        return hyper["lr"] / (1 - hyper["momentum"])

    assert step_of(torch.optim.SGD(weights, lr=0.1, momentum=0.9), corrects=True) == pytest.approx(1.0)
    assert step_of(torch.optim.SGD(weights, lr=0.1, momentum=0.5), corrects=True) == pytest.approx(3.5)
    assert step_of(torch.optim.SGD(weights, lr=0.1), corrects=True) == pytest.approx(7.0)
    assert step_of(torch.optim.AdamW(weights), corrects=True) == pytest.approx(7.0)
    assert step_of(torch.optim.SGD(weights, lr=0.1, momentum=0.9), corrects=False) == pytest.approx(7.0)
    average = {"lr": 1.0, "momentum": 0.0, "nesterov": 0.0}
    assert optimizers.outer_of(average, torch.optim.SGD(weights, lr=0.1, momentum=0.9), corrects=True)[0]["lr"] == 1.0
