"""Files read without rows: the same panes and watermarks, batch by batch, as from Spark's own readers."""

from __future__ import annotations

import copy
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather
import pyarrow.orc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import aion
from aion import aggregates as A
from aion import errors
from tests.spark.conftest import EVENTS, EVENTS_DDL, FileStream, Sink, last_panes, plain
from tests.spark.windows.test_windowed import BOUND, batches

WINDOWS: dict[str, Any] = {
    "key": "k",
    "time": "ts",
    "windows": [aion.Tumbling("10 seconds"), aion.Sliding("30 seconds", "10 seconds")],
    "aggregates": {"n": A.count(), "sum": A.sum("v")},
    "policy": BOUND,
}


class Batches:
    """What a query gave: for each batch its rows, and in its progress the watermark and what was counted."""

    def __init__(self, df: DataFrame, checkpoint: Path) -> None:
        self.rows: list[list[str]] = []

        def take(batch: DataFrame, _: int) -> None:
            self.rows.append(plain(row.asDict(recursive=True) for row in batch.collect()))

        query = df.writeStream.foreachBatch(take).option("checkpointLocation", str(checkpoint))
        started = query.trigger(availableNow=True).start()
        started.awaitTermination()
        progress = [json.loads(p.json) for p in started.recentProgress]
        self.watermarks = [p["eventTime"]["watermark"] for p in progress]
        self.files = [p["numInputRows"] for p in progress]
        self.counts: list[Mapping[str, Mapping[str, int]]] = [p.get("observedMetrics", {}) for p in progress]


def put_days(folder: Path) -> list[pa.Table]:
    """Files in folders of two days, two in each batch; the second file of a day has other types and no column v."""
    tables = []
    for number, rows in enumerate(batches(1, count=4)):
        columns = list(zip(*rows, strict=True))
        times = pa.array([None if t is None else t * 1_000_000 for t in columns[1]], pa.int64())
        table = pa.table([columns[0], times.cast(EVENTS.field("ts").type), columns[2]], schema=EVENTS)
        if number % 2:
            table = table.drop_columns(["v"]).set_column(1, "TS", times.cast(pa.timestamp("us")))
        place = folder / f"day={number // 2}" / f"{number}.parquet"
        place.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, place)
        os.utime(place, (1_700_000_000 + number,) * 2)
        tables.append(table)
    return tables


def test_the_same_panes_and_watermarks_as_of_sparks_reader(spark: SparkSession, tmp_path: Path) -> None:
    """With folders that hold values, columns that are missing or of other types, times that are null, and a filter."""
    tables = put_days(tmp_path / "in")
    ddl = f"{EVENTS_DDL}, day int"
    windows = {**WINDOWS, "key": ["k", "day"]}
    rows = spark.readStream.schema(ddl).option("maxFilesPerTrigger", 2).parquet(str(tmp_path / "in"))
    of_rows = rows.where("k <> 'b'").withWatermark("ts", "5 seconds")
    of_files = aion.read_files(
        spark,
        tmp_path / "in",
        schema=ddl,
        watermark=("ts", "5 seconds"),
        where=pc.field("k") != "b",
        max_files_per_trigger=2,
    )
    expected = Batches(aion.windowed(of_rows, **windows), tmp_path / "rows")
    got = Batches(aion.windowed(of_files, **windows), tmp_path / "files")
    assert got.rows == expected.rows and sum(map(len, got.rows)) > 20
    assert got.watermarks == expected.watermarks
    assert got.files == [2, 2, 0]
    read = [t.filter(pc.field("k") != "b").num_rows for t in tables]
    assert [counts["windowed.files"] for counts in got.counts] == [
        {"events": events, "skipped_files": 0} for events in (sum(read[:2]), sum(read[2:]), 0)
    ]


@pytest.mark.slow
def test_a_bad_file_is_skipped_again_when_its_batch_runs_again(
    spark: SparkSession, stream: FileStream, tmp_path: Path
) -> None:
    """Although it has been repaired; and the first try names it if it is not to be skipped.

    Several of Spark's partitions may be read by one of its tasks.
    """
    good = [stream.put(rows) for rows in batches(1, count=3)]
    bad = [stream.put(rows) for rows in batches(2, count=5)]
    contents = {}
    for number in range(len(good), len(good) + len(bad)):
        path = tmp_path / "input" / f"{number:06d}.parquet"
        contents[path] = path.read_bytes()
        path.write_bytes(contents[path][:-20])

    def events(on_bad_file: str, folder: str = "input") -> DataFrame:
        how: dict[str, Any] = {"watermark": ("ts", "0 seconds"), "on_bad_file": on_bad_file, "tasks": 4}
        files = aion.read_files(spark, f"{tmp_path}/{folder}", schema=EVENTS_DDL, **how)
        return files.to_df("all").union(files.to_df("others").where("k = 'b'")).coalesce(1)

    with pytest.raises(Exception, match=r"BadFile: file:.*00000\d\.parquet cannot be read as parquet"):
        Batches(events("error"), tmp_path / "failing")
    kept = sum(table.num_rows for table in good)
    skipping = Batches(events("drop"), tmp_path / "skipping")
    counts = {"events": kept, "skipped_files": len(bad)}
    assert skipping.counts == [{"all": counts, "others": counts}]
    for path, content in contents.items():
        path.write_bytes(content)
    (tmp_path / "skipping" / "commits" / "0").unlink()
    (tmp_path / "skipping" / "commits" / ".0.crc").unlink()
    again = Batches(events("drop", "./input/"), tmp_path / "skipping")
    assert again.rows[0] == skipping.rows[0] and again.counts[0] == skipping.counts[0]
    assert len(skipping.rows[0]) > kept


@pytest.mark.proof
def test_any_names_and_zones(spark: SparkSession, tmp_path: Path) -> None:
    """Columns may be called as what is counted or sent beside them; a zone may have a name that only Java knows."""
    rows = [{"k": f"é{i}", "events": i, "a.b": i, "a`b": -i, "t": "2024-03-10 02:30:00"} for i in range(3)]
    rows.append({"k": "later", "t": "2024-11-03 01:30:00"})
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.json").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    ddl = "k string, events int, `a.b` bigint, `a``b` int, t timestamp"
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "PST")
    try:
        stock = spark.readStream.schema(ddl).json(str(tmp_path / "in")).withWatermark("t", "0 seconds")
        files = aion.read_files(spark, tmp_path / "in", format="json", schema=ddl, watermark=("t", "0 s"))
        assert Batches(files.to_df(), tmp_path / "df").rows == Batches(stock, tmp_path / "stock").rows
        windows = {
            **WINDOWS,
            "key": ["k", "a`b"],
            "time": "t",
            "aggregates": {"sum": A.sum("a.b"), "most": A.max("events")},
        }
        expected = Batches(aion.windowed(stock, **windows), tmp_path / "rows")
        got = Batches(aion.windowed(files, **windows), tmp_path / "files")
        assert got.rows == expected.rows and sum(map(len, got.rows)) > 3
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)


def test_a_file_that_spark_lists_twice_is_read_once(spark: SparkSession, tmp_path: Path) -> None:
    """It does so if the name of another file is a glob."""
    for number, name in enumerate(("plain", "[x]", "{y,z}")):
        (tmp_path / "in").mkdir(exist_ok=True)
        pq.write_table(as_events([(name, 1000 + number, 1.0)]), tmp_path / "in" / f"{name}.parquet")
    got = Batches(aion.read_files(spark, tmp_path / "in", **GOOD).to_df(), tmp_path / "checkpoint")
    assert got.files[0] > 3 and got.counts == [{"files": {"events": 3, "skipped_files": 0}}]
    assert len(got.rows[0]) == 3


# -- the handle --------------------------------------------------------------------------------------------------


GOOD: dict[str, Any] = {"schema": EVENTS_DDL, "watermark": ("ts", "1 minute")}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"format": "xml"},
            errors.ConfigError,
            "format: 'xml' is not one of parquet, arrow, csv, json, orc, delta, iceberg",
        ),
        ({"schema": "ts timestam"}, errors.SchemaError, "schema: 'ts timestam' is not a schema of Spark"),
        ({"schema": 7}, errors.SchemaError, "schema: 7 is not a schema"),
        (
            {"schema": pa.schema([("ts", pa.int8()), ("ts", pa.int8())])},
            errors.SchemaError,
            "it names the column 'ts' twice",
        ),
        ({"schema": "ts timestamp, TS int"}, errors.SchemaError, "it names the column 'ts' twice, also as 'TS'"),
        (
            {"schema": "ts timestamp, v variant"},
            errors.SchemaError,
            "columns of type variant cannot be read from files: 'v'",
        ),
        (
            {"schema": pa.schema([("u", pa.uint64())])},
            errors.SchemaError,
            "column 'u' is of type uint64, which Spark does",
        ),
        (
            {"format": "csv", "schema": "ts timestamp, l array<int>"},
            errors.SchemaError,
            "column 'l' is of type list<element: int32>: that cannot be read from CSV files",
        ),
        ({"watermark": "ts"}, errors.ConfigError, "watermark: 'ts' is not a column and a delay"),
        (
            {"schema": "ts timestamp_ntz"},
            errors.SchemaError,
            "watermark: column 'ts' is of type timestamp[us]; Spark needs a timestamp",
        ),
        ({"watermark": ("when", "1 s")}, errors.SchemaError, "there is no column 'when'; the columns are k, ts, v"),
        ({"watermark": ("v", "1 s")}, errors.SchemaError, "watermark: column 'v' is of type double"),
        ({"watermark": ("ts", "soon")}, errors.ConfigError, "watermark of 'soon' is not a duration"),
        ({"where": "v > 0"}, errors.ConfigError, "where: 'v > 0' is not an expression of pyarrow"),
        ({"where": pc.field("w") > 0}, errors.SchemaError, "where: (w > 0) cannot be computed from k, ts, v"),
        ({"transform": 7}, errors.ConfigError, "transform: 7 is not a function of a pyarrow.RecordBatch"),
        (
            {"transform": lambda batch: batch.append_column("n", pa.array([len(k) for k in batch["k"].to_pylist()]))},
            errors.SchemaError,
            "transform: column 'n' has no type in an empty batch; name it, e.g. pa.array(values, pa.int64())",
        ),
        (
            {"transform": lambda batch: batch.append_column("u", pa.array([], pa.uint64()))},
            errors.SchemaError,
            "transform: column 'u' is of type uint64, which Spark does not have",
        ),
        ({"transform": lambda batch: 1}, errors.TransformError, "transform: TypeError: it returned int"),
        ({"transform": lambda batch: 1 / 0}, errors.TransformError, "transform: ZeroDivisionError"),
        ({"on_bad_file": "ignore"}, errors.ConfigError, "'ignore' is neither 'error' nor 'drop'"),
        ({"options": {"header": True}}, errors.ConfigError, "options: 'header' is not one of pathGlobFilter"),
        ({"options": {"modifiedBefore": "x"}}, errors.ConfigError, "options: 'modifiedBefore' is not one of"),
        ({"options": {"maxFileAge": "1d"}}, errors.ConfigError, "; use the argument max_file_age="),
        ({"options": ["header"]}, errors.ConfigError, "options: ['header'] is not a mapping"),
        ({"tasks": 0}, errors.ConfigError, "tasks: 0 is not a whole number from 1 on"),
        ({"max_files_per_trigger": "8"}, errors.ConfigError, "max_files_per_trigger: '8' is not a whole number from 1"),
        ({"max_file_age": "soon"}, errors.ConfigError, "max_file_age of 'soon' is not a duration"),
        ({"latest_first": "no"}, errors.ConfigError, "latest_first: 'no' is neither True nor False"),
        ({"transform": 5}, errors.ConfigError, "transform: 5 is not a function"),
        ({"watermark": (5, "1 s")}, errors.ConfigError, "watermark: (5, '1 s') is not a column and a delay"),
    ],
)
def test_wrong_arguments(spark: SparkSession, change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        aion.read_files(spark, "nowhere", **{**GOOD, **change})
    assert message in str(caught.value)


def test_what_cannot_be_sent_to_a_task_is_refused(spark: SparkSession) -> None:
    lock = threading.Lock()
    with pytest.raises(errors.ConfigError, match="where and transform are sent to the tasks, but cannot be pickled"):
        aion.read_files(spark, "nowhere", **GOOD, transform=lambda batch: (lock, batch)[1])


def test_the_handle_is_no_dataframe(spark: SparkSession, stream: FileStream, tmp_path: Path) -> None:
    events = aion.read_files(spark, tmp_path / "input", **GOOD)
    with pytest.raises(AttributeError, match=r"has no 'select'; \.to_df\(\) makes a DataFrame of it"):
        events.select("ts")  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"is no DataFrame; write \.to_df\(\)\['ts'\]"):
        events["ts"]
    with pytest.raises(TypeError, match=r"group_by: Files.* is not a DataFrame; \.to_df"):
        aion.group_by(events, "k")  # type: ignore[arg-type]
    with pytest.raises(errors.WatermarkError, match="a streaming DataFrame is needed"):
        aion.windowed("nowhere", **WINDOWS)  # type: ignore[arg-type]
    for wrong in (None, 7, "", ["input"]):
        with pytest.raises(errors.ConfigError, match="is not a path"):
            aion.read_files(spark, wrong, **GOOD)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        events.schema = EVENTS  # type: ignore[misc]
    assert repr(events).endswith("input', parquet, [k: string, ts: timestamp[us, tz=UTC], v: double])")
    assert copy.copy(events).schema == events.schema == EVENTS
    naive = pa.schema([("ts", pa.timestamp("ns")), ("at", pa.timestamp("ms", "UTC"))])
    times = aion.read_files(spark, tmp_path / "input", schema=naive, watermark=("at", "1 s")).to_df()
    assert times.dtypes == [("ts", "timestamp_ntz"), ("at", "timestamp")]
    df = events.to_df()
    assert df.isStreaming and df.columns == ["k", "ts", "v"]
    assert df.schema["ts"].metadata == {"spark.watermarkDelayMs": 60_000}
    reading = f"Spark lists the files of {tmp_path}/input; 2 tasks read parts of files with pyarrow, as parquet, and"
    said = " ".join(aion.explain(events, **WINDOWS).split())
    assert f"files {reading} of them the columns k, ts, v. child" in said
    of_rows = said.replace(f"files {reading} of them the columns k, ts, v. ", "").replace(
        "Python groups the events, because the tasks of Python read the files themselves.",
        "Spark's own functions group the events, before they reach Python; if few groups come out, they go to the root "
        "without Python here.",
    )
    assert of_rows == " ".join(aion.explain(df, **WINDOWS).split())
    with pytest.raises(errors.SchemaError, match="there is no column 'nokey'"):
        aion.windowed(events, **{**WINDOWS, "key": "nokey"})


# -- what takes longer -------------------------------------------------------------------------------------------


def as_events(rows: list[tuple[Any, ...]]) -> pa.Table:
    columns = list(zip(*rows, strict=True))
    times = pa.array([None if t is None else t * 1_000_000 for t in columns[1]], pa.int64())
    return pa.table([columns[0], times.cast(EVENTS.field("ts").type), columns[2]], schema=EVENTS)


@pytest.mark.proof
@pytest.mark.parametrize("format_", ["parquet", "csv", "json", "orc"])
def test_files_that_spark_wrote(spark: SparkSession, tmp_path: Path, format_: str) -> None:
    """In a time zone that text does not name."""
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "America/New_York")
    try:
        for rows in batches(5, count=3):
            written = spark.createDataFrame(as_events(rows)).coalesce(1).write.mode("append")
            written.option("timestampFormat", "yyyy-MM-dd HH:mm:ss.SSSSSS").format(format_).save(str(tmp_path / "in"))
        source = spark.readStream.schema(EVENTS_DDL).format(format_).option("maxFilesPerTrigger", 1)
        stock = source.option("timestampFormat", "yyyy-MM-dd HH:mm:ss.SSSSSS").load(str(tmp_path / "in"))
        files = aion.read_files(
            spark, tmp_path / "in", format=format_, schema=EVENTS_DDL, watermark=("ts", "0 s"), max_files_per_trigger=1
        )
        expected = Batches(aion.windowed(stock.withWatermark("ts", "0 seconds"), **WINDOWS), tmp_path / "rows")
        got = Batches(aion.windowed(files, **WINDOWS), tmp_path / "files")
        assert got.rows == expected.rows and sum(map(len, got.rows)) > 20
        assert got.watermarks == expected.watermarks
        also = Batches(files.to_df(), tmp_path / "df")
        assert also.rows == Batches(stock.withWatermark("ts", "0 seconds"), tmp_path / "stock").rows
    finally:
        spark.conf.set("spark.sql.session.timeZone", zone)


@pytest.mark.proof
def test_arrow_files_and_a_transform(spark: SparkSession, stream: FileStream, tmp_path: Path) -> None:
    """Its columns are those of the stream, and the watermark is on one of them."""
    (tmp_path / "arrow").mkdir()
    for number, rows in enumerate(batches(6, count=3)):
        stream.put(rows)
        path = tmp_path / "arrow" / f"{number}.arrow"
        pyarrow.feather.write_feather(as_events(rows), str(path))
        os.utime(path, (1_700_000_000 + number,) * 2)

    def later(batch: pa.RecordBatch) -> pa.RecordBatch:
        later = pc.add(batch.column("ts"), pa.scalar(7_000_000, pa.duration("us")))
        names = pc.coalesce(batch.column("k"), pa.scalar("none"))
        return pa.RecordBatch.from_arrays([names, later], names=["name", "at"]).filter(pc.field("name") != "a")

    windows = {**WINDOWS, "key": "name", "time": "at", "aggregates": {"n": A.count()}}
    files = aion.read_files(
        spark, tmp_path / "arrow", format="arrow", schema=EVENTS_DDL, watermark=("at", "1 second"), transform=later,
        where=pc.field("v").is_valid(), max_files_per_trigger=1,
    )  # fmt: skip
    rows = stream.read(EVENTS_DDL).where("v is not null").withColumn("name", F.expr("coalesce(k, 'none')"))
    rows = rows.withColumn("at", F.expr("ts + interval 7 seconds")).where("name <> 'a'").withWatermark("at", "1 second")
    expected = Batches(aion.windowed(rows, **windows), tmp_path / "rows")
    got = Batches(aion.windowed(files, **windows), tmp_path / "files")
    assert got.rows == expected.rows and got.watermarks == expected.watermarks


@pytest.mark.proof
def test_a_query_goes_on_from_its_checkpoint(spark: SparkSession, stream: FileStream, tmp_path: Path) -> None:
    """Large files, which several tasks read, merging levels, kept events, and a watermark on another column.

    Before it used read_files, the query read the same folder with Spark.
    """

    def put(seed: int) -> None:
        rows = [row for rows in batches(seed, count=3, size=3_000) for row in rows]
        table = stream.put(rows).append_column("pad", pa.array([os.urandom(1_000) for _ in rows]))
        path = max((tmp_path / "input").iterdir())
        times = path.stat()
        pq.write_table(table.append_column("arrived", table.column("ts")), path, row_group_size=500)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        assert path.stat().st_size > 8 << 20

    ddl = f"{EVENTS_DDL}, pad binary, arrived timestamp"
    windows: dict[str, Any] = {
        "key": "k",
        "time": "ts",
        "windows": aion.Tumbling("20 seconds"),
        "policy": {**BOUND, "distribution": {"merge_levels": 1}},
        "apply": aion.Apply(lambda key, window, events: {"n": sum(b.num_rows for b in events)}, "n bigint"),
    }

    def files() -> DataFrame:
        events = aion.read_files(
            spark, tmp_path / "input", schema=ddl, watermark=("arrived", "1 second"), max_files_per_trigger=1, tasks=3
        )
        return aion.windowed(events, **windows)

    rows = stream.read(ddl).withWatermark("arrived", "1 second")
    put(7)
    stopped = Sink(tmp_path / "stopped")
    stopped.run(aion.windowed(rows, **windows))
    put(8)
    stopped.run(files())
    put(9)
    got = stopped.run(files())
    alone = Sink(tmp_path / "alone").run(aion.windowed(rows, **windows))
    # A run that stops has one batch more, without data, so it executes some windows earlier.
    assert sum(r["events"] for r in got if r["kind"] == "dropped") == sum(
        r["events"] for r in alone if r["kind"] == "dropped"
    )
    panes = [last_panes(rows, "k") for rows in (got, alone)]
    assert panes[0].keys() == panes[1].keys()
    assert [row["n"] for row in panes[0].values()] == [panes[1][place]["n"] for place in panes[0]]


@pytest.mark.proof
def test_sparks_options_choose_and_order_the_files(spark: SparkSession, stream: FileStream, tmp_path: Path) -> None:
    tables = [stream.put([(name, 1000 + number, 1.0)]) for number, name in enumerate("abc")]
    (tmp_path / "input" / "other.txt").write_text("no file of the stream")
    files = aion.read_files(
        spark, tmp_path / "input", **GOOD, latest_first=True, max_files_per_trigger=1,
        options={"pathGlobFilter": "*.parquet"},
    )  # fmt: skip
    got = Batches(files.to_df(), tmp_path / "checkpoint")
    assert [rows[0].split("'k', ")[1][1] for rows in got.rows if rows] == ["c", "b", "a"]
    assert sum(counts["files"]["events"] for counts in got.counts) == len(tables)
    # The path of a glob: folders behind its first star hold values as well.
    put_days(tmp_path / "days")
    ddl = f"{EVENTS_DDL}, day int"
    globbed = aion.read_files(spark, f"{tmp_path}/days/*/*.parquet", schema=ddl, watermark=("TS", "1 s")).to_df()
    days = Batches(globbed, tmp_path / "globbed").rows[0]
    assert {row.split("'day', ")[1][0] for row in days} == {"0", "1"}
