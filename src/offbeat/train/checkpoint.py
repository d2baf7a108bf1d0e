"""Checkpoints: a training's state in a folder of its own, whole or not there at all.

    RUN/checkpoints/update-00000120/
        manifest.json           the format, the update, the trainer's state, each file's size and SHA-256
        weights.safetensors     one file for each name that was given

Laws: what bears the name of a checkpoint was on disk to the last byte before it got that name. Nothing is loaded
unless every byte of it is as it was written. An earlier checkpoint goes only after a later one is in place. Nothing
that is read is executed, names a place outside its folder, or sizes an allocation that its file does not fill.

One process writes into a folder, one save at a time; any may read. Names that begin with a dot are those of a save
under way: `.update-00000120.PID.unfinished` is being written or removed, and `.update-00000120.PID.replaced` is the
one before of the same update, which still counts until the new one has its name. The next save puts both right if
their process is gone, or is at no later update (a process may bear a dead one's number).

This file does not know what the state or the tensors mean.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import safetensors.torch
import torch
from torch import Tensor

from offbeat.errors import OffbeatError, RequestError
from offbeat.runs.disk import (
    has_size,
    is_alive,
    opened_folder,
    read_file,
    remove,
    replace_file,
    sync_folder,
    write_file,
)

FORMAT = 1
MOST_MANIFEST_BYTES = 16 * 2**20  # parsed, the worst JSON of this size takes some hundred MB
MANIFEST = "manifest.json"
ENDING = ".safetensors"

_WHOLE = re.compile(r"update-([0-9]{8,18})")
_UNDER_WAY = re.compile(r"\.update-([0-9]{8,18})\.([1-9][0-9]{0,9})\.(unfinished|replaced)")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
# The manifest's bytes stand between these, so that its hash is checked before anything of it is parsed.
_HEAD = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n"manifest": ')
_TAIL = b"\n}\n"


class CheckpointError(OffbeatError):
    """A checkpoint cannot be written, or read, or is not as it was written; the file is named."""


class CheckpointVersionError(CheckpointError):
    """It is whole, but of a format that this offbeat does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What was saved. `files` holds tensors by file (without its ending) and name, sorted, each in its own memory."""

    path: Path
    update: int
    state: dict[str, Any]
    files: Mapping[str, Mapping[str, Tensor]]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size_bytes: Annotated[int, msgspec.Meta(ge=0)]
    sha256: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    update: Annotated[int, msgspec.Meta(ge=0)]
    files: dict[str, _File]
    state: dict[str, Any]


# --- saving -------------------------------------------------------------------------------------------------------


def save(
    folder: Path,
    update: int,
    state: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Tensor] | bytes],
    *,
    keep: int,
) -> Path:
    """Write a checkpoint, then remove all but the last `keep`; CheckpointError if that cannot be done.

    Bytes are a safetensors file that was made elsewhere. `state` is JSON data: a tuple comes back as a list, and NaN
    and the infinities come back as they are. A checkpoint of the same update is replaced; at no moment is there
    neither the old nor the new one.

    Of the updates up to this one the last `keep` whole ones stay, and what is older goes. Whole means here that the
    manifest is right and each file has its size, since reading all of them at every save would cost too much. A
    broken one does not count, and goes when it is older than those that stay. Later updates (of a training that was
    taken up again from an earlier one) neither count nor go.
    """
    _check(update, keep)
    return _write(folder, update, _as_json(state), _as_bytes(files), keep)


def _check(update: int, keep: int) -> None:
    if keep < 1:
        raise RequestError(f"keep, the number of checkpoints to keep, must be at least 1; got {keep}")
    if not 0 <= update < 10**18:
        raise RequestError(f"an update must be 0 or more; got {update}")


def _as_json(state: Mapping[str, Any]) -> str:
    """The state as text, which is a copy too; RequestError for what would not come back."""
    try:
        text = json.dumps(dict(state))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the state of a checkpoint is JSON data (numbers, texts, lists, dicts): {error}") from None
    _check_keys(state, "state")
    return text


def _check_keys(value: Any, where: str) -> None:
    """json writes 1 and None as keys too, but they come back as texts."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise RequestError(f"the keys in a checkpoint's {where} are texts; got {key!r}")
            _check_keys(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for item in value:
            _check_keys(item, where)


def _as_bytes(files: Mapping[str, Mapping[str, Tensor] | bytes]) -> dict[str, bytes]:
    """Each file's bytes, which are a copy of the tensors as they are now; RequestError for what has no such form."""
    made = {}
    for name, content in files.items():
        if not _NAME.fullmatch(name):
            raise RequestError(f"a file of a checkpoint is named by letters, digits, '_', '-' and '.'; got {name!r}")
        made[name + ENDING] = content if isinstance(content, bytes) else serialise(content)
    return made


def serialise(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """One safetensors file. It takes only contiguous tensors that share no memory, so others are copied first."""
    plain: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if name == "__metadata__":
            raise RequestError("a tensor cannot be named '__metadata__': safetensors files reserve that name")
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
            raise RequestError(f"tensor '{name}' is sparse, quantised or without data; a checkpoint holds plain ones")
        # A conjugate or negative view is a mark on the tensor, not in its bytes.
        own = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        at = own.untyped_storage().data_ptr()
        plain[name] = own.clone() if at in seen else own
        seen.add(at)
    try:
        return safetensors.torch.save(plain, metadata)
    except KeyError as error:
        raise RequestError(f"tensors of {error} cannot be saved; convert them first") from None


def _write(folder: Path, update: int, state: str, files: Mapping[str, bytes], keep: int) -> Path:
    """The save itself; each step leaves the folder such that a crash after it costs nothing but this checkpoint."""
    final = folder / f"update-{update:08d}"
    unfinished = _under_way(final, "unfinished")
    manifest = _seal(update, state, files, final)
    try:
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            sync_folder(folder.parent)
        _put_right(folder, update)
        unfinished.mkdir()
        try:
            for name, content in files.items():
                write_file(unfinished / name, content)
                _check_file(unfinished / name, final / name)
            write_file(unfinished / MANIFEST, manifest)
            sync_folder(unfinished)
            _take_place(unfinished, final)
        except BaseException:
            # The first error is the one to tell; what cannot be removed now, the next save removes.
            with suppress(OSError):
                remove(unfinished)
            raise
    except OSError as error:
        raise CheckpointError(f"{_named(error, final)} cannot be written: {_reason(error)}") from error
    _remove_older(folder, update, keep)
    return final


def _check_file(written: Path, final: Path) -> None:
    """Bytes that came from elsewhere may be no safetensors file, which must not be found only when it is needed."""
    try:
        with safetensors.safe_open(written, framework="pt"):  # reads the header, and compares the size with it
            pass
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{final} would not be a valid safetensors file: {_line(error)}") from None


def _under_way(final: Path, kind: str) -> Path:
    return final.with_name(f".{final.name}.{os.getpid()}.{kind}")


def _seal(update: int, state: str, files: Mapping[str, bytes], final: Path) -> bytes:
    entries = {
        name: {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
    }
    body = (
        f'{{\n"format": {FORMAT},\n"update": {update},\n"files": {json.dumps(entries, indent=1)},\n"state": {state}\n}}'
    ).encode("ascii")
    head = f'{{"sha256": "{hashlib.sha256(body).hexdigest()}",\n"manifest": '.encode("ascii")
    sealed = head + body + _TAIL
    if len(sealed) > MOST_MANIFEST_BYTES:
        raise CheckpointError(
            f"{final / MANIFEST} would have {len(sealed)} bytes, more than {MOST_MANIFEST_BYTES}: "
            "the state is too large; save its large parts as tensors"
        )
    return sealed


def _take_place(unfinished: Path, final: Path) -> None:
    """Give the finished folder its name. No folder can be renamed onto a full one, so an old one steps aside first."""
    if not os.path.lexists(final):
        unfinished.replace(final)
        sync_folder(final.parent)
        return
    aside = _under_way(final, "replaced")
    final.replace(aside)
    try:
        unfinished.replace(final)
    except BaseException:
        with suppress(OSError):
            aside.replace(final)
        raise
    sync_folder(final.parent)
    # The new one has its place; what cannot be removed now, the next save removes.
    with suppress(OSError):
        remove(aside)


def _put_right(folder: Path, update: int) -> None:
    """Remove what saves that ended halfway have left, and give back its name to what one of them had set aside."""
    for entry in sorted(folder.iterdir()):
        match = _UNDER_WAY.fullmatch(entry.name)
        if match is None:
            continue
        process = int(match[2])
        if process != os.getpid() and int(match[1]) > update and is_alive(process):
            continue
        final = folder / f"update-{match[1]}"
        # What cannot be removed does no harm; the next save tries again.
        with suppress(OSError):
            if match[3] == "replaced" and not os.path.lexists(final):
                entry.replace(final)
            else:
                remove(entry)


def tidy(folder: Path, update: int, keep: int) -> None:
    """What a save of this update had yet to do when it was killed."""
    _put_right(folder, update)
    _remove_older(folder, update, keep)


def _remove_older(folder: Path, update: int, keep: int) -> None:
    whole = 0
    for path in _listed(folder):
        if path.name.startswith(".") or _update_of(path) > update:
            continue
        if whole < keep:
            whole += _looks_whole(path)
            continue
        # Renamed first: half a checkpoint must not bear the name of one, even if this process is killed now.
        going = _under_way(path, "unfinished")
        try:
            path.replace(going)
            remove(going)
        except OSError as error:
            raise CheckpointError(
                f"update {update} is saved, but the older {path} cannot be removed: {_reason(error)}"
            ) from error


# --- loading ------------------------------------------------------------------------------------------------------


def load(path: Path) -> Checkpoint:
    """Read a checkpoint and check every byte of it; CheckpointError names the file that is not as it was written."""
    files = {}
    try:
        with opened_folder(path) as folder:
            manifest = _read_manifest(path, folder)
            for name, entry in sorted(manifest.files.items()):
                content = read_file(name, folder, entry.size_bytes)
                if len(content) != entry.size_bytes:
                    amount = "less" if len(content) < entry.size_bytes else "more"
                    raise CheckpointError(
                        f"{path / name} is corrupt: it has {amount} than its {entry.size_bytes} bytes"
                    )
                if hashlib.sha256(content).hexdigest() != entry.sha256:
                    raise CheckpointError(f"{path / name} is corrupt: its SHA-256 does not match")
                files[name.removesuffix(ENDING)] = parse_tensors(content, f"{path / name} cannot be read")
    except OSError as error:
        where = _named(error, path)  # a file's name, or the folder itself
        raise CheckpointError(f"{where if where == path else path / where} cannot be read: {_reason(error)}") from error
    return Checkpoint(path=path, update=manifest.update, state=manifest.state, files=files)


def newest(folder: Path, tell: Callable[[str], None]) -> Checkpoint | None:
    """The whole checkpoint of the latest update; None if there is none. `tell` names each broken one passed over.

    One of another format is not broken, and going back behind it would waste it: that is a CheckpointVersionError.
    """
    for path in _listed(folder):
        try:
            return load(path)
        except CheckpointVersionError:
            raise
        except CheckpointError as error:
            tell(f"skipped a corrupt checkpoint: {_line(error)}")
    return None


def _read_manifest(path: Path, folder: int) -> _Manifest:
    """The manifest of an opened folder, with nothing in it that has not been checked."""
    where = path / MANIFEST
    content = read_file(MANIFEST, folder, MOST_MANIFEST_BYTES)
    if len(content) > MOST_MANIFEST_BYTES:
        raise CheckpointError(f"{where} is corrupt: it has more than {MOST_MANIFEST_BYTES} bytes")
    head = _HEAD.match(content)
    if head is None or not content.endswith(_TAIL):
        raise CheckpointError(f"{where} is corrupt: its manifest is incomplete")
    body = content[head.end() : -len(_TAIL)]
    if hashlib.sha256(body).hexdigest().encode("ascii") != head[1]:
        raise CheckpointError(f"{where} is corrupt: its SHA-256 does not match")
    try:
        data = json.loads(body)
        version = data.get("format") if isinstance(data, dict) else None
        if isinstance(version, int) and version != FORMAT:
            raise CheckpointVersionError(
                f"{where} has format {version}, this offbeat reads format {FORMAT}; use the offbeat that wrote it"
            )
        manifest = msgspec.convert(data, _Manifest)
    except (ValueError, RecursionError) as error:  # msgspec's and json's errors are ValueErrors
        raise CheckpointError(f"{where} is corrupt: {_line(error)}") from None
    for name in manifest.files:
        if not (name.endswith(ENDING) and _NAME.fullmatch(name.removesuffix(ENDING))):
            raise CheckpointError(f"{where} is corrupt: {name!r:.200} is not the name of a file in its folder")
    if _update_of(path) not in (-1, manifest.update):
        raise CheckpointError(f"{where} is of update {manifest.update}, which does not match the name of its folder")
    return manifest


def _looks_whole(path: Path) -> bool:
    try:
        with opened_folder(path) as folder:
            files = _read_manifest(path, folder).files
            return all(has_size(name, folder, entry.size_bytes) for name, entry in files.items())
    except (CheckpointError, OSError):
        return False


def _listed(folder: Path) -> list[Path]:
    """What may be a checkpoint, the latest update first; one that was set aside stands after that of its name."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {_reason(error)}") from error
    found = [name for name in names if _WHOLE.fullmatch(name) or _UNDER_WAY.fullmatch(name)]
    paths = [folder / name for name in found if not name.endswith(".unfinished")]
    return sorted(paths, key=lambda path: (_update_of(path), not path.name.startswith("."), path.name), reverse=True)


def _update_of(path: Path) -> int:
    """The update in a folder's name, or -1 if it has another name, as a copy may."""
    match = _WHOLE.fullmatch(path.name) or _UNDER_WAY.fullmatch(path.name)
    return int(match[1]) if match else -1


def parse_tensors(content: bytes, complaint: str) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name and sorted; CheckpointError with this complaint if it is none."""
    try:
        tensors = safetensors.torch.load(content)
    except Exception as error:  # its parser raises errors of many kinds for broken headers
        raise CheckpointError(f"{complaint}: it is not a valid safetensors file: {_line(error)}") from None
    # Cloned, since these lie at odd addresses of Python's memory, and some kernels' last bits depend on the alignment.
    return {name: tensors[name].clone() for name in sorted(tensors)}


# --- saving while training goes on --------------------------------------------------------------------------------


class Saver:
    """Saves in the background, one checkpoint at a time.

    A save that fails (a full disk, no permission) does not end the training: `tell` gets one line, from the saving
    thread, and the earlier checkpoints stay. `on_saved` is called, from that thread, when an update is on disk.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        tell: Callable[[str], None],
        on_saved: Callable[[int], None] = lambda update: None,
    ) -> None:
        self._folder, self._keep, self._tell, self._on_saved = folder, keep, tell, on_saved
        self._thread: threading.Thread | None = None
        self.failure = ""  # why the last save failed, if it did

    def save(self, update: int, state: Mapping[str, Any], files: Mapping[str, Mapping[str, Tensor] | bytes]) -> None:
        """As `save`, but return when all is copied, so that the caller may change it. Waits for the save before."""
        self.wait()
        self.failure = ""
        _check(update, self._keep)
        copies = (update, _as_json(state), _as_bytes(files))
        # Not a daemon: a program that ends has its last checkpoint.
        self._thread = threading.Thread(target=self._run, args=copies, name=f"offbeat-checkpoint-{update}")
        self._thread.start()

    def wait(self) -> None:
        """Until the last save is on disk, or has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, update: int, state: str, files: Mapping[str, bytes]) -> None:
        try:
            _write(self._folder, update, state, files, self._keep)
        except Exception as error:  # whatever it is, training goes on, and the user reads of it
            self.failure = _line(error)
            self._tell(f"saving update {update} failed; training continues, earlier checkpoints remain: {_line(error)}")
        else:
            self._on_saved(update)


# --- single files -------------------------------------------------------------------------------------------------


def write_weights(path: Path, tensors: Mapping[str, Tensor], *, update: int | None = None) -> None:
    """Write one safetensors file, CheckpointError if that fails; the one before stays until the new one is whole.

    Its metadata say of which update it is, where that is known.
    """
    content = serialise(tensors, None if update is None else {"update": str(update)})
    try:
        replace_file(path, content, durable=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {_reason(error)}") from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, by name and sorted; CheckpointError if it is not there, or is none."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {_reason(error)}") from error
    return parse_tensors(content, f"{path} cannot be read")


def update_of_weights(path: Path) -> int | None:
    """The update that a safetensors file says it is of; None where it says none."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            told = (file.metadata() or {}).get("update", "")
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {_line(error)}") from None
    return int(told) if told.isascii() and told.isdigit() else None


# --- what errors say ----------------------------------------------------------------------------------------------


def _named(error: OSError, otherwise: Path) -> Path:
    """The file an error is about, where the system says so by name."""
    return Path(error.filename) if isinstance(error.filename, str | os.PathLike) else otherwise


def _reason(error: OSError) -> str:
    return error.strerror or _line(error)


def _line(error: BaseException) -> str:
    """An error's text in one line of bounded length."""
    return " ".join(str(error).split())[:2000] or type(error).__name__
