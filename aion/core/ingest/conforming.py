"""How the columns of a file become the columns that a schema declares. Pure.

A column is found by its name. One that the file does not have is null. A type is widened if no value can change, as
Spark's own readers do; nanoseconds are cut to microseconds. Everything else is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from aion.core.ingest.text_times import instants_of
from aion.errors import SchemaError

_INT_DIGITS = {8: 3, 16: 5, 32: 10, 64: 19}


class Text(NamedTuple):
    """Times are text in the file. ``zone``: the time zone of times that do not name one."""

    zone: str


class Conforming:
    """Makes batches of ``wanted`` from batches of one file.

    ``names``: the columns to read from the file. ``constants``: values that the whole file has in common, such as those
    in the names of its folders; they win over columns of the file. ``text``: how to read times that are text; None if
    the format has a type for times. Raises SchemaError for columns that do not fit.
    """

    def __init__(
        self,
        found: pa.Schema,
        wanted: pa.Schema,
        *,
        constants: Mapping[str, pa.Scalar] | None = None,
        case_sensitive: bool = False,
        text: Text | None = None,
    ) -> None:
        self._wanted = wanted
        self._constants = constants or {}
        self._text = text
        self._sources: dict[str, str] = {}
        for field in wanted:
            if field.name in self._constants:
                continue
            name = _place(found.names, field.name, case_sensitive)
            if name is None:
                continue
            type_ = found.field(name).type
            if not fits(type_, field.type) and not (text is not None and _is_text_time(type_, field.type)):
                raise SchemaError(f"column {name!r} is of type {type_}, which does not fit the schema's {field.type}")
            self._sources[field.name] = name
        self.names = list(self._sources.values())
        self._as_is = {
            field.name
            for field in wanted
            if field.name in self._sources
            and found.field(self._sources[field.name]).type == field.type
            and self._sources[field.name] == field.name
        }

    def unchanged(self, columns: Sequence[str]) -> bool:
        """Whether the file has all these columns just as they are wanted."""
        return self._as_is.issuperset(columns)

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Raises ArrowInvalid for a value that the wanted type cannot hold."""
        columns = [self._column(batch, field) for field in self._wanted]
        return pa.RecordBatch.from_arrays(columns, schema=self._wanted)

    def _column(self, batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
        if field.name in self._constants:
            return pa.repeat(self._constants[field.name], batch.num_rows)
        name = self._sources.get(field.name)
        if name is None:
            return pa.nulls(batch.num_rows, field.type)
        column = batch.column(name)
        if column.type == field.type:
            return column
        if self._text is not None and _is_text_time(column.type, field.type):
            return instants_of(column, field.type, self._text.zone)
        if pa.types.is_timestamp(column.type) and column.type.tz is not None and field.type.tz is None:
            column = column.cast(pa.timestamp(column.type.unit, "UTC"))
        # Only a cast to a coarser unit of time loses something.
        return column.cast(field.type, safe=not pa.types.is_timestamp(field.type))


def fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Whether a column of type ``found`` can be read as ``wanted``, which is one of the types that Spark has."""
    t = pa.types
    if found == wanted or t.is_null(found):
        return True
    if t.is_dictionary(found):
        return fits(found.value_type, wanted)
    if t.is_timestamp(wanted):
        # As for Spark, times without a zone are in UTC if instants are wanted, and the other way round.
        return bool(t.is_timestamp(found) or (t.is_date(found) and wanted.tz is None))
    if t.is_date32(wanted):
        return bool(t.is_date64(found))
    if t.is_integer(found):
        return _integer_fits(found, wanted)
    if t.is_floating(found):
        return bool(t.is_floating(wanted) and found.bit_width <= wanted.bit_width)
    if t.is_decimal(found) and t.is_decimal(wanted):
        whole = wanted.precision - wanted.scale >= found.precision - found.scale
        return bool(whole and wanted.scale >= found.scale)
    if t.is_string(wanted) or t.is_binary(wanted):
        return any(
            is_(found)
            for is_ in (t.is_string, t.is_large_string, t.is_string_view, t.is_binary, t.is_large_binary,
                        t.is_binary_view, t.is_fixed_size_binary)
        )  # fmt: skip
    if t.is_list(wanted):
        lists = t.is_list(found) or t.is_large_list(found) or t.is_fixed_size_list(found)
        return bool(lists and fits(found.value_type, wanted.value_type))
    if t.is_struct(wanted):
        return bool(
            t.is_struct(found)
            and [f.name for f in found] == [f.name for f in wanted]
            and all(fits(f.type, w.type) for f, w in zip(found, wanted, strict=True))
        )
    if t.is_map(wanted):
        return bool(
            t.is_map(found) and fits(found.key_type, wanted.key_type) and fits(found.item_type, wanted.item_type)
        )
    return False


def _integer_fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    t = pa.types
    # All integers of Spark have a sign.
    bits = found.bit_width + t.is_unsigned_integer(found)
    if t.is_integer(wanted):
        return bool(bits <= wanted.bit_width)
    if t.is_floating(wanted):
        return bool(bits <= (32 if wanted.bit_width == 64 else 16))
    if t.is_decimal(wanted):
        return bool(wanted.precision - wanted.scale >= _INT_DIGITS[found.bit_width] + (bits == 65))
    return False


def _is_text_time(found: pa.DataType, wanted: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(wanted) and pa.types.is_string(found))


def _place(names: Sequence[str], name: str, case_sensitive: bool) -> str | None:
    """The file's name of a column. Raises SchemaError if several differ only in case."""
    if name in names or case_sensitive:
        return name if name in names else None
    alike = [n for n in names if n.lower() == name.lower()]
    if len(alike) > 1:
        raise SchemaError(f"the columns {', '.join(map(repr, alike))} differ only in case; which of them is {name!r}?")
    return alike[0] if alike else None
