"""A schedule as a picture: ranks are columns, steps are rows, chunks have colours.

Between two steps every rank shows the strip of its chunks. The fuller the colour, the more of what the
collective wants is already there; the number counts the contributions. An arrow goes from the chunk that
is sent to the place that it is added to (solid) or overwrites (dashed).
"""

from __future__ import annotations

from offbeat.errors import RequestError
from offbeat.schedules.ir import Schedule
from offbeat.schedules.proof import progress, verify
from offbeat.spec import count_of

_MOST_CELLS = 20_000
_LEFT, _TOP, _STRIP, _GAP, _RIGHT = 70, 92, 20, 58, 24
_INK, _FAINT, _PAPER = "#1f2933", "#9aa5b1", "#ffffff"
_PALETTE = ("#2f6fdb", "#e4572e", "#17a398", "#b5179e", "#c77f00", "#5f4bb6", "#6a994e", "#d1495b")


def svg(schedule: Schedule) -> str:
    """The picture as the text of an SVG file. The schedule is proved first; a wrong one is not drawn."""
    verify(schedule)
    cells = schedule.ranks * schedule.chunks * (len(schedule.steps) + 1)
    if cells > _MOST_CELLS:
        raise RequestError(
            f"'{schedule.name}' on {schedule.ranks} ranks is too large to draw "
            f"({cells} cells, at most {_MOST_CELLS}); use fewer ranks (--ranks)"
        )
    return _Picture(schedule).text()


def _escaped(text: str) -> str:
    from html import escape  # a table of 2,000 characters, only for who draws

    return escape(text)


class _Picture:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.cell = max(4.0, min(22.0, 112 / schedule.chunks))
        self.column = self.cell * schedule.chunks + max(26.0, self.cell)
        title = len(f"{schedule.name} {schedule.collective}") * 11.5  # wide enough for any font
        self.width = max(460.0, _LEFT + title + _RIGHT, _LEFT + self.column * schedule.ranks + _RIGHT)
        self.height = _TOP + (_STRIP + _GAP) * len(schedule.steps) + _STRIP + 34
        adds_up = schedule.collective in ("all-reduce", "reduce", "reduce-scatter")
        self.numbers = adds_up and self.cell >= 14
        self.marks: list[str] = []

    def text(self) -> str:
        schedule = self.schedule
        steps = len(schedule.steps)
        title = f"{schedule.name} {schedule.collective}"
        parts = ((schedule.ranks, "rank"), (schedule.chunks, "chunk"), (steps, "step"))
        subtitle = ", ".join([*(count_of(number, noun) for number, noun in parts), "proved"])
        self._label(_LEFT, 30, title, size=19, weight=600)
        self._label(_LEFT, 50, subtitle, size=12, colour=_FAINT)
        for rank in range(schedule.ranks):
            middle = self._x(rank, 0) + self.cell * schedule.chunks / 2
            self._label(middle, _TOP - 12, f"rank {rank}", size=12, anchor="middle")
        for step in range(steps):
            self._label(_LEFT - 14, self._y(step) + _STRIP + _GAP / 2 + 4, f"step {step + 1}", size=12, anchor="end")
            self._arrows(step)
        self._strips()
        kinds = set(schedule.steps.table[:, 3].tolist())
        legend = ["solid: added"] * (1 in kinds) + ["dashed: overwritten"] * (0 in kinds)
        legend += ["number: contributions so far"] * self.numbers
        if schedule.steps.codecs:
            raw = not schedule.steps.codec.all()
            legend.append(f"{'thin: ' if raw else ''}sent as {', '.join(schedule.steps.codecs)}")
            legend += ["thick: sent as it is"] * raw
        self._label(_LEFT, self.height - 12, "  ·  ".join(legend), size=11, colour=_FAINT)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}" '
            f'viewBox="0 0 {self.width:g} {self.height:g}" role="img" '
            f'font-family="Inter, Helvetica, Arial, sans-serif">'
        )
        paper = f'<rect width="100%" height="100%" fill="{_PAPER}"/>'
        name = f"<title>{_escaped(f'{title}: {subtitle}')}</title>"
        return "\n".join([head, name, paper, *self.marks, "</svg>"]) + "\n"

    def _x(self, rank: int, chunk: int) -> float:
        return _LEFT + rank * self.column + chunk * self.cell

    def _y(self, step: int) -> float:
        return _TOP + step * (_STRIP + _GAP)

    def _strips(self) -> None:
        for step, (held, share) in enumerate(progress(self.schedule)):
            for rank in range(self.schedule.ranks):
                for chunk in range(self.schedule.chunks):
                    self._place(step, rank, chunk, int(held[rank, chunk]), float(share[rank, chunk]))

    def _place(self, step: int, rank: int, chunk: int, held: int, share: float) -> None:
        x, y = self._x(rank, chunk), self._y(step)
        opacity = f"{0.12 + 0.88 * share:.2f}"
        self.marks.append(
            f'<rect x="{x:g}" y="{y:g}" width="{self.cell:g}" height="{_STRIP}" fill="{colour_of(chunk)}" '
            f'fill-opacity="{opacity}" stroke="{_PAPER}" stroke-width="1"/>'
        )
        if self.numbers:
            ink = _PAPER if share > 0.7 else _INK
            self._label(x + self.cell / 2, y + _STRIP / 2 + 4, str(held), size=11, colour=ink, anchor="middle")

    def _arrows(self, step: int) -> None:
        top, bottom = self._y(step) + _STRIP + 2, self._y(step + 1) - 2
        for source, target, chunk, reduce, codec in self.schedule.steps[step]:
            start = self._x(source, chunk) + self.cell / 2
            end = self._x(target, chunk) + self.cell / 2
            bend = (bottom - top) * 0.45
            dash = "" if reduce else ' stroke-dasharray="5 3"'
            width = 1.6 if codec or not self.schedule.steps.codecs else 3.2  # what is sent as it is weighs more
            tip = min(4.0, self.cell / 2)
            colour = colour_of(chunk)
            self.marks.append(
                f'<path d="M{start:g} {top:g}C{start:g} {top + bend:g} {end:g} {bottom - bend:g} '
                f'{end:g} {bottom - 5:g}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>'
                f'<path d="M{end - tip:g} {bottom - 6:g}h{2 * tip:g}l{-tip:g} 6z" fill="{colour}"/>'
            )

    def _label(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int,
        colour: str = _INK,
        weight: int = 400,
        anchor: str = "start",
    ) -> None:
        self.marks.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" font-weight="{weight}" fill="{colour}" '
            f'text-anchor="{anchor}">{_escaped(text)}</text>'
        )


def colour_of(chunk: int) -> str:
    """Eight colours chosen by hand, then hues that stay far from their neighbours."""
    if chunk < len(_PALETTE):
        return _PALETTE[chunk]
    return f"hsl({chunk * 137.5 % 360:.0f} 60% 48%)"
