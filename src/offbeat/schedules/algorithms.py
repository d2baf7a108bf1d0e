"""The named collectives, and the table that lists them.

To add one, write its function over a list of ranks and a list of chunks (from `phases`), and its row in
the table below; the command line, the proof over all rank counts and the ranking read the table. A row from outside
comes in by `offbeat.register_schedule`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from offbeat import codecs, plugins
from offbeat import spec as grammar
from offbeat.errors import RequestError, nearest, unknown
from offbeat.schedules.coding import one_after_the_other, with_codec
from offbeat.schedules.ir import Schedule, Steps
from offbeat.schedules.phases import (
    Chunks,
    Phase,
    Ranks,
    and_back,
    backwards,
    central_gather,
    central_reduce,
    direct_all_gather,
    direct_reduce_scatter,
    doubling_all_gather,
    exchange,
    halving_doubling,
    halving_reduce_scatter,
    in_order_tree,
    mirrored,
    pieces_of,
    piped_tree,
    power_of_two_below,
    ring_all_gather,
    ring_reduce_scatter,
    sends,
    staggered,
    together,
    tree_reduce,
    two_level_exchange,
    two_level_gather,
    two_level_reduce,
    two_level_reduce_scatter,
    whole_exchange,
)
from offbeat.schedules.proof import ROOTED, verify
from offbeat.spec import Param, choice, format_shape, parse_count, parse_shape
from offbeat.synonyms import unknown_strategy

Shape = tuple[int, ...]
Orders = tuple[tuple[int, ...], ...]

# --- all-reduce -----------------------------------------------------------------------------------------------


def _on_pieces(phase: Callable[..., Phase]) -> Callable[[Ranks, Chunks], Phase]:
    return lambda ranks, chunks: phase(ranks, pieces_of(chunks, len(ranks)))


def ring(ranks: Ranks, chunks: Chunks, order: Orders | None = None, parts: int = 1) -> Phase:
    """`parts` are the chunks of each piece: across hosts one goes on while the next is on its way."""
    orders = order or (tuple(range(len(ranks))),)
    rings = []
    for share, visited in zip(pieces_of(chunks, len(orders)), orders, strict=True):
        pieces = pieces_of(share, len(ranks))
        along = ranks[list(visited)]
        rings.append(ring_reduce_scatter(along, pieces) + ring_all_gather(along, pieces))
    return together(rings)


def double_tree(ranks: Ranks, chunks: Chunks, per_tree: int = 16) -> Phase:
    """Half of the data over each of two trees; an inner rank of one is a leaf of the other.

    `per_tree` is half of the chunks, and is known by them.
    """
    one, other = pieces_of(chunks, 2)
    swapped = ranks[::-1] if len(ranks) % 2 == 0 else np.roll(ranks, 1)
    parents = in_order_tree(len(ranks))
    return together([piped_tree(ranks, one, parents), piped_tree(swapped, other, parents)])


def multiring(ranks: Ranks, chunks: Chunks, shape: Shape) -> Phase:
    """Reduce-scatter along the first side, all-reduce over the others, all-gather along the first."""
    at = ranks.reshape(-1, shape[0])  # a row: consecutive ranks
    pieces = pieces_of(chunks, shape[0])
    rows = [ring_reduce_scatter(row, pieces) for row in at]
    back = [ring_all_gather(row, pieces) for row in at]
    across = zip(at.T, pieces, strict=True) if len(shape) > 1 else ()
    columns = [multiring(column, piece, shape[1:]) for column, piece in across]
    return together(rows) + together(columns) + together(back)


def hierarchical(
    ranks: Ranks,
    chunks: Chunks,
    shape: Shape,
    form: str = "scatter",
    inner: str | None = None,
    outer: str | None = None,
    parts: int = 1,
) -> Phase:
    if parts > 1:
        shares = pieces_of(chunks, parts)
        return staggered([hierarchical(ranks, share, shape, form, inner, outer) for share in shares])
    nodes = ranks.reshape(shape)
    across = _OUTER[outer or _OUTER_DEFAULT[form]].phase
    if form == "leader":
        reduce = together([_LEADER_INNER[inner or "tree"](node, chunks) for node in nodes])
        return reduce + across(nodes[:, 0], chunks) + backwards(reduce)
    scatter, gather = _SCATTER_INNER[inner or "ring"]
    pieces = pieces_of(chunks, shape[1])
    return (
        together([scatter(node, pieces) for node in nodes])
        + together([across(peers, piece) for peers, piece in zip(nodes.T, pieces, strict=True)])
        + together([gather(node, pieces) for node in nodes])
    )


def fold(ranks: Ranks, chunks: Chunks, folded: tuple[int, ...], parts: int = 1) -> Phase:
    """A ring of all ranks but some, which own nothing: they send to the owners, and receive the sums from them."""
    if len(ranks) == 1:
        return []
    out = ranks[list(folded)]
    inside = np.array([rank for rank in ranks if rank not in out], np.int32)
    phases = []
    for part in pieces_of(chunks, parts):
        pieces = pieces_of(part, len(inside))
        there: Phase = [np.concatenate([sends(np.full_like(inside, one), inside, pieces, reduce=True) for one in out])]
        phases.append(
            together([ring_reduce_scatter(inside, pieces), there]) + ring_all_gather(inside, pieces) + backwards(there)
        )
    return staggered(phases)


_SCATTER_INNER = {
    "ring": (ring_reduce_scatter, ring_all_gather),
    "halving": (halving_reduce_scatter, doubling_all_gather),
    "direct": (direct_reduce_scatter, direct_all_gather),
}
_LEADER_INNER = {"tree": tree_reduce, "central": central_reduce}
_OUTER_DEFAULT = {"scatter": "ring", "leader": "halving-doubling"}


# --- how many chunks; which shapes fit ---------------------------------------------------------------------------


def _one(ranks: int) -> int:
    return 1


def _as_many(ranks: int) -> int:
    return ranks


def _ring_chunks(ranks: int, order: Orders | None, parts: int) -> int:
    for visited in order or ():
        if sorted(visited) != list(range(ranks)):
            raise RequestError(
                f"a ring's order must visit each of the ranks 0..{ranks - 1} once; got {format_orders((visited,))}"
            )
    return parts * ranks * len(order or ((),))


def _shape_chunks(ranks: int, shape: Shape) -> int:
    if math.prod(shape) != ranks:
        wrong = f"a shape of {format_shape(shape)} has {math.prod(shape)} ranks, not {ranks}"
        sides = max(2, len(shape))
        fit = [format_shape(s) for s in islice((s for s in _factorisations(ranks) if len(s) == sides), 9)]
        if not fit:
            raise RequestError(f"{wrong}; {ranks} ranks have no shape of {sides} sides without a side of 1")
        raise RequestError(f"{wrong}; fitting: {', '.join(fit[:8])}{', ...' if len(fit) > 8 else ''}")
    return ranks


def _torus_chunks(ranks: int, shape: Shape) -> int:
    if len(shape) != 2:
        raise RequestError(f"a torus has two sides, like 4x8; got {format_shape(shape)} (multiring takes any number)")
    return _shape_chunks(ranks, shape)


def _hierarchical_chunks(ranks: int, shape: Shape, form: str, inner: str | None, outer: str | None, parts: int) -> int:
    if len(shape) != 2:
        raise RequestError(f"hierarchical needs NODESxPER_NODE, like 4x8; got {format_shape(shape)}")
    _shape_chunks(ranks, shape)
    known = _LEADER_INNER if form == "leader" else _SCATTER_INNER
    if inner is not None and inner not in known:
        raise RequestError(f"inner={inner}: the {form} form takes {' or '.join(known)}{nearest(inner, known)}")
    across = _OUTER[outer or _OUTER_DEFAULT[form]].chunks(shape[0])
    return parts * (across if form == "leader" else across * shape[1])


def _fold_chunks(ranks: int, folded: tuple[int, ...], parts: int) -> int:
    if ranks == 1:
        return parts
    if len(set(folded)) < len(folded) or not all(rank < ranks for rank in folded) or len(folded) >= ranks:
        raise RequestError(f"fold names some of the ranks 0..{ranks - 1}, like 2 or 2-3")
    return parts * (ranks - len(folded))


def _factorisations(number: int) -> Iterator[Shape]:
    """All ways to write a number as an ordered product of sides of 2 and more (1 as itself)."""
    yield (number,)
    for first in range(2, number // 2 + 1):
        if number % first == 0:
            for rest in _factorisations(number // first):
                yield (first, *rest)


def _splits(number: int) -> list[Shape]:
    return [(first, number // first) for first in range(1, number + 1) if number % first == 0]


def parse_orders(text: str) -> Orders:
    """`0-3-2-1` is one ring; `0-1-2+2-1-0` are two, with half of the data each."""
    words = [part.split("-") for part in text.split("+")]
    if not all(re.fullmatch(r"[0-9]{1,9}", word) for part in words for word in part):
        raise RequestError(f"an order of ranks is written like 0-3-2-1; got '{text[:40]}'")
    return tuple(tuple(int(word) for word in part) for part in words)


def _parse_ranks(text: str) -> tuple[int, ...]:
    (order,) = parse_orders(text.replace("+", " "))
    return order


def format_orders(orders: Orders) -> str:
    return "+".join("-".join(map(str, order)) for order in orders)


# --- the table ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One row: a collective algorithm a user can name.

    `chunks(ranks, **options)` says into how many chunks the vector is cut, and refuses options that do
    not fit; `phase(ranks, chunks, **options)` gives the steps; `shapes(ranks)` lists the ways to write it
    for that many ranks. `total_bytes(ranks, size_bytes)` is what all ranks together send, if the row claims it: the
    tests hold it to that. `examples` are lines for 4 ranks; `lineups` are lines that a command tries by itself.
    """

    name: str
    summary: str
    chunks: Callable[..., int]
    phase: Callable[..., Phase]
    collective: str = "all-reduce"
    params: tuple[Param, ...] = ()
    shapes: Callable[[int], list[str]] | None = None
    # Of a shape, or of none: the sides along which ranks are grouped, that of consecutive ranks first.
    consecutive_first: Callable[[int, Shape], Shape] = lambda ranks, shape: shape
    least_sides: int = 0  # shapes with fewer sides are another row in other words
    most_shapes: int | None = None  # of which a ranking tries those with the fewest steps
    total_bytes: Callable[[int, int], int] | None = None
    all_pairs: bool = False  # every rank sends to every other
    gathers: bool = False  # a rank gets the vectors of all others, coded or not, and adds them up in the order of ranks
    by_host: bool = False  # its shape is hosts x ranks of a host, if it is given none
    auto: int = 0  # whether `auto` considers it on one host, and before which others of the same price: the lower first
    examples: tuple[str, ...] = ()
    lineups: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def lines(self, ranks: int) -> list[str]:
        """Every line that names this algorithm for so many ranks."""
        return [self.name] if self.shapes is None else [f"{self.name}:{shape}" for shape in self.shapes(ranks)]


def _hierarchical_shapes(ranks: int) -> list[str]:
    splits = [format_shape(shape) for shape in _splits(ranks)]
    return [split + form for form in ("", ",outer=halving-doubling", ",leader") for split in splits]


def fewest_bytes(ranks: int, size_bytes: int) -> int:
    """What all ranks of an all-reduce must send together, and no more: 2M(P-1)."""
    return 2 * size_bytes * (ranks - 1)


_SHAPE = Param(
    name="shape",
    read=parse_shape,
    positional=True,
    required=True,
    help="lengths of the sides, like 4x8; the first side groups consecutive ranks",
)

_NODES = Param(name="shape", read=parse_shape, positional=True, required=True, help="NODESxPER_NODE")

_PLAIN = (
    Algorithm(
        name="central",
        summary="one rank reduces and sends the result back; all others share its port",
        chunks=_one,
        phase=and_back(central_reduce),
        total_bytes=fewest_bytes,
        auto=6,
        examples=("central",),
    ),
    Algorithm(
        name="direct",
        summary="every rank to every other, one piece each: 2 steps, for fully connected ranks",
        chunks=_as_many,
        phase=and_back(_on_pieces(direct_reduce_scatter)),
        total_bytes=fewest_bytes,
        all_pairs=True,
        auto=1,
        examples=("direct",),
    ),
    Algorithm(
        name="ring",
        summary="piece by piece around a ring: fewest bytes, 2(P-1) steps",
        chunks=_ring_chunks,
        phase=ring,
        params=(
            Param(name="order", read=parse_orders, help="ranks in ring order, like 0-3-2-1; join several rings with +"),
            Param(
                name="parts", read=parse_count, default=1, help="number of chunks per piece, pipelined independently"
            ),
        ),
        total_bytes=fewest_bytes,
        auto=3,
        examples=("ring", "ring:order=0-2-1-3", "ring:parts=2"),
        lineups={"race": ("ring",), "replay": ("ring",)},
    ),
    Algorithm(
        name="halving-doubling",
        summary="exchange halves, then double: fewest bytes, 2 log2 P steps (extra ranks fold in: +2)",
        chunks=power_of_two_below,
        phase=halving_doubling,
        consecutive_first=lambda ranks, shape: (2,) * (ranks.bit_length() - 1) if ranks.bit_count() == 1 else (),
        total_bytes=fewest_bytes,
        auto=2,
        examples=("halving-doubling",),
    ),
    Algorithm(
        name="tree",
        summary="binomial tree up and down: few steps, the whole vector in each; for small sizes",
        chunks=_one,
        phase=and_back(tree_reduce),
        total_bytes=fewest_bytes,
        auto=4,
        examples=("tree",),
    ),
    Algorithm(
        name="double-tree",
        summary="two binary trees, each with half of the data, pipelined in chunks",
        chunks=lambda ranks, per_tree: 2 * per_tree,
        phase=double_tree,
        consecutive_first=lambda ranks, shape: (),  # what it takes is no shape
        params=(
            Param(
                name="per-tree",
                read=parse_count,
                positional=True,
                default=16,
                help="number of pipelined chunks per tree (default 16)",
            ),
        ),
        shapes=lambda ranks: ["4", "16", "64"],
        total_bytes=fewest_bytes,
        auto=5,
        examples=("double-tree", "double-tree:4"),
    ),
)

_WHOLE = Algorithm(
    name="all-to-all",
    summary="every rank sends its whole vector to every other, and each adds up all of them: 1 step, P/2 times the "
    "bytes of ring",
    chunks=_one,
    phase=whole_exchange,
    consecutive_first=lambda ranks, shape: (),
    total_bytes=lambda ranks, size_bytes: size_bytes * ranks * (ranks - 1),
    all_pairs=True,
    gathers=True,
    examples=("all-to-all",),
)

_FOLD = Algorithm(
    name="fold",
    summary="a ring that leaves out ranks on slow links; they exchange their data with the ranks of the ring directly",
    chunks=_fold_chunks,
    phase=fold,
    consecutive_first=lambda ranks, shape: (),
    params=(
        Param(
            name="folded",
            read=_parse_ranks,
            positional=True,
            required=True,
            help="ranks to leave out of the ring, like 2-3",
        ),
        Param(name="parts", read=parse_count, default=1, help="number of pipelined parts (default 1)"),
    ),
    shapes=lambda ranks: [str(ranks - 1), f"{ranks - 1},parts=4"],
    total_bytes=fewest_bytes,
    examples=("fold:3", "fold:1-2,parts=2"),
)

# What can run across the nodes of `hierarchical`: every all-reduce that needs no shape, with its defaults.
_OUTER = {
    row.name: Algorithm(
        name=row.name,
        summary=row.summary,
        chunks=lambda ranks, row=row: row.chunks(ranks, **{p.name.replace("-", "_"): p.default for p in row.params}),
        phase=row.phase,
    )
    for row in _PLAIN
}

_SHAPED = (
    Algorithm(
        name="torus",
        summary="reduce-scatter along rows, all-reduce along columns, all-gather along rows: ring's bytes, fewer steps",
        chunks=_torus_chunks,
        phase=multiring,
        params=(_SHAPE,),
        shapes=lambda ranks: [format_shape(shape) for shape in _splits(ranks)],
        total_bytes=fewest_bytes,
        examples=("torus:2x2",),
    ),
    Algorithm(
        name="multiring",
        summary="the torus in any number of dimensions (PowerAI DDL): 2 sum(side - 1) steps",
        chunks=_shape_chunks,
        phase=multiring,
        params=(_SHAPE,),
        shapes=lambda ranks: [format_shape(shape) for shape in _factorisations(ranks)],
        least_sides=3,
        most_shapes=24,
        total_bytes=fewest_bytes,
        examples=("multiring:2x2",),
    ),
    Algorithm(
        name="hierarchical",
        by_host=True,
        summary="reduce inside nodes, all-reduce across nodes, distribute inside; ',leader': one rank per node",
        chunks=_hierarchical_chunks,
        phase=hierarchical,
        params=(
            _NODES,
            Param(
                name="form",
                read=choice("scatter", "leader"),
                positional=True,
                default="scatter",
                help="scatter (default): every rank communicates its piece; leader: one rank per node communicates "
                "for all",
            ),
            Param(
                name="inner",
                read=str,
                help="inside a node: ring (default), halving, direct; leader: tree (default), central",
            ),
            Param(
                name="outer",
                read=choice(*_OUTER),
                help=f"across nodes: {', '.join(_OUTER)} (default ring; leader: halving-doubling)",
            ),
            Param(
                name="parts",
                read=parse_count,
                default=1,
                help="number of pipelined parts: one is inside the nodes while another crosses nodes (default 1)",
            ),
        ),
        shapes=_hierarchical_shapes,
        consecutive_first=lambda ranks, shape: shape[::-1],
        total_bytes=fewest_bytes,
        examples=("hierarchical:2x2", "hierarchical:2x2,leader", "hierarchical:2x2,parts=3"),
    ),
)


def _exchanges(steps: Callable[[int], list[list[int]]]) -> Callable[[Ranks, Chunks], Phase]:
    return lambda ranks, chunks: [exchange(ranks, distances) for distances in steps(len(ranks)) if distances]


# The collectives that the runtime needs beside all-reduce: collective, name, summary, chunks, phase.
_OTHERS: tuple[tuple[str, str, str, Callable[[int], int], Callable[..., Phase]], ...] = (
    ("reduce-scatter", "ring", "P-1 steps around a ring", _as_many, _on_pieces(ring_reduce_scatter)),
    (
        "reduce-scatter", "halving", "floor(log2 P) steps (+2 past a power of two)", _as_many,
        _on_pieces(halving_reduce_scatter),
    ),
    ("reduce-scatter", "direct", "1 step, every rank to every other", _as_many, _on_pieces(direct_reduce_scatter)),
    ("all-gather", "ring", "P-1 steps around a ring", _as_many, _on_pieces(ring_all_gather)),
    (
        "all-gather", "doubling", "floor(log2 P) steps (+2 past a power of two)", _as_many,
        _on_pieces(doubling_all_gather),
    ),
    ("all-gather", "direct", "1 step, every rank to every other", _as_many, _on_pieces(direct_all_gather)),
    ("reduce", "tree", "binomial tree, ceil(log2 P) steps", _one, tree_reduce),
    ("reduce", "central", "1 step, every rank to the root", _one, central_reduce),
    ("broadcast", "tree", "binomial tree, ceil(log2 P) steps", _one, mirrored(tree_reduce)),
    ("broadcast", "central", "1 step, the root to every rank", _one, mirrored(central_reduce)),
    ("gather", "direct", "1 step, every rank to the root", _as_many, central_gather),
    ("scatter", "direct", "1 step, the root to every rank", _as_many, mirrored(central_gather)),
    (
        "all-to-all", "direct", "1 step, every rank to every other", lambda ranks: ranks * ranks,
        _exchanges(lambda ranks: [list(range(1, ranks))]),
    ),
    (
        "all-to-all", "pairwise", "P-1 steps, one partner in each", lambda ranks: ranks * ranks,
        _exchanges(lambda ranks: [[distance] for distance in range(1, ranks)]),
    ),
)  # fmt: skip


def _on_nodes(phase: Callable[..., Phase], *, pieces: bool = False) -> Callable[..., Phase]:
    def on_nodes(ranks: Ranks, chunks: Chunks, shape: Shape) -> Phase:
        return phase(ranks.reshape(shape), pieces_of(chunks, len(ranks)) if pieces else chunks)

    return on_nodes


def _node_chunks(chunks: Callable[[int], int]) -> Callable[..., int]:
    def of_shape(ranks: int, shape: Shape) -> int:
        if len(shape) != 2:
            raise RequestError(f"hierarchical needs NODESxPER_NODE, like 4x8; got {format_shape(shape)}")
        _shape_chunks(ranks, shape)
        return chunks(ranks)

    return of_shape


# The same on two levels: collective, summary, chunks, phase.
_TWO_LEVEL: tuple[tuple[str, str, Callable[[int], int], Callable[..., Phase]], ...] = (
    (
        "reduce-scatter", "add up inside nodes, then across: 2 steps, each sum crosses nodes once", _as_many,
        _on_nodes(two_level_reduce_scatter, pieces=True),
    ),
    (
        "all-gather", "across nodes, then inside: 2 steps, each piece enters a node once", _as_many,
        _on_nodes(mirrored(two_level_reduce_scatter), pieces=True),
    ),
    ("reduce", "inside nodes, then over a tree across nodes", _one, _on_nodes(two_level_reduce)),
    ("broadcast", "over a tree across nodes, then inside", _one, _on_nodes(mirrored(two_level_reduce))),
    ("gather", "inside nodes, then one message from each node", _as_many, _on_nodes(two_level_gather)),
    ("scatter", "one message to each node, then inside", _as_many, _on_nodes(mirrored(two_level_gather))),
    (
        "all-to-all", "3 steps, one message between each two nodes", lambda ranks: ranks * ranks,
        _on_nodes(lambda nodes, chunks: two_level_exchange(nodes)),
    ),
)  # fmt: skip


ALGORITHMS: dict[tuple[str, str], Algorithm] = {
    (row.collective, row.name): row
    for row in (
        *_PLAIN,
        *_SHAPED,
        _FOLD,
        _WHOLE,
        *(
            Algorithm(collective=of, name=n, summary=s, chunks=c, phase=p, all_pairs=n == "direct")
            for of, n, s, c, p in _OTHERS
        ),
        *(
            Algorithm(
                collective=of,
                name="hierarchical",
                summary=s,
                chunks=_node_chunks(c),
                phase=p,
                params=(_NODES,),
                shapes=lambda ranks: [format_shape(shape) for shape in _splits(ranks)],
                consecutive_first=lambda ranks, shape: shape[::-1],
                by_host=True,
                examples=("hierarchical:2x2",),
            )
            for of, s, c, p in _TWO_LEVEL
        ),
    )
}
COLLECTIVES = tuple(dict.fromkeys(collective for collective, _ in ALGORITHMS))


EXAMPLES_FOR = 4  # ranks: every example line of a row can run on so many
_TRIED = (1, 2, 3, 4, 5, 6, 8)  # ranks with which a new row is built and proved
BASELINE = "ring"  # with what the others are compared

MOST_PLACES = 64_000_000  # ranks * chunks: a ring on 8,000 ranks, two gigabytes of transfers


def algorithms(collective: str = "all-reduce") -> dict[str, Algorithm]:
    """The rows of one collective, by name."""
    if collective not in COLLECTIVES:
        raise unknown("collective", collective, COLLECTIVES)
    return {name: row for (of, name), row in ALGORITHMS.items() if of == collective}


def find(name: str, collective: str = "all-reduce") -> Algorithm:
    """The row of this name, also from a plugin; a `RequestError` names what is near."""
    if name not in algorithms(collective):
        plugins.load_known()
    rows = algorithms(collective)
    if name not in rows:
        raise unknown_strategy(f"{collective} algorithm", name, rows)
    return rows[name]


def auto_lines() -> tuple[str, ...]:
    """What `auto` considers on one host, where everybody reaches everybody alike and shapes only add steps."""
    plugins.load_known()
    return tuple(row.name for row in sorted(algorithms().values(), key=lambda row: row.auto) if row.auto)


def add_row(row: Algorithm) -> None:
    """Into the table, if every line of it builds and is proved for some rank counts; a `ScheduleError` shows where not.

    Whether its name is free among all strategies is for `strategy.register_schedule` to check.
    """
    algorithms(row.collective)  # refuses an unknown collective
    ALGORITHMS[row.collective, row.name] = row
    try:
        for line in row.examples:
            verify(build(line, ranks=EXAMPLES_FOR, collective=row.collective))
        for ranks in _TRIED:
            for line in row.lines(ranks):
                schedule = build(line, ranks=ranks, collective=row.collective)
                verify(schedule)
                _check_bytes(row, schedule)
    except BaseException:
        del ALGORITHMS[row.collective, row.name]
        raise


def _check_bytes(row: Algorithm, schedule: Schedule) -> None:
    if row.total_bytes is not None:
        size = 16 * schedule.chunks
        sent = sum(len(step) for step in schedule.steps) * 16
        claimed = row.total_bytes(schedule.ranks, size)
        if sent != claimed:
            raise RequestError(
                f"'{schedule.name}' on {schedule.ranks} ranks sends {sent} bytes for {size}; its row claims {claimed}"
            )


_GATHERS = {"halving-doubling": "doubling"}  # by what all-gather an all-reduce gathers, where it has another name
CODEC = Param(
    name="codec",
    read=codecs.read_option,
    help="what is sent instead of fp32, like int8 or top-k:0.01; int8@across: between hosts only; auto: where it gains",
)


FEEDBACK = Param(
    name="feedback",
    read=grammar.choice("on", "off"),
    help="off: what a codec does not send is lost, instead of being added to the next gradient (for experiments)",
)


def params_of(row: Algorithm) -> tuple[Param, ...]:
    """What a line of this row can say: every all-reduce takes a codec."""
    return (*row.params, CODEC, FEEDBACK) if row.collective == "all-reduce" else row.params


def split_codec(spec: grammar.Spec) -> tuple[grammar.Spec, str]:
    """A line without what it says of codecs, and the codec's line, or nothing."""
    options = tuple(option for option in spec.options if option[0] not in (CODEC.name, FEEDBACK.name))
    return grammar.Spec(name=spec.name, args=spec.args, options=options), dict(spec.options).get(CODEC.name, "")


def keeps_residuals(spec: grammar.Spec) -> bool:
    """Whether what a codec does not send is added to the next gradient."""
    return dict(spec.options).get(FEEDBACK.name, "on") == "on"


def _take_codec(options: dict[str, Any]) -> codecs.CodecOption | None:
    """What a line's options say of codecs, taken out of them."""
    coded: codecs.CodecOption | None = options.pop(CODEC.name, None)
    if options.pop(FEEDBACK.name, None) == "off":
        if coded is None:
            raise RequestError("feedback=off needs a codec; add codec=, like codec=top-k:0.01")
        exact = [str(codec) for codec in coded.codecs if not codec.biased]
        if exact:
            raise RequestError(f"{exact[0]} has no error feedback that feedback=off could switch off; leave it out")
    return coded


def chunks_of(text: str, *, ranks: int, collective: str = "all-reduce") -> int:
    """Into how many chunks the schedule of a line cuts a vector; as for `build`, which see."""
    spec = grammar.parse(text)
    row = find(spec.name, collective)
    options: dict[str, Any] = grammar.bind(spec, params_of(row))
    try:
        coded = _take_codec(options)
        if coded is not None and not coded.auto and (row.gathers or coded.only().kind == codecs.PER_TENSOR):
            return _tensor_chunks(spec, coded.only(), ranks)
        return row.chunks(ranks, **options)
    except RequestError as error:
        raise RequestError(f"'{spec}': {error}") from None


def _tensor_chunks(spec: grammar.Spec, codec: codecs.Codec, ranks: int) -> int:
    bare, _ = split_codec(spec)
    vectors = codec.vectors(1)
    if vectors is not None and not find(bare.name).gathers:
        return len(vectors) * chunks_of(str(bare), ranks=ranks)
    return chunks_of(gather_line(bare, codec), ranks=ranks, collective="all-gather")


def gather_line(bare: grammar.Spec, codec: codecs.Codec) -> str:
    """The all-gather by which the payloads of a per-tensor codec go where an all-reduce of this line is asked for."""
    rows = algorithms("all-gather")
    name = "direct" if find(bare.name).gathers else _GATHERS.get(bare.name, bare.name)
    shaped = name in rows and bool(rows[name].params)
    if name not in rows or bare.options or len(bare.args) > shaped:
        fits = ", ".join(dict.fromkeys(row for row in (*_GATHERS, *rows) if row not in _GATHERS.values()))
        raise RequestError(
            f"{codec.name} gathers the payloads of all ranks, which '{bare}' does not do; use one of {fits}, "
            "with no option but the codec"
        )
    return str(grammar.Spec(name=name, args=bare.args))


def sends_to_all(text: str, collective: str = "all-reduce") -> bool:
    """Whether every rank sends to every other in the schedule of a line."""
    return find(grammar.parse(text).name, collective).all_pairs


def _from_root(ranks: Ranks, root: int, nodes: Shape | None) -> Ranks:
    """The ranks, the root first; on nodes its node first, and in each node the rank that has its place."""
    if nodes is None or not root:
        return np.roll(ranks, -root)
    return np.roll(ranks.reshape(nodes), (-(root // nodes[1]), -(root % nodes[1])), (0, 1)).ravel()


def _build_coded(
    spec: grammar.Spec,
    coded: codecs.CodecOption,
    shape: Shape | None,
    ranks: int,
    hosts: Sequence[int] | None,
) -> Schedule:
    try:
        codec = coded.only()
    except RequestError as error:
        raise RequestError(f"'{spec}': {error}") from None
    bare, _ = split_codec(spec)
    gathers = find(bare.name).gathers
    if gathers and coded.across:
        raise RequestError(f"'{spec}': it sends whole tensors to all ranks alike; leave out '@{codecs.ACROSS}'")
    if gathers or codec.kind == codecs.PER_TENSOR:
        vectors = codec.vectors(1)
        if gathers or vectors is None:
            plain = build(gather_line(bare, codec), ranks=ranks, collective="all-gather")
        else:
            plain = one_after_the_other(build(str(bare), ranks=ranks), len(vectors))
        return with_codec(plain, str(spec), codec)
    groups = None
    if coded.across:
        groups = [rank // shape[1] for rank in range(ranks)] if shape is not None else hosts
        if groups is None:
            raise RequestError(
                f"'{spec}': which ranks share a host is known only in a running group; write hierarchical:HOSTSxRANKS"
            )
    return with_codec(build(str(bare), ranks=ranks), str(spec), codec, groups)


def build(
    text: str, *, ranks: int, collective: str = "all-reduce", root: int = 0, hosts: Sequence[int] | None = None
) -> Schedule:
    """The schedule that a line like `ring` or `torus:4x2` names, for so many ranks.

    A `RequestError` says which word is wrong, or which shapes would fit. `root` is for collectives that have one.
    `hosts[r]` is the host of rank r, for a codec that is used between hosts only.
    """
    spec = grammar.parse(text)
    row = find(spec.name, collective)
    if ranks < 1:
        raise RequestError(f"ranks must be 1 or more; got {ranks}")
    if root and collective not in ROOTED:
        raise RequestError(f"{collective} has no root; got root {root}")
    options: dict[str, Any] = grammar.bind(spec, params_of(row))
    chunks = chunks_of(text, ranks=ranks, collective=collective)
    coded = _take_codec(options)
    if ranks * chunks > MOST_PLACES:
        raise RequestError(
            f"'{spec}' on {ranks} ranks has {chunks} chunks: too large (ranks * chunks is at most {MOST_PLACES})"
        )
    if coded is not None:
        return _build_coded(spec, coded, options.get("shape") if row.by_host else None, ranks, hosts)
    order = _from_root(np.arange(ranks, dtype=np.int32), root, options.get("shape") if row.by_host else None)
    steps = Steps(row.phase(order, np.arange(chunks, dtype=np.int32), **options))
    return Schedule(str(spec), collective, ranks, chunks, steps, root)
