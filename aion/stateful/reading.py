"""Reads the state of all keys of a shard: rows with the key, the timers, and what each state variable holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any

from pyspark.sql.types import ArrayType, BinaryType, DataType, LongType, StructType, TimestampType

from aion.base.time import EPOCH
from aion.stateful.encoding import INTERNAL, Codec, from_plain
from aion.stateful.layout import RECORDS, key_of_record
from aion.stateful.packing import pack, unpack
from aion.stateful.record import KeyRecord
from aion.stateful.types import Convert, or_none
from aion.stateful.variables import Kind, Variable
from state_backends.format.ordered_map import LazyMap

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


def rows(store: LazyMap, key: StructType, variables: Sequence[Variable]) -> Iterator[Any]:
    """Yields a row for each key. ``variables``: the columns, in their order."""
    codec = Codec(key)
    said = {variable.name: _said(variable) for variable in variables}
    given = {variable.name: _given(_type(variable)) for variable in variables}
    for entry, data in store.scan(*RECORDS):
        record = KeyRecord(key_of_record(entry), data, store)
        held = {variable.name: plain for variable in variables if (plain := _held(record, variable)) is not None}
        values = {name: given[name](_plain(said[name], plain)) for name, plain in held.items()}
        packed = pack((list(record.timers or ()), {name: (said[name], plain) for name, plain in held.items()}))
        yield (*codec.value(unpack(record.key)), record.timers, *map(values.get, said), packed)


def _given(type_: DataType) -> Convert:
    """Returns the conversion of a plain value to what Spark's schema makes of it."""
    internal = INTERNAL.of(type_)
    return lambda plain: type_.fromInternal(internal(plain))


def _scalar_in_utc(type_: DataType) -> Convert:
    """Times get the zone UTC: without one they would be local times."""
    if isinstance(type_, TimestampType):
        return or_none(lambda us: EPOCH + timedelta(microseconds=us))
    return or_none(_given(type_))


_IN_UTC = from_plain(_scalar_in_utc, user_defined=_scalar_in_utc)
"""From a plain value to one that may be written to state as it is."""


def unpacked(packed: bytes) -> tuple[list[int], dict[str, Any]]:
    """Returns the timers (ms), and what each variable holds, by its name. The values may be written to state as they
    are.
    """
    timers, values = unpack(packed)
    return timers, {name: _in_utc(*said)(_plain(said, plain)) for name, (said, plain) in values.items()}


@lru_cache(maxsize=256)
def _in_utc(kind: str, value: str, key: str | None) -> Convert:
    of_value, of_key = (None if said is None else StructType.fromJson(json.loads(said)) for said in (value, key))
    assert of_value is not None
    return _IN_UTC.of(_type_of(kind, of_value, of_key))


def _said(variable: Variable) -> tuple[str, str, str | None]:
    """Returns the kind of a variable, and the schemas of its values and keys as JSON."""
    key = variable.key_codec
    return variable.kind.value, variable.codec.schema.json(), None if key is None else key.schema.json()


def _plain(said: Sequence[Any], held: Any) -> Any:
    """Returns what a variable holds as a plain value of its type, from the form in which it is stored."""
    return [(unpack(key), value) for key, value in held] if Kind(said[0]) is Kind.MAP else held


def _held(record: KeyRecord, variable: Variable) -> Any:
    """Returns what a variable without TTL holds, in the form in which it is stored, or None if there is nothing."""
    content, pages = record.content(variable), record.pages(variable)
    match variable.kind:
        case Kind.VALUE:
            return content.get(0)
        case Kind.LIST:
            return [*content.get(0, pages)] or None
    return [*content.items(0, pages)] or None
