"""Calendar windows on Spark: a query is restarted, and the rules of its zone are others by then."""

from __future__ import annotations

import zoneinfo
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import aion
from aion import aggregates as A
from aion.spark.taking_over.fork import fork
from tests.core.slicing.test_calendar_rules import SUMMER, ZONE, put
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink

HOUR_S = 3600
NOON = SUMMER // 1_000_000 + 12 * HOUR_S


@pytest.mark.proof
@pytest.mark.parametrize("forked", [False, True])
def test_windows_that_live_keep_their_edges_over_a_restart(
    spark: SparkSession, stream: FileStream, sink: Sink, tmp_path: Path, forked: bool
) -> None:
    """The rules by which they were made go with the checkpoint into its copy."""
    folder, before = tmp_path / "zones", zoneinfo.TZPATH
    folder.mkdir()

    def run(clocks: str) -> list[tuple[int, int, str, int]]:
        put(folder, clocks)
        zoneinfo.reset_tzpath(to=[str(folder)])
        try:
            panes = aion.windowed(
                stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"),
                time="ts",
                windows={"day": aion.Calendar("1 day", ZONE), "hours": aion.Tumbling("5 hours")},
                aggregates={"n": A.count()},
                policy={"lateness": {"initial_bound": "3 days"}, "state": {"shards": 1}},
            )
            rows = sink.run(panes)
        finally:
            zoneinfo.reset_tzpath(to=before)
        epoch = SUMMER // 1_000_000
        return [
            (
                round((row["window_start"].timestamp() - epoch) / HOUR_S),
                round((row["window_end"].timestamp() - epoch) / HOUR_S),
                row["kind"],
                row["n"],
            )
            for row in rows
            if row["window"] == "day"
        ]

    stream.put([("a", NOON, 1.0), ("a", NOON + 30 * HOUR_S, 1.0)])
    assert run("Europe/Berlin") == [(-2, 22, "on_time", 1)]
    if forked:
        original, sink.folder = sink.folder / "checkpoint", tmp_path / "copy"
        state = spark.conf.get("spark.aion.state.dir")
        assert state is not None
        fork(spark, str(original), str(sink.folder / "checkpoint"), state_dir=state)
    # An hour less from now on. The first event is late and of the first day, the second of the day that lives.
    stream.put([("a", NOON - 14 * HOUR_S, 1.0), ("a", NOON + 34 * HOUR_S - 1, 1.0), ("a", NOON + 35 * HOUR_S, 1.0)])
    stream.put([("a", NOON + 90 * HOUR_S, 1.0)])
    assert sorted(set(run("Etc/GMT-1"))) == [
        (-2, 22, "late", 2),
        (-2, 22, "on_time", 1),
        (22, 46, "on_time", 2),
        (46, 71, "on_time", 1),
    ]
