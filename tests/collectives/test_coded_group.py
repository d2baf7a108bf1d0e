"""Coded all-reduces on shared memory: the same bits on all ranks, nothing lost, and the bytes that were priced.

`OFFBEAT_CODECS=1` (make test-codecs) takes every schedule on 2 to 8 ranks with every codec.
"""

from __future__ import annotations

import os

import pytest

from collectives.nursery import Nursery
from offbeat.codecs import CODECS, PER_TENSOR
from offbeat.errors import RequestError
from offbeat.schedules import algorithms, build

WHOLE = bool(os.environ.get("OFFBEAT_CODECS"))
CODEC_LINES = [line for row in CODECS.values() for line in row.examples]


def coded_lines(ranks: int, codecs: list[str]) -> list[str]:
    """Every all-reduce with every codec that it can take."""
    found = []
    for row in algorithms().values():
        for line in row.lines(ranks):
            for codec in codecs:
                coded = f"{line}{',' if ':' in line else ':'}codec={codec}"
                try:
                    build(coded, ranks=ranks)
                except RequestError:  # what gathers payloads needs an all-gather of that name
                    assert CODECS[codec.partition(":")[0]].kind == PER_TENSOR
                    continue
                found.append(coded)
    return found


@pytest.mark.parametrize("ranks", range(2, 9) if WHOLE else (2, 3, 4))
@pytest.mark.parametrize("codecs", [CODEC_LINES] if WHOLE else [["bf16"], ["int8"], ["int4:stochastic"]])
def test_every_schedule_ends_with_the_same_bits_on_all_ranks(nursery: Nursery, ranks: int, codecs: list[str]) -> None:
    lines = coded_lines(ranks, codecs)
    assert all(any(f"codec={codec}" in line for line in lines) for codec in codecs)
    arena = 2**23 if ranks % 2 else 2**18  # in one round, and in many
    found = nursery.values(
        "coded_sums", ranks=ranks, lines=lines, steps=2, arena_bytes=arena, within_s=600 if WHOLE else 300
    )
    for line in lines:
        assert len({tuple(one[line]) for one in found}) == 1, line


@pytest.mark.parametrize("codec", ["1-bit", "top-k:0.01", "random-k:0.01", "power-sgd:4"])
def test_codecs_of_whole_tensors_end_with_the_same_bits(nursery: Nursery, codec: str) -> None:
    lines = [line for line in coded_lines(3, [codec]) if line.startswith(("ring", "direct", "all-to-all"))]
    found = nursery.values("coded_sums", ranks=3, lines=lines, steps=3, arena_bytes=2**23)
    assert lines and all(one == found[0] for one in found)


def test_between_nodes_only_the_bits_are_the_same_too(nursery: Nursery) -> None:
    lines = ["hierarchical:2x2,codec=int8@across", "hierarchical:2x2,leader,codec=bf16@across"]
    found = nursery.values("coded_sums", ranks=4, lines=lines, steps=3, arena_bytes=2**18)
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_is_small_or_no_sum_of_floats_goes_as_it_is(nursery: Nursery, ranks: int) -> None:
    nursery.values("uncoded_calls", ranks=ranks)


@pytest.mark.parametrize("codec", ["int8", "top-k:0.05", "power-sgd:2"])
def test_ddp_trains_with_a_codec(nursery: Nursery, codec: str) -> None:
    found = nursery.values("coded_ddp", ranks=2, line=f"ring:codec={codec}")
    assert found[0][0] == found[1][0]
    assert all(last < 0.8 * first for _, first, last in found)


@pytest.mark.parametrize("codec", ["int8", "int8:stochastic", "top-k:0.01", "random-k:0.01", "power-sgd:2", "1-bit"])
def test_what_was_kept_goes_on_bit_for_bit(nursery: Nursery, codec: str) -> None:
    for algorithm in ("ring", "all-to-all"):
        for whole, resumed in nursery.values("residuals_go_on", ranks=2, line=f"{algorithm}:codec={codec}"):
            assert whole == resumed


@pytest.mark.parametrize("codec", ["int8", "top-k:0.01", "random-k:0.01", "power-sgd:2", "1-bit"])
def test_a_rank_that_was_not_there_steps_as_the_others_do(nursery: Nursery, codec: str) -> None:
    found = nursery.values("a_newcomer_steps_alike", ranks=3, line=f"ring:codec={codec}")
    assert found[1:] == found[:1] * 2


def test_residuals_of_tensors_that_are_gone_are_let_go_of_and_counted(nursery: Nursery) -> None:
    for kept, lost in nursery.values("residuals_are_forgotten", ranks=2):
        assert kept <= 1 and lost >= 9


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "1-bit", "top-k:0.01", "power-sgd:2"])
def test_a_nan_reaches_all_ranks_and_is_gone_after_that_step(nursery: Nursery, codec: str) -> None:
    assert nursery.values("not_finite_sums", ranks=3, line=f"ring:codec={codec}") == [[True, False, True]] * 3


@pytest.mark.parametrize(
    "codec", ["", "bf16", "int8", "int4:stochastic", "1-bit", "top-k:0.01", "random-k:0.01", "power-sgd:2"]
)
def test_updates_to_each_other_move_all_replicas_alike_and_lose_nothing(nursery: Nursery, codec: str) -> None:
    ranks, steps = 3, 4
    found = nursery.values("peer_updates", ranks=ranks, codec=codec, steps=steps)
    for rank, (apart, off, confirmed) in enumerate(found):
        assert apart < 1e-5
        assert off < (1e-4 if codec != "int4:stochastic" else 10)  # which has no residual
        assert confirmed == [steps if other != rank else 0 for other in range(ranks)]
