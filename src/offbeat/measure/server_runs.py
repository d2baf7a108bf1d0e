"""A run of the real parameter server with learners' programs of ours, watched until all have ended.

Laws: a learner that fails, and a run that takes too long, end the measurement with one line that says which. No process
is left when `supervise` returns or raises.
"""

from __future__ import annotations

import time
from collections import deque

from offbeat.errors import OffbeatError
from offbeat.number_format import format_seconds
from offbeat.server.supervisor import ServerPlan, Supervisor

_MOST_SAID = 200  # lines that are kept


def supervise(plan: ServerPlan, doing: str, timeout_s: float) -> dict[int, str]:
    """Start it, and wait until all learners have left. What each of them printed last."""
    said: deque[tuple[str, str]] = deque(maxlen=_MOST_SAID)
    deadline = time.monotonic() + timeout_s

    def check() -> None:
        for learner, code in supervisor.exits.items():
            if code:
                words = [text for who, text in said if who == f"learner {learner}" and text.strip()]
                why = words[-1] if words else f"exit code {code}"
                raise OffbeatError(f"bench: learner {learner}: {why} ({doing})")
        if time.monotonic() > deadline:
            raise OffbeatError(f"bench: not done within {format_seconds(timeout_s)} ({doing})")

    with Supervisor(plan, lambda name, text: said.append((name, text))) as supervisor:
        supervisor.start()
        if supervisor.watch(check) is None:
            raise OffbeatError(f"bench: the coordinator did not say how the run went ({doing})")
    return {int(who.removeprefix("learner ")): text for who, text in said if who.startswith("learner ")}
