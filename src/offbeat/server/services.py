"""Coordinator and servers without learners: `python -m offbeat.server.services PLAN`, for whoever starts its own.

Says where it can be reached, as one line of JSON; ends when standard input is closed and all learners have left.
"""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path

import torch

from offbeat.errors import OffbeatError
from offbeat.processes.child import Stopwatch, die_with_parent
from offbeat.server.coordinator.session import Setting
from offbeat.server.supervisor import ServerPlan, Supervisor

_LINGER_S = 0.5  # for learners whose goodbye is on its way


def main(words: list[str]) -> int:
    die_with_parent()
    torch.set_num_threads(1)
    given = json.loads(words[0])
    log = Path(given["log"]) if given["log"] else None
    plan = ServerPlan(setting=Setting(**given["setting"]), seed=given["seed"], log=log)
    try:
        with Supervisor(plan, lambda name, line: print(f"{name}: {line}", file=sys.stderr)) as supervisor:
            supervisor.start()
            print(json.dumps({"door": supervisor.address, "token": supervisor.token}), flush=True)
            _serve(supervisor)
            supervisor.finish()
    except OffbeatError as error:
        print(f"offbeat: {error}", file=sys.stderr)
        return 1
    return 0


def _serve(supervisor: Supervisor) -> None:
    """Until whoever started this is done, and then until the others are."""
    is_open, quiet = True, Stopwatch()
    while quiet.seconds(not is_open and supervisor.is_quiet()) < _LINGER_S:
        supervisor.poll()
        if is_open and select.select([0], [], [], 0)[0] and not os.read(0, 4096):
            is_open = False


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
