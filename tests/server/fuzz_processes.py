"""A real run with one learner that says whatever it likes, as fast as it can, and others that train beside it.

The hostile process has the run's token. What it says (`mutations`) is generated from what it was told, mutated,
replayed and torn; when it is sent away it comes again as another process. At the end: the coordinator never died,
nothing was lost or doubled (every honest push is in the weights once, and nothing else is), and the coordinator has not
grown.

    cd tests && ../.venv/bin/python -m server.fuzz_processes --messages 100000
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from offbeat.errors import OffbeatError
from offbeat.server import handshake
from offbeat.server.coordinator import coordinator_process
from offbeat.server.learner.served_learner import ServedLearner
from offbeat.server.parameter_layout import layout_of, model_tensors
from offbeat.server.run_setting import RunSetting
from offbeat.server.supervisor import ServerPlan, Supervisor
from offbeat.server.wire import (
    MOST_BYTES,
    PROTOCOL,
    EndRequest,
    Fetched,
    GiveBack,
    Go,
    Granted,
    GroupCall,
    Hello,
    Message,
    PauseRequest,
    Push,
    Stop,
    Want,
    Weights,
    Welcome,
    WireError,
    decode_input,
    decode_output,
    encode,
)
from server.actors import SGD
from server.mutations import KINDS, Mutator

OFTEN = (Hello, Push, Push, Stop, Fetched, Want, GiveBack, GroupCall)
REFUSED = 500  # that this run bears of one process: with the 3 of a real one there would be a process for each message
GROWTH_BYTES = 32 * 2**20
SAMPLES = 100


def _model() -> tuple[nn.Linear, torch.optim.Optimizer]:
    model = nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


class Hostile:
    """One process: it speaks over a socket of its own, and notes what it hears."""

    def __init__(self, number: int, seed: str) -> None:
        self.number = number
        self.mutator = Mutator(seed, self._suited)
        self.told: dict[str, int] = {"learner": number, "incarnation": 0, "seq": 0, "version": 0, "pin": 0}
        self.lease = 0
        self.nonce = 1

    def run(self, address: str, token: str, most: int) -> int:
        """So many messages, or until it is sent away; how many they were."""
        model, optimizer = _model()
        tensors, groups = model_tensors(model, optimizer)
        table = layout_of(model, tensors, groups, rule="sgd", states=())
        own = handshake.Handshake(PROTOCOL, token, "learner", self.number, handshake.versions(), table)
        sent = 0
        with contextlib.suppress(OffbeatError, OSError):
            line, _, _ = handshake.keep_connecting(handshake.LocalRoad(address), own, most_s=20.0, gone_s=1.0)
            self._say(line, encode(Hello(self.number, self._new_nonce(), table.digest)))
            while sent < most:
                for _ in range(20):
                    self._hear(line)
                    frame = self.mutator.frame(OFTEN if self.mutator.rng.random() < 0.9 else KINDS)
                    if not self._is_its_right(frame):
                        self._say(line, frame)
                        sent += 1
        return sent

    def _new_nonce(self) -> int:
        self.nonce = int.from_bytes(os.urandom(7), "little") + 1
        return self.nonce

    def _say(self, line: socket.socket, frame: bytes) -> None:
        line.settimeout(5.0)
        line.send(frame or b"\0")

    def _hear(self, line: socket.socket) -> None:
        line.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while data := line.recv(MOST_BYTES):
                message = decode_output(data)
                if isinstance(message, Welcome):
                    self.told["incarnation"] = message.incarnation
                elif isinstance(message, Go):
                    self.told |= {"seq": message.seq, "version": message.version, "pin": message.pin}
                elif isinstance(message, Weights):
                    self.told["pin"] = message.pin
                elif isinstance(message, Granted) and message.lease is not None:
                    self.lease = message.lease[0]
            raise ConnectionResetError

    def _is_its_right(self, frame: bytes) -> bool:
        """To end the run, and to move the weights: an authenticated learner may, and then nothing could be compared."""
        try:
            message = decode_input(frame)
        except WireError:
            return False
        if isinstance(message, EndRequest | PauseRequest):
            return True
        if isinstance(message, Push) and any(hyper.get("lr") for hyper in message.hyper):
            return True
        self.mutator.note(message)
        return False

    def _suited(self, kind: type[Message], name: str) -> Any:
        rng = self.mutator.rng
        if kind is Hello:
            return {
                "learner": self.number,
                "nonce": self.nonce if rng.random() < 0.5 else self._new_nonce(),
                "after": self.told["incarnation"],
            }.get(name)
        return {
            **self.told,
            "samples": 1,
            "hyper": [{**SGD, "lr": 0.0}],
            "leases": [self.lease],
            "absent": [],
            "began_s": 0.0,
            "ended_s": 0.0,
            "number": rng.randint(1, 50),
            "epoch": 0,
            "count": 1,
            "of": SAMPLES,
            "finite": True,
        }.get(name)


def attack(folder: Path, number: int, address: str, token: str, messages: int, seed: int) -> None:
    """As many processes, one after the other, as it takes."""
    sent = lives = 0
    while sent < messages:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BaseException):
                said = Hostile(number, f"{seed} {lives}").run(address, token, messages - sent)
                os.write(writer, str(said).encode())
                code = 0
            os._exit(code)
        os.close(writer)
        os.waitpid(pid, 0)
        with os.fdopen(reader, "rb") as pipe:
            sent += int(pipe.read() or 0)
        lives += 1
        (folder / "sent").write_text(json.dumps([sent, lives]))


def train(folder: Path, learner: ServedLearner) -> None:
    """Until the hostile one is done; then the last weight and the number of pushes."""
    model, optimizer = _model()
    learner.prepare(model, optimizer)
    ones = torch.ones_like(model.weight)
    pushes = 0
    while not (folder / "over").exists():
        with learner.minibatch():
            model.weight.grad = ones
            optimizer.step()
        pushes += 1
    learner.finish()
    (folder / f"learned-{learner.number}").write_text(json.dumps([pushes, model.weight[0, 0].item()]))
    learner.close()


def run(messages: int, *, honest: int = 2, seed: int = 0, line: str = "async") -> dict[str, Any]:
    """What came of it, checked."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name, patch.object(coordinator_process, "MOST_REFUSED", REFUSED):
        folder = Path(name)

        def body(number: int) -> int:
            address, token = os.environ["OFFBEAT_ADDRESS"], os.environ["OFFBEAT_TOKEN"]
            if number == honest:
                try:
                    attack(folder, number, address, token, messages, seed)
                finally:
                    (folder / "over").touch()
            else:
                given: Any = {"listener": address, "token": token}
                train(folder, ServedLearner(line=line, number=number, learners=honest + 1, **given))
            return 0

        told: list[str] = []
        plan = ServerPlan(setting=RunSetting(line=line, learners=honest + 1, shards=1), body=body)
        sizes: list[int] = []
        with Supervisor(plan, lambda who, text: told.append(f"{who}: {text}")) as supervisor:
            supervisor.start()
            began_s = time.monotonic()

            def look() -> None:
                if (folder / "sent").exists():
                    sizes.append(_bytes_of(supervisor.services["coordinator"].pid))

            summary = json.loads(supervisor.watch(look) or "{}")
            took_s = time.monotonic() - began_s
        learned = [json.loads((folder / f"learned-{number}").read_text()) for number in range(honest)]
        sent, lives = json.loads((folder / "sent").read_text())
    pushes = sum(one for one, _ in learned)
    checks = {
        "every learner ended well": set(supervisor.exits.values()) == {0},
        "no coordinator or server died": not supervisor.recoveries,
        "every honest push is in the weights once, and nothing else": {last for _, last in learned} == {-1.0 * pushes},
        "received = applied + dropped": summary["pushes"]["received"]
        == summary["pushes"]["applied"] + summary["pushes"]["dropped"],
        "the coordinator has not grown": not sizes or max(sizes) - sizes[0] < GROWTH_BYTES,
    }
    found = {"sent": sent, "lives": lives, "pushes": pushes, "refused": summary["refused"], "seconds": took_s}
    broken = [law for law, holds in checks.items() if not holds]
    assert not broken, f"{broken}: {found}, {summary}, {supervisor.exits}, {supervisor.recoveries}, {told[-5:]}"
    return found | {"grown": max(sizes) - sizes[0] if sizes else 0}


def _bytes_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description="a real run with a learner that says what it likes")
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    found = run(given.messages, seed=given.seed)
    print(
        f"{found['sent']:,} hostile messages of {found['lives']} processes, {found['refused']:,} refused, beside "
        f"{found['pushes']:,} honest pushes in {found['seconds']:.0f} s: none lost, none doubled, no process died, "
        f"the coordinator grew by {found['grown'] / 2**20:.1f} MiB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
