"""A page from runs and results: which sections there are, in which order, and what is in each.

    build(runs, results, problems=..., target=..., price=..., limit=...) -> Page

Laws. A section is there only when it has something to show. Every number of a chart is in a table too, but for the bars
of a timeline, which are too many (`--perfetto` has them all). What is left out, because it is too much to draw, is said
in a note. The sections of what happened in runs are in run_sections.py, those of benchmarks in benchmarks.py.

What it must not know: files and HTML.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from offbeat.charts import BarChart, Bars, LineChart, Series, ShareChart
from offbeat.number_format import Cell, format_size, percent
from offbeat.report import benchmarks, run_sections, summary
from offbeat.report.facts import Facts, facts_of
from offbeat.report.inputs import BenchmarkResult
from offbeat.report.page_model import Column, Item, Page, PageSection, Table, TimelineChart
from offbeat.report.summary import RunGroup, groups_of
from offbeat.runs.metrics import DEFINITIONS, format_traffic
from offbeat.runs.run_folder import RENAMED
from offbeat.runs.run_record import RunRecord
from offbeat.runs.untrusted import LABEL, clean, shorten
from offbeat.spec import count_of

MOST_BARS = 400_000


def build(
    runs: Sequence[RunRecord],
    results: Sequence[BenchmarkResult] = (),
    *,
    problems: Sequence[str] = (),
    target: float | None = None,
    price: float | None = None,
    limit: int = MOST_BARS,
    known: Sequence[Facts] | None = None,
) -> Page:
    """`problems` are those of reading, as `read_inputs` has named them.

    `target` is an accuracy, `price` that of a device hour, `limit` how many bars all timelines have together. `known`
    are the facts of the runs, for who has them already.
    """
    known = [facts_of(run) for run in runs] if known is None else known
    groups = groups_of(runs, known, target)
    targets = {at: group.target for group in groups for at in group.members}
    sections = (
        run_sections.timelines(runs, known, limit),
        run_sections.errors(known, groups, targets, results),
        run_sections.staleness(known),
        run_sections.shares(known),
        benchmarks.device(results),
        benchmarks.scaling(results),
        _communication(known, results),
        run_sections.hosts(known),
        _machines(runs, known, groups, results),
        _energy(known, targets, price, results),
        benchmarks.predictions(results),
        _comparison(known, targets, price),
        _configuration(runs),
        _definitions(results),
    )
    told = [count_of(len(runs), "run")] if runs else []
    learners = {one.learners for one in known}
    if len(runs) > 1 and len(learners) == 1 and (many := learners.pop()):
        told[0] += f" with {count_of(many, 'learner')} each"
    told += [count_of(len(results), "benchmark")] if results else []
    return Page(
        title="offbeat report",
        subtitle=" and ".join(told),
        overview=_overview(known, targets, price),
        summary=summary.summary(runs, known, results, groups, price),
        notes=tuple(f"{one.label}: {note}" for one in known for note in one.notes),
        problems=(*problems, *(f"{one.label}: {problem}" for one in known for problem in one.problems)),
        sections=_with_content(sections),
    )


def _overview(known: Sequence[Facts], targets: Mapping[int, float | None], price: float | None) -> Table | None:
    """One row for each run: what to look at first. Without a price the cost is in device hours."""
    if not known:
        return None
    aims = {target for target in targets.values() if target is not None}
    to, meaning = "training time", "seconds"
    if aims:
        to, meaning = f"time to {percent(aims.pop())}" if len(aims) == 1 else "time to target", "time to accuracy"
    unit = "device hours" if price is None else f"at {price:g} per device hour"
    columns = (
        Column("strategy"),
        Column(f"{to} (s)", "seconds", DEFINITIONS[meaning].formula),
        Column("accuracy", help=DEFINITIONS["accuracy"].formula),
        Column("samples/s", "number", DEFINITIONS["throughput"].formula),
        Column("waiting", "percent", "share of the learners' time, as the run counted it"),
        Column("thrown away", "percent", f"share of the learners' time: {DEFINITIONS['thrown away'].formula}"),
        Column("staleness", "number", f"mean: {DEFINITIONS['staleness'].formula}"),
        Column("sent and received", help="bytes of gradients and weights, over all learners"),
        Column(f"cost ({unit})", "money", f"{DEFINITIONS['cost'].formula}; {DEFINITIONS['cost of a run'].formula}"),
    )
    rows = []
    for at, (one, name) in enumerate(zip(known, summary.names_of(known), strict=True)):
        moved = None if one.sent_bytes is None else format_size(one.sent_bytes + (one.received_bytes or 0))
        waits = one.share_of("wait_s") if one.wait_share is None else one.wait_share
        seconds = one.seconds if meaning == "seconds" else one.seconds_to(targets[at])
        cost = one.cost(one.seconds, 1.0 if price is None else price)
        age = None if one.staleness_mean is None else round(one.staleness_mean, 2)
        rows.append((name, seconds, one.right, one.throughput, waits, one.thrown_away_share, age,
                     moved, cost))  # fmt: skip
    return Table(key="overview", title="Overview", columns=columns, rows=tuple(rows))


def _with_content(sections: Sequence[PageSection]) -> tuple[PageSection, ...]:
    """Without the items that have nothing to show, and without the sections of which nothing is left."""
    found = [replace(section, items=tuple(filter(_has_content, section.items))) for section in sections]
    return tuple(section for section in found if section.items or section.paragraphs)


def _has_content(item: Item) -> bool:
    if isinstance(item, TimelineChart):
        return bool(item.learners)
    return bool(item.rows if isinstance(item, Table | ShareChart) else item.series)


# --- communication, machines, energy ------------------------------------------------------------------------------


def _communication(known: Sequence[Facts], results: Sequence[BenchmarkResult]) -> PageSection:
    split = [one for one in known if one.not_computing_share is not None]
    names = run_sections.SHARES[2:]
    shares = [tuple(one.share_of(part) for part in ("send_s", "wait_s", "apply_s")) for one in split]
    chart = BarChart(
        key="communication-runs",
        title="Share of the learners' time",
        x_label="run",
        y_label="share of time",
        categories=tuple(one.label for one in split),
        series=tuple(
            Bars(name=name, values=column)
            for name, column in zip(names, zip(*shares, strict=True), strict=False)
            if any(value is not None for value in column)
        ),
        y_form="percent",
    )
    table = Table(
        key="communication",
        title="Time not spent computing",
        columns=(
            Column("run"),
            *(Column(name, "percent") for name in names),
            Column("not computing", "percent", DEFINITIONS["not computing"].formula),
        ),
        rows=tuple((one.label, *row, one.not_computing_share) for one, row in zip(split, shares, strict=True)),
    )
    traffic = tuple(
        f"Learners of {one.label} {format_traffic(one.sent_bytes, one.received_bytes, one.wait_share)}."
        for one in known
        if one.sent_bytes is not None and one.received_bytes is not None
    )
    text = "Time that learners spend on synchronisation; one learner alone would not need it."
    if split:
        text += " For runs: the time in which learners do not compute, including waiting for slower ones."
    if any(one.inside_waiting for one in known):
        text += f" {run_sections.INSIDE_WAITING}"
    items = (*benchmarks.overheads(results), chart, table)
    return PageSection(key="communication", title="Communication overhead", items=items, about=text, paragraphs=traffic)


def _machines(
    runs: Sequence[RunRecord], known: Sequence[Facts], groups: Sequence[RunGroup], results: Sequence[BenchmarkResult]
) -> PageSection:
    """Finished runs that differ in nothing but learners, and what benchmarks say of the same."""
    items: list[Item] = []
    rows: list[tuple[Cell, ...]] = []
    for number, group in enumerate(groups, start=1):
        lines: dict[str, list[tuple[int, float, str]]] = {}
        for at in group.members:
            one = known[at]
            time = one.seconds if group.target is None else one.seconds_to(group.target)
            if one.learners is not None and time is not None and one.finished:
                lines.setdefault(_all_but_learners(runs[at]), []).append((one.learners, time, one.label))
        if not any(len({learners for learners, _, _ in points}) > 1 for points in lines.values()):
            continue
        what = "training time" if group.target is None else f"time to {percent(group.target)}"
        strategies = {one.label: one.strategy or one.label for one in known}
        called = Counter(strategies[points[0][2]] for points in lines.values())
        series = []
        for points in lines.values():
            name = strategies[points[0][2]]
            rows += [(label, name, learners, what, time) for learners, time, label in sorted(points)]
            told = f"{name} ({points[0][2]})" if called[name] > 1 else name
            series.append(Series(name=shorten(told), points=tuple((float(x), y) for x, y, _ in sorted(points))))
        items.append(
            LineChart(
                key=f"machines-{number}",
                title=f"{what.capitalize()} against learners",
                x_label="learners",
                y_label=f"{what} (s)",
                series=tuple(series),
                y_form="seconds",
            )
        )
    more, further = benchmarks.machines(results)
    columns = (
        Column("run or benchmark"),
        Column("strategy"),
        Column("learners", "number"),
        Column("what"),
        Column("time (s)", "seconds"),
    )
    table = Table(key="machines", title="Time by number of learners", columns=columns, rows=(*rows, *further))
    text = "How the time changes with the number of learners. Lines join only runs that differ in nothing else."
    return PageSection(key="machines", title="Time against learners", items=(*items, *more, table), about=text)


def _all_but_learners(run: RunRecord) -> str:
    """The whole configuration but for what more learners must change; nothing in common where there is none."""
    rest = {key: value for key, value in run.config.items() if key not in ("learners", "name")}
    return json.dumps(rest, sort_keys=True) if rest else f"run {run.label}"


def _energy(
    known: Sequence[Facts], targets: Mapping[int, float | None], price: float | None, results: Sequence[BenchmarkResult]
) -> PageSection:
    items: list[Item] = []
    if price is not None or any(one.energy.joules is not None or one.energy.seconds is not None for one in known):
        items += [*_energy_charts(known), _energy_table(known, targets, price)]
    items.append(benchmarks.energies(results))
    text = (
        "Energy is read from the machine's counters. Cost is devices x hours of training x the given price. Energy "
        "and cost to the target are the totals times the share of the training time that had "
        "passed when the target was reached."
    )
    return PageSection(key="energy", title="Energy and cost", items=tuple(items), about=text)


def _energy_charts(known: Sequence[Facts]) -> list[Item]:
    """Joules of the same sources beside each other, those of others in another chart."""
    alike: dict[tuple[str, ...], list[Facts]] = {}
    for one in known:
        if one.energy.joules is not None:
            alike.setdefault(one.energy.sources, []).append(one)
    return [
        BarChart(
            key="energy-runs" if number == 1 else f"energy-runs-{number}",
            title="Energy",
            x_label="run",
            y_label="energy (J)",
            categories=tuple(one.label for one in some),
            series=(Bars(name="energy", values=tuple(one.energy.joules for one in some)),),
            y_form="joules",
            note=f"Measured by {', '.join(sources)}." if sources else "",
        )
        for number, (sources, some) in enumerate(alike.items(), start=1)
    ]


def _energy_table(known: Sequence[Facts], targets: Mapping[int, float | None], price: float | None) -> Table:
    cost = f"{DEFINITIONS['cost'].formula}; {DEFINITIONS['cost of a run'].formula}"
    rows: list[tuple[Cell, ...]] = []
    for at, one in enumerate(known):
        energy = one.energy
        why = f"{'not measured' if energy.joules is None else 'in part, without'}: {energy.why_not}"
        rows.append(
            (one.label, energy.joules, ", ".join(energy.sources), why if energy.why_not else "", energy.seconds,
             one.joules_per_sample, one.joules_to(targets[at]), one.learners, one.seconds, one.cost(one.seconds, price),
             one.cost(one.seconds_to(targets[at]), price))
        )  # fmt: skip
    columns = (
        Column("run"),
        Column("energy (J)", "joules", DEFINITIONS["energy"].formula),
        Column("measured by", "text", "only energy of the same sources can be compared"),
        Column("not measured"),
        Column("energy measured over (s)", "seconds"),
        Column("energy per sample (J)", "joules", DEFINITIONS["energy per sample"].formula),
        Column("energy to target (J)", "joules", DEFINITIONS["energy to target"].formula),
        Column("devices", "number", DEFINITIONS["devices"].formula),
        Column("training time (s)", "seconds", DEFINITIONS["seconds"].formula),
        Column("cost", "money", cost),
        Column("cost to target", "money", cost),
    )
    note = "" if price is None else f"At a price of {price:g} for a device hour."
    return Table(key="energy", title="Energy and cost of the runs", columns=columns, rows=tuple(rows), note=note)


# --- tables at the end --------------------------------------------------------------------------------------------


def _comparison(known: Sequence[Facts], targets: Mapping[int, float | None], price: float | None) -> PageSection:
    rows = [
            (one.label, one.strategy, one.learners, one.servers, _kind(one),
             one.updates, one.seconds, one.seconds_per_update, one.samples, one.samples_dropped, one.throughput,
             one.last.accuracy, one.best_accuracy, one.last.loss, one.seconds_to(targets[at]), one.staleness_mean,
             one.applied, one.dropped, one.cancelled, one.unused, one.thrown_away_share, one.not_computing_share,
             one.energy.joules, one.cost(one.seconds, price))
        for at, one in enumerate(known)
    ]  # fmt: skip
    columns = (
        Column("run"),
        Column("strategy"),
        Column("learners", "number"),
        Column("servers", "number"),
        Column("kind"),
        Column("updates", "number"),
        Column("training time (s)", "seconds", DEFINITIONS["seconds"].formula),
        Column("time per update (s)", "seconds", DEFINITIONS["seconds per update"].formula),
        Column("samples applied", "number"),
        Column("samples never applied", "number"),
        Column("throughput (samples/s)", "number", DEFINITIONS["throughput"].formula),
        Column("accuracy at the end", "percent"),
        Column("best accuracy", "percent"),
        Column("loss at the end", "number"),
        Column("time to target (s)", "seconds", DEFINITIONS["time to accuracy"].formula),
        Column("mean staleness (versions)", "number", DEFINITIONS["staleness"].formula),
        Column("gradients applied", "number"),
        Column("gradients dropped", "number"),
        Column("minibatches cancelled", "number", "started and cancelled"),
        Column("gradients left over", "number", "pushed, and neither applied nor dropped when the run ended"),
        Column("thrown away", "percent", DEFINITIONS["thrown away"].formula),
        Column("not computing", "percent", DEFINITIONS["not computing"].formula),
        Column("energy (J)", "joules", DEFINITIONS["energy"].formula),
        Column("cost", "money", f"{DEFINITIONS['cost'].formula}; {DEFINITIONS['cost of a run'].formula}"),
    )
    table = Table(key="runs", title="All runs", columns=columns, rows=tuple(rows))
    return PageSection(key="runs", title="Comparison", items=(table,), about="One row per run.")


def _kind(one: Facts) -> str:
    kind = "simulated" if one.simulated else "real"
    return kind if one.finished else f"{kind}, {'unfinished' if one.ended == 'so far' else one.ended}"


def _configuration(runs: Sequence[RunRecord]) -> PageSection:
    """Fields that differ first, then the rest."""
    flat = [_flat({**run.config, **({"machine": run.machine} if run.machine else {})}) for run in runs]
    told = [
        (field, [one.get(field) for one in flat]) for field in dict.fromkeys(field for one in flat for field in one)
    ]
    differ = [(field, values) for field, values in told if any(value != values[0] for value in values)]
    same = [one for one in told if one not in differ]
    rows: list[tuple[Cell, ...]] = [("run", "", *(run.name for run in runs))] if runs else []
    rows += [(field, mark, *values) for mark, some in (("yes", differ), ("", same)) for field, values in some]
    columns = (Column("field"), Column("differs"), *(Column(run.label) for run in runs))
    table = Table(key="configuration", title="All fields", columns=columns, rows=tuple(rows))
    if len(runs) == 1:
        text = "The run can be repeated with these values."
    else:
        text = f"{count_of(len(differ), 'field')} {'differs' if len(differ) == 1 else 'differ'} between the runs."
    return PageSection(key="configuration", title="Configuration", items=(table,), about=text)


def _flat(value: Mapping[str, Any], above: str = "") -> dict[str, Cell]:
    found: dict[str, Cell] = {}
    for key, inside in value.items():
        name = clean(f"{above}{key}")
        name = RENAMED.get(name, name)
        if isinstance(inside, Mapping) and inside:
            found |= _flat(inside, f"{name}.")
        elif isinstance(inside, bool):
            found[name] = "true" if inside else "false"
        elif isinstance(inside, list | Mapping):
            found[name] = clean(", ".join(str(one) for one in inside) or "none")
        else:
            found[name] = inside
    return found


def _definitions(results: Sequence[BenchmarkResult]) -> PageSection:
    rows = [(name, one.unit, one.formula) for name, one in sorted(DEFINITIONS.items())]
    rows += [
        (shorten(f"{result.label}: {name}", 2 * LABEL), "", said)
        for result in results
        for name, said in result.definitions.items()
    ]
    columns = (Column("name"), Column("unit"), Column("definition"))
    table = Table(key="definitions", title="Definitions", columns=columns, rows=tuple(rows))
    return PageSection(key="definitions", title="Definitions", items=(table,), about="What each number means.")
