"""The rank's end of the line to the parent: one JSON object a line, a question in, an answer out.

Law: between a question and the next a rank sleeps in a blocking read, so that it costs the others nothing. A rank ends
when the line does, and on Linux it does not outlive its parent even inside a collective that hangs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from offbeat.errors import OffbeatError

# Of the values in a check of a sum: small whole numbers, so that every order of adding gives the same float.
CHECK_PERIOD = 251


class Wire:
    """Questions come on standard input; answers go where standard output went.

    Standard output itself becomes standard error, since libraries print there (Gloo does).
    """

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def questions(self) -> Iterator[dict[str, Any]]:
        """Until the parent hangs up."""
        while line := sys.stdin.readline():
            yield json.loads(line)

    def answer(self, **fields: object) -> None:
        self._out.write(json.dumps(fields) + "\n")
        self._out.flush()


def serve(work: Callable[[Wire], None]) -> int:
    """Run `work` and return the exit code; whatever it raises is told to the parent in one line."""
    wire = Wire()
    try:
        work(wire)
    except Exception as error:  # the parent decides what is shown
        text = str(error).strip().partition("\n")[0]
        wire.answer(error=text if isinstance(error, OffbeatError) else f"{type(error).__name__}: {text}")
        return 1
    return 0


def require(question: Mapping[str, Any], wanted: str) -> None:
    """The first question of every rank is known."""
    if question.get("do") != wanted:
        raise OffbeatError(f"expected the question '{wanted}'; got '{question.get('do')}'")
