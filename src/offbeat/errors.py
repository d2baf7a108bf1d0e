"""Every error a user can meet.

Law: a message says what was expected, what came, where, and what to do; its first line is enough.
A request that was wrong ends the command with exit code 2, work that failed with exit code 1.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OffbeatError(Exception):
    """Something failed. Catch this to catch all of offbeat's own errors."""

    exit_code = 1


class RequestError(OffbeatError, ValueError):
    """What was asked for cannot be: a wrong name, number, shape or option."""

    exit_code = 2


class ScheduleError(OffbeatError):
    """A schedule does not do what its collective promises, or a pipeline does not train; `grid` shows where.

    `step` and `rank` are the marked place; `step` equals the number of steps when the place is the
    end of the schedule, where something was still missing.
    """

    def __init__(self, message: str, *, step: int, rank: int, grid: str) -> None:
        super().__init__(f"{message}\n{grid}")
        self.step = step
        self.rank = rank
        self.grid = grid


class LogError(OffbeatError):
    """A run log cannot be read."""


class EventError(OffbeatError):
    """A policy was told of something that cannot have happened; its state is as before."""


class PolicyError(OffbeatError):
    """A policy failed, or broke a promise that it made about itself."""


class Terminated(SystemExit):
    """A signal has ended the command: whoever catches what other people's code raises must not catch this."""


class ReplayError(OffbeatError):
    """A log, replayed through its policy, gave other commands than those it holds."""


class PeerError(OffbeatError, RuntimeError):
    """A rank of a group is gone, did not come in time, or called something else; `ranks` are those at fault."""

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class LabError(OffbeatError):
    """A lab cannot be built or changed, or one of its hosts is gone."""


class LabUnavailableError(LabError):
    """This machine has no namespaces for a lab, or does not allow them."""


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that `word` was probably meant to be, as the end of a sentence; or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""


def unknown(kind: str, word: str, known: Iterable[str]) -> RequestError:
    """The error for a name that is not in a table: it names the nearest one, or all of them."""
    names = list(known)
    hint = nearest(word, names) or f"; known: {', '.join(names)}"
    return RequestError(f"unknown {kind} '{word}'{hint}")
