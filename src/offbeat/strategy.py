"""Every strategy a user can name: the one line that says how learners keep time.

A strategy is a schedule (all-reduce) or a policy. This gathers the tables of both kinds, so that the
command line, the docs and the errors list the same names.
"""

from __future__ import annotations

from dataclasses import dataclass

from offbeat.schedules.algorithms import algorithms
from offbeat.spec import Param


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A name, which family runs it, and what it does in one line."""

    name: str
    family: str
    summary: str
    params: tuple[Param, ...]

    def usage(self) -> str:
        """How it is written: `torus:SHAPE`, `ring[:order=...]`; what may be left out is in brackets."""
        text, mark = self.name, ":"
        for param in self.params:
            word = mark + (param.name.upper() if param.positional else f"{param.name}=...")
            text += word if param.required else f"[{word}]"
            mark = ","
        return text


def strategies() -> dict[str, Strategy]:
    """All of them by name."""
    return {
        row.name: Strategy(name=row.name, family="all-reduce", summary=row.summary, params=row.params)
        for row in algorithms("all-reduce").values()
    }
