"""torch's monitored barrier: a barrier after which rank 0 can say who did not come.

Every other rank tells rank 0 that it is there and waits for its answer. `dist.monitored_barrier` refuses every backend
but Gloo by name, so this is called on the group itself. The words of the errors are those that torch's users know.
"""

from __future__ import annotations

import time

import torch

from offbeat.collectives.calls import MessagePort
from offbeat.collectives.tensors import Flat
from offbeat.collectives.transport import SharedMemory
from offbeat.errors import PeerError

_TAG = -(2**40)  # no user's


def monitored_barrier(
    transport: SharedMemory, messages: MessagePort, timeout_s: float | None, wait_all_ranks: bool
) -> None:
    """`PeerError` on rank 0 names the first rank that did not come, or all of them; the others are told too."""
    transport.check()
    seconds = transport.timeout_s if timeout_s is None else timeout_s
    end = time.monotonic() + seconds
    if transport.rank != 0:
        messages.send(torch.ones(1, dtype=torch.uint8), 0, _TAG)
        answer = torch.zeros(1, dtype=torch.uint8)
        try:
            messages.receive(Flat(answer), 0, _TAG, seconds).wait()
        except PeerError:
            answer.zero_()
        if not answer.item():
            raise PeerError(
                f"Rank {transport.rank} successfully reached monitoredBarrier, but received errors while waiting for"
                " send/recv from rank 0. Please check rank 0 logs for faulty rank."
            )
        return
    if seconds <= 0:
        raise PeerError("Rank 0 timed out in monitoredBarrier after 0 ms.")
    missing = []
    for peer in transport.others:
        try:
            there = Flat(torch.zeros(1, dtype=torch.uint8))
            messages.receive(there, peer, _TAG, max(0.0, end - time.monotonic())).wait()
        except PeerError:
            missing.append(peer)
            if not wait_all_ranks:
                break
    for peer in transport.others:
        if peer not in missing:
            messages.send(torch.tensor([not missing], dtype=torch.uint8), peer, _TAG)
    if missing:
        names = ", ".join(str(peer) for peer in missing)
        plural = "s" if wait_all_ranks else ""
        raise PeerError(
            f"Rank{plural} {names} failed to pass monitoredBarrier in {1000 * seconds:.0f} ms",
            ranks=tuple(transport.names[peer] for peer in missing),
        )
