"""A learner's line to the run: the client machine, the socket, and a thread that listens.

The thread reads what comes, gives a sign of life, and comes in again when the line was cut (a coordinator that was
killed comes back). Whoever waits for an answer waits on a condition, and is told when the run is gone for good.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from offbeat.errors import OffbeatError, PeerError, RequestError
from offbeat.processes.child import die_with_parent
from offbeat.server import handshake
from offbeat.server.arena import Arena, stamp
from offbeat.server.learner.client import Client
from offbeat.server.parameter_layout import ParameterLayout
from offbeat.server.wire import MOST_BYTES, PROTOCOL, TO_LEARNER, EnterPause, Message, WireError, decode_output, encode

BEAT_S = 0.2
RETRY_S = 2.0  # an answer that takes longer may have been lost
_AGAIN_S = 600.0  # for a coordinator that goes through its journal
_NOBODY_S = 1.0  # for a door that is not there
_FIRST_S = 60.0  # to find the run at all
_PAUSE_S = 0.05  # before connecting again
T = TypeVar("T")


class RunOverError(OffbeatError):
    """The run has ended before its time: somebody wanted it to, and all was saved."""


class Link:
    """See the module's text. Methods may be called from any thread."""

    def __init__(
        self,
        name: str,
        token: str,
        learner: int,
        table: ParameterLayout,
        at_rest: Callable[[EnterPause], bool] = lambda rest: False,
    ) -> None:
        self.name = name
        self.introduction = handshake.Handshake(PROTOCOL, token, "learner", learner, handshake.versions(), table)
        self.line, self.admission, self.arena = self._come_in()
        self.client = Client(learner, table.digest, _nonces())
        self.changed = threading.Condition()
        self.failed: OffbeatError | None = None
        self.closed = False
        self.rested_s = 0.0
        self.halt_wanted = False  # whoever waits says so; may be set by a signal handler
        self.at_rest = at_rest  # what is to be done; True: the run is to end
        self._cancel = self.arena.cancel_word(learner)
        self._fence = self.arena.fence_word(learner)
        self._beat = self.arena.beat_word(learner)
        self._heard_s = time.monotonic()
        self._stamp = 0  # of the minibatch that is open
        self._thread = threading.Thread(target=self._listen, name="offbeat", daemon=True)
        _forget_in_children(self)
        with self.changed:
            self._send(self.client.join())
        self._thread.start()

    def _come_in(self) -> tuple[socket.socket, handshake.Accept, Arena]:
        """For the first time. A coordinator may be killed while it opens the door."""
        end = time.monotonic() + _FIRST_S
        while True:
            try:
                return handshake.connect(self.name, self.introduction, _FIRST_S)
            except PeerError:
                if time.monotonic() > end:
                    raise
                time.sleep(_PAUSE_S)

    # --- speaking ---------------------------------------------------------------------------------------------------

    def say(self, make: Callable[[Client], list[Message]]) -> None:
        """What the client has to say now."""
        with self.changed:
            self._send(make(self.client))

    def wait(
        self,
        ready: Callable[[Client], T | None],
        what: str,
        timeout_s: float | None = None,
        *,
        rests: bool = False,
    ) -> T:
        """What `ready` finds, as soon as it finds something. `PeerError` when the run is gone, or the time is up.

        Who may rest here says so: it writes nothing, and does not mind that it takes long.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self.changed:
            while True:
                if self.client.over:
                    raise RunOverError("the run is over")
                if self.halt_wanted and not self.client.halting and self.client.incarnation:
                    self._send(self.client.halt())
                if self.client.refused is not None:
                    raise RequestError(f"the run sent learner {self.client.learner} away: {self.client.refused}")
                if rests and (rest := self.client.take_rest()) is not None:
                    self._rest(rest)
                    continue
                found = ready(self.client)
                if found is not None:
                    return found
                if self.failed is not None:
                    raise self.failed
                if end is not None and time.monotonic() > end:
                    raise PeerError(f"waited {timeout_s:g} s for {what}")
                self.changed.wait(1.0)

    def _rest(self, rest: EnterPause) -> None:
        """Stand still until all may rise. What is to be done meanwhile is done without the lock: others listen on."""
        began_s = time.monotonic()
        self.changed.release()
        try:
            stop = self.at_rest(rest)
        finally:
            self.changed.acquire()
        self._send(self.client.rested(rest, stop=stop))
        client = self.client
        while client.resting and client.rest is None and not (client.over or client.fenced or client.refused):
            if self.failed is not None:
                break
            self.changed.wait(1.0)
        self.rested_s += time.monotonic() - began_s

    def _send(self, messages: Iterable[Message]) -> None:
        for message in messages:
            with contextlib.suppress(OSError):  # the listener sees that the line is cut, and all is said again
                self.line.send(encode(message))

    # --- what a learner looks at while it computes ------------------------------------------------------------------

    def opened(self) -> None:
        """A minibatch has begun."""
        self._stamp = stamp(self.client.incarnation, self.client.seq)

    def is_cancelled(self) -> bool:
        """Whether the minibatch that is open is not wanted: one look at a word that is shared, one at our own."""
        return self._cancel.view[self._cancel.index] >= self._stamp or self.client.void >= self.client.seq

    def nap(self, most_s: float) -> None:
        """Sleep, but not on when the minibatch is cancelled."""
        seen = self._cancel.get()
        if seen < self._stamp:
            self._cancel.sleep(seen, most_s)

    def is_fenced(self, incarnation: int) -> bool:
        """Whether this incarnation was given up: what it has read may be torn."""
        return self._fence.get() >= incarnation

    # --- listening --------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while not self.closed:
                readable, _, _ = select.select([self.line], [], [], BEAT_S)
                self._beat.view[self._beat.index] = (self._beat.get() + 1) & 0xFFFFFFFF
                if readable:
                    self._read()
                elif time.monotonic() - self._heard_s > RETRY_S:
                    self._heard_s = time.monotonic()
                    self.say(lambda client: client.retry())
        except OffbeatError as error:
            self._fail(error)
        except (OSError, ValueError) as error:
            if not self.closed:
                self._fail(PeerError(f"the line to the run broke: {error}"))

    def _fail(self, error: OffbeatError) -> None:
        with self.changed:
            self.failed = error
            self.changed.notify_all()

    def _read(self) -> None:
        try:
            data = self.line.recv(MOST_BYTES)
        except OSError:
            data = b""
        if not data:
            self._come_again()
            return
        message = decode_output(data)
        if not isinstance(message, TO_LEARNER):
            raise WireError(f"a learner was told {message}")
        if not isinstance(message, EnterPause):  # that is no answer, and is said again and again
            self._heard_s = time.monotonic()
        with self.changed:
            self._send(self.client.receive(message))
            self.changed.notify_all()

    def _come_again(self) -> None:
        """The coordinator is gone; perhaps another takes its place."""
        start = time.monotonic()
        self.line.close()
        while not self.closed:
            try:
                line, _, _ = handshake.connect(self.name, self.introduction, handshake.GREETING_S)
                break
            except PeerError as error:
                most_s = _NOBODY_S if isinstance(error, handshake.RunGoneError) else _AGAIN_S
                if self.client.gone or time.monotonic() - start > most_s:
                    raise PeerError("the run is gone: its coordinator does not answer any more") from None
                time.sleep(_PAUSE_S)
        else:
            return
        with self.changed:
            self.line = line
            self._send([*self.client.hello(), *self.client.retry()])

    def close(self) -> None:
        """Say goodbye and hang up."""
        if self.closed:
            return
        self.say(lambda client: client.bye())
        self.closed = True
        with contextlib.suppress(OSError):
            self.line.shutdown(socket.SHUT_RDWR)
        self._thread.join(2.0)
        self.line.close()


def _nonces() -> Iterator[int]:
    while True:
        yield secrets.randbits(62) + 1


def _forget_in_children(link: Link) -> None:
    """A process that is forked off (to load data) must not keep the line open when its parent dies, nor outlive it.

    The kernel ends a child with the thread that has forked it: only the main thread is sure to live as long as all.
    """
    known = weakref.ref(link)
    learner = os.getpid()
    by_main: list[bool] = []

    def look() -> None:
        by_main[:] = [threading.current_thread() is threading.main_thread()]

    def forget() -> None:
        mine = known()
        if mine is not None:
            mine.closed = True
            with contextlib.suppress(OSError):
                os.close(mine.line.fileno())
            if by_main == [True] and os.getppid() == learner:
                die_with_parent()

    os.register_at_fork(before=look, after_in_child=forget)
