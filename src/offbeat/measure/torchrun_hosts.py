"""`offbeat calibrate` under torchrun: the network between real hosts, measured by the ranks that torchrun has started.

    torchrun --nnodes 2 --nproc-per-node 1 ... -m offbeat calibrate digits-mlp -o calibration.json

There is no parent that asks: every rank runs the same measurement (`network_bench`), answers the questions that are put
to it, and gets the answers of all. Questions never leave a rank. Answers are numbers, and go through the process group,
encrypted where there is a key.
"""

from __future__ import annotations

import ipaddress
import json
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from offbeat.errors import PeerError, RequestError
from offbeat.measure.benchmark import OURS, Progress
from offbeat.measure.child_requests import Handlers
from offbeat.measure.network_bench import MeasuredHosts, measure_hosts
from offbeat.measure.torch_rank import ONE_A_HOST, AllReduceRank, Peers
from offbeat.network.addresses import own_address
from offbeat.predict.network_calibration import NetworkCalibration
from offbeat.processes.torchrun_rank import TorchrunRank
from offbeat.server.learner.join import torchrun_store
from offbeat.simulate.schedule_run import core_of
from offbeat.train.reduced_trainer import join_group
from offbeat.train.torchrun_learner import check_trust

_TIMEOUT_S = 120.0
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # alike in namespaces and containers of one machine
_MOST_BYTES = 64 * 1024  # of an answer


class TorchrunRanks:
    """All ranks of torchrun, as this one sees them: asked like the processes of a `Harness`."""

    def __init__(self, me: TorchrunRank, handlers: AllReduceRank) -> None:
        self._me = me
        self._handlers: Handlers = {
            "listen": handlers.listen,
            "round trips": handlers.round_trips,
            "one a host": handlers.one_a_host,
            "figures": handlers.figures,
            "nothing": lambda _: {"done": True},
        }

    def ask(self, questions: Mapping[str, Any] | Sequence[Mapping[str, Any]], doing: str) -> list[dict[str, Any]]:
        """The answers of all, which all get. `doing` ends the sentence when it fails."""
        mine = questions if isinstance(questions, Mapping) else questions[self._me.rank]
        try:
            answer = self._handlers[mine["do"]](mine)
        except OSError as error:
            raise PeerError(f"rank {self._me.rank}: {error.strerror or error} ({doing})") from None
        return gather(dict(answer))


def gather(mine: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank brings, as JSON: nothing that is received is executed."""
    text = json.dumps(mine).encode()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(text)]))
    most = max(int(size) for size in sizes)
    if not 0 < most <= _MOST_BYTES:
        raise PeerError(f"a rank answered with {most} bytes; expected at most {_MOST_BYTES}")
    padded = torch.zeros(most, dtype=torch.uint8)
    padded[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    each = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(each, padded)
    try:
        return [dict(json.loads(bytes(one[: int(size)].tolist()))) for one, size in zip(each, sizes, strict=True)]
    except (ValueError, TypeError):
        raise PeerError("the answer of a rank cannot be read") from None


def measure_torchrun_hosts(me: TorchrunRank, check: Callable[[], None], progress: Progress) -> NetworkCalibration:
    """By all ranks together; each gets the whole. The process group is gone afterwards.

    A `RequestError` of a rank's `check` ends all ranks, which would otherwise wait for it.
    """
    if me.nodes < 2:
        raise RequestError(
            "calibrate: torchrun was started on one host, which needs no torchrun; use 2 or more hosts (--nnodes 2) to "
            "measure the network between them"
        )
    check_trust()
    progress("network: waiting for the other hosts")
    store = PrefixStore("offbeat/calibrate", torchrun_store())
    join_group("ring", me.rank, me.ranks, torch.device("cpu"), store)
    cores = os.sched_getaffinity(0)
    try:
        where = _hosts(me, check)
        first = core_of(me.rank // where.ranks_each if where.shared else 0, me.rank % where.ranks_each, where.cores)
        os.sched_setaffinity(0, {sorted(cores)[first]})
        torch.set_num_threads(1)
        groups = {OURS: dist.group.WORLD}
        leaders = list(range(0, me.ranks, where.ranks_each))
        leading = dist.new_group(leaders, backend=OURS, timeout=timedelta(seconds=_TIMEOUT_S))
        if me.rank in leaders:
            groups[ONE_A_HOST] = leading
        peers = Peers(rank=me.rank, ranks=me.ranks, groups=groups)  # type: ignore[arg-type] # WORLD is one by now
        return measure_hosts(TorchrunRanks(me, AllReduceRank(peers)), where, progress)
    finally:
        os.sched_setaffinity(0, cores)
        dist.destroy_process_group()


def _hosts(me: TorchrunRank, check: Callable[[], None]) -> MeasuredHosts:
    """Which host each rank is on, as all say; `RequestError` where that cannot be measured."""
    error = ""
    try:
        check()
    except RequestError as wrong:
        error = str(wrong)
    mine = {
        "error": error,
        "address": own_address(int(os.environ["MASTER_PORT"])).address,
        "ranks": me.local_ranks,
        "cores": len(os.sched_getaffinity(0)),
        "boot": _BOOT.read_text().strip() if _BOOT.exists() else "",
    }
    return hosts_of(gather(mine))


def hosts_of(told: Sequence[Mapping[str, Any]]) -> MeasuredHosts:
    """From what each rank says of itself."""
    for one in told:
        if one["error"]:
            raise RequestError(str(one["error"]))
    each = {one["ranks"] for one in told}
    if len(each) > 1:
        raise RequestError(
            f"calibrate: hosts have {' and '.join(map(str, sorted(each)))} ranks; start torchrun with the same "
            "--nproc-per-node on every host"
        )
    (many,) = each
    addresses = tuple(str(ipaddress.ip_address(one["address"])) for one in told[::many])
    if len(set(addresses)) < max(2, len(addresses)):
        raise RequestError(
            f"calibrate: several of torchrun's nodes have the address {addresses[0]}; start one torchrun on each host"
        )
    boots = {one["boot"] for one in told}
    return MeasuredHosts(
        addresses=addresses,
        ranks_each=many,
        cores=min(int(one["cores"]) for one in told),
        shared=len(boots) == 1 and boots != {""},  # namespaces or containers of one machine
    )


def leave_torchrun(environment: MutableMapping[str, str] = os.environ) -> None:
    """From now on this process is one by itself: what it starts must not join torchrun's ranks."""
    own = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    for name in list(environment):
        if name in own or name.startswith(("TORCHELASTIC_", "LOCAL_", "GROUP_", "ROLE_")):
            del environment[name]
