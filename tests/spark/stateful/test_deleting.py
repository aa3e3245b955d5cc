"""``deleteIfExists`` holds for all keys, whether they have rows or not, from the first batch with it on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

import aion
from tests.spark.conftest import FileStream
from tests.spark.stateful.rig import (
    Case,
    Group,
    Output,
    both,
    comparable,
    compare,
    error,
    grouped_by_aion,
    grouped_by_spark,
    query_of,
)

COLUMNS = [("k", pa.string())]
OUT = "k string, what string"
KEYS = [(f"k{n}",) for n in range(8)]
ONE = KEYS[:1]
BESIDE = "a row of the union"
FAR_MS = 4_000_000_000_000


class Release(StatefulProcessor):
    """A release of a processor. Its ``init`` makes these calls, such as "value v" and "delete v".

    For each key it gives what the state variables hold, and adds to each. ``fails``: rows are not handled. ``all``: it
    also uses the variables that it deleted after it defined them.
    """

    def __init__(
        self, *calls: str, ttl_ms: int | None = None, timers: bool = False, fails: bool = False, all: bool = False
    ) -> None:
        self._calls, self._ttl_ms, self._timers, self._fails, self._all = calls, ttl_ms, timers, fails, all

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._states: dict[str, Any] = {}
        for kind, name in map(str.split, self._calls):
            match kind:
                case "delete":
                    handle.deleteIfExists(name)
                    if not self._all:
                        self._states.pop(name, None)
                case "value":
                    self._states[name] = handle.getValueState(name, "n bigint", self._ttl_ms)
                case "list":
                    self._states[name] = handle.getListState(name, "n bigint", self._ttl_ms)
                case "map":
                    self._states[name] = handle.getMapState(name, "k bigint", "n bigint", self._ttl_ms)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        assert not self._fails, "rows are not handled"
        for _ in rows:
            pass
        found = []
        for name, state in self._states.items():
            if hasattr(state, "appendValue"):
                found.append((name, list(state.get())))
                state.appendValue((1,))
            elif hasattr(state, "updateValue"):
                found.append((name, [tuple(map(tuple, entry)) for entry in state.iterator()]))
                state.updateValue((len(found[-1][1]),), (1,))
            else:
                found.append((name, state.get()))
                state.update((1,))
        if self._timers:
            found.append(("timers", list(self._handle.listTimers())))
            self._handle.registerTimer(FAR_MS)
        yield Row(k=key[0], what=str(found))

    def close(self) -> None:
        pass


class InPandas(Release):
    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        yield pd.DataFrame([row.asDict() for row in super().handleInputRows(key, rows, timerValues)])


class Releases:
    """Runs one release after the other in one query, each on one batch.

    ``beside``: the result is part of a union.
    """

    def __init__(self, spark: SparkSession, folder: Path, group: Group, *, beside: bool = False) -> None:
        folder.mkdir(exist_ok=True)
        self.checkpoint, self._spark, self._group, self._beside = folder / "checkpoint", spark, group, beside
        self._stream = FileStream(spark, folder / "input", pa.schema(COLUMNS))
        self.output: Output = {}

    def put(self, rows: Sequence[Any]) -> None:
        self._stream.put(rows)

    def run(self, release: Release) -> int:
        """What is in the input. Returns how many state variables Spark counts as deleted."""
        case = Case(lambda: release, COLUMNS, OUT, [], pandas=False)
        df = query_of(self._spark, case, self._group, self._stream)
        if self._beside:  # as part of a union, a partition of state is not the partition of the task
            df = self._stream.read("k string").select("k", F.lit(BESIDE).alias("what")).union(df)

        def keep(batch: Any, number: int) -> None:
            self.output[number] = [comparable(row) for row in batch.collect()]  # type: ignore[assignment]

        query = (
            df.writeStream.foreachBatch(keep)
            .outputMode("update")
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return sum(p.stateOperators[0].customMetrics["numDeletedStateVars"] for p in query.recentProgress)

    def found(self) -> set[str]:
        """What the last batch found, over all keys."""
        return {what for _, what in self.output[max(self.output)]} - {BESIDE}


@pytest.mark.proof
def test_a_deletion_is_of_all_keys_and_of_a_batch_that_is_complete(spark: SparkSession, tmp_path: Path) -> None:
    releases = Releases(spark, tmp_path, grouped_by_aion, beside=True)
    releases.put(KEYS)
    releases.run(Release("value v", "list w"))
    releases.put(ONE)
    with pytest.raises(StreamingQueryException, match="rows are not handled"):
        releases.run(Release("delete v", "list w", fails=True))
    state = aion.read_state(spark, str(releases.checkpoint))
    assert state.where("v.n = 1").count() == len(KEYS), "an attempt that failed has deleted nothing"
    assert releases.run(Release("delete v", "list w")) == 2, "as on stock Spark, one for each partition"
    state = aion.read_state(spark, str(releases.checkpoint))
    assert state.columns == ["k", "timers", "w", "packed"] and state.where("size(w) > 0").count() == len(KEYS)
    releases.put(KEYS)
    assert releases.run(Release("list v", "delete w")) == 2
    assert releases.found() == {"[('v', [])]"}


STORIES: dict[str, list[tuple[tuple[str, ...], list[Any]]]] = {
    "comes back": [(("value v",), KEYS), (("delete v", "value w"), ONE), (("value v", "value w"), KEYS)],
    "of another kind": [(("list v",), KEYS), (("delete v",), ONE), (("value v",), KEYS)],
    "in each batch": [(("map v",), KEYS), (("delete v", "map v"), ONE), (("delete v", "map v"), KEYS[1:2]),
                      (("map v",), KEYS)],
    "for good": [(("value v", "map w"), KEYS), (("value v", "delete w"), KEYS[3:5]), (("value v",), KEYS)],
    "what was never there": [(("value v", "delete w"), KEYS), (("delete w", "value v"), ONE)],
    "defined and deleted": [(("value v", "list w", "delete w"), KEYS), (("list w", "delete v"), KEYS)],
}  # fmt: skip
MODES = {
    "rows": {"pandas": False},
    "pandas": {"pandas": True},
    "timers": {"pandas": True, "time_mode": "processingTime"},
    "ttl": {"pandas": False, "time_mode": "processingTime"},
}


@pytest.mark.proof
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("story", STORIES)
def test_it_deletes_what_stock_spark_deletes(spark: SparkSession, tmp_path: Path, story: str, mode: str) -> None:
    how: dict[str, Any] = MODES[mode]
    make = InPandas if how["pandas"] else Release

    def case() -> Case:
        of_runs = iter(STORIES[story])
        more: dict[str, Any] = {"ttl_ms": 1_000_000} if mode == "ttl" else {"timers": mode == "timers"}
        return Case(
            lambda: make(*next(of_runs)[0], **more), COLUMNS, OUT, [rows for _, rows in STORIES[story]],
            restart_after=range(len(STORIES[story])), **how,
        )  # fmt: skip

    aions, sparks = both(spark, tmp_path, case)
    compare(aions, sparks)
    assert len(sparks) == len(STORIES[story])


@pytest.mark.proof
def test_the_counts_are_those_of_stock_spark(spark: SparkSession, tmp_path: Path) -> None:
    counts: list[list[int]] = []
    for name, group in (("aion", grouped_by_aion), ("spark", grouped_by_spark)):
        releases = Releases(spark, tmp_path / name, group)
        counts.append([])
        for calls, rows in [
            *STORIES["defined and deleted"],
            (("list w", "delete v"), ONE),
            (("delete w", "list w"), ONE),
        ]:
            releases.put(rows)
            counts[-1].append(releases.run(Release(*calls)))
    assert counts[0] == counts[1] == [2, 2, 0, 2]


@pytest.mark.proof
@pytest.mark.parametrize("kind", ["value", "list", "map"])
def test_a_variable_that_was_deleted_in_the_same_init_cannot_be_used(
    spark: SparkSession, tmp_path: Path, kind: str
) -> None:
    for name, group in (("aion", grouped_by_aion), ("spark", grouped_by_spark)):
        case = Case(lambda: Release(f"{kind} v", "delete v", all=True), COLUMNS, OUT, [ONE], pandas=False)
        assert f"{kind.capitalize()} state v is not initialized" in error(spark, tmp_path / name, case, group)
