"""Every command ends: a run that cannot go on by itself, and any command by a signal; a second one ends it at once."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offbeat import cli
from offbeat.processes import launcher
from offbeat.processes.launcher import Launcher
from offbeat.server.coordinator import coordinator, coordinator_process
from offbeat.server.run_setting import RunSetting
from offbeat.server.supervisor import Supervisor
from offbeat.simulate import server as simulator
from offbeat.train import served_trainer
from offbeat.train.served_trainer import ServedTrainer
from plugins.loading import BROKEN, untouched
from train.programs import Blow, Ended, Program, left_files, offbeat, resume_words, train_words

PLUGIN = ("--plugin", str(BROKEN))
SOON_S = 5.0  # promised, for the first signal
AT_ONCE_S = 4.0  # for the second: far more than it takes, and less than the first has


def last_line(ended: Ended) -> str:
    return ended.err.strip().splitlines()[-1]


# --- runs that cannot go on -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("mute", "learner 0 waits for the policy to apply its gradient, learner 1 waits for"),
        ("unsent", "learner 0 waits for the policy to send it weights, learner 1 waits for"),
    ],
)
def test_a_policy_that_never_answers_ends_the_run_in_one_line(line: str, says: str, tmp_path: Path) -> None:
    began_s = time.monotonic()
    ended = offbeat(tmp_path, *train_words(line, 2), *PLUGIN)
    assert time.monotonic() - began_s < 10.0
    assert (ended.code, ended.left) == (1, [])
    stands = f"offbeat: '{line}' is stuck at update 0: no learner computes, no update is under way"
    assert last_line(ended).startswith(stands) and says in last_line(ended)
    assert "Traceback" not in ended.err


def test_a_policy_that_holds_more_than_it_says_ends_the_run(tmp_path: Path) -> None:
    ended = offbeat(tmp_path, *train_words("liar", 3), *PLUGIN)
    assert (ended.code, ended.left) == (1, [])
    says = "the policy 'liar' holds 4 gradients, but its max_held for 3 learners is 3"
    assert last_line(ended) == f"offbeat: {says}"


def test_a_policy_that_raises_ends_the_run(tmp_path: Path) -> None:
    ended = offbeat(tmp_path, *train_words("crash", 2), *PLUGIN)
    assert (ended.code, ended.left) == (1, [])
    assert last_line(ended) == "offbeat: the policy 'crash' failed: KeyError: 'no such thing'"


SAID = {
    "crash": "the policy 'crash' failed: KeyError: 'no such thing'",
    "crowds": "the policy 'crowds' failed: TypeError: Crowds sends weights to learner",
    "hasty": "computes on the current weights: apply first",
    "babbles": "'hello', which is not a command",
}


@pytest.mark.parametrize("line", [*SAID, "abandons"])
def test_a_policy_that_breaks_the_rules_ends_a_training_in_one_line(line: str, tmp_path: Path) -> None:
    ended = offbeat(tmp_path, *train_words(line, 2), *PLUGIN)
    assert (ended.code, ended.left) == (1, [])
    says = SAID.get(line, "the policy 'abandons' cancels learner")
    assert says in last_line(ended) and "Traceback" not in ended.err


@pytest.mark.parametrize("more", [(), ("--json",), ("--latency", "1ms", "--json")])
@pytest.mark.parametrize("line", SAID)
def test_and_every_loop_of_the_simulator(line: str, more: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with untouched():
        assert cli.main(["simulate", line, "--learners", "2", "--updates", "20", *more, *PLUGIN]) == 1
    err = capsys.readouterr().err
    assert SAID[line] in err and err.count("\n") == 1


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_policy_that_never_makes_an_update_is_not_simulated_for_ever(
    more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with untouched():
        assert cli.main(["simulate", "wasteful", "--learners", "2", "--updates", "20", *more, *PLUGIN]) == 2
    assert "the simulation makes no progress at update 0" in capsys.readouterr().err


def test_more_gradients_than_there_is_room_for_are_refused_at_once(tmp_path: Path) -> None:
    ended = offbeat(tmp_path, *train_words("k-batch-async:900000000", 2))
    assert (ended.code, ended.left) == (2, [])
    says = "'k-batch-async:900000000' holds up to 900,000,000 gradients; the limit is 1,000,000"
    assert last_line(ended).endswith(says)


def one_slot_too_few() -> None:
    """Of a k-batch-async:6 with 2 learners there are 7: the last would never come, and both learners wait."""
    slots = RunSetting.slots
    assert isinstance(slots, property) and slots.fget is not None
    count = slots.fget
    RunSetting.slots = property(lambda setting: count(setting) - 2)


def test_too_few_slots_are_found_when_the_run_is_set_up(tmp_path: Path) -> None:
    ended = offbeat(tmp_path, *train_words("k-batch-async:6", 2), before=one_slot_too_few)
    assert (ended.code, ended.left) == (2, [])
    says = "'k-batch-async:6' holds up to 6 gradients; with 2 learners that needs 7 slots, but there are 5"
    assert says in last_line(ended)


def test_too_few_slots_that_nobody_has_checked_end_the_run(tmp_path: Path) -> None:
    def plant() -> None:
        one_slot_too_few()

        class Unchecked(coordinator.GuardedPolicy):
            def __init__(self, setting: RunSetting, slots: int) -> None:
                super().__init__(setting, slots + 100)

        vars(coordinator)["GuardedPolicy"] = Unchecked

    began_s = time.monotonic()
    ended = offbeat(tmp_path, *train_words("k-batch-async:6", 2), before=plant)
    assert time.monotonic() - began_s < 10.0
    assert (ended.code, ended.left) == (1, [])
    assert "learner 0 waits for room for its gradient (5 are held in 5 slots)" in last_line(ended)


def test_a_pending_wake_is_no_stall(tmp_path: Path) -> None:
    """Five seconds in which nothing happens: longer than a stall is borne."""
    assert coordinator_process.STALL_S < 5.0
    ended = offbeat(tmp_path, *train_words("sleeper", 2), "--json", *PLUGIN)
    assert (ended.code, ended.left) == (0, []), ended.err
    assert ended.result["updates"] > 10


# --- signals --------------------------------------------------------------------------------------------------------


def mark() -> None:
    Path("there").touch()


def until_there(folder: Path) -> None:
    end_s = time.monotonic() + 30.0
    while not (folder / "there").exists():
        assert time.monotonic() < end_s, "it does not come there"
        time.sleep(0.01)


def marked(owner: Any, name: str, *, then_s: float = 0.0) -> Callable[[], None]:
    """In the program: whoever calls this leaves a mark first, and may then take long."""

    def lay() -> None:
        original = getattr(owner, name)

        def patched(*given: Any, **named: Any) -> Any:
            mark()
            time.sleep(then_s)
            return original(*given, **named)

        setattr(owner, name, patched)

    return lay


def end_by(folder: Path, words: list[str], before: Callable[[], None], *signals: int) -> tuple[Ended, float]:
    """The command is sent the signals, one right after the other, when it is there; how long it took to end."""
    program = Program(folder, words, before=[before])
    try:
        until_there(folder)
    except AssertionError:
        os.kill(program.pid, signal.SIGKILL)
        raise
    began_s = time.monotonic()
    for at, number in enumerate(signals):
        time.sleep(0.3 if at else 0.0)
        os.kill(program.pid, number)
    end_s = time.monotonic() + 30.0
    while Path(f"/proc/{program.pid}").exists() and _lives(program.pid) and time.monotonic() < end_s:
        time.sleep(0.01)
    took_s = time.monotonic() - began_s
    return program.wait(), took_s


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


LONG = ["--learners", "2000", "--compute", "exp:1"]


def forever(folder: Path) -> dict[str, tuple[list[str], Callable[[], None]]]:
    """Commands that would take minutes."""
    from offbeat.commands import watch
    from offbeat.predict import replay

    script = folder / "script.py"
    script.write_text(
        textwrap.dedent("""
        import pathlib, time
        pathlib.Path("there").touch()
        time.sleep(60)
        """),
        encoding="utf-8",
    )
    run = ["--learners", "2", "--sync", "async"]
    return {
        "train": (train_words("async", 2, train__epochs=100_000), marked(ServedTrainer, "_minibatch")),
        "run": (["run", *run, str(script)], lambda: None),
        "simulate": (
            ["simulate", "async", "--updates", "100000000", "--yes-large", "--json", *LONG],
            marked(simulator, "go_quickly"),
        ),
        "compare": (["compare", "--minibatches", "100000000", "--yes-large", *LONG], marked(simulator, "go_quickly")),
        "bench": (["bench", "policies", "--learners", "2"], marked(Supervisor, "poll")),
        "watch": (["watch", "run"], marked(watch, "read_state", then_s=60.0)),
        "replay": (["replay", "run"], marked(replay, "read_run", then_s=60.0)),
    }


COMMANDS = ("train", "run", "simulate", "compare", "bench", "watch", "replay")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_signal_ends_a_command_soon(name: str, number: int, tmp_path: Path) -> None:
    words, before = forever(tmp_path)[name]
    if name in ("watch", "replay"):
        assert offbeat(tmp_path, *train_words("async", 2)).code == 0
    ended, took_s = end_by(tmp_path, words, before, number)
    assert (ended.code, ended.left) == (128 + number, []), ended.err
    assert took_s < SOON_S
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_while_python_drops_exceptions_ends_the_command_too(number: int, tmp_path: Path) -> None:
    """As in a finalizer, a callback of the garbage collector or of a fork: here for a second."""

    class Slow:
        def __del__(self) -> None:
            mark()
            time.sleep(1.0)

    def plant() -> None:
        original = vars(simulator)["go_quickly"]

        def patched(*given: Any) -> Any:
            Slow()
            return original(*given)

        vars(simulator)["go_quickly"] = patched

    ended, took_s = end_by(tmp_path, forever(tmp_path)["simulate"][0], plant, number)
    assert (ended.code, ended.left, ended.err) == (128 + number, [], "")
    assert took_s < SOON_S


def stubborn(folder: Path) -> list[str]:
    """A script that does not heed SIGTERM."""
    script = folder / "script.py"
    script.write_text(
        textwrap.dedent("""
        import pathlib, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path("there").touch()
        time.sleep(60)
        """),
        encoding="utf-8",
    )
    return ["run", "--learners", "2", "--sync", "async", str(script)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_script_that_does_not_heed_is_killed_soon_and_by_a_second_signal_at_once(number: int, tmp_path: Path) -> None:
    words = stubborn(tmp_path)
    ended, took_s = end_by(tmp_path, words, lambda: None, number)
    assert (ended.code, ended.left) == (128 + number, []) and took_s < SOON_S
    (tmp_path / "there").unlink()
    ended, took_s = end_by(tmp_path, words, lambda: None, number, number)
    assert (ended.code, ended.left) == (128 + number, []) and took_s < AT_ONCE_S


def test_a_second_signal_ends_a_training_at_once(tmp_path: Path) -> None:
    """Its learners are in a minibatch that takes a minute."""
    before = marked(ServedTrainer, "_minibatch", then_s=60.0)
    ended, took_s = end_by(tmp_path, train_words("async", 2), before, signal.SIGTERM, signal.SIGTERM)
    assert (ended.code, ended.left) == (143, [])
    assert took_s < AT_ONCE_S


def test_a_signal_ends_a_training_whose_minibatches_take_too_long(tmp_path: Path) -> None:
    before = marked(ServedTrainer, "_minibatch", then_s=60.0)
    ended, took_s = end_by(tmp_path, train_words("async", 2), before, signal.SIGTERM)
    assert (ended.code, ended.left) == (143, []) and took_s < SOON_S
    assert "ended without saving; --resume continues from the last checkpoint" in ended.err + ended.out


def test_a_signal_ends_a_run_whose_learners_all_wait(tmp_path: Path) -> None:
    """No minibatch begins any more; those who wait say that the run is to end, and it is saved."""
    words = [*train_words("sleeper", 2), *PLUGIN]
    ended, took_s = end_by(tmp_path, words, marked(ServedTrainer, "_minibatch"), signal.SIGTERM)
    assert (ended.code, ended.left) == (143, []), ended.err
    assert took_s < SOON_S
    assert left_files(tmp_path) == []
    goes_on = offbeat(tmp_path, *resume_words("run", "--json"))
    assert goes_on.code == 0, goes_on.err


def _struck_after_restart(after_s: float) -> Callable[[], None]:
    """In the program: it is sent SIGTERM so long after a learner was started again, which takes a while to begin."""

    def plant() -> None:
        start, begun = Launcher._start_learner, Counter[int]()
        os.register_at_fork(after_in_child=lambda: time.sleep(0.05))

        def patched(self: Launcher, learner: int) -> None:
            start(self, learner)
            begun[learner] += 1
            if begun[learner] == 2:
                time.sleep(after_s)
                os.kill(os.getpid(), signal.SIGTERM)

        vars(launcher)["Launcher"]._start_learner = patched

    return plant


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.03])
@pytest.mark.parametrize("learners", [1, 2])
def test_a_signal_right_after_a_learner_was_started_again_is_heeded(
    after_s: float, learners: int, tmp_path: Path
) -> None:
    """The new one does not know yet what to do when it is asked to end: it is asked when it does."""
    blow = Blow(point="served", count=4, whom="self", learner=learners - 1)
    words = train_words("async", learners, train__epochs=100_000, save__grace_s=30)
    ended = offbeat(tmp_path, *words, blow=blow, before=_struck_after_restart(after_s))
    assert (ended.code, ended.left) == (143, []), ended.err
    said = ended.out + ended.err
    assert said.count("is restarted") == 1 and "writing a checkpoint" in said and "without saving" not in said
    assert offbeat(tmp_path, *resume_words("run", "--train.epochs", "1", "--json")).code in (0, 2)


PRINTED = ("\x1e{}", "\x1e[]", '\x1e{"kind": "end"}', "\x1eabc", "\x1e", 'a\x1e{"kind": 7}')


def test_what_a_program_prints_is_never_taken_for_a_record(tmp_path: Path) -> None:
    def plant() -> None:
        original = ServedTrainer._minibatch

        def patched(self: ServedTrainer, *given: Any, **named: Any) -> Any:
            for line in PRINTED:
                print(line, flush=True)
            return original(self, *given, **named)

        vars(served_trainer)["ServedTrainer"]._minibatch = patched

    ended = offbeat(tmp_path, *train_words("async", 2), before=plant)
    assert (ended.code, ended.left) == (0, []), ended.err
    assert all(line in ended.out + ended.err for line in PRINTED)
