"""The chart read back: what a person would see, measured on the elements of the SVG."""

from __future__ import annotations

import math
import os
import random
import re
import subprocess
import sys
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.charts import Line, Run, labelled_lines, line_chart, svg
from offbeat.charts.labelled_lines import median_curve
from offbeat.charts.svg import text_width
from offbeat.errors import RequestError

SVG = "{http://www.w3.org/2000/svg}"
Element = ElementTree.Element


def draw(*lines: Line, **options: object) -> str:
    given = {"title": "A title", "x_label": "time (s)", "y_label": "test error"} | options
    return line_chart(lines, **given)  # type: ignore[arg-type]  # the options come as a dict of anything


def parts(svg: str, group: str, kind: str) -> list[Element]:
    """The elements of a kind in the groups of a class."""
    root = ElementTree.fromstring(svg)
    return [e for g in root.iter(SVG + "g") if group in g.get("class", "").split() for e in g.iter(SVG + kind)]


def texts(svg: str, group: str) -> list[str]:
    return [element.text or "" for element in parts(svg, group, "text")]


def points(element: Element) -> list[tuple[float, float]]:
    pairs = (pair.split(",") for pair in element.attrib["points"].split())
    return [(float(x), float(y)) for x, y in pairs]


def height_of(svg: str, tick: str) -> float:
    """The pixel of a y tick, from its text, whose baseline is a little lower."""
    (element,) = (e for e in parts(svg, "ticks", "text") if e.text == tick and e.get("text-anchor") == "end")
    return float(element.attrib["y"]) - 0.35 * float(element.attrib["font-size"])


def box(element: Element, size: float) -> tuple[float, float, float, float]:
    left, base = float(element.attrib["x"]), float(element.attrib["y"])
    return left, base - 0.9 * size, left + text_width(element.text or "", size), base + 0.3 * size


def assert_labels_are_apart(svg: str) -> None:
    root = ElementTree.fromstring(svg)
    boxes = [box(label, 14) for label in parts(svg, "labels", "text")]
    boxes += [box(label, 13) for label in parts(svg, "target-label", "text")]
    for one, other in combinations(boxes, 2):
        apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
        assert apart, f"{one} and {other} overlap"
    for left, top, right, bottom in boxes:
        assert left >= 0 and right <= float(root.attrib["width"]), "a label is cut off"
        assert top >= 0 and bottom <= float(root.attrib["height"]), "a label is cut off"


def decay(end: float, floor: float, seed: int, count: int = 40) -> Run:
    rng = random.Random(seed)
    return tuple(
        (end * i / count, (floor + (0.9 - floor) * math.exp(-5 * i / count)) * math.exp(rng.gauss(0, 0.05)))
        for i in range(count + 1)
    )


def strategies(count: int, spread: float, letters: int = 12) -> list[Line]:
    """Curves of three seeds each, all with nearly the same last value; `spread` is how different their times are."""
    return [
        Line(
            f"strategy-{number}".ljust(letters, "x"),
            tuple(decay(100 - spread * number, 0.03, seed) for seed in range(3)),
        )
        for number in range(count)
    ]


# --- the median -------------------------------------------------------------------------------------------------


def test_the_median_is_over_the_last_points_at_or_before_x() -> None:
    runs = (
        ((0.0, 9.0), (2.0, 5.0), (4.0, 1.0)),
        ((0.0, 8.0), (1.0, 6.0), (4.0, 2.0)),
        ((0.0, 7.0), (3.0, 3.0), (4.0, 3.0)),
    )
    # x:      0        1        2        3        4
    # values: 9 8 7    9 6 7    5 6 7    5 6 3    1 2 3
    assert median_curve(runs) == ((0.0, 8.0), (1.0, 7.0), (2.0, 6.0), (3.0, 5.0), (4.0, 2.0))


def test_the_median_of_an_even_number_of_runs_is_between_the_two_in_the_middle() -> None:
    assert median_curve((((0.0, 4.0),), ((0.0, 1.0),))) == ((0.0, 2.5),)


def test_the_median_is_only_where_half_of_the_runs_have_begun_and_not_ended() -> None:
    early, middle, late = ((0.0, 1.0), (1.0, 1.0)), ((1.0, 2.0), (2.0, 2.0)), ((1.0, 3.0), (9.0, 3.0))
    # At 0 one of three has begun. At 2 the first has ended and keeps its value. At 9 only one is left.
    assert median_curve((early, middle, late)) == ((1.0, 2.0), (2.0, 2.0))


def test_a_run_that_stops_at_the_target_does_not_lift_the_median() -> None:
    stopped, slower, slowest = ((0.0, 0.9), (1.0, 0.1)), ((0.0, 0.9), (2.0, 0.3)), ((0.0, 0.9), (2.0, 0.5))
    assert median_curve((stopped, slower, slowest))[-1] == (2.0, 0.3)


def test_the_bold_curve_is_the_median_and_the_thin_ones_are_the_runs() -> None:
    svg = draw(Line("a", (((0.0, 0.8), (10.0, 0.1)), ((0.0, 0.8), (10.0, 0.5)), ((0.0, 0.8), (10.0, 0.2)))), target=0.2)
    (bold,) = parts(svg, "medians", "polyline")
    assert len(parts(svg, "runs", "polyline")) == 3
    assert points(bold)[-1][1] == pytest.approx(height_of(svg, "20 %"), abs=0.2)
    (target,) = parts(svg, "target", "line")
    assert points(bold)[-1][1] == pytest.approx(float(target.attrib["y1"]), abs=0.2)


def test_a_single_run_is_drawn_once_and_bold() -> None:
    svg = draw(Line("a", (((0.0, 0.8), (10.0, 0.1)),)))
    assert len(parts(svg, "medians", "polyline")) == 1
    assert parts(svg, "runs", "polyline") == []


# --- labels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("letters", [12, 28, 60])
@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0, 6.0])
@pytest.mark.parametrize("count", [1, 2, 8, 14])
def test_labels_do_not_overlap_and_are_not_cut_off(count: int, spread: float, letters: int) -> None:
    svg = draw(*strategies(count, spread, letters), target=0.05, target_label="target: 5 %")
    assert len(texts(svg, "labels")) == count
    assert_labels_are_apart(svg)


def test_a_chart_with_very_many_lines_grows_until_they_have_room() -> None:
    svg = draw(*strategies(40, 0.0))
    assert int(ElementTree.fromstring(svg).attrib["height"]) > labelled_lines.HEIGHT
    assert_labels_are_apart(svg)


def test_a_label_stands_beside_the_end_of_its_curve_when_nothing_is_in_the_way() -> None:
    svg = draw(Line("high", (((0.0, 0.9), (10.0, 0.5)),)), Line("low", (((0.0, 0.9), (10.0, 0.05)),)))
    for label, curve in zip(parts(svg, "labels", "text"), parts(svg, "medians", "polyline"), strict=True):
        end = points(curve)[-1]
        assert float(label.attrib["x"]) > end[0]
        assert float(label.attrib["y"]) - 0.35 * 14 == pytest.approx(end[1], abs=0.2)


def test_a_label_that_was_moved_has_a_leader_to_its_curve() -> None:
    svg = draw(*strategies(8, 0.0))
    ends = {points(curve)[-1] for curve in parts(svg, "medians", "polyline")}
    leaders = [points(leader) for leader in parts(svg, "leaders", "polyline")]
    assert {leader[0] for leader in leaders} == ends
    middles = {round(float(label.attrib["y"]) - 0.35 * 14, 1) for label in parts(svg, "labels", "text")}
    assert all(min(abs(leader[-1][1] - middle) for middle in middles) < 0.2 for leader in leaders)


def test_a_curve_that_ends_early_has_its_label_inside_the_plot() -> None:
    svg = draw(Line("short", (((0.0, 0.9), (3.0, 0.1)),)), Line("long", (((0.0, 0.9), (30.0, 0.2)),)))
    short, long = parts(svg, "labels", "text")
    right = points(parts(svg, "medians", "polyline")[1])[-1][0]
    assert float(short.attrib["x"]) < right / 2
    assert float(long.attrib["x"]) > right


def test_a_long_label_is_shortened_and_kept_whole_for_those_who_point_at_it() -> None:
    name = "k-batch-async:4,rate=inverse,and=more"
    (label,) = parts(draw(Line(name, (((0.0, 0.5), (1.0, 0.4)),))), "labels", "text")
    assert label.text == name[:27] + "…"
    assert [title.text for title in label] == [name]


def test_eight_lines_differ_in_colour_and_in_dashes_and_the_ninth_in_dashes() -> None:
    curves = parts(draw(*strategies(16, 0.0)), "medians", "polyline")
    assert len({curve.attrib["stroke"] for curve in curves[:8]}) == 8
    assert len({curve.get("stroke-dasharray") for curve in curves[:8]}) == 8
    assert len({(curve.attrib["stroke"], curve.get("stroke-dasharray")) for curve in curves}) == 16


def test_the_words_are_dark_enough_to_be_read_on_white() -> None:
    def luminance(colour: str) -> float:
        shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    for ink in (*labelled_lines.INKS, svg.INK, svg.SOFT):
        assert 1.05 / (luminance(ink) + 0.05) >= 4.5, ink


# --- axes, target, marks ----------------------------------------------------------------------------------------


def y_names(svg: str) -> list[str]:
    return [e.text or "" for e in parts(svg, "ticks", "text") if e.get("text-anchor") == "end"]


def x_names(svg: str) -> list[str]:
    return [e.text or "" for e in parts(svg, "ticks", "text") if e.get("text-anchor") == "middle"]


def test_a_log_axis_has_round_percents_at_equal_ratios() -> None:
    svg = draw(Line("a", (((0.0, 0.9), (10.0, 0.02)),)))
    assert y_names(svg) == ["2 %", "5 %", "10 %", "20 %", "50 %", "90 %"]
    two, ten, twenty = (height_of(svg, name) for name in ("2 %", "10 %", "20 %"))
    assert ten - twenty == pytest.approx((two - ten) * math.log(2) / math.log(5), abs=0.3)


@pytest.mark.parametrize(
    ("low", "high"), [(0.3, 0.9), (0.1, 0.12), (0.021, 0.49), (1e-5, 0.9), (1e-30, 0.5), (0.05, 0.05)]
)
def test_any_log_axis_has_enough_different_ticks(low: float, high: float) -> None:
    names = y_names(draw(Line("a", (((0.0, high), (10.0, low)),))))
    assert 3 <= len(names) == len(set(names)) <= 11


def test_an_axis_of_values_above_one_is_not_in_percent() -> None:
    assert y_names(draw(Line("a", (((0.0, 20.0), (10.0, 0.2)),)))) == ["0.2", "0.5", "1", "2", "5", "10", "20"]


def test_a_linear_axis_has_equal_steps_from_zero() -> None:
    svg = draw(Line("a", (((0.0, 2.3), (10.0, 0.2)),)), log_y=False)
    assert y_names(svg) == ["0", "0.5", "1.0", "1.5", "2.0"]
    heights = [height_of(svg, name) for name in y_names(svg)]
    steps = [below - above for below, above in pairwise(heights)]
    assert steps == pytest.approx([steps[0]] * 4, abs=0.2)


@pytest.mark.parametrize("end", [0.0031, 0.7, 1.0, 9.9, 47.0, 133.0, 1119.0, 86400.0, 3.3e9])
def test_the_time_axis_has_five_to_eight_round_ticks_from_zero(end: float) -> None:
    names = x_names(draw(Line("a", (((0.0, 0.9), (end, 0.1)),))))
    assert 4 <= len(names) == len(set(names)) <= 8
    assert float(names[0]) == 0


def test_the_target_is_a_dashed_line_with_its_label_and_the_mark_is_a_dot_on_it() -> None:
    svg = draw(Line("a", (((0.0, 0.9), (10.0, 0.02)),), mark=(5.0, 0.1)), target=0.1, target_label="good enough")
    (target,) = parts(svg, "target", "line")
    (mark,) = parts(svg, "marks", "circle")
    assert target.get("stroke-dasharray")
    assert float(target.attrib["y1"]) == pytest.approx(height_of(svg, "10 %"), abs=0.2)
    assert mark.attrib["cy"] == target.attrib["y1"]
    left, right = (
        points(parts(svg, "medians", "polyline")[0])[0][0],
        points(parts(svg, "medians", "polyline")[0])[-1][0],
    )
    assert float(mark.attrib["cx"]) == pytest.approx((left + right) / 2, abs=0.2)
    assert texts(svg, "target-label") == ["good enough"]


def test_a_target_without_a_label_is_called_by_its_value() -> None:
    assert texts(draw(Line("a", (((0.0, 0.9), (1.0, 0.1)),)), target=0.05), "target-label") == ["target 5 %"]


def test_no_target_no_line() -> None:
    svg = draw(Line("a", (((0.0, 0.9), (1.0, 0.1)),)))
    assert parts(svg, "target", "line") == [] and parts(svg, "marks", "circle") == []


def test_a_curve_is_cut_where_the_axis_ends_and_its_label_is_there() -> None:
    line = Line("long", (((0.0, 0.9), (100.0, 0.1), (1000.0, 0.001)),))
    svg = draw(line, Line("late", (((90.0, 0.5),),)), x_max=50)
    assert x_names(svg) == ["0", "10", "20", "30", "40", "50"]
    (curve,) = parts(svg, "medians", "polyline")
    name = next(e for e in ElementTree.fromstring(svg).iter(SVG + "clipPath"))
    assert f"url(#{name.attrib['id']})" in svg
    assert points(curve)[-1][0] == pytest.approx(float(name[0].attrib["x"]) + float(name[0].attrib["width"]), abs=2.1)
    assert texts(svg, "labels") == ["long", "late (begins later)"]
    assert "0.1 %" not in y_names(svg), "what is not seen does not stretch the axis"


# --- what is odd ------------------------------------------------------------------------------------------------


def assert_sound(svg: str) -> None:
    """It parses, and every number in a place is a number inside the picture."""
    root = ElementTree.fromstring(svg)
    for element in root.iter():
        for key in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height", "points"):
            for number in re.split(r"[ ,]", element.get(key, "0")):
                assert -1 <= float(number) <= 2000, (key, number)


def test_values_that_are_not_finite_or_not_positive_do_no_harm() -> None:
    nan, inf = math.nan, math.inf
    run = ((0.0, 0.9), (1.0, nan), (2.0, inf), (3.0, 0.0), (4.0, -1.0), (5.0, -inf), (6.0, 0.1), (inf, 0.1), (nan, 0.1))
    svg = draw(Line("a", (run, run), mark=(nan, 0.1)), Line("b", (((0.0, nan),),)), Line("c", (run,), mark=(1.0, nan)))
    assert_sound(svg)
    (curve, other) = parts(svg, "medians", "polyline")
    heights = [y for _, y in points(curve)]
    assert len(heights) == 6, "the NaN is left out, the rest is kept"
    assert heights[2:5] == [max(heights)] * 3 and heights[1] == min(heights)
    frame = next(ElementTree.fromstring(svg).iter(SVG + "clipPath"))[0]
    top, tall = float(frame.attrib["y"]) + 3, float(frame.attrib["height"]) - 6  # it is a little larger than the plot
    assert (min(heights), max(heights)) == (top, top + tall), "an infinity is at the edge of the plot"
    assert points(other) == points(curve)
    assert texts(svg, "labels") == ["a", "b (not finite)", "c"]
    assert parts(svg, "marks", "circle") == []


def test_a_single_point_is_a_dot_with_its_label() -> None:
    svg = draw(Line("only", (((3.0, 0.4),),)))
    assert_sound(svg)
    assert len(parts(svg, "medians", "circle")) == 1
    assert texts(svg, "labels") == ["only"]


def test_runs_that_never_overlap_in_time_have_no_median_but_a_label() -> None:
    svg = draw(Line("a", tuple(((float(x), 0.5),) for x in range(3))))
    assert_sound(svg)
    assert parts(svg, "medians", "circle") == [] and len(parts(svg, "runs", "circle")) == 3
    assert texts(svg, "labels") == ["a"]


numbers = st.floats() | st.sampled_from([0.0, 1.0, 1e-320, 1e308, -1e308, 0.05])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.lists(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=5), min_size=1, max_size=3), max_size=3
    ),
    st.booleans(),
    numbers,
    numbers | st.none(),
)
def test_whatever_the_numbers_are_the_chart_is_sound_or_refused(
    data: list[list[list[tuple[float, float]]]], log_y: bool, target: float, x_max: float | None
) -> None:
    def order(point: tuple[float, float]) -> float:
        return math.inf if math.isnan(point[0]) else point[0]

    lines = [
        Line(f"line {n}", tuple(tuple(sorted(run, key=order)) for run in runs), mark=runs[0][0])
        for n, runs in enumerate(data)
    ]
    try:
        svg = draw(*lines, log_y=log_y, target=target, x_max=x_max)
    except RequestError:
        return
    assert_sound(svg)
    assert_labels_are_apart(svg)


@pytest.mark.parametrize(
    ("lines", "options", "words"),
    [
        ((), {}, "at least one line"),
        ((Line("ring", ()),), {}, "'ring' has no points"),
        ((Line("ring", ((), ())),), {}, "'ring' has no points"),
        ((Line("ring", (((0.0, math.nan),),)),), {}, "none of the 1 lines has a finite point"),
        ((Line("ring", (((5.0, 0.1),),)),), {"x_max": 3.0}, "up to x_max = 3"),
        ((Line("ring", (((5.0, 0.1),),)),), {"x_max": math.nan}, "must be a finite number"),
        ((Line("ring", (((5.0, 0.1), (4.0, 0.1)),)),), {}, "x decreases"),
    ],
)
def test_nothing_to_draw_is_refused_in_one_line(lines: tuple[Line, ...], options: dict[str, float], words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        draw(*lines, **options)
    assert "\n" not in str(caught.value)


# --- the file ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hostile", ["<script>alert(1)</script>", '"><a href="x">', "a & b", "\x00\x1b[31m\ud800\uffff", "x\ny"]
)
def test_hostile_words_are_only_words(hostile: str) -> None:
    svg = draw(
        Line(hostile, (((0.0, 0.9), (1.0, 0.1)),)),
        title=hostile, subtitle=hostile, x_label=hostile, y_label=hostile, target=0.2, target_label=hostile,
    )  # fmt: skip
    root = ElementTree.fromstring(svg.encode())
    known = {"svg", "title", "desc", "rect", "g", "line", "text", "polyline", "circle", "clipPath"}
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= known
    assert not any(key.startswith("on") or key.endswith("href") for element in root.iter() for key in element.attrib)
    if hostile.isprintable():
        assert texts(svg, "labels") == [hostile]
        assert texts(svg, "heading") == [hostile, hostile]


def test_the_picture_stands_alone_and_says_what_it_is() -> None:
    svg = draw(Line("ring", (((0.0, 0.9), (12.5, 0.03)),), mark=(8.0, 0.05)), target=0.05, subtitle="8 learners")
    root = ElementTree.fromstring(svg)
    assert (root.get("role"), root.get("width"), root.get("height")) == ("img", "900", "520")
    assert root.get("viewBox") == "0 0 900 520"
    assert [root[0].tag, root[0].text, root[1].tag] == [SVG + "title", "A title", SVG + "desc"]
    assert root[1].text == (
        "Line chart of test error against time (s). Dashed line: target 5 %. ring: 3 % at x = 12.5, marked at x = 8."
    )
    assert (root[2].get("width"), root[2].get("height"), root[2].get("fill")) == ("900", "520", "#ffffff")
    assert texts(svg, "heading") == ["A title", "8 learners"]
    assert texts(svg, "axis-labels") == ["test error", "time (s)"]
    assert "http" not in svg.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert "<style" not in svg and "<script" not in svg


def test_the_same_input_gives_the_same_bytes() -> None:
    program = (
        "from offbeat.charts import Line, line_chart\n"
        "import sys\n"
        "lines = [Line(f'a{n}', (((0.0, 0.9), (1.0 + n / 7, 0.1 / (n + 1))),)) for n in range(9)]\n"
        "sys.stdout.write(line_chart(lines, title='t', x_label='x', y_label='y', target=0.05))\n"
        "assert not {'torch', 'numpy'} & set(sys.modules)\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            check=True,
            timeout=60,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_a_long_curve_is_thinned_out_and_a_run_keeps_its_spike() -> None:
    run = tuple((float(i), 0.5) for i in range(50_000))
    spiked = (*run[:31_234], (31_234.0, 0.9), *run[31_235:])
    svg = draw(Line("a", (spiked, run, run)))
    assert len(svg) < 40_000
    assert not re.search(r'[ ,"]-?\d+\.\d\d+[ ,"]', svg), "tenths of a pixel are enough"
    runs = [points(element) for element in parts(svg, "runs", "polyline")]
    (median,) = (points(element) for element in parts(svg, "medians", "polyline"))
    assert all(len(curve) <= labelled_lines.POINTS for curve in (*runs, median))
    assert min(y for _, y in runs[0]) < min(y for _, y in runs[1]) - 50
    assert (median[0][0], median[-1][0]) == (runs[1][0][0], runs[1][-1][0]), "both ends are kept"
