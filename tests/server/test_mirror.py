"""The mirror: nobody hears of an update before it has it, and what it holds is whole."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.network.connections import Place
from offbeat.network.streams import ClosedError
from offbeat.server.coordinator import coordinator_process
from offbeat.server.coordinator.coordinator_process import PeerConnection
from offbeat.server.remote import mirror
from offbeat.server.remote.frames import HEADER_BYTES, Channel, FrameError, Header, Kind, unpack
from offbeat.server.remote.mirror import Mirror
from offbeat.server.wire import Committed, Go, Ready
from server.test_recovery import LoneCoordinator

PLACE, RUN = Place("127.0.0.1", 1), b"r" * 16
LIMIT_S = 30


class MirroredCoordinator(LoneCoordinator):
    """With a mirror on the other end of a socket pair: the real one, and the road process's loop, in threads."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, line: str = "async") -> None:
        super().__init__(folder, monkeypatch, line)
        self.options = self.process.options = replace(self.options, mirrors=True)
        self.mirror = Mirror(PLACE, None, 0, RUN, most_bytes=10_000)
        self.ends: list[socket.socket] = []

    def connect(self) -> None:
        """A mirror comes."""
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        there, here = socket.socketpair()
        mine.setblocking(False)
        self.ends = [mine, theirs, there, here]
        assert self.process.arena is not None
        self._start(mirror._pass_jobs, theirs, there, self.process.arena)
        self._start(self.mirror._take_copies, here)
        self.process._add(PeerConnection(mine, "mirror", 0, 0))

    def _start(self, body: Any, *given: Any) -> None:
        def run() -> None:
            try:
                body(*given)
            except (OSError, ClosedError, FrameError):
                for one in given[:2]:
                    if isinstance(one, socket.socket):
                        one.close()

        threading.Thread(target=run, daemon=True).start()

    def close(self) -> str:
        for one in self.ends:
            one.close()
        return super().close()


@pytest.fixture
def lone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MirroredCoordinator]:
    made = MirroredCoordinator(tmp_path, monkeypatch)
    yield made
    made.close()


def test_nobody_is_told_of_an_update_that_the_mirror_does_not_have(lone: MirroredCoordinator) -> None:
    lone.start()
    lone.connect()
    deliver, heard = lone.process._deliver, []

    def delivered(message: Any) -> None:
        held = lone.mirror.newest()
        version = message.version if isinstance(message, Committed | Go) else 0
        heard.append((version, -1 if held is None else held.version))
        deliver(message)

    lone.process._deliver = delivered  # type: ignore[method-assign]  # to listen
    lone.work(60, random.Random(0))
    assert max(version for version, _ in heard) > 10
    assert all(held >= version for version, held in heard if version), heard


def test_the_mirror_has_weights_and_ledger_of_the_newest_version(lone: MirroredCoordinator) -> None:
    lone.start()
    lone.connect()
    lone.work(40, random.Random(0))
    lone.process.turn()
    held, arena = lone.mirror.newest(), lone.process.arena
    assert held is not None and arena is not None
    assert held.version == lone.machine.grants.commit_groups[0].version
    current = arena.current()
    assert held.tensors.keys() == current.keys()
    assert all(torch.equal(held.tensors[name], current[name]) for name in current)
    facts = json.loads(held.facts)
    assert facts["version"] == held.version and facts["memory"] == lone.machine.guard.kept()
    assert lone.process.mirroring.updates > 0 and not lone.process.mirroring.without


def test_a_coordinator_that_was_killed_waits_for_the_mirror_of_its_predecessor(
    lone: MirroredCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_process, "MIRROR_WAIT_S", 0.05)
    monkeypatch.setattr(coordinator_process, "LIVENESS_S", 0.01)
    lone.start()
    lone.connect()
    lone.work(10, random.Random(0))
    for one in lone.ends:
        one.close()
    lone.restart()
    lone.hear(Ready(0, 1))
    lone.work(10, random.Random(0))
    lone.note()
    assert lone.told[-1] == "the mirror is lost: updates are not mirrored until another successor is there"


def test_a_run_whose_mirror_is_lost_waits_for_another_and_then_says_that_it_has_none(
    lone: MirroredCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_process, "MIRROR_WAIT_S", 0.05)
    monkeypatch.setattr(coordinator_process, "LIVENESS_S", 0.01)
    lone.start()
    lone.work(10, random.Random(0))
    assert lone.process.mirroring.updates == 0  # it was not waited for before it came
    lone.connect()
    lone.work(10, random.Random(0))
    lone.process.turn()
    mirrored = lone.process.mirroring.updates
    assert mirrored > 0
    for one in lone.ends[1:]:
        one.close()
    lone.work(10, random.Random(0))
    lone.note()
    assert lone.process.mirroring.updates == mirrored and lone.process.mirroring.without > 0
    assert lone.told[-1] == "the mirror is lost: updates are not mirrored until another successor is there"
    lone.connect()
    lone.process.turn()
    lone.work(10, random.Random(0))
    assert lone.process.mirroring.updates > mirrored


def test_a_run_that_is_over_waits_for_no_mirror(lone: MirroredCoordinator) -> None:
    lone.start()
    lone.connect()
    lone.work(10, random.Random(0))
    mirrored = lone.process.mirroring.updates
    lone.machine.pauses.over = True
    for one in lone.ends[1:]:
        one.close()
    lone.process._mirror_update(lone.machine, 1.0)  # comes back at once
    assert (lone.process.mirroring.updates, lone.process.mirroring.without) == (mirrored, 0)


def test_a_copy_that_did_not_come_whole_is_not_used() -> None:
    kept = Mirror(PLACE, None, 0, RUN, most_bytes=100)
    sender, receiver = socket.socketpair()
    done = threading.Event()

    def take() -> None:
        with pytest.raises((OSError, ClosedError)):
            kept._take_copies(receiver)
        done.set()

    threading.Thread(target=take, daemon=True).start()
    _send(sender, 1, torch.ones(4), 4)
    assert unpack(sender.recv(HEADER_BYTES), Channel.MIRROR).kind is Kind.FLUSH
    _send(sender, 2, torch.zeros(4), 3)
    sender.close()
    assert done.wait(LIMIT_S)
    held = kept.newest()
    assert held is not None and held.version == 1 and held.tensors["weights"].tolist() == [1.0] * 4
    receiver.close()


def test_a_copy_larger_than_the_model_is_refused() -> None:
    kept = Mirror(PLACE, None, 0, RUN, most_bytes=100)
    sender, receiver = socket.socketpair()
    _send(sender, 1, torch.ones(26), 0)
    with pytest.raises(FrameError, match="a copy of 104 bytes; this model has at most 100"):
        kept._take_copies(receiver)
    assert kept.newest() is None
    sender.close()
    receiver.close()


def _send(one: socket.socket, version: int, weights: torch.Tensor, items: int) -> None:
    """So many items of a copy."""
    vector = mirror.Vector("weights", "float32", len(weights))
    head = mirror._encode(mirror.CopyHead(version, "{}", (vector,)))
    one.sendall(Header(Kind.MESSAGE, size=len(head), number=version).pack() + head)
    for item in range(items):
        one.sendall(Header(Kind.DATA, size=4, number=version).pack() + weights[item].numpy().tobytes())
