"""Attack the stores of all-reduce groups as another user of this host, and see that no training ends by it.

    python benchmarks/store_attacks.py [--attacks 200] [--only WORD] [--seed 0] [--show]

As root: the attacker is user 65534. It writes junk and forged cards, deletes keys, floods the store with keys and
connections, leaves connections half open, sends garbage, oversized values and cards of ranks that never come; while a
group is made, and while it trains. The groups: of a program under an agent with a TCPStore, as torchrun has it, with
and without OFFBEAT_SECRET; of `offbeat run`, with `offbeat.join()` and with a group that the program makes; of
`offbeat train`, which has no store to attack. A training that had all its ranks must come to its end with the right
sums; a group that cannot be made must say why in one line on each rank, within its time. Prints a table by kind of
attack; ends with 1 where one failed. Minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import encodings.idna  # the other user cannot read where it is
import json
import mmap
import os
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

import offbeat
import offbeat.collectives.backend  # here, and not in each rank
from offbeat.errors import OffbeatError

NOBODY = 65534
LIMIT_S = 60.0  # for one attack, with the group
TIMEOUT_S = 25.0  # of a group
MISSING_S = 4.0  # of one that lacks a rank
CANNOT = 3  # exit code of a rank that has said why
STEPS = 40
KINDS = ("junk", "forged cards", "deletions", "counters", "keys flood", "connections", "half open", "oversized")
MORE = ("garbage", "strangers", "late card", "sustained")


@dataclass(frozen=True)
class Attack:
    """What is attacked, how, and when: before the group is made, or while it trains."""

    target: str
    kind: str
    phase: str
    seed: int

    def __str__(self) -> str:
        return f"{self.target}, {self.kind}, {self.phase}, seed {self.seed}"


def plan(most: int, first: int) -> list[Attack]:
    """All targets, kinds and moments, with other seeds each time around."""
    groups = [
        Attack(target, kind, phase, 0)
        for kind in (*KINDS, *MORE)
        for target in ("group", "group without secret")
        for phase in ("starting", "running")
        if not (kind in ("late card", "sustained") and phase == "running")
    ]
    commands = [
        Attack(target, kind, phase, 0)
        for kind in (*KINDS, "garbage", "strangers")
        for target, phase in (("run, join", "starting"), ("run, own group", "starting"), ("run, own group", "running"))
    ]
    trains = [Attack("train", "strangers", "running", 0)]
    found = [*islice(cycle(groups), most * 173 // 200), *islice(cycle(commands), most * 21 // 200)]
    found += islice(cycle(trains), most - len(found))
    return [Attack(one.target, one.kind, one.phase, first + number) for number, one in enumerate(found)]


# --- the attacker ----------------------------------------------------------------------------------------------------


class Intruder:
    """Another user, who knows the port. It goes on until `end_s`."""

    def __init__(self, port: int, chance: random.Random, end_s: float, pids: list[int]) -> None:
        self.port, self.chance, self.end_s, self.pids = port, chance, end_s, pids
        self.pause_s = chance.choice((0.0, 0.001, 0.02))
        self.store: Any = None

    def act(self, how: Callable[[Intruder], None], acts: mmap.mmap) -> None:
        """Again and again: the store ends the connection of who says nonsense. `acts` are counted."""
        while time.monotonic() < self.end_s:
            with contextlib.suppress(OSError, RuntimeError, ValueError):
                wait = timedelta(seconds=5)
                self.store = TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False, timeout=wait)
                acts[0] = min(255, acts[0] + 1)
                how(self)
            time.sleep(0.001)
        acts[1] = 1

    def rounds(self) -> Iterator[list[str]]:
        """The keys that are in the store, again and again; with cards of ranks that have not come."""
        while time.monotonic() < self.end_s:
            keys = [key for key in self.store.list_keys() if not key.startswith("flood/")]
            head = next((key[: key.index("card/")] for key in keys if "card/" in key), "default_pg/0//cpu//")
            names = [f"{head}card/{rank}{more}" for rank in range(3) for more in ("", "/read")]
            yield list(dict.fromkeys([*keys, *names]))
            time.sleep(self.pause_s)

    def junk(self) -> None:
        for keys in self.rounds():
            for key in keys:
                noise = self.chance.randbytes(self.chance.randrange(300)).decode("latin-1")
                self.store.set(key, self.chance.choice(["", "null", "[]", '{"protocol": 1}', "[" * 9999, noise]))

    def forged(self, error: bool) -> str:
        card: dict[str, Any] = {
            "protocol": 1, "token": self.chance.randbytes(16).hex(), "host": "h", "hostname": "h", "pid": 1,
            "numbering": "", "strategy": "ring", "arena": 1 << 20, "listener": "offbeat-" + "0" * 32,
        }  # fmt: skip
        if error:
            card["error"] = "go home"
        if self.chance.random() < 0.5:
            card["mac"] = self.chance.randbytes(32).hex()
        return json.dumps(card)

    def forge(self) -> None:
        for keys in self.rounds():
            cards = [key for key in keys if re.search(r"card/\d+$", key)]
            taken = [bytes(self.store.get(key)).decode("latin-1") for key in cards if self.store.check([key])]
            for key in cards:
                self.store.set(key, self.chance.choice([*taken, self.forged(False), self.forged(True)]))

    def delete(self) -> None:
        for keys in self.rounds():
            for key in keys:
                self.store.delete_key(key)

    def count(self) -> None:
        """Numbers that torch and older versions of offbeat count with."""
        for keys in self.rounds():
            for key in [*keys, *(f"default_pg/0//cpu//groups/{rank}" for rank in range(3)), "init/"]:
                with contextlib.suppress(RuntimeError):
                    self.store.add(key, self.chance.randint(-5, 5))

    def flood_keys(self) -> None:
        value = "x" * self.chance.choice((10, 1000, 100_000))
        most = min(50_000, 200_000_000 // len(value))
        for number in range(most):
            if time.monotonic() > self.end_s:
                return
            self.store.set(f"flood/{self.chance.random()}/{number}", value)

    def connect(self, most: int) -> list[socket.socket]:
        found = []
        with contextlib.suppress(OSError):
            for _ in range(most):
                one = socket.socket()
                one.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    one.connect(("127.0.0.1", self.port))
                found.append(one)
        return found

    def flood_connections(self) -> None:
        held = self.connect(self.chance.choice((200, 1000, 3000)))
        time.sleep(max(0.0, self.end_s - time.monotonic()))
        for one in held:
            one.close()

    def leave_half_open(self) -> None:
        """Handshakes and messages that do not end."""
        held = self.connect(self.chance.choice((20, 200)))
        time.sleep(0.1)
        starts = (b"", b"\x00", b"\x00\x00\x00\x00\x00", struct.pack("<BQ", 0, 1 << 20) + b"k", b"\x01\x08")
        for one in held:
            with contextlib.suppress(OSError):
                one.send(self.chance.choice(starts))
                if self.chance.random() < 0.3:
                    one.shutdown(socket.SHUT_WR)
        time.sleep(max(0.0, self.end_s - time.monotonic()))
        for one in held:
            one.close()

    def oversize(self) -> None:
        sizes = (20_000, 1 << 20, 8_000_000)
        for keys in self.rounds():
            for key in keys:
                self.store.set(key, self.chance.choice("[{9 ") * self.chance.choice(sizes))

    def send_garbage(self) -> None:
        """Queries of torch's store with wrong lengths, and noise."""
        while time.monotonic() < self.end_s:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as one:
                one.settimeout(0.05)
                if self.chance.random() < 0.7:
                    one.sendall(struct.pack("<BI", 0, 0x3C85F7CE))  # torch's VALIDATE
                for _ in range(self.chance.randint(1, 20)):
                    query = self.chance.randrange(24)
                    length = self.chance.choice((0, 1, 9, 1 << 23, 1 << 31, 1 << 63, (1 << 64) - 1))
                    one.sendall(struct.pack("<BQ", query, length) + self.chance.randbytes(self.chance.randrange(40)))
            time.sleep(self.pause_s)

    def intrude(self) -> None:
        """What is open of the run: sockets in the abstract name space, files, memory, the environment."""
        while time.monotonic() < self.end_s:
            for line in Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines():
                name = line.split()[-1]
                if name.startswith("@offbeat-"):
                    for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
                        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, kind) as one:
                            one.settimeout(0.05)
                            one.connect("\0" + name[1:])
                            one.send(self.chance.randbytes(self.chance.choice((1, 40, 4000))))
            intrude_in(self.pids)
            time.sleep(0.01)


HOW: dict[str, Callable[[Intruder], None]] = {
    "junk": Intruder.junk,
    "forged cards": Intruder.forge,
    "deletions": Intruder.delete,
    "counters": Intruder.count,
    "keys flood": Intruder.flood_keys,
    "connections": Intruder.flood_connections,
    "half open": Intruder.leave_half_open,
    "oversized": Intruder.oversize,
    "garbage": Intruder.send_garbage,
    "strangers": Intruder.intrude,
    "late card": Intruder.forge,
    "sustained": Intruder.junk,
}


def intrude_in(pids: list[int]) -> None:
    """Processes of another user: nothing of them can be opened or ended. Whatever can be ends this process with 9."""
    for pid in pids:
        for path in (f"/proc/{pid}/environ", f"/proc/{pid}/mem", f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                try:
                    number = os.open(path, os.O_RDONLY)
                    os.read(number, 1)
                except (PermissionError, IsADirectoryError):
                    continue
                os._exit(9)
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
            os._exit(9)


def as_nobody(body: Callable[[], None]) -> int:
    """A process of the other user; its number."""
    pid = os.fork()
    if pid:
        return pid
    code, said = 0, os.dup(2)
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        body()
    except (OSError, RuntimeError, ValueError):  # it is an attacker's: the store may refuse it
        code = 4
    except BaseException:
        os.write(said, traceback.format_exc().encode())
    finally:
        os._exit(code)


def attack(one: Attack, port: int, pids: list[int], acts: mmap.mmap) -> int:
    chance = random.Random(f"{one}")
    lasts_s = 14.0 if one.kind == "sustained" else 6.0 if one.kind == "late card" else chance.uniform(0.5, 2.0)

    def body() -> None:
        Intruder(port, chance, time.monotonic() + lasts_s, pids).act(HOW[one.kind], acts)

    return as_nobody(body)


# --- groups under an agent, as torchrun has it -----------------------------------------------------------------------


def forked(body: Callable[[], int], output: int) -> int:
    """A process of ours; its number. Its output goes to a file."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = body()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def keep_store(listener: socket.socket) -> NoReturn:
    """What torchrun's agent does."""
    port = int(listener.getsockname()[1])
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    while store is not None:
        signal.pause()
    raise SystemExit


def train(rank: int, ranks: int, flags: mmap.mmap) -> int:
    """All-reduce until the attack is over; flags: a byte for each rank that has met, and one for the end."""
    limit = timedelta(seconds=TIMEOUT_S if flags[63] == 0 else MISSING_S)
    try:
        dist.init_process_group("offbeat", timeout=limit, pg_options=offbeat.Options(strategy="ring"))
        flags[rank] = 1
        weights, step = torch.zeros(1000, dtype=torch.float64), 0
        more = torch.ones(1)
        while step < STEPS or more.item() > 0:
            gradient = torch.full((1000,), float(rank + 1 + step), dtype=torch.float64)
            dist.all_reduce(gradient)
            weights += gradient
            step += 1
            more.fill_(0.0 if flags[62] else 1.0)
            dist.all_reduce(more)
            time.sleep(0.002)
        expected = sum(sum(one + 1 + number for one in range(ranks)) for number in range(step))
        dist.destroy_process_group()
    except (OffbeatError, dist.DistError) as error:
        print(f"rank {rank}: {str(error).splitlines()[0]}", flush=True)
        return CANNOT
    assert bool((weights == expected).all()), f"rank {rank}: {weights[0]} is not {expected}"
    return 0


def attack_group(one: Attack, folder: Path) -> tuple[str, str]:
    """held, said why or failed; and what was said."""
    ranks = 2 + one.seed % 2
    come = ranks - 1 if one.kind == "late card" else ranks
    flags, acts = mmap.mmap(-1, 64), mmap.mmap(-1, 64)
    flags[63] = int(come < ranks)
    flags[62] = int(one.phase == "starting")
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    port = int(listener.getsockname()[1])
    said = os.open(folder / "said", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    started = [forked(lambda: keep_store(listener), os.open(os.devnull, os.O_WRONLY))]
    listener.close()
    own = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    if one.target == "group":
        own["OFFBEAT_SECRET"] = random.Random(one.seed).randbytes(32).hex()
    attacker = -1
    end_s = time.monotonic() + LIMIT_S
    try:
        if one.phase == "starting":
            attacker = attack(one, port, started, acts)
            time.sleep(random.Random(one.seed).uniform(0.0, 0.3))
        members = []
        for rank in range(come):

            def body(rank: int = rank) -> int:
                os.environ.update(own, RANK=str(rank))
                return train(rank, ranks, flags)

            members.append(forked(body, said))
        started += members
        if one.phase == "running":
            while time.monotonic() < end_s and sum(flags[:ranks]) < ranks:
                time.sleep(0.005)
            attacker = attack(one, port, members, acts)
            broke_in = wait_for([attacker], end_s) == [9]
            flags[62] = 1
        else:
            broke_in = False
        codes = wait_for(members, end_s)
    finally:
        for pid in (*started, attacker):
            if pid > 0:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
    text = os.pread(said, 100_000, 0).decode(errors="replace")
    os.close(said)
    if broke_in:
        return "failed", "a process of another user could be opened"
    if not acts[0] or (one.phase == "running" and not acts[1]):
        return "failed", "the attacker did not do what it was to do"
    if codes == [0] * come and come == ranks:
        return "held", text
    told = text.strip().splitlines()
    one_line_each = codes.count(CANNOT) == len(told) and set(codes) <= {0, CANNOT}
    if one.phase == "starting" and one_line_each and all(line.startswith("rank ") for line in told):
        return "said why", text
    return "failed", f"exit codes {codes}: {text}"


def wait_for(pids: list[int], end_s: float) -> list[int | None]:
    """Exit codes; None for one that takes too long."""
    codes: dict[int, int] = {}
    while len(codes) < len(pids) and time.monotonic() < end_s:
        for pid in pids:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return [codes.get(pid) for pid in pids]


# --- commands --------------------------------------------------------------------------------------------------------

JOINED = """
import os, sys, time, pathlib, torch, offbeat
folder = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "0":
    (folder / "port").write_text(os.environ["MASTER_PORT"])
learner = offbeat.join()
model = torch.nn.Linear(4, 1, bias=False)
torch.nn.init.zeros_(model.weight)
model, optimizer = learner.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
for step in range(60):
    with learner.minibatch():
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    time.sleep(0.01)
learner.finish()
assert learner.version == 60 and bool((next(model.parameters()) == -30.0).all()), next(model.parameters())
print("done", flush=True)
"""
OWN = """
import os, sys, time, pathlib, torch, torch.distributed as dist
from offbeat.errors import OffbeatError
folder = pathlib.Path(sys.argv[1])
if os.environ["RANK"] == "0":
    (folder / "port").write_text(os.environ["MASTER_PORT"])
import datetime
try:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=25))
    (folder / ("met-" + os.environ["RANK"])).touch()
    total = torch.zeros(100)
    for step in range(150):
        one = torch.ones(100)
        dist.all_reduce(one)
        total += one
        time.sleep(0.02)
    dist.destroy_process_group()
except (OffbeatError, dist.DistError) as error:
    print("rank " + os.environ["RANK"] + ": " + str(error).splitlines()[0], flush=True)
    raise SystemExit(3)
assert bool((total == 300.0).all()), total
print("done", flush=True)
"""


def attack_command(one: Attack, folder: Path) -> tuple[str, str]:
    command = [sys.executable, "-m", "offbeat"]
    if one.target == "train":
        command += ["train", "digits-softmax", "--sync", "ring", "--learners", "2", "--train.epochs", "20", "--quiet"]
        command += ["--device", "cpu", "--run-dir", str(folder / "run")]
    else:
        (folder / "script.py").write_text(JOINED if one.target == "run, join" else OWN, encoding="utf-8")
        command += ["run", "--learners", "2", "--sync", "ring", str(folder / "script.py"), str(folder)]
    end_s = time.monotonic() + LIMIT_S
    attacker, acts = -1, mmap.mmap(-1, 64)
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, cwd=folder, start_new_session=True
        )
        try:
            awaited = "met-1" if one.phase == "running" else "port"
            if one.target == "train":
                awaited = "run/metrics.jsonl"
            while process.poll() is None and time.monotonic() < end_s and not (folder / awaited).exists():
                time.sleep(0.005)
            tree = tree_of(process.pid)
            listening = listeners_of(tree)
            if one.target == "train":
                if listening:
                    return "failed", f"it listens on {listening}"
                attacker = attack_train(tree, random.Random(f"{one}"))
            else:
                attacker = attack(one, int((folder / "port").read_text(encoding="ascii")), tree, acts)
            broke_in = wait_for([attacker], end_s) == [9]
            process.wait(max(0.1, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return "failed", "it did not end\n" + (folder / "said").read_text(encoding="utf-8", errors="replace")
        finally:
            for pid in (process.pid, attacker):
                if pid > 0:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
            process.wait()
    text = (folder / "said").read_text(encoding="utf-8", errors="replace")
    if broke_in:
        return "failed", "a process of another user could be opened"
    if one.target != "train" and not acts[0] * acts[1]:
        return "failed", "the attacker did not do what it was to do"
    done = text.count("done") == 2 or one.target == "train"
    if process.returncode == 0 and done and "Traceback" not in text:
        return "held", text
    lines = re.findall(r"learner \d \| rank \d: .+", text)
    if one.phase == "starting" and one.target == "run, own group" and lines and "Traceback" not in text:
        return "said why", text
    return "failed", f"exit code {process.returncode}: {text}"


def attack_train(tree: list[int], chance: random.Random) -> int:
    """There is no port: what is left is what can be seen of the processes, and their sockets."""

    def body() -> None:
        intruder = Intruder.__new__(Intruder)
        intruder.chance, intruder.pids, intruder.end_s = chance, tree, time.monotonic() + 1.0
        intruder.intrude()

    return as_nobody(body)


def tree_of(root: int) -> list[int]:
    found, look = [], [root]
    while look:
        pid = look.pop()
        found.append(pid)
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                look += map(int, (task / "children").read_text(encoding="ascii").split())
    return found


def listeners_of(pids: list[int]) -> list[str]:
    """Addresses at which these processes listen by TCP."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(str(path.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                found.append(words[1])
    return found


# --- the table -------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attacks", type=int, default=200)
    parser.add_argument("--only", default="", help="attacks whose line has this in it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print every attack")
    given = parser.parse_args()
    assert encodings.idna
    if os.geteuid() != 0:
        print("store_attacks: needs root, to become another user", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    tried: Counter[str] = Counter()
    ends: Counter[tuple[str, str]] = Counter()
    slowest: dict[str, float] = {}
    for one in plan(given.attacks, given.seed):
        if given.only not in str(one):
            continue
        with tempfile.TemporaryDirectory() as made:
            began_s = time.monotonic()
            how, text = (attack_group if one.target.startswith("group") else attack_command)(one, Path(made))
            took_s = time.monotonic() - began_s
        row = f"{one.target.split(',')[0]}: {one.kind}" if one.target == "train" else one.kind
        tried[row] += 1
        ends[row, how] += 1
        slowest[row] = max(took_s, slowest.get(row, 0.0))
        if how == "failed" or given.show:
            last = text.strip().splitlines()[-12:] if how == "failed" else text.strip().splitlines()[-1:]
            print(f"{how:9} {took_s:5.1f} s  {one}: " + "\n          ".join(last), flush=True)
    print(f"{'attack':22}{'tried':>7}{'held':>7}{'said why':>10}{'failed':>8}{'longest':>10}")
    for row, many in tried.items():
        counts = [ends[row, how] for how in ("held", "said why", "failed")]
        print(f"{row:22}{many:>7}{counts[0]:>7}{counts[1]:>10}{counts[2]:>8}{slowest[row]:>8.1f} s")
    failed = sum(many for (_, how), many in ends.items() if how == "failed")
    print(f"{sum(tried.values())} attacks: {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
