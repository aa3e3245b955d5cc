"""The events of a workload in Kafka: a topic with one partition for each stream, filled once and read by all cells.

``python -m experiments.workloads.topics fill|drop WORKLOAD FOLDER SERVERS BATCHES TOPIC-PREFIX`` runs in a process of
its own, so that its memory does not count for a cell.

Spark can only limit a micro-batch by its number of offsets. So shorter batches are padded with records without value to
the length of the longest one. Then each micro-batch holds the arrivals of one window's time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from aion.errors import ConfigError
from experiments.workloads import load
from experiments.workloads.model import Shape, Workload, file_names

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WRONG = 2
"""The exit code for an error that the user can fix. The last line of output describes it."""
ANSWER_MS = 15_000
JSON = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX", "timeZone": "UTC"}
"""With microseconds; Spark's default format only has milliseconds. XXX is the pattern of a zone such as +01:00."""


def prefix(workload: Workload, shape: Shape, batches: int) -> str:
    """The prefix of a workload's topics. Other events have another prefix."""
    return f"aion-{workload.name}-{shape.digest(workload.name)}-{batches}"


def longest(folder: Path, stream: str, batches: int) -> int:
    """The number of events in the longest batch of :func:`~experiments.workloads.sources.write_files`."""
    files = [folder / stream / f"batch-{batch:05d}.parquet" for batch in range(batches)]
    return max(int(pq.read_metadata(file).num_rows) for file in files)


def encoded(rows: DataFrame, length: int) -> DataFrame:
    """A column ``value`` with each row as JSON, padded with nulls to ``length`` rows."""
    from pyspark.sql import functions as F

    values = rows.select(F.to_json(F.struct("*"), JSON).alias("value"))
    none = rows.sparkSession.range(max(0, length - rows.count())).select(F.lit(None).cast("string").alias("value"))
    return values.union(none)


def decoded(values: DataFrame, schema: pa.Schema) -> DataFrame:
    """The events in the column ``value``, strings or bytes. Anything but JSON of ``schema`` fails the query."""
    from pyspark.sql import functions as F
    from pyspark.sql.pandas.types import from_arrow_schema

    text = values.filter("value IS NOT NULL").select(F.col("value").cast("string"))
    event = F.from_json("value", from_arrow_schema(schema), {**JSON, "mode": "FAILFAST"})
    return text.select(event.alias("event")).select("event.*")


def read(spark: SparkSession, servers: str, topic: str, schema: pa.Schema, length: int) -> DataFrame:
    """The events of a topic from its beginning, ``length`` records per micro-batch. Raises ConfigError."""
    need_connector(spark)
    records = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", servers)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", length)
        .option("minPartitions", spark.sparkContext.defaultParallelism)
        .load()
    )
    return decoded(records, schema)


def need_connector(spark: SparkSession) -> None:
    """Raises ConfigError, which says what to install, if Spark has no Kafka source."""
    from pyspark.errors import AnalysisException

    try:
        spark.read.format("kafka").option("kafka.bootstrap.servers", "-").option("subscribe", "-").load()
    except AnalysisException:
        scala = _jvm(spark).scala.util.Properties.versionNumberString().rpartition(".")[0]
        package = f"org.apache.spark:spark-sql-kafka-0-10_{scala}:{spark.version}"
        raise ConfigError(
            f"Spark has no Kafka source: its package {package} is missing; "
            f"set PYSPARK_SUBMIT_ARGS='--packages {package} pyspark-shell'"
        ) from None


# -- topics ---------------------------------------------------------------------------------------------------


def fill(
    spark: SparkSession, workload: Workload, folder: Path, servers: str, batches: int, heartbeats: int, names: str
) -> None:
    """Sends the files to their topics, batch by batch in order, then the heartbeats.

    Skips topics with the right number of records, and recreates the others. Raises ConfigError.
    """
    need_connector(spark)
    with _admin(spark, servers) as admin:
        for stream in workload.streams:
            topic, length = f"{names}-{stream}", longest(folder, stream, batches)
            wanted = length * (batches + heartbeats)
            if admin.records(topic) == wanted:
                continue
            admin.drop([topic])
            admin.create(topic)
            for name in file_names(batches, heartbeats):
                values = encoded(spark.read.parquet(str(folder / stream / f"{name}.parquet")), length).coalesce(1)
                values.write.format("kafka").option("kafka.bootstrap.servers", servers).option("topic", topic).save()
            if (found := admin.records(topic)) != wanted:
                raise ConfigError(f"kafka: topic {topic} has {found} records, not the {wanted} sent; who else writes?")


def drop(spark: SparkSession, workload: Workload, servers: str, names: str) -> None:
    """Deletes the topics of a workload that exist. Raises ConfigError."""
    need_connector(spark)
    with _admin(spark, servers) as admin:
        admin.drop([f"{names}-{stream}" for stream in workload.streams])


class _Admin:
    """Kafka's own admin client, in the JVM."""

    def __init__(self, jvm: Any, client: Any) -> None:
        self._jvm, self._client = jvm, client
        self._package = jvm.org.apache.kafka.clients.admin

    def records(self, topic: str) -> int:
        """How many records a topic with one partition has; -1 if it does not exist."""
        if topic not in self._client.listTopics().names().get():
            return -1
        partition = self._jvm.org.apache.kafka.common.TopicPartition(topic, 0)
        first, end = (
            self._client.listOffsets({partition: which}).partitionResult(partition).get().offset()
            for which in (self._package.OffsetSpec.earliest(), self._package.OffsetSpec.latest())
        )
        return int(end - first)

    def create(self, topic: str) -> None:
        optional = self._jvm.java.util.Optional
        new = self._package.NewTopic(topic, optional.of(1), optional.empty())
        self._client.createTopics([new]).all().get()

    def drop(self, topics: list[str]) -> None:
        known = self._client.listTopics().names().get()
        self._client.deleteTopics([topic for topic in topics if topic in known]).all().get()


@contextmanager
def _admin(spark: SparkSession, servers: str) -> Iterator[_Admin]:
    from py4j.protocol import Py4JJavaError

    jvm, client = _jvm(spark), None
    options = {"bootstrap.servers": servers, "default.api.timeout.ms": str(ANSWER_MS), "request.timeout.ms": "10000"}
    try:
        client = jvm.org.apache.kafka.clients.admin.AdminClient.create(options)
        yield _Admin(jvm, client)
    except Py4JJavaError as error:
        cause = error.java_exception.getCause() or error.java_exception
        raise ConfigError(f"kafka: a request to the servers {servers} failed: {cause.getMessage()}") from None
    finally:
        if client is not None:
            client.close()


def _jvm(spark: SparkSession) -> Any:
    return spark.sparkContext._jvm


# -- apart ----------------------------------------------------------------------------------------------------


def apart(
    what: Literal["check", "fill", "drop"],
    workload: Workload,
    shape: Shape,
    folder: Path,
    servers: str,
    batches: int,
    environment: Mapping[str, str] | None = None,
) -> None:
    """:func:`need_connector`, :func:`fill` or :func:`drop` in a process of its own.

    Raises ConfigError, or RuntimeError with its output.
    """
    names = prefix(workload, shape, batches)
    numbers = str(batches), str(len(shape.heartbeats(batches)))
    command = [sys.executable, "-m", __name__, what, workload.name, str(folder), servers, *numbers, names]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
    if done.returncode == WRONG:
        raise ConfigError(done.stdout.strip().rpartition("\n")[2])
    if done.returncode:
        raise RuntimeError(f"Kafka's topics {names}: exit code {done.returncode}\n{done.stderr[-4_000:]}")


def main(what: str, name: str, folder: str, servers: str, batches: str, heartbeats: str, names: str) -> int:
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local[2]").appName(f"aion {what} {names}")
    spark = builder.config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        if what == "check":
            need_connector(spark)
        elif what == "fill":
            fill(spark, load(name), Path(folder), servers, int(batches), int(heartbeats), names)
        else:
            drop(spark, load(name), servers, names)
    except ConfigError as error:
        print(" ".join(str(error).split()))
        return WRONG
    finally:
        spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
