"""A damaged version: the query says which, `aion inspect --repair` sets it back, and it goes on as if undisturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from typer.testing import CliRunner

import aion
from aion import aggregates as A
from aion.cli import app
from tests.spark.conftest import EVENTS_DDL, FileStream, last_panes

BATCHES = [
    [("a", 1.0, 1.0), ("b", 2.0, 2.0)],
    [("a", 12.0, 3.0), ("c", 11.0, 4.0)],
    [("a", 3.0, 5.0), ("b", 25.0, 6.0)],  # the first one is late
    [("c", 4.0, 7.0), ("a", 36.0, 8.0)],
    [("b", 13.0, 9.0), ("a", 47.0, 1.0)],
]


class Panes:
    """An idempotent sink: the rows of each batch; a batch that is run again replaces what it gave before."""

    def __init__(self, folder: Path, stream: FileStream, state: Path) -> None:
        self.checkpoint, self._stream, self._state = folder / "checkpoint", stream, state
        self.of_batch: dict[int, list[dict[str, Any]]] = {}

    def run(self, spark: SparkSession) -> None:
        events = self._stream.read(EVENTS_DDL).withWatermark("ts", "1 second")
        before = spark.conf.get("spark.aion.state.dir")
        spark.conf.set("spark.aion.state.dir", str(self._state))
        try:
            panes = aion.windowed(
                events,
                key="k",
                time="ts",
                windows=aion.Tumbling("10 seconds"),
                aggregates={"n": A.count(), "total": A.sum("v")},
            )
        finally:
            spark.conf.set("spark.aion.state.dir", before)
        # Rows as plain numbers: the session's time zone is none of this test's business.
        rows = panes.withColumn("window_start", F.unix_micros("window_start")).drop("window_end", "event_time")
        query = (
            rows.writeStream.foreachBatch(self._keep)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    def _keep(self, rows: DataFrame, batch: int) -> None:
        self.of_batch[batch] = [row.asDict() for row in rows.collect()]

    @property
    def last(self) -> dict[Any, dict[str, Any]]:
        return last_panes([row for batch in sorted(self.of_batch) for row in self.of_batch[batch]], "k")


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x55
    path.write_bytes(content)


@pytest.mark.proof
def test_a_query_is_set_back_to_what_is_whole(spark: SparkSession, stream: FileStream, tmp_path: Path) -> None:
    state = tmp_path / "state"
    panes = Panes(tmp_path, stream, state)
    for batch in BATCHES:
        stream.put(batch)
    panes.run(spark)
    undisturbed = panes.last
    newest = max(int(p.name.partition("-")[0]) for p in state.glob("*/*/*/manifests/*.json"))
    clean = CliRunner().invoke(app, ["inspect", str(state)])
    assert clean.exit_code == 0 and "every version is whole" in clean.output, clean.output
    damaged = sorted(state.glob(f"*/*/*/manifests/{newest:010d}-*.json"))[:1]
    damaged += [max(folder.glob("*.sst")) for folder in sorted(state.glob("*/*/*/files"))[-1:]]
    for path in damaged:
        damage(path)
    found = CliRunner().invoke(app, ["inspect", str(state)])
    assert found.exit_code == 1
    said = "".join(found.output.split())
    for path in damaged:
        assert "".join(str(path.relative_to(state)).split()) in said, found.output
    mended = CliRunner().invoke(app, ["inspect", str(state), "--repair", "--checkpoint", str(panes.checkpoint)])
    assert mended.exit_code == 0, mended.output
    assert "replay:" in mended.output and "set aside:" in mended.output, mended.output
    assert CliRunner().invoke(app, ["inspect", str(state)]).exit_code == 0
    left = max(int(p.name) for p in (panes.checkpoint / "commits").iterdir() if p.name.isdecimal())
    assert left < newest
    stream.put([("c", 14.0, 2.0), ("b", 58.0, 3.0)])
    panes.run(spark)
    assert max(panes.of_batch) > left
    again = panes.last
    changed = {key for key in undisturbed if again[key] != undisturbed[key]}
    assert all(again[key]["n"] >= undisturbed[key]["n"] for key in undisturbed), "nothing is lost"
    assert {(key[0], key[2]) for key in changed} <= {("c", 10_000_000), ("a", 40_000_000), ("b", 50_000_000)}
    truth: dict[tuple[str, int], list[float]] = {}
    for k, ts, v in [*(row for batch in BATCHES for row in batch), ("c", 14.0, 2.0)]:
        truth.setdefault((k, int(ts // 10) * 10_000_000), []).append(v)
    for key, row in again.items():
        assert (row["n"], row["total"]) == (len(values := truth[key[0], key[2]]), sum(values)), key
