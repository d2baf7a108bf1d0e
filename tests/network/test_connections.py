"""Processes meet over TCP: each with each, strangers left out, nothing listening afterwards."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest

from network.meeting import KEY, TOKEN, close_all, met_by
from offbeat.network import connections
from offbeat.network.connections import Listener, Place, Unreachable
from offbeat.network.keys import RunKey, derive
from offbeat.network.tls import Stream, TlsStream, context_of

KEYS = [None, KEY]
IDS = ["open", "key"]


def send(one: Stream, data: bytes) -> None:
    assert one.sendmsg([data]) == len(data)


def receive(one: Stream, size: int) -> bytes:
    got = bytearray(size)
    end_s, done = time.monotonic() + 10, 0
    while done < size and time.monotonic() < end_s:
        with suppress(BlockingIOError):
            done += one.recvmsg_into([memoryview(got)[done:]], 0, socket.MSG_WAITALL)[0]
    return bytes(got)


@pytest.mark.parametrize("key", KEYS, ids=IDS)
def test_everybody_gets_as_many_streams_to_everybody_in_the_same_order(key: RunKey | None) -> None:
    listeners = [Listener("127.0.0.1") for _ in range(3)]
    met = met_by(listeners, 2, key)
    for rank in range(3):
        for peer in range(3):
            for stream in range(2) if rank != peer else ():
                assert isinstance(met[rank][peer][stream], TlsStream) == (key is not None)
                send(met[rank][peer][stream], said := b"%d %d %d" % (rank, peer, stream))
                assert receive(met[peer][rank][stream], len(said)) == said
    close_all(listeners, met)


@pytest.mark.parametrize("key", KEYS, ids=IDS)
def test_who_does_not_come_is_named(key: RunKey | None) -> None:
    listener = Listener("127.0.0.1")
    nobody = Listener("127.0.0.1")
    nobody.close()
    with pytest.raises(Unreachable) as raised:
        listener.meet(1, {0: nobody.place}, 1, TOKEN, 5.0, key)
    assert raised.value.peer == 0
    with pytest.raises(Unreachable, match=r"did not connect within 0.3 s") as late:
        listener.meet(0, {7: nobody.place}, 1, TOKEN, 0.3, key)
    assert late.value.peer == 7
    listener.close()


@pytest.mark.parametrize("key", KEYS, ids=IDS)
def test_nobody_listens_when_all_have_met(key: RunKey | None) -> None:
    listeners = [Listener("127.0.0.1") for _ in range(2)]
    close_all(listeners, met_by(listeners, 1, key))
    for listener in listeners:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(listener.place)


# --- strangers --------------------------------------------------------------------------------------------------------


def silent(place: Place) -> socket.socket:
    return socket.create_connection(place)


def random_bytes(place: Place) -> socket.socket:
    one = socket.create_connection(place)
    one.sendall(b"GET / HTTP/1.1\r\n" * 10)
    return one


def half_a_handshake(place: Place) -> socket.socket:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    half = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    half.check_hostname = False
    with pytest.raises(ssl.SSLWantReadError):
        half.wrap_bio(incoming, outgoing).do_handshake()
    one = socket.create_connection(place)
    one.sendall(outgoing.read()[:100])
    return one


def wrong_key(place: Place) -> socket.socket | None:
    return handshaken(place, context_of(derive(b"another run's"), server=False))


def no_key(place: Place) -> socket.socket | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return handshaken(place, context)


def old_tls(place: Place) -> socket.socket | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    return handshaken(place, context)


def no_tls(place: Place) -> socket.socket:
    one = socket.create_connection(place)
    one.sendall(hello(1, 0, 0))
    return one


def handshaken(place: Place, context: ssl.SSLContext) -> socket.socket | None:
    one = socket.create_connection(place, timeout=5.0)
    with suppress(OSError), context.wrap_socket(one) as secured:  # its side of TLS 1.3 ends before ours has looked
        secured.write(hello(1, 0, 0))
        assert secured.read(100) == b"", "a stranger was answered"
    return None


def hello(rank: int, peer: int, number: int, *, protocol: int = connections.PROTOCOL, token: bytes = TOKEN) -> bytes:
    return struct.pack("<8sIIII16s", b"offbeat\1", protocol, rank, peer, number, token)


STRANGERS = [silent, random_bytes, half_a_handshake, wrong_key, no_key, old_tls, no_tls]


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_is_dropped_and_harms_nobody(stranger: Callable[[Place], socket.socket | None]) -> None:
    listeners = [Listener("127.0.0.1") for _ in range(2)]
    held: list[socket.socket | None] = []
    met = met_by(listeners, 1, KEY, lambda: held.extend(stranger(listeners[0].place) for _ in range(3)))
    send(met[1][0][0], b"right")
    assert receive(met[0][1][0], 5) == b"right"
    for one in filter(None, held):
        one.settimeout(5.0)
        with one, suppress(ConnectionResetError):
            assert one.recv(100)[:1] in (b"", b"\x15"), "it is told nothing, or by an alert of TLS that it is refused"
            assert one.recv(100) == b""
    close_all(listeners, met)


@pytest.mark.parametrize(
    "said",
    [
        hello(1, 0, 0, protocol=1),
        hello(1, 0, 0, token=b"?" * 16),
        hello(0, 0, 0),
        hello(1, 0, 99),
        hello(9, 0, 0),
        b"x",
    ],
    ids=["protocol", "token", "rank", "number", "unknown rank", "length"],
)
@pytest.mark.parametrize("key", KEYS, ids=IDS)
def test_a_wrong_greeting_is_not_answered(key: RunKey | None, said: bytes) -> None:
    listeners = [Listener("127.0.0.1") for _ in range(2)]
    answers: list[bytes] = []

    def greet() -> None:
        one = socket.create_connection(listeners[0].place, timeout=5.0)
        if key is not None:
            one = context_of(key, server=False).wrap_socket(one)
        one.sendall(said)
        if len(said) > 1:
            with suppress(ConnectionResetError):
                answers.append(one.recv(100))
        one.close()

    met = met_by(listeners, 1, key, greet)
    assert not any(answers)
    close_all(listeners, met)


def test_more_silent_connections_than_the_limit_do_not_keep_a_peer_out() -> None:
    listeners = [Listener("127.0.0.1") for _ in range(2)]
    with ExitStack() as held:

        def crowd() -> None:
            for _ in range(2 * connections.MOST_GREETING):
                held.enter_context(silent(listeners[0].place))

        begun_s = time.monotonic()
        close_all(listeners, met_by(listeners, 2, KEY, crowd))
        assert time.monotonic() - begun_s < connections.GREETING_S, "nobody was waited for"


def test_a_crowd_from_elsewhere_takes_no_place_of_those_at_the_address_of_a_peer() -> None:
    listeners = [Listener("127.0.0.1") for _ in range(2)]
    with ExitStack() as held:

        def crowd() -> None:
            slow = held.enter_context(silent(listeners[0].place))
            others = [
                held.enter_context(socket.create_connection(listeners[0].place, 5.0, (f"127.0.0.{9 + at % 3}", 0)))
                for at in range(2 * connections.MOST_GREETING)
            ]
            assert others[0].recv(1) == b"", "the oldest of them is dropped"
            slow.settimeout(0.1)
            with pytest.raises(TimeoutError):
                slow.recv(1)

        close_all(listeners, met_by(listeners, 1, KEY, crowd))


@pytest.mark.parametrize("keys", [(KEY, derive(b"another")), (KEY, None)], ids=["wrong", "none"])
def test_two_that_do_not_have_the_same_key_do_not_meet(
    keys: tuple[RunKey, RunKey | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_ATTEMPTS", 2)
    listeners = [Listener("127.0.0.1") for _ in range(2)]
    failed: dict[int, str] = {}

    def meet_other(rank: int) -> None:
        try:
            listeners[rank].meet(rank, {1 - rank: listeners[1 - rank].place}, 1, TOKEN, 0.5, keys[rank])
        except Unreachable as error:
            failed[rank] = str(error)

    threads = [threading.Thread(target=meet_other, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "it did not connect within 0.5 s" in failed[0]
    assert "does not have the same key" in failed[1] or "did not answer as a rank of this group" in failed[1]
    for listener in listeners:
        listener.close()
