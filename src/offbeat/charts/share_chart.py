"""Horizontal bars, each made of the same parts, for a page: where the time of learners went."""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.charts.axes import LABEL_SIZE, TICK_SIZE, Scale, linear_ticks
from offbeat.charts.line_chart import LegendEntry
from offbeat.charts.svg import GRID, INK, SOFT, element, fit, group, label, stroke, text_width
from offbeat.number_format import percent

TIME_PARTS = ("computing", "thrown away", "sending", "waiting", "updating", "evaluating", "other")
COLUMN_SWATCH = element("rect", class_="column", x=4, y=0, width=14, height=12, rx=2)
TIGHT = 0.85  # of `text_width`, which reckons with wide letters in bold
_HATCHES = ("", "M-1 6L6 -1M4 11L11 4", "M4 -1L11 6M-1 4L6 11", "M0 5H10")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareChart:
    """The values of a row add up to at most 1. A part's name decides its colour (see `TIME_PARTS`)."""

    key: str
    title: str
    rows: tuple[str, ...]
    parts: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]  # of each row, in the order of the parts
    note: str = ""


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
