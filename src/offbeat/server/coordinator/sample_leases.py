"""The samples of a run: which learner is leased some, which one waits, and what comes back.

The book (`leases`) knows which samples are where; here it is decided when a learner is answered. A learner that waits
keeps its `Want` in its session. This file knows nothing of the policy, of slots or of weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from offbeat.errors import RequestError
from offbeat.leases import Answer, Lease, LeaseBook
from offbeat.server.coordinator.pauses import Pauses
from offbeat.server.coordinator.session import Gradient, LearnerSession
from offbeat.server.run_setting import RunSetting
from offbeat.server.wire import GiveBack, Granted, Want


class SampleLeases:
    """See the module's text. There is no book before a learner has said how many samples an epoch has."""

    def __init__(self, setting: RunSetting, pauses: Pauses) -> None:
        self.setting, self.pauses = setting, pauses
        self.book: LeaseBook | None = None
        self.samples: Counter[str] = Counter()  # by fate

    # --- wants --------------------------------------------------------------------------------------------------------

    def want(self, session: LearnerSession, want: Want) -> Granted | None:
        """The answer, where there is one now; else the learner waits. `RequestError` if its data is another's."""
        if session.granted is not None and session.granted.number == want.number:
            return session.granted
        if want.number <= session.wanted or want.seq in session.versions:
            return None  # it waits already, or is an old one; or what it said before has not come yet
        session.wanted = want.number
        if self.book is None:
            # From the epoch on that is first asked for: a program may go on from a checkpoint of its own.
            self.book = LeaseBook(samples=want.of, again=self.setting.again, epoch=max(0, want.epoch))
            if self.setting.book is not None:
                self.book.restore(self.setting.book)
            self.pauses.epoch = self.book.epoch
        if self.book.samples != want.of:
            raise RequestError(
                f"its data set has {want.of} samples, but that of other learners has {self.book.samples}"
            )
        if want.wait:  # it has nothing left: if it has, then word of it was lost
            for lease in self.book.in_hand(session.learner):
                self.book.put_back(lease.number)
        session.want = want
        return self.answer(session)

    def answer(self, session: LearnerSession) -> Granted | None:
        """To a learner that wants samples, unless it has to wait."""
        want = session.want
        assert want is not None
        found = self._find(session.learner, want)
        if found is Answer.WAIT and want.wait:
            return None
        session.want = None
        lease = None if isinstance(found, Answer) else (found.number, found.epoch, found.start, found.count)
        session.granted = Granted(
            session.learner,
            session.incarnation,
            want.number,
            "lease" if lease is not None else "ended" if found is Answer.ENDED else "wait",
            lease,
            session.answered,
        )
        return session.granted

    def _find(self, learner: int, want: Want) -> Lease | Answer:
        """Samples, or why there are none. In a pause at an epoch's end nobody leaves that epoch, or begins the next."""
        assert self.book is not None
        self.pauses.note_epoch(self.book.epoch)
        if self.pauses.at_epoch_end and want.epoch >= self.book.epoch - 1:
            return Answer.WAIT
        return self.book.take(learner, want.epoch, want.count)

    # --- what comes back ----------------------------------------------------------------------------------------------

    def in_hand(self, sessions: Iterable[LearnerSession]) -> bool:
        """Whether one of them has samples that it may still compute."""
        return self.book is not None and any(self.book.in_hand(session.learner) for session in sessions)

    def _mine(self, session: LearnerSession, leases: Iterable[int]) -> tuple[int, ...]:
        """Those of the leases that the learner really has, each once."""
        have = () if self.book is None else {lease.number for lease in self.book.in_hand(session.learner)}
        return tuple(number for number in dict.fromkeys(leases) if number in have)

    def hand_in(self, session: LearnerSession, leases: Iterable[int]) -> tuple[int, ...]:
        """Those of the leases that this learner really has: from now on they are the run's."""
        mine = self._mine(session, leases)
        for number in mine:
            assert self.book is not None
            self.book.hand_in(number)
        return mine

    def not_computed(self, session: LearnerSession, message: GiveBack) -> None:
        """The learner gives back what it will not compute."""
        for number in sorted(self._mine(session, message.leases)):
            assert self.book is not None
            if message.unused:
                self.samples["not used"] += self.book.lease(number).count
                self.book.settle(number, "not used")
            else:
                self.book.put_back(number)

    def lose(self, learner: int) -> None:
        """The learner is gone, and with it what it had."""
        for lease in () if self.book is None else self.book.lose(learner):
            self.samples["computed again: lost with its learner"] += lease.count

    def give_back(self, leases: Iterable[int], fate: str) -> None:
        """What was handed in was cancelled or dropped: it is computed again, if the run does that."""
        for number in leases:
            assert self.book is not None
            count = self.book.lease(number).count
            self.book.give_back(number, fate)
            self.samples[f"computed again: {fate}" if self.setting.again else fate] += count

    def settle(self, gradient: Gradient, fate: str) -> None:
        """The samples of a gradient are applied or dropped, for good."""
        self.samples[fate] += gradient.samples
        if self.book is not None:
            for number in gradient.leases:
                self.book.settle(number, fate)
            for epoch, count in gradient.epochs:
                self.book.recount(epoch, count, "held", fate)

    def end_epoch(self, gradients: Iterable[Gradient]) -> None:
        """What is left of the epoch are these gradients, which wait for more: they count for it as held."""
        assert self.book is not None
        for gradient in gradients:
            for number in gradient.leases:
                lease = self.book.lease(number)
                self.book.settle(number, "held")
                gradient.epochs.append((lease.epoch, lease.count))
            gradient.leases = ()
