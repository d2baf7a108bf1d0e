"""What a coordinator leaves to its successor: whole, or as it was before, wherever its writer was killed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator

import pytest

from offbeat.server.coordinator.journal import Journal, JournalError, new_files

Files = tuple[int, int]


@pytest.fixture
def files() -> Iterator[Files]:
    found = new_files()
    yield found
    for one in found:
        os.close(one)


def told(journal: Journal) -> list[tuple[bytes, float]]:
    return [(entry.data, entry.at_s) for entry in journal.read()]


def test_a_successor_reads_the_snapshot_and_what_came_after_it(files: Files) -> None:
    journal = Journal(files)
    journal.add(b"before", 1.0)
    assert journal.renew(b"snapshot")
    journal.add(b"one", 2.0)
    journal.add(b"two", 3.0)
    after = Journal(files)
    assert (after.snapshot, told(after)) == (b"snapshot", [(b"one", 2.0), (b"two", 3.0)])
    after.add(b"three", 4.0)
    assert [data for data, _ in told(Journal(files))] == [b"one", b"two", b"three"]


def test_it_is_as_long_as_what_happened_since_the_last_snapshot(files: Files) -> None:
    journal = Journal(files)
    for round_ in range(50):
        for number in range(100):
            journal.add(b"x" * 100, float(number))
        assert journal.renew(b"s" * (1000 + round_))
        assert sum(os.fstat(file).st_size for file in files) < 3000


@pytest.mark.parametrize("cut", range(1, 20))
def test_a_record_that_was_being_written_is_not_there(files: Files, cut: int) -> None:
    journal = Journal(files)
    journal.add(b"whole", 1.0)
    whole = journal.end
    journal.add(b"torn", 2.0)
    os.ftruncate(journal.descriptor, journal.end - cut)
    after = Journal(files)
    assert told(after) == [(b"whole", 1.0)] and after.end == whole


@pytest.mark.parametrize("written", range(0, 54, 6))
def test_a_snapshot_that_was_being_written_leaves_the_one_before(
    files: Files, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(files)
    journal.renew(b"first")
    journal.add(b"one", 1.0)
    _fails_after(monkeypatch, written)
    with pytest.raises(KilledError):
        journal.renew(b"second, and longer")
    monkeypatch.undo()
    after = Journal(files)
    assert (after.snapshot, told(after)) == (b"first", [(b"one", 1.0)])


def test_a_record_whose_bytes_have_changed_is_told_from_the_others(files: Files) -> None:
    journal = Journal(files)
    for data in (b"one", b"two", b"three"):
        journal.add(data, 0.0)
    data = os.pread(journal.descriptor, journal.end, 0)
    os.pwrite(journal.descriptor, b"W", data.index(b"two") + 1)
    assert [(entry.data, entry.whole) for entry in Journal(files).read()] == [
        (b"one", True),
        (b"tWo", False),
        (b"three", True),
    ]


def test_where_nothing_can_be_written_it_says_so_until_a_snapshot_can(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(files)
    journal.add(b"one", 1.0)
    _is_full(monkeypatch)
    with pytest.raises(OSError, match="No space"):
        journal.add(b"lost", 2.0)
    assert not journal.renew(b"no room either") and journal.degraded and journal.due
    monkeypatch.undo()
    with pytest.raises(JournalError, match="could not be written"):
        list(Journal(files).read())
    assert journal.renew(b"all so far") and not journal.degraded
    after = Journal(files)
    assert (after.snapshot, told(after)) == (b"all so far", [])


def test_short_writes_are_written_on(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, bytes(data)[:3], at))
    journal = Journal(files)
    journal.add(b"a long record", 1.0)
    assert journal.renew(b"a long snapshot")
    journal.add(b"another", 2.0)
    after = Journal(files)
    assert (after.snapshot, told(after)) == (b"a long snapshot", [(b"another", 2.0)])


class KilledError(Exception):
    """The process, in the middle of a write."""


def _fails_after(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    write: Callable[..., int] = os.pwrite

    def killed(file: int, data: bytes, at: int) -> int:
        nonlocal left
        write(file, bytes(data)[:left], at)
        left -= len(data)
        if left < 0:
            raise KilledError
        return len(data)

    monkeypatch.setattr(os, "pwrite", killed)


def _is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    write: Callable[..., int] = os.pwrite

    def full(file: int, data: bytes, at: int) -> int:
        if at + len(data) > os.fstat(file).st_size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data, at)

    monkeypatch.setattr(os, "pwrite", full)
