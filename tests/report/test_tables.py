"""Tables as CSV files."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from offbeat.errors import RequestError
from offbeat.report.page_model import Column, Page, PageSection, Table
from offbeat.report.tables import as_csv, tables_of, write_csv


def page_of(*tables: Table) -> Page:
    section = PageSection(key="s", title="S", items=tables)
    return Page(title="t", subtitle="", summary=(), problems=(), sections=(section,))


def one(*rows: tuple[str | int | float | None, ...], key: str = "numbers") -> Table:
    columns = (Column("name"), Column("time (s)", "seconds"))
    return Table(key=key, title="Numbers", columns=columns, rows=rows)


def read(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


def test_numbers_are_whole_and_what_is_not_known_is_empty() -> None:
    third = 1 / 3
    rows = read(as_csv(one(("a", third), ("b", 123456789012345678), ("c", None), ("d", -1e-300))))
    assert rows == [["name", "time (s)"], ["a", repr(third)], ["b", "123456789012345678"], ["c", ""], ["d", "-1e-300"]]
    assert float(rows[1][1]) == third


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "  =1", "＝1", '=HYPERLINK("x")'])
def test_text_that_a_spreadsheet_would_compute_is_text(text: str) -> None:
    table = Table(key="k", title="", columns=(Column(text),), rows=((text,),))
    assert read(as_csv(table)) == [[f"'{text}"], [f"'{text}"]]


def test_commas_quotes_and_letters_of_all_kinds_come_back_as_they_were() -> None:
    text = 'a, "b"; <script> é 😀 …'
    assert read(as_csv(one((text, 1.0))))[1] == [text, "1.0"]


def test_each_table_has_its_file_and_nothing_else_is_left(tmp_path: Path) -> None:
    page = page_of(one(("a", 1.0)), one(("b", 2.0), key="more"))
    folder = tmp_path / "new" / "csv"
    assert write_csv(page, folder) == (folder / "numbers.csv", folder / "more.csv")
    assert sorted(path.name for path in folder.iterdir()) == ["more.csv", "numbers.csv"]
    assert (folder / "more.csv").read_text(encoding="utf-8") == "name,time (s)\nb,2.0\n"
    assert len(tables_of(page)) == 2


def test_a_folder_that_cannot_be_written_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RequestError, match="cannot write"):
        write_csv(page_of(one()), tmp_path / "file")


def test_a_key_that_is_not_ours_never_names_a_file(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not a valid key"):
        write_csv(page_of(one(key="../up")), tmp_path)
