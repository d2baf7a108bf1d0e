"""Who computes which samples: positions of each epoch's permutation, leased in pieces to learners that may go.

A lease walks like this; what ends on the left is free again, what ends on the right is settled, for good:

    take -> in hand -> hand_in -> held by the run
             |    \\                |      \\
       put_back   settle       give_back   settle
       give_back
       lose

Laws. Every position of the epoch is exactly once free, out (in hand or held) or settled; `check` says which law is
broken. An epoch is over when all its positions are settled, and the next begins only then: epochs do not overlap.
What a call refuses (`EventError`) leaves the book as it was.

The book knows no clock, socket, tensor, permutation or chance. It keeps ranges, not samples: its size grows with what
is out and with the holes that are still open, and of epochs that are over only the counts are left.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple

from offbeat.errors import EventError, RequestError

EPOCHS_KEPT = 1000  # whose counts are remembered


class Lease(NamedTuple):
    """Positions `start` up to `start + count` of the permutation of `epoch`; `number` is unique in a run."""

    number: int
    epoch: int
    start: int
    count: int  # type: ignore[assignment]  # a tuple's own `count` is never called here


class Answer(Enum):
    """Why there is no lease."""

    ENDED = "ended"  # that epoch is over: every position is settled
    WAIT = "wait"  # nothing is free, but something is out and may come back; or an earlier epoch is not over


class LeaseBook:
    """The leases of one run; see the module's text.

    `again`: what was cancelled, or dropped as too late, is leased again; otherwise it is counted as dropped.
    `epoch`: the first one.
    """

    def __init__(self, *, samples: int, again: bool = True, epoch: int = 0) -> None:
        if samples < 1:
            raise RequestError(f"an epoch has {samples} samples; there must be at least 1")
        if epoch < 0:
            raise RequestError(f"the first epoch is {epoch}; epochs are counted from 0")
        self.samples = samples
        self.again = again
        self.epoch = epoch  # the one that is not over; all before it are
        self._fresh = 0  # positions from here on have never been leased
        self._returned: deque[tuple[int, int]] = deque()  # (start, count), the oldest first
        self._out: dict[int, Lease] = {}  # by number, which is the order of taking
        self._holder: dict[int, int] = {}  # number -> the learner that has it in hand; none: held by the run
        self._settled: list[tuple[int, int]] = []  # (start, end), rising, with gaps between them
        # Samples by fate, for the epoch that runs and the last ones that are over.
        self.counts: dict[int, Counter[str]] = {epoch: Counter()}
        self._next = 0  # lease number

    # --- what learners do -------------------------------------------------------------------------------------

    def take(self, learner: int, epoch: int, count: int) -> Lease | Answer:
        """At most `count` positions, what came back first; less at an epoch's end or from a smaller piece."""
        if count < 1:
            raise EventError(f"learner {learner} takes {count} samples; it must take at least 1")
        if epoch < self.epoch:
            return Answer.ENDED
        if epoch > self.epoch:
            return Answer.WAIT
        if self._returned:
            start, size = self._returned.popleft()
            if size > count:
                self._returned.appendleft((start + count, size - count))
        elif self._fresh < self.samples:
            start, size = self._fresh, self.samples - self._fresh
            self._fresh += min(size, count)
        else:
            return Answer.WAIT
        lease = Lease(self._next, epoch, start, min(size, count))
        self._next += 1
        self._out[lease.number] = lease
        self._holder[lease.number] = learner
        return lease

    def hand_in(self, number: int) -> None:
        """A push with this lease has arrived: it is the run's now, and no longer goes with its learner."""
        if number not in self._holder:
            raise self._not_out(number, "handed in")
        del self._holder[number]

    def put_back(self, number: int) -> None:
        """Its learner never computed it: leased again, whatever `again` says. Not for what has been handed in."""
        if number not in self._holder:
            raise self._not_out(number, "put back")
        self._release(number)

    def lose(self, learner: int) -> tuple[Lease, ...]:
        """The learner is gone: what it had in hand (the answer) is leased again, whatever `again` says."""
        lost = self.in_hand(learner)
        for lease in lost:
            self._release(lease.number)
        return lost

    # --- what the run decides ---------------------------------------------------------------------------------

    def settle(self, number: int, fate: str) -> None:
        """Final, whatever `again` says. The fate is "applied", or why it was dropped ("non-finite", ...)."""
        if number not in self._out:
            raise self._not_out(number, f"settled as '{fate}'")
        lease = self._out.pop(number)
        self._holder.pop(number, None)
        self.counts[lease.epoch][fate] += lease.count
        self._fill(lease.start, lease.start + lease.count)
        if self._settled == [(0, self.samples)]:
            self._begin(self.epoch + 1)

    def give_back(self, number: int, fate: str) -> None:
        """Cancelled, or dropped as late or stale: leased again; without `again` settled as that fate."""
        if number not in self._out:
            raise self._not_out(number, f"given back as '{fate}'")
        if self.again:
            self._release(number)
        else:
            self.settle(number, fate)

    # --- what is known ----------------------------------------------------------------------------------------

    @property
    def free(self) -> int:
        """How many samples of this epoch could be taken now."""
        return self.samples - self._fresh + sum(count for _, count in self._returned)

    def in_hand(self, learner: int) -> tuple[Lease, ...]:
        """What the learner has taken and not handed in, in the order of taking."""
        return tuple(self._out[number] for number, holder in self._holder.items() if holder == learner)

    def lease(self, number: int) -> Lease:
        """One that is out."""
        return self._out[number]

    def recount(self, epoch: int, count: int, before: str, now: str) -> None:
        """Samples that were settled as one fate have met another."""
        fates = self.counts.get(epoch)
        if fates is not None:
            fates[before] -= count
            fates[now] += count
            if not fates[before]:
                del fates[before]

    def check(self) -> None:
        """Raise `AssertionError`, naming the law that is broken and where."""
        pieces = [
            *((start, stop, "settled") for start, stop in self._settled),
            *((lease.start, lease.start + lease.count, f"lease {lease.number}") for lease in self._out.values()),
            *((start, start + count, "returned") for start, count in self._returned),
        ]
        if self._fresh < self.samples:
            pieces.append((self._fresh, self.samples, "fresh"))
        end, before = 0, "the start"
        for start, stop, what in sorted(pieces):
            law = "every position is either free, leased or settled, exactly once"
            _demand(start < stop, f"no piece is empty: {what} is {start}..{stop}")
            _demand(start == end, f"{law}: {before} ends at {end} and {what} begins at {start}")
            end, before = stop, what
        _demand(end == self.samples, f"an epoch has {self.samples} positions: {before} ends at {end}")
        _demand(self._settled != [(0, self.samples)], f"a finished epoch must be left, but epoch {self.epoch} was not")
        for number, lease in self._out.items():
            _demand(lease.epoch == self.epoch, f"epochs do not overlap, but {lease} is leased in epoch {self.epoch}")
            _demand(
                lease.number == number < self._next,
                f"a lease must be stored under its own number, but {lease} is stored under {number}",
            )
        _demand(
            self._holder.keys() <= self._out.keys(),
            f"a lease that a learner holds must be open, but some of {self._holder} are not",
        )
        for epoch, fates in self.counts.items():
            due = self.samples if epoch < self.epoch else sum(stop - start for start, stop in self._settled)
            _demand(
                fates.total() == due,
                f"each settled sample is counted once, but epoch {epoch} counts {fates} instead of {due}",
            )
        _demand(max(self.counts) == self.epoch, f"the last epoch with counts must be the current epoch, {self.epoch}")

    # --- a coordinator that comes back ------------------------------------------------------------------------

    def snapshot(self, *, all_back: bool = False) -> dict[str, Any]:
        """All of the state as plain data (numbers, texts, lists), which `restore` takes.

        `all_back`: as if everything that is out had come back, in the order of the permutation.
        """
        out = list(self._out.values())
        returned = [*self._returned, *(sorted((lease.start, lease.count) for lease in out) if all_back else ())]
        return {
            "samples": self.samples,
            "epoch": self.epoch,
            "fresh": self._fresh,
            "returned": [list(piece) for piece in returned],
            "out": [] if all_back else [[*lease, self._holder.get(lease.number)] for lease in out],
            "settled": [list(piece) for piece in self._settled],
            "counts": [[epoch, dict(fates)] for epoch, fates in self.counts.items()],
            "next": self._next,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on where `snapshot` was taken; a state that breaks a law is refused and changes nothing.

        What was out is out again. Who knows that its learner or its gradient is gone says so: `lose`, `give_back`.
        """
        if state.get("samples") != self.samples:
            came = state.get("samples")
            raise RequestError(
                f"the snapshot of the leases has epochs of {came} samples, but this run has {self.samples}"
            )
        book = LeaseBook(samples=self.samples, again=self.again)
        try:
            book.epoch, book._fresh, book._next = state["epoch"], state["fresh"], state["next"]
            book._returned = deque((start, count) for start, count in state["returned"])
            for *fields, learner in state["out"]:
                lease = Lease(*fields)
                book._out[lease.number] = lease
                if learner is not None:
                    book._holder[lease.number] = learner
            book._settled = [(start, end) for start, end in state["settled"]]
            book.counts = {epoch: Counter(fates) for epoch, fates in state["counts"]}
            book.check()
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise RequestError(f"the snapshot of the leases is incomplete: {error!r}") from None
        vars(self).update(vars(book))

    # --- the insides ------------------------------------------------------------------------------------------

    def _release(self, number: int) -> None:
        lease = self._out.pop(number)
        self._holder.pop(number, None)
        self._returned.append((lease.start, lease.count))

    def _fill(self, start: int, end: int) -> None:
        """Add a piece to what is settled, and join it with its neighbours."""
        at = bisect_left(self._settled, (start, end))
        if at < len(self._settled) and self._settled[at][0] == end:
            end = self._settled.pop(at)[1]
        if at > 0 and self._settled[at - 1][1] == start:
            at -= 1
            start = self._settled.pop(at)[0]
        self._settled.insert(at, (start, end))

    def _begin(self, epoch: int) -> None:
        self.epoch, self._fresh = epoch, 0
        self._settled.clear()
        self.counts[epoch] = Counter()
        self.counts.pop(epoch - EPOCHS_KEPT - 1, None)

    def _not_out(self, number: int, deed: str) -> EventError:
        if number in self._out:
            return EventError(
                f"lease {number} cannot be {deed}: its gradient was already pushed, so it belongs to the run"
            )
        why = "it was already returned or settled" if 0 <= number < self._next else "no lease has this number"
        return EventError(f"lease {number} cannot be {deed}: {why}")


def _demand(kept: bool, law: str) -> None:
    # Not `assert`: the laws hold under `python -O` too.
    if not kept:
        raise AssertionError(law)
