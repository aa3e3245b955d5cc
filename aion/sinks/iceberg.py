"""Iceberg, through pyiceberg. The mark is in properties of the table, which change in the same commit as its rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, ClassVar

import pyarrow as pa

from aion.errors import ConfigError, SchemaError, needs_extra
from aion.sinks.bad_values import UTF8, YEARS_1_TO_9999, Rule
from aion.sinks.lake import Conflict, Places, plain
from aion.sinks.marks import History, Mark

with needs_extra("iceberg", "a sink in Iceberg"):
    import pyiceberg_core  # noqa: F401 (pyiceberg needs it for tables that are partitioned by time or bucket)
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import CommitFailedException, ValidationException
    from pyiceberg.expressions import And, GreaterThanOrEqual, In, LessThanOrEqual

_QUERY, _CHECKPOINT, _BATCH = "aion.query", "aion.checkpoint", "aion.batch"
_WRITTEN = 2
_RUN, _DIGEST, _FILLED = "aion.run", "aion.digest", "aion.filled"


class Iceberg:
    """A snapshot of a table."""

    case: ClassVar[bool] = True

    def __init__(self, table: str, options: Mapping[str, str]) -> None:
        if "." not in table:
            raise ConfigError(f"table: {table!r} is no table of a catalog; write 'namespace.table'")
        properties = dict(options)
        self._name = table
        self._catalog: Any = load_catalog(properties.pop("catalog", None), **properties)
        self._table: Any = self._catalog.load_table(table) if self._catalog.table_exists(table) else None
        if self._table is not None and self._table.metadata.format_version > _WRITTEN:
            raise SchemaError(
                f"table {table!r} has version {self._table.metadata.format_version} of the Iceberg format, and "
                f"pyiceberg writes tables up to version {_WRITTEN}; make one of that version (format-version)"
            )

    def columns(self) -> pa.Schema | None:
        return None if self._table is None else plain(self._table.schema().as_arrow())

    def create(self, schema: pa.Schema) -> None:
        self._catalog.create_namespace_if_not_exists(self._name.rpartition(".")[0])
        self._table = self._catalog.create_table(self._name, schema=schema)

    def rules(self) -> Sequence[Rule]:
        return (UTF8, YEARS_1_TO_9999)

    def count(self) -> int:
        return int(self._table.scan().count())

    def mark(self, now: Mark) -> Mark | None:
        found = self._table.properties
        if _BATCH not in found:
            return None
        filled = {"true": True, "false": False}.get(found.get(_FILLED, ""))
        history = History(found[_QUERY], found[_CHECKPOINT])
        return Mark(history, int(found[_BATCH]), run=found.get(_RUN), digest=found.get(_DIGEST), filled=filled)

    @property
    def computed(self) -> set[str]:
        return set()

    def read(self, places: Places) -> pa.Table:
        return self._table.scan(row_filter=_filter(places)).to_arrow()

    def overwrite(self, places: Places, rows: pa.Table, mark: Mark) -> None:
        said = {_QUERY: mark.history.query, _CHECKPOINT: mark.history.checkpoint, _BATCH: str(mark.batch)}
        said |= {_FILLED: str(bool(mark.filled)).lower()}
        said |= {name: text for name, text in ((_RUN, mark.run), (_DIGEST, mark.digest)) if text is not None}
        try:
            self._commit(places, rows, said)
        except (CommitFailedException, ValidationException) as error:
            raise Conflict(str(error)) from error

    def _commit(self, places: Places, rows: pa.Table, said: Mapping[str, str]) -> None:
        with self._table.transaction() as transaction:
            if places.values:
                transaction.overwrite(rows, overwrite_filter=_filter(places))
            if unknown := {_RUN, _DIGEST} & self._table.properties.keys() - said.keys():
                transaction.remove_properties(*unknown)
            transaction.set_properties(said)

    def close(self) -> None:
        self._catalog.close()


def _filter(places: Places) -> Any:
    values = [v.isoformat(timespec="microseconds") if isinstance(v, datetime) else v for v in places.values]
    if places.between:
        return And(GreaterThanOrEqual(places.column, values[0]), LessThanOrEqual(places.column, values[1]))
    return In(places.column, values)
