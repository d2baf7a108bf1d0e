"""Lines and dots over numbers, for a page. `draw_line_chart` gives the SVG, `line_legend` the entries of its legend.

The script of the page zooms the SVG that is there: it moves the places in `points` and in the `M` of marks, so all
other places of a mark are relative. What it must know stands in `data-x` and `data-y` (see `Scale.data`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from offbeat.charts.axes import (
    TICK_SIZE,
    Figure,
    Scale,
    draw_x_axis,
    draw_y_axis,
    left_of,
    linear_range,
    log_range,
    ticks_of,
)
from offbeat.charts.svg import Point, element, fit, group, label, place, polyline, stroke
from offbeat.number_format import Form

# Okabe and Ito's colours for all kinds of colour vision, their yellow replaced by Tol's wine: yellow is lost on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#222222", "#882255")
FEW = 30  # points of a line that are all marked
MANY = 3000  # points: a line with more is thinned out
# Shapes that tell lines apart without colours: corners around the middle, in radii. The first is a circle.
_CORNERS: tuple[tuple[Point, ...], ...] = (
    (),
    ((-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)),
    ((0, -1.2), (1.1, 0.8), (-1.1, 0.8)),
    ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
    ((0, 1.2), (1.1, -0.8), (-1.1, -0.8)),
    ((-0.4, -1.2), (0.4, -1.2), (0.4, -0.4), (1.2, -0.4), (1.2, 0.4), (0.4, 0.4), (0.4, 1.2), (-0.4, 1.2), (-0.4, 0.4),
     (-1.2, 0.4), (-1.2, -0.4), (-0.4, -0.4)),
    ((-1.3, -0.6), (1.3, -0.6), (1.3, 0.6), (-1.3, 0.6)),
    ((-0.6, -1.3), (0.6, -1.3), (0.6, 1.3), (-0.6, 1.3)),
)  # fmt: skip


class Series(NamedTuple):
    """Points of a line chart with x rising. Those with the same `group` have one colour and one entry of the legend."""

    name: str
    points: tuple[Point, ...]
    style: Literal["line", "dots", "dashed"] = "line"
    group: str = ""  # empty: its own


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart(Figure):
    """Lines or dots over numbers. `levels` are horizontal lines with a text, like a target."""

    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_form: Form = "number"
    y_form: Form = "number"
    y_log: bool = False
    x_log: bool = False  # points at 0 and below are left out
    from_zero: bool = True  # whether the y axis begins at 0
    levels: tuple[tuple[float, str], ...] = ()


class LegendEntry(NamedTuple):
    name: str
    colour: str  # the class that colours it
    swatch: str  # SVG of 22 by 12


def groups_of(names: Iterable[str]) -> dict[str, int]:
    """The groups in their order, each with its number."""
    return {name: number for number, name in enumerate(dict.fromkeys(names))}


def colour_class(number: int) -> str:
    return f"c{number % len(COLOURS)}"


def mark(number: int, x: float, y: float, radius: float) -> str:
    """A path around a place: `M` to it, all else relative."""
    corners = _CORNERS[number % len(_CORNERS)]
    before = [(0.0, 0.0), *corners]
    steps = [
        f"{place((dx - x0) * radius)} {place((dy - y0) * radius)}"
        for (dx, dy), (x0, y0) in zip(corners, before, strict=False)
    ]
    half = f"a{radius:g} {radius:g} 0 1 0 "
    circle = f"m{-radius:g} 0{half}{2 * radius:g} 0{half}{-2 * radius:g} 0"
    shape = f"m{steps[0]}l{' '.join(steps[1:])}" if steps else circle
    return f"M{place(x)} {place(y)}{shape}Z"


def line_legend(chart: LineChart) -> list[LegendEntry]:
    entries = []
    for name, number in groups_of(series.group for series in chart.series).items():
        styles = {series.style for series in chart.series if series.group == name}
        line = next((style for style in ("line", "dashed") if style in styles), None)
        swatch = polyline(((1, 6), (21, 6)), class_=f"curve {line}") if line else ""
        swatch += element("path", class_="mark", d=mark(number, 11, 6, 4))
        entries.append(LegendEntry(name, colour_class(number), swatch))
    return entries


def draw_line_chart(chart: LineChart, width: int, name: str) -> str:
    """What is in the SVG of that width, with its attributes; `name` makes ids of its own. Nothing for no points."""
    if not any(series.points for series in chart.series):
        return ""
    height = 300 if width < 500 else 350
    top, bottom, right = 30.0, height - 46.0, width - 12.0
    heights = [y for series in chart.series for _, y in series.points] + [value for value, _ in chart.levels]
    low, high = log_range(heights) if chart.y_log else linear_range(heights, 0.06, from_zero=chart.from_zero)
    y = Scale(low, high, bottom, top, chart.y_log)
    y_ticks = ticks_of(y, chart.y_form, (bottom - top) / 48)
    left = left_of(y_ticks)
    ends = [x for series in chart.series for x, _ in series.points[:1] + series.points[-1:]]
    across = log_range(ends) if chart.x_log else linear_range(ends, 0.012, from_zero=False)
    x = Scale(*across, left, right, chart.x_log)
    x_ticks = ticks_of(x, chart.x_form, max(2.0, (right - left) / 75))
    groups = groups_of(series.group for series in chart.series)
    frame = element("rect", x=left - 6, y=top - 6, width=right - left + 12, height=bottom - top + 12)
    drawn = [_draw_series(chart, series, groups[series.group], x, y) for series in chart.series]
    return element(
        "svg",
        draw_y_axis(y, y_ticks, left, right, chart.y_label)
        + draw_x_axis(x, x_ticks, bottom, float(width), chart.x_label)
        + element("clipPath", frame, id=f"{name}-clip")
        + group("curves", *drawn, clip_path=f"url(#{name}-clip)")
        + _draw_levels(chart, y, left, right)
        + '<g class="cross"></g>',
        viewBox=f"0 0 {width} {height}",
        data_x=x.data(),
        data_y=y.data(),
    )


def _draw_series(chart: LineChart, series: Series, number: int, x: Scale, y: Scale) -> str:
    alike = sum(one.group == series.group and one.style == series.style for one in chart.series)
    many = " many" if alike > 2 else ""
    known = [point for point in series.points if point[0] > 0 or not chart.x_log]
    points = thin([(x.inside(at), y.inside(value)) for at, value in known], (0.0, 1.0), MANY)
    curve = polyline(points, class_=f"curve {series.style}{many}") if series.style != "dots" and points else ""
    if series.style != "dots" and len(points) > FEW:
        points = _spaced(points, x.first + (number % 4) / 4 * 100, max(60.0, (x.last - x.first) / 7))
    marks = "".join(mark(number, *point, 2.8 if many else 3.6) for point in points)
    shapes = element("path", class_="mark", d=marks) if marks else ""
    return group(f"series {colour_class(number)}", curve, shapes, data_group=number)


def _spaced(points: Sequence[Point], start: float, every: float) -> list[Point]:
    """A point now and then is enough to tell a long line from the others; each group's begin elsewhere."""
    kept = []
    for point in points:
        if point[0] >= start:
            kept.append(point)
            start = point[0] + every
    return kept


def _draw_levels(chart: LineChart, y: Scale, left: float, right: float) -> str:
    """Dashed lines, their texts above them and apart from each other."""
    drawn, before = [], -1e9
    for at, text in sorted((y.inside(value), text) for value, text in chart.levels):
        before = max(at - 9, before + 16)
        drawn += [
            stroke((left, at), (right, at), class_="level"),
            label(
                right - 4,
                before,
                fit(text, TICK_SIZE, right - left - 12),
                TICK_SIZE,
                text,
                text_anchor="end",
                class_="halo",
            ),
        ]
    return group("levels", *drawn)


def thin(points: list[Point], ranks: tuple[float, ...], most: int) -> list[Point]:
    """Of too many points both ends and, from each stretch between, those of the given ranks (0 lowest, 1 highest)."""
    if len(points) <= most:
        return points
    inner, stretches = points[1:-1], most // 2 - 1
    kept = set()
    for number in range(stretches):
        part = range(len(inner) * number // stretches, len(inner) * (number + 1) // stretches)
        order = sorted(part, key=lambda at: inner[at][1])
        kept |= {order[round(rank * (len(order) - 1))] for rank in ranks}
    return [points[0], *(inner[at] for at in sorted(kept)), points[-1]]
