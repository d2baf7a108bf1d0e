"""Learners in stages, for predictions: how long a minibatch takes a pipeline, beside one process with the whole model.

The layers of a model, measured (a calibration) or assumed, are cut as `offbeat train --parallel` cuts its pieces, and
the schedule is priced. A learner then is like any other, but its minibatches take `time_share` of what they took, and
its processes each reduce a part of the gradient, `size_share` at most.

What it must not know: torch, and the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.errors import RequestError
from offbeat.number_format import percent
from offbeat.pipelines.actions import PipelineSchedule
from offbeat.pipelines.model_graph import GraphNode, chain
from offbeat.pipelines.partition import CutProblem, StageDevice, best_partition
from offbeat.pipelines.pipeline_cost import PipelinePrice, StageCosts, price_pipeline
from offbeat.pipelines.pipeline_table import PIPELINES, build_pipeline
from offbeat.spec import count_of
from offbeat.topology import Topology
from offbeat.train.layout import AUTO, Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedLearner:
    """See the module's text. `layers` are those of each stage."""

    layout: Layout
    schedule: PipelineSchedule
    price: PipelinePrice
    layers: tuple[int, ...]
    time_share: float
    size_share: float

    @property
    def text(self) -> str:
        peaks = ", ".join(f"{peak:.4g}" for peak in self.price.peak_activations)
        return (
            f"{self.schedule.name} on {count_of(self.layout.stages, 'rank')}, "
            f"{self.schedule.microbatches} microbatches: "
            f"{1 / self.time_share:.2f}x as fast as one process, bubbles {percent(self.price.bubble_share)}, "
            f"activations of {peaks} microbatches at most; layers {' + '.join(map(str, self.layers))}"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "schedule": self.schedule.name,
            "stages": self.layout.stages,
            "microbatches": self.schedule.microbatches,
            "layers": list(self.layers),
            "time_share": self.time_share,
            "size_share": self.size_share,
            "bubble_share": self.price.bubble_share,
            "peak_activations": list(self.price.peak_activations),
        }


def stage_learner(
    layout: Layout,
    layers: Sequence[GraphNode],
    *,
    topology: Topology | None = None,
    slower: float = 1.0,
    cores: float = float("inf"),
) -> StagedLearner:
    """From the times of a whole minibatch; `output_bytes` are of a microbatch. With schedule=auto the fastest.

    `slower`: how many times longer a minibatch takes in microbatches. On fewer `cores` than stages these take turns.
    """
    lines = [layout.schedule] if layout.schedule != AUTO else [line for row in PIPELINES.values() for line in row.lines]
    found, refused = [], None
    for line in lines:
        try:
            schedule = build_pipeline(line, stages=layout.stages, microbatches=layout.microbatches)
            found.append(_staged(layout, schedule, layers, topology, slower, cores))
        except RequestError as error:
            refused = refused or error
    if not found:
        raise refused or RequestError("parallel: there is no schedule")
    return min(found, key=lambda one: one.time_share)


def _staged(
    layout: Layout,
    schedule: PipelineSchedule,
    layers: Sequence[GraphNode],
    topology: Topology | None,
    slower: float,
    cores: float,
) -> StagedLearner:
    if schedule.stages > len(layers):
        raise RequestError(
            f"--parallel: '{schedule.name}' on {count_of(layout.stages, 'rank')} has {schedule.stages} stages, but the "
            f"model has {count_of(len(layers), 'layer')}"
        )
    many = schedule.microbatches
    nodes = [one._replace(forward_s=one.forward_s / many, backward_s=one.backward_s / many) for one in layers]
    devices = (StageDevice(),) * schedule.stages
    problem = CutProblem(graph=chain("layers", nodes), devices=devices, microbatches=many)
    parts = best_partition(problem).parts
    price = price_pipeline(schedule, StageCosts.of(nodes, parts, sends=topology is not None), topology)
    sizes = [0] * schedule.ranks
    for node, part in zip(nodes, parts, strict=True):
        sizes[schedule.placement[part]] += node.parameter_bytes
    alone_s = sum(one.compute_s for one in layers)
    return StagedLearner(
        layout=layout,
        schedule=schedule,
        price=price,
        layers=tuple(parts.count(stage) for stage in range(schedule.stages)),
        time_share=slower * max(price.seconds / alone_s if alone_s else 1.0, 1 / cores),
        size_share=max(sizes) / (sum(sizes) or 1),
    )
