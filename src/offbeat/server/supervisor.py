"""The processes of a parameter server: coordinator, servers and, if asked to, learners; their memory and journal.

Coordinator and servers are forked from here, where torch is loaded already: one that was killed is back at once, on the
same memory and the same journal. A process that was stopped for too long is killed, so that another can take its place.
When the supervisor itself is killed, the kernel ends all that it has started.

`python -m offbeat.server.supervisor PLAN` runs one without learners, for those who start their own. It prints where it
can be reached, as one line of JSON, and ends when standard input is closed and all learners have left. With `listen` in
the plan, learners may also come from other hosts.

    supervisor --- coordinator --- learners
        |              |
        +---------- servers

With one server and a small model there is no process for the server: the coordinator makes its updates. Where learners
may come from other hosts, the gateway is one more process (`remote.gateway`).
"""

from __future__ import annotations

import json
import math
import os
import secrets
import select
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from offbeat.collectives import memory
from offbeat.errors import OffbeatError
from offbeat.network import keys
from offbeat.network.connections import Place
from offbeat.network.port import format_place, open_port
from offbeat.processes.child import (
    ChildProcess,
    RestartLimit,
    Stopwatch,
    describe_exit,
    die_with_parent,
    fork,
)
from offbeat.processes.launcher import SELF, Launcher, LaunchPlan
from offbeat.server import handshake
from offbeat.server.arena import Arena, ArenaLayout
from offbeat.server.coordinator import coordinator_process
from offbeat.server.coordinator.journal import new_files
from offbeat.server.parameter_layout import ParameterLayout
from offbeat.server.remote.gateway import Gateway, GatewayServers, RemotePlan
from offbeat.server.remote.link_traffic import HERE, RunTraffic, told_of
from offbeat.server.remote.mirror import MIRROR_GENERATION
from offbeat.server.remote.remote_road import GATEWAY
from offbeat.server.remote.server_host import GENERATION
from offbeat.server.remote.server_places import FIRST_HOST, ServerPlace, ServerPlaces
from offbeat.server.remote.shard_data import ShardData, ShardRegions
from offbeat.server.run_setting import RunSetting
from offbeat.server.shard import server_process
from offbeat.server.wire import MOST_BYTES

STOPPED_S = 2.0  # after which a stopped server or coordinator is replaced
MOST_DRAIN_S = 600.0
MOST_DEATHS, DEATHS_S = 8, 20.0  # of one server or of the coordinator: more than so many in so long, and the run ends
MOST_RESTARTS = 3  # of a learner that was killed
PIDS_KEPT = 64  # of each learner, those that came last
COME_S = 60.0  # for hosts with servers, after a run that does not wait for all learners has begun
INSIDE_ITEMS = 2**16  # of a model on one server: up to so many, the coordinator makes the updates itself
_LINGER_S = 0.5  # for learners whose goodbye is on its way


class HostLostError(OffbeatError):
    """A server is lost with its host. `version`: the updates that were made; `hosts` are left for servers."""

    def __init__(self, why: str, version: int, hosts: int) -> None:
        super().__init__(
            f"{why}, and its part of the parameters with it; continue from the newest checkpoint with --resume"
        )
        self.why, self.version, self.hosts = why, version, hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan(LaunchPlan):
    """What to run. Without a command or a body only coordinator and servers are started."""

    setting: RunSetting
    seed: int = 0
    log: Path | None = None
    facts: Mapping[str, Any] | None = None
    restarts: int = MOST_RESTARTS
    remote: RemotePlan | None = None  # places for learners on other hosts, which are not started here

    @property
    def learners_here(self) -> int:
        return self.setting.learners if self.remote is None else self.remote.first


class Supervisor(Launcher):
    """See the module's text."""

    plan: ServerPlan

    def __init__(self, plan: ServerPlan, on_line: Callable[[str, str], None]) -> None:
        super().__init__(plan, plan.learners_here, on_line)
        self.token = secrets.token_hex(16)
        self.listener, self.address = handshake.new_listener()
        self.server_secret = secrets.token_hex(16)  # which learners are not told
        self.journal = new_files()
        self.start_s = time.monotonic()
        self.arena: tuple[ParameterLayout, int] | None = None  # the shared memory
        self.services: dict[str, ChildProcess] = {}
        self.generations = [0] * plan.setting.shards
        self.begin_by_s: float | None = None  # with whoever is there: not all will come
        self.deaths: dict[str, RestartLimit] = {}
        self.outages: dict[str, tuple[float, str]] = {}  # of what has died and is not back yet: since when, and how
        self.pids: dict[int, int] = {}  # of learners, by nonce: whoever comes in the coordinator's place must know
        self.summary: str | None = None
        self.draining = False
        self.coordinator: socket.socket | None = None
        self.gateway: socket.socket | None = None
        self.servers_at: dict[int, ServerPlace] = {}  # on other hosts
        self.hosts_of: dict[int, str] = {}  # learners on others; where one had several, the last
        self.run_name = secrets.token_bytes(16)  # hosts that have joined know it
        listener = None if plan.remote is None else plan.remote.data_listener
        self._data_port = 0 if listener is None else int(listener.getsockname()[1])  # a fork has no such descriptor
        self._quiet: memory.Segment | None = None

    # --- starting ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._start_coordinator()
        self._start_gateway()
        super().start()
        for program in () if self.plan.remote is None else self.plan.remote.programs:
            self.start_host(program)

    def _start_coordinator(self) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.coordinator = mine
        run = coordinator_process.CoordinatorOptions(
            setting=replace(self.plan.setting, start_by_s=self.begin_by_s or self.plan.setting.start_by_s),
            token=self.token,
            server_secret=self.server_secret,
            seed=self.plan.seed,
            start_s=self.start_s,
            log=self.plan.log,
            launched=self.plan.launches,
            facts=dict(self.plan.facts or {}),
            inside_items=INSIDE_ITEMS,
            learners_here=self.plan.learners_here,
            mirrors=self.plan.remote is not None and self.plan.remote.mirrors,
        )

        def body() -> None:
            coordinator_process.CoordinatorProcess(
                run, self.listener, theirs, self.journal, self.arena, self.pids
            ).serve()

        keep = {theirs.fileno(), self.listener.fileno(), *self.journal, *([self.arena[1]] if self.arena else [])}
        self._add_service("coordinator", body, self._start_coordinator, keep)
        theirs.close()
        self._watch(mine.fileno(), lambda: self._receive(mine))
        for learner in self.exits:
            self._send("ended", number=learner)
        if self.draining:
            self._send("finish")

    def _start_gateway(self) -> None:
        """If there are places for learners on other hosts."""
        remote = self.plan.remote
        if remote is None:
            return
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.gateway = mine
        setting, seed = self.plan.setting, self.plan.seed

        def body() -> None:
            gateway = Gateway(
                remote,
                coordinator=self.address,
                token=self.token,
                learners=setting.learners,
                line=setting.line,
                seed=seed,
                supervisor=theirs,
                tell=lambda text: coordinator_process.say(theirs, "say", text=text),
                servers=self._servers_for(theirs),
                run=self.run_name,
                placed=lambda learner, address: coordinator_process.say(theirs, "placed", number=learner, text=address),
                mirror_token=handshake.server_token(self.server_secret, 0, MIRROR_GENERATION),
            )
            coordinator_process.say(theirs, "ready", text="gateway")
            gateway.serve()

        self._add_service("gateway", body, self._start_gateway, {theirs.fileno(), remote.listener.fileno()})
        theirs.close()
        self._watch(mine.fileno(), lambda: self._receive(mine))

    def _servers_for(self, line: socket.socket) -> GatewayServers | None:
        """What the gateway needs of servers on other hosts, where there are some."""
        if not self.plan.setting.spread or self.plan.remote is None or self.plan.remote.data_listener is None:
            return None
        here, starts_s = ServerPlace(FIRST_HOST, "", self._data_port), self.plan.setting.start_by_s

        def note(shard: int, place: ServerPlace) -> None:
            text = f"{place.host.hex()} {place.address} {place.port}"
            coordinator_process.say(line, "server", number=shard, text=text)

        return GatewayServers(
            places=ServerPlaces(self.plan.setting.shards, here, self.servers_at),
            token_of=lambda shard: handshake.server_token(self.server_secret, shard, GENERATION),
            note=note,
            lost=lambda why, hosts: coordinator_process.say(line, "lost", text=why, number=hosts),
            come_by_s=self.start_s + (math.inf if starts_s is None else starts_s + COME_S),
        )

    def _start_data(self) -> None:
        """Where shards are spread: the process that serves the bytes of the first of them."""
        remote = self.plan.remote
        assert self.arena is not None and remote is not None and remote.data_listener is not None
        (table, descriptor), listener = self.arena, remote.data_listener
        setting = replace(self.plan.setting, clip_norm=table.clip_norm)

        def body() -> None:
            segment = memory.Segment(descriptor, ArenaLayout(table, setting).size_bytes)
            ShardData(ShardRegions(Arena(segment, table, setting), 0), listener, remote.key).serve()

        self._add_service("shard data", body, self._start_data, {descriptor, listener.fileno()})

    def _start_server(self, shard: int) -> None:
        self.generations[shard] += 1
        generation = self.generations[shard]
        token = handshake.server_token(self.server_secret, shard, generation)
        self._add_service(
            f"server {shard}",
            lambda: server_process.serve(self.address, token, shard, generation),
            lambda: self._start_server(shard),
        )

    def _add_service(
        self,
        name: str,
        body: Callable[[], None],
        start_again: Callable[[], None],
        keep: AbstractSet[int] = frozenset(),
    ) -> None:
        self.services[name] = fork(name, body, keep=keep, captured=False)
        self._add(self.services[name], lambda code: self._service_ended(name, code, start_again))

    def environment_of(self, learner: int) -> dict[str, str]:
        return {
            "OFFBEAT_ADDRESS": self.address,
            "OFFBEAT_TOKEN": self.token,
            "OFFBEAT_SYNC": self.plan.setting.line,
            "OFFBEAT_LEARNER": str(learner),
            "OFFBEAT_LEARNERS": str(self.plan.setting.learners),
            **({GATEWAY: self.plan.remote.reached_here} if self.plan.remote is not None else {}),
        }

    # --- watching ---------------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Also replace a coordinator or server that was stopped for too long."""
        super().poll()
        for name, child in self.services.items():
            stopped_s = child.stopped_s()
            if stopped_s > STOPPED_S:
                self.outages.setdefault(name, (time.monotonic() - stopped_s, "was stopped"))
                child.kill()

    def _receive(self, line: socket.socket) -> bool:
        """A message of the coordinator; whether there was one."""
        try:
            data, descriptors, _, _ = socket.recv_fds(line, MOST_BYTES, 2)
        except OSError:
            data, descriptors = b"", []
        if not data:
            self._unwatch(line.fileno())
            return False
        message = coordinator_process.decode_supervisor_message(data)
        if message.what == "arena" and self.arena is None and message.table is not None:
            self.arena = (message.table, descriptors.pop(0))
            self._quiet = memory.Segment(self.arena[1], 4096)  # its first word says whether anybody is there
            for shard in range(1 if self.plan.setting.spread else message.number):
                self._start_server(shard)
            if self.plan.setting.spread:
                self._start_data()
        elif message.what == "server":
            host, address, port = message.text.split()
            self.servers_at[message.number] = ServerPlace(bytes.fromhex(host), address, int(port))
        elif message.what == "placed":
            self.hosts_of[message.number] = message.text
        elif message.what == "ready":
            self._recovered(message.text)
        elif message.what == "learner":
            self.pids[message.nonce] = message.pid
            if len(self.pids) > PIDS_KEPT * self.plan.setting.learners:
                del self.pids[next(iter(self.pids))]
        elif message.what == "replace":
            child = self.services.get(f"server {message.number}")
            if child is not None and child.pid == message.pid:
                child.kill()
        elif message.what == "say":
            self.on_line(SELF, message.text)
        elif message.what == "summary":
            self.summary = message.text
        elif message.what == "lost" and not self._closing and self.summary is None:
            self.kill_learners()
            raise HostLostError(message.text, self._newest_version(), message.number)
        elif message.what == "failed" and not self._closing:
            self.kill_learners()  # they wait for what does not come: asking them would take long
            raise OffbeatError(message.text)
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _newest_version(self) -> int:
        """The updates of this run."""
        if self.arena is None:
            return 0
        table, descriptor = self.arena
        setting = replace(self.plan.setting, clip_norm=table.clip_norm)
        arena = Arena(memory.Segment(descriptor, ArenaLayout(table, setting).size_bytes), table, setting)
        return max(version.get() for version, _ in arena.committed)

    def _service_ended(self, name: str, code: int, start_again: Callable[[], None]) -> None:
        del self.services[name]
        if name == "coordinator" and self.coordinator is not None:
            while self._receive(self.coordinator):  # its last messages
                pass
            self.coordinator.close()
            self.coordinator = None
        if name == "gateway" and self.gateway is not None:
            while self._receive(self.gateway):
                pass
            self.gateway.close()
        if self._closing or (name == "coordinator" and self.summary is not None):
            return
        if not self.deaths.setdefault(name, RestartLimit(MOST_DEATHS - 1, DEATHS_S)).take():
            how = f"died {MOST_DEATHS} times in {DEATHS_S:g} s, the last time: {describe_exit(code)}"
            raise OffbeatError(f"{name} {how}")
        self.outages.setdefault(name, (time.monotonic(), f"died ({describe_exit(code)})"))
        start_again()

    def _recovered(self, name: str) -> None:
        """A server or the coordinator works again, if it did not all the time."""
        if name in self.outages:
            since_s, how = self.outages.pop(name)
            seconds = time.monotonic() - since_s
            self.recoveries.append({"who": name, "how": how, "seconds": seconds})
            self.on_line(SELF, f"{name} {how} and was replaced after {seconds:.2f} s")

    def _learner_ended(self, learner: int, code: int) -> None:
        super()._learner_ended(learner, code)
        if learner not in self.exits:
            return
        self._send("ended", number=learner)
        self._begin_without()

    def _host_ended(self, name: str, code: int) -> None:
        """One that failed before all learners had joined is a mistake at the start; after that, the run does without
        it.
        """
        must = self.plan.remote is None or not self.plan.remote.may_fail
        if code and must and not self._closing and len(self.pids) < self.plan.setting.learners:
            self.kill_learners()  # they wait for those that do not come
            why = self._last_lines.get(name, "").removeprefix("offbeat: ") or "it printed nothing"
            raise OffbeatError(f"{name} did not start its learners ({describe_exit(code)}): {why}")
        super()._host_ended(name, code)
        self._begin_without()

    def _begin_without(self) -> None:
        """Not all learners will come: a run that has not begun begins with those that are there."""
        if self.begin_by_s is None and self.coordinator is not None:
            self.begin_by_s = time.monotonic() - self.start_s
            self._send("begin", at_s=self.begin_by_s)

    def _send(self, what: str, **fields: Any) -> None:
        """To the coordinator, if it is there."""
        if self.coordinator is not None:
            coordinator_process.say(self.coordinator, what, **fields)

    def is_quiet(self) -> bool:
        """Whether no learner is in the run."""
        return self.arena is None or self._quiet is None or bool(self._quiet.words[0])

    # --- the end ----------------------------------------------------------------------------------------------------

    def finish(self) -> str | None:
        """Let the last updates be made and the log be closed; the summary, as JSON."""
        self.draining = True
        self._send("finish")
        end = time.monotonic() + MOST_DRAIN_S  # the coordinator waits as long as updates are being made
        while self.summary is None and time.monotonic() < end:
            self.poll()
        return None if self.summary is None else self._with_links(self.summary)

    def _with_links(self, summary: str) -> str:
        """What the links of hosts carried, if there are several."""
        if not self.hosts_of:
            return summary
        told = json.loads(summary)
        minibatches: Counter[str] = Counter()
        for learner, many in enumerate(told.get("pushed", ())):
            minibatches[self.hosts_of.get(learner, HERE)] += many
        traffic = RunTraffic(
            minibatches=minibatches,
            push_bytes=told.get("push_bytes", 0),
            fetch_bytes=told.get("fetch_bytes", 0),
            mirror_bytes=told.get("mirror", {}).get("bytes", 0),
        )
        spread_on = [place.address for shard, place in self.servers_at.items() if shard]
        return json.dumps({**told, "link": told_of(traffic, spread_on)})

    def close(self) -> None:
        super().close()
        self.listener.close()
        for file in self.journal:
            os.close(file)
        for one in (self.coordinator, self.gateway):
            if one is not None:
                one.close()
        if self.plan.remote is not None:
            self.plan.remote.listener.close()
            if self.plan.remote.data_listener is not None:
                self.plan.remote.data_listener.close()
        if self.arena is not None:
            os.close(self.arena[1])


def main(words: list[str]) -> int:
    die_with_parent()
    import torch

    torch.set_num_threads(1)
    given = json.loads(words[0])
    log = Path(given["log"]) if given["log"] else None
    try:
        remote = _places_at(given["listen"], given.get("first", 0)) if given.get("listen") else None
        if remote is not None and given["setting"].get("spread"):
            remote = remote.spread()
        plan = ServerPlan(setting=RunSetting(**given["setting"]), seed=given["seed"], log=log, remote=remote)
        with Supervisor(plan, lambda name, line: print(f"{name}: {line}", file=sys.stderr)) as supervisor:
            supervisor.start()
            found = {"address": supervisor.address, "token": supervisor.token}
            if remote is not None:
                found["listens"] = format_place(Place(*remote.listener.getsockname()[:2]))
            print(json.dumps(found), flush=True)
            _serve(supervisor)
            supervisor.finish()
    except OffbeatError as error:
        print(f"offbeat: {error}", file=sys.stderr)
        return 1
    return 0


def _places_at(address: str, first: int) -> RemotePlan:
    """Learners from `first` on may come from other hosts."""
    return RemotePlan(listener=open_port(address, "listen"), key=keys.key_of(), first=first)


def _serve(supervisor: Supervisor) -> None:
    """Until whoever started this is done, and then until the others are."""
    is_open, quiet = True, Stopwatch()
    while quiet.seconds(not is_open and supervisor.is_quiet()) < _LINGER_S:
        supervisor.poll()
        if is_open and select.select([0], [], [], 0)[0] and not os.read(0, 4096):
            is_open = False


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
