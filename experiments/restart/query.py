"""The query that is restarted, in a process of its own: ``python -m experiments.restart.query REQUEST``.

It reads a folder of small files, one file per batch, until there are no more, and turns the rows into large events, so
that only the state is large. All events of a file arrive at one time. Their event time, *due*, is chosen freely. So the
watermark, which follows the arrival, only passes the windows that are to be executed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = "id bigint, key bigint, due timestamp, arrived timestamp"
KEYS = 100
DIGEST_BYTES = 128
"""A payload repeats the hexadecimal SHA-512 of the event's id, which has this many bytes."""
MINUTE_US = 60_000_000
ORIGIN_US = 1_700_000_040 * 1_000_000  # a whole minute


@dataclass(frozen=True, slots=True)
class Task:
    """``folder``: contains ``input``, ``checkpoint`` and, if ``state_dir`` is None, ``state``.

    ``hands_over``: large blocks are in files of the children, and not in those of RocksDB.
    """

    folder: str
    payload_bytes: int
    policy: str
    cores: int
    state_dir: str | None = None
    hands_over: bool = True


@dataclass(frozen=True, slots=True)
class Answer:
    """``first_pane_s``: seconds from the query's start until its sink got a pane; None if it got none.

    ``requests``: to the object store until then, by class, and their bytes; empty if the state is in a folder.
    """

    application: str
    first_pane_s: float | None
    panes: int
    windows_us: list[int]
    seconds: float
    batches: list[dict[str, Any]]
    rebuilds: int
    blocks: int
    disk_bytes: int
    peak_m_bucket_bytes: int
    requests: dict[str, int] = field(default_factory=dict)


def events(first_id: int, count: int, due_us: int, windows: int, arrived_us: int) -> pa.Table:
    """``count`` events that all arrive at ``arrived_us``, over ``windows`` windows of a minute from ``due_us`` on."""
    ids = np.arange(first_id, first_id + count)
    due = due_us + ids % windows * MINUTE_US + ids % MINUTE_US
    time_type = pa.timestamp("us", tz="UTC")
    return pa.table(
        {
            "id": ids,
            "key": ids % KEYS,
            "due": pa.array(due, time_type),
            "arrived": pa.array(np.full(count, arrived_us), time_type),
        }
    )


def size_of(key: tuple[Any, ...], window: Any, batches: Iterator[pa.RecordBatch]) -> dict[str, int]:
    """The values of a pane: the number of events, and the bytes of their payloads."""
    import pyarrow.compute as pc

    n = total = 0
    for batch in batches:
        n += batch.num_rows
        total += pc.sum(pc.binary_length(batch["payload"])).as_py() or 0
    return {"n": n, "bytes": total}


def panes_of(spark: SparkSession, request: Task) -> DataFrame:
    from pyspark.sql import functions as F

    import aion

    files = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(f"{request.folder}/input")
    digest = F.sha2(F.col("id").cast("string"), 512)
    large = files.withColumn("payload", F.repeat(digest, request.payload_bytes // DIGEST_BYTES))
    return aion.windowed(
        large.withWatermark("arrived", "0 seconds"),
        key="key",
        time="due",
        windows=aion.Tumbling("1 minute"),
        apply=aion.Apply(size_of, "n bigint, bytes bigint"),
    )


def run(request: Task) -> Answer:
    from aion import metrics
    from experiments.shared.stream import session

    more = {} if request.hands_over else {"spark.aion.distribution.hand_over": "null"}
    if request.state_dir is not None:
        more["spark.aion.state.dir"] = request.state_dir
    spark = session(request.cores, Path(request.folder), policy=request.policy, memory="2g", more=more)
    seen: list[float] = []
    found: list[Any] = []
    asked: dict[str, int] = {}

    def sink(df: DataFrame, batch: int) -> None:
        rows = df.select("window_start", "kind").collect()
        if rows:
            seen.append(time.perf_counter())
            if len(seen) == 1 and (now := metrics.state(spark)) is not None:
                for operators in now.queries.values():
                    asked.update(operators["windowed"].get("requests_total", {}))
            found.extend(rows)

    writer = panes_of(spark, request).writeStream.foreachBatch(sink)
    writer = writer.option("checkpointLocation", f"{request.folder}/checkpoint").trigger(availableNow=True)
    begin = time.perf_counter()
    query = writer.start()
    query.awaitTermination()
    seconds = time.perf_counter() - begin
    state = metrics.state(spark)
    assert state is not None
    answer = Answer(
        application=spark.sparkContext.applicationId,
        first_pane_s=seen[0] - begin if seen else None,
        panes=len(found),
        windows_us=sorted({round(row["window_start"].timestamp() * 1e6) for row in found}),
        seconds=seconds,
        batches=[{"rows": p["numInputRows"], "durationMs": p["durationMs"]} for p in query.recentProgress],
        rebuilds=state.rebuilds,
        blocks=state.blocks,
        disk_bytes=state.disk_bytes,
        peak_m_bucket_bytes=state.peak_m_bucket_bytes,
        requests=asked,
    )
    spark.stop()
    return answer


if __name__ == "__main__":
    os.environ["TZ"] = "UTC"  # for the timestamps that Spark returns
    time.tzset()
    print(json.dumps(asdict(run(Task(**json.loads(sys.argv[1]))))))
