"""Reads the state of all keys of a shard: rows with the key, the timers, and what each state variable holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

from pyspark.sql.types import ArrayType, BinaryType, DataType, LongType, MapType, StructType, TimestampType

from aion.base.time import EPOCH
from aion.stateful.encoding import Codec
from aion.stateful.layout import RECORDS, key_of_record
from aion.stateful.packing import pack, unpack
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
    key = variable.key_codec
    return _type_of(variable.kind.value, variable.codec.schema, None if key is None else key.schema)


def _type_of(kind: str, schema: StructType, key: StructType | None) -> DataType:
    match Kind(kind):
        case Kind.VALUE:
            return schema
        case Kind.LIST:
            return ArrayType(schema)
    assert key is not None
    # Not a map: pandas would make dicts of its keys, which cannot be keys of a dict.
    return ArrayType(StructType().add("key", key).add("value", schema))


def rows(store: KeyedAttempt, key: StructType, variables: Sequence[Variable], names: Sequence[str]) -> Iterator[Any]:
    """Yields a row for each key. ``variables``: the shard's own. ``names``: the columns, in their order."""
    codec = Codec(key)
    own = {v.name: (v, _type(v), _said(v)) for v in variables if v.name in names}
    for entry, data in store.scan(*RECORDS):
        record = KeyRecord(key_of_record(entry), data, store)
        held = {name: (plain, *of) for name, of in own.items() if (plain := _held(record, of[0])) is not None}
        values = {name: type_.fromInternal(_internal(said, plain)) for name, (plain, _, type_, said) in held.items()}
        packed = pack((list(record.timers or ()), {name: (said, plain) for name, (plain, _, _, said) in held.items()}))
        yield (*codec.value(unpack(record.key)), record.timers, *map(values.get, names), packed)


def unpacked(packed: bytes) -> tuple[list[int], dict[str, Any]]:
    """Returns the timers (ms), and what each variable holds, by its name. The values may be written to state as they
    are.
    """
    timers, values = unpack(packed)
    found = {}
    for name, (said, plain) in values.items():
        kind, value, key = said
        type_ = _type_of(kind, _codec(value).schema, None if key is None else _codec(key).schema)
        found[name] = _given(_internal(said, plain), type_)
    return timers, found


def _said(variable: Variable) -> tuple[str, str, str | None]:
    """Returns the kind of a variable, and the schemas of its values and keys as JSON."""
    key = variable.key_codec
    return variable.kind.value, variable.codec.schema.json(), None if key is None else key.schema.json()


@lru_cache(maxsize=256)
def _codec(schema: str) -> Codec:
    return Codec(StructType.fromJson(json.loads(schema)))


def _internal(said: Sequence[Any], plain: Any) -> Any:
    """Returns what a variable holds in Spark's internal form, from the form in which it is stored."""
    kind, value, key = said
    internal = _codec(value).internal
    match Kind(kind):
        case Kind.VALUE:
            return internal(plain)
        case Kind.LIST:
            return [internal(one) for one in plain]
    of_key = _codec(key).internal
    return [(of_key(unpack(one)), internal(of)) for one, of in plain]


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
    """Returns what a variable without TTL holds, in the form in which it is stored. None: nothing."""
    content, pages = record.content(variable), record.pages(variable)
    match variable.kind:
        case Kind.VALUE:
            return content.get(0)
        case Kind.LIST:
            return [*content.get(0, pages)] or None
    return [*content.items(0, pages)] or None
