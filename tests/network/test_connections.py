"""Processes meet over TCP: each with each, strangers left out, nothing listening afterwards."""

from __future__ import annotations

import socket
import threading

import pytest

from offbeat.network.connections import Listener, Unreachable

TOKEN = b"t" * 16


def test_everybody_gets_as_many_connections_to_everybody_in_the_same_order() -> None:
    listeners = [Listener("127.0.0.1") for _ in range(3)]
    places = {rank: one.place for rank, one in enumerate(listeners)}
    met: dict[int, dict[int, list[socket.socket]]] = {}

    def meet(rank: int) -> None:
        others = {peer: place for peer, place in places.items() if peer != rank}
        met[rank] = listeners[rank].meet(rank, others, 2, TOKEN, 10.0)

    stranger = socket.create_connection(places[0])  # says nothing, and is not answered
    stranger.sendall(b"GET / HTTP/1.1\r\n" * 10)
    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(3):
        for peer in range(3):
            for stream in range(2) if rank != peer else ():
                assert met[rank][peer][stream].getsockname() == met[peer][rank][stream].getpeername()
    for connections in met.values():
        for sockets in connections.values():
            for one in sockets:
                one.close()
    for listener in listeners:
        listener.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(places[0])
    stranger.close()


def test_who_does_not_come_is_named() -> None:
    listener = Listener("127.0.0.1")
    nobody = Listener("127.0.0.1")
    nobody.close()
    with pytest.raises(Unreachable) as raised:
        listener.meet(1, {0: nobody.place}, 1, TOKEN, 5.0)
    assert raised.value.peer == 0
    with pytest.raises(Unreachable, match=r"did not connect within 0.3 s") as late:
        listener.meet(0, {7: nobody.place}, 1, TOKEN, 0.3)
    assert late.value.peer == 7
    listener.close()
