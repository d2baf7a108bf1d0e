"""The mirror: the servers' state is on a second host before an update is acknowledged (`--mirror`).

    coordinator -- Unix socket -- road process ==MIRROR== Mirror, in a process of the other host

What is mirrored: the weights, the optimizer's state and, of the coordinator, what a checkpoint has of it (the ledger of
samples, what the policy keeps). When: after the shards have made an update, and before anybody hears of it. Until the
mirror has said that it has all of it, the coordinator neither writes the update to its journal nor answers anybody. So
what the mirror holds is never older than what a learner was told; it may be one update newer, which was not.

Laws. The mirror keeps two copies and writes over the older one: what is not whole is never used. Nothing received sizes
an allocation: copies grow with what has come, up to `MOST_COPY_BYTES` that the host of the mirror has computed itself.
Where the mirror is lost, the run waits `WAIT_S` for another before it goes on without one, and says so.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
import torch
from torch import Tensor

from offbeat.errors import OffbeatError, PeerError
from offbeat.network.connections import AnyConnection, Place
from offbeat.network.keys import RunKey
from offbeat.network.port import dial, raw_of, receive_all, send_all
from offbeat.network.streams import ClosedError
from offbeat.server import handshake
from offbeat.server.arena import Arena
from offbeat.server.parameter_layout import DTYPES
from offbeat.server.remote.frames import (
    HEADER_BYTES,
    PIECE_BYTES,
    Channel,
    FrameError,
    Greeting,
    Header,
    Kind,
    unpack,
)
from offbeat.server.remote.road_process import bytes_of, pieces_of
from offbeat.server.wire import MOST_BYTES, PROTOCOL

MIRROR_GENERATION = 2**20  # in its token: no server has it
WAIT_S = 10.0  # for another mirror, where one is lost
SILENT_S = 20.0  # after which the other side is gone
BEAT_S = 1.0
_DIAL_S = 5.0
_AGAIN_S = 2.0
_JOIN_S = 600.0  # for a coordinator that has no model yet
_GONE_S = 1.0


class MirrorJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="mirror"):
    """To the road: send this version to the mirror. Its answer is the number."""

    number: int
    version: int
    buffer: int
    facts: str  # of the coordinator, as JSON


class Vector(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of a copy: what follows, in this order."""

    name: Annotated[str, msgspec.Meta(max_length=100)]
    dtype: Annotated[str, msgspec.Meta(max_length=20)]
    items: Annotated[int, msgspec.Meta(ge=0)]


class CopyHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="copy"):
    """To the mirror, before the bytes of a copy."""

    version: Annotated[int, msgspec.Meta(ge=0)]
    facts: str
    vectors: tuple[Vector, ...]


_encode = msgspec.msgpack.Encoder().encode
_jobs, _heads = msgspec.msgpack.Decoder(MirrorJob), msgspec.msgpack.Decoder(CopyHead)
_INT64 = "int64"


def encode_job(job: MirrorJob) -> bytes:
    """`OffbeatError` where it has no room in a message."""
    data = _encode(job)
    if len(data) > MOST_BYTES:
        raise OffbeatError(f"the ledger of samples has {len(data):,} bytes; a mirror takes at most {MOST_BYTES:,}")
    return data


def vectors_of(arena: Arena, job: MirrorJob) -> dict[str, Tensor]:
    """What makes a version: as `Arena.current`, but not copied."""
    copy = job.version % 2
    states = {f"state.{name}": vector for name, vector in arena.states[copy].items()}
    return {"weights": arena.weights[job.buffer], **states, "steps": arena.steps[0][copy]}


# --- beside the coordinator -------------------------------------------------------------------------------------------


def serve_mirror(coordinator: str, token: str, one: AnyConnection) -> None:
    """Be the mirror to the coordinator, by the process at the other end; until that or the run is gone."""
    torch.set_num_threads(1)
    raw_of(one).settimeout(SILENT_S)
    own = handshake.Handshake(PROTOCOL, token, "mirror", 0, handshake.versions(), generation=MIRROR_GENERATION)
    with contextlib.suppress(OSError, ClosedError, OffbeatError):
        stop = threading.Event()
        thread = threading.Thread(target=_beat_until, args=(one, stop), daemon=True)
        thread.start()  # while there is no model yet
        here, _, arena = handshake.keep_connecting(
            handshake.LocalRoad(coordinator), own, most_s=_JOIN_S, gone_s=_GONE_S
        )
        stop.set()
        thread.join()
        with here:
            _pass_jobs(here, one, arena)


def _beat_until(one: AnyConnection, stop: threading.Event) -> None:
    with contextlib.suppress(OSError, ClosedError):
        while not stop.wait(BEAT_S):
            send_all(one, [Header(Kind.BEAT).pack()])


def _pass_jobs(here: socket.socket, one: AnyConnection, arena: Arena) -> None:
    inbox, watch = handshake.Inbox(), select.poll()
    watch.register(here.fileno(), select.POLLIN)
    room = memoryview(bytearray(HEADER_BYTES))
    while True:
        if not watch.poll(1000 * BEAT_S):
            send_all(one, [Header(Kind.BEAT).pack()])
            continue
        data = inbox.receive(here)
        if not data:
            return
        job = _jobs.decode(data)
        vectors = vectors_of(arena, job)
        told = tuple(Vector(name, str(one.dtype).removeprefix("torch."), len(one)) for name, one in vectors.items())
        head = _encode(CopyHead(job.version, job.facts, told))
        send_all(one, [Header(Kind.MESSAGE, size=len(head), number=job.number).pack(), head])
        for vector in vectors.values():
            content = bytes_of(vector)
            for start, end in pieces_of(len(content)):
                send_all(one, [Header(Kind.DATA, size=end - start, number=job.number).pack(), content[start:end]])
        receive_all(one, room)
        if unpack(room, Channel.MIRROR)[:1] != (Kind.FLUSH,):
            raise FrameError("an answer to another request")
        here.send(job.number.to_bytes(8, "little"))


# --- on the other host ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MirroredState:
    """The newest copy that is whole."""

    version: int
    facts: str
    tensors: Mapping[str, Tensor]


class Mirror:
    """Copies of the servers' state, in memory; its thread keeps them. `number`: which of the successors this is."""

    def __init__(self, place: Place, key: RunKey | None, number: int, run: bytes, most_bytes: int) -> None:
        self._place, self._key, self._number, self._run, self._most_bytes = place, key, number, run, most_bytes
        self._files = [os.memfd_create(f"offbeat-mirror-{one}") for one in range(2)]
        self._heads: list[CopyHead | None] = [None, None]
        self._newest = 1  # which of the two
        self._lock = threading.Lock()
        self.heard_s = 0.0  # of the run, on this connection

    def start(self) -> None:
        threading.Thread(target=self._keep, name="offbeat mirror", daemon=True).start()

    def _keep(self) -> None:
        torch.set_num_threads(1)
        greeting = Greeting(Channel.MIRROR, self._number, bytes(16), self._run).pack()
        while True:
            with contextlib.suppress(PeerError, ClosedError, OSError, FrameError):
                one = dial(self._place, self._key, greeting, _DIAL_S)
                with raw_of(one):
                    raw_of(one).settimeout(SILENT_S)
                    self._take_copies(one)
            time.sleep(_AGAIN_S)

    def _take_copies(self, one: AnyConnection) -> None:
        room, piece = memoryview(bytearray(HEADER_BYTES)), memoryview(bytearray(max(PIECE_BYTES, MOST_BYTES)))
        while True:
            receive_all(one, room)
            header = unpack(room, Channel.MIRROR)
            self.heard_s = time.monotonic()
            if header.kind is Kind.BEAT:
                continue
            if header.kind is not Kind.MESSAGE:
                raise FrameError("bytes of no copy")
            receive_all(one, piece[: header.size])
            head = _head_of(piece[: header.size])
            size = sum(DTYPE_BYTES[vector.dtype] * vector.items for vector in head.vectors)
            if size > self._most_bytes:
                raise FrameError(f"a copy of {size:,} bytes; this model has at most {self._most_bytes:,}")
            with self._lock:
                target = 1 - self._newest
                self._heads[target] = None
            at = 0
            while at < size:
                receive_all(one, room)
                part = unpack(room, Channel.MIRROR)
                if part.kind is not Kind.DATA or part.size > size - at:
                    raise FrameError("not the bytes of a copy")
                receive_all(one, piece[: part.size])
                self.heard_s = time.monotonic()
                for start in range(0, part.size, PIECE_BYTES):
                    os.pwrite(self._files[target], piece[start : part.size], at + start)
                at += part.size
            with self._lock:
                self._heads[target], self._newest = head, target
            send_all(one, [Header(Kind.FLUSH, number=header.number).pack()])

    def newest(self) -> MirroredState | None:
        """None where no copy has come."""
        with self._lock:
            head, file = self._heads[self._newest], self._files[self._newest]
            if head is None:
                return None
            tensors, at = {}, 0
            for vector in head.vectors:
                size = DTYPE_BYTES[vector.dtype] * vector.items
                data = bytearray(os.pread(file, size, at))
                at += size
                dtype = getattr(torch, vector.dtype)
                tensors[vector.name] = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            return MirroredState(version=head.version, facts=head.facts, tensors=tensors)


DTYPE_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()} | {_INT64: 8}


def _head_of(data: memoryview) -> CopyHead:
    try:
        head = _heads.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise FrameError("the head of a copy cannot be read") from None
    if any(vector.dtype not in DTYPE_BYTES for vector in head.vectors):
        raise FrameError("a copy of an unknown type")
    return head
