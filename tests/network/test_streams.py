"""Pieces come out of a link as they went in, over one stream or several; what is wrong is noticed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from offbeat.network.streams import HEADER_BYTES, PIECE_BYTES, TAG_BYTES, ClosedError, Link, MismatchError, pieces_of

TAG, OTHER = b"a" * TAG_BYTES, b"b" * TAG_BYTES
SIZES = (1, 100, PIECE_BYTES, PIECE_BYTES + 1, 7 * PIECE_BYTES - 5)


def connected(streams: int) -> tuple[Link, Link]:
    pairs = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(streams):
            one = socket.create_connection(server.getsockname())
            one.settimeout(None)
            pairs.append((one, server.accept()[0]))
    return Link([one for one, _ in pairs]), Link([other for _, other in pairs])


@pytest.fixture
def links() -> Iterator[Callable[[int], tuple[Link, Link]]]:
    made: list[Link] = []

    def make(streams: int) -> tuple[Link, Link]:
        pair = connected(streams)
        made.extend(pair)
        return pair

    yield make
    for link in made:
        link.shut()
        link.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "offbeat sender"]


def nothing() -> None:
    pass


def receive(link: Link, size: int, tag: bytes = TAG) -> bytes:
    got = bytearray(size)
    for offset, piece in pieces_of(size):
        link.receive(tag, offset, memoryview(got)[offset : offset + piece], nothing)
    link.end_receive()
    return bytes(got)


@pytest.mark.parametrize("streams", [1, 2, 4])
def test_what_is_sent_comes_whole_and_in_order(links: Callable[[int], tuple[Link, Link]], streams: int) -> None:
    one, other = links(streams)
    sent = [bytes([number + 1]) * size for number, size in enumerate(SIZES * 3)]
    for each in sent:
        one.send(TAG, memoryview(each), each)
        other.send(TAG, memoryview(each), each)
    for link in (one, other):
        assert [receive(link, len(each)) for each in sent] == sent
    for link in (one, other):
        link.wait_sent(len(sent), nothing)


def test_memory_may_change_when_its_send_is_through(links: Callable[[int], tuple[Link, Link]]) -> None:
    one, other = links(1)
    memory = bytearray(b"x" * (20 * PIECE_BYTES))
    came: list[bytes] = []
    reader = threading.Thread(target=lambda: came.append(receive(other, len(memory))))
    reader.start()
    one.send(TAG, memoryview(memory), memory)
    one.wait_sent(1, nothing)
    memory[:] = b"y" * len(memory)
    reader.join()
    assert came == [b"x" * len(memory)]


def test_a_send_that_nobody_receives_is_waited_for_and_looked_after(links: Callable[[int], tuple[Link, Link]]) -> None:
    one, _ = links(1)
    memory = bytes(64 * 1024 * 1024)
    one.send(TAG, memoryview(memory), memory)

    def look() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        one.wait_sent(1, look)


@pytest.mark.parametrize("streams", [1, 3])
def test_another_tag_or_size_is_a_mismatch(links: Callable[[int], tuple[Link, Link]], streams: int) -> None:
    one, other = links(streams)
    one.send(OTHER, memoryview(b"12345"), None)
    with pytest.raises(MismatchError) as raised:
        receive(other, 5)
    assert raised.value.tag == OTHER
    one, other = links(streams)
    one.send(TAG, memoryview(b"12345"), None)
    with pytest.raises(MismatchError):
        receive(other, 4)


def test_a_peer_that_is_gone_ends_the_wait_for_it(links: Callable[[int], tuple[Link, Link]]) -> None:
    one, other = links(1)
    one.send(TAG, memoryview(b"12345"), None)
    one.shut()
    assert receive(other, 5) == b"12345", "what was sent before still comes"
    with pytest.raises(ClosedError):
        receive(other, 1)


def test_rubbish_is_refused_before_it_sizes_anything() -> None:
    one, other = socket.socketpair()
    link = Link([other])
    one.sendall(b"\xff" * HEADER_BYTES)
    with pytest.raises(ClosedError, match="not a piece of this protocol"):
        receive(link, 10)
    one.close()
    link.close()
