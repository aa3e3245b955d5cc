"""A query of stock Spark that goes on with Aion gives the rows that it would have given, in each later batch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

import aion
from aion.errors import ConfigError
from aion.spark.api import patch
from tests.object_store import ObjectStore
from tests.spark.conftest import FileStream
from tests.spark.stateful import processors as p
from tests.spark.stateful.rig import Case, Output, compare, grouped_by_aion, grouped_by_spark, query_of, to_the_end
from tests.spark.stateful.test_differential import PROCESSORS, event_time, events, plain

FORMAT = "spark.sql.streaming.stateStore.checkpointFormatVersion"
FEW = [("k", pa.string()), ("v", pa.int64())]


class Twins:
    """A query that stops after some batches. It goes on twice: with stock Spark, and with Aion.

    ``form``: the format in which stock Spark writes its checkpoint. Its default is 1, and Aion needs 2. ``patched``:
    the job does not mention Aion.
    """

    def __init__(self, spark: SparkSession, folder: Path, case: Case, form: str = "1", patched: bool = False) -> None:
        self._spark, self._case, self._form, self._patched = spark, case, form, patched
        self._rest = iter(case.batches)
        self.stream = FileStream(spark, folder / "input", pa.schema(case.columns))
        self.old, self.new = folder / "old", folder / "new"
        self.aions: Output = {}
        self.sparks: Output = {}

    def begin(self, batches: int) -> None:
        for _ in range(batches):
            self.stream.put(next(self._rest))
            self._with_spark()

    def migrate(self, **more: Any) -> Any:
        self.sparks.clear()
        return aion.migrate(self._spark, str(self.old), str(self.new), **more)

    def go_on(self) -> None:
        for rows in self._rest:
            self.stream.put(rows)
            self._with_spark()
            self._with_aion()
        aions, sparks = ({b: rows for b, rows in side.items() if rows} for side in (self.aions, self.sparks))
        compare(aions, sparks)
        assert sparks, "the processor gave nothing"

    def _with_spark(self) -> None:
        self._spark.conf.set(FORMAT, self._form)
        try:
            to_the_end(
                query_of(self._spark, self._case, grouped_by_spark, self.stream), self.old, self._case, self.sparks
            )
        finally:
            self._spark.conf.set(FORMAT, "2")

    def _with_aion(self) -> None:
        group = grouped_by_aion
        if self._patched:
            self._spark.conf.set(patch.ENABLED, "true")
            patch.install()
            group = grouped_by_spark
        try:
            to_the_end(query_of(self._spark, self._case, group, self.stream), self.new, self._case, self.aions)
        finally:
            aion.unconfigure()
            self._spark.conf.unset(patch.ENABLED)


@pytest.mark.slow
def test_a_query_goes_on_with_aion(spark: SparkSession, tmp_path: Path) -> None:
    twins = Twins(spark, tmp_path, event_time(p.Fraud, ["a"], pandas=True, batches=events(["a"], batches=2)))
    twins.begin(1)
    with pytest.raises(ConfigError, match="there is no processor with the number 7; there are \\[0\\]"):
        twins.migrate(names={7: "x"})
    done = twins.migrate()
    assert (done.names, done.unfinished) == ({0: "stateful"}, False)
    with pytest.raises(ConfigError, match="there is something already"):
        twins.migrate()
    with pytest.raises(ConfigError, match="operator 0 runs on Aion already"):
        aion.migrate(spark, str(twins.new), str(tmp_path / "newer"))
    assert not (tmp_path / "newer").exists()
    twins.go_on()


def two_processors(df: DataFrame) -> DataFrame:
    second = df.groupBy("key").transformWithState(p.Count(), "key string, n long", "Append", "None")
    return second.selectExpr("key", "n * 1000 AS n")


WHO = pa.struct([("name", pa.string()), ("born", pa.date32())])
ANNA, NOBODY = {"name": "anna", "born": date(1990, 2, 3)}, {"name": None, "born": None}

SAME = {
    **PROCESSORS,
    "a struct as key": lambda: Case(
        p.Count, [("who", WHO), ("v", pa.int64())], "key string, n long",
        [[(ANNA, 1), (NOBODY, 2), (None, 3)], [(ANNA, 3), (None, 4)], [(NOBODY, 1), (ANNA, 2)], [(None, 1)]],
        keys=("who",), pandas=False,
    ),
    "two processors": lambda: Case(
        p.Count, FEW, "key string, n long", [[("a", 1), ("b", 2)], [("a", 3)], [(None, 1), ("a", 2)], [("b", 1)]],
        pandas=False, output_mode="append", then=two_processors,
    ),
}  # fmt: skip


@pytest.mark.proof
@pytest.mark.parametrize(
    ("name", "form"), [*((name, "1") for name in sorted(set(SAME) - {"releases"})), ("chained", "2"), ("balance", "2")]
)
def test_any_processor_goes_on_with_aion(spark: SparkSession, tmp_path: Path, name: str, form: str) -> None:
    make: Callable[[], Case] = SAME[name]
    case = make()
    twins = Twins(spark, tmp_path, case, form=form, patched=name == "two processors")
    twins.begin(len(case.batches) // 2)
    done = twins.migrate()
    assert sorted(done.names.values()) == ["stateful", "stateful-1"][: 1 + (name == "two processors")]
    twins.go_on()


@pytest.mark.proof
@pytest.mark.parametrize("name", ["basket", "sessions", "last values"])
def test_state_in_avro_goes_on_with_aion(spark: SparkSession, tmp_path: Path, avro: None, name: str) -> None:
    case = SAME[name]()
    twins = Twins(spark, tmp_path, case)
    twins.begin(len(case.batches) // 2)
    twins.migrate()
    twins.go_on()


@pytest.mark.proof
def test_a_batch_that_had_begun_runs_again(spark: SparkSession, tmp_path: Path) -> None:
    twins = Twins(spark, tmp_path, event_time(p.Reminders, ["a", "b", "done"], batches=events(["a", "b"], batches=3)))
    twins.begin(2)
    last = max(int(path.name) for path in (twins.old / "commits").glob("[0-9]*"))
    (twins.old / "commits" / str(last)).unlink()
    (twins.old / "commits" / f".{last}.crc").unlink()
    done = twins.migrate()
    assert (done.batch, done.unfinished) == (last - 1, True)
    twins.go_on()


@pytest.mark.proof
def test_the_state_goes_to_an_object_store(
    spark: SparkSession, tmp_path: Path, bucket: ObjectStore, place: Callable[[str], None]
) -> None:
    twins = Twins(spark, tmp_path, event_time(p.Fraud, ["a"], pandas=True, batches=events(["a"], batches=4)))
    twins.begin(2)
    place(bucket.uri("migrated"))
    assert twins.migrate().state_dir == bucket.uri("migrated")
    assert {path.split("/")[0] for path in bucket.objects()} == {"migrated"}
    twins.go_on()


@pytest.mark.slow
def test_what_is_no_checkpoint_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty: not the checkpoint of a streaming query"):
        aion.migrate(spark, str(tmp_path / "empty"), str(tmp_path / "new"))


@pytest.mark.proof
def test_a_query_without_a_processor_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    stream = FileStream(spark, tmp_path / "input", pa.schema(FEW))
    rows = stream.read("k string, v long")
    checkpoints = []
    for name, df in (("stateless", rows), ("deduplicated", rows.dropDuplicates(["k"]))):
        stream.put([("a", 1)])
        checkpoints.append(str(tmp_path / name))
        query = df.writeStream.format("noop").option("checkpointLocation", checkpoints[-1])
        query.trigger(availableNow=True).start().awaitTermination()
    with pytest.raises(ConfigError, match="this query has no state"):
        aion.migrate(spark, checkpoints[0], str(tmp_path / "new"))
    with pytest.raises(ConfigError, match=r"no transformWithState in Python is among .* dedupe"):
        aion.migrate(spark, checkpoints[1], str(tmp_path / "new"))
    for path in (tmp_path / "deduplicated" / "commits").iterdir():
        path.unlink()
    with pytest.raises(ConfigError, match="no batch of this query is complete"):
        aion.migrate(spark, checkpoints[1], str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()


@pytest.mark.proof
def test_the_command(spark: SparkSession, tmp_path: Path) -> None:
    case = plain(p.Basket, ["apple", "pay"], batches=events(["apple", "pay"], batches=3))
    twins = Twins(spark, tmp_path, case)
    twins.begin(2)
    command = [sys.executable, "-m", "aion.cli", "migrate", str(twins.old), str(twins.new), "--state", "state"]
    environment = {**os.environ, "PYTHONPATH": str(Path(aion.__file__).parent.parent)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [
        "processor 0: its state after batch 1 is taken over, under the name 'stateful'",
        "Start the job on Aion with these settings, and it goes on:",
        f"  checkpointLocation    {twins.new}",
        f"  spark.aion.state.dir  {tmp_path / 'state'}",
    ]
    again = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert f"{twins.new}: there is something already; give a folder that does not exist yet" in again.stderr
    before = spark.conf.get("spark.aion.state.dir")
    spark.conf.set("spark.aion.state.dir", str(tmp_path / "state"))
    try:
        twins.sparks.clear()
        twins.go_on()
    finally:
        spark.conf.set("spark.aion.state.dir", before)
