"""What the demo asks of Spark itself: the truth to compare with, and a stream whose watermark sees every flight."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from aion.demo import command as demo
from aion.demo.flights import departures, load_flights, write_stream
from aion.demo.report import compare, conclusion
from tests.package.test_demo import pandas_truth


@pytest.mark.proof
def test_spark_computes_the_truth_and_keeps_the_watermark_below_the_filter(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = load_flights().choose(1_000)
    write_stream(data.table, tmp_path / "flights")
    for query in demo.QUERIES:
        found = demo.truth_of(spark, query, tmp_path).toArrow().to_pandas()
        comparison = compare(
            query.name, pandas_truth(data, query), found.assign(pane=0), [query.key], list(query.truth)
        )
        assert comparison.equal, conclusion(comparison)
    capsys.readouterr()
    departures(spark, tmp_path / "flights").select("scheduled").explain()
    plan = capsys.readouterr().out
    assert plan.index("Filter") < plan.index("EventTimeWatermark") < plan.index("StreamingRelation")
    assert plan.count("Filter") == 1, plan
