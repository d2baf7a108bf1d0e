"""Whatever an authenticated learner or server says, no law is broken: a small part of `make test-fuzz`."""

from __future__ import annotations

from collections import Counter

import pytest

from server import fuzz, fuzz_processes
from server.world import LINES


@pytest.mark.parametrize("first", range(0, len(LINES), 4))
def test_worlds_with_hostile_learners_and_servers_keep_every_law(first: int) -> None:
    sent: Counter[str] = Counter()
    for seed in range(first, first + 4):
        sent += fuzz.run(seed).sent
    assert sent["messages"] > 1000
    assert min(sent["accepted"], sent["refused"], sent["not a message"]) > 50, "some pass the gate, and some do not"


def test_an_answer_to_what_a_predecessor_said_as_nobody_does_not_drive_a_newcomer_away() -> None:
    """Found by chance: a message of incarnation 0 was answered, and a newcomer that was not welcome yet heard it."""
    assert fuzz.run(43).sent["messages"] > 100


def test_a_real_run_goes_on_beside_a_hostile_learner() -> None:
    found = fuzz_processes.run(1500)
    assert found["sent"] >= 1500 and found["refused"] > 100 and found["pushes"] > 0
