"""``read_files``: files as a source. Except for text, the children read them, and events never become Spark rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn
from weakref import WeakSet

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType, TimestampType

from aion.base.hashing import ShardOfKeys
from aion.config import Policy
from aion.core.query.plan import Plan
from aion.errors import ConfigError, SchemaError
from aion.execute.files.formats import Format
from aion.execute.files.reading import FileReader
from aion.spark.api.file_arguments import (
    LakeTable,
    base_of,
    check_count,
    columns_after,
    columns_used,
    declared_columns,
    other_options,
    path_of,
    source_options,
    watermark_of,
    zone_of,
)
from aion.spark.session.sessions import is_session, parallelism, qualified
from aion.spark.session.types import is_case_sensitive, meant, quoted
from aion.spark.session.workers import in_arrow, of_aion
from aion.spark.start import listener
from aion.spark.tasks.blocks import row_type
from aion.spark.tasks.child import ChildWork
from aion.spark.tasks.file_child import (
    COUNTS,
    LATEST,
    FileChild,
    FileRows,
    FileScan,
    FileSplits,
    LinesOfText,
    Skipping,
    Transform,
)
from aion.spec import Spec, check_name
from state_backends.thresholds import threshold

_LISTING = StructType(
    [
        StructField("path", StringType()),
        StructField("modificationTime", TimestampType()),
        StructField("length", LongType()),
        StructField("content", BinaryType()),
    ]
)
_registered: WeakSet[SparkSession] = WeakSet()
"""The sessions that know the source of files of tables."""
_COUNT_FIELDS = [StructField(column, LongType()) for column in COUNTS.values()]
_SPLIT_BYTES = threshold(4 << 20, 256)
"""A part of a file has at least this size: to start a task for less takes longer than to read it."""


def read_files(
    spark: SparkSession,
    path: str | Path,
    *,
    schema: str | StructType | pa.Schema | None = None,
    watermark: tuple[str, str],
    format: str = "parquet",
    where: Any = None,
    transform: Transform | None = None,
    max_files_per_trigger: int | None = None,
    latest_first: bool = False,
    max_file_age: str | None = None,
    on_bad_file: str = "error",
    options: Mapping[str, object] | None = None,
    tasks: int | None = None,
) -> Files:
    """Reads the files of a folder as a stream of events. Those of Parquet, Arrow and ORC never become Spark rows.

    For example::

        events = aion.read_files(
            spark, "positions/", schema="ts timestamp, segment int", watermark=("ts", "20 seconds")
        )

    Spark lists the files and remembers which ones it has read. Aion's tasks read them with pyarrow, and only the
    columns that are needed. Only Spark reads CSV and JSON as Spark does, so it reads them itself, as rows. Pass the
    result to :func:`windowed` or :func:`explain`.

    ``path``: a folder or a glob, as for ``spark.readStream``. ``schema``: the columns of the files, in Spark's DDL or
    as a schema of Spark or Arrow; also those in the names of folders (``day=2024-01-31``). ``watermark``: the column of
    event times (a timestamp) and the delay, as for ``withWatermark``; it is the watermark of what ``where`` and
    ``transform`` leave. ``format``: parquet, arrow, csv, json, orc, delta or iceberg. ``where``: an expression such as
    ``pc.field("speed") > 0``; only events for which it is true are read. ``transform``: a function of a
    ``pyarrow.RecordBatch`` with all columns of ``schema``, which returns a RecordBatch. It is called once with an empty
    batch, to learn its columns.

    With ``delta`` and ``iceberg`` the files are those that the versions of a table add. ``path`` is then the folder of
    the table, or its name in a catalog, ``schema`` is by default that of the table, and ``options`` are those of its
    storage or catalog. A version that deletes or changes rows fails the query.

    ``max_files_per_trigger``, ``latest_first``, ``max_file_age``: as Spark's options. ``options``: others by Spark's
    names, of the file source (``pathGlobFilter``, ``cleanSource``) and, for CSV and JSON, of Spark's reader
    (``header``, ``timestampFormat``, ``mode``).

    The next two are not for CSV and JSON. ``tasks``: how many tasks read a batch. Default: the number of Spark's cores.
    ``on_bad_file``: what happens if a file is damaged or has columns of other types. ``error``, the default: the query
    fails with BadFile, which names the file. ``drop``: the file is left out and counted, also when the batch runs
    again. Then one task reads all of a file, and reads it twice: it decides before it uses an event.

    Raises ConfigError, MissingExtra, SchemaError, StorageError, TransformError.
    """
    place = path_of(path)
    if not is_session(spark):
        raise TypeError(f"read_files: a SparkSession is needed, not {type(spark).__name__}")
    case_sensitive = is_case_sensitive(spark)
    files = Format(format)
    table, source = None, {}
    if files.is_lake:
        refused = {"latest_first": latest_first, "max_file_age": max_file_age}
        table = LakeTable.of(spark, place, files.name, max_files_per_trigger, refused, options)
        place, schema = table.name, table.columns() if schema is None else schema
    else:
        source = other_options(spark, options, files)
        source |= source_options(max_files_per_trigger, latest_first, max_file_age)
    if schema is None:
        raise SchemaError(f"schema: it is needed for {files.name}; write e.g. schema='ts timestamp, speed double'")
    declared = declared_columns(schema, case_sensitive)
    files.check(declared)
    column, delay = watermark_of(watermark)
    check_count("tasks", tasks)
    if on_bad_file not in ("error", "drop"):
        raise ConfigError(f"on_bad_file: {on_bad_file!r} is neither 'error' nor 'drop'")
    if files.is_text and on_bad_file == "drop":
        raise ConfigError(
            f"on_bad_file: Spark reads {files.name} line by line, and drops no file as a whole; leave it out. A line "
            "that cannot be read is null; options={'mode': ...} changes that, and ignoreCorruptFiles leaves out damage"
        )
    if files.is_text and tasks is not None:
        raise ConfigError(
            f"tasks: Spark itself decides how many tasks read {files.name}; leave it out, and set "
            "spark.sql.files.maxPartitionBytes instead"
        )
    result = declared if transform is None else columns_after(transform, declared, case_sensitive)
    if (column := meant(spark, result.names, column)) not in result.names:
        raise SchemaError(f"watermark: there is no column {column!r}; the columns are {', '.join(result.names)}")
    type_ = result.field(column).type
    if not pa.types.is_timestamp(type_) or type_.tz is None:
        raise SchemaError(
            f"watermark: column {column!r} is of type {type_}; Spark needs a timestamp (with a zone, if it is of Arrow)"
        )
    try:
        cloudpickle.dumps((where, transform))
    except Exception as error:
        raise ConfigError(f"where and transform are sent to the tasks, but cannot be pickled: {error}") from error
    return Files(
        session=spark,
        schema=result,
        _path=place,
        _declared=declared,
        _format=files,
        _watermark=(column, delay),
        _where=where,
        _where_columns=columns_used(where, declared),
        _transform=transform,
        _skips=on_bad_file == "drop",
        _options=source,
        _table=table,
        _tasks=int(tasks or parallelism(spark)),
    )


@dataclass(frozen=True, repr=False, eq=False)
class Files:
    """A stream of events in files, made by :func:`read_files`. It is not a DataFrame: :meth:`to_df` makes one.

    ``schema``: the columns of the events, as an Arrow schema.
    """

    session: SparkSession
    schema: pa.Schema
    _path: str
    _declared: pa.Schema
    _format: Format
    _watermark: tuple[str, int]
    _where: Any
    _where_columns: tuple[str, ...]
    _transform: Transform | None
    _skips: bool
    _options: Mapping[str, str]
    _table: LakeTable | None
    _tasks: int

    def to_df(self, name: str = "files") -> DataFrame:
        """Returns the events as a streaming DataFrame, with the watermark.

        Spark's progress reports how many events were read, as ``observedMetrics[name]``. Several such DataFrames in one
        query need different names.
        """
        check_name(name)
        columns = from_arrow_schema(self.schema, prefer_timestamp_ntz=True).fields
        scan = self._scan(self.schema.names, name)
        rows = in_arrow(self._input(scan), FileRows(scan), StructType([*columns, *_COUNT_FIELDS]))
        column, delay_us = self._watermark
        return _counted(rows, name).withWatermark(quoted(column), _spark_delay(delay_us))

    rows_first: ClassVar[bool] = False

    def plan(self, spec: Spec) -> Plan:
        fields = {field.name: field for field in self.schema}
        asked = {name: self._meant(name) for name in spec.used_columns if name not in fields}
        renamed = {real: name for name, real in asked.items() if real in fields and real not in spec.used_columns}
        kept = [field.with_name(renamed.get(field.name, field.name)) for field in self.schema]
        more = [fields[real].with_name(name) for name, real in asked.items() if real in fields and real not in renamed]
        return spec.plan(pa.schema([*kept, *more]))

    def _meant(self, name: str) -> str:
        return meant(self.session, self.schema.names, name)

    def timed(self, spec: Spec) -> Spec:
        return spec if spec.time is not None else replace(spec, time=self._watermark[0])

    def policy(self, spec: Spec, policy: Policy) -> Policy:
        return policy

    @property
    def clock(self) -> Sequence[str]:
        return ()

    @property
    def before(self) -> Sequence[str]:
        return ()  # only conditions come before it

    @property
    def marked(self) -> frozenset[str]:
        return frozenset(self._watermark[:1])

    def delay_us(self, time: str) -> int | None:
        """Returns the delay of the watermark in microseconds. None if the watermark is on another column than
        ``time``.
        """
        column, delay_us = self._watermark
        return delay_us if column == self._meant(time) else None

    def reading(self, plan: Plan) -> str:
        """Returns how the children read the events, in words."""
        columns = ", ".join(self._scan(self._needed(plan), "").reader.schema.names)
        if self._format.is_text:
            return f"Spark reads the files of {self._path} as {self._format.name}, and of them the columns {columns}."
        how = "parts of files" if self._is_split else "whole files"
        lists = "Spark lists" if self._table is None else "The log names"
        return (
            f"{lists} the files of {self._path}; {self._tasks} tasks read {how} with pyarrow, as "
            f"{self._format.name}, and of them the columns {columns}."
        )

    def why_in_python(self, plan: Plan, *, drops_bad_texts: bool) -> str:
        return "the tasks of Python read the files themselves"

    def children(self, work: ChildWork) -> tuple[DataFrame, None]:
        """Returns the rows of blocks (:mod:`aion.spark.tasks.blocks`) that the children make of the events, with the
        watermark. Spark groups no events.
        """
        if not ShardOfKeys.covers(work.key_types):
            raise SchemaError(f"key: read_files cannot hash keys of type {', '.join(map(str, work.key_types))}")
        column, delay_us = self._watermark
        scan = self._scan(self._needed(work.plan), work.name)
        child = FileChild(scan, work, column, [self._meant(name) for name in work.plan.schema.names])
        fields = [*row_type(work.tree, level=0), StructField(LATEST, TimestampType()), *_COUNT_FIELDS]
        rows = in_arrow(self._input(scan), child, StructType(fields))
        blocks = _counted(rows, f"{work.name}.files").withWatermark(LATEST, _spark_delay(delay_us))
        return blocks.drop(LATEST), None

    def __repr__(self) -> str:
        columns = ", ".join(f"{f.name}: {f.type}" for f in self.schema)
        return f"Files({self._path!r}, {self._format.name}, [{columns}])"

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a stream of read_files has no {name!r}; .to_df() makes a DataFrame of it, which has the methods of Spark"
        )

    def __getitem__(self, name: object) -> NoReturn:
        raise TypeError(f"a stream of read_files is no DataFrame; write .to_df()[{name!r}]")

    def _needed(self, plan: Plan) -> list[str]:
        return list(dict.fromkeys([*map(self._meant, plan.schema.names), self._watermark[0]]))

    @property
    def _is_recursive(self) -> bool:
        """Whether the names of folders mean nothing, as for Spark."""
        return self._options.get("recursiveFileLookup", "").lower() == "true"

    @property
    def _is_split(self) -> bool:
        # Whoever may skip a file must see all of it.
        return self._format.is_split and not self._skips

    def _scan(self, names: Iterable[str], operator: str) -> FileScan:
        """Returns the reading of the columns ``names``, and of those that are needed to make them."""
        schema = pa.schema([self.schema.field(name) for name in names])
        read = schema
        if self._transform is not None:
            read = self._declared
        elif self._where is not None:
            more = [name for name in self._where_columns if name not in schema.names]
            read = pa.schema([*schema, *(self._declared.field(name) for name in more)])
        if self._format.is_text:
            return FileScan(LinesOfText(read, self._where, self._path), self._transform, schema)
        reader = FileReader(
            self._format,
            self._declared,
            read,
            self._where,
            self._where_columns,
            None if self._is_recursive or self._table else base_of(self.session, self._path),
            zone="UTC" if self._table else zone_of(self.session),
            case_sensitive=is_case_sensitive(self.session),
        )
        skipping = None
        if self._skips:
            listener.watch(self.session)  # tasks must know the checkpoint
            path = self._path if self._table else qualified(self.session, self._path)
            stream = hashlib.sha256(path.encode()).hexdigest()[:12]
            retained = int(self.session.conf.get("spark.sql.streaming.minBatchesToRetain"))
            skipping = Skipping(f"{operator}-{stream}", self._tasks, retained)
        return FileScan(FileSplits(reader, skipping), self._transform, schema)

    def _input(self, scan: FileScan) -> DataFrame:
        """Returns what the reader of ``scan`` gets."""
        return self._lines(scan.reader.schema.names) if self._format.is_text else self._splits()

    def _lines(self, names: Sequence[str]) -> DataFrame:
        """Returns the events as Spark reads them, under names that pyspark need not quote."""
        types = from_arrow_schema(self._declared, prefer_timestamp_ntz=True)
        reader = self.session.readStream.format(self._format.name).schema(types).options(**self._options)
        columns = [F.col(quoted(name)).alias(f"column{number}") for number, name in enumerate(names)]
        return reader.load(self._path).select(*columns)

    def _splits(self) -> DataFrame:
        """Returns the parts of the files of a batch, spread over the tasks that read them.

        A large file has a part for each task. Which task gets the first is a matter of the file's name, so that small
        files are spread, too.
        """
        if self._table is not None:
            files, more = _files_of(self._table, self.session), ["version", "values"]
        else:
            more = []
            reader = self.session.readStream.format("binaryFile").schema(_LISTING).options(**self._options)
            files = reader.load(self._path)
        tasks = F.lit(self._tasks)
        of = F.lit(1)
        if self._is_split:
            of = F.least(tasks, F.greatest(F.lit(1), F.ceil(F.col("length") / _SPLIT_BYTES))).cast("int")
        number = F.explode(F.sequence(F.lit(0), F.col("of") - 1)).alias("number")
        parts = files.withColumn("of", of).select("path", "length", number, "of", *more)
        task = F.pmod(F.xxhash64("path") + F.col("number"), tasks).cast("int")
        return parts.withColumn("task", task).repartitionById(self._tasks, F.col("task"))


def _files_of(table: LakeTable, session: SparkSession) -> DataFrame:
    """Returns the files that the versions of a table add, as a stream."""
    from aion.spark.tasks.lake_source import OPTION, LakeSource  # Spark 4.1 has not what it needs

    if session not in _registered:  # Spark warns if it is registered again
        with of_aion(session):
            session.dataSource.register(LakeSource)
        _registered.add(session)
    return session.readStream.format(LakeSource.name()).option(OPTION, table.to_json()).load()


def _counted(rows: DataFrame, name: str) -> DataFrame:
    """Reports the counts in Spark's progress, and leaves out the rows that have them."""
    counts = [F.coalesce(F.sum(column), F.lit(0)).alias(count) for count, column in COUNTS.items()]
    columns = list(COUNTS.values())
    return rows.observe(name, *counts).where(F.col(columns[0]).isNull()).drop(*columns)


def _spark_delay(delay_us: int) -> str:
    return f"{delay_us // 1000} milliseconds"
