"""The grid and the picture."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from offbeat.errors import RequestError, ScheduleError
from offbeat.schedules import ALGORITHMS, Schedule, Transfer, algorithms, build, grid, svg
from offbeat.schedules.grid import Highlight

SVG = "{http://www.w3.org/2000/svg}"


def test_the_grid_shows_what_arrives_where() -> None:
    assert grid(build("halving-doubling", ranks=4)).splitlines() == [
        "step  rank 0    rank 1    rank 2    rank 3",
        "   1  +c0-1 <1  +c2-3 <0  +c0-1 <3  +c2-3 <2",
        "   2  +c0 <2    +c2 <3    +c1 <0    +c3 <1",
        "   3  =c1 <2    =c3 <3    =c0 <0    =c2 <1",
        "   4  =c2-3 <1  =c0-1 <0  =c2-3 <3  =c0-1 <2",
    ]


def test_sources_that_send_the_same_share_a_word() -> None:
    assert grid(build("central", ranks=5)).splitlines()[1].split() == ["1", "+c0", "<1-4", ".", ".", ".", "."]


def test_a_large_grid_is_cut_and_says_so_but_keeps_its_mark() -> None:
    schedule = build("ring", ranks=40)
    cut = grid(schedule, mark=Highlight(60, 33)).splitlines()
    assert cut[-2:] == ["(steps 53 to 68 of 78)", "(ranks 29 to 36 of 40)"]
    assert sum("✗" in line for line in cut) == 1


def test_one_rank_has_nothing_to_do() -> None:
    assert grid(build("ring", ranks=1)).splitlines()[-1] == "(nothing to do)"


@pytest.mark.parametrize(("collective", "name"), list(ALGORITHMS))
def test_every_schedule_is_drawn_with_one_arrow_a_transfer_and_one_cell_a_place(collective: str, name: str) -> None:
    for ranks in (1, 2, 5, 6):
        schedule = build(algorithms(collective)[name].lines(ranks)[0], ranks=ranks, collective=collective)
        root = ET.fromstring(svg(schedule))
        assert len(root.findall(f"{SVG}path")) == 2 * len(schedule.steps.table)  # a line and its tip
        cells = ranks * schedule.chunks * (len(schedule.steps) + 1)
        assert len(root.findall(f"{SVG}rect")) == cells + 1  # and the paper


def test_everything_drawn_is_inside_the_picture() -> None:
    root = ET.fromstring(svg(build("torus:4x2", ranks=8)))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for shape in root.iter(f"{SVG}rect"):
        if "x" in shape.attrib:
            assert float(shape.attrib["x"]) >= 0 and float(shape.attrib["x"]) + float(shape.attrib["width"]) <= width
            assert 0 <= float(shape.attrib["y"]) <= height
    for path in root.iter(f"{SVG}path"):
        for x, y in re.findall(r"[MC ]([0-9.]+) ([0-9.]+)", path.attrib["d"]):
            assert 0 <= float(x) <= width and 0 <= float(y) <= height


def test_a_long_title_is_inside_too_and_the_legend_names_only_what_is_there() -> None:
    line = "hierarchical:2x2,scatter,inner=halving,outer=halving-doubling"
    root = ET.fromstring(svg(build(line, ranks=4)))
    assert float(root.attrib["width"]) > 70 + 10 * len(line)
    broadcast = svg(build("tree", ranks=2, collective="broadcast"))
    assert "dashed: overwritten" in broadcast and "solid: added" not in broadcast
    assert "2 ranks, 1 chunk, 1 step, proved" in broadcast


def test_a_place_is_pale_until_it_holds_what_is_wanted() -> None:
    root = ET.fromstring(svg(build("tree", ranks=2, collective="broadcast")))
    cells = [cell.attrib["fill-opacity"] for cell in root.findall(f"{SVG}rect") if "y" in cell.attrib]
    assert cells == ["1.00", "0.12", "1.00", "1.00"]  # the root's is right from the start, the other's is not


def test_the_last_row_of_an_all_reduce_is_full() -> None:
    root = ET.fromstring(svg(build("ring", ranks=3)))
    cells = [cell for cell in root.findall(f"{SVG}rect") if "y" in cell.attrib]
    last = max(float(cell.attrib["y"]) for cell in cells)
    assert {cell.attrib["fill-opacity"] for cell in cells if float(cell.attrib["y"]) == last} == {"1.00"}


def test_a_wrong_schedule_is_not_drawn_and_names_are_escaped() -> None:
    with pytest.raises(ScheduleError):
        svg(Schedule("x", "all-reduce", 2, 1, [[Transfer(0, 1, 0, True)]]))
    fine = build("tree", ranks=2)
    evil = Schedule("<script>&", fine.collective, 2, 1, fine.steps)
    assert "<script>" not in svg(evil)
    ET.fromstring(svg(evil))


def test_what_is_too_large_to_look_at_is_refused() -> None:
    with pytest.raises(RequestError, match="fewer ranks"):
        svg(build("ring", ranks=64))


def test_the_picture_of_the_readme_is_what_the_program_draws() -> None:
    picture = Path(__file__).parents[2] / "docs" / "torus.svg"
    assert picture.read_text(encoding="utf-8") == svg(build("torus:2x2", ranks=4))
