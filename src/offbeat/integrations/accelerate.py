"""Accelerate and a learner in one program: `prepare` in the place of `accelerator.prepare`, under `offbeat run`.

    learner = offbeat.join()
    model, optimizer, loader = prepare(learner, accelerator, model, optimizer, loader)

The loop stays as it is: `accelerator.accumulate`, `backward`, `clip_grad_norm_` and mixed precision are Accelerate's,
the step is the servers'. With an all-reduce there is nothing to do but `accelerator.prepare`: OFFBEAT_REPLACE=gloo.
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator

from offbeat.errors import RequestError
from offbeat.server.learner.served_learner import ServedLearner


def prepare(
    learner: Any, accelerator: Accelerator, model: Any, optimizer: Any, loader: Any, scheduler: Any = None
) -> tuple[Any, ...]:
    """The model, the optimizer, the leased loader and, if it was given, the scheduler, to be used instead."""
    if not isinstance(learner, ServedLearner):
        raise RequestError(
            "an all-reduce needs no learner under Accelerate: use accelerator.prepare, and OFFBEAT_REPLACE"
        )
    if accelerator.num_processes > 1:
        raise RequestError(
            "Accelerate has a process group of its own: start this program by `offbeat run`, not `launch`"
        )
    model, wrapped = accelerator.prepare(model, optimizer)
    given = () if scheduler is None else (scheduler,)
    found = learner.prepare(accelerator.unwrap_model(model), wrapped.optimizer, loader, *given)
    learner.accumulate()
    return model, wrapped, *found[2:]
