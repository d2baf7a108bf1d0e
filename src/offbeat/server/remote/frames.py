"""What passes between a learner on another host and its road process beside the servers: frames, and their bounds.

A learner has four connections, each used in one direction, so that what is urgent overtakes what is large:

    UP_CONTROL     learner -> road    messages, signs of life, requests to read
    UP_DATA        learner -> road    gradients and initial weights; then the message that says that they are there
    DOWN_CONTROL   road -> learner    messages; words (cancelled, given up, over)
    DOWN_DATA      road -> learner    weights, in pieces, and an END that says whether they are whole

A frame is a header of fixed size and at most `PIECE_BYTES` of payload. Where a payload goes is decided by the receiver:
a header names a region and an offset, and the region's size is known from the parameter layout.

A connection on which nothing else is sent carries a BEAT now and then. So bytes that were lost on the way, which leave
the rest unreadable, are noticed: one connection is silent then while the other one of its direction is heard
(`Silence`).

Law: pack(unpack(x)) == x. A header that is not of this protocol, or whose payload is too large, is a `FrameError`.
Nothing in a header sizes an allocation.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from offbeat.errors import OffbeatError
from offbeat.server.wire import MOST_BYTES

PROTOCOL = 5
PIECE_BYTES = 1024 * 1024
IDLE_S = 0.5  # after which a BEAT is sent
SILENT_S = 10.0  # of a connection, while the other one is heard: then bytes are missing
_BEATS_APART_S = 1.0  # at most, as long as both ends are awake
_HEADER = struct.Struct("<4sBBHIQQ")
_MAGIC = b"obr1"
HEADER_BYTES = _HEADER.size
_GREETING = struct.Struct("<8sHBxI16s16s")
_GREETING_MAGIC = b"offbeat\3"
GREETING_BYTES = _GREETING.size
_WORDS = struct.Struct("<QQQQ")
WORDS_BYTES = _WORDS.size
NUMBER_LIMIT = 2**20  # of learners
SEED_BYTES = 8  # that say with which random numbers a payload was made


class FrameError(OffbeatError):
    """Bytes that are no frame of this protocol."""


class Channel(IntEnum):
    """What a connection is for."""

    ENTER = 0  # a host asks for places; not one of a learner's four
    UP_CONTROL = 1
    UP_DATA = 2
    DOWN_CONTROL = 3
    DOWN_DATA = 4
    FOLLOW = 5  # a host that hears whether the run is there, and is sent checkpoints; not one of a learner's four
    SERVER = 6  # a host offers a server: jobs to it, and what it answers; `server_host`
    SERVERS = 7  # a learner asks where the servers are; `spread_arena`
    SHARD_UP = 8  # learner -> the host of a shard: gradients, and questions whether they are there
    SHARD_DOWN = 9  # the same, for requests to read; each is answered on the same connection
    MIRROR = 10  # a host that keeps a copy of the servers' state; `mirror`


LEARNER_CHANNELS = (Channel.UP_CONTROL, Channel.UP_DATA, Channel.DOWN_CONTROL, Channel.DOWN_DATA)


class Kind(IntEnum):
    """What a frame is."""

    MESSAGE = 1  # payload: a message of `wire`
    BEAT = 2  # a sign of life
    WRITE = 3  # payload: bytes of a region; `number` says of which minibatch or incarnation
    PART = 4  # payload: bytes of what a learner hands in, in pause `number`; `which` 1: these are the last
    READ = 5  # send me these regions, under `number`; `which`: a `Reading`. Of a shard: `number` bytes from `offset`
    WORDS = 6  # payload: `Words`
    DATA = 7  # payload: bytes of a region, asked for or pinned under `number`
    END = (
        8  # of what is sent under `number`: `which` 1 if it is whole; `offset`: for which incarnation; payload: `Words`
    )
    AGAIN = 9  # the coordinator is another one: say again what was not answered
    TAKE = 10  # the gradient is in the staging memory of learner `offset`: take it over, as a WRITE would
    FLUSH = 11  # say this again when all before it is done; `number` counts them


class Region(IntEnum):
    """A part of the servers' memory."""

    NONE = 0
    GRADIENT = 1  # the slot of the minibatch at hand; in a run with a codec, the seed of a payload and the payload
    WEIGHTS = 2
    EXTRA = 3
    STATE = 4  # of the optimizer; `which` says which
    STEPS = 5
    ROUNDED = 6  # weights as a payload of the codec for them
    COMMITTED = 7  # version and buffer of each commit group
    ROWS = 8  # of a parameter's gradient, as a payload (`sparse_rows`); `which` says which parameter


GRADIENTS = (Region.GRADIENT, Region.ROWS)  # which belong to a minibatch


class Reading(IntEnum):
    """What a learner may ask for by itself."""

    LAST = 1  # the weights as they are
    CURRENT = 2  # weights and optimizer state, in a pause that it leads
    COMMITTED = 3  # where the weights are, where others hold them; and the words, as they are after that


_MOST_PAYLOAD = {
    Kind.MESSAGE: MOST_BYTES,
    Kind.WRITE: PIECE_BYTES,
    Kind.PART: PIECE_BYTES,
    Kind.WORDS: WORDS_BYTES,
    Kind.DATA: PIECE_BYTES,
    Kind.END: WORDS_BYTES,
}
# Which frames may come on a connection.
ALLOWED = {
    Channel.UP_CONTROL: frozenset((Kind.MESSAGE, Kind.BEAT, Kind.READ)),
    Channel.UP_DATA: frozenset((Kind.MESSAGE, Kind.WRITE, Kind.PART, Kind.BEAT)),
    Channel.DOWN_CONTROL: frozenset((Kind.MESSAGE, Kind.WORDS, Kind.AGAIN, Kind.BEAT)),
    Channel.DOWN_DATA: frozenset((Kind.DATA, Kind.END, Kind.WORDS, Kind.BEAT)),
    Channel.SERVER: frozenset((Kind.MESSAGE,)),
    Channel.SHARD_UP: frozenset((Kind.WRITE, Kind.TAKE, Kind.FLUSH)),
    Channel.SHARD_DOWN: frozenset((Kind.READ, Kind.DATA)),
    Channel.MIRROR: frozenset((Kind.MESSAGE, Kind.DATA, Kind.FLUSH, Kind.BEAT)),
}


class Header(NamedTuple):
    """The first bytes of a frame."""

    kind: Kind
    region: Region = Region.NONE
    which: int = 0
    size: int = 0  # of the payload
    number: int = 0
    offset: int = 0  # in the region

    def pack(self) -> bytes:
        return _HEADER.pack(_MAGIC, self.kind, self.region, self.which, self.size, self.number, self.offset)


def unpack(data: bytes | memoryview, channel: Channel) -> Header:
    """The header that came on a connection of this kind."""
    if len(data) != HEADER_BYTES:
        raise FrameError(f"expected a header of {HEADER_BYTES} bytes; got {len(data)}")
    magic, kind, region, index, size, number, offset = _HEADER.unpack(data)
    try:
        header = Header(Kind(kind), Region(region), index, size, number, offset)
    except ValueError:
        raise FrameError(f"a frame of unknown kind {kind} or region {region}") from None
    if magic != _MAGIC or header.kind not in ALLOWED[channel]:
        raise FrameError(f"not a frame of protocol {PROTOCOL} for {channel.name}")
    if header.size > _MOST_PAYLOAD.get(header.kind, 0):
        raise FrameError(f"a frame {header.kind.name} with {header.size} bytes of payload")
    if header.kind in (Kind.WORDS, Kind.END) and header.size != WORDS_BYTES:
        raise FrameError(f"a frame {header.kind.name} with {header.size} bytes of payload")
    return header


class Silence:
    """How long each of two connections has been silent while the other one was heard.

    Time in which neither is heard does not count: the other end may be stopped, or this one, or the link is cut.
    """

    def __init__(self, one: Channel, other: Channel, now_s: float) -> None:
        self._silent_s = {one: 0.0, other: 0.0}
        self._heard_s = now_s

    def heard(self, channel: Channel, now_s: float) -> None:
        """A header has come. `FrameError` where bytes of the other connection must be missing."""
        passed_s, self._heard_s = min(now_s - self._heard_s, _BEATS_APART_S), now_s
        self._silent_s[channel] = 0.0
        for other in self._silent_s.keys() - {channel}:
            self._silent_s[other] += passed_s
            if self._silent_s[other] > SILENT_S:
                raise FrameError(
                    f"nothing whole has come on {other.name} for {SILENT_S:g} s: bytes were lost on the way"
                )


class Words(NamedTuple):
    """Words of shared memory, as the learner's copy has them."""

    cancelled: int  # `arena.stamp`: minibatches up to this one
    fenced: int  # incarnations up to this one
    quiet: int
    version: int  # committed

    def pack(self) -> bytes:
        return _WORDS.pack(*self)


def unpack_words(data: bytes | memoryview) -> Words:
    return Words(*_WORDS.unpack(data))


class Greeting(NamedTuple):
    """What whoever connects says first: what the connection is for, of which learner, for which host and session.

    `learner` is its number; to ENTER how many there are, to FOLLOW 1 if checkpoints are wanted, to SERVER the host's
    port, to MIRROR which of the successors the host is. To FOLLOW, SERVER and MIRROR `session` is the run's name.
    """

    channel: Channel
    learner: int
    host: bytes  # 16 bytes that name the process that asked for places
    session: bytes  # 16 bytes that the four connections of a learner have in common

    def pack(self) -> bytes:
        return _GREETING.pack(_GREETING_MAGIC, PROTOCOL, self.channel, self.learner, self.host, self.session)


def unpack_greeting(data: bytes) -> Greeting:
    magic, protocol, channel, learner, host, session = _GREETING.unpack(data)
    if magic != _GREETING_MAGIC or protocol != PROTOCOL or channel > max(Channel) or learner >= NUMBER_LIMIT:
        raise FrameError(f"not a greeting of protocol {PROTOCOL}")
    return Greeting(Channel(channel), learner, host, session)
