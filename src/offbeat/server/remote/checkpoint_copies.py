"""Copies of a run's newest checkpoint on hosts that can continue the run, and the sign that the run's host is there.

    the run's host:  serve_copies   sends the newest checkpoint when there is a new one, and a sign of life in between
                     say_anew       to a host that follows the run before this one, at the same place
    another host:    follow_run     keeps the copy in a folder that `offbeat train --resume` takes; returns when the
                                    run's host is lost, or has begun the run anew

Laws: a copy gets its name when all of its files are on disk, and an older one goes after that; what it holds is checked
when it is loaded. A host is lost when it has not been heard of, by connections that are tried again and again, for
`LOST_S`; each piece of a checkpoint is a sign of life. One that cannot be written here is told, and left out. Names of
files are of one pattern, and nothing received sizes an allocation: files are written in pieces.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from offbeat.errors import PeerError
from offbeat.network.connections import AnyConnection, Place
from offbeat.network.keys import RunKey
from offbeat.network.port import dial, raw_of, receive_all, send_all
from offbeat.network.streams import ClosedError
from offbeat.runs.disk import remove, sync_folder
from offbeat.runs.run_folder import RunDir
from offbeat.server.remote.frames import PIECE_BYTES, Channel, Greeting

LOST_S = 20.0
BEAT_S = 1.0
MOST_LIST_BYTES = 1 << 20
_SIZE_BYTES = 4
_WHOLE = re.compile(r"update-[0-9]{8,18}")
_UNDER_WAY = ".copy"
_ANEW_BYTES = b"\xff" * _SIZE_BYTES
ANEW, LOST = 3, 0  # what `follow_run` returns


class CopiedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$")]
    size: Annotated[int, msgspec.Meta(ge=0)]


class CheckpointCopy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint: its name, the run's configuration, and the files that follow."""

    name: Annotated[str, msgspec.Meta(pattern=r"^update-[0-9]{8,18}$")]
    config: str
    files: tuple[CopiedFile, ...]


_decode = msgspec.json.Decoder(CheckpointCopy).decode


# --- the run's host ---------------------------------------------------------------------------------------------------


def serve_copies(one: AnyConnection, folder: Path | None) -> None:
    """Until the other side has gone. Without a folder there are only signs of life."""
    raw_of(one).settimeout(LOST_S)
    sent = ""
    while True:
        name = "" if folder is None else newest_copy(folder)
        if folder is not None and name not in ("", sent):
            with contextlib.suppress(FileNotFoundError):  # a newer one has taken its place meanwhile
                _send(one, RunDir(folder), name)
                sent = name
                continue
        send_all(one, [bytes(_SIZE_BYTES)])
        time.sleep(BEAT_S)


def say_anew(one: AnyConnection) -> None:
    send_all(one, [_ANEW_BYTES])


def _send(one: AnyConnection, run: RunDir, name: str) -> None:
    with contextlib.ExitStack() as opened:
        paths = sorted((run.checkpoints / name).iterdir())
        files = [opened.enter_context(path.open("rb")) for path in paths]  # they stay while they are sent
        sizes = [os.fstat(file.fileno()).st_size for file in files]
        copied = tuple(CopiedFile(path.name, size) for path, size in zip(paths, sizes, strict=True))
        head = msgspec.json.encode(CheckpointCopy(name=name, config=run.read_config(), files=copied))
        send_all(one, [len(head).to_bytes(_SIZE_BYTES, "little"), head])
        for file in files:
            while piece := file.read(PIECE_BYTES):
                send_all(one, [piece])


def newest_copy(folder: Path) -> str:
    """The name of the newest checkpoint in a run's folder; "" where there is none."""
    try:
        names = [path.name for path in RunDir(folder).checkpoints.iterdir() if _WHOLE.fullmatch(path.name)]
    except OSError:
        return ""
    return max(names, key=lambda name: int(name.removeprefix("update-")), default="")


# --- another host -----------------------------------------------------------------------------------------------------


class _AnewError(Exception):
    """Another run is at this place."""


class LastSign:
    """When the run was heard of last."""

    def __init__(self) -> None:
        self.at_s = time.monotonic()


def follow_run(place: Place, key: RunKey | None, folder: Path | None, run: bytes, heard: LastSign | None = None) -> int:
    """Keep a copy of the newest checkpoint in `folder`, if there is one.

    Returns `LOST` when the run's host is lost, and `ANEW` when the run of this name has ended, and another is at its
    place.
    """
    try:
        _follow(place, key, folder, run, heard or LastSign())
    except _AnewError:
        return ANEW
    return LOST


def _follow(place: Place, key: RunKey | None, folder: Path | None, run: bytes, heard: LastSign) -> None:
    while time.monotonic() - heard.at_s < LOST_S:
        with contextlib.suppress(PeerError, ClosedError, OSError):
            greeting = Greeting(Channel.FOLLOW, int(folder is not None), secrets.token_bytes(16), run)
            one = dial(place, key, greeting.pack(), LOST_S / 3)
            with raw_of(one):
                raw_of(one).settimeout(LOST_S)
                while True:
                    copy = _receive_list(one)
                    heard.at_s = time.monotonic()
                    if copy is not None:
                        _receive_files(one, copy, folder, heard)
        time.sleep(BEAT_S)


def _receive_list(one: AnyConnection) -> CheckpointCopy | None:
    room = memoryview(bytearray(MOST_LIST_BYTES))
    receive_all(one, room[:_SIZE_BYTES])
    if room[:_SIZE_BYTES] == _ANEW_BYTES:
        raise _AnewError
    size = int.from_bytes(room[:_SIZE_BYTES], "little")
    if size > MOST_LIST_BYTES:
        raise PeerError(f"a list of {size} bytes exceeds the limit of {MOST_LIST_BYTES}")
    if not size:
        return None
    receive_all(one, room[:size])
    try:
        return _decode(room[:size])
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise PeerError("the list of a checkpoint cannot be read") from None


def _receive_files(one: AnyConnection, copy: CheckpointCopy, folder: Path | None, heard: LastSign) -> None:
    """`PeerError` where the connection breaks. What cannot be written here comes all the same: the next may fit."""
    if folder is None:
        raise PeerError("a checkpoint that this host did not ask for")
    pieces = _pieces(one, copy, heard)
    try:
        _write_files(copy, RunDir(folder), pieces)
    except OSError as error:
        why = f"cannot keep {copy.name} in {folder}: {error.strerror}"
        told = f"offbeat: {why}; make room there, or this host could continue the run from an older checkpoint only"
        print(told, file=sys.stderr, flush=True)
        for _ in pieces:
            pass


def _pieces(one: AnyConnection, copy: CheckpointCopy, heard: LastSign) -> Iterator[memoryview]:
    """Of all files, in order; each is gone with the next."""
    room = memoryview(bytearray(PIECE_BYTES))
    for file in copy.files:
        for start in range(0, file.size, PIECE_BYTES):
            piece = room[: min(PIECE_BYTES, file.size - start)]
            try:
                receive_all(one, piece)
            except OSError as error:
                raise PeerError(f"the connection broke: {error.strerror}") from None
            heard.at_s = time.monotonic()
            yield piece


def _write_files(copy: CheckpointCopy, run: RunDir, pieces: Iterator[memoryview]) -> None:
    """Into a folder beside, which then gets the checkpoint's name."""
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    beside, final = run.checkpoints / _UNDER_WAY, run.checkpoints / copy.name
    remove(beside)
    beside.mkdir()
    for file in copy.files:
        with (beside / file.name).open("xb") as out:
            for _ in range(0, file.size, PIECE_BYTES):
                out.write(next(pieces))
            out.flush()
            os.fsync(out.fileno())
    run.write_config(copy.config)
    remove(final)
    beside.rename(final)
    sync_folder(run.checkpoints)
    for path in tuple(run.checkpoints.iterdir()):
        if _WHOLE.fullmatch(path.name) and path != final:
            remove(path)
