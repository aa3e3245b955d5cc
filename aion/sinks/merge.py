"""``merge``: keeps the newest result of each window in a table of Delta Lake or Iceberg."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from aion.core.life.actions import PaneKind
from aion.core.query.sink_notes import Note
from aion.errors import AionError, ConfigError, SinkError
from aion.sinks.addresses import Address, Secret, hidden, secrets_in
from aion.sinks.bad_values import ERROR, check_choice
from aion.sinks.dropped import dropped_rows
from aion.sinks.lake import Conflict, Lake, Places, as_columns, columns_for
from aion.sinks.marks import Content, Goal, History, Mark, is_beyond, must_go_back, seen_again
from aion.sinks.rows import Change, Panes
from aion.sinks.sink import Sink, check_where, names

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def merge(
    format: str,
    table: str,
    key: str | Sequence[str] | None = None,
    *,
    adopt: str | None = None,
    options: Mapping[str, str] | None = None,
    dropped: str | None = None,
    on_bad_value: str = ERROR,
    where: str | None = None,
) -> Merge:
    """Returns a function for ``foreachBatch`` that keeps the newest result of each window in a table of a lake.

    For example::

        query = result.writeStream.foreachBatch(aion.sinks.merge("delta", "tolls/")).start()

    ``format``: ``"delta"`` or ``"iceberg"``. For Delta Lake, ``table`` is a path or URI, and ``options`` are those of
    its storage. For Iceberg, ``table`` is ``namespace.table``, and ``options`` are the properties of the catalog, and
    its name as ``catalog``. ``dropped`` is a table of the same kind; it has a commit of its own, and what a batch that
    is run again has written there is replaced. All else is as with :func:`aion.sinks.upsert`, and a batch is one
    commit. Raises ConfigError or MissingExtra.
    """
    if dropped == table:
        raise ConfigError(f"dropped: {str(Address.of(table))!r} is the table itself; name another one")
    check_choice(on_bad_value)
    check_where(where)
    address, to = Address.of(table), None if dropped is None else Address.of(dropped)
    sink = Merge(str(address), names(key), adopt, to, on_bad_value, where, format, dict(options or {}), address)
    sink.kind()
    return sink


_ATTEMPTS = 10
"""How often a batch is merged if others commit meanwhile, before it fails."""


@dataclass(frozen=True)
class Merge(Sink):
    """Writes to a table of a lake."""

    format: str
    options: Mapping[str, str] = field(repr=False)  # credentials may be among them
    address: Address

    @property
    def nested(self) -> bool:
        return True

    def kind(self) -> type[Lake]:
        """Returns the class for the format. Raises ConfigError or MissingExtra."""
        if self.format == "delta":
            from aion.sinks.delta import Delta

            return Delta
        if self.format == "iceberg":
            from aion.sinks.iceberg import Iceberg

            return Iceberg
        raise ConfigError(f"format: {Address.of(self.format)!r} is none that merge knows; write 'delta' or 'iceberg'")

    @property
    def secrets(self) -> tuple[Secret, ...]:
        more = () if self.dropped is None else self.dropped.parts
        return (*self.address.parts, *more, *secrets_in(self.options))

    def described(self, note: Note) -> Note:
        options = {name: text for name, text in self.options.items() if not secrets_in({name: text})}
        return replace(note, kind=self.format, options=options)

    def takes_back(self, history: History, goal: Goal) -> str | None:
        try:
            with self._opened(self.address) as lake:
                if lake.columns() is None:
                    return None
                found = lake.mark(Mark(history, goal.batch))
        except AionError:
            raise
        except Exception as error:  # each engine has its own
            text = f"table {self.table!r}: {type(error).__name__}: {error}"
        else:
            return self._stays(found, goal) if found is not None and is_beyond(found, history, goal) else None
        raise SinkError(hidden(text, self.secrets))

    def go_back(self, history: History, goal: Goal) -> bool:
        if (reason := self.takes_back(history, goal)) is not None:
            raise SinkError(reason)
        return False

    def _stays(self, found: Mark, goal: Goal) -> str:
        return (
            f"Table {self.table!r} has batch {found.batch}, and aion.sinks.merge cannot set it back to batch "
            f"{goal.batch}: restore the version of then with the tools of the lake, or write into an empty table"
        )

    def apply(self, change: Change, mark: Mark) -> None:
        """Reads and merges once more if somebody else, who compacts the table for example, commits in between."""
        for _ in range(_ATTEMPTS):
            try:
                return self._apply_to(change, mark)
            except Conflict as error:
                conflict = error
        raise conflict

    def _apply_to(self, change: Change, mark: Mark) -> None:
        with self._opened(self.address) as lake:
            columns = columns_for(self.table, lake, change.rows.schema)
            change, mark = self.checked(change, mark, lake.rules())
            before, count = lake.mark(mark), lake.count()
            stays = None
            if before is not None and mark.goal is not None and must_go_back(before, mark):
                stays = self._stays(before, mark.goal)
            if not self.is_new(before, Content.ROWS if count else Content.EMPTY, mark, stays):
                if before is not None and (again := seen_again(before, mark)) is not None:
                    lake.overwrite(Places(change.start, [], False), columns.empty_table(), again)
                return
            if self.dropped is not None and change.dropped is not None:
                # First, because the mark that the batch is written is in the other table.
                self._write_dropped(self.dropped, dropped_rows(change.dropped, mark), mark)
            _put(lake, change, columns, count, mark)

    def _write_dropped(self, address: Address, change: Change, mark: Mark) -> None:
        with self._opened(address) as lake:
            columns = columns_for(str(address), lake, change.rows.schema)
            if change.rows.num_rows or lake.mark(mark) == mark:
                _put(lake, change, columns, lake.count(), mark)

    def _opened(self, address: Address) -> AbstractContextManager[Lake]:
        return closing(self.kind()(address.secret.text, self.options))


def _put(lake: Lake, change: Change, columns: pa.Schema, count: int, mark: Mark) -> None:
    """Applies a change to a table that has ``count`` rows, in one commit with the mark."""
    change = replace(change, rows=as_columns(change.rows, columns), gone=as_columns(change.gone, columns))
    places = Places.of(change)
    old = as_columns(lake.read(places), columns)
    without = lake.computed - set(change.rows.column_names)
    rows = change.merged(old).select([name for name in columns.names if name not in without])
    lake.overwrite(places, rows, replace(mark, filled=count - old.num_rows + rows.num_rows > 0))


def merge_sql(
    table: str, batch: str, columns: StructType | Sequence[str], key: str | Sequence[str] | None = None
) -> str:
    """Returns a ``MERGE INTO`` for Spark that does to a table what a batch of panes says.

    For example::

        batch.createOrReplaceTempView("batch")
        batch.sparkSession.sql(aion.sinks.merge_sql("tolls", "batch", batch.schema))

    ``batch``: the name of a view with the batch. ``columns``: the schema of the batch, which says what its columns
    are; with ``key``, their names are enough. There is no mark: a batch that is run again is merged again. Raises
    SchemaError if a column is missing.
    """
    fields = [(field, {}) if isinstance(field, str) else (field.name, field.metadata) for field in columns]
    panes = Panes.of(fields, names(key))
    kind, seq, dropped = _quoted(panes.kind), _quoted(panes.seq), PaneKind.DROPPED.value
    same = ", ".join(map(_quoted, panes.identity))
    written = list(map(_quoted, panes.written))
    # A row of the table goes if a pane of its key and window has come. So the source has a row for each of these that
    # deletes, beside the rows that are inserted. Windows are partitioned by null as by a value.
    return f"""\
MERGE INTO {table} AS old
USING (
  SELECT *, explode(if(aion_first = 1, array(true, false), array(false))) AS aion_deletes
  FROM (
    SELECT *, row_number() OVER (PARTITION BY {same} ORDER BY {seq} DESC) AS aion_first
    FROM (
      SELECT *, max({seq}) OVER (PARTITION BY {same}) AS aion_newest FROM {batch} WHERE {kind} <> '{dropped}'
    )
    WHERE {seq} = aion_newest
  )
) AS new
ON new.aion_deletes AND {" AND ".join(f"old.{name} <=> new.{name}" for name in map(_quoted, panes.identity))}
WHEN MATCHED THEN DELETE
WHEN NOT MATCHED AND NOT new.aion_deletes AND new.{kind} <> '{PaneKind.RETRACTED.value}' THEN
  INSERT ({", ".join(written)}) VALUES ({", ".join(f"new.{name}" for name in written)})
"""


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
