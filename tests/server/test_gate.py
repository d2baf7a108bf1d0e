"""What a learner or a stranger says cannot end a run, nor hold it up: it is refused, counted and named."""

from __future__ import annotations

import math
from typing import Any, get_args

import msgspec
import pytest

from collectives.nursery import Nursery
from offbeat.server import wire
from offbeat.server.coordinator.coordinator_process import MOST_REFUSED
from server.hostile_learners import POISON
from server.mutations import KINDS

PUSHES = 20


@pytest.mark.parametrize("what", POISON)
def test_who_says_what_cannot_be_is_sent_away_and_the_others_train_on(nursery: Nursery, what: str) -> None:
    *learned, told, summary = nursery.values("serve_poison", ranks=4, line="async", what=what, pushes=PUSHES)
    assert learned == [-2.0 * PUSHES] * 2, "the weights are those of what was accepted"
    assert told.startswith(("the run removed learner 2: ", "the run refused this learner: ")), told
    assert summary["refused"] == MOST_REFUSED
    assert summary["gone"]["it said what cannot be"] == 1
    assert summary["pushes"]["received"] == summary["pushes"]["applied"] == 2 * PUSHES


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("lr", math.nan, "lr of parameter group 0 is nan: it must be a finite number"),
        ("weight_decay", math.inf, "weight_decay of parameter group 0 is inf: it must be a finite number"),
        (
            "momentum",
            0.9,
            "momentum of parameter group 0 is 0.9, but was 0 when the run began, so the servers keep no state for it",
        ),
    ],
)
def test_a_step_that_no_server_can_make_is_the_learners_own_error(
    nursery: Nursery, tmp_path: Any, option: str, value: float, says: str, log: bool
) -> None:
    run = {"option": option, "value": value, "log": str(tmp_path / "log") if log else None}
    *learned, told, summary = nursery.values("serve_bad_rate", ranks=4, line="async", pushes=PUSHES, **run)
    assert told == f"the servers cannot make this step: {says}"
    assert learned == [-2.0 * PUSHES - 2] * 2 and summary["refused"] == 0


def test_a_hundred_silent_connections_hold_nobody_up(nursery: Nursery) -> None:
    *learned, _ = nursery.values("serve_silence", ranks=3, line="async", connections=100, pushes=100)
    for last, seconds in learned:
        assert last == -200.0 and seconds < 10.0, "it was one push in two seconds when each was waited for"


def test_a_learner_cannot_pass_for_a_server(nursery: Nursery) -> None:
    *learned, _ = nursery.values("serve_false_server", ranks=3, line="async", pushes=PUSHES)
    assert [said for said, _ in learned] == [
        "",
        "the run closed the connection: it has ended, or this process is not part of it",
    ]
    assert {last for _, last in learned} == {-2.0 * PUSHES}


def test_every_field_of_every_message_has_bounds() -> None:
    """All but what may be anything: flags, the loss of a minibatch, and sums over weights."""
    free = {("Push", "loss"), ("Done", "sums")}
    messages = {*KINDS, *get_args(wire.OUTPUT)}
    hints: dict[Any, Any] = {kind: msgspec.inspect.type_info(kind) for kind in messages}
    loose = [
        (kind.__name__, field.name)
        for kind, info in hints.items()
        for field in info.fields
        if not _is_bounded(field.type)
    ]
    assert set(loose) <= free, sorted(loose)


def _is_bounded(kind: Any) -> bool:
    name = type(kind).__name__
    if name in ("BoolType", "LiteralType", "NoneType", "StructType"):
        return True
    if name in ("IntType", "FloatType"):
        return any(x is not None for x in (kind.ge, kind.gt)) and any(x is not None for x in (kind.le, kind.lt))
    if name in ("StrType", "BytesType"):
        return kind.max_length is not None
    if name == "VarTupleType":
        return kind.max_length is not None and _is_bounded(kind.item_type)
    if name == "TupleType":
        return all(map(_is_bounded, kind.item_types))
    if name == "DictType":
        return kind.max_length is not None and _is_bounded(kind.key_type) and _is_bounded(kind.value_type)
    if name == "UnionType":
        return all(map(_is_bounded, kind.types))
    raise AssertionError(name)


def test_a_frame_with_any_bit_flipped_is_refused() -> None:
    frame = wire.encode(wire.Push(1, 2, 3, 4, 5, 0.25, leases=(7,)))
    for bit in range(8 * len(frame)):
        torn = bytearray(frame)
        torn[bit // 8] ^= 1 << bit % 8
        with pytest.raises(wire.WireError):
            wire.decode_input(bytes(torn))
    for length in range(len(frame)):
        with pytest.raises(wire.WireError):
            wire.decode_input(frame[:length])
