"""``aion.table`` and ``aion.plot.lateness``: what a notebook shows of a query that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import aion
from aion import aggregates as A
from aion.errors import ConfigError, SchemaError
from tests.spark.conftest import EVENTS_DDL, FileStream, take_all


def sessions(stream: FileStream, **more: Any) -> DataFrame:
    return aion.windowed(
        stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"),
        key="k",
        time="ts",
        windows=aion.Session("10 seconds"),
        aggregates={"n": A.count()},
        bound="1 hour",
        trigger="every_batch",
        **more,
    )


def shown(query: Any) -> list[tuple[Any, ...]]:
    table = aion.table(query)
    return [(row.k, row.window_start.second, row.n) for row in table.itertuples()]


@pytest.mark.slow
def test_the_newest_panes_of_a_query_that_runs(stream: FileStream, alone: SparkSession) -> None:
    query = sessions(stream, name="seen").writeStream.format("memory").queryName("seen").start()
    try:
        stream.put([("a", 1, 1.0), ("a", 20, 1.0), ("b", 5, 1.0)])
        stream.put([("a", 100, 1.0)])
        stream.put([("z", 101, 1.0)])
        take_all(query)
        assert shown(query) == [("a", 1, 1), ("a", 20, 1), ("b", 5, 1)]
        stream.put([("a", 10, 1.0), ("a", 12, 1.0)])  # joins two sessions, which are taken back
        stream.put([("z", 102, 1.0)])
        take_all(query)
        assert shown(query) == [("a", 1, 4), ("b", 5, 1)]
        assert list(aion.table(query).columns)[:5] == ["k", "window", "window_start", "window_end", "n"]
        assert not {"pane_seq", "reason", "event"} & set(aion.table(query).columns)
        figure = aion.plot.lateness(query)
        assert figure._repr_png_().startswith(b"\x89PNG") and "'seen'" not in figure.axes[0].get_title()
        assert figure.axes[0].get_title() == "How late the events of seen are: 2 of 8"
        with pytest.raises(ConfigError, match="the query has the operators 'seen'; give name= one of them"):
            aion.plot.lateness(query, "other")
        said = aion.progress(query)._repr_html_()  # type: ignore[attr-defined]
        assert "<caption>seen</caption>" in said and "late_panes" in said
    finally:
        query.stop()


@pytest.mark.proof
def test_files_are_read_too_and_other_sinks_are_named(stream: FileStream, alone: SparkSession, tmp_path: Path) -> None:
    stream.put([("a", 1, 1.0)])
    stream.put([("z", 101, 1.0)])
    stream.put([("z", 102, 1.0)])

    def run(df: DataFrame, kind: str, name: str) -> Any:
        writer = df.writeStream.option("checkpointLocation", str(tmp_path / f"{name}-cp")).queryName(name)
        if kind == "parquet":
            writer = writer.option("path", str(tmp_path / name))
        query = writer.format(kind).trigger(availableNow=True).start()
        query.awaitTermination()
        return query

    assert shown(run(aion.panes(sessions(stream)), "parquet", "files")) == [("a", 1, 1)]
    with pytest.raises(ConfigError, match="which Spark cannot read back"):
        aion.table(run(sessions(stream), "noop", "nothing"))
    with pytest.raises(SchemaError, match="the query does not write column 0 of the key and window_end and pane_seq"):
        aion.table(run(sessions(stream).select("window_start", "n", "kind"), "memory", "less"))
    with pytest.raises(SchemaError, match="the query writes no columns of panes"):
        aion.table(run(stream.read(EVENTS_DDL), "memory", "events"))
