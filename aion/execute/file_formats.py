"""The file formats that can be read without Spark's rows: three through ``pyarrow.dataset``, and CSV and JSON."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from aion.errors import ConfigError, SchemaError

CSV_OPTIONS = ("header", "sep", "delimiter", "quote", "escape", "nullValue")
"""Spark's options for CSV that are understood here."""
_TEXT = ("csv", "json")
_MAKERS: dict[str, Callable[[], ds.FileFormat]] = {
    "parquet": lambda: ds.ParquetFileFormat(
        # Old times of 96 bits are nanoseconds for Arrow, which has none for years before 1678 and after 2262.
        read_options=ds.ParquetReadOptions(coerce_int96_timestamp_unit="us"),
        # Spark writes checksums. Without them, some damage looks like other values.
        default_fragment_scan_options=ds.ParquetFragmentScanOptions(page_checksum_verification=True),
    ),
    "arrow": ds.IpcFileFormat,
    "orc": ds.OrcFileFormat,
}
FORMATS = ("parquet", "arrow", "csv", "json", "orc")


@dataclass(frozen=True)
class Format:
    """How files are read. ``options``: Spark's names and their values, for CSV."""

    name: str
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in FORMATS:
            raise ConfigError(f"format: {self.name!r} is not one of {', '.join(FORMATS)}")
        for name in ("sep", "delimiter", "quote", "escape"):
            if name in self.options and len(self.options[name].encode()) != 1:
                raise ConfigError(f"options: {name} is {self.options[name]!r}; it must be one character of ASCII")
        if self.options.get("header", "false").lower() not in ("true", "false"):
            raise ConfigError(f"options: header is {self.options['header']!r}, and neither true nor false")

    def check(self, columns: pa.Schema) -> None:
        """Raises SchemaError if files of this format cannot hold such columns."""
        for column in columns:
            if (part := _unreadable(self.name, column.type)) is not None:
                where = "" if part == column.type else f", which has {part}"
                use = "a struct with the keys" if self.name == "json" and pa.types.is_map(part) else "string"
                raise SchemaError(
                    f"schema: column {column.name!r} is of type {column.type}{where}: that cannot be read from "
                    f"{self.name.upper()} files; read it as {use}, and change it in transform"
                )

    @property
    def is_split(self) -> bool:
        """Whether several tasks can read parts of one file."""
        return self.name == "parquet"

    @property
    def is_text(self) -> bool:
        """Whether files do not say which types their columns have."""
        return self.name in _TEXT

    @property
    def has_header(self) -> bool:
        return self.name == "csv" and self.options.get("header", "false").lower() == "true"

    def make(self) -> ds.FileFormat:
        """pyarrow's format, unless files are text."""
        return _MAKERS[self.name]()


def _unreadable(name: str, type_: pa.DataType) -> pa.DataType | None:
    """The part of a type that a format has no text for, or that pyarrow does not parse as Spark does."""
    t = pa.types
    if name not in _TEXT:
        return None
    if t.is_duration(type_) or t.is_map(type_) or (name == "json" and (t.is_binary(type_) or t.is_time(type_))):
        return type_
    if t.is_nested(type_):
        if name == "csv":
            return type_
        inner = [type_.field(i).type for i in range(type_.num_fields)]
        return next((part for part in (_unreadable(name, i) for i in inner) if part is not None), None)
    return None


def row_group_middles(metadata: Any) -> list[int]:
    """The middle byte of each row group of a Parquet file."""
    middles = []
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        columns = [group.column(j) for j in range(group.num_columns)]
        begins = min((_first_page(column) for column in columns), default=0)
        middles.append(begins + sum(column.total_compressed_size for column in columns) // 2)
    return middles


def row_bytes(metadata: Any, groups: Sequence[int], names: Sequence[str]) -> float:
    """About how many bytes a row of these columns takes in memory."""
    wanted = set(names)
    rows = size = 0
    for i in groups:
        group = metadata.row_group(i)
        rows += group.num_rows
        for j in range(group.num_columns):
            column = group.column(j)
            # The path of a part of a column begins with the column's name, which may have dots itself.
            names_above = itertools.accumulate(column.path_in_schema.split("."), "{}.{}".format)
            if not wanted.isdisjoint(names_above):
                # A dictionary makes a column smaller than it is in memory.
                size += max(column.total_uncompressed_size, 8 * group.num_rows)
    return size / max(rows, 1)


def _first_page(column: Any) -> int:
    page: int = column.data_page_offset
    if column.has_dictionary_page and column.dictionary_page_offset:
        page = min(page, column.dictionary_page_offset)
    return page
