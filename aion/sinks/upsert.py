"""``upsert``: keeps the newest result of each window in a table of a database."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from aion.core.query.sink_notes import Note
from aion.errors import AionError, ConfigError, SinkError
from aion.sinks.addresses import Address, Secret, hidden
from aion.sinks.bad_values import ERROR, check_choice
from aion.sinks.changes import changes_after, changes_before
from aion.sinks.database import Database, TableName, content_of, file_of, found_mark, locked_mark, prepare, set_mark
from aion.sinks.dropped import IGNORE, dropped_rows
from aion.sinks.marks import Content, Goal, History, Mark, is_beyond, must_go_back, seen_again, written
from aion.sinks.names import check_names
from aion.sinks.rows import TableChange
from aion.sinks.sink import Sink, check_where, names
from aion.sinks.undo import ENTRIES, SUFFIX, batches_of, prune, record, record_beside, taken_back, why_not
from aion.sinks.uris import kind_of

_log = logging.getLogger(__name__)


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
    undo: str | None = None,
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

    ``undo``: for how many batches the sink keeps what they replaced, e.g. ``"100 batches"``, in a table beside
    (``..._undo``) and in the same transaction. If the query is set back by at most this many, so is the table. By
    default nothing is kept, and the table cannot go back.

    Raises ConfigError or MissingExtra.
    """
    check_choice(on_bad_value)
    check_where(where)
    if not isinstance(add_columns, bool):
        raise ConfigError(f"add_columns: {add_columns!r} is neither True nor False")
    address = Address.of(uri)
    kind = kind_of(address)
    batches = batches_of(undo)
    seen = set[TableName]()
    beside = None if batches is None else table + SUFFIX
    for argument, name in (
        ("table", table),
        ("undo", beside),
        ("changes", changes),
        ("dropped", None if dropped == IGNORE else dropped),
    ):
        if name is not None:
            parts = TableName.of(name if kind.case else name.lower())
            if parts in seen or (batches is not None and parts.table == ENTRIES):
                raise ConfigError(f"{argument}: {name!r} is the name of another table of this sink; name another one")
            seen.add(parts)
            for part in filter(None, parts):
                check_names([part], case=True, longest=kind.longest_name, what=f"{argument}:")
    to = None if dropped is None else Address.of(dropped)
    resolved = kind.resolve(address)
    return Upsert(table, names(key), adopt, to, on_bad_value, where, resolved, changes, add_columns, batches)


@dataclass(frozen=True)
class Upsert(Sink):
    """Writes to a database. ``undo``: how many batches it can take back."""

    address: Address
    changes: str | None = None
    add_columns: bool = False
    undo: int | None = None

    @property
    def nested(self) -> bool:
        return kind_of(self.address).nested

    @property
    def secrets(self) -> tuple[Secret, ...]:
        return self.address.secrets

    def described(self, note: Note) -> Note:
        return dataclasses.replace(
            note, uri=str(self.address), adds=self.add_columns, kind=self.address.scheme, undo=self.undo,
            changes=self.changes, connect=self.address.without_password,
        )  # fmt: skip

    def apply(self, change: TableChange, mark: Mark) -> None:
        table = TableName.of(self.table)
        with kind_of(self.address).open(self.address) as database:
            before, stays = locked_mark(database, table), None
            if before is not None and mark.goal is not None and must_go_back(before, mark):
                before, stays = self._back(database, table, before, mark.goal)
            content = prepare(database, table, change, add=self.add_columns)
            change, mark = self.checked(change, mark, database.rules(table))
            if not self.is_new(before, content, mark, stays):
                if before is not None and (again := seen_again(before, mark)) is not None:
                    set_mark(database, table, again)
                return
            record(database, table, change, self.undo, before, content, mark)
            changed = self._replace(database, table, change, mark.batch)
            dropped = None if self.dropped is None or change.dropped is None else TableName.of(self.dropped.shown)
            if dropped is not None and change.dropped is not None:
                rows = dropped_rows(change.dropped, mark)
                prepare(database, dropped, rows, add=self.add_columns)
                if rows.rows.num_rows or before == mark:
                    database.replace(dropped, rows)
            if self.undo is not None:
                record_beside(database, table, mark.batch, changed, None if dropped is None else self.dropped_table)
                prune(database, table, mark.batch, self.undo)
            filled = content_of(database, table) is Content.ROWS
            set_mark(database, table, written(mark, before, filled))

    def _replace(self, database: Database, table: TableName, change: TableChange, batch: int) -> tuple[str, int] | None:
        """Returns the table of changes, and the number that the batch has there."""
        if self.changes is None:
            database.replace(table, change)
            return None
        changes = TableName.of(self.changes)
        seq = changes_before(database, table, change, changes, batch, add=self.add_columns)
        database.replace(table, change)
        changes_after(database, table, change, changes, seq)
        return self.changes, seq

    def _back(self, database: Database, table: TableName, found: Mark, goal: Goal) -> tuple[Mark | None, str | None]:
        """Takes back what a table has of batches after ``goal``. Returns the mark then, and why it cannot if so."""
        if (reason := why_not(database, table, found, goal)) is not None:
            return found, reason
        before = taken_back(database, table, found, goal)
        _log.info("table %r went back from batch %d of %s to batch %d", self.table, found.batch, found.history, goal[0])
        set_mark(database, table, before)
        return before, None

    def takes_back(self, history: History, goal: Goal) -> str | None:
        if self.address.scheme in ("sqlite", "duckdb") and not file_of(self.address).exists():
            return None  # to open it would make it
        reason = None
        with self._connected() as database:
            table = TableName.of(self.table)
            found = found_mark(database, table)
            if found is not None and is_beyond(found, history, goal):
                reason = why_not(database, table, found, goal)
        return reason

    def go_back(self, history: History, goal: Goal) -> bool:
        if self.address.scheme in ("sqlite", "duckdb") and not file_of(self.address).exists():
            return False
        with self._connected() as database:
            table = TableName.of(self.table)
            found = locked_mark(database, table)
            if found is None or not is_beyond(found, history, goal):
                return False
            _, reason = self._back(database, table, found, goal)
            if reason is not None:
                raise SinkError(reason)
        return True

    @contextmanager
    def _connected(self) -> Iterator[Database]:
        """Opens the database. Raises SinkError, without a secret, for what its driver raises."""
        try:
            with kind_of(self.address).open(self.address) as database:
                yield database
            return
        except AionError:
            raise
        except Exception as error:  # each driver has its own
            text = f"table {self.table!r} of {self.address}: {type(error).__name__}: {error}"
        raise SinkError(hidden(text, self.secrets))
