"""Reads the state of all keys of a shard: rows with the key, the timers, and what each state variable holds."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from pyspark.sql.types import ArrayType, BinaryType, DataType, LongType, MapType, StructType, TimestampType

from aion.base.time import EPOCH
from aion.stateful.encoding import Codec
from aion.stateful.layout import RECORDS, key_of_record
from aion.stateful.packing import unpack
from aion.stateful.record import KeyRecord
from aion.stateful.variables import Kind, Variable
from state_backends.store.keyed.protocol import KeyedAttempt

TIMERS = "timers"
PACKED = "packed"


def row_type(key: StructType, variables: Sequence[Variable]) -> StructType:
    """Returns the type of rows: the columns of the key, ``timers``, a column for each variable, and ``packed``.

    All but ``packed`` may be null. ``packed`` repeats the timers and variables as bytes, for :func:`unpacked`. If
    pyspark passes the other columns on as a frame of pandas, it renames some of them, makes doubles of integers beside
    nulls, and takes the zone from times.
    """
    row = StructType(list(key.fields)).add(TIMERS, ArrayType(LongType()))
    for variable in variables:
        row = row.add(variable.name, _type(variable))
    return row.add(PACKED, BinaryType(), nullable=False)


def _type(variable: Variable) -> DataType:
    schema = variable.codec.schema
    match variable.kind:
        case Kind.VALUE:
            return schema
        case Kind.LIST:
            return ArrayType(schema)
    assert variable.key_codec is not None
    # Not a map: pandas would make dicts of its keys, which cannot be keys of a dict.
    return ArrayType(StructType().add("key", variable.key_codec.schema).add("value", schema))


def rows(store: KeyedAttempt, key: StructType, variables: Sequence[Variable], names: Sequence[str]) -> Iterator[Any]:
    """Yields a row for each key. ``variables``: the shard's own. ``names``: the columns, in their order."""
    codec = Codec(key)
    own = {variable.name: (variable, _type(variable)) for variable in variables if variable.name in names}
    for entry, data in store.scan(*RECORDS):
        record = KeyRecord(key_of_record(entry), data, store)
        there = {name: (type_, held) for name, (v, type_) in own.items() if (held := _held(record, v)) is not None}
        values = {name: type_.fromInternal(held) for name, (type_, held) in there.items()}
        packed = pickle.dumps((list(record.timers or ()), there))
        yield (*codec.value(unpack(record.key)), record.timers, *map(values.get, names), packed)


def unpacked(packed: bytes) -> tuple[list[int], dict[str, Any]]:
    """Returns the timers (ms), and what each variable holds, by its name. The values may be written to state as they
    are.
    """
    timers, values = pickle.loads(packed)
    return timers, {name: _given(value, type_) for name, (type_, value) in values.items()}


def _given(value: Any, type_: DataType) -> Any:
    """Returns the user's value, from Spark's internal form. Times get the zone UTC: without one they would be local
    times.
    """
    if value is None:
        return None
    match type_:
        case StructType():
            return tuple(_given(part, field.dataType) for part, field in zip(value, type_, strict=True))
        case ArrayType():
            return [_given(element, type_.elementType) for element in value]
        case MapType():
            return {_given(k, type_.keyType): _given(v, type_.valueType) for k, v in value.items()}
        case TimestampType():
            return EPOCH + timedelta(microseconds=value)
    return type_.fromInternal(value)


def _held(record: KeyRecord, variable: Variable) -> Any:
    """Returns what a variable without TTL holds, in Spark's internal form. None: nothing."""
    content, pages, value = record.content(variable), record.pages(variable), variable.codec.internal
    match variable.kind:
        case Kind.VALUE:
            plain = content.get(0)
            return None if plain is None else value(plain)
        case Kind.LIST:
            return [value(plain) for plain in content.get(0, pages)] or None
    assert variable.key_codec is not None
    return [(variable.key_codec.internal(unpack(key)), value(plain)) for key, plain in content.items(0, pages)] or None
