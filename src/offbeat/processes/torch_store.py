"""A process that keeps torch's store for the programs of a run, on a socket that it was handed; nothing is printed.

    python torch_store.py DESCRIPTOR PORT

Whoever reaches the port can fill the store: its memory has a limit, so that only this process ends by that.
"""

from __future__ import annotations

import resource
import signal
import sys
from pathlib import Path

MOST_BYTES = 1 << 30  # beside what torch itself takes


def keep_store(descriptor: int, port: int) -> None:
    """Until this process is killed."""
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    used = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + MOST_BYTES, used + MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while store is not None:
        signal.pause()


if __name__ == "__main__":
    keep_store(int(sys.argv[1]), int(sys.argv[2]))
