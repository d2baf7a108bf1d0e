"""The JSON files that benchmarks write, read as far as they can be.

    {"measured": "scaling" | "accuracy" | "predictions", "rows": [...], "notes": [...], "definitions": {...}, ...}

Laws. A file of another kind has the kind "" and one sentence in `problems`. A field of a row that is missing or wrong
is None; wrong ones are counted and the first is named. Text is clean, numbers are finite.

What it must not know: where the numbers are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from offbeat.report import files
from offbeat.report.benchmark_fields import FIELDS, Accepts, Row
from offbeat.report.files import LABEL, Broken, clean, shorten

_MOST_ROWS = 10_000
_MOST_CURVES, _MOST_POINTS = 500, 5_000

_READERS: Mapping[Accepts, Callable[[Any], Any]] = {
    "text": lambda value: clean(value) if isinstance(value, str) else None,
    "flag": lambda value: value if isinstance(value, bool) else None,
    "count": files.count,
    "number": files.number,
    "from zero": files.from_zero,
    "above zero": lambda value: files.from_zero(value) or None,
    "share": files.share,
}


class Curve(NamedTuple):
    """Of one training: seconds, updates and accuracy, in order of time."""

    strategy: str
    learners: int | None
    seed: int | None
    points: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a benchmark found. `rows` have exactly the fields of their kind."""

    name: str
    label: str
    kind: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)  # recipe, precision, base, target, ...: text and numbers
    machine: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    curves: tuple[Curve, ...] = ()
    ranking: tuple[str, ...] = ()  # the benchmark's own verdict, a sentence each; nothing in old files
    notes: tuple[str, ...] = ()
    definitions: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def said(self, key: str) -> str:
        """A text that the file says of itself, or nothing."""
        return files.text(self.about.get(key))


def read_result(path: Path) -> Result:
    """All of a file that can be used."""
    name = clean(path.name)
    label = shorten(clean(path.name.removesuffix(".json")), LABEL)
    try:
        data = files.read_json(path)
    except Broken as broken:
        return Result(name=name, label=label, problems=(clean(str(broken)),))
    kind = data.get("measured")
    if not isinstance(kind, str) or kind not in FIELDS:
        is_one = f"'{shorten(kind)}'" if isinstance(kind, str) else "no benchmark"
        words = f"{name}: holds {is_one}, and a report shows {', '.join(FIELDS)}"
        return Result(name=name, label=label, problems=(clean(words),))
    problems: list[str] = []
    about = {
        key: value
        for key, value in data.items()
        if isinstance(value, str | int | float) and not isinstance(value, bool)
    }
    return Result(
        name=name,
        label=label,
        kind=kind,
        about=about,
        machine=_object(data.get("machine")),
        rows=_rows(name, kind, data.get("rows"), problems),
        curves=_curves(name, data.get("curves"), problems),
        ranking=tuple(one for one in _list(data.get("ranking")) if isinstance(one, str) and one.strip(". ")),
        notes=tuple(one for one in _list(data.get("notes")) if isinstance(one, str)),
        definitions={
            key: value for key, value in _object(data.get("definitions")).items() if isinstance(value, str)
        },
        problems=tuple(problems),
    )  # fmt: skip


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _rows(name: str, kind: str, given: Any, problems: list[str]) -> tuple[Row, ...]:
    if not isinstance(given, list) or not given:
        problems.append(f"{name}: has no rows")
        return ()
    wrong: list[str] = []
    rows = []
    for at, row in enumerate(given[:_MOST_ROWS], start=1):
        if not isinstance(row, dict):
            wrong.append(f"row {at} is no object")
            continue
        known = (field for field in FIELDS[kind] if field.accepts != "computed")
        read = {field.key: _READERS[field.accepts](row.get(field.key)) for field in known}
        bad = [key for key in read if read[key] is None and row.get(key) is not None]
        wrong += [f"'{key}' of row {at}" for key in bad]
        if read["strategy"] and read["learners"]:
            rows.append(read)
        elif not bad:
            wrong.append(f"row {at} does not say strategy and learners")
    if wrong:
        problems.append(f"{name}: {len(wrong):,} value{'' if len(wrong) == 1 else 's'} could not be read: {wrong[0]}"
                        + (", ..." if len(wrong) > 1 else ""))  # fmt: skip
    return tuple(rows)


def _curves(name: str, given: Any, problems: list[str]) -> tuple[Curve, ...]:
    found = []
    bad = 0
    for curve in _list(given)[:_MOST_CURVES]:
        points: list[tuple[float, float, float]] = []
        for point in _list(curve.get("points"))[:_MOST_POINTS] if isinstance(curve, dict) else []:
            numbers = [files.from_zero(one) for one in point] if isinstance(point, list) and len(point) == 3 else []
            whole = [one for one in numbers if one is not None]
            if len(whole) == 3 and whole[2] <= 1 and (not points or whole[0] >= points[-1][0]):
                points.append((whole[0], whole[1], whole[2]))
            else:
                bad += 1
        if points:
            strategy = files.text(curve.get("strategy")) or "?"
            found.append(Curve(strategy, files.count(curve.get("learners")), files.count(curve.get("seed")),
                               tuple(points)))  # fmt: skip
        elif not isinstance(curve, dict):
            bad += 1
    if bad:
        problems.append(f"{name}: {bad:,} point{'' if bad == 1 else 's'} of its curves could not be read")
    return tuple(found)
