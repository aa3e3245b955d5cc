"""``merge``: keeps the newest result of each window in a table of Delta Lake or Iceberg."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from aion.core.operator.actions import PaneKind
from aion.errors import ConfigError
from aion.sinks.lake import Lake, Windows, as_columns, columns_for
from aion.sinks.marks import Mark, is_new
from aion.sinks.rows import KIND, Change, identity_of, written_columns
from aion.sinks.sink import Sink, names


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
            fitting = Change(change.identity, as_columns(change.rows, columns), as_columns(change.gone, columns))
            windows = Windows.of(fitting.places)
            old = as_columns(lake.read(windows), columns)
            lake.overwrite(windows, fitting.merged(old).select(columns.names), mark)


def merge_sql(table: str, batch: str, columns: Sequence[str], key: str | Sequence[str] | None = None) -> str:
    """Returns a ``MERGE INTO`` for Spark that does to a table what a batch of panes says.

    ``batch``: the name of a view with the batch. ``columns``: the columns of the batch. There is no mark: a batch that
    is run again is merged again. Raises SchemaError if a column is missing.
    """
    identity = [_quoted(name) for name in identity_of(columns, names(key))]
    written = [_quoted(name) for name in written_columns(columns)]
    return f"""\
MERGE INTO {table} AS old
USING (
  SELECT last.*
  FROM (
    SELECT max_by(struct({", ".join(written)}), aion_row) AS last
    FROM (SELECT *, monotonically_increasing_id() AS aion_row FROM {batch} WHERE {KIND} <> '{PaneKind.DROPPED.value}')
    GROUP BY {", ".join(identity)}
  )
) AS new
ON {" AND ".join(f"old.{name} <=> new.{name}" for name in identity)}
WHEN MATCHED AND new.{KIND} = '{PaneKind.RETRACTED.value}' THEN DELETE
WHEN MATCHED THEN UPDATE SET {", ".join(f"{name} = new.{name}" for name in written)}
WHEN NOT MATCHED AND new.{KIND} <> '{PaneKind.RETRACTED.value}' THEN
  INSERT ({", ".join(written)}) VALUES ({", ".join(f"new.{name}" for name in written)})
"""


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
