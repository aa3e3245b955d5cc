"""Tables of Delta Lake and Iceberg as streams of files: which files are new, at most a number of them at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa

from aion.core.ingest.lake_versions import ALL, Added, Place
from aion.errors import ConfigError


class Lake(Protocol):
    """A table, as it is when it was last looked at. Raises ConfigError for a version that cannot be read as a stream,
    and StorageError for one that is not there any more.
    """

    id: str

    def columns(self) -> pa.Schema:
        """The columns that the table has now."""

    def newest(self) -> int | None:
        """Looks for new versions. Returns the newest one, or None if the table has none yet."""

    def start(self, newest: int) -> Place:
        """Returns where a stream begins."""

    def between(self, after: int, newest: int) -> Iterable[int]:
        """Returns the versions after one, in their order."""

    def whole(self, version: int) -> Sequence[Added]:
        """Returns all files of a version, the oldest first. The same ones each time."""

    def added(self, version: int) -> Sequence[Added]:
        """Returns the files that a version adds. The same ones each time."""

    def close(self) -> None:
        """Closes the connection to the catalog, if there is one."""


def opened(format_: str, table: str, options: Mapping[str, str]) -> Lake:
    """Returns a table. Raises ConfigError, MissingExtra, StorageError."""
    if format_ == "delta":
        from aion.execute.files.delta_log import DeltaLog

        return DeltaLog(table, options)
    from aion.execute.files.iceberg_log import IcebergLog

    return IcebergLog(table, options)


class LakeStream:
    """Says which files of a table belong between two offsets. An offset is a :class:`Place` as a dict.

    Before the first one there is an empty dict, so that a first batch that runs again begins where it began.
    """

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._last: int | None = None
        self._is_bounded = False
        self._known: dict[int, Sequence[Added]] = {}

    def close(self) -> None:
        self._lake.close()

    def stop_at_newest(self) -> None:
        """From now on there are no new versions."""
        self._last, self._is_bounded = self._lake.newest(), True

    def advanced(self, offset: Mapping[str, Any], limit: int | None) -> Mapping[str, Any]:
        """Returns the offset after at most ``limit`` more files. Raises ConfigError, StorageError."""
        newest = self._last if self._is_bounded else self._lake.newest()
        if newest is None:
            return offset
        place = self._place(offset) or self._lake.start(newest)
        room = limit
        for version, done in self._steps(place, newest):
            there = len(self._files(place, version))
            taken = there if room is None else min(done + room, there)
            place = place.after(version, taken, there)
            if room is not None:
                room -= taken - done
                if room <= 0:
                    break
        return place._asdict()

    def files(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Iterator[tuple[int, Added]]:
        """Yields the versions and the files between two offsets. Raises ConfigError, StorageError."""
        last = self._place(end)
        if last is None:
            return
        for version, done in self._steps(self._place(start) or last.start, last.version):
            files = self._files(last, version)
            stop = last.files if version == last.version and last.files != ALL else len(files)
            yield from ((version, file) for file in files[done:stop])

    def forget_before(self, offset: Mapping[str, Any]) -> None:
        """Forgets the files of versions that nobody asks for again."""
        place = self._place(offset)
        self._known = {v: files for v, files in self._known.items() if place is not None and v == place.version}

    def _place(self, offset: Mapping[str, Any]) -> Place | None:
        if not offset:
            return None
        place = Place(**offset)
        if place.table != self._lake.id:
            raise ConfigError(
                f"the checkpoint is of a table with the id {place.table}, and this table has the id {self._lake.id}; "
                "was it deleted and made again? Begin with a new checkpoint"
            )
        return place

    def _steps(self, place: Place, newest: int) -> Iterator[tuple[int, int]]:
        """Yields the versions from a place on, and how many files of each were read."""
        if place.files != ALL:
            yield place.version, place.files
        for version in self._lake.between(place.version, newest):
            yield version, 0

    def _files(self, place: Place, version: int) -> Sequence[Added]:
        if version not in self._known:
            is_whole = place.is_whole(version)
            self._known[version] = self._lake.whole(version) if is_whole else self._lake.added(version)
        return self._known[version]
