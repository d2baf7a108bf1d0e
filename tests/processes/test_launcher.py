"""Children and launchers with programs of a few words: output, ends, restarts, and that nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.errors import OffbeatError
from offbeat.processes import child, launcher
from offbeat.processes.child import RestartLimit, Stopwatch, close_inherited, describe_exit, fork, state_of
from offbeat.processes.launcher import SELF, Launcher, LaunchPlan, RankLauncher

LIMIT_S = 20.0


class Lines(list[tuple[str, str]]):
    """What was printed, and by whom."""

    def __call__(self, name: str, line: str) -> None:
        self.append((name, line))

    def of(self, name: str) -> list[str]:
        return [line for who, line in self if who == name]


def run(plan: LaunchPlan, learners: int = 1) -> tuple[Launcher, Lines]:
    lines = Lines()
    with Launcher(plan, learners, lines) as started:
        started.start()
        assert started.watch() is None
    return started, lines


def program(text: str) -> LaunchPlan:
    return LaunchPlan(command=[sys.executable, "-S", "-c", text], environment={"PATH": os.environ["PATH"]})


def is_gone(pid: int) -> bool:
    """Within some seconds; one that nobody has waited for is gone, too."""
    end_s = time.monotonic() + LIMIT_S
    while state_of(pid) not in ("", "Z", "X") and time.monotonic() < end_s:
        time.sleep(0.01)
    return state_of(pid) in ("", "Z", "X")


def test_forks_and_programs_print_with_their_names_and_end_with_their_codes() -> None:
    def body(learner: int) -> int:
        os.write(1, f"I am {learner}\nand".encode())  # a last line may have no end
        return 3 * learner

    ended, lines = run(LaunchPlan(body=body), 2)
    assert lines.of("learner 0") == ["I am 0", "and"] and lines.of("learner 1") == ["I am 1", "and"]
    assert ended.exits == {0: 0, 1: 3}
    assert lines.of("offbeat") == ["learner 1 ended: exit code 3"]
    ended, lines = run(program("import sys; print('out'); sys.stdout.flush(); sys.exit('err')"))
    assert lines.of("learner 0") == ["out", "err"] and ended.exits == {0: 1}


def test_a_learner_has_its_environment_and_nothing_to_read() -> None:
    def body(learner: int) -> int:
        os.write(1, f"{os.environ['OF_THE_PLAN']} {os.read(0, 10)!r}".encode())
        return 0

    _, lines = run(LaunchPlan(body=body, environment={"OF_THE_PLAN": "7"}))
    assert lines == [("learner 0", "7 b''")]


def test_a_learner_that_is_killed_is_started_again_as_often_as_the_plan_says() -> None:
    def body(learner: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    ended, lines = run(LaunchPlan(body=body, restarts=2))
    again = "learner 0 died (SIGKILL) and is restarted"
    assert lines.of("offbeat") == [again, again, "learner 0 ended: SIGKILL"]
    assert ended.exits == {0: -signal.SIGKILL}


@pytest.mark.parametrize(
    ("error", "said"),
    [(OffbeatError("no luck"), "offbeat: learner 0: no luck"), (ValueError("no luck"), "ValueError: no luck")],
)
def test_what_a_fork_raises_is_printed_and_it_fails(error: Exception, said: str) -> None:
    def body(learner: int) -> int:
        raise error

    ended, lines = run(LaunchPlan(body=body))
    assert lines.of("learner 0")[-1] == said and ended.exits == {0: 1}


def test_a_line_that_does_not_end_is_passed_on_in_pieces() -> None:
    def body(learner: int) -> int:
        os.write(1, b"x" * 200_000)
        return 0

    _, lines = run(LaunchPlan(body=body))
    assert "".join(lines.of("learner 0")) == "x" * 200_000


def test_what_a_learner_has_started_ends_with_it() -> None:
    text = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL).pid)"
    _, lines = run(program(text))
    assert is_gone(int(lines.of("learner 0")[0]))


def until(started: Launcher, is_so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not is_so():
        assert time.monotonic() < end_s
        started.poll()


def test_learners_that_do_not_heed_are_killed_after_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "GRACE_S", 0.1)
    lines = Lines()
    text = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(600)"
    with Launcher(program(text), 2, lines) as started:
        started.start()
        until(started, lambda: len(lines) == 2)
        started.ask_to_end()
    assert all(is_gone(int(line)) for _, line in lines)


def test_learners_die_when_their_launcher_is_killed() -> None:
    text = (
        "from offbeat.processes.launcher import Launcher, LaunchPlan\n"
        "command = ['sh', '-c', 'echo $$; exec sleep 600']\n"
        "with Launcher(LaunchPlan(command=command), 2, lambda name, line: print(line, flush=True)) as started:\n"
        "    started.start()\n"
        "    started.watch()\n"
    )
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        learners = [int(parent.stdout.readline()) for _ in range(2)]
        parent.kill()
    assert all(is_gone(pid) for pid in learners)


def test_a_fork_whose_parent_has_died_already_ends_at_once() -> None:
    one = fork("orphan", lambda: child.die_with_parent(os.getpid()))
    assert one.wait() == 1


def test_ranks_find_each_other_through_a_store_on_loopback() -> None:
    def body(rank: int) -> int:
        from torch._C._distributed_c10d import TCPStore

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(host, port, is_master=False, wait_for_workers=False)
        store.set(f"rank {rank}", os.environ["WORLD_SIZE"])
        store.get(f"rank {1 - rank}")  # which waits for it
        if rank == 0:
            Path(os.environ["OFFBEAT_SUMMARY"]).write_text('{"updates": 3}', encoding="utf-8")
        return 0

    with RankLauncher(LaunchPlan(body=body), 2, Lines()) as started:
        assert started.environment_of(1)["MASTER_ADDR"] == "127.0.0.1"
        started.start()
        assert started.watch() == '{"updates": 3}'
    assert started.exits == {0: 0, 1: 0}


def test_ranks_go_on_when_the_store_that_others_can_reach_has_ended() -> None:
    lines = Lines()

    def body(rank: int) -> int:
        from torch._C._distributed_c10d import FileStore

        store = FileStore(os.environ["OFFBEAT_STORE"], 2)
        store.set(f"rank {rank}", "here")
        end = time.monotonic() + LIMIT_S
        while not store.check(["store killed"]) and time.monotonic() < end:
            time.sleep(0.01)
        return 0 if store.get(f"rank {1 - rank}") == b"here" else 1

    with RankLauncher(LaunchPlan(body=body), 2, lines) as started:
        started.start()
        from torch._C._distributed_c10d import FileStore

        own = FileStore(started.environment_of(0)["OFFBEAT_STORE"], 2)
        next(one for one in started._children if one.name == "store").kill()
        started.poll()
        own.set("store killed", "yes")
        assert started.watch() is None
    assert started.exits == {0: 0, 1: 0}
    assert [line for line in lines.of(SELF) if "torch's store on port" in line and "ended (SIGKILL)" in line]


def test_inherited_descriptors_are_closed_and_their_numbers_stay_taken() -> None:
    reader, writer = os.pipe()

    def body() -> int:
        os.write(writer, b"kept")
        return 0 if Path(f"/proc/self/fd/{reader}").readlink() == Path(os.devnull) else 1

    one = fork("child", body, keep={writer})
    assert one.wait() == 0
    assert os.read(reader, 10) == b"kept"
    os.close(writer)
    assert os.read(reader, 10) == b""  # nobody else has the other end
    os.close(reader)


def test_a_fork_that_is_not_captured_ignores_the_signals_of_its_parent() -> None:
    reader, writer = os.pipe()

    def body() -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        os.write(writer, f"{os.getsid(0)}".encode())
        return 5

    one = fork("service", body, keep={writer}, captured=False)
    assert one.wait() == 5
    assert int(os.read(reader, 20)) == os.getsid(0)
    os.close(reader)
    os.close(writer)


def test_a_stopped_child_is_seen_and_killed() -> None:
    one = fork("sleeper", lambda: time.sleep(600))
    assert one.stopped_s() == 0.0
    os.kill(one.pid, signal.SIGSTOP)
    end_s = time.monotonic() + LIMIT_S
    while one.stopped_s() == 0.0 and time.monotonic() < end_s:
        time.sleep(0.001)
    assert one.stopped_s() > 0.0
    one.kill()
    assert one.wait() == -signal.SIGKILL


def test_restarts_are_counted_within_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    limit = RestartLimit(2, 10.0)
    assert [limit.take(), limit.take(), limit.take()] == [True, True, False]
    now_s = 110.0
    assert [limit.take(), limit.take(), limit.take()] == [True, True, False]
    assert not RestartLimit(0, 10.0).take()


def test_a_stopwatch_counts_from_when_it_was_first_so(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    watch, seen = Stopwatch(), []
    for at_s, is_so in ((0.0, False), (1.0, True), (3.0, True), (4.0, False), (5.0, True)):
        now_s = at_s
        seen.append(watch.seconds(is_so))
    assert seen == [0.0, 0.0, 2.0, 0.0, 0.0]


def test_how_a_process_ended_is_said_by_name() -> None:
    assert [describe_exit(code) for code in (-9, 3, -99)] == ["SIGKILL", "exit code 3", "exit code -99"]


def test_close_inherited_leaves_the_standard_streams() -> None:
    def body() -> int:
        close_inherited(frozenset())
        return 0 if all(Path(f"/proc/self/fd/{number}").exists() for number in range(3)) else 1

    assert fork("child", body).wait() == 0


def test_the_collector_of_a_fork_passes_over_what_its_parent_has_made() -> None:
    made: list[object] = [[]]

    def body() -> int:
        return int(any(one is made for one in gc.get_objects()))

    assert body() == 1
    assert fork("child", body).wait() == 0


def test_a_learner_is_started_again_in_a_long_run_more_often_than_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts are counted in a stretch of time, not over a learner's whole life."""
    plan = LaunchPlan(command=["/bin/sh", "-c", "kill -9 $$"], environment={}, restarts=2)
    _, lines = run(plan)
    assert len([line for line in lines.of("offbeat") if line.endswith("and is restarted")]) == 2
    monkeypatch.setattr(launcher, "RESTARTS_S", 0.0)
    lines = Lines()
    with Launcher(plan, 1, lines) as started:
        started.start()
        while len(lines.of("offbeat")) < 6:
            started.poll()
    assert started.exits.keys() <= {0}


def test_one_that_was_asked_to_end_is_not_started_again() -> None:
    with Launcher(LaunchPlan(command=["/bin/sleep", "60"], environment={}, restarts=3), 1, Lines()) as started:
        started.start()
        started.ask_to_end()
        started.watch()
    assert started.exits == {0: -signal.SIGTERM}
