"""Pieces come out of a link as they went in, over one stream or several; what is wrong is noticed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from itertools import cycle

import pytest

from network.meeting import KEY, connected_pairs
from offbeat.network.keys import RunKey
from offbeat.network.streams import (
    HEADER_BYTES,
    PIECE_BYTES,
    TAG_BYTES,
    ClosedError,
    Link,
    MismatchError,
    Outbox,
    pieces_of,
    streams_for,
    streams_worth_it,
)

TAG, OTHER = b"a" * TAG_BYTES, b"b" * TAG_BYTES
SIZES = (1, 100, PIECE_BYTES, PIECE_BYTES + 1, 7 * PIECE_BYTES - 5)


Outboxes = tuple[Outbox | None, Outbox | None]


@pytest.fixture(params=[None, KEY], ids=["open", "key"])
def key(request: pytest.FixtureRequest) -> RunKey | None:
    """Everything here is true with a key and without."""
    found: RunKey | None = request.param
    return found


def connected(streams: int, key: RunKey | None, outboxes: Outboxes = (None, None)) -> tuple[Link, Link]:
    pairs = connected_pairs(streams, key)
    return Link([one for one, _ in pairs], outboxes[0]), Link([other for _, other in pairs], outboxes[1])


@pytest.fixture
def links(key: RunKey | None) -> Iterator[Callable[[int], tuple[Link, Link]]]:
    made: list[Link] = []

    def make(streams: int) -> tuple[Link, Link]:
        pair = connected(streams, key)
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


@pytest.mark.parametrize("streams", [1, 4])
def test_a_peer_that_is_gone_ends_the_wait_for_it(links: Callable[[int], tuple[Link, Link]], streams: int) -> None:
    one, other = links(streams)
    one.send(TAG, memoryview(b"12345"), None)
    one.shut()
    assert receive(other, 5) == b"12345", "what was sent before still comes"
    with pytest.raises(ClosedError):
        receive(other, 1)


def test_rubbish_is_refused_before_it_sizes_anything(key: RunKey | None) -> None:
    ((one, other),) = connected_pairs(1, key)
    link = Link([other])
    one.sendmsg([b"\xff" * HEADER_BYTES])
    with pytest.raises(ClosedError, match="not a piece of this protocol"):
        receive(link, 10)
    one.close()
    link.close()


# --- sent by the caller's own thread ---------------------------------------------------------------------------------


@pytest.fixture
def exchanging(key: RunKey | None) -> Iterator[tuple[Link, Link]]:
    pair = connected(1, key, (Outbox(), Outbox()))
    yield pair
    for link in pair:
        link.shut()
        link.close()


def test_two_that_send_much_and_then_receive_do_not_wait_for_each_other(exchanging: tuple[Link, Link]) -> None:
    sent = [bytes([number]) * (40 * PIECE_BYTES) for number in range(2)]
    came: dict[int, bytes] = {}

    def exchange(number: int) -> None:
        exchanging[number].send(TAG, memoryview(sent[number]), sent[number])
        came[number] = receive(exchanging[number], len(sent[number]))
        exchanging[number].wait_sent(1, nothing)

    threads = [threading.Thread(target=exchange, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert came == {0: sent[1], 1: sent[0]}
    assert not [thread for thread in threading.enumerate() if thread.name == "offbeat sender"]


def test_a_wait_for_a_peer_ends_when_more_can_be_sent_to_it(exchanging: tuple[Link, Link]) -> None:
    one, other = exchanging
    much = bytes(64 * PIECE_BYTES)
    looks: list[None] = []
    one.send(TAG, memoryview(much), much)

    def answer() -> None:
        assert receive(other, len(much)) == much
        other.send(TAG, memoryview(b"12345"), None)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    one.receive(TAG, 0, memoryview(bytearray(5)), lambda: looks.append(None))
    thread.join(30)
    assert len(looks) < 10, "a look for each slice of time in which nothing could be sent, of 64 pieces"


def test_who_waits_for_one_peer_goes_on_sending_to_another(key: RunKey | None) -> None:
    outbox = Outbox()
    (here, far), (here2, far2) = (connected(1, key, (outbox, None)) for _ in range(2))
    much = bytes(40 * PIECE_BYTES)
    here.send(TAG, memoryview(much), much)
    came: list[bytes] = []

    def relay() -> None:  # answers on the second link when all has come on the first
        came.append(receive(far, len(much)))
        far2.send(TAG, memoryview(b"answer"), None)

    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    assert receive(here2, 6) == b"answer"
    thread.join(30)
    assert came == [much] and outbox.waiting == []
    for link in (here, far, here2, far2):
        link.shut()
        link.close()


def test_a_send_to_one_that_is_gone_is_an_error_of_the_wait_for_it(exchanging: tuple[Link, Link]) -> None:
    one, other = exchanging
    much = bytes(64 * PIECE_BYTES)
    one.send(TAG, memoryview(much), much)
    other.shut()
    other.close()
    with pytest.raises(ClosedError):
        one.wait_sent(1, nothing)


def test_a_send_that_nobody_takes_is_looked_after_by_the_caller(exchanging: tuple[Link, Link]) -> None:
    much = bytes(64 * 1024 * 1024)
    exchanging[0].send(TAG, memoryview(much), much)

    def look() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        exchanging[0].wait_sent(1, look)
    with pytest.raises(TimeoutError):
        exchanging[0].receive(TAG, 0, memoryview(bytearray(5)), look)


# --- how many streams ------------------------------------------------------------------------------------------------


def test_the_number_of_streams_can_change_between_sends_and_then_be_kept(key: RunKey | None) -> None:
    one, other = connected(4, key, (Outbox(), Outbox()))
    sent = bytes(range(256)) * (5 * PIECE_BYTES // 256)
    for count in (1, 2, 4, 1, 2):
        for link in (one, other):
            link.use(count)
        reader = threading.Thread(target=one.wait_sent, args=(one.sends + 1, nothing), daemon=True)
        one.send(TAG, memoryview(sent), sent)
        reader.start()
        assert receive(other, len(sent)) == sent
        reader.join(30)
    for link in (one, other):
        link.keep(2)
        assert len(link._streams) == 2
    one.send(TAG, memoryview(b"still"), None)
    assert receive(other, 5) == b"still"
    for link in (one, other):
        link.shut()
        link.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "offbeat sender"]


class FakeNetwork:
    """Sends take the seconds that it was told, in turn; `tried` is what was measured."""

    def __init__(self, seconds: dict[int, list[float]]) -> None:
        self._seconds = {streams: cycle(those) for streams, those in seconds.items()}
        self.tried: list[int] = []

    def time_s(self, streams: int) -> float:
        self.tried.append(streams)
        return next(self._seconds[streams])


@pytest.mark.parametrize(
    ("seconds", "chosen", "tried"),
    [
        ({1: [0.02], 2: [0.02]}, 1, 2),  # a line that is full
        ({1: [0.02], 2: [0.0192]}, 1, 2),  # gains 4 %
        ({1: [0.02], 2: [0.0188], 4: [0.0184]}, 2, 4),  # gains 6 %, and then 2 %
        ({1: [0.02], 2: [0.01], 4: [0.005], 8: [0.0025]}, 8, 8),
        ({1: [0.02], 2: [0.04]}, 1, 2),  # they hold each other up
        ({1: [0.02, 0.02, 0.3, 0.04, 0.5], 2: [0.02]}, 1, 2),  # somebody was in the way of the one
        ({1: [0.02], 2: [0.02, 0.01, 0.02, 0.02, 0.02]}, 1, 2),  # the two were lucky once
    ],
)
def test_twice_as_many_streams_are_tried_as_long_as_they_gain(
    seconds: dict[int, list[float]], chosen: int, tried: int
) -> None:
    network = FakeNetwork(seconds)
    assert streams_worth_it(8, 1.0, network.time_s) == chosen
    assert max(network.tried) == tried


def test_the_time_for_trying_streams_is_bounded() -> None:
    network = FakeNetwork({1: [0.4], 2: [0.2], 4: [0.1]})
    assert streams_worth_it(8, 1.0, network.time_s) == 2
    assert network.tried == [1, 2, 1, 2], "1.2 s: another turn, or 4 streams, would be more"


def test_no_more_streams_are_tried_than_there_are() -> None:
    network = FakeNetwork({1: [0.02], 2: [0.01]})
    assert streams_worth_it(2, 1.0, network.time_s) == 2
    assert max(network.tried) == 2


def test_many_peers_get_fewer_streams_each() -> None:
    assert [streams_for(peers) for peers in (1, 8, 9, 16, 17, 32, 33, 500)] == [8, 8, 4, 4, 2, 2, 1, 1]
