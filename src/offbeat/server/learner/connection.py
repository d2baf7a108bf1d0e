"""A learner's connection to the coordinator: the conversation (`ConnectionState`), and its socket (`Connection`).

`ConnectionState` knows what the learner has said, what it was told and what it waits for. It is a state machine without
clock, socket or tensor. Its driver calls a method when the learner has something to say, and sends what the method
returns; it hands over what comes by `receive`; and it sends what `retry` returns when an answer takes long or the
socket was closed. Saying something twice does no harm.

    join -> (Welcome) -> [seeded ->] (Go) -> begin -> push or stop -> (Go) -> begin -> ...

A newer Go cancels the minibatch that is open. After `Fenced` the learner has no incarnation, and joins again by itself
as a new one.

`Connection` drives it over a socket. Whoever waits for an answer reads the socket itself: no other thread has to be
woken first. While several wait, one of them reads, and the others wait on a condition. A thread of its own gives a sign
of life, reads now and then while nobody waits, and connects again when the socket was closed (a coordinator that was
killed comes back). Whoever waits is told when the run is gone for good.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Concatenate, Literal, ParamSpec, TypeVar

from offbeat.errors import OffbeatError, PeerError, RequestError
from offbeat.processes.child import die_with_parent
from offbeat.server import handshake
from offbeat.server.arena import Arena, stamp
from offbeat.server.parameter_layout import ParameterLayout
from offbeat.server.wire import (
    PROTOCOL,
    RUN_ENDED,
    TO_LEARNER,
    Ask,
    Bye,
    CancelWord,
    EndPause,
    EndRequest,
    EnterPause,
    Fenced,
    Fetched,
    GiveBack,
    Go,
    Granted,
    GroupCall,
    GroupCallAnswer,
    Hello,
    Hyper,
    Message,
    Paused,
    PauseRequest,
    Push,
    Refused,
    Seeded,
    Stop,
    Want,
    Weights,
    Welcome,
    WireError,
    decode_output,
    encode,
)

BEAT_S = 0.2
_LOOK_S = 1  # how long one waits before it looks around
RETRY_S = 2.0  # an answer that takes longer may have been lost
_RECONNECT_S = 600.0  # for a coordinator that goes through its journal
_GONE_S = 1.0  # for a listener that is not there any more
_FIRST_S = 60.0  # to find the run at all
P = ParamSpec("P")
T = TypeVar("T")
Again = Literal["again"]  # the learner was given up meanwhile: what it asked for must be asked again
ANSWER = Granted | GroupCallAnswer | Weights
A = TypeVar("A", Granted, GroupCallAnswer, Weights)


class RunOverError(OffbeatError):
    """The run has ended before its time: somebody wanted it to, and all was saved."""


class ConnectionState:
    """The learner's side of the conversation; see the module's text. `nonces` gives numbers that nobody has used."""

    def __init__(self, learner: int, layout: str, nonces: Iterator[int]) -> None:
        self.learner = learner
        self.layout = layout  # digest of the model's parameters
        self.nonces = nonces
        self.nonce = 0
        self.previous = 0  # the incarnation before
        self.refused: str | None = None
        self.left = False  # it has said goodbye
        self.version = self.slot = self.grant = 0  # of the minibatch begun last
        self.over = False  # the run is
        self.wants_end = False  # of the run
        self.wants_pause = False  # that it leads
        self._requests = 0
        self._start_incarnation()

    def _start_incarnation(self) -> None:
        """All that is of one incarnation, as it is before the learner is welcome."""
        self.incarnation: int = 0  # 0 while it has none
        self.must_seed: bool = False
        self.go: Go | None = None  # the newest, not begun yet
        self.seq: int = 0  # of the minibatch begun last
        self.void: int = 0  # minibatches up to this one are not wanted
        self.unused: set[int] = set()  # minibatches whose gradients are not used, as it was told; the last ones
        self.working: bool = False
        self.fenced: bool = False  # it was given up while it worked, or wrote the initial weights
        self.answers: dict[type[ANSWER], ANSWER] = {}  # to what it has asked last
        self.pause: EnterPause | None = None  # that it was called to, and has not entered yet
        self._entered = (0, False)  # the last pause that it has entered, and whether it led it
        self._paused: Paused | None = None  # said until the pause ends
        self._answer: Push | Stop | Seeded | None = None
        self._asked: dict[type[ANSWER], Want | Ask | GroupCall] = {}  # and is not answered yet, by what answers it
        self._fetched: tuple[Fetched, ...] = ()  # the last ones
        self._seeds: bool = True  # it may still be asked for the initial weights

    # --- what it hears --------------------------------------------------------------------------------------------

    def receive(self, message: TO_LEARNER | CancelWord) -> list[Message]:
        """Take a message in; what is to be said at once."""
        if isinstance(message, Welcome | Refused):
            if message.nonce == self.nonce:
                if isinstance(message, Refused) and message.why == RUN_ENDED:
                    self.over = True
                elif isinstance(message, Refused):
                    self.refused = message.why
                else:
                    self._welcome(message)
            return []
        if message.incarnation != self.incarnation or self.left:
            return []  # for one that it was before
        if isinstance(message, Fenced):
            if self.working or self.must_seed:  # another is given its slot when it joins again: not while it writes
                self.fenced = True
                self._cancel(self.seq)
                return []
            return self.join()
        if isinstance(message, Go):
            if message.seq > max(self.seq, self.void) and (self.go is None or message.seq > self.go.seq):
                self.go = message
                self._cancel(message.seq - 1)
                self.unused = {seq for seq in self.unused if seq >= self.seq} | {message.unused}
        elif isinstance(message, CancelWord):
            self._cancel(message.seq)
        elif isinstance(message, ANSWER):
            asked = self._asked.get(type(message))
            if asked is not None and message.number == asked.number:
                del self._asked[type(message)]
                self.answers[type(message)] = message
                self._cancel(0 if isinstance(message, Weights) else message.void)
        elif isinstance(message, EnterPause):
            if (message.number, message.lead) > self._entered:
                self.pause = message
        elif isinstance(message, EndPause):
            self.over = self.over or message.over  # one from before may come after
            if self._paused is not None and message.number >= self._paused.number:
                self._paused = None
            if self.pause is not None and message.number >= self.pause.number:
                self.pause = None
        return []

    def _welcome(self, message: Welcome) -> None:
        if self.incarnation == 0:
            self.incarnation = message.incarnation
        if message.incarnation == self.incarnation and message.seed and self._seeds:
            self.must_seed = True

    def _cancel(self, seq: int) -> None:
        """Minibatches up to this one are not wanted any more."""
        self.void = max(self.void, seq)
        if self.go is not None and self.go.seq <= self.void:
            self.go = None

    # --- what a learner waits for: None until it is there -----------------------------------------------------------

    def joined(self) -> int | None:
        """Its incarnation."""
        return self.incarnation or None

    def begun_or_seed(self) -> Go | Literal["seed"] | None:
        """The minibatch to compute, begun; or that the initial weights are wanted first."""
        if self.must_seed:
            return "seed"
        return self.begin() if self.go is not None and not self.working else None

    def answer_or_again(self, kind: type[A]) -> A | Again | None:
        """The answer to `request_samples` (Granted), `call` (GroupCallAnswer) or `request_weights` (Weights)."""
        answer = self.answers.get(kind)
        if (self.fenced and kind is not Weights) or (answer is None and kind not in self._asked):
            return "again"
        return answer  # type: ignore[return-value]  # it is kept by its type

    def led_or_fenced(self) -> bool | None:
        """Whether the pause that it asked for was led; False if the learner was given up."""
        return False if self.fenced else None if self.wants_pause else True

    @property
    def cancelled(self) -> bool:
        """Whether the minibatch that is open is not wanted any more."""
        return self.working and self.seq <= self.void

    @property
    def must_wait(self) -> bool:
        """Whether it stands still in a pause, and nothing else has come that it has to act on."""
        return self._paused is not None and self.pause is None and not (self.over or self.fenced or self.refused)

    # --- what it says -----------------------------------------------------------------------------------------------

    def join(self) -> list[Message]:
        """Join, or join again."""
        self.previous = self.incarnation or self.previous
        self.nonce = next(self.nonces)
        self._start_incarnation()
        return self.hello()

    def hello(self) -> list[Message]:
        """On a new socket: it is still the one that it was."""
        hello = Hello(self.learner, self.nonce, self.layout, self.previous)
        return [hello] if self.nonce and not self.left else []

    def seeded(self) -> list[Message]:
        """The initial weights are written."""
        self.must_seed = self._seeds = False
        return self._say_answer(Seeded(self.learner, self.incarnation))

    def begin(self) -> Go:
        """Start the minibatch that it was told to compute."""
        go = self.go
        assert go is not None and not self.working
        self.go = None
        self.seq, self.version, self.slot, self.grant = go.seq, go.version, go.slot, go.grant
        self.working = True
        self._answer = None
        self.must_seed = self._seeds = False
        return go

    def fetched(self, pin: int) -> list[Message]:
        """The weights that were pinned under this number are read."""
        if not self.incarnation:
            return []
        self._fetched = (*self._fetched, Fetched(self.learner, self.incarnation, pin))[-2:]
        return [self._fetched[-1]]

    def push(
        self,
        *,
        samples: int,
        version: int | None = None,
        loss: float | None = None,
        finite: bool = True,
        hyper: tuple[Hyper, ...] = (),
        leases: tuple[int, ...] = (),
        absent: tuple[int, ...] = (),
        began_s: float = 0.0,
        ended_s: float = 0.0,
        sent_bytes: int = 0,
        received_bytes: int = 0,
        delay: int | None = None,
    ) -> list[Message]:
        """The minibatch is done, and its gradient is in the slot."""
        told = self.version if version is None else version
        answer = Push(
            self.learner,
            self.incarnation,
            self.seq,
            told,
            samples,
            loss,
            finite,
            hyper,
            leases,
            absent,
            began_s,
            ended_s,
            sent_bytes,
            received_bytes,
            delay,
        )
        return self._say_answer(answer)

    def stop(self, leases: tuple[int, ...] = (), began_s: float = 0.0, ended_s: float = 0.0) -> list[Message]:
        """The minibatch was cancelled, and it has stopped. Without times nothing of it was computed."""
        return self._say_answer(Stop(self.learner, self.incarnation, self.seq, leases, began_s, ended_s, self.version))

    def _say_answer(self, answer: Push | Stop | Seeded) -> list[Message]:
        self.working = False
        if self.fenced:
            return self.join()
        self._answer = answer
        return [answer]

    def request_weights(self) -> list[Message]:
        return self._ask(Weights, Ask(self.learner, self.incarnation, self._requests + 1))

    def request_samples(self, *, epoch: int, count: int, of: int, wait: bool) -> list[Message]:
        number, answered = self._requests + 1, 0 if self.working else self.seq
        return self._ask(Granted, Want(self.learner, self.incarnation, number, epoch, count, of, wait, answered))

    def call(self, number: int, what: str, data: bytes) -> list[Message]:
        """To the other learners; without `what` its answer is not waited for any more."""
        answered = 0 if self.working else self.seq
        said = self._ask(GroupCallAnswer, GroupCall(self.learner, self.incarnation, number, what, data, answered))
        if not what:
            self._asked.pop(GroupCallAnswer, None)
        return said

    def _ask(self, kind: type[ANSWER], asked: Want | Ask | GroupCall) -> list[Message]:
        if not self.incarnation:
            return []
        self._requests += 1
        self._asked[kind] = asked
        self.answers.pop(kind, None)
        return [asked]

    def give_back(self, leases: tuple[int, ...], *, unused: bool = False) -> list[Message]:
        here = self.incarnation and not self.left
        return [GiveBack(self.learner, self.incarnation, leases, unused)] if here else []

    def take_pause(self) -> EnterPause | None:
        """The pause that it is called to, once."""
        pause, self.pause = self.pause, None
        if pause is not None:
            self._entered = pause.number, pause.lead
            self.wants_pause = self.wants_pause and not pause.lead
        return pause

    def paused(self, pause: EnterPause, *, stop: bool = False) -> list[Message]:
        """It stands still, or has done what there was to do; until the pause ends, it is said again."""
        if pause.incarnation != self.incarnation:
            return []
        self._paused = Paused(self.learner, self.incarnation, pause.number, pause.lead, stop)
        return [self._paused]

    def request_end(self) -> list[Message]:
        """The run is to end. Said again until it has."""
        self.wants_end = True
        return [EndRequest(self.learner, self.incarnation)] if self.incarnation and not self.over else []

    def request_pause(self) -> list[Message]:
        """A pause is wanted that it leads. Said again until it does."""
        self.wants_pause = True
        return [PauseRequest(self.learner, self.incarnation)] if self.incarnation and not self.over else []

    def bye(self) -> list[Message]:
        said: list[Message] = [Bye(self.learner, self.incarnation)] if self.incarnation and not self.left else []
        self.left = True
        return said

    def retry(self) -> list[Message]:
        """What has not been answered. A Hello again brings back whatever this incarnation was told last."""
        if self.left and self.incarnation:
            return [Bye(self.learner, self.incarnation)]
        if self.refused is not None:
            return []
        said = [] if self.working or self.go is not None else self.hello()
        if self.incarnation:
            asked = (*self._fetched, self._answer, *self._asked.values(), self._paused)
            said += [one for one in asked if one is not None]
            said += self.request_end() if self.wants_end else []
            said += self.request_pause() if self.wants_pause else []
        return said


class Connection:
    """A `ConnectionState` on a socket; see the module's text. Methods may be called from any thread.

    `on_pause` does what there is to do in a pause; it returns True if the run is to end.
    """

    def __init__(
        self,
        road: handshake.Road,
        token: str,
        learner: int,
        layout: ParameterLayout,
        on_pause: Callable[[EnterPause], bool] = lambda pause: False,
    ) -> None:
        self._road = road
        self.handshake = handshake.Handshake(PROTOCOL, token, "learner", learner, handshake.versions(), layout)
        self.closed = False
        self.state = ConnectionState(learner, layout.digest, iter(lambda: secrets.randbits(62) + 1, 0))
        self.socket, self.accepted, self.arena = self._connect(_FIRST_S)
        self.changed = threading.Condition()
        self.failed: OffbeatError | None = None
        self._inbox = handshake.Inbox()
        self._reading = False  # somebody who waits does
        self._broken = False  # the socket was closed, and there is no other yet
        self._alarm = threading.Event()  # the thread has something to do at once
        self.paused_s = 0.0
        self.end_wanted = False  # whoever waits says so; may be set by a signal handler
        self.on_pause = on_pause
        self._cancel, self._fence, self._beat = self.arena.learner_words[learner]
        self._heard_s = time.monotonic()
        self._stamp = 0  # of the minibatch that is open
        self._thread = threading.Thread(target=self._listen, name="offbeat", daemon=True)
        _close_in_children(self)
        self.say(ConnectionState.join)
        self._thread.start()

    def _connect(
        self, most_s: float, gone_s: float = _FIRST_S, answer_s: float = _FIRST_S
    ) -> tuple[socket.socket, handshake.Accept, Arena]:
        found, accepted, arena = handshake.keep_connecting(
            self._road,
            self.handshake,
            most_s=most_s,
            gone_s=gone_s,
            answer_s=answer_s,
            closed=lambda: self.closed or self.state.left,
        )
        # By the kernel: with Python's own timeout each `recv` would be two calls.
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", _LOOK_S, 0))
        return found, accepted, arena

    # --- speaking ---------------------------------------------------------------------------------------------------

    def say(
        self, make: Callable[Concatenate[ConnectionState, P], list[Message]], *given: P.args, **named: P.kwargs
    ) -> None:
        """Send what a method of the state has to say: `connection.say(ConnectionState.fetched, pin)`."""
        with self.changed:
            self._send(make(self.state, *given, **named))

    def wait(
        self,
        ready: Callable[[ConnectionState], T | None],
        what: str,
        timeout_s: float = math.inf,
        *,
        pauses: bool = False,
    ) -> T:
        """What `ready` finds, as soon as it finds something. `PeerError` when the run is gone, or the time is up.

        With `pauses` the learner may enter a pause here: it writes nothing, and does not mind that it takes long.
        """
        end = time.monotonic() + timeout_s
        state = self.state
        with self.changed:
            while True:
                if state.over:
                    raise RunOverError(RUN_ENDED)
                if self.end_wanted and not state.wants_end and state.incarnation:
                    self._send(state.request_end())
                if state.refused is not None:
                    raise RequestError(f"the run removed learner {state.learner}: {state.refused}")
                if pauses and (pause := state.take_pause()) is not None:
                    self._pause(pause)
                    continue
                found = ready(state)
                if found is not None:
                    return found
                if self.failed is not None:
                    raise self.failed
                if time.monotonic() > end:
                    raise PeerError(f"waited {timeout_s:g} s for {what}")
                self._await_news()

    def read_pending(self) -> ConnectionState:
        """The state after all that has come, without waiting for more."""
        self._read_beside()
        return self.state

    def _pause(self, pause: EnterPause) -> None:
        """Stand still until the pause ends. `on_pause` runs without the lock: the other threads go on."""
        began_s = time.monotonic()
        self.changed.release()
        try:
            stop = self.on_pause(pause)
        finally:
            self.changed.acquire()
        self._send(self.state.paused(pause, stop=stop))
        while self.state.must_wait and self.failed is None:
            self._await_news()
        self.paused_s += time.monotonic() - began_s

    def _send(self, messages: list[Message]) -> None:
        for message in messages:
            with contextlib.suppress(OSError):  # the thread sees that the socket is closed, and all is said again
                self.socket.send(encode(message))

    # --- words in shared memory, which a learner reads while it computes ----------------------------------------------

    def minibatch_begun(self) -> None:
        """From now on `is_cancelled` is about the minibatch that the state has begun."""
        self._stamp = stamp(self.state.incarnation, self.state.seq)
        self.arena.minibatch_begun(self._stamp, self.state.grant)

    def is_cancelled(self) -> bool:
        """Whether the minibatch that is open is not wanted: two comparisons, of a shared word and of our own."""
        return self._cancel.view[self._cancel.index] >= self._stamp or self.state.void >= self.state.seq

    def sleep(self, most_s: float) -> None:
        """Sleep, but not on when the minibatch is cancelled."""
        seen = self._cancel.get()
        if seen < self._stamp:
            self._cancel.sleep(seen, most_s)

    def is_fenced(self, incarnation: int) -> bool:
        """Whether this incarnation was given up: what it has read may be torn."""
        return self._fence.get() >= incarnation

    # --- listening --------------------------------------------------------------------------------------------------

    def _await_news(self) -> None:
        """Until a message was taken in, or for a while. The lock is held, and let go while nothing comes."""
        if self._reading or self._broken or self.closed:
            self.changed.wait(_LOOK_S)
            return
        self._reading = True
        self.changed.release()
        try:
            data = self._receive(0)
        finally:
            self.changed.acquire()
            self._reading = False
            self.changed.notify_all()  # another may read now
        self._take(data)

    def _receive(self, flags: int) -> bytes | None:
        """A packet; none where none has come, and nothing in it where the socket is closed."""
        try:
            return self._inbox.receive(self.socket, flags)
        except BlockingIOError:
            return None
        except OSError:
            return b""

    def _take(self, data: bytes | None) -> None:
        """Under the lock: what `_receive` gave."""
        if data is None:
            return
        if not data:
            self._broken = True
            self._alarm.set()
            return
        try:
            message = decode_output(data)
            if not isinstance(message, TO_LEARNER):
                raise WireError(f"a learner received an unexpected message: {message}")
        except WireError as error:
            self.failed = error
            return
        if not isinstance(message, EnterPause):  # that is no answer, and is said again and again
            self._heard_s = time.monotonic()
        self._send(self.state.receive(message))

    def _listen(self) -> None:
        try:
            while not self.closed and self.failed is None:
                self._alarm.wait(BEAT_S)
                self._alarm.clear()
                self._beat.view[self._beat.index] = (self._beat.get() + 1) & 0xFFFFFFFF
                if self._broken and not self.closed:
                    self._reconnect()
                elif not self._read_beside() and time.monotonic() - self._heard_s > RETRY_S:
                    self._heard_s = time.monotonic()
                    self.say(ConnectionState.retry)
        except (OffbeatError, OSError, ValueError) as error:
            known = error if isinstance(error, OffbeatError) else None
            with self.changed:
                if known is not None or not self.closed:
                    self.failed = known or PeerError(f"the connection to the run broke: {error}")
                self.changed.notify_all()

    def _read_beside(self) -> bool:
        """Take in all that has come while nobody waits; whether there was anything."""
        with self.changed:
            heard = False
            while not self._reading and (data := self._receive(socket.MSG_DONTWAIT)) is not None:
                heard = True
                self._take(data)
                self.changed.notify_all()
                if not data or self.failed is not None:
                    break
            return heard

    def _reconnect(self) -> None:
        """The coordinator is gone; perhaps another takes its place."""
        self.socket.close()
        try:
            found, _, _ = self._connect(_RECONNECT_S, _GONE_S, handshake.GREETING_S)
        except PeerError:
            raise PeerError("the run is gone: its coordinator no longer answers") from None
        with self.changed:
            self.socket, self._broken = found, False
            self._send([*self.state.hello(), *self.state.retry()])
            self.changed.notify_all()

    def close(self) -> None:
        """Say goodbye and close the socket."""
        if self.closed:
            return
        self.say(ConnectionState.bye)
        self.closed = True
        self._alarm.set()
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(2.0)
        self.socket.close()
        self._road.close()


def _close_in_children(connection: Connection) -> None:
    """A process that is forked off (to load data) must not keep the socket open when its parent dies, nor outlive it.

    The kernel ends a child with the thread that has forked it: only the main thread is sure to live as long as all.
    """
    known = weakref.ref(connection)
    learner = os.getpid()
    by_main: list[bool] = []

    def note_the_forking_thread() -> None:
        by_main[:] = [threading.current_thread() is threading.main_thread()]

    def close() -> None:
        mine = known()
        if mine is not None:
            mine.closed = True
            with contextlib.suppress(OSError):
                os.close(mine.socket.fileno())
            if by_main == [True] and os.getppid() == learner:
                die_with_parent()

    os.register_at_fork(before=note_the_forking_thread, after_in_child=close)
