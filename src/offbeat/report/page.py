"""A Page as one HTML file that loads nothing: text, tables and charts as SVG. page.js adds hovering and zoom.

    text = render(page)

Laws. The same page gives the same bytes. Nothing given is ever markup: text is escaped, data is JSON without
`<`, `>` and `&`, and the policy at the top lets the browser run this file's own script, by its hash, and nothing else.
Every cell of every table and every chart but the timeline is in the HTML: the page can be read, searched and printed
without JavaScript.
Whatever the numbers are, the data holds only finite ones.

A timeline's bars travel as five columns, bar by bar, each in the smallest type that holds it (see `_bars`): a run of
320,000 bars takes 3 to 4 MB.

What it must not know: what a run is, what the numbers mean, files but its own script and style.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from offbeat.charts.bar_chart import (
    BarChart,
    ShareChart,
    bar_colours,
    bar_legend,
    draw_bar_chart,
    draw_share_chart,
    share_legend,
    time_part,
)
from offbeat.charts.line_chart import LegendEntry, LineChart, draw_line_chart, line_legend
from offbeat.number_format import Cell, Form, column_unit, format_value
from offbeat.report.page_model import Column, Item, Page, PageSection, Table, TimelineChart

Data = dict[str, Any]  # what page.js reads; JSON has no better type

DARK = "/* dark */"  # what follows it in page.css is a style of its own, which the reader's choice turns on and off
LARGE = 1e100  # numbers beyond this are drawn as this, so that differences of them stay finite
DIGITS = 9  # of a point of a line, more than any screen shows
LETTERS = 300  # letters of a title attribute at most, and of a text that is shown whole; a longer one opens at a tap
WORDY, WORDIER = 24, 60  # a cell with more letters gets more room
SHOWN_PROBLEMS = 8  # the others are folded away
SHOWN_SENTENCES = 5  # of the summary; so are these
LAYOUTS = {"wide": 760, "narrow": 380}  # each chart is drawn for both; page.css shows the one that fits
TALL = 24  # a table with more rows scrolls by itself
PAPER = 660.0  # pixels of a table on paper; A4 has 688 between the margins of page.css
LETTER, PADDING = 6.4, 13.0  # pixels on paper of a letter, generously, and of a cell around its letters
NARROW, NARROWER = 24, 12  # letters of a column of text on paper, and of one that saves a table from being divided
WORD = 20  # letters of a word that is not broken on paper
TYPES = ("u1", "i1", "u2", "i2", "u4", "i4", "f8")  # of a column of bars, the smallest first; all little-endian

_NO_SCRIPT = "Timelines and values at the pointer need JavaScript, which is off. Everything else is shown."
# Characters that end a line in JavaScript, or could end the element that the data stands in.
_JSON_ESCAPES = {ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"}


def render(page: Page) -> str:
    """The whole document."""
    style, _, dark = _own("page.css").partition(DARK)
    script = "".join(map(_own, ("writing.js", "page.js", "timeline.js")))
    names = _Names()
    charts: list[Data] = []
    anchors = [names.take("section", section.key) for section in page.sections]
    sections = [
        _section(section, anchor, names, charts) for section, anchor in zip(page.sections, anchors, strict=True)
    ]
    data = json.dumps(charts, ensure_ascii=True, allow_nan=False, separators=(",", ":")).translate(_JSON_ESCAPES)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)} {_hash(dark)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{_text(page.title)}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
<style id="dark" media="screen and (prefers-color-scheme: dark)">{dark}</style>
</head>
<body>
<header class="top" id="top">
<div class="heading">
<h1>{_openable(page.title)}</h1>
{_paragraph(page.subtitle, "subtitle")}</div>
<div class="buttons" id="buttons"></div>
</header>
<noscript><p class="notice">{_NO_SCRIPT}</p></noscript>
<div class="columns">
{_contents(page, anchors)}<main>
{_summary(page, names)}{_notes(page.notes)}{_problems(page.problems)}{"".join(sections)}</main>
</div>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


# --- text ---------------------------------------------------------------------------------------------------------


class _Names:
    """Names of places in the page: no two alike, and nothing in them but letters, digits and dashes."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def take(self, kind: str, key: str) -> str:
        base = f"{kind}-{re.sub('[^a-z0-9]+', '-', key.lower())[:60].strip('-')}".strip("-")
        name, number = base, 1
        while name in self._taken:
            number += 1
            name = f"{base}-{number}"
        self._taken.add(name)
        return name


def _text(text: str) -> str:
    """Escaped, with line ends as spaces. Half characters and zeros, which HTML cannot hold, become a sign for that."""
    text = re.sub("[\ud800-\udfff\x00]", "\ufffd", text)
    return html.escape(re.sub(r"[\r\n\t]+", " ", text))


def _openable(text: str) -> str:
    """The text, all of it; a very long one shows its first lines until it is tapped, or printed."""
    shown = f"<bdi>{_text(text)}</bdi>"
    return shown if len(text) <= LETTERS else f'<details class="long"><summary>{shown}</summary></details>'


def _attribute(name: str, text: str) -> str:
    """With text that is cut where it is long; nothing for no text."""
    return f' {name}="{_text(_cut(text))}"' if text else ""


def _cut(text: str) -> str:
    return text if len(text) <= LETTERS else text[:LETTERS] + "…"


def _paragraph(text: str, kind: str = "") -> str:
    """With a kind, a very long one can be opened; a `p` holds nothing that can be."""
    if not text:
        return ""
    if not kind:
        return f"<p><bdi>{_text(text)}</bdi></p>\n"
    tag = "p" if len(text) <= LETTERS else "div"
    return f'<{tag} class="{kind}">{_openable(text)}</{tag}>\n'


def _contents(page: Page, anchors: Sequence[str]) -> str:
    if not page.sections:
        return ""
    places = [("summary", "Summary")] if page.summary or page.overview is not None else []
    places += [(anchor, section.title) for anchor, section in zip(anchors, page.sections, strict=True)]
    links = "".join(f'<li><a href="#{name}"><bdi>{_text(_cut(t))}</bdi></a></li>\n' for name, t in places)
    return (
        '<nav class="contents" aria-label="Contents"><details open>\n'
        f"<summary>Contents</summary>\n<ol>\n{links}</ol>\n</details></nav>\n"
    )


def _summary(page: Page, names: _Names) -> str:
    if not page.summary and page.overview is None:
        return ""
    table = "" if page.overview is None else _table(page.overview, names)
    shown, folded = page.summary[:SHOWN_SENTENCES], page.summary[SHOWN_SENTENCES:]
    text = "".join(map(_paragraph, shown))
    if folded:
        more = "".join(map(_paragraph, folded))
        text += f"<details><summary>{len(folded)} more findings</summary>\n{more}</details>\n"
    return f'<section class="summary" id="summary" aria-label="Summary">\n{table}{text}</section>\n'


def _notes(notes: Sequence[str]) -> str:
    if not notes:
        return ""
    rows = "".join(f"<li>{_openable(text)}</li>\n" for text in notes)
    return f'<aside class="notice notes" aria-label="Notes">\n<ul>\n{rows}</ul>\n</aside>\n'


def _problems(problems: Sequence[str]) -> str:
    if not problems:
        return ""
    rows = [f"<li>{_openable(text)}</li>\n" for text in problems]
    shown, folded = rows[:SHOWN_PROBLEMS], rows[SHOWN_PROBLEMS:]
    rest = f"<details><summary>{len(folded)} more</summary><ul>\n{''.join(folded)}</ul></details>\n" if folded else ""
    return (
        '<aside class="notice problems" aria-labelledby="problems">\n<h2 id="problems">What could not be read</h2>\n'
        f"<ul>\n{''.join(shown)}</ul>\n{rest}</aside>\n"
    )


def _section(section: PageSection, anchor: str, names: _Names, charts: list[Data]) -> str:
    items = "".join(_item(item, names, charts) for item in section.items)
    return (
        f'<section id="{anchor}" aria-labelledby="{anchor}-title">\n'
        f'<h2 id="{anchor}-title">{_openable(section.title)}</h2>\n'
        f"{''.join(map(_paragraph, (section.about, *section.paragraphs)))}{items}</section>\n"
    )


def _item(item: Item, names: _Names, charts: list[Data]) -> str:
    if isinstance(item, Table):
        return _table(item, names)
    name, number = names.take("chart", item.key), len(charts)
    legend = plot = ""
    if isinstance(item, TimelineChart):
        kind, data = "timeline", _bars(item)
    else:
        kind, prepare, entries, draw, pack = _KINDS[type(item)]
        chart = prepare(item)
        data = pack(chart)
        drawn = ((layout, draw(chart, width, f"{name}-{layout}")) for layout, width in LAYOUTS.items())
        plot = "".join(svg.replace("<svg", f'<svg class="{layout}" aria-hidden="true"', 1) for layout, svg in drawn)
        legend = "".join(map(_legend_entry, entries(chart))) if plot else ""
        plot = plot or '<p class="empty">nothing to show</p>\n'
    charts.append({"kind": kind, "key": item.key, "title": item.title, **data})
    about = ". ".join(text.rstrip(". ") for text in (item.title, item.note) if text)
    return (
        f'<figure class="chart {kind}" id="{name}" data-chart="{number}">\n'
        f'<figcaption><h3>{_openable(item.title)}</h3></figcaption>\n<div class="legend">{legend}</div>\n'
        f'<div class="plot" role="img" tabindex="0" aria-label="{_text(_cut(about))}">\n{plot}</div>\n'
        f"{_paragraph(item.note, 'note')}</figure>\n"
    )


def _legend_entry(entry: LegendEntry) -> str:
    about = "click: hide or show, double click: show alone"
    return (
        f'<button type="button" class="entry" aria-pressed="true" title="{about}">'
        f'<svg class="{entry.colour}" width="22" height="12" aria-hidden="true">{entry.swatch}</svg>'
        f"<bdi>{_text(_cut(entry.name))}</bdi></button>"
    )


# --- tables -------------------------------------------------------------------------------------------------------


def _table(table: Table, names: _Names) -> str:
    """As many cells in each row as there are columns: what is missing is a dash.

    A table that is too wide for paper is there twice: to be scrolled, and in blocks that are seen on paper only.
    """
    columns = [column._replace(name=_plain(column.name, column.form)) for column in table.columns]
    rows = [tuple(row[: len(columns)]) + (None,) * (len(columns) - len(row)) for row in table.rows]
    written = [_column(column, [row[at] for row in rows]) for at, column in enumerate(columns)]
    blocks = _blocks(columns, written)
    parts = [_grid(columns, written, block, table.title if n == 0 else "") for n, block in enumerate(blocks)]
    whole = _grid(columns, written, range(len(columns)), table.title)
    tall = " tall" if len(rows) > TALL else ""
    wide = " wide" if len(blocks) > 1 else ""
    name = _attribute("aria-label", table.title)
    paper = f'<div class="paper">\n{"".join(parts)}</div>\n' if wide else ""
    return (
        f'<div class="table" id="{names.take("table", table.key)}">\n'
        f'<div class="scroll{tall}{wide}" tabindex="0" role="region"{name}>\n{whole}</div>\n'
        f"{paper}{_paragraph(table.note, 'note')}{_help(columns)}</div>\n"
    )


def _plain(name: str, form: Form) -> str:
    """The name without its "(s)", which a CSV file needs, where each number is written with a unit of its own."""
    return name.removesuffix(" (s)") if form == "seconds" else name


def _column(column: Column, cells: Sequence[Cell]) -> list[str]:
    unit = column_unit(cells, column.form)
    return [format_value(cell, column.form, unit) for cell in cells]


def _grid(columns: Sequence[Column], written: Sequence[Sequence[str]], shown: Sequence[int], title: str) -> str:
    """A table of the columns that are shown, the first of them as the names of the rows."""
    count = len(written[0]) if written else 0
    body = "".join(
        "<tr>" + "".join(_cell(columns[at], written[at][number], first=at == 0) for at in shown) + "</tr>\n"
        for number in range(count)
    )
    if not count:
        body = f'<tr><td class="none" colspan="{max(len(shown), 1)}">nothing to show</td></tr>\n'
    caption = f"<caption>{_openable(title)}</caption>\n" if title else ""
    heads = "".join(_head(columns[at]) for at in shown)
    return f"<table>\n{caption}<thead><tr>{heads}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>\n"


def _blocks(columns: Sequence[Column], written: Sequence[Sequence[str]]) -> list[list[int]]:
    """The columns in blocks that fit on paper. Each begins with the columns that tell rows apart: mostly one."""
    if sum(map(_width, columns, written, repeat(NARROWER))) <= PAPER:
        return [list(range(len(columns)))]
    widths = list(map(_width, columns, written, repeat(NARROW)))
    rows = list(zip(*written, strict=True))
    names = next((n for n in range(1, min(4, len(columns))) if len({row[:n] for row in rows}) == len(rows)), 1)
    first = list(range(names)) if sum(widths[:names]) <= PAPER / 2 else [0]
    blocks = [list(first)]
    for at in range(len(first), len(columns)):
        if len(blocks[-1]) > len(first) and sum(widths[one] for one in [*blocks[-1], at]) > PAPER:
            blocks.append(list(first))
        blocks[-1].append(at)
    return blocks


def _width(column: Column, cells: Sequence[str], most: int) -> float:
    """Pixels on paper that the column needs so that no number and no word of it is broken; its name may take three
    lines, and text is at most so many letters wide.
    """
    if column.form != "text":
        most = NARROW
    longest = max((len(cell) for cell in cells), default=0)
    words = (len(word) for text in (column.name, *cells) for word in text.split() if len(word) <= WORD)
    letters = max(min(-(-len(column.name) // 3), WORD), *words, min(longest, most), 1)
    return LETTER * letters + PADDING


def _class(column: Column, text: str, *, head: bool = False) -> str:
    """Numbers stand right. Words with one that no paper holds are broken anywhere; much text gets more room."""
    kinds = ["number"] if column.form != "text" and (head or len(text) <= NARROW) else []
    kinds += ["broken"] if any(len(word) > WORD for word in text.split()) else []
    if not head:
        kinds += ["wordier"] if len(text) > WORDIER else ["wordy"] if len(text) > WORDY else []
    return f' class="{" ".join(kinds)}"' if kinds else ""


def _head(column: Column) -> str:
    text = _openable(column.name)
    inner = (
        f"<abbr{_attribute('title', column.help)}>{text}</abbr>"
        if column.help and len(column.name) <= LETTERS
        else text
    )
    return f'<th scope="col"{_class(column, column.name, head=True)}>{inner}</th>'


def _cell(column: Column, text: str, *, first: bool) -> str:
    tag, scope = ("th", ' scope="row"') if first else ("td", "")
    return f"<{tag}{scope}{_class(column, text)}>{_openable(text)}</{tag}>"


def _help(columns: Sequence[Column]) -> str:
    helped = [column for column in columns if column.help]
    if not helped:
        return ""
    text = "".join(f"<dt>{_openable(c.name)}</dt><dd>{_openable(c.help)}</dd>\n" for c in helped)
    return f'<details class="help"><summary>What the columns mean</summary>\n<dl>\n{text}</dl></details>\n'


# --- data of charts -----------------------------------------------------------------------------------------------


def _prepared_line(chart: LineChart) -> LineChart:
    """Groups have names, and points that are not finite are left out; see the model's law."""
    return replace(
        chart,
        x_label=_plain(chart.x_label, chart.x_form),
        y_label=_plain(chart.y_label, chart.y_form),
        levels=tuple((_drawn(value), text) for value, text in chart.levels if math.isfinite(value)),
        series=tuple(
            series._replace(
                group=series.group or series.name,
                points=tuple((_drawn(x), _drawn(y)) for x, y in series.points if math.isfinite(x) and math.isfinite(y)),
            )
            for series in chart.series
        ),
    )


def _line(chart: LineChart) -> Data:
    colours = {entry.name: entry.colour for entry in line_legend(chart)}
    return {
        "xLabel": chart.x_label,
        "xForm": chart.x_form,
        "yForm": chart.y_form,
        "fromZero": chart.from_zero,
        "levels": [value for value, _ in chart.levels],
        "series": [
            {
                "name": series.name,
                "style": series.style,
                "group": series.group,
                "colour": colours[series.group],
                "x": [x for x, _ in series.points],
                "y": [y for _, y in series.points],
            }
            for series in chart.series
        ],
    }


def _prepared_bar(chart: BarChart) -> BarChart:
    series = (
        bars._replace(values=tuple(None if v is None or not math.isfinite(v) else _drawn(v) for v in bars.values))
        for bars in chart.series
    )
    return replace(chart, y_label=_plain(chart.y_label, chart.y_form), series=tuple(series))


def _bar(chart: BarChart) -> Data:
    colours = bar_colours(chart)
    series = [(bars.name, colours[bars.name], bars.values) for bars in chart.series]
    return _bands(chart.x_label, chart.y_form, chart.categories, series)


def _prepared_share(chart: ShareChart) -> ShareChart:
    values = tuple(tuple(_drawn(value) if math.isfinite(value) else 0.0 for value in row) for row in chart.values)
    return replace(chart, values=values)


def _share(chart: ShareChart) -> Data:
    columns = zip(*chart.values, strict=True)
    series = [(part, time_part(part), values) for part, values in zip(chart.parts, columns, strict=False)]
    return _bands("", "percent", chart.rows, series)


def _bands(
    label: str, form: Form, bands: Sequence[str], series: Iterable[tuple[str, str, Sequence[float | None]]]
) -> Data:
    """Values side by side or one after the other: page.js tells those of one band."""
    return {
        "label": label,
        "form": form,
        "bands": list(bands),
        "series": [
            {"name": name, "group": name, "colour": colour, "values": values} for name, colour, values in series
        ],
    }


def _drawn(value: float) -> float:
    return float(f"{min(max(float(value), -LARGE), LARGE):.{DIGITS}g}")


def _bars(chart: TimelineChart) -> Data:
    """The bars learner by learner, in whole ticks, so that neither sums nor differences lose anything:

    counts    how many bars each learner has
    gaps      from the end of the bar before (or 0) to this one's start: mostly 0
    lengths   from its start to its end
    versions  minus the bar before's (or 0)
    marks     twice the index of what it is, plus one if cancelled
    """
    bars = np.array(chart.bars, dtype=np.float64).reshape(-1, 6)
    learner, what, start_s, end_s, version, cancelled = bars[np.argsort(bars[:, 0], kind="stable")].T
    start_s, end_s = np.clip((start_s, end_s), -LARGE, LARGE)
    last_s = np.abs((start_s, end_s)).max(initial=0.0)
    tick_s = 1e-9 if last_s < 1 else 1e-6 if last_s < 1e9 else last_s / 1e15
    start, end = np.rint(start_s / tick_s), np.rint(end_s / tick_s)
    return {
        "learners": list(chart.learners),
        "whats": list(chart.whats),
        "tick": tick_s,
        "counts": np.bincount(learner.astype(np.int64), minlength=len(chart.learners)).tolist(),
        "gaps": _packed(start - _before(end, learner)),
        "lengths": _packed(end - start),
        "versions": _packed(version - _before(version, learner)),
        "marks": _packed(2 * what + cancelled),
    }


def _before(values: npt.NDArray[np.float64], learner: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of each bar the value of the one before it of the same learner, 0 for its first."""
    before = np.zeros_like(values)
    before[1:] = np.where(learner[1:] == learner[:-1], values[:-1], 0.0)
    return before


def _packed(values: npt.NDArray[np.float64]) -> Data:
    """Whole numbers in the smallest type that holds them all, as base64."""
    low, high = values.min(initial=0.0), values.max(initial=0.0)
    kind = next(kind for kind in TYPES if kind == "f8" or (np.iinfo(kind).min <= low and high <= np.iinfo(kind).max))
    return {"type": kind, "bytes": base64.b64encode(values.astype(f"<{kind}").tobytes()).decode("ascii")}


# How a kind of chart comes onto a page: its name, and the functions that prepare it, make its legend, draw and pack it.
_KINDS: dict[type[Any], tuple[str, Callable[..., Any], Callable[..., list[LegendEntry]], Callable[..., str],
                              Callable[..., Data]]] = {
    LineChart: ("line", _prepared_line, line_legend, draw_line_chart, _line),
    BarChart: ("bar", _prepared_bar, bar_legend, draw_bar_chart, _bar),
    ShareChart: ("share", _prepared_share, share_legend, draw_share_chart, _share),
}  # fmt: skip


# --- the file's own parts -----------------------------------------------------------------------------------------


def _own(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"
