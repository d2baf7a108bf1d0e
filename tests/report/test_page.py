"""The HTML as text: what is in it, what can never be in it. How it looks and acts is in test_browser.py."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from offbeat.charts import BarChart, LineChart, Series, ShareChart
from offbeat.number_format import UNITS, Form, column_unit, format_value
from offbeat.report.page import render
from offbeat.report.page_model import Column, Page, PageSection, Table, TimelineChart
from offbeat.report.tables import as_csv
from report import pages

# Elements that have no end.
VOID = {"meta", "link", "br", "img", "input", "hr"}
# All that a page is made of: markup that came from a name would bring others.
ELEMENTS = {
    "html", "head", "meta", "title", "link", "style", "body", "header", "div", "h1", "h2", "h3", "bdi", "p", "noscript",
    "nav", "details", "summary", "ol", "ul", "li", "a", "main", "section", "aside", "figure", "figcaption", "table",
    "caption", "thead", "tbody", "tr", "th", "td", "abbr", "dl", "dt", "dd", "script", "button",
    "svg", "g", "line", "text", "polyline", "path", "rect", "pattern", "clippath",
}  # fmt: skip
ATTRIBUTES = {
    "lang", "charset", "http-equiv", "content", "name", "rel", "href", "id", "media", "class", "scope", "title",
    "tabindex", "role", "aria-label", "aria-labelledby", "data-chart", "type", "open", "colspan",
    "aria-hidden", "aria-pressed", "viewbox", "width", "height", "data-x", "data-y", "data-bands", "data-group",
    "hidden", "x", "y", "x1", "x2", "y1", "y2", "rx", "points", "d", "transform", "text-anchor", "font-size", "fill",
    "stroke", "clip-path", "patternunits",
}  # fmt: skip


class Reader(HTMLParser):
    """Reads a page and keeps what it is made of; complains about what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.stack: list[str] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = self.stack[-1] if self.stack else ""
        {"script": self.scripts, "style": self.styles}.get(inside, self.texts).append(data)


def data_of(text: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    read: list[dict[str, Any]] = json.loads(found[1])
    return read


def chart_of(page: Page, key: str) -> dict[str, Any]:
    return next(chart for chart in data_of(render(page)) if chart["key"] == key)


def page_with(*items: Any) -> Page:
    return Page(
        title="t", subtitle="", summary=(), problems=(), sections=(PageSection(key="s", title="S", items=items),)
    )


# --- what is in it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [pages.usual, pages.known, pages.odd, pages.hostile])
def test_a_page_is_made_of_known_elements_and_attributes_only_whatever_it_is_about(make: Any) -> None:
    reader = Reader(render(make()))
    assert {tag for tag, _ in reader.elements} <= ELEMENTS
    assert {name for _, attributes in reader.elements for name in attributes} <= ATTRIBUTES
    ids = [attributes["id"] for _, attributes in reader.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch("[a-z0-9-]+", name or "") for name in ids)
    assert {a["href"] for t, a in reader.elements if t == "a"} <= {f"#{name}" for name in ids}


def test_no_address_is_in_a_page_but_the_one_that_names_svg() -> None:
    text = render(pages.usual())
    assert set(re.findall(r"\w+://[^\"'\s)]*", text)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in text
    names = {attributes["id"] for _, attributes in Reader(text).elements if "id" in attributes}
    assert {name.removeprefix("#") for name in re.findall(r"url\(([^)]*)\)", text)} <= names


def test_the_policy_lets_run_what_is_in_the_page_by_its_hash_and_nothing_else() -> None:
    text = render(pages.usual())
    reader = Reader(text)
    policy = next(a["content"] or "" for t, a in reader.elements if a.get("http-equiv") == "Content-Security-Policy")
    rules = {rule.split()[0]: rule.split()[1:] for rule in policy.split(";")}

    def digest(inner: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()}'"

    script = text.rpartition("<script>")[2].partition("</script>")[0]
    styles = re.findall(r"<style[^>]*>(.*?)</style>", text, re.DOTALL)
    assert rules == {
        "default-src": ["'none'"],
        "script-src": [digest(script)],
        "style-src": [digest(style) for style in styles],
        "img-src": ["data:"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }
    assert len(styles) == 2
    assert text.count("<script") == 2 and text.count("</script") == 2


def test_every_cell_name_and_help_of_every_table_is_in_the_html() -> None:
    page = pages.usual()
    text = render(page)
    tables = [item for section in page.sections for item in section.items if isinstance(item, Table)]
    assert len(tables) == 2
    for table in tables:
        for at, column in enumerate(table.columns):
            assert html.escape(column.name) in text and html.escape(column.help) in text
            unit = column_unit([row[at] for row in table.rows], column.form)
            for row in table.rows:
                assert f"<bdi>{html.escape(format_value(row[at], column.form, unit))}</bdi>" in text
    reader = Reader(text)
    assert sum(t in ("td", "th") for t, _ in reader.elements) == sum(
        len(table.columns) * (len(table.rows) + 1) for table in tables
    )


def test_all_words_of_a_page_are_on_it_summary_first_and_problems_before_the_sections() -> None:
    page = pages.usual()
    texts = "\n".join(Reader(render(page)).texts)
    places = [texts.index(words, texts.index("Contents")) for words in (*page.summary, *page.problems)]
    for section in page.sections:
        places += [
            texts.index(text, places[-1])
            for text in (section.title, *filter(None, [section.about]), *section.paragraphs)
        ]
    assert places == sorted(places)
    assert page.title in texts and page.subtitle in texts
    for section in page.sections:
        for item in section.items:
            assert item.title in texts and item.note in texts


def test_numbers_stand_right_and_words_left() -> None:
    page = page_with(Table(key="t", title="T", columns=(Column("a"), Column("b", "number")), rows=(("x", 1.5),)))
    assert '<th scope="row"><bdi>x</bdi></th><td class="number"><bdi>1.5</bdi></td>' in render(page)


def test_a_wide_table_is_there_for_paper_too_in_blocks_that_begin_with_what_tells_rows_apart() -> None:
    table = next(item for item in pages.wide().sections[0].items if isinstance(item, Table))
    text = render(page_with(table))
    assert text.count("<caption>") == 2 and text.count("<table>") == 4
    blocks = text.partition('<div class="paper">')[2].split("<table>")[1:]
    heads = [
        re.findall("<bdi>([^<]*)</bdi>", block.partition("<thead>")[2].partition("</thead>")[0]) for block in blocks
    ]
    names = [column.name.removesuffix(" (s)") for column in table.columns]
    assert all(head[:2] == ["run", "learner"] for head in heads)
    assert [name for head in heads for name in head[2:]] == names[2:]
    assert all(block.count('<th scope="row"') == len(table.rows) for block in blocks)
    assert sum(block.count("<td") for block in blocks) == len(table.rows) * (len(names) - 2 + len(heads))


def test_a_name_of_seconds_is_without_its_unit_since_each_number_has_its_own() -> None:
    columns = (Column("time (s)", "seconds", "How long."), Column("rate (s)", "number"))
    series = (Series("a", ((1.0, 2.0),)),)
    chart = LineChart(key="l", title="", x_label="time (s)", y_label="other (s)", x_form="seconds", series=series)
    table = Table(key="t", title="", columns=columns, rows=((90.0, 1.0), (150.0, 2.0)))
    page = page_with(table, chart)
    texts = Reader(render(page)).texts
    assert texts.count("time") == 2 + 2 and "rate (s)" in texts and "time (s)" not in texts  # the chart is there twice
    assert chart_of(page, "l")["xLabel"] == "time" and texts.count("other (s)") == 2
    assert as_csv(table).startswith("time (s),rate (s)\n")


def test_a_very_long_text_can_be_opened_and_any_other_is_shown_whole() -> None:
    words = ("x " * 150, "x " * 151)
    table = Table(key="t", title="", columns=(Column("a"), Column("b")), rows=(words,))
    text = render(page_with(table))
    assert text.count('<details class="long">') == 1
    assert f'<details class="long"><summary><bdi>{words[1]}</bdi></summary></details></td>' in text
    assert "-webkit-line-clamp" in text and text.count("-webkit-line-clamp") == 1


def test_a_short_row_is_filled_with_dashes() -> None:
    page = page_with(Table(key="t", title="T", columns=(Column("a"), Column("b", "number")), rows=(("x",),)))
    assert '<td class="number"><bdi>–</bdi></td>' in render(page)


def test_more_problems_than_a_few_are_folded_away_but_all_there() -> None:
    page = replace(pages.usual(), problems=tuple(f"problem {n}." for n in range(20)))
    text = render(page)
    assert "<summary>12 more</summary>" in text
    assert all(f"problem {n}." in text for n in range(20))


def test_the_same_page_gives_the_same_bytes() -> None:
    assert render(pages.usual()) == render(pages.usual())


def test_an_empty_page_is_a_page() -> None:
    reader = Reader(render(Page(title="", subtitle="", summary=(), problems=(), sections=())))
    assert not any(tag == "nav" for tag, _ in reader.elements)


# --- names that would be markup -----------------------------------------------------------------------------------


def test_hostile_names_are_text_in_words_and_in_data() -> None:
    text = render(pages.hostile())
    reader = Reader(text)
    words = "".join(reader.texts)
    for name in pages.HOSTILE:
        clean = re.sub(r"[\r\n\t]+", " ", re.sub("[\ud800-\udfff\x00]", "\ufffd", name))
        assert clean in words
    between = text.partition('id="data">')[2].partition("</script>")[0]
    assert not set("<>&\u2028\u2029") & set(between)
    assert [one["name"] for one in data_of(text)[0]["series"]] == list(pages.HOSTILE)
    text.encode("utf-8")


def test_what_is_shown_at_the_pointer_is_cut() -> None:
    reader = Reader(render(pages.hostile()))
    titles = [a[n] or "" for _, a in reader.elements for n in ("title", "aria-label") if n in a]
    assert titles and max(map(len, titles)) <= 301


# --- data of charts -----------------------------------------------------------------------------------------------


def test_the_data_of_a_line_chart_comes_back() -> None:
    loss = next(item for section in pages.usual().sections for item in section.items if item.key == "loss")
    assert isinstance(loss, LineChart)
    read = chart_of(page_with(loss), "loss")
    assert [list(zip(one["x"], one["y"], strict=True)) for one in read["series"]] == [
        list(one.points) for one in loss.series
    ]
    assert [(one["name"], one["style"], one["group"]) for one in read["series"]] == [
        ("measured", "line", "measured"),
        ("predicted", "dashed", "predicted"),
        ("evaluations", "dots", "evaluations"),
    ]


def test_the_data_of_columns_and_shares_comes_back() -> None:
    items = {item.key: item for section in pages.usual().sections for item in section.items}
    cost, shares = items["throughput"], items["shares"]
    assert isinstance(cost, BarChart) and isinstance(shares, ShareChart)
    page = page_with(cost, shares)
    assert [tuple(one["values"]) for one in chart_of(page, "throughput")["series"]] == [b.values for b in cost.series]
    parts = chart_of(page, "shares")["series"]
    assert list(zip(*(part["values"] for part in parts), strict=True)) == list(shares.values)


def unpacked(packed: dict[str, str]) -> list[float]:
    found: list[float] = np.frombuffer(base64.b64decode(packed["bytes"]), dtype="<" + packed["type"]).tolist()
    return found


def bars_of(chart: dict[str, Any]) -> list[tuple[int, int, float, float, int, bool]]:
    """What page.js reads, read in the dumbest way."""
    columns = [iter(unpacked(chart[name])) for name in ("gaps", "lengths", "versions", "marks")]
    rows = []
    for learner, count in enumerate(chart["counts"]):
        time, version = 0.0, 0.0
        for _ in range(count):
            gap, length, more, mark = (next(column) for column in columns)
            start, time, version = time + gap, time + gap + length, version + more
            rows.append(
                (learner, int(mark) >> 1, start * chart["tick"], time * chart["tick"], int(version), mark % 2 == 1)
            )
    return rows


def test_the_bars_of_a_timeline_come_back_to_the_microsecond_in_any_order_of_learners() -> None:
    timeline = pages.timeline(4, 50, wide=True)
    rows = timeline.bars
    given = replace(timeline, bars=tuple(sorted(rows, key=lambda row: row[2])))
    read = bars_of(chart_of(page_with(given), "timeline"))
    assert [(*row[:2], *row[4:]) for row in read] == [(*row[:2], *row[4:]) for row in rows]
    assert max(abs(a[at] - b[at]) for a, b in zip(read, rows, strict=True) for at in (2, 3)) <= 0.6e-6


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e4, 1e9, 1e14])
def test_bars_keep_their_place_however_long_the_run(scale: float) -> None:
    timeline = TimelineChart(
        key="t", title="", learners=("a", "b"), whats=("compute",), bars=(
            (0, 0, 0.1 * scale, 0.5 * scale, 70_000, False),
            (0, 0, 0.5 * scale, scale, 3, True),
            (1, 0, 0.0, 0.25 * scale, 2**40, False),
        ),
    )  # fmt: skip
    read = bars_of(chart_of(page_with(timeline), "t"))
    assert [row[4] for row in read] == [70_000, 3, 2**40]
    assert [row[2] / scale for row in read] == pytest.approx([0.1, 0.5, 0.0], abs=1e-2 if scale < 1e-5 else 1e-6)
    assert [row[3] / scale for row in read] == pytest.approx([0.5, 1.0, 0.25], abs=1e-2 if scale < 1e-5 else 1e-6)


def test_a_run_of_many_bars_takes_a_dozen_bytes_for_each() -> None:
    small, large = (len(render(page_with(pages.timeline(8, n)))) for n in (100, 1100))
    assert (large - small) / (8 * 1000 * 2) < 14


def test_what_is_not_finite_is_not_in_the_data() -> None:
    text = render(pages.odd())  # the JSON would not be written with it
    huge = next(chart for chart in data_of(text) if chart["key"] == "l3")
    assert huge["series"][0]["y"] == [1e100, -1e100, 1e-308]
    assert not re.search("NaN|Infinity", text.partition('id="data">')[2].partition("</script>")[0])


# --- numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "form", "words"),
    [
        (None, "seconds", "–"),
        (math.nan, "number", "–"),
        (math.inf, "times", "∞"),
        (-math.inf, "number", "−∞"),
        (10**400, "number", "∞"),
        ("as it is", "number", "as it is"),
        ("", "text", "–"),
        (1234, "number", "1234"),
        (12345, "number", "12,345"),
        (12_345_678, "text", "12,345,678"),
        (0.123456, "number", "0.1235"),
        (-0.5, "number", "−0.5"),
        (1.23e-7, "number", "1.23e−7"),
        (9.9999e20, "number", "1e21"),
        (0, "number", "0"),
        (-0.0, "signed-percent", "0 %"),
        (0.0000123, "seconds", "12.3 µs"),
        (0.0123, "seconds", "12.3 ms"),
        (0.9996, "seconds", "1 s"),
        (119, "seconds", "119 s"),
        (150, "seconds", "2.5 min"),
        (5400, "seconds", "90 min"),
        (9000, "seconds", "2.5 h"),
        (0, "seconds", "0 s"),
        (-0.25, "seconds", "−250 ms"),
        (0.1234, "percent", "12.3 %"),
        (1, "percent", "100 %"),
        (0.004249, "percent", "0.42 %"),
        (0.00001, "percent", "0.001 %"),
        (0.05, "signed-percent", "+5.0 %"),
        (-0.451, "signed-percent", "−45.1 %"),
        (1.8249, "times", "1.82×"),
        (12.34, "times", "12.3×"),
        (123.4, "times", "123×"),
        (0.0123, "times", "0.012×"),
        (1234.5, "joules", "1.23 kJ"),
        (0.5, "joules", "500 mJ"),
        (2.5e6, "joules", "2.5 MJ"),
        (0.01234, "money", "0.0123"),
        (0.5, "money", "0.50"),
        (12.345, "money", "12.35"),
        (1234.5, "money", "1235"),
    ],
)
def test_a_number_is_written_as_a_person_reads_it(value: Any, form: Form, words: str) -> None:
    assert format_value(value, form) == words


def test_a_column_of_alike_numbers_has_one_unit_and_one_of_unlike_numbers_has_many() -> None:
    alike, unlike = (0.5, None, 90.0), (0.001, 90.0)
    unit = column_unit(alike, "seconds")
    assert [format_value(value, "seconds", unit) for value in alike] == ["0.5 s", "–", "90 s"]
    assert column_unit(unlike, "seconds") is None
    assert column_unit((1.0, 2.0), "percent") is None
    assert column_unit((None, 0, math.nan), "joules") is None


def test_units_come_from_large_to_small_and_the_last_fits_everything() -> None:
    for units in UNITS.values():
        assert [unit.size for unit in units] == sorted((unit.size for unit in units), reverse=True)
        assert units[-1].least == 0
