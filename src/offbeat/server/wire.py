"""What coordinator, servers and learners say to each other: small typed messages, and nothing else.

A push is named (learner, incarnation, seq). An incarnation is one stay of a learner, a seq one minibatch that it was
told to compute. Every message may be lost, doubled or overtaken: whoever receives one that it has seen before answers
as before, or not at all. Gradients and weights are not in here: they lie in memory that both sides see (`arena`), and
messages name places in it.

Law: decode(encode(x)) == x. Bytes that are no message of this version are refused, and nothing in a message sizes an
allocation beyond the message itself.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from offbeat.errors import OffbeatError

PROTOCOL = 3
MOST_BYTES = 128 * 1024

Hyper = dict[str, float]
Lease = tuple[int, int, int, int]  # number, epoch, start, count


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """The base of all of them."""


# --- from a learner -------------------------------------------------------------------------------------------------


class Hello(Message, frozen=True, tag="hello"):
    """I want to be this learner. `nonce` names this stay, `after` the incarnation that I was before, if I was."""

    learner: int
    nonce: int
    table: str  # digest of the model's parameters: all learners must have the same
    after: int = 0


class Seeded(Message, frozen=True, tag="seeded"):
    """The initial weights are in buffer 0."""

    learner: int
    incarnation: int


class Push(Message, frozen=True, tag="push"):
    """The gradient of a minibatch is in my slot."""

    learner: int
    incarnation: int
    seq: int
    version: int
    samples: int = 1
    loss: float | None = None
    finite: bool = True
    hyper: tuple[Hyper, ...] = ()  # of each parameter group; none: as in my push before
    leases: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()  # parameters without a gradient
    began_s: float = 0.0
    ended_s: float = 0.0


class Stop(Message, frozen=True, tag="stop"):
    """I have given up this minibatch: it was cancelled."""

    learner: int
    incarnation: int
    seq: int
    leases: tuple[int, ...] = ()
    began_s: float = 0.0
    ended_s: float = 0.0
    version: int = 0


class Ask(Message, frozen=True, tag="ask"):
    """I want the current weights, beside my work."""

    learner: int
    incarnation: int
    number: int


class Fetched(Message, frozen=True, tag="fetched"):
    """I have read what was pinned for me under this number, and under all before."""

    learner: int
    incarnation: int
    pin: int


class Want(Message, frozen=True, tag="want"):
    """I want up to `count` samples of an epoch of `of`.

    With `wait` the answer may take until some come back, and all that I had were pushed or given back. `seq` is the
    minibatch that I answered last, if none is open: should that answer be lost, it has to come again before this.
    """

    learner: int
    incarnation: int
    number: int
    epoch: int
    count: int
    of: int
    wait: bool
    seq: int = 0


class GiveBack(Message, frozen=True, tag="give-back"):
    """I shall not compute these; with `unused` I was given them by my loader, and have no use for them."""

    learner: int
    incarnation: int
    leases: tuple[int, ...]
    unused: bool = False


class Paused(Message, frozen=True, tag="rested"):
    """I stand still. With `led` I have done what there was to do in this rest; with `stop` the run is to end."""

    learner: int
    incarnation: int
    number: int
    led: bool = False
    stop: bool = False


class EndRequest(Message, frozen=True, tag="halt"):
    """The run is to end, after a rest."""

    learner: int
    incarnation: int


class PauseRequest(Message, frozen=True, tag="pause"):
    """I want everybody to stand still for a moment, and to lead that rest."""

    learner: int
    incarnation: int


class Call(Message, frozen=True, tag="call"):
    """My `number`-th call to the other learners; `what` names it and must be the same for all, `data` is mine.

    Without `what` I do not wait for its answer any more. `seq` is as in a `Want`.
    """

    learner: int
    incarnation: int
    number: int
    what: str
    data: bytes = b""
    seq: int = 0


class Bye(Message, frozen=True, tag="bye"):
    """I leave."""

    learner: int
    incarnation: int


# --- what is seen of a learner without its saying so ----------------------------------------------------------------


class Gone(Message, frozen=True, tag="gone"):
    """Its process has ended, or closed the line: it writes to no memory any more."""

    learner: int
    incarnation: int


class Silent(Message, frozen=True, tag="silent"):
    """It gives no sign of life, but may still wake up."""

    learner: int
    incarnation: int


class Tick(Message, frozen=True, tag="tick"):
    """Time has passed."""


class Woke(Message, frozen=True, tag="woke"):
    """The time has come at which the policy wanted to be woken."""


class Finish(Message, frozen=True, tag="finish"):
    """The run is over: nobody will come any more."""


# --- to a learner ---------------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True, tag="welcome"):
    """You are this incarnation. With `seed`, put the initial weights into buffer 0 and say so."""

    learner: int
    nonce: int
    incarnation: int
    seed: bool = False


class Refused(Message, frozen=True, tag="refused"):
    learner: int
    nonce: int
    why: str


class Fenced(Message, frozen=True, tag="fenced"):
    """You were given up, and are this incarnation no longer: come again."""

    learner: int
    incarnation: int


class Go(Message, frozen=True, tag="go"):
    """Compute minibatch `seq` on these weights (none: on those you have), and put its gradient into this slot.

    `pieces` are buffer and version of each lane. An older minibatch that is still open is cancelled by this.
    """

    learner: int
    incarnation: int
    seq: int
    version: int
    slot: int
    pin: int = 0
    pieces: tuple[tuple[int, int], ...] = ()


class Weights(Message, frozen=True, tag="weights"):
    """What you asked for."""

    learner: int
    incarnation: int
    number: int
    version: int
    pin: int
    pieces: tuple[tuple[int, int], ...]


class Granted(Message, frozen=True, tag="granted"):
    """The answer to a `Want`: a lease, or "ended" or "wait". Minibatches up to `void` are not waited for any more."""

    learner: int
    incarnation: int
    number: int
    answer: str
    lease: Lease | None = None
    void: int = 0


class EnterPause(Message, frozen=True, tag="rest"):
    """Stand still when you next wait, and say so. With `lead` all others do, and it is yours to do what is to be done.

    `facts` are for the one who leads: where the run stands, as JSON.
    """

    learner: int
    incarnation: int
    number: int
    lead: bool = False
    facts: str = ""


class EndPause(Message, frozen=True, tag="rise"):
    """All rests up to this one have ended; with `over` the run has, too."""

    learner: int
    incarnation: int
    number: int
    over: bool = False


class Called(Message, frozen=True, tag="called"):
    """All members have made this call: what each of them gave, by learner; or why there is no answer.

    Minibatches up to `void` are not waited for any more.
    """

    learner: int
    incarnation: int
    number: int
    data: tuple[tuple[int, bytes], ...] = ()
    error: str = ""
    void: int = 0


# --- words in shared memory, written by whoever carries the coordinator's messages ----------------------------------


class Cancel(Message, frozen=True, tag="cancel"):
    """All minibatches of this learner up to `seq` are cancelled."""

    learner: int
    incarnation: int
    seq: int


class Fence(Message, frozen=True, tag="fence"):
    """This incarnation and all before are given up: what they still read may be torn."""

    learner: int
    incarnation: int


class Committed(Message, frozen=True, tag="committed"):
    """A lane has this version now, in this buffer."""

    lane: int
    version: int
    buffer: int


# --- between coordinator and servers --------------------------------------------------------------------------------


class Ready(Message, frozen=True, tag="ready"):
    """A server holds this shard now; `generation` says which process of those that have."""

    shard: int
    generation: int


class Job(Message, frozen=True, tag="job"):
    """Work for a shard on one update: gradients in `slots`, each times its scale, divided by their number.

    "apply": from buffer `source` and optimizer state to buffer `target`, as version `version`. "norm": sums of squares
    of the mean gradient, by block. "drift": sum of squares of buffer `source` less buffer `reads[0]`. Doing it again
    gives the same, until the coordinator has heard of it; after that `number` shows that it was done.
    """

    shard: int
    number: int
    kind: str
    version: int
    source: int
    target: int
    slots: tuple[int, ...] = ()
    scales: tuple[float, ...] = ()
    reads: tuple[int, ...] = ()  # the buffer that each gradient was computed on, where a rate needs it
    compensation: float = 0.0
    clip: float = 1.0
    damping: float = 1.0  # of the step; see `optimizers.damped`
    hyper: tuple[Hyper, ...] = ()
    skip: tuple[int, ...] = ()  # parameters without a gradient in all of them


class Done(Message, frozen=True, tag="done"):
    shard: int
    generation: int
    number: int
    sums: tuple[float, ...] = ()
    seconds: float = 0.0


FROM_STAY = (
    Seeded | Push | Stop | Ask | Fetched | Want | GiveBack | Paused | EndRequest | PauseRequest | Call | Bye
)  # all that name it
FROM_LEARNER = Hello | FROM_STAY
TO_LEARNER = Welcome | Refused | Fenced | Go | Weights | Granted | EnterPause | EndPause | Called
INPUT = FROM_LEARNER | Gone | Silent | Tick | Woke | Finish | Ready | Done
OUTPUT = TO_LEARNER | Cancel | Fence | Committed | Job

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()
_inputs: msgspec.msgpack.Decoder[INPUT] = msgspec.msgpack.Decoder(INPUT)
_outputs: msgspec.msgpack.Decoder[OUTPUT] = msgspec.msgpack.Decoder(OUTPUT)


class WireError(OffbeatError):
    """Bytes that are no message of this protocol."""


def encode(message: Message) -> bytes:
    data = _encoder.encode(message)
    if len(data) > MOST_BYTES:
        raise WireError(f"a message of {len(data)} bytes is longer than the {MOST_BYTES} that may travel")
    return data


def decode_input(data: bytes) -> INPUT:
    """What came to the coordinator."""
    return _decode(_inputs, data)


def decode_output(data: bytes) -> OUTPUT:
    """What came from the coordinator."""
    return _decode(_outputs, data)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    if len(data) > MOST_BYTES:
        raise WireError(f"a message of {len(data)} bytes is longer than the {MOST_BYTES} that may travel")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"not a message of protocol {PROTOCOL}: {error}") from None


def addressee(message: Message) -> tuple[str, int]:
    """("learner", n), ("server", n), or ("memory", 0) for what is written into shared words."""
    if isinstance(message, Job):
        return "server", message.shard
    if isinstance(message, Cancel | Fence | Committed):
        return "memory", 0
    learner: int = message.learner  # type: ignore[attr-defined]  # all others are to a learner
    return "learner", learner
