"""Where a run stands, for the learner that saves it in a pause; plain data."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from offbeat.errors import PolicyError

if TYPE_CHECKING:
    from offbeat.server.coordinator.coordinator import Coordinator


def standing_of(coordinator: Coordinator) -> dict[str, Any]:
    """What is not in the weights yet counts as not computed yet."""
    applied, rests = sum(coordinator.staleness.values()), coordinator.rests
    return {
        "version": min(lane.version for lane in coordinator.desk.lanes),
        "seeded": coordinator.seeded,
        "epoch_end": rests.at_epoch_end,
        "halt": rests.halting,
        "book": None if coordinator.book is None else coordinator.book.snapshot(all_back=True),
        "memory": _kept(coordinator),
        "gradients": applied,
        "staleness": sum(age * many for age, many in coordinator.staleness.items()) / applied if applied else 0.0,
        "samples": dict(coordinator.samples),
        "held": sum(count for gradient in coordinator.gradients.values() for _, count in gradient.epochs),
        "seconds": rests.began_s - coordinator.begun_s - sum(end - start for start, end in rests.times),
    }


def _kept(coordinator: Coordinator) -> dict[str, Any]:
    """What the policy keeps over a restart, as it will come back."""
    try:
        kept: dict[str, Any] = json.loads(json.dumps(coordinator.policy.kept(), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise PolicyError(f"the policy '{coordinator.setting.line}' keeps what is no plain data: {error}") from None
    return kept
