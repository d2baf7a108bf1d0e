"""What torchrun says to a process that it has started: which rank it is, of how many, and on how many hosts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple


class TorchrunRank(NamedTuple):
    """A rank. `nodes` are torchrun's agents, one for each host; `restarts` counts how often all ranks were restarted
    after one had failed.
    """

    rank: int
    ranks: int
    local_ranks: int
    nodes: int
    restarts: int


def torchrun_rank(environment: Mapping[str, str] | None = None) -> TorchrunRank | None:
    """None where torchrun has not started this process."""
    told = os.environ if environment is None else environment
    if "TORCHELASTIC_RUN_ID" not in told or "RANK" not in told:
        return None
    ranks = int(told["WORLD_SIZE"])
    return TorchrunRank(
        rank=int(told["RANK"]),
        ranks=ranks,
        local_ranks=int(told.get("LOCAL_WORLD_SIZE", ranks)),
        nodes=int(told.get("GROUP_WORLD_SIZE", 1)),
        restarts=int(told.get("TORCHELASTIC_RESTART_COUNT", 0)),
    )
