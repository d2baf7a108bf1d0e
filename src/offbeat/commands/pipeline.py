"""offbeat pipeline: a pipeline schedule proved, priced and drawn, or all of them ranked."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat import pipelines, topology
from offbeat.commands.base import Command, Terminal, answer, facts, heading, option, say, table, write_file
from offbeat.errors import RequestError
from offbeat.number_format import format_seconds, format_size, percent
from offbeat.pipelines import PipelinePrice, PipelineProof, PipelineSchedule, StageCosts, Unit
from offbeat.pipelines.pipeline_ranking import (
    BASELINE,
    advised_pipeline,
    costs_for,
    pipeline_advice,
    rank_pipelines,
)
from offbeat.runs.untrusted import read_bytes
from offbeat.spec import count_of, parse_count, parse_seconds, parse_size, parse_whole
from offbeat.topology import Topology

if TYPE_CHECKING:
    from rich.text import Text

_STYLES = {"F": "blue", "B": "green", "I": "cyan", "W": "yellow"}
_STAGES, _MICROBATCHES = 4, 8


def _read_times(text: str) -> tuple[float, ...]:
    return tuple(parse_seconds(word) for word in text.split(","))


def _run(given: argparse.Namespace) -> None:
    if given.name is not None and given.name.endswith(".csv"):
        schedule = PipelineSchedule.from_csv(Path(given.name).stem.replace(" ", "-"), _read(Path(given.name)))
        for name, found in (("stages", schedule.ranks), ("microbatches", schedule.microbatches)):
            if getattr(given, name) not in (None, found):
                raise RequestError(f"pipeline: {given.name} has {found} {name}, not {getattr(given, name)}")
        _one(given, schedule, is_named=False)
        return
    stages, microbatches = given.stages or _STAGES, given.microbatches or _MICROBATCHES
    if given.name is None:
        _rank_all(given, stages, microbatches)
    else:
        _one(given, pipelines.build(given.name, stages=stages, microbatches=microbatches), is_named=True)


def _read(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a text file"
        raise RequestError(f"pipeline: cannot read {path}: {why}") from None


def _costs(given: argparse.Namespace, ranks: int, stages: int) -> StageCosts:
    """One time for all ranks, or one for each rank or stage. Ranks with unequal numbers of stages: all stages equal."""
    counts = {len(times) for times in (given.forward, given.backward, given.weight) if times and len(times) > 1}
    count = counts.pop() if counts else ranks if stages % ranks == 0 else stages
    if counts or count not in (ranks, stages):
        raise RequestError(f"pipeline: give one time, or one for each of {ranks} stages; got {count}")

    def spread(times: tuple[float, ...]) -> tuple[float, ...]:
        return times * count if len(times) == 1 else times

    forward = spread(given.forward)
    backward = spread(given.backward) if given.backward else tuple(2 * time for time in forward)
    weight = spread(given.weight) if given.weight else tuple(time / 2 for time in backward)
    if any(part > whole for part, whole in zip(weight, backward, strict=True)):
        raise RequestError("pipeline: --weight is a part of --backward and cannot be longer than it")
    return StageCosts(
        forward_s=forward,
        input_s=tuple(whole - part for whole, part in zip(backward, weight, strict=True)),
        weight_s=weight,
        activation_bytes=(given.activation,) * (count - 1),
    )


def _machine(given: argparse.Namespace, ranks: int) -> Topology | None:
    if given.topology is None:
        if given.activation:
            raise RequestError("pipeline: --activation needs a --topology, like uniform:bandwidth=10Gbit/s")
        return None
    return topology.build(given.topology, ranks=ranks)


def _unit(costs: StageCosts) -> Unit | None:
    """The times of one rank, if all have the same."""
    kinds = (costs.forward_s, costs.input_s, costs.weight_s)
    return Unit(*(times[0] for times in kinds)) if all(len(set(times)) == 1 for times in kinds) else None


def _one(given: argparse.Namespace, schedule: PipelineSchedule, *, is_named: bool) -> None:
    """A file may be called what it likes: only a pipeline that was built by name has the formula of that name."""
    proof = pipelines.prove(schedule, buffers=given.buffers)
    costs = _costs(given, schedule.ranks, schedule.stages)
    machine = _machine(given, schedule.ranks)
    price = pipelines.price(schedule, costs_for(schedule, costs), machine)
    if given.svg is not None:
        write_file(given.svg, pipelines.svg(schedule, price))
    if given.csv is not None:
        write_file(given.csv, schedule.csv())
    formula = None
    unit = _unit(costs)
    if unit is not None and machine is None and is_named:
        formula = pipelines.closed_form(
            schedule.name, stages=schedule.ranks, microbatches=schedule.microbatches, unit=unit
        )

    def show(out: Terminal) -> None:
        heading(out, f"{schedule.name}, {_count(schedule)}{f', {machine.name}' if machine else ''}")
        out.print(_coloured(pipelines.diagram(schedule, price, width=out.width)), soft_wrap=True)
        out.print()
        facts(out, _facts(schedule, proof, price, formula))
        for path in filter(None, (given.svg, given.csv)):
            say(out, f"\nwrote {path}")

    told = _json(schedule, proof, price) | {
        "ranks": schedule.ranks,
        "chunks": schedule.stages // schedule.ranks,
        "closed_form": formula,
        "topology": machine.name if machine else None,
    }
    answer(given, told, show)


def _count(schedule: PipelineSchedule) -> str:
    chunks = schedule.stages // schedule.ranks
    ranks = count_of(schedule.ranks, "rank") + (f" with {chunks} stages each" if chunks > 1 else "")
    return f"{ranks}, {_microbatches(schedule.microbatches)}"


def _microbatches(count: int) -> str:
    return f"{count} microbatch{'' if count == 1 else 'es'}"


def _facts(
    schedule: PipelineSchedule, proof: PipelineProof, price: PipelinePrice, formula: float | None
) -> list[tuple[str, str]]:
    shares = f"{percent(price.bubble_share)} of the time of all ranks"
    if formula is not None:
        text = pipelines.PIPELINES[schedule.name.partition(":")[0]].bubble_text
        shares += f"; closed form {text} = {percent(formula)}"
    found = [
        ("proved", "each pass once and in order, sends and receives match, no deadlock, one version of the weights"),
        ("buffers", f"at least {count_of(proof.buffers, 'receive buffer')} per stage and direction"),
        ("time", f"{format_seconds(price.seconds)}, {price.steps} steps"),
        ("bubbles", shares),
        ("activations", ", ".join(f"{peak:.4g}" for peak in price.peak_activations) + " microbatches at most, by rank"),
    ]
    if any(price.sent_bytes):
        found.append(("sent", f"{format_size(max(price.sent_bytes))} by the busiest rank"))
    return found


def _json(schedule: PipelineSchedule, proof: PipelineProof, price: PipelinePrice) -> dict[str, Any]:
    return {
        "name": schedule.name,
        "stages": schedule.ranks,
        "microbatches": schedule.microbatches,
        "steps": price.steps,
        "bubble_share": price.bubble_share,
        "peak_activations": list(price.peak_activations),
        "seconds": price.seconds,
        "buffers": proof.buffers,
        "busy_s": list(price.busy_s),
        "sent_bytes": list(price.sent_bytes),
    }


def _rank_all(given: argparse.Namespace, stages: int, microbatches: int) -> None:
    if given.svg is not None or given.csv is not None or given.buffers is not None:
        raise RequestError("pipeline: --svg, --csv and --buffers need a schedule, like 1f1b")
    costs, machine = _costs(given, stages, stages), _machine(given, stages)
    ranking, refused = rank_pipelines(costs, microbatches, machine)
    flat = next(one for one in ranking if one.line == BASELINE)
    rows = [
        (
            one.line,
            str(one.price.steps),
            format_seconds(one.price.seconds),
            f"{flat.price.seconds / one.price.seconds:.2f}x" if one.price.seconds else "",
            percent(one.price.bubble_share),
            f"{max(one.price.peak_activations):.4g}",
            format_size(max(one.price.sent_bytes)),
        )
        for one in ranking
    ]

    def show(out: Terminal) -> None:
        ranks = count_of(stages, "stage")
        heading(out, f"pipelines, {ranks}, {_microbatches(microbatches)}{f', {machine.name}' if machine else ''}")
        columns = ("schedule", "steps", "time", f"vs {BASELINE}", "bubbles", "activations", "busiest rank sends")
        table(out, columns, rows)
        say(out, pipeline_advice(ranking))
        for line, why in refused.items():
            say(out, f"{line} is not listed: {why}", style="dim")

    told = {
        "stages": stages,
        "microbatches": microbatches,
        "topology": machine.name if machine else None,
        "advised": advised_pipeline(ranking).line,
        "ranking": [_json(one.schedule, one.proof, one.price) for one in ranking],
        "undefined": refused,
    }
    answer(given, told, show)


def _coloured(text: str) -> Text:
    from rich.text import Text

    made = Text(text)
    for match in re.finditer(r"\d*([FBIW])\d+-*", text):
        made.stylize(_STYLES[match[1]], *match.span())
    return made


COMMAND = Command(
    summary="verify, price and draw a pipeline schedule, or rank all of them",
    about="Verify, price and draw a pipeline schedule: which stage computes which microbatch, and when. Without a "
    "name, rank all schedules. All times are per microbatch.",
    examples=(
        "pipeline 1f1b --stages 4 --microbatches 8",
        "pipeline zb-v --stages 4 --microbatches 8 --svg zb-v.svg --csv zb-v.csv",
        "pipeline --stages 8 --microbatches 32 --forward 10ms --activation 16MB --topology uniform:bandwidth=10Gbit/s",
    ),
    options=(
        option("name", nargs="?", help="gpipe, 1f1b, interleaved-1f1b:2, ..., or a CSV file (default: rank all)"),
        option(
            "--stages",
            read=parse_count,
            metavar="P",
            help=f"ranks of the pipeline; some schedules cut the stage of each rank further (default {_STAGES})",
        ),
        option(
            "--microbatches",
            read=parse_count,
            metavar="M",
            help=f"microbatches per minibatch (default {_MICROBATCHES})",
        ),
        option(
            "--forward",
            read=_read_times,
            default=(1.0,),
            metavar="TIME[,...]",
            help="time of a forward pass in a stage, or one for each stage (default 1s)",
        ),
        option(
            "--backward",
            read=_read_times,
            metavar="TIME[,...]",
            help="time of a backward pass in a stage (default: twice --forward)",
        ),
        option(
            "--weight",
            read=_read_times,
            metavar="TIME[,...]",
            help="part of --backward that computes the gradients of the weights (default: half)",
        ),
        option(
            "--activation",
            read=parse_size,
            default=0,
            metavar="SIZE",
            help="size of the activations that a stage sends to the next one per microbatch (default 0)",
        ),
        option("--topology", metavar="TOPOLOGY", help="network between the ranks (default: messages take no time)"),
        option(
            "--buffers",
            read=parse_whole,
            metavar="N",
            help="verify that this many receive buffers per stage are enough",
        ),
        option("--svg", read=Path, metavar="FILE", help="write a drawing of the schedule"),
        option(
            "--csv", read=Path, metavar="FILE", help="write the schedule as a CSV file for torch.distributed.pipelining"
        ),
    ),
    run=_run,
)
