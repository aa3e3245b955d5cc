"""Reads the name of an Arrow type, as ``str`` writes it. Pure."""

from __future__ import annotations

import re

import pyarrow as pa

_TOKEN = re.compile(r"\s*([A-Za-z_][\w/:+-]*|-?\d+|[<>()\[\],:=])")
_PLAIN = {
    "bool": pa.bool_(), "int8": pa.int8(), "int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64(),
    "uint8": pa.uint8(), "uint16": pa.uint16(), "uint32": pa.uint32(), "uint64": pa.uint64(),
    "halffloat": pa.float16(), "float": pa.float32(), "double": pa.float64(), "null": pa.null(),
    "string": pa.string(), "large_string": pa.large_string(), "binary": pa.binary(), "large_binary": pa.large_binary(),
    "month_day_nano_interval": pa.month_day_nano_interval(),
}  # fmt: skip


def arrow_type(name: str) -> pa.DataType:
    """Returns the type with this name, e.g. ``"list<item: timestamp[us, tz=UTC]>"``. Raises ValueError for others."""
    reader = _Reader(name)
    found = reader.type()
    reader.end()
    if str(found) != name:
        raise ValueError(f"{name!r} is not the name of an Arrow type that can be read")
    return found


class _Reader:
    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def type(self) -> pa.DataType:
        name = self._word()
        if name in _PLAIN:
            return _PLAIN[name]
        match name:
            case "timestamp":
                unit, zone = self._options()
                return pa.timestamp(unit, zone)
            case "duration":
                return pa.duration(self._options()[0])
            case "date32" | "date64":
                self._options()
                return getattr(pa, name)()
            case "decimal128" | "decimal256":
                self._take("(")
                precision = int(self._word())
                self._take(",")
                scale = int(self._word())
                self._take(")")
                return getattr(pa, name)(precision, scale)
            case "fixed_size_binary":
                self._take("[")
                width = int(self._word())
                self._take("]")
                return pa.binary(width)
            case "list" | "large_list":
                (item,) = self._fields()
                return pa.list_(item) if name == "list" else pa.large_list(item)
            case "struct":
                return pa.struct(self._fields())
            case "map":
                return self._map()
        raise self._error()

    def end(self) -> None:
        if self._text[self._at :].strip():
            raise self._error()

    def _options(self) -> tuple[str, str | None]:
        """Reads ``[us]``, ``[us, tz=Europe/Berlin]`` or ``[day]``."""
        self._take("[")
        unit, zone = self._word(), None
        if self._peek() == ",":
            for token in (",", "tz", "="):
                self._take(token)
            zone = self._until("]")
        self._take("]")
        return unit, zone

    def _map(self) -> pa.DataType:
        self._take("<")
        key = self.type()
        self._take(",")
        item = self.type()
        if self._peek() == "(":
            raise self._error()  # the names of its fields are others than usual
        self._take(">")
        return pa.map_(key, item)

    def _fields(self) -> list[pa.Field]:
        self._take("<")
        fields: list[pa.Field] = []
        while self._peek() != ">":
            if fields:
                self._take(",")
            name = self._until(":").strip()
            self._take(":")
            type_ = self.type()
            nullable = self._peek() != "not"
            if not nullable:
                self._take("not")
                self._take("null")
            fields.append(pa.field(name, type_, nullable))
        self._take(">")
        return fields

    def _peek(self) -> str | None:
        match = _TOKEN.match(self._text, self._at)
        return None if match is None else match[1]

    def _word(self) -> str:
        match = _TOKEN.match(self._text, self._at)
        if match is None:
            raise self._error()
        self._at = match.end()
        return match[1]

    def _take(self, token: str) -> None:
        if self._word() != token:
            raise self._error()

    def _until(self, token: str) -> str:
        """Reads up to a character, which stays. Names of columns and zones may have anything else in them."""
        end = self._text.find(token, self._at)
        if end < 0:
            raise self._error()
        found, self._at = self._text[self._at : end], end
        return found

    def _error(self) -> ValueError:
        return ValueError(f"{self._text!r} is not the name of an Arrow type that can be read")
