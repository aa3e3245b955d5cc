"""Spark's types: what values of each are stored as, and how they are converted. One row for each type.

A value crosses three forms: the user's; the *plain* one, which is None, bool, int, float, str, bytes, or a list of
plain values; and MessagePack bytes. Every other module takes its part from the rows here, and says for arrays, maps and
structs how a value is made of its parts (:class:`Conversion`).
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import MAX_EMAX, MIN_EMIN, ROUND_HALF_UP, Context, Decimal
from enum import Enum
from typing import Any, NamedTuple

from pyspark.errors import PySparkRuntimeError
from pyspark.sql import types as t

from aion.base.time import format_instant

Convert = Callable[[Any], Any]
_FLOAT = struct.Struct("<f")
_DECIMALS = Context(prec=1000, rounding=ROUND_HALF_UP, Emin=MIN_EMIN, Emax=MAX_EMAX)
_LONG = 1 << 63
_EPOCH = date(1970, 1, 1)


def same(value: Any) -> Any:
    """The conversion that leaves a value as it is."""
    return value


def or_none(convert: Convert) -> Convert:
    """Returns a conversion that leaves a null as it is."""
    return lambda v: None if v is None else convert(v)


class Avro(Enum):
    """What Avro stores a type as, as far as its rules convert it to another one. Ints are longs here."""

    LONG = "long"
    FLOAT = "float"
    DOUBLE = "double"
    STRING = "string"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class Scalar:
    """A row of the table. Its functions get no nulls, except ``plain``.

    ``plain``: the plain form of what Spark's own conversion leaves of the user's value. A value of another type becomes
    null, or is converted to text (``EvaluatePython.makeFromJava``). ``exact``: values of exactly this type are plain
    already, if integers have at most ``bits`` bits. ``internal``: what Spark's schema makes the user's value of, from a
    plain value. ``in_row``: a plain value in Spark's rows (``UnsafeRow``), or None if :mod:`aion.stateful.order` does
    not cover the type. ``to_json``: what JSON has for a plain value. ``json``: the types of JSON, or none for any.
    ``from_json``: the user's value from it.
    """

    plain: Convert
    avro: Avro | None = None
    exact: type | None = None
    bits: int = 0
    internal: Convert = same
    in_row: Callable[[Any], bytes] | None = None
    to_json: Convert = same
    json: tuple[type, ...] = ()
    from_json: Convert = same


def _of(kind: type) -> Convert:
    return lambda v: v if type(v) is kind else None


def _wrapping(bits: int) -> Convert:
    """Keeps the lowest bits of an integer, as the JVM does."""
    half, full = 1 << (bits - 1), 1 << bits

    def convert(v: Any) -> int | None:
        if type(v) is not int or not -_LONG <= v < _LONG:
            return None
        return v if -half <= v < half else (v + half) % full - half

    return convert


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


def _signed(bits: int) -> Callable[[Any], bytes]:
    return lambda v: int(v).to_bytes(bits // 8, "little", signed=True)


def _floating(form: str) -> Callable[[Any], bytes]:
    return lambda v: struct.pack(form, v + 0.0)  # the sum makes 0.0 of -0.0


def _number(bits: int) -> Scalar:
    def from_json(v: int) -> int:
        if not -(1 << (bits - 1)) <= v < 1 << (bits - 1):
            raise ValueError(f"it needs more than {bits} bits")
        return v

    return Scalar(_wrapping(bits), Avro.LONG, int, bits, in_row=_signed(bits), json=(int,), from_json=from_json)


def _decimal(type_: t.DecimalType) -> Scalar:
    digits, precision = type_.scale, type_.precision
    scale = Decimal(1).scaleb(-digits)

    def plain(v: Any) -> str | None:
        if not isinstance(v, Decimal) or not v.is_finite():
            return None
        rounded = v.quantize(scale, context=_DECIMALS)
        if len(rounded.as_tuple().digits) > precision:
            raise PySparkRuntimeError(
                f"Error updating state: [NUMERIC_VALUE_OUT_OF_RANGE.WITHOUT_SUGGESTION] The {v} rounded half up from "
                f"{v} cannot be represented as Decimal({precision}, {digits})."
            )
        return str(rounded.copy_abs() if rounded.is_zero() else rounded)

    def from_json(v: str | int) -> Decimal:
        number = Decimal(v)
        if number != number.quantize(scale):
            raise ValueError(f"it has more than {digits} digits after the point")
        return number

    unscaled = _signed(64)
    in_row = (lambda v: unscaled(Decimal(v).scaleb(digits))) if precision <= 18 else None
    return Scalar(plain, internal=Decimal, in_row=in_row, json=(str, int), from_json=from_json)


def _days_to_json(days: int) -> str:
    try:
        return (_EPOCH + timedelta(days=days)).isoformat()
    except OverflowError:
        return f"{days} days"


def _time_from_json(*, zone: bool) -> Callable[[str], datetime]:
    def from_json(v: str) -> datetime:
        time = datetime.fromisoformat(v)
        if (time.tzinfo is not None) != zone:
            raise ValueError("it needs a time zone, as in 2024-05-01T12:00:00Z" if zone else "it has a time zone")
        return time

    return from_json


_SCALARS: Mapping[type[t.DataType] | None, Scalar] = {
    t.NullType: Scalar(lambda v: None),
    t.BooleanType: Scalar(_of(bool), exact=bool, in_row=_signed(8), json=(bool,)),
    t.ByteType: _number(8),
    t.ShortType: _number(16),
    t.IntegerType: _number(32),
    t.LongType: _number(64),
    t.FloatType: Scalar(_float, Avro.FLOAT, in_row=_floating("<f"), json=(int, float), from_json=float),
    t.DoubleType: Scalar(_of(float), Avro.DOUBLE, float, in_row=_floating("<d"), json=(int, float), from_json=float),
    t.StringType: Scalar(_string, Avro.STRING, str, in_row=str.encode, json=(str,)),
    t.BinaryType: Scalar(
        _binary, Avro.BYTES, bytes, in_row=bytes,
        to_json=lambda v: base64.b64encode(v).decode(), json=(str,),
        from_json=lambda v: base64.b64decode(v, validate=True),
    ),
    # Spark's own conversion has made integers of these.
    t.DateType: Scalar(
        _wrapping(32), Avro.LONG, in_row=_signed(32),
        to_json=_days_to_json, json=(str,), from_json=date.fromisoformat,
    ),
    t.TimestampType: Scalar(
        _wrapping(64), Avro.LONG, in_row=_signed(64),
        to_json=format_instant, json=(str,), from_json=_time_from_json(zone=True),
    ),
    t.TimestampNTZType: Scalar(
        _wrapping(64), Avro.LONG, in_row=_signed(64),
        to_json=lambda v: format_instant(v).removesuffix("Z"), json=(str,), from_json=_time_from_json(zone=False),
    ),
    t.DayTimeIntervalType: Scalar(
        _wrapping(64), Avro.LONG, json=(int,), from_json=lambda v: timedelta(microseconds=v)
    ),
    t.YearMonthIntervalType: Scalar(_wrapping(32), Avro.LONG),
    getattr(t, "TimeType", None): Scalar(_wrapping(64)),  # older versions of pyspark do not have it
}  # fmt: skip


def scalar(type_: t.DataType) -> Scalar | None:
    """Returns the row of a type, or None if it is an array, a map or a struct, or it cannot be stored."""
    return _decimal(type_) if isinstance(type_, t.DecimalType) else _SCALARS.get(type(type_))


class Conversion(NamedTuple):
    """How values of every type are converted.

    ``scalar``: the conversion for a type without parts. ``array``, ``map`` and ``struct``: those for the others, from
    the conversions of their parts. ``user_defined``: that for a type that a user has defined, or None for that of its
    SQL type.
    """

    scalar: Callable[[Any], Convert]
    array: Callable[[t.ArrayType, Convert], Convert]
    map: Callable[[t.MapType, Convert, Convert], Convert]
    struct: Callable[[t.StructType, Sequence[Convert]], Convert]
    user_defined: Callable[[Any], Convert] | None = None

    def of(self, type_: t.DataType) -> Convert:
        """Returns the conversion of the values of a type."""
        match type_:
            case t.ArrayType():
                return self.array(type_, self.of(type_.elementType))
            case t.MapType():
                return self.map(type_, self.of(type_.keyType), self.of(type_.valueType))
            case t.StructType():
                return self.struct(type_, [self.of(field.dataType) for field in type_])
            case t.UserDefinedType():
                return self.of(type_.sqlType()) if self.user_defined is None else self.user_defined(type_)
        return self.scalar(type_)


def listed(element: Convert) -> Convert:
    """Returns the conversion of the elements of a list."""
    return or_none(lambda v: [element(e) for e in v])


def paired(key: Convert, value: Convert) -> Convert:
    """Returns the conversion of the pairs of a map in its plain form."""
    return or_none(lambda v: [[key(k), value(e)] for k, e in v])
