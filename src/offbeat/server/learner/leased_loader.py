"""The loader's side of the leases: a user's loader that hands out what its learner has been leased.

`wrap` chooses. A torch `DataLoader` over a map-style data set in plain or shuffled order becomes a `LeasedLoader`: all
learners together go through each epoch once, whoever is slow, cancelled or gone. Anything else that can be iterated
becomes a `LocalLoader`: each learner goes through its own data, and only a cancelled batch is handed out again.

Law: a lease that was taken is either begun, just before its batch is handed to the user, or given back.

This file knows nothing of sockets, policies or gradients: these are behind `Source`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from offbeat.errors import RequestError
from offbeat.leases import Answer, Lease


class Source(Protocol):
    """What a loader asks; the real one speaks with the coordinator. One source serves one loader.

    All calls come from the thread that iterates, but for `give_back`, which Python may also call when it throws an
    iterator away, in any thread and as late as at the end of the process; it should then not raise.
    """

    def take(self, epoch: int, count: int, *, wait: bool) -> Lease | Answer:
        """At most `count` positions of the epoch's permutation.

        With `wait` only a lease or `ENDED` comes back. The learner then has no batch left, and the user is done with
        the last one: what was begun and will never be pushed must be settled first, or the learner waits for itself.
        """
        ...

    def begin(self, leases: Sequence[Lease]) -> None:
        """The batch that is handed to the user now carries these leases; none: it is the learner's own data."""
        ...

    def give_back(self, leases: Sequence[Lease]) -> None:
        """These were taken, and their batches will never be handed out: `LeaseBook.put_back`."""
        ...

    def was_cancelled(self) -> bool:
        """Whether the batch of the last `begin` was cancelled. Only a `LocalLoader` asks, when it wants the next."""
        ...


def seed_of(seed: int, epoch: int) -> int:
    """The seed of an epoch's permutation: the same for every learner, unrelated for another epoch or run."""
    return int.from_bytes(blake2b(f"{seed} {epoch}".encode(), digest_size=7).digest(), "big")


class Orders:
    """Which samples the positions of epochs are. The last few permutations are kept."""

    KEPT = 4

    def __init__(self, seed: int, samples: int, *, shuffled: bool = True) -> None:
        self.seed, self.samples, self.shuffled = seed, samples, shuffled
        self._orders: dict[int, torch.Tensor] = {}

    def indices(self, batch: Iterable[tuple[int, int, int]]) -> list[int]:
        """Of stretches (epoch, start, count)."""
        found: list[int] = []
        for epoch, start, count in batch:
            if self.shuffled:
                found += self._order(epoch)[start : start + count].tolist()
            else:
                found += range(start, start + count)
        return found

    def _order(self, epoch: int) -> torch.Tensor:
        if epoch not in self._orders:
            chance = torch.Generator(device="cpu").manual_seed(seed_of(self.seed, epoch))
            while len(self._orders) >= self.KEPT:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = torch.randperm(self.samples, generator=chance, device="cpu")
        return self._orders[epoch]


class LeasedLoader:
    """A `DataLoader` whose batches are what its learner is leased; iterating it is one epoch.

    Batches are built as the user's loader would (its data set, batch size, collate function, workers, ...), and with
    one learner and no shuffling they are the very same. A batch may be smaller where an odd piece came back. Workers
    live as long as they would: for one iteration, or, if they persist, as long as the loader.

    `epoch` is what the next iteration goes through. It rises when an epoch is over. A loop that is left early gives
    back what was fetched ahead, and the next loop goes on *in the same epoch*: a look at one batch costs nothing, and
    nobody waits for an epoch that all have left. A learner that joins late finds the epochs before empty. To resume,
    set `epoch`. One iteration at a time: a new one ends the one before it.

    `samples` is how many positions an epoch has, and the `LeaseBook` must have as many: all samples, or with
    `drop_last` those that fill whole batches (others in each epoch, if shuffled). Learners whose batch sizes differ
    must agree on it; only they can meet a short batch in spite of `drop_last`.

    `len()` counts the batches of the whole epoch, over all learners: how many one of them will get, nobody knows.
    All else is asked of the wrapped loader: `dataset`, `batch_size`, `sampler`, ...
    """

    def __init__(self, loader: DataLoader[Any], source: Source, *, seed: int) -> None:
        if why := why_local(loader):
            raise RequestError(f"this loader cannot be leased, since {why}; `wrap` makes it a LocalLoader")
        batches = loader.batch_sampler if type(loader.batch_sampler) is BatchSampler else None
        sampler: Any = batches.sampler if batches is not None else loader.sampler  # Any: one of the two just asked for
        size, batch = len(sampler), batches.batch_size if batches is not None else 1
        self.samples = size - size % batch if batches is not None and batches.drop_last else size
        if self.samples < 1:
            dropped = f", batches of {batch}, and drop_last" if size else ""
            raise RequestError(f"an epoch of this loader has no batch: {size} samples{dropped}")
        self.epoch = 0
        self.notes: tuple[str, ...] = ()
        if not loader.in_order:
            self.notes = ("in_order=False is not kept: batches come in the order in which they were leased",)
        self._loader = loader
        self._source = source
        self._feed = _Feed(
            source,
            seed=seed if type(sampler) is RandomSampler else None,
            size=size,
            samples=self.samples,
            batch=batch,
            listed=batches is not None,
        )
        self._lasting: DataLoader[Any] | None = None  # the loader inside, if its workers persist

    def __len__(self) -> int:
        return -(-self.samples // self._feed.batch)

    def __getattr__(self, name: str) -> Any:
        return _ask(self, name)

    def __iter__(self) -> Iterator[Any]:
        feed, epoch = self._feed, self.epoch
        turn = feed.start(epoch)
        inside: DataLoader[Any] | None = None
        try:
            while feed.wait():
                if inside is None:
                    inside = self._inside()
                for batch in inside:  # one pass: leases are taken ahead, until nothing is free
                    feed.begin()
                    yield batch
                    if feed.turn != turn:
                        raise RequestError("this iteration was ended by a newer one of the same loader")
            if self.epoch == epoch:
                self.epoch += 1
        finally:
            if feed.turn == turn:
                feed.give_back()

    def _inside(self) -> DataLoader[Any]:
        """The user's loader over the feed. Its workers outlive a pass, since an epoch can have many short ones."""
        if self._lasting is not None:
            return self._lasting
        user = self._loader
        order: dict[str, Any] = (
            {"batch_sampler": self._feed} if self._feed.listed else {"sampler": self._feed, "batch_size": None}
        )
        inside: DataLoader[Any] = DataLoader(
            user.dataset,
            **order,
            num_workers=user.num_workers,
            collate_fn=user.collate_fn,
            pin_memory=user.pin_memory,
            pin_memory_device=user.pin_memory_device,
            timeout=user.timeout,
            worker_init_fn=user.worker_init_fn,
            multiprocessing_context=user.multiprocessing_context,
            generator=user.generator,
            prefetch_factor=user.prefetch_factor,
            persistent_workers=user.num_workers > 0,
        )
        if user.persistent_workers:
            self._lasting = inside
        return inside


class _Feed:
    """The sampler of the loader inside: it takes leases, and knows those whose batches are still to come, in order.

    While batches are on their way it never waits: told `WAIT`, it ends the pass, and `wait` begins the next one when
    that is drained. So a learner that waits has nothing that others wait for.
    """

    def __init__(self, source: Source, *, seed: int | None, size: int, samples: int, batch: int, listed: bool) -> None:
        self.source = source
        self.seed = seed  # None: in plain order
        self.size, self.samples, self.batch = size, samples, batch
        self.listed = listed  # whether indices come in lists, one for each batch
        self.epoch = 0
        self.turn = 0  # counts iterations: only the newest may take
        self.first: Lease | None = None  # of the next pass
        self.coming: deque[Lease] = deque()
        self.permutation: tuple[int, torch.Tensor] | None = None  # and its epoch

    def start(self, epoch: int) -> int:
        """A new iteration; whatever one before it still has is given back."""
        self.turn += 1
        self.epoch = epoch
        self.give_back()
        return self.turn

    def wait(self) -> bool:
        """Wait for a lease to begin a pass with; False: the epoch is over."""
        answer = self.source.take(self.epoch, self.batch, wait=True)
        if answer is Answer.WAIT:
            raise AssertionError("Source.take with wait=True answers with a lease or ENDED; it said WAIT")
        self.first = answer if isinstance(answer, Lease) else None
        return self.first is not None

    def __iter__(self) -> Iterator[Any]:
        while True:
            answer = self.first or self.source.take(self.epoch, self.batch, wait=False)
            self.first = None
            if not isinstance(answer, Lease):
                return
            self.coming.append(answer)
            yield self._indices(answer)

    def begin(self) -> None:
        """The oldest batch is about to be handed out."""
        self.source.begin((self.coming[0],))
        self.coming.popleft()  # only now: had the source refused, it would have to be given back

    def give_back(self) -> None:
        """No batch will come any more."""
        leases = ((self.first,) if self.first else ()) + tuple(self.coming)
        self.first = None
        self.coming.clear()
        if leases:
            self.source.give_back(leases)

    def _indices(self, lease: Lease) -> Any:
        end = lease.start + lease.count
        if lease.epoch != self.epoch or not 0 <= lease.start < end <= self.samples or lease.count > self.batch:
            raise RequestError(
                f"{lease} does not fit epoch {self.epoch} of {self.samples} samples in batches of {self.batch}; "
                "do all learners have the same data set, and one batch size if drop_last?"
            )
        if self.seed is None:
            indices = list(range(lease.start, end))
        else:
            if self.permutation is None or self.permutation[0] != self.epoch:
                # On the CPU, whatever the default device: there the numbers are the same on every machine.
                chance = torch.Generator(device="cpu").manual_seed(seed_of(self.seed, self.epoch))
                self.permutation = self.epoch, torch.randperm(self.size, generator=chance, device="cpu")
            indices = self.permutation[1][lease.start : end].tolist()
        return indices if self.listed else indices[0]


class LocalLoader:
    """Any iterable: each learner goes through its own data, and a batch that was cancelled is handed out again.

    It is the same object that is handed out again: who changes batches in place finds them changed. `epoch` counts
    the iterations that came to their end; `notes` say in words what is not done for this loader, and why.
    All else is asked of the wrapped iterable.
    """

    def __init__(self, loader: Iterable[Any], source: Source, *, why: str = "") -> None:
        self._loader = loader
        self._source = source
        self.epoch = 0
        reason = f", since {why}" if why else ""
        self.notes = (
            f"every learner goes through its own data{reason}: what a learner that is lost had left is not seen, "
            "and learners given the same data all go through all of it",
        )

    def __len__(self) -> int:
        loader: Any = self._loader  # Any: has it no length, then its own error says so
        return len(loader)

    def __getattr__(self, name: str) -> Any:
        return _ask(self, name)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._source.begin(())
            yield batch
            while self._source.was_cancelled():
                self._source.begin(())
                yield batch
        self.epoch += 1


def wrap(loader: Any, source: Source, *, seed: int) -> LeasedLoader | LocalLoader:
    """The loader, fed by leases if it can be and local if not; what is wrapped already comes back as it is."""
    if isinstance(loader, (LeasedLoader, LocalLoader)):
        return loader
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise RequestError(f"a loader is something to iterate over, such as a DataLoader; this is {loader!r}")
    if why := why_local(loader):
        return LocalLoader(loader, source, why=why)
    return LeasedLoader(loader, source, seed=seed)


def why_local(loader: Any) -> str:
    """Why positions of a permutation cannot stand for this loader's batches; nothing if they can."""
    if not isinstance(loader, DataLoader):
        return f"it is no DataLoader but a {type(loader).__name__}"
    kind: Any = type(loader)  # Any: `_get_iterator` is torch's own, and overriding it is how some loaders differ
    plain: Any = DataLoader
    if kind.__iter__ is not plain.__iter__ or kind._get_iterator is not plain._get_iterator:
        return f"its class {kind.__name__} iterates in its own way"
    if isinstance(loader.dataset, IterableDataset):
        return "its data set is a stream (an IterableDataset)"
    order: Any = loader.sampler
    if loader.batch_sampler is not None:
        if type(loader.batch_sampler) is not BatchSampler:
            return f"it has a batch sampler of its own ({type(loader.batch_sampler).__name__})"
        order = loader.batch_sampler.sampler
    if type(order) not in (RandomSampler, SequentialSampler):
        return f"it has a sampler of its own ({type(order).__name__})"
    if type(order) is RandomSampler and order.replacement:
        return "it draws with replacement"
    try:
        through, size = (len(order), len(order.data_source)), len(loader.dataset)  # type: ignore[arg-type] # see except
    except TypeError:
        return "its data set has no length"
    if through != (size, size):
        return f"its sampler goes through {through[0]} samples of {through[1]}, and its data set has {size}"
    return ""


def _ask(wrapper: LeasedLoader | LocalLoader, name: str) -> Any:
    if name.startswith("_"):  # what is private is not the wrapped loader's to answer, `_loader` itself least of all
        raise AttributeError(f"{type(wrapper).__name__} has no attribute '{name}'")
    return getattr(wrapper._loader, name)
