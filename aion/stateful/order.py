"""The order in which Spark iterates over timers and the entries of a map.

Spark's order is that of the bytes of its rows (``UnsafeRow``) in RocksDB: little endian numbers, and texts by length.
No document promises it, but results of processors may depend on it, for example if they join keys to a text.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from pyspark.sql.types import StructType

from aion.stateful.packing import pack
from aion.stateful.types import Avro, scalar

_WORD = 8
_OF_ANY_LENGTH = (Avro.STRING, Avro.BYTES)
"""These are behind the words of a row, which say where."""


def timer_order(time_ms: int) -> bytes:
    return time_ms.to_bytes(_WORD, "little", signed=True)


def map_order(schema: StructType) -> Callable[[Sequence[Any]], bytes]:
    """Returns the order of the entries of a map, as a sort key of the plain values of a map's key."""
    fields = [row for field in schema if (row := scalar(field.dataType)) is not None and row.in_row is not None]
    if len(fields) < len(schema):
        return pack
    nulls_words = (len(fields) + 63) // 64

    def order(plain: Sequence[Any]) -> bytes:
        nulls, slots, rest = 0, [], b""
        at = _WORD * (nulls_words + len(fields))
        for number, (field, value) in enumerate(zip(fields, plain, strict=True)):
            if value is None:
                nulls |= 1 << number
                slots.append(bytes(_WORD))
                continue
            assert field.in_row is not None
            data = field.in_row(value)
            if field.avro in _OF_ANY_LENGTH:
                slots.append(struct.pack("<II", len(data), at + len(rest)))
                rest += data.ljust(-(-len(data) // _WORD) * _WORD, b"\0")
            else:
                slots.append(data.ljust(_WORD, b"\0"))
        row = nulls.to_bytes(_WORD * nulls_words, "little") + b"".join(slots) + rest
        return struct.pack("<I", len(row)) + row

    return order
