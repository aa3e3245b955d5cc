"""Brings the state of keys from elsewhere into the records of a shard, as Spark's state data source has it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pyarrow as pa
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle
from pyspark.sql.types import StructType

from aion.stateful.keys import Keys
from aion.stateful.packing import pack
from aion.stateful.record import KeyRecord
from aion.stateful.variables import Kind, Variable

_INTEGERS = {"timestamp": pa.int64(), "duration": pa.int64(), "time64": pa.int64(), "date32": pa.int32()}
TIMER = "timer"
"""The column with a timer of the key, in ms."""


class Declaration(NamedTuple):
    """A state variable of a processor whose code is not at hand. ``expires``: whether it has a TTL.

    If it has one, each of its elements comes with the time at which it expires.
    """

    name: str
    kind: Kind
    schema: StructType
    key_schema: StructType | None
    expires: bool


class Declaring(StatefulProcessor):
    """A processor that only defines variables. How long their values live is not known, and not needed."""

    def __init__(self, declared: Sequence[Declaration]) -> None:
        self._declared = tuple(declared)

    def init(self, handle: StatefulProcessorHandle) -> None:
        for name, kind, schema, key_schema, expires in self._declared:
            ttl_ms = 1 if expires else None
            match kind:
                case Kind.VALUE:
                    handle.getValueState(name, schema, ttl_ms)
                case Kind.LIST:
                    handle.getListState(name, schema, ttl_ms)
                case Kind.MAP:
                    assert key_schema is not None
                    handle.getMapState(name, key_schema, schema, ttl_ms)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        raise AssertionError("a query that only brings state has no rows")

    def close(self) -> None:
        pass


def key_column(number: int) -> str:
    """Returns the name of a column of the key, in tables with state."""
    return f"key_{number}"


def state_column(number: int) -> str:
    """Returns the name of the column with a variable's state. ``number``: its place in the declaration."""
    return f"state_{number}"


class Restored(NamedTuple):
    """The state of one key: its timers, and the elements of variables by their place in the declaration."""

    timers: list[int]
    states: dict[int, Any]


def restored_keys(table: pa.Table, keys: Keys, width: int, states: int) -> Mapping[bytes, Restored]:
    """Returns the state of each key in a table. A row has a key, and one timer or the state of one variable.

    ``width``: how many columns the key has. ``states``: how many variables there are.
    """
    parts = [plain_values(table.column(key_column(n))) for n in range(width)]
    packed = [keys.packed(key) for key in zip(*parts, strict=True)]
    found: dict[bytes, Restored] = defaultdict(lambda: Restored([], {}))
    for key, time_ms in zip(packed, table.column(TIMER).to_pylist(), strict=True):
        if time_ms is not None:
            found[key].timers.append(time_ms)
    for number in range(states):
        for key, content in zip(packed, plain_values(table.column(state_column(number))), strict=True):
            if content is not None:
                found[key].states[number] = content
    return found


def restore(record: KeyRecord, variables: Sequence[Variable], declared: Sequence[Declaration], state: Restored) -> None:
    """Puts the state of a key into its record, which is new. ``variables``: the shard's, in the declaration's order."""
    for time_ms in state.timers:
        record.add_timer(time_ms)
    for number, content in state.states.items():
        expires = _put(record, variables[number], declared[number].expires, content)
        if expires:
            record.expires_at(min(expires))


def _put(record: KeyRecord, variable: Variable, expires: bool, content: Any) -> list[int]:
    """Returns the times at which elements expire."""
    target = record.content(variable)

    def element(found: Any) -> tuple[Any, int]:
        value, time_ms = found if expires else (found, 0)
        return value, max(time_ms, 0)

    times = []
    match variable.kind:
        case Kind.VALUE:
            value, time_ms = element(content)
            target.set(value, time_ms)
            times.append(time_ms)
        case Kind.LIST:
            for value, time_ms in map(element, content):
                target.append(value, time_ms)
                times.append(time_ms)
        case Kind.MAP:
            pages = record.pages(variable)
            for key, found in content:
                value, time_ms = element(found)
                target.set(pack(key), value, time_ms, pages)
                times.append(time_ms)
    return [time_ms for time_ms in times if time_ms]


def plain_values(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Returns the plain form (:mod:`aion.stateful.encoding`) of each value of a column.

    Times keep the unit of the column, which is Spark's own.
    """
    if isinstance(column, pa.ChunkedArray):
        return [value for chunk in column.chunks for value in plain_values(chunk)]
    values = _values(column)
    if column.null_count and pa.types.is_nested(column.type):
        return [v if valid else None for v, valid in zip(values, column.is_valid().to_pylist(), strict=True)]
    return values


def _values(array: pa.Array) -> list[Any]:
    kind = array.type
    if pa.types.is_struct(kind):
        fields = [plain_values(field) for field in array.flatten()]
        return [list(row) for row in zip(*fields, strict=True)] if fields else [[] for _ in range(len(array))]
    if pa.types.is_map(kind):
        keys, items = plain_values(array.keys), plain_values(array.items)
        pairs = [list(pair) for pair in zip(keys, items, strict=True)]
        return [pairs[begin:end] for begin, end in pairwise(array.offsets.to_pylist())]
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        elements = plain_values(array.values)
        return [elements[begin:end] for begin, end in pairwise(array.offsets.to_pylist())]
    if pa.types.is_decimal(kind):
        return [None if value is None else str(value) for value in array.to_pylist()]
    integer = _INTEGERS.get(str(kind).split("[")[0])
    plain: list[Any] = (array if integer is None else array.cast(integer)).to_pylist()
    return plain
