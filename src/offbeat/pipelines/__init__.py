"""Pipelines as data: built, proved, priced and drawn. numpy and the standard library only.

    schedule = pipelines.build("1f1b", stages=4, microbatches=8)
    pipelines.prove(schedule)  # a ScheduleError shows the wrong place
    price = pipelines.price(schedule, pipelines.equal_costs(4, activation_bytes=4_000_000))
    print(pipelines.diagram(schedule, price))

A `PipelineSchedule` is a row of actions for each rank: stage 2 computes the forward pass of microbatch 0. It is read
from and written to the CSV of torch.distributed.pipelining. Adding one is a function and a row: `register_pipeline`.
"""

from offbeat.pipelines.actions import Action, PipelineSchedule
from offbeat.pipelines.pipeline_cost import PipelinePrice, StageCosts, equal_costs
from offbeat.pipelines.pipeline_cost import price_pipeline as price
from offbeat.pipelines.pipeline_diagram import diagram
from offbeat.pipelines.pipeline_messages import with_messages, without_messages
from offbeat.pipelines.pipeline_proof import PipelineProof, peak_activations, prove
from offbeat.pipelines.pipeline_svg import pipeline_svg as svg
from offbeat.pipelines.pipeline_table import PIPELINES, PipelineAlgorithm, Unit, closed_form, register_pipeline
from offbeat.pipelines.pipeline_table import build_pipeline as build

__all__ = [
    "PIPELINES",
    "Action",
    "PipelineAlgorithm",
    "PipelinePrice",
    "PipelineProof",
    "PipelineSchedule",
    "StageCosts",
    "Unit",
    "build",
    "closed_form",
    "diagram",
    "equal_costs",
    "peak_activations",
    "price",
    "prove",
    "register_pipeline",
    "svg",
    "with_messages",
    "without_messages",
]
