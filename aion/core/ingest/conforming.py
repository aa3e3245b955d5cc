"""How the columns of a file become the columns that a schema declares. Pure.

A column is found by its name, and so is a field of a struct. One that the file does not have is null. A type is widened
if no value can change, as Spark's own readers do; nanoseconds are floored to microseconds. Everything else is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from aion.errors import SchemaError

_INT_DIGITS = {8: 3, 16: 5, 32: 10, 64: 19}


class Conforming:
    """Makes batches of ``wanted`` from batches of one file.

    ``names``: the columns to read from the file. ``constants``: values that the whole file has in common, such as those
    in the names of its folders; they win over columns of the file. Raises SchemaError for columns that do not fit.
    """

    def __init__(
        self,
        found: pa.Schema,
        wanted: pa.Schema,
        *,
        constants: Mapping[str, pa.Scalar] | None = None,
        case_sensitive: bool = False,
    ) -> None:
        self._wanted = wanted
        self._constants = constants or {}
        self._case_sensitive = case_sensitive
        self._sources: dict[str, str] = {}
        for field in wanted:
            if field.name in self._constants:
                continue
            name = place_of_column(found.names, field.name, case_sensitive)
            if name is None:
                continue
            type_ = found.field(name).type
            if not fits(type_, field.type, case_sensitive=case_sensitive):
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
        return self._converted(batch.column(name), field.type)

    def _converted(self, column: pa.Array, wanted: pa.DataType) -> pa.Array:
        """``column`` as ``wanted``, which :func:`fits` says it fits."""
        t, found = pa.types, column.type
        if found == wanted:
            return column
        if t.is_struct(wanted) and t.is_struct(found):
            parts = dict(zip([f.name for f in found], column.flatten(), strict=True))
            places = [(f, place_of_column(list(parts), f.name, self._case_sensitive)) for f in wanted]
            fields = [
                pa.nulls(len(column), f.type) if name is None else self._converted(parts[name], f.type)
                for f, name in places
            ]
            return pa.StructArray.from_arrays(fields, fields=list(wanted), mask=column.is_null())
        if t.is_list(wanted) and (t.is_list(found) or t.is_large_list(found)):
            offsets, (values,) = _inside(column, column.values)
            return pa.ListArray.from_arrays(
                offsets, self._converted(values, wanted.value_type), type=wanted, mask=column.is_null()
            )
        if t.is_list(wanted) and t.is_fixed_size_list(found):
            return self._converted(column.cast(pa.list_(found.value_type)), wanted)
        if t.is_map(wanted) and t.is_map(found):
            offsets, (keys, items) = _inside(column, column.keys, column.items)
            keys, items = self._converted(keys, wanted.key_type), self._converted(items, wanted.item_type)
            return pa.MapArray.from_arrays(offsets, keys, items, type=wanted, mask=column.is_null())
        if t.is_dictionary(found):
            return self._converted(column.dictionary_decode(), wanted)
        if t.is_timestamp(found) and found.unit == "ns":
            # Their number since 1970, in UTC, is the same with and without a zone.
            return _floored(column, 1_000).view(wanted)
        if t.is_date64(found) and t.is_date32(wanted):
            return _floored(column, 86_400_000).cast(pa.int32()).view(wanted)
        if t.is_timestamp(found) and found.tz is not None and t.is_timestamp(wanted) and wanted.tz is None:
            column = column.cast(pa.timestamp(found.unit, "UTC"))
        return column.cast(wanted)


def _floored(column: pa.Array, units: int) -> pa.Array:
    """Numbers of larger units. A cast cuts towards zero, and so moves times before 1970 to the next unit."""
    numbers = column.view(pa.int64())
    floored = pa.array(numbers.fill_null(0).to_numpy() // units)
    return pc.if_else(numbers.is_valid(), floored, None) if numbers.null_count else floored


def _inside(column: pa.Array, *values: pa.Array) -> tuple[pa.Array, list[pa.Array]]:
    """Offsets of lists, counted from the first value of the column, and the values from there on."""
    first, last = column.offsets[0], column.offsets[-1]
    begin, size = first.as_py(), last.as_py() - first.as_py()
    offsets = pc.subtract(column.offsets, first).cast(pa.int32())
    return offsets, [part.slice(begin, size) for part in values]


def fits(found: pa.DataType, wanted: pa.DataType, *, case_sensitive: bool = False) -> bool:
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

    def inside(found: pa.DataType, wanted: pa.DataType) -> bool:
        return fits(found, wanted, case_sensitive=case_sensitive)

    if t.is_list(wanted):
        lists = t.is_list(found) or t.is_large_list(found) or t.is_fixed_size_list(found)
        return bool(lists and inside(found.value_type, wanted.value_type))
    if t.is_struct(wanted):
        if not t.is_struct(found):
            return False
        places = [(place_of_column([f.name for f in found], f.name, case_sensitive), f.type) for f in wanted]
        both = [(found.field(name).type, type_) for name, type_ in places if name is not None]
        # With no field in common it is another struct.
        return bool(both) and all(inside(*types) for types in both)
    if t.is_map(wanted):
        return bool(
            t.is_map(found) and inside(found.key_type, wanted.key_type) and inside(found.item_type, wanted.item_type)
        )
    return False


def nullable(type_: pa.DataType) -> pa.DataType:
    """The type, with null allowed in every part of it."""
    t = pa.types
    if t.is_struct(type_):
        return pa.struct([pa.field(f.name, nullable(f.type)) for f in type_])
    if t.is_list(type_):
        return pa.list_(pa.field(type_.value_field.name, nullable(type_.value_type)))
    if t.is_map(type_):
        return pa.map_(nullable(type_.key_type), pa.field(type_.item_field.name, nullable(type_.item_type)))
    return type_


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


def place_of_column(names: Sequence[str], name: str, case_sensitive: bool) -> str | None:
    """The file's name of a column; None if it has no such column. Raises SchemaError if several may be meant."""
    if names.count(name) > 1:
        raise SchemaError(f"there are {names.count(name)} columns {name!r}")
    if name in names or case_sensitive:
        return name if name in names else None
    alike = [n for n in names if n.lower() == name.lower()]
    if len(alike) > 1:
        raise SchemaError(f"the columns {', '.join(map(repr, alike))} differ only in case; which of them is {name!r}?")
    return alike[0] if alike else None
