"""The curves of a training for TensorBoard, if it is installed.

TensorBoard is loaded when a board is made, not before: it takes a second, and most trainings have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.errors import RequestError

# The fields of an "evaluated" record that are drawn, over the updates.
SCALARS = ("epoch", "accuracy", "loss", "train_loss", "samples_per_s", "wait_share", "staleness", "rate")


def check_installed() -> Any:
    """The writer's class; RequestError if TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise RequestError(
            f"save.tensorboard needs TensorBoard, which cannot be loaded ({error}); "
            "install it with: pip install 'offbeat[tensorboard]'"
        ) from None
    return SummaryWriter


class Board:
    """Writes event files into `folder`; RequestError if TensorBoard is not installed."""

    def __init__(self, folder: Path) -> None:
        self._writer = check_installed()(str(folder))

    def write(self, record: Mapping[str, Any]) -> None:
        """Add a point to each curve that the record has a number for, and have it on show at once."""
        for name in SCALARS:
            value = record.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(name, value, record["update"])
        self._writer.flush()

    def close(self) -> None:
        """Nothing is written after this. Closing twice is no mistake."""
        self._writer.close()
