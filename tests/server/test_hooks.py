"""Gradients leave layer by layer; a minibatch stops at the very next layer and leaves no trace.

The oracle is a twin: the same model, never cancelled, with the same random numbers.
"""

from __future__ import annotations

import copy
import io
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from offbeat.errors import RequestError
from offbeat.server.learner.gradient_hooks import Cancelled, Hooks

NEVER = 10**9
ONE = torch.tensor([1])


class Bench:
    """A model with hooks, a target for its gradients, and a cancel that comes true at look number `at`."""

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter] | None = None, *, keeps_buffers: bool = True
    ) -> None:
        self.model = model
        self.parameters = list(model.parameters()) if parameters is None else list(parameters)
        self.filled: dict[int, Tensor] = {}
        self.fills: list[int] = []
        self.looks = 0
        self.at = NEVER
        self.hooks = Hooks(model, self.parameters, self, keeps_buffers=keeps_buffers)

    def fill(self, index: int, gradient: Tensor) -> None:
        self.fills.append(index)
        self.filled[index] = torch.zeros(gradient.shape, dtype=gradient.dtype).copy_(gradient)

    def is_unchanged(self, index: int, gradient: Tensor) -> bool:
        return True

    def is_cancelled(self) -> bool:
        self.looks += 1
        return self.looks >= self.at

    def is_true_to_the_gradients(self) -> bool:
        return all(
            parameter.grad is None or torch.equal(self.filled[index], parameter.grad.to_dense().cpu())
            for index, parameter in enumerate(self.parameters)
        )

    def whole(self, batch: Tensor) -> tuple[int, ...]:
        self.hooks.begin()
        run(self.model, batch)
        return self.hooks.finish()

    def cancel_at(self, look: int, work: Callable[[], object]) -> None:
        """Begins, is cancelled at that look, and abandons."""
        self.looks, self.at = 0, look
        self.hooks.begin()
        with pytest.raises(Cancelled):
            work()
        assert self.looks == look, "nothing looked again after the cancel: nothing went on"
        self.hooks.abandon()
        self.at = NEVER


def cnn() -> nn.Module:
    """Batch norm, dropout, modules that work in place, and modules inside of modules."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.3)),
        nn.Sequential(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(inplace=True)), nn.Flatten()),
        nn.Linear(150, 5),
    )


def seeded(make: Callable[[], nn.Module], seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def images(seed: int = 2) -> Tensor:
    return torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(seed))


def rows(seed: int = 2) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def backward(loss: Tensor, create_graph: bool = False) -> None:
    loss.backward(create_graph=create_graph)  # type: ignore[no-untyped-call]  # torch has no type for it


def run(model: nn.Module, batch: Tensor, seed: int = 3) -> Tensor:
    torch.manual_seed(seed)
    loss: Tensor = model(batch).square().mean()
    backward(loss)
    return loss.detach()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))


class Net(nn.Module):
    """A module around one. (`compile()` of torch's own classes compiles nothing: torch skips its own files.)"""

    def __init__(self, inner: Any, how: Callable[[Any, Tensor], Any] = lambda inner, batch: inner(batch)) -> None:
        super().__init__()
        self.inner = inner
        self.how = how

    def forward(self, batch: Tensor) -> Tensor:
        result: Tensor = self.how(self.inner, batch)
        return result


def state(model: nn.Module) -> Iterator[tuple[str, Tensor | None]]:
    for name, value in model.state_dict().items():
        yield name, value
    for name, parameter in model.named_parameters():
        yield f"{name}.grad", parameter.grad


def assert_same(mine: nn.Module, other: nn.Module) -> None:
    for (name, a), (_, b) in zip(state(mine), state(other), strict=True):
        assert (a is None) == (b is None), name
        assert a is None or b is None or torch.equal(a, b), name


def steps(bench: Bench, twin: nn.Module, batch: Tensor) -> None:
    """Two minibatches with a step each: after both, model and twin are equal to the bit."""
    ours = torch.optim.SGD(bench.model.parameters(), lr=0.1, momentum=0.9)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for seed in (11, 12):
        bench.hooks.begin()
        assert torch.equal(run(bench.model, batch, seed), run(twin, batch, seed))
        assert bench.hooks.finish() == ()
        assert bench.is_true_to_the_gradients()
        ours.step()
        theirs.step()
        assert_same(bench.model, twin)
        ours.zero_grad()
        theirs.zero_grad()


def cancel_everywhere(bench: Bench, twin: nn.Module, batch: Tensor, looks: int) -> None:
    for look in range(1, looks + 1):
        bench.cancel_at(look, lambda: run(bench.model, batch))
        assert_same(bench.model, twin)
    steps(bench, twin, batch)
    assert bench.looks == looks * 3, "a cancel came at every look that there is: the last one, and two minibatches"


# --- cancelling -------------------------------------------------------------------------------------------------------

CNN_MODULES = len(list(cnn().modules()))
CNN_LOOKS = CNN_MODULES + len(list(cnn().parameters()))


def test_each_module_and_each_parameter_looks_once() -> None:
    bench = Bench(cnn())
    bench.hooks.begin()
    run(bench.model, images())
    assert bench.looks == CNN_LOOKS
    assert bench.hooks.notes == ()


@pytest.mark.parametrize("look", range(1, CNN_LOOKS + 1))
def test_a_cancel_stops_at_the_very_next_layer_and_leaves_no_trace(look: int) -> None:
    bench, twin = Bench(seeded(cnn)), seeded(cnn)
    entered: list[nn.Module] = []
    for module in bench.model.modules():  # registered later: called after ours
        module.register_forward_pre_hook(lambda module, _: entered.append(module))
    bench.hooks.begin()
    run(bench.model, images())
    whole, order = entered[:], bench.fills[:]
    bench.hooks.abandon()
    assert_same(bench.model, twin)

    entered.clear()
    bench.fills.clear()
    arrived: list[int] = []
    for index, parameter in enumerate(bench.parameters):
        parameter.register_hook(lambda _, index=index: arrived.append(index))  # type: ignore[no-untyped-call]  # torch has no type for it
    bench.cancel_at(look, lambda: run(bench.model, images()))
    assert entered == whole[: look - 1]
    into_backward = max(look - CNN_MODULES, 0)
    assert arrived == order[:into_backward]
    assert bench.fills == order[: max(into_backward - 1, 0)]
    assert_same(bench.model, twin)
    steps(bench, twin, images())


def test_without_keeps_buffers_a_cancel_leaves_the_statistics_as_they_are() -> None:
    bench = Bench(seeded(cnn), keeps_buffers=False)
    bench.cancel_at(CNN_MODULES, lambda: run(bench.model, images()))
    assert dict(bench.model.named_buffers())["0.1.num_batches_tracked"] == 1


class Caching(nn.Module):
    """Puts other tensors, and new ones, in the place of its buffers; some buffers cannot be written at all."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("later", None)
        self.register_buffer("expanded", torch.ones(1).expand(4))
        with torch.inference_mode():
            self.register_buffer("frozen", torch.ones(4))

    def forward(self, batch: Tensor) -> Tensor:
        self.seen = self.get_buffer("seen") + batch.detach().mean(0)
        self.later = torch.ones(4)
        self.register_buffer("new", torch.ones(4), persistent=False)
        result: Tensor = self.inner(batch + self.seen + self.get_buffer("expanded"))
        return result


def test_buffers_that_were_replaced_or_added_go_back_too() -> None:
    bench = Bench(seeded(Caching))
    before = dict(bench.model.named_buffers())
    bench.cancel_at(3, lambda: run(bench.model, rows()))
    after = dict(bench.model.named_buffers())
    assert list(before) == list(after)
    assert all(after[name] is buffer for name, buffer in before.items())
    assert bench.model.later is None
    steps(bench, seeded(Caching), rows())


def test_a_cancel_is_not_forgiven_by_code_that_forgives_errors() -> None:
    assert not issubclass(Cancelled, Exception)


# --- outside of a minibatch -------------------------------------------------------------------------------------------


def test_hooks_rest_before_begin_after_finish_after_abandon_and_after_remove() -> None:
    bench = Bench(cnn())
    bench.at = 1

    def nothing_happens() -> None:
        run(bench.model, images())
        assert (bench.looks, bench.fills) == (0, [])
        bench.model.zero_grad()

    nothing_happens()
    bench.hooks.begin()
    assert bench.hooks.finish() == tuple(range(len(bench.parameters)))
    nothing_happens()
    bench.hooks.begin()
    bench.hooks.abandon()
    nothing_happens()
    bench.hooks.begin()
    bench.hooks.end()
    bench.hooks.end()
    nothing_happens()


def test_abandon_outside_of_a_minibatch_leaves_the_buffers_of_now() -> None:
    bench = Bench(cnn())
    bench.whole(images())
    before = copy.deepcopy(bench.model.state_dict())
    bench.hooks.abandon()
    assert all(parameter.grad is None for parameter in bench.parameters)
    assert all(torch.equal(value, before[name]) for name, value in bench.model.state_dict().items())


def test_a_copy_of_the_model_has_no_hooks_that_act() -> None:
    bench = Bench(mlp())
    bench.hooks.begin()
    bench.at = 1
    run(copy.deepcopy(bench.model), rows())
    assert bench.looks == 0
    torch.save(bench.model, io.BytesIO())


# --- what is filled equals the gradients at the step ------------------------------------------------------------------


def test_gradients_accumulate_over_several_backwards() -> None:
    bench, twin = Bench(seeded(mlp)), seeded(mlp)
    for seed in (1, 2, 3):
        bench.hooks.begin()
        run(bench.model, rows(seed))
        run(twin, rows(seed))
    assert bench.hooks.finish() == ()
    assert len(bench.fills) == 3 * len(bench.parameters), "each backward filled, the step nothing more"
    assert bench.is_true_to_the_gradients()
    assert_same(bench.model, twin)


def test_a_cancel_in_the_second_of_two_backwards_goes_back_to_before_the_first() -> None:
    bench, twin = Bench(seeded(cnn)), seeded(cnn)

    def two_backwards() -> None:
        for seed in (1, 2):
            bench.hooks.begin()
            run(bench.model, images(seed))

    bench.cancel_at(CNN_LOOKS + 15, two_backwards)
    assert_same(bench.model, twin)
    steps(bench, twin, images())


def test_unused_parameters_are_named_by_their_index() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    bench = Bench(model)
    bench.hooks.begin()
    run(model[0], rows())
    run(model[2], rows())
    assert bench.hooks.finish() == (2, 3)
    assert sorted(bench.filled) == [0, 1, 4, 5]


def test_frozen_modules_are_looked_at_but_not_filled() -> None:
    model = mlp()
    next(model.children()).requires_grad_(False)
    bench = Bench(model, parameters=[parameter for parameter in model.parameters() if parameter.requires_grad])
    assert bench.whole(rows()) == ()
    assert bench.looks == 7 + 4


def unscale(parameters: list[nn.Parameter]) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    scaler.unscale_(torch.optim.SGD(parameters, lr=1))


def each(change: Callable[[Any], object]) -> Callable[[list[nn.Parameter]], object]:
    return lambda parameters: [change(parameter) for parameter in parameters]


CHANGES: dict[str, Callable[[list[nn.Parameter]], object]] = {
    "clip_grad_norm_": lambda parameters: nn.utils.clip_grad_norm_(parameters, 1e-3),
    "clip_grad_norm_, one by one": lambda parameters: nn.utils.clip_grad_norm_(parameters, 1e-3, foreach=False),
    "clip_grad_value_": lambda parameters: nn.utils.clip_grad_value_(parameters, 1e-4),
    "GradScaler.unscale_": unscale,
    "another tensor": each(lambda parameter: parameter.__setattr__("grad", parameter.grad * 3)),
    "a sparse tensor": each(lambda parameter: parameter.__setattr__("grad", (parameter.grad * 3).to_sparse())),
    "another storage": each(lambda p: p.grad.__setattr__("data", p.grad.view(-1).index_fill(0, ONE, 7).view_as(p))),
    "in place": each(lambda parameter: parameter.grad.mul_(2)),
    "one element in place": each(lambda parameter: parameter.grad.view(-1)[1].add_(1)),
    "rescaled by way of .data": each(lambda parameter: parameter.grad.data.mul_(2)),
    "rescaled by way of numpy": each(lambda parameter: parameter.grad.numpy().__imul__(2)),
    "zeros": each(lambda parameter: parameter.grad.zero_()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_change_of_the_gradients_after_backward_is_seen(change: Callable[[list[nn.Parameter]], object]) -> None:
    bench = Bench(seeded(cnn))
    bench.hooks.begin()
    run(bench.model, images())
    assert bench.is_true_to_the_gradients()
    change(bench.parameters)
    assert not bench.is_true_to_the_gradients()
    assert bench.hooks.finish() == ()
    assert bench.is_true_to_the_gradients()


def test_a_gradient_that_shows_no_telling_element_is_filled_again() -> None:
    """All looked-at elements are zero, the others are not: GradScaler's rescaling could not be seen."""
    weight = nn.Parameter(torch.zeros(1000))
    bench = Bench(nn.Identity(), parameters=[weight])
    bench.hooks.begin()
    backward(weight[1:2].sum())
    unscale([weight])
    bench.hooks.finish()
    assert bench.fills == [0, 0]
    assert bench.is_true_to_the_gradients()


def test_gradients_that_nobody_touched_are_filled_once() -> None:
    convolution: Any = nn.Conv2d(3, 4, 3)
    bench = Bench(convolution.to(memory_format=torch.channels_last))
    bench.whole(images())
    assert sorted(bench.fills) == [0, 1]
    assert bench.is_true_to_the_gradients()


def test_gradients_taken_away_or_put_there_by_hand_count_as_they_are_at_the_step() -> None:
    bench = Bench(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    bench.hooks.begin()
    run(next(bench.model.children()), rows())
    bench.parameters[1].grad = None
    bench.parameters[2].grad = torch.ones(4, 4)
    assert bench.hooks.finish() == (1, 3)
    assert bench.is_true_to_the_gradients()


def test_tied_weights_end_with_the_whole_gradient() -> None:
    def make() -> nn.Module:
        one, two = nn.Linear(4, 4), nn.Linear(4, 4)
        two.weight = one.weight
        return nn.Sequential(one, two, two)

    bench, twin = Bench(seeded(make)), seeded(make)
    steps(bench, twin, rows())
    bench.cancel_at(5, lambda: run(bench.model, rows()))
    steps(bench, twin, rows())


def test_parameters_that_share_memory_are_filled_each_by_its_own() -> None:
    base = torch.randn(8, 4)
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[0].weight = nn.Parameter(base[:4])
    model[1].weight = nn.Parameter(base[2:6])
    bench = Bench(model)
    assert bench.whole(rows()) == ()
    assert bench.is_true_to_the_gradients()


def test_a_sparse_gradient_is_filled_as_a_dense_one() -> None:
    bench = Bench(nn.Embedding(5, 2, sparse=True))
    assert bench.whole(torch.tensor([1, 3, 3])) == ()
    gradient = bench.parameters[0].grad
    assert gradient is not None and gradient.is_sparse
    assert torch.equal(bench.filled[0], gradient.to_dense())


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_what_is_filled_is_no_part_of_a_graph_of_higher_order() -> None:
    weight = nn.Parameter(torch.ones(3))
    bench = Bench(nn.Identity(), [weight])
    bench.hooks.begin()
    backward((weight**3).sum(), create_graph=True)
    assert weight.grad is not None and weight.grad.requires_grad
    assert not bench.filled[0].requires_grad
    weight.grad = weight.grad * 2
    bench.hooks.finish()
    assert not bench.filled[0].requires_grad
    weight.grad = None  # it and its graph hold each other


# --- checkpoints, models without submodules ---------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_cancel_in_the_recomputation_of_a_checkpoint_leaves_no_trace(reentrant: bool) -> None:
    def make() -> nn.Module:
        inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 4))
        return nn.Sequential(nn.Linear(4, 4), Net(inner, partial(checkpoint, use_reentrant=reentrant)))

    bench, twin = Bench(seeded(make)), seeded(make)
    bench.hooks.begin()
    run(bench.model, rows())
    bench.hooks.abandon()
    assert bench.looks > 8 + 8, "recomputation looks too"
    cancel_everywhere(bench, twin, rows(), looks=bench.looks)


def functions() -> nn.Module:
    weights = nn.ParameterList([nn.Parameter(torch.randn(4, 4)) for _ in range(3)])
    return Net(weights, lambda weights, batch: reduce(functional.linear, weights, batch))


@pytest.mark.parametrize("make", [functions, lambda: nn.Linear(4, 4)])
def test_a_model_without_submodules_is_cancelled_at_its_start_and_at_each_parameter(
    make: Callable[[], nn.Module],
) -> None:
    bench, twin = Bench(seeded(make)), seeded(make)
    assert ["no submodules" in note for note in bench.hooks.notes] == [True]
    cancel_everywhere(bench, twin, rows(), looks=1 + len(bench.parameters))


# --- compiled models --------------------------------------------------------------------------------------------------


def compiled(way: str, backend: Any) -> nn.Module:
    model: Any = Net(mlp())
    if way == "torch.compile(model)":
        model = torch.compile(model, backend=backend, fullgraph=True)
    elif way == "model.compile()":
        model.compile(backend=backend, fullgraph=True)
    else:
        model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)
    assert isinstance(model, nn.Module)
    return model


WAYS = ("torch.compile(model)", "model.compile()", "model.forward = torch.compile(model.forward)")


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # inductor's own
@pytest.mark.parametrize(
    ("way", "backend"), [*((way, backend) for way in WAYS for backend in ("eager", "aot_eager")), (WAYS[0], "inductor")]
)
def test_a_compiled_model_is_cancelled_at_its_start_and_at_each_parameter(way: str, backend: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    torch.compiler.reset()
    bench, twin = Bench(seeded(lambda: compiled(way, backend))), seeded(lambda: compiled(way, backend))
    assert bench.hooks.notes[0].startswith("compiled: the model;")
    steps(bench, twin, rows())
    cancel_everywhere(bench, twin, rows(), looks=1 + len(bench.parameters))


@pytest.mark.parametrize("way", WAYS)
def test_hooks_neither_break_a_graph_nor_compile_it_again(way: str) -> None:
    torch.compiler.reset()
    counter = CompileCounter()
    model = compiled(way, counter)
    bench = Bench(model)
    for _ in range(3):
        run(bench.model, rows())
        bench.whole(rows())
    run(model, rows())
    assert counter.frame_count == 1


def test_a_model_compiled_after_its_hooks_has_a_whole_graph_and_fills() -> None:
    torch.compiler.reset()
    bench, counter = Bench(seeded(lambda: Net(mlp()))), CompileCounter()
    bench.model.compile(backend=counter, fullgraph=True)
    steps(bench, seeded(lambda: Net(mlp())), rows())
    run(bench.model, rows())
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at inputs
def test_around_compiled_parts_a_cancel_acts_at_every_module() -> None:
    torch.compiler.reset()

    def make() -> nn.Module:
        blocks = nn.Sequential(*(Net(mlp()) for _ in range(5)))
        for block in blocks:
            block.compile(backend="aot_eager", fullgraph=True)
        return nn.Sequential(nn.Linear(4, 4), blocks)

    bench, twin = Bench(seeded(make)), seeded(make)
    assert bench.hooks.notes[0].startswith("compiled: '1.0', '1.1', '1.2' and 2 more;")
    cancel_everywhere(bench, twin, rows(), looks=8 + 32)


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_script_module_is_cancelled_around_it_and_in_backward() -> None:
    def make() -> nn.Module:
        scripted: Any = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        return nn.Sequential(nn.Linear(4, 4), scripted, nn.Linear(4, 4))

    bench, twin = Bench(seeded(make)), seeded(make)
    assert bench.hooks.notes[0].startswith("a ScriptModule: '1';")
    cancel_everywhere(bench, twin, rows(), looks=3 + 8)


def test_data_parallel_on_several_devices_or_distributed_is_refused() -> None:
    model = nn.DataParallel(mlp())
    bench = Bench(model)
    bench.cancel_at(3, lambda: run(bench.model, rows()))
    model.device_ids = [0, 1]
    with pytest.raises(RequestError, match=r"the model is wrapped in DataParallel on 2 devices.*`\.module`"):
        Bench(model)

    wrapper = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapper)
    with pytest.raises(RequestError, match=r"'0' is wrapped in DistributedDataParallel.*`\.module`"):
        Bench(nn.Sequential(wrapper), [])


def test_parameters_that_cannot_be_filled_are_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    weight, bias = model.parameters()
    with pytest.raises(RequestError, match=r"parameter 2 \(weight\) is the same as parameter 0"):
        Bench(model, [weight, bias, weight])
    bias.requires_grad_(False)
    with pytest.raises(RequestError, match=r"parameter 1 \(bias\) requires no gradient"):
        Bench(model, [weight, bias])
    assert not model._forward_pre_hooks, "who is refused leaves nothing behind"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: autograd has a thread for it")
def test_on_a_gpu_a_cancel_comes_out_of_backward_as_it_is() -> None:
    bench, twin = Bench(seeded(cnn).cuda()), seeded(cnn).cuda()
    assert bench.hooks.notes[0].startswith("parameters on cuda:")
    with torch.backends.cudnn.flags(deterministic=True, benchmark=False):
        cancel_everywhere(bench, twin, images().cuda(), looks=CNN_LOOKS)
