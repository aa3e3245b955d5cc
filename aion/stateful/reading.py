"""Reads the state of all keys of a shard: rows with the key, the timers, and what each state variable holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pyspark.sql.types import ArrayType, DataType, LongType, StructType

from aion.stateful.encoding import Codec
from aion.stateful.layout import RECORDS, key_of_record
from aion.stateful.packing import unpack
from aion.stateful.record import KeyRecord
from aion.stateful.variables import Kind, Variable
from state_backends.store.keyed.protocol import KeyedAttempt

TIMERS = "timers"


def row_type(key: StructType, variables: Sequence[Variable]) -> StructType:
    """The type of rows: the columns of the key, ``timers``, and a column for each variable. All may be null."""
    row = StructType(list(key.fields)).add(TIMERS, ArrayType(LongType()))
    for variable in variables:
        row = row.add(variable.name, _type(variable))
    return row


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
        held = (_held(record, own[name]) if name in own else None for name in names)
        yield (*codec.value(unpack(record.key)), record.timers, *held)


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
