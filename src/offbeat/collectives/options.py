"""What a group can be told when it is made."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from offbeat import spec as grammar
from offbeat.errors import RequestError

STRATEGY, MOVE, ARENA = "OFFBEAT_STRATEGY", "OFFBEAT_MOVE", "OFFBEAT_ARENA"
_SMALLEST_ARENA = 64 * 1024


def mark_joined() -> None:
    """Tell `offbeat run` that its script has become a learner."""
    told = os.environ.get("OFFBEAT_JOINED")
    if told is not None:
        with contextlib.suppress(OSError), Path(told).open("ab") as joined:
            joined.write(b"1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of a process group with the backend "offbeat".

        torch.distributed.init_process_group("offbeat", pg_options=offbeat.Options(strategy="ring"))

    strategy     the all-reduce: any all-reduce line of `offbeat strategies`, `auto` or `native` (torch's own)
    move         whether tensors that are reduced again and again (DDP's buckets) are moved into shared memory
    arena_bytes  how much each rank stages at once, for tensors that are not

    Without it the environment variables OFFBEAT_STRATEGY, OFFBEAT_MOVE and OFFBEAT_ARENA are used.
    """

    strategy: str = "auto"
    move: bool = True
    arena_bytes: int = 8 * 1024 * 1024

    def __post_init__(self) -> None:
        if self.arena_bytes < _SMALLEST_ARENA or self.arena_bytes % 64:
            raise RequestError(
                f"arena_bytes must be a multiple of 64 and at least {_SMALLEST_ARENA}; got {self.arena_bytes}"
            )

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] | None = None) -> Options:
        """As OFFBEAT_STRATEGY, OFFBEAT_MOVE and OFFBEAT_ARENA say."""
        given = os.environ if environment is None else environment
        move = given.get(MOVE) or "1"
        if move not in ("0", "1"):
            raise RequestError(f"{MOVE}: expected 0 or 1; got '{move}'")
        return cls(
            strategy=given.get(STRATEGY) or "auto",
            move=move == "1",
            arena_bytes=grammar.parse_size(given.get(ARENA) or "8MiB"),
        )
