"""``aion experiment joins``: orders and payments, joined by Aion and by stock Spark, with and without late payments.

Each batch brings one file of either side. A payment comes some batches after its order. With late rows, a part of the
payments is later than the watermark allows; stock Spark drops these without a word, and so does Flink's interval join.
Flink has such a join for inner ones only.

The leg ``open`` has one shard of Aion with a state server, without Spark: the time of a small batch where few orders
wait for their payment, and where many do. In the leg ``due``, orders turn out not to be paid, and the disk is slow:
with and without fetching ahead what is due next.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiments.shared.bench import PACKAGES, wide_console
from state_backends.thresholds import threshold

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from experiments.joins.flink import FlinkJoin

BATCH_S = 60
"""Seconds of event time in a batch."""
WITHIN_S = 300
LATE_S = 240
"""How much later than the watermark a late payment is, at least."""
LATE_SHARE = 0.05
ORDERS, PAYMENTS = "id long, ordered timestamp, price double", "id long, paid timestamp, amount double"
CONTENDERS = ("aion", "stock", "stock, in memory")
UNMEASURED = 2
"""Batches at the beginning of a run that are not measured."""
_OF_FLINK = ("flink-heap", "flink-rocksdb")
HOWS = ("inner", "left")
SMALL_ROWS, SMALL_BATCHES = 1000, 12
"""Rows of each side in a batch of the legs ``open`` and ``due``, and how many such batches there are."""
DUE_GAP_S = threshold(5, 0)
"""Between the batches of the leg ``due``: enough to read what is due from its disk."""


@dataclass(frozen=True)
class Run:
    """``rows``: of the table in the end, by a number of the pair. ``seconds``: of each batch with data."""

    contender: str
    how: str
    late_share: float
    rows: int
    with_partner: int
    seconds: list[float]


def joins(
    rows: Annotated[int, typer.Option(min=10, help="Rows of each side in a batch.")] = 100_000,
    batches: Annotated[int, typer.Option(min=4, help="Batches; the first two are not measured.")] = 12,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each; they take turns.")] = 3,
    cores: Annotated[int, typer.Option(min=1, help="Cores, and shuffle partitions.")] = 2,
    legs: Annotated[str, typer.Option(help="Some of: spark,open,due.")] = "spark,open",
    open_rows: Annotated[str, typer.Option(help="Numbers of open rows.")] = "10000,10000000",
    budget_mib: Annotated[int, typer.Option(min=16, help="The memory budget where rows are open.")] = 256,
    flink: Annotated[
        Path | None, typer.Option(help="Flink's jars, a folder or a wheel, to measure Flink, too.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for results.", file_okay=False)] = Path("out/joins"),
) -> None:
    """Join two streams with Aion and with stock Spark, with late rows and without."""
    chosen = legs.split(",")
    if not {*chosen} <= {"spark", "open", "due"}:
        raise typer.BadParameter(f"{legs}: give some of spark,open,due", param_hint="--legs")
    out.mkdir(parents=True, exist_ok=True)
    if "spark" in chosen:
        _beside_stock(rows, batches, runs, cores, out, flink_of(flink, out))
    for leg in ("open", "due"):
        if leg in chosen:
            _with_open_rows(leg, [int(number) for number in open_rows.split(",")], budget_mib, out)


def _with_open_rows(leg: str, numbers: list[int], budget_mib: int, out: Path) -> None:
    from rich.table import Table

    from experiments.joins.open_rows import READS_PER_S
    from experiments.shared import bench

    console = wide_console()
    others = {
        "open": f"{SMALL_ROWS:,} payments",
        "due": f"as many that are not paid; {READS_PER_S:,} reads a second from disk, {DUE_GAP_S} s between batches",
    }
    title = f"Batches of {SMALL_ROWS:,} new orders and {others[leg]}; budget {budget_mib} MiB"
    table = Table(title=title, title_justify="left")
    for column in ("open orders", "fetched ahead", "seconds a batch", "fastest", "slowest", "results a batch"):
        table.add_column(column, justify="right")
    found = []
    for number in numbers:
        for fetches in (None,) if leg == "open" else (False, True):
            done = _small_batches(number, budget_mib, fetches, out)
            seconds, results = [each for each, _ in done], [rows for _, rows in done]
            cells = (f"{value:.3f}" for value in (_median(seconds), min(seconds), max(seconds)))
            table.add_row(f"{number:,}", {None: "", True: "yes", False: "no"}[fetches], *cells, f"{_median(results):,}")
            found.append({"open": number, "fetches": fetches, "seconds": seconds, "results": results})
    record = {"experiment": "joins", "versions": bench.versions(PACKAGES), "machine": bench.machine(), leg: found}
    bench.write_json(out / f"{leg}.json", record)
    console.print(table)
    console.print(f"written: {out / f'{leg}.json'}", highlight=False)


def _small_batches(number: int, budget_mib: int, fetches: bool | None, out: Path) -> list[tuple[float, int]]:
    """Runs batches of the leg ``open``, or if ``fetches`` is given, of ``due``. Returns seconds and results of each."""
    from experiments.joins.open_rows import OpenRows

    done = []
    with tempfile.TemporaryDirectory(
        prefix="work-",
        dir=out.absolute(),
        ignore_cleanup_errors=True,  # the server may still write there
    ) as work:
        shard = OpenRows(number, budget_mib, Path(work), fetches=fetches)
        for _ in range(SMALL_BATCHES):
            time.sleep(0 if fetches is None else DUE_GAP_S)
            done.append(shard.batch(SMALL_ROWS) if fetches is None else shard.due(SMALL_ROWS))
        shard.close()
    return done[2:]


def flink_of(jars: Path | None, out: Path) -> FlinkJoin | None:
    """Returns Flink's program, or None if no jars are given. Raises typer.BadParameter if it cannot be compiled."""
    from experiments.joins.flink import FlinkJoin
    from experiments.shared.flink import FlinkError

    try:
        return None if jars is None else FlinkJoin(jars, out / "data")
    except FlinkError as error:
        raise typer.BadParameter(f"--flink: {error}") from None


def _beside_stock(rows: int, batches: int, runs: int, cores: int, out: Path, flink: FlinkJoin | None) -> None:
    from rich.table import Table

    from experiments.shared import bench
    from experiments.shared.flink import HOW_TO_GET
    from experiments.shared.stream import session

    console = wide_console()
    work = Path(tempfile.mkdtemp(prefix="work-", dir=out)).absolute()
    done: list[Run] = []
    truths = {}
    spark = session(cores, work, policy="standard")
    try:
        for share in (0.0, LATE_SHARE):
            truths[share] = generate(work / f"data-{share:g}", rows, batches, share)
        for turn in range(runs):
            for share in truths:
                for how in HOWS:
                    for contender in CONTENDERS:
                        run = _run(spark, work, contender, how, share, batches)
                        done.append(run)
                        console.print(f"run {turn}: {_words(run)}", highlight=False)
                for contender in _OF_FLINK if flink is not None else ():
                    assert flink is not None
                    run = _with_flink(flink, work, contender, share, batches, cores)
                    done.append(run)
                    console.print(f"run {turn}: {_words(run)}", highlight=False)
    finally:
        spark.stop()
        shutil.rmtree(work, ignore_errors=True)
    table = Table(title=f"{rows:,} rows of each side in a batch, {batches} batches", title_justify="left")
    for column in ("join", "late", "contender", "rows/s", "rows of the table", "pairs found", "pairs there are"):
        table.add_column(column, justify="right")
    found = []
    for share, pairs in truths.items():
        for how in HOWS:
            for contender in (*CONTENDERS, *_OF_FLINK):
                same = [r for r in done if (r.how, r.late_share, r.contender) == (how, share, contender)]
                if not same:
                    continue
                rate = sorted(2 * rows / _median(r.seconds[UNMEASURED:]) for r in same)[len(same) // 2]
                last = same[-1]
                cells = (how, f"{share:.0%}", contender, f"{rate:,.0f}", f"{last.rows:,}", f"{last.with_partner:,}")
                table.add_row(*cells, f"{pairs:,}")
                found.append({"how": how, "late": share, "contender": contender, "rows_per_s": rate})
    record = {"experiment": "joins", "versions": bench.versions(PACKAGES), "machine": bench.machine(), "rates": found}
    bench.write_json(out / "joins.json", {**record, "runs": [vars(run) for run in done]})
    console.print(table)
    console.print("rows/s: rows of both sides over the time of a batch, the median of the batches after the second.")
    console.print(HOW_TO_GET if flink is None else "Flink has no batches: all rows after those of the second batch.")
    console.print(f"written: {out / 'joins.json'}", highlight=False)


def generate(folder: Path, rows: int, batches: int, late_share: float) -> int:
    """Writes the files of both sides, one of each for a batch. Returns how many pairs there are."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(1)
    begin = 1_767_225_600 * 1_000_000
    ids = np.arange(rows * batches)
    ordered = begin + ids * (BATCH_S * 1_000_000) // rows
    # Each order is paid once, a while later; a late payment reaches Spark some batches after its time.
    paid = ordered + random.integers(1, (WITHIN_S - LATE_S) * 1_000_000, len(ids))
    late = random.random(len(ids)) < late_share
    comes = paid + late * (LATE_S + 2 * BATCH_S) * 1_000_000
    batch_of = (comes - begin) // (BATCH_S * 1_000_000)
    for side in ("orders", "payments"):
        (folder / side).mkdir(parents=True, exist_ok=True)
    stamp = pa.timestamp("us", "UTC")
    for batch in range(batches):
        some = ids[batch * rows : (batch + 1) * rows]
        orders = {"id": some, "ordered": pa.array(ordered[some]).cast(stamp), "price": random.random(len(some))}
        pq.write_table(pa.table(orders), folder / "orders" / f"{batch:04d}.parquet")
        came = np.flatnonzero(batch_of == batch)
        payments = {"id": came, "paid": pa.array(paid[came]).cast(stamp), "amount": random.random(len(came))}
        pq.write_table(pa.table(payments), folder / "payments" / f"{batch:04d}.parquet")
    return int((batch_of < batches).sum())


def _run(spark: SparkSession, work: Path, contender: str, how: str, share: float, batches: int) -> Run:
    folder = work / f"data-{share:g}"
    orders = _stream(spark, folder / "orders", ORDERS, "ordered")
    payments = _stream(spark, folder / "payments", PAYMENTS, "paid")
    from experiments.shared.stream import spark_settings

    table: Counter[tuple[int, bool]] = Counter()
    ours = contender == "aion"
    joined = _with_aion(orders, payments, how) if ours else _with_spark(orders, payments, how)
    keep = _keep_aion if ours else _keep_spark

    def write(batch: DataFrame, number: int) -> None:
        keep(batch, table)

    checkpoint = work / "checkpoint"
    query = joined.writeStream.foreachBatch(write).option("checkpointLocation", str(checkpoint))
    with spark_settings(spark, _IN_MEMORY if contender == "stock, in memory" else {}):
        running = query.trigger(availableNow=True).start()
        running.awaitTermination()
    with_rows = [report for report in running.recentProgress if report["numInputRows"]]
    seconds = [report["durationMs"]["triggerExecution"] / 1000 for report in with_rows]
    shutil.rmtree(checkpoint, ignore_errors=True)
    there = Counter({key: n for key, n in table.items() if n})
    pairs = sum(n for (_, has_partner), n in there.items() if has_partner)
    return Run(contender, how, share, sum(there.values()), pairs, seconds[:batches])


def _with_flink(flink: FlinkJoin, work: Path, contender: str, share: float, batches: int, cores: int) -> Run:
    """Runs Flink's interval join over the same rows. It has no batches, so all have the same time."""
    from experiments.joins.flink import write_rows

    written = write_rows(work / f"data-{share:g}", work / "rows.bin", batches, unmeasured=UNMEASURED)
    seconds, pairs = flink.run(contender, work / "rows.bin", written, WITHIN_S, cores)
    each = seconds / (batches - UNMEASURED)
    return Run(contender, "inner", share, pairs, pairs, [each] * batches)


def _stream(spark: SparkSession, folder: Path, schema: str, time: str) -> DataFrame:
    reader = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
    return reader.parquet(str(folder)).withWatermark(time, "0 seconds")


def _with_aion(orders: DataFrame, payments: DataFrame, how: Any) -> DataFrame:
    import aion

    return aion.join(
        orders, payments, key="id", within=("0 seconds", f"{WITHIN_S} seconds"), how=how, bound=f"{2 * LATE_S} seconds"
    )


def _with_spark(orders: DataFrame, payments: DataFrame, how: Any) -> DataFrame:
    from pyspark.sql import functions as F

    condition = (
        (F.col("o.id") == F.col("p.id"))
        & (F.col("paid") >= F.col("ordered"))
        & (F.col("paid") <= F.col("ordered") + F.expr(f"interval {WITHIN_S} seconds"))
    )
    left, right = orders.alias("o"), payments.alias("p")
    return left.join(right, condition, how).select("o.id", "ordered", "price", "paid", "amount")


def _keep_aion(batch: DataFrame, table: Counter[tuple[int, bool]]) -> None:
    found = batch.select("id", "paid", "kind").toArrow()
    for kind, sign in (("on_time", 1), ("late", 1), ("retracted", -1)):
        _count(found.filter(_equals(found["kind"], kind)), sign, table)


def _keep_spark(batch: DataFrame, table: Counter[tuple[int, bool]]) -> None:
    _count(batch.select("id", "paid").toArrow(), 1, table)


def _count(found: Any, sign: int, table: Counter[tuple[int, bool]]) -> None:
    has_partner = found["paid"].is_valid().to_pylist()
    for key in zip(found["id"].to_pylist(), has_partner, strict=True):
        table[key] += sign


def _equals(column: Any, value: str) -> Any:
    import pyarrow.compute as pc

    return pc.equal(column, value)


_IN_MEMORY = {
    "spark.sql.streaming.stateStore.providerClass": (
        "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
    ),
    "spark.sql.streaming.stateStore.checkpointFormatVersion": "1",
}
"""Spark's default: all state is in the memory of the JVM. The other contender has it in RocksDB."""


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _words(run: Run) -> str:
    return (
        f"{run.how}, {run.late_share:.0%} late, {run.contender}: {_median(run.seconds[UNMEASURED:]):.2f} s a batch, "
        f"{run.with_partner:,} pairs"
    )
