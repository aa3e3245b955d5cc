"""Reads events from files: only the columns that are needed, of the split that a task has."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from aion.core.ingest.conforming import Conforming
from aion.core.ingest.file_splits import Split, folder_values
from aion.errors import AionError, BadFile, SchemaError, StorageError, TransformError
from aion.execute.files.formats import Format, row_bytes, row_group_middles
from aion.execute.files.places import place_of
from state_backends.files.remote import storage_errors
from state_backends.thresholds import threshold

# Fewer rows cost more passes over them. Of more rows a column is so large that the C library takes its memory from the
# system each time, which took a third of the processor's time. Wide rows are bounded by their bytes.
_BATCH_ROWS = threshold(1 << 16)
_BATCH_BYTES = threshold(8 << 20, 256)
_BATCHES_AHEAD = 4


@dataclass(frozen=True)
class FileReader:
    """Reads splits of files. Can be sent to a task.

    ``declared``: the columns that files are said to have. ``schema``: those to give. ``where``: an expression over the
    columns of ``schema``; ``where_columns``: those that it uses. ``base``: the folder above the folders whose names
    hold values; None if none do. ``zone``: the time zone of times there without one.
    """

    format: Format
    declared: pa.Schema
    schema: pa.Schema
    where: Any
    where_columns: tuple[str, ...]
    base: str | None
    zone: str
    case_sensitive: bool

    def read(self, split: Split) -> Iterator[pa.RecordBatch]:
        """The events of a split. Raises BadFile, which names the file, TransformError and StorageError."""
        try:
            yield from self._read(split)
        except AionError as error:
            if isinstance(error, SchemaError):
                raise BadFile(f"{split.path}: {error}") from error.__cause__
            raise
        except FileNotFoundError as error:
            raise StorageError(f"{split.path}: {error}{_of_version(split)}") from error
        except PermissionError as error:
            raise StorageError(f"{split.path}: {error}") from error
        except (OSError, pa.ArrowException, ValueError) as error:
            _check_readable(split)
            first, *_ = str(error).splitlines() or [type(error).__name__]
            is_of_file = isinstance(error, OSError) or self.where is None
            if not is_of_file and replace(self, where=None).trouble(split) is None:
                raise TransformError(f"{split.path}: where fails on an event: {first}") from error
            raise BadFile(f"{split.path} cannot be read as {self.format.name}: {first}") from error

    def trouble(self, split: Split) -> str | None:
        """Why a split cannot be read; None if it can. Reads all of it. Raises StorageError."""
        why = None
        for _ in range(2):  # a connection that breaks for a moment looks like a damaged file
            try:
                for _ in self.read(split):
                    pass
            except BadFile as error:
                why = str(error)
            else:
                return None
        return why

    def _read(self, split: Split) -> Iterator[pa.RecordBatch]:
        filesystem, path = place_of(split.path)
        fragment = self.format.make().make_fragment(path, filesystem)
        constants = self._constants(split, fragment.physical_schema.names)
        conforming = Conforming(
            fragment.physical_schema, self.schema, constants=constants, case_sensitive=self.case_sensitive
        )
        pushed = self.where is not None and conforming.unchanged(self.where_columns) and not self._keeps_nan()
        for raw in self._scanned(fragment, split, conforming.names, self.where if pushed else None):
            for at in range(0, raw.num_rows, _BATCH_ROWS):
                batch = conforming(raw.slice(at, _BATCH_ROWS))
                if self.where is not None and not pushed:
                    batch = batch.filter(self.where)
                if batch.num_rows:
                    yield batch

    def _keeps_nan(self) -> bool:
        """Whether ``where`` may keep events with a NaN.

        A Parquet file's statistics leave NaN out. So they must not decide which row groups such an expression needs.
        """
        types = [self.schema.field(name).type for name in self.where_columns]
        if not self.format.is_split or not any(map(_has_floats, types)):
            return False
        if len(types) > 1 or not pa.types.is_floating(types[0]):
            return True  # it depends on other values
        nan = pa.array([math.nan], pa.float64()).cast(types[0])
        try:
            return bool(pa.record_batch([nan], names=self.where_columns).filter(self.where).num_rows)
        except pa.ArrowException:
            return True

    def _scanned(self, fragment: Any, split: Split, names: Sequence[str], where: Any) -> Iterator[pa.RecordBatch]:
        found = fragment.physical_schema
        columns = list(names) or found.names[:1]
        rows = _BATCH_ROWS
        if self.format.is_split:
            groups = split.units(row_group_middles(fragment.metadata))
            if not groups:
                return
            size = max(row_bytes(fragment.metadata, groups, columns), 1)
            rows = max(min(_BATCH_ROWS, int(_BATCH_BYTES / size)), 1)
            fragment = fragment.subset(row_group_ids=groups)
        scanner = fragment.scanner(
            schema=found, columns=columns, filter=where, batch_size=rows, batch_readahead=_BATCHES_AHEAD
        )
        yield from scanner.to_batches()

    def _constants(self, split: Split, found: Sequence[str]) -> Mapping[str, pa.Scalar]:
        values = folder_values(split.path, self.base) if split.values is None else json.loads(split.values)
        if self.format.name == "iceberg":
            # A file mostly has the columns of its partition, and pyiceberg keeps values of double as float.
            values = {name: value for name, value in values.items() if name not in found}
        if not self.case_sensitive:
            values = {name.lower(): value for name, value in values.items()}
        constants = {}
        for column in self.declared:
            name = column.name if self.case_sensitive else column.name.lower()
            if name in values:
                if split.values is not None and pa.types.is_binary(column.type):
                    raise SchemaError(f"the partition {column.name} is binary; leave the column out of the schema")
                constants[column.name] = _typed(column, values[name], self.zone)
        return constants


def _has_floats(type_: pa.DataType) -> bool:
    fields = [type_.field(i) for i in range(type_.num_fields)]
    return pa.types.is_floating(type_) or any(_has_floats(field.type) for field in fields)


def _typed(column: pa.Field, text: str | None, zone: str) -> pa.Scalar:
    try:
        values = pa.array([text], pa.string())
        if pa.types.is_timestamp(column.type):
            return instants_of(values, column.type, zone)[0]
        return values.cast(column.type)[0]
    except pa.ArrowException as error:
        raise SchemaError(
            f"the folder or partition {column.name}={text} is not of the schema's type {column.type}"
        ) from error


def _of_version(split: Split) -> str:
    if split.version is None:
        return ""
    return (
        f"; version {split.version} of the table has this file. If it was vacuumed before it was read, begin with a "
        "new checkpoint, and keep files longer"
    )


def _check_readable(split: Split) -> None:
    """Raises StorageError if the bytes of a file cannot be read. Otherwise it is its content that is wrong."""
    filesystem, path = place_of(split.path)
    # As it is: what cannot be decompressed is read, but wrong.
    with storage_errors(split.path), filesystem.open_input_stream(path, compression=None) as stream:
        while stream.read(1 << 22):
            pass


# A zone follows a time of day: the end of a date alone looks like a zone.
_ZONED = r"[T ]\d\d.*(?:Z|[+-]\d\d(?::?\d\d)?)$"
_FINER_THAN_MICROS = r"(\.\d{6})\d+"
_MICROS = pa.timestamp("us")


def instants_of(texts: pa.Array, type_: pa.DataType, zone: str) -> pa.Array:
    """Times of ``type_`` from ISO 8601 text. What is finer than microseconds is cut.

    A text without a zone is in ``zone``, as in Spark: where clocks are set back, it is the first of two instants; where
    they skip an hour, it is counted from before. Raises ArrowInvalid for a text that is not such a time, or one with a
    zone if ``type_`` has none.
    """
    if type_.tz is None:
        return _parsed(texts, _MICROS)
    zoned = pc.match_substring_regex(texts, _ZONED)
    if not pc.any(zoned).as_py():
        return _in_zone(_parsed(texts, _MICROS), zone).cast(type_)
    with_zone = _parsed(pc.if_else(zoned, texts, None), type_)
    without = _in_zone(_parsed(pc.if_else(zoned, None, texts), _MICROS), zone).cast(type_)
    return pc.coalesce(with_zone, without)


def _parsed(texts: pa.Array, type_: pa.DataType) -> pa.Array:
    try:
        return texts.cast(type_)
    except pa.ArrowInvalid:
        # Only then: to look for such texts takes as long as to parse them.
        return pc.replace_substring_regex(texts, _FINER_THAN_MICROS, r"\1").cast(type_)


def _in_zone(local: pa.Array, zone: str) -> pa.Array:
    instants = pc.assume_timezone(local, zone, ambiguous="earliest", nonexistent="earliest")
    # A time that clocks skip becomes the last instant before. Its offset from UTC is the one to count with.
    offset = pc.subtract(pc.local_timestamp(instants), instants.cast(pa.timestamp("us", "UTC")).cast(_MICROS))
    return pc.subtract(local, offset).cast(pa.timestamp("us", "UTC"))
