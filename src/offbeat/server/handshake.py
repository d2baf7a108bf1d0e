"""How learners and servers connect: one Unix socket; whoever connects is asked for user, token and version.

The socket is in the abstract name space, under a name that nobody can guess: it leaves no file behind. Whoever connects
must be of the same user and know the run's token; it says who it is, and is given the arena's descriptor. From then on
each packet is one message (`wire`). The token of a server is its own, made for its shard and generation: no learner has
one.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Annotated, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Meta

from offbeat.collectives import memory
from offbeat.collectives.rendezvous import credentials
from offbeat.errors import OffbeatError, PeerError, RequestError
from offbeat.server.arena import Arena, ArenaLayout
from offbeat.server.parameter_layout import ParameterLayout
from offbeat.server.run_setting import RunSetting
from offbeat.server.wire import MOST_BYTES, PROTOCOL, JobNumber, LearnerNumber, Text

GREETING_S = 5.0  # for an answer
_PAUSE_S = 0.05  # between two attempts to connect
HANDSHAKE_S = 5.0  # for whoever has connected to say who it is; nobody waits for it meanwhile


class RunGoneError(PeerError):
    """Nobody listens: the run is over."""


class PlaceTakenError(RequestError):
    """Another host has the place of this learner by now: it may ask for another one."""


class Handshake(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="handshake"):
    """The first packet: who I am. A learner brings the table of its model."""

    protocol: int
    token: Annotated[str, Meta(max_length=128)]
    role: Literal["learner", "server", "mirror"]
    number: LearnerNumber
    version: Text  # of offbeat and torch: all must be of one
    table: ParameterLayout | None = None
    generation: JobNumber = 0  # of a server


class Accept(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="accept"):
    """The answer, with the arena's descriptor beside it; or why not."""

    refused: str = ""
    taken: bool = False  # since another host has the place
    table: ParameterLayout | None = None
    setting: RunSetting | None = None  # without what the run goes on from
    seed: int = 0
    start_s: float = 0.0  # of the run, on the host's monotonic clock


_encode = msgspec.msgpack.Encoder().encode
_handshakes = msgspec.msgpack.Decoder(Handshake)
_accepts = msgspec.msgpack.Decoder(Accept)


class Road(Protocol):
    """How a learner or server reaches the run: this host's memory (`LocalRoad`), or TCP (`remote.remote_road`)."""

    def connect(self, own: Handshake, timeout_s: float) -> tuple[socket.socket, Accept, Arena]:
        """The socket, what the run is, and its memory. `PeerError` where nobody answers, `RequestError` if refused."""

    def close(self) -> None:
        """What was said is sent; then all is closed."""


class Inbox:
    """Receives packets of any size into memory of its own, for one thread at a time.

    A plain `recv` makes room for the largest packet each time, by a mapping of its own: that takes five times as long.
    """

    def __init__(self) -> None:
        self._room = memoryview(bytearray(MOST_BYTES))

    def receive(self, one: socket.socket, flags: int = 0) -> bytes:
        """As `one.recv`."""
        return bytes(self._room[: one.recv_into(self._room, 0, flags)])


def new_listener() -> tuple[socket.socket, str]:
    """A listening socket, and its name."""
    name = f"offbeat-{secrets.token_hex(16)}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(b"\0" + name.encode())
    listener.listen(1024)
    return listener, name


def versions() -> str:
    import torch

    from offbeat import __version__

    return f"offbeat {__version__}, torch {torch.__version__}"


def server_token(secret: str, shard: int, generation: int) -> str:
    """What the server of a shard says; only who knows the secret can make one."""
    return hmac.new(secret.encode(), f"{shard} {generation}".encode(), "sha256").hexdigest()


def check_user(one: socket.socket) -> None:
    """`OSError` if whoever has connected is another user."""
    if credentials(one)[1] != os.geteuid():
        raise PermissionError("the process belongs to another user")


def read_handshake(one: socket.socket, token: str, server_secret: str = "") -> Handshake:
    """Who has connected. `RequestError` if its version is another; `OSError` for a stranger, who is told nothing.

    `BlockingIOError` where it has not spoken yet, on a socket that does not wait.
    """
    check_user(one)
    try:
        said = _handshakes.decode(one.recv(MOST_BYTES))
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise PermissionError("not a handshake") from None
    due = token if said.role == "learner" else server_token(server_secret, said.number, said.generation)
    if not secrets.compare_digest(said.token.encode(), due.encode()):
        raise PermissionError("the token is wrong")
    if said.protocol != PROTOCOL or said.version != versions():
        raise RequestError(
            f"this run uses protocol {PROTOCOL} ({versions()}), but this process uses {said.protocol} ({said.version});"
            " use the same versions everywhere"
        )
    return said


def accept_peer(one: socket.socket, accept: Accept, descriptor: int | None) -> None:
    socket.send_fds(one, [_encode(accept)], [] if descriptor is None else [descriptor])


class LocalRoad(NamedTuple):
    """A run on this host, by the name of its listener."""

    name: str

    def connect(self, own: Handshake, timeout_s: float) -> tuple[socket.socket, Accept, Arena]:
        return connect(self.name, own, timeout_s)

    def close(self) -> None:
        """Nothing is kept here."""


def encode_handshake(own: Handshake) -> bytes:
    """For a road: as a packet of `connect` has it."""
    return _encode(own)


def decode_handshake(data: bytes) -> Handshake:
    try:
        return _handshakes.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise PeerError("not a handshake") from None


def encode_accept(accept: Accept) -> bytes:
    return _encode(accept)


def decode_accept(data: bytes) -> Accept:
    try:
        return _accepts.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, OffbeatError):
        raise PeerError("the run's answer cannot be read") from None


def connect(name: str, own: Handshake, timeout_s: float) -> tuple[socket.socket, Accept, Arena]:
    """Connect: the socket, what the run is, and its memory.

    `PeerError` where nobody answers, `RequestError` if refused.
    """
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptors: list[int] = []
    try:
        one.settimeout(timeout_s)
        one.connect(b"\0" + name.encode())
        check_user(one)  # its name may have come through a store that others write to
        one.send(_encode(own))
        data, descriptors, _, _ = socket.recv_fds(one, MOST_BYTES, 4)
        if not data:
            raise PeerError("the run closed the connection: it has ended, or this process is not part of it")
        accept = _accepts.decode(data)
        if accept.refused:
            raise RequestError(f"the run refused this {own.role}: {accept.refused}")
        if accept.table is None or accept.setting is None or len(descriptors) != 1:
            raise PeerError("the run's answer was incomplete")
        size_bytes = ArenaLayout(accept.table, accept.setting).size_bytes
        segment = memory.receive(descriptors.pop(), size_bytes, sealed=True)
        one.setblocking(True)
        return one, accept, Arena(segment, accept.table, accept.setting)
    except (OSError, msgspec.DecodeError, OffbeatError) as error:
        one.close()
        if isinstance(error, OffbeatError):
            raise
        gone = isinstance(error, ConnectionRefusedError)
        raise (RunGoneError("the run is gone") if gone else PeerError(f"cannot reach the run: {error}")) from None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def keep_connecting(
    road: Road,
    own: Handshake,
    *,
    most_s: float,
    gone_s: float,
    answer_s: float = GREETING_S,
    closed: Callable[[], bool] = lambda: False,
) -> tuple[socket.socket, Accept, Arena]:
    """As `road.connect`, until it succeeds: a coordinator may be killed while it lets somebody in, and another comes.

    `PeerError` after `most_s`, or after `gone_s` where nobody listens, or at once when this side is `closed`.
    """
    start_s = time.monotonic()
    while True:
        try:
            return road.connect(own, answer_s)
        except PeerError as error:
            limit_s = gone_s if isinstance(error, RunGoneError) else most_s
            if closed() or time.monotonic() - start_s > limit_s:
                raise
            time.sleep(_PAUSE_S)
