"""Spans as rows of text."""

from __future__ import annotations

from offbeat.runs.log import Piece, Span, text_rows


def test_a_row_shows_versions_waiting_and_cancelled_work() -> None:
    spans = [
        Span(0, "compute", 0, 4, 0),
        Span(0, "send", 4, 5, 0),
        Span(0, "wait", 5, 6, 0),
        Span(0, "compute", 6, 10, 1),
        Span(1, "compute", 0, 6, 0, cancelled=True),
        Span(1, "compute", 6, 9, 1),
    ]
    found = text_rows(spans, width=10)
    assert ["".join(piece.text for piece in found[learner]) for learner in (0, 1)] == ["0███─·1███", "0░░░░░1██ "]
    assert found[0] == [Piece("0███", 0), Piece("─·", -1), Piece("1███", 1)]


def test_versions_past_nine_show_their_last_digit_and_what_is_late_is_cut() -> None:
    spans = [Span(3, "compute", 0, 2, 12), Span(3, "compute", 2, 100, 13)]
    assert "".join(piece.text for piece in text_rows(spans, width=8, end_s=4)[3]) == "2███3███"


def test_no_spans_no_rows() -> None:
    assert text_rows([], width=10) == {}
