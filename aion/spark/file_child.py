"""The child that reads files itself: it gets parts of files, and gives rows of blocks or of events.

Besides the blocks, its rows have the largest event time so far, which makes the watermark. The last row of a task has
no block: it says how much the task has read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from aion.core.ingest.conforming import Conforming
from aion.core.ingest.file_parts import Part
from aion.core.ingest.hashing import ShardOfKeys
from aion.errors import AionError, TransformError
from aion.execute.file_reading import FileReader
from aion.execute.skipped_files import Records
from aion.spark.child import ChildWork, together
from aion.spark.starts import checkpoint_of

Transform = Callable[[pa.RecordBatch], Any]

COUNTS = ("events", "skipped_files")
"""The columns of the last row of a task; null in all other rows."""
COUNT_TYPES = ", ".join(f"{name} bigint" for name in COUNTS)
LATEST = "latest"
"""The column with the largest event time so far."""
_NO_COUNTS = dict.fromkeys(COUNTS)
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FileScan:
    """The events of a task's parts of files, after ``where`` and ``transform``. Can be sent to a task.

    ``schema``: the columns of the events. ``skipping``: None if a bad file fails the query.
    """

    reader: FileReader
    transform: Transform | None
    schema: pa.Schema
    skipping: Skipping | None

    def events(self, parts: Iterator[pa.RecordBatch], counts: dict[str, int]) -> Iterator[pa.RecordBatch]:
        """Adds what was read to ``counts``. Raises BadFile, StorageError, TransformError."""
        found: Iterator[Part] = (Part(*row.values()) for batch in parts for row in batch.to_pylist())
        if self.skipping is not None:
            found = self._usable(list(found), self.skipping, counts)
        for part in found:
            for events in self.reader.read(part):
                if self.transform is not None:
                    events = transformed(self.transform, events, self.schema)
                if events.num_rows:
                    counts["events"] += events.num_rows
                    yield events

    def _usable(self, parts: list[Part], skipping: Skipping, counts: dict[str, int]) -> Iterator[Part]:
        """The files that are not skipped. No event may be used before all that is decided is recorded."""
        records = skipping.records()
        if records.task[0] == 0:
            records.forget(skipping.retained)
        known = records.known() if parts else {}
        new = {part.path: self.reader.trouble(part) for part in parts if part.path not in known}
        if new:
            known = records.decide(new)
        for part in parts:
            if (why := known[part.path]) is None:
                yield part
            else:
                counts["skipped_files"] += 1
                log.warning("a file is skipped: %s", why)


@dataclass(frozen=True)
class Skipping:
    """Where decisions about bad files are recorded. ``name``: of the stream. ``retained``: batches that may run again.

    ``tasks``: how many tasks read a batch.
    """

    name: str
    tasks: int
    retained: int

    def records(self) -> Records:
        context = TaskContext.get()
        assert context is not None
        return Records(
            checkpoint_of(context),
            self.name,
            int(context.getLocalProperty("streaming.sql.batchId") or "0"),
            (context.partitionId(), self.tasks),
            context.taskAttemptId(),
        )


def transformed(transform: Transform, events: pa.RecordBatch, schema: pa.Schema | None) -> pa.RecordBatch:
    """The result of a user's function, with the columns of ``schema`` if they are known. Raises TransformError."""
    try:
        result = transform(events)
        if isinstance(result, pa.Table):
            batches = result.combine_chunks().to_batches()
            result = batches[0] if batches else pa.RecordBatch.from_pylist([], schema=result.schema)
        if not isinstance(result, pa.RecordBatch):
            raise TypeError(f"it returned {type(result).__name__}, and must return a pyarrow.RecordBatch")
        return result if schema is None else Conforming(result.schema, schema, case_sensitive=True)(result)
    except AionError as error:
        raise TransformError(f"transform: {error}") from error
    except Exception as error:
        raise TransformError(f"transform: {type(error).__name__}: {error}") from error


class FileChild:
    """The function for ``mapInArrow`` that makes blocks. Its input is the columns of :class:`Part`.

    ``watermark``: the column of event times that make it.
    """

    def __init__(self, scan: FileScan, work: ChildWork, watermark: str) -> None:
        self._scan = scan
        self._work = work
        self._watermark = watermark

    def __call__(self, parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        counts = dict.fromkeys(COUNTS, 0)
        latest: pa.Scalar = pa.scalar(None, self._scan.schema.field(self._watermark).type)
        names = self._work.plan.schema.names
        with self._work.begun(ShardOfKeys(self._work.tree.shards)) as (builder, sending):
            for events in together(self._scan.events(parts, counts)):
                # Before any block of these events leaves.
                newest = pc.max(events.column(self._watermark))
                latest = max((s for s in (latest, newest) if s.is_valid), key=_value, default=latest)
                for row in sending.of(builder.add(events.select(names))):
                    yield extended(row, latest)
            for row in sending.finish(builder.finish()):
                yield extended(row, latest)
        if any(counts.values()):
            empty = pa.RecordBatch.from_arrays([pa.nulls(1, f.type) for f in sending.schema], schema=sending.schema)
            yield extended(empty, latest, counts)


class FileRows:
    """The function for ``mapInArrow`` that gives the events themselves, each as a row."""

    def __init__(self, scan: FileScan) -> None:
        self._scan = scan

    def __call__(self, parts: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        counts = dict.fromkeys(COUNTS, 0)
        for events in self._scan.events(parts, counts):
            yield extended(events, None)
        if any(counts.values()):
            empty = pa.RecordBatch.from_arrays(
                [pa.nulls(1, f.type) for f in self._scan.schema], schema=self._scan.schema
            )
            yield extended(empty, None, counts)


def extended(rows: pa.RecordBatch, latest: pa.Scalar | None, counts: dict[str, int] | None = None) -> pa.RecordBatch:
    """Rows with the largest event time, if there is one, and the counts."""
    more = {} if latest is None else {LATEST: pa.repeat(latest, rows.num_rows)}
    values = counts or _NO_COUNTS
    more |= {name: pa.array([values[name]] * rows.num_rows, pa.int64()) for name in COUNTS}
    return pa.RecordBatch.from_arrays([*rows.columns, *more.values()], names=[*rows.schema.names, *more])


def _value(time: pa.Scalar) -> int:
    value: int = time.value
    return value
