"""Local SGD whose deltas travel while the next steps are computed: what it computes, against one process by hand."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

from collectives.nursery import Nursery
from offbeat.errors import RequestError
from offbeat.policies import create
from server import programs

H, LEARNERS, MINIBATCHES = 3, 2, 11  # a partial push at the end


def by_hand(delay: int) -> Tensor:
    """The servers' weights at the end: w' = w - mean of what the learners have moved, taken `delay` minibatches later
    as w' + (x - x at the push)."""
    torch.set_num_threads(1)
    models = [programs.model_of() for _ in range(LEARNERS)]
    optimizers = [programs.optimizer_of("momentum", model) for model in models]

    def own(learner: int) -> Tensor:
        return nn.utils.parameters_to_vector(models[learner].parameters()).detach().clone()

    served = own(0)
    bases = [served.clone() for _ in models]  # what each has taken last
    pushed: list[Tensor] = []  # the weights of each at its last push, until that is answered
    since = 0

    def push() -> None:
        nonlocal served, pushed, since
        pushed, since = [own(learner) for learner in range(LEARNERS)], 0
        served = served - sum(base - at for base, at in zip(bases, pushed, strict=True)) / LEARNERS

    def take() -> None:
        for learner, model in enumerate(models):
            taken = served + (own(learner) - pushed[learner]) if since else served
            nn.utils.vector_to_parameters(taken.clone(), model.parameters())
            bases[learner] = served.clone()
        pushed.clear()

    for number in range(MINIBATCHES):
        for learner, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            programs.loss_of(model, programs.local_batch(learner, number)).backward()  # type: ignore[no-untyped-call]  # torch has no types for it
            optimizer.step()
        since += 1
        if pushed and since == delay:
            take()
        if since == H:
            push()
            if delay == 0:
                take()
    if pushed:
        take()
    if since:
        push()
    return served


def trained(nursery: Nursery, line: str, *, at_once: bool = False) -> Tensor:
    *learned, summary = nursery.values(
        "serve_local_steps", ranks=LEARNERS + 1, line=line, minibatches=MINIBATCHES, at_once=at_once
    )
    assert learned[0] == learned[1], "all end with the last weights"
    assert summary["updates"] == -(-MINIBATCHES // H) and summary["staleness_mean"] == 0
    delays = Counter({int(delay): many for delay, many in summary["delays"].items()})
    least, most = create(line, expect=LEARNERS).rule.delays
    early = sum(many for delay, many in delays.items() if delay < least)
    assert early <= LEARNERS and max(delays, default=0) <= most, "at the end, what is there is taken"
    if most and not at_once:
        assert delays.total() == LEARNERS * (MINIBATCHES // H), "each answer is taken once"
    if at_once:
        assert set(delays) <= {0}
    return torch.tensor(learned[0], dtype=torch.float64)


@pytest.mark.parametrize("delay", [1, H])
def test_new_weights_are_taken_with_the_own_change_since_the_push(nursery: Nursery, delay: int) -> None:
    found = trained(nursery, f"local-sgd:{H},overlap,delay={delay}")
    assert float((found - by_hand(delay).double()).abs().max()) < 1e-6
    assert float((found - by_hand(0).double()).abs().max()) > 1e-4, "the delay is seen"


def test_where_nothing_overlaps_it_has_the_bits_of_the_plain_form(nursery: Nursery) -> None:
    plain = trained(nursery, f"local-sgd:{H}")
    assert float((plain - by_hand(0).double()).abs().max()) < 1e-6
    assert torch.equal(trained(nursery, f"local-sgd:{H},overlap", at_once=True), plain)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("local-sgd:4,delay=2", "delay=2 is for learners that compute on: write local-sgd:4,overlap,delay=2"),
        ("local-sgd:4,overlap,delay=5", "delay=5 exceeds H=4, after which the next push needs the new weights"),
        ("local-sgd:4,overlp", "unknown choice 'overlp'; did you mean 'overlap'"),
    ],
)
def test_delays_that_cannot_be_are_refused(line: str, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        create(line, expect=2)
