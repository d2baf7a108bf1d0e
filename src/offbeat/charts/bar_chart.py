"""Bars, for a page.

BarChart     columns side by side for each category: a histogram, or numbers of strategies
ShareChart   horizontal bars, each made of the same parts: where the time of learners went
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from offbeat.charts.axes import (
    LABEL_SIZE,
    TICK_SIZE,
    Figure,
    Scale,
    draw_y_axis,
    left_of,
    linear_range,
    linear_ticks,
    ticks_of,
)
from offbeat.charts.line_chart import LegendEntry, colour_class, groups_of, mark
from offbeat.charts.svg import AXIS, GRID, INK, SOFT, element, fit, group, label, place, stroke, text_width
from offbeat.number_format import Form, format_value, percent

TIME_PARTS = ("computing", "thrown away", "sending", "waiting", "updating", "evaluating", "other")
COLUMN_SWATCH = element("rect", class_="column", x=4, y=0, width=14, height=12, rx=2)
TIGHT = 0.85  # of `text_width`, which reckons with wide letters in bold
_HATCHES = ("", "M-1 6L6 -1M4 11L11 4", "M4 -1L11 6M-1 4L6 11", "M0 5H10")
SPARE = (6, 7, 5)  # colours that no part of the time has


class Bars(NamedTuple):
    """A value for each category, None where there is none; drawn as columns, or as dots over the others' columns."""

    name: str
    values: tuple[float | None, ...]
    style: Literal["columns", "dots"] = "columns"


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart(Figure):
    x_label: str
    y_label: str
    categories: tuple[str, ...]
    series: tuple[Bars, ...]
    y_form: Form = "number"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareChart(Figure):
    """The values of a row add up to at most 1. A part's name decides its colour (see `TIME_PARTS`)."""

    rows: tuple[str, ...]
    parts: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]  # of each row, in the order of the parts


def time_part(name: str) -> str:
    """The class that colours a part of the time."""
    small = name.lower()
    known = next((part for part in TIME_PARTS if small.startswith(part[:4])), "other")
    return "updating" if small.startswith("appl") else known.partition(" ")[0]


def hatch(name: str, number: int) -> tuple[str, str | None]:
    """A pattern of lines, so that neighbours differ without colours, and the fill that uses it; the first has none."""
    lines = _HATCHES[number % len(_HATCHES)]
    if not lines:
        return "", None
    path = element("path", class_="hatch", d=lines)
    return element("pattern", path, id=name, width=10, height=10, patternUnits="userSpaceOnUse"), f"url(#{name})"


# --- columns by category ---------------------------------------------------------------------------------------------


def bar_colours(chart: BarChart) -> dict[str, str]:
    """The class of each name. A part of the time has its own colour; what is beside it has one that no part has."""
    groups = groups_of(bars.name for bars in chart.series)
    parts = {name for name in groups if name.lower() in TIME_PARTS[:-1]}
    others = [name for name in groups if name not in parts]
    if not parts:
        return {name: colour_class(number) for name, number in groups.items()}
    spare = {name: colour_class(SPARE[at % len(SPARE)]) for at, name in enumerate(others)}
    return {name: spare.get(name) or time_part(name) for name in groups}


def bar_legend(chart: BarChart) -> list[LegendEntry]:
    colours = bar_colours(chart)
    return [
        LegendEntry(
            name,
            colours[name],
            COLUMN_SWATCH
            if any(bars.style == "columns" for bars in chart.series if bars.name == name)
            else element("path", class_="mark", d=mark(number, 11, 6, 5)),
        )
        for name, number in groups_of(bars.name for bars in chart.series).items()
    ]


def draw_bar_chart(chart: BarChart, width: int, name: str) -> str:
    """The SVG of that width; nothing for no values."""
    values = [value for bars in chart.series for value in bars.values[: len(chart.categories)] if value is not None]
    if not values:
        return ""
    longest = max(text_width(category[:60], TICK_SIZE) for category in chart.categories)
    slanted = longest > max((width - 70) / len(chart.categories) - 6, 40)
    below = (min(longest, 150) * 0.6 + 26 if slanted else 28) + (22 if chart.x_label else 0)
    bottom, right = 254.0, width - 10.0
    y = Scale(*linear_range(values, 0.06, from_zero=True), bottom, 30)
    whole = chart.y_form == "number" and all(float(value).is_integer() for value in values)
    ticks = ticks_of(y, chart.y_form, 4.5, whole=whole)
    left = left_of(ticks)
    x = Scale(0, len(chart.categories), left, right)  # a category is from its number to the next
    band = (right - left) / len(chart.categories)
    columns = [bars for bars in chart.series if bars.style == "columns"]
    slot = min(band * (0.76 if band > 12 else 0.94) / max(1, len(columns)), 72.0)
    # Values are written on the columns where each of them has room and no dot would stand on it.
    written = [format_value(value, chart.y_form) for value in values]
    valued = len(columns) == len(chart.series) and all(text_width(text, TICK_SIZE) * TIGHT < slot for text in written)
    drawn = [
        _draw_bars(chart, bars, columns, slot, x, y, f"{name}-{number}", valued)
        for number, bars in enumerate(sorted(chart.series, key=lambda bars: bars.style == "dots"))
    ]
    x_label = fit(chart.x_label, LABEL_SIZE, right - left)
    height = round(bottom + below)
    return element(
        "svg",
        draw_y_axis(y, ticks, left, right, chart.y_label)
        + _draw_categories(chart.categories, x, bottom + 14, slanted)
        + "".join(drawn)
        + group("axis", stroke((left, y(0)), (right, y(0))), stroke=AXIS)
        + label((left + right) / 2, height - 10, x_label, LABEL_SIZE, chart.x_label, text_anchor="middle", fill=INK)
        + element("rect", class_="chosen", x=left, y=30, width=band, height=bottom - 30, hidden=""),
        viewBox=f"0 0 {width} {height}",
        data_bands=f"x {place(left)} {band:.3f}",
    )


def _draw_bars(
    chart: BarChart, bars: Bars, columns: Sequence[Bars], slot: float, x: Scale, y: Scale, name: str, valued: bool
) -> str:
    number = groups_of(one.name for one in chart.series)[bars.name]
    shift = (columns.index(bars) - (len(columns) - 1) / 2) * slot if bars in columns else 0.0
    pattern, over = hatch(name, number) if bars.style == "columns" else ("", None)
    drawn = [pattern]
    for category, value in enumerate(bars.values[: len(chart.categories)]):
        if value is None:
            continue
        centre, top = x(category + 0.5) + shift, y.inside(value)
        if bars.style == "dots":
            drawn.append(element("path", class_="mark", d=mark(number, centre, top, 5)))
            continue
        box = {
            "x": centre - slot * 0.46,
            "y": min(top, y(0)),
            "width": max(0.6, slot * 0.92),
            "height": abs(top - y(0)),
            "rx": 2 if slot > 8 else 0,
        }
        drawn.append(element("rect", class_="column", **box))
        drawn += [element("rect", fill=over, **box)] if over else []
        if valued:
            text = format_value(value, chart.y_form)
            drawn.append(
                label(centre, top + (10 if value < 0 else -9), text, TICK_SIZE, text_anchor="middle", class_="halo")
            )
    return group(f"series {bar_colours(chart)[bars.name]}", *drawn, data_group=number)


def _draw_categories(categories: Sequence[str], x: Scale, y: float, slanted: bool) -> str:
    """Their names, slanted where they would touch each other; of very many some."""
    widest = 18.0 if slanted else max(text_width(category, TICK_SIZE) for category in categories) * TIGHT + 6
    every = max(1, -int(-widest // (x(1) - x(0))))
    drawn = []
    for category in range(0, len(categories), every):
        text, middle = categories[category], x(category + 0.5)
        if slanted:
            end, top = middle + 4, y - 2
            short = fit(text, TICK_SIZE, min(170.0, end / 0.8))  # so that the first one does not leave the picture
            turned = f"rotate(-36 {place(end)} {place(top)})"
            drawn.append(label(end, top, short, TICK_SIZE, text, text_anchor="end", transform=turned))
        else:
            short = fit(text, TICK_SIZE, x.last - x.first)
            drawn.append(label(middle, y, short, TICK_SIZE, text, text_anchor="middle"))
    return group("ticks categories", *drawn, fill=SOFT)


# --- bars made of parts ----------------------------------------------------------------------------------------------


def share_legend(chart: ShareChart) -> list[LegendEntry]:
    lines = element("path", class_="hatch", d="M4 8L12 0M8 12L18 2")
    return [
        LegendEntry(part, time_part(part), COLUMN_SWATCH + (lines if time_part(part) == "thrown" else ""))
        for part in chart.parts
    ]


def draw_share_chart(chart: ShareChart, width: int, name: str) -> str:
    """The SVG of that width; nothing for no rows. In a narrow one the name of a row stands above its bar."""
    if not chart.rows or not chart.parts:
        return ""
    narrow = width < 500
    each, thick = (54, 24) if narrow else (36, 26)
    left = 0.0 if narrow else min(220.0, max(text_width(row[:60], LABEL_SIZE) for row in chart.rows) * TIGHT + 16)
    x = Scale(0.0, 1.0, left, width - 26.0)
    bottom = float(len(chart.rows) * each + 4)
    grid, texts = [], []
    for tick in linear_ticks("percent", 0.0, 1.0, 4 if narrow else 10):
        grid.append(stroke((x(tick.value), 0.0), (x(tick.value), bottom)))
        anchor = "start" if narrow and not tick.value else "middle"
        texts.append(label(x(tick.value), bottom + 14, tick.text, TICK_SIZE, text_anchor=anchor))
    pattern, over = hatch(name, 1)
    drawn = []
    for number, (row, values) in enumerate(zip(chart.rows, chart.values, strict=False)):
        top = float(number * each + (24 if narrow else 5))
        if narrow:
            drawn.append(label(0.0, top - 11, fit(row, LABEL_SIZE, width), LABEL_SIZE, row, class_="name halo"))
        else:
            short = fit(row, LABEL_SIZE, (left - 12) / TIGHT)
            drawn.append(label(left - 12, top + thick / 2, short, LABEL_SIZE, row, text_anchor="end", class_="name"))
        start = 0.0
        for index, (part, value) in enumerate(zip(chart.parts, values, strict=False)):
            share = min(max(value, 0.0), 1 - start)
            if share > 0:
                drawn.append(_draw_part(part, index, share, x(start), x(start + share), top, thick, over))
                start += share
    return element(
        "svg",
        group("grid", *grid, stroke=GRID) + group("ticks", *texts, fill=SOFT) + pattern + "".join(drawn),
        viewBox=f"0 0 {width} {bottom + 26:.0f}",
        fill=INK,
        data_bands=f"y 0 {each}",
    )


def _draw_part(
    part: str, index: int, share: float, left: float, right: float, top: float, thick: float, over: str | None
) -> str:
    kind = time_part(part)
    box = {"x": left, "y": top, "width": max(0.3, right - left - 1), "height": thick}
    drawn = [element("rect", class_="column", **box)]
    drawn += [element("rect", fill=over, **box)] if kind == "thrown" else []
    text = percent(share)
    if text_width(text, TICK_SIZE) * TIGHT + 6 <= right - left:
        middle = ((left + right) / 2, top + thick / 2)
        drawn.append(label(*middle, text, TICK_SIZE, text_anchor="middle", class_="inside"))
    return group(f"series {kind}", *drawn, data_group=index)
