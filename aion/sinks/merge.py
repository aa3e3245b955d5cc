"""``merge``: keeps the newest result of each window in a table of Delta Lake or Iceberg."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from aion.core.life.actions import PaneKind
from aion.core.query.sink_notes import Note
from aion.errors import AionError, ConfigError, SinkError
from aion.sinks.addresses import Address, Secret, hidden, plain, secrets_in
from aion.sinks.bad_values import ERROR, check_choice
from aion.sinks.dropped import BATCH, QUERY, dropped_rows
from aion.sinks.lake import Conflict, Lake, Places, as_columns, columns_for
from aion.sinks.marks import Content, Goal, History, Mark, is_beyond, must_go_back, seen_again, written
from aion.sinks.rows import Panes, TableChange
from aion.sinks.sink import Sink, check_where, names
from aion.sinks.versions import Base, base_of, gone, last_of

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
    commit. If the query is set back, the table goes back to the version that it had then, as long as the lake keeps it.
    Raises ConfigError or MissingExtra.
    """
    if dropped == table:
        raise ConfigError(f"dropped: {str(Address.of(table))!r} is the table itself; name another one")
    check_choice(on_bad_value)
    check_where(where)
    address, to = Address.of(table), None if dropped is None else Address.of(dropped)
    sink = Merge(str(address), names(key), adopt, to, on_bad_value, where, format, dict(options or {}), address)
    sink.kind()
    return sink


_log = logging.getLogger(__name__)
_ATTEMPTS = 10
"""How often a batch is merged if others commit meanwhile, before it fails."""

_MOST = 2**62
"""No batch has a larger number."""


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
        more = () if self.dropped is None else self.dropped.secrets
        return (*self.address.secrets, *more, *secrets_in(self.options))

    def described(self, note: Note) -> Note:
        options = {name: without_secret for name, text in self.options.items() if (without_secret := plain(name, text))}
        return replace(note, kind=self.format, options=options)

    def takes_back(self, history: History, goal: Goal) -> str | None:
        with self._reached(), self._opened(self.address) as lake:
            found = _beyond(lake, history, goal)
            base = None if found is None else self._base(lake, found, goal)
        return base if isinstance(base, str) else None

    def go_back(self, history: History, goal: Goal) -> bool:
        with self._reached():
            return self._repeated(lambda: self._go_back(history, goal))

    def _go_back(self, history: History, goal: Goal) -> bool:
        with self._opened(self.address) as lake:
            found = _beyond(lake, history, goal)
            if found is None:
                return False
            if (reason := self._back(lake, found, goal)) is not None:
                raise SinkError(reason)
        return True

    def _base(self, lake: Lake, found: Mark, goal: Goal) -> Base | str:
        """Returns what the table goes back to, or as a sentence why it cannot."""
        base = base_of(self.table, lake.commits(found.history, found.batch - goal.batch), found, goal)
        if isinstance(base, Base) and base.version is not None and (what := lake.missing(base.version)) is not None:
            return gone(self.table, found, goal, what)
        return base

    def _back(self, lake: Lake, found: Mark, goal: Goal) -> str | None:
        """Takes back what the tables have of batches after ``goal``. Returns why they cannot, if so."""
        base = self._base(lake, found, goal)
        if isinstance(base, str):
            return base
        mark = Mark(found.history, goal.batch, rewound=goal.rewind)
        if self.dropped is not None and self.dropped_table is not None:
            # First, because the other table says what has been done. If this is interrupted, it is done again.
            self._take_dropped_back(self.dropped, mark)
        count = 0 if base.empty else lake.count() if base.version is None else lake.count_at(base.version)
        lake.restore(base, replace(mark, filled=count > 0), str(found.batch))
        _log.info(
            "table %r went back from batch %d of %s to batch %d", self.table, found.batch, found.history, goal.batch
        )
        return None

    def _take_dropped_back(self, address: Address, mark: Mark) -> None:
        """Deletes the dropped rows of later batches."""
        with self._opened(address) as lake:
            columns = lake.columns()
            if columns is None:
                return
            places = Places(BATCH, [mark.batch + 1, _MOST], True)
            there = as_columns(lake.read(places), columns)
            kept = there.filter(pc.fill_null(pc.not_equal(there[QUERY], mark.history.query), True))
            if kept.num_rows < there.num_rows:
                filled = lake.count() > there.num_rows - kept.num_rows
                lake.overwrite(places, kept, replace(mark, filled=filled))

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Raises SinkError, without a secret, for what an engine raises."""
        try:
            yield
            return
        except AionError:
            raise
        except Exception as error:  # each engine has its own
            text = f"table {self.table!r}: {type(error).__name__}: {error}"
        raise SinkError(hidden(text, self.secrets))

    def apply(self, change: TableChange, mark: Mark) -> None:
        """Reads and merges once more if somebody else, who compacts the table for example, commits in between."""
        while not self._repeated(lambda: self._apply_to(change, mark)):
            pass

    def _repeated(self, function: Callable[[], bool]) -> bool:
        for _ in range(_ATTEMPTS):
            try:
                return function()
            except Conflict as error:
                conflict = error
        raise conflict

    def _apply_to(self, change: TableChange, mark: Mark) -> bool:
        """Returns False if the table went back first. Then the batch is still to be written."""
        with self._opened(self.address) as lake:
            columns = columns_for(self.table, lake, change.rows.schema)
            change, mark = self.checked(change, mark, lake.rules())
            before, stays = lake.mark(mark), None
            if before is not None and mark.goal is not None and must_go_back(before, mark):
                stays = self._back(lake, before, mark.goal)
                if stays is None:
                    return False
            count = lake.count()
            content = Content.ROWS if count else Content.EMPTY
            if not self.is_new(before, content, mark, stays):
                if before is not None and (again := seen_again(before, mark)) is not None:
                    last = last_of(before, content, mark)
                    lake.overwrite(Places(change.start, [], False), columns.empty_table(), again, last)
                return True
            if self.dropped is not None and change.dropped is not None:
                # First, because the mark that the batch is written is in the other table.
                self._write_dropped(self.dropped, dropped_rows(change.dropped, mark), mark)
            _put(lake, change, columns, count, mark, before)
        return True

    def _write_dropped(self, address: Address, change: TableChange, mark: Mark) -> None:
        with self._opened(address) as lake:
            columns = columns_for(str(address), lake, change.rows.schema)
            before = lake.mark(mark)
            if change.rows.num_rows or before == mark:
                _put(lake, change, columns, lake.count(), mark, before)

    def _opened(self, address: Address) -> AbstractContextManager[Lake]:
        return closing(self.kind()(address.secret.text, self.options))


def _beyond(lake: Lake, history: History, goal: Goal) -> Mark | None:
    """Returns the mark of a table that must go back, or None if it need not."""
    found = None if lake.columns() is None else lake.mark(Mark(history, goal.batch))
    return found if is_beyond(found, history, goal) else None


def _put(lake: Lake, change: TableChange, columns: pa.Schema, count: int, mark: Mark, before: Mark | None) -> None:
    """Applies a change to a table that has ``count`` rows, in one commit with the mark. ``before``: that of now."""
    change = replace(change, rows=as_columns(change.rows, columns), removed=as_columns(change.removed, columns))
    places = Places.of(change)
    old = as_columns(lake.read(places), columns)
    without = lake.computed - set(change.rows.column_names)
    rows = change.merged(old).select([name for name in columns.names if name not in without])
    last = last_of(before, Content.ROWS if count else Content.EMPTY, mark)
    lake.overwrite(places, rows, written(mark, before, count - old.num_rows + rows.num_rows > 0), last)


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
