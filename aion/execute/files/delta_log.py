"""The log of a table of Delta Lake, through deltalake: the files of a version, and those that a version adds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from aion.core.ingest.lake_versions import (
    DELTA_OPTIONS,
    STARTING_VERSION,
    Added,
    Place,
    Reading,
    check_delta,
    deletion_vectors,
    delta_files,
    delta_path,
)
from aion.errors import ConfigError, StorageError, needs_extra

with needs_extra("delta", "read_files of a table of Delta Lake"):
    import deltalake
    from deltalake.exceptions import DeltaError, TableNotFoundError
    from deltalake.fs import DeltaStorageHandler


class DeltaLog:
    """A table of Delta Lake. ``table``: its folder, as Spark writes it."""

    def __init__(self, table: str, options: Mapping[str, str]) -> None:
        self._shown = table
        self._reading, self._options = Reading.of(options, DELTA_OPTIONS)
        scheme, colon, rest = table.partition(":")
        self._uri = "/" + rest.lstrip("/") if colon and scheme == "file" else table
        self._load()
        # A version says only what it changes, so a stream that begins later would not see it.
        self._check(self._table, f"table {self._shown!r}")

    def columns(self) -> pa.Schema:
        return pa.schema(self._table.schema().to_arrow())

    def newest(self) -> int:
        known = self._table.version()
        with suppress(DeltaError):  # of a table that was made again, and has fewer versions
            self._table.update_incremental()
            if self._table.version() == known:
                return int(known)
        self._load()  # later versions do not say that they are of another table
        return int(self._table.version())

    def start(self, newest: int) -> Place:
        if self._reading.latest:
            return Place.at(self.id, "after", newest)
        version = self._reading.numbers.get(STARTING_VERSION)
        if version is None:
            return Place.at(self.id, "all", newest)
        if version > newest:
            raise ConfigError(f"options: {STARTING_VERSION} is {version}, and table {self._shown!r} has {newest}")
        return Place.at(self.id, "added", version)

    def between(self, after: int, newest: int) -> Iterable[int]:
        return range(after + 1, newest + 1)

    def whole(self, version: int) -> Sequence[Added]:
        what, then = self._what(version), self._at(version)
        self._check(then, what)
        if any(batch.num_rows for batch in map(pa.record_batch, then.deletion_vectors())):
            raise ConfigError(deletion_vectors(what))
        rows = pa.table(then.get_add_actions())
        values = _texts(rows["partition"].combine_chunks()) if "partition" in rows.column_names else []
        columns = (rows[name].to_pylist() for name in ("modification_time", "path", "size_bytes"))
        found = sorted(zip(*columns, values or [{}] * rows.num_rows, strict=True), key=lambda row: row[:2])
        return [Added(delta_path(self._shown, path), size, json.dumps(of)) for _, path, size, of in found]

    def added(self, version: int) -> Sequence[Added]:
        files = pafs.PyFileSystem(DeltaStorageHandler(self._table.table_uri, self._options))
        try:
            with files.open_input_file(f"_delta_log/{version:020}.json") as file:
                actions = [json.loads(line) for line in file.read().splitlines() if line.strip()]
        except FileNotFoundError as error:
            raise self._gone(version, error) from error
        return list(delta_files(actions, self._shown, self._what(version), self._reading.passed))

    def close(self) -> None:
        """There is no connection."""

    def _load(self) -> None:
        self._table = self._at(None)
        self.id = str(self._table.metadata().id)

    def _at(self, version: int | None) -> Any:
        try:
            return deltalake.DeltaTable(self._uri, version=version, storage_options=self._options)
        except TableNotFoundError as error:
            raise ConfigError(f"{self._shown!r} is no table of Delta Lake: {error}") from error
        except DeltaError as error:
            if version is not None:
                raise self._gone(version, error) from error
            raise StorageError(f"table {self._shown!r}: {error}") from error

    def _check(self, table: Any, what: str) -> None:
        check_delta(table.protocol().reader_features or (), table.metadata().configuration, what)

    def _what(self, version: int) -> str:
        return f"version {version} of table {self._shown!r}"

    def _gone(self, version: int, error: Exception) -> StorageError:
        return StorageError(
            f"{self._what(version)} cannot be read. If its log was cleaned up before, begin with a new checkpoint, and "
            f"keep the log longer (delta.logRetentionDuration). {type(error).__name__}: {error}"
        )


def _texts(partitions: pa.StructArray) -> list[dict[str, str | None]]:
    """Returns the values of partitions as texts. Times have their zone, which is UTC."""
    names = [field.name for field in partitions.type]
    columns = [column.cast(pa.string()).to_pylist() for column in partitions.flatten()]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
