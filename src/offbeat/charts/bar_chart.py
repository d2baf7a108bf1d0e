"""Columns side by side for each category, for a page: a histogram, or numbers of strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from offbeat.charts.axes import LABEL_SIZE, TICK_SIZE, Scale, draw_y_axis, left_of, linear_range, ticks_of
from offbeat.charts.line_chart import LegendEntry, colour_class, groups_of, mark
from offbeat.charts.share_chart import COLUMN_SWATCH, TIGHT, TIME_PARTS, hatch, time_part
from offbeat.charts.svg import AXIS, INK, SOFT, element, fit, group, label, place, stroke, text_width
from offbeat.number_format import Form, format_value

SPARE = (6, 7, 5)  # colours that no part of the time has


class Bars(NamedTuple):
    """A value for each category, None where there is none; drawn as columns, or as dots over the others' columns."""

    name: str
    values: tuple[float | None, ...]
    style: Literal["columns", "dots"] = "columns"
    group: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    key: str
    title: str
    x_label: str
    y_label: str
    categories: tuple[str, ...]
    series: tuple[Bars, ...]
    y_form: Form = "number"
    note: str = ""


class _Layout(NamedTuple):
    """Where the categories and their columns are."""

    left: float
    right: float
    bottom: float
    band: float  # of a category
    slot: float  # of a column
    slanted: bool

    def middle(self, category: int) -> float:
        return self.left + self.band * (category + 0.5)


def bar_colours(chart: BarChart) -> dict[str, str]:
    """The class of each group. A part of the time has its own colour; what is beside it has one that no part has."""
    groups = groups_of(bars.group for bars in chart.series)
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
            if any(bars.style == "columns" for bars in chart.series if bars.group == name)
            else element("path", class_="mark", d=mark(number, 11, 6, 5)),
        )
        for name, number in groups_of(bars.group for bars in chart.series).items()
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
    band = (right - left) / len(chart.categories)
    columns = [bars for bars in chart.series if bars.style == "columns"]
    slot = min(band * (0.76 if band > 12 else 0.94) / max(1, len(columns)), 72.0)
    layout = _Layout(left, right, bottom, band, slot, slanted)
    # Values are written on the columns where each of them has room and no dot would stand on it.
    written = [format_value(value, chart.y_form) for value in values]
    valued = len(columns) == len(chart.series) and all(text_width(text, TICK_SIZE) * TIGHT < slot for text in written)
    drawn = [
        _draw_bars(chart, bars, columns, layout, y, f"{name}-{number}", valued)
        for number, bars in enumerate(sorted(chart.series, key=lambda bars: bars.style == "dots"))
    ]
    x_label = fit(chart.x_label, LABEL_SIZE, right - left)
    height = round(bottom + below)
    return element(
        "svg",
        draw_y_axis(y, ticks, left, right, chart.y_label)
        + _draw_categories(chart.categories, layout)
        + "".join(drawn)
        + group("axis", stroke((left, y(0)), (right, y(0))), stroke=AXIS)
        + label((left + right) / 2, height - 10, x_label, LABEL_SIZE, chart.x_label, text_anchor="middle", fill=INK)
        + element("rect", class_="chosen", x=left, y=30, width=band, height=bottom - 30, hidden=""),
        viewBox=f"0 0 {width} {height}",
        data_bands=f"x {place(left)} {band:.3f}",
    )


def _draw_bars(
    chart: BarChart, bars: Bars, columns: Sequence[Bars], layout: _Layout, y: Scale, name: str, valued: bool
) -> str:
    number = groups_of(one.group for one in chart.series)[bars.group]
    place_of = [one.group for one in columns]
    at = columns.index(bars) if bars in columns else place_of.index(bars.group) if bars.group in place_of else None
    shift = 0.0 if at is None else (at - (len(columns) - 1) / 2) * layout.slot
    pattern, over = hatch(name, number) if bars.style == "columns" else ("", None)
    drawn = [pattern]
    for category, value in enumerate(bars.values[: len(chart.categories)]):
        if value is None:
            continue
        centre, top = layout.middle(category) + shift, y.inside(value)
        if bars.style == "dots":
            drawn.append(element("path", class_="mark", d=mark(number, centre, top, 5)))
            continue
        box = {
            "x": centre - layout.slot * 0.46,
            "y": min(top, y(0)),
            "width": max(0.6, layout.slot * 0.92),
            "height": abs(top - y(0)),
            "rx": 2 if layout.slot > 8 else 0,
        }
        drawn.append(element("rect", class_="column", **box))
        drawn += [element("rect", fill=over, **box)] if over else []
        if valued:
            text = format_value(value, chart.y_form)
            drawn.append(
                label(centre, top + (10 if value < 0 else -9), text, TICK_SIZE, text_anchor="middle", class_="halo")
            )
    return group(f"series {bar_colours(chart)[bars.group]}", *drawn, data_group=number)


def _draw_categories(categories: Sequence[str], layout: _Layout) -> str:
    """Their names, slanted where they would touch each other; of very many some."""
    widest = 18.0 if layout.slanted else max(text_width(category, TICK_SIZE) for category in categories) * TIGHT + 6
    every = max(1, -int(-widest // layout.band))
    drawn = []
    for category in range(0, len(categories), every):
        text, x, y = categories[category], layout.middle(category), layout.bottom + 14
        if layout.slanted:
            x, y = x + 4, y - 2
            short = fit(text, TICK_SIZE, min(170.0, x / 0.8))  # so that the first one does not leave the picture
            turned = f"rotate(-36 {place(x)} {place(y)})"
            drawn.append(label(x, y, short, TICK_SIZE, text, text_anchor="end", transform=turned))
        else:
            short = fit(text, TICK_SIZE, layout.right - layout.left)
            drawn.append(label(x, y, short, TICK_SIZE, text, text_anchor="middle"))
    return group("ticks categories", *drawn, fill=SOFT)
