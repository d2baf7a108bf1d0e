"""A model's graph that is cut, as a picture: a panel for each part, its nodes from above, cut edges bold with bytes."""

from __future__ import annotations

from collections import defaultdict

from offbeat.charts.svg import AXIS, FONT, INK, SOFT, element, fit, label, text_width
from offbeat.errors import RequestError
from offbeat.number_format import format_seconds, format_size
from offbeat.pipelines.model_graph import ModelGraph
from offbeat.pipelines.partition import Cut
from offbeat.spec import count_of

_PANEL, _GAP, _LEFT, _TOP, _ROW = 230, 110, 30, 116, 17
_BAR, _SIZE = 60.0, 11.0
_MOST_NODES = 3000
_COLOURS = ("#2f6fdb", "#e4572e", "#17a398", "#b5179e", "#c77f00", "#5f4bb6", "#6a994e", "#d1495b")
_CUT, _PAPER, _FILL = "#b3261e", "#ffffff", "#f6f8fa"


def partition_svg(graph: ModelGraph, cut: Cut) -> str:
    """The picture as the text of an SVG file."""
    if len(graph.nodes) > _MOST_NODES:
        raise RequestError(f"a graph of {len(graph.nodes):,} nodes is too large to draw (at most {_MOST_NODES:,})")
    parts = max(cut.parts) + 1
    rows: dict[int, int] = {}
    filled: dict[int, int] = defaultdict(int)
    for node, part in enumerate(cut.parts):
        rows[node] = filled[part]
        filled[part] += 1
    width = 2 * _LEFT + parts * _PANEL + (parts - 1) * _GAP
    height = _TOP + _ROW * max(filled.values()) + 40
    title = f"{graph.name} in {count_of(parts, 'part')}"
    about = f"{format_seconds(cut.price.seconds)} an update; bold: what crosses a cut, for each microbatch"
    items = [
        element("rect", width="100%", height="100%", fill=_PAPER),
        label(_LEFT, 28, title, 19, fill=INK, font_weight=600),
        label(_LEFT, 52, about, 13, fill=SOFT),
    ]
    longest = max(node.compute_s for node in graph.nodes) or 1.0
    for part in range(parts):
        x = _x(part)
        colour = _COLOURS[part % len(_COLOURS)]
        items.append(
            element(
                "rect", x=x - 8, y=_TOP - 38.0, width=_PANEL + 16.0, height=_ROW * max(filled.values()) + 52.0,
                fill=_FILL, stroke=colour, rx=6,
            )
        )  # fmt: skip
        text = f"part {part}: {format_seconds(cut.price.stage_s[part])}"
        items.append(label(x, _TOP - 22, text, 13, fill=colour, font_weight=600))
    for source, target in graph.edges:
        if cut.parts[source] == cut.parts[target]:
            items.append(_inside(cut.parts[source], rows[source], rows[target]))
    for node, (made, part) in enumerate(zip(graph.nodes, cut.parts, strict=True)):
        x, y = _x(part), _y(rows[node])
        name = fit(made.name, _SIZE, _PANEL - _BAR - 34)
        items.append(
            element(
                "rect", x=x + _PANEL - _BAR, y=y - 4.0, width=max(0.5, _BAR * made.compute_s / longest), height=8.0,
                fill=_COLOURS[part % len(_COLOURS)], fill_opacity="0.75",
            )
        )  # fmt: skip
        items.append(label(x + 24, y, name, _SIZE, made.name, fill=INK))
        items.append(element("circle", element("title", format_seconds(made.compute_s)), cx=x + 14, cy=float(y), r=2.5))
    items += _cut_edges(graph, cut, rows)
    return element(
        "svg",
        "\n" + "".join(items),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {height}",
        width=width,
        height=height,
        font_family=FONT,
        role="img",
        aria_label=f"{title}: {about}",
    )


def _x(part: int) -> float:
    return float(_LEFT + part * (_PANEL + _GAP))


def _y(row: int) -> float:
    return float(_TOP + _ROW * row)


def _inside(part: int, source: int, target: int) -> str:
    """A line down to the next node, an arc past the nodes between."""
    x, top, bottom = _x(part) + 14, _y(source), _y(target)
    bend = min(13.0, 2.0 * (target - source - 1))
    path = f"M{x:g} {top:g}C{x - bend:g} {top + 6:g} {x - bend:g} {bottom - 6:g} {x:g} {bottom:g}"
    return element("path", d=path, fill="none", stroke=AXIS, stroke_width=1)


def _cut_edges(graph: ModelGraph, cut: Cut, rows: dict[int, int]) -> list[str]:
    items, sizes = [], []
    for source, target in cut.cut_edges:
        one, other = cut.parts[source], cut.parts[target]
        start, end = (_x(one) + _PANEL, _y(rows[source])), (_x(other) + 10, _y(rows[target]))
        middle = (start[0] + end[0]) / 2
        path = f"M{start[0]:g} {start[1]:g}C{middle:g} {start[1]:g} {middle:g} {end[1]:g} {end[0]:g} {end[1]:g}"
        items.append(
            element(
                "path",
                element("title", f"{graph.nodes[source].name} to {graph.nodes[target].name}"),
                d=path,
                fill="none",
                stroke=_CUT,
                stroke_width=3,
                stroke_opacity="0.8",
            )
        )
    for part, size in enumerate(cut.price.cut_bytes):
        text = format_size(size)
        x = _x(part) + _PANEL + _GAP / 2
        room = text_width(text, 12) + 8
        sizes.append(
            element("rect", x=x - room / 2, y=_TOP - 32.0, width=room, height=18.0, fill=_PAPER, stroke=_CUT, rx=3)
        )
        sizes.append(label(x, _TOP - 23, text, 12, fill=_CUT, text_anchor="middle", font_weight=600))
    return items + sizes
