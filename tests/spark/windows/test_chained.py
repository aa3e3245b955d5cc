"""Windows of windows in one query: the panes are those of a batch computation, with late events, over restarts."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from statistics import median
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

import aion
from aion import aggregates as A
from aion.errors import ConfigError, SchemaError, WatermarkError, WindowError
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink

LATE: dict[str, Any] = {"bound": "1 hour", "trigger": "every_batch"}
MINUTES = 60
BATCHES = [
    [("a", 10, 1.0), ("a", 20, 2.0), ("b", 30, 5.0), ("a", 70, 4.0)],
    [("a", 130, 3.0), ("b", 200, 1.0), ("a", 250, 7.0)],
    [("a", 15, 10.0), ("b", 310, 2.0), ("a", None, 1.0)],  # late for an inner window that is open outside
    [("a", 700, 1.0), ("b", 710, 2.0)],
    [("a", 71, 20.0), ("b", 320, 4.0), ("b", 25, 8.0)],  # late for both
    [("a", 1400, 1.0), ("b", 1400, 1.0)],
]


def inner(stream: FileStream, **changes: Any) -> DataFrame:
    definition: dict[str, Any] = {"key": "k", "time": "ts", "windows": aion.Tumbling("1 minute"), "name": "minutes"}
    definition |= {"aggregates": {"n": A.count(), "total": A.sum("v")}, **LATE, **changes}
    return aion.windowed(stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"), **definition)


def outer(panes: DataFrame, **changes: Any) -> DataFrame:
    definition: dict[str, Any] = {"key": "k", "time": "window_start", "windows": aion.Tumbling("5 minutes")}
    definition |= {"aggregates": {"panes": A.count(), "top": A.max("n"), "sum": A.sum("total")}, "name": "outer"}
    return aion.windowed(panes, **(definition | {"trigger": "every_batch"} | changes))


def expected(batches: list[list[Any]]) -> dict[Any, tuple[int, int, float]]:
    """By key and five minutes: the number of minutes with events, the most events and the sum of all."""
    minutes: dict[Any, list[float]] = defaultdict(list)
    for key, at, value in (event for batch in batches for event in batch if event[1] is not None):
        minutes[key, at // MINUTES * MINUTES].append(value)
    found: dict[Any, tuple[int, int, float]] = {}
    for (key, start), values in minutes.items():
        n, top, total = found.get((key, start // 300 * 300), (0, 0, 0.0))
        found[key, start // 300 * 300] = n + 1, max(top, len(values)), total + sum(values)
    return found


def newest(rows: list[dict[str, Any]], *values: str) -> dict[Any, Any]:
    shown = {}
    for row in rows:
        if row["kind"] != "dropped":
            key = row["k"], int(row["window_start"].timestamp())
            shown[key] = None if row["kind"] == "retracted" else tuple(row[name] for name in values)
    return {key: value for key, value in shown.items() if value is not None}


def until(batches: list[list[Any]], watermark: int) -> dict[Any, Any]:
    return {key: value for key, value in expected(batches).items() if key[1] + 300 <= watermark}


@pytest.mark.slow
def test_panes_of_panes_are_those_of_a_batch(stream: FileStream, sink: Sink) -> None:
    """Over a restart. Late events change panes inside, and these replace the earlier ones outside."""
    seen: list[list[Any]] = []
    for number, batch in enumerate(BATCHES):
        stream.put(batch)
        seen.append(batch)
        if number not in (2, len(BATCHES) - 1):  # two runs, of three batches each
            continue
        rows = in_order(sink, outer(inner(stream)))
        watermark = max(event[1] for events in seen for event in events if event[1] is not None)
        assert newest(rows, "panes", "top", "sum") == until(seen, watermark)
    kinds = [(row["kind"], row["k"], int(row["window_start"].timestamp())) for row in rows if row["kind"] != "dropped"]
    assert ("on_time", "a", 0) in kinds and ("late", "a", 0) in kinds
    # A pane that comes in the batch whose watermark ends the outer window is in the pane that is on time.
    assert sum(kind == "on_time" for kind, *_ in kinds) == len(until(BATCHES, 1400)) == 5
    assert next(row["panes"] for row in rows if row["kind"] == "on_time" and row["k"] == "a") == 4
    [dropped] = [row for row in rows if row["kind"] == "dropped"]
    assert (dropped["k"], dropped["reason"]) == ("a", "the windows before dropped it")
    assert "the event time is null" in dropped["event"]


def sums(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    table = pa.Table.from_batches(list(events))
    totals = table.column("total").to_pylist()
    return {"panes": len(totals), "middle": median(totals), "columns": ",".join(table.column_names)}


@pytest.mark.proof
def test_a_function_sees_the_newest_panes(stream: FileStream, sink: Sink) -> None:
    """Sessions take back panes, columns have other names, and dropped rows are left out before."""
    for batch in [*BATCHES, [("a", 40, 100.0)], [("a", 3000, 1.0)]]:  # which joins two sessions
        stream.put(batch)
    sessions = inner(stream, windows=aion.Session("25 seconds"))
    at, key = F.col("window_end").alias("at"), F.col("k").alias("whose")
    panes = aion.panes(sessions).select(key, "window_start", at, "kind", "pane_seq", "total")
    definition = {"key": "whose", "time": "at", "windows": aion.Tumbling("5 minutes"), "name": "outer"}
    rows = sink.run(
        aion.windowed(panes, apply=aion.Apply(sums, "panes long, middle double, columns string"), **definition)
    )
    last = {(row["whose"], int(row["window_start"].timestamp())): row for row in sorted(rows, key=lambda r: r["pane"])}
    first = last["a", 0]  # from 10 to 40, 70, 71, then 130 and 250
    assert (first["panes"], first["middle"]) == (4, median([113.0, 24.0, 3.0, 7.0]))
    assert first["columns"] == "whose,window_start,at,kind,pane_seq,total"
    assert all(row["kind"] != "dropped" for row in rows)


@pytest.mark.proof
def test_final_panes_go_through_anything(stream: FileStream, sink: Sink) -> None:
    """Each pane is the only one, so it may be filtered, and windows of keys may be made of them."""
    for batch in BATCHES:
        stream.put(batch)
    panes = aion.panes(inner(stream, emit="final", bound="10 minutes")).where("n > 0").drop("kind")
    rows = sink.run(outer(panes, windows=aion.Session("90 seconds"), time="window_end", emit="final"))
    shown = {(row["k"], int(row["window_start"].timestamp())): row["panes"] for row in rows}
    assert shown == {("a", 60): 3, ("a", 300): 1, ("b", 60): 1, ("b", 240): 1, ("b", 360): 1}


@pytest.mark.proof
def test_three_in_a_row(stream: FileStream, sink: Sink) -> None:
    for batch in [*BATCHES, [("a", 9000, 1.0)], [("a", 9100, 1.0)]]:
        stream.put(batch)
    definition: dict[str, Any] = {"time": "window_start", "windows": aion.Tumbling("20 minutes"), "name": "third"}
    counted = {"sum": A.sum("sum"), "fives": A.count()}
    rows = sink.run(aion.windowed(outer(inner(stream)), aggregates=counted, trigger="every_batch", **definition))
    fives = [value for key, value in expected(BATCHES).items() if key[1] < 1200]
    [first] = [row for row in rows if row["kind"] == "on_time" and row["window_start"].timestamp() == 0]
    assert (first["fives"], first["sum"]) == (len(fives), sum(total for *_, total in fives))


@pytest.mark.proof
def test_a_shorter_bound_does_not_end_windows_whose_panes_still_come(stream: FileStream, sink: Sink) -> None:
    """A window that began before the restart keeps its bound, so its late panes come long after the new bound."""
    for batch in [[("a", 10, 1.0)], [("a", 310, 2.0)]]:
        stream.put(batch)
    sink.run(outer(inner(stream)))
    for batch in [[("a", 1000, 1.0)], [("a", 320, 5.0)], [("a", 1001, 1.0)]]:
        stream.put(batch)
    rows = sink.run(outer(inner(stream, bound="1 minute")))
    assert not [row for row in rows if row["kind"] == "dropped"]
    of_window = [row for row in rows if row["k"] == "a" and row["window_start"].timestamp() == 300]
    assert max(of_window, key=lambda row: row["pane"])["sum"] == 7.0


@pytest.mark.slow
@pytest.mark.parametrize("emit", ["all", "final"])
def test_a_longer_bound_lengthens_the_life_of_windows_whose_panes_come_later(
    stream: FileStream, sink: Sink, emit: str
) -> None:
    """A window that begins after the restart has the new bound, and is in an outer one that began before."""
    for batch in [[("a", 10, 1.0)], [("b", 150, 1.0)]]:
        stream.put(batch)
    sink.run(outer(inner(stream, bound="1 minute", emit=emit)))
    for batch in [[("a", 200, 2.0)], *([("b", at, 1.0)] for at in (3000, 3001, 3002)), [("a", 201, 4.0)]]:
        stream.put(batch)
    for at in (3003, 9000, 20_000):
        stream.put([("b", at, 1.0)])
    rows = sink.run(outer(inner(stream, emit=emit)))
    assert not [row for row in rows if row["kind"] == "dropped"]
    assert newest(rows, "panes", "sum")["a", 0] == (2, 7.0)


@pytest.mark.slow
def test_a_final_pane_comes_before_the_windows_behind_are_gone(stream: FileStream, sink: Sink) -> None:
    """It does not wait, although its window has more events than a batch may read before those that are on time."""
    [large] = stream.put([("a", 10, 1.0)]).to_batches()
    events = pa.Table.from_batches([large] * 1000)
    pq.write_table(pa.concat_tables([events] * 1001), stream.folder / "000000.parquet")
    os.utime(stream.folder / "000000.parquet", (1_700_000_000,) * 2)
    for at in [61, 15, 362, 725, 726, 727]:
        stream.put([("a", at, 1.0)])
    late: dict[str, Any] = {"bound": "5 minutes", "trigger": {"kind": "count", "count": 100}}
    panes = inner(stream, **late, policy={"execution": {"late_share": 0.0}})
    rows = sink.run(outer(panes, windows=aion.Tumbling("1 minute")))
    assert not [row for row in rows if row["kind"] == "dropped"]
    assert newest(rows, "top")["a", 0] == (1_001_001,)


def test_what_would_be_wrong_is_refused(stream: FileStream) -> None:
    panes = inner(stream)

    def refused(error: type[Exception], match: str, df: DataFrame, **changes: Any) -> None:
        with pytest.raises(error, match=match):
            outer(df, **changes)

    refused(SchemaError, "the column 'kind' of the windows before is missing", panes.drop("kind"))
    refused(SchemaError, "window_end of the windows before is missing", panes.drop("window_end"))
    refused(SchemaError, "column 0 of the key of the windows before is missing", panes.drop("k"), key=None)
    refused(WatermarkError, "Filter comes between the two operators", panes.where("n > 1"))
    refused(WatermarkError, "put together with other rows", panes.union(panes))
    refused(WatermarkError, "Leave this withWatermark out", panes.withWatermark("window_start", "0 seconds"))
    refused(ConfigError, "the windows before are called 'outer', too", inner(stream, name="outer"))
    refused(SchemaError, "'closes_at' is neither window_start nor window_end", panes, time="closes_at")
    refused(SchemaError, "'n' is not part of the key of the windows before", panes, key="n")
    refused(ConfigError, r"1 hour is too short: panes of 'minutes' may come 61 minutes", panes, bound="1 hour")
    refused(WindowError, "emit='final'", panes, windows=aion.Session("1 minute"))
    refused(SchemaError, "give their window_end as the time", inner(stream, windows=aion.Session("1 minute")))
    outer(panes, bound="2 hours")
    outer(aion.panes(panes).withColumn("total", F.when(F.col("total") > 1, F.col("total"))))


def test_names_in_another_case(stream: FileStream) -> None:
    assert outer(inner(stream), key="K", time="Window_Start").columns[:2] == ["K", "window"]


def test_explain_says_it(stream: FileStream) -> None:
    definition: dict[str, Any] = {"key": "k", "time": "window_start", "windows": aion.Tumbling("5 minutes")}
    text = aion.explain(inner(stream), aggregates={"top": A.max("n")}, name="outer", **definition)
    said = " ".join(text.split())
    assert "the panes of 'minutes' are the events. All are kept, and the newest of each key and window counts" in said
    assert "They are kept for 61 minutes after their end." in said
    assert "__aion" not in text


def in_order(sink: Sink, df: DataFrame) -> list[dict[str, Any]]:
    return sorted(sink.run(df), key=lambda row: row["pane"] or 0)
