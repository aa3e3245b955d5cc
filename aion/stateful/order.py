"""The order in which Spark iterates over timers and the entries of a map.

Spark's order is that of the bytes of its rows (``UnsafeRow``) in RocksDB: little endian numbers, and texts by length.
No document promises it, but results of processors may depend on it, for example if they join keys to a text.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any

from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from aion.stateful.packing import pack

_SIGNED = {BooleanType: 1, ByteType: 1, ShortType: 2, IntegerType: 4, DateType: 4, LongType: 8, TimestampType: 8}
_WORD = 8


def timer_order(time_ms: int) -> bytes:
    return time_ms.to_bytes(_WORD, "little", signed=True)


def map_order(schema: StructType) -> Callable[[Sequence[Any]], bytes]:
    """Returns the order of the entries of a map, as a sort key of the plain values of a map's key."""
    fields = [_field(field.dataType) for field in schema]
    if None in fields:
        return pack
    nulls_words = (len(fields) + 63) // 64

    def order(plain: Sequence[Any]) -> bytes:
        nulls, slots, rest = 0, [], b""
        at = _WORD * (nulls_words + len(fields))
        for number, (field, value) in enumerate(zip(fields, plain, strict=True)):
            assert field is not None
            if value is None:
                nulls |= 1 << number
                slots.append(bytes(_WORD))
                continue
            encoded = field(value)
            if encoded.fixed:
                slots.append(encoded.data.ljust(_WORD, b"\0"))
            else:
                slots.append(struct.pack("<II", len(encoded.data), at + len(rest)))
                rest += encoded.data.ljust(-(-len(encoded.data) // _WORD) * _WORD, b"\0")
        row = nulls.to_bytes(_WORD * nulls_words, "little") + b"".join(slots) + rest
        return struct.pack("<I", len(row)) + row

    return order


class _Encoded:
    __slots__ = ("data", "fixed")

    def __init__(self, data: bytes, *, fixed: bool) -> None:
        self.data, self.fixed = data, fixed


def _field(type_: DataType) -> Callable[[Any], _Encoded] | None:
    """Encodes a value as Spark's rows do. None: this type is not covered."""
    for kind, size in (*_SIGNED.items(), (TimestampNTZType, 8)):
        if isinstance(type_, kind):
            return _integer(size)
    match type_:
        case DoubleType():
            return lambda v: _Encoded(struct.pack("<d", v + 0.0), fixed=True)
        case FloatType():
            return lambda v: _Encoded(struct.pack("<f", v + 0.0), fixed=True)
        case StringType():
            return lambda v: _Encoded(v.encode(), fixed=False)
        case BinaryType():
            return lambda v: _Encoded(v, fixed=False)
        case DecimalType() if type_.precision <= 18:
            unscaled, scale = _integer(8), type_.scale
            return lambda v: unscaled(int(Decimal(v).scaleb(scale)))
    return None


def _integer(size: int) -> Callable[[Any], _Encoded]:
    return lambda v: _Encoded(int(v).to_bytes(size, "little", signed=True), fixed=True)
