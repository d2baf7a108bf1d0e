"""The proof finds what is wrong, says where, and agrees with the dumb oracle."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import RequestError, ScheduleError
from offbeat.schedules import ALGORITHMS, Schedule, Transfer, algorithms, build, proof, verify
from offbeat.schedules.ir import Steps, Table
from schedules.oracle import is_correct

Lists = list[list[Transfer]]


def planted(schedule: Schedule, bug: Callable[[Lists], object]) -> Schedule:
    steps = [list(step) for step in schedule.steps]
    bug(steps)
    return Schedule(schedule.name, schedule.collective, schedule.ranks, schedule.chunks, steps, schedule.root)


def swap(steps: Lists, one: int, other: int) -> None:
    steps[one], steps[other] = steps[other], steps[one]


def change(steps: Lists, step: int, **fields: int | bool) -> None:
    steps[step][0] = steps[step][0]._replace(**fields)  # type: ignore[arg-type]  # the names are a Transfer's


BUGS: dict[str, tuple[str, Callable[[Lists], object], str]] = {
    "a chunk is lost": ("ring", lambda s: s[1].pop(2), "without the data of rank"),
    "a chunk is lost in the all-gather": ("ring", lambda s: s[4].pop(0), "without the data of rank"),
    "a transfer is made twice in one step": ("ring", lambda s: s[0].append(s[0][0]), "twice"),
    "a reduction is repeated a step later": ("ring", lambda s: s[1].append(s[0][0]), "twice"),
    "the all-gather adds instead of overwriting": ("ring", lambda s: change(s, 3, reduce=True), "twice"),
    "the reduce-scatter overwrites instead of adding": (
        "ring",
        lambda s: change(s, 0, reduce=False),
        "without the data of rank",
    ),
    "two steps are in the wrong order": ("halving-doubling", lambda s: swap(s, 0, 1), "without the data of rank"),
    "the all-gather comes first": ("ring", lambda s: s.insert(0, s.pop(3)), "twice"),
    "the last step is missing": ("ring", lambda s: s.pop(), "without the data of rank"),
    "two overwrites of one place collide": (
        "tree",
        lambda s: s[3].append(Transfer(2, 1, 0, False)),
        "write the same chunk",
    ),
    "an addition and an overwrite collide": (
        "ring",
        lambda s: s[3].append(Transfer(2, s[3][0].target, s[3][0].chunk, True)),
        "write the same chunk",
    ),
    "a rank sends to itself": ("ring", lambda s: s[0].append(Transfer(2, 2, 1, True)), "sends to itself"),
    "the wrong chunk is sent": ("ring", lambda s: change(s, 0, chunk=0), "without the data of rank 0"),
    "the wrong rank receives": ("ring", lambda s: change(s, 3, target=2), "without the data of rank"),
    "two steps are merged, so that a read comes before its write": (
        "tree",
        lambda s: s[0].extend(s.pop(1)),
        "without the data of rank",
    ),
    "a rank is never told": (
        "central",
        lambda s: s[1].pop(),
        "rank 3 ends with chunk 0 without the data of ranks 0, 1, 2",
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str) -> None:
    line, plant, says = BUGS[bug]
    schedule = build(line, ranks=4)
    verify(schedule)
    wrong = planted(schedule, plant)
    assert not is_correct(wrong)
    with pytest.raises(ScheduleError, match=says) as caught:
        verify(wrong)
    assert "✗" in caught.value.grid


@given(data=st.data())
@settings(max_examples=400)
def test_the_proof_and_the_dumb_oracle_agree_on_random_damage(data: st.DataObject) -> None:
    collective, name = data.draw(st.sampled_from(list(ALGORITHMS)))
    ranks = data.draw(st.integers(2, 6))
    line = data.draw(st.sampled_from(algorithms(collective)[name].lines(ranks)))
    schedule = build(line, ranks=ranks, collective=collective)
    steps = [list(step) for step in schedule.steps]
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(steps) - 1))
        if not steps[at]:
            continue
        which = data.draw(st.integers(0, len(steps[at]) - 1))
        one = steps[at][which]
        match data.draw(st.sampled_from(["drop", "double", "target", "chunk", "sign", "move"])):
            case "drop":
                steps[at].pop(which)
            case "double":
                steps[data.draw(st.integers(0, len(steps) - 1))].append(one)
            case "target":
                steps[at][which] = one._replace(target=data.draw(st.integers(0, ranks - 1)))
            case "chunk":
                steps[at][which] = one._replace(chunk=data.draw(st.integers(0, schedule.chunks - 1)))
            case "sign":
                steps[at][which] = one._replace(reduce=not one.reduce)
            case "move":
                steps[at].pop(which)
                steps[data.draw(st.integers(0, len(steps) - 1))].append(one)
    damaged = Schedule(schedule.name, collective, ranks, schedule.chunks, steps)
    try:
        verify(damaged)
        proved = True
    except ScheduleError:
        proved = False
    assert proved == is_correct(damaged)


def test_the_error_marks_the_place_in_the_grid() -> None:
    wrong = planted(build("ring", ranks=3), lambda s: s[1].append(s[0][0]))
    with pytest.raises(ScheduleError) as caught:
        verify(wrong)
    assert (caught.value.step, caught.value.rank) == (1, 1)
    assert str(caught.value) == (
        "schedule 'ring' is not a correct all-reduce: step 2: '0>1 c2 +' counts rank 0's contribution twice\n"
        "step  rank 0  rank 1      rank 2\n"
        "   1  +c1 <2  +c2 <0      +c0 <1\n"
        "   2  +c0 <2  ✗ +c1-2 <0  +c2 <1\n"
        "   3  =c2 <2  =c0 <0      =c1 <1\n"
        "   4  =c1 <2  =c2 <0      =c0 <1"
    )


def test_a_place_that_lacks_something_is_marked_at_the_end() -> None:
    wrong = planted(build("tree", ranks=2), lambda s: s.pop())
    with pytest.raises(ScheduleError) as caught:
        verify(wrong)
    assert caught.value.step == 1
    assert caught.value.grid.splitlines()[-1].split() == ["end", ".", "✗", "c0:", "rank", "1"]


def test_several_additions_to_one_place_in_one_step_are_legal() -> None:
    verify(Schedule("sum", "reduce", 4, 1, [[Transfer(rank, 0, 0, True) for rank in (1, 2, 3)]]))


def test_many_additions_of_one_contribution_do_not_wrap_around() -> None:
    many = [Transfer(1, 0, 0, True)] * 65536
    with pytest.raises(ScheduleError, match="twice"):
        verify(Schedule("wrap", "reduce", 2, 1, [many]))


def recursive_doubling(ranks: int, chunks: int) -> Schedule:
    """Partners add each other's sum in each step: right, but every sum is used twice."""
    steps = [
        [Transfer(rank, rank ^ distance, chunk, True) for rank in range(ranks) for chunk in range(chunks)]
        for distance in (1 << bit for bit in range(ranks.bit_length() - 1))
    ]
    return Schedule("recursive-doubling", "all-reduce", ranks, chunks, steps)


def test_sums_that_are_used_twice_are_proved_by_counting_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "_BLOCK_BYTES", 4 * 8 * 8 * 3)  # three chunks at a time
    right = recursive_doubling(8, 7)
    assert not proof._in_trees(right).any()
    verify(right)
    with pytest.raises(ScheduleError, match="rank 0 ends with chunk 5 without the data of rank 7"):
        verify(planted(right, lambda s: s[0].remove(Transfer(7, 6, 5, True))))


@pytest.mark.parametrize("collective, name", ALGORITHMS)
def test_every_algorithm_in_which_a_value_is_added_once_is_proved_by_trees_alone(collective: str, name: str) -> None:
    row = algorithms(collective)[name]
    for ranks in (2, 7, 8, 12):
        for line in row.lines(ranks):
            assert proof._in_trees(build(line, ranks=ranks, collective=collective)).all() != row.gathers


DAMAGE: dict[str, tuple[Callable[[Table, int], Table], str]] = {
    "lost": (lambda rows, at: np.delete(rows, at, axis=0), "without the data of rank"),
    "made twice": (lambda rows, at: np.insert(rows, at, rows[at], axis=0), "twice|write the same chunk"),
    "added instead of copied, or copied instead of added": (
        lambda rows, at: _set(rows, at, 3, 1 - rows[at, 3]),
        "twice|without the data of rank",
    ),
    "sent elsewhere": (
        lambda rows, at: _set(rows, at, 1, (rows[at, 1] + 77) % 256),
        "twice|without the data of rank|same chunk",
    ),
    "of another chunk": (
        lambda rows, at: _set(rows, at, 2, (rows[at, 2] + 77) % 256),
        "twice|without the data of rank|same chunk",
    ),
}


def _set(rows: Table, at: int, column: int, value: int) -> Table:
    changed = rows.copy()
    changed[at, column] = value
    return changed


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("line", ["torus:16x16", "halving-doubling", "hierarchical:32x8"])
def test_one_wrong_transfer_of_a_hundred_thousand_is_found(line: str, damage: str) -> None:
    change, says = DAMAGE[damage]
    right = build(line, ranks=256)
    tables = [right.steps.rows(step) for step in range(len(right.steps))]
    chance = np.random.default_rng(0)
    for _ in range(2):
        step = int(chance.integers(len(tables)))
        at = int(chance.integers(len(tables[step])))
        damaged = [*tables[:step], change(tables[step], at), *tables[step + 1 :]]
        with pytest.raises(ScheduleError, match=says):
            verify(Schedule("damaged", "all-reduce", 256, right.chunks, Steps(damaged)))


def test_unknown_collectives_and_wrong_chunk_counts_are_refused() -> None:
    with pytest.raises(RequestError, match="did you mean 'all-reduce'"):
        verify(Schedule("x", "allreduce", 2, 1, []))
    with pytest.raises(RequestError, match="needs a multiple of 2 chunks; it has 3"):
        verify(Schedule("x", "all-gather", 2, 3, []))
    with pytest.raises(RequestError, match="needs 4 chunks; it has 3"):
        verify(Schedule("x", "all-to-all", 2, 3, []))
