"""What experiments measure, run small in the session of the tests; the whole commands are in tests/experiments."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from experiments.ingest.contenders import CONTENDERS, Shape
from experiments.ingest.settings import WINDOW, WINDOW_MS
from experiments.network.streams import Run, Sources, configured, run
from experiments.shared.generate import EventPlan, write_batches
from experiments.shared.stream import file_stream, run_to_end
from experiments.windows.command import DELAY, LEGS, SCHEMA
from experiments.windows.streams import check_equal, measure

SOURCES = Sources(children=4, events_per_child=1_000, batches=2, keys=5, span_s=5, seed=1)


@pytest.mark.slow
def test_ingest_reads_all_events_and_says_how_fast(spark: SparkSession, tmp_path: Path) -> None:
    files = write_batches(EventPlan(events_per_batch=500), 3, tmp_path / "data")
    stream = file_stream(spark, files, SCHEMA, WINDOW)
    panes = CONTENDERS["partials"].build(stream, Shape(WINDOW, WINDOW_MS, None, payload=False))
    done = run_to_end(panes, tmp_path / "checkpoint", 1_500)
    assert done.events == 1_500 and done.dropped_by_spark == 0
    assert done.whole_events_per_s > 0 and done.steady_events_per_s > 0


@pytest.mark.proof
def test_overlapping_windows_are_those_of_spark(spark: SparkSession, tmp_path: Path) -> None:
    files = write_batches(EventPlan(events_per_batch=500, late_share=0.0), 3, tmp_path / "data")
    found = [
        measure(
            spark, "20", LEGS["20"], contender, file_stream(spark, files, SCHEMA, DELAY), tmp_path / contender, 1_500
        )
        for contender in ("aion-no-bound", "stock")
    ]
    check_equal(*found)
    assert found[0].results > 0


@pytest.mark.proof
def test_hops_of_central_and_distributed_queries_are_counted(spark: SparkSession, tmp_path: Path) -> None:
    mine = configured(spark.newSession())  # settings of its own
    folder = SOURCES.write(tmp_path / "data")

    def done(contender: str, levels: int) -> Run:
        return run(mine, SOURCES, folder, contender, "mean", levels, 2, tmp_path / f"{contender}-{levels}")

    central, distributed = done("central", 2), done("distributed", 2)
    assert [hop.tasks for hop in central.hops] == [hop.tasks for hop in distributed.hops] == [4, 2]
    assert [hop.rows for hop in central.hops] == [SOURCES.events] * 2, "every event over every hop"
    slices = SOURCES.span_s * SOURCES.batches
    assert [hop.rows for hop in distributed.hops] == [4 * slices, 2 * slices], "a block for each child, node and slice"
    assert central.bytes > 3 * distributed.bytes
    assert (central.results, central.events) == (distributed.results, SOURCES.events)
    assert abs(central.checksum - distributed.checksum) < 1e-9 * central.checksum
