"""Checkpoints come back as they were, the last ones stay, and training goes on while they are written."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat.errors import OffbeatError, RequestError
from offbeat.runs import disk
from offbeat.train import checkpoint
from offbeat.train.checkpoint import CheckpointError, Saver, load, newest, save
from train.checkpoints import dead_process, names, put, silence, value_of

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def same(left: Tensor, right: Tensor) -> bool:
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and left.tolist().__repr__() == right.tolist().__repr__()
    )


# --- round trips --------------------------------------------------------------------------------------------------

tensors = st.builds(
    lambda shape, dtype, seed: (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 9).to(dtype),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
states = st.dictionaries(
    st.text(), st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)
)
files_of_tensors = st.dictionaries(
    st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,9}", fullmatch=True),
    st.dictionaries(st.text(max_size=5).filter(lambda name: "\x00" not in name), tensors, max_size=3),
    max_size=3,
)


@settings(max_examples=25)
@given(st.integers(0, 10**9), states, files_of_tensors)
def test_what_is_saved_comes_back(update: int, state: dict[str, Any], files: dict[str, dict[str, Tensor]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder), update, state, files, keep=1)
        found = load(path)
        assert path.name == f"update-{update:08d}"
        assert (found.path, found.update, found.state) == (path, update, state)
        assert {name: set(held) for name, held in found.files.items()} == {
            name: set(held) for name, held in files.items()
        }
        for name, held in files.items():
            for key, tensor in held.items():
                assert same(found.files[name][key], tensor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3)])
def test_every_kind_of_tensor_survives(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    found = load(save(tmp_path, 0, {}, {"a": {"t": tensor}}, keep=1)).files["a"]["t"]
    assert same(found, tensor)


def test_views_that_share_memory_and_parameters_survive(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    parameter = torch.nn.Parameter(torch.ones(2))
    given = {
        "whole": base, "same": base, "row": base[1], "turned": base.t(), "every other": base[:, ::2],
        "widened": torch.ones(1).expand(4), "parameter": parameter, "conjugate": torch.tensor([1 + 2j]).conj(),
    }  # fmt: skip
    found = load(save(tmp_path, 0, {}, {"a": given}, keep=1)).files["a"]
    for name, tensor in given.items():
        assert same(found[name], tensor.detach()), name


def test_numbers_of_the_state_come_back_exactly(tmp_path: Path) -> None:
    state = {"rng": 2**127 + 1, "loss": 0.1 + 0.2, "best": math.inf, "none": math.nan, "tuple": (1, 2)}
    found = load(save(tmp_path, 0, state, {}, keep=1)).state
    assert math.isnan(found.pop("none"))
    assert found == {"rng": 2**127 + 1, "loss": 0.1 + 0.2, "best": math.inf, "tuple": [1, 2]}


def test_bytes_of_another_process_are_taken_as_they_are(tmp_path: Path) -> None:
    made = safetensors.torch.save({"w": torch.arange(4)})
    path = save(tmp_path, 3, {}, {"shard-0": made}, keep=1)
    assert (path / "shard-0.safetensors").read_bytes() == made
    assert load(path).files["shard-0"]["w"].tolist() == [0, 1, 2, 3]


def test_loaded_tensors_stay_when_the_files_are_gone_and_changed_ones_change_no_file(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    found = load(path)
    found.files["weights"]["w"].add_(5)
    assert value_of(load(path)) == 1
    for file in path.iterdir():
        file.write_bytes(b"\xff" * file.stat().st_size)
    shutil.rmtree(path)
    assert value_of(found) == 6


def test_loaded_tensors_lie_where_torch_would_put_them(tmp_path: Path) -> None:
    given = {str(size): torch.ones(size) for size in range(1, 20)}
    found = load(save(tmp_path, 0, {}, {"a": given}, keep=1)).files["a"]
    assert {tensor.data_ptr() % 64 for tensor in found.values()} == {0}


def test_the_manifest_is_json_that_a_person_can_read(tmp_path: Path) -> None:
    body = json.loads((put(tmp_path, 7) / "manifest.json").read_text(encoding="ascii"))["manifest"]
    assert (body["format"], body["update"], body["state"]) == (1, 7, {"epoch": 7})
    assert sorted(body["files"]) == ["more.safetensors", "weights.safetensors"]


@pytest.mark.parametrize(
    "state", [{"a": object()}, {1: 2}, {"a": [{"b": {None: 1}}]}, {"a": {1, 2}}, {"a": torch.ones(1)}]
)
def test_a_state_that_would_not_come_back_is_refused(tmp_path: Path, state: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="state"):
        save(tmp_path, 0, state, {}, keep=1)
    assert names(tmp_path) == []


def test_a_state_that_holds_itself_is_refused(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    state["again"] = state
    with pytest.raises(RequestError, match="JSON data"):
        save(tmp_path, 0, state, {}, keep=1)


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/x", ".hidden", "a\n", "ü", "a" * 101])
def test_a_name_that_is_no_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match="named by letters"):
        save(tmp_path, 0, {}, {name: {}}, keep=1)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("t", torch.ones(2, 2).to_sparse()),
        ("t", torch.ones(2, dtype=torch.complex128)),
        ("t", torch.empty(2, device="meta")),
        ("__metadata__", torch.ones(2)),
    ],
)
def test_a_tensor_that_no_file_can_hold_is_refused(tmp_path: Path, name: str, tensor: Tensor) -> None:
    with pytest.raises(RequestError):
        save(tmp_path, 0, {}, {"a": {name: tensor}}, keep=1)
    assert names(tmp_path) == []


@pytest.mark.parametrize(("update", "keep"), [(-1, 1), (10**18, 1), (0, 0)])
def test_numbers_out_of_range_are_refused(tmp_path: Path, update: int, keep: int) -> None:
    with pytest.raises(RequestError):
        save(tmp_path, update, {}, {}, keep=keep)


def test_bytes_that_are_no_safetensors_file_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    put(tmp_path, 1)
    made = safetensors.torch.save({"w": torch.arange(4)})
    for broken in (b"", b"hello", made[:-1], made + b"!"):
        with pytest.raises(CheckpointError, match=r"update-00000002/shard\.safetensors"):
            save(tmp_path, 2, {}, {"shard": broken}, keep=1)
    assert names(tmp_path) == ["update-00000001"]


def test_a_state_that_is_too_large_to_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "MOST_MANIFEST_BYTES", 1000)
    with pytest.raises(CheckpointError, match="too large"):
        save(tmp_path, 1, {"text": "x" * 1000}, {}, keep=1)
    assert load(save(tmp_path, 1, {"text": "x" * 500}, {}, keep=1)).update == 1


# --- what stays ---------------------------------------------------------------------------------------------------


def test_the_last_ones_stay(tmp_path: Path) -> None:
    for update in range(1, 6):
        put(tmp_path, update, keep=2)
    assert names(tmp_path) == ["update-00000004", "update-00000005"]
    put(tmp_path, 6, keep=1)
    assert names(tmp_path) == ["update-00000006"]


def test_a_broken_one_does_not_count_and_goes_with_the_older_ones(tmp_path: Path) -> None:
    for update in (1, 2, 3):
        put(tmp_path, update)
    (tmp_path / "update-00000003" / "weights.safetensors").write_bytes(b"cut")
    put(tmp_path, 4, keep=2)
    assert names(tmp_path) == ["update-00000002", "update-00000003", "update-00000004"]
    put(tmp_path, 5, keep=2)
    assert names(tmp_path) == ["update-00000004", "update-00000005"]


def test_a_save_behind_later_ones_neither_removes_them_nor_itself(tmp_path: Path) -> None:
    for update in (1, 8, 9):
        put(tmp_path, update)
    put(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["update-00000002", "update-00000008", "update-00000009"]


def test_the_same_update_is_replaced(tmp_path: Path) -> None:
    put(tmp_path, 1, value=5)
    put(tmp_path, 1, value=6)
    assert names(tmp_path) == ["update-00000001"]
    assert value_of(newest(tmp_path, silence)) == 6


def test_leftovers_of_dead_processes_and_of_earlier_updates_are_removed(tmp_path: Path) -> None:
    dead, alive = dead_process(), os.getppid()
    for name in (
        f".update-00000009.{dead}.unfinished",
        f".update-00000005.{alive}.unfinished",
        f".update-00000009.{os.getpid()}.unfinished",
        f".update-00000009.{alive}.unfinished",
        ".notes.unfinished",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights.safetensors").write_bytes(b"half")
    put(tmp_path, 6)
    assert names(tmp_path) == [".notes.unfinished", f".update-00000009.{alive}.unfinished", "update-00000006"]


def test_a_link_in_the_place_of_a_checkpoint_is_removed_and_what_it_shows_is_not(tmp_path: Path) -> None:
    outside = put(tmp_path / "other", 1)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "update-00000001").symlink_to(outside)
    put(folder, 2, keep=1)
    assert names(folder) == ["update-00000002"]
    assert value_of(load(outside)) == 1


# --- in the background --------------------------------------------------------------------------------------------


class Gate:
    """Holds the saving thread before its first file until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.threads: list[str] = []
        monkeypatch.setattr(checkpoint, "write_file", self._write)

    def _write(self, path: Path, content: bytes) -> None:
        self.threads.append(threading.current_thread().name)
        self.reached.set()
        assert self.opened.wait(30)
        disk.write_file(path, content)


def test_what_is_changed_after_save_returns_is_not_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    saver = Saver(tmp_path / "run" / "checkpoints", keep=2, tell=silence)
    weights, state = torch.zeros(3), {"losses": [1.0]}
    files = {"weights": {"w": weights, "part": weights[1:]}}
    saver.save(5, state, files)
    assert gate.reached.wait(30)
    weights.fill_(7)
    state["losses"].append(2.0)
    files["weights"].clear()
    assert newest(tmp_path / "run" / "checkpoints", silence) is None
    gate.opened.set()
    saver.wait()
    found = newest(tmp_path / "run" / "checkpoints", silence)
    assert found is not None and (found.update, found.state) == (5, {"losses": [1.0]})
    assert {name: held.tolist() for name, held in found.files["weights"].items()} == {"w": [0, 0, 0], "part": [0, 0]}
    assert set(gate.threads) == {"offbeat-checkpoint-5"}


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    saver = Saver(tmp_path, keep=2, tell=silence)
    saver.save(1, {}, {"a": {}})
    second = threading.Thread(target=lambda: saver.save(2, {}, {"a": {}}))
    second.start()
    assert gate.reached.wait(30)
    assert set(gate.threads) == {"offbeat-checkpoint-1"} and second.is_alive()
    gate.opened.set()
    second.join(30)
    saver.wait()
    assert gate.threads == ["offbeat-checkpoint-1"] * 2 + ["offbeat-checkpoint-2"] * 2
    assert names(tmp_path) == ["update-00000001", "update-00000002"]


def test_a_full_disk_is_told_in_one_line_and_the_old_one_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    saver = Saver(tmp_path, keep=1, tell=told.append)
    saver.save(1, {}, {"weights": {"w": torch.ones(3)}})
    saver.wait()

    def full(file: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        saver.save(2, {}, {"weights": {"w": torch.zeros(3)}})
        saver.wait()
    assert len(told) == 1 and "update 2" in told[0] and "No space left" in told[0] and "\n" not in told[0]
    assert names(tmp_path) == ["update-00000001"]
    assert value_of(newest(tmp_path, silence)) == 1
    saver.save(3, {}, {})
    saver.wait()
    assert len(told) == 1 and names(tmp_path) == ["update-00000003"]


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    told: list[str] = []
    saver = Saver(tmp_path / "file" / "checkpoints", keep=1, tell=told.append)
    saver.save(1, {}, {})
    saver.wait()
    assert len(told) == 1 and "Not a directory" in told[0]


def test_an_error_nobody_thought_of_is_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path, content: bytes) -> None:
        raise MemoryError

    monkeypatch.setattr(checkpoint, "write_file", broken)
    told: list[str] = []
    saver = Saver(tmp_path, keep=1, tell=told.append)
    saver.save(1, {}, {})
    saver.wait()
    assert len(told) == 1 and "MemoryError" in told[0]


def test_a_state_that_is_no_json_is_the_callers_mistake_at_once(tmp_path: Path) -> None:
    saver = Saver(tmp_path, keep=1, tell=silence)
    with pytest.raises(RequestError):
        saver.save(1, {"a": object()}, {})
    saver.wait()


# --- weights ------------------------------------------------------------------------------------------------------


def test_weights_come_back_and_replace_those_before(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    (tmp_path / ".weights.safetensors.unfinished").write_bytes(b"half")
    shared = torch.arange(4.0)
    for factor in (1, 2):
        checkpoint.write_weights(path, {"b": shared * factor, "a": (shared * factor)[::2]})
    found = checkpoint.read_weights(path)
    assert {name: held.tolist() for name, held in found.items()} == {"a": [0, 4], "b": [0, 2, 4, 6]}
    assert list(found) == ["a", "b"]
    assert names(tmp_path) == ["weights.safetensors"]


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_weights_that_cannot_be_written_leave_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "weights.safetensors"
    checkpoint.write_weights(path, {"a": torch.ones(1)})

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match=r"weights\.safetensors.* No space left"):
        patch.setattr(os, step, full)
        checkpoint.write_weights(path, {"a": torch.zeros(1)})
    assert names(tmp_path) == ["weights.safetensors"]
    assert checkpoint.read_weights(path)["a"].item() == 1


def test_weights_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    with pytest.raises(CheckpointError, match=r"weights\.safetensors cannot be read: No such file"):
        checkpoint.read_weights(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match=r"weights\.safetensors cannot be read: it is not a valid safetensors"):
        checkpoint.read_weights(path)
    assert issubclass(CheckpointError, OffbeatError) and CheckpointError.exit_code == 1
