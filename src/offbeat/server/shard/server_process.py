"""A server's process: takes jobs, does them on its shard of the arena, says so."""

from __future__ import annotations

import socket
import time

import torch

from offbeat.errors import EventError, PeerError
from offbeat.server import handshake
from offbeat.server.arena import Arena, ShardMemory
from offbeat.server.shard.shard import Shard
from offbeat.server.wire import MOST_BYTES, PROTOCOL, ShardJob, decode_output, encode

_AGAIN_S = 600.0  # for a coordinator that goes through its journal
_NOBODY_S = 1.0  # where nobody listens


def serve(name: str, token: str, shard: int, generation: int) -> None:
    """Until the coordinator is gone for good."""
    torch.set_num_threads(1)
    own = handshake.Handshake(PROTOCOL, token, "server", shard, handshake.versions())
    machine: Shard | None = None
    while True:
        connection, arena = _connect(name, own)
        if machine is None:
            machine = Shard(shard, generation, ShardMemory(arena, shard))
        try:
            connection.send(encode(machine.ready()))
            while data := connection.recv(MOST_BYTES):
                job = decode_output(data)
                if not isinstance(job, ShardJob):
                    raise EventError(f"a server was told {job}")
                connection.send(encode(machine.handle(job)))
        except OSError:
            pass
        connection.close()


def _connect(name: str, own: handshake.Handshake) -> tuple[socket.socket, Arena]:
    """To the coordinator, or to one that takes its place."""
    start = time.monotonic()
    while True:
        try:
            connection, _, arena = handshake.connect(name, own, handshake.GREETING_S)
            return connection, arena
        except PeerError as error:
            if time.monotonic() - start > (_NOBODY_S if isinstance(error, handshake.RunGoneError) else _AGAIN_S):
                raise SystemExit(0) from None  # there is nobody any more
            time.sleep(0.05)
