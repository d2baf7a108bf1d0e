"""What a report is made of: folders of runs, and the JSON files that benchmarks write, read as far as they can be.

    read_inputs(paths)     -> Inputs          both, in the order given
    read_result(path)      -> BenchmarkResult  the file of a benchmark:

    {"measured": "scaling" | ... (`FIELDS`), "rows": [...], "notes": [...], "definitions": {...}, ...}

Laws. Only a path that is not there, or a request of which nothing at all can be read, is refused. A file of another
kind has the kind "" and one sentence in `problems`. A field of a row that is missing or wrong is None; wrong ones are
counted and the first is named. Text is clean, numbers are finite.

What it must not know: where the numbers are shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.errors import RequestError
from offbeat.report.benchmark_fields import FIELDS, NAMED_BY, Accepts, Row
from offbeat.runs import untrusted
from offbeat.runs.run_record import RunRecord, read_run

_MOST_ROWS = 10_000
_MOST_CURVES, _MOST_POINTS = 500, 5_000

_READERS: Mapping[Accepts, Callable[[Any], Any]] = {
    "text": lambda value: untrusted.clean(value) if isinstance(value, str) else None,
    "flag": lambda value: value if isinstance(value, bool) else None,
    "count": untrusted.count,
    "number": untrusted.number,
    "from zero": untrusted.from_zero,
    "above zero": lambda value: untrusted.from_zero(value) or None,
    "share": untrusted.share,
}


class RaceCurve(NamedTuple):
    """Of one training: seconds, updates and accuracy, in order of time."""

    strategy: str
    learners: int | None
    seed: int | None
    points: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult:
    """What a benchmark found. `rows` have exactly the fields of their kind."""

    name: str
    label: str
    kind: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)  # recipe, precision, base, target, ...: text and numbers
    machine: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    curves: tuple[RaceCurve, ...] = ()
    ranking: tuple[str, ...] = ()  # the benchmark's own verdict, a sentence each; nothing in old files
    notes: tuple[str, ...] = ()
    definitions: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def said(self, key: str) -> str:
        """A text that the file says of itself, or nothing."""
        return untrusted.text(self.about.get(key))


def read_result(path: Path) -> BenchmarkResult:
    """All of a file that can be used."""
    name = untrusted.clean(path.name)
    label = untrusted.shorten(untrusted.clean(path.name.removesuffix(".json")), untrusted.LABEL)
    try:
        data = untrusted.read_json(path)
    except untrusted.UnusableFile as broken:
        return BenchmarkResult(name=name, label=label, problems=(untrusted.clean(str(broken)),))
    kind = data.get("measured")
    if not isinstance(kind, str) or kind not in FIELDS:
        is_one = f"'{untrusted.shorten(kind)}'" if isinstance(kind, str) else "no benchmark"
        problem = untrusted.clean(f"{name}: expected a benchmark of {', '.join(FIELDS)}; got {is_one}")
        return BenchmarkResult(name=name, label=label, problems=(problem,))
    problems: list[str] = []
    about = {
        key: value
        for key, value in data.items()
        if isinstance(value, str | int | float) and not isinstance(value, bool)
    }
    return BenchmarkResult(
        name=name,
        label=label,
        kind=kind,
        about=about,
        machine=_object(data.get("machine")),
        rows=_rows(name, kind, data.get("rows"), problems),
        curves=_curves(name, data.get("curves"), problems),
        ranking=tuple(one for one in untrusted.items(data.get("ranking")) if isinstance(one, str) and one.strip(". ")),
        notes=tuple(one for one in untrusted.items(data.get("notes")) if isinstance(one, str)),
        definitions={
            key: value for key, value in _object(data.get("definitions")).items() if isinstance(value, str)
        },
        problems=tuple(problems),
    )  # fmt: skip


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _rows(name: str, kind: str, given: Any, problems: list[str]) -> tuple[Row, ...]:
    if not isinstance(given, list) or not given:
        problems.append(f"{name}: has no rows")
        return ()
    wrong: list[str] = []
    rows = []
    for at, row in enumerate(given[:_MOST_ROWS], start=1):
        if not isinstance(row, dict):
            wrong.append(f"row {at} is not an object")
            continue
        read = {
            field.key: _READERS[field.accepts](row.get(field.key))
            for field in FIELDS[kind]
            if field.accepts != "computed"
        }
        bad = [key for key in read if read[key] is None and row.get(key) is not None]
        wrong += [f"'{key}' of row {at}" for key in bad]
        if all(read[key] for key in NAMED_BY[kind]):
            rows.append(read)
        elif not bad:
            wrong.append(f"row {at} has no {' and '.join(NAMED_BY[kind])}")
    if wrong:
        problems.append(f"{name}: {len(wrong):,} value{'' if len(wrong) == 1 else 's'} could not be read: {wrong[0]}"
                        + (", ..." if len(wrong) > 1 else ""))  # fmt: skip
    return tuple(rows)


def _curves(name: str, given: Any, problems: list[str]) -> tuple[RaceCurve, ...]:
    found = []
    bad = 0
    for curve in untrusted.items(given)[:_MOST_CURVES]:
        points: list[tuple[float, float, float]] = []
        for point in untrusted.items(curve.get("points"))[:_MOST_POINTS] if isinstance(curve, dict) else []:
            numbers = [untrusted.from_zero(one) for one in point] if isinstance(point, list) and len(point) == 3 else []
            whole = [one for one in numbers if one is not None]
            if len(whole) == 3 and whole[2] <= 1 and (not points or whole[0] >= points[-1][0]):
                points.append((whole[0], whole[1], whole[2]))
            else:
                bad += 1
        if points:
            strategy = untrusted.text(curve.get("strategy")) or "?"
            found.append(RaceCurve(strategy, untrusted.count(curve.get("learners")), untrusted.count(curve.get("seed")),
                               tuple(points)))  # fmt: skip
        elif not isinstance(curve, dict):
            bad += 1
    if bad:
        problems.append(f"{name}: {bad:,} point{'' if bad == 1 else 's'} of its curves could not be read")
    return tuple(found)


# --- all that was asked for ---------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """All that a report is made of."""

    runs: tuple[RunRecord, ...]
    results: tuple[BenchmarkResult, ...]
    problems: tuple[str, ...]  # with the name of what they are of


def read_inputs(paths: Sequence[Path]) -> Inputs:
    """Everything, with names told apart. `RequestError` for a path that is not there, or if nothing could be read."""
    if not paths:
        raise RequestError("give the folder of a run, or the JSON file of a benchmark")
    runs: list[tuple[Path, RunRecord]] = []
    results: list[BenchmarkResult] = []
    unusable: list[str] = []
    for path in paths:
        if path.is_dir():
            run = read_run(path)
            if run.is_empty:
                unusable += [f"{run.name}: {problem}" for problem in run.problems]
            else:
                runs.append((path, run))
        elif path.is_file() and path.name.endswith(".json"):
            result = read_result(path)
            if result.kind:
                results.append(result)
            else:
                unusable += result.problems
        elif path.exists():
            raise RequestError(f"{path}: expected the folder of a run, or the .json file of a benchmark")
        else:
            raise RequestError(
                f"no such file or directory: {path}; expected the folder of a run, or the .json file of a benchmark"
            )
    if not runs and not results:
        raise RequestError("nothing could be read: " + "; ".join(unusable))
    told = _told_apart(runs)
    problems = [f"{run.label}: {problem}" for run in told for problem in run.problems]
    problems += [problem for result in results for problem in result.problems]
    return Inputs(told, tuple(results), (*problems, *unusable))


def _told_apart(runs: Sequence[tuple[Path, RunRecord]]) -> tuple[RunRecord, ...]:
    """Runs of the same name get that of the folder above too, and where that is not enough a number."""
    alike = Counter(run.label for _, run in runs)
    seen: set[str] = set()
    told = []
    for path, run in runs:
        above = untrusted.clean(path.resolve().parent.name) if alike[run.label] > 1 else ""
        name = untrusted.clean(f"{above}/{run.name}") if above else run.name
        label, number = untrusted.shorten(name, untrusted.LABEL), 1
        while label in seen:
            number += 1
            label = f"{untrusted.shorten(name, untrusted.LABEL - 6)} #{number}"
        seen.add(label)
        told.append(replace(run, name=name if number == 1 else f"{name} #{number}", label=label))
    return tuple(told)
