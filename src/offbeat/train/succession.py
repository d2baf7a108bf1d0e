"""When the host of a run is lost, another host continues it: who that is, and what each host does then.

A run names its successors in order (`--successors`), and every host that joins is told. A successor, which finds an
address of its own in the list, keeps a copy of the newest checkpoint. When the run's host is lost
(`server.remote.checkpoint_copies`), each host goes through the list: at its own address it continues the run there; at
another it waits for that host to listen, and joins it. Nobody votes: a host that is only cut off goes on by itself.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import OffbeatError, PeerError, RequestError
from offbeat.network import keys
from offbeat.network.connections import Place, family_of
from offbeat.network.port import format_place, parse_place
from offbeat.processes.child import ChildProcess, fork
from offbeat.server.remote.checkpoint_copies import LOST_S, follow_run, newest_copy

WAIT_S = 60.0  # for a successor to listen: it loads torch and the checkpoint before
JOIN_S = 10  # after which a run that is continued begins with whoever has joined; others may come later
_TRY_S = 2.0
_NUMBER = struct.Struct("<q")


def parse_successors(text: str) -> tuple[str, ...]:
    """`10.0.0.2:7000,10.0.0.3:7000`"""
    found = tuple(format_place(parse_place(item.strip(), "--successors")) for item in text.split(","))
    if len(set(found)) < len(found):
        raise RequestError(f"--successors: an address is named twice in '{text}'")
    return found


def own_index(successors: Sequence[str]) -> int | None:
    """Which of these addresses is one of this host, if any."""
    for index, text in enumerate(successors):
        place = parse_place(text, "--successors")
        with contextlib.suppress(OSError), socket.socket(family_of(place.address), socket.SOCK_STREAM) as one:
            one.bind(place._replace(port=0))
            return index
    return None


class SeenUpdates:
    """The newest update that each learner of this host has seen, in memory that its forks share."""

    def __init__(self, learners: int) -> None:
        self._numbers = mmap.mmap(-1, _NUMBER.size * learners)
        self._learners = range(learners)

    def note(self, learner: int, update: int) -> None:
        _NUMBER.pack_into(self._numbers, _NUMBER.size * learner, update)

    def newest(self) -> int:
        return max(int(_NUMBER.unpack_from(self._numbers, _NUMBER.size * learner)[0]) for learner in self._learners)


class Follower:
    """A process that keeps the copy of the newest checkpoint, and ends when the run's host is lost."""

    def __init__(self, place: Place, folder: Path | None) -> None:
        key = keys.key_of()
        self._child: ChildProcess = fork("follower", lambda: follow_run(place, key, folder), captured=False)

    def is_lost(self) -> bool:
        return os.waitid(os.P_PIDFD, self._child.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait_for_loss(self) -> bool:
        """Whether the run's host turns out to be lost: all learners have failed, and it is not known yet."""
        end_s = time.monotonic() + 2 * LOST_S
        while not self.is_lost() and time.monotonic() < end_s:
            time.sleep(0.1)
        return self.is_lost()

    def close(self) -> None:
        self._child.kill()
        self._child.wait()


@contextlib.contextmanager
def following(place: Place, folder: Path | None) -> Iterator[Follower]:
    follower = Follower(place, folder)
    try:
        yield follower
    finally:
        follower.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class LostRun:
    """A run whose host was lost, as this host knew it."""

    successors: tuple[str, ...]
    mine: int | None  # which of them is this host
    learners: int  # of the run
    here: int  # of these, on this host
    seen: int  # the newest update that a learner of this host has seen
    folder: Path | None  # with the copy of the newest checkpoint


def go_on(lost: LostRun) -> tuple[str, list[str]]:
    """What there is to say, and the words of the `offbeat` command with which this host goes on.

    `PeerError` where there is none.
    """
    for index, text in enumerate(lost.successors):
        if index == lost.mine:
            return _continue(lost, index)
        if _listens(parse_place(text, "--successors")):
            words = ["work", "--join", text, "--learners", str(lost.here)]
            if lost.folder is not None:  # a copy of the run that another host continues is another run's
                words += ["--run-dir", f"{lost.folder}-next"]
            return f"the host of the run is lost; joins the run again at {text}", words
    raise PeerError("the host of the run is lost, and none of its successors listens")


def _continue(lost: LostRun, index: int) -> tuple[str, list[str]]:
    name = "" if lost.folder is None else newest_copy(lost.folder)
    if lost.folder is None or not name:
        raise OffbeatError(
            "the host of the run is lost, and no checkpoint had been copied to this host; start it again"
        )
    update = int(name.removeprefix("update-"))
    rest = lost.successors[index + 1 :]
    words = ["train", "--resume", str(lost.folder), "--listen", lost.successors[index]]
    words += ["--remote", str(lost.learners - lost.here), "--join-within", f"{JOIN_S}s"]
    words += ["--successors", ",".join(rest)] if rest else []
    told = f"the host of the run is lost; this host continues the run from update {update} in {lost.folder}"
    return f"{told}; updates lost: at least {max(0, lost.seen - update)}", words


def _listens(place: Place) -> bool:
    """Whether somebody listens there within `WAIT_S`."""
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError):
            socket.create_connection(place, _TRY_S).close()
            return True
        time.sleep(0.2)
    return False
