"""The learner's end of the conversation: what it has said, what it was told, what it waits for.

A state machine without clock, socket or tensor. Whoever drives it calls a method when the learner has something to say
and sends what the method returns; gives it what comes by `receive`; and sends what `retry` returns when an answer takes
long or the line was cut. Saying something twice does no harm.

    join -> (Welcome) -> [seeded ->] (Go) -> begin -> push or stop -> (Go) -> begin -> ...

A newer Go cancels the minibatch that is open. After `Fenced` it is nobody, and joins again by itself as a new
incarnation.
"""

from __future__ import annotations

from collections.abc import Iterator

from offbeat.server.wire import (
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
    Lease,
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
)


class Client:
    """See the module's text. `nonces` gives numbers that nobody has used before."""

    def __init__(self, learner: int, table: str, nonces: Iterator[int]) -> None:
        self.learner = learner
        self.table = table
        self.nonces = nonces
        self.nonce = 0
        self.incarnation = 0  # 0 while it is nobody
        self.before = 0  # the incarnation that it was
        self.refused: str | None = None
        self.gone = False  # it has said goodbye
        self.must_seed = False
        self.go: Go | None = None  # the newest, not begun yet
        self.seq = 0  # of the minibatch begun last
        self.version = 0  # and its version
        self.slot = 0
        self.void = 0  # minibatches up to this one are not wanted
        self.working = False
        self.fenced = False  # it was given up while it worked, or wrote the initial weights
        self.leases: tuple[Lease, ...] = ()  # of the minibatch that is open
        self.granted: Granted | None = None
        self.weights: Weights | None = None
        self.called: GroupCallAnswer | None = None
        self.rest: EnterPause | None = None  # that it was called to, and has not come to yet
        self.over = False  # the run is
        self._rests = (0, False)  # the last one that it has come to, and whether it led it
        self._rested: Paused | None = None  # it stands still
        self.halting = False  # it wants the run to end
        self.pausing = False  # it wants a rest that it leads
        self._answer: Push | Stop | Seeded | None = None
        self._want: Want | None = None
        self._ask: Ask | None = None
        self._call: GroupCall | None = None
        self._fetched: tuple[Fetched, ...] = ()  # the last ones
        self._seeds = True  # it may still be asked for the initial weights
        self._numbers = 0

    # --- what it hears --------------------------------------------------------------------------------------------

    def receive(self, message: TO_LEARNER | CancelWord) -> list[Message]:
        """What is to be said at once."""
        if isinstance(message, Welcome | Refused):
            if message.nonce == self.nonce:
                if isinstance(message, Refused):
                    self.refused = message.why
                else:
                    self._welcome(message)
            return []
        if message.incarnation != self.incarnation or self.gone:
            return []  # for one that it was before
        if isinstance(message, Fenced):
            if self.working or self.must_seed:  # another is given its slot when it comes again: not while it writes
                self.fenced = True
                self.void = max(self.void, self.seq)
                return []
            return self.join()
        if isinstance(message, Go):
            if message.seq > max(self.seq, self.void) and (self.go is None or message.seq > self.go.seq):
                self.go = message
                self.void = max(self.void, message.seq - 1)
        elif isinstance(message, CancelWord):
            self.void = max(self.void, message.seq)
            self._forget_void()
        elif isinstance(message, Granted):
            if self._want is not None and message.number == self._want.number:
                self._want, self.granted = None, message
                self.void = max(self.void, message.void)
                self._forget_void()
        elif isinstance(message, GroupCallAnswer):
            if self._call is not None and message.number == self._call.number:
                self._call, self.called = None, message
                self.void = max(self.void, message.void)
                self._forget_void()
        elif isinstance(message, EnterPause):
            if (message.number, message.lead) > self._rests:
                self.rest = message
        elif isinstance(message, EndPause):
            self.over = self.over or message.over  # one from before may come after
            if self._rested is not None and message.number >= self._rested.number:
                self._rested = None
            if self.rest is not None and message.number >= self.rest.number:
                self.rest = None
        elif self._ask is not None and message.number == self._ask.number:
            self._ask, self.weights = None, message
        return []

    def _welcome(self, message: Welcome) -> None:
        if self.incarnation == 0:
            self.incarnation = message.incarnation
        if message.incarnation == self.incarnation and message.seed and self._seeds:
            self.must_seed = True

    def _forget_void(self) -> None:
        if self.go is not None and self.go.seq <= self.void:
            self.go = None

    # --- what it says -----------------------------------------------------------------------------------------------

    def join(self) -> list[Message]:
        """Come, or come again."""
        self.before = self.incarnation or self.before
        self.nonce = next(self.nonces)
        self.incarnation = self.seq = self.void = 0
        self.go = self.granted = self.weights = self.called = None
        self._answer = self._want = self._ask = self._call = self._rested = self.rest = None
        self._rests = (0, False)
        self._fetched = ()
        self.working = self.must_seed = self.fenced = False
        self._seeds = True
        self.leases = ()
        return [self._hello()]

    def hello(self) -> list[Message]:
        """On a new line: I am still the one I was."""
        return [self._hello()] if self.nonce and not self.gone else []

    def _hello(self) -> Hello:
        return Hello(self.learner, self.nonce, self.table, self.before)

    def seeded(self) -> list[Message]:
        self.must_seed = self._seeds = False
        if self.fenced:
            return self.join()
        self._answer = Seeded(self.learner, self.incarnation)
        return [self._answer]

    def begin(self) -> Go:
        """Start the minibatch that it was told to compute."""
        go = self.go
        assert go is not None and not self.working
        self.go = None
        self.seq, self.version, self.slot = go.seq, go.version, go.slot
        self.working = True
        self._answer = None
        self.must_seed = self._seeds = False
        return go

    @property
    def cancelled(self) -> bool:
        """Whether the minibatch that is open is not wanted any more."""
        return self.working and self.seq <= self.void

    @property
    def wants(self) -> bool:
        """Whether it has asked for samples as the incarnation that it is, answered or not."""
        return self._want is not None or self.granted is not None

    @property
    def asks(self) -> bool:
        """The same of weights."""
        return self._ask is not None or self.weights is not None

    def fetched(self, pin: int) -> list[Message]:
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
        absent: tuple[int, ...] = (),
        began_s: float = 0.0,
        ended_s: float = 0.0,
    ) -> list[Message]:
        """The minibatch is done, and its gradient is in the slot."""
        answer = Push(
            self.learner,
            self.incarnation,
            self.seq,
            self.version if version is None else version,
            samples,
            loss,
            finite,
            hyper,
            tuple(lease[0] for lease in self.leases),
            absent,
            began_s,
            ended_s,
        )
        return self._say(answer)

    def stop(self, *, began_s: float = 0.0, ended_s: float = 0.0) -> list[Message]:
        """The minibatch was cancelled, and it has stopped."""
        leases = tuple(lease[0] for lease in self.leases)
        return self._say(Stop(self.learner, self.incarnation, self.seq, leases, began_s, ended_s, self.version))

    def _say(self, answer: Push | Stop) -> list[Message]:
        self.working = False
        self.leases = ()
        if self.fenced:
            return self.join()
        self._answer = answer
        return [answer]

    def ask(self) -> list[Message]:
        self._numbers += 1
        self._ask, self.weights = Ask(self.learner, self.incarnation, self._numbers), None
        return [self._ask]

    def want(self, *, epoch: int, count: int, of: int, wait: bool) -> list[Message]:
        self._numbers += 1
        answered = 0 if self.working else self.seq
        self._want = Want(self.learner, self.incarnation, self._numbers, epoch, count, of, wait, answered)
        self.granted = None
        return [self._want]

    @property
    def calls(self) -> bool:
        """Whether it has made a call as the incarnation that it is, answered or not."""
        return self._call is not None or self.called is not None

    def call(self, number: int, what: str, data: bytes) -> list[Message]:
        """To the other learners; without `what` its answer is not waited for any more."""
        call = GroupCall(self.learner, self.incarnation, number, what, data, 0 if self.working else self.seq)
        self._call, self.called = call if what else None, None
        return [call] if self.incarnation else []

    def give_back(self, leases: tuple[int, ...], *, unused: bool = False) -> list[Message]:
        here = self.incarnation and not self.gone
        return [GiveBack(self.learner, self.incarnation, leases, unused)] if here else []

    def take_rest(self) -> EnterPause | None:
        """The rest that it is called to, once."""
        rest, self.rest = self.rest, None
        if rest is not None:
            self._rests = rest.number, rest.lead
            self.pausing = self.pausing and not rest.lead
        return rest

    def rested(self, rest: EnterPause, *, stop: bool = False) -> list[Message]:
        """It stands still, or has done what there was to do; until it may rise, `resting` holds."""
        if rest.incarnation != self.incarnation:
            return []
        self._rested = Paused(self.learner, self.incarnation, rest.number, rest.lead, stop)
        return [self._rested]

    @property
    def resting(self) -> bool:
        return self._rested is not None

    def halt(self) -> list[Message]:
        """The run is to end. Said again until it has."""
        self.halting = True
        return [EndRequest(self.learner, self.incarnation)] if self.incarnation and not self.over else []

    def pause(self) -> list[Message]:
        """A rest is wanted that it leads. Said again until it does."""
        self.pausing = True
        return [PauseRequest(self.learner, self.incarnation)] if self.incarnation and not self.over else []

    def bye(self) -> list[Message]:
        said: list[Message] = [Bye(self.learner, self.incarnation)] if self.incarnation and not self.gone else []
        self.gone = True
        return said

    def retry(self) -> list[Message]:
        """What has not been answered. A Hello again brings back whatever this incarnation was told last."""
        if self.gone and self.incarnation:
            return [Bye(self.learner, self.incarnation)]
        if self.gone or self.refused is not None or self.nonce == 0:
            return []
        said: list[Message] = [] if self.working or self.go is not None else [self._hello()]
        if self.incarnation:
            asked = (*self._fetched, self._answer, self._want, self._ask, self._call, self._rested)
            said += [one for one in asked if one is not None]
            said += self.halt() if self.halting else []
            said += self.pause() if self.pausing else []
        return said
