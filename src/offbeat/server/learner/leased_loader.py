"""The loader's side of the leases: a user's loader that hands out what its learner has been leased.

`wrap` chooses. A torch `DataLoader` over a map-style data set in plain or shuffled order becomes a `LeasedLoader`: all
learners together go through each epoch once, whoever is slow, cancelled or gone. Anything else that can be iterated
becomes a `LocalLoader`: each learner reads its own data, and only a cancelled batch is handed out again.

Law: a lease that was taken is either begun, just before its batch is handed to the user, or given back.

This file knows nothing of sockets, policies or gradients: these are behind `LeaseSource`.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from offbeat.errors import RequestError
from offbeat.leases import Answer, Lease

_SOCKET_NAME_BYTES = 107


class LeaseSource(Protocol):
    """What a loader asks; the real one speaks with the coordinator. One source serves one loader.

    All calls come from the thread that iterates, but for `give_back`, which Python may also call when it throws an
    iterator away, in any thread and as late as at the end of the process; it should then not raise.
    """

    def take(self, epoch: int, count: int, *, wait: bool) -> Lease | Answer:
        """At most `count` positions of the epoch's permutation.

        With `wait` only a lease or `ENDED` comes back. The learner then has no batch left, and the user is done with
        the last one: what was begun and will never be pushed must be settled first, or the learner waits for itself.
        """

    def begin(self, leases: Sequence[Lease]) -> None:
        """The batch that is handed to the user now carries these leases; none: it is the learner's own data."""

    def give_back(self, leases: Sequence[Lease]) -> None:
        """These were taken, and their batches will never be handed out: `LeaseBook.put_back`."""

    def was_cancelled(self) -> bool:
        """Whether the batch of the last `begin` was cancelled. Only a `LocalLoader` asks, when it wants the next."""


@lru_cache(16)
def seed_of(seed: int, epoch: int) -> int:
    """The seed of an epoch's permutation: the same for every learner, unrelated for another epoch or run."""
    return int.from_bytes(blake2b(f"{seed} {epoch}".encode(), digest_size=7).digest(), "big")


class SampleOrder:
    """Which samples the positions of epochs are. The last few permutations are kept."""

    KEPT = 4

    def __init__(self, seed: int, samples: int, *, shuffled: bool = True) -> None:
        self.seed, self.samples, self.shuffled = seed, samples, shuffled
        self._permutation = lru_cache(self.KEPT)(self._shuffle)  # by epoch

    def indices(self, batch: Iterable[tuple[int, int, int]]) -> list[int]:
        """Of stretches (epoch, start, count)."""
        found: list[int] = []
        for one in batch:
            found += self.stretch(*one).tolist()
        return found

    def stretch(self, epoch: int, start: int, count: int) -> torch.Tensor:
        if not self.shuffled:
            return torch.arange(start, max(start, min(start + count, self.samples)), device="cpu")
        return self._permutation(epoch)[start : start + count]

    def _shuffle(self, epoch: int) -> torch.Tensor:
        # On the CPU, whatever the default device: there the numbers are the same on every machine.
        chance = torch.Generator(device="cpu").manual_seed(seed_of(self.seed, epoch))
        return torch.randperm(self.samples, generator=chance, device="cpu")


class LoaderWrapper:
    """A user's loader in the hands of a learner. `epoch` counts; what is not defined here is the wrapped loader's.

    `notes` say in words what is done otherwise than with the loader by itself, and why.
    """

    def __init__(self, loader: Any) -> None:
        if isinstance(loader, DataLoader) and loader.num_workers:
            _check_temporary_folder()
        self._loader = loader
        self.epoch = 0
        self.notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self._loader)  # has it no length, then its own error says so

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what is private is not the wrapped loader's to answer, `_loader` itself least of all
            raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")
        return getattr(self._loader, name)


def _check_temporary_folder() -> None:
    """Workers hand tensors over by a socket in a folder of TMPDIR; where its name is too long, torch waits for ever."""
    folder = tempfile.gettempdir()
    most = _SOCKET_NAME_BYTES - len("/pymp-xxxxxxxx/listener-xxxxxxxx")
    by_socket = torch.multiprocessing.get_sharing_strategy() == "file_descriptor"  # type: ignore[no-untyped-call]
    if by_socket and len(os.fsencode(folder)) > most:
        raise RequestError(
            f"the workers of a DataLoader cannot work with a TMPDIR of more than {most} characters: {folder}; "
            "set TMPDIR to a shorter path"
        )


def rebuilt(loader: DataLoader[Any], *, persistent_workers: bool, **order: Any) -> DataLoader[Any]:
    """A loader like this one, in another order (`sampler`, `batch_sampler`, ...)."""
    return DataLoader(
        loader.dataset,
        **order,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        pin_memory_device=loader.pin_memory_device,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=persistent_workers,
    )


class LeasedLoader(LoaderWrapper):
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
    """

    def __init__(self, loader: DataLoader[Any], source: LeaseSource, *, seed: int) -> None:
        super().__init__(loader)
        if why := why_local(loader):
            raise RequestError(
                f"this loader cannot be shared between learners, since {why}; use `wrap`, which makes a LocalLoader"
            )
        batches = loader.batch_sampler if type(loader.batch_sampler) is BatchSampler else None
        sampler: Any = batches.sampler if batches is not None else loader.sampler  # Any: one of the two just asked for
        size, batch = len(sampler), batches.batch_size if batches is not None else 1
        self.samples = size - size % batch if batches is not None and batches.drop_last else size
        if self.samples < 1:
            dropped = f", batches of {batch}, and drop_last" if size else ""
            raise RequestError(f"an epoch of this loader has no minibatch: {size} samples{dropped}")
        if not loader.in_order:
            self.notes = ("in_order=False is ignored: minibatches keep the order in which they were leased",)
        order = SampleOrder(seed, size, shuffled=type(sampler) is RandomSampler)
        self._sampler = _LeaseSampler(source, order, self.samples, batch, listed=batches is not None)
        self._persistent: DataLoader[Any] | None = None  # the loader inside, if its workers persist

    def __len__(self) -> int:
        return -(-self.samples // self._sampler.batch)

    def __iter__(self) -> Iterator[Any]:
        leases, epoch = self._sampler, self.epoch
        turn = leases.start(epoch)
        inside: DataLoader[Any] | None = None
        try:
            while leases.wait():
                if inside is None:
                    inside = self._inside()
                for batch in inside:  # one pass: leases are taken ahead, until nothing is free
                    leases.begin()
                    yield batch
                    if leases.turn != turn:
                        raise RequestError("this iteration was ended by a newer one of the same loader")
            if self.epoch == epoch:
                self.epoch += 1
        finally:
            if leases.turn == turn:
                leases.give_back()

    def _inside(self) -> DataLoader[Any]:
        """The user's loader over the leases. Its workers outlive a pass: an epoch can have many short ones."""
        if self._persistent is not None:
            return self._persistent
        leases = self._sampler
        order = {"batch_sampler": leases} if leases.listed else {"sampler": leases, "batch_size": None}
        inside = rebuilt(self._loader, persistent_workers=self._loader.num_workers > 0, **order)
        if self._loader.persistent_workers:
            self._persistent = inside
        return inside


class _LeaseSampler:
    """The sampler of the loader inside: it takes leases, and knows those whose batches are still to come, in order.

    While batches are on their way it never waits: told `WAIT`, it ends the pass, and `wait` begins the next one when
    that is drained. So a learner that waits has nothing that others wait for.
    """

    def __init__(self, source: LeaseSource, order: SampleOrder, samples: int, batch: int, *, listed: bool) -> None:
        self.source, self.order, self.samples, self.batch = source, order, samples, batch
        self.listed = listed  # whether indices come in lists, one for each batch
        self.epoch = 0
        self.turn = 0  # counts iterations: only the newest may take
        self.first: Lease | None = None  # of the next pass
        self.coming: deque[Lease] = deque()

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
            raise AssertionError("LeaseSource.take with wait=True must return a lease or ENDED; it returned WAIT")
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
        indices = self.order.indices([lease[1:]])
        return indices if self.listed else indices[0]


class LocalLoader(LoaderWrapper):
    """Any iterable: each learner reads its own data, and a batch that was cancelled is handed out again.

    It is the same object that is handed out again: who changes batches in place finds them changed. `epoch` counts
    the iterations that came to their end.
    """

    def __init__(self, loader: Iterable[Any], source: LeaseSource, *, why: str = "") -> None:
        super().__init__(loader)
        self._source = source
        reason = f", since {why}" if why else ""
        self.notes = (
            f"every learner reads its own data{reason}; the remaining samples of a lost learner are not "
            "computed, and learners that have the same data each compute all of it",
        )

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._source.begin(())
            yield batch
            while self._source.was_cancelled():
                self._source.begin(())
                yield batch
        self.epoch += 1


def wrap(loader: Any, source: LeaseSource, *, seed: int) -> LeasedLoader | LocalLoader:
    """The loader, fed by leases if it can be and local if not; what is wrapped already comes back as it is."""
    if isinstance(loader, (LeasedLoader, LocalLoader)):
        return loader
    if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
        raise RequestError(f"expected an iterable loader, such as a DataLoader; got {loader!r}")
    if why := why_local(loader):
        return LocalLoader(loader, source, why=why)
    return LeasedLoader(loader, source, seed=seed)


def why_local(loader: Any) -> str:
    """Why positions of a permutation cannot stand for this loader's batches; nothing if they can."""
    if not isinstance(loader, DataLoader):
        return f"it is a {type(loader).__name__}, not a DataLoader"
    kind: Any = type(loader)  # Any: `_get_iterator` is torch's own, and overriding it is how some loaders differ
    plain: Any = DataLoader
    if kind.__iter__ is not plain.__iter__ or kind._get_iterator is not plain._get_iterator:
        return f"its class {kind.__name__} overrides iteration"
    if isinstance(loader.dataset, IterableDataset):
        return "its data set is a stream (an IterableDataset)"
    order: Any = loader.sampler
    if loader.batch_sampler is not None:
        if type(loader.batch_sampler) is not BatchSampler:
            return f"it has a custom batch sampler ({type(loader.batch_sampler).__name__})"
        order = loader.batch_sampler.sampler
    if type(order) not in (RandomSampler, SequentialSampler):
        return f"it has a custom sampler ({type(order).__name__})"
    if type(order) is RandomSampler and order.replacement:
        return "it samples with replacement"
    try:
        through, size = (len(order), len(order.data_source)), len(loader.dataset)  # type: ignore[arg-type] # see except
    except TypeError:
        return "its data set has no length"
    if through != (size, size):
        return f"its sampler goes through {through[0]} samples of {through[1]}, and its data set has {size}"
    return ""
