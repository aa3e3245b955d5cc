"""The file formats: three that pyarrow reads as Spark does, CSV and JSON, which Spark itself reads, and the tables of
lakes, whose files are of Parquet."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from aion.errors import ConfigError, SchemaError

_TEXT = ("csv", "json")
_LAKES = ("delta", "iceberg")
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
FORMATS = ("parquet", "arrow", "csv", "json", "orc", *_LAKES)


@dataclass(frozen=True)
class Format:
    """What files are, by the name of Spark's reader."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in FORMATS:
            raise ConfigError(f"format: {self.name!r} is not one of {', '.join(FORMATS)}")

    def check(self, columns: pa.Schema) -> None:
        """Raises SchemaError if files of this format cannot hold such columns."""
        for column in columns:
            if self.name == "csv" and (pa.types.is_nested(column.type) or pa.types.is_null(column.type)):
                raise SchemaError(
                    f"schema: column {column.name!r} is of type {column.type}: that cannot be read from CSV files; "
                    "read it as string, and change it in transform"
                )

    @property
    def is_split(self) -> bool:
        """Whether several tasks can read parts of one file."""
        return self.name == "parquet" or self.is_lake

    @property
    def is_text(self) -> bool:
        """Whether files do not say which types their columns have. What their lines mean only Spark knows."""
        return self.name in _TEXT

    @property
    def is_lake(self) -> bool:
        """Whether a table's log says which files there are."""
        return self.name in _LAKES

    def make(self) -> ds.FileFormat:
        """pyarrow's format, unless files are text."""
        return _MAKERS["parquet" if self.is_lake else self.name]()


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
