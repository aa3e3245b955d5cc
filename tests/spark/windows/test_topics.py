"""Events as Kafka's records, there and back; with ``AION_KAFKA=HOST:PORT``, workloads whose events come from there.

That needs Spark's package for Kafka: ``PYSPARK_SUBMIT_ARGS="--packages ... pyspark-shell"``
(docs/measured/experiments.md).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession

from aion.errors import ConfigError
from experiments.workloads import NAMES, application, load, sources, topics
from experiments.workloads.chaining import Results
from experiments.workloads.model import TIMESTAMP, Probe, Shape
from tests.spark.pages.test_workloads import BATCHES, PAST, SPECS, assert_equal, policy

SERVERS = os.environ.get("AION_KAFKA")
END = re.compile(r"(\d+)\}\}")
"""Of a topic's one partition, where a micro-batch ended."""
needs_kafka = pytest.mark.skipif(SERVERS is None, reason="AION_KAFKA=HOST:PORT names no servers")


def same_rows(one: DataFrame, other: DataFrame) -> bool:
    return one.exceptAll(other).isEmpty() and other.exceptAll(one).isEmpty()


@pytest.mark.proof
@pytest.mark.parametrize("name", NAMES)
def test_every_event_comes_back_from_its_record_and_batches_are_equally_long(
    spark: SparkSession, tmp_path: Path, name: str
) -> None:
    workload, shape, batches = load(name), Shape.of(SPECS[name], past_windows=PAST), 2
    sources.write_files(workload, shape, batches, tmp_path)
    for stream in workload.streams:
        length = topics.longest(tmp_path, stream, batches)
        for file in sorted((tmp_path / stream).iterdir()):
            rows = spark.read.parquet(str(file))
            records = topics.encoded(rows, length)
            assert records.count() == length
            assert same_rows(topics.decoded(records, pq.read_schema(file)), rows), file.name


def test_values_come_back_to_the_last_bit(spark: SparkSession) -> None:
    table = pa.table(
        {
            "at": pa.array([1, -1, 1_700_000_000_000_001, 1_699_999_999_999_999, None], pa.int64()).cast(TIMESTAMP),
            "x": pa.array([0.1, 5e-324, -1.7976931348623157e308, 1 / 3, None], pa.float64()),
            "n": pa.array([2**63 - 1, -(2**63), 0, (1 << 53) + 1, None], pa.int64()),
            "text": pa.array(['"\\{}', "\u2028\n\t\x00", "é😀", "", None]),
        }
    )
    rows = spark.createDataFrame(table)
    back = topics.decoded(topics.encoded(rows, 9), table.schema)
    assert back.toArrow().sort_by("n").to_pydict() == table.sort_by("n").to_pydict()


def test_a_record_that_is_no_event_is_not_taken_for_an_empty_one(spark: SparkSession) -> None:
    records = spark.createDataFrame([('{"n": 1}',), ("n=1",)], "value string")
    with pytest.raises(Py4JJavaError, match="MALFORMED_RECORD_IN_PARSING"):
        topics.decoded(records, pa.schema([("n", pa.int64())])).collect()


@pytest.mark.skipif(SERVERS is not None, reason="the package is there")
def test_who_lacks_sparks_package_for_kafka_is_told_its_name(spark: SparkSession, tmp_path: Path) -> None:
    workload, shape = load("average"), Shape.of(SPECS["average"], past_windows=1)
    sources.write_files(workload, shape, 1, tmp_path)
    with pytest.raises(ConfigError, match=f"spark-sql-kafka-0-10_2.13:{spark.version}"):
        sources.read(spark, workload, shape, batches=1, folder=tmp_path, kafka="localhost:9092", aion=True)


# -- with a broker --------------------------------------------------------------------------------------------


def apart(what: Literal["fill", "drop"], name: str, data: Path) -> None:
    assert SERVERS is not None
    topics.apart(what, load(name), Shape.of(SPECS[name], past_windows=PAST), data, SERVERS, BATCHES[name])


@pytest.fixture
def filled(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """A workload whose topics have all its events."""
    name: str = request.param
    data = tmp_path / "data"
    sources.write_files(load(name), Shape.of(SPECS[name], past_windows=PAST), BATCHES[name], data)
    apart("drop", name, data)
    apart("fill", name, data)
    yield name
    apart("drop", name, data)


@needs_kafka
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("filled", "backend"),
    [("average", "tiered"), ("stock", "tiered"), ("linear-road", "tiered"), ("linear-road", "spark-list")],
    indirect=["filled"],
)
def test_results_of_kafkas_events_are_those_of_a_batch_computation(
    spark: SparkSession, tmp_path: Path, filled: str, backend: str
) -> None:
    workload, shape, batches = load(filled), Shape.of(SPECS[filled], past_windows=PAST), BATCHES[filled]
    data, aion = tmp_path / "data", application.is_aion(backend)
    streams = sources.read(spark, workload, shape, batches=batches, folder=data, kafka=SERVERS, aion=aion)
    panes = application.panes_of(workload, backend, streams, shape, Probe(), policy(shape, backend) if aion else None)
    query = application.start(workload, backend, panes, shape, tmp_path / "out")
    query.awaitTermination()
    reports = [report for report in query.recentProgress if report["numInputRows"]]
    for stream in workload.streams:
        length = topics.longest(data, stream, batches)
        sources_of = [[s for s in of["sources"] if f"-{stream}]" in s["description"]] for of in reports]
        ends = [{int(end) for s in those for end in END.findall(s["endOffset"])} for those in sources_of]
        wanted = [{length * (batch + 1)} for batch in range(batches)] + [{length * batches + 1}]
        assert ends == wanted, "what arrives in a window's time, then the heartbeat"
    truth = workload.truth(sources.events_of(data, workload, batches), shape)
    assert_equal(Results(tmp_path / "out" / "results").read(), truth)
