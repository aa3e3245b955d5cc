"""Values of state variables as JSON, and keys that are given as JSON.

Times are ISO 8601 in UTC, dates are ISO 8601, decimals are text, bytes are Base64, and intervals are numbers of
microseconds or months. A map whose keys are not text becomes a list of pairs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import InvalidOperation
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql.types import DataType, MapType, StringType, StructType

from aion.errors import SchemaError
from aion.stateful.keys import Keys
from aion.stateful.types import Conversion, Convert, listed, or_none, paired, same, scalar


class JsonKey:
    """The key of an operator. ``fields``: its columns, as the operator's definition has them."""

    def __init__(self, fields: Sequence[Mapping[str, Any]]) -> None:
        self.schema = StructType.fromJson({"type": "struct", "fields": list(fields)})
        self._keys = Keys(self.schema)

    def __str__(self) -> str:
        return ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in self.schema)

    def values(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns the values of the columns. Raises SchemaError for other columns or types."""
        names = self.schema.names
        wrong = [f"the column {name} is missing" for name in names if name not in given]
        wrong += [f"it has no column {name}" for name in given if name not in names]
        if wrong:
            raise SchemaError("; ".join(wrong))
        values = []
        for field in self.schema:
            try:
                values.append(_FROM_JSON.of(field.dataType)(given[field.name]))
            except SchemaError as error:
                raise SchemaError(f"column {field.name}: {error}") from error.__cause__
        return tuple(values)

    def to_bytes(self, values: tuple[Any, ...]) -> bytes:
        """Returns the key as it is stored. Raises SchemaError for a value that its type cannot have."""
        try:
            return self._keys.to_bytes(values)
        except PySparkException as error:
            raise SchemaError(str(error)) from error


def json_text(plain: Any, type_: DataType) -> str:
    """Returns a plain value (:mod:`aion.stateful.types`) as the text of JSON."""
    return json.dumps(_TO_JSON.of(type_)(plain), ensure_ascii=False)


def _scalar_to_json(type_: DataType) -> Convert:
    row = scalar(type_)
    return same if row is None else or_none(row.to_json)


def _map_to_json(type_: MapType, key: Convert, value: Convert) -> Convert:
    pairs = paired(key, value)
    return or_none(lambda v: dict(pairs(v))) if isinstance(type_.keyType, StringType) else pairs


def _struct_to_json(type_: StructType, fields: Sequence[Convert]) -> Convert:
    names = type_.names
    return or_none(lambda v: {name: field(e) for name, field, e in zip(names, fields, v, strict=True)})


_TO_JSON = Conversion(_scalar_to_json, lambda type_, element: listed(element), _map_to_json, _struct_to_json)
"""From a plain value to what :func:`json.dumps` takes."""


def _checked(type_: DataType, kinds: Sequence[type], convert: Convert) -> Convert:
    """Returns a conversion of what JSON has. It raises SchemaError for a value of none of these kinds; none: of any."""
    names = {int: "a number", float: "a number", str: "a text", bool: "true or false", list: "a list"}
    wanted = " or ".join(dict.fromkeys(names.get(kind, "an object") for kind in kinds))

    def checked(value: Any) -> Any:
        try:
            if kinds and type(value) not in kinds:
                raise ValueError(f"it must be {wanted}")
            return convert(value)
        except (ValueError, OverflowError, InvalidOperation) as error:
            raise SchemaError(f"{json.dumps(value)} is no {type_.simpleString()}: {error}") from error

    return or_none(checked)


def _scalar_from_json(type_: DataType) -> Convert:
    row = scalar(type_)
    return same if row is None else _checked(type_, row.json, row.from_json)


def _struct_from_json(type_: StructType, fields: Sequence[Convert]) -> Convert:
    names = type_.names

    def convert(value: Mapping[str, Any]) -> tuple[Any, ...]:
        if sorted(value) != sorted(names):
            raise ValueError(f"its fields must be {', '.join(names)}")
        return tuple(field(value[name]) for name, field in zip(names, fields, strict=True))

    return _checked(type_, [dict], convert)


_FROM_JSON = Conversion(
    _scalar_from_json,
    lambda type_, element: _checked(type_, [list], listed(element)),
    lambda type_, key, value: same,  # Spark has no maps as keys
    _struct_from_json,
    lambda type_: same,
)
"""From what JSON has to what a user's code has."""
