"""What a page holds, as plain values: text, tables and charts. Who fills them and who draws them meet here.

    build.py    runs and results -> a Page
    page.py     a Page -> one HTML file        tables.py    a Page -> a CSV file for every table

Laws. All text is text: nothing in it is ever taken for markup. A number that is not known is None and is shown as a
dash; a number that is not finite does not occur in a chart. The order of what is given is the order on the page.

What it must not know: files, HTML, and what a run is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from offbeat.charts import BarChart, Figure, LineChart, ShareChart
from offbeat.number_format import Cell, Form


class Column(NamedTuple):
    """A column of a table; `help` says what it means."""

    name: str
    form: Form = "text"
    help: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Figure):
    """`key` names its CSV file."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


# Who (an index into `learners`), what (one into `whats`), from, to, at which version, cancelled or not.
Bar = tuple[int, int, float, float, int, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineChart(Figure):
    """What each learner did, as bars. Those of one learner do not overlap, and come in order of their start.

    Zoomable; coloured by version.
    """

    learners: tuple[str, ...]
    whats: tuple[str, ...]
    bars: tuple[Bar, ...]


Item = Table | LineChart | BarChart | ShareChart | TimelineChart


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    """A part of a page: a heading, what it is about, some paragraphs, then what is shown."""

    key: str
    title: str
    items: tuple[Item, ...]
    paragraphs: tuple[str, ...] = ()
    about: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """All of it. The table comes first, then the summary, a sentence or two each, the most important first; then notes
    on how to read the numbers, what could not be read, and the sections.
    """

    title: str
    subtitle: str
    summary: tuple[str, ...]
    problems: tuple[str, ...]
    sections: tuple[PageSection, ...]
    overview: Table | None = None
    notes: tuple[str, ...] = ()
