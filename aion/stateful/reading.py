"""Reads the state of all keys of a shard: rows with the key, the timers, and what each state variable holds."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from pyspark.sql.types import ArrayType, BinaryType, DataType, LongType, MapType, StructType, TimestampType

from aion.stateful.encoding import Codec
from aion.stateful.layout import RECORDS, key_of_record
from aion.stateful.packing import unpack
from aion.stateful.record import KeyRecord
from aion.stateful.variables import Kind, Variable
from state_backends.store.keyed.protocol import KeyedAttempt

TIMERS = "timers"
PACKED = "packed"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def row_type(key: StructType, variables: Sequence[Variable]) -> StructType:
    """The type of rows: the columns of the key, ``timers``, a column for each variable, and ``packed``.

    All but ``packed`` may be null. It has the timers and variables again, in a form that nothing on the way changes:
    frames of pandas have other names for some columns, doubles for integers beside nulls, and times without a zone.
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
    """A row for each key. ``variables``: the shard's own. ``names``: the columns, in their order."""
    codec = Codec(key)
    own = {variable.name: variable for variable in variables}
    for entry, data in store.scan(*RECORDS):
        record = KeyRecord(key_of_record(entry), data, store)
        held = [_held(record, own[name]) if name in own else None for name in names]
        there = [(own[name], value) for name, value in zip(names, held, strict=True) if value is not None]
        yield (*codec.value(unpack(record.key)), record.timers, *held, _packed(record.timers, there))


def _packed(timers: Sequence[int] | None, held: Sequence[tuple[Variable, Any]]) -> bytes:
    types = [(variable, _type(variable)) for variable, _ in held]
    values = {v.name: (type_, type_.toInternal(value)) for (v, type_), (_, value) in zip(types, held, strict=True)}
    return pickle.dumps((list(timers or ()), values))


def unpacked(packed: bytes) -> tuple[list[int], dict[str, Any]]:
    """The timers (ms), and by name what each variable holds, as the user may write it."""
    timers, values = pickle.loads(packed)
    return timers, {name: _given(value, type_) for name, (type_, value) in values.items()}


def _given(value: Any, type_: DataType) -> Any:
    """A value in Spark's internal form as a user's own. Times have a zone, so no process takes them for local ones."""
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
            return _EPOCH + timedelta(microseconds=value)
    return type_.fromInternal(value)


def _held(record: KeyRecord, variable: Variable) -> Any:
    """What a variable without TTL holds, as the user wrote it. None: nothing."""
    content, pages, value = record.content(variable), record.pages(variable), variable.codec.value
    match variable.kind:
        case Kind.VALUE:
            plain = content.get(0)
            return None if plain is None else value(plain)
        case Kind.LIST:
            return [value(plain) for plain in content.get(0, pages)] or None
    assert variable.key_codec is not None
    return [(variable.key_codec.value(unpack(key)), value(plain)) for key, plain in content.items(0, pages)] or None
