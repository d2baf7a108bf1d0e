"""A port that stays open: who greets with the key is heard, and strangers hold nobody up."""

from __future__ import annotations

import socket
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from network.meeting import KEY
from offbeat.errors import PeerError, RequestError
from offbeat.network import port
from offbeat.network.connections import Place
from offbeat.network.keys import RunKey, derive
from offbeat.network.port import (
    Guest,
    Port,
    RefusedError,
    check_trust,
    dial,
    listen,
    parse_place,
    receive_all,
    send_all,
)
from offbeat.network.tls import TlsConnection, context_of

GREETING = b"hello 0123456789"


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen(Place("127.0.0.1", 0), "a test") as one:
        yield one


def place_of(listener: socket.socket) -> Place:
    return Place(*listener.getsockname()[:2])


def guests_at(opened: Port, wanted: int) -> list[Guest]:
    """So many guests, as they come; fewer where they do not come for long."""
    found: list[Guest] = []
    end_s = time.monotonic() + 10
    while len(found) < wanted and time.monotonic() < end_s:
        found += opened.poll(0.05)
    return found


def dialled(listener: socket.socket, key: RunKey | None, said: list[object]) -> threading.Thread:
    def call() -> None:
        try:
            said.append(dial(place_of(listener), key, GREETING, 10.0))
        except PeerError as error:
            said.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    return thread


def close_all(*met: object) -> None:
    for one in met:
        connection = one.connection if isinstance(one, Guest) else one
        if isinstance(connection, socket.socket | TlsConnection):
            connection.close()


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "key"])
def test_who_greets_is_heard_and_both_sides_can_speak(listener: socket.socket, key: RunKey | None) -> None:
    opened, said = Port(listener, key, len(GREETING)), list[object]()
    thread = dialled(listener, key, said)
    (guest,) = guests_at(opened, 1)
    thread.join()
    (mine,) = said
    assert not isinstance(mine, Exception)
    assert guest.greeting == GREETING and guest.address == "127.0.0.1"
    data = bytes(range(256)) * 1000
    sender = threading.Thread(target=send_all, args=(mine, [data[:7], data[7:]]))
    sender.start()
    got = bytearray(len(data))
    receive_all(guest.connection, memoryview(got))
    sender.join()
    close_all(guest, *said)
    assert bytes(got) == data


def test_another_key_and_no_key_are_not_let_in(listener: socket.socket) -> None:
    """With TLS 1.3 who dials may believe that it was let in, and finds out when it reads; it is not heard."""
    opened, said = Port(listener, KEY, len(GREETING)), list[object]()
    thread = dialled(listener, derive(b"the secret of another run"), said)
    with socket.create_connection(place_of(listener)) as plain:
        plain.sendall(GREETING)
        end_s = time.monotonic() + 10
        heard: list[Guest] = []
        while (not said or opened._newcomers) and time.monotonic() < end_s:
            heard += opened.poll(0.05)
        thread.join()
    close_all(*said)
    assert heard == [] and not opened._newcomers


def test_silent_strangers_do_not_hold_up_who_greets(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "MOST_GREETING", 4)
    opened, said = Port(listener, None, len(GREETING)), list[object]()
    with ExitStack() as strangers:
        silent = [strangers.enter_context(socket.create_connection(place_of(listener))) for _ in range(12)]
        silent[0].sendall(GREETING[:3])
        thread = dialled(listener, None, said)
        (guest,) = guests_at(opened, 1)
        thread.join()
        assert guest.greeting == GREETING
        assert len(opened._newcomers) <= 4
    opened.close()
    close_all(guest, *said)


def test_who_does_not_greet_in_time_is_dropped(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "GREETING_S", 0.05)
    opened = Port(listener, None, len(GREETING))
    with socket.create_connection(place_of(listener)) as silent:
        silent.settimeout(10)
        end_s = time.monotonic() + 10
        opened.poll(1.0)
        while opened._newcomers and time.monotonic() < end_s:
            opened.poll(0.05)
        assert silent.recv(1) == b""


def test_who_sends_a_byte_now_and_then_has_no_more_time(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(port, "GREETING_S", -1.0)
    opened = Port(listener, None, len(GREETING))
    with socket.create_connection(place_of(listener)) as slow:
        opened.poll(1.0)
        slow.sendall(GREETING[:1])
        opened.poll(1.0)
        assert not opened._newcomers


def test_where_nobody_listens_that_is_said(listener: socket.socket) -> None:
    place = place_of(listener)
    listener.close()
    with pytest.raises(RefusedError, match=rf"nobody listens on 127.0.0.1:{place.port}"):
        dial(place, None, GREETING, 5.0)


def test_without_a_key_nothing_leaves_this_host() -> None:
    beyond = Place("192.0.2.1", 7000)
    with pytest.raises(RequestError, match="there is no key"):
        check_trust(beyond, None, is_open=False, what="--listen")
    check_trust(beyond, KEY, is_open=False, what="--listen")
    check_trust(beyond, None, is_open=True, what="--listen")
    check_trust(Place("127.0.0.1", 7000), None, is_open=False, what="--listen")


@pytest.mark.parametrize("text", ["7000", "host", ":7000", "h:", "h:x", "10.0.0.1:70000", "h:" + "9" * 5000])
def test_an_address_without_a_port_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match=r"--join: expected ADDRESS:PORT"):
        parse_place(text, "--join")


def test_addresses_are_read(listener: socket.socket) -> None:
    assert parse_place("127.0.0.1:7000", "--join") == Place("127.0.0.1", 7000)
    assert parse_place("[::1]:7000", "--join") == Place("::1", 7000)
    with pytest.raises(RequestError, match=r"--listen: cannot listen on 127.0.0.1:\d+: Address already in use"):
        listen(place_of(listener), "--listen")


def test_who_has_not_shown_the_key_yet_costs_little_memory() -> None:
    context, pairs = context_of(KEY, server=True), [socket.socketpair() for _ in range(50)]
    tracemalloc.start()
    connections = [TlsConnection(one, context, server=True) for one, _ in pairs]
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 50 * 32 * 1024 and connections
    for one in (end for pair in pairs for end in pair):
        one.close()
