"""Signs that a training does not learn, read from its evaluations.

    nothing applied   no sample was applied over a whole epoch: every gradient was dropped
    not finite        the loss is infinite or not a number
    guessing          the accuracy cannot be told from that of always naming the most frequent class
    as at the start   the mean training loss is no lower than that of the first minibatch
    rising            it is higher than an epoch before, and not small
    fallen back       at the end the accuracy is far below, and by more than chance, what it was before

A training may begin slowly, so `guessing` and `as at the start` count when they were so an epoch before too, and at the
end of a run. Evaluations are the records of metrics.jsonl.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from offbeat.runs.metrics import format_accuracy, interval

_AS_HIGH = 0.95  # of the loss at the start
_RISE = 1.1  # from one evaluation to the next
_FALLEN = 0.8  # of the best accuracy
_MOSTLY = 0.5  # of the targets in one class
_SMALL = 0.5  # of the loss at the start: below it, a rise is noise


class Sign(NamedTuple):
    """What is wrong, by its name and in words."""

    name: str
    text: str


def sign_of(evaluations: Sequence[Mapping[str, Any]], *, ended: bool) -> Sign | None:
    """What the latest of these says, in view of those before; None: it may well learn."""
    now = evaluations[-1]
    epoch = now.get("epoch") or 0
    past = [one for one in evaluations[:-1] if (one.get("epoch") or 0) <= epoch - 1]
    before = past[-1] if past else {}
    if epoch >= 1 and (now.get("samples") or 0) <= (before.get("samples") or 0):
        bad = (now.get("dropped") or {}).get("not finite")
        why = f": {bad:,} samples gave gradients that are not finite" if bad else ""
        return Sign("nothing applied", f"no gradient was applied over a whole epoch{why}")
    if "loss" in now and now["loss"] is None:
        return Sign("not finite", "the loss is not finite")
    if _guesses(now) and (ended or _guesses(before)):
        shown = format_accuracy(now["accuracy"], now["test_samples"])
        return Sign("guessing", f"accuracy {shown} is no better than guessing ({100 * now['chance']:.1f} %)")
    loss, start, last = now.get("train_loss"), now.get("start_loss"), before.get("train_loss")
    if _as_high(now) and (ended or _as_high(before)):
        return Sign("as at the start", f"training loss {loss:.3g} is no lower than at the start ({start:.3g})")
    if loss is not None and start is not None and last is not None and loss > max(_RISE * last, _SMALL * start):
        return Sign("rising", f"training loss rises: {last:.3g}, then {loss:.3g} ({start:.3g} at the start)")
    return _fallen_back(evaluations) if ended else None


def _fallen_back(evaluations: Sequence[Mapping[str, Any]]) -> Sign | None:
    now, samples = evaluations[-1].get("accuracy"), evaluations[-1].get("test_samples")
    best = max(evaluations, key=lambda one: one.get("accuracy") or 0.0)
    highest = best.get("accuracy") or 0.0
    if now is None or not samples or now > _FALLEN * highest or interval(now, samples)[1] >= highest:
        return None
    text = f"the accuracy fell from {100 * highest:.1f} % (epoch {best.get('epoch') or 0:g}) to {100 * now:.1f} %"
    return Sign("fallen back", text)


def sign_of_losses(losses: Sequence[float], first: int) -> Sign | None:
    """Of a run without evaluations, by the losses of its minibatches: the last quarter beside the one before.

    `first`: so many are the loss at the start. With fewer than four times as many nothing is said.
    """
    many, quarter = len(losses), len(losses) // 4
    if quarter < max(1, first):
        return None
    before, last = (losses[many - end * quarter : many - (end - 1) * quarter] for end in (2, 1))
    now: dict[str, Any] = {"epoch": 2, "samples": 1, "train_loss": fmean(last), "start_loss": fmean(losses[:first])}
    now |= {} if math.isfinite(fmean(last)) else {"loss": None}
    return sign_of([{"epoch": 1, "samples": 0, "train_loss": fmean(before)}, now], ended=True)


def warning_of(sign: Sign, remedy: str) -> str:
    """The line that is told; `remedy` is what to try."""
    return f"this run does not learn: {sign.text}; try {remedy}"


def warning_of_losses(sign: Sign) -> str:
    """The same for a loop of one's own, of which no more is known than its losses."""
    trained = ", unless it began with trained weights" if sign.name == "as at the start" else ""
    return warning_of(sign, f"a lower learning rate{trained}")


def _guesses(evaluation: Mapping[str, Any]) -> bool:
    accuracy, samples, chance = (evaluation.get(name) for name in ("accuracy", "test_samples", "chance"))
    if accuracy is None or chance is None or not samples:
        return False
    if chance > _MOSTLY and not _as_high(evaluation):
        return False  # most targets are one class: the accuracy tells little, and the loss falls
    return interval(accuracy, samples)[0] <= float(chance)


def _as_high(evaluation: Mapping[str, Any]) -> bool:
    loss, start = evaluation.get("train_loss"), evaluation.get("start_loss")
    return loss is not None and start is not None and bool(loss > _AS_HIGH * start)
