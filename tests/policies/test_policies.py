"""Exact answers of every policy to short stories, as the definitions have them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from offbeat.errors import EventError, LogError, ReplayError, RequestError
from offbeat.policies import (
    POLICIES,
    Apply,
    Asked,
    Command,
    Event,
    Joined,
    Left,
    Policy,
    Pushed,
    Stopped,
    create,
    recorded,
    replay,
)
from offbeat.policies.base import LearnerRule
from offbeat.policies.events import as_text
from offbeat.policies.replay import decision
from policies.drive import World, say, started

SCENARIOS = sorted((Path(__file__).parents[1] / "scenarios").glob("*.txt"))
LINES = [line for row in POLICIES.values() for line in row.examples]


# --- exact stories --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    """A scenario file: the policy, then events, each followed by the commands it must lead to, indented."""
    lines = [line.split("#")[0].rstrip() for line in path.read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line]
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 40, "a scenario is short enough to be read"
    word, strategy, _, learners = lines.pop(0).split()
    assert word == "policy"
    policy = create(strategy, expect=int(learners))
    while lines:
        event = lines.pop(0)
        expected = []
        while lines and lines[0].startswith(" "):
            expected += [command.strip() for command in lines.pop(0).split("|")]
        assert say(policy, event) == expected, event


def test_nobody_is_sent_weights_before_all_have_joined_or_the_deadline_has_passed() -> None:
    policy = create("async", expect=3, start_by_s=10.0)
    assert say(policy, "joined 0") == []
    assert say(policy, "woke @9.9") == []
    assert say(policy, "joined 1") == []
    assert say(policy, "woke @10") == ["send 0", "send 1"]
    with pytest.raises(EventError, match="no wake is pending"):
        say(policy, "woke @11")
    assert say(policy, "joined 2") == ["send 2"]


def test_unequal_minibatches_are_weighted_by_their_samples() -> None:
    policy = started("full-sync", 2)
    say(policy, "pushed 0 t1 v0 n3")
    (apply, *_) = policy.handle(Pushed(1, 2, 0, 1))
    assert apply == Apply((1, 2), (1.5, 0.5))


@pytest.mark.parametrize(
    ("rate", "scales"),
    [
        ("constant", (1.0, 1.0)),
        ("inverse", (1.0, 0.5)),
        ("inverse-mean", (1.0, 1.0)),  # the mean is 1
        ("drift:0.5", (1.0, 0.125)),
        ("delay-compensated:0.04", (1.0, 1.0)),
    ],
)
def test_rates_scale_by_staleness_or_drift(rate: str, scales: tuple[float, float]) -> None:
    """An update of two gradients: one fresh with drift 0.25, one two versions old with drift 4."""
    policy = started(f"k-batch-async:2,rate={rate}", 3)
    for ticket, (learner, version) in enumerate([(0, 0), (2, 0), (0, 0), (2, 1)]):
        say(policy, f"pushed {learner} t{ticket} v{version} n1 drift=0")
    assert policy.version == 2
    say(policy, "pushed 2 t4 v2 n1 drift=0.25")
    (apply, _) = policy.handle(Pushed(1, 5, 0, 1, 4.0))
    assert isinstance(apply, Apply)
    assert apply.scales == pytest.approx(scales)
    assert policy.rate.compensation == (0.04 if "delay" in rate else 0.0)


def test_the_mean_staleness_of_an_update_divides_all_its_gradients() -> None:
    policy = started("k-batch-async:2,rate=inverse-mean", 3)
    for ticket, (learner, version) in enumerate([(0, 0), (2, 0), (0, 0), (2, 1), (2, 2), (2, 2), (0, 1)]):
        say(policy, f"pushed {learner} t{ticket} v{version}")
    (apply, _) = policy.handle(Pushed(1, 7, 0))  # 3 and 2 versions old
    assert isinstance(apply, Apply) and apply.scales == pytest.approx((1 / 2.5, 1 / 2.5))


def test_a_rate_by_drift_needs_the_drift() -> None:
    policy = started("async:rate=drift:1", 1)
    with pytest.raises(EventError, match="needs a drift"):
        policy.handle(Pushed(0, 1, 0))


def test_adaptive_k_doubles_when_the_loss_flattens_and_stops_at_all_learners() -> None:
    policy = started("adaptive-k:1,window=2,improvement=0.1", 3)
    ks = []
    for ticket, loss in enumerate([4.0, 4.0, 2.0, 2.0, 1.99, 1.99]):
        say(policy, f"pushed 0 t{ticket} v{policy.version} n1 loss={loss}")
        ks.append(policy.snapshot()["k"])
    assert ks == [1, 1, 1, 1, 1, 2]
    policy.restore(policy.snapshot() | {"k": 2, "losses": [5.0], "before": 1.0})
    policy.last_ticket = 89
    say(policy, f"pushed 0 t90 v{policy.version} n1 loss=5.0")
    say(policy, "pushed 1 t91 v0 n1 loss=5.0")
    assert policy.snapshot()["k"] == 3


def test_downpour_and_local_sgd_tell_learners_what_to_do_by_themselves() -> None:
    assert create("downpour:push=4,fetch=2", expect=2).rule == LearnerRule(4, 2)
    assert create("local-sgd:8,outer=nesterov", expect=2).rule == LearnerRule(8, delta=True)
    assert create("k-sync:1", expect=2).rule == LearnerRule()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("async:codec=auto", "expected one codec for all links, like int8; got 'auto'"),
        ("async:codec=int8@across", "expected one codec for all links"),
        ("async:down=top-k:0.1", "weights are sent whole, by a codec that rounds to the nearest"),
        ("async:down=int8:stochastic", "weights are sent whole, by a codec that rounds to the nearest"),
    ],
)
def test_codecs_that_a_server_cannot_use_are_refused(line: str, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        create(line, expect=2)


def words(commands: tuple[Command, ...]) -> list[list[str]]:
    return [sorted(as_text(command).split()) for command in commands]


# --- identities, command for command --------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=60)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("full-sync", "k-sync:4"),
        ("async", "k-batch-async:1"),
        ("async", "k-async:1"),
        ("softsync:2", "k-batch-async:2"),
        ("softsync:3", "k-batch-async:1"),
        ("k-async:4", "full-sync"),
        ("stale-drop:1000", "async"),
        ("ssp:1000", "async"),
    ],
)
def test_policies_that_are_the_same_say_the_same(one: str, other: str, data: st.DataObject) -> None:
    """On random runs of four learners that stay (identities between barriers hold while nobody comes or goes)."""
    first, second = started(one, 4), started(other, 4)
    computing = dict.fromkeys(range(4), 0)
    for ticket in range(data.draw(st.integers(0, 60))):
        if not computing:
            break
        learner = data.draw(st.sampled_from(sorted(computing)))
        event = Pushed(learner, ticket, computing.pop(learner))
        answer = first.handle(event)
        other_answer = second.handle(event)
        if one == "k-async:4":  # the same, but for the order: of arrival here, of learners there
            assert sorted(words(answer)) == sorted(words(other_answer))
        else:
            assert answer == other_answer
        for line in map(as_text, answer):
            if line.startswith("send"):
                computing[int(line.split()[1])] = first.version


# --- random runs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", LINES)
@given(st.data())
@settings(max_examples=120)
def test_random_runs_keep_every_invariant(strategy: str, data: st.DataObject) -> None:
    world = World(strategy, 4)
    world.run(data.draw, 60)


@pytest.mark.parametrize("strategy", LINES)
@given(st.data())
@settings(max_examples=15)
def test_a_policy_restored_from_its_snapshot_goes_on_as_if_nothing_had_been(strategy: str, data: st.DataObject) -> None:
    world = World(strategy, 4)
    world.run(data.draw, 30)
    state = json.loads(json.dumps(world.policy.snapshot()))
    copy = create(strategy, expect=4)
    copy.restore(state)
    assert copy.snapshot() == world.policy.snapshot()
    before = len(world.log)
    world.run(data.draw, 20)
    for event, commands in world.log[before:]:
        assert copy.handle(event) == commands


@pytest.mark.parametrize("strategy", LINES)
@given(st.data())
@settings(max_examples=15)
def test_a_log_replays_to_the_same_commands(strategy: str, data: st.DataObject) -> None:
    world = World(strategy, 4)
    world.run(data.draw, 40)
    log = [decision(event, commands) for event, commands in world.log]
    again = replay({"strategy": strategy, "expect": 4}, log)
    assert again.snapshot() == world.policy.snapshot()


@pytest.mark.parametrize("strategy", LINES)
@given(st.data())
@settings(max_examples=25)
def test_an_event_that_cannot_be_raises_and_changes_nothing(strategy: str, data: st.DataObject) -> None:
    world = World(strategy, 4)
    world.run(data.draw, 30)
    before = world.policy.snapshot()
    impossible: list[Event] = [Joined(-1), Left(9), Asked(9), Stopped(9, 0), Pushed(9, 999, 0, 1, 1.0)]
    for learner in sorted(world.present):
        owed = world.owed[learner]
        impossible += [Joined(learner), Pushed(learner, 999, world.version + 1, 1, 1.0)]
        impossible += [Stopped(learner, world.version), Stopped(learner, world.version + 1)]
        if not owed:
            impossible += [Pushed(learner, 999, version, 1, 1.0) for version in range(world.version + 1)]
            impossible += [Asked(learner)]
    for event in impossible:
        with pytest.raises(EventError, match="is impossible"):
            world.policy.handle(event)
        assert world.policy.snapshot() == before, event


def test_a_ticket_that_is_held_already_and_a_gradient_of_no_samples_are_refused() -> None:
    policy = started("full-sync", 2)
    say(policy, "pushed 0 t1 v0")
    before = policy.snapshot()
    for line, says in (
        ("pushed 1 t1 v0", "tickets must rise, and the last one was 1"),
        ("pushed 1 t2 v0 n0", "at least 1 sample"),
    ):
        with pytest.raises(EventError, match=says):
            say(policy, line)
    assert policy.snapshot() == before


# --- planted bugs: the checks can fail ------------------------------------------------------------------------


def planted_bugs() -> dict[str, tuple[str, str]]:
    """Name -> (strategy, which attribute is replaced by something wrong); see `break_policy`."""
    return {
        "applies one too few": ("k-batch-async:3", "apply-late"),
        "forgets to send": ("async", "no-send"),
        "sends twice": ("async", "send-twice"),
        "applies late work": ("k-sync:2", "keep-late"),
        "does not cancel": ("k-sync:2", "no-cancel"),
        "applies a ticket twice": ("k-async:2", "apply-twice"),
        "drops without saying": ("stale-drop:0", "silent-drop"),
        "skips a version": ("async", "skip-version"),
        "forgets who left": ("full-sync", "ghost"),
        "waits for the dead": ("full-sync", "no-leave"),
        "resumes the last one too": ("k-batch-sync:3", "resume-last"),
        "lets nobody wait": ("k-async:2", "send-early"),
    }


def break_policy(policy: Policy, how: str) -> None:
    original = policy.handle

    def handle(event):  # type: ignore[no-untyped-def]  # a wrapper of any event
        if how == "ghost" and as_text(event).startswith("left"):
            return ()
        if how == "keep-late" and isinstance(event, Pushed) and event.version < policy.version:
            policy.applied += 1
            policy.version += 1
            return (Apply((event.ticket,), (1.0,)),)
        commands = list(original(event))
        kinds = [as_text(command).split()[0] for command in commands]
        if how == "no-send" and isinstance(event, Pushed):
            commands = [c for c, kind in zip(commands, kinds, strict=True) if kind != "send"]
        if how == "send-twice" and isinstance(event, Pushed):
            commands += [c for c, kind in zip(commands, kinds, strict=True) if kind == "send"]
        if how == "no-cancel":
            commands = [c for c, kind in zip(commands, kinds, strict=True) if kind != "cancel"]
        if how == "apply-twice" and "apply" in kinds:
            commands.append(commands[kinds.index("apply")])
        if how == "silent-drop":
            commands = [c for c, kind in zip(commands, kinds, strict=True) if kind != "drop"]
        if how == "skip-version" and "apply" in kinds:
            policy.version += 1
        return tuple(commands)

    policy.handle = handle  # type: ignore[method-assign]  # on purpose
    if how == "apply-late":
        policy.k += 1  # type: ignore[attr-defined]  # on purpose; the cap below is that of the right K
        policy.max_held = lambda learners: 2  # type: ignore[method-assign]  # on purpose
    if how == "no-leave":
        policy.on_leave = lambda learner: ()  # type: ignore[method-assign]  # on purpose
    if how == "resume-last":
        cut = policy.cut  # type: ignore[attr-defined]  # on purpose
        policy.cut = lambda why: (*cut(why), policy.resume(next(iter(policy.learners)), why))  # type: ignore[attr-defined]
    if how == "send-early":
        policy.on_push = lambda event: (policy.send(event.learner, "early"),)  # type: ignore[method-assign]  # on purpose


@pytest.mark.parametrize("bug", planted_bugs())
def test_a_planted_bug_is_found(bug: str) -> None:
    strategy, how = planted_bugs()[bug]

    @given(st.data())
    @settings(max_examples=300, report_multiple_bugs=False, phases=[Phase.generate])  # the first will do as it is
    def hunt(data: st.DataObject) -> None:
        policy = create(strategy, expect=4)
        break_policy(policy, how)
        World(strategy, 4, policy).run(data.draw, 60)

    with pytest.raises(
        (AssertionError, EventError)
    ):  # a law broken, or an event that cannot be: not a crash of the bug
        hunt()


def test_what_a_learner_owed_may_still_come_after_it_asked() -> None:
    policy = started("k-sync:1", 2)
    assert say(policy, "pushed 0 t1 v0") == ["apply t1", "cancel 1", "send 0", "send 1"]
    assert say(policy, "asked 1") == ["send 1"]  # before it had heard
    assert say(policy, "pushed 1 t2 v0") == ["drop t2"]
    with pytest.raises(EventError):  # once, and not twice
        say(policy, "pushed 1 t3 v0")
    assert say(policy, "pushed 1 t3 v1") == ["apply t3", "cancel 0", "send 0", "send 1"]


def test_no_push_is_applied_twice() -> None:
    policy = started("k-batch-async:1", 2)
    say(policy, "pushed 0 t1 v0")
    with pytest.raises(EventError, match="tickets must rise"):
        say(policy, "pushed 1 t1 v0")
    policy = started("downpour", 2)
    say(policy, "pushed 0 t5 v0")
    with pytest.raises(EventError, match="tickets must rise"):
        say(policy, "pushed 0 t5 v0")


def test_full_sync_waits_for_the_slow_one_however_often_another_comes_back() -> None:
    policy = started("full-sync", 2)
    say(policy, "pushed 0 t0 v0")
    for ticket in range(1, 6):
        assert say(policy, "left 0") == []
        assert say(policy, "joined 0") == ["send 0"]
        assert say(policy, f"pushed 0 t{ticket} v0") == [f"drop t{ticket}"]
    assert say(policy, "pushed 1 t9 v0") == ["apply t0 t9", "send 1", "send 0"]


def test_a_push_of_downpour_is_never_older_than_the_one_before() -> None:
    policy = started("downpour:push=1,fetch=1", 1)
    for line in ("pushed 0 t0 v0", "asked 0", "pushed 0 t1 v1"):
        say(policy, line)
    with pytest.raises(EventError):
        say(policy, "pushed 0 t2 v0")


def test_a_snapshot_of_another_policy_or_half_of_one_changes_nothing() -> None:
    policy, other = started("ssp:1", 2), started("async", 2)
    before = policy.snapshot()
    for wrong in (other.snapshot(), {**before, "seats": [[1]]}, {key: before[key] for key in before if key != "held"}):
        with pytest.raises(RequestError):
            policy.restore(wrong)
        assert policy.snapshot() == before


def test_a_drift_that_cannot_be_is_refused() -> None:
    policy = started("async:rate=drift:1", 1)
    for drift in (-2.0, float("nan")):
        with pytest.raises(EventError, match="a drift of 0 or more"):
            policy.handle(Pushed(0, 1, 0, 1, drift))


@pytest.mark.parametrize(
    "record", [{"event": "apply t1", "commands": []}, {"event": 5, "commands": []}, {"event": "tick @1"}]
)
def test_a_record_that_is_no_decision_does_not_replay(record: dict[str, object]) -> None:
    with pytest.raises(ReplayError, match="decision 1"):
        replay({"strategy": "async", "expect": 1}, [record])
    with pytest.raises(LogError, match="'strategy' and 'expect'"):
        replay({"strategy": "async", "expect": "1"}, [])


# --- the table ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expect", "says"),
    [
        ("k-sync:9", 8, "K=9 exceeds the 8 learners"),
        ("k-async:9", 8, "K=9 exceeds the 8 learners"),
        ("adaptive-k:9", 8, "K=9"),
        ("softsync:9", 8, "N=9"),
        ("k-sync:0", 8, "k: expected a whole number from 1"),
        ("k-sync", 8, "K is missing"),
        ("k-sink:2", 8, "did you mean 'k-sync'"),
        ("k-async:2,rate=inverted", 8, "did you mean 'inverse'"),
        ("k-async:2,rate=drift", 8, "NUMBER is missing"),
        ("k-async:2,rate=drift:-1", 8, "above 0"),
        ("ssp:-1", 8, "whole number"),
        ("local-sgd:4,outer=adam", 8, "unknown choice 'adam'"),
        ("adaptive-k:2,improvement=2", 8, "number from 0 to below 1"),
        ("async", 0, "1 learner or more"),
    ],
)
def test_an_impossible_policy_is_refused_before_anything_starts(line: str, expect: int, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        create(line, expect=expect)


def test_more_than_all_is_legal_for_the_batch_forms() -> None:
    assert create("k-batch-sync:9", expect=2) and create("k-batch-async:9", expect=2)


def test_every_policy_is_a_small_class_of_its_own() -> None:
    """Adding one is a class of under 60 lines and a row."""
    import ast
    import inspect

    from offbeat.policies import barrier, local, stale

    for module in (barrier, local, stale):
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.ClassDef):
                assert node.end_lineno is not None and node.end_lineno - node.lineno < 60, node.name
    assert len(POLICIES) == 15


def test_a_changed_log_does_not_replay() -> None:
    log: list[dict[str, object]] = []
    handle = recorded(create("async", expect=1), log.append)
    handle(Joined(0))
    handle(Pushed(0, 1, 0))
    run = {"strategy": "async", "expect": 1}
    assert replay(run, log).version == 1
    with pytest.raises(ReplayError, match=r"decision 2, 'pushed 0 t1 v0 n1 @0.0': the log has \['drop t1'\]"):
        replay(run, [log[0], log[1] | {"commands": ["drop t1"]}])
    with pytest.raises(ReplayError, match="decision 2: 'pushed 0 t1 v5"):
        replay(run, [log[0], log[1] | {"event": "pushed 0 t1 v5 n1 @0.0"}])
