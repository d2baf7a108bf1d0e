"""The built-in models: their sizes, shapes and refusals. The large ones are built without memory, on torch's meta."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional

from offbeat.errors import RequestError
from offbeat.train.models import MODELS, build_model, settle


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small models gain nothing from more, and lose much where other tests run beside them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def on_meta(name: str, *shape: int, classes: int = 10) -> nn.Module:
    with torch.device("meta"):
        return build_model(name, shape, classes)


@pytest.mark.parametrize(("name", "count"), [("resnet50", 25_557_032), ("alexnet", 61_100_840), ("vgg16", 138_357_544)])
def test_the_large_ones_have_the_published_number_of_parameters(name: str, count: int) -> None:
    model = on_meta(name, 3, 224, 224, classes=1000)
    assert parameters(model) == count
    assert model(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)


def test_resnet18_for_small_images_has_the_known_number_of_parameters() -> None:
    model = on_meta("resnet18", 3, 32, 32)
    assert parameters(model) == 11_173_962
    assert model(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 10)


@pytest.mark.parametrize(("name", "blocks"), [("resnet18", 8), ("resnet50", 16)])
def test_every_residual_block_shows_its_last_norm_once(name: str, blocks: int) -> None:
    model = on_meta(name, 3, 64, 64)
    norms = [module.last_norm for module in model.modules() if hasattr(module, "last_norm")]
    assert len(norms) == blocks
    assert all(isinstance(norm, nn.BatchNorm2d) for norm in norms)
    assert len(model.state_dict()) == sum(1 for _ in model.parameters()) + sum(1 for _ in model.buffers())


@pytest.mark.parametrize(("name", "side", "last"), [("resnet18", 32, (512, 4, 4)), ("resnet50", 224, (2048, 7, 7))])
def test_the_blocks_halve_the_image_as_often_as_published(name: str, side: int, last: tuple[int, ...]) -> None:
    model = on_meta(name, 3, side, side)
    assert isinstance(model, nn.Sequential)
    assert model[:2](torch.empty(2, 3, side, side, device="meta")).shape == (2, *last)


def test_a_block_with_a_zeroed_last_norm_is_the_identity() -> None:
    model = build_model("resnet18", (1, 8, 8), 10, {"width": 4})
    block = next(module for module in model.modules() if hasattr(module, "last_norm"))
    images = torch.rand(2, 4, 8, 8)
    assert not torch.equal(block(images), images)
    assert isinstance(block.last_norm, nn.BatchNorm2d)
    nn.init.zeros_(block.last_norm.weight)
    assert torch.equal(block(images), images)


SMALL = [
    ("softmax", (1, 8, 8), {}, 650),
    ("mlp", (1, 8, 8), {}, 64 * 65 + 10 * 65),
    ("mlp", (5,), {"hidden": 3, "layers": 2}, 3 * 6 + 3 * 4 + 10 * 4),
    ("cnn", (1, 8, 8), {}, 16 * 10 + 32 * 145 + 10 * 129),
    ("cnn", (1, 8, 8), {"hidden": 64}, 16 * 10 + 32 * 145 + 64 * 129 + 10 * 65),
    ("cnn", (3, 28, 28), {"width": 2, "hidden": 5}, 2 * 28 + 4 * 19 + 5 * 197 + 10 * 6),
    ("cnn-bn", (1, 8, 8), {}, 16 * 9 + 32 * 144 + 2 * 48 + 10 * 129),
]


@pytest.mark.parametrize(("name", "shape", "options", "count"), SMALL)
def test_the_small_ones_have_the_layers_they_were_told(
    name: str, shape: tuple[int, ...], options: dict[str, int], count: int
) -> None:
    model = build_model(name, shape, 10, options)
    assert parameters(model) == count
    assert model(torch.rand(3, *shape)).shape == (3, 10)


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [("softmax", (1, 8, 8), {}), ("mlp", (1, 8, 8), {}), ("cnn", (1, 8, 8), {}), ("cnn-bn", (1, 8, 8), {}),
     ("resnet18", (1, 8, 8), {"width": 4}), ("transformer", (12,), {"width": 16, "heads": 2})],
)  # fmt: skip
def test_a_few_steps_lower_the_loss(name: str, shape: tuple[int, ...], options: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = build_model(name, shape, 10, options)
    if name == "transformer":
        inputs, targets = torch.randint(10, (8, *shape)), torch.randint(10, (8, *shape))
    else:
        inputs, targets = torch.rand(8, *shape), torch.randint(10, (8,))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own lack of a type
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]


def test_the_same_seed_gives_the_same_weights() -> None:
    for name in ("cnn", "transformer"):
        shape = (6,) if name == "transformer" else (1, 8, 8)
        twice = []
        for _ in range(2):
            torch.manual_seed(3)
            twice.append(nn.utils.parameters_to_vector(build_model(name, shape, 10).parameters()))
        assert torch.equal(*twice)


def test_the_transformer_sees_no_character_before_its_time() -> None:
    torch.manual_seed(0)
    model = build_model("transformer", (8,), 20).eval()
    characters = torch.randint(20, (1, 8))
    changed = characters.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 20
    before, after = model(characters), model(changed)
    assert before.shape == (1, 20, 8)
    assert torch.allclose(before[:, :, :5], after[:, :, :5], atol=1e-6)
    assert not torch.allclose(before[:, :, 5:], after[:, :, 5:], atol=1e-6)
    assert model(characters[:, :3]).shape == (1, 20, 3)


@pytest.mark.parametrize(
    ("name", "shape", "options", "why"),
    [
        ("cnm", (1, 8, 8), {}, "unknown model 'cnm'; did you mean 'cnn'"),
        ("cnn", (1, 8, 8), {"widht": 8}, "no option 'widht'; did you mean 'width'"),
        ("cnn", (1, 8, 8), {"x": 8}, "known: width, hidden"),
        ("softmax", (1, 8, 8), {"width": 8}, "it has no options"),
        ("cnn", (1, 8, 8), {"width": 0}, "must be at least 1"),
        ("cnn", (1, 8, 8), {"width": "8"}, "is '8'; it must be of type int, like 16"),
        ("cnn", (1, 8, 8), {"width": True}, "is True; it must be of type int"),
        ("cnn", (64,), {}, r"needs images.*\(64,\)"),
        ("cnn", (1, 3, 8), {}, "at least 4x4 pixels; got 3x8"),
        ("alexnet", (3, 62, 62), {}, "at least 63x63"),
        ("vgg16", (3, 31, 31), {}, "at least 32x32"),
        ("transformer", (1, 8, 8), {}, "needs sequences"),
        ("transformer", (8,), {"context": 4}, "context of model transformer is 4, but a sample has 8"),
        ("transformer", (8,), {"width": 10, "heads": 4}, "cannot split a width of 10 into 4 heads"),
        ("transformer", (8,), {"context": -1}, "must be at least 0"),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_line(
    name: str, shape: tuple[int, ...], options: dict[str, int | str | bool], why: str
) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        build_model(name, shape, 10, options)
    assert "\n" not in str(caught.value)


def test_a_model_for_no_classes_is_refused() -> None:
    with pytest.raises(RequestError, match="at least 1 class; got 0"):
        build_model("softmax", (4,), 0)


def test_the_smallest_images_that_are_allowed_go_through() -> None:
    for name, side in (("cnn", 4), ("resnet18", 1), ("resnet50", 32), ("alexnet", 63), ("vgg16", 32)):
        model = on_meta(name, 3, side, side)
        assert model(torch.empty(2, 3, side, side, device="meta")).shape == (2, 10)


def test_a_whole_number_is_fine_where_a_fraction_is_the_default() -> None:
    assert settle("x", {"rate": 1}, {"rate": 0.5, "deep": False}) == {"rate": 1, "deep": False}


def test_every_row_has_a_summary_of_one_line() -> None:
    assert all(row.summary and "\n" not in row.summary for row in MODELS.values())
