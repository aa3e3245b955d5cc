"""The snapshots of a table of Iceberg, through pyiceberg: the files of a snapshot, and those that it adds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from aion.core.ingest.lake_versions import (
    ICEBERG_OPTIONS,
    START_AFTER,
    START_TIME,
    Added,
    Place,
    Reading,
    is_passed_over,
    renamed_column,
)
from aion.errors import ConfigError, StorageError, needs_extra

with needs_extra("iceberg", "read_files of a table of Iceberg"):
    import pyiceberg_core  # noqa: F401 (pyiceberg needs it for some partitions)
    from pyiceberg.catalog import load_catalog
    from pyiceberg.exceptions import NoSuchTableError
    from pyiceberg.manifest import DataFileContent, FileFormat, ManifestContent, ManifestEntryStatus
    from pyiceberg.transforms import IdentityTransform

_READ = 2
"""The newest version of the format that is read."""


class IcebergLog:
    """A table of Iceberg. ``options``: the properties of the catalog, and its name as ``catalog``."""

    def __init__(self, table: str, options: Mapping[str, str]) -> None:
        self._shown = table
        self._reading, properties = Reading.of(options, ICEBERG_OPTIONS)
        self._catalog = load_catalog(properties.pop("catalog", None), **properties)
        self._load()

    def columns(self) -> pa.Schema:
        return self._table.schema().as_arrow()

    def newest(self) -> int | None:
        self._load()
        snapshot = self._table.current_snapshot()
        return None if snapshot is None else int(snapshot.snapshot_id)

    def start(self, newest: int) -> Place:
        after, since = map(self._reading.numbers.get, (START_AFTER, START_TIME))
        if after is not None:
            return Place.at(self.id, "after", after)
        if since is None:
            return Place.at(self.id, "all", newest)
        later = [s.snapshot_id for s in self._ancestors(newest) if s.timestamp_ms >= since]
        return Place.at(self.id, "added", later[-1]) if later else Place.at(self.id, "after", newest)

    def between(self, after: int, newest: int) -> Iterable[int]:
        found: list[int] = []
        for snapshot in self._ancestors(newest):
            if snapshot.snapshot_id == after:
                return reversed(found)
            found.append(snapshot.snapshot_id)
            if snapshot.parent_snapshot_id == after:
                return reversed(found)
        raise StorageError(
            f"what came after {self._what(after)} is not known: it or a later one has expired before that was read, or "
            "the table was set back to an older one; begin with a new checkpoint, and keep snapshots longer"
        )

    def whole(self, version: int) -> Sequence[Added]:
        return self._files(self._snapshot(version), None)

    def added(self, version: int) -> Sequence[Added]:
        snapshot = self._snapshot(version)
        operation = None if snapshot.summary is None else snapshot.summary.operation.value
        if is_passed_over(operation, self._what(version), self._reading.passed):
            return []
        return self._files(snapshot, version)

    def close(self) -> None:
        self._catalog.close()

    def _load(self) -> None:
        try:
            self._table: Any = self._catalog.load_table(self._shown)
        except NoSuchTableError as error:
            raise ConfigError(f"there is no table {self._shown!r} in the catalog") from error
        self.id = str(self._table.metadata.table_uuid)
        self._check()

    def _files(self, snapshot: Any, only: int | None) -> list[Added]:
        """Returns the files of a snapshot, the oldest first; with ``only``, those that this snapshot has added."""
        what, found = self._what(snapshot.snapshot_id), []
        for manifest in reversed(snapshot.manifests(self._table.io)):
            if only is not None and manifest.added_snapshot_id != only:
                continue
            for entry in manifest.fetch_manifest_entry(self._table.io, discard_deleted=True):
                if only is not None and (entry.status != ManifestEntryStatus.ADDED or entry.snapshot_id != only):
                    continue
                file = entry.data_file
                if manifest.content != ManifestContent.DATA or file.content != DataFileContent.DATA:
                    raise ConfigError(
                        f"{what} has files of deletes, and read_files would read deleted rows; run rewrite_data_files "
                        "with delete-file-threshold 1, and begin after it with a new checkpoint"
                    )
                if file.file_format != FileFormat.PARQUET:
                    raise ConfigError(f"{what} has {file.file_path}, which is no Parquet; read the table with Spark")
                values = dict(self._values(file))
                added = Added(file.file_path, int(file.file_size_in_bytes), json.dumps(values))
                found.append((entry.sequence_number or 0, added))
        return [added for _, added in sorted(found, key=lambda one: one[0])]

    def _values(self, file: Any) -> Iterator[tuple[str, str | None]]:
        """Yields the columns that make the partition as they are. Other partitions are of computed values."""
        schema = self._table.schema()
        for field, value in zip(self._table.specs()[file.spec_id].fields, file.partition, strict=True):
            name = schema.find_column_name(field.source_id)
            if name is not None and isinstance(field.transform, IdentityTransform):
                text = field.transform.to_human_string(schema.find_type(field.source_id), value)
                yield name, None if value is None else text

    def _ancestors(self, version: int) -> Iterator[Any]:
        """Yields a snapshot and those before it, as long as they have not expired."""
        snapshot = self._table.snapshot_by_id(version)
        while snapshot is not None:
            yield snapshot
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else self._table.snapshot_by_id(parent)

    def _snapshot(self, version: int) -> Any:
        snapshot = self._table.snapshot_by_id(version)
        if snapshot is None:
            raise StorageError(
                f"{self._what(version)} has expired before it was read; begin with a new checkpoint, and keep "
                "snapshots longer"
            )
        return snapshot

    def _check(self) -> None:
        """Raises ConfigError if a plain reader of Parquet would read the files of such a table wrongly."""
        metadata = self._table.metadata
        if metadata.format_version > _READ:
            raise ConfigError(
                f"table {self._shown!r} has version {metadata.format_version} of the Iceberg format, and read_files "
                f"reads tables up to version {_READ}; read it with Spark"
            )
        names = [{id_: str(s.find_column_name(id_)) for id_ in s.field_ids} for s in metadata.schemas]
        if (renamed := renamed_column(names)) is not None:
            raise ConfigError(
                f"column {renamed!r} of table {self._shown!r} had another name, or another column had this name, and "
                "read_files finds columns by their names; copy the table, or read it with Spark"
            )

    def _what(self, version: int) -> str:
        return f"snapshot {version} of table {self._shown!r}"
