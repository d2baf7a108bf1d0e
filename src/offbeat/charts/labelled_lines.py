"""Lines with their names at their ends, as a standalone SVG: error against time, one line for each strategy.

    chart = line_chart([Line("k-async:4", runs)], title="...", x_label="simulated time (s)", y_label="test error")

Laws. The same input gives the same bytes. The picture loads nothing, runs nothing and brings its own background.
Labels never overlap each other. Whatever the numbers are, no coordinate is outside the picture or not a number:
what is not finite is left out (a NaN) or drawn at the edge (an infinity; on a log axis also zero and below).

This file knows points and text. It knows no strategy, run, file or clock.
"""

from __future__ import annotations

import hashlib
import html
import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from offbeat.charts.axes import (
    LABEL_SIZE,
    LARGE,
    TICK_SIZE,
    Scale,
    bounded,
    draw_x_axis,
    draw_y_axis,
    left_of,
    linear_range,
    log_range,
    round_text,
    ticks_of,
)
from offbeat.charts.line_chart import COLOURS, thin
from offbeat.charts.svg import (
    FONT,
    INK,
    SOFT,
    Point,
    clean,
    element,
    fit,
    group,
    label,
    polyline,
    shorten,
    stroke,
    text_width,
)
from offbeat.errors import RequestError
from offbeat.number_format import Form

Run = tuple[Point, ...]
_Span = tuple[float, float, bool]  # of the x axis: from, to, whether it is logarithmic

WIDTH, HEIGHT = 900, 520
TITLE_SIZE = 18  # of its font
ROW = 19  # from one label's baseline to the next one's, at least
GAP = 22  # from the plot to the labels right of it
NUDGE = 5  # a label inside the plot that is moved further than this gets a leader
ROWS = 20  # labels that fit beside a chart of the usual height
LETTERS = 28  # the longest label that is shown whole
X_TICKS, Y_TICKS = 7, 7  # of a linear axis, at most about so many
POINTS = 600  # a curve with more is thinned out
EXTREMES, MIDDLE = (0.0, 1.0), (0.5,)  # what is kept of a stretch: of a run how far it went, of a median its middle
# The colours of lines, dark enough to be read as text.
INKS = ("#0072b2", "#b34f00", "#00775a", "#a34479", "#8f6200", "#1b75a8", "#222222", "#882255")
DASHES = (None, "9 3", "3 2.5", "11 3 3 3", "18 3", "6 2.5", "11 3 3 3 3 3", "18 3 6 3")


class Line(NamedTuple):
    """One strategy: a curve for each seed, and where it reached the target (the median over the seeds)."""

    label: str
    runs: tuple[Run, ...]  # points (x, y), x rising
    mark: Point | None = None


class _Curve(NamedTuple):
    """A line that has been read: only numbers that can be drawn, only what is seen."""

    number: int
    label: str
    runs: tuple[Run, ...]
    bold: Run
    path: Run  # what the label is put to: the bold curve, or the longest run where there is none
    mark: Point | None
    note: str  # why there is nothing to see
    colour: str
    text: str  # what the label says


class _Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: _Box) -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


class _Label(NamedTuple):
    """Text at the end of a curve: from `x`, its middle at `y`. The curve ends at `end`."""

    curve: _Curve
    x: float
    y: float
    end: Point


class _Target(NamedTuple):
    """The dashed line at the pixel `y`, and where its text is."""

    y: float
    text: str
    box: _Box


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_label: str,
    target: float | None = None,
    target_label: str = "",
    log_y: bool = True,
    subtitle: str = "",
    x_max: float | None = None,
    log_x: bool = False,
) -> str:
    """The chart as SVG. Thin curves are runs, the bold one is their median (see `median_curve`), dots are the marks.

    With `log_y` the y axis is logarithmic, in percent if no value is above 1. The x axis ends with the last point,
    or at `x_max`; with `log_x` it is logarithmic, without points at 0 and below. A target without a label is called by
    its value. Raises RequestError if there is nothing to draw.
    """
    title, subtitle, x_label, y_label = (clean(text) for text in (title, subtitle, x_label, y_label))
    if not lines:
        raise RequestError("a chart needs at least one line, but there is none; give the results of at least one run")
    if x_max is not None and not abs(x_max) < LARGE:
        raise RequestError(f"x_max is {x_max:g}; it must be a finite number, below {LARGE:g}")
    if log_x:
        lines = [line._replace(runs=tuple(tuple(p for p in run if p[0] > 0) for run in line.runs)) for line in lines]
    curves = [_read(number, line, x_max) for number, line in enumerate(lines)]
    seen = [point for curve in curves for run in curve.runs for point in run if x_max is None or point[0] <= x_max]
    if not seen:
        where = "" if x_max is None else f" up to x_max = {x_max:g}"
        raise RequestError(f"none of the {len(lines)} lines has a finite point{where}, so there is nothing to draw")
    goal = None if target is None or math.isnan(target) else bounded(target)
    seen += [curve.mark for curve in curves if curve.mark]
    values = [y for _, y in seen] + ([] if goal is None else [goal])
    form: Form = "percent" if log_y and all(y <= 1 for y in values if y < LARGE) else "number"
    height = HEIGHT + ROW * max(0, len(curves) - ROWS)
    low, high = log_range(values) if log_y else linear_range(values, 0.04)
    y = Scale(low, high, height - 60, 30.0 + (26 if title else 0) + (28 if subtitle else 0), log_y)
    y_ticks = ticks_of(y, form, Y_TICKS)
    target_text = clean(target_label) or ("" if goal is None else f"target {round_text(goal, form)}")
    widths = [x for x, _ in seen]
    span = (*(log_range(widths) if log_x else linear_range(widths, 0.0, x_max)), log_x)
    x, labels, aim = _arrange(curves, y, left_of(y_ticks) + 8, span, goal, target_text)

    about = f"{y_label or 'y'} against {x_label or 'x'}"
    heading = label(28, 28, fit(title, TITLE_SIZE, WIDTH - 56), TITLE_SIZE, fill=INK, font_weight=600)
    heading += label(28, 52 if title else 28, fit(subtitle, LABEL_SIZE, WIDTH - 56), LABEL_SIZE, fill=SOFT)
    x_axis = draw_x_axis(x, ticks_of(x, "number", X_TICKS), y.first, x.last + GAP, x_label)
    y_axis = draw_y_axis(y, y_ticks, x.first, x.last, y_label)
    description = html.escape(_describe(curves, aim, form, about))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" font-family="{FONT}">\n'
        f"{element('title', html.escape(title or about))}{element('desc', description)}"
        f"{element('rect', width=WIDTH, height=height, fill='#ffffff')}{group('heading', heading)}{y_axis}{x_axis}"
        f"{_draw_curves(curves, x, y, aim)}{_draw_labels(curves, labels, x, y, aim)}</svg>\n"
    )


def median_curve(runs: Sequence[Run]) -> Run:
    """The median of the runs at each x that one of them has.

    A run's value at x is its last point at or before x; one that has not begun has none, and one that has ended keeps
    its last: a run that stopped at the target must not lift the median by leaving. The curve is there only where
    at least half of the runs have begun and not ended.
    """
    runs = [run for run in runs if run]
    curve = []
    for x in sorted({x for run in runs for x, _ in run}):
        last = [bisect_right(run, x, key=lambda point: point[0]) - 1 for run in runs]
        going = sum(at >= 0 and x <= run[-1][0] for at, run in zip(last, runs, strict=True))
        if 2 * going >= len(runs):
            curve.append((x, median(run[at][1] for at, run in zip(last, runs, strict=True) if at >= 0)))
    return tuple(curve)


# --- what was given -------------------------------------------------------------------------------------------


def _read(number: int, line: Line, x_max: float | None) -> _Curve:
    name = clean(line.label)
    if not any(line.runs):
        raise RequestError(f"line '{name}' has no points; leave it out, or give at least one point (x, y)")
    finite = (
        tuple((bounded(x), bounded(y)) for x, y in run if abs(x) < LARGE and not math.isnan(y)) for run in line.runs
    )
    runs = [run for run in finite if run]
    if any(after[0] < before[0] for run in runs for before, after in pairwise(run)):
        raise RequestError(f"in one run of line '{name}', x decreases; sort the points of each run by x")
    end = math.inf if x_max is None else x_max
    seen = tuple(cut for run in runs if (cut := _cut(run, end)))
    note = "" if seen else "begins later" if runs else "not finite"
    bold = _cut(runs[0] if len(runs) == 1 else median_curve(runs), end)
    path = bold or max(seen, key=lambda run: run[-1][0], default=())
    mark = line.mark and (bounded(line.mark[0]), bounded(line.mark[1]))
    if mark and (math.isnan(mark[1]) or not -LARGE < mark[0] <= min(end, LARGE / 2)):
        mark = None
    text = shorten(name, LETTERS) + (f" ({note})" if note else "")
    return _Curve(number, name, seen, bold, path, mark, note, COLOURS[number % len(COLOURS)], text)


def _cut(run: Run, end: float) -> Run:
    """The points up to `end` and the next one, towards which the curve leaves the plot; nothing if none is seen."""
    count = bisect_right(run, end, key=lambda point: point[0])
    return run[: count + 1] if count else ()


# --- where things are -----------------------------------------------------------------------------------------


def _arrange(
    curves: Sequence[_Curve], y: Scale, left: float, span: _Span, goal: float | None, target_text: str
) -> tuple[Scale, list[_Label], _Target | None]:
    """The x axis, the labels of the curves, and the target."""
    crowded: set[int] = set()  # the curves for whose label there was no room inside the plot
    while True:
        x, beside = _widest(curves, left, span, crowded)
        dots = [dot for curve in curves for dot in _dots(thin(_pixels(curve.bold, x, y), MIDDLE, POINTS))]
        dots += [(x(c.mark[0]) + dx, y.inside(c.mark[1])) for c in curves if c.mark for dx in (-6, 0, 6)]
        aim = None if goal is None else _aim(target_text, x, y, y.inside(goal), dots)
        if aim:
            dots += _dots([(x.first, aim.y), (x.last, aim.y)])
        labels, failed = _inside([c for c in curves if c.number not in beside], x, y, dots, aim)
        if not failed:
            labels += _column([curve for curve in curves if curve.number in beside], x, y)
            return x, sorted(labels, key=lambda label: label.curve.number), aim
        crowded |= failed


def _widest(curves: Sequence[_Curve], left: float, span: _Span, crowded: set[int]) -> tuple[Scale, set[int]]:
    """The widest x axis that leaves room for the labels right of it, and whose labels those are.

    A label that fits between the end of its curve and the end of the plot is inside. A wider plot has room for more
    of them, so the labels beside it only become fewer, and the loop ends.
    """
    widths = {curve.number: GAP + text_width(curve.text, LABEL_SIZE) for curve in curves}
    beside = set(widths)
    while True:
        low, high, log = span
        x = Scale(low, high, left, WIDTH - 16 - max((widths[number] for number in beside), default=8), log)
        free = {
            curve.number
            for curve in curves
            if curve.number not in crowded and not curve.note and x(curve.path[-1][0]) + widths[curve.number] <= x.last
        }
        if not beside & free:
            return x, beside
        beside -= free


def _column(curves: Sequence[_Curve], x: Scale, y: Scale) -> list[_Label]:
    """Labels right of the plot, each as near to its curve's height as the others allow (least squares)."""
    top = ((x.last, y.last),)  # where the labels of curves that are not seen begin
    ends = [((top if curve.note else _pixels(curve.path, x, y))[-1], curve) for curve in curves]
    ends.sort(key=lambda pair: (pair[0][1], pair[1].number))
    # Less one row for each label above it, a height may not fall; neighbours that would are moved to their mean.
    blocks: list[tuple[float, int]] = []  # (mean, labels)
    for row, ((_, height), _) in enumerate(ends):
        mean, count = height - row * ROW, 1
        while blocks and blocks[-1][0] > mean:
            above, more = blocks.pop()
            mean, count = (mean * count + above * more) / (count + more), count + more
        blocks.append((mean, count))
    lowest = y.first - (len(ends) - 1) * ROW
    means = [max(y.last, min(mean, lowest)) for mean, count in blocks for _ in range(count)]
    return [
        _Label(curve, x.last + GAP, mean + row * ROW, end)
        for row, (mean, (end, curve)) in enumerate(zip(means, ends, strict=True))
    ]


def _inside(
    curves: Sequence[_Curve], x: Scale, y: Scale, dots: Sequence[Point], aim: _Target | None
) -> tuple[list[_Label], set[int]]:
    """Labels of the curves that end early, where they hide least and are moved least; and those without room."""
    taken = [aim.box] if aim else []
    labels, failed = [], set()
    for end, curve in sorted((_pixels(curve.path, x, y)[-1], curve) for curve in curves):
        width = text_width(curve.text, LABEL_SIZE)
        near = [dot for dot in dots if end[0] < dot[0] < end[0] + GAP + width + 6]
        places: list[tuple[float, float, _Box]] = []
        for move in range(-120, 121, 3):
            left, at = end[0] + (GAP if abs(move) > NUDGE else 9), end[1] + move
            box = _Box(left - 3, at - ROW / 2, left + width, at + ROW / 2)
            if y.last <= at <= y.first - ROW / 2 and not any(box.meets(other) for other in taken):
                hidden = sum(box.left < dot[0] < box.right and box.top - 1 < dot[1] < box.bottom + 1 for dot in near)
                places.append((abs(move) + (10 if abs(move) > NUDGE else 0) + 4 * hidden, left, box))
        if places:
            _, left, box = min(places, key=lambda place: place[0])
            taken.append(box)
            labels.append(_Label(curve, left, (box.top + box.bottom) / 2, end))
        else:
            failed.add(curve.number)
    return labels, failed


def _aim(text: str, x: Scale, y: Scale, at: float, dots: Sequence[Point]) -> _Target:
    """The target's text above or below its line, where it hides least of the curves; best at the left."""
    text = fit(text, TICK_SIZE, x.last - x.first - 16)
    width = text_width(text, TICK_SIZE)
    room = x.last - x.first - 16 - width
    boxes = [
        _Box(left, at + side - 8, left + width, at + side + 8)
        for left in (x.first + 8 + room * part / 4 for part in range(5))
        for side in (-11, 12)
        if y.last <= at + side <= y.first
    ]
    hidden = [sum(b.left < dot[0] < b.right and b.top < dot[1] < b.bottom for dot in dots) for b in boxes]
    return _Target(at, text, boxes[hidden.index(min(hidden))])


def _pixels(run: Run, x: Scale, y: Scale) -> list[Point]:
    """The run on the picture; one that leaves it ends where it does."""
    points = [(x(at), y.inside(value)) for at, value in run]
    if len(points) > 1 and points[-1][0] > x.last:
        (x0, y0), (x1, y1) = points[-2:]
        points[-1] = (x.last, y0 + (y1 - y0) * (x.last - x0) / (x1 - x0) if x0 < x.last else y1)
    return points


def _dots(points: Sequence[Point]) -> list[Point]:
    """Places along a line, some pixels apart: what a label should not hide."""
    dots = list(points[:1])
    for (x0, y0), (x1, y1) in pairwise(points):
        count = math.ceil(math.hypot(x1 - x0, y1 - y0) / 4)
        dots += [(x0 + (x1 - x0) * part / count, y0 + (y1 - y0) * part / count) for part in range(1, count + 1)]
    return dots


# --- drawing --------------------------------------------------------------------------------------------------


def _draw_curves(curves: Sequence[_Curve], x: Scale, y: Scale, aim: _Target | None) -> str:
    runs = [
        _line(thin(_pixels(run, x, y), EXTREMES, POINTS), stroke=curve.colour)
        for curve in curves
        if len(curve.runs) > 1 or len(curve.bold) > POINTS
        for run in curve.runs
    ]
    bold = [
        _line(
            thin(_pixels(curve.bold, x, y), MIDDLE, POINTS),
            stroke=curve.colour,
            stroke_dasharray=DASHES[(curve.number + curve.number // len(COLOURS)) % len(DASHES)],
        )
        for curve in curves
        if curve.bold
    ]
    dashed = [stroke((x.first, aim.y), (x.last, aim.y), stroke=SOFT, stroke_dasharray="5 4")] if aim else []
    drawn = group("runs", *runs, stroke_width=1, stroke_opacity=0.3) + group("medians", *bold, stroke_width=2.4)
    # Charts may be put into one page: the name of the clip path must be this chart's own.
    name = "plot-" + hashlib.sha256(drawn.encode()).hexdigest()[:12]
    frame = element("rect", x=x.first, y=y.last - 3, width=x.last - x.first + 2, height=y.first - y.last + 6)
    clipped = group("curves", drawn, clip_path=f"url(#{name})", fill="none", stroke_linejoin="round")
    return element("clipPath", frame, id=name) + group("target", *dashed) + clipped


def _draw_labels(curves: Sequence[_Curve], labels: Sequence[_Label], x: Scale, y: Scale, aim: _Target | None) -> str:
    """What stands on the curves: leaders, marks, and the names with a white rim that keeps them legible."""
    leaders, names = [], []
    for one in labels:
        curve, (right, height) = one.curve, one.end
        if not curve.note:
            elbow = (max(right, min(x.last, one.x - GAP)), height)
            path = [one.end, elbow, (one.x - 8, one.y), (one.x - 4, one.y)]
            leaders += [_line(path, stroke=curve.colour)] if one.x - right >= GAP else []
            leaders.append(element("circle", cx=right, cy=height, r=2.6, fill=curve.colour, stroke="none"))
        whole = curve.label if len(curve.label) > LETTERS else ""
        ink = SOFT if curve.note else INKS[curve.number % len(INKS)]
        names.append(label(one.x, one.y, curve.text, LABEL_SIZE, whole, fill=ink))
    marks = [
        element("circle", cx=x(curve.mark[0]), cy=y.inside(curve.mark[1]), r=5.5, fill=curve.colour)
        for curve in curves
        if curve.mark
    ]
    rim = {"stroke": "#ffffff", "stroke_width": 3, "stroke_linejoin": "round", "paint_order": "stroke"}
    goal = [label(aim.box.left, (aim.box.top + aim.box.bottom) / 2, aim.text, TICK_SIZE, fill=SOFT)] if aim else []
    return (
        group("leaders", *leaders, fill="none", stroke_width=1, stroke_opacity=0.8)
        + group("target-label", *goal, **rim)
        + group("marks", *marks, stroke="#ffffff", stroke_width=1.6)
        + group("labels", *names, font_weight=600, **rim)
    )


def _describe(curves: Sequence[_Curve], aim: _Target | None, form: Form, about: str) -> str:
    """The picture in words, for those who do not see it."""
    parts = [f"Line chart of {about}."] + ([f"Dashed line: {aim.text}."] if aim else [])
    for curve in curves:
        x, y = (math.nan, math.nan) if curve.note else curve.path[-1]
        mark = f", marked at x = {curve.mark[0]:.4g}" if curve.mark else ""
        parts.append(f"{curve.label}: {curve.note or f'{round_text(y, form)} at x = {x:.4g}{mark}'}.")
    return " ".join(parts)


def _line(points: Sequence[Point], **style: object) -> str:
    """A single point is a dot."""
    if len(points) == 1:
        return element("circle", cx=points[0][0], cy=points[0][1], r=3, fill=style["stroke"], stroke="none")
    return polyline(points, **style)
