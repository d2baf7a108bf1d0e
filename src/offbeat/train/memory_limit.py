"""`--memory 2GB`: what learners need is predicted before they start, and what they use is checked while they train.

The need is that of the process before it trains, plus `rank_need` for its part of the model. What does not fit is
refused with what would: more stages, or activations that are computed again.
"""

from __future__ import annotations

import math
import resource

from offbeat.errors import OffbeatError, RequestError
from offbeat.machine import resident_bytes
from offbeat.number_format import format_size
from offbeat.spec import parse_size
from offbeat.train.config import Config
from offbeat.train.config_files import changed
from offbeat.train.layout import BY_DEFAULT
from offbeat.train.stage_plan import MeasuredPieces, StagePlan, plan_stages, rank_need, state_vectors

TRIED = (2, 3, 4)  # stages that are tried for an advice


def limit_of(config: Config) -> int | None:
    return parse_size(config.train.memory) if config.train.memory else None


def room_of(config: Config) -> float:
    """What a learner may need beside what this process, from which it is forked, has now."""
    limit = limit_of(config)
    return math.inf if limit is None else max(1, limit - (resident_bytes() or 0))


def check_need(config: Config, measured: MeasuredPieces, plan: StagePlan | None) -> tuple[int, ...]:
    """Bytes that each learner of a replica needs; a `RequestError` where that is more than the limit."""
    limit, base = limit_of(config), resident_bytes() or 0
    whole = _whole_need(measured, state_vectors(config.train), recompute=config.train.recompute)
    need = tuple(base + size for size in ((whole,) if plan is None else plan.need_bytes))
    if limit is None or max(need) <= limit:
        return need
    advice = "; ".join(_fitting(config, measured, base, limit)) or "use smaller minibatches or a smaller model"
    who = "a learner" if len(need) == 1 else f"learner {need.index(max(need))}"
    raise RequestError(
        f"train.memory: {who} needs about {format_size(max(need))}, more than {config.train.memory}; {advice}"
    )


def _whole_need(measured: MeasuredPieces, state: int, *, recompute: bool) -> int:
    """Of a learner with the whole model. With recompute it keeps about what lies between the pieces, and computes one
    of them at a time again."""
    need = rank_need(measured, [range(len(measured.nodes))], held=1, state=state, recompute=False, leads=True)
    if recompute:
        kept = [node.kept_bytes for node in measured.nodes]
        need += min(0, sum(node.output_bytes for node in measured.nodes) + max(kept) - sum(kept))
    return need


def _fitting(config: Config, measured: MeasuredPieces, base: int, limit: int) -> list[str]:
    """Other ways to train it, each with what it needs."""
    found, train, stages = [], config.train, config.layout.stages
    ways = [
        (f"--parallel {words}", {"parallel": words, "learners": more}, train.batch_size / microbatches)
        for more in TRIED
        if more > stages
        for microbatches in [min(BY_DEFAULT * more, train.batch_size)]
        for words in [f"pipeline={more},microbatches={microbatches}"]
    ]
    for words, changes, samples in ways:
        try:
            plan = plan_stages(changed(config, changes), measured.scaled(samples))
        except RequestError:  # too few layers, or an option that pipelines do not have
            continue
        if base + max(plan.need_bytes) <= limit:
            found.append(f"{words} needs {format_size(base + max(plan.need_bytes))}")
            break
    if not train.recompute:
        again = changed(config, {"train": {"recompute": True}})
        needs = plan_stages(again, measured).need_bytes if config.parallel else ()
        need = base + max(needs or (_whole_need(measured, state_vectors(train), recompute=True),))
        found += [f"--train.recompute true needs {format_size(need)}"] if need <= limit else []
    return found


def check_use(limit: int | None) -> None:
    """An `OffbeatError` where this process has used more than it may."""
    if limit is not None and used_bytes() > limit:
        raise OffbeatError(
            f"used {format_size(used_bytes())} of memory, more than --memory {format_size(limit)}; use more stages "
            "(--parallel), smaller microbatches or --train.recompute true"
        )


def used_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
