"""The interface that `offbeat.join` returns: types as a user's type checker sees them, and both learners against it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, assert_type

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

import offbeat
from offbeat.server.learner.reduced_learner import ReducedLearner
from offbeat.server.learner.served_learner import ServedLearner

CALLS = (
    "all_reduce", "barrier", "broadcast", "close", "finish", "gather", "load_state_dict", "minibatch", "prepare",
    "state_dict",
)  # fmt: skip
ATTRIBUTES = ("learners", "notes", "number", "strategy", "version")


if TYPE_CHECKING:  # not run: `mypy`, a part of `make test`, checks each line

    def prepare_returns_the_types_it_was_given(loader: DataLoader[tuple[torch.Tensor, torch.Tensor]]) -> None:
        learner = offbeat.join()
        assert_type(learner, offbeat.Learner)
        model = nn.Sequential(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = StepLR(optimizer, 3)
        assert_type(learner.prepare(model, optimizer), tuple[nn.Sequential, torch.optim.SGD])
        assert_type(
            learner.prepare(model, optimizer, loader, clip_norm=1.0),
            tuple[nn.Sequential, torch.optim.SGD, DataLoader[tuple[torch.Tensor, torch.Tensor]]],
        )
        assert_type(learner.prepare(model, optimizer, [1.0, 2.0]), tuple[nn.Sequential, torch.optim.SGD, list[float]])
        assert_type(learner.prepare(model, optimizer, None, scheduler), tuple[nn.Sequential, torch.optim.SGD, StepLR])
        assert_type(
            learner.prepare(model, optimizer, scheduler=scheduler), tuple[nn.Sequential, torch.optim.SGD, StepLR]
        )
        model, optimizer, loader, scheduler = learner.prepare(model, optimizer, loader, scheduler)
        assert_type(model, nn.Sequential)
        learner.prepare(model, optimizer, 5)  # type: ignore[call-overload] # not a loader
        learner.prepare(optimizer, model)  # type: ignore[call-overload] # the other way round
        with learner.minibatch() as minibatch:
            assert_type(minibatch, offbeat.OpenMinibatch)
            minibatch.loss = torch.zeros(())
        assert_type(minibatch.cancelled, bool)
        assert_type(learner.version, int)
        offbeat.jion()  # type: ignore[attr-defined] # a name that is not there is refused
        assert_type(offbeat.policies.create("async", expect=2), offbeat.policies.Policy)


def public(kind: type[Any]) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_the_interface_is_what_the_docs_describe() -> None:
    assert public(offbeat.Learner) == {*CALLS, *ATTRIBUTES}


@pytest.mark.parametrize("kind", [ServedLearner, ReducedLearner])
def test_both_learners_take_what_the_interface_takes_and_document_it(kind: type[Any]) -> None:
    for name in CALLS:
        wanted = inspect.signature(getattr(offbeat.Learner, name)).parameters
        taken = inspect.signature(getattr(kind, name)).parameters
        assert [one for one in taken if one in wanted] == list(wanted), name
        assert all(taken[one].default == wanted[one].default for one in wanted), name
        assert inspect.getdoc(getattr(kind, name)), name
    assert all(name in (kind.__doc__ or "") for name in ATTRIBUTES)


def test_a_learner_has_the_attributes_of_the_interface() -> None:
    learner = ServedLearner(line="async", number=0, learners=1, listener="nowhere", token="")
    assert all(hasattr(learner, name) for name in ATTRIBUTES)
    learner.close()
