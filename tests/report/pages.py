"""Pages for tests, and for looking at: a usual one, an odd one, one with hostile names, and one of a long run.

Also a tab of a browser that keeps what a page says and asks for.

python -m report.pages FOLDER        (with tests/ on the path) writes each as an HTML file
"""

from __future__ import annotations

import math
import random
import sys
from pathlib import Path
from typing import Any

from offbeat.charts import BarChart, Bars, LineChart, Series, ShareChart
from offbeat.report.page import render
from offbeat.report.page_model import Column, Item, Page, PageSection, Table, TimelineChart

STRATEGIES = ("ring", "k-sync:6", "k-batch-async:4", "softsync:2", "downpour:push=4,fetch=2")
HOSTILE = (
    "<script>window.pwned = 1</script>",
    "</script><script>window.pwned = 2</script>",
    "\"><img src=x onerror='window.pwned = 3'>",
    "'; window.pwned = 4; //",
    "\u202eright to left \u2066 and never back",
    "wide" * 2500,
    "🐢🐇" * 40,
    "line one\nline two\u2028line three\x00\ud800 &amp; <b>",
    "{{7*7}} ${window.pwned = 5} <!-- -->",
    "𝔲𝔫𝔦𝔠𝔬𝔡𝔢 Zürich 東京 مرحبا",
)
WHY = "not measured: there are no counters here, since containers and virtual machines hide them. " * 3
WHATS = ("compute", "wait", "send", "apply", "evaluate")


def timeline(learners: int, minibatches: int, *, wide: bool = False, key: str = "timeline") -> TimelineChart:
    """Learners that take turns: compute, wait, and each version a learner begins with one more than before.

    Without `wide` the first learner computes for exactly 0.2 s and waits for 0.05 s, so that a test knows its bars.
    With `wide` there are all kinds of bars.
    """
    chance = random.Random(7)
    rows: list[tuple[int, int, float, float, int, bool]] = []
    for learner in range(learners):
        time = 0.0
        for number in range(minibatches):
            version = number if learner % 2 == 0 else max(0, number - 1)
            took = 0.2 if learner == 0 else 0.2 * chance.uniform(0.7, 1.2) * (2.2 if learner == 3 else 1)
            cancelled = learner == 3 and number % 3 == 1
            rows.append((learner, 0, time, time + took, version, cancelled))
            time += took
            if wide:
                rows.append((learner, 2, time, time + 0.03, version, False))
                time += 0.03
                if number % 10 == 9:
                    rows.append((learner, 4, time, time + 0.15, version, False))
                    time += 0.15
                elif number % 5 == 4:
                    rows.append((learner, 3, time, time + 0.04, version, False))
                    time += 0.04
            rest = 0.05 if learner == 0 else chance.uniform(0.01, 0.15)
            rows.append((learner, 1, time, time + rest, version, False))
            time += rest
    return TimelineChart(
        key=key,
        title="What each learner did",
        learners=tuple(f"learner {n}" for n in range(learners)),
        whats=WHATS,
        bars=tuple(rows),
        note="Colours that come at once in all rows are versions that all learners begin together: the run is "
        "synchronous. Colours in a slant are learners that overtake each other.",
    )


def curve(start: float, rate: float, points: int, step: float, noise: int = 0) -> tuple[tuple[float, float], ...]:
    chance = random.Random(noise)
    return tuple(
        (round(step * n, 6), max(0.02, 0.04 + start * math.exp(-rate * n) + (chance.gauss(0, 0.012) if noise else 0)))
        for n in range(points)
    )


def usual() -> Page:
    error = LineChart(
        key="error-by-time",
        title="Test error against time",
        x_label="time",
        y_label="test error",
        x_form="seconds",
        y_form="percent",
        y_log=True,
        series=tuple(
            Series(
                f"{name}, seed {seed}", curve(0.8, 0.03 + 0.012 * at, 60, 4 + 3 * at, seed + 10 * at + 1), "line", name
            )
            for at, name in enumerate(STRATEGIES)
            for seed in range(3)
        ),
        levels=((0.08, "target: 8%"),),
        note="Each line is one seed. The axis is logarithmic: equal heights are equal factors.",
    )
    loss = LineChart(
        key="loss",
        title="Training loss",
        x_label="epoch",
        y_label="loss",
        series=(
            Series("measured", ((0.0, 2.5), (1.0, 1.25), (2.0, 0.8125), (3.0, 0.6), (4.0, 0.5))),
            Series("predicted", ((0.0, 2.4), (1.0, 1.3), (2.0, 0.9), (3.0, 0.66), (4.0, 0.52)), "dashed"),
            Series("evaluations", ((1.0, 1.4), (3.0, 0.75)), "dots"),
        ),
    )
    staleness = BarChart(
        key="staleness",
        title="Staleness of the gradients that were applied",
        x_label="staleness (updates)",
        y_label="gradients",
        categories=tuple(str(n) for n in range(16)),
        series=(
            Bars("measured", tuple(float(round(400 * math.exp(-((n - 5) ** 2) / 9))) for n in range(16))),
            Bars("simulated", tuple(float(round(380 * math.exp(-((n - 5.5) ** 2) / 8))) for n in range(16)), "dots"),
        ),
    )
    cost = BarChart(
        key="throughput",
        title="Throughput of each strategy",
        x_label="",
        y_label="samples per second",
        categories=STRATEGIES,
        series=(
            Bars("measured", (812.0, 1034.0, 1290.5, 1402.0, None)),
            Bars("predicted", (820.0, 1010.0, 1350.0, 1377.0, 1500.0)),
        ),
        note="Predicted by the simulator from the costs that were measured before the run.",
    )
    shares = ShareChart(
        key="shares",
        title="Where the time went",
        rows=("ring", "k-sync:6", "k-batch-async:4, learner 3", "softsync:2"),
        parts=("computing", "thrown away", "sending", "waiting", "updating", "evaluating", "other"),
        values=(
            (0.61, 0.0, 0.08, 0.27, 0.02, 0.02, 0.0),
            (0.7, 0.12, 0.06, 0.08, 0.02, 0.02, 0.0),
            (0.86, 0.03, 0.05, 0.02, 0.01, 0.02, 0.01),
            (0.9, 0.0, 0.05, 0.02, 0.01, 0.015, 0.005),
        ),
    )
    times = Table(
        key="times",
        title="Time to 8% test error",
        columns=(
            Column("strategy"),
            Column("time", "seconds", "From the first minibatch to the first evaluation at or below the target."),
            Column("against ring", "times", "The time of ring over the time of this one."),
            Column("idle", "percent", "Share of the time in which a learner waited."),
            Column("change", "signed-percent"),
            Column("energy", "joules", "Of all learners, measured by the device."),
            Column("cost", "money"),
            Column("updates", "number"),
        ),
        rows=(
            ("ring", 412.0, 1.0, 0.271, 0.0, 51234.0, 1.84, 1200),
            ("k-sync:6", 301.5, 1.366, 0.083, -0.268, 48100.0, 1.35, 1190),
            ("k-batch-async:4", 226.2, 1.821, 0.021, -0.451, 40120.0, 1.01, 1544),
            ("softsync:2", 254.0, 1.622, 0.019, -0.383, None, 1.13, 12820),
            ("downpour:push=4,fetch=2", None, None, None, None, None, None, None),
        ),
        note="A dash means that it was not measured, or that the target was not reached.",
    )
    machine = Table(
        key="machine",
        title="What it ran on",
        columns=(Column("what"), Column("value")),
        rows=(
            ("host", "a machine with 2 cores and a rather long name of its processor, as they have"),
            ("torch", "2.13.0"),
        ),
    )
    return Page(
        title="Five strategies on eight learners",
        subtitle="resnet-8 on CIFAR-10 subset · 8 learners, one of them twice as slow · 5 strategies, 3 seeds each",
        summary=(
            "k-batch-async:4 reached 8% test error in 226 s, 1.82× as fast as ring.",
            "Ring's learners waited 27% of the time, nearly all of it for learner 3, which is about twice as slow.",
            "The simulator had predicted 231 s, 2% too much.",
        ),
        problems=("runs/ring-2/log.jsonl, line 1203: cut off in the middle; what came before it was used.",),
        sections=(
            PageSection(
                key="speed",
                title="Which was fastest",
                about="All five ran on the same machines with the same seeds, one after the other.",
                items=(times, error, cost),
            ),
            PageSection(key="time", title="Where the time went", items=(shares, timeline(8, 60, wide=True))),
            PageSection(
                key="learning",
                title="How it learned",
                paragraphs=("Loss over the samples that were just computed, smoothed by nothing.",),
                items=(loss, staleness),
            ),
            PageSection(key="machine", title="Machines", items=(machine,)),
        ),
    )


def known() -> Page:
    """Small charts whose numbers a test can name."""
    page = usual()
    items = {item.key: item for section in page.sections for item in section.items}
    chosen = (items["loss"], items["throughput"], items["shares"], items["times"], timeline(4, 200))
    return Page(
        title="Known",
        subtitle="",
        summary=("One.",),
        problems=(),
        sections=(PageSection(key="all", title="All", items=chosen, paragraphs=("Some words.",)),),
    )


def page_of(*items: Item) -> Page:
    section = PageSection(key="s", title="", items=items)
    return Page(title="", subtitle="", summary=(), problems=(), sections=(section,))


def wide() -> Page:
    """A table of twenty columns whose rows only the first two tell apart, and one with long words in its cells."""
    many = Table(
        key="wide",
        title="Every learner",
        columns=(
            Column("run"),
            Column("learner", "number"),
            *(Column(f"share of part {n}", "percent") for n in range(16)),
            Column("measured over (s)", "seconds", "The whole run."),
            Column("strategy"),
        ),
        rows=tuple((run, n, *(0.5,) * 16, 12.5, "downpour:push=4,fetch=2") for run in STRATEGIES for n in range(4)),
    )
    why = Table(key="why", title="", columns=(Column("name"), Column("why not")), rows=(("a", WHY), ("b", WHY * 10)))
    return page_of(many, why)


def items_of(names: tuple[str, ...]) -> tuple[Item, ...]:
    """One of each kind, everything in it called by the names."""
    return (
        Table(
            key=names[0],
            title=names[1],
            note=names[2],
            columns=(Column(names[0], "text", names[3]), Column(names[5], "number", names[5]), Column("n", "seconds")),
            rows=tuple((name, 1, names[5] if at == 2 else 0.5) for at, name in enumerate(names)),
        ),
        LineChart(
            key=names[1],
            title=names[5],
            x_label=names[0],
            y_label=names[5],
            levels=((0.5, names[5]), (0.51, names[0])),
            series=tuple(Series(name, ((0.0, at), (1.0, at + 1.0))) for at, name in enumerate(names)),
            note=names[0],
        ),
        BarChart(
            key=names[2],
            title=names[0],
            x_label=names[5],
            y_label=names[4],
            categories=names,
            series=tuple(Bars(name, (1.0,) * len(names)) for name in names[:3]),
        ),
        ShareChart(
            key=names[3],
            title=names[4],
            rows=names,
            parts=("computing", names[0], names[5]),
            values=((0.5, 0.2, 0.1),) * len(names),
        ),
        TimelineChart(
            key=names[5],
            title=names[3],
            learners=names,
            whats=("compute", names[0]),
            bars=tuple((at, at % 2, 0.0, 1.0, 3, False) for at in range(len(names))),
            note=names[5],
        ),
    )


def hostile() -> Page:
    return Page(
        title=HOSTILE[0],
        subtitle=HOSTILE[5],
        summary=HOSTILE,
        problems=HOSTILE + HOSTILE,
        sections=tuple(
            PageSection(key=name, title=name, paragraphs=(name,), items=items_of(HOSTILE) if at == 0 else ())
            for at, name in enumerate(HOSTILE)
        ),
    )


def odd() -> Page:
    """Charts with nothing in them, with one point, with numbers as large and as small as they come."""
    huge = ((0.0, 1e308), (1.0, -1e308), (1e308, 1e-308), (1.1e308, math.inf), (1.2e308, math.nan))
    saw = tuple((float(n), float(n % 97)) for n in range(20_000))

    def line(key: str, title: str, *points: tuple[float, float], log: bool = False, zero: bool = True) -> LineChart:
        series = (Series("a", points),)
        return LineChart(key=key, title=title, x_label="x", y_label="y", series=series, y_log=log, from_zero=zero)

    def columns(key: str, title: str, *values: float | None) -> BarChart:
        named = tuple("abc"[: len(values)])
        return BarChart(key=key, title=title, x_label="x", y_label="y", categories=named, series=(Bars("a", values),))

    def bars(key: str, title: str, *rows: tuple[float, float, int, bool]) -> TimelineChart:
        given = tuple((0, 0, *row) for row in rows)
        return TimelineChart(key=key, title=title, learners=("a", "b"), whats=("compute",), bars=given)

    items: tuple[Item, ...] = (
        LineChart(key="l0", title="No series", x_label="", y_label="", series=()),
        line("l1", "No points"),
        line("l2", "One point", (3.0, 0.0)),
        line("l3", "Huge", *huge),
        line("l4", "Log of nothing", (0.0, 0.0), (1.0, -1.0), log=True),
        line("l5", "All the same", (0.0, 5.0), (1.0, 5.0), zero=False),
        line("l6", "Tiny", (0.0, 1e-300), (1e-9, 3e-300)),
        line("l7", "Many", *saw),
        columns("b0", "No categories"),
        columns("b1", "No values", None),
        columns("b2", "Below zero", -1e308, math.inf),
        columns("b3", "Zero", 0.0),
        ShareChart(key="s0", title="No rows", rows=(), parts=("computing",), values=()),
        ShareChart(key="s1", title="Too much", rows=("a",), parts=("x", "y"), values=((0.8, 0.9),)),
        bars("t0", "No bars"),
        bars("t1", "One short bar", (1e-7, 2e-7, 2**40, False)),
        bars("t2", "Long", (0.0, 1e9, 0, False), (1e12, 1e12 + 5, -1, True)),
        Table(key="e", title="Empty", columns=(), rows=()),
        Table(key="f", title="No rows", columns=(Column("a"),), rows=()),
        Table(key="g", title="Odd", columns=(Column("a"), Column("b", "number")), rows=(("x",), ("y", 10**400))),
    )
    sections = (PageSection(key="", title="", items=items), PageSection(key="", title="Twice the same key", items=()))
    return Page(title="", subtitle="", summary=(), problems=(), sections=sections)


def large() -> Page:
    """8 learners with 20,000 minibatches each: 320,000 bars, and curves of that length."""
    points = tuple((n * 0.25, 2 / (1 + n / 500) + (n % 13) / 100) for n in range(20_000))
    loss = LineChart(
        key="loss",
        title="Loss of each learner",
        x_label="time",
        y_label="loss",
        x_form="seconds",
        series=tuple(Series(f"learner {n}", points) for n in range(8)),
    )
    return Page(
        title="A long run",
        subtitle="8 learners, 20,000 minibatches each",
        summary=("A long run.",),
        problems=(),
        sections=(PageSection(key="all", title="All", items=(timeline(8, 20_000), loss)), *usual().sections),
    )


class Watched:
    """A tab, what it said on the console and what it asked for; nothing but files is given to it."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.said: list[str] = []
        self.asked: list[str] = []
        self.context = browser.new_context(**options)
        self.context.on("request", lambda request: self.asked.append(request.url))
        self.context.on("console", lambda message: self.said.append(message.text))
        self.context.on("weberror", lambda error: self.said.append(str(error.error)))
        self.context.route(lambda url: not url.startswith("file:"), lambda route: route.abort())
        self.tab = self.context.new_page()
        self.tab.set_default_timeout(5000)


def open_file(tab: Any, page: Page, file: Path) -> None:
    file.write_text(render(page), encoding="utf-8")
    tab.goto(file.as_uri())


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for make in (usual, known, wide, hostile, odd, large):
        (folder / f"{make.__name__}.html").write_text(render(make()), encoding="utf-8")
