"""`offbeat train` under torchrun on hosts of a lab, each with a folder of its own: only the network is shared."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from offbeat.lab import Lab
from offbeat.lab.control import HostProcess
from offbeat.train.tasks import Tensors
from train.programs import norm_net, train_words
from train.runs import points

TESTS = Path(__file__).parents[1]
PORT = "29400"


def folder_of(folder: Path, host: int) -> Path:
    """Where the commands of a host run."""
    own = folder / f"host{host}"
    own.mkdir(exist_ok=True)
    return own


def start(
    lab: Lab,
    folder: Path,
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    ranks: int = 2,
    elastic: str = "",
    hosts: Sequence[int] | None = None,
    before: Mapping[int, Sequence[str]] | None = None,
) -> list[HostProcess]:
    """torchrun on each host, with so many ranks. `elastic` is what --nnodes says, where hosts may come and go; `before`
    are words in front of the command of a host."""
    here = range(lab.network.hosts) if hosts is None else hosts
    if elastic:
        where = ["--nnodes", elastic, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{{host0}}:{PORT}"]
        where += ["--rdzv-id", "lab", "--max-restarts", "3"]
    else:
        where = ["--nnodes", str(len(here)), "--node-rank", "{host}", "--master-addr", "{host0}", "--master-port", PORT]
    launch = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *where]
    command = [*launch, "--nproc-per-node", str(ranks), "-m", "offbeat", *words]
    paths = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **environment}
    own = {name: value for name, value in given.items() if value}
    return [
        lab.start(
            host,
            [*(before or {}).get(host, ()), *command],
            environment=own,
            directory=str(folder_of(folder, host)),
        )
        for host in here
    ]


def finish(processes: Sequence[HostProcess], code: int = 0, timeout_s: float = 180) -> list[str]:
    for process in processes:
        assert process.wait(timeout_s=timeout_s) == code, process.output
    return [process.output for process in processes]


def wait_for_file(path: Path, timeout_s: float = 120) -> None:
    end_s = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < end_s, f"no {path}"
        time.sleep(0.01)


def words_for(sync: str, **options: Any) -> list[str]:
    """As for forked learners; how many there are is torchrun's to say."""
    words = train_words(sync, 4, **options)
    at = words.index("--learners")
    return words[:at] + words[at + 2 :]


# --- what is trained ------------------------------------------------------------------------------------------------


class Waits(nn.Module):
    """Rank 2, which is on host 1: in its n-th forward it says so by a file, and computes no more until it is killed."""

    def __init__(self, marker: str, at: int) -> None:
        super().__init__()
        self.net, self.marker, self.left = norm_net(), Path(marker), at

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and os.environ.get("RANK") == "2":
            self.left -= 1
            if self.left == 0 and not self.marker.exists():
                self.marker.touch()
                signal.pause()
        outputs: Tensor = self.net(inputs)
        return outputs


def waits(marker: str, at: int = 5) -> nn.Module:
    return Waits(marker, at)


def local_points(samples: int = 96) -> tuple[Tensors, Tensors]:
    """Data that a host has, if it has the file; the file says of how many samples, where it says something."""
    path = Path("points.txt")
    if not path.exists():
        raise FileNotFoundError("no points.txt in this folder")
    return points(int(path.read_text() or samples))
