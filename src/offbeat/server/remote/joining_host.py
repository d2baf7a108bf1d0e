"""The learners of a host that has joined a run: started at the places that the run gave them, watched, and sent away.

Laws: a signal lets them leave, so that others compute what they had begun; a second one ends them at once. A host that
was started from elsewhere (`attached`) leaves when its standard input is closed, and ends after `GRACE_S` all the same.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from dataclasses import dataclass

from offbeat.collectives import memory
from offbeat.network import keys
from offbeat.network.addresses import address_towards
from offbeat.network.connections import Place
from offbeat.network.port import format_place, listen
from offbeat.processes.child import Stopwatch, describe_exit, fork
from offbeat.processes.launcher import GRACE_S, SELF, Launcher, LaunchPlan
from offbeat.processes.signals import terminable
from offbeat.server.remote.gateway import Entered
from offbeat.server.remote.remote_road import SCHEME
from offbeat.server.remote.server_host import ServerHost
from offbeat.server.supervisor import STOPPED_S

_LEFT = (143, 130, -15)  # how learners end that were asked to


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedHost:
    """A run that this host has entered, and the name under which it has places there."""

    place: Place
    host: bytes
    entered: Entered


class _HostLauncher(Launcher):
    """The learners of this host, at the places that the run has given them."""

    def __init__(self, joined: JoinedHost, plan: LaunchPlan, on_line: Callable[[str, str], None]) -> None:
        super().__init__(plan, len(joined.entered.places), on_line)
        self._joined = joined
        self.server: ServerHost | None = None
        if joined.entered.spread:
            own = Place(address_towards(joined.place.address), 0)
            self.server = ServerHost(
                run=joined.place,
                run_name=joined.entered.run,
                key=keys.key_of(),
                host=joined.host,
                descriptor=memory.new_file(),
                listener=listen(own, "--place spread"),
            )
        self.serves = False  # a server of the run is on this host
        self.leaves = False  # this host does not wait for the end of the run

    def start(self) -> None:
        if self.server is not None:
            self._start_server(self.server)
        super().start()

    def _start_server(self, server: ServerHost) -> None:
        """A server that was killed is replaced, on the same memory; one that ends by itself has no run any more."""
        keep = {server.descriptor, server.listener.fileno()}
        child = fork("server", server.serve, keep=keep, captured=False)
        self.serves = True
        self._server_child = child

        def ended(code: int) -> None:
            self.serves = code < 0 and not self._closing
            if self.serves:
                self.on_line(SELF, f"the server of this host died ({describe_exit(code)}) and is restarted")
                self._start_server(server)

        self._add(child, ended)

    def poll(self) -> None:
        """Also replace a server that was stopped for too long."""
        super().poll()
        if self.serves and self._server_child.stopped_s() > STOPPED_S:
            self._server_child.kill()

    def finish(self) -> str | None:
        """The learners of this host have ended: its server stays until the run does."""
        while self.serves and not self.leaves:
            self.poll()
        return None

    def close(self) -> None:
        super().close()
        if self.server is not None:
            os.close(self.server.descriptor)
            self.server.listener.close()

    def name_of(self, learner: int) -> str:
        return f"learner {self._joined.entered.places[learner]}"

    def environment_of(self, learner: int) -> dict[str, str]:
        entered = self._joined.entered
        return {
            "OFFBEAT_ADDRESS": f"{SCHEME}{format_place(self._joined.place)}",
            "OFFBEAT_TOKEN": self._joined.host.hex() + entered.run.hex(),
            "OFFBEAT_SYNC": entered.line,
            "OFFBEAT_LEARNER": str(entered.places[learner]),
            "OFFBEAT_LEARNERS": str(entered.learners),
            **({} if self.server is None else self.server.environment),
        }


def run_learners(
    joined: JoinedHost,
    plan: LaunchPlan,
    on_line: Callable[[str, str], None],
    *,
    attached: bool = False,
    is_lost: Callable[[], bool] = lambda: False,
) -> dict[int, int]:
    """Be learners of a run until it ends, or is lost; their exit codes, by place."""
    told, leaving, is_open = False, Stopwatch(), True
    with terminable(noted=1) as signals, _HostLauncher(joined, plan, on_line) as launcher:

        def check() -> None:
            nonlocal told, is_open
            is_open = is_open and not (attached and _is_closed(0))
            if (signals.received or not is_open) and not told:
                told = launcher.leaves = True
                launcher.ask_to_end()
            if leaving.seconds(not is_open) > GRACE_S:
                launcher.kill_learners()
            if is_lost():
                launcher.leaves = True
                for learner in tuple(launcher.learners):
                    launcher.give_up(learner)

        launcher.start()
        launcher.watch(check)
    exits = {joined.entered.places[learner]: code for learner, code in launcher.exits.items()}
    left = (*_LEFT, -9) if not is_open else _LEFT
    return {place: 0 if told and code in left else code for place, code in sorted(exits.items())}


def _is_closed(descriptor: int) -> bool:
    """Whether nobody will write there any more. What was written is passed over."""
    return bool(select.select([descriptor], [], [], 0)[0]) and not os.read(descriptor, 4096)
