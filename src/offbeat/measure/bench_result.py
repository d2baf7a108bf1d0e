"""What a benchmark found: the object that `--json` prints and `--out` writes, and the same for the terminal.

Every number is in a row, and every row is described by fields (`offbeat.report.benchmark_fields`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offbeat.report.benchmark_fields import Field, Row, printed


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """`json` is recorded whole, with the request, the machine and all rounds."""

    json: Mapping[str, Any]
    heading: str
    tables: tuple[tuple[Sequence[Field], Sequence[Row]], ...]
    verdict: Sequence[str]  # in bold
    details: Sequence[str] = ()
    terms: Sequence[tuple[str, str]] = ()  # words of the tables, and what they mean
    spread: float = 1.0  # the largest of one system's rounds
    chart: str = ""  # an SVG, where the benchmark draws one

    @property
    def rows(self) -> Sequence[Row]:
        return self.tables[0][1]


def defined(tables: Sequence[tuple[Sequence[Field], Sequence[Row]]], definitions: Mapping[str, str]) -> dict[str, str]:
    """The columns of these tables that have a definition."""
    shown = [field for fields, rows in tables for field in printed(fields, rows)]
    return {
        field.title: definitions[field.key].removeprefix(f"{field.title.partition(' ')[0]}: ")
        for field in shown
        if field.key in definitions
    }


def json_rows(fields: Sequence[Field], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Exactly the values that the fields describe."""
    return [{field.key: row[field.key] for field in fields if field.key in row} for row in rows]
