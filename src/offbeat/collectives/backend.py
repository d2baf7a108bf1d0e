"""Making a group: what `init_process_group("offbeat")` calls.

With OFFBEAT_REPLACE, a group is also made where a program asks for Gloo or NCCL. torch then calls this through
`offbeat_autoload`, which changes one answer of torch's. A program that hard-codes its backend, or checks it by name,
needs no edit. offbeat itself never asks torch for them by name: its strategy `native` makes them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from offbeat.collectives import memory, rendezvous
from offbeat.collectives.cards import token_of
from offbeat.collectives.choice import Choice, check
from offbeat.collectives.counters import Stats
from offbeat.collectives.cuda import nccl_backend
from offbeat.collectives.options import Options, mark_joined
from offbeat.collectives.process_group import OffbeatGroup
from offbeat.collectives.transport import SharedMemory, control_bytes
from offbeat.errors import OffbeatError, PeerError, RequestError, nearest
from offbeat.network.keys import OPEN, TRUST, is_open, secret_of
from offbeat.strategy import AUTO, NATIVE
from offbeat_autoload import REPLACE, REPLACING

REPLACEABLE = ("gloo", "nccl")


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
        rendezvous.say_why_not(given.store, rank, f"uses the strategy '{NATIVE}'; all ranks must use the same strategy")
        return _native(given)
    transport, chooser = _join(given.store, rank, names, given.timeout.total_seconds(), chosen)
    return OffbeatGroup(given.store, transport, chooser, chosen)


def _options(given: Any, ranks: int) -> Options:
    if isinstance(given, Options):
        return given
    if isinstance(given, str):
        return Options(strategy=given)
    if given is not None:
        raise RequestError(f"pg_options must be offbeat.Options or a strategy like 'ring'; got {type(given).__name__}")
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
        check(inherited.strategy, ranks)
    except RequestError:
        return replace(inherited, strategy=AUTO)
    return inherited


def _join(
    store: Any, rank: int, names: Sequence[int], timeout_s: float, options: Options
) -> tuple[SharedMemory, Choice]:
    """Meet the other ranks. What is wrong with one of them is said on all."""
    ranks = len(names)
    size_bytes = control_bytes(ranks) + options.arena_bytes
    listener = rendezvous.Listener(ranks)
    card = {"strategy": options.strategy, "arena": options.arena_bytes, "listener": listener.name}
    descriptor = -1
    try:
        try:
            chosen = Choice(options.strategy, ranks)
            own, descriptor = memory.create(size_bytes, f"rank {names[rank]}")
        except OffbeatError as error:
            card["error"] = str(error).splitlines()[0]
            with contextlib.suppress(PeerError):  # the others may have ended by the same mistake
                rendezvous.hand_out_card(store, rank, names, card, timeout_s)
            raise
        cards = rendezvous.hand_out_card(store, rank, names, card, timeout_s)
        rendezvous.check_cards(cards, rank, names)
        token = token_of(cards, secret_of())
        peers = listener.meet(rank, names, cards, token, descriptor, size_bytes, timeout_s)
        hosts = len(set(rendezvous.hosts_of(cards)))
        remote = None
        if hosts > 1:
            if names[rank] == 0 and not dist.is_initialized() and is_open():
                told = f"{ranks} ranks on {hosts} hosts talk over TCP that is neither encrypted nor authenticated"
                _say(f"{TRUST}={OPEN}: {told}; whoever can reach their network can read and change what they send")
            remote = rendezvous.meet_remote(store, rank, names, cards, token, control_bytes(ranks), timeout_s)
            chosen = Choice(options.strategy, ranks, hosts=remote.hosts)
    finally:
        listener.close()
        if descriptor >= 0:
            os.close(descriptor)
    return SharedMemory(rank, names, own, peers, timeout_s, options.arena_bytes, remote), chosen


def _native(given: Any) -> dist.ProcessGroup:
    """torch's own: Gloo for CPU tensors, NCCL for GPUs where there are any."""
    rank, ranks = given.group_rank, given.group_size
    group = dist.ProcessGroup(given.store, rank, ranks)
    kinds = dist.ProcessGroup.BackendType
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo", given.store), rank, ranks, given.timeout)
    group._set_default_backend(kinds.GLOO)
    group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
    if torch.cuda.is_available() and dist.is_nccl_available():
        nccl = nccl_backend(given.store, rank, ranks, given.timeout)
        group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
    return group


def group_of(group: dist.ProcessGroup | None) -> OffbeatGroup:
    """The group, or the default one; `RequestError` where it is not of this backend."""
    found = group if group is not None else dist.group.WORLD
    if not isinstance(found, OffbeatGroup):
        what = "there is no process group" if found is None else f"this group uses {dist.get_backend(found)}"
        raise RequestError(f"statistics need a process group of the backend 'offbeat' with shared memory; {what}")
    return found


def stats(group: dist.ProcessGroup | None = None) -> Stats:
    """Counters of this rank in a process group with the backend "offbeat" (by default the default group).

    `strategy`, `calls`, `received_bytes` and `sent_bytes` (`received[p]`, `sent[p]`: from and to rank p), `waited_s`
    for ranks that came later, and `late`: a slow link between hosts, or the rank that came last most often. Try
    `print(offbeat.stats().late)`.
    """
    return group_of(group).stats()


# --- in the place of another backend ----------------------------------------------------------------------------------


def replaced(line: str) -> tuple[str, ...]:
    """The backends that a value of OFFBEAT_REPLACE names. `RequestError` where offbeat cannot stand for one."""
    names = tuple(dict.fromkeys(name.strip().lower() for name in line.split(",") if name.strip()))
    for name in names:
        if name not in REPLACEABLE:
            hint = nearest(name, REPLACEABLE)
            raise RequestError(f"{REPLACE}: expected gloo, nccl or gloo,nccl; got '{name}'{hint}")
    return names


def made(asked: Mapping[str, str]) -> dict[str, str]:
    """Which backend torch is to make for each device, where a program asked for these.

    A group of ours serves all devices: it is made if one of them is to be replaced, and the others must be ones that it
    can serve as well.
    """
    names = replaced(os.environ.get(REPLACE, ""))
    if not set(names) & set(asked.values()):
        return dict(asked)
    foreign = sorted(set(asked.values()) - {*REPLACEABLE, "offbeat"})
    if foreign:
        whole = ",".join(f"{device}:{backend}" for device, backend in asked.items())
        raise RequestError(
            f"{REPLACE}={','.join(names)}: '{whole}' also names '{foreign[0]}', which offbeat cannot replace"
        )
    return dict.fromkeys(asked, REPLACING)


def create_replacing(given: Any, options: Any) -> dist.ProcessGroup:
    """A group in the place of another backend's. Options of that backend mean nothing here, and rank 0 says so."""
    names = replaced(os.environ.get(REPLACE, ""))
    foreign = options is not None and not isinstance(options, Options | str)
    group = create(given, None if foreign else options)
    members = list(given.global_ranks_in_group) or range(given.group_size)
    if members[given.group_rank] == 0:
        start = f"{REPLACE}={','.join(names)}:"
        if not isinstance(dist.group.WORLD, OffbeatGroup) or dist.get_backend() == "offbeat":  # it is the first
            strategy = group.options.strategy if isinstance(group, OffbeatGroup) else NATIVE
            quoted = " and ".join(f"'{name}'" for name in names)
            _say(f"{start} offbeat replaces process groups of {quoted} ({strategy})")
        if foreign:
            _say(f"{start} pg_options of type {type(options).__qualname__} are ignored")
    return group


@cache
def _say(line: str) -> None:
    """Once in a process."""
    print(f"offbeat: {line}", file=sys.stderr, flush=True)
