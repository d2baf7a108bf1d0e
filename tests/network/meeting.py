"""Ranks that meet over TCP within one process, each in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from offbeat.network.connections import Listener
from offbeat.network.keys import RunKey, derive
from offbeat.network.tls import Stream

TOKEN = b"t" * 16
KEY = derive(b"a secret of this run")
Met = dict[int, dict[int, list[Stream]]]


def met_by(listeners: list[Listener], streams: int, key: RunKey | None, late: Callable[[], None] = lambda: None) -> Met:
    """The streams of each rank to each other one. The last rank comes when `late` has returned."""
    places = {rank: one.place for rank, one in enumerate(listeners)}
    met: Met = {}

    def meet_others(rank: int) -> None:
        others = {peer: place for peer, place in places.items() if peer != rank}
        met[rank] = listeners[rank].meet(rank, others, streams, TOKEN, 20.0, key)

    threads = [threading.Thread(target=meet_others, args=(rank,)) for rank in range(len(listeners))]
    for thread in threads[:-1]:
        thread.start()
    late()
    threads[-1].start()
    for thread in threads:
        thread.join()
    assert len(met) == len(listeners)
    return met


def close_all(listeners: list[Listener], met: Met) -> None:
    for connected in met.values():
        for streams in connected.values():
            for one in streams:
                one.close()
    for listener in listeners:
        listener.close()


def connected_pairs(streams: int, key: RunKey | None) -> list[tuple[Stream, Stream]]:
    """Both ends of so many streams."""
    listeners = [Listener("127.0.0.1") for _ in range(2)]
    met = met_by(listeners, streams, key)
    for listener in listeners:
        listener.close()
    return list(zip(met[0][1], met[1][0], strict=True))
