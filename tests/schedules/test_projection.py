"""The programs of all ranks together do what the schedule says, in whatever order the ranks come to run."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.schedules import ALGORITHMS, Schedule, Transfer, build
from offbeat.schedules.projection import Encode, Mark, Program, Put, Read, Receive, Send, Sent, Wait, project

Values = list[list[str]]  # [rank][chunk]: the additions that were made, written out


def run_step_by_step(schedule: Schedule, values: Values) -> Values:
    """The oracle: the law of schedules, to the letter. All reads of a step, then its writes in the order listed."""
    payloads: dict[tuple[int, int], str] = {}  # that a copy can pass on
    for step in schedule.steps:
        for t in step:
            if t.codec and not t.reduce and (t.source, t.chunk) not in payloads:
                values[t.source][t.chunk] = payloads[t.source, t.chunk] = f"<{values[t.source][t.chunk]}>"
        reads = [f"<{values[t.source][t.chunk]}>" if t.codec and t.reduce else values[t.source][t.chunk] for t in step]
        for t in step:
            payloads.pop((t.target, t.chunk), None)
        for t, value in zip(step, reads, strict=True):
            if t.codec and not t.reduce:
                payloads[t.target, t.chunk] = value
        for transfer, value in zip(step, reads, strict=True):
            own = values[transfer.target][transfer.chunk]
            values[transfer.target][transfer.chunk] = f"({own}+{value})" if transfer.reduce else value
    return values


def run_programs(programs: list[Program], values: Values, chance: random.Random) -> Values:
    """The ranks take turns by chance; a value is read when its reader's turn comes, as in shared memory.

    The network has turns too: a chunk that is sent is read from its rank's memory when one comes. A rank that is
    through has its result taken and its memory overwritten at once: it is the caller's again.
    """
    at, marks = [0] * len(programs), [0] * len(programs)
    payloads: list[dict[int, str]] = [{} for _ in programs]

    def encode(rank: int, now: Encode) -> None:
        payloads[rank][now.chunk] = f"<{values[rank][now.chunk]}>"
        if now.take:
            values[rank][now.chunk] = payloads[rank][now.chunk]

    for program in programs:
        for first in program.first:
            encode(program.rank, first)
    scratch: list[dict[int, str]] = [{} for _ in programs]
    results: dict[int, list[str]] = {}
    sends: dict[tuple[int, int], list[tuple[int, bool]]] = defaultdict(list)  # (from, to) -> what waits to be sent
    sent: dict[tuple[int, int], list[tuple[int, str]]] = defaultdict(list)  # what was
    received: dict[tuple[int, int], int] = defaultdict(int)

    def can_go_on(rank: int) -> bool:
        if at[rank] == len(programs[rank].instructions):
            return False
        now = programs[rank].instructions[at[rank]]
        if isinstance(now, Wait):
            return marks[now.peer] >= now.mark
        if isinstance(now, Sent):
            return len(sent[rank, now.peer]) >= now.sends
        return not isinstance(now, Receive) or len(sent[now.peer, rank]) > received[now.peer, rank]

    while len(results) < len(programs):
        ready = [rank for rank in range(len(programs)) if can_go_on(rank)]
        through = [r for r, p in enumerate(programs) if at[r] == len(p.instructions) and r not in results]
        waiting = [pair for pair, chunks in sends.items() if chunks]
        assert ready or through or waiting, "everybody waits"
        for source, target in [chance.choice(waiting)] if waiting and (not ready or chance.random() < 0.3) else []:
            chunk, coded = sends[source, target].pop(0)
            sent[source, target].append((chunk, payloads[source][chunk] if coded else values[source][chunk]))
        for rank in through:
            results[rank], values[rank] = values[rank], ["overwritten"] * len(values[rank])
            payloads[rank] = dict.fromkeys(range(len(values[rank])), "overwritten")
        for rank in [chance.choice(ready)] if ready else []:
            for _ in range(chance.choice([1, 1, 5, 50])):  # a burst: one rank runs far ahead of the others
                if not can_go_on(rank):
                    break
                now = programs[rank].instructions[at[rank]]
                at[rank] += 1
                if isinstance(now, Send):
                    sends[rank, now.peer].append((now.chunk, now.coded))
                elif isinstance(now, Read | Receive):
                    if isinstance(now, Read):
                        assert now.coded or now.chunk in programs[now.peer].exposed
                        value = payloads[now.peer][now.chunk] if now.coded else values[now.peer][now.chunk]
                    else:
                        chunk, value = sent[now.peer, rank][received[now.peer, rank]]
                        received[now.peer, rank] += 1
                        assert chunk == now.chunk, "received in another order than sent"
                    if now.scratch is None:
                        write(values[rank], now.chunk, value, now.reduce)
                        if now.coded and not now.reduce:
                            payloads[rank][now.chunk] = value
                    else:
                        scratch[rank][now.scratch] = value
                elif isinstance(now, Put):
                    value = scratch[rank].pop(now.scratch)
                    write(values[rank], now.chunk, value, now.reduce)
                    if now.coded and not now.reduce:
                        payloads[rank][now.chunk] = value
                elif isinstance(now, Encode):
                    encode(rank, now)
                elif isinstance(now, Mark):
                    assert now.mark > marks[rank]
                    marks[rank] = now.mark
    return [results[rank] for rank in range(len(programs))]


def write(row: list[str], chunk: int, value: str, reduce: bool) -> None:
    row[chunk] = f"({row[chunk]}+{value})" if reduce else value


def start(schedule: Schedule) -> Values:
    return [[f"{rank}.{chunk}" for chunk in range(schedule.chunks)] for rank in range(schedule.ranks)]


def every_schedule(ranks: int) -> list[Schedule]:
    rows = ALGORITHMS.values()
    named = [build(line, ranks=ranks, collective=row.collective) for row in rows for line in row.lines(ranks)]
    return [*named, build("ring:parts=3", ranks=ranks)]


@pytest.mark.parametrize("hosts", [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 0, 2), (0, 1, 2, 3), (0, 0, 0, 1, 1, 2)])
def test_every_coded_all_reduce_gives_what_its_steps_give_on_any_hosts(hosts: tuple[int, ...]) -> None:
    ranks = len(hosts)
    rows = [row for row in ALGORITHMS.values() if row.collective == "all-reduce" and not row.gathers]
    lines = [line for row in rows for line in row.lines(ranks)] + ["ring:parts=3"]
    for line, codec in itertools.product(lines, ("int8", "int8@across")):
        if codec.endswith("across") and not line.startswith("hierarchical") and len(set(hosts)) == 1:
            continue
        schedule = build(f"{line}{',' if ':' in line else ':'}codec={codec}", ranks=ranks, hosts=hosts)
        expected = run_step_by_step(schedule, start(schedule))
        assert all(values == expected[0] for values in expected)
        programs = [project(schedule, rank, hosts if len(set(hosts)) > 1 else None) for rank in range(ranks)]
        for seed in range(3):
            assert run_programs(programs, start(schedule), random.Random(seed)) == expected, (line, codec, seed)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_every_algorithm_gives_what_its_steps_give_in_any_order_of_turns(ranks: int) -> None:
    for schedule in every_schedule(ranks):
        programs = [project(schedule, rank) for rank in range(ranks)]
        for program in programs:
            assert set(program.exposed) == {
                t.chunk for step in schedule.steps for t in step if t.source == program.rank
            }
            assert set(program.written) == {
                t.chunk for step in schedule.steps for t in step if t.target == program.rank
            }
        expected = run_step_by_step(schedule, start(schedule))
        for seed in range(3):
            got = run_programs(programs, start(schedule), random.Random(seed))
            assert got == expected, (schedule.name, schedule.collective, seed)


@st.composite
def random_schedules(draw: st.DrawFn) -> Schedule:
    ranks, chunks = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    transfer = st.builds(
        Transfer,
        st.integers(0, ranks - 1),
        st.integers(0, ranks - 1),
        st.integers(0, chunks - 1),
        st.booleans(),
        st.just(""),
    ).filter(lambda t: t.source != t.target)
    steps = draw(st.lists(st.lists(transfer, max_size=6), max_size=5))
    return Schedule("random", "none", ranks, chunks, steps)


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1), (0, 1, 2, 3), (0, 0, 1, 1), (1, 0, 1, 0), (0, 0, 0, 0, 1, 1)])
def test_every_algorithm_gives_the_same_across_hosts(hosts: tuple[int, ...]) -> None:
    for schedule in every_schedule(len(hosts)):
        programs = [project(schedule, rank, hosts) for rank in range(len(hosts))]
        expected = run_step_by_step(schedule, start(schedule))
        for seed in range(3):
            got = run_programs(programs, start(schedule), random.Random(seed))
            assert got == expected, (schedule.name, schedule.collective, seed)


@settings(max_examples=400, deadline=None)
@given(random_schedules(), st.lists(st.integers(0, 2), min_size=4, max_size=4), st.integers(0, 10))
def test_any_schedule_at_all_across_hosts(schedule: Schedule, hosts: list[int], seed: int) -> None:
    programs = [project(schedule, rank, hosts) for rank in range(schedule.ranks)]
    expected = run_step_by_step(schedule, start(schedule))
    assert run_programs(programs, start(schedule), random.Random(seed)) == expected


@settings(max_examples=400, deadline=None)
@given(random_schedules(), st.integers(0, 10))
def test_any_schedule_at_all_swaps_and_chains_included(schedule: Schedule, seed: int) -> None:
    programs = [project(schedule, rank) for rank in range(schedule.ranks)]
    expected = run_step_by_step(schedule, start(schedule))
    assert run_programs(programs, start(schedule), random.Random(seed)) == expected


def test_the_programs_of_direct_on_two_ranks_are_short() -> None:
    assert project(build("direct", ranks=2), 0).instructions == (
        Read(1, 0, True),
        Mark(2),
        Wait(1, 2),
        Read(1, 1, False),
        Mark(4),
        Wait(1, 3),
    )


def test_two_ranks_that_swap_a_chunk_go_through_scratch() -> None:
    swap = Schedule("swap", "none", 2, 1, [[Transfer(0, 1, 0, True), Transfer(1, 0, 0, True)]])
    assert project(swap, 0).instructions == (Read(1, 0, True, 0), Mark(1), Wait(1, 1), Put(0, 0, True), Mark(2))


def test_two_hosts_that_swap_a_chunk_send_before_they_receive() -> None:
    swap = Schedule("swap", "none", 2, 1, [[Transfer(0, 1, 0, True), Transfer(1, 0, 0, True)]])
    assert project(swap, 0, (0, 1)).instructions == (
        Send(1, 0),
        Receive(1, 0, True, 0),
        Mark(1),
        Sent(1, 1),
        Put(0, 0, True),
        Mark(2),
    )


def test_a_part_that_has_come_goes_on_before_the_next_one_comes() -> None:
    instructions = project(build("ring:parts=2", ranks=3), 0, (0, 1, 2)).instructions
    sent = {now.chunk: at for at, now in reversed(list(enumerate(instructions))) if isinstance(now, Send)}
    came = [(now.chunk, at) for at, now in enumerate(instructions) if isinstance(now, Receive) and now.reduce]
    passed_on = [chunk for chunk, at in came[:2] if sent[chunk] == at + 1]
    assert passed_on == [chunk for chunk, _ in came[:2]], instructions


def test_a_send_that_is_not_waited_for_is_noticed() -> None:
    swap = Schedule("swap", "none", 2, 1, [[Transfer(0, 1, 0, True), Transfer(1, 0, 0, True)]])
    programs = [project(swap, rank, (0, 1)) for rank in range(2)]
    bare = [replace(p, instructions=tuple(i for i in p.instructions if not isinstance(i, Sent))) for p in programs]
    expected = run_step_by_step(swap, start(swap))
    assert any(run_programs(bare, start(swap), random.Random(seed)) != expected for seed in range(20))


def test_a_wait_that_is_left_out_is_noticed() -> None:
    """The checker can fail: without its waits the ring gives something else for some order of turns."""
    schedule = build("ring", ranks=4)
    programs = [project(schedule, rank) for rank in range(4)]
    bare = [
        Program(
            rank=p.rank,
            instructions=tuple(i for i in p.instructions if not isinstance(i, Wait)),
            exposed=p.exposed,
            written=p.written,
            marks=p.marks,
        )
        for p in programs
    ]
    expected = run_step_by_step(schedule, start(schedule))
    assert any(run_programs(bare, start(schedule), random.Random(seed)) != expected for seed in range(5))


def test_sums_come_out_right_with_numbers_too() -> None:
    schedule = build("hierarchical:2x3", ranks=6)
    programs = [project(schedule, rank) for rank in range(6)]
    data: npt.NDArray[np.int64] = np.arange(6 * schedule.chunks).reshape(6, schedule.chunks)
    got = run_programs(programs, [[str(v) for v in row] for row in data.tolist()], random.Random(1))
    for row in got:
        terms = [sorted(int(n) for n in text.replace("(", "").replace(")", "").split("+")) for text in row]
        assert terms == [sorted(column) for column in data.T.tolist()]
