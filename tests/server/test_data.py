"""Loaders of several learners in one process, over one book: each sample once, whatever happens on the way."""

from __future__ import annotations

import copy
import random
import re
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from offbeat.errors import RequestError
from offbeat.leases import Answer, Lease, LeaseBook
from offbeat.server.learner.leased_loader import LeasedLoader, LocalLoader, seed_of, wrap

# Neither is this test's business: how many cores there are, and that torch forks a process that has threads.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded"),
]


class Numbers(Dataset[torch.Tensor]):
    """Sample i is the number i; it refuses those that are bad."""

    def __init__(self, size: int, bad: int = -1) -> None:
        self.size, self.bad = size, bad

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.bad:
            raise LookupError(f"sample {index} cannot be read")
        return torch.tensor(index)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(6))


class Fake:
    """A source over a book. What was begun is `open` until the test says what became of it.

    Asked to wait where it would have to wait, it lets `meanwhile` happen: what other learners do.
    """

    def __init__(self, book: LeaseBook, learner: int = 0, meanwhile: Callable[[], None] | None = None) -> None:
        self.book, self.learner, self.meanwhile = book, learner, meanwhile
        self.open: deque[Lease] = deque()
        self.begun: list[tuple[Lease, ...]] = []
        self.cancels: deque[bool] = deque()
        self.refuse = False

    def take(self, epoch: int, count: int, *, wait: bool) -> Lease | Answer:
        for _ in range(100):
            answer = self.book.take(self.learner, epoch, count)
            if answer is not Answer.WAIT or not wait:
                return answer
            assert set(self.book.in_hand(self.learner)) <= set(self.open), "it waits with batches in its pipeline"
            assert self.meanwhile is not None, "it waits for ever"
            self.meanwhile()
        raise AssertionError("it waits for ever")

    def begin(self, leases: Sequence[Lease]) -> None:
        if self.refuse:
            raise ConnectionError("gone")
        self.begun.append(tuple(leases))
        self.open.extend(leases)

    def give_back(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            assert lease not in self.open
            self.book.put_back(lease.number)

    def was_cancelled(self) -> bool:
        return self.cancels.popleft() if self.cancels else False

    def push(self) -> None:
        """Every open batch is pushed, and applied at once."""
        while self.open:
            number = self.open.popleft().number
            self.book.hand_in(number)
            self.book.settle(number, "applied")

    def cancel(self) -> None:
        while self.open:
            self.book.give_back(self.open.popleft().number, "cancelled")


def alone(loader: DataLoader[Any], *, seed: int = 0, **book: Any) -> tuple[LeasedLoader, Fake]:
    samples = len(loader) * (loader.batch_size or 1) if loader.drop_last else len(loader.sampler)  # type: ignore[arg-type] # every sampler here has a length
    source = Fake(LeaseBook(samples=samples, **book))
    leased = LeasedLoader(loader, source, seed=seed)
    assert leased.samples == samples
    return leased, source


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def an_epoch(leased: LeasedLoader, source: Fake) -> list[list[int]]:
    """The batches of one epoch of a learner that pushes each before it wants the next."""
    batches = []
    for batch in leased:
        batches.append(batch.tolist())
        source.push()
    return batches


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("drop_last", [False, True])
def test_one_learner_gets_the_batches_of_the_plain_loader(workers: int, drop_last: bool) -> None:
    def twice(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) * 2

    plain = DataLoader(Numbers(19), batch_size=4, num_workers=workers, drop_last=drop_last, collate_fn=twice)
    leased, source = alone(plain)
    assert len(leased) == len(plain)
    for epoch in range(2):
        assert leased.epoch == epoch
        assert an_epoch(leased, source) == [batch.tolist() for batch in plain]
        assert source.book.counts[epoch] == {"applied": leased.samples}
        assert [lease.start for (lease,) in source.begun] == [0, 4, 8, 12, 16][: len(plain)]
        source.begun.clear()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffled_epoch_is_a_permutation_of_its_seed(workers: int) -> None:
    def epochs(seed: int) -> list[list[int]]:
        loader = DataLoader(Numbers(50), batch_size=8, shuffle=True, num_workers=workers)
        leased, source = alone(loader, seed=seed)
        return [flat(an_epoch(leased, source)) for _ in range(2)]

    first, second = epochs(seed=1)
    assert first == torch.randperm(50, generator=torch.Generator().manual_seed(seed_of(1, 0))).tolist()
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert [first, second] == epochs(seed=1)
    assert epochs(seed=0)[1] != first  # seed and epoch are not just added


def test_with_drop_last_and_shuffling_each_epoch_drops_others() -> None:
    leased, source = alone(DataLoader(Numbers(11), batch_size=4, shuffle=True, drop_last=True))
    seen = [sorted(flat(an_epoch(leased, source))) for _ in range(6)]
    assert {len(set(epoch)) for epoch in seen} == {8}
    assert len({tuple(epoch) for epoch in seen}) > 1


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_learners_together_see_each_sample_once_in_each_epoch(workers: int, shuffle: bool, seed: int) -> None:
    """Batch sizes and speeds differ, learners are cancelled and leave the loop; what is pushed counts."""
    chance = random.Random(seed)
    samples, epochs = (25, 1) if workers else (101, 3)
    book = LeaseBook(samples=samples)
    applied: Counter[tuple[int, int]] = Counter()
    learners: list[Learner] = []

    class Learner:
        def __init__(self, number: int) -> None:
            self.source = Fake(book, number, self.others_go_on)
            data = DataLoader(Numbers(samples), batch_size=(4, 3, 7)[number], shuffle=shuffle, num_workers=workers)
            self.loader = LeasedLoader(data, self.source, seed=5)
            self.batches: Iterator[torch.Tensor] | None = None
            self.last: tuple[Lease, torch.Tensor] | None = None
            self.running = False

        def others_go_on(self) -> None:
            for other in learners:
                if other is not self and not other.running:
                    other.finish_batch(cancel=False)
                    # One that is not waiting itself gives up what it has fetched ahead, so that nobody waits for it.
                    other.batches = None

        def finish_batch(self, cancel: bool) -> None:
            if self.last is None:
                return
            (lease, batch), self.last = self.last, None
            if cancel:
                self.source.cancel()
            else:
                self.source.push()
                applied.update((lease.epoch, number) for number in batch.tolist())

        def step(self) -> None:
            self.finish_batch(cancel=chance.random() < 0.2)
            if self.batches is None or chance.random() < 0.05:
                self.batches = None  # it breaks out of its loop ...
                self.batches = iter(self.loader)  # ... and begins another
            self.running = True
            batch = next(self.batches, None)
            self.running = False
            if batch is None:
                self.batches = None
            else:
                ((lease,),) = self.source.begun[-1:]
                assert lease.count == len(batch)
                self.last = lease, batch

    learners.extend(Learner(number) for number in range(2 if workers else 3))
    for _ in range(10_000):
        going = [learner for learner in learners if learner.loader.epoch < epochs]
        if not going:
            break
        chance.choice(going).step()
        book.check()
    assert applied == Counter((epoch, number) for epoch in range(epochs) for number in range(samples))
    assert [book.counts[epoch] for epoch in range(epochs)] == [{"applied": samples}] * epochs


@pytest.mark.parametrize("workers", [0, 2])
def test_a_cancelled_batch_comes_again_in_another_pass(workers: int) -> None:
    leased, source = alone(DataLoader(Numbers(8), batch_size=2, num_workers=workers))
    seen = []
    for batch in leased:
        seen.append(batch.tolist())
        if len(seen) in (1, 4, 5):
            source.cancel()
        else:
            source.push()
    if workers:  # all four were on their way when the first was cancelled
        assert seen[:4] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert sorted(seen[4:]) == [[0, 1], [0, 1], [6, 7]]
    else:
        assert seen == [[0, 1], [0, 1], [2, 3], [4, 5], [4, 5], [4, 5], [6, 7]]
    assert source.book.counts[0] == {"applied": 8}
    assert source.book.epoch == leased.epoch == 1


def test_a_learner_that_finds_nothing_waits_for_what_others_may_give_back() -> None:
    book = LeaseBook(samples=6)
    other = book.take(1, 0, 4)
    assert isinstance(other, Lease)

    def the_other_dies() -> None:
        book.lose(1)

    mine = Fake(book, 0, meanwhile=the_other_dies)
    leased = LeasedLoader(DataLoader(Numbers(6), batch_size=4), mine, seed=0)
    assert an_epoch(leased, mine) == [[4, 5], [0, 1, 2, 3]]


def test_workers_are_refused_where_the_name_of_their_socket_would_be_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch drops what such a worker has read, and waits for it for ever."""
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + 71 * "x")
    LeasedLoader(DataLoader(Numbers(4)), Fake(LeaseBook(samples=4)), seed=0)
    with pytest.raises(RequestError, match=r"TMPDIR of more than 75 characters: .*; set TMPDIR to a shorter path"):
        LeasedLoader(DataLoader(Numbers(4), num_workers=1), Fake(LeaseBook(samples=4)), seed=0)


@pytest.mark.parametrize("persistent", [False, True])
def test_what_was_fetched_ahead_is_given_back_when_the_user_leaves_the_loop(persistent: bool) -> None:
    loader = DataLoader(Numbers(40), batch_size=2, num_workers=2, persistent_workers=persistent)
    leased, source = alone(loader, again=False)
    for batch in leased:
        assert batch.tolist() == [0, 1]
        assert len(source.book.in_hand(0)) > 1
        break
    assert source.book.in_hand(0) == tuple(source.open)
    assert leased.epoch == 0
    source.push()
    rest = an_epoch(leased, source)
    assert sorted(flat(rest)) == list(range(2, 40))
    assert source.book.counts[0] == {"applied": 40}
    assert sorted(flat(an_epoch(leased, source))) == list(range(40))


def test_a_new_iteration_ends_the_one_before_it() -> None:
    leased, source = alone(DataLoader(Numbers(6), batch_size=2, num_workers=2))
    old = iter(leased)
    next(old)
    source.push()
    assert sorted(an_epoch(leased, source)) == [[2, 3], [4, 5]]  # and does not wait for what the old one had fetched
    with pytest.raises(RequestError, match="ended by a newer one"):
        next(old)
    assert leased.epoch == 1
    source.book.check()


def test_an_old_iteration_that_goes_takes_nothing_from_the_new_one() -> None:
    leased, source = alone(DataLoader(Numbers(40), batch_size=2, num_workers=2))
    old = iter(leased)
    next(old)
    new = iter(leased)
    next(new)
    before = source.book.in_hand(0)
    assert len(before) > len(source.open)
    del old
    assert source.book.in_hand(0) == before


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_the_data_set_reaches_the_user_and_keeps_no_lease(workers: int) -> None:
    leased, source = alone(DataLoader(Numbers(20, bad=5), batch_size=2, num_workers=workers))
    with pytest.raises(LookupError, match="sample 5 cannot be read"):
        an_epoch(leased, source)
    assert source.book.in_hand(0) == ()
    assert source.book.counts[0] == {"applied": 4}


def test_a_batch_that_the_source_refuses_to_begin_is_given_back() -> None:
    leased, source = alone(DataLoader(Numbers(4), batch_size=2))
    source.refuse = True
    with pytest.raises(ConnectionError):
        next(iter(leased))
    assert source.book.in_hand(0) == ()


def test_a_late_learner_finds_the_epochs_before_empty() -> None:
    leased, source = alone(DataLoader(Numbers(4), batch_size=2), epoch=2)
    assert [an_epoch(leased, source) for _ in range(3)] == [[], [], [[0, 1], [2, 3]]]


def test_a_run_is_resumed_by_setting_the_epoch() -> None:
    plain = DataLoader(Numbers(9), batch_size=4, shuffle=True)
    first, source = alone(plain)
    whole = [an_epoch(first, source) for _ in range(3)]
    second, source = alone(plain, epoch=2)
    second.epoch = 2
    assert an_epoch(second, source) == whole[2]


def test_a_loader_without_batches_of_its_own_is_leased_sample_by_sample() -> None:
    plain = DataLoader(Numbers(5), batch_size=None)
    leased, source = alone(plain)
    assert an_epoch(leased, source) == [batch.tolist() for batch in plain] == [0, 1, 2, 3, 4]
    assert len(leased) == 5


def test_workers_start_once_in_an_epoch_and_once_in_all_if_they_persist() -> None:
    for persistent, expected in ((False, 4), (True, 2)):
        started = torch.zeros(1, dtype=torch.int64)
        started.share_memory_()  # type: ignore[no-untyped-call]  # torch has no type for it

        def count(worker: int, started: torch.Tensor = started) -> None:
            started.add_(worker + 1)  # 1 + 2 = 3 for each start of both

        loader = DataLoader(
            Numbers(4), batch_size=2, num_workers=2, worker_init_fn=count, persistent_workers=persistent
        )
        leased, source = alone(loader)
        for _ in range(2):
            cancels = 3
            for _batch in leased:
                source.push() if not cancels else source.cancel()
                cancels = max(0, cancels - 1)
        assert leased.epoch == 2
        assert started.item() == 3 * expected / 2


def test_the_users_loader_answers_for_all_else() -> None:
    data = Numbers(10)
    leased, _ = alone(DataLoader(data, batch_size=5))
    assert leased.dataset is data
    assert leased.batch_size == 5
    assert copy.copy(leased).samples == 10
    with pytest.raises(AttributeError, match="colour"):
        _ = leased.colour
    with pytest.raises(AttributeError, match="_secret"):
        _ = leased._secret


def test_a_lease_that_does_not_fit_is_named() -> None:
    source = Fake(LeaseBook(samples=12))
    leased = LeasedLoader(DataLoader(Numbers(10), batch_size=6), source, seed=0)
    with pytest.raises(RequestError, match=r"start=6.*10 samples"):
        an_epoch(leased, source)
    assert source.book.in_hand(0) == ()


@pytest.mark.parametrize("lease", [Lease(0, 1, 0, 2), Lease(0, 0, 0, 5), Lease(0, 0, 0, 0), Lease(0, 0, -1, 2)])
def test_a_lease_of_another_epoch_or_size_is_named(lease: Lease) -> None:
    class Odd(Fake):
        def take(self, epoch: int, count: int, *, wait: bool) -> Lease | Answer:
            return lease

        def give_back(self, leases: Sequence[Lease]) -> None:
            assert list(leases) == [lease]

    leased = LeasedLoader(DataLoader(Numbers(10), batch_size=4), Odd(LeaseBook(samples=10)), seed=0)
    with pytest.raises(RequestError, match="does not fit epoch 0 of 10 samples in batches of 4"):
        next(iter(leased))


def test_a_source_that_does_not_wait_is_named() -> None:
    class Hasty(Fake):
        def take(self, epoch: int, count: int, *, wait: bool) -> Lease | Answer:
            return Answer.WAIT

    leased = LeasedLoader(DataLoader(NUMBERS), Hasty(LeaseBook(samples=6)), seed=0)
    with pytest.raises(AssertionError, match="it returned WAIT"):
        next(iter(leased))


def test_a_lease_is_given_back_once_when_the_workers_cannot_start() -> None:
    def refuse() -> None:
        raise OSError("no process left")

    leased, source = alone(DataLoader(NUMBERS, batch_size=2))
    inside, leased._inside = leased._inside, refuse  # type: ignore[method-assign,assignment]  # the fault, planted
    with pytest.raises(OSError, match="no process left"):
        next(iter(leased))
    assert source.book.in_hand(0) == ()
    leased._inside = inside  # type: ignore[method-assign]  # and mended
    assert len(an_epoch(leased, source)) == 3


def test_a_loader_without_a_batch_is_refused() -> None:
    for loader, why in (
        (DataLoader(Numbers(3), batch_size=4, drop_last=True), "3 samples, batches of 4, and drop_last"),
        (DataLoader(Numbers(0)), "0 samples$"),
    ):
        with pytest.raises(RequestError, match=why):
            wrap(loader, Fake(LeaseBook(samples=1)), seed=0)


class OwnBatches(BatchSampler):
    pass


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        return super().__iter__()


NUMBERS = Numbers(6)
LOCAL: list[tuple[Any, str]] = [
    (DataLoader(Stream()), "a stream"),
    (DataLoader(NUMBERS, batch_sampler=[[0, 1], [2]]), r"custom batch sampler \(list\)"),
    (DataLoader(NUMBERS, batch_sampler=OwnBatches(SequentialSampler(NUMBERS), 2, False)), "OwnBatches"),
    (DataLoader(NUMBERS, sampler=SubsetRandomSampler([0, 1])), "SubsetRandomSampler"),
    (DataLoader(NUMBERS, sampler=WeightedRandomSampler([1.0] * 6, 6)), "WeightedRandomSampler"),
    (DataLoader(NUMBERS, sampler=RandomSampler(NUMBERS, replacement=True)), "with replacement"),
    (DataLoader(NUMBERS, sampler=RandomSampler(NUMBERS, num_samples=4)), "4 samples of 6"),
    (DataLoader(NUMBERS, sampler=SequentialSampler(range(3))), "3 samples of 3, and its data set has 6"),
    (OwnLoader(NUMBERS), "OwnLoader overrides iteration"),
    ([1, 2, 3], "it is a list, not a DataLoader"),
]


@pytest.mark.parametrize(("loader", "why"), LOCAL)
def test_what_cannot_be_leased_is_local_and_says_why(loader: Any, why: str) -> None:
    source = Fake(LeaseBook(samples=1))
    wrapped = wrap(loader, source, seed=0)
    assert isinstance(wrapped, LocalLoader)
    (note,) = wrapped.notes
    assert re.search(f"reads its own data, since .*{why}", note)
    assert len(list(wrapped)) == len(list(loader))
    assert wrap(wrapped, source, seed=0) is wrapped
    if isinstance(loader, DataLoader):
        with pytest.raises(RequestError, match=why):
            LeasedLoader(loader, source, seed=0)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(NUMBERS, batch_size=2),
        DataLoader(NUMBERS, batch_size=2, shuffle=True),
        DataLoader(NUMBERS, sampler=RandomSampler(NUMBERS), batch_size=3),
        DataLoader(NUMBERS, batch_sampler=BatchSampler(RandomSampler(NUMBERS), 4, False)),
        DataLoader(Subset(NUMBERS, [5, 4, 3, 2, 1, 0]), batch_size=4),
    ],
)
def test_what_can_be_leased_is(loader: DataLoader[Any]) -> None:
    source = Fake(LeaseBook(samples=6))
    wrapped = wrap(loader, source, seed=0)
    assert isinstance(wrapped, LeasedLoader)
    assert wrapped.notes == ()
    assert len(wrapped) == len(loader)
    assert sorted(flat(an_epoch(wrapped, source))) == list(range(6))
    assert wrap(wrapped, source, seed=0) is wrapped


def test_batches_out_of_order_are_not_kept_and_a_note_says_so() -> None:
    leased, source = alone(DataLoader(NUMBERS, batch_size=2, num_workers=2, in_order=False))
    assert "in_order=False is ignored" in leased.notes[0]
    assert an_epoch(leased, source) == [[0, 1], [2, 3], [4, 5]]


def test_what_cannot_be_iterated_is_refused() -> None:
    with pytest.raises(RequestError, match="got 5"):
        wrap(5, Fake(LeaseBook(samples=1)), seed=0)


def test_a_local_batch_that_was_cancelled_is_handed_out_again_before_new_ones() -> None:
    source = Fake(LeaseBook(samples=1))
    source.cancels.extend([False, True, True, False, True])
    local = LocalLoader("abc", source)
    assert list(local) == ["a", "b", "b", "b", "c", "c"]
    assert source.begun == [()] * 6
    assert list(local) == ["a", "b", "c"]
    assert local.epoch == 2
    assert len(local) == 3
    assert local.upper() == "ABC"


def test_a_local_iterable_without_a_length_has_none() -> None:
    local = wrap((number for number in range(3)), Fake(LeaseBook(samples=1)), seed=0)
    with pytest.raises(TypeError, match="has no len"):
        len(local)
    assert list(local) == [0, 1, 2]
