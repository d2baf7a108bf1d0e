"""Some rows of the matrix (the others: make test-matrix), that it has them all, and that its ledger can complain."""

from __future__ import annotations

from pathlib import Path

import pytest

from offbeat import spec as grammar
from offbeat.runs.log import RunLog
from offbeat.strategy import PEERS, strategies
from train import matrix
from train.matrix import ROWS, Audit, Row, audited

Decision = tuple[str, list[list[int]], list[str]]  # an event, its batch and the commands
HERE = {"ring": 12, "k-sync:2": 12, "k-async:2": 12, "downpour": 20}  # epochs; in the matrix the first three have 32


@pytest.mark.parametrize("sync", HERE)
def test_a_strategy_learns_the_digits_and_its_books_are_right(sync: str, tmp_path: Path) -> None:
    row = next(row for row in ROWS if row.sync == sync)
    row = row._replace(way=row.way._replace(train={**row.way.train, "epochs": HERE[sync]}))
    assert matrix.trained(row, tmp_path / "run").complaints == []


def test_every_strategy_is_in_the_matrix() -> None:
    assert {grammar.parse(row.sync).name for row in ROWS} == {
        name for name, known in strategies().items() if known.family != PEERS
    }


def test_rows_have_two_to_four_learners_and_synchronous_ones_must_be_better() -> None:
    assert {row.learners for row in ROWS} == {2, 3, 4}
    assert {row.sync: row.least for row in (Row("ring", 2), Row("k-batch-sync:2", 2), Row("ssp:1", 2))} == {
        "ring": 0.95,
        "k-batch-sync:2": 0.95,
        "ssp:1": 0.94,
    }


# --- the ledger -------------------------------------------------------------------------------------------------------


def _audit(*decisions: Decision) -> Audit:
    """Of a log with these pushes, one epoch of 8 samples."""
    records = [{"event": event, "batch": batch, "commands": commands} for event, batch, commands in decisions]
    return audited(RunLog(run={}, decisions=tuple(records)), epochs=1, samples=8)


def test_a_dropped_gradient_counts_when_its_samples_come_again() -> None:
    first = ("pushed 0 t1 v0 n4 @1.0", [[0, 0, 4]], ["drop t1", "send 0"])
    second = ("pushed 1 t2 v0 n4 @2.0", [[0, 4, 4]], ["apply t2", "send 1"])
    again = ("pushed 0 t3 v1 n4 @3.0", [[0, 0, 2], [0, 2, 2]], ["apply t3", "send 0"])
    audit = _audit(first, second, again)
    assert (audit.complaints(), audit.gradients) == ([], 2)
    assert _audit(first, second).complaints() == [
        "epoch 0: 4 samples neither applied nor held at the end, from position 0 on"
    ]


def test_a_sample_that_is_applied_twice_is_found() -> None:
    held: Decision = ("pushed 0 t1 v0 n4 @1.0", [[0, 0, 4]], [])
    both = ("pushed 1 t2 v0 n5 @2.0", [[0, 3, 5]], ["apply t1 t2"])
    assert _audit(held, both).complaints() == ["epoch 0: 1 samples applied more than once, from position 3 on"]


def test_what_is_held_at_the_end_is_told_apart() -> None:
    audit = _audit(
        ("pushed 0 t1 v0 n6 @1.0", [[0, 0, 6]], ["apply t1", "send 0"]),
        ("pushed 1 t2 v0 n2 @2.0", [[0, 6, 2]], ["send 1"]),
    )
    assert (audit.complaints(), int(audit.applied.sum()), int(audit.held.sum())) == ([], 6, 2)


def test_a_push_whose_leases_are_not_its_samples_is_found() -> None:
    with pytest.raises(AssertionError, match="has 3 samples by its leases"):
        _audit(("pushed 0 t1 v0 n4 @1.0", [[0, 0, 3]], ["apply t1"]))


def test_an_epoch_whose_samples_do_not_add_up_is_named() -> None:
    record = {"epoch": 1, "samples": 6, "held": 0, "dropped": {matrix.ENDED: 2}}
    assert matrix._epoch_complaints([record], 1, 8) == []
    lost = record | {"samples": 5}
    assert matrix._epoch_complaints([lost], 1, 8) == ["after epoch 1 7 samples are accounted for, of 8"]
    assert matrix._epoch_complaints([record | {"held": 2, "dropped": {}}], 1, 8) == [
        "2 samples are held at the end, in no bucket"
    ]
    assert matrix._epoch_complaints([record | {"dropped": {"not finite": 2}}], 1, 8) == [
        "samples were dropped: {'not finite': 2}"
    ]
