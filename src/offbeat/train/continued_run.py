"""A server was lost with its host: the run begins anew on the hosts that are left, from its newest checkpoint.

It does so in the process that has started it, in the same folder and on the same port, as `--resume` would: what was
computed since the checkpoint is computed again, so that every sample counts once. The hosts that are left see that
another run is at its place (`server.remote.checkpoint_copies`), and join that one (`succession`).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from offbeat.processes.ssh_hosts import HostProgram
from offbeat.server.supervisor import HostLostError
from offbeat.spec import count_of
from offbeat.train.config_files import changed
from offbeat.train.launch import Start, prepare
from offbeat.train.remote_learner import open_places
from offbeat.train.succession import JOIN_S, Loss


def go_on_without(
    start: Start,
    lost: HostLostError,
    listener: socket.socket,
    *,
    successors: Sequence[str] = (),
    programs: Sequence[HostProgram] = (),
    tell: Callable[[str], None],
) -> tuple[Start, str]:
    """The run as it begins anew, and what there is to say of it, in one line."""
    assert start.remote is not None
    remote = start.config.learners - start.remote.first
    servers = max(1, min(start.config.servers, lost.hosts))
    again = prepare(changed(start.config, {"servers": servers}), resume=start.run.path, tell=tell)
    update = 0 if again.checkpoint is None else again.checkpoint.update
    newest = lost.version + (0 if start.checkpoint is None else start.checkpoint.update)
    loss = Loss(why=lost.why, update=update, updates=max(0, newest - update))
    loss.note(again.run)
    again = open_places(again, listener, remote, float(JOIN_S), programs, successors, spread=servers > 1, may_fail=True)
    many = count_of(servers, "server")
    return again, f"{lost.why}; the run goes on from update {update} with {many}; updates lost: {loss.updates}"
