"""A shard that has had a version begins with nothing only if Spark has never named that version."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import aion
from aion import aggregates as A
from tests.counters import Counter
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink, last_panes

KEYS = [f"key-{number}" for number in range(8)]


@pytest.fixture
def state(spark: SparkSession, place: Any, tmp_path: Path) -> Path:
    place(str(tmp_path / "state"))
    return tmp_path / "state"


def windows(stream: FileStream, *, only: str | None = None) -> DataFrame:
    events = stream.read(EVENTS_DDL)
    if only is not None:
        events = events.where(F.col("k") == only)
    return aion.windowed(
        events.withWatermark("ts", "1 second"), key="k", time="ts", windows=aion.Tumbling("10 seconds"),
        aggregates={"n": A.count()}, bound="1 hour", policy={"trigger": {"kind": "every_batch"}},
    )  # fmt: skip


def processor(stream: FileStream) -> DataFrame:
    return aion.group_by(stream.read(EVENTS_DDL), "k").transformWithState(
        Counter(), "k string, n long", "Append", "none"
    )


def manifests(state: Path) -> dict[str, list[Path]]:
    """The manifests of each shard."""
    found: dict[str, list[Path]] = {}
    for path in sorted(state.rglob("manifests/*.json")):
        found.setdefault(path.parent.parent.name, []).append(path)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("query", [windows, pytest.param(processor, marks=pytest.mark.proof)])
def test_a_token_that_is_lost_after_the_first_version_is_missed(
    spark: SparkSession, stream: FileStream, sink: Sink, state: Path, query: Callable[[FileStream], DataFrame]
) -> None:
    stream.put([(KEYS[0], 1, 1.0)])
    sink.run(query(stream))
    ((shard, (manifest,)),) = manifests(state).items()
    other = manifest.parents[2] / ("shard-00000" if shard != "shard-00000" else "shard-00001") / "manifests"
    other.mkdir(parents=True)
    shutil.copy(manifest, other)  # a version of a committed batch, which Spark does not name
    stream.put([(KEYS[0], 2, 1.0)])  # it has no event yet
    with pytest.raises(PySparkException, match=r"CorruptState.*names no version of shard.*begin again with nothing"):
        sink.run(query(stream))


@pytest.mark.proof
def test_what_a_failed_batch_has_left_is_not_missed(
    spark: SparkSession, stream: FileStream, sink: Sink, state: Path
) -> None:
    """The user leaves out the events that his sink did not take, and later they come again."""

    def refuses(batch: DataFrame, number: int) -> None:
        raise ValueError(f"{batch.count()} rows of batch {number} have no room")

    stream.put([(key, 1, 1.0) for key in KEYS])
    with pytest.raises(PySparkException, match="have no room"):
        windows(stream).writeStream.foreachBatch(refuses).option(
            "checkpointLocation", str(sink.folder / "checkpoint")
        ).trigger(availableNow=True).start().awaitTermination()
    before = manifests(state)
    assert len(before) == 2
    sink.run(windows(stream, only=KEYS[0]))
    stream.put([(key, 3, 1.0) for key in KEYS])
    stream.put([(key, 100, 1.0) for key in KEYS])
    rows = sink.run(windows(stream))
    found = {key: row["n"] for (key, _, start), row in last_panes(rows, "k").items() if start.timestamp() == 0}
    assert found == dict.fromkeys(KEYS, 1) | {KEYS[0]: 2}
