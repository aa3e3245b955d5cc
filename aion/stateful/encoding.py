"""The values of state variables as bytes, by Spark's schemas.

A value crosses three forms: the user's tuple; *plain* values, which are lists of None, bool, int, float, str, bytes and
lists; and MessagePack bytes. Conversion to plain values does what Spark does between Python and its rows
(``EvaluatePython.makeFromJava``): a value of another type than the schema's becomes null, or is converted to text.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date, datetime
from decimal import MAX_EMAX, MIN_EMIN, ROUND_HALF_UP, Context, Decimal
from typing import Any

import numpy as np
from pyspark.errors import PySparkRuntimeError
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
    NullType,
    Row,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
    UserDefinedType,
    YearMonthIntervalType,
)

from aion.errors import SchemaError
from aion.stateful.rows import row_maker

Plain = Sequence[Any]
Convert = Callable[[Any], Any]
_SCALARS = frozenset({bool, int, float, str, bytes, datetime, date, type(None)})
_BITS: dict[type[DataType], int] = {LongType: 64, IntegerType: 32, ShortType: 16, ByteType: 8}
_EXACT: dict[type[DataType], type] = {
    **dict.fromkeys(_BITS, int), DoubleType: float, StringType: str, BooleanType: bool, BinaryType: bytes
}  # fmt: skip
_FLOAT = struct.Struct("<f")
_DECIMALS = Context(prec=1000, rounding=ROUND_HALF_UP, Emin=MIN_EMIN, Emax=MAX_EMAX)
_LONG = 1 << 63


class Codec:
    """Converts the values of one state variable by its schema. Raises SchemaError for a type that cannot be stored."""

    def __init__(self, schema: StructType) -> None:
        self.schema = schema
        self._row = row_maker(schema.names)
        self._to = [_to_plain(field.dataType) for field in schema]
        self._from = [_from_plain(field.dataType) for field in schema]
        kinds = [type(field.dataType) for field in schema]
        # Values of exactly these types are plain already, if integers are not too large.
        self._exact = [_EXACT[kind] for kind in kinds] if all(kind in _EXACT for kind in kinds) else None
        self._limits = [(i, 1 << (_BITS[kind] - 1)) for i, kind in enumerate(kinds) if kind in _BITS]
        self._converts = any(field.dataType.needConversion() for field in schema)
        self._is_plain = not self._converts and not any(self._from)
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
        values = self.schema.toInternal(tuple(map(normalized, value)))
        if len(values) != len(self._to):
            raise _wrong_length(len(self._to), len(values))
        return [convert(v) for convert, v in zip(self._to, values, strict=True)]

    def value(self, plain: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the user's tuple."""
        if self._is_plain:
            return tuple(plain)
        return tuple(self.schema.fromInternal(self.internal(plain))) if self._converts else self.internal(plain)

    def internal(self, plain: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the value in the form that Spark's schema makes the user's value of."""
        return tuple([convert(v) if convert else v for convert, v in zip(self._from, plain, strict=True)])

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


# -- to plain values ----------------------------------------------------------------------------------


def _to_plain(type_: DataType) -> Convert:
    for kind, bits in _BITS.items():
        if isinstance(type_, kind):
            return _long if bits == 64 else _wrapping(bits)
    for kinds, convert in _TO:
        if isinstance(type_, kinds):
            return convert
    match type_:
        case DecimalType():
            return _decimal(type_)
        case ArrayType():
            return _array(_to_plain(type_.elementType))
        case MapType():
            return _map(_to_plain(type_.keyType), _to_plain(type_.valueType))
        case StructType():
            return _struct([_to_plain(field.dataType) for field in type_])
        case UserDefinedType():
            return _to_plain(type_.sqlType())
    if type_.typeName().startswith("time"):  # TIME, which older versions of pyspark do not have
        return _long
    raise SchemaError(f"a state variable cannot have the type {type_.simpleString()}")


def _long(v: Any) -> int | None:
    return v if type(v) is int and -_LONG <= v < _LONG else None


def _wrapping(bits: int) -> Convert:
    """Keeps the lowest bits of an integer, as the JVM does."""
    half, full = 1 << (bits - 1), 1 << bits

    def convert(v: Any) -> int | None:
        if type(v) is not int or not -_LONG <= v < _LONG:
            return None
        return v if -half <= v < half else (v + half) % full - half

    return convert


def _bool(v: Any) -> bool | None:
    return v if type(v) is bool else None


def _double(v: Any) -> float | None:
    return v if type(v) is float else None


def _float(v: Any) -> float | None:
    if type(v) is not float:
        return None
    try:
        rounded: float = _FLOAT.unpack(_FLOAT.pack(v))[0]
    except OverflowError:
        return float("inf") if v > 0 else float("-inf")
    return rounded


def _string(v: Any) -> str | None:
    return v if v is None or type(v) is str else _java_text(v)


def _java_text(v: Any) -> str:
    """Returns a value as the JVM's ``toString`` writes it."""
    match v:
        case None:
            return "null"
        case bool():
            return str(v).lower()
        case float():
            return _java_float(v)
        case list():
            return f"[{', '.join(map(_java_text, v))}]"
        case dict():
            return f"{{{', '.join(f'{_java_text(k)}={_java_text(e)}' for k, e in v.items())}}}"
    return str(v)


def _java_float(v: float) -> str:
    if not math.isfinite(v):
        return "NaN" if math.isnan(v) else "Infinity" if v > 0 else "-Infinity"
    if v == 0 or 1e-3 <= abs(v) < 1e7:
        return f"{Decimal(repr(v)):f}" if "e" in repr(v) else repr(v)
    sign, digits, exponent = Decimal(repr(v)).normalize().as_tuple()
    assert isinstance(exponent, int)
    rest = "".join(map(str, digits[1:])) or "0"
    return f"{'-' * sign}{digits[0]}.{rest}E{exponent + len(digits) - 1}"


def _binary(v: Any) -> bytes | None:
    if isinstance(v, str):
        return v.encode()
    return bytes(v) if isinstance(v, bytes | bytearray | memoryview) else None


def _null(v: Any) -> None:
    return None


def _decimal(type_: DecimalType) -> Convert:
    scale = Decimal(1).scaleb(-type_.scale)

    def convert(v: Any) -> str | None:
        if not isinstance(v, Decimal) or not v.is_finite():
            return None
        rounded = v.quantize(scale, context=_DECIMALS)
        if len(rounded.as_tuple().digits) > type_.precision:
            raise PySparkRuntimeError(
                f"Error updating state: [NUMERIC_VALUE_OUT_OF_RANGE.WITHOUT_SUGGESTION] The {v} rounded half up from "
                f"{v} cannot be represented as Decimal({type_.precision}, {type_.scale})."
            )
        return str(rounded.copy_abs() if rounded.is_zero() else rounded)

    return convert


def _array(element: Convert) -> Convert:
    return lambda v: [element(e) for e in v] if isinstance(v, list | tuple) else None


def _map(key: Convert, value: Convert) -> Convert:
    # Pairs, because a plain map could not have lists as keys.
    return lambda v: [[key(k), value(e)] for k, e in v.items()] if isinstance(v, dict) else None


def _struct(fields: Sequence[Convert]) -> Convert:
    def convert(v: Any) -> Plain | None:
        if not isinstance(v, list | tuple):
            return None
        if len(v) != len(fields):
            raise _wrong_length(len(fields), len(v))
        return [field(e) for field, e in zip(fields, v, strict=True)]

    return convert


_TO: tuple[tuple[type[DataType] | tuple[type[DataType], ...], Convert], ...] = (
    (BooleanType, _bool),
    (DoubleType, _double),
    (FloatType, _float),
    (StringType, _string),
    (BinaryType, _binary),
    (NullType, _null),
    # Spark's own conversion has made integers of these.
    ((DateType, YearMonthIntervalType), _wrapping(32)),
    ((TimestampType, TimestampNTZType, DayTimeIntervalType), _long),
)


# -- from plain values --------------------------------------------------------------------------------


def _from_plain(type_: DataType) -> Convert | None:
    """Returns what makes the value that Spark's schema takes. None: the plain value is that value."""
    match type_:
        case DecimalType():
            return _or_none(Decimal)
        case ArrayType():
            element = _from_plain(type_.elementType)  # a new list: the user may change it
            return _or_none(list if element is None else lambda v: [element(e) for e in v])
        case MapType():
            key, value = _from_plain(type_.keyType), _from_plain(type_.valueType)
            return _or_none(lambda v: {key(k) if key else k: value(e) if value else e for k, e in v})
        case StructType():
            fields = [_from_plain(field.dataType) for field in type_]  # the schema makes a Row of them
            return _or_none(lambda v: tuple([f(e) if f else e for f, e in zip(fields, v, strict=True)]))
        case UserDefinedType():
            return _from_plain(type_.sqlType())
    return None


def _or_none(convert: Convert) -> Convert:
    return lambda v: None if v is None else convert(v)
