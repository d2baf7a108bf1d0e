"""Coordinator and servers without learners: `python -m offbeat.server.services PLAN`, for whoever starts its own.

Says where it can be reached, as one line of JSON; ends when standard input is closed and all learners have left.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

import torch

from offbeat.errors import OffbeatError
from offbeat.server.run_setting import RunSetting
from offbeat.server.supervisor import Plan, Supervisor

_LINGER_S = 0.5  # for learners whose goodbye is on its way
_PR_SET_PDEATHSIG = 1


def main(words: list[str]) -> int:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    given = json.loads(words[0])
    setting = RunSetting(**given["setting"])
    log = Path(given["log"]) if given["log"] else None
    supervisor = Supervisor(
        Plan(setting=setting, seed=given["seed"], log=log),
        tell=lambda name, line: print(f"{name}: {line}", file=sys.stderr),
    )
    try:
        supervisor.start()
        print(json.dumps({"door": supervisor.name, "token": supervisor.token}), flush=True)
        _serve(supervisor)
        supervisor.finish()
    except OffbeatError as error:
        print(f"offbeat: {error}", file=sys.stderr)
        return 1
    finally:
        supervisor.close()
    return 0


def _serve(supervisor: Supervisor) -> None:
    """Until whoever started this is done, and then until the others are."""
    is_open, since = True, None
    while is_open or since is None or time.monotonic() - since < _LINGER_S:
        supervisor.turn()
        if is_open and select.select([0], [], [], 0)[0] and not os.read(0, 4096):
            is_open = False
        if not is_open:
            since = (since or time.monotonic()) if supervisor.is_quiet() else None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
