"""One Spark session for all tests, and streams made of files, one micro-batch each."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

import aion
from tests.object_store import CREDENTIALS, ObjectStore, serving
from tests.spark.program import Program

SECOND = 1_000_000
# Spark compiles each query to Java, which takes longer than to interpret it for a few rows, and it writes a file with a
# checksum beside each file of a checkpoint. `make proof` lets it.
QUICK = os.environ.get("HYPOTHESIS_PROFILE", "ci") == "ci"
# No result depends on the zone of the session, and no clock shows full hours of UTC in this one.
ZONE = "America/St_Johns"


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    folder = tmp_path_factory.mktemp("spark")
    for name, value in CREDENTIALS.items():  # for tests with an object store: executors inherit the environment
        os.environ.setdefault(name, value)
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # for the functions of tests
    builder = (
        SparkSession.builder.master("local[2,3]")  # a task may fail twice before the query does
        .appName("aion tests")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.streaming.checkpoint.fileChecksum.enabled", str(not QUICK).lower())
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", ZONE)
        .config("spark.sql.codegen.wholeStage", str(not QUICK).lower())
        .config("spark.sql.codegen.factoryMode", "NO_CODEGEN" if QUICK else "FALLBACK")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.driver.memory", "1g")
    )
    session = aion.configure(builder, state_dir=str(folder / "state")).getOrCreate()
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program(tmp_path_factory.mktemp("program"))


@pytest.fixture
def alone(spark: SparkSession) -> Iterator[SparkSession]:
    """The session, which is left as it was: without queries, tables, or settings of a page's ``configure``."""
    before = dict(spark.conf.getAll)
    yield spark
    for query in spark.streams.active:
        query.stop()
    for table in spark.sql("SHOW TABLES").collect():  # catalog.listTables() fails without generated code
        spark.catalog.dropTempView(table.tableName)
    for name, value in dict(spark.conf.getAll).items():
        if before.get(name) != value:
            with suppress(Exception):  # what cannot be changed any more was not changed either
                spark.conf.set(name, before[name]) if name in before else spark.conf.unset(name)


def settle(spark: SparkSession) -> None:
    """Until all queries have taken what is there."""
    for query in spark.streams.active:
        take_all(query)


def take_all(query: Any) -> None:
    """Waits until a query has taken all files that are there.

    Spark's own call returns too early if the query was already looking for files when it was called, and found none. It
    then begins to look again, so the second call waits for a look that sees all files.
    """
    query.processAllAvailable()
    query.processAllAvailable()


@pytest.fixture(scope="module")
def bucket() -> Iterator[ObjectStore]:
    with serving() as port:
        yield ObjectStore(port)


@pytest.fixture
def place(spark: SparkSession) -> Iterator[Callable[[str], None]]:
    """Sets where the session's queries keep their state; a session's setting comes before a policy's."""
    before = spark.conf.get("spark.aion.state.dir")
    yield lambda uri: spark.conf.set("spark.aion.state.dir", uri)
    spark.conf.set("spark.aion.state.dir", before)


class FileStream:
    """A file source with one file, and so one micro-batch, for each ``put``."""

    def __init__(self, spark: SparkSession, folder: Path, schema: pa.Schema) -> None:
        self._spark = spark
        self.folder = folder
        self.schema = schema
        self._count = 0
        folder.mkdir()

    def put(self, rows: Iterable[Sequence[Any]]) -> pa.Table:
        """Rows in the schema's order; timestamps as seconds since the epoch."""
        table = table_of(self.schema, rows)
        path = self.folder / f"{self._count:06d}.parquet"
        part = self.folder / f".{path.name}"  # a query that runs must not see half of it
        pq.write_table(table, part)
        # The source takes files in the order of their modification times.
        os.utime(part, (1_700_000_000 + self._count, 1_700_000_000 + self._count))
        part.rename(path)
        self._count += 1
        return table

    def read(self, ddl: str) -> DataFrame:
        return self._spark.readStream.schema(ddl).option("maxFilesPerTrigger", 1).parquet(str(self.folder))


def table_of(schema: pa.Schema, rows: Iterable[Sequence[Any]]) -> pa.Table:
    """Rows in the order of a schema; timestamps as seconds since the epoch."""
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    arrays = [_column(values, field.type) for values, field in zip(columns, schema, strict=True)]
    return pa.table(arrays, schema=schema)


def _column(values: Sequence[Any], type_: pa.DataType) -> pa.Array:
    if pa.types.is_timestamp(type_):
        return pa.array([None if v is None else round(v * SECOND) for v in values], pa.int64()).cast(type_)
    return pa.array(values, type_)


class Sink:
    """Keeps the rows of each batch; a batch that runs again replaces its rows. ``run`` takes what is there, and returns
    the rows of all batches.

    Writing files and reading them again would take a sixth of a query's processor time.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.query_id = ""
        self._batches: dict[int, list[dict[str, Any]]] = {}

    def start(self, df: DataFrame, **trigger: Any) -> StreamingQuery:
        writer = df.writeStream.foreachBatch(self.keep).option("checkpointLocation", str(self.folder / "checkpoint"))
        query = (writer.trigger(**trigger) if trigger else writer).start()
        self.query_id = query.id
        return query

    def run(self, df: DataFrame) -> list[dict[str, Any]]:
        self.start(df, availableNow=True).awaitTermination()
        return self.rows()

    def rows(self) -> list[dict[str, Any]]:
        return [row for _, rows in sorted(self._batches.items()) for row in rows]

    def forget_after(self, number: int) -> None:
        """The query was set back to this batch."""
        self._batches = {batch: rows for batch, rows in self._batches.items() if batch <= number}

    def of_batch(self, number: int) -> list[dict[str, Any]]:
        return self._batches[number]

    def keep(self, batch: DataFrame, number: int) -> None:
        self._batches[number] = [row.asDict(recursive=True) for row in batch.collect()]


EVENTS = pa.schema([("k", pa.string()), ("ts", pa.timestamp("us", "UTC")), ("v", pa.float64())])
EVENTS_DDL = "k string, ts timestamp, v double"


@pytest.fixture
def stream(spark: SparkSession, tmp_path: Path) -> FileStream:
    return FileStream(spark, tmp_path / "input", EVENTS)


@pytest.fixture
def sink(spark: SparkSession, tmp_path: Path) -> Sink:
    return Sink(tmp_path)


def last_panes(rows: Iterable[dict[str, Any]], *keys: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The last pane of every window, by key and window."""
    last: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted((r for r in rows if r["kind"] != "dropped"), key=lambda r: r["pane"]):
        last[(*(row[k] for k in keys), row["window"], row["window_start"])] = row
    return last


def plain(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Rows in an order of their own, for comparison. Each shard numbers its panes for itself."""
    return sorted(repr(sorted((k, v) for k, v in row.items() if k != "pane_seq")) for row in rows)
