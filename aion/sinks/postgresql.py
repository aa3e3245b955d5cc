"""PostgreSQL, through the driver of ADBC: rows go from Arrow to binary COPY."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.types as t

from aion.errors import needs_extra
from aion.sinks.addresses import Address, check_libpq
from aion.sinks.bad_values import JSON, NUL, NUL_IN_JSON, UTF8, Rule, longer_than, times
from aion.sinks.database import TableName, Types, identifier, identifiers, type_in
from aion.sinks.rows import Change, null_patterns

with needs_extra("postgresql", "a sink in PostgreSQL"):
    import adbc_driver_manager  # noqa: F401 (checked here because the other one imports it)
    import adbc_driver_postgresql.dbapi as adbc

_STAGED = "aion_staged"
_PLACES = re.compile(r'"(?:[^"]|"")*"|\?')
"""A name in quotes, in which a question mark is one, or the place of a value."""
_LONGEST_NAME = 63
_TIMES = times(-210_866_803_200_000_000, (1 << 63) - 1)
"""The first instant is 4713-11-24 BC, in the calendar that PostgreSQL uses."""
_LENGTH = re.compile(r"character varying\((\d+)\)")
_NULLS_NOT_DISTINCT = 150_000
"""The first version whose unique index can treat nulls as equal."""
_TYPES: Types = (
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
_WIDER = {
    "smallint": {"integer", "bigint", "numeric"},
    "integer": {"bigint", "numeric"},
    "bigint": {"numeric"},
    "real": {"double precision"},
    "text": {"character varying"},
    "jsonb": {"json", "text"},
}


class PostgreSQL:
    """A transaction on a PostgreSQL database."""

    nested: ClassVar[bool] = False
    case: ClassVar[bool] = True
    longest_name: ClassVar[int | None] = _LONGEST_NAME

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor

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
        self._cursor.execute(sql, values or None)
        return list(self._cursor.fetchall()) if self._cursor.description else []

    def columns(self, table: TableName) -> dict[str, str]:
        rows = self.query(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = to_regclass(?) AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
            str(table),
        )
        return dict(rows)

    def type_of(self, field: pa.Field) -> str:
        if field.metadata == JSON:
            return "jsonb"
        kind = type_in(_TYPES, field)
        return f"numeric({field.type.precision},{field.type.scale})" if kind == "numeric" else kind

    def holds(self, declared: str, field: pa.Field) -> bool:
        wanted = self.type_of(field)
        if declared == wanted:
            return True
        if t.is_decimal(field.type):
            return _holds_decimal(declared, field.type)
        base = _LENGTH.sub("character varying", declared)
        return base in _WIDER.get(wanted, ())

    def rules(self, table: TableName) -> Sequence[Rule]:
        lengths = ((name, _LENGTH.fullmatch(kind)) for name, kind in self.columns(table).items())
        short = [longer_than(name, int(length[1])) for name, length in lengths if length is not None]
        return (UTF8, NUL, NUL_IN_JSON, _TIMES, *short)

    def index(self, table: TableName, columns: Sequence[str], *, unique: bool) -> None:
        if not unique:
            self.query(f"CREATE INDEX ON {table} ({identifiers(columns)})")
            return
        ((version,),) = self.query("SELECT current_setting('server_version_num')")
        nulls = " NULLS NOT DISTINCT" if int(version) >= _NULLS_NOT_DISTINCT else ""
        self.query(f"CREATE UNIQUE INDEX ON {table} ({identifiers(columns)}){nulls}")

    def replace(self, table: TableName, change: Change) -> None:
        for rows in (change.rows, change.gone):
            if rows.num_rows:
                self._stage(rows)
                self._delete(table, change.identity, rows)
                if rows is change.rows:
                    self._insert(table, rows)
                self.query(f"DROP TABLE {_STAGED}")

    def _stage(self, rows: pa.Table) -> None:
        self._cursor.adbc_ingest(_STAGED, rows, mode="create", temporary=True)

    def _delete(self, table: TableName, identity: Sequence[str], rows: pa.Table) -> None:
        """Equality finds rows by an index or a hash table, and IS NOT DISTINCT FROM compares all with all."""
        for nulls in null_patterns(rows.select(list(identity))):
            same = [
                f"old.{name} IS NULL AND new.{name} IS NULL" if column in nulls else f"old.{name} = new.{name}"
                for column in identity
                for name in (identifier(column),)
            ]
            self.query(f"DELETE FROM {table} AS old USING {_STAGED} AS new WHERE {' AND '.join(same)}")

    def _insert(self, table: TableName, rows: pa.Table) -> None:
        declared = self.columns(table)
        values = [
            f"CAST({identifier(field.name)} AS {declared[field.name]})"
            if field.metadata == JSON
            else identifier(field.name)
            for field in rows.schema
        ]
        names = identifiers(rows.column_names)
        self.query(f"INSERT INTO {table} ({names}) SELECT {', '.join(values)} FROM {_STAGED}")


def _holds_decimal(declared: str, type_: pa.DataType) -> bool:
    if declared == "numeric":
        return True
    found = re.fullmatch(r"numeric\((\d+),(\d+)\)", declared)
    if found is None:
        return False
    precision, scale = map(int, found.groups())
    return scale >= int(type_.scale) and precision - scale >= int(type_.precision - type_.scale)
