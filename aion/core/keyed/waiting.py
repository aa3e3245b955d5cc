"""Rows that came in a batch and wait for its end, when they join their windows. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from aion.core.keyed.table import Table, stacked


class WaitingRows(Protocol):
    """The rows of one definition. An operator's shell may keep them elsewhere than in memory."""

    def __len__(self) -> int: ...

    def add(self, rows: Table) -> None:
        """Adds rows. All calls of a batch bring tables of the same columns."""

    def take(self) -> Iterator[Table]:
        """Yields all rows in pieces, and keeps none. The rows of a key are in one piece, in the order they came in.

        A piece has the keys of some of the hashes, by their lowest bits, so all pieces are about equally large.
        """


class RowsInMemory:
    """Rows that wait in memory. They are one piece."""

    def __init__(self) -> None:
        self._tables: list[Table] = []

    def __len__(self) -> int:
        return sum(map(len, self._tables))

    def add(self, rows: Table) -> None:
        self._tables.append(rows)

    def take(self) -> Iterator[Table]:
        tables, self._tables = self._tables, []
        if tables:
            yield stacked(tables)
