"""Learners of a script on other hosts: what `offbeat run` tells a host that joins, and a host that runs the script too.

The script itself is not sent: the joining host has it, and is refused where its name is another. It is run as on the
host of the run, once per learner, and finds the run by its environment (`offbeat.join`).
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from offbeat.errors import PeerError, RequestError
from offbeat.network import keys
from offbeat.network.port import check_trust, format_place, parse_place, raw_of
from offbeat.processes.launcher import LaunchPlan, thread_environment
from offbeat.processes.ssh_hosts import HostProgram
from offbeat.server.remote.gateway import RemotePlan, enter
from offbeat.server.remote.joining_host import JoinedHost, run_learners
from offbeat.server.supervisor import MOST_RESTARTS

ENTER_S = 10.0


class ScriptTold(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="script"):
    """What a run of a script tells a host that joins."""

    script: Annotated[str, msgspec.Meta(max_length=4096)]
    slow: tuple[str, ...] = ()
    threads: Annotated[int, msgspec.Meta(ge=1)] = 1


def script_places(
    listener: socket.socket,
    *,
    first: int,
    script: str,
    slow: Sequence[str],
    threads: int,
    programs: Sequence[HostProgram],
) -> RemotePlan:
    """Places for learners of the script on other hosts, from `first` on."""
    told = ScriptTold(script=script, slow=tuple(slow), threads=threads)
    return RemotePlan(
        listener=listener, key=keys.key_of(), first=first, told=msgspec.json.encode(told), programs=programs
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedScript(JoinedHost):
    """A run of a script that this host has joined."""

    told: ScriptTold


def enter_script(address: str, learners: int, script: str) -> JoinedScript:
    """Ask a run for places. `RequestError` where it runs another script, or none."""
    place, key = parse_place(address, "--join"), keys.key_of()
    check_trust(place, key, is_open=keys.is_open(), what="--join")
    host = secrets.token_bytes(16)
    entered, one = enter(place, key, host, learners, ENTER_S)
    raw_of(one).close()
    try:
        told = msgspec.json.decode(entered.told, type=ScriptTold)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise PeerError(f"{format_place(place)} is not a run of `offbeat run`; join it without a script") from None
    if told.script != script:
        raise RequestError(f"{format_place(place)} runs {told.script}; this host was given {script}")
    return JoinedScript(place=place, host=host, entered=entered, told=told)


def join_script(
    run: JoinedScript, command: Sequence[str], on_line: Callable[[str, str], None], *, attached: bool = False
) -> dict[int, int]:
    """Run the command once for each place until it ends; the exit codes, by place."""
    own = {"OFFBEAT_SEED": str(run.entered.seed), "OFFBEAT_SLOW": " ".join(run.told.slow)}
    environment = {**os.environ, **thread_environment(run.told.threads), **own}
    plan = LaunchPlan(command=command, environment=environment, restarts=MOST_RESTARTS)
    return run_learners(run, plan, on_line, attached=attached)
