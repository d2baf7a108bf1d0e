"""Who makes no progress is found, and nobody who is only slow, waits, starts, evaluates or was not looked at."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from offbeat.processes.child import fork
from offbeat.processes.watchdog import Phase, ProgressBoard, Silence, StackFiles, Watchdog, innermost

LEAST_S = 30.0


class Scene:
    """Learners on a clock that is turned by hand; a look every half second."""

    def __init__(self, learners: int = 2, *, together: bool = False, least_s: float = LEAST_S) -> None:
        self.board = ProgressBoard(learners)
        self.dog = Watchdog(self.board, learners, least_s=least_s, together=together)
        self.now_s = 100.0
        self.running = dict.fromkeys(range(learners), False)
        self.found: list[Silence] = []

    def note(self, phase: Phase, *learners: int) -> None:
        for learner in learners or self.running:
            self.board.note(learner, phase)

    def passes(self, seconds: float) -> list[Silence]:
        """What is found, first, in so many seconds."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += 0.5
            found = self.dog.check(self.running, self.now_s)
            if found:
                return found
        return []

    def minibatches(self, many: int, each_s: float, *learners: int) -> list[Silence]:
        for _ in range(many):
            self.note(Phase.READING, *learners)
            self.note(Phase.COMPUTING, *learners)
            if found := self.passes(each_s):
                return found
            self.note(Phase.WAITING, *learners)
        return []


def test_a_learner_that_computes_nothing_for_30_s_is_found_and_not_those_who_wait_for_it() -> None:
    scene = Scene(3)
    scene.note(Phase.WAITING)
    scene.note(Phase.COMPUTING, 1)
    assert scene.passes(29) == []
    (found,) = scene.passes(3)
    assert (found.learner, found.phase, found.stopped) == (1, Phase.COMPUTING, False)
    assert str(found).startswith("has computed no minibatch for 30 s")


def test_a_learner_whose_heart_beats_but_whose_data_set_sleeps_is_found() -> None:
    scene = Scene()
    assert scene.minibatches(20, 0.5) == []
    scene.note(Phase.WAITING, 0)
    scene.note(Phase.READING, 1)
    (found,) = scene.passes(40)
    assert "has read no minibatch for 3" in str(found) and "usually one in 0.5" in str(found)


@pytest.mark.parametrize(("each_s", "slower"), [(0.5, 5), (0.5, 50), (4.0, 5), (4.0, 50), (30.0, 50)])
def test_a_minibatch_that_takes_many_times_longer_once_is_no_hang(each_s: float, slower: int) -> None:
    scene = Scene()
    assert scene.minibatches(10, min(each_s, LEAST_S - 1)) == []
    assert scene.minibatches(1, each_s * slower) == []
    assert scene.minibatches(5, each_s) == []


def test_a_learner_that_is_always_slow_has_as_much_more_time() -> None:
    scene = Scene()
    assert scene.minibatches(5, 20.0) == []
    scene.note(Phase.COMPUTING, 0)
    scene.note(Phase.WAITING, 1)
    assert scene.passes(60 * 20 - 5) == []
    assert [one.learner for one in scene.passes(200)] == [0]


def test_starting_evaluating_and_saving_may_take_long() -> None:
    scene = Scene()
    assert scene.passes(19 * LEAST_S) == []  # it compiles
    scene.note(Phase.LEADING, 0)
    scene.note(Phase.WAITING, 1)
    assert scene.passes(9 * LEAST_S) == []
    for _ in range(100):  # batches of a long evaluation
        scene.note(Phase.LEADING, 0)
        assert scene.passes(20) == []
    (found,) = scene.passes(5 * 9 * LEAST_S + 20)
    assert found.learner == 0 and "evaluation or checkpoint" in str(found)


def test_a_later_evaluation_may_take_five_times_the_longest() -> None:
    scene = Scene()
    scene.note(Phase.LEADING, 0)
    scene.note(Phase.WAITING, 1)
    assert scene.passes(250) == []
    scene.note(Phase.LEADING, 0)
    assert scene.passes(1200) == []
    assert [one.learner for one in scene.passes(100)] == [0]


def test_learners_of_a_server_may_all_wait_and_ranks_may_not() -> None:
    """A policy may have a timer of an hour; but of ranks, one must compute."""
    served, reduced = Scene(), Scene(together=True)
    for scene in (served, reduced):
        scene.note(Phase.WAITING)
    assert served.passes(3600) == []
    assert [one.learner for one in reduced.passes(3600)] == [0, 1]


def test_a_stopped_rank_is_found_while_it_waits_and_a_servers_learner_has_longer() -> None:
    for together, most_s in ((True, 32.0), (False, 122.0)):
        scene = Scene(together=together)
        scene.note(Phase.WAITING)
        scene.running[1] = True
        assert scene.passes(most_s - 3) == []
        (found,) = scene.passes(5)
        assert (found.learner, found.stopped) == (1, True) and "has been stopped (SIGSTOP)" in str(found)


def test_ranks_that_cannot_be_told_apart_are_all_named() -> None:
    scene = Scene(3, together=True)
    scene.note(Phase.COMPUTING, 0)
    assert scene.passes(0.5) == []
    scene.note(Phase.COMPUTING, 1)
    scene.note(Phase.WAITING, 2)
    assert [one.learner for one in scene.passes(40)] == [0, 1]


def test_time_in_which_nobody_looked_does_not_count() -> None:
    scene = Scene()
    scene.note(Phase.COMPUTING)
    assert scene.passes(5) == []
    scene.now_s += 3600  # the machine was suspended
    assert scene.passes(20) == []
    assert len(scene.passes(20)) == 2


def test_a_learner_that_is_started_again_begins_anew() -> None:
    scene = Scene()
    scene.note(Phase.WAITING, 0)
    scene.note(Phase.COMPUTING, 1)
    assert scene.passes(25) == []
    scene.board.clear(1)
    assert scene.passes(100) == []


def test_without_a_least_time_nobody_is_found() -> None:
    scene = Scene(least_s=0.0)
    scene.note(Phase.COMPUTING)
    assert scene.passes(10_000) == []


def test_what_is_noted_in_a_fork_is_seen_here() -> None:
    board = ProgressBoard(2)

    def body() -> None:
        board.note(1, Phase.COMPUTING)
        board.note(1, Phase.WAITING)

    child = fork("noter", body)
    assert child.wait() == 0
    assert board.read(1) == (2, Phase.WAITING, 1)
    assert board.read(0) == (0, Phase.STARTING, 0)


def spin_for_ever() -> None:
    while True:
        pass


def sleep_for_ever() -> None:
    threading.Event().wait()


@pytest.mark.parametrize("hang", [spin_for_ever, sleep_for_ever])
def test_a_process_that_hangs_tells_where(hang: object) -> None:
    files = StackFiles(1)
    begun, begin = os.pipe()

    def body() -> None:
        files.serve(0)
        os.write(begin, b"x")
        hang()  # type: ignore[operator]

    child = fork("hangs", body, keep={begin})
    try:
        os.read(begun, 1)
        end_s = time.monotonic() + 20
        stacks = ""
        while hang.__name__ not in stacks and time.monotonic() < end_s:  # type: ignore[attr-defined]
            stacks = files.ask(0, child.pid)
        assert hang.__name__ in stacks  # type: ignore[attr-defined]
        assert innermost(stacks).startswith(("test_watchdog.py, line ", "threading.py, line "))
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        files.close()
        os.close(begun)
        os.close(begin)


def test_the_innermost_frame_is_that_of_the_thread_that_was_asked() -> None:
    text = (
        'Thread 0x1 (most recent call first):\n  File "/a/queue.py", line 3 in get\n\n'
        'Current thread 0x2 (most recent call first):\n  File "/b/data.py", line 12 in __getitem__\n'
        '  File "/b/x.py", line 1 in f\n'
    )
    assert innermost(text) == "data.py, line 12, __getitem__"
    assert innermost("") == ""
