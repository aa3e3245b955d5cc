"""Stateful code that does not mention Aion runs on it by configuration alone, and Aion's tools see its state."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import AnalysisException
from pyspark.sql import GroupedData, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import aion
from aion.spark.api import patch
from aion.spark.api.group_by import METHODS
from tests import documents
from tests.spark.conftest import FileStream
from tests.spark.stateful import processors as p
from tests.spark.stateful.rig import compare, grouped_by_spark, run
from tests.spark.stateful.test_differential import events, plain

KINDS = ["apple", "pear", "plum", "pay"]


@pytest.fixture
def enabled(spark: SparkSession, tmp_path: Path) -> Iterator[Path]:
    """The session has the setting, and the patch is installed. Returns where the state goes."""
    state, before = tmp_path / "state", spark.conf.get("spark.aion.state.dir")
    spark.conf.set(patch.ENABLED, "true")
    spark.conf.set("spark.aion.state.dir", str(state))
    patch.install()
    yield state
    aion.unconfigure()
    spark.conf.unset(patch.ENABLED)
    spark.conf.set("spark.aion.state.dir", before)


@pytest.mark.slow
def test_group_by_of_spark_runs_on_aion_until_it_is_undone(
    spark: SparkSession, tmp_path: Path, enabled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = plain(p.Basket, KINDS, batches=events(KINDS, batches=2), restart_after=())
    with caplog.at_level(logging.WARNING, "aion"):
        ours = run(spark, tmp_path / "ours", case, grouped_by_spark)
    assert "transformWithState runs on Aion, as the operator 'stateful'" in caplog.text
    assert list(enabled.glob("*/stateful")), "the state is in Aion's folder"
    aion.unconfigure()
    assert all(getattr(GroupedData, name) is stock for name, stock in METHODS.items())
    operators = set(enabled.glob("*/*"))
    before = set(enabled.rglob("*.json"))  # retention, in the background, may still delete some
    stocks = run(spark, tmp_path / "stock", case, grouped_by_spark)
    assert set(enabled.glob("*/*")) == operators, "Spark keeps its own state again"
    assert before and set(enabled.rglob("*.json")) <= before
    compare(ours, stocks)


class Sizes(StatefulProcessor):
    """Says the key, and what rows look like."""

    def init(self, handle: Any) -> None:
        self._rows = handle.getValueState("rows", "n long")

    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Any], timers: Any) -> Iterator[Row]:
        got = list(rows)
        self._rows.update((len(got),))
        yield Row(key=key[0], n=self._rows.get()[0], v=sorted(row.v for row in got))


@pytest.mark.proof
def test_an_expression_with_an_alias_is_a_key(spark: SparkSession, tmp_path: Path) -> None:
    """Spark looks its name up among the columns, and finds none."""
    stream = FileStream(spark, tmp_path / "in", pa.schema([("k", pa.string()), ("v", pa.int64())]))
    stream.put([("a", 1), ("A", 2), ("b", 3)])
    by = F.upper("k").alias("name")
    given = (Sizes(), "key string, n long, v array<long>", "Update", "None")
    with pytest.raises(AnalysisException, match="name"):
        stream.read("k string, v long").groupBy(by).transformWithState(*given).schema  # noqa: B018
    counted = aion.group_by(stream.read("k string, v long"), by, name="aliased").transformWithState(*given)
    (
        counted.writeStream.outputMode("update").format("memory").queryName("aliased")
        .option("checkpointLocation", str(tmp_path / "cp")).trigger(availableNow=True).start().awaitTermination()
    )  # fmt: skip
    assert sorted(map(tuple, spark.table("aliased").collect())) == [("A", 2, [1, 2]), ("B", 1, [3])]


@pytest.mark.proof
def test_the_code_of_the_page(spark: SparkSession, tmp_path: Path) -> None:
    blocks = documents.blocks_of("docs/how-to/stateful.md", "python")
    counting, configuring, going_back = (block.text for block in blocks)
    stream = FileStream(spark, tmp_path / "in", pa.schema([("user", pa.string())]))
    stream.put([("ann",), ("bob",), ("ann",)])
    names = {"events": stream.read("user string"), "SparkSession": SparkSession}
    exec(counting, names)
    names["spark"] = spark

    def counts(query: str) -> list[tuple[str, int]]:
        (
            names["counts"].writeStream.outputMode("update").format("memory").queryName(query)
            .option("checkpointLocation", str(tmp_path / query)).trigger(availableNow=True).start().awaitTermination()
        )  # fmt: skip
        return sorted(map(tuple, spark.table(query).collect()))

    assert counts("page") == [("ann", 2), ("bob", 1)]
    exec(going_back.replace("CHECKPOINT", str(tmp_path / "page")), names)
    assert counts("back") == [("ann", 4), ("bob", 2)]
    try:
        exec(configuring, names)
        assert spark.conf.get(patch.ENABLED) == "true"
        assert GroupedData.transformWithState is not METHODS["transformWithState"]
    finally:
        aion.unconfigure()
        spark.conf.unset(patch.ENABLED)


JOB = """
    import sys
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming import StatefulProcessor
    from pyspark.sql import Row

    class Count(StatefulProcessor):
        def init(self, handle):
            self.count = handle.getValueState("count", "n long")

        def handleInputRows(self, key, rows, timerValues):
            n = (self.count.get() or (0,))[0] + sum(1 for _ in rows)
            self.count.update((n,))
            yield Row(key=key[0], n=n)

        def close(self):
            pass

    provider = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.streaming.stateStore.providerClass", provider)
        .config("spark.aion.stateful.enabled", sys.argv[1])
        .config("spark.aion.state.dir", "state")
        .getOrCreate()
    )
    rows = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
    keyed = rows.selectExpr("value % 3 AS key").groupBy("key")
    result = keyed.transformWithState(Count(), "key long, n long", "Update", "None")
    query = result.writeStream.option("checkpointLocation", sys.argv[2]).outputMode("update").format("noop").start()
    while query.lastProgress is None or query.lastProgress["batchId"] < 1:
        query.awaitTermination(1)
    query.stop()
"""


@pytest.mark.proof
def test_a_job_that_does_not_mention_aion(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(textwrap.dedent(JOB))
    environment = {**os.environ, "PYTHONPATH": str(Path(aion.__file__).parent.parent)}
    for enabled in ("true", "false"):
        command = [sys.executable, "-m", "aion.run", str(job), enabled, str(tmp_path / f"checkpoint-{enabled}")]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert (re.search("runs on Aion, as the operator 'stateful'", done.stderr) is not None) == (enabled == "true")
    assert len(list((tmp_path / "state").glob("*"))) == 1
    shown = subprocess.run(
        [sys.executable, "-m", "aion.cli", "inspect", "state"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "keyed values" in shown.stdout
