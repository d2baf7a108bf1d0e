"""Who is called a straggler, and which span made which push."""

from __future__ import annotations

from offbeat.policies.events import Pushed, Send
from offbeat.policies.replay import Decision
from offbeat.runs.log import Span, minibatches_by_span, pushed_spans
from offbeat.runs.metrics import SLOWER, is_slow, is_straggler

SLOW, EQUAL = (1.01 * SLOWER, 1.0), (SLOWER, 1.0)


def test_a_straggler_is_slow_over_the_whole_and_in_each_part() -> None:
    assert is_straggler(SLOW, [SLOW, SLOW])
    assert not is_straggler(EQUAL, [SLOW, SLOW])
    assert not is_straggler(SLOW, [SLOW, EQUAL])


def test_one_part_is_too_few_and_nobody_is_slow_beside_nothing() -> None:
    assert not is_straggler(SLOW, [SLOW])
    assert not is_slow(1.0, 0.0)


def test_a_push_is_of_the_last_minibatch_that_was_finished_and_not_pushed_before() -> None:
    spans = [
        Span(0, "compute", 0.0, 1.0, 0),
        Span(0, "compute", 1.0, 2.0, 0),
        Span(0, "compute", 2.0, 2.5, 0, cancelled=True),
        Span(0, "wait", 2.5, 3.0, 0),
        Span(1, "compute", 0.0, 9.0, 0),
    ]
    pushes = [
        Pushed(0, 7, 0, at_s=3.0),
        Pushed(0, 8, 0, at_s=3.0),
        Pushed(0, 9, 0, at_s=3.0),
        Pushed(1, 10, 0, at_s=8.0),
    ]
    assert pushed_spans(spans, pushes) == {7: 1, 8: 0}


def test_a_span_holds_as_many_minibatches_as_its_push_has_stretches_of_samples() -> None:
    spans = [Span(0, "compute", 0.0, 4.0, 0), Span(0, "compute", 5.0, 7.0, 1), Span(0, "compute", 8.0, 9.0, 2)]
    batches = (((0, 0, 8), (0, 8, 8), (0, 16, 8), (0, 24, 8)), ((0, 32, 8), (0, 40, 8)), ())
    decisions = [
        Decision(Pushed(0, ticket, ticket, at_s=spans[ticket].end_s), (Send(0),), batch)
        for ticket, batch in enumerate(batches)
    ]
    assert minibatches_by_span(spans, decisions, 4) == {0: 4, 1: 2, 2: 4}
