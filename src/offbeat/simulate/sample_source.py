"""Which samples a simulated learner computes next: one long stream, or epoch by epoch as the real run has it.

    Epochs    an epoch begins when every sample of the one before is settled (`leases.LeaseBook`, the book of the real
              server): at its end learners step aside, and the last minibatch is a smaller one.
    Stream    the epochs lie one behind the other, each in a permutation of its own, and only the last one has an end;
              a minibatch may hold the end of one and the beginning of the next.

Laws: a run takes exactly `epochs` times `samples`, and both books end alike. What was taken is settled once, or given
back and taken again; with `again` false, what is given back counts as dropped. No clock, no chance: which samples the
positions are is said by whoever trains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from offbeat.errors import RequestError
from offbeat.leases import Lease, LeaseBook

Batch = tuple[tuple[int, int, int], ...]  # (epoch, start, count) of each stretch of positions
NOT_FULL = "the run ended before its update was full"  # the fate of gradients that wait when there are no more samples


def count_samples(batch: Batch) -> int:
    return sum(count for _, _, count in batch)


class Epochs:
    """See the module's text. `sizes`: samples in a minibatch of each learner. `taken` below is what `take` gave."""

    def __init__(self, *, samples: int, sizes: tuple[int, ...], epochs: int, again: bool = True) -> None:
        if min(sizes, default=0) < 1 or samples < 1 or epochs < 1:
            raise RequestError(
                f"minibatch sizes, samples and epochs must be above 0; got {sizes}, {samples} and {epochs}"
            )
        self.samples, self.sizes, self.epochs, self.again = samples, sizes, epochs, again
        self._leases = LeaseBook(samples=samples, again=again)
        self._out: dict[Batch, int] = {}  # the number of its lease
        self._early: set[Batch] = set()  # settled before their update was made
        self._counts: Counter[str] = Counter()  # samples by fate

    @property
    def over(self) -> bool:
        """Whether all epochs are."""
        return self._leases.epoch >= self.epochs

    @property
    def free(self) -> bool:
        """Whether there are samples to take now."""
        return not self.over and self._leases.free > 0

    def take(self, learner: int) -> Batch | None:
        """The learner's next minibatch; None: there is none now."""
        if self.over:
            return None
        lease = self._leases.take(learner, self._leases.epoch, self.sizes[learner])
        if not isinstance(lease, Lease):
            return None
        batch = self._batch(lease)
        self._out[batch] = lease.number
        return batch

    def _batch(self, lease: Lease) -> Batch:
        return ((lease.epoch, lease.start, lease.count),)

    def settle(self, taken: Batch, fate: str = "applied") -> None:
        if taken in self._early:
            self._early.remove(taken)
        else:
            self._leases.settle(self._out.pop(taken), fate)
        self._counts[fate] += count_samples(taken)

    def give_back(self, taken: Batch, fate: str) -> None:
        self._leases.give_back(self._out.pop(taken), fate)
        if not self.again:
            self._counts[fate] += count_samples(taken)

    def put_back(self, taken: Batch) -> None:
        """It went with its learner: taken again, whatever is done with what is given back."""
        self._leases.put_back(self._out.pop(taken))

    def settle_held(self) -> None:
        """Only gradients that wait for more to come keep an epoch open: let it end."""
        for batch, number in self._out.items():
            self._leases.settle(number, "held")
            self._early.add(batch)
        self._out.clear()

    @property
    def counts(self) -> dict[str, int]:
        """Samples by fate, of all epochs."""
        held = sum(map(count_samples, self._early)) if self.over else 0
        return {**self._counts, **({NOT_FULL: held} if held else {})}

    @property
    def dropped(self) -> dict[str, int]:
        """Those that were not applied, by reason."""
        return {fate: many for fate, many in self.counts.items() if fate != "applied"}


class Stream(Epochs):
    """See the module's text: for the book one long epoch."""

    def __init__(self, *, samples: int, sizes: tuple[int, ...], epochs: int, again: bool = True) -> None:
        super().__init__(samples=samples * epochs, sizes=sizes, epochs=1, again=again)
        self.samples = samples

    def _batch(self, lease: Lease) -> Batch:
        at, end, batch = lease.start, lease.start + lease.count, []
        while at < end:
            epoch, start = divmod(at, self.samples)
            count = min(end - at, self.samples - start)
            batch.append((epoch, start, count))
            at += count
        return tuple(batch)


def batches_of_updates(stream: Stream) -> Iterator[tuple[Batch, ...]]:
    """For an all-reduce: update by update, what each learner computes; in the last one some may have nothing."""
    while not stream.over:
        taken = (stream.take(learner) for learner in range(len(stream.sizes)))
        pieces = tuple(piece for piece in taken if piece is not None)
        for piece in pieces:
            stream.settle(piece)
        yield pieces
