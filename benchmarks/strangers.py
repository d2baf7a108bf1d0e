"""1,000 strangers during a training on three hosts: none gets in, and the weights are those of a run without them.

    python benchmarks/strangers.py                      # prints the table; the exit code is 1 if one got in
    python benchmarks/strangers.py --ranks 2 --strangers 60 --meetings 2

Ranks, one on each host of a lab, train with DDP under a key. At the start and between minibatches they make
groups: then they listen. At each such meeting the last rank waits until strangers have come: from the other hosts of
the group, as another user of theirs would, and from a host that is none of the group's. Each stranger does one of:

    silent      connects, and says nothing
    random      sends random bytes
    half        sends half of the first message of a handshake
    no-key      speaks TLS 1.3 without a certificate
    wrong-key   speaks it with the key of another run
    tls-1.2     speaks an older version
    no-tls      greets properly, without TLS
    replayed    sends what a rank with the right key once sent
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import socket
import ssl
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from offbeat.lab import Lab, Network
from offbeat.network import connections
from offbeat.network.connections import Place
from offbeat.network.keys import derive, key_of
from offbeat.network.tls import context_of

STEPS_EACH = 5  # minibatches between two meetings
WAIT_S = 120.0
ANSWER_S = 1.0
HELLO = struct.pack("<8sIIII16s", b"offbeat\1", connections.PROTOCOL, 1, 0, 0, bytes(16))


def wait_for(path: Path) -> None:
    end_s = time.monotonic() + WAIT_S
    while not path.exists():
        if time.monotonic() > end_s:
            raise TimeoutError(f"{path.name} did not come")
        time.sleep(0.01)


# --- a rank -----------------------------------------------------------------------------------------------------------


def train(rank: int, ranks: int, address: str, meetings: int, folder: Path, *, gated: bool) -> None:
    """Rank 0's weights go to a file. With strangers, the last rank comes to each meeting when it is told."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    meet, met = connections.Listener.meet, [0]

    def meet_late(listener: connections.Listener, *words: Any, **named: Any) -> Any:
        number, met[0] = met[0], met[0] + 1
        written = folder / f"place-{number}-{rank}.part"
        written.write_text(json.dumps(listener.place))
        written.rename(written.with_suffix(""))
        if rank == ranks - 1:
            wait_for(folder / f"go-{number}")
        return meet(listener, *words, **named)

    if gated:
        connections.Listener.meet = meet_late  # type: ignore[method-assign,assignment] # that is what this is for
    torch.set_num_threads(1)
    dist.init_process_group("offbeat", init_method=f"tcp://{address}", rank=rank, world_size=ranks)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05, momentum=0.9)
    own = torch.Generator().manual_seed(rank)
    for meeting in range(meetings):
        group = None if not meeting else dist.new_group(backend="offbeat")
        for _ in range(STEPS_EACH):
            optimizer.zero_grad()
            inputs = torch.randn(32, 64, generator=own)
            loss = torch.nn.functional.cross_entropy(parallel(inputs), torch.randint(0, 10, (32,), generator=own))
            torch.autograd.backward(loss)
            optimizer.step()
            total = loss.detach().clone()
            dist.all_reduce(total, group=group)
    flat = torch.cat([one.detach().flatten() for one in model.parameters()])
    (folder / f"weights-{rank}").write_bytes(flat.numpy().tobytes())
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB")
    dist.destroy_process_group()


# --- strangers --------------------------------------------------------------------------------------------------------


def record_handshake(key_secret: str) -> list[bytes]:
    """What a rank with the key sends, message by message, to another."""
    key = key_of({"OFFBEAT_SECRET": key_secret})
    assert key is not None
    pipes = [ssl.MemoryBIO() for _ in range(4)]
    client = context_of(key, server=False).wrap_bio(pipes[0], pipes[1])
    server = context_of(key, server=True).wrap_bio(pipes[2], pipes[3], server_side=True)
    said = []
    for _ in range(3):
        for one in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                one.do_handshake()
            if one is client:
                said.append(pipes[1].read())
                pipes[2].write(said[-1])
            else:
                pipes[0].write(pipes[3].read())
    client.write(HELLO)
    return [one for one in (*said, pipes[1].read()) if one]


def without_certificate(newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = newest
    return context


def greeted(one: socket.socket, context: ssl.SSLContext) -> bytes:
    with context.wrap_socket(one) as secured:
        secured.write(HELLO)
        return secured.read(len(HELLO))


def replayed(one: socket.socket, messages: Sequence[bytes]) -> bytes:
    answer = b""
    for message in messages:
        one.sendall(message)
        answer = one.recv(1 << 16)
    return b"" if answer[:1] in (b"\x15", b"\x16", b"\x17") else answer  # what a server of TLS says to anybody


def first_half() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        without_certificate().wrap_bio(incoming, outgoing).do_handshake()
    hello = outgoing.read()
    return hello[: len(hello) // 2]


def attack(host: int, ranks: int, strangers: int, meetings: int, folder: Path, seed: int) -> None:
    """Strangers of one host, to the ranks below it; those of the last host, which has no rank, to all.

    Counts go to a file for each meeting.
    """
    rng = random.Random(f"{seed} {host}")
    recorded = [bytes.fromhex(one) for one in json.loads((folder / "recorded").read_text())]
    half, wrong = first_half(), context_of(derive(b"another run"), server=False)

    def sends(data: bytes) -> Callable[[socket.socket], bytes]:
        def act(one: socket.socket) -> bytes:
            one.sendall(data)
            return one.recv(100)

        return act

    ways: dict[str, Callable[[socket.socket], bytes]] = {
        "random": lambda one: sends(rng.randbytes(rng.randrange(1, 3000)))(one),
        "no-key": lambda one: greeted(one, without_certificate()),
        "wrong-key": lambda one: greeted(one, wrong),
        "tls-1.2": lambda one: greeted(one, without_certificate(ssl.TLSVersion.TLSv1_2)),
        "no-tls": sends(HELLO),
        "replayed": lambda one: replayed(one, recorded),
    }
    for meeting in range(meetings):
        places = []
        for rank in range(ranks):
            path = folder / f"place-{meeting}-{rank}"
            wait_for(path)
            places.append(Place(*json.loads(path.read_text())))
        targets = places[: min(host, ranks - 1)]  # the last rank has not come yet
        found: Counter[str] = Counter()
        held: list[socket.socket] = []
        for number in range(strangers):
            way = ("silent", "half", *ways)[number % (2 + len(ways))]
            outcome = "dropped"
            try:
                one = socket.create_connection(rng.choice(targets), ANSWER_S)
                one.settimeout(ANSWER_S)
                if way in ways:
                    with one:
                        outcome = "GOT IN" if is_answer(ways[way](one)) else "dropped"
                else:  # the socket stays open while others come
                    one.sendall(half if way == "half" else b"")
                    held.append(one)
                    outcome = "held open"
            except TimeoutError:
                outcome = "not answered"
            except OSError:  # refused by TLS, reset, closed
                pass
            found[f"{way}: {outcome}"] += 1
        (folder / f"found-{meeting}-{host}").write_text(json.dumps(found))
        wait_for(folder / f"go-{meeting}")
        for one in held:  # they are dropped when the meeting is over, and told nothing
            with one, contextlib.suppress(ConnectionResetError):
                one.settimeout(WAIT_S)
                assert not is_answer(one.recv(100)), "a stranger was answered"


def is_answer(said: bytes) -> bool:
    """Whether this is more than TLS says to anybody: an alert is record type 21."""
    return bool(said) and said[0] != 21


# --- both -------------------------------------------------------------------------------------------------------------


def run(lab: Lab, count: int, strangers: int, meetings: int, folder: Path, port: int) -> Counter[str]:
    """One training by so many ranks; what became of the strangers."""
    folder.mkdir()
    secret = random.SystemRandom().randbytes(32).hex()
    (folder / "recorded").write_text(json.dumps([one.hex() for one in record_handshake(secret)]))
    own = {"OFFBEAT_SECRET": secret, "OFFBEAT_STRATEGY": "ring", "OMP_NUM_THREADS": "1", "OFFBEAT_NETWORK_TRUST": ""}
    words = [sys.executable, "-W", "ignore", __file__, "--meetings", str(meetings), "--folder", str(folder)]
    words += ["--ranks", str(count)]
    ranks = [
        lab.start(
            rank,
            [*words, "--rank", str(rank), "--address", f"{{host0}}:{port}", "--strangers", str(strangers)],
            environment={**os.environ, **own},
        )
        for rank in range(count)
    ]
    hosts = range(1, count + 1) if strangers else ()
    shares = {
        host: [str(strangers * (place + 1) // count - strangers * place // count)] for place, host in enumerate(hosts)
    }
    attackers = [
        lab.start(host, [*words, "--attack", str(host), "--strangers", *shares[host]], environment=dict(os.environ))
        for host in hosts
    ]
    found: Counter[str] = Counter()
    for meeting in range(meetings if strangers else 0):
        for host in hosts:
            path = folder / f"found-{meeting}-{host}"
            end_s = time.monotonic() + WAIT_S
            while not path.exists() or not path.read_text().endswith("}"):
                assert time.monotonic() < end_s, [process.output for process in (*ranks, *attackers)]
                time.sleep(0.05)
            found.update(json.loads(path.read_text()))
        (folder / f"go-{meeting}").touch()
    for process in (*ranks, *attackers):
        assert process.wait(timeout_s=WAIT_S) == 0, process.output
    peak = max(int(process.output.split("peak memory ")[1].split()[0]) for process in ranks)
    found["peak MiB"] = peak
    return found


def compare(ranks: int, strangers: int, meetings: int) -> tuple[Counter[str], Counter[str], bool]:
    """What became of the strangers, the same run without them, and whether the weights are the same bits."""
    with tempfile.TemporaryDirectory(prefix="offbeat-strangers-") as name, Lab(Network.of(hosts=ranks + 1)) as lab:
        folder = Path(name)
        alone = run(lab, ranks, 0, meetings, folder / "alone", 29401)
        among = run(lab, ranks, strangers // meetings, meetings, folder / "among", 29402)
        weights = {
            (folder / which / f"weights-{rank}").read_bytes() for which in ("alone", "among") for rank in range(ranks)
        }
    return among, alone, len(weights) == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strangers", type=int, default=1000)
    parser.add_argument("--meetings", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--attack", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        train(given.rank, given.ranks, given.address, given.meetings, given.folder, gated=given.strangers > 0)
        return 0
    if given.attack is not None:
        attack(given.attack, given.ranks, given.strangers, given.meetings, given.folder, seed=0)
        return 0
    among, alone, same = compare(given.ranks, given.strangers, given.meetings)
    peaks = among.pop("peak MiB"), alone.pop("peak MiB")
    got_in = sum(count for outcome, count in among.items() if outcome.endswith("GOT IN"))
    for outcome, count in sorted(among.items()):
        print(f"{outcome:<26} {count}")
    print(f"{sum(among.values())} strangers at {given.meetings} meetings: {got_in} got in")
    print(f"weights: {'bit-equal' if same else 'DIFFERENT'} to those of a run without strangers, on all ranks")
    print(f"peak memory of a rank: {peaks[0]} MiB, without strangers {peaks[1]} MiB")
    return 1 if got_in or not same else 0


if __name__ == "__main__":
    sys.exit(main())
