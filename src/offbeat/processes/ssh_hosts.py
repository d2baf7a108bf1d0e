"""Other hosts that ssh starts a part of the run on: `alice:4,bob:2`, and the command line for each.

    ssh -o BatchMode=yes alice sh -c 'cd DIR; exec PYTHON -m offbeat work --join ADDRESS:PORT --attached ...'

The program there reads the key from its standard input, so the key is in no file and in no list of processes. It leaves
the run when its standard input is closed, which ssh does when it ends: whoever is killed here, nothing is left there.
"""

from __future__ import annotations

import re
import shlex
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from offbeat.errors import RequestError
from offbeat.spec import parse_count

SSH = "ssh -o BatchMode=yes"  # nobody is there to type a password
MOST_HOSTS = 256
_NAME = re.compile(r"[A-Za-z0-9_\[][A-Za-z0-9_.@:%\[\]-]*")  # no dash at its start: that would be an option of ssh


class HostShare(NamedTuple):
    """A host as ssh names it, and how many learners it has. Text: `alice:4`."""

    name: str
    learners: int

    def __str__(self) -> str:
        return f"{self.name}:{self.learners}"

    @property
    def address(self) -> str:
        """Its name without the user: what is looked up."""
        return self.name.rpartition("@")[2].removeprefix("[").removesuffix("]")

    @property
    def is_here(self) -> bool:
        """Whether this is the host that starts the run, by its name; no name is looked up."""
        return self.address in ("localhost", socket.gethostname())


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProgram:
    """What is started for another host: `words` here, with `given` on its standard input, which stays open."""

    name: str
    words: tuple[str, ...]
    given: bytes = b""


def parse_hosts(text: str) -> tuple[HostShare, ...]:
    """`alice:4,me@bob:2`; `RequestError` for what is no host, or twice the same."""
    found = []
    for item in text.split(","):
        name, colon, count = item.strip().rpartition(":")
        if not colon or not _NAME.fullmatch(name):
            raise RequestError(f"expected HOST:LEARNERS,..., such as alice:4,bob:2; got '{text}'")
        found.append(HostShare(name, parse_count(count)))
    names = [host.name for host in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise RequestError(f"'{twice}' is named twice; give the number of all of its learners once")
    if len(found) > MOST_HOSTS:
        raise RequestError(f"expected at most {MOST_HOSTS} hosts; got {len(found)}")
    return tuple(found)


def others_of(hosts: Sequence[HostShare]) -> tuple[HostShare, ...]:
    """Those that are started over ssh. `RequestError` if there is none."""
    others = tuple(host for host in hosts if not host.is_here)
    if not others:
        raise RequestError("--hosts names this host only; use --learners instead")
    return others


def learners_on_this(hosts: Sequence[HostShare]) -> int | None:
    """The learners of this host, where the list names it."""
    return next((host.learners for host in hosts if host.is_here), None)


def host_program(
    host: HostShare, words: Sequence[str], *, ssh: str = SSH, python: str = "", given: bytes = b""
) -> HostProgram:
    """`offbeat WORDS` on another host, in the same folder as here where that exists, and by the same path of Python."""
    program = shlex.join([python or sys.executable, "-m", "offbeat", *words])
    script = f"cd {shlex.quote(str(Path.cwd()))} 2>/dev/null; exec {program}"
    command = f"exec sh -c {shlex.quote(script)}"  # whatever the shell of that user is
    return HostProgram(name=host.name, words=(*split_ssh(ssh), host.name, command), given=given)


def split_ssh(text: str) -> tuple[str, ...]:
    """The words of the command in the place of ssh."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise RequestError(f"--ssh: '{text}' is not a command: {error}") from None
    if not words:
        raise RequestError("--ssh: expected a command, such as 'ssh -p 2222'")
    return words
