"""``upsert``: keeps the newest result of each window in a table of a database."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from aion.errors import ConfigError
from aion.sinks.addresses import Address, Secret
from aion.sinks.bad_values import ERROR, check_choice
from aion.sinks.changes import replace_and_record
from aion.sinks.database import TableName, content_of, locked_mark, prepare, set_mark
from aion.sinks.dropped import IGNORE, dropped_rows
from aion.sinks.marks import Content, Mark, seen_again
from aion.sinks.names import check_names
from aion.sinks.rows import Change
from aion.sinks.sink import Sink, check_where, names
from aion.sinks.uris import kind_of


def upsert(
    uri: str,
    table: str,
    key: str | Sequence[str] | None = None,
    *,
    adopt: str | None = None,
    changes: str | None = None,
    dropped: str | None = None,
    on_bad_value: str = ERROR,
    add_columns: bool = False,
    where: str | None = None,
) -> Upsert:
    """Returns a function for ``foreachBatch`` that keeps the newest result of each window in a table.

    For example::

        table = aion.sinks.upsert("sqlite:///tolls.db", "tolls")
        query = result.writeStream.foreachBatch(table).option("checkpointLocation", "cp/").start()

    ``uri``: ``sqlite:///PATH``, ``postgresql://USER@HOST/DATABASE`` or ``duckdb:///PATH``. ``table``: its name, or
    ``schema.table``. It is made if it is missing. ``key``: the key columns; by default those before ``window``. A row
    is found by the key, ``window``, ``window_start`` and ``window_end``; nulls are equal to each other. Retracted rows
    are deleted.

    A batch is one transaction, and changes nothing if it is run again. A batch that does not follow the one that the
    table has is refused, and the error says which value of ``adopt`` lets the query continue (docs/how-to/sinks.md).

    ``changes``: the name of another table, which gets a row for each row of the table that a batch adds, changes or
    deletes, with the values before (``old_...``) and after it. It is written in the same transaction.

    ``dropped``: the name of a table that gets the dropped rows, in the same transaction; or ``"ignore"``. Without it,
    they are left out, and a WARNING says so once in a run.

    ``on_bad_value``: what happens to a value that the database cannot hold, such as a NUL in a text of PostgreSQL.
    ``"error"`` stops the query, and names it. ``"replace"`` writes another value or null. ``"drop"`` leaves out the
    row.

    ``add_columns=True`` adds columns that the rows have and the table lacks, in the same transaction: they are null in
    the rows that are there. Otherwise such a batch is refused. No column of the key or the window is added.

    ``where``: a condition in Spark's SQL over the columns of the batch, e.g. ``"cars > 5"``. The table has the rows for
    which it is true; a row goes when a later pane of its window does not meet it. (``where`` of a DataFrame would leave
    out that pane, and the row would stay.)

    Raises ConfigError or MissingExtra.
    """
    check_choice(on_bad_value)
    check_where(where)
    if not isinstance(add_columns, bool):
        raise ConfigError(f"add_columns: {add_columns!r} is neither True nor False")
    address = Address.of(uri)
    kind = kind_of(address)
    seen = set[TableName]()
    for argument, name in (("table", table), ("changes", changes), ("dropped", None if dropped == IGNORE else dropped)):
        if name is not None:
            parts = TableName.of(name if kind.case else name.lower())
            if parts in seen:
                raise ConfigError(f"{argument}: {name!r} is the name of another table of this sink; name another one")
            seen.add(parts)
            for part in filter(None, parts):
                check_names([part], case=True, longest=kind.longest_name, what=f"{argument}:")
    to = None if dropped is None else Address.of(dropped)
    return Upsert(table, names(key), adopt, to, on_bad_value, where, kind.resolve(address), changes, add_columns)


@dataclass(frozen=True)
class Upsert(Sink):
    """Writes to a database."""

    address: Address
    changes: str | None = None
    add_columns: bool = False

    @property
    def shown_uri(self) -> str:
        return str(self.address)

    @property
    def adds(self) -> bool:
        return self.add_columns

    @property
    def nested(self) -> bool:
        return kind_of(self.address).nested

    @property
    def secrets(self) -> tuple[Secret, ...]:
        return self.address.parts

    def apply(self, change: Change, mark: Mark) -> None:
        table = TableName.of(self.table)
        with kind_of(self.address).open(self.address) as database:
            before = locked_mark(database, table)
            content = prepare(database, table, change, add=self.add_columns)
            change, mark = self.checked(change, mark, database.rules(table))
            if not self.is_new(before, content, mark):
                if before is not None and (again := seen_again(before, mark)) is not None:
                    set_mark(database, table, again, before)
                return
            if self.changes is None:
                database.replace(table, change)
            else:
                replace_and_record(
                    database, table, change, TableName.of(self.changes), mark.batch, add=self.add_columns
                )
            if self.dropped is not None and change.dropped is not None:
                dropped, rows = TableName.of(self.dropped.shown), dropped_rows(change.dropped, mark)
                prepare(database, dropped, rows)
                if rows.rows.num_rows or before == mark:
                    database.replace(dropped, rows)
            filled = content_of(database, table) is Content.ROWS
            set_mark(database, table, dataclasses.replace(mark, filled=filled), before)
