"""`--memory 2GB`: what learners need is predicted before they start, and what they use is checked while they train.

The need is that of the process before it trains, plus `rank_need` for its part of the model. What does not fit is
refused with what would: more stages, or activations that are computed again.
"""

from __future__ import annotations

import ctypes
import gc
import math
import resource
from contextlib import suppress
from itertools import pairwise

from offbeat.errors import OffbeatError, RequestError
from offbeat.number_format import format_size
from offbeat.spec import parse_size
from offbeat.train.config import Config
from offbeat.train.config_files import changed
from offbeat.train.layout import BY_DEFAULT
from offbeat.train.stage_plan import MeasuredPieces, StagePlan, data_bytes, plan_stages, rank_need, state_vectors

TRIED = (2, 3, 4)  # stages that are tried for an advice
SPARE = 0.05  # of the limit, that what is predicted leaves free
LARGE_BYTES, _M_MMAP_THRESHOLD = 4 << 20, -3
ROUGH = 1.2  # blocks are not the pieces that were measured: recompute is advised where there is room


def limit_of(config: Config) -> int | None:
    return parse_size(config.train.memory) if config.train.memory else None


def _usable(config: Config) -> int | None:
    limit = limit_of(config)
    return None if limit is None else int((1 - SPARE) * limit)


def room_of(config: Config, measured: MeasuredPieces) -> float:
    """What a learner may need beside what this process has, from which it is forked."""
    limit = _usable(config)
    return math.inf if limit is None else max(1, limit - measured.base_bytes)


def check_need(config: Config, measured: MeasuredPieces, plan: StagePlan | None) -> tuple[int, ...]:
    """Bytes that each process of a learner needs; a `RequestError` where that is more than the limit."""
    limit, base = _usable(config), measured.base_bytes
    whole = _whole_need(config, measured, recompute=config.train.recompute)
    need = tuple(base + size for size in ((whole,) if plan is None else plan.need_bytes))
    if limit is None or max(need) <= limit:
        return need
    advice = "; ".join(_fitting(config, measured, base, limit)) or "use smaller minibatches or a smaller model"
    who = "a learner" if plan is None else plan.names(1)[need.index(max(need))]
    raise RequestError(
        f"train.memory: {who} needs about {format_size(max(need))}, more than {100 * (1 - SPARE):.0f} % of "
        f"{config.train.memory}; {advice}"
    )


def _whole_need(config: Config, measured: MeasuredPieces, *, recompute: bool) -> int:
    """Of a learner with the whole model. With recompute it keeps what lies between its blocks, here as many pieces in
    each, and the activations of one block at a time."""
    nodes = measured.nodes
    need = rank_need(
        measured,
        [range(len(nodes))],
        held=1,
        state=state_vectors(config.train),
        recompute=False,
        leads=True,
        data_bytes=data_bytes(config, measured),
    )
    if recompute and measured.blocks:
        cuts = [len(nodes) * at // measured.blocks for at in range(measured.blocks + 1)]
        blocks = [nodes[start:end] for start, end in pairwise(cuts) if start < end]
        between = sum(block[-1].output_bytes for block in blocks[:-1])
        largest = max(sum(node.kept_bytes for node in block) for block in blocks)
        need += min(0, between + largest - sum(node.kept_bytes for node in nodes))
    return need


def _fitting(config: Config, measured: MeasuredPieces, base: int, limit: int) -> list[str]:
    """Other ways to train it, each with what it needs."""
    found, train, stages = [], config.train, config.layout.stages
    ways = [
        (f"--parallel {words}", {"parallel": words}, train.batch_size / microbatches)
        for more in TRIED
        if more > stages
        for microbatches in [min(BY_DEFAULT * more, train.batch_size)]
        for words in [f"stages={more},microbatches={microbatches}"]
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
        own = max(needs or (_whole_need(config, measured, recompute=True),))
        found += [f"--train.recompute true needs {format_size(base + own)}"] if base + ROUGH * own <= limit else []
    return found


def map_large_blocks() -> None:
    """In this process and its forks: a large block that is freed goes back to the system at once. Otherwise the C
    library keeps holes between blocks, up to a third of what is used."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def give_back() -> None:
    """Memory that this process has no more use for, and that its forks would have too."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library keeps it
        ctypes.CDLL(None).malloc_trim(0)


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
