"""What is known of the machine that a number was measured on: flat facts for a JSON file.

Laws: nothing here raises for what a system does not tell, waits, or looks at a clock. It must not know torch: what only
torch knows, the caller gives.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def machine_facts(*, torch: str | None = None, device: str | None = None, threads: int | None = None) -> dict[str, Any]:
    """Facts that explain a number; to be asked for before anything is started, because of the load.

    `torch` is its version, `threads` are those of one learner. What is not given is left out.
    """
    import platform  # as slow to load as ten of our files

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    facts = {"cores": cores, "load": _load(), "processor": _processor(), "python": platform.python_version()}
    given = {"torch": torch, "device": device, "threads": threads}
    return facts | {name: value for name, value in given.items() if value is not None}


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


def _processor() -> str:
    import platform

    named = (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name"))
    return next(named, platform.machine())


def available_bytes() -> int | None:
    """Memory that a new program can have; None where the system does not tell."""
    told = (line for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:"))
    return next((int(line.split()[1]) * 1024 for line in told), None)


def forked_bytes() -> int | None:
    """Memory that a fork of this process has from the start; None where the system does not tell.

    Files that are mapped, like libraries, are not in it: a fork maps them again as it uses them.
    """
    told = (line for line in _lines("/proc/self/status") if line.startswith("RssAnon:"))
    return next((int(line.split()[1]) * 1024 for line in told), None)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
