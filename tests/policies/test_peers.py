"""Peers: version vectors, the window, and how far replicas can be from each other, in random worlds."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from offbeat.errors import EventError, RequestError
from offbeat.policies import create
from offbeat.policies.peers import PEERS, Peer, farthest, row_of, rule_of

WORLDS = 1000


class World:
    """Learners with a number as weights, each other's updates under way in any order between learners, and chance."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.learners = chance.randint(2, 6)
        self.window = chance.randint(1, 5)
        members = range(self.learners)
        self.peers = [Peer(me, members, window=self.window) for me in members]
        self.weights = np.zeros((self.learners, 3))
        self.seen: list[dict[int, int] | None] = [None] * self.learners  # of the minibatch that is computed
        self.sent = {
            (a, b): deque[tuple[int, dict[int, int], np.ndarray]]() for a in members for b in members if a != b
        }
        self.confirming = {key: deque[int]() for key in self.sent}
        self.largest = 0.0
        self.made = [0] * self.learners

    def choices(self) -> list[tuple[str, int, int]]:
        found = [("begin", me, me) for me, peer in enumerate(self.peers) if self.seen[me] is None and peer.may_begin]
        found += [("finish", me, me) for me in range(self.learners) if self.seen[me] is not None]
        found += [("arrive", a, b) for (a, b), queue in self.sent.items() if queue]
        return found + [("confirm", a, b) for (a, b), queue in self.confirming.items() if queue]

    def step(self, *, make: bool = True) -> bool:
        found = [one for one in self.choices() if make or one[0] != "begin"]
        if not found:
            return False
        what, a, b = self.chance.choice(found)
        if what == "begin":
            self.seen[a] = dict(self.peers[a].applied)
        elif what == "finish":
            seen = self.seen[a]
            assert seen is not None
            self.seen[a] = None
            update = np.array([self.chance.gauss(0, 1) for _ in range(3)])
            self.largest = max(self.largest, float(np.linalg.norm(update)))
            assert self.peers[a].make(seen) >= 0
            self.made[a] += 1
            self.weights[a] += update
            for other in range(self.learners):
                if other != a:
                    self.sent[a, other].append((self.made[a], seen, update))
        elif what == "arrive":
            number, seen, update = self.sent[a, b].popleft()
            assert self.peers[b].receive(a, number, seen) >= 0
            self.weights[b] += update
            self.confirming[b, a].append(number)
        else:
            self.peers[b].confirm(a, self.confirming[a, b].popleft())
        return True

    def check(self) -> None:
        apart = np.linalg.norm(self.weights - self.weights.mean(axis=0), axis=1).max()
        assert apart <= farthest(self.learners, self.window, self.largest) + 1e-9
        for peer in self.peers:
            for other, count in peer.applied.items():
                assert 0 <= self.made[other] - count <= (self.window if other != peer.me else 0)


@pytest.mark.parametrize("block", range(10))
def test_the_consensus_distance_is_bounded_and_all_updates_arrive_in_random_worlds(block: int) -> None:
    for seed in range(block * WORLDS // 10, (block + 1) * WORLDS // 10):
        world = World(random.Random(seed))
        for _ in range(80):
            assert world.step(), "somebody can always go on"
            world.check()
        while world.step(make=False):  # nobody begins another minibatch
            world.check()
        made = dict(enumerate(world.made))
        assert all(peer.has_all(made) for peer in world.peers)
        assert np.allclose(world.weights, world.weights[0], atol=1e-9)


def test_without_the_window_the_bound_is_broken() -> None:
    """The check can fail: a world whose learners never wait leaves the bound of a window of 1."""
    broken = 0
    for seed in range(50):
        world = World(random.Random(seed))
        world.window = 1
        for peer in world.peers:
            peer.window = 50
        try:
            for _ in range(200):
                world.step()
                world.check()
        except AssertionError:
            broken += 1
    assert broken > 25


def test_staleness_counts_the_updates_that_a_gradient_had_not_seen() -> None:
    one, two = Peer(0, [0, 1, 2]), Peer(1, [0, 1, 2])
    seen = dict(one.applied)
    assert one.receive(1, 1, {}) == 0
    assert one.receive(2, 1, {}) == 1  # it had not seen that of learner 1
    assert one.make(seen) == 2
    assert two.receive(0, 1, seen) == 0
    assert (one.version, two.version) == (3, 1)
    assert not two.has_all(one.applied) and one.has_all({0: 1, 1: 1, 2: 1})


def test_what_cannot_have_happened_is_refused() -> None:
    peer = Peer(0, [0, 1], window=1)
    with pytest.raises(EventError, match="expects update 1 of learner 1; got 2"):
        peer.receive(1, 2, {})
    with pytest.raises(EventError, match="cannot receive an update of learner 0"):
        peer.receive(0, 1, {})
    peer.make({})
    assert not peer.may_begin
    with pytest.raises(EventError, match="has 1 updates that another has not confirmed"):
        peer.make({})
    with pytest.raises(EventError, match="cannot confirm 2"):
        peer.confirm(1, 2)
    peer.confirm(1, 1)
    assert peer.may_begin
    assert Peer(3, [3]).may_begin  # alone


def test_lines_of_peers_are_read() -> None:
    for row in PEERS.values():
        for line in row.examples:
            assert row_of(line) is row
            rule_of(line)
    assert row_of("all-to-all") is None and row_of("ring") is None
    rule = rule_of("all-to-all:async,average=7,window=3,codec=top-k:0.01")
    assert (rule.average, rule.window, str(rule.codec)) == (7, 3, "top-k:0.01")
    assert not rule_of("average-once:start=own").sends
    with pytest.raises(RequestError, match="expected one codec"):
        rule_of("all-to-all:async,codec=auto")
    with pytest.raises(RequestError, match="no strategy of peers"):
        rule_of("ring")
    with pytest.raises(RequestError, match="has no server; only offbeat train, simulate and compare"):
        create("average-once", expect=2)
