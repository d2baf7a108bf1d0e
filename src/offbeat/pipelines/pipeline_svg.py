"""A pipeline as a picture: a row for each rank, time to the right, a box for each action with its microbatch in it.

Forward passes are blue; backward passes are green where they are whole, and else the gradients of inputs are teal and
those of weights amber. Of the stages of one rank, later ones are paler. The two boxes of an overlapped pair are above
each other. Grey is idle; at the right stands how many microbatches' activations the rank holds at most.
"""

from __future__ import annotations

from offbeat.charts.axes import Scale, draw_x_axis, ticks_of
from offbeat.charts.svg import FONT, INK, SOFT, element, fit, label, text_width
from offbeat.errors import RequestError
from offbeat.number_format import format_seconds, percent
from offbeat.pipelines.actions import BACKWARD, FORWARD, INPUT, WEIGHT, Action, PipelineSchedule
from offbeat.pipelines.pipeline_cost import PipelinePrice
from offbeat.spec import count_of

_LEFT, _TOP, _ROW, _BOX, _RIGHT = 70, 96, 38, 30, 96
_WIDTH, _SIZE = 1120, 11.0
_MOST_BOXES = 20_000
_COLOURS = {FORWARD: "#2f6fdb", BACKWARD: "#2e8b57", INPUT: "#17a398", WEIGHT: "#d08700"}
_NAMES = {FORWARD: "forward", BACKWARD: "backward", INPUT: "gradients of inputs", WEIGHT: "gradients of weights"}
_IDLE, _PAPER = "#eceff2", "#ffffff"


def pipeline_svg(schedule: PipelineSchedule, price: PipelinePrice) -> str:
    """The picture as the text of an SVG file."""
    boxes = sum(len(span.action.singles) for span in price.spans)
    if boxes > _MOST_BOXES:
        raise RequestError(f"'{schedule.name}' is too large to draw ({boxes:,} boxes, at most {_MOST_BOXES:,})")
    x = Scale(0.0, price.seconds or 1.0, _LEFT, _WIDTH - _RIGHT)
    bottom = _TOP + _ROW * schedule.ranks
    depth = _depths(schedule)
    title = f"{schedule.name}, {count_of(schedule.ranks, 'rank')}, {count_of(schedule.microbatches, 'microbatch')}"
    title = title.replace("microbatchs", "microbatches")
    subtitle = f"{format_seconds(price.seconds)}, bubbles {percent(price.bubble_share)}, {price.steps} steps, proved"
    items = [
        element("rect", width="100%", height="100%", fill=_PAPER),
        label(_LEFT, 26, title, 19, fill=INK, font_weight=600),
        label(_LEFT, 50, subtitle, 13, fill=SOFT),
        _legend(schedule),
        label(_WIDTH - _RIGHT + 12, _TOP - 12, "holds", 12, fill=SOFT),
    ]
    for rank in range(schedule.ranks):
        y = _TOP + _ROW * rank
        held = f"{price.peak_activations[rank]:.4g}"
        items.append(label(_LEFT - 12, y + _BOX / 2, f"rank {rank}", 12, fill=INK, text_anchor="end"))
        items.append(label(_WIDTH - _RIGHT + 12, y + _BOX / 2, held, 12, fill=INK))
        items.append(
            element("rect", x=float(_LEFT), y=float(y), width=x.last - x.first, height=float(_BOX), fill=_IDLE)
        )
    for span in price.spans:
        height = _BOX / len(span.action.singles)
        for place, single in enumerate(span.action.singles):
            top = _TOP + _ROW * span.rank + place * height
            items += _box(single, x(span.start_s), x(span.end_s), top, height, depth[single.stage])
    items.append(draw_x_axis(x, ticks_of(x, "seconds", 8), bottom, _WIDTH, ""))
    return element(
        "svg",
        "\n" + "".join(items),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH} {bottom + 40}",
        width=_WIDTH,
        height=bottom + 40,
        font_family=FONT,
        role="img",
        aria_label=f"{title}: {subtitle}",
    )


def _depths(schedule: PipelineSchedule) -> dict[int, float]:
    """How pale a stage is: 0 for the first of its rank, 1 for the last."""
    of_rank: dict[int, list[int]] = {}
    for stage, rank in schedule.placement.items():
        of_rank.setdefault(rank, []).append(stage)
    return {stage: place / max(1, len(stages) - 1) for stages in of_rank.values() for place, stage in enumerate(stages)}


def _box(action: Action, start: float, end: float, y: float, height: float, depth: float) -> list[str]:
    text = str(action.microbatch)
    room = text_width(text, _SIZE) <= end - start
    return [
        element(
            "rect",
            element("title", str(action)),
            x=start,
            y=y,
            width=end - start,
            height=height,
            fill=_COLOURS[action.kind],
            fill_opacity=f"{1 - 0.6 * depth:.2f}",
            stroke=_PAPER,
            stroke_width=1,
        ),
        label(
            (start + end) / 2,
            y + height / 2,
            fit(text, _SIZE, end - start) if room else "",
            _SIZE,
            fill=_PAPER if depth < 0.5 else INK,
            text_anchor="middle",
        ),
    ]


def _legend(schedule: PipelineSchedule) -> str:
    used = {single.kind for _, _, action in schedule.places() for single in action.singles}
    items, x = [], float(_LEFT)
    for kind, name in _NAMES.items():
        if kind in used:
            items.append(element("rect", x=x, y=66.0, width=14.0, height=12.0, fill=_COLOURS[kind]))
            items.append(label(x + 20, 72, name, 12, fill=SOFT))
            x += 36 + text_width(name, 12)
    items.append(element("rect", x=x, y=66.0, width=14.0, height=12.0, fill=_IDLE))
    paler = "; paler: later stages of the rank" if schedule.stages > schedule.ranks else ""
    items.append(label(x + 20, 72, f"idle{paler}", 12, fill=SOFT))
    return "".join(items)
