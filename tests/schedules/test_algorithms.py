"""Every algorithm on every number of ranks, against the closed forms."""

from __future__ import annotations

import random
from math import ceil, log2, prod

import pytest

from offbeat.errors import RequestError
from offbeat.schedules import ALGORITHMS, algorithms, build, verify
from offbeat.schedules.ir import renumbered
from offbeat.schedules.phases import in_order_tree
from offbeat.schedules.proof import ROOTED
from offbeat.spec import parse, parse_shape
from schedules.oracle import all_reduce, bytes_sent, is_correct

COUNTS = [*range(1, 18), 32, 64]
EVERY_ROW = pytest.mark.parametrize(("collective", "name"), list(ALGORITHMS))


@EVERY_ROW
@pytest.mark.parametrize("ranks", COUNTS)
def test_every_algorithm_is_proved_in_every_shape(collective: str, name: str, ranks: int) -> None:
    for line in algorithms(collective)[name].lines(ranks):
        verify(build(line, ranks=ranks, collective=collective))


@pytest.mark.parametrize("ranks", COUNTS)
def test_hierarchical_is_proved_with_every_inner_and_outer_phase(ranks: int) -> None:
    outers = ("central", "direct", "ring", "halving-doubling", "tree", "double-tree")
    for nodes in (n for n in range(1, ranks + 1) if ranks % n == 0):
        for outer in outers:
            for inner in ("ring", "halving", "direct"):
                line = f"hierarchical:{nodes}x{ranks // nodes},inner={inner},outer={outer}"
                verify(build(line, ranks=ranks))
            for inner in ("tree", "central"):
                line = f"hierarchical:{nodes}x{ranks // nodes},leader,inner={inner},outer={outer}"
                verify(build(line, ranks=ranks))


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
@pytest.mark.parametrize("name", ["tree", "central"])
def test_any_rank_can_be_the_root(collective: str, name: str) -> None:
    for ranks in (2, 5, 8):
        for root in range(ranks):
            schedule = build(name, ranks=ranks, collective=collective, root=root)
            verify(schedule)
            assert is_correct(schedule)


@EVERY_ROW
def test_the_dumb_oracle_agrees_that_every_algorithm_is_correct(collective: str, name: str) -> None:
    for ranks in (1, 2, 3, 4, 6, 7, 8, 12):
        for line in algorithms(collective)[name].lines(ranks):
            assert is_correct(build(line, ranks=ranks, collective=collective)), line


@pytest.mark.parametrize("name", algorithms())
def test_on_numbers_every_all_reduce_gives_the_plain_sum(name: str) -> None:
    for ranks in (1, 2, 3, 6, 8):
        length = 2 * ranks + 3  # does not divide
        vectors = [[float((rank + 1) * (i + 1) ** 2) for i in range(length)] for rank in range(ranks)]
        plain = [sum(column) for column in zip(*vectors, strict=True)]
        for line in algorithms()[name].lines(ranks):
            assert all_reduce(build(line, ranks=ranks), vectors) == [plain] * ranks, line


# --- closed forms: steps, and bytes sent by each rank for a vector of M bytes --------------------------------------


def steps_of(line: str, ranks: int) -> int:
    return len(build(line, ranks=ranks).steps)


@pytest.mark.parametrize("ranks", [*range(2, 18), 32, 64])
def test_steps_are_those_of_the_literature(ranks: int) -> None:
    extra = 0 if log2(ranks).is_integer() else 2
    assert steps_of("central", ranks) == 2
    assert steps_of("direct", ranks) == 2
    assert steps_of("all-to-all", ranks) == 1
    assert steps_of("ring", ranks) == 2 * (ranks - 1)
    assert steps_of("halving-doubling", ranks) == 2 * int(log2(ranks)) + extra
    assert steps_of("tree", ranks) == 2 * ceil(log2(ranks))
    for name in ("torus", "multiring"):
        for line in algorithms()[name].lines(ranks):
            assert steps_of(line, ranks) == 2 * sum(side - 1 for side in parse_shape(parse(line).args[0]))
    for nodes in (n for n in range(1, ranks + 1) if ranks % n == 0):
        assert steps_of(f"hierarchical:{nodes}x{ranks // nodes}", ranks) == 2 * (ranks // nodes - 1) + 2 * (nodes - 1)


@pytest.mark.parametrize("ranks", [*range(2, 18), 32, 64])
def test_steps_of_the_other_collectives(ranks: int) -> None:
    extra = 0 if log2(ranks).is_integer() else 2
    expected = {
        ("reduce-scatter", "ring"): ranks - 1,
        ("reduce-scatter", "halving"): int(log2(ranks)) + extra,
        ("reduce-scatter", "direct"): 1,
        ("all-gather", "ring"): ranks - 1,
        ("all-gather", "doubling"): int(log2(ranks)) + extra,
        ("all-gather", "direct"): 1,
        ("reduce", "tree"): ceil(log2(ranks)),
        ("reduce", "central"): 1,
        ("broadcast", "tree"): ceil(log2(ranks)),
        ("broadcast", "central"): 1,
        ("gather", "direct"): 1,
        ("scatter", "direct"): 1,
        ("all-to-all", "direct"): 1,
        ("all-to-all", "pairwise"): ranks - 1,
    }
    for (collective, name), steps in expected.items():
        assert len(build(name, ranks=ranks, collective=collective).steps) == steps, (collective, name)
    assert set(expected) == {key for key in ALGORITHMS if key[0] != "all-reduce" and key[1] != "hierarchical"}


@pytest.mark.parametrize(("nodes", "each"), [(1, 4), (2, 1), (2, 2), (2, 4), (3, 2), (4, 3), (5, 1)])
def test_on_two_levels_nothing_crosses_nodes_twice(nodes: int, each: int) -> None:
    ranks = nodes * each
    crossing = {  # chunks
        "reduce-scatter": nodes * (nodes - 1) * each,
        "all-gather": nodes * (nodes - 1) * each,
        "reduce": nodes - 1,
        "broadcast": nodes - 1,
        "gather": (nodes - 1) * each,
        "scatter": (nodes - 1) * each,
        "all-to-all": ranks**2 - nodes * each**2,
    }
    assert set(crossing) == {of for of, name in ALGORITHMS if name == "hierarchical"} - {"all-reduce"}
    shuffled = random.Random(ranks).sample(range(ranks), ranks)
    for collective, chunks in crossing.items():
        for root in range(ranks) if collective in ROOTED else (0,):
            schedule = build(f"hierarchical:{nodes}x{each}", ranks=ranks, collective=collective, root=root)
            verify(schedule)
            verify(renumbered(schedule, shuffled))
            across = [move for step in schedule.steps for move in step if move.source // each != move.target // each]
            assert len(across) == chunks, (collective, root)


def test_steps_of_the_large_published_shapes() -> None:
    assert steps_of("torus:32x32", 1024) == 124
    assert steps_of("ring", 1024) == 2046
    assert steps_of("multiring:4x4x16", 256) == 42
    assert steps_of("ring", 256) == 510


@pytest.mark.parametrize("ranks", [*range(2, 18), 32, 64])
def test_bytes_per_rank_are_exactly_those_of_the_closed_forms(ranks: int) -> None:
    size = 64 * ranks * 3  # every chunk count divides it
    fewest = [2 * size * (ranks - 1) // ranks] * ranks
    assert bytes_sent(build("central", ranks=ranks), size) == [size * (ranks - 1)] + [size] * (ranks - 1)
    assert max(bytes_sent(build("tree", ranks=ranks), size)) == size * ceil(log2(ranks))
    for name in ("direct", "ring", "torus", "multiring", "hierarchical"):
        for line in algorithms()[name].lines(ranks):
            if "leader" not in line and "outer" not in line:
                assert bytes_sent(build(line, ranks=ranks), size) == fewest, line
    if log2(ranks).is_integer():
        assert bytes_sent(build("halving-doubling", ranks=ranks), size) == fewest


@pytest.mark.parametrize("name", algorithms())
@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 7, 8, 12, 13, 16])
def test_bytes_in_all_are_those_that_the_row_claims_for_lengths_that_do_not_divide(name: str, ranks: int) -> None:
    for size in (0, 1, ranks - 1, 1009):
        for line in algorithms()[name].lines(ranks):
            claimed = algorithms()[name].total_bytes
            assert claimed is not None
            assert sum(bytes_sent(build(line, ranks=ranks), size)) == claimed(ranks, size), (line, size)
            fewest = 2 * size * (ranks - 1)
            assert claimed(ranks, size) == (fewest * ranks // 2 if algorithms()[name].gathers else fewest)


def test_hierarchical_sends_a_share_of_a_share_across_nodes() -> None:
    nodes, per_node, size = 4, 8, 4 * 8 * 100
    schedule = build("hierarchical:4x8", ranks=32)
    across = 0
    for step in schedule.steps:
        across += sum(size // schedule.chunks for t in step if t.source == 0 and t.target // per_node)
    assert across == 2 * size // per_node * (nodes - 1) // nodes


# --- structure ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", range(1, 70))
def test_the_trees_are_binary_shallow_and_swap_leaves(count: int) -> None:
    parents = in_order_tree(count)
    children = [sum(parent == i for parent in parents) for i in range(count)]
    assert parents.count(-1) == 1
    assert max(children) <= 2
    assert all(children[i] == 0 for i in range(0, count, 2))
    depth = [0] * count
    for i in range(count):
        above = parents[i]
        while above >= 0:
            depth[i], above = depth[i] + 1, parents[above]
    assert max(depth) <= log2(count)
    swapped = [(count - 1 - i) if count % 2 == 0 else (i + 1) % count for i in range(count)]  # place in the other tree
    inner_in_both = [i for i in range(count) if children[i] and children[swapped[i]]]
    assert inner_in_both == []


def test_a_double_tree_pipelines_its_chunks() -> None:
    assert steps_of("double-tree:16", 8) == 2 * 3 + 16 - 1
    assert build("double-tree:16", ranks=8).chunks == 32


def test_the_torus_is_the_multiring_of_two_sides() -> None:
    assert build("torus:4x3", ranks=12).steps == build("multiring:4x3", ranks=12).steps
    assert build("multiring:7", ranks=7).steps == build("ring", ranks=7).steps


def test_a_ring_follows_its_order_and_several_rings_share_the_data() -> None:
    schedule = build("ring:order=0-2-1-3", ranks=4)
    verify(schedule)
    pairs = {(t.source, t.target) for step in schedule.steps for t in step}
    assert pairs == {(0, 2), (2, 1), (1, 3), (3, 0)}
    double = build("ring:order=0-1-2-3+3-2-1-0", ranks=4)
    verify(double)
    assert (double.chunks, len(double.steps)) == (8, 6)
    assert bytes_sent(double, 80) == [120] * 4


def test_halving_doubling_sends_most_bytes_to_the_nearest_rank() -> None:
    schedule = build("halving-doubling", ranks=8)
    first = [t for t in schedule.steps[0] if t.source == 0]
    assert {t.target for t in first} == {1} and len(first) == 4


def test_hierarchical_leaders_alone_speak_across_nodes() -> None:
    schedule = build("hierarchical:3x4,leader", ranks=12)
    crossing = {t.source for step in schedule.steps for t in step if t.source // 4 != t.target // 4}
    assert crossing == {0, 4, 8}


@pytest.mark.parametrize(
    ("text", "ranks", "says"),
    [
        ("rign", 4, "did you mean 'ring'"),
        ("torus:3x5", 16, r"3x5 has 15 ranks, not 16; fitting: 2x8, 4x4, 8x2"),
        ("torus:2x2", 5, "5 ranks have no shape of 2 sides without a side of 1"),
        ("torus:2x2x2", 8, "two sides"),
        ("torus", 8, "SHAPE is missing"),
        ("multiring:4x4x4", 32, "64 ranks, not 32"),
        ("hierarchical:8", 8, "NODESxPER_NODE"),
        ("hierarchical:2x4,leader,inner=ring", 8, "leader form takes tree or central"),
        ("hierarchical:2x4,outer=rings", 8, "did you mean 'ring'"),
        ("hierarchical:2x4,lead", 8, "did you mean 'leader'"),
        ("ring:order=0-1-1", 3, "must visit each of the ranks 0..2 once"),
        ("ring:order=a-b", 2, "written like 0-3-2-1"),
        ("ring:4", 4, "takes no arguments"),
        ("tree:fast=1", 4, "unknown option 'fast'"),
        ("double-tree:0", 4, "expected a whole number"),
        ("ring", 0, "1 or more"),
    ],
)
def test_a_wrong_line_is_refused_with_what_would_fit(text: str, ranks: int, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        build(text, ranks=ranks)


def test_roots_are_checked() -> None:
    with pytest.raises(RequestError, match=r"one of the ranks 0\.\.3"):
        build("tree", ranks=4, collective="broadcast", root=4)
    with pytest.raises(RequestError, match="has no root"):
        build("ring", ranks=4, root=1)
    with pytest.raises(RequestError, match="unknown collective 'all-redcue'; did you mean 'all-reduce'"):
        build("ring", ranks=4, collective="all-redcue")


def test_only_shapes_that_do_not_fit_are_refused() -> None:
    for ranks in COUNTS:
        for first in range(1, 10):
            for second in range(1, 10):
                for name in ("torus", "hierarchical"):
                    line = f"{name}:{first}x{second}"
                    if prod((first, second)) == ranks:
                        build(line, ranks=ranks)
                    else:
                        with pytest.raises(RequestError):
                            build(line, ranks=ranks)
