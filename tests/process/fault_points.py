"""Where the processes of a run can be struck, and how: called by the processes themselves, at the n-th call of a point.

A blow is {"who": "learner", "number": 1, "at": "fill", "call": 5, "what": "kill"}; `number` is of the learner or the
server. It falls once in a run: whoever creates its marker file first strikes. A process that is stopped goes on when
the warden says so (`fault_nursery`), which finds its number in the marker.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from offbeat.processes import child
from offbeat.server import arena, handshake, wire
from offbeat.server.coordinator import coordinator_process, journal
from offbeat.server.learner import connection, push_modes
from offbeat.server.shard import server_process

LEARNER = ("compute", "computed", "fill", "push", "pushed", "reply", "fetch", "seed", "want", "granted", "bye", "end")
SERVER = ("idle", "mid-apply", "applied", "finished", "replied")
COORDINATOR = (
    "hear",
    "torn-journal",
    "journal",
    "handled",
    "carried",
    "hear-bye",
    "admit",
    "before-reply",
    "with-learner",
)


class Points:
    """Counts the calls of each point, and strikes at the one that it was told."""

    def __init__(self, order: dict[str, Any], folder: Path, who: str, number: int) -> None:
        self.folder = folder
        self.blows = [blow for blow in order["blows"] if (blow["who"], blow.get("number", 0)) == (who, number)]
        self.calls: Counter[str] = Counter()
        self.slow_s = 0.0  # that each minibatch takes longer
        self.packets = ""  # what becomes of those that are sent
        self.held: list[socket.socket] = []  # connections of strangers

    def __call__(
        self, at: str, before: Callable[[], object] | None = None, pids: Callable[[], list[int]] = list
    ) -> None:
        """A point is reached. `before` does half of the work, if this is where it is struck."""
        self.calls[at] += 1
        if at == "compute":
            time.sleep(self.slow_s)
        for blow in self.blows:
            if blow["at"] == at and blow["call"] <= self.calls[at]:
                marker = self.folder / f"struck-{blow['name']}"
                victims = pids() or [os.getpid()]
                try:
                    with marker.open("x", encoding="utf-8") as file:
                        file.write(f"{victims[0]}")
                except FileExistsError:
                    continue
                if before is not None:
                    before()
                if blow["what"] in HARM:
                    HARM[blow["what"]](self)
                else:
                    _strike(blow["what"], victims)
                (self.folder / f"continued-{blow['name']}").touch()


def _strike(what: str, victims: list[int]) -> None:
    if what == "kill":
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
    elif what == "stop":
        for pid in victims:
            os.kill(pid, signal.SIGSTOP)
    elif what == "raise":
        raise RuntimeError("struck on purpose")
    elif what == "kill the supervisor":
        os.kill(os.getppid(), signal.SIGKILL)
    else:  # as a terminal does: to the supervisor and all in its group
        os.killpg(os.getpgid(os.getppid()), signal.Signals[what])


def _be_slow(points: Points) -> None:
    points.slow_s = 0.05  # a minibatch takes a few milliseconds


def _jump(points: Points) -> None:
    """The wall clock of this process: by a day, to and fro."""
    real, calls = time.time, Counter[str]()

    def jumping() -> float:
        calls["all"] += 1
        return real() + (86_400.0 if calls["all"] % 3 else -86_400.0)

    time.time = jumping


def _take_all_memory(points: Points) -> None:
    torch.empty(1 << 50)


def _intrude(points: Points) -> None:
    """Connections of the same user without a token: silent ones, noise, and a packet that is too large."""
    said = (b"", b"\xff" * 64, b"\0" * 200_000, b"\x95\x01", bytes(range(256)) * 8)
    for number in range(300):
        one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        one.settimeout(0.05)
        with contextlib.suppress(OSError):
            one.connect(b"\0" + os.environ["OFFBEAT_ADDRESS"].encode())
            if said[number % len(said)]:
                one.send(said[number % len(said)])
        points.held.append(one)


def _other_version(points: Points) -> None:
    handshake.versions = lambda: "offbeat 0.0.1, torch 1.0"


def _kill_loaders(points: Points) -> None:
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text(encoding="ascii").split():
            os.kill(int(pid), signal.SIGKILL)


def _packets(kind: str) -> Callable[[Points], None]:
    def strike(points: Points) -> None:
        points.packets = kind

    return strike


HARM: dict[str, Callable[[Points], None]] = {
    "nothing more": lambda points: None,
    "slow": _be_slow,
    "clock": _jump,
    "memory": _take_all_memory,
    "strangers": _intrude,
    "version": _other_version,
    "loaders": _kill_loaders,
    "twice": _packets("twice"),
    "old": _packets("old"),
    "late": _packets("late"),
    "lost": _packets("lost"),
    "torn": _packets("torn"),
}


def _garble(points: Points, connection: connection.Connection, messages: list[Any]) -> list[Any]:
    """What is sent of these, by the harm that was done: the n-th packet from then on counts."""
    points.calls["packets"] += 1
    nth = points.calls["packets"]
    (points.folder / "garbled").touch()
    if points.packets == "twice":
        return [one for message in messages for one in (message, message)]
    if points.packets == "late" and nth % 4 == 0:
        time.sleep(0.02)
    if points.packets in ("lost", "torn") and nth <= 2:  # the learner says it again
        for message in messages if points.packets == "torn" else ():
            frame = bytearray(wire.encode(message))
            frame[nth % len(frame)] ^= 0x10
            with contextlib.suppress(OSError):
                connection.socket.send(bytes(frame))
        return []
    return messages


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Put `around(original, *arguments)` in the place of a function."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *given, **named: around(original, *given, **named))


def learner(order: dict[str, Any], folder: Path, number: int) -> Points:
    """In a learner's process."""
    points = Points(order, folder, "learner", number)

    def fill(original: Any, self: arena.Arena, slot: int, index: int, gradient: torch.Tensor, **how: bool) -> Any:
        start, half = self.offsets[index], self.table.sizes[index] // 2
        points("fill", lambda: self.slots[slot][start : start + half].copy_(gradient.flatten()[:half]))
        return original(self, slot, index, gradient, **how)

    def fetch(original: Any, self: arena.Arena, parts: Any, pieces: Any, **how: bool) -> int:
        points("fetch", lambda: parts.trained[0].detach().zero_())
        read: int = original(self, parts, pieces, **how)
        return read

    def seed(original: Any, self: arena.Arena, parts: Any, kept: Any = None) -> None:
        points("seed", lambda: self.weights[0][:7].fill_(1e9))
        original(self, parts, kept)

    def receive(original: Any, self: connection.ConnectionState, message: Any) -> Any:
        if isinstance(message, wire.Go) and message.seq > 1:
            points("reply")
        elif isinstance(message, wire.Granted):
            points("granted")
        return original(self, message)

    def push(original: Any, self: connection.ConnectionState, **named: Any) -> Any:
        points("push")
        return original(self, **named)

    def pushed(original: Any, self: push_modes.PushMode, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        points("pushed")

    def spoken(at: str) -> Callable[..., Any]:
        def speak(original: Any, self: connection.ConnectionState, *given: Any, **named: Any) -> Any:
            points(at)
            return original(self, *given, **named)

        return speak

    def connect(original: Any, *given: Any) -> Any:
        found = original(*given)
        (folder / "prepared").touch()
        return found

    sent: deque[Any] = deque(maxlen=4)

    def send(original: Any, self: connection.Connection, messages: Any) -> None:
        messages = list(messages)
        old = [sent[0]] if points.packets == "old" and len(sent) == sent.maxlen else []
        original(self, [*_garble(points, self, messages), *old] if points.packets else messages)
        sent.extend(messages)

    for owner, name, around in (
        (connection.Connection, "_send", send),
        (arena.Arena, "fill", fill),
        (arena.Arena, "fetch", fetch),
        (arena.Arena, "seed", seed),
        (connection.ConnectionState, "receive", receive),
        (connection.ConnectionState, "push", push),
        (push_modes.PushMode, "push", pushed),
        (connection.ConnectionState, "request_samples", spoken("want")),
        (connection.ConnectionState, "bye", spoken("bye")),
        (handshake, "connect", connect),
    ):
        wrap(owner, name, around)
    return points


def services(order: dict[str, Any], folder: Path) -> None:
    """In the supervisor's process: coordinator and servers are forked from it."""
    _servers(order, folder)
    _coordinator(order, folder)


class _Line:
    """A server's line, with points around what it hears and says."""

    def __init__(self, line: Any, points: Points) -> None:
        self.line, self.points = line, points

    def recv(self, most: int) -> bytes:
        self.points("idle")
        data: bytes = self.line.recv(most)
        return data

    def send(self, data: bytes) -> None:
        self.line.send(data)
        if isinstance(wire.decode_input(data), wire.Done):
            self.points("replied")

    def close(self) -> None:
        self.line.close()


def _servers(order: dict[str, Any], folder: Path) -> None:
    every: dict[int, Points] = {}

    def points_of(shard: int) -> Points:
        return every.setdefault(shard, Points(order, folder, "server", shard))

    def connect(original: Any, name: str, own: handshake.Handshake) -> Any:
        line, memory = original(name, own)
        return _Line(line, points_of(own.number)), memory

    def runs(original: Any, self: server_process.ShardMemory, *given: Any) -> Any:
        """Between two parts of an update: one is written, the other is not."""
        for number, part in enumerate(original(self, *given)):
            if number:
                points_of(self.shard)("mid-apply")
            yield part

    def finish(original: Any, self: server_process.ShardMemory, number: int, version: int) -> None:
        points_of(self.shard)("applied")
        original(self, number, version)
        points_of(self.shard)("finished")

    wrap(server_process, "_connect", connect)
    wrap(server_process.ShardMemory, "_runs", runs)
    wrap(server_process.ShardMemory, "finish", finish)


def _coordinator(order: dict[str, Any], folder: Path) -> None:
    points = Points(order, folder, "coordinator", 0)

    def tell(original: Any, self: coordinator_process.CoordinatorProcess, message: Any, *given: Any) -> None:
        if not isinstance(message, wire.Tick):
            points("hear")
        if isinstance(message, wire.Bye):
            points("hear-bye")
        original(self, message, *given)

    def add(original: Any, self: journal.Journal, data: bytes, at_s: float) -> None:
        points("torn-journal", lambda: os.pwrite(self.descriptor, b"\1" * 15, self.end))
        original(self, data, at_s)
        points("journal")

    def carry(original: Any, self: coordinator_process.CoordinatorProcess, message: Any) -> None:
        points("handled")
        if isinstance(message, wire.Go) and message.seq > 1:
            blow = points.blows[0] if points.blows else {}
            here = [line for line in self.connections if line.role == "learner"]
            mine = [line.pid for line in here if blow.get("all") or line.number == message.learner]
            points("before-reply", pids=lambda: mine)
            points("with-learner", pids=lambda: [*mine, os.getpid()])
        original(self, message)
        points("carried")

    def let_in(original: Any, self: coordinator_process.CoordinatorProcess, *given: Any) -> None:
        points("admit")
        original(self, *given)

    wrap(coordinator_process.CoordinatorProcess, "_handle", tell)
    wrap(journal.Journal, "add", add)
    wrap(coordinator_process.CoordinatorProcess, "_deliver", carry)
    wrap(coordinator_process.CoordinatorProcess, "_admit", let_in)


# --- bugs, to see them found ------------------------------------------------------------------------------------------


def _one_copy_of_the_state() -> None:
    """An update that was interrupted and is made again moves the optimizer's state twice."""

    def come(original: Any, self: arena.Arena, *given: Any) -> None:
        original(self, *given)
        self.states[1] = self.states[0]

    wrap(arena.Arena, "__init__", come)


def _forget_pushes() -> None:
    """The coordinator that comes back does not know of pushes that were acknowledged."""

    def add(original: Any, self: journal.Journal, data: bytes, at_s: float) -> None:
        if not isinstance(wire.decode_input(data), wire.Push):
            original(self, data, at_s)

    wrap(journal.Journal, "add", add)


def _outlive_the_supervisor() -> None:
    child.die_with_parent = lambda parent=None: None
    connection._GONE_S = server_process._NOBODY_S = 60.0  # nor do they end by themselves, when the listener is gone


PLANTED = {
    "one copy of the state": _one_copy_of_the_state,
    "forgets pushes": _forget_pushes,
    "outlives the supervisor": _outlive_the_supervisor,
}
