"""Values of state variables as JSON, and keys that are given as JSON.

Times are ISO 8601 in UTC, dates are ISO 8601, decimals are text, bytes are Base64, and intervals are numbers of
microseconds or months. A map whose keys are not text becomes a list of pairs.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal, InvalidOperation
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
    UserDefinedType,
)

from aion.base.time import format_instant
from aion.errors import SchemaError
from aion.stateful.keys import Keys

_BITS: Mapping[type[DataType], int] = {ByteType: 8, ShortType: 16, IntegerType: 32, LongType: 64}
_EPOCH = date(1970, 1, 1)


class JsonKey:
    """The key of an operator. ``fields``: its columns, as the operator's definition has them."""

    def __init__(self, fields: Sequence[Mapping[str, Any]]) -> None:
        self.schema = StructType.fromJson({"type": "struct", "fields": list(fields)})
        self._keys = Keys(self.schema)

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in self.schema)

    def values(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns the values of the columns. Raises SchemaError for other columns or types."""
        names = self.schema.names
        wrong = [f"the column {name} is missing" for name in names if name not in given]
        wrong += [f"it has no column {name}" for name in given if name not in names]
        if wrong:
            raise SchemaError("; ".join(wrong))
        values = []
        for field in self.schema:
            try:
                values.append(from_json(given[field.name], field.dataType))
            except SchemaError as error:
                raise SchemaError(f"column {field.name}: {error}") from error.__cause__
        return tuple(values)

    def to_bytes(self, values: tuple[Any, ...]) -> bytes:
        """Returns the key as it is stored. Raises SchemaError for a value that its type cannot have."""
        try:
            return self._keys.to_bytes(values)
        except PySparkException as error:
            raise SchemaError(str(error)) from error


def json_text(plain: Any, type_: DataType) -> str:
    """Returns a plain value as the text of JSON."""
    return json.dumps(as_json(plain, type_), ensure_ascii=False)


def as_json(plain: Any, type_: DataType) -> Any:
    """Returns what :func:`json.dumps` takes, for a plain value (:mod:`aion.stateful.encoding`)."""
    if plain is None:
        return None
    match type_:
        case StructType():
            return {f.name: as_json(v, f.dataType) for f, v in zip(type_, plain, strict=True)}
        case ArrayType():
            return [as_json(v, type_.elementType) for v in plain]
        case MapType():
            pairs = [(as_json(k, type_.keyType), as_json(v, type_.valueType)) for k, v in plain]
            return dict(pairs) if isinstance(type_.keyType, StringType) else [list(pair) for pair in pairs]
        case UserDefinedType():
            return as_json(plain, type_.sqlType())
        case BinaryType():
            return base64.b64encode(plain).decode()
        case TimestampType():
            return format_instant(plain)
        case TimestampNTZType():
            return format_instant(plain).removesuffix("Z")
        case DateType():
            try:
                return (_EPOCH + timedelta(days=plain)).isoformat()
            except OverflowError:
                return f"{plain} days"
    return plain


def from_json(value: Any, type_: DataType) -> Any:
    """Returns what a user's code has for a value that is given as JSON. Raises SchemaError for a value of another
    type.
    """
    if value is None:
        return None
    try:
        return _from_json(value, type_)
    except (ValueError, OverflowError, InvalidOperation) as error:
        raise SchemaError(f"{json.dumps(value)} is no {type_.simpleString()}: {error}") from error


def _from_json(value: Any, type_: DataType) -> Any:
    for kind, bits in _BITS.items():
        if isinstance(type_, kind):
            _check(value, type_, int)
            if not -(1 << (bits - 1)) <= value < 1 << (bits - 1):
                raise ValueError(f"it needs more than {bits} bits")
            return value
    match type_:
        case DoubleType() | FloatType():
            _check(value, type_, int, float)
            return float(value)
        case BooleanType():
            _check(value, type_, bool)
        case StringType():
            _check(value, type_, str)
        case BinaryType():
            _check(value, type_, str)
            return base64.b64decode(value, validate=True)
        case DecimalType():
            _check(value, type_, str, int)
            number = Decimal(value)
            if number != number.quantize(Decimal(1).scaleb(-type_.scale)):
                raise ValueError(f"it has more than {type_.scale} digits after the point")
            return number
        case DateType():
            _check(value, type_, str)
            return date.fromisoformat(value)
        case TimestampType() | TimestampNTZType():
            _check(value, type_, str)
            time = datetime.fromisoformat(value)
            if (time.tzinfo is None) == isinstance(type_, TimestampType):
                raise ValueError(
                    "it needs a time zone, as in 2024-05-01T12:00:00Z" if time.tzinfo is None else "it has a time zone"
                )
            return time
        case DayTimeIntervalType():
            _check(value, type_, int)
            return timedelta(microseconds=value)
        case ArrayType():
            _check(value, type_, list)
            return [from_json(v, type_.elementType) for v in value]
        case StructType():
            _check(value, type_, dict)
            if sorted(value) != sorted(type_.names):
                raise ValueError(f"its fields must be {', '.join(type_.names)}")
            return tuple(from_json(value[field.name], field.dataType) for field in type_)
    return value


def _check(value: Any, type_: DataType, *kinds: type) -> None:
    if type(value) not in kinds:
        names = {int: "a number", float: "a number", str: "a text", bool: "true or false", list: "a list"}
        wanted = " or ".join(dict.fromkeys(names.get(kind, "an object") for kind in kinds))
        raise ValueError(f"it must be {wanted}")
