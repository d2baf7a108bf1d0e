"""How learners and servers come in: one Unix socket, and who connects is asked for user, token and version.

The socket is in the abstract name space, under a name that nobody can guess: it leaves no file behind. Whoever connects
must be of the same user and know the run's token; it says who it is, and is given the arena's descriptor. From then on
each packet is one message (`wire`).
"""

from __future__ import annotations

import os
import secrets
import socket

import msgspec

from offbeat.collectives import memory
from offbeat.collectives.rendezvous import credentials
from offbeat.errors import OffbeatError, PeerError, RequestError
from offbeat.server.arena import Arena, ArenaLayout
from offbeat.server.coordinator.session import Setting
from offbeat.server.parameter_layout import ParameterLayout
from offbeat.server.wire import MOST_BYTES, PROTOCOL

GREETING_S = 5.0  # for an answer
INTRODUCTION_S = 0.5  # for whoever has connected to say who it is: the door serves one at a time


class RunGoneError(PeerError):
    """There is no such door: the run is over."""


class Handshake(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="introduction"):
    """The first packet: who I am. A learner brings the table of its model."""

    protocol: int
    token: str
    role: str  # "learner" or "server"
    number: int
    version: str  # of offbeat and torch: all must be of one
    table: ParameterLayout | None = None


class Accept(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="admission"):
    """The answer, with the arena's descriptor beside it; or why not."""

    refused: str = ""
    table: ParameterLayout | None = None
    setting: dict[str, str | int | float | bool | None] = {}
    seed: int = 0
    start_s: float = 0.0  # of the run, on the host's monotonic clock


_encode = msgspec.msgpack.Encoder().encode
_introductions = msgspec.msgpack.Decoder(Handshake)
_admissions = msgspec.msgpack.Decoder(Accept)


def setting_as_data(setting: Setting) -> dict[str, str | int | float | bool | None]:
    """What a learner or server has to know of it; not what the run goes on from."""
    return {name: getattr(setting, name) for name in Setting.__dataclass_fields__ if name not in ("book", "memory")}


def setting_from_data(data: dict[str, str | int | float | bool | None]) -> Setting:
    return Setting(**data)  # type: ignore[arg-type]  # its own fields, as `setting_as_data` wrote them


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


def read_handshake(one: socket.socket, token: str) -> Handshake | str:
    """Who has connected; or, in words, why it may not come in. "" for a stranger, who is told nothing."""
    try:
        if credentials(one)[1] != os.geteuid():
            return ""
        said = _introductions.decode(one.recv(MOST_BYTES))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return ""
    if not secrets.compare_digest(said.token.encode(), token.encode()):
        return ""
    if said.protocol != PROTOCOL or said.version != versions():
        return (
            f"this run speaks protocol {PROTOCOL} ({versions()}), the one who came {said.protocol} ({said.version}):"
            " use the same versions everywhere"
        )
    return said


def accept_peer(one: socket.socket, admission: Accept, descriptor: int | None) -> None:
    socket.send_fds(one, [_encode(admission)], [] if descriptor is None else [descriptor])


def connect(door: str, introduction: Handshake, timeout_s: float) -> tuple[socket.socket, Accept, Arena]:
    """Come in: the line, what the run is, and its memory.

    `PeerError` where nobody answers, `RequestError` if refused.
    """
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptors: list[int] = []
    try:
        one.settimeout(timeout_s)
        one.connect(b"\0" + door.encode())
        one.send(_encode(introduction))
        data, descriptors, _, _ = socket.recv_fds(one, MOST_BYTES, 4)
        if not data:
            raise PeerError("the run closed the door: it is over, or this process is not of it")
        admission = _admissions.decode(data)
        if admission.refused:
            raise RequestError(f"the run refused this {introduction.role}: {admission.refused}")
        if admission.table is None or len(descriptors) != 1:
            raise PeerError("the run's answer was not whole")
        setting = setting_from_data(admission.setting)
        size_bytes = ArenaLayout(admission.table, setting).size_bytes
        segment = memory.receive(descriptors.pop(), size_bytes, sealed=True)
        one.setblocking(True)
        return one, admission, Arena(segment, admission.table, setting)
    except ConnectionRefusedError:
        one.close()
        raise RunGoneError("the run is gone") from None
    except (OSError, msgspec.DecodeError) as error:
        one.close()
        raise PeerError(f"cannot reach the run: {error}") from None
    except OffbeatError:
        one.close()
        raise
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
