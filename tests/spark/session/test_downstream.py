"""What comes behind windows whose panes replace each other, and lets only some of them through, is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import aion
from aion import aggregates as A
from aion.errors import ConfigError
from tests.spark.conftest import EVENTS_DDL, FileStream

REFUSED: dict[str, tuple[str, Callable[[DataFrame], DataFrame]]] = {
    "a value": ("where", lambda df: aion.panes(df).where("n > 1")),
    "a value that is made of one": ("where", lambda df: df.withColumn("m", F.col("n") + 1).where("m > 1 OR k = 'a'")),
    "the number of the pane": ("where", lambda df: df.where("pane = 0")),
    "a value, renamed": ("where", lambda df: df.withColumnRenamed("n", "k2").where("k2 > 1")),
    "a sum": ("groupBy", lambda df: aion.panes(df).groupBy("k").agg(F.sum("n"))),
    "the first pane": ("dropDuplicates", lambda df: df.dropDuplicates(["k", "window_start"])),
    "different rows": ("dropDuplicates", lambda df: df.select("k").distinct()),
}
ALLOWED: dict[str, Callable[[DataFrame], DataFrame]] = {
    "panes": aion.panes,
    "dropped": aion.dropped,
    "a kind": lambda df: df.where("kind = 'late'"),
    "keys": lambda df: aion.panes(df).where("k <> 'x' AND window_start > timestamp'1970-01-01'"),
    "what is made of a key": lambda df: df.withColumn("d", F.to_date("window_end")).where("d > date'1960-01-01'"),
    "a key, renamed": lambda df: df.select(F.upper("k").alias("u"), "n").where("u = 'A'"),
    "a static side": lambda df: df.join(df.sparkSession.range(1), F.lit(True), "left"),
}


def windows(stream: FileStream, **changes: Any) -> DataFrame:
    given = {"bound": "1 hour", "windows": aion.Tumbling("10 seconds")} | changes
    events = stream.read(EVENTS_DDL).withWatermark("ts", "1 second")
    return aion.windowed(events, key="k", time="ts", aggregates={"n": A.count()}, **given)


def run(df: DataFrame, folder: Path) -> None:
    writer = df.writeStream.format("noop").option("checkpointLocation", str(folder)).trigger(availableNow=True)
    mode = "complete" if "groupBy" in str(folder) else "append"
    writer.outputMode(mode).start().awaitTermination()


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_let_all_panes_through_is_refused(stream: FileStream, tmp_path: Path, name: str) -> None:
    what, behind = REFUSED[name]
    said = rf"this query has {what} behind the windows 'windowed'.*emit='final'.*emit='changes'.*where="
    with pytest.raises(ConfigError, match=said):
        run(behind(windows(stream)), tmp_path / what)


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_the_same_for_all_panes_of_a_window_goes(stream: FileStream, tmp_path: Path, name: str) -> None:
    run(ALLOWED[name](windows(stream)), tmp_path / "checkpoint")


@pytest.mark.parametrize(
    "changes",
    [{"emit": "final"}, {"emit": "changes"}, {"bound": 0}],
    ids=["final", "changes", "one pane for each window"],
)
def test_rows_that_nothing_replaces_may_be_left_out(
    stream: FileStream, tmp_path: Path, changes: dict[str, Any]
) -> None:
    run(windows(stream, **changes).where("n > 1"), tmp_path / "checkpoint")


def test_a_bound_of_zero_is_not_enough_for_windows_that_grow(stream: FileStream, tmp_path: Path) -> None:
    early = aion.Tumbling("10 seconds", early="5 seconds")
    for grows in (aion.Session("10 seconds"), early):
        with pytest.raises(ConfigError, match="where behind the windows"):
            run(windows(stream, windows=grows, bound=0).where("n > 1"), tmp_path / "checkpoint")
