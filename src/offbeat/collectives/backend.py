"""Making a group: what `init_process_group("offbeat")` calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from offbeat.collectives import choice, rendezvous
from offbeat.collectives.counters import Stats
from offbeat.collectives.options import Options, mark_joined
from offbeat.collectives.process_group import OffbeatGroup
from offbeat.errors import OffbeatError, RequestError
from offbeat.strategy import AUTO, NATIVE


def create(given: Any, options: Any) -> dist.ProcessGroup:
    """A group of the ranks that torch names. `options` are `Options`, or a strategy's line, or nothing.

    Without any, the first group does as the environment says; others do as the first one, but for a strategy that does
    not fit their number of ranks (a torus of all ranks, in a group of some): that becomes `auto`.
    """
    mark_joined()
    rank, ranks = given.group_rank, given.group_size
    names = list(given.global_ranks_in_group) or list(range(ranks))
    try:
        chosen = _options(options, ranks)
    except OffbeatError as error:
        rendezvous.say_why_not(given.store, rank, str(error).splitlines()[0])
        raise
    if chosen.strategy == NATIVE:
        rendezvous.say_why_not(given.store, rank, f"it uses the strategy '{NATIVE}', and so must all")
        return _native(given)
    return OffbeatGroup(given.store, rank, ranks, given.timeout.total_seconds(), chosen, names)


def _options(given: Any, ranks: int) -> Options:
    if isinstance(given, Options):
        return given
    if isinstance(given, str):
        return Options(strategy=given)
    if given is not None:
        raise RequestError(f"pg_options must be offbeat.Options or a strategy's line; got {type(given).__name__}")
    if not dist.is_initialized():
        return Options.of_environment()
    first = dist.group.WORLD
    if isinstance(first, OffbeatGroup):
        inherited = first.options
    elif dist.get_backend(first) == "offbeat":
        return Options(strategy=NATIVE)
    else:
        inherited = Options.of_environment()
    try:
        choice.check(inherited.strategy, ranks)
    except RequestError:
        return replace(inherited, strategy=AUTO)
    return inherited


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
        what = "there is none" if found is None else f"this one is {dist.get_backend(found)}'s, or '{NATIVE}'"
        raise RequestError(f"only a group of the backend 'offbeat' through shared memory can tell; {what}")
    return found


def stats(group: dist.ProcessGroup | None = None) -> Stats:
    """Counters of this rank in a process group with the backend "offbeat" (by default the default group).

    `strategy`, `calls`, `received_bytes` and `sent_bytes` (`received[p]`, `sent[p]`: from and to rank p), `waited_s`
    for ranks that came later, and `late`: the rank that came last most often. Try `print(offbeat.stats().late)`.
    """
    return group_of(group).stats()
