"""What a page shows of the JSON files of benchmarks: charts and tables for the sections that build.py puts together.

Laws. Numbers are shown as the file has them; only what follows from them alone (the error of a prediction) is computed
where it is missing. Rows that a benchmark did not rank are in its table, with the reason, and in no chart.

What it must not know: runs, files and HTML.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from offbeat.charts import BarChart, Bars, LineChart, Series
from offbeat.number_format import Cell, percent
from offbeat.report.benchmark_fields import (
    ACCURACY,
    BENCHMARK,
    DEVICE,
    ENERGY,
    LEARNERS,
    PREDICTIONS,
    SCALING,
    STRATEGY,
    Field,
    Row,
)
from offbeat.report.inputs import BenchmarkResult
from offbeat.report.page_model import Column, Item, PageSection, Table
from offbeat.runs.metrics import known_interval
from offbeat.runs.untrusted import share, shorten
from offbeat.spec import count_of

_CURVES = (
    BENCHMARK,
    STRATEGY,
    LEARNERS,
    Field("seed", "count", "number", "seed"),
    Field("seconds", "from zero", "seconds", "training time (s)"),
    Field("updates", "from zero", "number", "updates"),
    Field("accuracy", "share", "percent", "accuracy"),
    Field("error", "computed", "percent", "test error"),
)


def _of(results: Sequence[BenchmarkResult], kind: str) -> Iterator[tuple[int, BenchmarkResult]]:
    """Results of a kind, numbered over all of that kind."""
    yield from enumerate((one for one in results if one.kind == kind and one.rows), start=1)


def _heading(result: BenchmarkResult, *more: str) -> str:
    said = [result.said("recipe"), result.said("precision"), *more]
    return ", ".join([result.label, *filter(None, said)])


def _notes(result: BenchmarkResult) -> str:
    facts = [f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
             for key, value in result.machine.items() if isinstance(value, str | int | float)]  # fmt: skip
    said = [*result.notes[:12], *([f"Machine: {', '.join(facts[:12])}"] if facts else [])]
    return " ".join(one if one.endswith((".", "!", "?")) else f"{one}." for one in said if one)


def _drawn(result: BenchmarkResult) -> list[Row]:
    return [row for row in result.rows if row.get("ranked") is not False]


def _lines(rows: Sequence[Row], key: str) -> tuple[Series, ...]:
    """A line for each strategy: this number against learners."""
    points: dict[str, dict[float, float]] = {}
    for row in rows:
        if row[key] is not None:
            points.setdefault(row["strategy"], {})[float(row["learners"])] = float(row[key])
    return tuple(Series(name=shorten(name), points=tuple(sorted(line.items()))) for name, line in points.items())


def _table(key: str, title: str, fields: Sequence[Field], rows: Sequence[Row], note: str = "") -> Table:
    """The fields that a page shows, in their order."""
    shown = [field for field in fields if field.page]
    return Table(
        key=key,
        title=title,
        columns=tuple(Column(field.page, field.form, field.help) for field in shown),
        rows=tuple(tuple(row.get(field.key) for field in shown) for row in rows),
        note=note,
    )


# --- scaling ------------------------------------------------------------------------------------------------------


def scaling(results: Sequence[BenchmarkResult]) -> PageSection:
    """Speed-up against learners, with the ideal line."""
    items: list[Item] = []
    rows: list[Row] = []
    notes = []
    for number, result in _of(results, "scaling"):
        kind = result.said("kind") or "weak"
        base = result.said("base")
        series = _lines(_drawn(result), "speedup")
        if series:
            most = max(x for one in series for x, _ in one.points)
            ideal = Series(name="ideal", points=((1.0, 1.0), (most, most)) if most > 1 else ((1.0, 1.0),),
                           style="dashed")  # fmt: skip
            items.append(
                LineChart(
                    key=f"speedup-{number}",
                    title=f"Speed-up: {_heading(result, f'{kind} scaling')}",
                    x_label="learners",
                    y_label="speed-up",
                    series=(*series, ideal),
                    y_form="times",
                    note=f"Base: {base}." if base else "",
                )
            )
        for row in result.rows:
            why = "" if row["ranked"] is not False else row["why_not"] or "not ranked"
            rows.append({**row, "benchmark": result.label, "kind": kind, "why_not": why})
        notes.append(_notes(result))
    table = _table("scaling", "Scaling", SCALING, rows, " ".join(filter(None, notes)))
    text = "How much faster several learners are than one. The dashed line is the ideal speed-up."
    return PageSection(key="scaling", title="Scaling", items=(*items, table), about=text)


def overheads(results: Sequence[BenchmarkResult]) -> list[Item]:
    """T(n) - T(1) of each strategy; the numbers are in the table of the scaling."""
    items: list[Item] = []
    for number, result in _of(results, "scaling"):
        rows = [row for row in _drawn(result) if row["overhead_s"] is not None and row["learners"] > 1]
        counts = sorted({row["learners"] for row in rows})
        values = {(row["strategy"], row["learners"]): float(row["overhead_s"]) for row in rows}
        names = list(dict.fromkeys(row["strategy"] for row in rows))
        items.append(
            BarChart(
                key=f"overhead-{number}",
                title=f"Overhead T(n) - T(1): {_heading(result)}",
                x_label="learners",
                y_label="overhead (s)",
                categories=tuple(str(many) for many in counts),
                series=tuple(
                    Bars(name=shorten(name), values=tuple(values.get((name, many)) for many in counts))
                    for name in names
                ),
                y_form="seconds",
                note="The numbers are in the scaling table.",
            )
        )
    return items


# --- accuracy -----------------------------------------------------------------------------------------------------


def races(results: Sequence[BenchmarkResult]) -> list[Item]:
    """Curves of each race to an accuracy, and who got there when."""
    items: list[Item] = []
    rows: list[Row] = []
    points: list[Row] = []
    for number, result in _of(results, "accuracy"):
        target = share(result.about.get("target"))
        series = []
        for curve in result.curves:
            group = curve.strategy if curve.learners is None else f"{curve.strategy}, {curve.learners}"
            name = group if curve.seed is None else f"{group}, seed {curve.seed}"
            line = tuple((seconds, 1 - accuracy) for seconds, _, accuracy in curve.points)
            series.append(Series(name=shorten(name), points=line, group=shorten(group)))
            own = {
                "benchmark": result.label,
                "strategy": curve.strategy,
                "learners": curve.learners,
                "seed": curve.seed,
            }
            points += [
                {**own, "seconds": seconds, "updates": updates, "accuracy": accuracy, "error": 1 - accuracy}
                for seconds, updates, accuracy in curve.points
            ]
        items.append(
            LineChart(
                key=f"race-{number}",
                title=f"Test error against time: {_heading(result)}",
                x_label="training time (s)",
                y_label="test error",
                series=tuple(series),
                x_form="seconds",
                y_form="percent",
                levels=() if target is None else ((1 - target, f"target {percent(target)}"),),
                note=_notes(result),
            )
        )
        for row in result.rows:
            low, high = known_interval(row["accuracy_mean"], row["test_samples"])
            more = {"benchmark": result.label, "target": target, "accuracy_low": low, "accuracy_high": high}
            rows.append({**row, **more})
    curves = _table("race-curves", "Every evaluation of the accuracy benchmarks", _CURVES, points)
    return [*items, _table("races", "Time to accuracy", ACCURACY, rows), curves]


# --- one device ----------------------------------------------------------------------------------------------------


def device(results: Sequence[BenchmarkResult]) -> PageSection:
    """Samples a second against the minibatch, a chart for each recipe and a line for each precision."""
    items: list[Item] = []
    rows: list[Row] = []
    notes = []
    for number, result in _of(results, "device"):
        for at, recipe in enumerate(dict.fromkeys(row["recipe"] for row in result.rows), start=1):
            points: dict[str, dict[float, float]] = {}
            for row in result.rows:
                if row["recipe"] == recipe and row["throughput"] is not None and row["batch"]:
                    points.setdefault(row["precision"], {})[float(row["batch"])] = float(row["throughput"])
            items.append(
                LineChart(
                    key=f"device-{number}-{at}",
                    title=f"Throughput: {', '.join(filter(None, [shorten(recipe), result.said('device')]))}",
                    x_label="samples in a minibatch",
                    y_label="samples/s",
                    series=tuple(
                        Series(name=shorten(name), points=tuple(sorted(line.items()))) for name, line in points.items()
                    ),
                )
            )
        rows += [{**row, "benchmark": result.label} for row in result.rows]
        notes.append(_notes(result))
    table = _table("device", "One device", DEVICE, rows, " ".join(filter(None, notes)))
    text = "Throughput of one device alone, by model, minibatch size and precision. It limits every distributed run."
    title = "Throughput by model, minibatch size and precision"
    return PageSection(key="device", title=title, items=(*items, table), about=text)


# --- machines and energy ------------------------------------------------------------------------------------------


def machines(results: Sequence[BenchmarkResult]) -> tuple[list[Item], list[tuple[Cell, ...]]]:
    """Time against learners: charts, and the rows of their table."""
    items: list[Item] = []
    rows: list[tuple[Cell, ...]] = []
    for kind, key, what in (("scaling", "seconds", "T(n)"), ("accuracy", "seconds_to_target", "time to target")):
        for number, result in _of(results, kind):
            drawn = [row for row in _drawn(result) if row[key] is not None]
            series = _lines(drawn, key)
            if len({row["learners"] for row in drawn}) < 2:
                continue
            items.append(
                LineChart(
                    key=f"machines-{kind}-{number}",
                    title=f"{what[0].upper()}{what[1:]} against learners: {_heading(result)}",
                    x_label="learners",
                    y_label=f"{what} (s)",
                    series=series,
                    y_form="seconds",
                )
            )
            rows += [(result.label, row["strategy"], row["learners"], what, row[key]) for row in drawn]
    return items, rows


def energies(results: Sequence[BenchmarkResult]) -> Table:
    """Energy and cost in benchmarks, where they were measured."""
    keys = [field.key for field in ENERGY if field.form in ("joules", "money")]
    rows = [
        {**row, "benchmark": result.label}
        for kind in ("scaling", "accuracy")
        for _, result in _of(results, kind)
        for row in result.rows
        if any(row.get(key) is not None for key in keys)
    ]
    return _table("energy-benchmarks", "Energy and cost in benchmarks", ENERGY, rows)


# --- predictions --------------------------------------------------------------------------------------------------

# Of which measured number `predicted_s` is the prediction.
_MEASURED = {"scaling": ("seconds", "T(n)"), "accuracy": ("seconds_to_target", "time to target"),
             "predictions": ("measured_s", "time per update")}  # fmt: skip


def predictions(results: Sequence[BenchmarkResult]) -> PageSection:
    """What the simulator said beside what was measured, the worst first."""
    rows: list[Row] = []
    points: dict[str, list[tuple[float, float]]] = {}
    for kind, (key, what) in _MEASURED.items():
        for _, result in _of(results, kind):
            for row in result.rows:
                measured, predicted, error = row[key], row["predicted_s"], row["error"]
                if predicted is None:
                    continue
                if error is None and measured:
                    error = predicted / measured - 1
                own = {"benchmark": result.label, "slow": row.get("slow") or "", "what": what}
                rows.append({**row, **own, "measured_s": measured, "error": error})
                if measured:
                    points.setdefault(result.label, []).append((float(measured), float(predicted)))
    rows.sort(key=lambda row: 1.0 if row["error"] is None else -abs(row["error"]))
    items: list[Item] = []
    ends = [x for line in points.values() for point in line for x in point]
    if ends:
        series = [Series(name=name, points=tuple(sorted(line)), style="dots") for name, line in points.items()]
        low, high = min(ends), max(ends)
        diagonal = Series(name="as predicted", points=((low, low), (high, high)), style="dashed")
        items.append(
            LineChart(
                key="predicted",
                title="Predictions compared with measurements",
                x_label="measured (s)",
                y_label="predicted (s)",
                series=(*series, diagonal),
                x_form="seconds",
                y_form="seconds",
                from_zero=False,
                note="A dot above the dashed line was predicted too slow, a dot below it too fast.",
            )
        )
    items.append(_table("predictions", "Predictions, largest error first", PREDICTIONS, rows))
    known = [abs(row["error"]) for row in rows if row["error"] is not None]
    text = f"{count_of(len(rows), 'prediction')} of the simulator, compared with measurements."
    if known:
        text += f" They are off by {percent(sum(known) / len(known))} on average, {percent(max(known))} at worst."
    return PageSection(
        key="predictions", title="Predictions compared with measurements", items=tuple(items), about=text
    )
