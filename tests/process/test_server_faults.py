"""The parameter server is injured for real: processes killed and stopped at scripted points, and all of it checked.

Whatever is struck: each push is in one update at most and each sample in exactly one, the weights are bit for bit those
that the log says, the run goes on to its end, and nothing is left behind (`server_faults`). One run for each point;
with OFFBEAT_REPEATS=20 twenty, with other policies, numbers and moments in each, and stops of five seconds.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offbeat.policies import Pushed
from offbeat.policies.events import from_text
from offbeat.runs.log import read_log
from offbeat.server.supervisor import MOST_DEATHS, MOST_RESTARTS
from process.server_faults import Blow, Ended, Nursery, Order, check, check_nothing_left, nursery, pushes_of, tally

REPEATS = int(os.environ.get("OFFBEAT_REPEATS", "1"))
BACK_S = 2.0  # promised: in which a server that was killed is back
END_S = 8.0  # promised: after Ctrl-C or SIGTERM; learners have five seconds to end by themselves
AT_ONCE = 3  # runs in which somebody is stopped wait most of the time
SYNCS = (
    "async", "k-async:2", "full-sync", "k-sync:1", "ssp:2", "k-batch-sync:2", "downpour", "local-sgd:2",
    "local-sgd:2,overlap",
)  # fmt: skip
CALLS = {"fetch": 1, "seed": 1, "bye": 1, "hear-bye": 1, "admit": 2, "before-reply": 6, "with-learner": 6}
MOST_CALLS = {"learner": 5, "server": 12, "coordinator": 50}  # so often at least is any other point reached


@pytest.fixture(scope="module")
def runs() -> Iterator[Nursery]:
    with nursery() as one:
        yield one


@pytest.fixture(autouse=True)
def _tell_the_table(runs: Nursery, record_property: Callable[[str, object], None]) -> Iterator[None]:
    """What became of the runs of each test; see `fault_table`."""
    before = len(runs.over)
    yield
    if "OFFBEAT_REPEATS" in os.environ:
        record_property("runs", [tally(one) for one in runs.over[before:]])


def timed(order: Order) -> Order:
    """With shorter times in a quick run."""
    return replace(order, stop_s=1.2, silence_s=0.5, stopped_s=0.4) if REPEATS == 1 else order


def orders(who: str, at: str, what: str = "kill", *, all: bool = False) -> list[Order]:
    """As many runs as there are repeats, each with its own policy, numbers and moment."""
    found = []
    for seed in range(REPEATS):
        chance = random.Random(f"{who} {at} {what} {seed}")
        places = [sync for sync in SYNCS if at not in ("fill", "reply", "push") or sync != "downpour"]
        sync = places[(seed + len(at)) % len(places)]
        learners = 2 if sync.startswith("local-sgd") else chance.choice((2, 3))  # by three it does not divide exactly
        servers = chance.choice((1, 2))
        most = CALLS.get(at, MOST_CALLS[who] if not sync.startswith(("downpour", "local-sgd")) else 3)
        number = {"learner": 0 if at == "seed" else chance.randrange(learners), "server": chance.randrange(servers)}
        blow = Blow(who, at, chance.randint(1, most), what, number.get(who, 0), all)
        found.append(timed(Order(sync=sync, learners=learners, servers=servers, blows=(blow,))))
    return found


def lives(ended: Ended, learner: int) -> set[int]:
    """Incarnations of a learner that have pushed."""
    decisions = pushes_of(read_log(ended.folder / "log")).values()
    events = [(from_text(one["event"]), one["seq"][0]) for one in decisions]
    return {life for event, life in events if isinstance(event, Pushed) and event.learner == learner}


def restarts(ended: list[Ended], who: str) -> list[float]:
    return [one["seconds"] for run in ended for one in run.summary["restarts"] if one["who"].startswith(who)]


def tell(what: str, seconds: list[float]) -> None:
    middle, most = statistics.median(seconds), max(seconds)
    print(f"\n{what}: back after {middle:.3f} s (median), {most:.3f} s (most) in {len(seconds)} runs", flush=True)


# --- killed ---------------------------------------------------------------------------------------------------------


LEARNER_POINTS = {
    "compute": "while it computes",
    "fill": "in the middle of writing its slot",
    "push": "before its push",
    "pushed": "after its push",
    "reply": "when the reply comes",
    "fetch": "while it fetches",
    "seed": "while it gives the initial weights",
    "granted": "when it is given samples",
    "bye": "when it says goodbye",
}


@pytest.mark.parametrize("at", LEARNER_POINTS)
def test_a_learner_that_is_killed_comes_back_and_no_push_is_lost_or_doubled(
    runs: Nursery, tmp_path: Path, at: str
) -> None:
    for ended in runs.run(tmp_path, *orders("learner", at)):
        check(ended)
        blow = ended.order.blows[0]
        assert f"learner {blow.number} died (SIGKILL) and is restarted" in ended.text("err")
        assert max(lives(ended, blow.number), default=0) > 1 or at in ("seed", "bye"), f"it did nothing more: {ended}"


def test_a_learner_that_is_killed_after_its_update_and_before_the_reply_is_counted_once(
    runs: Nursery, tmp_path: Path
) -> None:
    for ended in runs.run(tmp_path, *orders("coordinator", "before-reply")):
        check(ended)
        assert "is restarted" in ended.text("err")


def test_when_all_learners_are_killed_at_once_all_come_back(runs: Nursery, tmp_path: Path) -> None:
    for ended in runs.run(tmp_path, *orders("coordinator", "before-reply", all=True)):
        check(ended)
        assert ended.text("err").count("(SIGKILL) and is restarted") == ended.order.learners


SERVER_POINTS = ("idle", "mid-apply", "applied", "finished", "replied")


@pytest.mark.parametrize("at", SERVER_POINTS)
def test_a_server_that_is_killed_is_back_within_two_seconds(runs: Nursery, tmp_path: Path, at: str) -> None:
    found = runs.run(tmp_path, *orders("server", at))
    for ended in found:
        check(ended)
    seconds = restarts(found, "server")
    assert len(seconds) == len(found)
    tell(f"server killed, {at}", seconds)
    assert max(seconds) < BACK_S


COORDINATOR_POINTS = ("hear", "torn-journal", "journal", "handled", "carried", "hear-bye", "admit")


@pytest.mark.parametrize("at", COORDINATOR_POINTS)
def test_training_goes_on_when_the_coordinator_is_killed(runs: Nursery, tmp_path: Path, at: str) -> None:
    found = runs.run(tmp_path, *orders("coordinator", at))
    for ended in found:
        check(ended)
    seconds = restarts(found, "coordinator")
    assert len(seconds) == len(found)
    tell(f"coordinator killed, {at}", seconds)


INSIDE_POINTS = {
    "mid-apply": ("server", "mid-apply"),
    "applied": ("server", "applied"),
    "finished": ("server", "finished"),
    "journal": ("coordinator", "journal"),
    "carried": ("coordinator", "carried"),
}


@pytest.mark.parametrize("point", INSIDE_POINTS)
def test_an_update_is_made_once_when_the_coordinator_that_makes_it_itself_is_killed(
    runs: Nursery, tmp_path: Path, point: str
) -> None:
    given = []
    for order in orders(*INSIDE_POINTS[point]):
        given.append(replace(order, servers=1, inside=True, blows=(replace(order.blows[0], number=0),)))
    found = runs.run(tmp_path, *given)
    for ended in found:
        check(ended)
    assert len(restarts(found, "coordinator")) == len(found)
    assert not restarts(found, "server"), "there is no process of a server"


def test_a_learner_that_dies_with_the_coordinator_is_found_dead_by_the_next(runs: Nursery, tmp_path: Path) -> None:
    """Else its slot would be kept back for ever: it might still write there."""
    first, *others = orders("coordinator", "with-learner")
    for ended in runs.run(tmp_path, replace(first, sync="async"), *others):  # there each learner has just one slot
        check(ended)
        assert "is restarted" in ended.text("err") and "coordinator died (SIGKILL)" in ended.text("err")


def test_learner_coordinator_and_server_are_killed_in_one_run(runs: Nursery, tmp_path: Path) -> None:
    found = []
    for order in orders("coordinator", "hear"):
        learner = Blow("learner", "compute", 3, number=1, name="learner")
        server = Blow("server", "mid-apply", 3, number=order.servers - 1, name="server")
        found.append(replace(order, blows=(*order.blows, learner, server)))
    for ended in runs.run(tmp_path, *found):
        check(ended)


# --- stopped --------------------------------------------------------------------------------------------------------


def stopped(who: str, points: tuple[str, ...]) -> list[Order]:
    """For each repeat one run; the points take turns."""
    every = {at: orders(who, at, "stop") for at in points}
    if REPEATS == 1:
        return [every[at][0] for at in points]
    return [every[points[seed % len(points)]][seed] for seed in range(REPEATS)]


def test_a_learner_that_is_stopped_is_given_up_and_comes_back_as_another_incarnation(
    runs: Nursery, tmp_path: Path
) -> None:
    points = ("fill", "compute", "push", "reply", "want")
    for ended in runs.run(tmp_path, *stopped("learner", points), at_once=AT_ONCE):
        check(ended)
        number = ended.order.blows[0].number
        assert "it sent no heartbeat" in ended.summary["gone"], str(ended)
        assert max(lives(ended, number), default=0) > 1, f"it did nothing more: {ended}"
        assert not (ended.folder / f"life-{number}-1").exists(), f"it was not to be started again: {ended}"


def test_a_server_that_is_stopped_is_replaced(runs: Nursery, tmp_path: Path) -> None:
    found = runs.run(tmp_path, *stopped("server", ("mid-apply", "idle", "finished")), at_once=AT_ONCE)
    for ended in found:
        check(ended)
        assert "was stopped and was replaced" in ended.text("err"), str(ended)
    tell(f"server stopped (replaced after {found[0].order.stopped_s:g} s)", restarts(found, "server"))


def test_a_coordinator_that_is_stopped_is_replaced(runs: Nursery, tmp_path: Path) -> None:
    found = runs.run(tmp_path, *stopped("coordinator", ("hear", "handled")), at_once=AT_ONCE)
    for ended in found:
        check(ended)
        assert "coordinator was stopped and was replaced" in ended.text("err"), str(ended)
    tell(f"coordinator stopped (replaced after {found[0].order.stopped_s:g} s)", restarts(found, "coordinator"))


# --- a learner that fails --------------------------------------------------------------------------------------------


def few(count: int = 1, **given: Any) -> list[Order]:
    """Runs of three learners in which one stays away, with all kinds of policies."""
    seeds = range(count if REPEATS == 1 else REPEATS)
    return [Order(sync=("async", "full-sync", "k-async:2", "ssp:2")[seed % 4], learners=3, **given) for seed in seeds]


def test_a_learner_whose_script_raises_stays_away_and_the_others_go_on(runs: Nursery, tmp_path: Path) -> None:
    blow = Blow("learner", "compute", 3, "raise", 1)
    for ended in runs.run(tmp_path, *few(2, blows=(blow,), absent=(1,))):
        check(ended, code=1)
        said = ended.text("err").splitlines()
        assert "learner 1 | RuntimeError: struck on purpose" in said
        assert "offbeat   | learner 1 ended: exit code 1" in said
        assert said[-1] == "offbeat: run: 1 learner failed: 1"
        assert ended.summary["exits"] == {"0": 0, "1": 1, "2": 0}


def test_a_learner_that_raises_before_it_has_joined_does_not_keep_the_others_waiting(
    runs: Nursery, tmp_path: Path
) -> None:
    blow = Blow("learner", "start", 1, "raise", 0)
    ended = runs.run(tmp_path, Order(learners=3, blows=(blow,), absent=(0,)))[0]
    check(ended, code=1)
    assert ended.summary["exits"] == {"0": 1, "1": 0, "2": 0}


def test_a_learner_without_memory_stays_away_and_the_others_go_on(runs: Nursery, tmp_path: Path) -> None:
    blow = Blow("learner", "compute", 4, "memory", 2)
    for ended in runs.run(tmp_path, *few(blows=(blow,), absent=(2,))):
        check(ended, code=1)
        assert "can't allocate memory" in ended.text("err")
        assert ended.summary["exits"] == {"0": 0, "1": 0, "2": 1}


LOADER_GONE = ("DataLoader worker", "Connection reset by peer")  # torch's words, by what the loader was doing


def test_a_learner_whose_loader_dies_stays_away_unless_it_had_read_all_and_the_others_go_on(
    runs: Nursery, tmp_path: Path
) -> None:
    blow = Blow("learner", "compute", 2, "loaders", 1)
    for ended in runs.run(tmp_path, *few(blows=(blow,), absent=(1,), workers=1)):
        assert ended.text("out"), str(ended)
        failed = ended.summary["exits"]["1"]
        check(ended, code=failed)
        assert any(told in ended.text("err") for told in LOADER_GONE) or not failed, str(ended)
        assert ended.summary["exits"] == {"0": 0, "1": failed, "2": 0} and failed in (0, 1)


def test_a_learner_with_another_model_is_refused_in_one_line_and_the_others_go_on(
    runs: Nursery, tmp_path: Path
) -> None:
    for ended in runs.run(tmp_path, *few(odd=1, absent=(1,))):
        check(ended, code=2)
        said = [line for line in ended.text("err").splitlines() if line.startswith("learner 1 | ")]
        assert len(said) == 1
        assert "the run refused this learner: its model or optimizer is not that of the others" in said[0]
        assert ended.summary["exits"] == {"0": 0, "1": 2, "2": 0}


def test_a_learner_of_another_version_is_refused_in_one_line_and_the_others_go_on(
    runs: Nursery, tmp_path: Path
) -> None:
    blow = Blow("learner", "start", 1, "version", 1)
    for ended in runs.run(tmp_path, *few(blows=(blow,), absent=(1,))):
        check(ended, code=2)
        said = [line for line in ended.text("err").splitlines() if line.startswith("learner 1 | ")]
        assert len(said) == 1
        assert "but this process uses" in said[0] and "(offbeat 0.0.1, torch 1.0)" in said[0]


def test_a_wrong_request_is_refused_before_anything_starts(runs: Nursery, tmp_path: Path) -> None:
    wrong = ("k-sync:9", "asinc", "ssp:-1", "k-batch-sync:0", "local-sgd:x", "k-async:", "full-sync:2")
    for ended in runs.run(tmp_path, *(Order(sync=wrong[seed % len(wrong)]) for seed in range(max(2, REPEATS)))):
        assert ended.code == 2 and ended.result["left"] == [], str(ended)
        said = ended.text("err").strip().splitlines()
        assert len(said) == 1 and said[0].startswith("offbeat: "), str(ended)
        assert not list(ended.folder.glob("life-*")), str(ended)


# --- slow, strange and spoilt -----------------------------------------------------------------------------------------


def test_a_slow_learner_is_waited_for_and_not_given_up(runs: Nursery, tmp_path: Path) -> None:
    for ended in runs.run(tmp_path, *orders("learner", "compute", "slow"), at_once=AT_ONCE):
        check(ended)
        assert ended.summary["gone"].keys() <= {"it left"}, str(ended)


@pytest.mark.parametrize("what", ["twice", "old", "late", "lost", "torn"])
def test_packets_said_twice_late_never_or_torn_change_nothing(runs: Nursery, tmp_path: Path, what: str) -> None:
    for ended in runs.run(tmp_path, *orders("learner", "pushed", what), at_once=AT_ONCE):
        check(ended)
        assert (ended.folder / "garbled").exists(), str(ended)
        assert ended.summary["gone"].keys() <= {"it left"}, str(ended)


def test_the_wall_clock_may_jump(runs: Nursery, tmp_path: Path) -> None:
    found = []
    for seed, order in enumerate(orders("learner", "compute", "clock")):
        others = Blow("server", "idle", 2, "clock", name="server"), Blow("coordinator", "hear", 5, "clock", name="hear")
        found.append(replace(order, blows=(*order.blows, others[seed % 2])))
    for ended in runs.run(tmp_path, *found):
        check(ended)
        assert ended.summary["gone"].keys() <= {"it left"}, str(ended)


def test_a_gradient_that_is_not_finite_is_dropped_and_counted(runs: Nursery, tmp_path: Path) -> None:
    local = ("downpour", "local-sgd")
    spoilt = [one for one in orders("learner", "computed", "nothing more") if not one.sync.startswith(local)]
    for ended in runs.run(tmp_path, *spoilt):
        check(ended)
        cancels = ended.order.sync in ("k-sync:1", "k-batch-sync:2")  # perhaps just that minibatch
        assert ended.summary["dropped"].get("not finite", 0) in ((0, 1) if cancels else (1,)), str(ended)


def test_strangers_at_the_listener_hold_nobody_up(runs: Nursery, tmp_path: Path) -> None:
    for ended in runs.run(tmp_path, *orders("learner", "compute", "strangers")):
        check(ended)
        assert ended.summary["gone"].keys() <= {"it left"}, str(ended)


def test_learners_that_come_and_go_all_the_time_lose_nothing(runs: Nursery, tmp_path: Path) -> None:
    found = []
    for order in orders("learner", "compute"):
        blows = tuple(
            Blow("learner", "compute", 2 + life % 2, number=number, name=f"{number}-{life}")
            for number in range(order.learners)
            for life in range(MOST_RESTARTS)
        )
        found.append(replace(order, blows=blows))
    for ended in runs.run(tmp_path, *found):
        check(ended)
        assert ended.text("err").count("(SIGKILL) and is restarted") == MOST_RESTARTS * ended.order.learners


# --- again and again --------------------------------------------------------------------------------------------------


def test_a_learner_that_dies_again_and_again_stays_away_and_the_others_go_on(runs: Nursery, tmp_path: Path) -> None:
    blows = tuple(Blow("learner", "fill", 2, number=1, name=f"{life}") for life in range(1 + MOST_RESTARTS))
    ended = runs.run(tmp_path, Order(learners=3, blows=blows, absent=(1,)))[0]
    check(ended, code=1)
    assert ended.text("err").count("learner 1 died (SIGKILL) and is restarted") == MOST_RESTARTS
    assert ended.summary["exits"] == {"0": 0, "1": -9, "2": 0}


def test_a_server_that_dies_again_and_again_ends_the_run_in_one_line(runs: Nursery, tmp_path: Path) -> None:
    blows = tuple(Blow("server", "mid-apply", 1, name=f"{life}") for life in range(MOST_DEATHS))
    ended = runs.run(tmp_path, Order(blows=blows))[0]
    assert ended.code == 1 and not ended.result["timed_out"], str(ended)
    assert ended.text("err").splitlines()[-1].startswith(f"offbeat: server 0 died {MOST_DEATHS} times in"), str(ended)
    check_nothing_left(ended)


# --- the checks themselves --------------------------------------------------------------------------------------------


PLANTED = {
    "one copy of the state": Blow("server", "mid-apply", 5),
    "forgets pushes": Blow("coordinator", "hear", 40),
    "outlives the supervisor": Blow("learner", "compute", 3, "kill the supervisor"),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(runs: Nursery, tmp_path: Path, bug: str) -> None:
    ended = runs.run(tmp_path, timed(Order(planted=bug, blows=(PLANTED[bug],), limit_s=3.0)))[0]
    assert (ended.folder / "struck-it").exists()
    with pytest.raises(AssertionError):
        check(ended, code=ended.code)


# --- the end of it all ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["seed", "fill", "compute", "bye"])
def test_nothing_stays_behind_when_the_supervisor_is_killed(runs: Nursery, tmp_path: Path, at: str) -> None:
    found = runs.run(tmp_path, *orders("learner", at, "kill the supervisor"))
    for ended in found:
        assert ended.code == -9 and not ended.result["timed_out"], str(ended)
        check_nothing_left(ended)
    most = max(ended.result["gone_s"] for ended in found)
    print(f"\nsupervisor killed, {at}: all gone after {most:.3f} s at most in {len(found)} runs", flush=True)


def test_loaders_go_too(runs: Nursery, tmp_path: Path) -> None:
    """Processes that load data go with the supervisor. Its name is short: their sockets lie in a folder of it."""
    blow = Blow("learner", "compute", 5, "kill the supervisor")
    ended = runs.run(tmp_path, Order(blows=(blow,), program=True, workers=1, limit_s=120.0))[0]
    assert ended.code == -9 and not ended.result["timed_out"], str(ended)
    check_nothing_left(ended)


@pytest.mark.parametrize(("signal", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_run_that_is_told_to_end_ends_and_leaves_nothing_behind(
    runs: Nursery, tmp_path: Path, signal: str, code: int
) -> None:
    found = runs.run(tmp_path, *orders("learner", "compute", signal))
    for ended in found:
        assert not ended.result["timed_out"] and ended.code == code, str(ended)
        assert ended.result["seconds"] < END_S, str(ended)
        assert "Traceback" not in ended.text("err"), str(ended)
        check_nothing_left(ended)


def test_programs_survive(runs: Nursery, tmp_path: Path) -> None:
    """As a user starts it, with a process that loads data beside each learner."""
    blow = Blow("learner", "fill", 4, number=1)
    ended = runs.run(tmp_path, Order(blows=(blow,), program=True, workers=1, limit_s=120.0))[0]
    check(ended)
    assert max(lives(ended, 1)) > 1
