"""Files that are on disk when a function says so, and reads that follow no link out of their folder.

Everything here raises the system's OSError; whoever calls knows what the file was for.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PIECE_BYTES = 16 * 2**20


def write_file(path: Path, content: bytes) -> None:
    """Every byte on disk, not only in the system's memory. The error names the file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(path, flags, 0o666)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(file, rest[:_PIECE_BYTES]) :]
        os.fsync(file)
    except OSError as error:
        error.filename = str(path)
        raise
    finally:
        os.close(file)


def replace_file(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Whole, or not at all: who reads it meanwhile has the one before, and a failure leaves nothing behind.

    `durable`: it is on disk when this returns, and was before it got its name.
    """
    beside = path.with_name(f".{path.name}.unfinished")
    try:
        if durable:
            write_file(beside, content)
        else:
            beside.write_bytes(content)
        beside.replace(path)
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """A new name is on disk only when its folder is."""
    with opened_folder(path) as folder:
        os.fsync(folder)


@contextmanager
def opened_folder(path: Path) -> Iterator[int]:
    """The folder itself, not its name: all that is read through it is from one, even if another takes its place."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)


def read_file(name: str, folder: int, most_bytes: int) -> bytes:
    """The bytes of a plain file in an opened folder, at most one more than `most_bytes`. A link is an error.

    The error names the file.
    """
    # Non-blocking: a pipe that bears the name of a file must not hold us up.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(name, flags, dir_fd=folder)
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            with os.fdopen(file, "rb", closefd=False) as stream:
                return stream.read(min(found.st_size, most_bytes) + 1)
        finally:
            os.close(file)
    except OSError as error:
        why = "it is a symbolic link, not a file" if error.errno == errno.ELOOP else error.strerror
        raise OSError(error.errno, why, name) from None


def cut_to_lines(path: Path) -> int:
    """Cut off what stands behind the last end of a line, in place; the size that is left."""
    with path.open("r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - _PIECE_BYTES)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                end = start + found + 1
                break
            end = start
        if end < size:
            file.truncate(end)
    return end


def has_size(name: str, folder: int, size_bytes: int) -> bool:
    """Whether a plain file of this size is in an opened folder."""
    found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    return stat.S_ISREG(found.st_mode) and found.st_size == size_bytes


def remove(path: Path) -> None:
    """A file, a link or a folder with all that is in it; nothing if it is not there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_alive(process: int) -> bool:
    """Whether a process of this number is there, which may be another one than it was."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it is there, and another user's
    return True
