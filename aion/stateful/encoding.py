"""The values of state variables as plain values (:mod:`aion.stateful.types`), by Spark's schemas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, datetime
from typing import Any

import numpy as np
from pyspark.errors import PySparkRuntimeError
from pyspark.sql.types import DataType, Row, StructType

from aion.errors import SchemaError
from aion.stateful.rows import row_maker
from aion.stateful.types import Conversion, Convert, or_none, same, scalar

Plain = Sequence[Any]
_SCALARS = frozenset({bool, int, float, str, bytes, datetime, date, type(None)})


def _plain_scalar(type_: DataType) -> Convert:
    if (row := scalar(type_)) is None:
        raise SchemaError(f"a state variable cannot have the type {type_.simpleString()}")
    return row.plain


def _plain_struct(fields: Sequence[Convert]) -> Convert:
    def convert(v: Any) -> Plain | None:
        if not isinstance(v, list | tuple):
            return None
        if len(v) != len(fields):
            raise _wrong_length(len(fields), len(v))
        return [field(e) for field, e in zip(fields, v, strict=True)]

    return convert


_PLAIN = Conversion(
    _plain_scalar,
    lambda type_, element: lambda v: [element(e) for e in v] if isinstance(v, list | tuple) else None,
    # Pairs, because a plain map could not have lists as keys.
    lambda type_, key, value: lambda v: [[key(k), value(e)] for k, e in v.items()] if isinstance(v, dict) else None,
    lambda type_, fields: _plain_struct(fields),
)
"""From what Spark's own conversion leaves of the user's value."""


def _map(key: Convert, value: Convert) -> Convert:
    return or_none(dict if key is value is same else lambda v: {key(k): value(e) for k, e in v})


def _tuple(fields: Sequence[Convert]) -> Convert:
    if all(field is same for field in fields):
        return or_none(tuple)
    return or_none(lambda v: tuple([field(e) for field, e in zip(fields, v, strict=True)]))


def from_plain(
    convert: Callable[[DataType], Convert], user_defined: Callable[[Any], Convert] | None = None
) -> Conversion:
    """Returns a conversion of plain values to lists, dicts and tuples. ``convert``: that of their scalars."""
    return Conversion(
        convert,
        # A new list: the user may change it.
        lambda type_, element: or_none(list if element is same else lambda v: [element(e) for e in v]),
        lambda type_, key, value: _map(key, value),
        lambda type_, fields: _tuple(fields),
        user_defined,
    )


def _internal_scalar(type_: DataType) -> Convert:
    row = scalar(type_)
    return same if row is None or row.internal is same else or_none(row.internal)


INTERNAL = from_plain(_internal_scalar)
"""To what Spark's schema makes the user's value of."""


class Codec:
    """Converts the values of one state variable by its schema. Raises SchemaError for a type that cannot be stored."""

    def __init__(self, schema: StructType) -> None:
        self.schema = schema
        self._row = row_maker(schema.names)
        self._to = _PLAIN.of(schema)
        self._internal = INTERNAL.of(schema)
        scalars = [scalar(field.dataType) for field in schema]
        # Values of exactly these types are plain already, if integers are not too large.
        exact = [row.exact for row in scalars if row is not None and row.exact is not None]
        self._exact = exact if len(exact) == len(scalars) else None
        self._limits = [(i, 1 << (row.bits - 1)) for i, row in enumerate(scalars) if row is not None and row.bits]
        self._converts = any(field.dataType.needConversion() for field in schema)
        self._is_plain = not self._converts and all(INTERNAL.of(field.dataType) is same for field in schema)
        self.plain: Callable[[Any], Plain] = self._single() or self._plain
        """The plain form of a user's tuple. Raises what Spark raises."""

    def _single(self) -> Callable[[Any], Plain] | None:
        """:meth:`_plain` in a third of the time, for tuples of one value that is plain already."""
        if self._exact is None or len(self._exact) != 1:
            return None
        (kind,), limit, any_value = self._exact, self._limits[0][1] if self._limits else 0, self._plain

        def single(value: Any) -> Plain:
            is_plain = type(value) is tuple and len(value) == 1 and type(value[0]) is kind
            return value if is_plain and (not limit or -limit <= value[0] < limit) else any_value(value)

        return single

    def _plain(self, value: Any) -> Plain:
        if [*map(type, value)] == self._exact:
            for i, limit in self._limits:
                if not -limit <= value[i] < limit:
                    break
            else:
                return value if type(value) is tuple else list(value)
        plain: Plain = self._to(self.schema.toInternal(tuple(map(normalized, value))))
        return plain

    def value(self, plain: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the user's tuple."""
        if self._is_plain:
            return tuple(plain)
        internal: tuple[Any, ...] = self._internal(plain)
        return tuple(self.schema.fromInternal(internal)) if self._converts else internal

    def values(self, plains: Iterable[Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
        """Returns the user's tuples, lazily."""
        return map(tuple if self._is_plain else self.value, plains)

    def row(self, plain: Sequence[Any]) -> Row:
        """Returns the value as a Row with the names of its fields."""
        return self._row(self.value(plain))


def _wrong_length(fields: int, values: int) -> PySparkRuntimeError:
    return PySparkRuntimeError(
        "Error updating state: [STRUCT_ARRAY_LENGTH_MISMATCH] Input row doesn't have expected number of values "
        f"required by the schema. {fields} fields are required while {values} values are provided. SQLSTATE: 2201E"
    )


def normalized(v: Any) -> Any:
    """Returns a value with numbers of Python instead of numpy's, and times of Python instead of pandas', at every
    depth.
    """
    if type(v) in _SCALARS:
        return v
    if isinstance(v, np.generic):
        return v.tolist()
    if isinstance(v, Row) or (isinstance(v, tuple) and hasattr(v, "_fields")):
        return type(v)(*map(normalized, v))
    if isinstance(v, list | tuple):
        return type(v)(map(normalized, v))
    if isinstance(v, dict):
        return {normalized(key): normalized(value) for key, value in v.items()}
    if hasattr(v, "to_pytimedelta"):
        return v.to_pytimedelta()
    if hasattr(v, "to_pydatetime"):
        return v.to_pydatetime()
    return v
