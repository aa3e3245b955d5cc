"""The state variables of an operator: their numbers, kinds and schemas, over all restarts.

A shard's snapshot lists them. A variable keeps its number for good. If it is deleted and defined again, it gets
another one, so what it held before is never read again. Each schema that a variable had is kept with a version, and
stored values say by which of them they were written. An element of a list or map that is written again with an older
value, because another one changed, keeps that value: it is followed by the version of its schema, and the value as it
was written. So each value is converted only once, as in Spark's state store, where every element has its version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
from pyspark.sql.types import ArrayType, DataType, MapType, StructType

from aion.errors import ForeignState
from aion.stateful.encoding import Codec
from aion.stateful.order import map_order
from aion.stateful.packing import pack, unpack
from aion.stateful.types import Avro, Convert, listed, or_none, paired, same, scalar


class Kind(Enum):
    VALUE = "value"
    LIST = "list"
    MAP = "map"


class Variable:
    """A state variable. ``ttl_ms``: how long its values live after an update, or None for good."""

    def __init__(
        self,
        number: int,
        name: str,
        kind: Kind,
        schemas: list[dict[str, Any]],
        key_schema: StructType | None,
        ttl_ms: int | None,
    ) -> None:
        self.number, self.name, self.kind, self.ttl_ms = number, name, kind, ttl_ms
        self.schemas = schemas
        self.version = len(schemas) - 1
        current = StructType.fromJson(schemas[-1])
        self.codec = Codec(current)
        self.key_codec = None if key_schema is None else Codec(key_schema)
        self.map_order = map_order(key_schema or StructType())
        self._older = [converter(StructType.fromJson(schema), current) for schema in schemas[:-1]]

    def current(self, version: int, content: bytes) -> bytes:
        """Stored content, as the current schema has it."""
        if version == self.version:
            return content
        value = unpack(content)
        match self.kind:
            case Kind.VALUE:
                value[1] = self._older[version](value[1])
            case Kind.LIST:
                value[1] = self.current_page(version, value[1])
            case Kind.MAP:
                value[2] = self.current_page(version, value[2])
        return pack(value)

    def current_page(self, version: int, page: Any) -> Any:
        """Returns the elements of a page, as the current schema has them."""
        if version == self.version or page is None:
            return page
        return [self._current_element(version, element) for element in page]

    def _current_element(self, version: int, element: list[Any]) -> list[Any]:
        at = 2 if self.kind is Kind.MAP else 1  # its key, when it expires, its value
        written, original = element[at + 1 :] or (version, element[at])
        return [*element[:at], self._older[written](original), written, original]


class Variables:
    """All variables of an operator. ``known``: as a snapshot has them, or None if there are none yet.

    ``by_name``: whether fields of values are found by their names if the schema changes, as with Spark's Avro encoding.
    With its other encoding they are found by their places, and only their names may change.
    """

    def __init__(self, known: Mapping[str, Any] | None, by_name: bool = False) -> None:
        self._by_name = by_name
        self._next: int = 0 if known is None else known["next"]
        self._known: dict[str, dict[str, Any]] = {} if known is None else dict(known["variables"])

    def define(
        self, name: str, kind: Kind, schema: StructType, key_schema: StructType | None, ttl_ms: int | None
    ) -> Variable:
        """Returns the variable of this name; a new one if there is none. Raises ForeignState if it was of another kind.

        The fields of a map's keys may get other names, as in Spark.
        """
        found = self._known.get(name)
        value_schema = _plain(schema)
        map_key = None if key_schema is None else _plain(key_schema)
        if found is not None and (found["kind"], _types(found["key"])) != (kind.value, _types(map_key)):
            raise ForeignState(
                f"the state variable {name!r} is stored as a {found['kind']} with the keys {found['key']}; it cannot "
                f"become a {kind.value} with the keys {map_key}: give it another name, or delete it with deleteIfExists"
            )
        if found is None:
            found = {"number": self._next, "kind": kind.value, "key": map_key, "schemas": []}
            self._next += 1
        schemas = found["schemas"]
        if schemas and not self._by_name and _types(schemas[-1]) == _types(value_schema):
            schemas = [*schemas[:-1], value_schema]
        elif not schemas or schemas[-1] != value_schema:
            schemas = [*schemas, value_schema]
        self._known[name] = {**found, "key": map_key, "schemas": schemas, "ttl_ms": ttl_ms}
        return self._variable(name)

    def define_as(self, other: Variable) -> Variable:
        """Defines a variable as another shard has it."""
        key_schema = None if other.key_codec is None else other.key_codec.schema
        return self.define(other.name, other.kind, other.codec.schema, key_schema, other.ttl_ms)

    def delete(self, name: str) -> None:
        self._known.pop(name, None)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._known)

    def __iter__(self) -> Iterator[Variable]:
        """Returns the variables, by name."""
        return map(self._variable, sorted(self._known))

    def _variable(self, name: str) -> Variable:
        found = self._known[name]
        key_schema = None if found["key"] is None else StructType.fromJson(found["key"])
        return Variable(found["number"], name, Kind(found["kind"]), found["schemas"], key_schema, found["ttl_ms"])

    @property
    def numbers(self) -> frozenset[int]:
        return frozenset(found["number"] for found in self._known.values())

    def to_json(self) -> dict[str, Any]:
        return {"next": self._next, "variables": self._known}


def _types(schema: Any) -> Any:
    """Returns a schema as JSON, without the names of fields, and whether they may be null."""
    match schema:
        case {"type": "struct", "fields": fields}:
            return [_types(field["type"]) for field in fields]
        case dict():
            return {name: _types(part) for name, part in schema.items() if not name.endswith("ontainsNull")}
        case [*parts]:
            return [_types(part) for part in parts]
    return schema


def _plain(schema: StructType) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(schema.json())
    return found


_READS: Mapping[tuple[Avro | None, Avro | None], Convert] = {
    (Avro.LONG, Avro.LONG): same,
    (Avro.LONG, Avro.FLOAT): lambda v: float(np.int64(v).astype(np.float32)),  # a double on the way would round, too
    (Avro.LONG, Avro.DOUBLE): float,
    (Avro.FLOAT, Avro.DOUBLE): float,
    (Avro.STRING, Avro.BYTES): str.encode,
    (Avro.BYTES, Avro.STRING): lambda v: v.decode(errors="replace"),
}
"""What Avro makes of a value that was written as one type and is read as another."""


def converter(old: DataType, new: DataType) -> Convert:
    """Makes a plain value of the type ``new`` from one of the type ``old``. What cannot be converted becomes null.

    If Spark's state store has the Avro encoding (``spark.sql.streaming.stateStore.encodingFormat``), fields may be
    added, removed, moved, and get another type, as Avro's rules for reading allow. Spark refuses every other change
    when the query starts. A value becomes what Spark's Avro reader makes of it. For Avro, dates are ints, timestamps
    and intervals are longs, and texts are bytes.
    """
    match old, new:
        case StructType(), StructType():
            at = {name: i for i, name in enumerate(old.names)}
            fields = [
                (at[field.name], converter(old[field.name].dataType, field.dataType)) if field.name in at else None
                for field in new
            ]
            return or_none(lambda v: [None if found is None else found[1](v[found[0]]) for found in fields])
        case ArrayType(), ArrayType():
            return listed(converter(old.elementType, new.elementType))
        case MapType(), MapType():
            return paired(converter(old.keyType, new.keyType), converter(old.valueType, new.valueType))
    if type(old) is type(new):
        return same
    before, now = (None if (row := scalar(type_)) is None else row.avro for type_ in (old, new))
    return or_none(_READS.get((before, now), lambda v: None))
