"""``completeness=True``: which rows say how complete they are, and which say nothing."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import aion
from aion import aggregates as A
from aion.errors import ConfigError, SchemaError
from tests.local.seconds import at

COLUMNS = ("completeness", "completeness_low")
COUNTED = {"aggregates": {"n": A.count()}}
APPLIED = {"apply": aion.Apply(lambda key, window, events: [{"n": 1}, {"n": 2}], "n bigint")}
BOTH = pytest.mark.parametrize("what", [COUNTED, {**APPLIED, "aggregates": None}], ids=["aggregates", "apply"])


def operator(windows: Any = None, **what: Any) -> aion.LocalOperator:
    given: dict[str, Any] = {"policy": {"lateness": {"initial_bound": "5 s", "coverage": None}}, **COUNTED, **what}
    return aion.LocalOperator(windows=windows or aion.Tumbling("1 s"), time="ts", key="k", completeness=True, **given)


def said(rows: list[dict[str, Any]]) -> set[tuple[float | None, ...]]:
    return {tuple(row[name] for name in COLUMNS) for row in rows}


def table(seconds: list[float], keys: list[str] | None = None) -> pa.Table:
    return pa.table({"ts": at(*seconds), "k": keys or ["a"] * len(seconds)})


@BOTH
def test_the_last_row_is_complete_and_the_first_ones_are_unknown(what: dict[str, Any]) -> None:
    with operator(**what, policy={"lateness": {"initial_bound": "5 s"}, "trigger": {"kind": "interval"}}) as local:
        rows = local.process(table([0.5])).to_pylist() + local.advance(1_000_000).to_pylist()
        assert {row["kind"] for row in rows} == {"on_time"} and said(rows) == {(None, None)}
        rows = local.process(table([0.7])).to_pylist() + local.advance(6_000_000).to_pylist()
        assert {row["kind"] for row in rows} == {"final"} and said(rows) == {(1.0, 1.0)}
        (row,) = local.process(table([0.8])).to_pylist()[:1]
        assert row["kind"] == "dropped" and said([row]) == {(None, None)}


def test_a_window_that_is_over_at_once_is_complete() -> None:
    with operator() as local:
        local.process(table([0.5]))
        assert said(local.advance(60_000_000).to_pylist()) == {(1.0, 1.0)}


def of_a_stream(windows: Any, what: dict[str, Any], length: int = 60, **more: Any) -> list[dict[str, Any]]:
    """Each second a fifth of the events of a window come two seconds after its end. Without dropped rows."""
    rows: list[dict[str, Any]] = []
    with operator(windows, **what, **more) as local:
        for second in range(1, length):
            seconds = [second - 0.5] * 16 + [second - 3.5] * 4 * (second > 3)
            keys = (["a"] * 8 + ["b"] * 8 + ["a"] * 2 + ["b"] * 2)[: len(seconds)]
            rows += local.process(table(seconds, keys), (second - 1) * 1_000_000).to_pylist()
    return [row for row in rows if row["kind"] != "dropped"]


@pytest.mark.slow(but_first=True)
@BOTH
@pytest.mark.parametrize("lateness", [None, "3 s"], ids=["bound of the policy", "bound of its own"])
def test_the_one_row_of_a_final_result_is_complete(what: dict[str, Any], lateness: str | None) -> None:
    rows = of_a_stream(aion.Tumbling("1 s", bound=lateness), what, length=30, emit="final")
    assert len(rows) >= 40 and {row["kind"] for row in rows} == {"final"}
    assert said(rows) == {(1.0, 1.0)} and max(row["events"] for row in rows) == 10


@pytest.mark.slow
@BOTH
def test_early_rows_say_nothing_and_later_ones_do(what: dict[str, Any]) -> None:
    """The watermark passes the middle of each window."""
    rows = of_a_stream(aion.Tumbling("2 s", early="1 s"), what)
    early = [row for row in rows if row["kind"] == "early"]
    assert len(early) >= 50 and said(early) == {(None, None)}
    known = [row for row in rows if row["kind"] == "on_time" and row["window_end"].timestamp() > 40]
    assert len(known) >= 15
    for row in known:
        assert row["completeness"] == pytest.approx(0.8) == row["completeness_low"]


@pytest.mark.parametrize("windows", [aion.Session("1 s"), aion.Count(1), aion.PerRecord("1 s")])
def test_windows_of_single_keys_say_nothing(windows: Any) -> None:
    with operator(windows) as local:
        rows = local.process(table([0.5, 0.6])).to_pylist() + local.advance(60_000_000).to_pylist()
    assert rows and said(rows) == {(None, None)}


@pytest.mark.slow
@BOTH
def test_what_is_learned_is_said(what: dict[str, Any]) -> None:
    rows = of_a_stream(None, what)
    known = [row for row in rows if row["window_end"].timestamp() > 40 and row["kind"] == "on_time"]
    assert len(known) >= 30
    for row in known:
        assert row["completeness"] == pytest.approx(0.8) == row["completeness_low"]


def test_columns_come_only_if_asked_for() -> None:
    with operator(input_schema="ts timestamp, k string") as local:
        names = local.advance(0).schema.names
    assert names[names.index("late_events") + 1 :][:4] == ["closes_at", "pane_seq", *COLUMNS]
    with aion.LocalOperator(windows=aion.Tumbling("1 s"), time="ts", **COUNTED) as local:
        local.process(pa.table({"ts": at(0.5)}))
        assert not set(COLUMNS) & set(local.advance(0).schema.names)


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ConfigError, match=r"completeness: 0\.9 is neither True nor False"):
        aion.Spec(windows=aion.Tumbling("1 s"), time="ts", completeness=0.9, **COUNTED)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="'completeness_low' is a column that every result has"):
        operator(aggregates={"completeness_low": A.count()}, input_schema="ts timestamp, k string").close()
