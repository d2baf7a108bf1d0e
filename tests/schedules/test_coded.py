"""Schedules that carry a codec: their text, their proof, their bytes, and the bits that ranks end with."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from torch import Tensor

from offbeat import codecs, topology
from offbeat.errors import RequestError, ScheduleError
from offbeat.schedules import Schedule, Transfer, algorithms, build, grid, price, svg, verify
from offbeat.schedules.coding import LEAST_BYTES, coded_bytes, with_codec
from offbeat.schedules.ir import chunk_sizes, renumbered

MOST_RANKS = 8 if os.environ.get("OFFBEAT_CODECS") else 5
LINES = {
    ranks: [line for row in algorithms().values() if not row.gathers for line in row.lines(ranks)]
    for ranks in range(2, 9)
}


def coded(line: str, codec: str) -> str:
    return f"{line}{',' if ':' in line else ':'}codec={codec}"


def run(schedule: Schedule, tensors: list[Tensor], residuals: list[Tensor]) -> list[Tensor]:
    """The dumb way: one transfer after the other, a new payload for each chunk that is encoded."""
    sizes = list(chunk_sizes(len(tensors[0]), schedule.chunks))
    held = [list(torch.split(tensor.clone(), sizes)) for tensor in tensors]
    rests = [torch.split(rest, sizes) for rest in residuals]
    payloads: dict[tuple[int, int], Tensor] = {}
    for step in schedule.steps:
        writes = []
        sent: dict[tuple[int, int], Tensor] = {}
        for source, _, chunk, reduce, line in step:  # who sends encodes first
            if line and (source, chunk) not in sent:
                known = payloads.get((source, chunk))
                if known is None or reduce:
                    codec, values = codecs.parse(line), held[source][chunk]
                    known = torch.empty(codec.size_bytes(len(values)), dtype=torch.uint8)
                    codec.coder().encode(values, known, rests[source][chunk], take=not reduce)
                    if not reduce:
                        payloads[source, chunk] = known
                sent[source, chunk] = known
        for source, target, chunk, reduce, line in step:
            values = held[source][chunk].clone()
            if line:
                codecs.parse(line).coder().decode(sent[source, chunk], values)
            writes.append((target, chunk, reduce, values, sent.get((source, chunk)) if line and not reduce else None))
        for target, chunk, reduce, values, payload in writes:
            if reduce:
                held[target][chunk] += values
            else:
                held[target][chunk] = values
            payloads.pop((target, chunk), None)
            if payload is not None:
                payloads[target, chunk] = payload
    return [torch.cat(parts) for parts in held]


@pytest.mark.parametrize("ranks", range(2, MOST_RANKS + 1))
@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_every_all_reduce_is_proved_and_ends_with_the_same_bits_on_all_ranks(codec: str, ranks: int) -> None:
    items = 3001
    for line in LINES[ranks]:
        schedule = build(coded(line, codec), ranks=ranks)
        verify(schedule)
        tensors = [torch.randn(items, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
        residuals = [torch.zeros(items) for _ in range(ranks)]
        ends = run(schedule, tensors, residuals)
        assert all(torch.equal(end, ends[0]) for end in ends), line
        total = torch.stack(tensors).double().sum(0)
        kept = torch.stack(residuals).double().sum(0)
        assert float((ends[0].double() + kept - total).abs().max()) < 1e-4 * ranks, line  # who rounded keeps the error


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1, 2, 2), (0, 0, 0, 1, 1)])
def test_between_hosts_only_every_all_reduce_still_ends_with_the_same_bits(hosts: tuple[int, ...]) -> None:
    ranks = len(hosts)
    for line in LINES[ranks]:
        if line.startswith("hierarchical"):  # its shape says which ranks share a host
            continue
        schedule = build(coded(line, "int8@across"), ranks=ranks, hosts=hosts)
        verify(schedule)
        crossing = [t for step in schedule.steps for t in step if hosts[t.source] != hosts[t.target]]
        assert crossing and all(transfer.codec == "int8" for transfer in crossing)
        inside = [t for step in schedule.steps for t in step if hosts[t.source] == hosts[t.target] and t.reduce]
        assert all(transfer.codec == "" for transfer in inside)
        tensors = [torch.randn(777, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
        ends = run(schedule, tensors, [torch.zeros(777) for _ in range(ranks)])
        assert all(torch.equal(end, ends[0]) for end in ends), line


def test_hierarchical_codes_between_its_nodes_and_nowhere_else() -> None:
    schedule = build("hierarchical:2x4,codec=bf16@across", ranks=8)
    verify(schedule)
    for transfer in itertools.chain.from_iterable(schedule.steps):
        assert (transfer.codec == "bf16") == (transfer.source // 4 != transfer.target // 4), transfer


def test_a_coded_schedule_is_written_as_it_is_read() -> None:
    for line in ("ring:codec=int8", "hierarchical:2x2,codec=int4:stochastic@across", "ring:codec=top-k:0.01"):
        schedule = build(line, ranks=4)
        assert Schedule.parse(schedule.text()) == schedule
        assert schedule.name == line
    assert Transfer.parse("0>1 c3 + int8") == Transfer(0, 1, 3, True, "int8")
    assert build("ring:codec=int8", ranks=4) != build("ring:codec=bf16", ranks=4)
    turned = renumbered(build("ring:codec=int8", ranks=3), (1, 2, 0))
    assert {transfer.codec for step in turned.steps for transfer in step} == {"int8"}
    verify(turned)


def test_a_sum_that_is_passed_on_before_it_is_encoded_is_refused_with_its_place() -> None:
    text = "schedule own all-reduce ranks=3 chunks=1\n1>0 c0 + int8 | 2>0 c0 + int8\n0>1 c0 =\n0>2 c0 = int8\n"
    with pytest.raises(ScheduleError, match="chunk 0 is encoded more than once, or passed on before"):
        verify(Schedule.parse(text))


def test_a_sum_that_two_ranks_encode_is_refused() -> None:
    text = (
        "schedule own all-reduce ranks=4 chunks=1\n1>0 c0 + int8 | 2>0 c0 + int8 | 3>0 c0 + int8\n0>1 c0 =\n"
        "0>2 c0 = int8 | 1>3 c0 = int8\n"
    )
    with pytest.raises(ScheduleError, match="different bits"):
        verify(Schedule.parse(text))


def test_a_coded_value_that_is_used_in_two_sums_is_refused() -> None:
    """Recursive doubling: each rank adds what it gets to what it has, so each ends with other bits."""
    exchange = "schedule own all-reduce ranks=2 chunks=1\n0>1 c0 +{0} | 1>0 c0 +{0}\n"
    verify(Schedule.parse(exchange.format("")))
    with pytest.raises(ScheduleError, match="different bits"):
        verify(Schedule.parse(exchange.format(" int8")))


def test_only_an_all_reduce_or_an_all_gather_can_be_coded_per_transfer() -> None:
    verify(with_codec(build("ring", ranks=4, collective="all-gather"), "own", codecs.parse("int8")))
    schedule = build("ring", ranks=4, collective="reduce-scatter")
    with pytest.raises(RequestError, match="only an all-reduce or an all-gather"):
        verify(with_codec(schedule, "own", codecs.parse("int8")))
    with pytest.raises(RequestError, match="codec"):
        build("ring:codec=int8", ranks=4, collective="all-gather")


@pytest.mark.parametrize("codec", ["bf16", "fp16", "int8", "int4"])
@pytest.mark.parametrize("line", ["ring", "direct", "tree", "torus:2x2", "ring:parts=3"])
def test_a_price_counts_the_bytes_of_every_payload(line: str, codec: str) -> None:
    machine, items = topology.build("uniform", ranks=4), 100_003
    schedule = build(coded(line, codec), ranks=4)
    found = price(schedule, machine, 4 * items)
    sizes = chunk_sizes(items, schedule.chunks)
    sent = [0] * 4
    for source, _, chunk, *_ in itertools.chain.from_iterable(schedule.steps):
        sent[source] += codecs.parse(codec).size_bytes(sizes[chunk])
    assert found.bytes_per_rank == tuple(sent)


def test_small_vectors_are_priced_as_they_are_sent_uncoded() -> None:
    machine = topology.build("uniform", ranks=4)
    for line in ("ring", "direct"):
        plain, small = build(line, ranks=4), build(coded(line, "int8"), ranks=4)
        assert price(small, machine, LEAST_BYTES) == price(plain, machine, LEAST_BYTES)
        assert price(small, machine, LEAST_BYTES + 4).bytes_total < price(plain, machine, LEAST_BYTES + 4).bytes_total


def test_per_tensor_codecs_have_a_schedule_of_their_own() -> None:
    machine, items = topology.build("uniform", ranks=4), 1_000_000
    gathered = build("ring:codec=top-k:0.01", ranks=4)
    verify(gathered)
    assert gathered.collective == "all-gather"
    assert price(gathered, machine, 4 * items).bytes_per_rank == (3 * 8 * 10_000,) * 4  # 2k (P-1) words, not 2k
    values = build("ring:codec=random-k:0.01", ranks=4)
    verify(values)
    assert price(values, machine, 4 * items).bytes_per_rank == (2 * 3 * 4 * 10_000 // 4,) * 4
    factors = build("ring:codec=power-sgd:4", ranks=4)
    verify(factors)
    rows_and_columns = codecs.parse("power-sgd:4").size_bytes(items)
    assert abs(price(factors, machine, 4 * items).bytes_total - 2 * 3 * rows_and_columns) == 0
    assert len(factors.steps) == 2 * len(build("ring", ranks=4).steps)
    assert coded_bytes(factors, 1, items).sum() == rows_and_columns


@pytest.mark.parametrize("codec", ["bf16", "int8", "1-bit", "top-k:0.01", "random-k:0.01", "power-sgd:4"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_where_whole_vectors_go_to_all_every_codec_sends_one_payload_to_each_other_rank(codec: str, ranks: int) -> None:
    machine, items = topology.build("uniform", ranks=ranks), 100_003
    schedule = build(f"all-to-all:codec={codec}", ranks=ranks)
    verify(schedule)
    assert len(schedule.steps) == 1
    each = codecs.parse(codec).size_bytes(items)
    assert price(schedule, machine, 4 * items).bytes_per_rank == ((ranks - 1) * each,) * ranks
    plain = build("all-to-all", ranks=ranks)
    for size in (4, LEAST_BYTES):
        assert price(schedule, machine, size).bytes_per_rank == price(plain, machine, size).bytes_per_rank


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ring:codec=int9", "did you mean 'int8'"),
        ("ring:codec=int8@across", "hierarchical:HOSTSxRANKS"),
        ("tree:codec=top-k:0.01", "use one of halving-doubling, ring, direct, hierarchical"),
        ("ring:parts=2,codec=1-bit", "with no option but the codec"),
        ("ring:codec=int8@inside", "expected '@across'"),
        ("all-to-all:codec=int8@across", "leave out '@across'"),
    ],
)
def test_what_cannot_be_coded_is_named_with_what_can(line: str, said: str) -> None:
    with pytest.raises(RequestError) as error:
        build(line, ranks=4)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_the_grid_and_the_drawing_show_the_codec() -> None:
    schedule = build("hierarchical:2x2,codec=int8@across", ranks=4)
    assert " int8" in grid(schedule)
    assert "sent as int8" in svg(schedule) and "thick: sent as it is" in svg(schedule)
