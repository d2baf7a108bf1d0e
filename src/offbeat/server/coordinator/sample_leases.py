"""The coordinator's dealings in samples: who asks for some, who is answered, who waits, and what comes back.

A part of the coordinator, in a file of its own. The book (`leases`) knows which samples are where; here it is decided
when a learner hears of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from offbeat.leases import Answer, Lease, LeaseBook
from offbeat.policies import Policy
from offbeat.server.coordinator.grants import Grants
from offbeat.server.coordinator.pauses import Pauses
from offbeat.server.coordinator.session import Gradient, LearnerSession, Setting
from offbeat.server.wire import FROM_STAY, OUTPUT, GiveBack, Granted, Push, Refused, Want


class SampleLeases:
    """See the module's text; what it needs of the coordinator is named here."""

    setting: Setting
    policy: Policy
    rows: dict[int, LearnerSession]
    desk: Grants
    rests: Pauses
    book: LeaseBook | None
    gradients: dict[int, Gradient]
    inbox: list[tuple[Push, Gradient]]
    samples: Counter[str]
    seeded: bool
    finished: bool
    _out: list[OUTPUT]

    def _known(self, message: FROM_STAY) -> LearnerSession | None:
        raise NotImplementedError

    def _seat(self, row: LearnerSession) -> None:
        raise NotImplementedError

    def _give_up(self, row: LearnerSession, *, why: str, may_wake: bool) -> None:
        raise NotImplementedError

    def _want(self, message: Want) -> None:
        row = self._known(message)
        if row is None:
            return
        if row.granted is not None and row.granted.number == message.number:
            self._out.append(row.granted)
            return
        if message.number <= row.wanted or message.seq in row.versions:
            return  # it waits already, or is an old one; or what it said before has not come yet
        row.wanted = message.number
        if self.book is None:
            self.book = self._new_book(message.of, max(0, message.epoch))
        if self.book.samples != message.of:
            why = f"its data has {message.of} samples, that of others {self.book.samples}"
            self._out.append(Refused(row.learner, row.nonce, why))
            self._give_up(row, why="other data", may_wake=True)
            return
        if message.wait:  # it has nothing left: if it has, then word of it was lost
            for lease in self.book.in_hand(row.learner):
                self.book.put_back(lease.number)
        if not self._serve(row, message):
            row.want = message
        elif not row.seated and self.seeded:
            self._seat(row)

    def _new_book(self, samples: int, epoch: int) -> LeaseBook:
        """From the epoch on that is first asked for: a program may go on from a checkpoint of its own."""
        book = LeaseBook(samples=samples, again=self.setting.again, epoch=epoch)
        if self.setting.book is not None:
            book.restore(self.setting.book)
        self.rests.epoch = book.epoch
        return book

    def _find(self, learner: int, want: Want) -> Lease | Answer:
        """Samples, or why there are none. In a rest at an epoch's end nobody leaves that epoch, or begins the next."""
        assert self.book is not None
        self.rests.look_at(self.book.epoch)
        if self.rests.at_epoch_end and want.epoch >= self.book.epoch - 1:
            return Answer.WAIT
        return self.book.take(learner, want.epoch, want.count)

    def _serve(self, row: LearnerSession, want: Want) -> bool:
        """Answer a learner that wants samples, unless it has to wait."""
        assert self.book is not None
        found = self._find(row.learner, want)
        if found is Answer.WAIT and want.wait:
            return False
        row.want = None
        lease = None if isinstance(found, Answer) else (found.number, found.epoch, found.start, found.count)
        said = found.value if isinstance(found, Answer) else "lease"
        answer = Granted(row.learner, row.incarnation, want.number, said, lease, row.answered)
        row.granted = answer
        self._out.append(answer)
        return True

    def _give_back(self, message: GiveBack) -> None:
        row = self._known(message)
        if row is not None and self.book is not None:
            have = {lease.number for lease in self.book.in_hand(row.learner)}
            for number in sorted(have.intersection(message.leases)):
                if message.unused:
                    self.samples["not used"] += self.book.lease(number).count
                    self.book.settle(number, "not used")
                else:
                    self.book.put_back(number)

    def _hand_in(self, row: LearnerSession, leases: Iterable[int]) -> tuple[int, ...]:
        """Those of the leases that this learner really has: from now on they are the run's."""
        if self.book is None:
            return ()
        have = {lease.number for lease in self.book.in_hand(row.learner)}
        mine = tuple(number for number in leases if number in have)
        for number in mine:
            self.book.hand_in(number)
        return mine

    def _back(self, leases: Iterable[int], fate: str) -> None:
        for number in leases:
            assert self.book is not None
            count = self.book.lease(number).count
            self.book.give_back(number, fate)
            self.samples[f"computed again: {fate}" if self.setting.again else fate] += count

    def _serve_waiting(self) -> bool:
        """Whoever waits for samples, if there are some now, or the epoch has ended."""
        book = self.book
        if book is None or self.finished:
            return False
        waiting = [row for row in self.rows.values() if row.want is not None]
        served = [row for row in waiting if row.want is not None and self._serve(row, row.want)]
        stuck = waiting and not served and not self.rests.due and not self._under_way() and self.desk.idle
        if stuck and not self._somebody_comes():
            # Nothing is free or being computed: what is left are gradients that wait for more to come. They are
            # applied with those of the next epoch.
            for gradient in self.gradients.values():
                for number in gradient.leases:
                    lease = book.lease(number)
                    book.settle(number, "held")
                    gradient.epochs.append((lease.epoch, lease.count))
                gradient.leases = ()
            served = [row for row in waiting if row.want is not None and self._serve(row, row.want)]
        for row in served:  # together: at an epoch's end all go on with the same version
            if not row.seated and self.seeded:
                self._seat(row)
        return bool(served)

    def _somebody_comes(self) -> bool:
        """Where all rest between epochs: whether one that may compute has yet to ask for samples.

        By that the policy hears that no more is coming, and may make an update of what it holds. It is not waited for
        where learners do as they like between epochs: who knows when it asks.
        """
        seats = self.policy.learners
        computing = {learner for learner, seat in seats.items() if seat.computing}
        return self.rests.at_epochs and any(row.want is None for row in self.rows.values() if row.learner in computing)

    def _under_way(self) -> bool:
        assert self.book is not None
        return bool(self.inbox) or any(self.book.in_hand(row.learner) for row in self.rows.values())
