"""Making a group: what `init_process_group("offbeat")` calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from offbeat.collectives.counters import Stats
from offbeat.collectives.options import Options
from offbeat.collectives.process_group import OffbeatGroup
from offbeat.errors import RequestError
from offbeat.strategy import NATIVE


def create(given: Any, options: Any) -> dist.ProcessGroup:
    """A group of the ranks that torch names. `options` are `Options`, or a strategy's line, or nothing."""
    if isinstance(options, str):
        options = Options(strategy=options)
    elif options is None:
        options = Options.of_environment()
    elif not isinstance(options, Options):
        raise RequestError(f"pg_options must be offbeat.Options or a strategy's line; got {type(options).__name__}")
    rank, ranks = given.group_rank, given.group_size
    if options.strategy == NATIVE:
        return _native(given)
    names = list(given.global_ranks_in_group) or list(range(ranks))
    return OffbeatGroup(given.store, rank, ranks, given.timeout.total_seconds(), options, names)


def _native(given: Any) -> dist.ProcessGroup:
    """torch's own: Gloo for CPU tensors, NCCL for GPUs where there are any."""
    rank, ranks = given.group_rank, given.group_size
    group = dist.ProcessGroup(given.store, rank, ranks)
    kinds = dist.ProcessGroup.BackendType
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", given.store), rank, ranks, given.timeout)
    group._set_default_backend(kinds.GLOO)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if torch.cuda.is_available() and dist.is_nccl_available():
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = given.timeout
        nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", given.store), rank, ranks, options)
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    return group


def group_of(group: dist.ProcessGroup | None) -> OffbeatGroup:
    """The group, or the default one; `RequestError` where it is not of this backend."""
    found = group if group is not None else dist.group.WORLD
    if not isinstance(found, OffbeatGroup):
        what = "there is no process group" if found is None else f"its backend is {dist.get_backend(found)}"
        raise RequestError(f"this needs a process group of the backend 'offbeat', but {what}")
    return found


def stats(group: dist.ProcessGroup | None = None) -> Stats:
    """What this rank of a group (the default one) did so far: bytes from and to each rank, who was late."""
    return group_of(group).stats()
