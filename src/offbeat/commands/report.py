"""offbeat report: one HTML page from the folders of runs and the JSON files of benchmarks."""

from __future__ import annotations

import argparse
import json
import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.commands.base import Command, Terminal, answer, busy, facts, heading, option, read_accuracy, say
from offbeat.errors import RequestError
from offbeat.number_format import format_size
from offbeat.spec import count_of, parse_number

if TYPE_CHECKING:
    from offbeat.report.facts import Facts
    from offbeat.report.inputs import Inputs
    from offbeat.report.page_model import Page
    from offbeat.runs.run_record import RunRecord

SENTENCES = 5  # of the summary that are printed
PROBLEMS = 10
CURVE = ("seconds", "update", "accuracy", "loss", "test_samples")  # of an evaluation, in JSON


def _price(text: str) -> float:
    return parse_number(text, lambda x: 0 <= x < 1e9, "a price is a number of 0 or more, like 2.5")


def write_report(run: Path) -> Path:
    """The page of one run, in its folder."""
    from offbeat.report.build import build
    from offbeat.report.inputs import read_inputs
    from offbeat.report.page import render

    path = run / "report.html"
    place = _place(path, [run])
    inputs = read_inputs([run])
    _replace(path, place, [render(build(inputs.runs, inputs.results, problems=inputs.problems))])
    return path


def _run(given: argparse.Namespace) -> None:
    from offbeat.report.build import build
    from offbeat.report.facts import facts_of
    from offbeat.report.inputs import read_inputs
    from offbeat.report.page import render
    from offbeat.report.tables import write_csv

    place = _place(given.output, given.runs)  # what cannot be written is found before the long work
    trace = None if given.perfetto is None else _place(given.perfetto, given.runs)
    if trace == place:
        raise RequestError(f"--output and --perfetto name the same file, {given.output}; choose two files")
    with busy("reading the runs"):
        inputs = read_inputs(given.runs)
        known = [facts_of(run) for run in inputs.runs]
        page = build(
            inputs.runs,
            inputs.results,
            problems=inputs.problems,
            target=given.target,
            price=given.price,
            known=known,
        )
        size = _replace(given.output, place, [render(page)])
        tables = write_csv(page, given.csv) if given.csv is not None else ()
        if trace is not None:
            _replace(given.perfetto, trace, _trace(inputs.runs))
    more = len(page.problems) - PROBLEMS
    rows = [
        ("page", f"{given.output} ({format_size(size)})"),
        *([("tables", f"{given.csv} ({count_of(len(tables), 'CSV file')})")] if given.csv is not None else []),
        *([("trace", f"{given.perfetto}")] if given.perfetto is not None else []),
        *(("note", note) for note in page.notes[:PROBLEMS]),
        *(("problem", problem) for problem in page.problems[:PROBLEMS]),
        *([("problem", f"{more} more on the page")] if more > 0 else []),
    ]
    told = _as_json(given, inputs, known, page, size) if given.json else {}
    answer(given, told, lambda out: _show(out, page, rows))


def _show(out: Terminal, page: Page, rows: Sequence[tuple[str, str]]) -> None:
    heading(out, f"{page.title}: {page.subtitle}")
    say(out, *page.summary[:SENTENCES])
    if len(page.summary) > SENTENCES:
        say(out, f"... and {count_of(len(page.summary) - SENTENCES, 'sentence')} more on the page.")
    if page.summary:
        out.print()
    facts(out, rows)


def _place(path: Path, inputs: Sequence[Path]) -> Path:
    """Where a file is really written: a link is followed. `RequestError` for what is not ours to replace."""
    place = Path(os.path.realpath(path))
    try:
        found = path.stat()
    except OSError:  # not there yet, or not to be reached: writing will tell
        found = None
    if place.is_symlink():
        raise RequestError(f"cannot write {path}: it is a broken symbolic link; choose another file")
    if found is not None:
        if stat.S_ISDIR(found.st_mode):
            raise RequestError(f"cannot write {path}: it is a folder; expected a file")
        if not stat.S_ISREG(found.st_mode) or _is_own_output(found):
            raise RequestError(f"cannot write {path}: it is not a regular file; choose another file")
    for one in inputs:
        real = Path(os.path.realpath(one))
        if one.is_dir() and place.is_relative_to(real) and place != real / "report.html":
            raise RequestError(
                f"cannot write {path}: it is in the folder of a run, where only {one / 'report.html'} may be replaced"
            )
        if place == real or (found is not None and one.is_file() and os.path.samestat(found, one.stat())):
            raise RequestError(f"cannot write {path}: it is one of the input files; choose another file")
    return place


def _is_own_output(found: os.stat_result) -> bool:
    """Whether it is this program's standard output or error, sent into a file."""
    for number in (1, 2):
        with suppress(OSError):
            if os.path.samestat(found, os.fstat(number)):
                return True
    return False


def _replace(path: Path, place: Path, parts: Iterable[str]) -> int:
    """Write the file at `place`, which the user calls `path`, whole or not at all; its size in bytes."""
    beside = place.with_name(f".{place.name}.{os.getpid()}.unfinished")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("w", encoding="utf-8") as file:
            for part in parts:
                file.write(part)
        size = beside.stat().st_size
        beside.replace(place)
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}") from None
    finally:
        with suppress(OSError):
            beside.unlink()
    return size


def _trace(runs: Sequence[RunRecord]) -> Iterable[str]:
    """A process for each run, or for each of its hosts; a thread for each learner."""
    from offbeat.report.facts import names_of_last
    from offbeat.report.run_sections import one_clock
    from offbeat.runs.log import chrome_trace

    mark = '{"displayTimeUnit": "ms", "traceEvents": ['
    process = 0
    for run in runs:
        hosts = names_of_last(run, "hosts")
        for event in chrome_trace(one_clock(run), name=run.label, process=process, hosts=hosts)["traceEvents"]:
            yield f"{mark}{json.dumps(event, allow_nan=False)}"
            mark = ",\n"
        process += max(1, len(set(hosts)))
    yield f"{mark}]}}" if mark.startswith("{") else "]}\n"


def _as_json(
    given: argparse.Namespace, inputs: Inputs, known: Sequence[Facts], page: Page, size: int
) -> dict[str, Any]:
    from offbeat.report.facts import straggler
    from offbeat.report.summary import groups_of

    groups = groups_of(inputs.runs, known, given.target)
    targets = {at: group.target for group in groups for at in group.members}
    ranked = {at for group in groups if group.target is not None for at in group.ranked}
    runs = []
    for at, one in enumerate(known):
        slow = straggler(one)
        runs.append(
            asdict(one)
            | {
                "curve": [{key: getattr(point, key) for key in CURVE} for point in one.curve],
                "throughput": one.throughput,
                "seconds_per_update": one.seconds_per_update,
                "accuracy": one.last.accuracy,
                "best_accuracy": one.best_accuracy,
                "target": targets[at],
                "seconds_to_target": one.seconds_to(targets[at]),
                "updates_to_target": one.updates_to(targets[at]),
                "staleness_mean": one.staleness_mean,
                "staleness_std": one.staleness_std,
                "ranked": at in ranked,
                "not_computing_share": one.not_computing_share,
                "thrown_away_share": one.thrown_away_share,
                "joules_per_sample": one.joules_per_sample,
                "joules_to_target": one.joules_to(targets[at]),
                "cost": one.cost(one.seconds, given.price),
                "cost_to_target": one.cost(one.seconds_to(targets[at]), given.price),
                "straggler": None if slow is None else slow._asdict(),
            }
        )
    return {
        "page": str(given.output),
        "size_bytes": size,
        "summary": list(page.summary),
        "notes": list(page.notes),
        "problems": list(page.problems),
        "runs": runs,
        "results": [
            {
                "name": one.name,
                "measured": one.kind,
                "ranking": list(one.ranking),
                "rows": [dict(row) for row in one.rows],
            }
            for one in inputs.results
        ],
    }


COMMAND = Command(
    summary="write one HTML page about runs and benchmarks: timeline, accuracy, staleness, scaling, energy",
    about="""Read the folders of runs (real or simulated) and the JSON files of benchmarks, and write one self-contained
HTML page: a summary table, timelines, error against time, staleness compared with theory, where the time went, scaling,
communication, energy and cost, predictions compared with measurements. The page lists missing and broken files.""",
    examples=("report runs/digits",),
    options=(
        option("runs", nargs="+", read=Path, metavar="RUN", help="folder of a run, or .json file of a benchmark"),
        option(
            "-o",
            "--output",
            read=Path,
            default=Path("report.html"),
            metavar="FILE",
            help="output file (default report.html)",
        ),
        option(
            "--target",
            read=read_accuracy,
            metavar="ACCURACY",
            help="target accuracy, like 0.95 (default: the highest that all ranked runs reached)",
        ),
        option("--price", read=_price, metavar="PRICE", help="price of one device hour; adds the cost of the runs"),
        option("--csv", read=Path, metavar="FOLDER", help="write every table to this folder as a CSV file"),
        option(
            "--perfetto",
            read=Path,
            metavar="FILE",
            help="write all timelines to one trace file for Perfetto or chrome://tracing",
        ),
    ),
    run=_run,
)
