"""What the literature says of a strategy's staleness, for the report: asked of the policy itself."""

from __future__ import annotations

from offbeat.errors import RequestError
from offbeat.policies import Staleness, create
from offbeat.policies.staleness import FRESH
from offbeat.strategy import ALL_REDUCE, family_of


def staleness_theory(line: str, learners: int) -> Staleness | None:
    """For a strategy with so many learners; None where only an estimate is known, or the line is no strategy here."""
    try:
        if learners < 1:
            return None
        if family_of(line) == ALL_REDUCE:
            return FRESH
        expected = create(line, expect=learners).expected_staleness(learners)
    except RequestError:
        return None
    return expected if expected.exact else None
