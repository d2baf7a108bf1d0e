"""An address is what the kernel says of a connection."""

from __future__ import annotations

import socket

import pytest

from offbeat.errors import RequestError
from offbeat.network.addresses import addresses_that_reached, own_address


def test_the_address_is_that_of_the_socket_that_reached_the_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.3", 0)):
            assert addresses_that_reached(port) == ["127.0.0.3"]
            found = own_address(port, {})
            assert found.address == "127.0.0.3" and found.is_loopback
        assert addresses_that_reached(port) == []


def test_an_ipv4_address_in_the_table_of_ipv6_is_read_as_one() -> None:
    with socket.socket(socket.AF_INET6) as server:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("::", 0))
        server.listen()
        port = server.getsockname()[1]
        with socket.socket(socket.AF_INET6) as one:
            one.connect(("::ffff:127.0.0.1", port))
            assert addresses_that_reached(port) == ["127.0.0.1"]


def test_an_interface_can_be_named() -> None:
    assert own_address(None, {"OFFBEAT_INTERFACE": "lo"}).address == "127.0.0.1"
    with pytest.raises(RequestError, match="OFFBEAT_INTERFACE"):
        own_address(None, {"OFFBEAT_INTERFACE": "nonesuch"})


def test_a_process_without_a_store_is_told_to_name_one() -> None:
    with pytest.raises(RequestError, match="set OFFBEAT_INTERFACE"):
        own_address(None, {})


def test_no_hostname_is_ever_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: object) -> None:
        raise AssertionError("a name was resolved")

    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "getfqdn"):
            monkeypatch.setattr(socket, name, refuse)
        own_address(server.getsockname()[1], {})
