"""A query that is started again with another definition goes on with its state, or says why it cannot."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import DataFrame

import aion
from aion import aggregates as A
from aion.errors import ForeignState
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink, last_panes

WINDOWS = {"minute": aion.Tumbling("1 minute"), "five": aion.Tumbling("5 minutes"), "quiet": aion.Session("1 minute")}


def query(stream: FileStream, windows: list[str], **changes: Any) -> DataFrame:
    definition = {
        "key": "k",
        "time": "ts",
        "windows": {name: WINDOWS[name] for name in windows},
        "aggregates": {"n": A.count()},
        "lateness": "1 hour",
        "trigger": "every_batch",
    }
    return aion.windowed(stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"), **definition | changes)


def found(rows: list[Any], *columns: str) -> dict[tuple[str, str, int], tuple[Any, ...]]:
    return {
        (window, key, int(start.timestamp())): tuple(row[name] for name in columns)
        for (key, window, start), row in last_panes(rows, "k").items()
    }


def test_windows_and_columns_come_and_go(stream: FileStream, sink: Sink) -> None:
    stream.put([("a", 10, 1.0), ("b", 70, 2.0)])
    sink.run(query(stream, ["minute"]))
    stream.put([("a", 20, 3.0), ("a", 130, 4.0), ("b", 75, 5.0)])
    rows = sink.run(query(stream, ["five", "minute"], aggregates={"n": A.count(), "top": A.max("v")}))
    stream.put([("a", 30, 6.0), ("a", 140, 7.0), ("a", 310, 8.0), ("b", 80, 9.0), ("a", 1000, 0.0)])
    rows = sink.run(query(stream, ["five"], aggregates={"n": A.count(), "top": A.max("v")}))
    stream.put([("a", 1001, 0.0)])
    rows = sink.run(query(stream, ["five"], aggregates={"n": A.count(), "top": A.max("v")}))
    last = found(rows, "n", "top")
    assert last["minute", "a", 0] == (3, None)
    assert last["minute", "b", 60] == (3, None)
    assert last["minute", "a", 120] == (2, 7.0)
    assert last["five", "a", 300] == (1, 8.0)
    assert not {key for key in last if key[0] == "five" and key[2] < 300}, "they began before the change"
    assert ("minute", "a", 300) not in last


def test_what_cannot_go_on_is_refused_with_the_reason(stream: FileStream, sink: Sink) -> None:
    stream.put([("a", 10, 1.0)])
    sink.run(query(stream, ["minute"]))
    stream.put([("a", 20, 1.0)])
    with pytest.raises(ForeignState, match=r"key: was k; is none. It cannot go on with this one: key was k \(string\)"):
        sink.run(query(stream, ["minute"], key=None))
    with pytest.raises(ForeignState, match="'quiet' is new, and its windows depend on all events of a key"):
        sink.run(query(stream, ["minute", "quiet"]))
    stream.put([("a", 100, 1.0)])
    rows = sink.run(query(stream, ["minute"]))
    stream.put([("a", 100, 1.0)])
    rows = sink.run(query(stream, ["minute"]))
    assert found(rows, "n")["minute", "a", 0] == (2,)
