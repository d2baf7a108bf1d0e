"""Accelerate and a learner in one program: `prepare` in the place of `accelerator.prepare`, under `offbeat run`.

    learner = offbeat.join()
    model, optimizer, loader = prepare(learner, accelerator, model, optimizer, loader)

The loop stays as it is: `accelerator.accumulate`, `backward`, `clip_grad_norm_` and mixed precision are Accelerate's,
the step is the servers'. With an all-reduce `prepare` is `accelerator.prepare`, on the backend `offbeat`.
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
    given = (model, optimizer, loader) if scheduler is None else (model, optimizer, loader, scheduler)
    if not isinstance(learner, ServedLearner):
        return tuple(accelerator.prepare(*given))
    if accelerator.num_processes > 1:
        raise RequestError(
            "Accelerate already created a process group; start this program with `offbeat run`, not `accelerate launch`"
        )
    model, wrapped = accelerator.prepare(model, optimizer)
    found = learner.prepare(accelerator.unwrap_model(model), wrapped.optimizer, *given[2:])
    own_clip = accelerator.clip_grad_norm_
    clips: list[tuple[float, int]] = []  # what the loop has clipped by last

    def clip(parameters: Any, max_norm: float, norm_type: int = 2) -> Any:
        clips[:] = [(max_norm, norm_type)]
        return own_clip(parameters, max_norm, norm_type)

    def step_with_the_rest() -> None:
        """What was accumulated when an epoch ends is clipped as the loop does it, and the next one begins anew."""
        accelerator.gradient_state._set_sync_gradients(True)
        for how in clips:
            own_clip(model.parameters(), *how)
        wrapped.step()
        wrapped.zero_grad()
        accelerator.step = 0

    accelerator.clip_grad_norm_ = clip
    learner.accumulate(step_with_the_rest)
    return model, wrapped, *found[2:]
