"""Spans as rows of text, one a learner, as textbooks draw them.

    learner 0 |0███████░░░1██████████2███|      0, 1, 2: version at which a minibatch was begun
    learner 1 |0████████████·1███████2███|      ░ cancelled work, · waiting, ─ sending

A row is made of pieces, so that whoever prints it can colour each by its version.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from offbeat.runs.log import Span

_FILL = {"compute": "█", "send": "─", "wait": "·", "apply": "▒", "evaluate": "▚"}
_CANCELLED = "░"


class Piece(NamedTuple):
    """Some characters of a row; `version` is -1 where nothing was computed."""

    text: str
    version: int


def rows(spans: Sequence[Span], *, width: int, end_s: float | None = None) -> dict[int, list[Piece]]:
    """The pieces of each learner's row, `width` characters from 0 to `end_s` (default: the last end)."""
    if not spans:
        return {}
    end = max(span.end_s for span in spans) if end_s is None else end_s
    per_s = width / end if end else 0.0
    found: dict[int, list[Piece]] = {}
    for learner in sorted({span.learner for span in spans}):
        cells = [(" ", -1)] * width
        for span in sorted((one for one in spans if one.learner == learner), key=lambda one: one.start_s):
            first, last = round(span.start_s * per_s), round(span.end_s * per_s)
            fill = _CANCELLED if span.cancelled else _FILL[span.what]
            version = span.version if span.what == "compute" else -1
            for at in range(max(0, first), min(width, last)):
                label = span.what == "compute" and at == first
                cells[at] = (str(span.version)[-1] if label else fill, version)
        found[learner] = [
            Piece("".join(text for text, _ in some), version) for version, some in groupby(cells, key=itemgetter(1))
        ]
    return found
