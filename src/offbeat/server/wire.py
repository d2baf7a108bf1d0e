"""What coordinator, servers and learners say to each other: small typed messages, and nothing else.

A push is named (learner, incarnation, seq). An incarnation is one session of a learner, a seq one minibatch that it was
told to compute. Every message may be lost, doubled or overtaken: whoever receives one that it has seen before answers
as before, or not at all. Gradients and weights are not in here: they lie in memory that both sides see (`arena`), and
messages name places in it.

A frame is a checksum and one message. Every field has its bounds in its type, and what is outside them is refused with
the bytes; whether a message fits the session that it is from is for the coordinator (`fault_of`).

Law: decode(encode(x)) == x. Bytes that are no message of this version are refused, and nothing in a message sizes an
allocation beyond the message itself.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from offbeat.errors import OffbeatError

PROTOCOL = 7
MOST_BYTES = 128 * 1024
MOST_DATA_BYTES = MOST_BYTES // 2  # of all learners together, in one group call
_CHECKSUM_BYTES = 4

# --- bounds ---------------------------------------------------------------------------------------------------------

MOST_INCARNATIONS = 2**23  # with a seq in one word of shared memory: `arena.stamp`
LATEST_S = 1e12  # no run lasts longer
LearnerNumber = Annotated[int, Meta(ge=0, lt=2**20)]
Incarnation = Annotated[int, Meta(ge=0, lt=MOST_INCARNATIONS)]
Nonce = Annotated[int, Meta(ge=1, le=2**62)]
Seq = Annotated[int, Meta(ge=0, lt=2**40)]
Version = Annotated[int, Meta(ge=0, lt=2**32)]
JobNumber = Annotated[int, Meta(ge=0, lt=2**31)]  # with a version in one word
Number = Annotated[int, Meta(ge=0, lt=2**53)]  # of what one side counts: requests, pins, leases, samples, epochs
Delay = Annotated[int, Meta(ge=0, lt=2**31)]
Count = Annotated[int, Meta(ge=1, lt=2**53)]
Place = Annotated[int, Meta(ge=0, lt=2**20)]  # of a buffer, slot, shard, group or parameter
Finite = Annotated[float, Meta(gt=-1e308, lt=1e308)]  # nan and infinite are outside
Seconds = Annotated[float, Meta(gt=-LATEST_S, lt=LATEST_S)]
Text = Annotated[str, Meta(max_length=4000)]
Digest = Annotated[str, Meta(max_length=64)]
Hyper = Annotated[dict[Annotated[str, Meta(max_length=64)], Finite], Meta(max_length=32)]
Hypers = Annotated[tuple[Hyper, ...], Meta(max_length=1024)]  # of each parameter group: bools as 0.0 and 1.0
Numbers = Annotated[tuple[Number, ...], Meta(max_length=2**16)]
Places = Annotated[tuple[Place, ...], Meta(max_length=2**16)]
Sums = Annotated[tuple[float, ...], Meta(max_length=4096)]  # of weights that may be anything
Lease = tuple[Number, Number, Number, Count]  # number, epoch, start, count
Piece = tuple[Place, Version]  # a buffer, and the version in it
Pieces = Annotated[tuple[Piece, ...], Meta(max_length=2**16)]
Data = Annotated[bytes, Meta(max_length=MOST_DATA_BYTES)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """The base of all of them."""


class SessionMessage(Message, frozen=True):
    """About, to or from a learner as one incarnation."""

    learner: LearnerNumber
    incarnation: Incarnation


class FromSession(SessionMessage, frozen=True):
    """What a learner says once it is an incarnation."""


# --- from a learner -------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """I want to be this learner. `nonce` names this session, `after` the incarnation that I was before, if I was."""

    learner: LearnerNumber
    nonce: Nonce
    table: Digest  # digest of the model's parameters: all learners must have the same
    after: Incarnation = 0


class Seeded(FromSession, frozen=True):
    """The initial weights are in buffer 0."""


class Push(FromSession, frozen=True):
    """The gradient of a minibatch is in my slot."""

    seq: Seq
    version: Version
    samples: Count = 1
    loss: float | None = None
    finite: bool = True
    hyper: Hypers = ()  # of each parameter group; none: as in my push before
    leases: Numbers = ()
    absent: Places = ()  # parameters without a gradient
    began_s: Seconds = 0.0
    ended_s: Seconds = 0.0
    sent_bytes: Number = 0  # as it travels, where only rows of some parameters are pushed; and what was fetched since
    received_bytes: Number = 0  # the push before
    delay: Delay | None = None  # minibatches between my push before and taking the weights that answered it


class Stop(FromSession, frozen=True):
    """I have given up this minibatch: it was cancelled."""

    seq: Seq
    leases: Numbers = ()
    began_s: Seconds = 0.0
    ended_s: Seconds = 0.0
    version: Version = 0


class Ask(FromSession, frozen=True):
    """I want the current weights, beside my work."""

    number: Count


class Fetched(FromSession, frozen=True):
    """I have read what was pinned for me under this number, and under all before."""

    pin: Number


class Want(FromSession, frozen=True):
    """I want up to `count` samples of an epoch of `of`.

    With `wait` the answer may take until some come back, and all that I had were pushed or given back. `seq` is the
    minibatch that I answered last, if none is open: should that answer be lost, it has to come again before this.
    """

    number: Count
    epoch: Number
    count: Count
    of: Count
    wait: bool
    seq: Seq = 0


class GiveBack(FromSession, frozen=True):
    """I shall not compute these; with `unused` I was given them by my loader, and have no use for them."""

    leases: Numbers
    unused: bool = False


class Paused(FromSession, frozen=True):
    """I have paused. With `led` I have led this pause to its end; with `stop` the run is to end."""

    number: Number
    led: bool = False
    stop: bool = False


class EndRequest(FromSession, frozen=True):
    """The run is to end, after a last pause."""


class PauseRequest(FromSession, frozen=True):
    """I want all learners to pause, and to lead that pause."""


class GroupCall(FromSession, frozen=True):
    """My `number`-th call to the other learners; `what` names it and must be the same for all, `data` is mine.

    Without `what` I do not wait for its answer any more. `seq` is as in a `Want`.
    """

    number: Count
    what: Text
    data: Data = b""
    seq: Seq = 0


class Bye(FromSession, frozen=True):
    """I leave."""


# --- what is seen of a learner without its saying so ----------------------------------------------------------------


class Gone(SessionMessage, frozen=True):
    """Its process has ended, or closed the line: it writes to no memory any more."""


class Silent(SessionMessage, frozen=True):
    """It gives no sign of life, but may still wake up."""


class SentAway(SessionMessage, frozen=True):
    """It has said what cannot be, again and again; it may still write to its memory."""

    why: Text


class Tick(Message, frozen=True):
    """Time has passed."""


class WakeDue(Message, frozen=True):
    """The time has come at which the policy wanted to be woken."""


class Finish(Message, frozen=True):
    """The run is over: nobody will come any more."""


# --- to a learner ---------------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """You are this incarnation. With `seed`, put the initial weights into buffer 0 and say so."""

    learner: LearnerNumber
    nonce: Nonce
    incarnation: Incarnation
    seed: bool = False


RUN_ENDED = "the run has ended"


class Refused(Message, frozen=True):
    learner: LearnerNumber
    nonce: Nonce
    why: Text


class Fenced(SessionMessage, frozen=True):
    """You were given up, and are this incarnation no longer: come again."""


class Go(SessionMessage, frozen=True):
    """Compute minibatch `seq` on these weights (none: on those you have), and put its gradient into this slot.

    `pieces` are buffer and version of each commit group. An older minibatch that is still open is cancelled by this.
    `unused` is the last minibatch that you had begun whose gradient is not used: cancelled, or dropped when it came.
    `grant` orders all that were ever given a slot, where shards are spread over hosts: the later one may write to it.
    """

    seq: Seq
    version: Version
    slot: Place
    pin: Number = 0
    pieces: Pieces = ()
    unused: Seq = 0
    grant: Number = 0


class Weights(SessionMessage, frozen=True):
    """What you asked for."""

    number: Number
    version: Version
    pin: Number
    pieces: Pieces


class Granted(SessionMessage, frozen=True):
    """The answer to a `Want`: a lease, or "ended" or "wait". Minibatches up to `void` are not waited for any more."""

    number: Number
    answer: Literal["lease", "ended", "wait"]
    lease: Lease | None = None
    void: Seq = 0


class EnterPause(SessionMessage, frozen=True):
    """Pause when you next wait, and say so. With `lead` all others have paused: evaluate, save, or end the run.

    `facts` are for the one who leads: where the run stands, as JSON.
    """

    number: Number
    lead: bool = False
    facts: Annotated[str, Meta(max_length=MOST_BYTES)] = ""


class EndPause(SessionMessage, frozen=True):
    """All pauses up to this one have ended; with `over` the run has, too."""

    number: Number
    over: bool = False


class GroupCallAnswer(SessionMessage, frozen=True):
    """All members have made this call: what each of them gave, by learner; or why there is no answer.

    Minibatches up to `void` are not waited for any more.
    """

    number: Number
    data: Annotated[tuple[tuple[LearnerNumber, Data], ...], Meta(max_length=2**16)] = ()
    error: Text = ""
    void: Seq = 0


# --- words in shared memory, written by whoever carries the coordinator's messages ----------------------------------


class CancelWord(SessionMessage, frozen=True):
    """All minibatches of this learner up to `seq` are cancelled."""

    seq: Seq


class FenceWord(SessionMessage, frozen=True):
    """This incarnation and all before are given up: what they still read may be torn."""


class Committed(Message, frozen=True):
    """A commit group has this version now, in this buffer."""

    commit_group: Place
    version: Version
    buffer: Place


# --- between coordinator and servers --------------------------------------------------------------------------------


class Ready(Message, frozen=True):
    """A server holds this shard now; `generation` says which process of those that have."""

    shard: Place
    generation: JobNumber


class ShardJob(Message, frozen=True):
    """Work for a shard on one update: gradients in `slots`, each times its scale, divided by their number.

    "apply": from buffer `source` and optimizer state to buffer `target`, as version `version`. "norm": sums of squares
    of the mean gradient, by block. "drift": sum of squares of buffer `source` less buffer `reads[0]`. Doing it again
    gives the same, until the coordinator has heard of it; after that `number` shows that it was done.
    """

    shard: Place
    number: JobNumber
    kind: Literal["", "apply", "norm", "drift"]
    version: Version
    source: Place
    target: Place
    slots: Places = ()
    scales: Annotated[tuple[Finite, ...], Meta(max_length=2**16)] = ()
    reads: Places = ()  # the buffer that each gradient was computed on, where a rate needs it
    compensation: Finite = 0.0
    clip: Finite = 1.0
    damping: Finite = 1.0  # of the step; see `optimizers.damped`
    hyper: Hypers = ()
    skip: Places = ()  # parameters without a gradient in all of them


class Done(Message, frozen=True):
    shard: Place
    generation: JobNumber
    number: JobNumber
    sums: Sums = ()


TO_LEARNER = Welcome | Refused | Fenced | Go | Weights | Granted | EnterPause | EndPause | GroupCallAnswer
INPUT = (
    Hello
    | Seeded
    | Push
    | Stop
    | Ask
    | Fetched
    | Want
    | GiveBack
    | Paused
    | EndRequest
    | PauseRequest
    | GroupCall
    | Bye
    | Gone
    | Silent
    | SentAway
    | Tick
    | WakeDue
    | Finish
    | Ready
    | Done
)
OUTPUT = TO_LEARNER | CancelWord | FenceWord | Committed | ShardJob

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


class WireError(OffbeatError):
    """Bytes that are no message of this protocol."""


def encode(message: Message) -> bytes:
    body = _encoder.encode(message)
    return _checked(zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little") + body)


def _checked(data: bytes) -> bytes:
    if len(data) > MOST_BYTES:
        raise WireError(f"a message of {len(data)} bytes exceeds the limit of {MOST_BYTES}")
    return data


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    body = memoryview(_checked(data))[_CHECKSUM_BYTES:]
    if zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little") != data[:_CHECKSUM_BYTES]:
        raise WireError(f"{len(data)} bytes whose checksum is wrong")
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"not a message of protocol {PROTOCOL}: {error}") from None


# What came to the coordinator, and what came from it.
decode_input: Callable[[bytes], INPUT] = partial(_decode, msgspec.msgpack.Decoder(INPUT))
decode_output: Callable[[bytes], OUTPUT] = partial(_decode, msgspec.msgpack.Decoder(OUTPUT))
