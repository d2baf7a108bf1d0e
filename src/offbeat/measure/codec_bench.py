"""`offbeat bench codecs`: how fast each codec is here, up to which bandwidth it pays, and whether it does in a lab.

Laws: no torch is loaded here. Speeds are of one thread. With a lab all ranks code at once, since they share the cores
of this machine, and every line takes a turn in every round. What loses is printed like what gains.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from offbeat import codecs
from offbeat.errors import OffbeatError, RequestError
from offbeat.lab import Lab
from offbeat.lab.network import format_bandwidth
from offbeat.machine import machine_facts
from offbeat.measure.benchmark import (
    BenchResult,
    Progress,
    Turn,
    alternate,
    check_above_zero,
    check_distinct,
    check_least,
    check_memory,
    check_processes,
    spread,
)
from offbeat.measure.harness import Harness, program
from offbeat.measure.rank_bench import LabRequest
from offbeat.network.keys import KEY, OPEN, TRUST
from offbeat.number_format import format_rate, format_size
from offbeat.processes.launcher import thread_environment
from offbeat.processes.signals import terminable
from offbeat.report.benchmark_fields import Field, Row, format_ms
from offbeat.schedules import BASELINE
from offbeat.spec import count_of

PLAIN = BASELINE
LINES = ("bf16", "fp16", "int8", "int4", "1-bit", "top-k:0.01", "random-k:0.01", "power-sgd:4")
PARAMETERS = 25_600_000
_TIMES = 3
_PORT = 29500
_NEEDED = 9  # tensors of the size of the gradient that a rank holds at most

DEFINITIONS: Mapping[str, str] = {
    "ratio": "bytes that an all-reduce sends without the codec / with it; top-k and 1-bit gather all ranks' payloads",
    "encode_bytes_per_s": "bytes of fp32 a second, with error feedback, by one thread; the fastest of 3 times",
    "decode_bytes_per_s": "the same, decoded and added",
    "coding_bytes_per_s": "bytes of fp32 that an all-reduce sends / seconds of coding that it needs: c",
    "break_even_bytes_per_s": "c (1 - 1/ratio): on a faster link the codec loses, if coding and sending take turns",
    "ms": "median over rounds of one all-reduce (mean of float32), the slowest rank, begun together",
    "gain": "ms of ring / ms",
    "sent_bytes": "bytes that rank 0 sends in one all-reduce",
}
_SPEEDS = ("ratio", "encode_bytes_per_s", "decode_bytes_per_s", "coding_bytes_per_s", "break_even_bytes_per_s")


def _rate(key: str) -> Any:
    return lambda row: format_rate(row[key])


SPEED_FIELDS = (
    Field("codec", title="codec"),
    Field("ratio", form="number", title="ratio", text=lambda row: f"{row['ratio']:.3g}x"),
    Field("encode_bytes_per_s", form="number", title="encode", text=_rate("encode_bytes_per_s")),
    Field("decode_bytes_per_s", form="number", title="decode", text=_rate("decode_bytes_per_s")),
    Field("coding_bytes_per_s", form="number", title="in an all-reduce", text=_rate("coding_bytes_per_s")),
    Field(
        "break_even_bytes_per_s", form="number", title="pays below",
        text=lambda row: format_bandwidth(row["break_even_bytes_per_s"]),
    ),
)  # fmt: skip
REDUCE_FIELDS = (
    Field("line", title="strategy"),
    Field("ms", form="number", title="ms", text=lambda row: format_ms(row["ms"])),
    Field(
        "rounds_ms", form="number", title="of rounds",
        text=lambda row: f"{format_ms(min(row['rounds_ms']))}-{format_ms(max(row['rounds_ms']))}",
    ),
    Field("gain", form="number", title=f"vs {PLAIN}", text=lambda row: f"{row['gain']:.2f}x"),
    Field("sent_bytes", form="number", title="sent", text=lambda row: format_size(row["sent_bytes"])),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecsRequest:
    """What is asked for; wrong requests are refused at birth. `auto:bf16+int8` is among `lines` only with a lab."""

    lines: tuple[str, ...] = LINES
    ranks: int = 4
    parameters: int = PARAMETERS
    rounds: int = 3
    timeout_s: float = 120.0
    lab: LabRequest | None = None

    def __post_init__(self) -> None:
        for line in self.lines:
            if not codecs.read_option(line).auto:
                codecs.parse(line)
            elif self.lab is None:
                raise RequestError(f"bench codecs: {line} chooses by the links between hosts, so it needs --lab")
        check_distinct("codecs", self.lines, "codec")
        check_processes("--ranks", [self.ranks], 2)
        check_least("--parameters", self.parameters, 20_000)
        check_above_zero("--timeout", self.timeout_s)
        many = 1 if self.lab is None else self.ranks
        what = f"gradients of {self.parameters:,} parameters on {count_of(many, 'rank')}"
        check_memory(what, many * _NEEDED * 4 * self.parameters, "; use fewer --parameters")

    @property
    def codecs(self) -> tuple[str, ...]:
        return tuple(line for line in self.lines if not codecs.read_option(line).auto)

    @property
    def reduced(self) -> tuple[str, ...]:
        """The strategies that are compared in a lab: without a codec, with each, and by `auto`'s choice."""
        choosing = dict.fromkeys(("auto", *(line for line in self.lines if line not in self.codecs)))
        return PLAIN, *(_coded(line) for line in (*self.codecs, *choosing))


def _coded(line: str) -> str:
    return f"{PLAIN}:codec={line}"


def measure(request: CodecsRequest, progress: Progress) -> BenchResult:
    """The speed of each codec; with a lab also an all-reduce with each."""
    machine = machine_facts()
    rounds: dict[str, list[tuple[float, float]]] = {}
    why: list[str] = []
    with terminable(), ExitStack() as stack:
        progress("starting")
        ranks, facts = _start(stack, request)
        speeds = {}
        for line in request.codecs:
            progress(f"timing {line}")
            answers = ranks.ask({"do": "speed", "codec": line, "times": _TIMES}, f"timing {line}")
            speeds[line] = (max(one["encode_s"] for one in answers), max(one["decode_s"] for one in answers))
        if request.lab is not None:
            lines = request.reduced
            for line in lines:
                progress(f"checking {line}")
                answers = ranks.ask({"do": "warm", "line": line}, f"checking {line}")
                if len({answer["digest"] for answer in answers}) > 1:
                    raise OffbeatError(f"bench: wrong result: with {line} the ranks have different bits")
                if line not in map(_coded, request.codecs) and line != PLAIN:
                    why.append(f"{line.partition(':')[2]}: {answers[0]['why']}")
            turns: dict[str, Turn[tuple[float, float]]] = {line: partial(_time, ranks, line) for line in lines}
            rounds = alternate(turns, request.rounds, progress)
    return result_of(request, machine | facts, speeds, rounds, why)


def _time(ranks: Harness, line: str, number: int, doing: str) -> tuple[float, float]:
    answers = ranks.ask({"do": "time", "line": line, "iterations": 1}, doing)
    return max(answer["seconds"] for answer in answers), answers[0]["sent"]


def _start(stack: ExitStack, request: CodecsRequest) -> tuple[Harness, dict[str, Any]]:
    ranks = stack.enter_context(Harness(request.timeout_s))
    environment = {**os.environ, **thread_environment(1), TRUST: OPEN, KEY: "", "OFFBEAT_STRATEGY": PLAIN}
    asked = {"do": "join", "items": request.parameters, "port": _PORT, "timeout_s": 2 * request.timeout_s}
    if request.lab is None:
        ranks.start("rank 0", program("codec_rank"), environment)
        (answer,) = ranks.ask([asked | {"rank": 0, "ranks": 1}], "starting")
        return ranks, answer
    hosts = stack.enter_context(Lab(request.lab.network))
    for rank in range(request.ranks):
        place = request.lab.host_of(rank)
        ranks.add(f"rank {rank}", hosts.start_piped(place, program("codec_rank"), environment))
    joined = asked | {"ranks": request.ranks, "address": request.lab.network.address(0)}
    answers = ranks.ask([joined | {"rank": rank} for rank in range(request.ranks)], "starting the ranks")
    return ranks, answers[0]


def result_of(
    request: CodecsRequest,
    machine: Mapping[str, Any],
    speeds: Mapping[str, tuple[float, float]],
    rounds: Mapping[str, Sequence[tuple[float, float]]],
    why: Sequence[str],
) -> BenchResult:
    """From the seconds of each codec, and of each line in each round."""
    size = 4 * request.parameters
    rows = [_speed_row(request, line, *seconds) for line, seconds in speeds.items()]
    reduced = _reduce_rows(rounds)
    lab = None if request.lab is None else request.lab.links()
    who = count_of(request.ranks, "rank") + ("" if lab is None else ", coding at once")
    json = {
        "measured": "codecs",
        "ranks": request.ranks,
        "parameters": request.parameters,
        "machine": dict(machine),
        "codecs": rows,
        "definitions": dict(DEFINITIONS) if reduced else {name: DEFINITIONS[name] for name in _SPEEDS},
        **({"links": lab, "rounds": request.rounds, "strategies": reduced, "why": list(why)} if reduced else {}),
    }
    tables: list[tuple[Sequence[Field], Sequence[Row]]] = [(SPEED_FIELDS, rows), (REDUCE_FIELDS, reduced)]
    return BenchResult(
        json=json,
        heading=f"codecs on {format_size(size)} of gradients, all-reduce of {who}",
        tables=tuple(table for table in tables if table[1]),
        verdict=_verdict(reduced) if reduced else _advice(rows),
        details=list(why),
        terms=[
            *((name.partition("_")[0], DEFINITIONS[name]) for name in _SPEEDS[1:3]),
            ("in an all-reduce", DEFINITIONS["coding_bytes_per_s"]),
            ("pays below", DEFINITIONS["break_even_bytes_per_s"]),
            *([] if lab is None or request.lab is None else [("lab", f"{request.lab.network.hosts} hosts, {lab}")]),
        ],
        spread=max((spread(row["rounds_ms"]) for row in reduced), default=1.0),
    )


def _speed_row(request: CodecsRequest, line: str, encode_s: float, decode_s: float) -> Row:
    size = 4 * request.parameters
    figures = codecs.all_reduce_figures(codecs.parse(line), request.ranks, request.parameters, encode_s, decode_s)
    return {
        "codec": line,
        "ratio": figures.ratio,
        "encode_bytes_per_s": size / encode_s,
        "decode_bytes_per_s": size / decode_s,
        "coding_bytes_per_s": figures.bytes_per_s,
        "break_even_bytes_per_s": figures.break_even,
    }


def _reduce_rows(rounds: Mapping[str, Sequence[tuple[float, float]]]) -> list[dict[str, Any]]:
    plain_s = statistics.median(seconds for seconds, _ in rounds[PLAIN]) if rounds else 0.0
    found = []
    for line, taken in rounds.items():
        seconds = statistics.median(each for each, _ in taken)
        found.append(
            {
                "line": line,
                "ms": 1e3 * seconds,
                "gain": plain_s / seconds,
                "sent_bytes": taken[-1][1],
                "rounds_ms": [1e3 * each for each, _ in taken],
            }
        )
    return found


def _verdict(reduced: Sequence[Row]) -> list[str]:
    best = max(reduced, key=lambda row: row["gain"])
    told = [f"fastest: {best['line']}, {best['gain']:.2f}x {PLAIN}"]
    options = {row["line"]: codecs.read_option(row["line"].partition("=")[2]) for row in reduced[1:]}
    loses = [row["line"].partition("=")[2] for row in reduced[1:] if row["gain"] < 1 and not options[row["line"]].auto]
    told += [f"slower than {PLAIN} here: {', '.join(loses)}"] if loses else []
    for row in reduced[1:]:
        option = options[row["line"]]
        if option.auto:
            choices = {PLAIN, *(_coded(codec.line) for codec in option.codecs)}
            fastest = min(one["ms"] for one in reduced if one["line"] in choices)
            told.append(f"{row['line']}: {row['ms'] / fastest - 1:+.0%} against the fastest that it chooses from")
    return told


def _advice(rows: Sequence[Row]) -> list[str]:
    least = min(rows, key=lambda row: row["break_even_bytes_per_s"])
    most = max(rows, key=lambda row: row["break_even_bytes_per_s"])
    limits = " to ".join(dict.fromkeys(format_bandwidth(row["break_even_bytes_per_s"]) for row in (least, most)))
    return [
        f"a codec pays on links below {limits}, by codec; on faster links, as in most data centres, "
        "send gradients as they are"
    ]
