"""The curves of a training for TensorBoard, if it is installed.

TensorBoard is loaded when its writer is asked for, not before: it takes a second, and most trainings have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offbeat.errors import RequestError

# The fields of an "evaluated" record that are drawn, over the updates.
SCALARS = ("epoch", "accuracy", "loss", "train_loss", "samples_per_s", "wait_share", "staleness", "rate")


def writer_class() -> Any:
    """TensorBoard's `SummaryWriter`, which writes event files into a folder; RequestError if it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise RequestError(
            f"save.tensorboard needs TensorBoard, which cannot be imported ({error}); "
            "install it with: pip install 'offbeat[tensorboard]'"
        ) from None
    return SummaryWriter


def write_scalars(writer: Any, record: Mapping[str, Any]) -> None:
    """Add a point to each curve that the record has a number for, and have it on show at once."""
    for name in SCALARS:
        value = record.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            writer.add_scalar(name, value, record["update"])
    writer.flush()
