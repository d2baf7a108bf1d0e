"""What each codec promises: sizes, stated errors, what becomes of NaN and Inf, and that nothing is lost.

`OFFBEAT_CODECS=1` (make test-codecs) tries 10,000 tensors and 1,000 steps of each; otherwise a part of them.
"""

from __future__ import annotations

import math
import os
from functools import cache

import pytest
import torch
from torch import Tensor

import offbeat
from offbeat import codecs
from offbeat.codecs.coder import Coder, PieceCoder
from offbeat.codecs.low_rank import Layers
from offbeat.codecs.table import BLOCK, SIGN_BLOCK, add_row, check_sizes, kept
from offbeat.errors import RequestError
from offbeat.schedules import build, verify

WHOLE = bool(os.environ.get("OFFBEAT_CODECS"))
TENSORS, STEPS = (10_000, 1_000) if WHOLE else (400, 60)
LINES = [line for row in codecs.CODECS.values() for line in row.examples]
EXACT = ("bf16", "fp16", "top-k", "random-k")
SIZES = (0, 1, 2, 3, 7, 255, 256, 257, 511, 1000, 2047, 2048, 2049, 4097, 70_001)


def payload_of(codec: codecs.Codec, items: int) -> Tensor:
    return torch.empty(codec.size_bytes(items), dtype=torch.uint8)


def random_tensor(number: int) -> Tensor:
    """Of any size and magnitude; some with zeros, some with few large items, some all alike."""
    chance = torch.Generator().manual_seed(number)
    items = SIZES[number % len(SIZES)] if number % 3 else int(torch.randint(0, 5000, (1,), generator=chance))
    values = torch.randn(items, generator=chance) * 10.0 ** float(torch.randint(-40, 30, (1,), generator=chance))
    kind = number % 5
    if kind == 1:
        values[torch.rand(items, generator=chance) < 0.9] = 0.0
    if kind == 2:
        values *= torch.exp(3 * torch.randn(items, generator=chance))
    if kind == 3 and items:
        values = torch.full((items,), float(values[0]))
    return torch.as_tensor(values)


@cache  # its scratch memory takes longer to make than a small tensor to encode
def coder_of(line: str) -> Coder:
    return codecs.parse(line).coder()


def coded(codec: codecs.Codec, values: Tensor, residual: Tensor | None = None, number: int = 0) -> Tensor:
    """Encode and decode."""
    coder, payload = coder_of(codec.line), payload_of(codec, len(values))
    coder.seed(number)
    coder.encode(values, payload, residual)
    out = torch.full_like(values, torch.nan)
    coder.decode(payload, out)
    return out


def blocks_of(values: Tensor, size: int) -> list[Tensor]:
    return list(torch.split(values, size)) if len(values) else []


def largest_by_block(values: Tensor, size: int = BLOCK) -> Tensor:
    parts = [torch.full_like(one, float(one.abs().max())) for one in blocks_of(values, size)]
    return torch.cat(parts) if parts else values


def within_stated_error(codec: codecs.Codec, values: Tensor, out: Tensor) -> bool:
    """What the row's `error` says, written once more as arithmetic."""
    wide, error = values.double(), (out.double() - values.double()).abs()
    levels = {"int8": 127, "int4": 7}.get(codec.name)
    if levels is not None:
        steps = (1 if "stochastic" in codec.line else 0.5) / levels + 2.0**-22
        limit = largest_by_block(values).double() * steps + 2.0**-100
        return bool((error <= limit).all())
    if codec.name == "bf16":
        return bool((error <= wide.abs() * 2.0**-8 + 2.0**-134).all())
    if codec.name == "fp16":
        reach = wide.abs() <= 65504
        return bool((error <= wide.abs() * 2.0**-11 + 2.0**-25)[reach].all()) and bool(
            (out[~reach].abs() == 65504).all()
        )
    if codec.name in ("top-k", "random-k"):
        sent = out != 0
        few = int(sent.sum()) <= kept(len(values), codec.options["share"])
        return few and bool((out[sent] == values[sent]).all())
    if codec.name == "1-bit":
        pairs = zip(blocks_of(error, SIGN_BLOCK), blocks_of(wide, SIGN_BLOCK), strict=True)
        return all(float(one.norm()) <= float(block.norm()) * (1 + 1e-6) + 1e-40 for one, block in pairs)
    return float(error.norm()) <= float(wide.norm()) * (1 + 1e-5) + 1e-40


@pytest.mark.parametrize("line", LINES)
def test_every_codec_stays_within_its_stated_error(line: str) -> None:
    codec = codecs.parse(line)
    for number in range(TENSORS):
        values = random_tensor(number)
        before = values.clone()
        assert within_stated_error(codec, values, coded(codec, values, number=number)), number
        assert torch.equal(values, before)


@pytest.mark.parametrize("line", LINES)
def test_what_is_sent_and_what_is_kept_make_up_the_gradient_over_many_steps(line: str) -> None:
    codec = codecs.parse(line)
    for items in (1, 3, 777, 5000):
        coder, payload = codec.coder(), payload_of(codec, items)
        chance = torch.Generator().manual_seed(items)
        residual, out = torch.zeros(items), torch.empty(items)
        for step in range(STEPS):
            gradient = torch.randn(items, generator=chance) * torch.exp(torch.randn(items, generator=chance))
            whole = gradient + residual
            coder.seed(step)
            coder.encode(gradient, payload, residual)
            coder.decode(payload, out)
            if codec.name in EXACT:
                assert torch.equal(out + residual, whole), (items, step)
            else:
                block = {"1-bit": SIGN_BLOCK, "power-sgd": items}.get(codec.name, BLOCK)
                off = (out.double() + residual.double() - whole.double()).abs()
                assert bool((off <= largest_by_block(whole, block).double() * 2.0**-22).all()), (items, step)
        assert residual.isfinite().all()


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("items", SIZES)
def test_a_payload_has_the_size_that_is_said_and_every_byte_of_it_is_written(line: str, items: int) -> None:
    codec = codecs.parse(line)
    values = torch.randn(items)
    payloads = [torch.full((codec.size_bytes(items) + 64,), fill, dtype=torch.uint8) for fill in (0, 255)]
    for payload in payloads:
        codec.coder().encode(values, payload[: codec.size_bytes(items)])
    used = codec.size_bytes(items)
    assert torch.equal(payloads[0][:used], payloads[1][:used])
    assert int(payloads[0][used:].sum()) == 0 and bool((payloads[1][used:] == 255).all())  # and none behind it


@pytest.mark.parametrize("line", LINES)
def test_decoding_and_adding_is_decoding_then_adding(line: str) -> None:
    codec = codecs.parse(line)
    coder = codec.coder()
    for items in SIZES:
        values, payload = torch.randn(items), payload_of(codec, items)
        coder.encode(values, payload)
        out, onto = torch.empty(items), torch.randn(items)
        coder.decode(payload, out)
        wanted = onto + out
        coder.add(payload, onto)
        assert torch.equal(onto, wanted)


@pytest.mark.parametrize("line", LINES)
def test_who_encodes_can_take_what_the_others_decode(line: str) -> None:
    codec = codecs.parse(line)
    for items in SIZES:
        coder, payload = codec.coder(), payload_of(codec, items)
        values, residual = torch.randn(items), torch.randn(items) / 10
        coder.encode(values, payload, residual, take=True)
        out = torch.empty(items)
        coder.decode(payload, out)
        assert torch.equal(values.view(torch.int32), out.view(torch.int32))  # to the sign of a zero


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("line", LINES)
def test_what_is_not_finite_is_told_to_the_others_and_does_not_stay(line: str, wrong: float) -> None:
    codec = codecs.parse(line)
    values = torch.ones(5000)
    values[::7] = -2.0
    values[300] = wrong
    residual = torch.zeros(5000)
    out = coded(codec, values, residual)
    assert residual.isfinite().all()
    if codec.name in ("bf16", "fp16"):  # as it is, and nowhere else
        assert torch.equal(out[300:301].isnan(), values[300:301].isnan()) and not out[300].isfinite()
        assert int(out.isfinite().sum()) == 4999
    elif codec.name in ("int8", "int4", "1-bit"):
        block = SIGN_BLOCK if codec.name == "1-bit" else BLOCK
        start = 300 // block * block
        assert out[start : start + block].isnan().all()
        assert int(out.isnan().sum()) == block
    elif codec.name == "top-k":
        assert int(out.isnan().sum()) == kept(5000, 0.01)
    elif codec.name == "power-sgd":
        assert out.isnan().any()
    assert coded(codec, torch.ones(5000), residual).isfinite().all()  # the next step is not poisoned


@pytest.mark.parametrize("line", LINES)
def test_the_largest_and_the_smallest_numbers_are_sent_as_finite_ones(line: str) -> None:
    codec = codecs.parse(line)
    for size in (3e38, 1e-38, 1e-45, 0.0):
        if codec.name in ("1-bit", "power-sgd") and size > 1e38:  # a sum of these is not finite
            continue
        values = torch.full((300,), size)
        values[::2] = -size
        residual = torch.zeros(300)
        out = coded(codec, values, residual)
        assert out.isfinite().all() and residual.isfinite().all()
        if codec.name in EXACT:
            assert torch.equal(out + residual, values)


def test_bf16_sends_the_largest_fp32_as_the_largest_bf16() -> None:
    largest = torch.full((3,), torch.finfo(torch.float32).max)
    residual = torch.zeros(3)
    out = coded(codecs.parse("bf16"), largest, residual)
    assert float(out[0]) == torch.finfo(torch.bfloat16).max and torch.equal(out + residual, largest)


def test_top_k_sends_the_largest_by_a_threshold_and_by_a_sort_alike() -> None:
    for items in (10, 1000, 200_000):
        values = torch.randn(items, generator=torch.Generator().manual_seed(items)) ** 3
        out = coded(codecs.parse("top-k:0.01"), values)
        count = kept(items, 0.01)
        assert set(out.nonzero().view(-1).tolist()) == set(values.abs().topk(count).indices.tolist())


def test_top_k_of_values_that_the_sample_misses_sends_k_of_them_all_the_same() -> None:
    values = torch.zeros(1_000_000)
    values[7] = 1.0
    assert int((coded(codecs.parse("top-k:0.01"), values) != 0).sum()) == 1


def test_random_k_takes_every_place_in_time_and_the_same_on_all_ranks() -> None:
    codec = codecs.parse("random-k:0.05")
    values = torch.ones(1000)
    seen = sum(coded(codec, values, number=number) for number in range(400))
    assert isinstance(seen, Tensor) and bool((seen > 0).all())
    assert torch.equal(coded(codec, values, number=9), coded(codec, 2 * values, number=9) / 2)


def test_stochastic_rounding_is_right_on_average_and_nearest_is_not() -> None:
    values = torch.full((256,), 0.3)
    values[0] = 127.0
    means = {
        line: float(sum(float(coded(codecs.parse(line), values, number=n)[1:].mean()) for n in range(200))) / 200
        for line in ("int8", "int8:stochastic")
    }
    assert means["int8"] == 0.0
    assert abs(means["int8:stochastic"] - 0.3) < 0.02


def test_power_sgd_finds_a_matrix_of_low_rank_within_a_few_steps() -> None:
    """With the warm start it finds a matrix of its rank; a new start every time does not get better."""
    codec = codecs.parse("power-sgd:2")
    chance = torch.Generator().manual_seed(1)
    matrix = torch.randn(96, 2, generator=chance) @ torch.randn(2, 96, generator=chance)
    values = matrix.flatten() + 0.001 * torch.randn(96 * 96, generator=chance)
    coder, payload, out = codec.coder(), payload_of(codec, len(values)), torch.empty(len(values))
    for _ in range(3):
        coder.encode(values, payload)
    coder.decode(payload, out)
    assert float((out - values).norm()) < 0.01 * float(values.norm())


def test_ratios_are_those_of_the_formulas() -> None:
    items = 1 << 24
    ratios = {line: codecs.parse(line).ratio(items) for line in LINES}
    assert round(ratios["int8"], 2) == 3.94 and ratios["bf16"] == 2.0
    assert round(ratios["top-k:0.01"]) == 50  # 1 / (2 s)
    assert round(ratios["power-sgd:4"]) == 4096 * 4096 // (4 * (4096 + 4096))


def test_the_break_even_bandwidth_is_where_a_codec_gains_nothing() -> None:
    bandwidth = codecs.most_bandwidth(3.94, 1e9)
    assert math.isclose(codecs.gain(3.94, 1e9, bandwidth), 1.0)
    assert codecs.gain(3.94, 1e9, bandwidth / 10) > 2 > 1 > codecs.gain(3.94, 1e9, 10 * bandwidth)
    assert math.isclose(codecs.least_speed(3.94, bandwidth), 1e9)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("int9", "did you mean 'int8'"),
        ("top-k", "SHARE is missing"),
        ("top-k:0", "above 0 and up to 1"),
        ("top-k:2", "above 0 and up to 1"),
        ("int8:up", "'int8:up': rounding: unknown choice 'up'"),
        ("power-sgd:0", "whole number from 1"),
        ("bf16:2", "takes no arguments"),
        ("int8@here", "expected '@across'"),
        ("top-k:0.1@across", "leave out '@across'"),
    ],
)
def test_a_wrong_line_is_named_with_what_is_allowed(line: str, said: str) -> None:
    with pytest.raises(RequestError) as error:
        codecs.split_place(line)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("line", LINES)
def test_a_line_is_written_as_it_is_read(line: str) -> None:
    assert str(codecs.parse(line)) == line
    check_sizes(codecs.parse(line))


class Upper(PieceCoder):
    """The codec of docs/extending.md."""

    def _round(self, values: Tensor, payload: Tensor, start: int, items: int, decoded: Tensor | None) -> bool:
        kept_ones = payload.view(torch.float32)[start : start + len(values)]
        torch.mul(values, values.abs() > 1e-4, out=kept_ones)
        if decoded is not None:
            decoded.copy_(kept_ones)
        return bool(kept_ones.isfinite().all())

    def _decode(self, payload: Tensor, start: int, items: int, into: Tensor) -> None:
        into.copy_(payload.view(torch.float32)[start : start + len(into)])


def test_a_codec_of_ones_own_is_a_class_and_a_row() -> None:
    offbeat.register_codec(
        codecs.CodecRow(
            name="upper", summary="", kind=codecs.PER_TRANSFER, biased=True, size_bytes=lambda items: 4 * items,
            coder=f"{__name__}:Upper", error="1e-4", not_finite="as they are", examples=("upper",),
        )
    )  # fmt: skip
    try:
        values, residual = torch.randn(1000) * 1e-4, torch.zeros(1000)
        out = coded(codecs.parse("upper"), values, residual)
        assert torch.equal(out + residual, values) and 0 < int((out == 0).sum()) < 1000
        verify(build("ring:codec=upper", ranks=4))
        with pytest.raises(RequestError, match="already exists"):
            offbeat.register_codec(codecs.CODECS["upper"])
    finally:
        del codecs.CODECS["upper"]
        codecs.parse.cache_clear()


def test_a_row_whose_sizes_do_not_add_up_is_refused() -> None:
    row = codecs.CodecRow(
        name="odd", summary="", kind=codecs.PER_TRANSFER, biased=False, size_bytes=lambda items: items * items,
        coder="offbeat.codecs.rounding:Bf16", error="", not_finite="", examples=("odd",),
    )  # fmt: skip
    with pytest.raises(RequestError, match="is not that of their blocks"):
        add_row(row)
    assert "odd" not in codecs.CODECS


# --- power-sgd by layers ----------------------------------------------------------------------------------------------

SHAPES = ((40, 30), (40,), (6, 40, 3, 3), (6,), (), (2, 2), (0, 5))


def of_layers(values: Tensor, layers: Layers, start: Tensor) -> tuple[Tensor, Tensor]:
    """One rank alone: what is decoded, and the next start; `values` becomes what was not sent."""
    left = layers.left(values, start)
    layers.orthogonalise(left)
    right = layers.right(values, left)
    decoded = torch.empty(layers.items)
    layers.product(left, right, decoded)
    return decoded, layers.next_start(right, start)


def test_each_layer_has_a_matrix_of_its_own_and_the_rest_is_sent_as_it_is() -> None:
    layers = Layers(SHAPES, 4)
    assert [(one.rows, one.columns, one.width) for one in layers.layers] == [(40, 30, 4), (6, 360, 4)]
    assert sum(part.stop - part.start for part in layers.uncoded) == 40 + 6 + 1 + 4
    assert layers.items == sum(math.prod(shape) for shape in SHAPES)
    values = torch.randn(layers.items, generator=torch.Generator().manual_seed(1))
    before = values.clone()
    decoded, _ = of_layers(values, layers, layers.start())
    assert float((decoded + values - before).abs().max()) < 1e-5  # sent + residual = gradient
    for part in layers.uncoded:
        assert torch.equal(decoded[part], before[part]) and not values[part].any()


def test_layers_of_low_rank_are_exact_after_a_few_steps_and_a_flat_matrix_is_not() -> None:
    chance = torch.Generator().manual_seed(2)
    shapes = ((64, 48), (64,), (80, 64))
    parts = [
        torch.randn(rows, 2, generator=chance) @ torch.randn(2, columns, generator=chance)
        for rows, columns in (shapes[0], shapes[2])
    ]
    flat = torch.cat([parts[0].view(-1), torch.randn(64, generator=chance), parts[1].view(-1)])
    layers = Layers(shapes, 2)
    start = layers.start()
    for _ in range(3):
        rest = flat.clone()
        _, start = of_layers(rest, layers, start)
    assert float(rest.norm() / flat.norm()) < 1e-4
    codec = codecs.parse("power-sgd:2")
    coder, payload = codec.coder(), torch.empty(codec.size_bytes(len(flat)), dtype=torch.uint8)
    for _ in range(3):
        rest = torch.zeros(len(flat))
        coder.encode(flat, payload, rest)
    assert float(rest.norm() / flat.norm()) > 0.5


def test_what_is_not_finite_does_not_stay_in_a_layer() -> None:
    layers = Layers(SHAPES, 2)
    values = torch.ones(layers.items)
    values[7] = torch.nan
    decoded, start = of_layers(values, layers, layers.start())
    assert decoded.isnan().any() and values.isfinite().all() and start.isfinite().all()
