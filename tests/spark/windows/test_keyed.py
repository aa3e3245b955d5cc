"""Windows that each key has its own of, on Spark: the same as by the oracle, over restarts, beside other windows."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F

import aion
from aion import aggregates as A
from tests.keyed_oracle import Event, windows_of
from tests.spark.conftest import SECOND, FileStream, Sink

SESSION, COUNT, RECORD = aion.Session("5 seconds"), aion.Count(4, 2), aion.PerRecord("3 seconds")
WINDOWS = {
    "session": SESSION,
    "count": COUNT,
    "record": RECORD,
    "mark": aion.Punctuated("mark"),
    "minute": aion.Tumbling("1 minute"),
}
BOUND = {"lateness": {"initial_bound": "1 hour", "coverage": None}, "trigger": {"kind": "every_batch"}}
DDL = "k bigint, ts timestamp, v bigint, mark boolean"


@pytest.fixture
def stream(spark: Any, tmp_path: Any) -> FileStream:
    return FileStream(
        spark,
        tmp_path / "in",
        pa.schema([("k", pa.int64()), ("ts", pa.timestamp("us", "UTC")), ("v", pa.int64()), ("mark", pa.bool_())]),
    )


def last_panes(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """What a sink that replaces by key and window, and deletes what is retracted, ends with."""
    gone = {place(row) for row in rows if row["kind"] == "retracted"}
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row["pane"]):
        if place(row) not in gone:
            kept[place(row)] = row
    return kept


def place(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["window"], row["k"], micros(row["window_start"]), micros(row["window_end"])


def micros(at: Any) -> int:
    return round(at.timestamp() * SECOND)


def truth(events: list[Event], watermark: int) -> dict[tuple[Any, ...], tuple[int, int]]:
    found: dict[tuple[Any, ...], tuple[int, int]] = {}
    for key in {e.key for e in events}:
        own = [e for e in events if e.key == key]
        for name, definition in WINDOWS.items():
            if name == "minute":
                continue
            for w in windows_of(definition, own):
                if w.over <= watermark:
                    found[name, key, w.start, w.end] = (len(w.events), sum(e.value for e in w.events))
        minutes = {e.t // (60 * SECOND) for e in own}
        for m in minutes:
            inside = [e for e in own if e.t // (60 * SECOND) == m]
            if (m + 1) * 60 * SECOND <= watermark:
                found["minute", key, m * 60 * SECOND, (m + 1) * 60 * SECOND] = (
                    len(inside),
                    sum(e.value for e in inside),
                )
    return found


@pytest.mark.proof
def test_all_of_them_in_one_query_over_restarts(stream: FileStream, sink: Sink) -> None:
    """Late events shift, extend, join and split windows. After every other batch the query stops and is restarted."""
    rng = random.Random(7)
    events: list[Event] = []
    for batch in range(4):
        some = [
            Event(rng.randrange(3), SECOND * t, rng.randrange(100), rng.random() < 0.2)
            # Of one instant no two: which of them is first in a count window would be a matter of Spark's order.
            for t in rng.sample(range(1000 + max(0, 20 * batch - 60), 1000 + 20 * batch + 20), 12)
        ]
        some = [e for e in some if all((e.key, e.t) != (o.key, o.t) for o in events)]
        events += some
        stream.put([(e.key, e.t / SECOND, e.value, e.mark) for e in some])
        if batch % 2:
            sink.run(query(stream))
    end = 5000 * SECOND
    for _ in range(2):
        stream.put([(99, end / SECOND, 0, False)])
    rows = sink.run(query(stream))
    found = {p: (row["n"], row["total"]) for p, row in last_panes(rows).items() if row["k"] != 99}
    assert found == truth(events, end)
    assert any(row["kind"] == "retracted" for row in rows)
    assert not any(row["kind"] == "dropped" for row in rows)


def query(stream: FileStream) -> Any:
    return aion.windowed(
        stream.read(DDL).withWatermark("ts", "0 seconds"),
        key="k",
        time="ts",
        windows=WINDOWS,
        aggregates={"n": A.count(), "total": A.sum("v")},
        policy=BOUND,
    )


CUT = {
    "shift": aion.Session("5 seconds", max_duration="12 seconds"),
    "lease": aion.Session(gap_column="gap"),
    "recent": aion.PerRecord("3 seconds", on_arrival="emit"),
}


@pytest.mark.proof
def test_cut_sessions_gaps_from_a_column_and_windows_on_arrival_over_a_restart(spark: Any, tmp_path: Any) -> None:
    """The first query takes the first batch, a restarted one the others. The gaps are Spark's intervals."""
    types = [("k", pa.int64()), ("ts", pa.timestamp("us", "UTC")), ("v", pa.int64()), ("s", pa.int64())]
    stream, sink = FileStream(spark, tmp_path / "in", pa.schema(types)), Sink(tmp_path)

    def rows() -> list[dict[str, Any]]:
        events = stream.read("k bigint, ts timestamp, v bigint, s bigint")
        return sink.run(
            aion.windowed(
                events.withColumn("gap", F.expr("make_dt_interval(0, 0, 0, s)")).withWatermark("ts", "0 seconds"),
                key="k",
                time="ts",
                windows=CUT,
                aggregates={"n": A.count(), "total": A.sum("v")},
                policy=BOUND,
            )
        )

    rng = random.Random(3)
    batches = [
        [
            Event(rng.randrange(2), SECOND * t, rng.randrange(100), gap=rng.choice([2, 4, 9, 0, None]))
            for t in rng.sample(range(begin, begin + 40), 20)
        ]
        for begin in (1000, 1020, 990)
    ]
    for batch in batches:
        stream.put([(e.key, e.t / SECOND, e.value, e.gap) for e in batch])
        found = rows() if batch is batches[0] else []
        own = {(e.key, e.t) for e in batch} if found else set()
        assert own <= {(r["k"], micros(r["window_end"])) for r in found if r["window"] == "recent"}, "none waits"
    for _ in range(2):
        stream.put([(99, 5000, 0, None)])
    every = [e._replace(gap=e.gap and e.gap * SECOND) for batch in batches for e in batch]
    expected = {}
    for name, definition in CUT.items():
        for key in range(2):
            own_events = [e for e in every if e.key == key and (name != "lease" or e.gap)]
            for w in windows_of(definition, own_events):
                expected[name, key, w.start, w.end] = (len(w.events), sum(e.value for e in w.events))
    last = rows()
    panes = [row for row in last if row["k"] != 99 and row["kind"] != "dropped"]
    assert {p: (row["n"], row["total"]) for p, row in last_panes(panes).items()} == expected
    assert {row["kind"] for row in panes} == {"on_time", "late", "retracted"}
    reasons = {(row["reason"], row["window"]) for row in last if row["kind"] == "dropped"}
    assert reasons == {("the gap is null", "lease"), ("the gap is not positive", "lease")}
