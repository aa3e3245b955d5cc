"""PostgreSQL, through the driver of ADBC: rows go from Arrow to binary COPY."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.types as t

from aion.errors import needs_extra
from aion.sinks.addresses import Address, check_libpq
from aion.sinks.bad_values import JSON, NUL, NUL_IN_JSON, UTF8, Rule, longer_than, times
from aion.sinks.database import STAGED, Staging, TableName, identifiers

with needs_extra("postgresql", "a sink in PostgreSQL"):
    import adbc_driver_manager  # noqa: F401 (checked here because the other one imports it)
    import adbc_driver_postgresql.dbapi as adbc

_PLACES = re.compile(r'"(?:[^"]|"")*"|\?')
"""A name in quotes, in which a question mark is one, or the place of a value."""
_TIMES = times(-210_866_803_200_000_000, (1 << 63) - 1)
"""The first instant is 4713-11-24 BC, in the calendar that PostgreSQL uses."""
_LENGTH = re.compile(r"character varying\((\d+)\)")
_NULLS_NOT_DISTINCT = 150_000
"""The first version whose unique index can treat nulls as equal."""


class PostgreSQL(Staging):
    """A transaction on a PostgreSQL database."""

    case = True
    longest_name = 63
    types = (
        (t.is_boolean, "boolean"),
        (lambda type_: t.is_int8(type_) or t.is_int16(type_), "smallint"),
        (t.is_int32, "integer"),
        (t.is_int64, "bigint"),
        (t.is_float32, "real"),
        (t.is_float64, "double precision"),
        (lambda type_: t.is_string(type_) or t.is_large_string(type_), "text"),
        (lambda type_: t.is_binary(type_) or t.is_large_binary(type_), "bytea"),
        (t.is_date, "date"),
        (lambda type_: t.is_timestamp(type_) and type_.tz is not None, "timestamp with time zone"),
        (t.is_timestamp, "timestamp without time zone"),
        (t.is_decimal, "numeric"),
        (t.is_duration, "interval"),
    )
    widths = (
        ("smallint", "integer", "bigint", "numeric"),
        ("real", "double precision"),
        ("text", "character varying"),
        ("jsonb", "json", "text"),
    )
    unfit = (UTF8, NUL, NUL_IN_JSON, _TIMES)

    @classmethod
    def resolve(cls, address: Address) -> Address:
        check_libpq(address)
        return address

    @classmethod
    @contextmanager
    def open(cls, address: Address) -> Iterator[PostgreSQL]:
        with adbc.connect(address.secret.text) as connection, connection.cursor() as cursor:
            yield cls(cursor)
            connection.commit()

    def query(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        numbers = iter(range(1, len(values) + 1))
        sql = _PLACES.sub(lambda found: f"${next(numbers)}" if found[0] == "?" else found[0], sql)
        self.driver.execute(sql, values or None)
        return list(self.driver.fetchall()) if self.driver.description else []

    def _columns(self, table: TableName) -> list[tuple[str, str]]:
        return self.query(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = to_regclass(?) AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
            str(table),
        )

    def insertable(self, table: TableName) -> Sequence[str]:
        rows = self.query(
            "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(?) AND attnum > 0 AND NOT attisdropped "
            "AND attgenerated = '' AND attidentity <> 'a' ORDER BY attnum",
            str(table),
        )
        return [name for (name,) in rows]

    def type_of(self, field: pa.Field) -> str:
        if field.metadata == JSON:
            return "jsonb"
        kind = super().type_of(field)
        return f"numeric({field.type.precision},{field.type.scale})" if kind == "numeric" else kind

    def holds(self, declared: str, field: pa.Field) -> bool:
        if t.is_decimal(field.type):
            return _holds_decimal(declared, field.type)
        return super().holds(_LENGTH.sub("character varying", declared), field)

    def rules(self, table: TableName) -> Sequence[Rule]:
        lengths = ((name, _LENGTH.fullmatch(kind)) for name, kind in self.columns(table).items())
        return (*self.unfit, *(longer_than(name, int(length[1])) for name, length in lengths if length is not None))

    def index(self, table: TableName, columns: Sequence[str], *, unique: bool) -> None:
        kind, nulls = "UNIQUE INDEX" if unique else "INDEX", ""
        if unique and int(self.query("SELECT current_setting('server_version_num')")[0][0]) >= _NULLS_NOT_DISTINCT:
            nulls = " NULLS NOT DISTINCT"
        self.query(f"CREATE {kind} ON {table} ({identifiers(columns)}){nulls}")

    @contextmanager
    def staged(self, rows: pa.Table) -> Iterator[None]:
        self.driver.adbc_ingest(STAGED, rows, mode="create", temporary=True)
        yield
        self.query(f"DROP TABLE {STAGED}")


def _holds_decimal(declared: str, type_: pa.DataType) -> bool:
    if declared == "numeric":
        return True
    found = re.fullmatch(r"numeric\((\d+),(\d+)\)", declared)
    if found is None:
        return False
    precision, scale = map(int, found.groups())
    return scale >= int(type_.scale) and precision - scale >= int(type_.precision - type_.scale)
