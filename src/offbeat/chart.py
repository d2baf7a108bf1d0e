"""One picture: error against time, one line for each strategy, as a standalone SVG.

    chart = line_chart([Line("k-async:4", runs)], title="...", x_label="simulated time (s)", y_label="test error")

Laws. The same input gives the same bytes. The picture loads nothing, runs nothing and brings its own background.
Labels never overlap each other. Whatever the numbers are, no coordinate is outside the picture or not a number:
what is not finite is left out (a NaN) or drawn at the edge (an infinity; on a log axis also zero and below).

This file knows points and words. It knows no strategy, run, file or clock.
"""

from __future__ import annotations

import hashlib
import html
import math
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from offbeat.errors import RequestError

Point = tuple[float, float]
Run = tuple[Point, ...]

WIDTH, HEIGHT = 900, 520
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
TITLE, WORDS, TICKS = 18, 14, 13  # font sizes
INK, SOFT, AXIS, GRID = "#1f2328", "#57606a", "#8c959f", "#e7eaee"
ROW = 19  # from one label's baseline to the next one's, at least
GAP = 22  # from the plot to the labels right of it
NUDGE = 5  # a label inside the plot that is moved further than this gets a leader
ROWS = 20  # labels that fit beside a chart of the usual height
LETTERS = 28  # the longest label that is shown whole
POINTS = 600  # a curve with more is thinned out
EXTREMES, MIDDLE = (0.0, 1.0), (0.5,)  # what is kept of a stretch: of a run how far it went, of a median its course
EMS = dict.fromkeys("ijltfrI.,:;'|!()[]/ ", 0.42) | dict.fromkeys("mwMW@%", 1.06)  # widths of unusual letters
LARGE, SMALL = 1e100, 1e-100  # beyond these a number is drawn as infinite, or as zero

# Okabe and Ito's colours for all kinds of colour vision, their yellow replaced by Tol's wine: yellow is lost on white.
# The inks are the same for text, dark enough to be read.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#222222", "#882255")
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
    ink: str
    dash: str | None
    words: str  # what the label says


class _Scale(NamedTuple):
    """From a value to a pixel."""

    low: float
    high: float
    first: float  # the pixel of `low`
    last: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            part = 0.0 if value <= self.low else math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.first + (self.last - self.first) * part

    def inside(self, value: float) -> float:
        """The pixel, at the edge for a value beyond it."""
        return self(min(max(value, self.low), self.high))


class _Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: _Box) -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


class _Label(NamedTuple):
    """Words at the end of a curve: from `x`, their middle at `y`. The curve ends at `end`."""

    curve: _Curve
    x: float
    y: float
    end: Point


class _Target(NamedTuple):
    """The dashed line at the pixel `y`, and where its words are."""

    y: float
    words: str
    box: _Box


class _Plot(NamedTuple):
    """Everything that is decided before something is drawn."""

    x: _Scale
    y: _Scale
    curves: list[_Curve]
    labels: list[_Label]
    percent: bool
    target: _Target | None
    height: int


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
) -> str:
    """The chart as SVG. Thin curves are runs, the bold one is their median (see `median_curve`), dots are the marks.

    With `log_y` the y axis is logarithmic, in percent if no value is above 1. The x axis ends with the last point,
    or at `x_max`. A target without a label is called by its value. Raises RequestError if there is nothing to draw.
    """
    title, subtitle, x_label, y_label = (_clean(words) for words in (title, subtitle, x_label, y_label))
    top = 24 + (26 if title else 0) + (20 if subtitle else 0)
    plot = _decide(lines, top, target, _clean(target_label), log_y, x_max)
    about = f"{y_label or 'y'} against {x_label or 'x'}"
    heading = _text(28, 28, _fit(title, TITLE, WIDTH - 56), TITLE, fill=INK, font_weight=600)
    heading += _text(28, 52 if title else 28, _fit(subtitle, WORDS, WIDTH - 56), WORDS, fill=SOFT)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{plot.height}" '
        f'viewBox="0 0 {WIDTH} {plot.height}" role="img" font-family="{FONT}">\n'
        f"{_tag('title', html.escape(title or about))}{_tag('desc', html.escape(_describe(plot, about)))}"
        f"{_tag('rect', width=WIDTH, height=plot.height, fill='#ffffff')}"
        f"{_group('heading', heading)}{_axes(plot, x_label, y_label)}{_curves(plot)}{_words(plot)}</svg>\n"
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


def text_width(words: str, size: float) -> float:
    """About how many pixels the words take, in the wider ones of the usual fonts, in bold."""
    wide = (1.05 if unicodedata.east_asian_width(c) in "WF" else 0.8 if c.isupper() else 0.7 for c in words)
    return size * sum(EMS.get(letter, em) for letter, em in zip(words, wide, strict=True))


# --- what was given -------------------------------------------------------------------------------------------


def _read(number: int, line: Line, x_max: float | None) -> _Curve:
    label = _clean(line.label)
    if not any(line.runs):
        raise RequestError(f"line '{label}' has no points; leave it out, or give at least one point (x, y)")
    finite = (tuple((_near(x), _near(y)) for x, y in run if abs(x) < LARGE and not math.isnan(y)) for run in line.runs)
    runs = [run for run in finite if run]
    if any(after[0] < before[0] for run in runs for before, after in pairwise(run)):
        raise RequestError(f"x must rise along a run, but in one of line '{label}' it falls; sort the points by x")
    end = math.inf if x_max is None else x_max
    seen = tuple(cut for run in runs if (cut := _cut(run, end)))
    note = "" if seen else "begins later" if runs else "not finite"
    bold = _cut(runs[0] if len(runs) == 1 else median_curve(runs), end)
    path = bold or max(seen, key=lambda run: run[-1][0], default=())
    mark = line.mark and (_near(line.mark[0]), _near(line.mark[1]))
    if mark and (math.isnan(mark[1]) or not -LARGE < mark[0] <= min(end, LARGE / 2)):
        mark = None
    colour, ink = COLOURS[number % len(COLOURS)], SOFT if note else INKS[number % len(INKS)]
    dash = DASHES[(number + number // len(COLOURS)) % len(DASHES)]
    words = _shorten(label, LETTERS) + (f" ({note})" if note else "")
    return _Curve(number, label, seen, bold, path, mark, note, colour, ink, dash, words)


def _cut(run: Run, end: float) -> Run:
    """The points up to `end` and the next one, towards which the curve leaves the plot; nothing if none is seen."""
    count = bisect_right(run, end, key=lambda point: point[0])
    return run[: count + 1] if count else ()


def _near(value: float) -> float:
    """The number, within what can be calculated with."""
    return 0.0 if abs(value) < SMALL else min(max(float(value), -LARGE), LARGE)


def _clean(words: str) -> str:
    """One line of what XML allows."""
    line = " ".join(words.split())
    return "".join("\ufffd" if unicodedata.category(c) in ("Cc", "Cs") or c in "\ufffe\uffff" else c for c in line)


def _shorten(words: str, letters: int) -> str:
    return words if len(words) <= letters else words[: letters - 1].rstrip() + "…"


def _fit(words: str, size: float, room: float) -> str:
    """The words, shortened until they fit."""
    letters = len(words)
    while letters > 1 and text_width(_shorten(words, letters), size) > room:
        letters -= 1
    return _shorten(words, letters)


# --- scales ---------------------------------------------------------------------------------------------------


def _range(values: Iterable[float], pad: float, end: float | None = None) -> tuple[float, float]:
    """A linear axis for the values. It begins at 0 unless that would leave much of it empty."""
    known = [value for value in values if abs(value) < LARGE] or [0.0]
    low, high = min(known), max(known) if end is None else end
    if low > 0 and (low <= high / 2 or low == high):
        low = 0.0
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        return low, low + max(abs(low), 1.0)
    extra = pad * (high - low)
    return low - (extra if low else 0.0), high + extra


def _log_range(values: Iterable[float]) -> tuple[float, float]:
    """A logarithmic axis, with more room below: that is where curves end and labels are."""
    known = [value for value in values if 0 < value < LARGE] or [0.1, 1.0]
    low, high = min(known), max(known)
    span = math.log(high / low)
    return (low / math.exp(0.09 * span), high * math.exp(0.02 * span)) if span > 0.4 else (low / 1.25, high * 1.25)


def _ticks(low: float, high: float) -> list[float]:
    """Five to eight round numbers (rarely fewer) on a linear axis."""
    step = 10.0 ** math.floor(math.log10((high - low) / 4))
    factor = next(f for f in (1, 2, 2.5, 5, 10) if math.floor(high / (step * f)) - math.ceil(low / (step * f)) < 8)
    step *= factor
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _log_ticks(low: float, high: float, percent: bool) -> list[float]:
    """1, 2, 5, 10 ... where they fit; finer on a short axis, whole powers of ten on a long one."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    few = powers[:: math.ceil(len(powers) / 8)]
    choices = ((powers, "125", 4), (powers, "1", 4), (powers, "123456789", 4), (powers, "125", 3), (few, "1", 4))
    for tens, factors, least in choices:
        ticks = [tick for ten in tens for factor in factors if low <= (tick := float(f"{factor}e{ten}")) <= high]
        if least <= len(ticks) <= 10:
            return ticks + [0.9] * (percent and ticks[-1] < 0.9 <= high)  # the error of guessing one of ten
    return _ticks(low, high)


def _names(ticks: Sequence[float]) -> list[str]:
    """The ticks of a linear axis as text, all with the same number of decimals."""
    largest = max(abs(tick) for tick in ticks)
    step = min((after - before for before, after in pairwise(ticks)), default=largest or 1.0)
    if largest >= 1e7 or step < 1e-5:
        digits = max(0, math.floor(math.log10(largest)) - math.floor(math.log10(step)) + 1)
        return [f"{tick:.{digits}e}" for tick in ticks]
    decimals = next(d for d in range(8) if abs(round(step, d) - step) < step * 1e-6)
    return [f"{tick:,.{decimals}f}" for tick in ticks]


def _value(y: float, percent: bool) -> str:
    return f"{y * 100:.6g} %" if percent else f"{y:.6g}"


# --- where things are -----------------------------------------------------------------------------------------


def _decide(
    lines: Sequence[Line], top: float, target: float | None, words: str, log_y: bool, x_max: float | None
) -> _Plot:
    if not lines:
        raise RequestError("a chart needs at least one line, but there is none; give the results of at least one run")
    if x_max is not None and not abs(x_max) < LARGE:
        raise RequestError(f"x_max is {x_max:g}; it must be a finite number, below {LARGE:g}")
    curves = [_read(number, line, x_max) for number, line in enumerate(lines)]
    seen = [point for curve in curves for run in curve.runs for point in run if x_max is None or point[0] <= x_max]
    if not seen:
        where = "" if x_max is None else f" up to x_max = {x_max:g}"
        raise RequestError(f"none of the {len(lines)} lines has a finite point{where}, so there is nothing to draw")
    goal = None if target is None or math.isnan(target) else _near(target)
    seen += [curve.mark for curve in curves if curve.mark]
    values = [y for _, y in seen] + ([] if goal is None else [goal])
    percent = log_y and all(y <= 1 for y in values if y < LARGE)
    height = HEIGHT + ROW * max(0, len(curves) - ROWS)
    low, high = _log_range(values) if log_y else _range(values, 0.04)
    y = _Scale(low, high, height - 60, top, log_y)
    left = 46 + max(text_width(name, TICKS) for _, name in _y_ticks(y, percent))
    words = words or ("" if goal is None else f"target {_value(goal, percent)}")

    crowded: set[int] = set()  # the curves for whose label there was no room inside the plot
    while True:
        x, beside = _widest(curves, left, _range([x for x, _ in seen], 0.0, x_max), crowded)
        dots = [dot for curve in curves for dot in _dots(_thin(_pixels(curve.bold, x, y), MIDDLE))]
        dots += [(x(c.mark[0]) + dx, y.inside(c.mark[1])) for c in curves if c.mark for dx in (-6, 0, 6)]
        aim = None if goal is None else _aim(words, x, y, y.inside(goal), dots)
        if aim:
            dots += _dots([(x.first, aim.y), (x.last, aim.y)])
        labels, failed = _inside([c for c in curves if c.number not in beside], x, y, dots, aim)
        if not failed:
            labels += _column([curve for curve in curves if curve.number in beside], x, y)
            labels.sort(key=lambda label: label.curve.number)
            return _Plot(x, y, curves, labels, percent, aim, height)
        crowded |= failed


def _y_ticks(y: _Scale, percent: bool) -> list[tuple[float, str]]:
    if not y.log:
        ticks = _ticks(y.low, y.high)
        return list(zip(ticks, _names(ticks), strict=True))
    return [(tick, _value(tick, percent)) for tick in _log_ticks(y.low, y.high, percent)]


def _widest(
    curves: Sequence[_Curve], left: float, span: tuple[float, float], crowded: set[int]
) -> tuple[_Scale, set[int]]:
    """The widest x axis that leaves room for the labels right of it, and whose labels those are.

    A label that fits between the end of its curve and the end of the plot is inside. A wider plot has room for more
    of them, so the labels beside it only become fewer, and the loop ends.
    """
    widths = {curve.number: GAP + text_width(curve.words, WORDS) for curve in curves}
    beside = set(widths)
    while True:
        x = _Scale(*span, left, WIDTH - 16 - max((widths[number] for number in beside), default=8))
        free = {
            curve.number
            for curve in curves
            if curve.number not in crowded and not curve.note and x(curve.path[-1][0]) + widths[curve.number] <= x.last
        }
        if not beside & free:
            return x, beside
        beside -= free


def _column(curves: Sequence[_Curve], x: _Scale, y: _Scale) -> list[_Label]:
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
    curves: Sequence[_Curve], x: _Scale, y: _Scale, dots: Sequence[Point], aim: _Target | None
) -> tuple[list[_Label], set[int]]:
    """Labels of the curves that end early, where they hide least and are moved least; and those without room."""
    taken = [aim.box] if aim else []
    labels, failed = [], set()
    for end, curve in sorted((_pixels(curve.path, x, y)[-1], curve) for curve in curves):
        width = text_width(curve.words, WORDS)
        near = [dot for dot in dots if end[0] < dot[0] < end[0] + GAP + width + 6]
        best: tuple[float, float, _Box] | None = None
        for move in range(-120, 121, 3):
            left, at = end[0] + (GAP if abs(move) > NUDGE else 9), end[1] + move
            box = _Box(left - 3, at - ROW / 2, left + width, at + ROW / 2)
            if not y.last <= at <= y.first - ROW / 2 or any(box.meets(other) for other in taken):
                continue
            hidden = sum(box.left < dot[0] < box.right and box.top - 1 < dot[1] < box.bottom + 1 for dot in near)
            cost = abs(move) + (10 if abs(move) > NUDGE else 0) + 4 * hidden
            if best is None or cost < best[0]:
                best = cost, left, box
        if best:
            _, left, box = best
            taken.append(box)
            labels.append(_Label(curve, left, (box.top + box.bottom) / 2, end))
        else:
            failed.add(curve.number)
    return labels, failed


def _aim(words: str, x: _Scale, y: _Scale, at: float, dots: Sequence[Point]) -> _Target:
    """The target's words above or below its line, where they hide least of the curves; best at the left."""
    words = _fit(words, TICKS, x.last - x.first - 16)
    width = text_width(words, TICKS)
    room = x.last - x.first - 16 - width
    boxes = [
        _Box(left, at + side - 8, left + width, at + side + 8)
        for left in (x.first + 8 + room * part / 4 for part in range(5))
        for side in (-11, 12)
        if y.last <= at + side <= y.first
    ]
    hidden = [sum(b.left < dot[0] < b.right and b.top < dot[1] < b.bottom for dot in dots) for b in boxes]
    return _Target(at, words, boxes[hidden.index(min(hidden))])


def _pixels(run: Run, x: _Scale, y: _Scale) -> list[Point]:
    """The run on the picture; one that leaves it ends where it does."""
    points = [(x(at), y.inside(value)) for at, value in run]
    if len(points) > 1 and points[-1][0] > x.last:
        (x0, y0), (x1, y1) = points[-2:]
        points[-1] = (x.last, y0 + (y1 - y0) * (x.last - x0) / (x1 - x0) if x0 < x.last else y1)
    return points


def _thin(points: list[Point], ranks: tuple[float, ...]) -> list[Point]:
    """Of too many points both ends and, from each stretch between, those of the given ranks (0 lowest, 1 highest)."""
    if len(points) <= POINTS:
        return points
    inner, stretches = points[1:-1], POINTS // 2 - 1
    kept = set()
    for number in range(stretches):
        part = range(len(inner) * number // stretches, len(inner) * (number + 1) // stretches)
        order = sorted(part, key=lambda at: inner[at][1])
        kept |= {order[round(rank * (len(order) - 1))] for rank in ranks}
    return [points[0], *(inner[at] for at in sorted(kept)), points[-1]]


def _dots(points: Sequence[Point]) -> list[Point]:
    """Places along a line, some pixels apart: what a label should not hide."""
    dots = list(points[:1])
    for (x0, y0), (x1, y1) in pairwise(points):
        count = math.ceil(math.hypot(x1 - x0, y1 - y0) / 4)
        dots += [(x0 + (x1 - x0) * part / count, y0 + (y1 - y0) * part / count) for part in range(1, count + 1)]
    return dots


# --- drawing --------------------------------------------------------------------------------------------------


def _axes(plot: _Plot, x_label: str, y_label: str) -> str:
    """Grid, ticks with their numbers, and what they are numbers of."""
    x, y = plot.x, plot.y
    ticks = _ticks(x.low, x.high)
    grid, words = [], []
    for value, name in zip(ticks, _names(ticks), strict=True):
        at = x(value)
        grid += [_stroke((at, y.last), (at, y.first), GRID), _stroke((at, y.first), (at, y.first + 5), AXIS)]
        words.append(_text(at, y.first + 17, name, TICKS, text_anchor="middle"))
    for value, name in _y_ticks(y, plot.percent):
        at = y(value)
        grid += [_stroke((x.first, at), (x.last, at), GRID), _stroke((x.first - 5, at), (x.first, at), AXIS)]
        words.append(_text(x.first - 9, at, name, TICKS, text_anchor="end"))
    if y.log and y.high / y.low < 2000:  # short strokes that show that the axis is logarithmic
        powers = range(math.floor(math.log10(y.low)), math.ceil(math.log10(y.high)))
        values = (factor * 10.0**power for power in powers for factor in range(1, 10))
        grid += [_stroke((x.first - 3, y(v)), (x.first, y(v)), AXIS) for v in values if y.low < v < y.high]
    corner = (x.first, y.first)
    grid += [_stroke((x.first, y.last), corner, AXIS), _stroke(corner, (x.last, y.first), AXIS)]
    across, up = (x.first + x.last) / 2, (y.first + y.last) / 2
    below, beside = _fit(x_label, WORDS, x.last - x.first), _fit(y_label, WORDS, y.first - y.last)
    names = [
        _text(across, plot.height - 20, below, WORDS),
        _text(22, up, beside, WORDS, transform=f"rotate(-90 22 {_n(up)})"),
    ]
    drawn = _group("grid", *grid) + _group("ticks", *words, fill=SOFT)
    return drawn + _group("axis-labels", *names, fill=INK, text_anchor="middle")


def _curves(plot: _Plot) -> str:
    x, y = plot.x, plot.y
    thin = [
        _line(_thin(_pixels(run, x, y), EXTREMES), stroke=curve.colour)
        for curve in plot.curves
        if len(curve.runs) > 1 or len(curve.bold) > POINTS
        for run in curve.runs
    ]
    bold = [
        _line(_thin(_pixels(curve.bold, x, y), MIDDLE), stroke=curve.colour, stroke_dasharray=curve.dash)
        for curve in plot.curves
        if curve.bold
    ]
    aim = plot.target
    dashed = [_stroke((x.first, aim.y), (x.last, aim.y), SOFT, stroke_dasharray="5 4")] if aim else []
    drawn = _group("runs", *thin, stroke_width=1, stroke_opacity=0.3) + _group("medians", *bold, stroke_width=2.4)
    # Charts may be put into one page: the name of the clip path must be this chart's own.
    name = "plot-" + hashlib.sha256(drawn.encode()).hexdigest()[:12]
    frame = _tag("rect", x=x.first, y=y.last - 3, width=x.last - x.first + 2, height=y.first - y.last + 6)
    clipped = _group("curves", drawn, clip_path=f"url(#{name})", fill="none", stroke_linejoin="round")
    return _tag("clipPath", frame, id=name) + _group("target", *dashed) + clipped


def _words(plot: _Plot) -> str:
    """What stands on the curves: leaders, marks, and the names with a white rim that keeps them legible."""
    leaders, names = [], []
    for label in plot.labels:
        curve, (x, y) = label.curve, label.end
        if not curve.note:
            elbow = (max(x, min(plot.x.last, label.x - GAP)), y)
            path = [(x, y), elbow, (label.x - 8, label.y), (label.x - 4, label.y)]
            leaders += [_line(path, stroke=curve.colour)] if label.x - x >= GAP else []
            leaders.append(_tag("circle", cx=x, cy=y, r=2.6, fill=curve.colour, stroke="none"))
        whole = _tag("title", html.escape(curve.label)) if len(curve.label) > LETTERS else ""
        names.append(_text(label.x, label.y, curve.words, WORDS, whole, fill=curve.ink))
    marks = [
        _tag("circle", cx=plot.x(curve.mark[0]), cy=plot.y.inside(curve.mark[1]), r=5.5, fill=curve.colour)
        for curve in plot.curves
        if curve.mark
    ]
    rim = {"stroke": "#ffffff", "stroke_width": 3, "stroke_linejoin": "round", "paint_order": "stroke"}
    aim = plot.target
    goal = [_text(aim.box.left, (aim.box.top + aim.box.bottom) / 2, aim.words, TICKS, fill=SOFT)] if aim else []
    return (
        _group("leaders", *leaders, fill="none", stroke_width=1, stroke_opacity=0.8)
        + _group("target-label", *goal, **rim)
        + _group("marks", *marks, stroke="#ffffff", stroke_width=1.6)
        + _group("labels", *names, font_weight=600, **rim)
    )


def _describe(plot: _Plot, about: str) -> str:
    """The picture in words, for those who do not see it."""
    parts = [f"Line chart of {about}."] + ([f"Dashed line: {plot.target.words}."] if plot.target else [])
    for curve in plot.curves:
        x, y = (math.nan, math.nan) if curve.note else curve.path[-1]
        mark = f", marked at x = {curve.mark[0]:.4g}" if curve.mark else ""
        parts.append(f"{curve.label}: {curve.note or f'{_value(y, plot.percent)} at x = {x:.4g}{mark}'}.")
    return " ".join(parts)


def _line(points: Sequence[Point], **style: object) -> str:
    if len(points) == 1:
        return _tag("circle", cx=points[0][0], cy=points[0][1], r=3, fill=style["stroke"], stroke="none")
    return _tag("polyline", points=" ".join(f"{_n(x)},{_n(y)}" for x, y in points), **style)


def _stroke(start: Point, end: Point, colour: str, **style: object) -> str:
    return _tag("line", x1=start[0], y1=start[1], x2=end[0], y2=end[1], stroke=colour, **style)


def _text(x: float, y: float, words: str, size: int, more: str = "", **style: object) -> str:
    """Words whose middle is at the height `y`; nothing for no words."""
    return _tag("text", html.escape(words) + more, x=x, y=y + 0.35 * size, font_size=size, **style) if words else ""


def _group(name: str, *items: str, **style: object) -> str:
    """The items under a class that says what they are; nothing for no items."""
    content = "".join(items)
    return _tag("g", "\n" + content, **{"class": name}, **style) if content else ""


def _tag(name: str, content: str = "", /, **attributes: object) -> str:
    """One element. The content is markup, already escaped; attributes are escaped here, and left out if None."""
    written = "".join(
        f' {key.replace("_", "-")}="{html.escape(_n(value) if isinstance(value, float) else str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{written}>{content}</{name}>\n" if content else f"<{name}{written}/>\n"


def _n(value: float) -> str:
    """A length or place: tenths of a pixel are enough. Adding zero turns minus zero into zero."""
    return f"{round(value, 1) + 0.0:.1f}".removesuffix(".0")
