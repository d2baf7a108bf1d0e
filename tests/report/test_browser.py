"""Pages in a real browser: what is drawn, what is said at the pointer, what the keys do, what is never loaded.

One browser for all tests, the system's chromium; nothing is downloaded. A page's policy forbids strings as code, so
waiting is for elements. A window is 1280 or 390 wide: a desk and a hand.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from offbeat import number_format
from offbeat.charts import BarChart, Bars, LineChart, Series
from offbeat.report.page import render
from offbeat.report.page_model import Page, Table, TimelineChart
from report import pages
from report.pages import Watched, open_file, page_of

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install 'offbeat[browser]'")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the PATH")

DRAWN = "html[data-drawn]"
FRAME = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
CUT = "(all) => all.map((n) => n.scrollHeight - n.clientHeight > 2 && getComputedStyle(n).overflow === 'hidden')"
# All kinds of text on a page.
READ = (
    "h1", ".subtitle", ".contents a", ".contents a[aria-current]", ".summary p", ".problems h2", ".problems li", "h2",
    "section > p", "caption", "thead th", "tbody td", ".note", ".help summary", ".entry", ".plot svg text", "svg .name",
    "svg .halo", ".tools button", ".said", "#buttons button",
)  # fmt: skip
Open = Callable[..., Any]  # a Page of offbeat, and how the browser is set up -> a Page of playwright


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-background-networking", "--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def watched(browser: Any) -> Watched:
    return Watched(browser)


@pytest.fixture
def show(watched: Watched, tmp_path: Path) -> Iterator[Open]:
    """Opens a page, once in a test, and at the end complains about anything it said or asked for but itself."""
    watched.said.clear()
    watched.asked.clear()
    tab = watched.tab
    file = tmp_path / "page.html"

    def open_(page: Page, *, width: int = 1280, height: int = 900, scheme: str = "light", wait: bool = True) -> Any:
        tab.set_viewport_size({"width": width, "height": height})
        tab.emulate_media(media="screen", color_scheme=scheme, reduced_motion="reduce")
        tab.mouse.move(0, 0)
        open_file(tab, page, file)
        if wait:
            tab.wait_for_selector(DRAWN, state="attached")
        return tab

    yield open_
    assert watched.said == []
    # A favicon that is empty data is no request to anyone.
    assert [url for url in watched.asked if url != "data:,"] == [file.as_uri()]


def hover(tab: Any, figure: Any, part: str, x: float, y: float) -> str:
    """The words at the pointer, at a place of the figure's picture, in pixels."""
    figure.scroll_into_view_if_needed()
    tab.evaluate(FRAME)  # what is said goes when the page scrolls
    box = figure.locator(part).first.bounding_box()
    tab.mouse.move(box["x"] + x, box["y"] + y)
    return words(tab)


def words(tab: Any) -> str:
    tip = tab.locator(".tip")
    return "\n".join(line for line in tip.inner_text().split("\n") if line.strip()) if tip.is_visible() else ""


def wait(tab: Any, done: Callable[[], bool]) -> None:
    for _ in range(100):
        if done():
            return
        tab.wait_for_timeout(10)
    raise AssertionError("it did not come within a second")


def pixels(figure: Any) -> str:
    found: str = figure.locator("canvas").first.evaluate("canvas => canvas.toDataURL()")
    return found


def overflow(tab: Any) -> int:
    found: int = tab.evaluate("document.scrollingElement.scrollWidth - document.scrollingElement.clientWidth")
    return found


def centre(figure: Any, selector: str) -> tuple[float, float]:
    """Of an element of a picture, in the pixels of the picture."""
    picture = figure.locator(".plot > svg.wide").bounding_box()
    box = figure.locator(selector).first.bounding_box()
    return box["x"] + box["width"] / 2 - picture["x"], box["y"] + box["height"] / 2 - picture["y"]


# --- all pages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("make", [pages.usual, pages.hostile, pages.odd])
def test_every_chart_is_drawn_and_nothing_is_wider_than_the_window(show: Open, make: Any, width: int) -> None:
    tab = show(make(), width=width)
    charts = [item for section in make().sections for item in section.items if not isinstance(item, Table)]
    found = tab.locator("figure.chart").evaluate_all(
        """(figures) => figures.map((figure) => [
          figure.dataset.drawn,
          figure.querySelectorAll(".plot > svg .series, .plot canvas").length,
          figure.querySelectorAll(".empty").length,
        ])"""
    )  # fmt: skip
    assert len(found) == len(charts)
    assert all(drawn == "yes" and (parts > 0) != (empty > 0) for drawn, parts, empty in found)
    assert sum(empty for _, _, empty in found) == (6 if make is pages.odd else 0)
    assert overflow(tab) <= 0
    assert "NaN" not in tab.locator("main").inner_html()


def test_hostile_names_run_nothing_and_are_shown_as_they_are(show: Open) -> None:
    tab = show(pages.hostile())
    for kind in ("line", "bar", "share", "timeline"):
        figure = tab.locator(f"figure.{kind}").first
        figure.scroll_into_view_if_needed()
        tab.mouse.move(0, 0)
        box = figure.locator(".plot > svg, canvas").first.bounding_box()
        tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
        tip = tab.locator(".tip").bounding_box()
        assert tip is not None and tip["width"] <= 400 and tip["height"] <= 700, kind
        assert tip["x"] >= 0 and tip["x"] + tip["width"] <= 1280
    assert tab.evaluate("typeof window.pwned") == "undefined"
    assert tab.locator("main script, main img").count() == 0
    assert tab.locator("h1").inner_text() == pages.HOSTILE[0]
    assert tab.locator("figure.line .entry bdi").first.inner_text() == pages.HOSTILE[0]


def test_numbers_are_written_alike_in_python_and_in_the_browser(show: Open) -> None:
    numbers = [0.0, 0.5, 1.5, 2.5, 0.125, 1.125, 999.5, 0.9995, 0.99949, 1234.5, 9999.5, 10000, 12345.678, 1e15]
    numbers += [m * 10.0**e for e in range(-12, 19) for m in (1, 1.005, 2.675, 3.14159, 9.9949, 9.995, 9.9996)]
    numbers += [1e-310, 1e-300, 1e300, 1.7e308, 1.125e15, 119.99, 120, 7199, 7200, 99.95e-2, 0.995e-2]
    numbers += [-number for number in numbers]
    tab = show(pages.known())
    for form in ("number", "seconds", "percent", "signed-percent", "times", "money", "joules"):
        # The page's `writing` is no property of its window; a function of the test may name it all the same.
        there = tab.evaluate("([numbers, form]) => numbers.map((one) => writing.write(one, form))", [numbers, form])
        assert there == [number_format.format_value(number, form) for number in numbers], form


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(show: Open, scheme: str) -> None:
    tab = show(pages.usual(), scheme=scheme)
    found = tab.evaluate(
        """(selectors) => {
          const parts = (colour) => (colour.match(/[\\d.]+/g) || []).map(Number);
          const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
          const light = ([r, g, b]) => 0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
          const ground = (node) => {
            for (let at = node; at; at = at.parentElement) {
              const colour = parts(getComputedStyle(at).backgroundColor);
              if (colour.length === 3 || colour[3] > 0.5) return colour;
            }
            return [255, 255, 255];
          };
          return selectors.map((selector) => {
            const node = document.querySelector(selector);
            const style = getComputedStyle(node);
            const [a, b] = [light(parts(node.ownerSVGElement ? style.fill : style.color)), light(ground(node))];
            return [selector, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), parseFloat(style.fontSize)];
          });
        }""",
        [*READ],
    )
    assert len(found) == len(READ)
    assert [row for row in found if row[1] < 4.5 or row[2] < 12] == []
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")


def test_the_button_changes_the_theme_and_the_canvas_with_it(show: Open) -> None:
    tab = show(pages.known())
    figure = tab.locator("figure.timeline")
    before = pixels(figure)
    button = tab.locator("#buttons button")
    grounds = []
    for name in ("light", "dark", "auto"):
        button.click()
        assert button.inner_text() == f"theme: {name}"
        grounds.append(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert (pixels(figure) == before) == (name != "dark")
    assert grounds[0] == grounds[2] != grounds[1]


def test_printing_draws_every_chart_in_light(browser: Any, tmp_path: Path) -> None:
    watched = Watched(browser, color_scheme="dark")
    watched.context.add_init_script(
        "window.requestIdleCallback = () => 0; window.IntersectionObserver = class { observe() {} unobserve() {} };"
    )  # nothing comes near the window, and there is never time
    tab = watched.tab
    open_file(tab, pages.usual(), tmp_path / "page.html")
    missing = tab.locator("figure:not([data-drawn])")
    corner = """() => {
      const copy = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
      copy.drawImage(document.querySelector("canvas"), 0, 0);
      return [...copy.getImageData(0, 0, 1, 1).data];
    }"""
    assert missing.count() == 5
    tab.evaluate("() => dispatchEvent(new Event('beforeprint'))")
    assert missing.count() == 0
    assert tab.evaluate(corner) == [247, 248, 250, 255]
    assert tab.locator(".help dl").is_visible()
    tab.evaluate("() => dispatchEvent(new Event('afterprint'))")
    assert tab.evaluate(corner) == [24, 29, 36, 255]
    assert not tab.locator(".help dl").is_visible()
    watched.context.close()
    assert watched.said == []


def test_on_paper_there_are_no_buttons_and_no_chart_is_cut(show: Open) -> None:
    tab = show(pages.usual(), scheme="dark")
    tab.emulate_media(media="print", color_scheme="dark")
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    hidden = tab.locator("#buttons, .tools, .contents")
    assert hidden.count() == 3 and not any(hidden.nth(at).is_visible() for at in range(3))
    assert tab.locator("figure.chart").first.evaluate("node => getComputedStyle(node).breakInside") == "avoid"


@pytest.mark.parametrize("make", [pages.wide, pages.usual, pages.hostile])
def test_on_paper_no_table_and_no_text_is_cut(show: Open, make: Any) -> None:
    tab = show(make(), width=688)  # A4 without its margins
    tab.emulate_media(media="print")
    seen = [one for one in tab.locator("table").all() if one.is_visible()]
    assert len(seen) == {"wide": 4, "usual": 2, "hostile": 1}[make.__name__]
    assert max(one.evaluate("node => node.scrollWidth") for one in seen) <= 688
    assert not any(tab.locator("bdi").evaluate_all(CUT))
    assert overflow(tab) <= 0


def test_cells_are_whole_in_a_narrow_window_and_a_very_long_one_opens_at_a_tap(show: Open) -> None:
    tab = show(pages.wide(), width=390)
    cells = tab.locator("#table-why tbody td bdi")
    assert cells.all_text_contents() == [pages.WHY, pages.WHY * 10]
    assert cells.evaluate_all(CUT) == [False, True]
    tab.locator("#table-why .long summary").click()
    assert cells.evaluate_all(CUT) == [False, False]


def test_a_tap_on_another_chart_shows_what_that_one_says(browser: Any, tmp_path: Path) -> None:
    watched = Watched(browser, has_touch=True, viewport={"width": 390, "height": 900})
    tab = watched.tab
    open_file(tab, pages.known(), tmp_path / "page.html")
    tab.wait_for_selector(DRAWN, state="attached")
    heads = {"loss": "epoch", "throughput": "k-", "shares": "ring", "timeline": "learner"}
    for key in (*heads, "loss"):
        figure = tab.locator(f"#chart-{key}")
        figure.scroll_into_view_if_needed()
        tab.evaluate(FRAME)
        box = figure.locator(".plot").bounding_box()
        tab.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + 20)
        tab.evaluate(FRAME)
        assert words(tab).startswith(heads[key]), key
    watched.context.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_without_javascript_tables_and_charts_are_there_and_the_page_says_what_is_missing(
    browser: Any, tmp_path: Path, width: int
) -> None:
    watched = Watched(browser, java_script_enabled=False, viewport={"width": width, "height": 900})
    tab = watched.tab
    open_file(tab, pages.usual(), tmp_path / "page.html")
    assert tab.locator("noscript p").is_visible()
    assert "need JavaScript" in tab.locator("noscript p").inner_text()
    assert tab.get_by_role("cell", name="3.77 min").is_visible()
    figures = tab.locator("figure.chart:not(.timeline)")
    assert figures.count() == 5
    for at in range(5):  # one picture of each, that of the place's width
        pictures = figures.nth(at).locator(".plot > svg")
        assert [one.get_attribute("class") for one in pictures.all() if one.is_visible()] == [
            "wide" if width > 500 else "narrow"
        ]
        assert figures.nth(at).locator(".entry").first.is_visible()
    watched.context.close()
    assert watched.said == []


def test_contents_are_folded_on_a_narrow_window_and_lead_to_sections(show: Open) -> None:
    tab = show(pages.usual(), width=390)
    link = tab.get_by_role("link", name="How it learned")
    assert not link.is_visible()
    tab.locator(".contents summary").click()
    link.click()
    assert tab.url.endswith("#section-learning")
    assert not link.is_visible()


# --- lines --------------------------------------------------------------------------------------------------------


def test_a_line_chart_says_the_values_at_the_nearest_x(show: Open) -> None:
    tab = show(pages.known())
    figure = tab.locator("#chart-loss")
    figure.scroll_into_view_if_needed()
    x, y = centre(figure, ".wide .series:nth-child(3) .mark")  # the dots begin at 1 and end at 3
    box = figure.locator(".wide .series:nth-child(3) .mark").bounding_box()
    left = x - box["width"] / 2
    assert (
        hover(tab, figure, ".plot > svg.wide", left + 12, y)
        == "epoch: 1\nmeasured\n1.25\npredicted\n1.3\nevaluations\n1.4"
    )
    assert hover(tab, figure, ".plot > svg.wide", x, y) == "epoch: 2\nmeasured\n0.8125\npredicted\n0.9"
    tab.mouse.move(2, 2)
    assert words(tab) == ""


def test_the_legend_hides_shows_and_isolates_series(show: Open) -> None:
    tab = show(pages.known())
    figure = tab.locator("#chart-loss")
    entries = figure.locator(".legend .entry")
    series = figure.locator(".wide .series:not([hidden])")
    reset = figure.get_by_role("button", name="reset")
    assert (entries.count(), series.count(), reset.is_visible()) == (3, 3, False)
    entries.nth(1).click()
    assert (series.count(), entries.nth(1).get_attribute("aria-pressed"), reset.is_visible()) == (2, "false", True)
    entries.nth(1).click()
    assert (series.count(), entries.nth(1).get_attribute("aria-pressed"), reset.is_visible()) == (3, "true", False)
    entries.nth(0).dblclick()
    assert series.count() == 1 and "c0" in series.first.get_attribute("class")
    reset.click()
    assert (series.count(), reset.is_visible()) == (3, False)
    entries.nth(2).focus()
    tab.keyboard.press("Enter")
    assert series.count() == 2


def test_series_of_a_group_share_a_colour_and_an_entry_and_a_level_has_its_words(show: Open) -> None:
    tab = show(pages.usual())
    figure = tab.locator("#chart-error-by-time")
    assert figure.locator(".entry").all_inner_texts() == list(pages.STRATEGIES)
    assert figure.locator(".wide .series:not([hidden])").count() == 15
    assert figure.locator(".wide .level").count() == figure.locator(".wide").get_by_text("target: 8%").count() == 1
    figure.locator(".entry").first.click()
    assert figure.locator(".wide .series:not([hidden])").count() == 12
    assert figure.locator(".wide .series.c0:not([hidden])").count() == 0


def test_of_a_line_with_few_points_each_is_marked_and_of_a_long_one_some(show: Open) -> None:
    few, many = (Series(f"{n}", tuple((float(x) / n, 1.0) for x in range(n + 1))) for n in (29, 30))
    tab = show(page_of(LineChart(key="l", title="", x_label="", y_label="", series=(few, many))))
    count = "(all) => all.map((node) => node.getAttribute('d').split('Z').length - 1)"
    marks = tab.locator(".wide .series .mark").evaluate_all(count)
    assert marks[0] == 30 and 3 < marks[1] < 15


def test_keys_walk_along_a_line_chart(show: Open) -> None:
    tab = show(pages.known())
    tab.locator("#chart-loss .plot").focus()
    heads = []
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft", "End", "Home"):
        tab.keyboard.press(key)
        heads.append(words(tab).split("\n")[0])
    assert heads == [f"epoch: {n}" for n in (0, 1, 2, 1, 4, 0)]
    tab.keyboard.press("Escape")
    assert words(tab) == ""


def test_a_drag_zooms_a_line_chart_and_a_double_click_shows_all_again(show: Open) -> None:
    tab = show(pages.known())
    figure = tab.locator("#chart-loss")
    figure.scroll_into_view_if_needed()
    picture = figure.locator(".plot > svg.wide")
    whole = picture.inner_html()
    box = picture.bounding_box()
    tab.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 100)
    tab.mouse.down()
    tab.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 100)
    tab.mouse.up()
    ticks = picture.locator("text").all_text_contents()
    assert "1.8" in ticks and "4.0" not in ticks
    assert figure.get_by_role("button", name="reset").is_visible()
    tab.locator("#chart-loss .plot").focus()
    tab.keyboard.press("Home")
    assert words(tab).split("\n")[0] == "epoch: 2"  # the only one that is seen
    tab.keyboard.press("Escape")
    tab.mouse.dblclick(box["x"] + box["width"] / 2, box["y"] + 100)
    tab.mouse.move(0, 0)
    tab.keyboard.press("Escape")
    assert picture.inner_html() == whole


def test_many_points_are_thinned_to_what_a_screen_shows(show: Open) -> None:
    points = tuple((float(n), 1.0 if n == 54_321 else 0.1) for n in range(100_000))
    chart = LineChart(key="many", title="", x_label="", y_label="", series=(Series("a", points),))
    tab = show(page_of(chart))
    path = tab.locator(".wide .curve").get_attribute("points")
    assert path.count(" ") < 4 * 1280
    heights = [float(part.split(",")[1]) for part in path.split()]
    assert sum(height < max(heights) - 100 for height in heights) == 1  # the one point that is high is still there


# --- columns and shares -------------------------------------------------------------------------------------------


def test_columns_say_their_values_and_a_dash_where_there_is_none(show: Open) -> None:
    tab = show(pages.known())
    figure = tab.locator("#chart-throughput")
    figure.scroll_into_view_if_needed()
    x, y = centre(figure, ".wide .series.c0 .column")
    assert hover(tab, figure, ".plot > svg.wide", x, y) == "ring\nmeasured\n812\npredicted\n820"
    figure.locator(".plot").focus()
    tab.keyboard.press("End")
    assert words(tab) == "downpour:push=4,fetch=2\nmeasured\n–\npredicted\n1500"
    assert figure.locator(".wide .series.c0 .column").count() == 4
    figure.locator(".entry").first.click()
    assert figure.locator(".wide .series.c0:not([hidden])").count() == 0


def test_a_part_of_the_time_has_its_colour_among_columns_too(show: Open) -> None:
    names = ("total", "waiting", "Thrown away", "computing", "other runs")
    series = tuple(Bars(name, (1.0,)) for name in names)
    tab = show(page_of(BarChart(key="b", title="", x_label="", y_label="", categories=("a",), series=series)))
    kinds = tab.locator(".wide .series").evaluate_all("(all) => all.map((n) => n.classList[1])")
    assert kinds == ["c6", "waiting", "thrown", "computing", "c7"]


def test_shares_are_labelled_where_they_fit_and_all_said_at_the_pointer(show: Open) -> None:
    tab = show(pages.known())
    figure = tab.locator("#chart-shares")
    labels = figure.locator(".wide .inside").all_text_contents()
    assert "61.0 %" in labels and "2.0 %" not in labels
    x, y = centre(figure, ".wide .series.computing .column")
    said = hover(tab, figure, ".plot > svg.wide", x, y).split("\n")
    assert said[:5] == ["ring", "computing", "61.0 %", "thrown away", "0 %"]
    assert said[-4:] == ["evaluating", "2.0 %", "other", "0 %"]


# --- the timeline -------------------------------------------------------------------------------------------------


def window(figure: Any) -> tuple[float, float]:
    """The times that the timeline says it shows."""
    found = re.match(r"([\d.,]+) s to ([\d.,]+) s of", figure.locator(".said").inner_text())
    assert found is not None
    return float(found[1].replace(",", "")), float(found[2].replace(",", ""))


def bar_words(tab: Any, figure: Any, time_s: float, learner: int) -> str:
    """What is said at a time of a learner's row, of rows that are 30 high; 'learner 0' and a gap stand left of them."""
    start, end = window(figure)
    left, wide = figure.locator(".overview").evaluate("node => [node.offsetLeft, node.offsetWidth]")
    return hover(tab, figure, "canvas", left + (time_s - start) / (end - start) * wide, 30 * learner + 15)


def test_the_timeline_begins_where_bars_can_be_seen_and_says_what_each_is(show: Open) -> None:
    tab = show(pages.known())
    figure = tab.locator("figure.timeline")
    assert figure.get_attribute("data-mode") == "bars"
    assert window(figure)[0] == 0 and 4 < window(figure)[1] < 15  # of about 90 s
    # Learner 0 computes for 0.2 s and waits for 0.05 s, ever and ever.
    assert bar_words(tab, figure, 2.6, 0) == "learner 0: compute\nversion\n10\nfrom\n2.500 s\nto\n2.700 s\ntook\n200 ms"
    assert bar_words(tab, figure, 2.725, 0).startswith("learner 0: wait\nversion\n10\nfrom\n2.7000 s\nto\n2.7500 s")
    _, _, start, end, _, _ = next(bar for bar in pages.timeline(4, 200).bars if bar[5])
    said = bar_words(tab, figure, (start + end) / 2, 3)
    assert said.startswith("learner 3: compute\nversion\n0\n") and said.endswith("cancelled\nthrown away")


def test_buttons_wheel_and_keys_zoom_and_move_the_timeline(show: Open) -> None:
    tab = show(pages.known())
    figure = tab.locator("figure.timeline")
    figure.scroll_into_view_if_needed()
    first = pixels(figure)
    said = figure.locator(".said")

    def act(do: Callable[[], Any]) -> tuple[float, float]:
        before = said.inner_text()
        do()
        wait(tab, lambda: said.inner_text() != before)
        return window(figure)

    start = window(figure)
    closer = act(figure.get_by_role("button", name="+").click)
    assert closer[1] - closer[0] == pytest.approx((start[1] - start[0]) / 2, rel=0.02)
    assert pixels(figure) != first
    whole = act(figure.get_by_role("button", name="all").click)
    assert whole[0] == 0 and whole[1] > 80
    assert act(figure.get_by_role("button", name="start").click) == start
    assert pixels(figure) == first
    figure.locator(".plot").focus()
    right = act(lambda: tab.keyboard.press("ArrowRight"))
    assert right[0] == pytest.approx((start[1] - start[0]) * 0.2, abs=0.02)
    nearer = act(lambda: tab.keyboard.press("+"))
    assert nearer[1] - nearer[0] == pytest.approx((start[1] - start[0]) / 2, rel=0.02)
    assert act(lambda: tab.keyboard.press("Home")) == start
    box = figure.locator("canvas").first.bounding_box()
    tab.mouse.move(box["x"] + 500, box["y"] + 50)
    scrolled = tab.evaluate("scrollY")
    tab.keyboard.down("Control")
    wheeled = act(lambda: tab.mouse.wheel(0, -100))
    tab.keyboard.up("Control")
    assert wheeled[1] - wheeled[0] < start[1] - start[0] and tab.evaluate("scrollY") == scrolled
    tab.mouse.down()
    dragged = act(lambda: tab.mouse.move(box["x"] + 400, box["y"] + 50))
    tab.mouse.up()
    assert dragged[0] > wheeled[0]
    overview = figure.locator(".overview").bounding_box()
    jumped = act(lambda: tab.mouse.click(overview["x"] + overview["width"] / 2, overview["y"] + 5))
    assert sum(jumped) / 2 == pytest.approx(whole[1] / 2, rel=0.02)


def test_timelines_of_a_page_begin_with_the_same_stretch_however_long_the_runs(show: Open) -> None:
    one, short = pages.timeline(4, 200), pages.timeline(4, 10, key="short")
    slow = tuple((who, what, 3 * start, 3 * end, at, thrown) for who, what, start, end, at, thrown in one.bars)
    tab = show(page_of(one, replace(one, key="slow", bars=slow), short))
    windows = [window(tab.locator(f"#chart-{key}")) for key in ("timeline", "slow", "short")]
    assert windows[0] == windows[1] == windows[2] and windows[0][1] > 15
    tab.locator("#chart-short").get_by_role("button", name="+").click()
    assert bar_words(tab, tab.locator("#chart-timeline"), 2.6, 0).startswith("learner 0: compute\nversion\n10\n")


def test_the_legend_of_a_timeline_hides_and_shows_kinds_of_bars(show: Open) -> None:
    tab = show(pages.known())
    figure = tab.locator("figure.timeline")
    first = pixels(figure)
    entry = figure.get_by_role("button", name="waiting")
    entry.click()
    assert pixels(figure) != first and bar_words(tab, figure, 2.725, 0) == ""
    assert bar_words(tab, figure, 2.6, 0).startswith("learner 0: compute")
    figure.get_by_role("button", name="all").click()
    tab.wait_for_selector("figure.timeline[data-mode=shares]")
    assert entry.get_attribute("aria-pressed") == "false"
    figure.get_by_role("button", name="start").click()
    tab.wait_for_selector("figure.timeline[data-mode=bars]")
    figure.get_by_role("button", name="reset").click()
    assert pixels(figure) == first


def test_a_plain_wheel_over_the_timeline_scrolls_the_page(show: Open) -> None:
    tab = show(pages.known(), height=400)
    figure = tab.locator("figure.timeline")
    figure.scroll_into_view_if_needed()
    before, scrolled = window(figure), tab.evaluate("scrollY")
    box = figure.locator("canvas").first.bounding_box()
    tab.mouse.move(box["x"] + 300, box["y"] + 30)
    tab.mouse.wheel(0, -200)
    wait(tab, lambda: tab.evaluate("scrollY") < scrolled)
    assert window(figure) == before


def test_a_bar_that_is_wider_than_its_pixel_has_all_of_it_among_shares_too(show: Open) -> None:
    """First one bar of 100 s, then 4000 bars in 100 s, which are waiting and computing by turns."""
    starts = (0.0, *(100 + n / 40 for n in range(4001)))
    bars = tuple((0, at % 2, *ends, 0, False) for at, ends in enumerate(pairwise(starts)))
    timeline = TimelineChart(key="t", title="", learners=("a",), whats=("compute", "wait"), bars=bars)
    tab = show(page_of(timeline))
    figure = tab.locator("figure.timeline")
    figure.get_by_role("button", name="all").click()
    tab.wait_for_selector("figure.timeline[data-mode=shares]")
    assert bar_words(tab, figure, 50, 0).split("\n")[1:] == ["computing", "100 %", "waiting", "0 %"]
    part = float(bar_words(tab, figure, 150, 0).split("\n")[2][:-1])
    assert part == pytest.approx(50, abs=10)


def test_a_long_run_is_small_opens_in_time_and_shows_shares_from_afar(show: Open) -> None:
    """The promise: 320,000 bars, less than 15 MB, drawn within 3 seconds of opening."""
    page = pages.large()
    assert len(render(page).encode()) < 15e6
    tab = show(page)
    assert tab.evaluate("performance.getEntriesByName('all charts drawn')[0].startTime") < 3000
    figure = tab.locator("figure.timeline").first
    assert figure.get_attribute("data-mode") == "bars"
    figure.get_by_role("button", name="all").click()
    tab.wait_for_selector("figure.timeline[data-mode=shares]")
    # Learner 0 computes 4 parts of 5: in a pixel, about 46 minibatches, a little more or less.
    said = bar_words(tab, figure, window(figure)[1] / 10, 0).split("\n")
    assert (said[1], said[3]) == ("computing", "waiting")
    assert float(said[2][:-1]) == pytest.approx(80, abs=1) and float(said[4][:-1]) == pytest.approx(20, abs=1)
    assert "zoom in" in figure.locator(".said").inner_text()


def test_ticks_have_one_unit_and_stay_apart_however_deep_the_zoom(show: Open) -> None:
    tab = show(pages.known())
    ticks = "([form, low, high, most]) => writing.axis(form, low, high, most).map((tick) => tick.text)"
    assert tab.evaluate(ticks, ["seconds", 0, 9000, 5]) == ["0", "0.5 h", "1.0 h", "1.5 h", "2.0 h", "2.5 h"]
    assert tab.evaluate(ticks, ["seconds", 7200, 7200.5, 5]) == [f"7200.{n} s" for n in range(6)]
    assert tab.evaluate(ticks, ["seconds", 3, 3.004, 4]) == [f"{n} ms" for n in range(3000, 3005)]
    assert tab.evaluate(ticks, ["percent", -0.5, 0.5, 5]) == ["−40 %", "−20 %", "0 %", "20 %", "40 %"]
    assert tab.evaluate(ticks, ["number", 0, 100000, 2]) == ["0", "50,000", "100,000"]
