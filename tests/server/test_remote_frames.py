"""Frames between a learner on another host and its road: what is refused, and that nothing else happens to it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.server.remote.frames import (
    ALLOWED,
    GREETING_BYTES,
    HEADER_BYTES,
    LEARNER_CHANNELS,
    PIECE_BYTES,
    WORDS_BYTES,
    Channel,
    FrameError,
    Greeting,
    Header,
    Kind,
    Region,
    Silence,
    Words,
    unpack,
    unpack_greeting,
    unpack_words,
)
from offbeat.server.wire import MOST_BYTES
from server.remote_fuzz import fuzz

NUMBERS, SHORTS = st.integers(0, 2**64 - 1), st.integers(0, 2**16 - 1)


@given(st.sampled_from(LEARNER_CHANNELS), st.sampled_from(Region), SHORTS, NUMBERS, NUMBERS, st.data())
def test_a_header_comes_back_as_it_was(
    channel: Channel, region: Region, which: int, number: int, offset: int, data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(sorted(ALLOWED[channel])))
    size = WORDS_BYTES if kind in (Kind.WORDS, Kind.END) else 0
    header = Header(kind, region, which, size, number, offset)
    assert unpack(header.pack(), channel) == header
    assert len(header.pack()) == HEADER_BYTES


@pytest.mark.parametrize(
    ("header", "channel"),
    [
        (Header(Kind.WRITE, size=PIECE_BYTES + 1), Channel.UP_DATA),
        (Header(Kind.MESSAGE, size=MOST_BYTES + 1), Channel.UP_CONTROL),
        (Header(Kind.BEAT, size=1), Channel.UP_CONTROL),
        (Header(Kind.WORDS, size=WORDS_BYTES - 1), Channel.DOWN_CONTROL),
        (Header(Kind.WRITE), Channel.UP_CONTROL),  # large things have a connection of their own
        (Header(Kind.DATA), Channel.UP_DATA),
    ],
)
def test_what_is_too_large_or_in_the_wrong_place_is_refused(header: Header, channel: Channel) -> None:
    with pytest.raises(FrameError):
        unpack(header.pack(), channel)


def test_mutated_headers_are_refused_or_within_their_bounds() -> None:
    chance = random.Random(7)
    refused = 0
    for _ in range(20_000):
        channel = chance.choice(LEARNER_CHANNELS)
        data = bytearray(Header(chance.choice(sorted(ALLOWED[channel])), Region.GRADIENT, 1, 32, 5, 64).pack())
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            header = unpack(bytes(data), channel)
        except FrameError:
            refused += 1
        else:
            assert header.kind in ALLOWED[channel] and header.size <= max(PIECE_BYTES, MOST_BYTES)
    assert refused > 5_000


def test_greetings_and_words_come_back_as_they_were() -> None:
    greeting = Greeting(Channel.UP_DATA, 3, b"h" * 16, b"s" * 16)
    assert unpack_greeting(greeting.pack()) == greeting and len(greeting.pack()) == GREETING_BYTES
    words = Words(2**63, 4, 1, 77)
    assert unpack_words(words.pack()) == words


@given(st.binary(min_size=GREETING_BYTES, max_size=GREETING_BYTES))
def test_random_bytes_are_no_greeting(data: bytes) -> None:
    with pytest.raises(FrameError):
        unpack_greeting(data)


def test_a_learner_that_sends_what_it_likes_changes_its_own_slot_only() -> None:
    ends = fuzz(3_000, seed=5)  # more: python -m server.remote_fuzz
    assert ends["taken"] > 300 and ends["refused"] > 300


# --- bytes that were lost ---------------------------------------------------------------------------------------------

CONTROL, DATA = Channel.UP_CONTROL, Channel.UP_DATA


def test_a_connection_that_is_silent_while_the_other_is_heard_has_lost_something() -> None:
    silence = Silence(CONTROL, DATA, 0.0)
    for tenth in range(1, 99):
        silence.heard(CONTROL, tenth / 10)
    silence.heard(DATA, 9.9)
    for tenth in range(100, 199):
        silence.heard(CONTROL, tenth / 10)
    with pytest.raises(FrameError, match="nothing whole has come on UP_DATA for 10 s"):
        silence.heard(CONTROL, 20.0)


def test_time_in_which_nothing_is_heard_is_no_silence_of_one() -> None:
    silence = Silence(CONTROL, DATA, 0.0)
    for stop in range(9):  # the other end stops, or this one, for a minute each
        silence.heard(CONTROL, 60.0 * stop + 60.0)
    for _ in range(100):  # what has come meanwhile is read at once
        silence.heard(CONTROL, 540.1)
    silence.heard(DATA, 540.2)
    silence.heard(CONTROL, 541.0)
