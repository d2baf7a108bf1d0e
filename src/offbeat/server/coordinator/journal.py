"""The coordinator's journal: a snapshot, and all that the machine was told since; in memory that outlives the process.

    header | snapshot | record record record ...

There are two such files, and one of them is current: the one with a whole header and the higher number. A new snapshot
goes to the other, its header last; whoever is killed meanwhile leaves the current one as it was. So the journal is as
long as what happened since the last snapshot, however long the run.

The files are anonymous memory, held by the supervisor: they take no disk, and are gone with it. Where memory is not to
be had either, the run goes on and the journal says that it is not whole (`degraded`), until a snapshot can be written.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from offbeat.errors import OffbeatError

SNAPSHOT_EVERY = 250  # records: going through so many takes 10 ms, and a snapshot a tenth of a millisecond
_HEADER = struct.Struct("<8sQQIII")  # magic, number, bytes of the snapshot and their checksum; degraded; of the header
_RECORD = struct.Struct("<dII")  # time, bytes, checksum
_MAGIC = b"offbeat\1"
_LONGEST = 2**20  # bytes of a record: longer ones are torn


class JournalError(OffbeatError):
    """What there is cannot bring a coordinator back."""


class Entry(NamedTuple):
    """What the machine was told, as bytes, and when. `whole`: the checksum is right."""

    data: bytes
    at_s: float
    whole: bool


def new_files() -> tuple[int, int]:
    """Two descriptors, for a journal that is to outlive this process's children."""
    return os.memfd_create("offbeat-journal"), os.memfd_create("offbeat-journal")


class Journal:
    """See the module's text. A journal that is opened on files of a predecessor is where that one was."""

    def __init__(self, files: tuple[int, int]) -> None:
        self.files = files
        self.entries = 0  # records since the snapshot
        self.degraded = False
        found = [(number, index) for index in (0, 1) if (number := self._number_of(index))]
        self.number, self._current = max(found, default=(0, 0))
        self._snapshot_bytes = 0
        if found:
            _, _, self._snapshot_bytes, checksum, degraded, _ = _HEADER.unpack(self._read(0, _HEADER.size))
            self.degraded = bool(degraded)
            self.end = _HEADER.size + self._snapshot_bytes
            if zlib.crc32(self.snapshot) != checksum:
                raise JournalError("the snapshot in the journal is incomplete")
            self.end = max((end for end, _ in self._records()), default=self.end)
            os.ftruncate(self.descriptor, self.end)  # what was being written when its writer was killed
        else:
            self.end = 0
            self.renew(b"")
            if not self.number:
                raise JournalError("there is not enough memory for the journal")

    @property
    def descriptor(self) -> int:
        """Of the file that is current."""
        return self.files[self._current]

    @property
    def snapshot(self) -> bytes:
        """Empty where the journal begins with the run."""
        return self._read(_HEADER.size, self._snapshot_bytes)

    @property
    def due(self) -> bool:
        """Whether a new snapshot should be written."""
        return self.entries >= SNAPSHOT_EVERY or self.degraded

    def add(self, data: bytes, at_s: float) -> None:
        """A message that the machine was told. `OSError` where it cannot be written: then `degraded` is set."""
        record = _RECORD.pack(at_s, len(data), zlib.crc32(data)) + data
        try:
            _write_all(self.descriptor, record, self.end)
        except OSError:
            os.ftruncate(self.descriptor, self.end)
            self._mark_degraded()
            raise
        self.end += len(record)
        self.entries += 1

    def read(self) -> Iterator[Entry]:
        """All since the snapshot. `JournalError` where some of it could not be written."""
        if self.degraded:
            raise JournalError(
                "the coordinator was killed while its journal could not be written: what it had decided last is lost"
            )
        self.entries = 0
        for _, entry in self._records():
            self.entries += 1
            yield entry

    def renew(self, snapshot: bytes) -> bool:
        """Begin anew with a snapshot of all so far; False, and as before, where there is no room for it."""
        other = 1 - self._current if self.number else 0
        file = self.files[other]
        try:
            os.ftruncate(file, 0)
            _write_all(file, snapshot, _HEADER.size)
            head = _header(self.number + 1, snapshot, degraded=False)
            _write_all(file, head, 0)
        except OSError:
            os.ftruncate(file, 0)
            return False
        if self.number:
            os.ftruncate(self.descriptor, 0)
        self.number, self._current, self._snapshot_bytes = self.number + 1, other, len(snapshot)
        self.entries, self.end, self.degraded = 0, _HEADER.size + len(snapshot), False
        return True

    # --- the insides ------------------------------------------------------------------------------------------------

    def _mark_degraded(self) -> None:
        self.degraded = True
        os.pwrite(self.descriptor, _header(self.number, self.snapshot, degraded=True), 0)

    def _number_of(self, index: int) -> int:
        """Of a file that is whole; else 0."""
        head = os.pread(self.files[index], _HEADER.size, 0)
        if len(head) < _HEADER.size or zlib.crc32(head[:-4]) != int.from_bytes(head[-4:], "little"):
            return 0
        magic, number, *_ = _HEADER.unpack(head)
        return int(number) if magic == _MAGIC else 0

    def _records(self) -> Iterator[tuple[int, Entry]]:
        """Each with where it ends. One that was being written when its writer was killed is not there."""
        at, size = _HEADER.size + self._snapshot_bytes, os.fstat(self.descriptor).st_size
        data = memoryview(self._read(at, size - at))
        start = 0
        while len(head := data[start : start + _RECORD.size]) == _RECORD.size:
            at_s, length, checksum = _RECORD.unpack(head)
            body = bytes(data[start + _RECORD.size : start + _RECORD.size + length])
            if length > _LONGEST or len(body) < length:
                return
            start += _RECORD.size + length
            yield at + start, Entry(body, at_s, zlib.crc32(body) == checksum)

    def _read(self, at: int, size: int) -> bytes:
        pieces, left = [], size
        while left > 0 and (piece := os.pread(self.descriptor, left, at + size - left)):
            pieces.append(piece)
            left -= len(piece)
        return b"".join(pieces)


def _header(number: int, snapshot: bytes, *, degraded: bool) -> bytes:
    head = _HEADER.pack(_MAGIC, number, len(snapshot), zlib.crc32(snapshot), degraded, 0)[:-4]
    return head + zlib.crc32(head).to_bytes(4, "little")


def _write_all(file: int, data: bytes, at: int) -> None:
    """All of it, however many writes that takes; `OSError` where it cannot be."""
    written = os.pwrite(file, data, at)
    while written < len(data):
        written += os.pwrite(file, memoryview(data)[written:], at + written)
