"""A table of Delta Lake or Iceberg for Spark, as a stream of the files that its versions add: a row for each file.

Spark remembers in its checkpoint which ones it has read. It asks for them in a process of Python beside its driver.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxFiles, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from aion.execute.files.lakes import LakeStream, opened
from state_backends.thresholds import threshold

LAKE = "aion_lake"
OPTION = "secret"
"""The only option: format, table, limit and options as JSON. Spark makes the names of options small, and shows in plans
and errors the values of those that are not called so.
"""
_FILES = threshold(10_000, 2)
"""How many files a partition names at most."""


class LakeSource(DataSource):
    """Spark makes one for each stream."""

    @classmethod
    def name(cls) -> str:
        return LAKE

    def schema(self) -> str:
        return "path string, length long, values string, version long"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return LakeReader(**json.loads(self.options[OPTION]))


class LakeReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Answers Spark's questions. ``limit``: how many files a batch has at most, or None.

    Spark sends a reader to the tasks that give its rows. Only one that is asked for offsets opens the table.
    """

    def __init__(self, format: str, table: str, limit: int | None, options: Mapping[str, str]) -> None:
        self._format, self._table, self._limit, self._options = format, table, limit, options

    @cached_property
    def _stream(self) -> LakeStream:
        return LakeStream(opened(self._format, self._table, self._options))

    def initialOffset(self) -> dict[str, Any]:
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable() if self._limit is None else ReadMaxFiles(self._limit)

    def prepareForTriggerAvailableNow(self) -> None:
        self._stream.stop_at_newest()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        return dict(self._stream.advanced(start, getattr(limit, "max_files", None)))

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        files = [(*file, version) for version, file in self._stream.files(start, end)]
        return [InputPartition(files[at : at + _FILES]) for at in range(0, len(files), _FILES)]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        return iter(partition.value)

    def stop(self) -> None:
        if "_stream" in self.__dict__:
            self._stream.close()

    def commit(self, end: dict[str, Any]) -> None:
        self._stream.forget_before(end)
