"""DuckDB, which reads Arrow where it lies."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from aion.errors import needs_extra
from aion.sinks.addresses import Address
from aion.sinks.bad_values import UTF8, times
from aion.sinks.database import STAGED, WAIT_S, Staging, TableName, file_of

with needs_extra("duckdb", "a sink in DuckDB"):
    import duckdb

_TIMES = times(-9_223_372_022_400_000_000, (1 << 63) - 2)
"""The first instant is 290309-12-22 BC, and the last number means infinity."""
_PAUSE_S = 0.05


class DuckDB(Staging):
    """A transaction on a DuckDB file. Others can open the file between two batches.

    There is no unique index: DuckDB does not let a transaction delete a row and insert another in its place.
    """

    nested = True
    widths = (("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT"), ("FLOAT", "DOUBLE"))
    unfit = (UTF8, _TIMES)
    # With the first and the last of the batch's windows, such a join skips the row groups of other times.
    equal = "IS NOT DISTINCT FROM"

    @classmethod
    @contextmanager
    def open(cls, address: Address) -> Iterator[DuckDB]:
        with _connect(str(file_of(address))) as connection:
            connection.begin()
            yield cls(connection)
            connection.commit()

    def _columns(self, table: TableName) -> list[tuple[str, str]]:
        return self.query(
            "SELECT column_name, data_type FROM duckdb_columns() WHERE database_name = current_database() "
            "AND lower(table_name) = lower(?) AND lower(schema_name) = lower(?) ORDER BY column_index",
            table.table,
            table.schema or "main",
        )

    def insertable(self, table: TableName) -> Sequence[str]:
        found = self.driver.execute(
            "SELECT * FROM duckdb_columns() WHERE database_name = current_database() AND lower(table_name) = lower(?) "
            "AND lower(schema_name) = lower(?) ORDER BY column_index",
            [table.table, table.schema or "main"],
        )
        names = [each[0] for each in found.description]
        rows = [dict(zip(names, row, strict=True)) for row in found.fetchall()]
        # DuckDB before 2.0 does not say which columns it computes.
        return [row["column_name"] for row in rows if not row.get("is_generated")]

    def type_of(self, field: pa.Field) -> str:
        """Returns what DuckDB itself makes of the column."""
        with self.staged(pa.schema([field]).empty_table()):
            ((_, kind, *_),) = self.query(f"DESCRIBE SELECT * FROM {STAGED}")
        return str(kind)

    def index(self, table: TableName, columns: Sequence[str], *, unique: bool) -> None:
        """There is none."""

    @contextmanager
    def staged(self, rows: pa.Table) -> Iterator[None]:
        self.driver.register(STAGED, rows)
        yield
        self.driver.unregister(STAGED)


def _connect(path: str) -> Any:
    """Opens a file. While another process has it open, if only to read, DuckDB refuses; then this waits."""
    until = time.monotonic() + WAIT_S
    while True:
        try:
            return duckdb.connect(path)
        except duckdb.IOException as error:
            if "lock" not in str(error) or time.monotonic() > until:
                raise
        time.sleep(_PAUSE_S)
