"""A learner of virtual training that is plain arithmetic on one number, and checks what it is asked to do.

The loss is 0.5 * curvature * w^2 with noise that is a function of the minibatch, so that an update's bits depend on
which minibatches it has and at which weights they were computed, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from offbeat.policies import create
from offbeat.policies.base import LearnerRule
from offbeat.predict.timelines import LossAndDrift, Minibatch, ServedTimeline, Step, Timeline, Update, train
from offbeat.simulate.cluster import Cluster
from offbeat.simulate.result import Result
from offbeat.simulate.sample_source import Batch, Epochs, Stream

Made = tuple[int, float, tuple[Minibatch, ...], tuple[float, ...], int]


def noise_of(batch: Batch) -> float:
    """From -0.5 to 0.5, by which samples these are."""
    mixed = 0
    for epoch, start, count in batch:
        mixed = (mixed * 31 + epoch * 7919 + start * 104729 + count) * 2654435761 % 2**32
    return mixed / 2**32 - 0.5


class FakeLearner:
    """`training.Learner`. It refuses to compute twice, at weights that are not there, or out of a learner's order."""

    def __init__(
        self, rule: LearnerRule | None = None, *, slope: float = 0.1, noise: float = 0.3, silent: bool = False
    ) -> None:
        self.rule = rule or LearnerRule()
        self.steps_itself = self.rule.delta or self.rule.push_every > 1 or self.rule.fetch_every > 0
        self.slope, self.noise = slope, noise  # rate * curvature, and of the gradients
        self.silent = silent  # it answers nothing
        self.version = 0
        self.weights = {0: 1.0}
        self.path = [1.0]  # of the weights, for those who compare
        self.gradients: dict[int, float] = {}
        self.losses: dict[int, float] = {}
        self.computed: set[int] = set()
        self.forgotten: set[int] = set()
        self.made: list[Made] = []
        self.most_kept = 1  # versions, at any time
        self.most_left = 0  # gradients, after what is lost was forgotten
        self.most_at_once = 0  # works
        self.calls = 0
        self._own: dict[int, tuple[float, int]] = {}  # of learners that step by themselves, and the version fetched
        self._last: dict[int, int] = {}  # number of each one's last work

    def compute(self, works: Sequence[Minibatch]) -> None:
        assert works, "it is asked for something"
        self.calls += 1
        self.most_at_once = max(self.most_at_once, len(works))
        for work in works:
            assert work.number not in self.computed, f"a work is computed once: {work}"
            assert work.version <= work.latest <= self.version, f"{work} is computed at {self.version}"
            self.computed.add(work.number)
            self.gradients[work.number] = self._stepped(work) if self.steps_itself else self._plain(work)
            self.losses[work.number] = 0.5 * self.weights[work.version] ** 2 + self.noise * noise_of(work.batch)

    def _plain(self, work: Minibatch) -> float:
        (step,) = work.steps
        assert step.fetched in (-1, work.version)
        return self._gradient(self.weights[work.version], step)

    def _stepped(self, work: Minibatch) -> float:
        """As the real one: local SGD pushes by how much it moved, Downpour the sum of its gradients."""
        steps = work.computed
        assert 0 < len(steps) <= self.rule.push_every
        assert self._last.get(work.learner, -1) < work.number, "a learner's pushes are computed in their order"
        self._last[work.learner] = work.number
        if self.rule.overlaps:
            self._check_delay(work)
        elif work.steps[0].fetched < 0:
            assert self._own[work.learner][1] == work.version, "its version is that of the oldest weights in it"
        else:
            assert work.steps[0].fetched == work.version
        total = before = 0.0
        at_push, made = self._own.get(work.learner, (0.0, -1))[0], 0
        for step in work.steps:
            if step.fetched >= 0:
                change = self._own[work.learner][0] - at_push if self.rule.overlaps and made else 0.0
                self._own[work.learner] = self.weights[step.fetched] + change, step.fetched
                before = self.weights[step.fetched]
            if not step.batch:
                continue
            made += 1
            own, fetched = self._own[work.learner]
            gradient = self._gradient(own, step)
            total += gradient
            self._own[work.learner] = own - self.slope * gradient, fetched
        assert self._own[work.learner][1] == work.latest, "the newest weights in it are its latest"
        return (before - self._own[work.learner][0]) / self.slope if self.rule.delta else total

    def _check_delay(self, work: Minibatch) -> None:
        """New weights are taken once between two pushes, so many steps after the first as the rule lets them be."""
        (taken,) = [at for at, step in enumerate(work.steps) if step.fetched >= 0]
        least, most = self.rule.delays
        steps = len(work.computed)
        assert work.steps[taken].fetched == work.version
        # Nothing was awaited by one that has just come, and at the end of an epoch all is taken at once.
        assert taken == 0 or min(least, steps) <= taken <= most

    def _gradient(self, weights: float, step: Step) -> float:
        return weights + self.noise * noise_of(step.batch)

    def apply(self, update: Update) -> None:
        assert update.version == self.version + 1, "versions rise by one"
        assert len(update.works) == len(update.scales) > 0
        missing = [work for work in update.works if work.number not in self.gradients]
        if missing:
            self.compute(missing)
        total = 0.0
        for work, scale in zip(update.works, update.scales, strict=True):
            total += scale * self.gradients.pop(work.number)
            del self.losses[work.number]
        weights = self.weights[self.version] - self.slope * total / len(update.works)
        self.version = update.version
        self.weights[self.version] = weights
        self.most_kept = max(self.most_kept, len(self.weights))
        self.path.append(weights)
        self.made.append((update.version, update.at_s, update.works, update.scales, update.told))

    def answer(self, work: Minibatch) -> LossAndDrift:
        if self.silent:
            return LossAndDrift(None, None)
        return LossAndDrift(
            self.losses[work.number], 40 * (self.weights[self.version] - self.weights[work.version]) ** 2
        )

    def keep(self, versions: Collection[int]) -> None:
        kept = {*versions, self.version}
        self.weights = {version: one for version, one in self.weights.items() if version in kept}

    def forget(self, numbers: Collection[int]) -> None:
        for number in numbers:
            del self.gradients[number], self.losses[number]
            self.forgotten.add(number)
        self.most_left = max(self.most_left, len(self.gradients))

    @property
    def applied(self) -> set[int]:
        return {work.number for _, _, works, _, _ in self.made for work in works}


def stream_for(cluster: Cluster, *, minibatches: int, size: int = 4, again: bool = True) -> Stream:
    """Two epochs of so many minibatches together; the last of an epoch goes on in the next."""
    samples = max(1, minibatches * size // 2 - 1)
    return Stream(samples=samples, sizes=(size,) * cluster.learners, epochs=2, again=again)


def fake_for(strategy: str, cluster: Cluster, *, silent: bool = False) -> FakeLearner:
    policy = create(strategy, expect=cluster.learners)
    # Pushes of several gradients move the weights by several steps.
    return FakeLearner(policy.rule, slope=0.1 / policy.rule.push_every, silent=silent)


def trained(
    strategy: str, cluster: Cluster, book: Epochs, *, width: int, silent: bool = False
) -> tuple[FakeLearner, ServedTimeline]:
    """A run until its book is over."""
    learner, timeline = fake_for(strategy, cluster, silent=silent), ServedTimeline(strategy, cluster, book)
    train(timeline, learner, width=width, after=lambda update: False)
    return learner, timeline


class Simulated:
    """A timeline that was simulated to its end before, so that many can train on it."""

    lock_step = False

    def __init__(self, timeline: Timeline) -> None:
        assert not timeline.lock_step
        self._updates = tuple(timeline.stream())
        self._result = timeline.result()

    def stream(self) -> Iterator[Update]:
        return iter(self._updates)

    def result(self) -> Result:
        return self._result


def one_by_one(timeline: Timeline, learner: FakeLearner) -> FakeLearner:
    """The oracle: everything is computed when it is applied, and every version is kept."""
    for update in timeline.stream():
        learner.apply(update)
    return learner
