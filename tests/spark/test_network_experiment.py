"""Bytes by hop as `aion experiment network` counts them, on Spark: as many hops as levels, and the same results."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from experiments.network_streams import Run, Sources, configured, run

SOURCES = Sources(children=4, events_per_child=2_000, batches=2, keys=5, span_s=5, seed=1)


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
