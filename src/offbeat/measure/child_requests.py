"""The child's side of a benchmark: requests come in, each is answered, and what goes wrong is told to the parent.

    serve          a request is a line of JSON on standard input, and so is its answer on standard output
    answer_once    the only request is the argument; the answer is the last line of standard output

Law: between two requests a child sleeps in a blocking read, so that it costs the others nothing. It ends when its
standard input does, and on Linux it does not outlive its parent even inside a collective that hangs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from offbeat.errors import OffbeatError
from offbeat.processes.child import die_with_parent

# Period of the values in a check of a sum: small whole numbers, so that every order of adding gives the same float.
CHECK_PERIOD = 251

Request = Mapping[str, Any]  # "do" names the handler
Answer = Mapping[str, object]
Handlers = Mapping[str, Callable[[Request], Answer]]


def serve(join: Callable[[Request], tuple[Answer, Handlers]]) -> int:
    """Answer requests until the parent hangs up, and return the exit code. The first makes the handlers of the others.

    Standard output becomes standard error, since libraries print there (Gloo does).
    """
    die_with_parent()
    handlers: Handlers = {}
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)
        try:
            for line in iter(sys.stdin.readline, ""):
                request = json.loads(line)
                if not handlers:
                    answer, handlers = join(request)
                elif request["do"] in handlers:
                    answer = handlers[request["do"]](request)
                else:
                    raise OffbeatError(f"unknown request '{request['do']}'")
                print(json.dumps(answer), file=out, flush=True)
        except Exception as error:  # the parent decides what is shown
            print(json.dumps({"error": error_text(error)}), file=out, flush=True)
            return 1
    return 0


def answer_once(work: Callable[[Request], Answer]) -> None:
    print(json.dumps(work(json.loads(sys.argv[1]))), flush=True)


def error_text(error: Exception) -> str:
    """One line."""
    text = str(error).strip().partition("\n")[0]
    return text if isinstance(error, OffbeatError) else f"{type(error).__name__}: {text}"
