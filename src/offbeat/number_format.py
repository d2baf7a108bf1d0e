"""How numbers are written for people: `format_value(0.0123, "seconds")` is "12.3 ms".

Two families. `format_value` writes a value of a table or a chart in a form, and picks the unit:

    number, text    12,345   0.1235   1.23e−7       at most 4 digits that count, whole numbers whole
    seconds         12.3 ms  4.5 s    2.1 min       3 digits that count
    joules          1.23 kJ
    percent         12.3 %   0.42 %                 of a share: 0.123 is 12.3 %
    signed-percent  +12.3 %  −4.0 %
    times           1.82×    12.3×    123×
    money           1,234    12.35    0.0123        in whatever currency the text says

`format_seconds`, `format_size`, `format_rate`, `percent` ... write what stands in a sentence or on a terminal:
plain ASCII, and the parsers of spec.py read it back.

Laws. What is not known is a dash. writing.js writes the forms too, letter for letter, for values at the pointer.
So both use only operations that every machine does alike: a number is rounded as the floor of its multiple plus a half,
and its exponent is read from its digits. A test in a browser compares the two over many numbers.

What it must not know: tables, charts, pages and commands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

Cell = str | int | float | None
Form = Literal["text", "number", "seconds", "percent", "signed-percent", "times", "money", "joules"]

DASH, MINUS = "–", "−"
GROUPED = 10_000  # from here on thousands are set apart
LARGE, SMALL = 1e15, 1e-4  # beyond these a number is written with an exponent
NOTHING = 1e-300  # below this it is written as 0
MOST = 1e306  # a hundred times this is still a number
ROOM = 0.9995  # 999.6 ms would be rounded to 1000: it is a second
ALIKE = 500.0  # numbers of a column that differ by at most this have one unit


class Unit(NamedTuple):
    least: float  # the smallest number it fits
    size: float
    name: str


UNITS: dict[str, tuple[Unit, ...]] = {
    "seconds": (
        Unit(7200, 3600, "h"),
        Unit(120, 60, "min"),
        Unit(ROOM, 1, "s"),
        Unit(ROOM * 1e-3, 1e-3, "ms"),
        Unit(0, 1e-6, "µs"),
    ),
    "joules": (
        Unit(ROOM * 1e6, 1e6, "MJ"),
        Unit(ROOM * 1e3, 1e3, "kJ"),
        Unit(ROOM, 1, "J"),
        Unit(0, 1e-3, "mJ"),
    ),
}


def format_value(value: Cell, form: Form, unit: Unit | None = None) -> str:
    """The value in its form. Words stay words. With `unit`, seconds and joules are written in that unit."""
    if value is None or value == "":
        return DASH
    if isinstance(value, str):
        return value
    number = _float(value)
    if math.isnan(number):
        return DASH
    sign = MINUS if number < 0 else "+" if form == "signed-percent" and number > 0 else ""
    size = abs(number)
    if math.isinf(size):
        return f"{sign}∞"
    if size < NOTHING:
        size, sign = 0.0, ""
    return sign + _size(size, form, unit)


def column_unit(values: Iterable[Cell], form: Form) -> Unit | None:
    """The one unit for a column whose numbers are alike, so that they compare at a glance; None: each its own."""
    numbers = (abs(_float(value)) for value in values if isinstance(value, int | float))
    sizes = [size for size in numbers if NOTHING <= size < math.inf]
    if form not in UNITS or not sizes or max(sizes) > ALIKE * min(sizes):
        return None
    return _unit(form, max(sizes))


def format_fixed(value: float, digits: int) -> str:
    """With that many digits after the point, as the ticks of an axis have them."""
    return (MINUS if value < 0 else "") + _fixed(abs(value), digits)


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # a whole number of more than 308 digits
        return math.inf if value > 0 else -math.inf


# --- a number that is not negative --------------------------------------------------------------------------------


def _size(size: float, form: Form, unit: Unit | None) -> str:
    if form in UNITS:
        unit = unit or (_unit(form, size) if size else UNITS[form][2])
        return f"{_significant(size / unit.size, 3)} {unit.name}"
    if form in ("percent", "signed-percent"):
        return _percent(100 * min(size, MOST)) + " %"
    if form == "times":
        return (_fixed(size, 0 if size >= 100 else 1 if size >= 10 else 2) if size >= 0.1 else _number(size, 2)) + "×"
    if form == "money":
        return _fixed(size, 0) if size >= 1000 else _fixed(size, 2) if size >= 0.1 or not size else _number(size, 3)
    return _number(size, 4)


def _unit(form: Form, size: float) -> Unit:
    return next(unit for unit in UNITS[form] if size >= unit.least)


def _percent(size: float) -> str:
    return _fixed(size, 0 if size >= 99.95 else 1 if size >= 0.995 else 2) if size >= 0.01 else _number(size, 1)


def _number(size: float, digits: int) -> str:
    return _fixed(size, 0) if size == math.floor(size) and size < LARGE else _significant(size, digits)


def _significant(size: float, digits: int) -> str:
    """With that many digits that count, but no digit before the point left out; zeros at the end are."""
    if not size:
        return "0"
    power = int(f"{size:.17e}".split("e")[1])
    if size < SMALL or size >= LARGE:
        front = _bare(_fixed(size / float(f"1e{power}"), digits - 1))
        front, power = ("1", power + 1) if front == "10" else (front, power)
        return f"{front}e{MINUS if power < 0 else ''}{abs(power)}"
    return _bare(_fixed(size, max(digits - 1 - power, 0)))


def _fixed(size: float, digits: int) -> str:
    """With that many digits after the point, rounded half up, thousands set apart."""
    if size >= LARGE:
        return _significant(size, 4)
    whole = str(math.floor(size * float(f"1e{digits}") + 0.5)).rjust(digits + 1, "0")
    front, back = whole[: len(whole) - digits], whole[len(whole) - digits :]
    front = f"{int(front):,}" if int(front) >= GROUPED else front
    return f"{front}.{back}" if back else front


def _bare(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


# --- sentences and terminals --------------------------------------------------------------------------------------


def finite_or_none(number: float | None) -> float | None:
    """For JSON, which has neither infinities nor NaN."""
    return number if number is not None and math.isfinite(number) else None


def format_seconds(seconds: float) -> str:
    return "0 s" if seconds == 0 else _scaled(seconds, [(1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")])


def format_size(size_bytes: float) -> str:
    return _scaled(size_bytes, [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")])


def format_rate(bytes_per_s: float) -> str:
    return f"{format_size(bytes_per_s)}/s"


def percent(share: float, digits: int = 1) -> str:
    """`12.5 %` of a share of 0.125."""
    return f"{100 * share:.{digits}f} %"


def whole_percent(share: float) -> str:
    return percent(share, 0)


def format_change(share: float) -> str:
    """`+12.5 %`, with a sign."""
    return f"{100 * share:+.1f} %"


def format_joules(joules: float) -> str:
    unit = _unit("joules", max(joules, 1.0))
    return f"{joules / unit.size:.{1 if joules < 100 * unit.size else 0}f} {unit.name}"


def format_clock(seconds: float) -> str:
    """`4:05`, or `1:04:05` from an hour on."""
    minutes, rest = divmod(max(int(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _scaled(value: float, steps: Sequence[tuple[float, str]]) -> str:
    factor, unit = next(
        ((factor, unit) for factor, unit in steps if abs(value) >= 0.99995 * factor), steps[-1]
    )  # 999.99 MB reads 1 GB and not 1000 MB
    scaled = value / factor
    return f"{scaled:.4g} {unit}" if abs(scaled) < 9999.5 else f"{scaled:.0f} {unit}"
