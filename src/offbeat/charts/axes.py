"""Scales, ranges, ticks and the frame of a chart, the same for every kind of chart.

Laws. Whatever the numbers are, no place is outside the frame or not a number: what is not finite or too large is drawn
at the edge, and so is zero and below on a log axis. The ticks of an axis have one unit and one number of decimals.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offbeat.charts.svg import AXIS, GRID, INK, SOFT, fit, group, label, place, stroke, text_width
from offbeat.number_format import UNITS, Form, Unit, format_fixed, format_value

LARGE, SMALL = 1e100, 1e-100  # beyond these a number is drawn as infinite, or as zero
TICK_SIZE, LABEL_SIZE = 13, 14  # of fonts


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What a page shows under a title, with a note below; `key` names it."""

    key: str
    title: str
    note: str = ""


class AxisTick(NamedTuple):
    value: float
    text: str


class Scale(NamedTuple):
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

    def data(self) -> str:
        """For the script of a page, which turns places back into values."""
        return f"{self.low!r} {self.high!r} {place(self.first)} {place(self.last)}{' log' if self.log else ''}"


def bounded(value: float) -> float:
    """The number, within what can be calculated with."""
    return 0.0 if abs(value) < SMALL else min(max(float(value), -LARGE), LARGE)


# --- ranges ---------------------------------------------------------------------------------------------------------


def linear_range(
    values: Iterable[float], pad: float, end: float | None = None, from_zero: bool | None = None
) -> tuple[float, float]:
    """A linear axis for the values. Unless told, it begins at 0 if that does not leave much of it empty."""
    known = [value for value in values if abs(value) < LARGE] or [0.0]
    low, high = min(known), max(known) if end is None else end
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    elif from_zero is None and low > 0 and (low <= high / 2 or low == high):
        low = 0.0
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        return low, low + max(abs(low), 1.0)
    extra = pad * (high - low)
    return low - (extra if low else 0.0), high + (extra if high else 0.0)


def log_range(values: Iterable[float]) -> tuple[float, float]:
    """A logarithmic axis, with more room below: that is where curves end and labels are."""
    known = [value for value in values if 0 < value < LARGE] or [0.1, 1.0]
    low, high = min(known), max(known)
    span = math.log(high / low)
    return (low / math.exp(0.09 * span), high * math.exp(0.02 * span)) if span > 0.4 else (low / 1.25, high * 1.25)


# --- ticks ----------------------------------------------------------------------------------------------------------


def round_text(value: float, form: Form) -> str:
    """`5 %` and not `5.0 %`: for values that are round by themselves."""
    return format_value(value, form).replace(".0 ", " ")


def ticks_of(scale: Scale, form: Form, most: float, *, whole: bool = False) -> list[AxisTick]:
    return (
        log_ticks(form, scale.low, scale.high) if scale.log else linear_ticks(form, scale.low, scale.high, most, whole)
    )


def linear_ticks(form: Form, low: float, high: float, most: float, whole: bool = False) -> list[AxisTick]:
    """At most about so many round numbers, in the largest unit that does not need many digits."""
    share = form.endswith("percent")
    plain = Unit(0, 0.01 if share else 1, " %" if share else "×" if form == "times" else "")
    size = max(abs(low), abs(high))
    units = [unit for unit in UNITS.get(form, ()) if size >= unit.least] or [plain]
    steps = [_step((high - low) / unit.size / max(most, 1.0), whole) for unit in units]
    fitting = (at for at, step in enumerate(steps) if _decimals(step) <= 2)
    at = next(fitting, len(units) - 1)
    unit, step, decimals = units[at], steps[at], _decimals(steps[at])
    name = f" {unit.name}" if form in UNITS else unit.name
    ticks = []
    for number in range(math.ceil(low / unit.size / step - 1e-9), math.floor(high / unit.size / step + 1e-9) + 1):
        value = number * step
        text = format_value(value, "number") if decimals > 9 else format_fixed(value, decimals)
        ticks.append(AxisTick(value * unit.size, text + name if number else "0" if form in UNITS else "0" + name))
    return ticks


def _step(rough: float, whole: bool) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(by * power for by in (1, 2, 5, 10) if by * power >= rough * 0.999)
    return max(1.0, step) if whole else step


def _decimals(step: float) -> int:
    return max(0, -math.floor(math.log10(step) + 1e-9))


def log_ticks(form: Form, low: float, high: float) -> list[AxisTick]:
    """1, 2, 5, 10 ... where they fit; finer on a short axis, whole powers of ten on a long one."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    few = powers[:: math.ceil(len(powers) / 8)]
    choices = ((powers, "125", 4), (powers, "1", 4), (powers, "123456789", 4), (powers, "125", 3), (few, "1", 4))
    for tens, factors, least in choices:
        values = [value for ten in tens for factor in factors if low <= (value := float(f"{factor}e{ten}")) <= high]
        if least <= len(values) <= 10:
            if form == "percent" and values[-1] < 0.9 <= high:
                values.append(0.9)  # the error of guessing one of ten
            return [AxisTick(value, round_text(value, form)) for value in values]
    return linear_ticks(form, low, high, 7)


# --- the frame ------------------------------------------------------------------------------------------------------


def left_of(ticks: Sequence[AxisTick]) -> float:
    """Where a plot begins, right of the texts of its y axis."""
    return 18 + max((text_width(tick.text, TICK_SIZE) for tick in ticks), default=0.0)


def draw_y_axis(y: Scale, ticks: Sequence[AxisTick], left: float, right: float, y_label: str) -> str:
    """Grid and numbers, and above them what they are numbers of."""
    grid = [stroke((left, y(tick.value)), (right, y(tick.value))) for tick in ticks]
    texts = [label(left - 9, y(tick.value), tick.text, TICK_SIZE, text_anchor="end") for tick in ticks]
    name = label(8, y.last - 15, fit(y_label, LABEL_SIZE, right - 8), LABEL_SIZE, y_label)
    return (
        group("grid y-grid", *grid, stroke=GRID)
        + group("ticks y-ticks", *texts, fill=SOFT)
        + group("axis-labels", name, fill=INK)
    )


def draw_x_axis(x: Scale, ticks: Sequence[AxisTick], bottom: float, right: float, x_label: str) -> str:
    """The line below the plot, its numbers, and what they are numbers of. No number leaves the picture."""
    marks = [stroke((x(tick.value), bottom), (x(tick.value), bottom + 5)) for tick in ticks]
    texts = []
    for tick in ticks:
        half = text_width(tick.text, TICK_SIZE) / 2
        at = min(max(x(tick.value), half), max(right - half, half))
        texts.append(label(at, bottom + 17, tick.text, TICK_SIZE, text_anchor="middle"))
    name = fit(x_label, LABEL_SIZE, x.last - x.first)
    return (
        group("axis", stroke((x.first, bottom), (x.last, bottom)), stroke=AXIS)
        + group("axis x-marks", *marks, stroke=AXIS)
        + group("ticks x-ticks", *texts, fill=SOFT)
        + group(
            "axis-labels",
            label((x.first + x.last) / 2, bottom + 38, name, LABEL_SIZE, x_label, text_anchor="middle"),
            fill=INK,
        )
    )
