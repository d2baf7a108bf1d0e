"""The gateway: the run's port for learners on other hosts. It gives them their places, and each a road process.

A run has a fixed number of places for learners; those from `first` on are for other hosts. A host asks for some of them
(ENTER) and is told what the run is; its learners then connect, four connections each. A place belongs to the host that
asked for it as long as its learner is connected, and `KEPT_S` longer; then whoever asks may have it.

What a joining host is told beside that (`RemotePlan.told` and `files`) is the business of whoever starts the run: this
file only carries it.

The gateway keeps nothing that is needed to go on: when it is killed its road processes end with it, the learners
connect to the next one, say which places they had, and join again.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import msgspec

from offbeat.errors import OffbeatError, PeerError, RequestError
from offbeat.network.connections import AnyConnection, Place
from offbeat.network.keys import RunKey
from offbeat.network.port import Guest, Port, dial, format_place, listen, raw_of, receive_all, send_all
from offbeat.network.streams import ClosedError
from offbeat.processes.child import ChildProcess, fork
from offbeat.processes.ssh_hosts import HostProgram
from offbeat.server import handshake
from offbeat.server.remote.checkpoint_copies import say_anew, serve_copies
from offbeat.server.remote.frames import (
    GREETING_BYTES,
    LEARNER_CHANNELS,
    PIECE_BYTES,
    PROTOCOL,
    Channel,
    FrameError,
    Greeting,
    Header,
    Kind,
    unpack_greeting,
)
from offbeat.server.remote.mirror import serve_mirror
from offbeat.server.remote.road_process import RoadOptions, RoadProcess
from offbeat.server.remote.server_host import serve_road
from offbeat.server.remote.server_places import ServerPlace, ServerPlaces
from offbeat.spec import count_of

KEPT_S = 5.0
_REFUSED = 3  # exit code of a road whose learner was refused
COMPLETE_S = 10.0  # for the four connections of a learner
ENTER_S = 10.0  # for a host to take the next bytes of its answer
MOST_SESSIONS = 1024  # of which some connections have come, and not all
_POLL_S = 0.25
MOST_ENTRY_BYTES = 1 << 20
_SIZE_BYTES = 4


class NoPlaceError(RequestError):
    """All places of a run are taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePlan:
    """Places for learners on other hosts: those from `first` on."""

    listener: socket.socket
    key: RunKey | None
    first: int
    told: bytes = b""  # to a host that joins
    files: Mapping[int, bytes] = field(default_factory=dict)  # what a learner had when the run was saved
    hand_in: Callable[[int, int, bytes], None] = lambda pause, learner, part: None
    programs: Sequence[HostProgram] = ()  # that bring them, and are started with the run
    mirrors: bool = False  # one of the hosts that join keeps a copy of the servers' state
    may_fail: bool = False  # then the run does without those, also at the start
    folder: Path | None = None  # of the run, whose checkpoints other hosts may have
    data_listener: socket.socket | None = None  # where the first shard's bytes are served; None: not spread

    def spread(self) -> RemotePlan:
        """The same, with each shard on a host of its own."""
        address = self.listener.getsockname()[0]
        return replace(self, data_listener=listen(Place(address, 0), "--place spread"))

    @property
    def reached_here(self) -> str:
        """Where processes of this host reach the run's port."""
        address, port = self.listener.getsockname()[:2]
        loopback = "::1" if ":" in address else "127.0.0.1"
        return format_place(Place(loopback if ipaddress.ip_address(address).is_unspecified else address, port))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayServers:
    """What the gateway needs where shards are spread over hosts."""

    places: ServerPlaces
    token_of: Callable[[int], str]  # with which the server of a shard comes to the coordinator
    note: Callable[[int, ServerPlace], None]  # for the gateway that may come after this one
    lost: Callable[[str, int], None]  # one of them, in words; and how many hosts are left for servers, with this one
    come_by_s: float = math.inf  # after that, one that has not come is lost too


class Entered(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="entered"):
    """The answer to a host: its places, and what the run is; or why not. The files of its learners follow."""

    protocol: int
    version: str
    refused: str = ""
    places: tuple[int, ...] = ()
    learners: int = 0  # of the run
    line: str = ""
    seed: int = 0
    told: bytes = b""
    sizes: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()  # of the files
    spread: bool = False  # each host offers a server too
    run: bytes = b""  # its name: one that begins anew, at the same place, has another


_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Entered)


class Places:
    """Which host has which place; see the module's text. No clock: times are given."""

    def __init__(self, first: int, learners: int) -> None:
        self._numbers = range(first, learners)
        self._host: dict[int, bytes] = {}
        self._until_s: dict[int, float] = {}  # where nobody is connected: kept until then
        self._busy: set[int] = set()

    def take(self, host: bytes, count: int, now_s: float) -> tuple[int, ...]:
        """Places for a host: those that it had, then others; as many as there are."""
        mine = [number for number in self._numbers if self._host.get(number) == host]
        free = [number for number in self._numbers if number not in mine and self._is_free(number, b"", now_s)]
        free.sort(key=lambda number: number in self._host)  # first those that nobody has had
        taken = tuple(sorted((*mine, *free)[:count]))
        for number in taken:
            self._host[number], self._until_s[number] = host, now_s + KEPT_S
        return taken

    def _is_free(self, number: int, host: bytes, now_s: float) -> bool:
        if self._host.get(number) == host:
            return True
        return number not in self._busy and now_s >= self._until_s.get(number, 0.0)

    def admit(self, number: int, host: bytes, now_s: float) -> str:
        """A learner of this host comes to its place; why not, if it may not."""
        if number not in self._numbers:
            return (
                f"learner {number} has no place for another host; those are {self._numbers[0]} to {self._numbers[-1]}"
            )
        if not self._is_free(number, host, now_s):
            return f"the place of learner {number} was given to another host"
        self._host[number] = host
        self._busy.add(number)
        return ""

    def left(self, number: int, now_s: float) -> None:
        """Its learner is not connected any more."""
        self._busy.discard(number)
        self._until_s[number] = now_s + KEPT_S

    def refused(self, number: int) -> None:
        """Its learner was sent away, as one of the run before is: the place is not kept for its host."""
        self._busy.discard(number)
        self._host.pop(number, None)
        self._until_s.pop(number, None)

    def hosts(self) -> set[bytes]:
        """Those with a learner that is connected."""
        return {self._host[number] for number in self._busy}


class Gateway:
    """See the module's text."""

    def __init__(
        self,
        plan: RemotePlan,
        *,
        coordinator: str,
        token: str,
        learners: int,
        line: str,
        seed: int,
        supervisor: socket.socket,
        tell: Callable[[str], None],
        servers: GatewayServers | None = None,
        run: bytes = b"",
        mirror_token: str = "",
        placed: Callable[[int, str], None] = lambda learner, address: None,
    ) -> None:
        self._placed = placed
        self.run = run
        self._mirror_token = mirror_token
        self._mirror: tuple[int, ChildProcess] | None = None  # which of the successors, and its road
        self.plan, self.coordinator, self.token = plan, coordinator, token
        self.learners, self.line, self.seed, self.tell = learners, line, seed, tell
        self._supervisor = supervisor
        self._port = Port(plan.listener, plan.key, GREETING_BYTES)
        self._places = Places(plan.first, learners)
        self._sessions: dict[bytes, tuple[float, dict[Channel, AnyConnection], Greeting, str]] = {}
        self._roads: dict[int, ChildProcess] = {}
        self._answers: list[ChildProcess] = []
        self._servers = servers
        self._server_roads: dict[int, ChildProcess] = {}
        self._servers_missing_told = False

    def serve(self) -> None:
        """Until the supervisor is gone."""
        while True:
            children = (*self._roads.values(), *self._server_roads.values())
            guests = self._port.poll(_POLL_S, [child.pidfd for child in children])
            now_s = time.monotonic()
            for number, child in list(self._roads.items()):
                if _has_ended(child):
                    self._reap(number, now_s)
            if self._servers is not None:
                self._check_servers(self._servers, now_s)
            for child in [one for one in self._answers if _has_ended(one)]:
                child.wait()
                self._answers.remove(child)
            for guest in guests:
                try:
                    self._welcome(guest, now_s)
                except (OffbeatError, OSError, ClosedError):  # a stranger, or one that has gone again
                    raw_of(guest.connection).close()
            for session, (since_s, connections, _, _) in list(self._sessions.items()):
                if now_s - since_s > COMPLETE_S:
                    self._forget(session, connections)

    def _welcome(self, guest: Guest, now_s: float) -> None:
        greeting = unpack_greeting(guest.greeting)
        if greeting.channel is Channel.ENTER:
            self._enter(guest, greeting, now_s)
            return
        if greeting.channel is Channel.FOLLOW:
            folder = self.plan.folder if greeting.learner else None
            known = greeting.session == self.run
            self._answer(guest, lambda: serve_copies(guest.connection, folder) if known else say_anew(guest.connection))
            return
        if greeting.channel is Channel.MIRROR and self.plan.mirrors and greeting.session == self.run:
            self._start_mirror_road(guest, greeting)
            return
        if greeting.channel is Channel.SERVERS and self._servers is not None:
            places = self._servers.places
            if places.missing and not self._servers_missing_told:
                self._servers_missing_told = True
                self.tell(f"waits for {count_of(places.missing, 'more host')} with a server")
            self._answer(guest, lambda: send_all(guest.connection, [places.answer()]))
            return
        if greeting.channel is Channel.SERVER and self._servers is not None:
            self._start_server_road(self._servers, guest, greeting, now_s)
            return
        if greeting.channel not in LEARNER_CHANNELS:
            raise FrameError(f"a connection for {greeting.channel.name}, which this run has no use for")
        if len(self._sessions) >= MOST_SESSIONS:
            oldest = next(iter(self._sessions))
            self._forget(oldest, self._sessions[oldest][1])
        _, connections, first, _ = self._sessions.setdefault(greeting.session, (now_s, {}, greeting, guest.address))
        if greeting.channel in connections or (greeting.learner, greeting.host) != (first.learner, first.host):
            raise FrameError("a connection of another learner")
        connections[greeting.channel] = guest.connection
        if len(connections) == len(LEARNER_CHANNELS):
            del self._sessions[greeting.session]
            self._start_road(greeting, connections, guest.address, now_s)

    def _forget(self, session: bytes, connections: Mapping[Channel, AnyConnection]) -> None:
        del self._sessions[session]
        for one in connections.values():
            raw_of(one).close()

    # --- hosts ------------------------------------------------------------------------------------------------------

    def _enter(self, guest: Guest, greeting: Greeting, now_s: float) -> None:
        """Give a host its places. The answer is sent by a process of its own: nobody waits for a slow one."""
        places = self._places.take(greeting.host, greeting.learner, now_s)
        files = [self.plan.files.get(number, b"") for number in places]
        many = self.learners - self.plan.first
        why = "" if places else f"all {many} places for learners on other hosts are taken; use a larger --remote"
        answer = Entered(
            protocol=PROTOCOL,
            version=handshake.versions(),
            refused=why,
            places=places,
            learners=self.learners,
            line=self.line,
            seed=self.seed,
            told=self.plan.told if places else b"",
            sizes=tuple(map(len, files)),
            spread=self._servers is not None,
            run=self.run,
        )

        def send() -> None:
            raw_of(guest.connection).settimeout(ENTER_S)
            send_all(guest.connection, [_sized(_encode(answer)), *files])

        self._answer(guest, send)
        if places:
            self.tell(f"{guest.address} joins with {count_of(len(places), 'learner')}: {', '.join(map(str, places))}")

    def _answer(self, guest: Guest, send: Callable[[], None]) -> None:
        """In a process of its own."""

        def body() -> None:
            with contextlib.suppress(OSError):
                send()

        name = f"answer to {guest.address}"
        self._answers.append(fork(name, body, keep={raw_of(guest.connection).fileno()}, captured=False))
        raw_of(guest.connection).close()

    # --- learners ---------------------------------------------------------------------------------------------------

    def _start_road(
        self, greeting: Greeting, connections: Mapping[Channel, AnyConnection], address: str, now_s: float
    ) -> None:
        number = greeting.learner
        why = self._places.admit(number, greeting.host, now_s)
        if why:
            data = handshake.encode_accept(handshake.Accept(refused=why, taken=number >= self.plan.first))
            with contextlib.suppress(OSError):
                header = Header(Kind.MESSAGE, size=len(data))
                send_all(connections[Channel.DOWN_CONTROL], [header.pack(), data])
        else:
            if number in self._roads:  # it comes again before we have seen that it was gone
                self._roads[number].kill()
                self._reap(number, now_s)
                self._places.admit(number, greeting.host, now_s)
            self._placed(number, address)
            options = RoadOptions(
                learner=number,
                coordinator=self.coordinator,
                token=self.token,
                hand_in=self.plan.hand_in,
                tell=self.tell,
                run=self.run.hex(),
            )
            keep = {raw_of(one).fileno() for one in connections.values()} | {self._supervisor.fileno()}
            self._roads[number] = fork(
                f"road of learner {number} ({address})",
                lambda: _serve(RoadProcess(options, connections)),
                keep=keep,
                captured=False,
            )
        for one in connections.values():
            raw_of(one).close()

    # --- the mirror -------------------------------------------------------------------------------------------------

    def _start_mirror_road(self, guest: Guest, greeting: Greeting) -> None:
        """The mirror is the first of the successors that is there: it is the one that goes on without this host."""
        if self._mirror is not None and not _has_ended(self._mirror[1]) and self._mirror[0] < greeting.learner:
            raw_of(guest.connection).close()
            return
        if self._mirror is not None:
            self._mirror[1].kill()
            self._mirror[1].wait()
        number, token = greeting.learner, self._mirror_token
        keep = {raw_of(guest.connection).fileno(), self._supervisor.fileno()}
        child = fork(
            f"road of the mirror ({guest.address})",
            lambda: serve_mirror(self.coordinator, token, guest.connection),
            keep=keep,
            captured=False,
        )
        self._mirror = number, child
        raw_of(guest.connection).close()
        self.tell(f"the mirror is on {guest.address}")

    # --- servers on other hosts -------------------------------------------------------------------------------------

    def _start_server_road(self, servers: GatewayServers, guest: Guest, greeting: Greeting, now_s: float) -> None:
        place = ServerPlace(greeting.host, guest.address, greeting.learner)
        shard = servers.places.offer(place) if greeting.session == self.run else None
        if shard is None:
            refused = handshake.encode_accept(handshake.Accept(refused="the run has no use for this server"))
            header = Header(Kind.MESSAGE, size=len(refused))
            self._answer(guest, lambda: send_all(guest.connection, [header.pack(), refused]))
            return
        if shard in self._server_roads:  # it comes again before we have seen that it was gone
            before = self._server_roads.pop(shard)
            before.kill()
            before.wait()
        else:
            self.tell(f"server {shard} is on {guest.address}")
        servers.note(shard, place)
        keep = {raw_of(guest.connection).fileno(), self._supervisor.fileno()}
        self._server_roads[shard] = fork(
            f"road of server {shard} ({guest.address})",
            lambda: serve_road(self.coordinator, servers.token_of(shard), shard, guest.connection),
            keep=keep,
            captured=False,
        )
        raw_of(guest.connection).close()

    def _check_servers(self, servers: GatewayServers, now_s: float) -> None:
        for shard, child in list(self._server_roads.items()):
            if _has_ended(child):
                self._server_roads.pop(shard).wait()
                servers.places.left(shard, now_s)
        lost = servers.places.lost(now_s, servers.come_by_s)
        if lost is not None:
            servers.lost(servers.places.told(lost), 1 + len(servers.places.hosts() | self._places.hosts()))

    def _reap(self, number: int, now_s: float) -> None:
        if self._roads.pop(number).wait() == _REFUSED:
            self._places.refused(number)
        else:
            self._places.left(number, now_s)


def _serve(road: RoadProcess) -> None:
    if not road.serve():
        os._exit(_REFUSED)


def _has_ended(child: ChildProcess) -> bool:
    found = os.waitid(os.P_PIDFD, child.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return found is not None


# --- the side of a host that joins ------------------------------------------------------------------------------------


def enter(
    place: Place, key: RunKey | None, host: bytes, learners: int, timeout_s: float
) -> tuple[Entered, AnyConnection]:
    """Ask for places. `NoPlaceError` if there are none, `PeerError` where the run cannot be reached.

    The files of the learners follow on the connection (`receive_files`), which the caller closes.
    """
    greeting = Greeting(Channel.ENTER, learners, host, secrets.token_bytes(16))
    one = dial(place, key, greeting.pack(), timeout_s)
    try:
        raw_of(one).settimeout(timeout_s)
        answer = _receive_answer(one)
        if answer.protocol != PROTOCOL or answer.version != handshake.versions():
            raise RequestError(
                f"the run uses {answer.version}, but this host has {handshake.versions()}; use the same versions "
                "everywhere"
            )
        if answer.refused:
            raise NoPlaceError(f"the run refused this host: {answer.refused}")
        return answer, one
    except BaseException as error:
        raw_of(one).close()
        if isinstance(error, TimeoutError):
            raise PeerError(f"the run at {place.address}:{place.port} did not answer within {timeout_s:g} s") from None
        if isinstance(error, ClosedError | OSError):
            raise PeerError(f"the run closed the connection; is the key the same? ({error})") from None
        raise


def receive_files(one: AnyConnection, sizes: Sequence[int], most_bytes: int) -> list[bytes]:
    """What the learners of this host had when the run was saved. Memory grows with what has come, up to a limit."""
    if sum(sizes) > most_bytes:
        raise PeerError(
            f"the run sends {sum(sizes):,} bytes of saved state, more than the {most_bytes:,} of this model"
        )
    files, room = [], memoryview(bytearray(PIECE_BYTES))
    try:
        for size in sizes:
            data = bytearray()
            while len(data) < size:
                piece = room[: min(PIECE_BYTES, size - len(data))]
                receive_all(one, piece)
                data += piece
            files.append(bytes(data))
    except (ClosedError, OSError) as error:
        raise PeerError(f"the connection broke while saved state was sent ({error})") from None
    return files


def _sized(data: bytes) -> bytes:
    if len(data) > MOST_ENTRY_BYTES:
        raise OffbeatError(f"what joining hosts are told has {len(data)} bytes; the limit is {MOST_ENTRY_BYTES}")
    return len(data).to_bytes(_SIZE_BYTES, "little") + data


def _receive_answer(one: AnyConnection) -> Entered:
    room = memoryview(bytearray(MOST_ENTRY_BYTES))
    receive_all(one, room[:_SIZE_BYTES])
    size = int.from_bytes(room[:_SIZE_BYTES], "little")
    if size > MOST_ENTRY_BYTES:
        raise PeerError(f"the run's answer of {size} bytes exceeds the limit of {MOST_ENTRY_BYTES}")
    receive_all(one, room[:size])
    try:
        return _decoder.decode(room[:size])
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise PeerError("the run's answer cannot be read") from None
