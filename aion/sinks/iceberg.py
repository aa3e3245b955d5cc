"""Iceberg, through pyiceberg. The mark is in properties of the table, which change in the same commit as its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from aion.errors import ConfigError, needs_extra
from aion.sinks.lake import START, Windows, plain
from aion.sinks.marks import History, Mark

with needs_extra("iceberg", "a sink in Iceberg"):
    from pyiceberg.catalog import load_catalog
    from pyiceberg.expressions import And, GreaterThanOrEqual, In, LessThanOrEqual

_QUERY, _CHECKPOINT, _BATCH = "aion.query", "aion.checkpoint", "aion.batch"


class Iceberg:
    """A snapshot of a table."""

    def __init__(self, table: str, options: Mapping[str, str]) -> None:
        if "." not in table:
            raise ConfigError(f"table: {table!r} is no table of a catalog; write 'namespace.table'")
        properties = dict(options)
        self._name = table
        self._catalog: Any = load_catalog(properties.pop("catalog", None), **properties)
        self._table: Any = self._catalog.load_table(table) if self._catalog.table_exists(table) else None

    def columns(self) -> pa.Schema | None:
        return None if self._table is None else plain(self._table.schema().as_arrow())

    def create(self, schema: pa.Schema) -> None:
        self._catalog.create_namespace_if_not_exists(self._name.rpartition(".")[0])
        self._table = self._catalog.create_table(self._name, schema=schema)

    def is_empty(self) -> bool:
        return bool(self._table.scan().count() == 0)

    def mark(self, now: Mark) -> Mark | None:
        found = self._table.properties
        if _BATCH not in found:
            return None
        return Mark(History(found[_QUERY], found[_CHECKPOINT]), int(found[_BATCH]))

    def read(self, windows: Windows) -> pa.Table:
        return self._table.scan(row_filter=_filter(windows)).to_arrow()

    def overwrite(self, windows: Windows, rows: pa.Table, mark: Mark) -> None:
        history = mark.history
        with self._table.transaction() as transaction:
            if windows.starts:
                transaction.overwrite(rows, overwrite_filter=_filter(windows))
            transaction.set_properties(
                {_QUERY: history.query, _CHECKPOINT: history.checkpoint, _BATCH: str(mark.batch)}
            )

    def close(self) -> None:
        self._catalog.close()


def _filter(windows: Windows) -> Any:
    texts = [at.isoformat(timespec="microseconds") for at in windows.starts]
    if windows.between:
        return And(GreaterThanOrEqual(START, texts[0]), LessThanOrEqual(START, texts[1]))
    return In(START, texts)
