"""Which rows of a parameter the last versions have changed, in memory that a server writes and all others read.

So whoever has the weights of an earlier version takes only these rows. There is an entry for each of the last versions:

    version     how many rows (-1: all)     their numbers

Law: what `since` gives holds all rows that differ between the two versions; else it gives None. An entry is written
before its version is committed, and says no version while it is written; a reader looks at the version again when it
has read.
"""

from __future__ import annotations

from torch import Tensor

from offbeat.server import sparse_rows
from offbeat.server.parameter_layout import RowTable

KEPT = 16  # versions
_ALL = -1
_NO_VERSION = -1
_MASK = 2**31 - 1  # versions are larger than an entry's words


def entry_items(table: RowTable) -> int:
    """Of int32; an update of more rows counts as one of all."""
    return 2 + max(16, table.rows // 8)


class ChangedRows:
    """See the module's text. `memory` has `KEPT` entries; what is zero there names no version but the first."""

    def __init__(self, memory: Tensor, table: RowTable) -> None:
        self._entries = memory.view(KEPT, entry_items(table))
        self._table = table

    def write(self, version: int, rows: Tensor | None) -> None:
        """What this version has changed; None: all."""
        entry = self._entries[version % KEPT]
        entry[0] = _NO_VERSION
        if rows is None or len(rows) > len(entry) - 2:
            entry[1] = _ALL
        else:
            entry[2 : 2 + len(rows)] = rows
            entry[1] = len(rows)
        entry[0] = version & _MASK

    def since(self, before: int, version: int) -> list[Tensor] | None:
        """The rows that were changed after a version, up to another one; None where that is not known any more."""
        if not 0 <= version - before < KEPT:
            return None
        found = []
        for one in range(before + 1, version + 1):
            entry = self._entries[one % KEPT]
            if int(entry[0]) != one & _MASK:
                return None
            try:
                rows = sparse_rows.read(entry[1:], self._table)
            except sparse_rows.RowsError:  # all, or it is being written
                return None
            if int(entry[0]) != one & _MASK:
                return None
            found.append(rows)
        return found
