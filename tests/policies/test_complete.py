"""A policy is complete: what it says of itself is true, for every example of every row."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import EventError, RequestError
from offbeat.policies import EXAMPLES_FOR, POLICIES, Joined, Policy, Pushed, Wake, Woke, create, line_up, simplest
from offbeat.policies.memory import vectors_of
from offbeat.policies.table import params_of
from offbeat.server.arena import ArenaLayout
from offbeat.server.parameter_layout import ParameterLayout
from offbeat.server.run_setting import RunSetting
from offbeat.simulate import server
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.compute import parse_law
from offbeat.spec import parse
from policies.drive import World, say, started

LINES = [line for row in POLICIES.values() for line in row.examples]
SIMULATED = [line for line in LINES if not create(line, expect=EXAMPLES_FOR).needs_drift]


@pytest.mark.parametrize("name", POLICIES)
def test_a_row_has_examples_of_its_own_name_that_run_with_4_learners(name: str) -> None:
    row = POLICIES[name]
    assert row.examples and row.name == name and row.summary
    for line in row.examples:
        assert parse(line).name == name
        create(line, expect=EXAMPLES_FOR)
    create(row.examples[0], expect=2)
    assert [param.name for param in params_of(name)[-3:]] == ["rate", "codec", "down"]


@pytest.mark.parametrize("line", LINES)
@given(data=st.data())
@settings(max_examples=40)
def test_no_more_gradients_are_held_than_it_says(line: str, data: st.DataObject) -> None:
    world = World(line, EXAMPLES_FOR)
    world.run(data.draw, 80)
    assert world.most_held <= world.policy.max_held(EXAMPLES_FOR + 2)  # two more learners come and go


@pytest.mark.parametrize("line", SIMULATED)
def test_as_many_gradients_are_held_as_it_says(line: str) -> None:
    """The bound is met: memory for one gradient less would not do."""
    policy = create(line, expect=EXAMPLES_FOR)
    most = 0
    handle = policy.on_push

    def watched(event: Pushed):  # type: ignore[no-untyped-def]  # whatever `on_push` gives
        nonlocal most
        most = max(most, len(policy.held))
        return handle(event)

    policy.on_push = watched  # type: ignore[method-assign]  # to look at it from inside
    simulation = server.Simulation(line, Cluster(learners=EXAMPLES_FOR, law=parse_law("exp:1")), 300, 0, None)
    simulation.policy, simulation.handle = policy, policy.handle
    for _ in simulation.turns():
        pass
    grows = policy.needs_loss  # adaptive-k holds more as losses flatten, and a simulation has none
    assert most == policy.max_held(EXAMPLES_FOR) or (grows and most < policy.max_held(EXAMPLES_FOR))


@pytest.mark.parametrize("line", SIMULATED)
def test_updates_have_the_gradients_and_the_staleness_that_it_says(line: str) -> None:
    result = server.run(line, Cluster(learners=EXAMPLES_FOR, law=parse_law("exp:1"), seed=3), updates=4000)
    policy = create(line, expect=EXAMPLES_FOR)
    per_update = result.applied / policy.rule.push_every / result.updates
    said = policy.gradients_per_update(EXAMPLES_FOR)
    more, fewer = parse(line).name == "grace-sync", policy.shortens_small_updates  # than is said: a quorum, a deadline
    in_between = (more and said < per_update <= EXAMPLES_FOR) or (fewer and 1 <= per_update < said)
    assert per_update == pytest.approx(said) or in_between
    expected = policy.expected_staleness(EXAMPLES_FOR)
    assert expected.formula
    if expected.exact:
        assert result.staleness_mean == pytest.approx(expected.mean, abs=0.1)
    if expected.share_from is not None:
        assert expected.share_from(0) == 1
        applied = sum(result.staleness.values())
        for age in range(3):
            assert result.staleness.get(age, 0) / applied == pytest.approx(expected.share(age), abs=0.05)
    assert (result.cancelled > 0) <= policy.cancels
    assert policy.explain(result)


@pytest.mark.parametrize("line", LINES)
def test_a_line_by_a_simpler_name_has_the_same_timing(line: str) -> None:
    for learners in (1, 2, 3, 4):
        try:
            create(line, expect=learners)
        except RequestError:
            continue
        name = simplest(line, learners)
        if name == line or create(line, expect=learners).needs_drift:
            continue
        cluster = Cluster(learners=learners, law=parse_law("exp:1"))
        logs: list[list[dict[str, object]]] = [[], []]
        for one, log in zip((line, name), logs, strict=True):
            server.run(one, cluster, updates=50, write=log.append)
        events = [[record["event"] for record in log] for log in logs]
        assert events[0] == events[1], (line, name)


@pytest.mark.parametrize("line", LINES)
def test_what_waits_for_all_has_one_gradient_of_each_learner_in_an_update(line: str) -> None:
    policy = create(line, expect=EXAMPLES_FOR)
    if policy.waits_for_all(EXAMPLES_FOR):
        assert policy.gradients_per_update(EXAMPLES_FOR) == EXAMPLES_FOR


@pytest.mark.parametrize("line", LINES)
def test_a_server_has_room_for_what_the_policy_holds(line: str) -> None:
    for learners in (2, 4, 5):
        if learners < EXAMPLES_FOR and line != POLICIES[parse(line).name].examples[0]:
            continue
        setting = RunSetting(line=line, learners=learners)
        policy = setting.policy()
        assert setting.slots == learners + policy.max_held(learners) - 1 + (policy.rule.fetch_every > 0)


@pytest.mark.parametrize("line", LINES)
def test_the_memory_that_is_told_is_what_a_server_allocates(line: str) -> None:
    items = 2**20
    table = ParameterLayout((items,), (0,), 0, "float32", "float32", "sgd", ("momentum_buffer",), 0.0, False, "")
    allocated = ArenaLayout(table, RunSetting(line=line, learners=EXAMPLES_FOR)).size_bytes
    told = vectors_of(create(line, expect=EXAMPLES_FOR), EXAMPLES_FOR).size_bytes(4 * items)
    assert told <= allocated <= told + 64 * 4096  # the words of learners and servers, in whole pages


@pytest.mark.parametrize("line", LINES)
def test_what_is_kept_over_a_restart_is_plain_data_and_comes_back(line: str) -> None:
    policy = create(line, expect=EXAMPLES_FOR)
    assert set(policy.kept_over_restart) <= set(policy.extra_state)
    kept = json.loads(json.dumps(policy.kept()))
    again = create(line, expect=EXAMPLES_FOR)
    again.recall(kept)
    assert again.snapshot() == policy.snapshot()


def test_adaptive_k_goes_on_with_its_k_but_not_with_more_than_all_learners() -> None:
    policy = create("adaptive-k:1", expect=2)
    policy.recall({"k": 4, "losses": [1.0], "before": 2.0, "again": [7]})
    assert policy.kept() == {"k": 2, "losses": [1.0], "before": 2.0}


# --- time -----------------------------------------------------------------------------------------------------------


def timed() -> Policy:
    policy = started("grace-sync:2,grace=0.5s", 3)
    say(policy, "pushed 0 t1 v0 @1")
    assert say(policy, "pushed 1 t2 v0 @1") == ["wake @1.5"]
    return policy


def test_a_wake_before_its_time_or_without_one_cannot_be() -> None:
    policy = timed()
    before = policy.snapshot()
    with pytest.raises(EventError, match=r"the pending wake is at 1\.5 s"):
        policy.handle(Woke(1.25))
    assert policy.snapshot() == before
    policy.handle(Woke(1.5))
    with pytest.raises(EventError, match="no wake is pending"):
        policy.handle(Woke(2.0))


def test_a_pending_wake_is_in_the_snapshot() -> None:
    policy, again = timed(), create("grace-sync:2,grace=0.5s", expect=3)
    again.restore(json.loads(json.dumps(policy.snapshot())))
    assert again.wake_at_s == 1.5
    assert again.handle(Woke(1.5)) == policy.handle(Woke(1.5))


def test_a_snapshot_of_version_0_1_has_no_wake() -> None:
    policy = started("k-async:2", 3)
    state = {key: value for key, value in policy.snapshot().items() if key != "wake_at_s"}
    policy.restore(state)
    assert policy.wake_at_s is None


def test_a_log_of_version_0_1_with_a_tick_replays() -> None:
    from offbeat.policies import replay

    run = {"strategy": "async", "expect": 3, "start_by_s": 0.0}
    decisions = [
        {"event": "joined 0 @0.1", "commands": []},
        {"event": "tick @0.5", "commands": ["send 0"]},
        {"event": "joined 1 @0.6", "commands": ["send 1"]},
    ]
    assert replay(run, decisions).started


def test_a_grace_that_is_over_when_all_are_in_means_nothing() -> None:
    policy = timed()
    say(policy, "pushed 2 t3 v0 @1.25")
    assert policy.wake_at_s == 1.5
    assert policy.handle(Woke(1.5)) == ()


@pytest.mark.parametrize("line", ["grace-sync:1,grace=0.5s", "deadline-sync:1s"])
def test_a_timer_is_simulated_exactly(line: str) -> None:
    """One learner takes 1 s, the other 10: the update waits for the clock, and no longer."""
    cluster = Cluster(learners=2, law=parse_law("constant:0.9"), speeds=(1.0, 0.1))
    result = server.run(line, cluster, updates=10)
    assert result.seconds_per_update == pytest.approx(1.4 if "grace" in line else 1.0)
    assert result.cancelled == 10 and result.staleness_mean == 0


def test_a_wake_in_the_past_is_due_at_once() -> None:
    class Hasty(Policy):
        def on_push(self, event: Pushed):  # type: ignore[no-untyped-def]  # of commands
            return (self.wake(event.at_s - 1.0, "too late"),)

        def on_wake(self):  # type: ignore[no-untyped-def]  # of commands
            return (self.apply(tuple(self.held), "woken"), *(self.send(one, "again") for one in self.learners))

        def max_held(self, learners: int) -> int:
            return 1

        gradients_per_update = max_held

    policy = Hasty(expect=1)
    simulation = server.Simulation("async", Cluster(learners=1, law=parse_law("constant:1")), 3, 0, None)
    simulation.policy, simulation.handle = policy, policy.handle
    simulation.go()
    assert policy.version == 3 and simulation.now == 3.0


# --- the two loops of the simulator -----------------------------------------------------------------------------------


@pytest.mark.parametrize("line", SIMULATED)
@pytest.mark.parametrize("seed", range(3))
def test_the_quick_loop_and_the_plain_one_are_the_same_run(line: str, seed: int) -> None:
    cluster = Cluster(
        learners=EXAMPLES_FOR + seed, law=parse_law(["exp:1", "pareto:2,1", "constant:1"][seed]), seed=seed
    )
    runs = []
    for quickly in (True, False):
        log: list[dict[str, object]] = []
        simulation = server.Simulation(line, cluster, 200, 0, log.append)
        if quickly and not simulation.is_plain:
            pytest.skip("learners go on by themselves: the quick loop is not used")
        if quickly:
            simulation.go()
        else:
            for _ in simulation.turns():
                pass
        result = simulation.result().as_json()
        result["events"] = 0  # the plain loop counts other entries
        runs.append(
            (log, {name: pytest.approx(value) if isinstance(value, float) else value for name, value in result.items()})
        )
    assert runs[0][0] == runs[1][0]
    assert runs[1][1] == json.loads(json.dumps(server_result(line, cluster)))


def server_result(line: str, cluster: Cluster) -> dict[str, object]:
    return server.run(line, cluster, updates=200).as_json() | {"events": 0}


# --- line-ups ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["compare", "race", "replay", "check"])
@pytest.mark.parametrize("learners", [1, 2, 3, 4, 8, 30])
def test_a_line_up_has_lines_that_can_run_and_no_strategy_twice(command: str, learners: int) -> None:
    lines = line_up(command, learners)
    assert len(lines) == len(set(lines))
    for line in lines:
        create(line, expect=learners)
        assert simplest(line, learners).partition(":")[0] == parse(line).name or "rate=" in line


def test_a_policy_that_drops_what_it_held_must_say_so() -> None:
    class Forgetful(Policy):
        def on_push(self, event: Pushed):  # type: ignore[no-untyped-def]  # of commands
            return tuple(self.drop(ticket, "old") for ticket in list(self.held)[:1]) if len(self.held) > 1 else ()

    policy = Forgetful(expect=2)
    policy.handle(Joined(0))
    policy.handle(Joined(1))
    policy.handle(Pushed(0, 1, 0))
    with pytest.raises(TypeError, match="drops_held"):
        policy.handle(Pushed(1, 2, 0))


def test_a_wake_is_a_command_with_a_reason() -> None:
    policy = timed()
    assert policy.wake_at_s == 1.5
    assert policy.wake(2.0, "why") == Wake(2.0)
