"""Keys of bigint that a double cannot hold, beside a null."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

import aion
from tests.spark.conftest import FileStream, Sink

LARGE = [9007199254740992, 9007199254740993, -(2**63), 2**63 - 1]


class Rows(StatefulProcessor):
    """Counts the rows of a key, in state."""

    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "n bigint")

    def _counted(self, key: tuple[Any, ...], more: int) -> dict[str, Any]:
        n = (self._count.get() or (0,))[0] + more
        self._count.update((n,))
        return {"key": str(key[0]), "text": key[1], "n": n}

    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Any], timers: Any) -> Iterator[Any]:
        yield Row(**self._counted(key, sum(1 for _ in rows)))


class Frames(Rows):
    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Any], timers: Any) -> Iterator[Any]:
        more = 0
        for frame in rows:
            assert list(frame.columns) == ["id", "t", "v"]
            more += len(frame)
        yield pd.DataFrame([self._counted(key, more)])


@pytest.mark.slow
@pytest.mark.parametrize("pandas", [True, False])
def test_a_null_key_does_not_change_the_others(
    spark: SparkSession, stream: FileStream, sink: Sink, pandas: bool
) -> None:
    ids = FileStream(
        spark, stream.folder / "ids", pa.schema([("id", pa.int64()), ("t", pa.string()), ("v", pa.int64())])
    )
    for _ in range(2):
        ids.put([(number, "t", 1) for number in (*LARGE, None)])
    grouped = aion.group_by(ids.read("id bigint, t string, v bigint"), "id", "t")
    run, processor = (grouped.transformWithStateInPandas, Frames()) if pandas else (grouped.transformWithState, Rows())
    rows = sink.run(run(processor, "key string, text string, n bigint", "Update", "None"))
    assert sorted((row["key"], row["n"]) for row in rows) == sorted(
        (str(number), n) for number in (*LARGE, None) for n in (1, 2)
    )
