"""A run of the real parameter server with learners' programs of ours, watched until all have ended.

Laws: a learner that fails, and a run that takes too long, end the measurement with one line that says which. No process
is left when `supervise` returns or raises.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping

from offbeat import plugins
from offbeat.errors import OffbeatError
from offbeat.number_format import format_seconds
from offbeat.server.supervisor import ServerPlan, Supervisor

_MOST_SAID = 200  # lines that are kept


def program(module: str, *words: str) -> list[str]:
    return [sys.executable, "-P", "-u", "-m", f"offbeat.measure.{module}", *words]


def environment(own: Mapping[str, str]) -> dict[str, str]:
    """One torch thread a learner; a run that this process itself is part of is not joined. Plugins are known to all."""
    kept = (name for name in os.environ if not name.startswith("OFFBEAT_") or name == plugins.VARIABLE)
    outer = {name: os.environ[name] for name in kept}
    return {**outer, **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"), **own}


def supervise(plan: ServerPlan, doing: str, timeout_s: float) -> dict[int, str]:
    """Start it, and wait until all learners have left. What each of them printed last."""
    said: list[tuple[str, str]] = []

    def tell(name: str, text: str) -> None:
        said.append((name, text))
        del said[:-_MOST_SAID]

    deadline = time.monotonic() + timeout_s
    supervisor = Supervisor(plan, tell)
    try:
        supervisor.start()
        while supervisor.learners:
            supervisor.poll()
            failed = [learner for learner, code in supervisor.exits.items() if code]
            if failed:
                name = f"learner {failed[0]}"
                words = [text for who, text in said if who == name and text.strip()]
                why = words[-1] if words else f"exit code {supervisor.exits[failed[0]]}"
                raise OffbeatError(f"bench: {name}: {why} ({doing})")
            if time.monotonic() > deadline:
                raise OffbeatError(f"bench: not done within {format_seconds(timeout_s)} ({doing})")
        summary = supervisor.finish()
    finally:
        supervisor.close()
    if summary is None:
        raise OffbeatError(f"bench: the coordinator did not say how the run went ({doing})")
    return {int(who.removeprefix("learner ")): text for who, text in said if who.startswith("learner ")}
