"""Every pipeline on the same model and machine, fastest first."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat import plugins
from offbeat.errors import RequestError
from offbeat.number_format import format_seconds, percent
from offbeat.pipelines.actions import PipelineSchedule
from offbeat.pipelines.pipeline_cost import PipelinePrice, StageCosts, price_pipeline
from offbeat.pipelines.pipeline_proof import PipelineProof, prove
from offbeat.pipelines.pipeline_table import PIPELINES, build_pipeline
from offbeat.topology import Topology

BASELINE = "1f1b"
CLOSE = 1.02  # times that differ by less are not told apart: the model leaves more out than that


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPipeline:
    line: str
    schedule: PipelineSchedule
    proof: PipelineProof
    price: PipelinePrice


def costs_for(schedule: PipelineSchedule, costs: StageCosts) -> StageCosts:
    """Times given for each rank are cut into as many stages as the schedule has; times of stages are kept."""
    if costs.stages == schedule.ranks and schedule.stages % schedule.ranks == 0:
        return costs.cut(schedule.stages // schedule.ranks)
    return costs


def rank_pipelines(
    costs: StageCosts, microbatches: int, topology: Topology | None = None
) -> tuple[list[RankedPipeline], dict[str, str]]:
    """All that are defined for so many ranks and microbatches, fastest first, and why the others are not."""
    plugins.load_known()
    found, refused = [], {}
    for row in PIPELINES.values():
        for line in row.lines:
            try:
                schedule = build_pipeline(line, stages=costs.stages, microbatches=microbatches)
            except RequestError as error:
                refused[line] = str(error).removeprefix(f"'{line}': ")
                continue
            proof = prove(schedule)
            price = price_pipeline(schedule, costs_for(schedule, costs), topology)
            found.append(RankedPipeline(line=line, schedule=schedule, proof=proof, price=price))
    return sorted(found, key=lambda one: (one.price.seconds, max(one.price.peak_activations))), refused


def advised_pipeline(ranking: list[RankedPipeline]) -> RankedPipeline:
    """Of those within 2 % of the fastest, the one that holds the fewest activations."""
    close = [one for one in ranking if one.price.seconds <= CLOSE * ranking[0].price.seconds]
    return min(close, key=lambda one: max(one.price.peak_activations))


def pipeline_advice(ranking: list[RankedPipeline]) -> str:
    best, fastest = advised_pipeline(ranking), ranking[0]
    held = f"it holds activations of {max(best.price.peak_activations):.4g} microbatches on a rank"
    if best is fastest:
        return (
            f"use {best.line}: {format_seconds(best.price.seconds)}, bubbles {percent(best.price.bubble_share)}; {held}"
        )
    slower = best.price.seconds / fastest.price.seconds - 1
    return (
        f"use {best.line}: within {percent(slower)} of {fastest.line}, the fastest, and {held} instead of "
        f"{max(fastest.price.peak_activations):.4g}"
    )
