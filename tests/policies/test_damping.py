"""The steps of stale updates are made shorter: by the expected staleness first, by the measured one later."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest

from offbeat.policies import Apply, Joined, Policy, Pushed, Woke, create
from offbeat.policies.events import as_text, from_text


def started(line: str, learners: int, *, corrects: bool = True) -> Policy:
    policy = create(line, expect=learners, corrects=corrects)
    for learner in range(learners):
        policy.handle(Joined(learner))
    return policy


def rounds(policy: Policy, count: int, *, learners: int) -> list[Apply]:
    """Learners push one after the other, each what it computed at the version it was last given."""
    applied = []
    for ticket in range(policy.last_ticket + 1, policy.last_ticket + 1 + count):
        learner = ticket % learners
        commands = policy.handle(Pushed(learner, ticket, policy.learners[learner].version, 1, 1.0))
        applied += [command for command in commands if isinstance(command, Apply)]
    return applied


@pytest.mark.parametrize(
    ("line", "learners", "damping"),
    [
        ("async", 1, 1.0),
        ("async", 2, 1 / 2),
        ("async", 4, 1 / 4),
        ("k-async:2", 4, 1 / 2),
        ("k-batch-async:2", 4, 1 / 2.5),
        ("full-sync", 4, 1.0),
        ("local-sgd:4", 4, 1.0),
        ("async:rate=delay-compensated:0.04", 4, 1 / 4),
    ],
)
def test_the_first_step_is_shortened_by_the_expected_staleness(line: str, learners: int, damping: float) -> None:
    policy = create(line, expect=learners, corrects=True)
    assert policy.damping is not None
    assert policy.damping.now() == pytest.approx(damping, abs=1e-6)


def test_without_the_correction_nothing_is_shortened() -> None:
    assert {update.damping for update in rounds(started("async", 4, corrects=False), 40, learners=4)} == {1.0}
    assert started("async", 4, corrects=False).staleness_note() == ""


def test_synchronous_updates_are_never_shortened_also_of_unequal_minibatches() -> None:
    policy = started("full-sync", 3)
    applied = []
    for ticket in range(30):
        commands = policy.handle(Pushed(ticket % 3, ticket, policy.version, 1 + ticket % 7))
        applied += [command for command in commands if isinstance(command, Apply)]
    assert len(applied) == 10 and {update.damping for update in applied} == {1.0}


def test_the_measured_staleness_takes_the_place_of_the_expected_one() -> None:
    """Of four learners only two push: gradients are one version old, where three were expected."""
    policy = started("async", 4)
    applied = rounds(policy, 2000, learners=2)
    assert applied[0].damping == pytest.approx(1 / 4, rel=0.02)
    assert applied[-1].damping == pytest.approx(1 / 2, rel=0.001)
    assert all(one.damping <= other.damping + 1e-6 for one, other in pairwise(applied[2:]))


def test_what_a_rule_takes_off_counts() -> None:
    """With rate=inverse gradients 3 versions old count a third: with the damping a quarter in all, as without it."""
    update = rounds(started("async:rate=inverse", 4), 400, learners=4)[-1]
    assert update.scales == (1 / 3,)
    assert update.scales[0] * update.damping == pytest.approx(1 / 4, rel=1e-3)


@pytest.mark.parametrize(
    ("line", "learners", "scaling", "damping"),
    [
        ("k-batch-async:4", 4, 4, 1 / (1 + 3 / 4 * 4)),
        ("softsync:2", 4, 2, 1 / (1 + 3 / 2 * 2)),
        ("k-async:2", 4, 2, 1 / (1 + 1 * 2)),
        ("async", 30, 1 / 8, 1 / (1 + 29 / 8)),  # a rate that was lowered for small minibatches
        ("full-sync", 4, 4, 1.0),
        ("local-sgd:4", 4, 1, 1.0),
    ],
)
def test_a_scaled_step_is_shortened_by_the_staleness_in_steps_of_one_minibatch(
    line: str, learners: int, scaling: float, damping: float
) -> None:
    policy = create(line, expect=learners, corrects=True, scaling=scaling)
    assert policy.damping is not None
    assert policy.damping.now() == pytest.approx(damping, abs=1e-6)


def test_a_push_that_adds_up_gradients_is_a_longer_step() -> None:
    policy = create("downpour:push=4,fetch=1", expect=4, corrects=True)
    assert policy.damping is not None
    policy.damping.mean = 2.0
    assert policy.damping.now() == pytest.approx(1 / (1 + 2 * 4), abs=1e-6)


def test_a_deadline_that_few_keep_shortens_the_step_that_was_scaled_for_all() -> None:
    for scaling, first, second in ((4.0, 1.0, 0.25), (1.0, 1.0, 1.0)):  # 1: a rate that nobody has scaled
        policy = create("deadline-sync:1s", expect=4, corrects=True, scaling=scaling)
        for learner in range(4):
            policy.handle(Joined(learner))
        commands = [*(policy.handle(Pushed(learner, learner, 0)) for learner in range(4))]
        assert [one.damping for one in commands[-1] if isinstance(one, Apply)] == [first]
        policy.handle(Pushed(2, 4, 1, at_s=0.5))
        assert [one.damping for one in policy.handle(Woke(1.0)) if isinstance(one, Apply)] == [second]


@pytest.mark.parametrize("staleness", [1, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_with_momentum_too_the_way_that_a_gradient_goes_in_the_end_decides(staleness: int, momentum: float) -> None:
    """lr / (1 - momentum) times c: a step of 1 / (1 + t) of it is stable, one of pi / (1 + t) is not."""

    def ends_at(way: float) -> float:
        weights, step = [1.0] * (staleness + 1), 0.0
        for _ in range(3000):
            step = momentum * step - way * (1 - momentum) * weights[-1 - staleness]
            weights.append(weights[-1] + step)
            if abs(weights[-1]) > 1e9:
                break
        return abs(weights[-1])

    assert ends_at(1 / (1 + staleness)) < 1e-6 < 1e6 < ends_at(3.15 / (1 + staleness))


def test_the_measured_staleness_is_in_snapshots_and_kept_over_a_restart() -> None:
    policy = started("async", 4)
    rounds(policy, 100, learners=2)
    again = create("async", expect=4, corrects=True)
    again.restore(json.loads(json.dumps(policy.snapshot())))
    assert rounds(again, 10, learners=2) == rounds(policy, 10, learners=2)
    later = create("async", expect=4, corrects=True)
    later.recall(json.loads(json.dumps(policy.kept())))
    assert later.damping is not None and policy.damping is not None
    assert later.damping.mean == policy.damping.mean < 3


@pytest.mark.parametrize(("line", "learners"), [("full-sync", 4), ("async", 8), ("k-async:2", 4)])
def test_the_staleness_of_another_strategy_or_of_other_learners_is_not_kept(line: str, learners: int) -> None:
    policy = started("async", 4)
    rounds(policy, 100, learners=2)
    other = create(line, expect=learners, corrects=True)
    other.recall(policy.kept())
    assert other.damping is not None
    assert other.damping.mean == other.expected_staleness(learners).mean


def test_a_damping_is_a_part_of_the_command_and_of_its_text() -> None:
    update = Apply((7, 9), (1.0, 0.5), "why", 0.25)
    assert as_text(update) == "apply t7 t9 *1.0 *0.5 x0.25"
    assert from_text(as_text(update)) == update != Apply((7, 9), (1.0, 0.5), "why")
    assert from_text("apply t7") == Apply((7,), (1.0,))


def test_a_quadratic_is_stable_with_the_damping_and_not_without() -> None:
    """lr c = 1.5 is stable with fresh gradients; 3 versions old, the bound is 0.445."""

    def ends_at(damping: float, staleness: int) -> float:
        weights = [1.0] * (staleness + 1)
        for _ in range(400):
            weights.append(weights[-1] - 1.5 * damping * weights[-1 - staleness])
        return abs(weights[-1])

    damping = create("async", expect=4, corrects=True).damping
    assert damping is not None
    assert ends_at(1.0, staleness=0) < 1e-6 < 1e6 < ends_at(1.0, staleness=3)
    assert ends_at(damping.now(), staleness=3) < 1e-6
