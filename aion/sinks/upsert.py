"""``upsert``: keeps the newest result of each window in a table of a database."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from aion.errors import ConfigError
from aion.sinks.changes import replace_and_record
from aion.sinks.database import TableName, is_empty, locked_mark, prepare, set_mark
from aion.sinks.marks import Mark, is_new
from aion.sinks.notes import without_secrets
from aion.sinks.rows import Change
from aion.sinks.sink import Sink, names
from aion.sinks.uris import kind_of


def upsert(
    uri: str,
    table: str,
    key: str | Sequence[str] | None = None,
    *,
    adopt: str | None = None,
    changes: str | None = None,
    add_columns: bool = False,
) -> Upsert:
    """Returns a function for ``foreachBatch`` that keeps the newest result of each window in a table.

    ``uri``: ``sqlite:///PATH``, ``postgresql://USER@HOST/DATABASE`` or ``duckdb:///PATH``. ``table``: its name, or
    ``schema.table``. It is made if it is missing. ``key``: the key columns; by default those before ``window``. A row
    is found by the key, ``window``, ``window_start`` and ``window_end``; nulls are equal to each other. Retracted rows
    are deleted, and dropped rows are left out.

    A batch is one transaction, and changes nothing if it is run again. A batch that does not follow the one that the
    table has is refused, and the error says which value of ``adopt`` lets the query continue (docs/run-again.md).

    ``changes``: the name of another table, which gets a row for each row of the table that a batch adds, changes or
    deletes, with the values before (``old_...``) and after it. It is written in the same transaction.

    ``add_columns=True`` adds columns that the rows have and the table lacks, in the same transaction: they are null in
    the rows that are there. Otherwise such a batch is refused. No column of the key or the window is added.

    Raises ConfigError or MissingExtra.
    """
    if not isinstance(add_columns, bool):
        raise ConfigError(f"add_columns: {add_columns!r} is neither True nor False")
    named = [TableName.of(name) for name in (table, changes) if name is not None]
    if len(set(named)) < len(named):
        raise ConfigError(f"changes: {changes!r} is the table itself; name another one")
    return Upsert(table, names(key), adopt, kind_of(uri).resolve(uri), changes, add_columns)


@dataclass(frozen=True)
class Upsert(Sink):
    """Writes to a database."""

    uri: str = field(repr=False)  # a password may be in it
    changes: str | None = None
    add_columns: bool = False

    @property
    def shown_uri(self) -> str:
        return without_secrets(self.uri)

    @property
    def adds(self) -> bool:
        return self.add_columns

    @property
    def nested(self) -> bool:
        return kind_of(self.uri).nested

    def apply(self, change: Change, mark: Mark) -> None:
        table = TableName.of(self.table)
        with kind_of(self.uri).open(self.uri) as database:
            before = locked_mark(database, table)
            prepare(database, table, change, add=self.add_columns)
            if not is_new(self.table, before, is_empty(database, table), mark, self.adopt):
                return
            if self.changes is None:
                database.replace(table, change)
            else:
                replace_and_record(
                    database, table, change, TableName.of(self.changes), mark.batch, add=self.add_columns
                )
            set_mark(database, table, mark, before)
