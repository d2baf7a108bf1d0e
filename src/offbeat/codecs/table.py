"""The named codecs, and what they cost in bytes. No torch here: prices and simulations read this table.

A codec is one class (`Coder`) and one row. There are two kinds. A *per-transfer* codec rounds numbers, so any chunk of
a schedule can be sent with it: a reduce hop decodes, adds and encodes again. A *per-tensor* codec needs the whole
tensor and has a schedule of its own: each rank's payload is all-gathered, or two small factors are all-reduced.

Laws. `size_bytes(items)` is exact, for every number of items. For a per-transfer codec it adds up over cuts at
multiples of `BLOCK` items. `str(parse(line)) == line`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from offbeat import plugins
from offbeat import spec as grammar
from offbeat.errors import RequestError, unknown
from offbeat.spec import Param, choice, parse_count, parse_number

if TYPE_CHECKING:
    from offbeat.codecs.coder import Coder

PER_TRANSFER, PER_TENSOR = "per transfer", "per tensor"
BLOCK = 256  # items that share a scale
SIGN_BLOCK = 32  # the same for signs: with more, numbers that are nearly 0 take the size of their neighbours
ITEM_BYTES = 4  # of the fp32 numbers that are coded
ACROSS = "across"  # `codec=int8@across`: between hosts only
AUTO = "auto"  # `codec=auto`: what is fastest of these, or nothing
# Those that train as well as no codec. Coarser ones can cost accuracy, so `auto` takes them only if they are named.
AUTO_LINES = ("bf16", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecRow:
    """One codec that a user can name.

    `size_bytes(items, **options)` is the size of a payload. `coder` is the class, as `module:name`, so that the table
    loads without torch; it is called with the options. `vectors` are the lengths of what a payload consists of, where
    payloads of different ranks can be added up; without it a per-tensor payload is gathered. `error` states in words
    how far a decoded number can be from the encoded one, `not_finite` what becomes of NaN and Inf. A `biased` codec
    converges in general only with error feedback; stochastic rounding takes the bias away.
    """

    name: str
    summary: str
    kind: str
    biased: bool
    size_bytes: Callable[..., int]
    coder: str
    error: str
    not_finite: str
    params: tuple[Param, ...] = ()
    examples: tuple[str, ...] = ()
    vectors: Callable[..., tuple[int, ...]] | None = None  # (items, **options): what ranks can add up, in order
    sends_numbers: bool = False  # as they are, and leaves out others
    sends_velocity: bool = False  # where the optimizer's momentum is known: see `collectives.momentum`
    spares_biases: bool = False  # tensors of one dimension are sent as they are, where shapes are known

    def usage(self) -> str:
        """How it is written: `top-k:SHARE`."""
        text, mark = self.name, ":"
        for param in self.params:
            text += f"{mark}{param.name.upper()}" if param.required else f"[{mark}{param.name.upper()}]"
            mark = ","
        return text


@dataclass(frozen=True, slots=True)
class Codec:
    """A row with its options, as a line names it."""

    row: CodecRow
    options: dict[str, Any] = field(hash=False)
    line: str

    def __str__(self) -> str:
        return self.line

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def kind(self) -> str:
        return self.row.kind

    @property
    def biased(self) -> bool:
        return self.row.biased and self.options.get("rounding") != "stochastic"

    def size_bytes(self, items: int) -> int:
        """The size of the payload of so many fp32 numbers."""
        return self.row.size_bytes(items, **self.options)

    def vectors(self, items: int) -> tuple[int, ...] | None:
        """The lengths of the fp32 vectors of a payload, where those of all ranks can be added up."""
        return None if self.row.vectors is None else self.row.vectors(items, **self.options)

    def ratio(self, items: int) -> float:
        """How many times smaller the payload is than the numbers."""
        return ITEM_BYTES * items / max(1, self.size_bytes(items))

    def coder(self) -> Coder:
        """What encodes and decodes; it keeps scratch memory, so one for each thread."""
        module, _, name = self.row.coder.partition(":")
        coder: Coder = getattr(import_module(module), name)(**self.options)
        return coder


# --- sizes ----------------------------------------------------------------------------------------------------------


def _blocks(items: int, block: int = BLOCK) -> int:
    return -(-items // block)


def int4_bytes(items: int, rounding: str = "nearest") -> int:
    """A scale and two numbers a byte; the last block has a byte more where it is odd."""
    return 4 * _blocks(items) + -(-items // 2)


def kept(items: int, share: float) -> int:
    """How many of so many items a share is: at least one, where there is one."""
    return min(items, max(1, math.ceil(share * items * (1 - 1e-12)))) if items else 0  # 0.07 of 100 are 7, not 8


def matrix_shape(items: int) -> tuple[int, int]:
    """The matrix that a flat tensor is seen as, for low-rank codecs: as square as whole rows of 16 items allow."""
    if not items:
        return 0, 0
    columns = -(-max(1, math.isqrt(items)) // 16) * 16
    return -(-items // columns), columns


def factor_items(items: int, rank: int) -> tuple[int, int]:
    """How many numbers the left and the right factor of that matrix have."""
    rows, columns = matrix_shape(items)
    width = min(rank, rows, columns)
    return rows * width, columns * width


def _parse_share(text: str) -> float:
    return parse_number(text, lambda share: 0 < share <= 1, "expected a share above 0 and up to 1, like 0.01")


_ROUNDING = Param(
    name="rounding",
    read=choice("nearest", "stochastic"),
    positional=True,
    default="nearest",
    help="nearest (default), or stochastic: up or down by chance, so that the mean is exact",
)
_SHARE = Param(
    name="share", read=_parse_share, positional=True, required=True, help="share of the items to send, like 0.01"
)

CODECS: dict[str, CodecRow] = {
    row.name: row
    for row in (
        CodecRow(
            name="bf16",
            summary="the upper 16 bits of a float, rounded: the range of fp32, 8 bits of precision",
            kind=PER_TRANSFER,
            biased=True,
            size_bytes=lambda items: 2 * items,
            coder="offbeat.codecs.rounding:Bf16",
            error="at most 2^-8 of the number, plus 2^-134",
            not_finite="NaN stays NaN, Inf stays Inf",
            examples=("bf16",),
        ),
        CodecRow(
            name="fp16",
            summary="half precision: 11 bits of precision, largest number 65504",
            kind=PER_TRANSFER,
            biased=True,
            size_bytes=lambda items: 2 * items,
            coder="offbeat.codecs.rounding:Fp16",
            error="at most 2^-11 of the number, plus 2^-25; larger numbers than 65504 are sent as 65504",
            not_finite="NaN stays NaN, Inf stays Inf",
            examples=("fp16",),
        ),
        CodecRow(
            name="int8",
            summary="whole numbers from -127 to 127 and one fp32 scale for each block of 256",
            kind=PER_TRANSFER,
            biased=True,
            size_bytes=lambda items, rounding="nearest": items + 4 * _blocks(items),
            coder="offbeat.codecs.blocks:Int8",
            error="at most 1/254 + 2^-22 of the block's largest (stochastic: 1/127 + 2^-22)",
            not_finite="a block with NaN, Inf or a number above 3e38 is decoded as NaN",
            params=(_ROUNDING,),
            examples=("int8", "int8:stochastic"),
        ),
        CodecRow(
            name="int4",
            summary="whole numbers from -7 to 7, two in a byte, and one fp32 scale for each block of 256",
            kind=PER_TRANSFER,
            biased=True,
            size_bytes=int4_bytes,
            coder="offbeat.codecs.blocks:Int4",
            error="at most 1/14 + 2^-22 of the block's largest (stochastic: 1/7 + 2^-22)",
            not_finite="a block with NaN, Inf or a number above 3e38 is decoded as NaN",
            params=(_ROUNDING,),
            examples=("int4", "int4:stochastic"),
        ),
        CodecRow(
            name="1-bit",
            summary="the sign of each number, and the mean size of each block of 32 (Seide et al. 2014)",
            kind=PER_TENSOR,
            biased=True,
            size_bytes=lambda items: 2 * _blocks(items, SIGN_BLOCK) + -(-items // 8),
            coder="offbeat.codecs.sign:OneBit",
            error="the norm of a block's error is at most the norm of the block",
            not_finite="a block with NaN or Inf is decoded as NaN",
            spares_biases=True,
            sends_velocity=True,
            examples=("1-bit",),
        ),
        CodecRow(
            name="top-k",
            summary="the share of the items that are largest, each with its place; the threshold is from a sample",
            kind=PER_TENSOR,
            biased=True,
            size_bytes=lambda items, share: 8 * kept(items, share),
            coder="offbeat.codecs.sparse:TopK",
            error="what is sent is exact; what is not sent is 0",
            not_finite="a tensor with NaN or Inf is decoded with NaN in every place that is sent",
            params=(_SHARE,),
            sends_velocity=True,
            sends_numbers=True,
            examples=("top-k:0.01",),
        ),
        CodecRow(
            name="random-k",
            summary="a random share of the items, the same places on all ranks, so that only values are sent",
            kind=PER_TENSOR,
            biased=True,
            size_bytes=lambda items, share: 4 * kept(items, share),
            coder="offbeat.codecs.sparse:RandomK",
            error="what is sent is exact; what is not sent is 0",
            not_finite="NaN and Inf are sent when their place is; until then they stay out of the residual",
            params=(_SHARE,),
            sends_velocity=True,
            sends_numbers=True,
            examples=("random-k:0.01",),
            vectors=lambda items, share: (kept(items, share),),
        ),
        CodecRow(
            name="power-sgd",
            summary="the tensor as a matrix of low rank, by one power iteration with a warm start (Vogels et al. 2019)",
            kind=PER_TENSOR,
            biased=True,
            size_bytes=lambda items, rank: 4 * sum(factor_items(items, rank)),
            coder="offbeat.codecs.low_rank:PowerSgd",
            error="the norm of the error is at most the norm of the tensor",
            not_finite="a tensor with NaN or Inf is decoded as NaN",
            params=(
                Param(name="rank", read=parse_count, positional=True, required=True, help="rank of the matrix, like 4"),
            ),
            examples=("power-sgd:4",),
            vectors=factor_items,
        ),
    )
}


# Numbers as they are, where ranks send whole vectors to each other: no row that a user could name.
NONE = Codec(
    CodecRow(
        name="fp32",
        summary="the numbers as they are",
        kind=PER_TENSOR,
        biased=False,
        size_bytes=lambda items: ITEM_BYTES * items,
        coder="offbeat.codecs.rounding:Fp32",
        error="none",
        not_finite="sent as they are",
    ),
    {},
    "fp32",
)


@cache
def parse(line: str) -> Codec:
    """The codec that a line like `int8` or `top-k:0.01` names; a `RequestError` names what is allowed."""
    spec = grammar.parse(line)
    if spec.name not in CODECS:
        plugins.load_known()
    if spec.name not in CODECS:
        raise unknown("codec", spec.name, CODECS)
    row = CODECS[spec.name]
    return Codec(row, grammar.bind(spec, row.params), str(spec))


class CodecOption(NamedTuple):
    """What a strategy's `codec=` says: one codec, or several of which a running group takes what is fastest."""

    codecs: tuple[Codec, ...]
    across: bool = False  # between hosts only
    auto: bool = False

    def only(self) -> Codec:
        """The one codec; a `RequestError` where it is chosen later."""
        if self.auto:
            raise RequestError(
                f"codec={AUTO} is resolved only in a running process group; name a codec, like {AUTO_LINES[0]}"
            )
        return self.codecs[0]


def read_option(text: str) -> CodecOption:
    """`int8`, `int8@across`, `auto`, or `auto:bf16+int8` to choose from these only."""
    name, _, lines = text.partition(":")
    if name == AUTO:
        return CodecOption(tuple(parse(line) for line in (lines.split("+") if lines else AUTO_LINES)), auto=True)
    codec, across = split_place(text)
    return CodecOption((codec,), across)


def read_codec(text: str) -> Codec:
    """One codec for all that is sent, like `int8`."""
    option = read_option(text)
    if option.auto or option.across:
        raise RequestError(f"expected one codec for all links, like int8; got '{text}'")
    return option.only()


def read_rounding(text: str) -> Codec:
    """A codec for numbers that are sent whole each time, without a residual: one that rounds, like `bf16`."""
    codec = read_codec(text)
    if codec.kind != PER_TRANSFER or not codec.biased:
        rounds = ", ".join(row.name for row in CODECS.values() if row.kind == PER_TRANSFER)
        raise RequestError(f"weights are sent whole, by a codec that rounds to the nearest ({rounds}); got '{text}'")
    return codec


def split_place(text: str) -> tuple[Codec, bool]:
    """`int8@across` is int8, and True: only between hosts."""
    line, at, place = text.partition("@")
    if at and place != ACROSS:
        raise RequestError(f"expected '@{ACROSS}' (between hosts only) after the codec; got '@{place}'")
    codec = parse(line)
    if at and codec.kind == PER_TENSOR:
        raise RequestError(f"{codec.name} codes whole tensors, not single links; leave out '@{place}'")
    return codec, bool(at)


def add_row(row: CodecRow) -> None:
    """Into the table, if its examples parse and encode and decode as it says; a `RequestError` says what is wrong."""
    if row.kind not in (PER_TRANSFER, PER_TENSOR):
        raise RequestError(f"codec '{row.name}': its kind is '{PER_TRANSFER}' or '{PER_TENSOR}'; got '{row.kind}'")
    plugins.check_new(row.name, CODECS, row.examples)
    CODECS[row.name] = row
    parse.cache_clear()
    try:
        for line in row.examples:
            check_sizes(parse(line))
    except BaseException:
        del CODECS[row.name]
        parse.cache_clear()
        raise


_TRIED = (0, 1, 2, 255, 256, 257, 511, 512, 1000)


def check_sizes(codec: Codec) -> None:
    """That sizes are whole numbers, and add up over cuts at blocks where chunks are coded by themselves."""
    for items in _TRIED:
        size = codec.size_bytes(items)
        if not isinstance(size, int) or size < 0 or (size > 0) != (items > 0):
            raise RequestError(f"codec '{codec}': the payload of {items} items cannot have {size} bytes")
        parts = (items // BLOCK * BLOCK, items % BLOCK)
        if codec.kind == PER_TRANSFER and size != sum(codec.size_bytes(part) for part in parts):
            raise RequestError(f"codec '{codec}': the size of {items} items is not that of their blocks of {BLOCK}")


# --- whether it pays ------------------------------------------------------------------------------------------------


def gain(ratio: float, codec_bytes_per_s: float, link_bytes_per_s: float) -> float:
    """How many times faster a coded transfer is, where coding and sending take turns: below 1 it is slower."""
    return (1 / link_bytes_per_s) / (1 / (ratio * link_bytes_per_s) + 1 / codec_bytes_per_s)


def least_speed(ratio: float, link_bytes_per_s: float) -> float:
    """What a codec must do, in bytes of fp32 a second, to gain on a link: B / (1 - 1/r)."""
    return link_bytes_per_s / (1 - 1 / ratio) if ratio > 1 else math.inf


class Figures(NamedTuple):
    """A codec in an all-reduce: how much less is sent, and how fast it codes, in bytes of plain fp32 that are sent."""

    ratio: float
    bytes_per_s: float

    @property
    def break_even(self) -> float:
        """The bandwidth above which it loses, in bytes a second."""
        return most_bandwidth(self.ratio, self.bytes_per_s)


def coding_s(codec: Codec, ranks: int, encode_s: float, decode_s: float, *, gathers: bool = False) -> float:
    """What a rank spends on coding in an all-reduce, from the seconds to encode and to decode the whole tensor.

    A ring encodes every chunk once and decodes all but its own twice; what is gathered is decoded for every rank.
    """
    if gathers or (codec.kind == PER_TENSOR and codec.row.vectors is None):
        return encode_s + ranks * decode_s
    return encode_s + (2 * (ranks - 1) / ranks if codec.kind == PER_TRANSFER else 1) * decode_s


def all_reduce_figures(codec: Codec, ranks: int, items: int, encode_s: float, decode_s: float) -> Figures:
    """Of a tensor of so many items in an all-reduce that sends the fewest bytes."""
    plain = 2 * (ranks - 1) / ranks * ITEM_BYTES * items
    gathers = codec.kind == PER_TENSOR and codec.row.vectors is None
    sent = codec.size_bytes(items) * ((ranks - 1) if gathers else 2 * (ranks - 1) / ranks)
    return Figures(plain / max(1.0, sent), plain / coding_s(codec, ranks, encode_s, decode_s))


def most_bandwidth(ratio: float, codec_bytes_per_s: float) -> float:
    """The break-even bandwidth: on a faster link the codec loses. c (1 - 1/r)."""
    return max(0.0, codec_bytes_per_s * (1 - 1 / ratio))
