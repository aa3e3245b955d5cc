"""Early and final panes on Spark, over a restart."""

from __future__ import annotations

from typing import Any

import pytest

import aion
from aion import aggregates as A
from tests.spark.conftest import EVENTS_DDL, FileStream, Sink

POLICY = {"lateness": {"initial_bound": "30 seconds", "coverage": None}, "trigger": {"kind": "every_batch"}}


def brief(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return sorted((r["window"], r["kind"], r["pane"], r["k"], r["n"]) for r in rows)


@pytest.mark.slow
@pytest.mark.parametrize("emit", ["all", pytest.param("final", marks=pytest.mark.proof)])
def test_early_and_final_panes_over_a_restart(stream: FileStream, sink: Sink, emit: Any) -> None:
    early = {"early": "10 seconds"} if emit == "all" else {}

    def panes() -> Any:
        return aion.windowed(
            stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"),
            key="k",
            time="ts",
            windows={
                "minute": aion.Tumbling("1 minute", **early),
                "visit": aion.Session("20 seconds", bound="1 minute", **early),
            },
            aggregates={"n": A.count()},
            policy=POLICY,
            emit=emit,
        )

    stream.put([("a", 1200, 1.0), ("b", 1210, 1.0)])
    stream.put([("a", 1215, 1.0)])
    stream.put([("a", 1216, 1.0)])
    first = sink.run(panes())
    stream.put([("b", 1305, 1.0)])
    stream.put([("c", 9000, 1.0)])
    stream.put([("c", 9001, 1.0)])
    second = [row for row in sink.run(panes()) if row["k"] != "c" and row not in first]
    if emit == "final":
        assert first == []
        assert brief(second) == [
            ("minute", "final", 0, "a", 3), ("minute", "final", 0, "b", 1), ("minute", "final", 0, "b", 1),
            ("visit", "final", 0, "a", 3), ("visit", "final", 0, "b", 1), ("visit", "final", 0, "b", 1),
        ]  # fmt: skip
        return
    # At the first watermark, 1210, a had two events. Then it moved to 1215 and 1216: less than 10 seconds more.
    assert brief(first) == [
        ("minute", "early", 0, "a", 2), ("minute", "early", 0, "b", 1),
        ("visit", "early", 0, "a", 2), ("visit", "early", 0, "b", 1),
    ]  # fmt: skip
    assert {(r["window"], r["k"], r["closes_at"].timestamp()) for r in first} == {
        ("minute", "a", 1290.0), ("minute", "b", 1290.0), ("visit", "a", 1295.0), ("visit", "b", 1290.0),
    }  # fmt: skip
    on_time = [row for row in second if row["kind"] == "on_time"]
    assert sorted((r["window"], r["k"], r["n"]) for r in on_time) == [
        ("minute", "a", 3), ("minute", "b", 1), ("minute", "b", 1),
        ("visit", "a", 3), ("visit", "b", 1), ("visit", "b", 1),
    ]  # fmt: skip
    assert [r["pane"] for r in on_time if r["window"] == "minute" and r["k"] == "a"] == [1], "numbers go on"
    assert sum(r["kind"] == "retracted" for r in second) == 1, "the visit of a has grown since its early pane"


@pytest.mark.proof
def test_the_first_early_panes_need_no_further_rows(stream: FileStream, sink: Sink) -> None:
    """A shard whose rows all came in the first batch is woken by any watermark, also by one before its windows."""
    panes = aion.windowed(
        stream.read(EVENTS_DDL).withWatermark("ts", "10 minutes"),
        key="k",
        time="ts",
        windows={
            "visit": aion.Session("1 hour", early="1 minute"),
            "tens": aion.Count(10, early="1 minute"),
            "minute": aion.Tumbling("1 minute", early="batch"),
        },
        aggregates={"n": A.count()},
        policy=POLICY,
    )
    keys = "abcdefgh"
    stream.put([(key, 1200 + at, 1.0) for at, key in enumerate(keys)])
    assert brief(sink.run(panes)) == sorted(
        (w, "early", 0, key, 1) for w in ("minute", "tens", "visit") for key in keys
    )


def test_early_panes_of_each_batch_come_though_the_watermark_stands(stream: FileStream, sink: Sink) -> None:
    panes = aion.windowed(
        stream.read(EVENTS_DDL).withWatermark("ts", "0 seconds"),
        key="k",
        time="ts",
        windows=aion.Tumbling("1 hour", early="batch"),
        aggregates={"n": A.count()},
        bound="5 minutes",
        trigger="every_batch",
    )
    for second in (1230, 1215, 1216, 1217):  # the watermark is 1230 from the second batch on
        stream.put([("a", second, 1.0)])
    rows = sink.run(panes)
    assert [(row["kind"], row["pane"], row["n"]) for row in rows] == [("early", pane, pane + 2) for pane in range(3)]
    assert {(row["closes_at"] - row["window_end"]).seconds for row in rows} == {300}
