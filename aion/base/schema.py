"""Result schemas as users write them: a pyarrow schema or Spark's DDL, e.g. ``"median double, n bigint"``."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pyarrow as pa

from aion.errors import SchemaError

_SIMPLE: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(), "byte": pa.int8(),
    "smallint": pa.int16(), "short": pa.int16(),
    "int": pa.int32(), "integer": pa.int32(),
    "bigint": pa.int64(), "long": pa.int64(),
    "float": pa.float32(), "real": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(), "binary": pa.binary(), "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"), "timestamp_ltz": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}  # fmt: skip
_TOKEN = re.compile(r"\s*(`[^`]+`|\w+|[<>(),:])")


def parse_schema(value: str | pa.Schema) -> pa.Schema:
    """Returns the Arrow schema of a DDL string; an Arrow schema is returned as it is. Raises SchemaError for anything
    else.
    """
    if isinstance(value, pa.Schema):
        return value
    if not isinstance(value, str) or not value.strip():
        raise SchemaError(f"schema: {value!r} is not a schema; write e.g. schema='median double, n bigint'")
    reader = _Reader(value)
    fields = list(reader.fields(end=None))
    names = [f.name for f in fields]
    if len(set(names)) != len(names):
        raise SchemaError(f"schema: {value!r} names a column twice")
    return pa.schema(fields)


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[str] = []
        position = 0
        while position < len(text.rstrip()):
            match = _TOKEN.match(text, position)
            if match is None:
                raise self._error(f"unexpected {text[position:].strip()[:10]!r}")
            self.tokens.append(match.group(1))
            position = match.end()
        self.tokens.reverse()

    def fields(self, end: str | None) -> Iterator[pa.Field]:
        while True:
            name = self._next("a column name").strip("`")
            if self._peek() == ":":
                self.tokens.pop()
            type_ = self.type()
            nullable = True
            if (self._peek() or "").lower() == "not":
                self.tokens.pop()
                if self._next("NULL").lower() != "null":
                    raise self._error("NOT must be followed by NULL")
                nullable = False
            yield pa.field(name, type_, nullable)
            if self._peek() == end:
                if end is not None:
                    self.tokens.pop()
                return
            self._expect(",")

    def type(self) -> pa.DataType:
        name = self._next("a type").lower()
        if name in ("decimal", "numeric", "dec"):
            precision, scale = 10, 0
            if self._peek() == "(":
                self.tokens.pop()
                precision = self._number("a precision")
                if self._peek() == ",":
                    self.tokens.pop()
                    scale = self._number("a scale")
                self._expect(")")
            if not 1 <= precision <= 38 or scale > precision:
                raise self._error(f"decimal({precision}, {scale}) is not valid; use 1 to 38 digits, scale included")
            return pa.decimal128(precision, scale)
        if name == "array":
            self._expect("<")
            element = self.type()
            self._expect(">")
            return pa.list_(element)
        if name == "map":
            self._expect("<")
            key = self.type()
            self._expect(",")
            value = self.type()
            self._expect(">")
            return pa.map_(key, value)
        if name == "struct":
            self._expect("<")
            return pa.struct(list(self.fields(end=">")))
        if name not in _SIMPLE:
            raise self._error(f"unknown type {name!r}; use {', '.join(sorted(_SIMPLE))}, decimal(p,s), "
                              "array<>, map<>, struct<>")  # fmt: skip
        return _SIMPLE[name]

    def _number(self, what: str) -> int:
        token = self._next(what)
        if not token.isdecimal() or len(token) > 9:
            raise self._error(f"expected {what}, found {token!r}")
        return int(token)

    def _peek(self) -> str | None:
        return self.tokens[-1] if self.tokens else None

    def _next(self, what: str) -> str:
        if not self.tokens:
            raise self._error(f"expected {what}, but the text ends")
        return self.tokens.pop()

    def _expect(self, token: str) -> None:
        found = self._next(repr(token))
        if found != token:
            raise self._error(f"expected {token!r}, found {found!r}")

    def _error(self, problem: str) -> SchemaError:
        return SchemaError(f"schema: {self.text!r}: {problem}")


def instead_of_nested(name: str, type_: pa.DataType) -> str:
    """Returns what to write instead of a key column of this nested type: the end of an error."""
    if pa.types.is_struct(type_):
        fields = [field.name for field in type_]
        columns = {f"{name}_{field}": f"events[{name!r}][{field!r}]" for field in fields}
        return (
            "give its fields instead: add .withColumns({"
            + ", ".join(f"{column!r}: {value}" for column, value in columns.items())
            + f"}}) to the events, and use key={[*columns]}"
        )
    return (
        f"give it as text instead: add .withColumn('{name}_text', "
        f"to_json({name!r})) to the events, and use key='{name}_text'"
    )
