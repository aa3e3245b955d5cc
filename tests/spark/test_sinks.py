"""``aion.sinks`` with real queries: what tables hold after failures, restarts, and copies of a checkpoint."""

from __future__ import annotations

import shutil
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import aion
from aion import aggregates as A
from aion.errors import ConfigError
from aion.sinks.frames import panes_of
from tests.sinks.databases import KINDS, WITHOUT_SERVER, Place, place, server
from tests.spark.conftest import EVENTS_DDL, FileStream

POLICY = {"lateness": {"initial_bound": "1 hour", "coverage": None}, "trigger": {"kind": "every_batch"}}


@pytest.fixture(scope="module")
def postgresql() -> Iterator[str | None]:
    with server() as uri:
        yield uri


def sessions(stream: FileStream) -> DataFrame:
    """Sessions of keys, with a result of every shape."""
    return aion.windowed(
        stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"),
        key="k",
        time="ts",
        windows=aion.Session("10 seconds"),
        aggregates={"n": A.count(), "largest": A.max("ts"), "values": A.collect_list("v")},
        policy=POLICY,
    )


def run(panes: DataFrame, checkpoint: Path, sink: Any) -> None:
    options = {"checkpointLocation": str(checkpoint)}
    query = panes.writeStream.foreachBatch(sink).options(**options).trigger(availableNow=True).start()
    query.awaitTermination()


def mixed(panes: DataFrame) -> DataFrame:
    """The same rows in other places, behind a column that is not of the key."""
    return panes.repartition(3).select(F.lit("x").alias("first"), *reversed(panes.columns)).drop("first")


FIRST = [[("a", 0, 1.0), ("a", 5, 1.5), ("a", 20, 2.0), (None, 1, 3.0), ("end", 40, 0.0)]]
LATE = [[("a", 12, 4.0), (None, 2, 5.0), ("end", 41, 0.0)], [("a", -9_000, 6.0), ("end", 42, 0.0)]]


@pytest.mark.slow
def test_tables_follow_a_query_that_fails_and_starts_again(
    stream: FileStream, tmp_path: Path, postgresql: str | None
) -> None:
    """The sink has committed when its batch fails, so Spark runs the batch again."""
    kinds = [kind for kind in KINDS if kind != "postgresql" or postgresql is not None]
    places = [place(kind, tmp_path, postgresql) for kind in kinds]
    tables = [aion.sinks.upsert(each.uri, "visits", changes="visits_changes", dropped="too_late") for each in places]
    failed = set[int]()

    def write(batch: DataFrame, batch_id: int) -> None:
        for table in tables:
            table(batch, batch_id)
        if batch_id not in failed:
            failed.add(batch_id)
            raise RuntimeError("after the sinks")

    for rows in FIRST:
        stream.put(rows)
    for _ in range(2):  # the windows end in the second batch, which has no events
        with pytest.raises(StreamingQueryException, match="after the sinks"):
            run(mixed(sessions(stream)), tmp_path / "checkpoint", write)
    failed |= set(range(10))
    for rows in LATE:
        stream.put(rows)
    run(mixed(sessions(stream)), tmp_path / "checkpoint", write)
    for each in places:
        assert each.rows("visits", "k", "n") == [("a", "4"), (None, "2")], each.kind
        json = {"sqlite": "\"values\" ->> '$[3]'", "postgresql": '"values" -> 3', "duckdb": '"values"[4]'}
        assert each.rows("visits", f"({json[each.kind]})", "k") == [("2.0", "a"), (None, None)], each.kind
        (late,) = each.rows("too_late", "k", "n", "lateness_us")
        assert late[:2] == ("a", "1") and int(late[2] or 0) > 3_600_000_000, each.kind
        # Each change is there once, though each batch up to the failures was run twice.
        assert each.rows("visits_changes", "change", "k", "n", "old_n") == [
            ("delete", "a", None, "1"), ("delete", "a", None, "2"), ("delete", None, None, "1"),
            ("insert", "a", "1", None), ("insert", "a", "2", None), ("insert", "a", "4", None),
            ("insert", None, "1", None), ("insert", None, "2", None),
        ], each.kind  # fmt: skip
    if postgresql is None:
        pytest.skip(WITHOUT_SERVER)


def test_a_corrected_program_reaches_the_table_and_half_a_batch_does_not(stream: FileStream, tmp_path: Path) -> None:
    """The driver dies between the sink's commit and Spark's; then its program is another one."""
    database = Place("sqlite", f"sqlite:///{tmp_path / 'db'}")
    table = aion.sinks.upsert(database.uri, "visits", key="K")  # Spark finds a column in another case

    def dies(batch: DataFrame, batch_id: int) -> None:
        table(batch.withColumn("n", F.lit(-1).cast("long")), batch_id)
        if not batch.isEmpty():
            raise RuntimeError("after the sink")

    def halves(batch: DataFrame, batch_id: int) -> None:
        table(batch.where("k = 'a'"), batch_id)
        table(batch.where("k IS NULL"), batch_id)

    for rows in FIRST:
        stream.put(rows)
    with pytest.raises(StreamingQueryException, match="after the sink"):
        run(sessions(stream), tmp_path / "checkpoint", dies)
    assert database.rows("visits", "k", "n") == [("a", "-1"), ("a", "-1"), (None, "-1")]
    with pytest.raises(StreamingQueryException, match="twice in one run"):
        run(sessions(stream), tmp_path / "checkpoint", halves)
    run(sessions(stream), tmp_path / "checkpoint", table)
    assert database.rows("visits", "k", "n") == [("a", "1"), ("a", "2"), (None, "1")]


@pytest.mark.proof
def test_the_copy_of_a_checkpoint_may_not_write_where_the_original_does(stream: FileStream, tmp_path: Path) -> None:
    database = Place("sqlite", f"sqlite:///{tmp_path / 'db'}")
    table = aion.sinks.upsert(database.uri, "visits")
    for rows in FIRST:
        stream.put(rows)
    run(sessions(stream), tmp_path / "checkpoint", table)
    before = database.run("SELECT * FROM visits")
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "copy")
    for rows in LATE:
        stream.put(rows)
    with pytest.raises(StreamingQueryException, match=r"of the same query from another checkpoint.*adopt='\w+:\d+'"):
        run(sessions(stream), tmp_path / "copy", table)
    assert database.run("SELECT * FROM visits") == before
    run(sessions(stream), tmp_path / "checkpoint", table)
    assert database.rows("visits", "k", "n") == [("a", "4"), (None, "2")]


@pytest.mark.proof
def test_tables_of_a_lake_follow_a_query(stream: FileStream, tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake")
    table = aion.sinks.merge("delta", str(tmp_path / "visits"))
    for events in (FIRST, LATE):
        for rows in events:
            stream.put(rows)
        run(sessions(stream), tmp_path / "checkpoint", table)
    found = deltalake.DeltaTable(str(tmp_path / "visits")).to_pyarrow_table().select(["k", "n", "values"]).to_pylist()
    first, second = sorted(found, key=lambda row: row["n"])
    assert (first["k"], first["n"], sorted(first["values"])) == (None, 2, [3.0, 5.0])
    assert (second["k"], second["n"], sorted(second["values"])) == ("a", 4, [1.0, 1.5, 2.0, 4.0])


def test_spark_reads_the_merge_that_it_is_to_run(spark: SparkSession) -> None:
    columns = ["k", "odd `name`", "window", "window_start", "window_end", "n", "kind", "pane_seq", "reason"]
    text = aion.sinks.merge_sql("lake.traffic.tolls", "batch", columns, key=["k", "odd `name`"])
    plan = spark._jsparkSession.sessionState().sqlParser().parsePlan(text)
    actions = [*seen(plan.matchedActions()), *seen(plan.notMatchedActions())]
    assert [action.getClass().getSimpleName() for action in actions] == ["DeleteAction", "InsertAction"]
    assert len(seen(actions[1].assignments())) == len(columns) - 2  # without the number of the pane and the reason


def seen(sequence: Any) -> list[Any]:
    """A sequence of Scala as a list."""
    return [sequence.apply(number) for number in range(sequence.size())]


def test_the_rows_that_a_merge_gets_are_the_newest(spark: SparkSession) -> None:
    """The part of the text that Spark can run without a table of a lake. A row of each pane says what to delete."""
    rows = [("a", "w", 0, 1, n, "late", n) for n in range(9)] + [
        ("a", "w", 0, 1, 10, "late", 8),  # the pane has two rows
        (None, "w", 0, 1, 1, "late", 0),
        ("b", "w", 0, 1, 1, "on_time", 0),
        ("b", "w", 0, 1, None, "retracted", 1),
        ("a", "w", 0, 1, 7, "dropped", None),
    ]
    schema = "k string, window string, window_start int, window_end int, n int, kind string, pane_seq long"
    batch = spark.createDataFrame(rows, schema).repartition(3)
    batch.createOrReplaceTempView("merged")
    text = aion.sinks.merge_sql("lake.tolls", "merged", batch.columns, key="k")
    source = text[text.index("USING (") + 7 : text.index(") AS new")]
    found = [(row.k, row.n, row.aion_deletes) for row in spark.sql(source).collect()]
    written = [(k, n) for k, n, deletes in found if not deletes and n is not None]
    assert sorted(written, key=repr) == [("a", 10), ("a", 8), (None, 1)]
    assert sorted((k for k, _, deletes in found if deletes), key=repr) == ["a", "b", None]


@pytest.mark.slow
def test_a_row_goes_when_a_later_pane_does_not_meet_the_condition(stream: FileStream, tmp_path: Path) -> None:
    database = Place("sqlite", f"sqlite:///{tmp_path / 'db'}")
    sink = aion.sinks.upsert(database.uri, "high", where="least > 5 AND size(all) > 0", changes="changed")
    panes = aion.windowed(
        stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"),
        key="k",
        time="ts",
        windows=aion.Tumbling("10 seconds"),
        aggregates={"least": A.min("v"), "all": A.collect_list("v")},
        policy=POLICY,
    )
    for batch in [[("a", 1, 6.0), ("b", 1, 3.0), ("c", 1, 9.0), ("x", 40, 0.0)], [("a", 2, 4.0), ("x", 41, 0.0)]]:
        stream.put(batch)
        run(panes, tmp_path / "checkpoint", sink)
    assert database.run("SELECT k, least FROM high ORDER BY k") == [("c", 9.0)]
    assert database.run("SELECT k, change FROM changed ORDER BY seq, k") == [
        ("a", "insert"), ("c", "insert"), ("a", "delete"),
    ]  # fmt: skip
    for wrong in ("", 5):
        with pytest.raises(ConfigError, match="is not a condition in SQL"):
            aion.sinks.upsert(database.uri, "high", where=wrong)  # type: ignore[arg-type]


def test_a_time_in_json_is_the_instant_whatever_the_zone_was_then(spark: SparkSession) -> None:
    """The zone of the session was 3:30:52 behind UTC until 1935, and a text of the offset has no seconds."""
    batch = spark.sql("SELECT array(timestamp '1900-01-01 00:00:00Z') AS at")
    found = panes_of(batch, ["at"], as_json=True, where=None)
    assert found["at"].to_pylist() == ['["1900-01-01T00:00:00.000000Z"]']


def test_a_sink_outside_a_query_says_where_it_belongs(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.createDataFrame(
        [], "k string, window string, window_start timestamp, window_end timestamp, kind string, pane_seq long"
    )
    with pytest.raises(aion.errors.ConfigError, match="foreachBatch"):
        aion.sinks.upsert(f"sqlite:///{tmp_path / 'db'}", "visits", key="k")(rows, 0)


@pytest.mark.slow
def test_a_split_batch_is_computed_once_and_all_of_it(stream: FileStream, tmp_path: Path) -> None:
    """Functions that read nothing, or only a part, or all of it twice."""
    marks = tmp_path / "computed"
    marks.mkdir()
    seen: Counter[str] = Counter()

    def counted(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        (marks / uuid.uuid4().hex).touch()
        yield from batches

    def panes(rows: DataFrame, batch_id: int) -> None:
        rows.count()
        seen.update(row.kind for row in rows.collect())
        assert "reason" not in rows.columns

    def dropped(rows: DataFrame, batch_id: int) -> None:
        seen.update(row.kind for row in rows.collect() if row.reason)

    def write(batch: DataFrame, batch_id: int) -> None:
        before = len(list(marks.iterdir()))
        split(batch.mapInArrow(counted, batch.schema), batch_id)
        assert len(list(marks.iterdir())) == before + 2  # partitions
        aion.sinks.split(panes=lambda rows, _: rows.take(1), dropped=lambda rows, _: None)(batch, batch_id)

    split = aion.sinks.split(panes=panes, dropped=dropped)
    for rows in [*FIRST, *LATE]:
        stream.put(rows)
    run(sessions(stream), tmp_path / "checkpoint", write)
    assert seen["dropped"] == 1 and seen["on_time"] == 3 and seen["late"] == 2


@pytest.mark.proof
def test_a_batch_of_which_a_part_is_read_fails_as_the_page_says(stream: FileStream, tmp_path: Path) -> None:
    stream.put(FIRST[0])
    with pytest.raises(StreamingQueryException, match="CheckpointInfo length: 1, numPartitions: 2"):
        run(sessions(stream), tmp_path / "checkpoint", lambda batch, _: batch.isEmpty())
