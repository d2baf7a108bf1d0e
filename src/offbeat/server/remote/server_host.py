"""A server on another host than the coordinator: its process there (`ServerHost`), and its road here (`serve_road`).

    coordinator -- Unix socket -- road process ==SERVER== server process on its host, with the memory of its shard

To the coordinator the road process is the server: it says Ready, is given jobs and answers them. It passes each on and
waits for the answer; the shard and its state machine are those of every server. The memory is held by the process that
has started the server, so a server that was killed is replaced on the same memory, and repeats its job.

There is one road process of a shard at a time, and one server process: the generation of both is always `GENERATION`.
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

import torch

from offbeat.collectives import memory
from offbeat.errors import OffbeatError, PeerError
from offbeat.network.connections import AnyConnection, Place
from offbeat.network.keys import RunKey
from offbeat.network.port import RefusedError, dial, raw_of, receive_all, send_all
from offbeat.network.streams import ClosedError
from offbeat.server import handshake
from offbeat.server.arena import Arena, ArenaLayout
from offbeat.server.parameter_layout import ParameterLayout
from offbeat.server.remote.frames import HEADER_BYTES, Channel, FrameError, Greeting, Header, Kind, unpack
from offbeat.server.remote.server_places import LOST_S
from offbeat.server.remote.shard_data import ShardData, ShardRegions
from offbeat.server.run_setting import RunSetting
from offbeat.server.shard.server_process import Shard, ShardMemory
from offbeat.server.wire import MOST_BYTES, PROTOCOL, Ready, ShardJob, decode_output, encode

MEMORY = "OFFBEAT_HOST_MEMORY"  # of a learner: the name of its host, and where the memory of its server is
GENERATION = 1
SIZED_S = 60.0  # for the server of this host to be told how large the model is
_GONE_S = 1.0  # where nobody listens
_NO_SERVER_BYTES = 1  # the size of the memory where the run has no use for a server of this host
_DIAL_S = 5.0
_AGAIN_S = 0.1
_CONNECT_S = 600.0  # for a coordinator that goes through its journal, or waits for the first model


class _Messages:
    """Messages on a connection that takes turns: one side asks, and the other answers."""

    def __init__(self, one: AnyConnection) -> None:
        self.one = one
        self._room = memoryview(bytearray(MOST_BYTES))

    def send(self, data: bytes, which: int = 0) -> None:
        send_all(self.one, [Header(Kind.MESSAGE, which=which, size=len(data)).pack(), data])

    def receive(self) -> tuple[int, bytes]:
        head = memoryview(bytearray(HEADER_BYTES))
        receive_all(self.one, head)
        header = unpack(head, Channel.SERVER)
        payload = self._room[: header.size]
        receive_all(self.one, payload)
        return header.which, bytes(payload)


# --- beside the coordinator -------------------------------------------------------------------------------------------


def serve_road(coordinator: str, token: str, shard: int, one: AnyConnection) -> None:
    """Be server `shard` to the coordinator, by the process at the other end; until that or the run is gone."""
    road, there = handshake.LocalRoad(coordinator), _Messages(one)
    own = handshake.Handshake(PROTOCOL, token, "server", shard, handshake.versions(), generation=GENERATION)
    told = False
    with contextlib.suppress(OSError, ClosedError, OffbeatError):
        while True:
            # Before the first learner has come, the coordinator closes the connection: there is no model yet.
            here, accept, _ = handshake.keep_connecting(road, own, most_s=_CONNECT_S, gone_s=_GONE_S)
            if not told:
                there.send(handshake.encode_accept(accept), shard)
                told = True
            with here:
                _pass_jobs(here, there, shard)


def _pass_jobs(here: socket.socket, there: _Messages, shard: int) -> None:
    """Until the coordinator is gone; `ClosedError` where the server is."""
    inbox, watch = handshake.Inbox(), select.poll()
    raw = raw_of(there.one)
    for file in (here.fileno(), raw.fileno()):
        watch.register(file, select.POLLIN)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        here.send(encode(Ready(shard, GENERATION)))
        while True:
            ready = {file for file, _ in watch.poll()}
            if raw.fileno() in ready:  # nobody has asked it anything
                raise ClosedError("closed")
            job = inbox.receive(here)
            if not job:
                return
            there.send(job)
            here.send(there.receive()[1])


# --- on the host of the server ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerHost:
    """A server that this host offers to a run. `descriptor` is an empty file in memory, which outlives the process."""

    run: Place
    run_name: bytes  # another run at that place has no use for this server, which has another's weights
    key: RunKey | None
    host: bytes
    descriptor: int
    listener: socket.socket

    @property
    def environment(self) -> Mapping[str, str]:
        """For the learners beside it."""
        return {MEMORY: f"{self.host.hex()} /proc/{os.getpid()}/fd/{self.descriptor}"}

    def serve(self) -> int:
        """The life of the process: until the run is gone, or has no use for this server."""
        torch.set_num_threads(1)
        machine: Shard | None = None
        heard_s = time.monotonic()
        while True:
            try:
                one = self._dial()
            except PeerError as error:
                if time.monotonic() - heard_s > (_GONE_S if isinstance(error, RefusedError) else LOST_S):
                    return 0
                time.sleep(_AGAIN_S)
                continue
            with contextlib.suppress(OSError, ClosedError, FrameError):
                there = _Messages(one)
                shard, data = there.receive()
                accept = handshake.decode_accept(data)
                if accept.refused:
                    if machine is None and not os.fstat(self.descriptor).st_size:
                        os.ftruncate(self.descriptor, _NO_SERVER_BYTES)
                    return 0
                if machine is None:
                    machine = self._start(shard, accept)
                while True:
                    job = decode_output(there.receive()[1])
                    if not isinstance(job, ShardJob):
                        raise FrameError(f"a server received an unexpected message: {job}")
                    there.send(encode(machine.handle(job)))
            raw_of(one).close()
            heard_s = time.monotonic()
            time.sleep(_AGAIN_S)

    def _dial(self) -> AnyConnection:
        port = self.listener.getsockname()[1]
        return dial(self.run, self.key, Greeting(Channel.SERVER, port, self.host, self.run_name).pack(), _DIAL_S)

    def _start(self, shard: int, accept: handshake.Accept) -> Shard:
        """The memory, made here or by the process before, and the thread that serves its bytes."""
        if accept.table is None or accept.setting is None:
            raise PeerError("the run's answer was incomplete")
        layout = ArenaLayout(accept.table, accept.setting)
        if os.fstat(self.descriptor).st_size:
            segment = memory.Segment(self.descriptor, layout.size_bytes)
        else:
            segment = memory.fill(self.descriptor, layout.size_bytes, f"server {shard}", layout.spans_of(shard))
        arena = Arena(segment, accept.table, accept.setting)
        data = ShardData(ShardRegions(arena, shard), self.listener, self.key)
        threading.Thread(target=data.serve, name="offbeat shard data", daemon=True).start()
        return Shard(shard, GENERATION, ShardMemory(arena, shard))


def memory_here(table: ParameterLayout, setting: RunSetting) -> tuple[bytes, Arena] | None:
    """The name of this host and the memory of its server, where a learner has one beside it."""
    told = os.environ.get(MEMORY)
    if told is None:
        return None
    host, path = told.split(" ", 1)
    size_bytes = ArenaLayout(table, setting).size_bytes
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    end_s = time.monotonic() + SIZED_S
    while (size := os.fstat(descriptor).st_size) < size_bytes:
        if size == _NO_SERVER_BYTES:
            os.close(descriptor)
            return None
        if time.monotonic() > end_s:
            os.close(descriptor)
            raise PeerError(f"the server of this host was not ready within {SIZED_S:g} s")
        time.sleep(_AGAIN_S)
    return bytes.fromhex(host), Arena(memory.receive(descriptor, size_bytes, sealed=False), table, setting)
