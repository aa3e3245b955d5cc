"""Reads CSV and JSON, whose files do not say which types they hold: a file is parsed as the columns it should have.

Compressed files are recognised by the ends of their names, such as ``.gz``, ``.bz2`` and ``.zst``.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.json

from aion.core.ingest.conforming import place_of_column
from aion.core.ingest.text_times import as_text
from aion.errors import SchemaError
from aion.execute.file_formats import Format
from state_backends.thresholds import threshold

_BLOCK_BYTES = 8 << 20
"""Text is parsed in blocks of this size; a row must fit into one."""
_LINE_OF_NULL = re.compile(rb"\n[ \t\r]*null([^\n]*)")
_JSON_BYTES = 4 * _BLOCK_BYTES
"""So much of a JSON file is in memory at once: threads parse its blocks."""
_HEAD_BYTES = threshold(1 << 16)
_NO_COLUMN = pa.field("\0", pa.string())


class TextFile:
    """One file. ``columns``: those that it should have. Raises SchemaError if its header does not name them all."""

    def __init__(self, format_: Format, filesystem: Any, path: str, columns: pa.Schema, case_sensitive: bool) -> None:
        self._format = format_
        self._filesystem = filesystem
        self._path = path
        self._case_sensitive = case_sensitive
        self.schema = pa.schema([pa.field(f.name, as_text(f.type)) for f in columns])
        """The columns as they are parsed, with the file's names. Times and dates stay text: see ``Conforming``."""
        self._has_rows = True
        if format_.name == "csv":
            self._look_at_head()

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of the file, with these columns of :attr:`schema`; with others if there are none of them."""
        wanted = [self.schema.field(name) for name in names]
        with self._filesystem.open_input_stream(self._path) as stream:
            if self._format.name == "json":
                yield from _json(stream, pa.schema(wanted or [_NO_COLUMN]))
            elif self._has_rows:
                yield from self._csv(stream, wanted)

    def _csv(self, stream: Any, wanted: Sequence[pa.Field]) -> Iterator[pa.RecordBatch]:
        if not wanted:  # no names mean all columns; bytes can be anything
            wanted = [pa.field(self.schema.names[0], pa.binary())]
        null = self._format.options.get("nullValue", "")
        yield from pyarrow.csv.open_csv(
            stream,
            parse_options=self._parsing,
            read_options=pyarrow.csv.ReadOptions(
                block_size=_BLOCK_BYTES, column_names=None if self._format.has_header else self.schema.names
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                include_columns=[f.name for f in wanted],
                column_types={f.name: f.type for f in wanted},
                null_values=list(dict.fromkeys(["", null])),
                strings_can_be_null=True,
                quoted_strings_can_be_null=null == "",  # as in Spark
            ),
        )

    @property
    def _parsing(self) -> pyarrow.csv.ParseOptions:
        given = self._format.options
        return pyarrow.csv.ParseOptions(
            delimiter=given.get("sep", given.get("delimiter", ",")),
            quote_char=given.get("quote", '"'),
            escape_char=given.get("escape", False),
        )

    def _look_at_head(self) -> None:
        """Notes whether there are rows, and the names in the header, which is the first line that is not empty."""
        head = b""
        with self._filesystem.open_input_stream(self._path) as stream:
            while data := stream.read(_HEAD_BYTES):
                head = (head + data).lstrip(b"\r\n")
                if b"\n" in head or b"\r" in head or (head and not self._format.has_header):
                    break
        self._has_rows = bool(head)
        if not head or not self._format.has_header:
            return
        first, *more = head.splitlines(keepends=True)
        self._has_rows = bool(more) or first.endswith((b"\n", b"\r"))
        line = pa.BufferReader(first.rstrip(b"\r\n") + b"\n")
        names = pyarrow.csv.read_csv(line, parse_options=self._parsing).column_names
        types = dict.fromkeys(names, pa.string())
        for field in self.schema:
            name = place_of_column(names, field.name, self._case_sensitive)
            if name is None:
                raise SchemaError(f"the header does not name the column {field.name!r}")
            types[name] = field.type
        self.schema = pa.schema([(name, types[name]) for name in names])


def _json(stream: Any, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Keys that are no columns are ignored, whatever they hold. Reading a dataset would not ignore those."""
    rest = stream.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8)
    while data := stream.read(_JSON_BYTES):
        end = data.rfind(b"\n") + 1
        if not end:
            rest += data
            continue
        yield from _json_rows(rest + data[:end], columns)
        rest = data[end:]
    yield from _json_rows(rest, columns)


def _row_of_nulls(line: re.Match[bytes]) -> bytes:
    """The same row without the word: pyarrow ends the process if a null comes first in a block."""
    if line[1].strip():
        raise ValueError("a line is not an object of JSON")
    return b"\n{}"


def _json_rows(lines: bytes, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
    if b"{" not in lines:
        if lines.strip():  # pyarrow ends the process if there are only nulls
            raise ValueError("a line is not an object of JSON")
        return
    table = pyarrow.json.read_json(
        pa.BufferReader(_LINE_OF_NULL.sub(_row_of_nulls, b"\n" + lines)),
        read_options=pyarrow.json.ReadOptions(block_size=_BLOCK_BYTES),
        parse_options=pyarrow.json.ParseOptions(explicit_schema=columns, unexpected_field_behavior="ignore"),
    )
    yield from table.to_batches()
