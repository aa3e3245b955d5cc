"""Tables of Delta Lake and Iceberg as streams: the same panes as of their files, and each event once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession

import aion
from aion.errors import ConfigError
from tests.sinks.lakes import LAKES, Lake, fresh_threads
from tests.spark.conftest import EVENTS_DDL, FileStream
from tests.spark.files.test_read_files import WINDOWS, Batches
from tests.spark.windows.test_windowed import batches


def read(spark: SparkSession, lake: Lake, **more: Any) -> Any:
    options = {**lake.options, **more.pop("options", {})}
    how: dict[str, Any] = {"format": lake.kind, "watermark": ("ts", "5 seconds"), "options": options, **more}
    return aion.read_files(spark, lake.name("minutes"), **how)


@pytest.fixture
def threads() -> Iterator[None]:
    with fresh_threads("iceberg"):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
def test_the_same_panes_and_watermarks_as_of_the_files(spark: SparkSession, stream: FileStream, tmp_path: Path) -> None:
    """With the table's own schema, which has a column that older files do not have."""
    lakes = [Lake(kind, tmp_path) for kind in LAKES]
    for number, rows in enumerate(batches(1, count=4)):
        table = stream.put(rows)
        for lake in lakes:
            lake.put(table if number < 2 else table.append_column("more", pa.array([number] * table.num_rows)))
    of_files = aion.read_files(
        spark, tmp_path / "input", schema=EVENTS_DDL, watermark=("ts", "5 seconds"), max_files_per_trigger=2
    )
    expected = Batches(aion.windowed(of_files, **WINDOWS), tmp_path / "files")
    assert sum(map(len, expected.rows)) > 20
    for lake, first in zip(lakes, ("startingVersion", "stream-from-timestamp"), strict=True):
        of_table = read(spark, lake, max_files_per_trigger=2, options={first: 0})
        assert of_table.schema.names == ["k", "ts", "v", "more"]
        said = " ".join(aion.explain(of_table, **WINDOWS).split())
        assert re.search(rf"The log names the files of \S+minutes; 2 tasks read parts .* as {lake.kind}, and of", said)
        got = Batches(aion.windowed(of_table, **WINDOWS), tmp_path / lake.kind)
        assert (got.rows, got.watermarks, got.files) == (expected.rows, expected.watermarks, expected.files)
        assert [c["windowed.files"] for c in got.counts] == [c["windowed.files"] for c in expected.counts]


def test_each_event_is_read_once_over_failures_and_restarts(
    spark: SparkSession, stream: FileStream, tmp_path: Path
) -> None:
    """A batch that fails runs again with the same files, also if there are new ones, and a bad one is left out."""
    lake = Lake("delta", tmp_path)
    tables = [stream.put(rows) for rows in batches(2, count=4)]
    days = [table.append_column("day", pa.array([f"{n} %/é"] * table.num_rows)) for n, table in enumerate(tables)]
    for day in days[:2]:
        lake.put(day, by="day")
    got: dict[int, list[Any]] = {}
    fails = True

    def take(batch: DataFrame, number: int) -> None:
        rows = sorted(repr((row["day"], row["v"])) for row in batch.collect())
        assert got.setdefault(number, rows) == rows, "another batch than before"
        if fails and number == 1:
            raise RuntimeError("the sink fails")

    def run() -> None:
        files = read(spark, lake, max_files_per_trigger=1, on_bad_file="drop", schema=f"{EVENTS_DDL}, day string")
        writer = files.to_df().writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()

    with pytest.raises(StreamingQueryException, match="the sink fails"):
        run()
    for day in days[2:]:
        lake.put(day)
    (bad,) = (path for path in Path(lake.name("minutes")).rglob("*.parquet") if path.parent.name.startswith("day=3"))
    bad.write_bytes(bad.read_bytes()[:-20])
    fails = False
    run()
    assert sorted(got) == [0, 1, 2, 3] and got[3] == []
    assert sorted(row for rows in got.values() for row in rows) == sorted(
        repr((row["day"], row["v"])) for day in days[:3] for row in day.to_pylist()
    )
    lake.table().delete("day = '0 %/é'")
    with pytest.raises(StreamingQueryException, match=r"version 4 of table '.*minutes' deletes rows, and a stream"):
        run()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latest_first": True}, "latest_first: the versions of a table are read in their order; leave it out"),
        ({"max_file_age": "1 day"}, "max_file_age: the versions of a table"),
        ({"max_files_per_trigger": 0}, "max_files_per_trigger: 0 is not a whole number from 1 on"),
        (
            {"options": {"maxFilesPerTrigger": 1}},
            "options: 'maxFilesPerTrigger' is an argument; use max_files_per_trigger=$",
        ),
        ({"options": ["x"]}, r"options: \['x'\] is not a mapping"),
        ({"format": "iceberg"}, "path: 'nowhere' is no table of a catalog; write 'namespace.table'"),
        ({}, "'file:/.*/nowhere' is no table of Delta Lake"),
        ({"format": "parquet"}, "schema: it is needed for parquet; write e.g. schema='ts timestamp, speed double'"),
    ],
)
@pytest.mark.usefixtures("threads")
def test_wrong_arguments(spark: SparkSession, change: dict[str, Any], message: str) -> None:
    how: dict[str, Any] = {"format": "delta", "watermark": ("ts", "1 second"), **change}
    with pytest.raises(ConfigError, match=message):
        aion.read_files(spark, "nowhere", **how)


def test_credentials_are_not_shown(spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The options of a table may hold some."""
    files = aion.read_files(
        spark, tmp_path / "t", schema=EVENTS_DDL, format="delta", watermark=("ts", "1 s"), options={"aws_key": "hush"}
    )
    files.to_df().explain(True)
    shown = capsys.readouterr().out
    assert "aion_lake" in shown and "hush" not in shown + repr(files)
