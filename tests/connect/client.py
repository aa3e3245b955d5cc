"""Programs of a client. Each does something in a folder, in a session with a URL, and prints what came out."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import write_deltalake
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import aion
from aion import aggregates as A
from aion.errors import AionError
from tests.connect.events import DDL, put
from tests.counters import Counter, FrameCounter

WINDOWS: dict[str, Any] = {"key": "k", "time": "ts", "windows": aion.Tumbling("1 minute"), "bound": "1 hour"}
COUNTS: dict[str, Any] = {"aggregates": {"n": A.count()}, "trigger": "every_batch"}
KEPT: dict[str, Any] = {
    "windows": {"minute": aion.Tumbling("1 minute"), "session": aion.Session("30 seconds")},
    "aggregates": {"n": A.count(), "values": A.collect_list("v"), "median": A.median("v")},
    "bound": "5 minutes",
    "trigger": "every_batch",
}


def session(url: str, folder: Path) -> SparkSession:
    builder = SparkSession.builder
    if url.startswith("sc://"):
        builder = builder.remote(url)
    else:
        builder = builder.master(url).config("spark.sql.shuffle.partitions", "2").config("spark.ui.enabled", "false")
    return aion.configure(builder, state_dir=str(folder / "state")).getOrCreate()


def events(spark: SparkSession, folder: Path) -> DataFrame:
    source = spark.readStream.schema(DDL).option("maxFilesPerTrigger", 1).parquet(str(folder / "in"))
    return source.withWatermark("ts", "0 seconds")


def run(df: DataFrame, folder: Path, name: str = "out") -> list[dict[str, Any]]:
    """Runs what is there, and returns all rows that were ever written."""
    writer = df.writeStream.format("parquet").option("path", str(folder / name))
    writer = writer.option("checkpointLocation", str(folder / f"{name}.checkpoint")).trigger(availableNow=True)
    writer.start().awaitTermination()
    rows = df.sparkSession.read.parquet(str(folder / name)).toArrow().to_pylist()
    return sorted(({name: str(value) for name, value in row.items()} for row in rows), key=str)


def refusal(call: Callable[[], Any]) -> str:
    """Returns the kind of an error, and the first line of its message."""
    try:
        call()
    except (AionError, AnalysisException) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "none"


# -- what a test asks for ------------------------------------------------------------------------------


def tolls(spark: SparkSession, folder: Path, batches: list[Any]) -> dict[str, Any]:
    """Counts events in a table, as a user would."""
    put(folder, batches)
    panes = aion.panes(aion.windowed(events(spark, folder), **WINDOWS, **COUNTS))
    writer = panes.writeStream.foreachBatch(aion.sinks.upsert(f"sqlite:///{folder / 'tolls.db'}", "tolls"))
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True).start()
    query.awaitTermination()
    with sqlite3.connect(folder / "tolls.db") as database:
        rows = database.execute("SELECT k, window_start, n, pane FROM tolls ORDER BY 2, 1").fetchall()
    state = sorted(path.name for path in (folder / "state").glob("[!.]*"))
    server = aion.metrics.state(spark)
    return {
        "rows": rows, "query": str(query.id), "state": state, "progress": aion.progress(query),
        "operators": [] if server is None else list(server.operators),
    }  # fmt: skip


def refused(spark: SparkSession, folder: Path) -> list[str]:
    """What cannot work, or is wrong."""
    put(folder, [[("a", 5, 1)]])
    df = events(spark, folder)
    bare = spark.readStream.schema(DDL).parquet(str(folder / "in"))
    builder = SparkSession.builder.remote("sc://localhost")
    twice = aion.windowed(df, **WINDOWS, **COUNTS).union(aion.windowed(df, **WINDOWS, **COUNTS))
    later = aion.windowed(df, **WINDOWS, **COUNTS).withWatermark("window_start", "0 seconds")
    calls: list[Callable[[], Any]] = [
        lambda: aion.configure(builder, stateful=True),
        lambda: aion.windowed(bare, **WINDOWS, **COUNTS),
        lambda: aion.watermark(bare, "ts", "1 second", idle_after="1 minute"),
        lambda: aion.migrate(spark, str(folder / "old"), str(folder / "new")),
        lambda: aion.read_state(spark, str(folder / "old")),
        lambda: run(twice, folder, "twice"),
        lambda: run(later, folder, "later"),
        lambda: aion.windowed(df, **WINDOWS, **COUNTS).show(),
        lambda: nowhere(spark, df),
    ]
    return [refusal(call) for call in calls]


def columns(spark: SparkSession, folder: Path) -> list[dict[str, Any]]:
    """The key is an expression, and the time the column with the watermark."""
    key = [F.upper("k").alias("upper"), F.col("v")]
    usual = {name: value for name, value in WINDOWS.items() if name not in ("key", "time")}
    return run(aion.windowed(events(spark, folder), key=key, **usual, **COUNTS), folder, "columns")


def without_checkpoint(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """A table in memory needs no checkpoint of its own; a sink of Aion does."""
    put(folder, [[("a", 5, 1)], [("a", 100, 1)]])
    panes = aion.panes(aion.windowed(events(spark, folder), **WINDOWS, **COUNTS))
    panes.writeStream.format("memory").queryName("tolls").trigger(availableNow=True).start().awaitTermination()
    sink = aion.sinks.upsert(f"sqlite:///{folder / 'tolls.db'}", "tolls")
    failed = panes.writeStream.foreachBatch(sink).trigger(availableNow=True).start()
    try:
        failed.awaitTermination()
    except PySparkException as error:
        said = str(error)
    return {"rows": [row.n for row in spark.table("tolls").collect()], "said": said}


def nowhere(spark: SparkSession, df: DataFrame) -> DataFrame:
    spark.conf.unset("spark.aion.state.dir")
    return aion.windowed(df, **WINDOWS, **COUNTS)


def kept(spark: SparkSession, folder: Path) -> list[dict[str, Any]]:
    """All rows of windows that keep their events, dropped ones included."""
    return run(aion.windowed(events(spark, folder), **WINDOWS | KEPT), folder, "kept")


def chained(spark: SparkSession, folder: Path) -> list[dict[str, Any]]:
    """Windows of windows, behind a watermark of Aion, with a user's function."""

    def spread(key: Any, window: Any, events: Any) -> dict[str, Any]:
        values = [value for batch in events for value in batch.column("v").to_pylist()]
        return {"n": len(values), "spread": max(values) - min(values)}

    source = spark.readStream.schema(DDL).option("maxFilesPerTrigger", 1).parquet(str(folder / "in"))
    marked = aion.watermark(source, "ts", "0 seconds", max_ahead="1 hour")
    inner = aion.windowed(marked, **WINDOWS, apply=aion.Apply(spread, "n bigint, spread double"), trigger="every_batch")
    outer = aion.windowed(
        aion.panes(inner), key="k", time="window_end", windows=aion.Tumbling("10 minutes"), name="outer",
        aggregates={"n": A.sum("n"), "spread": A.max("spread")}, trigger="every_batch",
    )  # fmt: skip
    return run(outer, folder, "chained")


def joined(spark: SparkSession, folder: Path) -> list[dict[str, Any]]:
    """Minutes of windows with later events of the same key, by a condition in SQL; what has no partner comes early."""
    minutes = aion.windowed(events(spark, folder), **WINDOWS, **COUNTS, name="minutes")
    later = events(spark, folder).withColumnRenamed("v", "value")
    pairs = aion.join(
        minutes, later, key="k", time=("window_end", None), within=("0 seconds", "10 minutes"), how="left",
        on="value >= n", bound=(None, "2 hours"), early="batch",
    )  # fmt: skip
    return run(pairs.drop("pair", "pane_seq"), folder, "joined")  # these are others in each run


def files(spark: SparkSession, folder: Path) -> list[dict[str, Any]]:
    """The same events, which the children read themselves."""
    read = aion.read_files(
        spark,
        folder / "in",
        schema=DDL,
        watermark=("ts", "0 seconds"),
        max_files_per_trigger=1,
        where=pc.field("v") > 1,
    )
    return run(aion.windowed(read, **WINDOWS | KEPT), folder, "files")


def lines(spark: SparkSession, folder: Path) -> list[dict[str, Any]]:
    """Events in lines of text."""
    (folder / "lines").mkdir(exist_ok=True)
    (folder / "lines" / "1.csv").write_text("k;ts;v\na;2026-01-01T00:00:05Z;1\nb;2026-01-01T00:02:00Z;2\n")
    read = aion.read_files(
        spark,
        folder / "lines",
        schema=DDL,
        watermark=("ts", "0 seconds"),
        format="csv",
        options={"header": True, "sep": ";"},
    )
    return run(aion.panes(aion.windowed(read, **WINDOWS, **COUNTS)), folder, "from-lines")


def table(spark: SparkSession, folder: Path) -> list[dict[str, Any]]:
    """Events in a table of Delta Lake."""
    times = pa.array([5_000_000, 120_000_000], pa.timestamp("us", "UTC"))
    write_deltalake(folder / "table", pa.table({"k": ["a", "b"], "ts": times, "v": [1.0, 2.0]}), mode="ignore")
    read = aion.read_files(spark, folder / "table", format="delta", watermark=("ts", "0 seconds"))
    return run(aion.panes(aion.windowed(read, **WINDOWS, **COUNTS)), folder, "from-table")


def processors(spark: SparkSession, folder: Path) -> list[list[dict[str, Any]]]:
    """Counts with stateful processors of both kinds, one of them from an initial state."""
    first = aion.group_by(spark.createDataFrame([("a", 100)], "k string, n long"), "k")
    rows, frames = (aion.group_by(events(spark, folder), "k", name=name) for name in ("rows", "frames"))
    output = "k string, n long"
    return [
        run(rows.transformWithState(Counter(), output, "Append", "none", first), folder, "rows"),
        run(frames.transformWithStateInPandas(FrameCounter(), output, "Append", "none"), folder, "frames"),
    ]


def partitions(spark: SparkSession, folder: Path, counts: list[int]) -> dict[str, Any]:
    """Goes on with other numbers of partitions, and then with another definition."""
    for number in counts:
        spark.conf.set("spark.sql.shuffle.partitions", str(number))
        put(folder, [[(f"key-{i}", 10, 1) for i in range(20)], [("z", 100 + number, 1)]])
        rows = run(aion.panes(aion.windowed(events(spark, folder), **WINDOWS, **COUNTS)), folder)
    last = {row["k"]: row["n"] for row in sorted(rows, key=lambda row: int(row["pane"])) if row["k"] != "z"}
    other = WINDOWS | {"emit": "final"}
    refused = refusal(lambda: run(aion.windowed(events(spark, folder), **other, **COUNTS), folder))
    put(folder, [[("z", 500, 1)], [("z", 2000, 1)], [("z", 2001, 1)]])
    evolved = WINDOWS | {"windows": aion.Tumbling("2 minutes")}
    rows = run(aion.panes(aion.windowed(events(spark, folder), **evolved, **COUNTS)), folder)
    return {
        "counts": sorted(set(last.values())),
        "other": refused,
        "windows": sorted({row["window"] for row in rows}),
    }


def at_once(spark: SparkSession, folder: Path) -> dict[str, list[Any]]:
    """Two queries with operators of the same name, each with a sink, at the same time."""
    queries = []
    for name in ("one", "two"):
        panes = aion.panes(aion.windowed(events(spark, folder), **WINDOWS, **COUNTS))
        writer = panes.writeStream.foreachBatch(aion.sinks.upsert(f"sqlite:///{folder / name}.db", "tolls"))
        queries.append(writer.option("checkpointLocation", str(folder / name)).trigger(availableNow=True).start())
    found = {}
    for name, query in zip(("one", "two"), queries, strict=True):
        query.awaitTermination()
        with sqlite3.connect(folder / f"{name}.db") as database:
            found[name] = database.execute("SELECT k, window_start, n FROM tolls ORDER BY 2, 1").fetchall()
    return found


def endless(spark: SparkSession, folder: Path) -> None:
    """Runs until the server is killed. Says which batch is done."""
    panes = aion.panes(aion.windowed(events(spark, folder), **WINDOWS, **COUNTS))
    sink = aion.sinks.upsert(f"sqlite:///{folder / 'tolls.db'}", "tolls")

    def write(batch: DataFrame, number: int) -> None:
        sink(batch, number)
        (Path(str(folder)) / f"batch-{number}").touch()

    panes.writeStream.foreachBatch(write).option("checkpointLocation", str(folder / "checkpoint")).start()


def main(url: str, what: str, folder: str, arguments: str) -> None:
    answer = globals()[what](session(url, Path(folder)), Path(folder), **json.loads(arguments))
    print(json.dumps(answer, default=str))


if __name__ == "__main__":
    main(*sys.argv[1:])
