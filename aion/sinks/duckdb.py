"""DuckDB, which reads Arrow where it lies."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pyarrow as pa

from aion.errors import needs_extra
from aion.sinks.addresses import Address
from aion.sinks.bad_values import UTF8, Rule, times
from aion.sinks.database import Columns, TableName, file_of, identifier, identifiers, with_absolute_path
from aion.sinks.rows import Change

with needs_extra("duckdb", "a sink in DuckDB"):
    import duckdb

_BATCH = "aion_batch_of_rows"
_TIMES = times(-9_223_372_022_400_000_000, (1 << 63) - 2)
"""The first instant is 290309-12-22 BC, and the last number means infinity."""
_WAIT_S = 60.0
_PAUSE_S = 0.05


class DuckDB:
    """A transaction on a DuckDB file. Others can open the file between two batches.

    There is no unique index: DuckDB does not let a transaction delete a row and insert another in its place.
    """

    nested: ClassVar[bool] = True
    case: ClassVar[bool] = False
    longest_name: ClassVar[int | None] = None

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @classmethod
    def resolve(cls, address: Address) -> Address:
        return with_absolute_path(address)

    @classmethod
    @contextmanager
    def open(cls, address: Address) -> Iterator[DuckDB]:
        with _connect(str(file_of(address))) as connection:
            connection.begin()
            yield cls(connection)
            connection.commit()

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        return list(self._connection.execute(sql, list(values)).fetchall())

    def columns(self, table: TableName) -> dict[str, str]:
        rows = self.query(
            "SELECT column_name, data_type FROM duckdb_columns() WHERE database_name = current_database() "
            "AND lower(table_name) = lower(?) AND lower(schema_name) = lower(?) ORDER BY column_index",
            table.table,
            table.schema or "main",
        )
        return Columns(rows)

    def type_of(self, field: pa.Field) -> str:
        """Returns what DuckDB itself makes of the column."""
        self._connection.register(_BATCH, pa.schema([field]).empty_table())
        ((_, kind, *_),) = self.query(f"DESCRIBE SELECT * FROM {_BATCH}")
        self._connection.unregister(_BATCH)
        return str(kind)

    def holds(self, declared: str, field: pa.Field) -> bool:
        wanted = self.type_of(field)
        integers = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT")
        if wanted in integers and declared in integers:
            return integers.index(wanted) <= integers.index(declared)
        return declared == wanted or (wanted, declared) == ("FLOAT", "DOUBLE")

    def rules(self, table: TableName) -> Sequence[Rule]:
        return (UTF8, _TIMES)

    def index(self, table: TableName, columns: Sequence[str], *, unique: bool) -> None:
        pass

    def replace(self, table: TableName, change: Change) -> None:
        # With the first and the last of the batch's windows, DuckDB skips the row groups of other times.
        same = " AND ".join(f"old.{name} IS NOT DISTINCT FROM new.{name}" for name in map(identifier, change.identity))
        self._connection.register(_BATCH, change.places)
        self.query(f"DELETE FROM {table} AS old USING {_BATCH} AS new WHERE {same}")
        self._connection.unregister(_BATCH)
        self._connection.register(_BATCH, change.rows)
        names = identifiers(change.rows.column_names)
        self.query(f"INSERT INTO {table} ({names}) SELECT {names} FROM {_BATCH}")
        self._connection.unregister(_BATCH)


def _connect(path: str) -> Any:
    """Opens a file. While another process has it open, if only to read, DuckDB refuses; then this waits."""
    until = time.monotonic() + _WAIT_S
    while True:
        try:
            return duckdb.connect(path)
        except duckdb.IOException as error:
            if "lock" not in str(error) or time.monotonic() > until:
                raise
        time.sleep(_PAUSE_S)
