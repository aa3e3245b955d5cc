"""``merge``: keeps the newest result of each window in a table of Delta Lake or Iceberg."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from aion.core.operator.actions import PaneKind
from aion.errors import ConfigError
from aion.sinks.lake import Lake, Windows, as_columns, columns_for
from aion.sinks.marks import Mark, is_new
from aion.sinks.rows import Change, Panes
from aion.sinks.sink import Sink, names

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def merge(
    format: str,
    table: str,
    key: str | Sequence[str] | None = None,
    *,
    adopt: str | None = None,
    options: Mapping[str, str] | None = None,
) -> Merge:
    """Returns a function for ``foreachBatch`` that keeps the newest result of each window in a table of a lake.

    ``format``: ``"delta"`` or ``"iceberg"``. For Delta Lake, ``table`` is a path or URI, and ``options`` are those of
    its storage. For Iceberg, ``table`` is ``namespace.table``, and ``options`` are the properties of the catalog, and
    its name as ``catalog``. All else is as with :func:`aion.sinks.upsert`, and a batch is one commit. Raises
    ConfigError or MissingExtra.
    """
    sink = Merge(table, names(key), adopt, format, dict(options or {}))
    sink.kind()
    return sink


@dataclass(frozen=True)
class Merge(Sink):
    """Writes to a table of a lake."""

    format: str
    options: Mapping[str, str] = field(repr=False)  # credentials may be among them

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
        raise ConfigError(f"format: {self.format!r} is none that merge knows; write 'delta' or 'iceberg'")

    def apply(self, change: Change, mark: Mark) -> None:
        with closing(self.kind()(self.table, self.options)) as lake:
            columns = columns_for(self.table, lake, change.rows.schema)
            if not is_new(self.table, lake.mark(mark), lake.is_empty(), mark, self.adopt):
                return
            fitting = replace(change, rows=as_columns(change.rows, columns), gone=as_columns(change.gone, columns))
            windows = Windows.of(fitting.places)
            old = as_columns(lake.read(windows), columns)
            lake.overwrite(windows, fitting.merged(old).select(columns.names), mark)


def merge_sql(
    table: str, batch: str, columns: StructType | Sequence[str], key: str | Sequence[str] | None = None
) -> str:
    """Returns a ``MERGE INTO`` for Spark that does to a table what a batch of panes says.

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
