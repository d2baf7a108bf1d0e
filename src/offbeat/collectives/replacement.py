"""OFFBEAT_REPLACE: a group of this backend where a program asks for Gloo or NCCL.

torch calls this through `offbeat_autoload`, which changes one answer of torch's. A program that hard-codes its backend,
or checks it by name, needs no edit. offbeat itself never asks torch for them by name: its strategy `native` makes them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch.distributed as dist

from offbeat.collectives.backend import create
from offbeat.collectives.options import Options
from offbeat.collectives.process_group import OffbeatGroup
from offbeat.errors import RequestError, nearest
from offbeat.strategy import NATIVE
from offbeat_autoload import REPLACE, REPLACING

REPLACEABLE = ("gloo", "nccl")


def replaced(line: str) -> tuple[str, ...]:
    """The backends that a value of OFFBEAT_REPLACE names. `RequestError` where offbeat cannot stand for one."""
    names = tuple(dict.fromkeys(name.strip().lower() for name in line.split(",") if name.strip()))
    for name in names:
        if name not in REPLACEABLE:
            hint = nearest(name, REPLACEABLE)
            raise RequestError(f"{REPLACE} names '{name}'; it can name gloo, nccl, or both as gloo,nccl{hint}")
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
        raise RequestError(f"{REPLACE}={','.join(names)}: '{whole}' also names '{foreign[0]}', which offbeat cannot be")
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
            _say(f"{start} process groups of {quoted} are offbeat's ({strategy})")
        if foreign:
            _say(f"{start} pg_options of type {type(options).__qualname__} are ignored")
    return group


@cache
def _say(line: str) -> None:
    """Once in a process."""
    print(f"offbeat: {line}", file=sys.stderr, flush=True)
