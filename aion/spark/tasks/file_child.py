"""The child that reads files itself: it gets splits of files, and gives rows of blocks or of events.

Lines of text, which only Spark reads as Spark does, come to it as rows. The rest is the same for both.

Besides the blocks, its rows have the largest event time so far, which makes the watermark. The last row of a task has
no block: it says how much the task has read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from aion.core.ingest.conforming import Conforming
from aion.core.ingest.file_splits import Split
from aion.errors import AionError, SchemaError, TransformError
from aion.execute.files.reading import FileReader
from aion.execute.files.skipped import Records
from aion.spark.tasks.child import ChildWork, together
from aion.spark.tasks.running import Running, lasting_checkpoint_of
from aion.spark.tasks.worker import begin_task

Transform = Callable[[pa.RecordBatch], Any]

COUNTS = {name: f"__aion_{name}" for name in ("events", "skipped_files")}
"""What is counted, and the columns for it: in the last row of a task; null in all other rows."""
LATEST = "latest"
"""The column with the largest event time so far."""
_NO_COUNTS: dict[str, None] = dict.fromkeys(COUNTS)
log = logging.getLogger(__name__)


class Reader(Protocol):
    """Reads what a task gets. Can be sent to a task."""

    @property
    def schema(self) -> pa.Schema:
        """The columns that it reads."""

    def read(self, given: Iterator[pa.RecordBatch], counts: dict[str, int]) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Yields the events for which ``where`` is true, and where they are from. Adds skipped files to ``counts``.

        Raises BadFile, StorageError, TransformError.
        """


@dataclass(frozen=True)
class FileScan:
    """The events that a task reads, after ``where`` and ``transform``. Can be sent to a task.

    ``schema``: the columns of the events.
    """

    reader: Reader
    transform: Transform | None
    schema: pa.Schema

    def events(self, given: Iterator[pa.RecordBatch], counts: dict[str, int]) -> Iterator[pa.RecordBatch]:
        """Adds what was read to ``counts``. Raises BadFile, StorageError, TransformError."""
        for source, events in self.reader.read(given, counts):
            if self.transform is not None:
                try:
                    events = transformed(self.transform, events, self.schema)
                except TransformError as error:
                    raise TransformError(f"{source}: {error}") from error.__cause__
            if events.num_rows:
                counts["events"] += events.num_rows
                yield events


@dataclass(frozen=True)
class LinesOfText:
    """Events that Spark has read from CSV or JSON. They come with all columns of ``schema``, in this order.

    ``where``: an expression over them. ``source``: where the files are.
    """

    schema: pa.Schema
    where: Any
    source: str

    def read(self, given: Iterator[pa.RecordBatch], counts: dict[str, int]) -> Iterator[tuple[str, pa.RecordBatch]]:
        conforming = None
        for batch in given:
            named = pa.RecordBatch.from_arrays(batch.columns, names=self.schema.names)
            conforming = conforming or Conforming(named.schema, self.schema, case_sensitive=True)
            events = conforming(named)
            if self.where is not None:
                try:
                    events = events.filter(self.where)
                except pa.ArrowException as error:
                    first, *_ = str(error).splitlines() or [type(error).__name__]
                    raise TransformError(f"{self.source}: where fails on an event: {first}") from error
            yield self.source, events


@dataclass(frozen=True)
class FileSplits:
    """Events that pyarrow reads. What a task gets is the fields of :class:`Split`, and the number of the task.

    ``skipping``: None if a bad file fails the query.
    """

    reader: FileReader
    skipping: Skipping | None

    @property
    def schema(self) -> pa.Schema:
        return self.reader.schema

    def read(self, given: Iterator[pa.RecordBatch], counts: dict[str, int]) -> Iterator[tuple[str, pa.RecordBatch]]:
        rows = (row for batch in given for row in batch.to_pylist())
        of_tasks = _each_once((row.pop("task"), Split(**row)) for row in rows)
        found: Iterator[Split] = (split for _, split in of_tasks)
        if self.skipping is not None:
            found = self._usable(of_tasks, self.skipping, counts)
        for split in found:
            for events in self.reader.read(split):
                yield split.path, events

    def _usable(
        self, splits: Iterator[tuple[int, Split]], skipping: Skipping, counts: dict[str, int]
    ) -> Iterator[Split]:
        """Yields the files that are not skipped. No event may be used before all that is decided is recorded."""
        of_tasks: dict[int, list[Split]] = {}
        for task, split in splits:
            of_tasks.setdefault(task, []).append(split)
        for task, some in of_tasks.items():
            records = skipping.records(task)
            if task == 0:
                records.forget(skipping.retained)
            known = records.known()
            new = {split.path: self.reader.trouble(split) for split in some if split.path not in known}
            if new:
                known = records.decide(new)
            for split in some:
                if (why := known[split.path]) is None:
                    yield split
                else:
                    counts["skipped_files"] += 1
                    log.warning("a file is skipped: %s", why)


def _each_once(splits: Iterable[tuple[int, Split]]) -> Iterator[tuple[int, Split]]:
    """Spark takes the name of a file for a glob. If it is one, such as ``[a].csv``, all files come several times."""
    seen: set[Split] = set()
    for task, split in splits:
        if split not in seen:
            seen.add(split)
            yield task, split


@dataclass(frozen=True)
class Skipping:
    """Where decisions about bad files are recorded. ``name``: of the stream. ``retained``: batches that may run again.

    ``tasks``: how many tasks read a batch.
    """

    name: str
    tasks: int
    retained: int

    def records(self, task: int) -> Records:
        """``task``: its number. It is not Spark's number of a partition: the query may go on with fewer partitions."""
        context = TaskContext.get()
        assert context is not None
        return Records(
            lasting_checkpoint_of(context),
            self.name,
            Running.of(context).batch,
            (task, self.tasks),
            context.taskAttemptId(),
        )


def transformed(transform: Transform, events: pa.RecordBatch, schema: pa.Schema | None) -> pa.RecordBatch:
    """Returns the result of a user's function, with the columns of ``schema`` if they are known. Raises
    TransformError.
    """
    try:
        result = transform(events)
        if isinstance(result, pa.Table):
            batches = result.to_batches()
            result = pa.concat_batches(batches) if batches else pa.RecordBatch.from_pylist([], schema=result.schema)
        if not isinstance(result, pa.RecordBatch):
            raise TypeError(f"it returned {type(result).__name__}, and must return a pyarrow.RecordBatch")
        if schema is None or not result.num_rows:
            return result
        if missing := [name for name in schema.names if name not in result.schema.names]:
            raise SchemaError(f"it returned no column {missing[0]!r}, which it returned for an empty batch")
        return Conforming(result.schema, schema, case_sensitive=True)(result)
    except AionError as error:
        raise TransformError(f"transform: {error}") from error.__cause__
    except Exception as error:
        raise TransformError(f"transform: {type(error).__name__}: {error}") from error


class FileChild:
    """The function for ``mapInArrow`` that makes blocks. Its input is that of the scan's reader.

    ``watermark``: the column of event times that make it. ``columns``: what each column of the plan is called in the
    files.
    """

    def __init__(self, scan: FileScan, work: ChildWork, watermark: str, columns: Sequence[str]) -> None:
        self._scan = scan
        self._work = work
        self._watermark = watermark
        self._columns = columns

    def __call__(self, splits: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        counts = dict.fromkeys(COUNTS, 0)
        latest: pa.Scalar = pa.scalar(None, self._scan.schema.field(self._watermark).type)
        names = self._work.plan.schema.names
        with self._work.begun() as (builder, sending):
            for events in together(self._scan.events(splits, counts)):
                # Before any block of these events leaves.
                newest = pc.max(events.column(self._watermark))
                latest = max((s for s in (latest, newest) if s.is_valid), key=_value, default=latest)
                own = pa.RecordBatch.from_arrays([events.column(name) for name in self._columns], names)
                for row in sending.of(builder.add(own)):
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

    def __call__(self, splits: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        begin_task()
        counts = dict.fromkeys(COUNTS, 0)
        for events in self._scan.events(splits, counts):
            yield extended(events, None)
        if any(counts.values()):
            empty = pa.RecordBatch.from_arrays(
                [pa.nulls(1, f.type) for f in self._scan.schema], schema=self._scan.schema
            )
            yield extended(empty, None, counts)


def extended(rows: pa.RecordBatch, latest: pa.Scalar | None, counts: dict[str, int] | None = None) -> pa.RecordBatch:
    """Returns rows with the largest event time, if there is one, and the counts."""
    more = {} if latest is None else {LATEST: pa.repeat(latest, rows.num_rows)}
    values = counts or _NO_COUNTS
    more |= {column: pa.repeat(pa.scalar(values[name], pa.int64()), rows.num_rows) for name, column in COUNTS.items()}
    return pa.RecordBatch.from_arrays([*rows.columns, *more.values()], names=[*rows.schema.names, *more])


def _value(time: pa.Scalar) -> int:
    value: int = time.value
    return value
