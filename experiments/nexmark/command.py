"""``aion experiment nexmark``: rates and results of Nexmark's queries on Aion, on stock Spark, and on Flink."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from experiments.nexmark.events import Stream
    from experiments.nexmark.flink import Flink
    from experiments.nexmark.shared import Query, Row

CONTENDERS = {"aion": "Aion", "spark": "stock Spark", "flink-heap": "Flink, heap", "flink-rocksdb": "Flink, RocksDB"}
SKIPPED = 2


@dataclass(frozen=True, slots=True)
class Result:
    """One run of one query. ``right``: whether its last results are those of all events; ``rows``: how many it has."""

    query: str
    contender: str
    round: int
    steady_events_per_s: float
    wall_s: float
    rows: int
    right: bool


def nexmark(
    queries: Annotated[str, typer.Option(help="Some of: q5,q7,q8,q11,q12,q3,q4,q8-join,q9.")] = "",
    contenders: Annotated[str, typer.Option(help="Some of: aion,spark,flink-heap,flink-rocksdb.")] = "",
    events: Annotated[int, typer.Option(min=100, help="Events: of 50, a person, three auctions, 46 bids.")] = 2_000_000,
    per_second: Annotated[int, typer.Option(min=1, help="Events in a second of event time.")] = 10_000,
    batches: Annotated[int, typer.Option(min=SKIPPED + 1, help="Batches; the first two are not measured.")] = 12,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each query, in turns.")] = 1,
    cores: Annotated[int, typer.Option(min=1, help="Cores, and shuffle partitions.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the events.")] = 1,
    flink: Annotated[Path | None, typer.Option(help="Flink's jars, a folder or a wheel, to measure Flink, too.")] = (
        None
    ),
    out: Annotated[Path, typer.Option(help="Folder for results.", file_okay=False)] = Path("out/nexmark"),
) -> None:
    """Nexmark's windows, sessions and joins: rates, and results compared with a computation over all events."""
    from experiments.nexmark.events import Stream
    from experiments.nexmark.queries import QUERIES
    from experiments.shared import bench
    from experiments.shared.bench import PACKAGES, wide_console
    from experiments.shared.flink import HOW_TO_GET

    console = wide_console()
    chosen = bench.pick(queries, list(QUERIES))
    wanted = bench.pick(contenders, [name for name in CONTENDERS if flink is not None or not name.startswith("flink")])
    stream = Stream(events, per_second, batches, seed)
    program = flink_of(flink, out)
    if program is None:
        console.print(HOW_TO_GET, highlight=False, soft_wrap=True)
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="work-", dir=out)).absolute()
    try:
        say = partial(console.print, highlight=False)
        results = measure(stream, chosen, wanted, runs, cores, work, say, program)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    bench.write_json(
        out / "nexmark.json",
        {
            "experiment": "nexmark",
            "settings": {**asdict(stream), "cores": cores, "runs": runs},
            "versions": bench.versions(PACKAGES),
            "machine": bench.machine(),
            "results": [asdict(result) for result in results],
        },
    )
    for text in ratios(results):
        console.print(text, highlight=False)
    console.print(f"written: {out / 'nexmark'}.json", highlight=False)
    if not all(result.right for result in results):
        raise typer.Exit(1)


def flink_of(jars: Path | None, out: Path) -> Flink | None:
    """Flink's program, if there are jars. Raises typer.BadParameter if they are not Flink's, or without a compiler."""
    from experiments.nexmark.flink import Flink
    from experiments.shared.flink import FlinkError

    try:
        return None if jars is None else Flink(jars, out / "data")
    except FlinkError as error:
        raise typer.BadParameter(f"--flink: {error}") from None


def measure(
    stream: Stream,
    queries: list[str],
    contenders: list[str],
    runs: int,
    cores: int,
    work: Path,
    say: Callable[[str], None],
    flink: Flink | None = None,
) -> list[Result]:
    from experiments.nexmark.events import generate, write
    from experiments.nexmark.flink import write_events
    from experiments.nexmark.joins import JOINS
    from experiments.nexmark.queries import QUERIES
    from experiments.shared.flink import BACKENDS
    from experiments.shared.stream import session

    table = generate(stream)
    folder = work / "events"
    write(stream, table, folder)
    if flink is not None:
        write_events(table, work / "events.bin")
    spark = session(cores, work, policy="standard")
    results = []
    try:
        for name in queries:
            query = QUERIES[name]
            truth = query.truth(table)
            # Flink's program has no joins.
            able = [contender for contender in contenders if contender not in BACKENDS or name not in JOINS]
            for round_ in range(runs):
                for contender in able:
                    if contender in BACKENDS:
                        assert flink is not None, "without --flink, Flink cannot be chosen"
                        skipped = stream.events * SKIPPED // stream.batches
                        run = flink.run(name, contender, work / "events.bin", stream.events, skipped, cores)
                        found = query.newest(run.rows)
                        rates = (run.steady_events_per_s, run.wall_s)
                        result = Result(name, contender, round_, *rates, len(found), found == truth)
                    else:
                        checkpoint = work / f"{name}-{contender}-{round_}"
                        result = _run(spark, name, query, contender, round_, folder, checkpoint, truth)
                        shutil.rmtree(checkpoint, ignore_errors=True)
                    results.append(result)
                    right = "" if result.right else ", and results that are NOT those of all events"
                    say(
                        f"{name:<7} {query.asks:<32} {contender:<13} {result.steady_events_per_s:>12,.0f} events/s, "
                        f"{result.wall_s:6.1f} s in all, {result.rows:,} results{right}"
                    )
    finally:
        spark.stop()
    return results


def _run(
    spark: SparkSession,
    name: str,
    query: Query,
    contender: str,
    round_: int,
    folder: Path,
    checkpoint: Path,
    truth: set[Row],
) -> Result:
    from experiments.nexmark.events import DDL
    from experiments.nexmark.shared import DELAY
    from experiments.shared import bench

    events = spark.readStream.schema(DDL).option("maxFilesPerTrigger", 1).parquet(str(folder))
    if query.by_arrival:
        from pyspark.sql import functions as F

        events = events.withColumn("at", F.current_timestamp()).withWatermark("at", "0 seconds")
    else:
        events = events.withWatermark("ts", DELAY)
    result = query.aion(events) if contender == "aion" else query.spark(events)
    rows: list[Mapping[str, Any]] = []

    def take(batch: DataFrame, number: int) -> None:
        rows.extend(batch.toArrow().to_pylist())

    begin = time.perf_counter()
    running = (
        result.writeStream.option("checkpointLocation", str(checkpoint))
        .outputMode("append" if contender == "aion" else query.mode)
        .trigger(availableNow=True)
        .foreachBatch(take)
        .start()
    )
    running.awaitTermination()
    wall_s = time.perf_counter() - begin
    progress = [dict(report) for report in running.recentProgress]
    # The last two files only move the watermark. A join reads each twice.
    rate = bench.steady_rate([report for report in progress if report["numInputRows"] > 6], SKIPPED)
    kept = [row for row in rows if row.get("kind") != "dropped"]
    found = query.newest(kept)
    return Result(name, contender, round_, rate, wall_s, len(found), found == truth)


def ratios(results: list[Result]) -> list[str]:
    """How much faster Aion is than each other contender, by query."""
    from statistics import median

    said = []
    for name in dict.fromkeys(result.query for result in results):
        rates = {
            contender: median(of)
            for contender in CONTENDERS
            if (of := [r.steady_events_per_s for r in results if (r.query, r.contender) == (name, contender)])
        }
        if "aion" in rates:
            said += [
                f"{name}: Aion over {CONTENDERS[other]} {rates['aion'] / rates[other]:.2f}"
                for other in rates
                if other != "aion"
            ]
    return said
