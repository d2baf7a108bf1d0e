"""Which samples a simulated learner computes next: a stream without end, or epoch by epoch as the real run has it.

    Stream    learners take the next minibatch of an endless row of epochs, each in a permutation of its own; a
              minibatch may hold the end of one and the beginning of the next. Nobody ever waits for samples.
    Epochs    an epoch begins when every sample of the one before is settled (`leases.LeaseBook`, the book of the real
              server): at its end learners step aside, and the last minibatch is a smaller one.

Laws: what was taken is settled once, or given back and taken again; with `again` false, what is given back counts as
dropped. No clock, no chance: which samples the positions are is said by whoever trains.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Protocol

from offbeat.errors import EventError, RequestError
from offbeat.leases import Lease, LeaseBook

Batch = tuple[tuple[int, int, int], ...]  # (epoch, start, count) of each stretch of positions


class Book(Protocol):
    """What a simulation asks. `taken` below is what `take` gave."""

    @property
    def over(self) -> bool:
        """Whether all epochs are."""
        ...

    @property
    def free(self) -> bool:
        """Whether there are samples to take now."""
        ...

    def take(self, learner: int) -> Batch | None:
        """The learner's next minibatch; None: there is none now."""
        ...

    def settle(self, taken: Batch, fate: str = "applied") -> None: ...
    def give_back(self, taken: Batch, fate: str) -> None: ...

    def put_back(self, taken: Batch) -> None:
        """It went with its learner: taken again, whatever is done with what is given back."""
        ...

    def settle_held(self) -> None:
        """Only gradients that wait for more to come keep an epoch open: let it end."""
        ...

    @property
    def counts(self) -> dict[str, int]:
        """Samples by fate, of all epochs."""
        ...

    @property
    def dropped(self) -> dict[str, int]:
        """Those that were not applied, by reason."""
        ...


def samples_of(batch: Batch) -> int:
    return sum(count for _, _, count in batch)


class _Counts:
    """Samples by fate."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def _count(self, taken: Batch, fate: str) -> None:
        self._counts[fate] = self._counts.get(fate, 0) + samples_of(taken)

    @property
    def counts(self) -> dict[str, int]:
        return dict(self._counts)

    @property
    def dropped(self) -> dict[str, int]:
        return {fate: many for fate, many in self._counts.items() if fate != "applied"}


class Stream(_Counts):
    """See the module's text. `sizes`: samples in a minibatch of each learner."""

    def __init__(self, *, samples: int, sizes: tuple[int, ...], epochs: int, again: bool = True) -> None:
        if min(sizes, default=0) < 1 or samples < 1 or epochs < 1:
            raise RequestError(f"minibatches of {sizes} samples, of {samples}, in {epochs} epochs: all must be above 0")
        self.samples, self.sizes, self.again = samples, sizes, again
        self._total = samples * epochs
        self._next = 0
        self._returned: deque[Batch] = deque()
        super().__init__()
        self._settled = 0

    @property
    def over(self) -> bool:
        return self._settled >= self._total

    @property
    def free(self) -> bool:
        return True

    def take(self, learner: int) -> Batch:
        if self._returned:
            return self._returned.popleft()
        batch: list[tuple[int, int, int]] = []
        left = self.sizes[learner]
        while left:
            epoch, start = divmod(self._next, self.samples)
            count = min(left, self.samples - start)
            batch.append((epoch, start, count))
            self._next += count
            left -= count
        return tuple(batch)

    def settle(self, taken: Batch, fate: str = "applied") -> None:
        self._settled += samples_of(taken)
        self._count(taken, fate)

    def give_back(self, taken: Batch, fate: str) -> None:
        if self.again:
            self._returned.append(taken)
        else:
            self.settle(taken, fate)

    def put_back(self, taken: Batch) -> None:
        self._returned.append(taken)

    def settle_held(self) -> None:
        raise EventError("a stream of samples never waits for gradients")


class Epochs(_Counts):
    """See the module's text."""

    def __init__(self, *, samples: int, sizes: tuple[int, ...], epochs: int, again: bool = True) -> None:
        self.sizes, self.epochs = sizes, epochs
        self._book = LeaseBook(samples=samples, again=again)
        self._out: dict[Batch, int] = {}  # the number of its lease
        self._early: set[Batch] = set()  # settled before their update was made
        super().__init__()

    @property
    def over(self) -> bool:
        return self._book.epoch >= self.epochs

    @property
    def free(self) -> bool:
        return not self.over and self._book.free > 0

    def take(self, learner: int) -> Batch | None:
        if self.over:
            return None
        lease = self._book.take(learner, self._book.epoch, self.sizes[learner])
        if not isinstance(lease, Lease):
            return None
        batch = ((lease.epoch, lease.start, lease.count),)
        self._out[batch] = lease.number
        return batch

    def settle(self, taken: Batch, fate: str = "applied") -> None:
        if taken in self._early:
            self._early.remove(taken)
        else:
            self._book.settle(self._out.pop(taken), fate)
        self._count(taken, fate)

    def give_back(self, taken: Batch, fate: str) -> None:
        self._book.give_back(self._out.pop(taken), fate)
        if not self._book.again:
            self._count(taken, fate)

    def put_back(self, taken: Batch) -> None:
        self._book.put_back(self._out.pop(taken))

    def settle_held(self) -> None:
        for batch, number in self._out.items():
            self._book.settle(number, "held")
            self._early.add(batch)
        self._out.clear()


def pieces_of(stream: Stream) -> Iterator[tuple[Batch, ...]]:
    """For an all-reduce: update by update, what each learner computes."""
    while not stream.over:
        pieces = tuple(stream.take(learner) for learner in range(len(stream.sizes)))
        for piece in pieces:
            stream.settle(piece)
        yield pieces
