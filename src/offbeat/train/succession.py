"""When the host of a run is lost, another host continues it: who that is, and what each host does then.

A run names its successors in order (`--successors`), and every host that joins is told. A successor, which finds an
address of its own in the list, keeps a copy of the newest checkpoint. When the run's host is lost
(`server.remote.checkpoint_copies`), each host goes through the list: at its own address it continues the run there; at
another it waits for that host to listen, and joins it; at last it waits for the run's own host, from which it may only
have been cut off. Nobody votes: a host that is only cut off goes on by itself.

Where the run's host has begun the run anew (`continued_run`), all others join it again at the same address.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import mmap
import os
import re
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from offbeat.errors import OffbeatError, PeerError, RequestError
from offbeat.network import keys
from offbeat.network.connections import Place, family_of
from offbeat.network.port import format_place, parse_place
from offbeat.processes.child import ChildProcess, fork
from offbeat.runs.run_folder import RunDir
from offbeat.server.remote.checkpoint_copies import ANEW, LOST, LOST_S, LastSign, follow_run, newest_copy

WAIT_S = 60.0  # for a successor to listen: it loads torch and the checkpoint before
JOIN_S = 10  # after which a run that is continued begins with whoever has joined; others may come later
_TRY_S = 2.0
MIRRORED = 4  # a follower's exit code, beside those of `follow_run`
_NUMBER = struct.Struct("<q")


def parse_successors(text: str) -> tuple[str, ...]:
    """`10.0.0.2:7000,10.0.0.3:7000`"""
    places = [parse_place(item.strip(), "--successors") for item in text.split(",")]
    if any(ipaddress.ip_address(place.address.partition("%")[0]).is_unspecified for place in places):
        raise RequestError(f"--successors: expected addresses that belong to one host each; got '{text}'")
    found = tuple(map(format_place, places))
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


class Keeper(Protocol):
    """Keeps what is mirrored to this host (`mirrored_state.StateKeeper`)."""

    def start(self) -> None: ...
    def save(self, heard_s: float) -> bool:
        """Make a checkpoint of it; whether that has each update that was acknowledged."""
        ...


class Follower:
    """A process that keeps the copy of the newest checkpoint, and ends when the run's host is lost, or begins anew."""

    def __init__(self, place: Place, folder: Path | None, run: bytes, keeper: Keeper | None) -> None:
        key = keys.key_of()

        def body() -> int:
            if keeper is not None:
                keeper.start()
            heard = LastSign()
            end = follow_run(place, key, folder, run, heard)
            return MIRRORED if end == LOST and keeper is not None and keeper.save(heard.at_s) else end

        self._child: ChildProcess = fork("follower", body, captured=False)

    def _exit(self) -> os.waitid_result | None:
        return os.waitid(os.P_PIDFD, self._child.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)

    def is_lost(self) -> bool:
        return self._exit() is not None

    def begins_anew(self) -> bool:
        """Of a run that is lost: another one is at its place."""
        return self._has_returned(ANEW)

    def was_mirrored(self) -> bool:
        """Of a run that is lost: the checkpoint in the folder has each update that was acknowledged."""
        return self._has_returned(MIRRORED)

    def _has_returned(self, code: int) -> bool:
        found = self._exit()
        return found is not None and found.si_code == os.CLD_EXITED and found.si_status == code

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
def following(place: Place, folder: Path | None, run: bytes, keeper: Keeper | None = None) -> Iterator[Follower]:
    follower = Follower(place, folder, run, keeper)
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
    at: str  # where the run was
    anew: bool = False  # it begins anew there
    mirrored: bool = False  # the newest checkpoint has each update that was acknowledged
    mirrors: bool = False  # as the run did, it is to be mirrored
    servers: int = 1  # on hosts of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What a host's loss has cost; `exact`: not only at least."""

    why: str
    update: int  # from which the run goes on
    updates: int
    exact: bool = True

    def note(self, run: RunDir) -> None:
        with contextlib.suppress(OSError):  # it is told, too
            run.note_loss(asdict(self))


def go_on(lost: LostRun) -> tuple[str, list[str]]:
    """What there is to say, and the words of the `offbeat` command with which this host goes on.

    `PeerError` where there is none.
    """
    if lost.anew:
        return f"the run begins anew on the hosts that are left; joins it again at {lost.at}", _join(lost, lost.at)
    for index, text in enumerate(lost.successors):
        if index == lost.mine:
            return _continue(lost, index)
        if _listens(parse_place(text, "--successors")):
            return f"the host of the run is lost; joins the run again at {text}", _join(lost, text)
    if _listens(parse_place(lost.at, "--join")):
        return f"the host of the run is back; joins it again at {lost.at}", _join(lost, lost.at)
    raise PeerError(
        "the host of the run is lost, and "
        + ("none of its successors listens" if lost.successors else "it has no --successors")
    )


def _join(lost: LostRun, at: str) -> list[str]:
    words = ["work", "--join", at, "--learners", str(lost.here)]
    if lost.folder is None:
        return words
    # A copy of the run that another host continues is another run's.
    name = re.sub(r"-next(\d*)$", "", lost.folder.name)
    folders = (lost.folder.with_name(f"{name}-next{number or ''}") for number in itertools.count())
    return [*words, "--run-dir", str(next(folder for folder in folders if not folder.exists()))]


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
    words += ["--mirror"] if rest and lost.mirrors else []
    servers = lost.servers - 1
    words += ["--place", "spread" if servers > 1 else "first", "--servers", str(servers)] if lost.servers > 1 else []
    loss = Loss(
        why=f"the run's host at {lost.at}",
        update=update,
        updates=max(0, lost.seen - update),
        exact=lost.mirrored,
    )
    loss.note(RunDir(lost.folder))
    told = f"the host of the run is lost; this host continues the run from update {update} in {lost.folder}"
    many = "none, since each was mirrored before it was acknowledged" if lost.mirrored else f"at least {loss.updates}"
    return f"{told}; updates lost: {many}", words


def _listens(place: Place) -> bool:
    """Whether somebody listens there within `WAIT_S`."""
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError):
            socket.create_connection(place, _TRY_S).close()
            return True
        time.sleep(0.2)
    return False
