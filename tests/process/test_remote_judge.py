"""The judge of runs that a fault has struck finds samples lost or doubled, and pushes that were taken twice."""

from __future__ import annotations

from typing import Any

from offbeat.runs.log import RunLog
from process.remote_runs import SAMPLES, Findings, judged_logs

HALF = SAMPLES // 2


def decision(ticket: int, start: int, count: int, *, seq: int | None = None) -> dict[str, Any]:
    """Learner 0 pushes these samples of the first epoch, and they are applied."""
    event = f"pushed 0 t{ticket} v{ticket} n{count} @{ticket}.0"
    return {
        "event": event,
        "commands": [f"apply t{ticket} *1.0"],
        "batch": [[0, start, count]],
        "seq": [1, ticket if seq is None else seq],
    }


def judged(*decisions: dict[str, Any], updates: int | None = None) -> Findings:
    made = len(decisions) if updates is None else updates
    samples = sum(one["batch"][0][2] for one in decisions[:made])
    last = {"epoch": 1, "samples": samples, "update": made, "accuracy": 0.9}
    return judged_logs([(RunLog(run={}, spans=(), decisions=decisions), made)], last)


def test_samples_that_are_each_in_one_update_are_well() -> None:
    found = judged(decision(0, 0, HALF), decision(1, HALF, SAMPLES - HALF))
    assert (found.lost, found.doubled, found.wrong) == (0, 0, ())


def test_samples_in_no_update_are_lost() -> None:
    assert judged(decision(0, 0, HALF)).lost == SAMPLES - HALF


def test_samples_in_two_updates_are_doubled() -> None:
    assert judged(decision(0, 0, SAMPLES), decision(1, 0, 10)).doubled == 10


def test_a_push_that_was_taken_twice_is_named() -> None:
    found = judged(decision(0, 0, HALF), decision(1, HALF, SAMPLES - HALF, seq=0))
    assert found.doubled == 1 and found.wrong == ("push (0, 1, 0) was taken twice",)


def test_what_the_policy_decided_and_nobody_made_is_held() -> None:
    found = judged(decision(0, 0, HALF), decision(1, HALF, SAMPLES - HALF), updates=1)
    assert (found.lost, found.doubled, found.wrong) == (0, 0, ())
