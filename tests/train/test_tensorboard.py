"""The board's event files, read by TensorBoard's own reader."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offbeat.errors import RequestError
from offbeat.train.tensorboard import SCALARS, write_scalars, writer_class

RECORD = {
    "kind": "evaluated", "update": 120, "epoch": 2, "accuracy": 0.875, "loss": 0.5, "train_loss": 0.75,
    "samples_per_s": 1024.0, "wait_share": 0.25, "staleness": 1.5, "rate": 0.0625,
}  # fmt: skip


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="the extra 'tensorboard' is not installed"
    )
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {name: [(point.step, point.value) for point in events.Scalars(name)] for name in events.Tags()["scalars"]}


def board(folder: Path) -> Any:
    pytest.importorskip("tensorboard", reason="the extra 'tensorboard' is not installed")
    return writer_class()(str(folder))


def test_each_number_of_a_record_is_a_point_at_its_update(tmp_path: Path) -> None:
    made = board(tmp_path / "board")
    write_scalars(made, RECORD)
    write_scalars(made, {**RECORD, "update": 240, "accuracy": 1.0})
    found = curves(tmp_path / "board")  # before it is closed: a training is watched while it runs
    made.close()
    assert set(found) == set(SCALARS)
    assert found["accuracy"] == [(120, 0.875), (240, 1.0)]
    assert found["rate"] == [(120, 0.0625), (240, 0.0625)]
    assert [path.name.startswith("events.out.tfevents.") for path in (tmp_path / "board").iterdir()] == [True]


def test_what_is_no_number_is_left_out(tmp_path: Path) -> None:
    made = board(tmp_path)
    write_scalars(made, {"update": 1, "accuracy": None, "loss": math.nan, "rate": True, "epoch": 1, "strange": 5})
    made.close()
    found = curves(tmp_path)
    assert set(found) == {"epoch", "loss"}
    assert math.isnan(found["loss"][0][1])


def test_where_tensorboard_is_missing_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(RequestError, match=r"pip install 'offbeat\[tensorboard\]'"):
        writer_class()


def test_tensorboard_is_not_loaded_before_a_board_is_made() -> None:
    code = "import sys, offbeat.train.tensorboard; print('tensorboard' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
