"""Random histories beside a book that keeps each sample by itself, and each refusal."""

from __future__ import annotations

import json
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat import leases
from offbeat.errors import EventError, RequestError
from offbeat.leases import Answer, Lease, LeaseBook


def handed_in(book: LeaseBook) -> tuple[Lease, ...]:
    """What was handed in and is neither settled nor given back, in the order of taking."""
    return tuple(Lease(*fields) for *fields, learner in book.snapshot()["out"] if learner is None)


def taken(book: LeaseBook, learner: int, count: int, epoch: int = 0) -> Lease:
    lease = book.take(learner, epoch, count)
    assert isinstance(lease, Lease)
    return lease


class Dumb:
    """The oracle: for each sample of each epoch what became of it, and for each piece who has it."""

    def __init__(self, samples: int, again: bool) -> None:
        self.samples, self.again = samples, again
        self.state: dict[tuple[int, int], str] = {}  # (epoch, position) -> "free", "out" or a fate
        self.pieces: list[range] = []  # returned ones, the oldest first
        self.holder: dict[Lease, int | None] = {}

    def state_of(self, epoch: int, position: int) -> str:
        return self.state.get((epoch, position), "free")

    def over(self, epoch: int) -> bool:
        return all(self.state_of(epoch, at) not in ("free", "out") for at in range(self.samples))

    def expect(self, epoch: int, count: int) -> range | Answer:
        if self.over(epoch):
            return Answer.ENDED
        if epoch and not self.over(epoch - 1):
            return Answer.WAIT
        if self.pieces:
            return self.pieces[0][:count]
        fresh = [at for at in range(self.samples) if (epoch, at) not in self.state]
        return range(fresh[0], min(fresh[0] + count, self.samples)) if fresh else Answer.WAIT

    def took(self, learner: int, lease: Lease) -> None:
        positions = range(lease.start, lease.start + lease.count)
        for at in positions:
            assert self.state_of(lease.epoch, at) == "free", "a sample is leased to one learner at a time"
            self.state[lease.epoch, at] = "out"
        if self.pieces:
            rest = self.pieces[0][lease.count :]
            self.pieces[:1] = [rest] if rest else []
        self.holder[lease] = learner

    def end(self, lease: Lease, fate: str) -> None:
        del self.holder[lease]
        for at in range(lease.start, lease.start + lease.count):
            self.state[lease.epoch, at] = fate
        if fate == "free":
            self.pieces.append(range(lease.start, lease.start + lease.count))

    def counts(self, epoch: int) -> Counter[str]:
        fates = (self.state_of(epoch, at) for at in range(self.samples))
        return Counter(fate for fate in fates if fate not in ("free", "out"))


def live(chance: random.Random, book: LeaseBook, *, learners: int, epochs: int, again: bool, patience: int) -> None:
    """A random life; after `patience` steps every lease is applied, so that it must come to its end."""
    dumb = Dumb(book.samples, again)
    at = dict.fromkeys(range(learners), 0)  # each learner's epoch
    ended: set[int] = set()
    steps = 0
    while min(at.values()) < epochs:
        steps += 1
        assert steps < patience + 1000 * learners, "no progress"
        calm = steps > patience
        learner = chance.randrange(learners)
        deed = chance.choice(["take", "take", "push", "apply"] if calm else ["take"] * 4 + DEEDS)
        mine = [lease for lease, holder in dumb.holder.items() if holder == learner]
        held = [lease for lease, holder in dumb.holder.items() if holder is None]
        if deed == "take" and at[learner] < epochs:
            count = chance.randint(1, 5)
            expected = dumb.expect(at[learner], count)
            answer = book.take(learner, at[learner], count)
            if isinstance(answer, Lease):
                assert isinstance(expected, range)
                assert answer.epoch == at[learner]
                assert range(answer.start, answer.start + answer.count) == expected
                dumb.took(learner, answer)
            else:
                assert answer is expected
                if answer is Answer.ENDED:
                    ended.add(at[learner])
                    at[learner] += 1
        elif deed == "push" and mine:
            lease = chance.choice(mine)
            book.hand_in(lease.number)
            dumb.holder[lease] = None
        elif deed in ("apply", "refuse", "drop") and held:
            lease = chance.choice(held)
            fate = {"apply": "applied", "refuse": "non-finite", "drop": "late"}[deed]
            if deed == "drop":
                book.give_back(lease.number, fate)
                dumb.end(lease, "free" if again else fate)
            else:
                book.settle(lease.number, fate)
                dumb.end(lease, fate)
        elif deed == "cancel" and mine:
            lease = chance.choice(mine)
            book.give_back(lease.number, "cancelled")
            dumb.end(lease, "free" if again else "cancelled")
        elif deed == "unread" and mine:
            lease = chance.choice(mine)
            book.put_back(lease.number)
            dumb.end(lease, "free")
        elif deed == "lose":
            assert book.lose(learner) == tuple(mine)
            for lease in mine:
                dumb.end(lease, "free")
        elif deed == "restart":
            state = json.loads(json.dumps(book.snapshot()))
            book = LeaseBook(samples=book.samples, again=again)
            book.restore(state)
        book.check()
        assert book.in_hand(learner) == tuple(lease for lease, holder in dumb.holder.items() if holder == learner)
        assert set(handed_in(book)) == {lease for lease, holder in dumb.holder.items() if holder is None}
        assert {lease.epoch for lease in dumb.holder} <= {book.epoch}, "epochs do not overlap"
        assert all(dumb.over(epoch) for epoch in range(book.epoch)) and not dumb.over(book.epoch)
        assert book.free == sum(dumb.state_of(book.epoch, position) == "free" for position in range(book.samples))
        assert dict(book.counts) == {epoch: dumb.counts(epoch) for epoch in range(book.epoch + 1)}
    assert ended == set(range(epochs))
    for epoch in range(epochs):
        assert book.counts[epoch].total() == book.samples


DEEDS = ["push", "push", "apply", "apply", "refuse", "drop", "cancel", "unread", "lose", "restart"]


@given(
    seed=st.integers(0, 2**32),
    samples=st.integers(1, 23),
    learners=st.integers(1, 4),
    epochs=st.integers(1, 3),
    again=st.booleans(),
)
def test_every_sample_of_an_epoch_is_counted_exactly_once(
    seed: int, samples: int, learners: int, epochs: int, again: bool
) -> None:
    book = LeaseBook(samples=samples, again=again)
    live(random.Random(seed), book, learners=learners, epochs=epochs, again=again, patience=400)


def test_pieces_are_taken_in_order_and_the_last_is_short() -> None:
    book = LeaseBook(samples=10)
    assert [book.take(learner, 0, 4) for learner in (7, 8, 7)] == [
        Lease(0, 0, 0, 4),
        Lease(1, 0, 4, 4),
        Lease(2, 0, 8, 2),
    ]
    assert book.take(8, 0, 4) is Answer.WAIT
    assert book.in_hand(7) == (Lease(0, 0, 0, 4), Lease(2, 0, 8, 2))


def test_what_came_back_is_leased_first_the_oldest_before_and_never_merged() -> None:
    book = LeaseBook(samples=100)
    first, second, third = (taken(book, 0, 4) for _ in range(3))
    book.give_back(second.number, "cancelled")
    book.give_back(first.number, "cancelled")
    pieces = [taken(book, 1, 3) for _ in range(5)]
    assert [(piece.start, piece.count) for piece in pieces] == [(4, 3), (7, 1), (0, 3), (3, 1), (12, 3)]
    assert third in book.in_hand(0)


def test_an_epoch_begins_when_the_one_before_it_is_over() -> None:
    book = LeaseBook(samples=4)
    lease = taken(book, 0, 4)
    assert book.take(1, 0, 4) is Answer.WAIT
    assert book.take(1, 1, 4) is Answer.WAIT
    book.hand_in(lease.number)
    assert book.take(1, 1, 4) is Answer.WAIT
    assert handed_in(book) == (lease,)
    book.settle(lease.number, "applied")
    assert book.take(1, 0, 4) is Answer.ENDED
    assert book.take(1, 2, 4) is Answer.WAIT
    assert taken(book, 1, 4, epoch=1) == Lease(1, 1, 0, 4)
    assert book.counts == {0: {"applied": 4}, 1: {}}


def test_what_is_free_in_hand_or_held_by_the_run_is_told_apart() -> None:
    book = LeaseBook(samples=4)
    assert (book.free, handed_in(book)) == (4, ())
    first, second = taken(book, 0, 2), taken(book, 1, 2)
    book.hand_in(first.number)
    assert (book.free, book.in_hand(1), handed_in(book)) == (0, (second,), (first,)), "learner 1 may still push"
    book.hand_in(second.number)
    assert (book.free, book.in_hand(1), handed_in(book)) == (0, (), (first, second))
    book.give_back(second.number, "late")
    assert (book.free, handed_in(book)) == (2, (first,)), "it can be taken"


def test_without_again_a_cancelled_piece_is_counted_and_not_leased_again() -> None:
    book = LeaseBook(samples=6, again=False)
    cancelled, refused, applied = (taken(book, 0, 2) for _ in range(3))
    book.give_back(cancelled.number, "cancelled")
    book.settle(refused.number, "non-finite")
    assert book.take(0, 0, 2) is Answer.WAIT
    book.settle(applied.number, "applied")
    assert book.take(0, 0, 2) is Answer.ENDED
    assert book.counts[0] == {"cancelled": 2, "non-finite": 2, "applied": 2}


@pytest.mark.parametrize("again", [True, False])
def test_what_a_lost_learner_had_in_hand_comes_back_and_what_it_pushed_stays(again: bool) -> None:
    book = LeaseBook(samples=6, again=again)
    pushed, open_, other = taken(book, 0, 2), taken(book, 0, 2), taken(book, 1, 2)
    book.hand_in(pushed.number)
    assert book.lose(0) == (open_,)
    assert book.lose(0) == ()
    assert handed_in(book) == (pushed,)
    assert book.in_hand(1) == (other,)
    assert taken(book, 1, 2).start == open_.start


@pytest.mark.parametrize("again", [True, False])
def test_what_was_never_computed_is_leased_again(again: bool) -> None:
    book = LeaseBook(samples=2, again=again)
    lease = taken(book, 0, 2)
    book.put_back(lease.number)
    assert taken(book, 1, 2).start == 0


def test_what_is_not_out_is_refused_and_changes_nothing() -> None:
    book = LeaseBook(samples=10)
    applied, back, held = (taken(book, 0, 2) for _ in range(3))
    book.settle(applied.number, "applied")
    book.give_back(back.number, "late")
    book.hand_in(held.number)
    before = book.snapshot()
    for number, why in (
        (applied.number, "already returned or settled"),
        (back.number, "already returned"),
        (99, "no lease has this number"),
        (-1, "no lease has this number"),
    ):
        with pytest.raises(EventError, match=why):
            book.settle(number, "applied")
        with pytest.raises(EventError, match=why):
            book.give_back(number, "late")
        with pytest.raises(EventError, match=why):
            book.hand_in(number)
        with pytest.raises(EventError, match=why):
            book.put_back(number)
    for refused in (book.hand_in, book.put_back):
        with pytest.raises(EventError, match=f"lease {held.number} .* belongs to the run"):
            refused(held.number)
    with pytest.raises(EventError, match="takes 0 samples"):
        book.take(0, 0, 0)
    assert book.snapshot() == before


def test_an_empty_epoch_and_a_negative_one_are_refused() -> None:
    with pytest.raises(RequestError, match="0 samples"):
        LeaseBook(samples=0)
    with pytest.raises(RequestError, match="counted from 0"):
        LeaseBook(samples=1, epoch=-1)


def test_a_run_may_begin_at_a_later_epoch() -> None:
    book = LeaseBook(samples=2, epoch=5)
    book.check()
    assert book.take(0, 4, 2) is Answer.ENDED
    assert taken(book, 0, 2, epoch=5) == Lease(0, 5, 0, 2)


def test_the_book_stays_small() -> None:
    book = LeaseBook(samples=10**12)
    for _ in range(1000):
        book.settle(taken(book, 0, 256).number, "applied")
    assert len(json.dumps(book.snapshot())) < 300
    book = LeaseBook(samples=1)
    for epoch in range(leases.EPOCHS_KEPT + 5):
        book.settle(taken(book, 0, 1, epoch=epoch).number, "applied")
    assert len(book.counts) == leases.EPOCHS_KEPT + 1
    assert max(book.counts) == leases.EPOCHS_KEPT + 5
    book.check()


def test_a_snapshot_of_another_run_or_a_damaged_one_is_refused_and_changes_nothing() -> None:
    book = LeaseBook(samples=8)
    book.settle(taken(book, 0, 3).number, "applied")
    taken(book, 1, 2)
    before = book.snapshot()
    with pytest.raises(RequestError, match="9 samples, but this run has 8"):
        book.restore(LeaseBook(samples=9).snapshot())
    for name, value in (
        ("fresh", 4),
        ("fresh", 6),
        ("settled", []),
        ("returned", [[0, 1]]),
        ("out", []),
        ("out", [[1]]),
        ("counts", [[0, {"applied": 4}]]),
        ("counts", [[0, {"applied": 3}], [1, {}]]),
        ("next", 1),
        ("epoch", 1),
    ):
        with pytest.raises(RequestError, match="incomplete"):
            book.restore({**before, name: value})
    with pytest.raises(RequestError, match="incomplete: KeyError"):
        book.restore({"samples": 8})
    assert book.snapshot() == before


def test_each_broken_law_is_seen() -> None:
    """The check has been seen to fail: for each law a book that breaks it."""

    def broken(law: str, **damage: object) -> None:
        book = LeaseBook(samples=6)
        book.settle(taken(book, 0, 2).number, "applied")
        lease = taken(book, 0, 2)
        book.check()
        assert lease == Lease(1, 0, 2, 2)
        vars(book).update(damage)
        with pytest.raises(AssertionError, match=law):
            book.check()

    exactly_once = "either free, leased or settled, exactly once"
    broken(exactly_once, _fresh=3)  # twice
    broken(exactly_once, _fresh=5)  # never
    broken(exactly_once, _out={}, _holder={})
    broken("6 positions", _fresh=6)
    broken("no piece is empty", _settled=[(0, 2), (2, 2)])
    broken("epochs do not overlap", _out={1: Lease(1, 1, 2, 2)})
    broken("its own number", _out={0: Lease(1, 0, 2, 2)})
    broken("a lease that a learner holds must be open", _holder={0: 0})
    broken("counted once", counts={0: Counter(applied=3)})
    broken("must be the current epoch", counts={0: Counter(applied=2), 1: Counter(applied=2)})
    broken("must be left", _settled=[(0, 6)], _out={}, _fresh=6)
