"""The checkpoint that a run goes on from, sent by the first rank to all others through their process group.

Ranks on other hosts cannot read the run's folder, so nobody but the first rank does. What is sent is encrypted where
the group is. Law: all ranks have the same bytes as the first, which has checked them.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist

from offbeat.train.checkpoint import Checkpoint, parse_tensors, serialise


def share(checkpoint: Checkpoint | None) -> Checkpoint | None:
    """The first rank's, on every rank of the default group; the others give None."""
    files = {} if checkpoint is None else {name: serialise(tensors) for name, tensors in checkpoint.files.items()}
    head = b""
    if checkpoint is not None:
        facts = {"path": str(checkpoint.path), "update": checkpoint.update, "state": checkpoint.state}
        head = json.dumps({**facts, "files": {name: len(data) for name, data in files.items()}}).encode()
    size = torch.tensor([len(head)])
    dist.broadcast(size, 0)
    if not int(size):
        return None
    facts = json.loads(_from_first(head, int(size)))
    received = {name: _from_first(files.get(name, b""), bytes_) for name, bytes_ in facts["files"].items()}
    if checkpoint is not None:
        return checkpoint
    return Checkpoint(
        path=Path(facts["path"]),
        update=facts["update"],
        state=facts["state"],
        files={name: parse_tensors(data, f"what rank 0 sent of {name}") for name, data in received.items()},
    )


def _from_first(data: bytes, size_bytes: int) -> bytes:
    """What the first rank gives, on all."""
    buffer = torch.empty(size_bytes, dtype=torch.uint8)
    if data:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, 0)
    return buffer.numpy().tobytes()
