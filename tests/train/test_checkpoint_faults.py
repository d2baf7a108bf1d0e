"""Nothing broken is loaded, and a save that ends anywhere costs nothing that was saved before."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from offbeat.runs import disk
from offbeat.train import checkpoint
from offbeat.train.checkpoint import CheckpointError, CheckpointVersionError, load, newest
from train.checkpoints import names, put, silence, value_of


def forge(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and hash it anew, as somebody who means harm can."""
    file = path / "manifest.json"
    body = json.loads(file.read_bytes())["manifest"]
    change(body)
    forge_text(path, json.dumps(body))


def forge_text(path: Path, text: str) -> None:
    hashed = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(f'{{"sha256": "{hashed}",\n"manifest": {text}\n}}\n', encoding="utf-8")


# --- broken files -------------------------------------------------------------------------------------------------


def test_a_flipped_bit_anywhere_is_seen_and_the_file_is_named(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    rng = random.Random(0)
    for file in path.iterdir():
        good = file.read_bytes()
        for at in range(len(good)):
            bad = bytearray(good)
            bad[at] ^= 1 << rng.randrange(8)
            file.write_bytes(bad)
            with pytest.raises(CheckpointError, match=file.name):
                load(path)
        file.write_bytes(good)
    assert value_of(load(path)) == 1


def test_a_file_cut_or_grown_anywhere_is_seen_and_named(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    for file in path.iterdir():
        good = file.read_bytes()
        for bad in [*(good[:length] for length in range(len(good))), good + b"\n", good + b"\0", good * 2]:
            file.write_bytes(bad)
            with pytest.raises(CheckpointError, match=file.name):
                load(path)
        file.write_bytes(good)


def test_of_a_wrong_size_the_right_one_is_told(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    file = path / "weights.safetensors"
    good = file.read_bytes()
    for bad, amount in ((good[:-1], "less"), (good + b"!", "more")):
        file.write_bytes(bad)
        with pytest.raises(CheckpointError, match=f"it has {amount} than its {len(good)} bytes"):
            load(path)


def test_a_file_that_is_missing_or_no_file_is_named(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        (tmp_path / file.name).write_bytes(good)
        makers: list[Callable[[Path], None]] = [
            lambda gone: None,
            lambda folder: folder.mkdir(),
            lambda pipe: os.mkfifo(pipe),
            lambda link: link.symlink_to(tmp_path / link.name),
        ]
        for make in makers:
            file.unlink()
            make(file)
            with pytest.raises(CheckpointError, match=f"{file.name} cannot be read"):
                load(path)
            disk.remove(file)
            file.write_bytes(good)
    assert value_of(load(path)) == 1


def test_a_broken_one_is_named_in_one_line_and_the_one_before_is_used(tmp_path: Path) -> None:
    for update in (1, 2, 3, 4):
        put(tmp_path, update)
    (tmp_path / "update-00000004" / "weights.safetensors").write_bytes(b"")
    (tmp_path / "update-00000003" / "manifest.json").unlink()
    (tmp_path / "update-00000009").write_text("a file", encoding="utf-8")
    told: list[str] = []
    assert value_of(newest(tmp_path, told.append)) == 2
    assert [
        f"update-0000000{update}" in line and "\n" not in line for update, line in zip((9, 4, 3), told, strict=True)
    ] == [True] * 3
    assert "update-00000004/weights.safetensors" in told[1]


def test_where_there_is_none_newest_says_so(tmp_path: Path) -> None:
    assert newest(tmp_path / "nowhere", silence) is None
    assert newest(tmp_path, silence) is None
    (tmp_path / "update-12").mkdir()
    (tmp_path / "notes").mkdir()
    assert newest(tmp_path, silence) is None


def test_ten_digits_come_after_eight(tmp_path: Path) -> None:
    put(tmp_path, 99_999_999)
    put(tmp_path, 100_000_000)
    found = newest(tmp_path, silence)
    assert found is not None and found.update == 100_000_000


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "a/../b.safetensors", "x", ".x.safetensors"])
def test_a_manifest_that_names_a_place_outside_is_refused(tmp_path: Path, name: str) -> None:
    path = put(tmp_path, 1)
    outside = safetensors.torch.save({"w": torch.zeros(1)})
    (tmp_path / "x.safetensors").write_bytes(outside)
    entry = {"size_bytes": len(outside), "sha256": hashlib.sha256(outside).hexdigest()}
    forge(path, lambda body: body["files"].update({name: entry}))
    with pytest.raises(CheckpointError, match="not the name of a file in its folder"):
        load(path)


@pytest.mark.parametrize(
    "change",
    [
        {"update": "1"},
        {"update": True},
        {"update": -1},
        {"files": {"weights.safetensors": {"size_bytes": -1, "sha256": "0" * 64}}},
        {"files": {"weights.safetensors": {"size_bytes": 1, "sha256": "0"}}},
        {"files": []},
        {"state": []},
        {"more": 1},
        {"update": 2},
        {"format": "1"},
    ],
)
def test_a_forged_manifest_is_refused(tmp_path: Path, change: Mapping[str, Any]) -> None:
    path = put(tmp_path, 1)
    forge(path, lambda body: body.update(change))
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        load(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "[]", "nonsense", '"\\ud800"', ""])
def test_odd_json_is_refused(tmp_path: Path, text: str) -> None:
    path = put(tmp_path, 1)
    forge_text(path, text)
    with pytest.raises(CheckpointError, match=r"manifest\.json is corrupt"):
        load(path)


def test_of_a_huge_manifest_no_more_than_the_limit_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path, 1)
    with (path / "manifest.json").open("r+b") as file:
        file.truncate(2**32)  # sparse: takes no room on disk
    asked: list[int] = []

    def spy(name: str, folder: int, most_bytes: int) -> bytes:
        content = disk.read_file(name, folder, most_bytes)
        asked.append(len(content))
        return content

    monkeypatch.setattr(checkpoint, "read_file", spy)
    with pytest.raises(CheckpointError, match="more than"):
        load(path)
    assert asked == [checkpoint.MOST_MANIFEST_BYTES + 1]


def test_another_format_ends_the_search_and_both_versions_are_named(tmp_path: Path) -> None:
    put(tmp_path, 1)
    forge(put(tmp_path, 2), lambda body: body.update({"format": 2, "unheard": "of"}))
    with pytest.raises(CheckpointVersionError, match="has format 2, this offbeat reads format 1"):
        newest(tmp_path, silence)


def test_a_copy_may_have_any_name_but_not_that_of_another_update(tmp_path: Path) -> None:
    path = put(tmp_path, 1)
    assert load(path.rename(tmp_path / "best")).update == 1
    with pytest.raises(CheckpointError, match="of update 1, which does not match the name of its folder"):
        load((tmp_path / "best").rename(tmp_path / "update-00000002"))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match="nowhere cannot be read: No such file"):
        load(tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"^a/b cannot be read"):
        load(Path("a/b"))


# --- saves that end halfway ---------------------------------------------------------------------------------------

# Every call of the system by which a save changes the disk; a save is ended at each of them in turn.
STEPS = ("open", "write", "fsync", "replace", "mkdir", "unlink", "rmdir")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No waiting for the disk: what a killed process has written, the system has."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


class Scripted(Exception):  # noqa: N818 - it is the script's, no error of anybody
    """The save ends here."""


def at_step(monkeypatch: pytest.MonkeyPatch, number: int, end: Callable[[str], None]) -> list[str]:
    """Call `end` instead of the call of that number; the list tells which calls came."""
    seen: list[str] = []

    def scripted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            seen.append(name)
            if len(seen) - 1 == number:
                end(name)
            return real(*args, **options)

        return call

    for name in STEPS:
        monkeypatch.setattr(os, name, scripted(name, getattr(os, name)))
    return seen


def prepared(folder: Path) -> None:
    put(folder, 1)
    put(folder, 2, value=20)


def steps_of(folder: Path, update: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    with monkeypatch.context() as patch:
        seen = at_step(patch, -1, lambda name: None)
        put(folder, update, value=99, keep=1)
    return list(seen)


# Newer Pythons warn of a fork beside torch's threads; the child does nothing that could wait for one of them.
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("update", [2, 3])  # 2 replaces one, 3 is new
def test_a_process_killed_at_any_step_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: int
) -> None:
    """Also when the one that is replaced is the only one."""
    for only in (False, True):
        make = (lambda folder: put(folder, 2, value=20) and None) if only else prepared
        make(tmp_path / "count")
        steps = steps_of(tmp_path / "count", update, monkeypatch)
        assert {"open", "write", "fsync", "replace", "mkdir", "unlink", "rmdir"} <= set(steps)
        values = []
        for number in range(len(steps) + 1):
            folder = tmp_path / f"{only}-{number}"
            make(folder)
            child = os.fork()
            if child == 0:
                try:
                    at_step(monkeypatch, number, lambda name: os._exit(7))
                    put(folder, update, value=99, keep=1)
                    os._exit(0)
                finally:
                    os._exit(1)  # the child must not go on as a second pytest
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (7 if number < len(steps) else 0)
            values.append(value_of(newest(folder, silence)))
            put(folder, update + 1, keep=2)
            assert not [name for name in names(folder) if name.startswith(".")], "the next save puts all right"
            assert len(names(folder)) == 2
        assert values[0] == 20 and values[-1] == 99
        assert values == sorted(values), "once it is there, it stays"
        shutil.rmtree(tmp_path / "count")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("update", [2, 3])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), Scripted()])
def test_an_error_at_any_step_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: int, error: Exception
) -> None:
    prepared(tmp_path / "count")
    steps = steps_of(tmp_path / "count", update, monkeypatch)
    raised = 0

    def end(name: str) -> None:
        raise error

    for number in range(len(steps)):
        folder = tmp_path / str(number)
        prepared(folder)
        with monkeypatch.context() as patch:
            at_step(patch, number, end)
            try:
                put(folder, update, value=99, keep=1)
            except (CheckpointError, Scripted) as caught:
                raised += 1
                assert isinstance(error, Scripted) or "No space left" in str(caught)
        assert value_of(newest(folder, silence)) in (20, 99)
        assert (folder / "update-00000002").exists() or (folder / "update-00000003").exists()
        put(folder, update + 1, keep=2)
        assert not [name for name in names(folder) if name.startswith(".")]
    assert raised > len(steps) // 2


@pytest.mark.parametrize("update", [1, 2])  # 1 replaces one
def test_all_is_on_disk_before_it_has_its_name_and_before_an_older_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: int
) -> None:
    put(tmp_path, 0)
    put(tmp_path, 1)
    seen: list[str] = []
    replace = os.replace

    def sync(file: int) -> None:
        seen.append("sync " + str(Path(f"/proc/self/fd/{file}").readlink().relative_to(tmp_path)))

    def rename(old: Path, new: Path) -> None:
        seen.append(f"{old.name} -> {new.name}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    put(tmp_path, update, keep=1)
    final = f"update-0000000{update}"
    unfinished = f".{final}.{os.getpid()}.unfinished"
    aside = [f"{final} -> .{final}.{os.getpid()}.replaced"] if update == 1 else []
    files = ("weights.safetensors", "more.safetensors", "manifest.json")
    older = ["update-00000000"] if update == 1 else ["update-00000001", "update-00000000"]
    assert seen == [
        *(f"sync {unfinished}/{name}" for name in files),
        f"sync {unfinished}",
        *aside,
        f"{unfinished} -> {final}",
        "sync .",
        *(f"{name} -> .{name}.{os.getpid()}.unfinished" for name in older),
    ]


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, 1)

    def full(file: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match=r"weights\.safetensors.* No space left"):
        patch.setattr(os, "write", full)
        put(tmp_path, 2)
    assert names(tmp_path) == ["update-00000001"]
    assert value_of(newest(tmp_path, silence)) == 1


def test_writes_that_take_only_a_part_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, content: real(file, content[:7]))
        path = put(tmp_path, 2)
    assert value_of(load(path)) == 2
