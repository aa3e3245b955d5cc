"""The file formats that can be read without Spark's rows, through ``pyarrow.dataset``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset as ds
import pyarrow.json

from aion.errors import ConfigError

_TEXT_BLOCK_BYTES = 8 << 20
"""Text is parsed in blocks of this size; a row must fit into one."""


@dataclass(frozen=True)
class Format:
    """How files are read. ``options``: Spark's names and their values, for CSV."""

    name: str
    options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in _MAKERS:
            raise ConfigError(f"format: {self.name!r} is not one of {', '.join(_MAKERS)}")

    @property
    def is_split(self) -> bool:
        """Whether several tasks can read parts of one file."""
        return self.name == "parquet"

    @property
    def has_text_times(self) -> bool:
        return self.name in ("csv", "json")

    @property
    def has_header(self) -> bool:
        return self.name == "csv" and self.options.get("header", "false").lower() == "true"

    def make(self, columns: pa.Schema) -> ds.FileFormat:
        """pyarrow's format. ``columns``: those of the files, which formats without types of their own need to know."""
        return _MAKERS[self.name](self, columns)


def _typed(columns: pa.Schema) -> list[pa.Field]:
    """The columns as a text parser reads them. Times stay text: the parser does not know the session's time zone."""
    return [pa.field(f.name, pa.string() if pa.types.is_timestamp(f.type) else f.type) for f in columns]


CSV_OPTIONS = ("header", "sep", "delimiter", "quote", "nullValue")
"""Spark's options for CSV that are understood here."""


def _csv(format_: Format, columns: pa.Schema) -> ds.FileFormat:
    given = format_.options
    null = given.get("nullValue", "")
    return ds.CsvFileFormat(
        parse_options=pyarrow.csv.ParseOptions(
            delimiter=given.get("sep", given.get("delimiter", ",")), quote_char=given.get("quote", '"')
        ),
        read_options=pyarrow.csv.ReadOptions(
            block_size=_TEXT_BLOCK_BYTES, column_names=None if format_.has_header else columns.names
        ),
        convert_options=pyarrow.csv.ConvertOptions(
            column_types={f.name: f.type for f in _typed(columns)},
            null_values=list(dict.fromkeys(["", null])),
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )


def _json(format_: Format, columns: pa.Schema) -> ds.FileFormat:
    return ds.JsonFileFormat(
        read_options=pyarrow.json.ReadOptions(block_size=_TEXT_BLOCK_BYTES),
        parse_options=pyarrow.json.ParseOptions(
            explicit_schema=pa.schema(_typed(columns)), unexpected_field_behavior="ignore"
        ),
    )


_MAKERS: dict[str, Callable[[Format, pa.Schema], ds.FileFormat]] = {
    "parquet": lambda *_: ds.ParquetFileFormat(),
    "arrow": lambda *_: ds.IpcFileFormat(),
    "csv": _csv,
    "json": _json,
    "orc": lambda *_: ds.OrcFileFormat(),
}


def row_group_middles(metadata: Any) -> list[int]:
    """The middle byte of each row group of a Parquet file."""
    middles = []
    for i in range(metadata.num_row_groups):
        group = metadata.row_group(i)
        columns = [group.column(j) for j in range(group.num_columns)]
        begins = min(_first_page(column) for column in columns)
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
            if column.path_in_schema.partition(".")[0] in wanted:
                # A dictionary makes a column smaller than it is in memory.
                size += max(column.total_uncompressed_size, 8 * group.num_rows)
    return size / max(rows, 1)


def _first_page(column: Any) -> int:
    page: int = column.data_page_offset
    if column.has_dictionary_page and column.dictionary_page_offset:
        page = min(page, column.dictionary_page_offset)
    return page
