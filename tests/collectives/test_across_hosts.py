"""Groups whose ranks are on several hosts: hosts of a lab, that is namespaces of this machine."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from collectives.nursery import Nursery
from lab.fixture import StartLab, wait_for
from offbeat.cli import main
from offbeat.lab import Lab
from offbeat.lab.control import HostProcess
from process import ddp_script

PROGRAMS = Path(__file__).parent / "network_programs.py"
DDP_SCRIPT = Path(ddp_script.__file__)
HOST_PROGRAMS = Path(__file__).parents[2] / "benchmarks" / "programs_on_hosts.py"


def start(
    lab: Lab,
    ranks: Sequence[int],
    program: str,
    *,
    store: str = "{host0}",
    keys: Sequence[Path] = (),
    by_turns: bool = False,
    **environment: str,
) -> list[HostProcess]:
    """`ranks[h]` ranks on host h, that run a program of `network_programs`; `keys[h]` is that of host h.

    `by_turns`: not host by host.
    """
    given = {"OFFBEAT_NETWORK_TRUST": "open", "OFFBEAT_STRATEGY": "ring", "OMP_NUM_THREADS": "1", **environment}
    own = {name: value for name, value in {**os.environ, **given}.items() if value}
    hosts = [host for host, count in enumerate(ranks) for _ in range(count)]
    if by_turns:
        hosts.sort(key=[place for count in ranks for place in range(count)].__getitem__)
    return [
        lab.start(
            host,
            [sys.executable, "-W", "ignore", str(PROGRAMS), program, str(rank), str(len(hosts)), store],
            environment=own | ({"OFFBEAT_KEY": str(keys[host])} if keys else {}),
        )
        for rank, host in enumerate(hosts)
    ]


def finish(processes: Sequence[HostProcess]) -> list[str]:
    for process in processes:
        assert process.wait(timeout_s=120) == 0, process.output
    return [process.output for process in processes]


def test_every_line_gives_the_plain_sum_and_the_same_bits_on_all_ranks(start_lab: StartLab) -> None:
    lab = start_lab(hosts=2)
    printed = finish(start(lab, [2, 1], "collectives,messages,sums,interface"))
    for told in ("all collectives are right", "all messages are right", "lines are right", "the interface is right"):
        assert all(told in text for text in printed)
    assert "OFFBEAT_NETWORK_TRUST=open: 3 ranks on 2 hosts talk over TCP" in printed[0]
    assert "neither encrypted nor authenticated" in printed[0] and "encrypted" not in printed[1] + printed[2]


def test_where_one_rank_has_a_gpu_all_cut_large_sums_alike(start_lab: StartLab) -> None:
    for text in finish(start(start_lab(hosts=2), [1, 1], "parts")):
        assert "sums in parts are right" in text


@pytest.mark.parametrize("ranks", [[1, 1, 1], [2, 2], [2, 1]])
def test_coded_all_reduces_end_with_the_same_bits_across_hosts(start_lab: StartLab, ranks: list[int]) -> None:
    lab = start_lab(hosts=len(ranks))
    for text in finish(start(lab, ranks, "coded", PYTHONPATH=str(PROGRAMS.parents[1]))):
        assert "coded lines are right" in text


def test_every_collective_is_right_wherever_the_ranks_are(start_lab: StartLab) -> None:
    lab = start_lab(hosts=2)
    for text in finish(start(lab, [2, 2], "every_collective", by_turns=True)):
        assert "calls of every collective are right" in text


def test_leaving_the_host_needs_leave(start_lab: StartLab) -> None:
    lab = start_lab(hosts=2)
    for text in finish(start(lab, [1, 1], "collectives", OFFBEAT_NETWORK_TRUST="")):
        assert "run 'offbeat keys FILE', copy FILE to every host and set OFFBEAT_KEY=FILE; or set" in text
        assert "OFFBEAT_NETWORK_TRUST=open on a network that you trust" in text
        assert text.count("\n") == 1, "one line"


def test_calls_that_differ_are_told_apart(start_lab: StartLab) -> None:
    lab = start_lab(hosts=2)
    printed = finish(start(lab, [1, 1], "other_call"))
    told = "rank 1 (host1, 10.0.0.2) called all_reduce(sum) of 1000 float32, but rank 0 all_reduce(sum) of 999 float32"
    assert told in printed[0]


def test_a_rank_that_ends_is_named_by_who_waits_for_its_message_but_what_it_has_sent_arrives(
    start_lab: StartLab,
) -> None:
    lab = start_lab(hosts=2)
    printed = finish(start(lab, [2, 1], "broken_messages"))
    assert "Ranks 2 failed to pass monitoredBarrier in 1000 ms" in printed[0]
    assert "Please check rank 0 logs for faulty rank" in printed[1]
    assert "it has arrived" in printed[0]
    assert "rank 2 (host1, 10.0.0.2) is gone while rank 0 was exchanging a message with it" in printed[0]


def test_a_slow_link_is_named_as_a_link(start_lab: StartLab) -> None:
    lab = start_lab(hosts=3, bandwidth="300Mbit/s", slow=["host=2,bandwidth=60Mbit/s"])
    for text in finish(start(lab, [1, 1, 1], "slow_link")):
        told = re.search(r"late: host 2 (sends|receives) at ([\d.]+) MB/s, the others at ([\d.]+) MB/s", text)
        assert told is not None, text
        assert 5 < float(told[2]) < 9.5 and 25 < float(told[3]) < 48, text  # 7.2 and 35.9 of payload


def test_a_ddp_script_under_torchrun_trains_as_gloo_does_and_as_one_process_on_the_union_batch(
    start_lab: StartLab, nursery: Nursery, tmp_path: Path
) -> None:
    """By gloo on one host, in ranks that are forked: what it trains does not depend on where they are."""
    lab = start_lab(hosts=2)
    for backend in ("gloo", "offbeat"):
        (tmp_path / backend).mkdir()
    launch = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--node-rank",
        "{host}", "--master-addr", "{host0}", "--master-port", "29400", str(DDP_SCRIPT),
        "--backend", "offbeat", "--out", str(tmp_path / "offbeat"),
    ]  # fmt: skip
    main(["keys", str(tmp_path / "run.key")])
    key = str(tmp_path / "run.key")
    given = {"OFFBEAT_KEY": key, "OFFBEAT_STRATEGY": "hierarchical", "OMP_NUM_THREADS": "1"}
    job = [lab.start(host, launch, environment={**os.environ, **given}) for host in range(2)]
    words = ["--backend", "gloo", "--out", str(tmp_path / "gloo")]
    nursery.values("run_script", ranks=4, script=str(DDP_SCRIPT), words=words, port=free_port())
    assert "on 4 ranks by offbeat" in finish(job)[0]
    ours, gloos = (np.load(tmp_path / backend / "parameters.npy") for backend in ("offbeat", "gloo"))
    assert np.abs(ours - gloos).max() < 1e-6
    assert np.abs(ours - train_alone(ranks=4, epochs=2)).max() < 1e-6


def test_sharded_tensor_parallel_and_pipelined_programs_train_as_with_gloo(
    start_lab: StartLab, nursery: Nursery, tmp_path: Path
) -> None:
    """Unmodified ones, under torchrun. `benchmarks/programs_on_hosts.py` has the table, and Lightning too."""
    lab = start_lab(hosts=2)
    for backend in ("gloo", "offbeat"):
        (tmp_path / backend).mkdir()
    names = ["fsdp2", "tensor-parallel", "pipelining"]
    launch = [
        sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2",
        "--node-rank", "{host}", "--master-addr", "{host0}", "--master-port", "29400", str(HOST_PROGRAMS),
        "--rank", str(tmp_path / "offbeat"), "--programs", *names,
    ]  # fmt: skip
    main(["keys", str(tmp_path / "run.key")])
    given = {"OFFBEAT_KEY": str(tmp_path / "run.key"), "OFFBEAT_REPLACE": "gloo", "OMP_NUM_THREADS": "1"}
    job = [lab.start(host, launch, environment={**os.environ, **given}) for host in range(2)]
    words = ["--rank", str(tmp_path / "gloo"), "--programs", *names]
    nursery.values("run_script", ranks=4, script=str(HOST_PROGRAMS), words=words, port=free_port())
    told = finish(job)[0]
    for name in names:
        assert f"{name} on 4 ranks by OffbeatGroup" in told, told
        ours, gloos = (np.load(tmp_path / backend / f"{name}.npy") for backend in ("offbeat", "gloo"))
        assert np.abs(ours - gloos).max() < 1e-6, name


def train_alone(ranks: int, epochs: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """As `ddp_script` trains, in one process: each minibatch is what all ranks have together."""
    torch.manual_seed(1)
    model = ddp_script.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = ddp_script.make_data(examples=5 * 8 * ranks)
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True, seed=3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(data, batch_size=8 * ranks, sampler=sampler):
            optimizer.zero_grad()
            torch.autograd.backward(torch.nn.functional.cross_entropy(model(images), labels))
            optimizer.step()
    return np.concatenate([tensor.detach().numpy().ravel() for tensor in model.parameters()])


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.mark.parametrize(
    ("fault", "secret"), [("kill", ""), ("cut", ""), ("kill", "5e" * 32)], ids=["kill", "cut", "kill with a key"]
)
def test_survivors_name_the_rank_that_is_gone(start_lab: StartLab, fault: str, secret: str) -> None:
    """At once where connections are closed; within 10 s where a link is cut and nobody is told."""
    lab = start_lab(hosts=3)
    trust = "" if secret else "open"
    processes = start(lab, [2, 1, 1], "reduce_for_ever", OFFBEAT_SECRET=secret, OFFBEAT_NETWORK_TRUST=trust)
    for process in processes:
        wait_for(process, "started")
    at = time.time()
    (lab.kill if fault == "kill" else lab.cut)(1)
    survivors = [0, 1, 3]
    for rank in survivors:
        assert processes[rank].wait(timeout_s=30) == 0
        text = processes[rank].output
        failed = re.search(r"at ([\d.]+): (.*)", text)
        assert failed is not None, text
        assert "rank 2 (host1, 10.0.0.2)" in failed[2], text
        assert float(failed[1]) - at < (1.5 if fault == "kill" else 10.5), text
