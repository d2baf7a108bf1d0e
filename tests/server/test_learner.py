"""The learner's interface, in real runs: cancelling, odd models, odd gradients, odd loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from collectives.nursery import Nursery
from offbeat.errors import RequestError
from offbeat.server.learner.served_learner import ServedLearner
from server import programs


def test_a_cancelled_learner_stops_at_the_next_layer_and_its_model_is_clean(nursery: Nursery) -> None:
    *learned, summary = nursery.values("serve_cancelled", ranks=4, line="k-sync:2", updates=30)
    slow = learned[-1]
    assert slow["cancelled"] >= 1
    assert slow["layers_after"] == 0, "the layer in which it was cancelled is the last that it entered"
    assert not slow["dirty"], "no gradient is left, and batch norm has not counted it"
    assert all(one["weights"] == slow["weights"] for one in learned)
    assert summary["stopped"] >= slow["cancelled"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_a_push_that_is_no_number_is_dropped_whole_and_counted(nursery: Nursery, value: float) -> None:
    *learned, summary = nursery.values("serve_bad_gradients", ranks=3, line="full-sync", value=value, times=3, pushes=6)
    assert summary["dropped"] == {"not finite": 3}
    assert all(abs(weight) < 10 for weight in learned[0])


def test_a_learner_with_nothing_but_bad_gradients_is_sent_away_and_the_others_go_on(nursery: Nursery) -> None:
    *learned, summary = nursery.values(
        "serve_bad_gradients", ranks=4, line="full-sync", value=float("nan"), times=99, pushes=20
    )
    assert "its last 20 gradients were not finite" in learned[2]
    assert learned[0] == learned[1]
    assert summary["updates"] == 20


def test_frozen_and_seldom_used_parameters_are_as_torch_has_them(nursery: Nursery) -> None:
    first, second, _ = nursery.values("serve_parts", ranks=3, line="full-sync", servers=2)
    assert first == second, "frozen parameters and buffers come from the first learner too"
    assert first["scale"] == [1.0, 1.0]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {name: nn.Linear(programs.FEATURES, programs.FEATURES) for name in ("frozen", "used", "seldom")}
    )
    model["frozen"].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    x = programs.data().tensors[0][:16]
    for number in range(6):
        optimizer.zero_grad()
        out = model["used"](model["frozen"](x))
        (model["seldom"](out) if number % 2 else out).square().mean().backward()
        optimizer.step()
    assert first["weights"] == pytest.approx(programs.weights_of(model), abs=1e-7)


_COMPILED = pytest.param("compiled", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="forks, unlike CUDA"))


@pytest.mark.parametrize("kind", ["accumulated", "plain", "clipped", "closure", _COMPILED])
def test_loops_as_people_write_them_give_what_torch_gives(nursery: Nursery, kind: str) -> None:
    learned, _ = nursery.values("serve_loop", ranks=2, kind=kind, line="async", within_s=60)
    torch.set_num_threads(1)
    model = programs.model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start in range(0, 32 if kind == "closure" else 96, 32):
        optimizer.zero_grad()
        programs.loss_of(model, slice(start, start + 32)).backward()  # type: ignore[no-untyped-call]  # torch has no types
        if kind == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    assert learned["weights"] == pytest.approx(programs.weights_of(model), abs=1e-6)
    assert bool(learned["notes"]) == (kind == "compiled"), "what is coarser than a layer is said"


def test_a_scheduler_that_was_prepared_counts_versions(nursery: Nursery) -> None:
    first, second, _ = nursery.values("serve_schedule", ranks=3, line="async", pushes=5)
    for version, rate in (*first, *second):
        assert rate == pytest.approx(1 / (1 + version))
    assert max(version for version, _ in (*first, *second)) == 10


def test_another_model_is_refused_and_the_others_go_on(nursery: Nursery) -> None:
    *learned, summary = nursery.values("serve_refused", ranks=4, line="k-batch-async:1", pushes=3, start_by_s=1.0)
    assert "its model or optimizer is not that of the others" in learned[2]
    assert summary["updates"] == 6


def test_own_data_comes_again_when_its_minibatch_was_cancelled(nursery: Nursery) -> None:
    *learned, _ = nursery.values(
        "serve_local_data", ranks=4, line="k-sync:2", slow=["learner=2,factor=1", "constant:0.002"]
    )
    for one in learned:
        assert one["done"] == list(range(8)), "each batch is computed, in order"
        assert "its own data" in one["notes"][0]
    assert sum(one["tries"] for one in learned) >= 24


def test_batches_without_use_are_settled_and_do_not_come_again(nursery: Nursery) -> None:
    *used, summary = nursery.values("serve_skipping", ranks=3, line="async", within_s=60)
    samples = summary["samples"]
    assert samples["applied"] + samples["not used"] == 2 * programs.SAMPLES
    assert samples["applied"] == 8 * sum(used)


# --- refusals, before anything is started ----------------------------------------------------------------------------


def refusal(model: nn.Module, optimizer: Any, **options: Any) -> str:
    learner = ServedLearner(line="async", number=0, learners=1, listener="nowhere", token="")
    try:
        with pytest.raises(RequestError) as caught:
            learner.prepare(model, optimizer, **options)
    finally:
        learner.close()
    return str(caught.value)


def test_what_cannot_be_run_is_refused_by_name() -> None:
    model = programs.model_of()
    some = list(model.parameters())[:2]
    assert "LBFGS" in refusal(model, torch.optim.LBFGS(model.parameters()))
    assert "'2.weight'" in refusal(model, torch.optim.SGD(some, lr=0.1)), "a parameter that nobody trains"
    stranger = nn.Parameter(torch.zeros(2, 3))
    assert "2x3" in refusal(model, torch.optim.SGD([*model.parameters(), stranger], lr=0.1))
    assert "clip_norm" in refusal(model, torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=-1.0)
    assert "'int8'" in refusal(model, torch.optim.SGD(model.parameters(), lr=0.1), gradients="int8")


def test_a_minibatch_before_prepare_says_what_to_do() -> None:
    learner = ServedLearner(line="async", number=0, learners=1, listener="nowhere", token="")
    with pytest.raises(RequestError, match=r"learner\.prepare"), learner.minibatch():
        pass
    learner.close()


@pytest.mark.parametrize("inside", [True, False])
def test_what_is_cancelled_between_backward_and_step_is_cancelled_too(nursery: Nursery, inside: bool) -> None:
    *learned, summary = nursery.values("serve_late_step", ranks=3, line="k-sync:1", inside=inside)
    slow = learned[-1]
    assert slow["seen"] == [float(n) for n in range(8)], "the batch comes again"
    assert slow["counted"] == 8 or not inside, "batch norm has not counted what was given up"
    assert (slow["cancelled"] >= 1) == inside, "a loop without `with` is not told"
    assert summary["pushes"]["received"] == summary["pushes"]["applied"] + summary["pushes"]["dropped"]


def test_gradients_changed_behind_torchs_back_are_seen_and_after_the_end_nothing_is(nursery: Nursery) -> None:
    learned, _ = nursery.values("serve_touched", ranks=2, line="async")
    assert learned["moved"] == -1.0
    assert "has finished" in learned["after"]


def test_downpour_never_begins_on_a_mixture(nursery: Nursery) -> None:
    *learned, summary = nursery.values("serve_free_hammer", ranks=3, line="downpour", minibatches=100, within_s=60)
    assert [one["torn"] for one in learned] == [0, 0]
    assert {one["last"] for one in learned} == {-200.0}
    assert summary["updates"] == 200


def test_what_changes_after_prepare_and_schedulers_of_other_things_are_refused() -> None:
    model = programs.model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    learner = ServedLearner(line="async", number=0, learners=1, listener="nowhere", token="")
    with pytest.raises(RequestError, match="ReduceLROnPlateau"):
        learner._follow_version(plateau)
    learner._replace_methods(optimizer, list(model.parameters()))
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    with pytest.raises(RequestError, match="parameters of the optimizer changed"):
        optimizer.step()
    learner.close()
