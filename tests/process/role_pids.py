"""Which process of a run has which role, told from what the kernel knows: parents, sockets, memory. For hosts of a lab.

    python -m process.role_pids ROLE SIGNAL [WHICH]  # to a process of this host: sends the signal, prints its pid
    python -m process.role_pids all 0                # of each role: how many processes, KiB of memory, descriptors

The roles on the host of a run: coordinator, server, gateway, road. On a host that has joined: learner.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path

ROLES = ("coordinator", "server", "gateway", "road", "learner")


def sockets_of(pid: int) -> set[str]:
    found = set()
    for path in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):
            found.add(str(path.readlink()))
    return found


def children_of() -> dict[int, list[int]]:
    """Of every process of this host, in the order in which they were started."""
    found: dict[int, list[int]] = {}
    for path in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError):
            parent = int(path.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            found.setdefault(parent, []).append(int(path.name))
    return found


def listening(table: str, pattern: str) -> set[str]:
    """Sockets that listen, as links of /proc/PID/fd name them."""
    text = Path(f"/proc/net/{table}").read_text()
    return {f"socket:[{one}]" for one in re.findall(pattern, text, re.MULTILINE)}


def find(role: str, which: int = -1) -> int:
    """The pid of a process that has this role: of those there are, this one. 0 if there is none."""
    found = find_all()[role]
    return found[which % len(found)] if found else 0


def find_all() -> dict[str, list[int]]:
    """The pids of all processes of a role, in the order of the programs to which they belong."""
    children = children_of()
    roots = [pid for pid in children.get(1, []) if _is_ours(pid)]
    roles: dict[str, list[int]] = {name: [] for name in ROLES}
    ports = listening("tcp", r"^\s*\d+: \S+ \S+ 0A (?:\S+ +){5}(\d+)")
    names = listening("unix", r"^\S+: \S+ \S+ 00010000 \S+ 01 +(\d+) @offbeat-")
    for root in roots:
        kept = {pid: sockets_of(pid) for pid in children.get(root, ())}
        gateway = next((pid for pid, links in kept.items() if links & ports), 0)
        coordinator = next((pid for pid, links in kept.items() if links & names), 0)
        others = [pid for pid in kept if pid not in (gateway, coordinator)]
        here = {
            "coordinator": [coordinator] if coordinator else [],
            "gateway": [gateway] if gateway else [],
            "road": children.get(gateway, []),
            "server": [pid for pid in others if _shares_output(root, pid)],
            "learner": [pid for pid in others if not _shares_output(root, pid)],
        }
        for role in ROLES:
            roles[role] += here[role]
    return roles


def _is_ours(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"-m\0offbeat\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _shares_output(one: int, other: int) -> bool:
    """Services print where the run does; what learners print goes through a pipe."""
    return Path(f"/proc/{one}/fd/1").readlink() == Path(f"/proc/{other}/fd/1").readlink()


def tell_all() -> None:
    for role, pids in find_all().items():
        known = [(told, len(sockets_of(pid))) for pid in pids if (told := _resident_kib(pid))]
        if known and role != "learner":
            print(role, len(known), sum(kib for kib, _ in known), sum(count for _, count in known))


def _resident_kib(pid: int) -> int:
    """Of its own: the servers' memory is shared."""
    with contextlib.suppress(OSError):
        said = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
        return int(said[1]) if said else 0
    return 0


def main(words: list[str]) -> int:
    if words[0] == "all":
        tell_all()
        return 0
    pid = find(words[0], *map(int, words[2:]))
    if not pid:
        return 1
    os.kill(pid, int(words[1]))
    print(pid)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
