"""Every table of a page as a CSV file.

Laws. One file for each table, named by our own key. Numbers are whole, never rounded; what is not known is an empty
cell. A cell of text that a spreadsheet would take for a formula begins with an apostrophe. The same page gives the same
bytes.

What it must not know: what the numbers mean.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from offbeat.errors import RequestError
from offbeat.number_format import Cell
from offbeat.report.page_model import Page, Table
from offbeat.runs.disk import replace_file

_KEY = re.compile(r"[a-z0-9][a-z0-9-]{0,60}")
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")  # full-width ones are read as formulas too


def tables_of(page: Page) -> tuple[Table, ...]:
    return tuple(item for section in page.sections for item in section.items if isinstance(item, Table))


def as_csv(table: Table) -> str:
    """The table as text: a line of column names with their units, then the rows."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_cell(column.name) for column in table.columns])
    writer.writerows([[_cell(cell) for cell in row] for row in table.rows])
    return text.getvalue()


def write_csv(page: Page, folder: Path) -> tuple[Path, ...]:
    """A file for each table, each whole or not at all; `RequestError` if the folder cannot be written."""
    written = []
    for table in tables_of(page):
        assert _KEY.fullmatch(table.key), f"'{table.key}' is not a valid key"
        path = folder / f"{table.key}.csv"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, as_csv(table).encode())
        except OSError as error:
            raise RequestError(f"cannot write {path}: {error.strerror}") from None
        written.append(path)
    return tuple(written)


def _cell(value: Cell) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return f"'{value}" if value.lstrip(" ").startswith(_FORMULA) else value
    return repr(value)
