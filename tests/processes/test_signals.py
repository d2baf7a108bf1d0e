"""The one handler of Ctrl-C and SIGTERM: what is noted, what is raised, what ends the process at once."""

from __future__ import annotations

import math
import os
import signal
import threading
from pathlib import Path

import pytest

from offbeat.errors import Terminated
from offbeat.processes import signals
from offbeat.processes.child import fork
from offbeat.processes.signals import SignalHandler, signals_deferred, terminable


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_the_first_signal_is_raised_and_the_handlers_before_come_back(number: int, kind: type[BaseException]) -> None:
    before = signal.getsignal(number)
    with pytest.raises(kind), terminable():
        send(number)
    assert signal.getsignal(number) is before


def test_a_first_signal_may_be_noted_instead_and_the_second_is_raised() -> None:
    with pytest.raises(KeyboardInterrupt), terminable(noted=1) as handler:
        send(signal.SIGTERM)
        assert handler.received == [signal.SIGTERM]
        send(signal.SIGINT)
    assert handler.received == [signal.SIGTERM, signal.SIGINT]


def test_one_more_ends_the_process_at_once() -> None:
    def body() -> None:
        with terminable():
            try:
                send(signal.SIGTERM)
            finally:
                send(signal.SIGINT)

    assert fork("child", body).wait() == 128 + signal.SIGINT


def test_nested_commands_share_one_handler_unless_one_notes() -> None:
    with terminable():
        outer = signal.getsignal(signal.SIGTERM)
        with terminable():
            assert signal.getsignal(signal.SIGTERM) is outer
        with terminable(noted=1) as handler:
            assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.getsignal(signal.SIGTERM) is outer


def test_a_thread_installs_nothing() -> None:
    found = []

    def look() -> None:
        with terminable() as handler:
            found.append((handler.received, signal.getsignal(signal.SIGTERM)))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [([], before)]


def test_whoever_notes_all_is_called_for_each() -> None:
    handler = SignalHandler(math.inf)
    called: list[int] = []
    handler(signal.SIGTERM, None)  # before there is anybody to call
    handler.on_noted = lambda: called.append(len(handler.received))
    handler(signal.SIGTERM, None)
    assert called == [2]


def test_signals_come_after_what_they_must_not_disturb() -> None:
    with pytest.raises(KeyboardInterrupt), terminable() as handler:
        with signals_deferred():
            send(signal.SIGINT)
            assert handler.received == []
        pytest.fail("it comes before the next statement")
    assert not {signal.SIGINT, signal.SIGTERM} & signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_there_is_one_definition_of_each() -> None:
    """Of handlers, and of dying with one's parent: no other file of the package installs or asks for them."""
    package = Path(signals.__file__).parents[1]
    texts = {str(path.relative_to(package)): path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
    assert [name for name, text in texts.items() if "PDEATHSIG" in text] == ["processes/child.py"]
    handlers = sorted(name for name, text in texts.items() if "signal.signal(" in text or "pthread_sigmask(" in text)
    assert handlers == ["processes/child.py", "processes/signals.py"]
