"""Random worlds keep every law, and every planted bug breaks one."""

from __future__ import annotations

import itertools

import pytest

from server import world
from server.planted import FOUND_AT, KITS
from server.world import LINES, World, found_at

SEEDS = 312  # thirteen of each line; `python -m server.world` goes through thousands


@pytest.mark.parametrize("line", range(len(LINES)), ids=LINES)
def test_every_law_is_kept_whatever_goes_wrong(line: int) -> None:
    for seed in range(line, SEEDS, len(LINES)):
        story = World(seed).run()
        assert story.updates > 0 or story.faults.total() > 0


def test_a_world_follows_from_its_seed() -> None:
    first, second = World(1), World(1)
    assert first.run() == second.run()
    assert first.oracle.history == second.oracle.history
    assert first.coordinator.counts == second.coordinator.counts


@pytest.mark.parametrize("name", KITS)
def test_a_planted_bug_is_found(name: str) -> None:
    # The seed at which it was seen first; should the worlds have changed since, then the first of 2,000.
    found = found_at(KITS[name], itertools.chain((FOUND_AT.get(name, 0),), range(2000)))
    assert found is not None, f"no law is broken in 2,000 worlds with '{name}'"


def test_worlds_pause_and_some_go_on_from_what_was_saved() -> None:
    stories = [World(seed).run() for seed in (0, 1, 2, 3, 14, 52)]
    assert sum(story.pauses for story in stories) > 0
    assert any(story.halted for story in stories)
    assert any(not story.pauses for story in stories)


def test_every_fault_happens() -> None:
    missing = set(world.FAULTS) | set(world.NETWORK_FAULTS)
    for seed in range(48):
        missing -= World(seed).run().faults.keys()
        if not missing:
            break
    assert not missing
