"""The books of simulated samples: beside one that keeps each sample by itself, and in whole runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.errors import RequestError
from offbeat.predict.timelines import Minibatch, ServedTimeline
from offbeat.simulate.cluster import Cluster, Wires
from offbeat.simulate.compute import Failures, parse_law
from offbeat.simulate.sample_source import NOT_FULL, Batch, Epochs, Stream, count_samples
from predict.fakes import trained

SERVED = (
    "full-sync", "k-sync:4", "k-batch-sync:5", "async", "k-async:3", "k-batch-async:4", "softsync:2,rate=inverse",
    "ssp:0", "ssp:2", "stale-drop:0", "stale-drop:3", "adaptive-k:1,window=4,improvement=0.1", "async:rate=drift:0.5",
    "k-sync:2,rate=drift:0.5",
)  # fmt: skip
BY_THEMSELVES = ("downpour:push=2,fetch=3", "downpour", "local-sgd:3")
PLAIN = Cluster(learners=6, law=parse_law("exp:1"), seed=3)
WIRES = Wires(size_bytes=10, learner_bytes_per_s=40.0, server_bytes_per_s=100.0, latency_s=0.3)
WIRED = replace(PLAIN, wires=WIRES)
FAILING = replace(WIRED, failures=Failures(mean_up_s=12.0, mean_down_s=1.0))
SIZE = 4


class Ledger:
    """What became of every sample, one by one, as the run says it: the oracle of the book that it is put beside."""

    def __init__(self) -> None:
        self.fates: dict[tuple[int, int], str] = {}  # of what was ever taken: out, free, held, or how it was settled
        self.sizes: Counter[int] = Counter()  # of minibatches
        self.retaken = 0  # samples

    def take(self, batch: Batch) -> None:
        self.sizes[count_samples(batch)] += 1
        for one in each(batch):
            assert self.fates.get(one, "free") == "free", f"{one} is taken and is {self.fates[one]}"
            self.retaken += one in self.fates
            self.fates[one] = "out"

    def settle(self, batch: Batch, fate: str) -> None:
        for one in each(batch):
            assert self.fates[one] in ("out", "held"), f"{one} is settled and was {self.fates[one]}"
            self.fates[one] = fate

    def give_back(self, batch: Batch) -> None:
        for one in each(batch):
            assert self.fates[one] == "out", f"{one} is given back and was {self.fates[one]}"
            self.fates[one] = "free"

    def hold(self) -> None:
        self.fates = {one: "held" if fate == "out" else fate for one, fate in self.fates.items()}

    @property
    def totals(self) -> Counter[str]:
        return Counter(self.fates.values())


def each(batch: Batch) -> list[tuple[int, int]]:
    return [(epoch, at) for epoch, start, count in batch for at in range(start, start + count)]


class WatchedEpochs(Epochs):
    def __init__(self, *, samples: int, learners: int, epochs: int, again: bool = True) -> None:
        super().__init__(samples=samples, sizes=(SIZE,) * learners, epochs=epochs, again=again)
        self.ledger = Ledger()
        self.epoch = 0  # that is taken from

    def take(self, learner: int) -> Batch | None:
        batch = super().take(learner)
        if batch is not None:
            self.begin(batch)
            self.ledger.take(batch)
        return batch

    def begin(self, batch: Batch) -> None:
        ((epoch, _, _),) = batch
        if epoch > self.epoch:
            assert epoch == self.epoch + 1 and len(self.ledger.fates) == epoch * self.samples
            assert not {"out", "free"} & self.ledger.totals.keys(), "epochs do not overlap"
        assert epoch >= self.epoch
        self.epoch = epoch

    def settle(self, taken: Batch, fate: str = "applied") -> None:
        super().settle(taken, fate)
        self.ledger.settle(taken, fate)

    def give_back(self, taken: Batch, fate: str) -> None:
        super().give_back(taken, fate)
        if self.again:
            self.ledger.give_back(taken)
        else:
            self.ledger.settle(taken, fate)

    def put_back(self, taken: Batch) -> None:
        super().put_back(taken)
        self.ledger.give_back(taken)

    def settle_held(self) -> None:
        super().settle_held()
        self.ledger.hold()


class WatchedStream(WatchedEpochs, Stream):
    def begin(self, batch: Batch) -> None:
        """Epochs may overlap."""


def run(strategy: str, cluster: Cluster, book: Epochs) -> tuple[list[tuple[Minibatch, ...]], ServedTimeline]:
    """The works of each update, and the timeline at its end."""
    learner, timeline = trained(strategy, cluster, book, width=7)
    return [works for _, _, works, _, _ in learner.made], timeline


def positions(updates: list[tuple[Minibatch, ...]]) -> list[tuple[int, int]]:
    return [one for works in updates for work in works for one in each(work.batch)]


# --- a stream --------------------------------------------------------------------------------------------------------


def test_a_stream_goes_on_from_epoch_to_epoch_without_a_seam_and_ends_with_the_last() -> None:
    book = Stream(samples=10, sizes=(4, 25), epochs=3)
    assert [book.take(0) for _ in range(3)] == [((0, 0, 4),), ((0, 4, 4),), ((0, 8, 2), (1, 0, 2))]
    assert book.take(1) == ((1, 2, 8), (2, 0, 10))
    assert book.take(0) is None and not book.free and not book.over and book.counts == {}


def test_a_stream_gives_again_what_came_back_first_and_counts_it_once() -> None:
    book = Stream(samples=5, sizes=(4,), epochs=2)
    first, second, third = (book.take(0) for _ in range(3))
    assert first is not None and second is not None and third == ((1, 3, 2),)
    book.give_back(second, "cancelled")
    book.give_back(first, "too old")
    assert book.counts == {} and book.free
    assert [book.take(0), book.take(0), book.take(0)] == [second, first, None]
    book.settle(third)
    book.settle(first)
    assert not book.over and book.counts == {"applied": 6}
    book.settle(second)
    assert book.over and book.counts == {"applied": 10}


def test_a_stream_that_does_not_give_again_counts_what_was_dropped() -> None:
    book = Stream(samples=8, sizes=(4,), epochs=1, again=False)
    first, second = book.take(0), book.take(0)
    assert first is not None and second is not None
    book.give_back(first, "cancelled")
    assert book.take(0) is None and not book.over
    book.settle(second)
    assert book.over and book.counts == {"cancelled": 4, "applied": 4}


@pytest.mark.parametrize(
    ("samples", "sizes", "epochs"), [(0, (1,), 1), (1, (1, 0), 1), (1, (), 1), (1, (1,), 0), (-3, (1,), 1)]
)
def test_a_stream_of_nothing_is_refused(samples: int, sizes: tuple[int, ...], epochs: int) -> None:
    with pytest.raises(RequestError, match="must be above 0"):
        Stream(samples=samples, sizes=sizes, epochs=epochs)


def test_gradients_that_wait_for_more_at_the_end_are_dropped_and_said_to_be() -> None:
    book = Stream(samples=8, sizes=(4,), epochs=1)
    first, _ = book.take(0), book.take(0)
    assert first is not None
    book.settle(first)
    book.settle_held()
    assert book.over and book.counts == {"applied": 4, NOT_FULL: 4} and book.dropped == {NOT_FULL: 4}


@pytest.mark.parametrize("strategy", ["k-sync:2", "k-batch-sync:3", "stale-drop:2"])
def test_in_a_run_without_again_what_is_given_back_is_counted_and_not_taken_again(strategy: str) -> None:
    book = WatchedStream(samples=101, learners=6, epochs=3, again=False)
    updates, timeline = run(strategy, WIRED, book)
    totals = book.ledger.totals
    held = totals.pop("held", 0)
    assert book.ledger.retaken == 0 and "free" not in totals
    assert book.counts == totals | ({NOT_FULL: held} if held else {})
    assert sum(totals.values()) + held == len(book.ledger.fates) == 303 > totals["applied"]
    assert totals["applied"] == len(positions(updates))
    result = timeline.result()
    assert (
        totals["late"] + totals["too old"] + totals["this learner already has a gradient in this update"]
        <= SIZE * result.dropped
    )
    assert (totals["cancelled"] > 0) == (result.cancelled > 0)


@pytest.mark.parametrize("strategy", ["k-sync:2", "async", "downpour", "local-sgd:3"])
def test_what_goes_with_its_learner_is_taken_again_even_without_again(strategy: str) -> None:
    book = WatchedStream(samples=101, learners=6, epochs=3, again=False)
    _, timeline = run(strategy, FAILING, book)
    assert timeline.result().failed > 0
    assert book.ledger.retaken > 0
    known = {"applied", "cancelled", "late", "this learner already has a gradient in this update"}
    assert set(book.ledger.totals) <= known, "nothing counts as lost"


# --- epoch by epoch --------------------------------------------------------------------------------------------------


def test_an_epoch_begins_when_the_one_before_is_settled() -> None:
    book = Epochs(samples=6, sizes=(4, 4), epochs=2)
    first, second = book.take(0), book.take(1)
    assert (first, second, book.take(0)) == (((0, 0, 4),), ((0, 4, 2),), None)
    assert first is not None and second is not None
    book.settle(first)
    assert not book.free and book.take(0) is None
    book.give_back(second, "cancelled")
    assert book.free and book.take(1) == second
    book.settle(second)
    assert book.free and book.counts == {"applied": 6} and not book.over
    third, fourth = book.take(0), book.take(0)
    assert (third, fourth) == (((1, 0, 4),), ((1, 4, 2),))
    assert third is not None and fourth is not None
    book.settle(third)
    book.settle(fourth)
    assert book.over and not book.free and book.take(0) is None and book.counts == {"applied": 12}


def test_gradients_that_wait_for_more_let_their_epoch_end_and_are_applied_in_the_next() -> None:
    book = Epochs(samples=6, sizes=(4,), epochs=2)
    first, second = book.take(0), book.take(0)
    assert first is not None and second is not None
    book.settle(first)
    book.settle_held()
    assert book.counts == {"applied": 4} and book.take(0) == ((1, 0, 4),)
    book.settle(second)
    assert book.counts == {"applied": 6} and not book.over
    with pytest.raises(KeyError):
        book.settle(second)


def test_epochs_that_do_not_give_again_count_what_was_dropped() -> None:
    book = Epochs(samples=6, sizes=(4,), epochs=1, again=False)
    first, second = book.take(0), book.take(0)
    assert first is not None and second is not None
    book.give_back(first, "too old")
    assert not book.free
    book.settle(second)
    assert book.over and book.counts == {"too old": 4, "applied": 2}


def epochs_of(
    strategy: str, cluster: Cluster, *, samples: int, again: bool = True, kind: type[WatchedEpochs] = WatchedEpochs
) -> tuple[WatchedEpochs, list[tuple[Minibatch, ...]]]:
    """A whole run, with what must hold at its end."""
    book = kind(samples=samples, learners=cluster.learners, epochs=4, again=again)
    updates, timeline = run(strategy, cluster, book)
    assert book.over
    totals = book.ledger.totals
    held = sum(gradient.samples for gradient in timeline.policy.held.values())
    assert totals.pop("held", 0) == held, "only what waits for more at the very end is not applied"
    assert sum(totals.values()) + held == len(book.ledger.fates) == 4 * samples
    assert book.counts == totals | ({NOT_FULL: held} if held else {}) and not {"out", "free"} & totals.keys()
    applied = positions(updates)
    assert len(applied) == len(set(applied)) == totals["applied"]
    if again:
        assert totals["applied"] + held == 4 * samples
    return book, updates


@pytest.mark.parametrize(
    "cluster",
    [PLAIN, WIRED, FAILING, replace(WIRED, law=parse_law("constant:1"))],
    ids=["plain", "wires", "failures", "ties"],
)
@pytest.mark.parametrize("strategy", [*SERVED, *BY_THEMSELVES])
def test_in_a_run_every_sample_of_every_epoch_is_settled_once(strategy: str, cluster: Cluster) -> None:
    book, _ = epochs_of(strategy, cluster, samples=103)
    assert book.ledger.sizes.keys() == {SIZE, 103 % SIZE}
    assert book.ledger.sizes[103 % SIZE] >= 4, "the last of each epoch is smaller"
    book, _ = epochs_of(strategy, cluster, samples=103, kind=WatchedStream)
    assert book.ledger.sizes.keys() <= {SIZE}, "4 * 103 is a multiple of the size, and only the end is an end"
    epochs_of(strategy, cluster, samples=103, again=False)


@pytest.mark.parametrize("cluster", [PLAIN, WIRED], ids=["plain", "wires"])
@pytest.mark.parametrize(
    "strategy",
    [
        *SERVED,
        *BY_THEMSELVES,
        "local-sgd:1000",
        "downpour:push=99,fetch=99",
        "k-batch-async:25",
        "k-batch-sync:25",
        "k-async:30",
        "k-sync:50",
    ],
)
def test_more_learners_than_minibatches_do_not_stop_a_run(strategy: str, cluster: Cluster) -> None:
    epochs_of(strategy, replace(cluster, learners=50), samples=39)
    epochs_of(strategy, replace(cluster, learners=50), samples=39, kind=WatchedStream)


@pytest.mark.parametrize("strategy", ["local-sgd:1000", "local-sgd:1000,outer=nesterov", "downpour:push=1000,fetch=7"])
def test_learners_push_what_they_have_at_the_end_of_an_epoch(strategy: str) -> None:
    """26 minibatches an epoch among 6 learners: nobody ever has a thousand."""
    for cluster in (PLAIN, WIRED):
        _, updates = epochs_of(strategy, cluster, samples=103)
        by_epoch = [{epoch for epoch, _ in positions([works])} for works in updates]
        assert all(len(epochs) == 1 for epochs in by_epoch), "no push holds work of two epochs"
        pushes = Counter(epoch for works in updates for work in works for epoch in {one[0] for one in work.batch})
        assert pushes == dict.fromkeys(range(4), 6), "one of each learner at each end"
        assert len(updates) == (24 if "downpour" in strategy else 4)


def test_steps_are_counted_from_the_end_of_the_epoch_on() -> None:
    """Alone, 3 minibatches an epoch, and a push every 2: 2, 1 | 2, 1, since the push at the end begins the count."""
    _, updates = epochs_of("local-sgd:2", Cluster(learners=1, law=parse_law("constant:1")), samples=3 * SIZE)
    assert [len(work.steps) for works in updates for work in works] == [2, 1] * 4
    assert [works[0].version for works in updates] == list(range(8))


def test_downpour_goes_on_counting_over_the_end_of_an_epoch() -> None:
    """As a real learner does: 3 minibatches an epoch, of which the 2nd, 4th and 6th push, and so does an odd end."""
    cluster = Cluster(learners=2, law=parse_law("constant:1"), speeds=(1.0, 0.1))
    _, updates = epochs_of("downpour:push=2,fetch=5", cluster, samples=4 * SIZE)
    assert [len(work.steps) for works in updates for work in works if work.learner == 0] == [2, 1, 1, 2] * 2


def test_a_push_is_there_before_its_learner_steps_aside() -> None:
    """Downpour sends beside computing: it must not leave while what it has pushed is on its way."""
    said: list[str] = []

    def write(record: dict[str, Any], work: Minibatch | None) -> None:
        said.append(record["event"])

    slow = Wires(size_bytes=10, learner_bytes_per_s=1.0, server_bytes_per_s=100.0)
    cluster = Cluster(learners=1, law=parse_law("constant:1"), wires=slow)
    book = Epochs(samples=8, sizes=(4,), epochs=1)
    updates = list(ServedTimeline("downpour:push=1,fetch=3", cluster, book, write=write).stream())
    assert said == ["joined 0 @0.0", "pushed 0 t1 v0 n4 @21.0", "pushed 0 t2 v0 n4 @31.0"]
    assert [update.samples for update in updates] == [4, 4]


def test_an_update_of_more_minibatches_than_an_epoch_has_is_made_in_the_next_one() -> None:
    for strategy in ("k-batch-async:25", "k-batch-sync:25"):
        book, updates = epochs_of(strategy, PLAIN, samples=40)
        assert [len(works) for works in updates] == [25]
        assert {epoch for epoch, _ in positions(updates)} == {0, 1, 2}
        assert book.counts == {"applied": 25 * SIZE, NOT_FULL: 15 * SIZE}


def test_an_epoch_of_one_sample_and_a_single_learner_are_epochs_too() -> None:
    for strategy in SERVED:
        epochs_of(strategy, PLAIN, samples=1)
        if ":" not in strategy:
            epochs_of(strategy, Cluster(learners=1, law=parse_law("exp:1")), samples=13)


def test_a_learner_without_samples_leaves_and_comes_back_when_there_are_some() -> None:
    """Two learners and three minibatches: the third is one learner's alone, and nobody waits for the other."""
    said: list[tuple[str, ...]] = []

    def write(record: dict[str, Any], work: Minibatch | None) -> None:
        said.append((record["event"], *record["commands"], *(str(stretch) for stretch in record.get("batch", ()))))

    cluster = Cluster(learners=2, law=parse_law("constant:1"))
    list(ServedTimeline("full-sync", cluster, Epochs(samples=11, sizes=(4, 4), epochs=2), write=write).stream())
    assert said == [
        ("joined 0 @0.0",),
        ("joined 1 @0.0", "send 0", "send 1"),
        ("pushed 0 t1 v0 n4 @1.0", "[0, 0, 4]"),
        ("pushed 1 t2 v0 n4 @1.0", "apply t1 t2", "send 0", "send 1", "[0, 4, 4]"),
        ("left 1 @1.0",),
        ("pushed 0 t3 v1 n3 @2.0", "apply t3", "send 0", "[0, 8, 3]"),
        ("joined 1 @2.0", "send 1"),
        ("pushed 0 t4 v2 n4 @3.0", "[1, 0, 4]"),
        ("pushed 1 t5 v2 n4 @3.0", "apply t4 t5", "send 0", "send 1", "[1, 4, 4]"),
        ("left 1 @3.0",),
        ("pushed 0 t6 v3 n3 @4.0", "apply t6", "send 0", "[1, 8, 3]"),
    ]


def test_a_learner_that_gets_samples_at_the_very_moment_does_not_leave() -> None:
    """Both are done at once: the first finds no samples, the second ends the epoch."""
    said: list[str] = []
    cluster = Cluster(learners=2, law=parse_law("constant:1"))
    book = Epochs(samples=8, sizes=(4, 4), epochs=3)
    list(ServedTimeline("async", cluster, book, write=lambda record, work: said.append(record["event"])).stream())
    assert [event.split()[0] for event in said] == ["joined"] * 2 + ["pushed"] * 6


def test_learners_that_stepped_aside_come_back_when_a_minibatch_is_given_back() -> None:
    """4 learners, 3 minibatches, the first 2 count: who is cancelled gives its minibatch to whoever is there first."""
    said: list[str] = []

    def write(record: dict[str, Any], work: Minibatch | None) -> None:
        said.append(f"{record['event']}: {' '.join(record['commands'])}")

    wires = Wires(size_bytes=0, latency_s=0.25)
    cluster = Cluster(learners=4, law=parse_law("constant:1"), speeds=(1.0, 0.5, 0.25), wires=wires)
    book = Epochs(samples=3, sizes=(1,) * 4, epochs=1)
    updates = list(ServedTimeline("k-sync:2", cluster, book, write=write).stream())
    assert said[4:] == [
        "left 3 @0.25: ",
        "pushed 0 t1 v0 n1 @1.5: ",
        "pushed 1 t2 v0 n1 @2.5: apply t1 t2 cancel 2 send 0 send 1 send 2",
        "joined 3 @2.75: send 3",
        "left 1 @2.75: ",
        "left 2 @2.75: ",
        "left 3 @3.0: ",
        "pushed 0 t3 v1 n1 @4.0: apply t3 send 0",
    ]
    assert [work.batch for update in updates for work in update.works] == [((0, 0, 1),), ((0, 1, 1),), ((0, 2, 1),)]


@given(
    st.sampled_from([*SERVED, *BY_THEMSELVES]),
    st.integers(1, 9),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from(["constant:1", "exp:1", "bimodal:1,10,0.2", "pareto:1.2,0.5"]),
    st.sampled_from([None, WIRES, Wires(size_bytes=0, latency_s=1.0), Wires(size_bytes=10, server_bytes_per_s=10.0)]),
    st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_whatever_the_machines_an_epochs_samples_are_settled_once(
    strategy: str, learners: int, samples: int, again: bool, law: str, wires: Wires | None, seed: int
) -> None:
    cluster = Cluster(learners=max(learners, 4), law=parse_law(law), wires=wires, seed=seed)
    epochs_of(strategy, cluster, samples=samples, again=again)
    epochs_of(strategy, cluster, samples=samples, again=again, kind=WatchedStream)
