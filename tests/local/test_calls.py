"""What calls of LocalOperator say, and refuse."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given

import aion
from aion import aggregates as A
from aion.errors import AionError, ConfigError, IntegerOverflow, PolicyError, SchemaError, WindowError
from tests.durations import us
from tests.local.scenarios import (
    AGGREGATES,
    FOREVER,
    Scenario,
    in_order,
    plain,
    policy,
    rows_of,
    scenarios,
    table,
    window_of,
)
from tests.local.seconds import EVENTS, at, seconds_operator


def test_the_columns_of_a_result() -> None:
    with seconds_operator(key=["k"]) as operator:
        operator.process(pa.table({"ts": at(1), "k": ["a"]}))
        (row,) = operator.advance(datetime(1970, 1, 1, 0, 0, 10, tzinfo=UTC)).to_pylist()
    epoch = datetime(1970, 1, 1, tzinfo=UTC)
    assert row == {
        "k": "a", "window": "tumbling 10 seconds", "window_start": epoch, "window_end": epoch + timedelta(seconds=10),
        "n": 1, "pane": 0, "kind": "on_time", "events": 1, "late_events": 0,
        "closes_at": epoch + timedelta(seconds=610), "pane_seq": 0,
        "event_time": None, "lateness_us": None, "reason": None, "event": None,
    }  # fmt: skip


def test_what_late_events_trigger_comes_out_of_the_call_that_brings_them() -> None:
    with seconds_operator(policy={"trigger": {"kind": "every_batch"}}) as operator:
        operator.process(pa.table({"ts": at(1)}))
        assert operator.advance(10_000_000)["kind"].to_pylist() == ["on_time"]
        assert operator.process(pa.table({"ts": at(2)}))["events"].to_pylist() == [2]
        assert operator.process(pa.table({"ts": at(3)}))["events"].to_pylist() == [3]
        assert operator.advance(10_000_001).num_rows == 0
        assert operator.close().num_rows == 0, "nothing came since"


def test_what_waits_for_its_trigger_comes_out_of_the_call_that_ends_the_wait() -> None:
    def operator(trigger: dict[str, Any]) -> aion.LocalOperator:
        operator = seconds_operator(policy={"trigger": trigger, "lateness": {"initial_bound": "1 hour"}})
        operator.process(pa.table({"ts": at(1)}))
        assert operator.advance(10_000_000)["events"].to_pylist() == [1]
        assert operator.process(pa.table({"ts": at(2)})).num_rows == 0, "it waits"
        return operator

    with operator({"kind": "count", "count": 2}) as counting:
        assert counting.process(pa.table({"ts": at(3)}))["events"].to_pylist() == [3]
        assert counting.process(pa.table({"ts": at(4)})).num_rows == 0
        assert counting.close()["events"].to_pylist() == [4]
        assert counting.close().num_rows == 0, "closing again says nothing"
    with operator({"kind": "interval", "interval": "5 s"}) as waiting:
        assert waiting.advance(14_999_999).num_rows == 0
        assert waiting.advance(15_000_000)["events"].to_pylist() == [2]


def test_a_batch_as_on_spark_moves_the_watermark_first_and_runs_late_windows_once() -> None:
    policy = {"trigger": {"kind": "interval", "interval": "5 s"}, "lateness": {"initial_bound": "1 hour"}}
    with seconds_operator(policy=policy) as operator:
        operator.process(pa.table({"ts": at(1)}))
        rows = operator.process(pa.table({"ts": at(2, 11)}), 10_000_000)
        assert [(r["kind"], r["events"]) for r in rows.to_pylist()] == [("on_time", 1)]
        rows = operator.process(pa.table({"ts": at(3)}), datetime(1970, 1, 1, 0, 0, 20, tzinfo=UTC))
        assert [(r["kind"], r["events"]) for r in rows.to_pylist()] == [("on_time", 1), ("late", 3)]


FUNCTION = {
    "aggregates": None,
    "apply": aion.Apply(lambda key, window, events: {"n": 0, "s": "x"}, "n bigint, s string"),
}
INPUT = pa.schema([("ts", pa.timestamp("us", "UTC")), ("k", pa.dictionary(pa.int32(), pa.string())), ("v", pa.int32())])


@pytest.mark.parametrize("definition", [{"aggregates": {"n": A.count(), "s": A.sum("v")}}, FUNCTION])
@pytest.mark.parametrize("input_schema", [INPUT, "ts timestamp, k string, v int"])
def test_an_answer_before_any_data_has_the_schema_of_all_others(definition: dict[str, Any], input_schema: Any) -> None:
    with seconds_operator(key="k", input_schema=input_schema, **definition) as operator:
        first = operator.advance(5_000_000)
        answers = [operator.process(INPUT.empty_table()), operator.advance(20_000_000), operator.close()]
    assert first.num_rows == 0
    assert {"k", "window_start", "n", "s", "kind", "lateness_us"} <= set(first.column_names)
    assert [answer.schema for answer in answers] == [first.schema] * 3
    unused = seconds_operator(key="k", input_schema=input_schema, **definition)
    assert [unused.close().schema, unused.close().schema] == [first.schema] * 2


@pytest.mark.parametrize("definition", [{"aggregates": {"n": A.count(), "s": A.sum("v")}}, FUNCTION])
@pytest.mark.parametrize("key", [None, "k", ["k", "v"]])
def test_without_the_inputs_schema_an_answer_has_at_least_all_columns(definition: dict[str, Any], key: Any) -> None:
    with seconds_operator(key=key, **definition) as operator:
        first = operator.advance(5_000_000)
        later = operator.process(INPUT.empty_table())
    unused = seconds_operator(key=key, **definition)
    assert first.schema == unused.close().schema
    assert first.column_names == later.column_names
    for before, after in zip(first.schema, later.schema, strict=True):
        assert before.type in (after.type, pa.null()), before.name
    if "apply" in definition:
        assert first.schema.field("s").type == pa.string()
    both = pa.concat_tables([first, later], promote_options="permissive")
    assert both.schema == later.schema


def test_a_definition_that_does_not_fit_the_inputs_schema_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SchemaError, match="'k'"):
        seconds_operator(key="k", input_schema="ts timestamp")
    with pytest.raises(SchemaError, match="dubble"):
        seconds_operator(input_schema="ts dubble")
    assert list(tmp_path.iterdir()) == []


def test_a_watermark_may_come_before_the_first_events() -> None:
    with seconds_operator(policy={"lateness": {"initial_bound": 0}}) as operator:
        operator.advance(20_000_000)
        operator.advance(10_000_000)
        rows = operator.process(pa.table({"ts": at(9, 25)})).to_pylist()
    assert [(r["kind"], r["lateness_us"], r["events"]) for r in rows] == [("dropped", 10_000_000, 1)]


def test_times_keep_the_zone_that_they_have() -> None:
    naive = pa.array([1_000_000], pa.int64()).cast(pa.timestamp("us"))
    for times, zone in [(naive, None), (at(1), "UTC"), (at(1).cast(pa.timestamp("ms", "Europe/Paris")), "UTC")]:
        with seconds_operator() as operator:
            operator.process(pa.table({"ts": times}))
            start = operator.advance(FOREVER)["window_start"]
        assert start.type == pa.timestamp("us", zone)
        assert start.cast(pa.int64()).to_pylist() == [0]


def test_keys_and_values_may_be_dictionaries() -> None:
    encoded = pa.array(["a", "b", "a", None]).dictionary_encode()
    with seconds_operator(key="k", aggregates={"hi": A.max("v")}) as operator:
        operator.process(pa.table({"ts": at(1, 2, 3, 4), "k": encoded, "v": encoded}))
        rows = operator.advance(FOREVER).select(["k", "hi"]).to_pylist()
    assert in_order(rows) == in_order([{"k": v, "hi": v} for v in ("a", "b", None)])


@pytest.mark.parametrize(
    "definition",
    [
        {"aggregates": {"n": A.count()}},
        {"apply": aion.Apply(len, "n bigint")},
    ],
)
def test_keys_that_spark_takes_for_one_are_one(definition: dict[str, Any]) -> None:
    """Spark's groups: 0.0 and -0.0 are the same key, and so is every NaN."""
    if "apply" in definition:
        counted = aion.Apply(lambda key, window, events: {"n": sum(b.num_rows for b in events)}, "n bigint")
        definition = {"apply": counted}
    keys = [0.0, -0.0, math.nan, math.nan, None, None]
    with seconds_operator(key="k", **{"aggregates": None, **definition}) as operator:
        operator.process(pa.table({"ts": at(*range(6)), "k": pa.array(keys, pa.float64(), from_pandas=False)}))
        rows = operator.advance(FOREVER).select(["k", "n"]).to_pylist()
    assert in_order([plain(r) for r in rows]) == in_order([{"k": k, "n": 2} for k in (0.0, "NaN", None)])


def test_only_keys_that_changed_are_yielded_again() -> None:
    called = []

    def seen(key: tuple[Any, ...], window: aion.Window, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
        called.append(key[0])
        return {"n": sum(b.num_rows for b in batches)}

    for definition in (
        {"aggregates": {"n": A.count()}},
        {"aggregates": None, "apply": aion.Apply(seen, "n bigint")},
    ):
        with seconds_operator(key="k", **definition) as operator:
            operator.process(pa.table({"ts": at(1, 2), "k": ["a", "b"]}))
            operator.advance(10_000_000)
            operator.process(pa.table({"ts": at(3), "k": ["b"]}))
            rows = operator.close().select(["k", "n", "events", "late_events", "pane"]).to_pylist()
        assert rows == [{"k": "b", "n": 2, "events": 2, "late_events": 1, "pane": 1}]
    assert sorted(called) == ["a", "b", "b"]


def test_the_events_of_a_key_stay_in_the_order_of_arrival() -> None:
    count = 5_000
    keys = np.random.default_rng(3).integers(0, 3, count)
    events = pa.table({"ts": at(*[1] * count), "k": keys, "id": np.arange(count)})

    def listed(key: Any, window: Any, batches: Iterator[pa.RecordBatch]) -> dict[str, Any]:
        return {"ids": [i for b in batches for i in b["id"].to_pylist()]}

    small = {"blocks": {"target": "4KiB"}}
    applied = aion.Apply(listed, "ids array<bigint>")
    with seconds_operator(key="k", aggregates=None, apply=applied, policy=small) as operator:
        operator.process(events)
        rows = operator.advance(FOREVER).to_pylist()
    assert {row["k"]: row["ids"] for row in rows} == {k: np.flatnonzero(keys == k).tolist() for k in range(3)}


def test_many_keys_with_many_values_are_kept_apart() -> None:
    """Their combinations are more than 64 bits can number."""
    values = [*range(1024)]
    columns: dict[str, Any] = {f"k{i}": [*values, *[0] * 1023] for i in range(7)}
    columns["k0"] = [*values, *values[1:]]
    counted = {"apply": aion.Apply(lambda key, window, batches: {"n": sum(b.num_rows for b in batches)}, "n bigint")}
    with seconds_operator(key=list(columns), aggregates=None, **counted) as operator:
        operator.process(pa.table({"ts": at(*[1] * 2047), **columns}))
        rows = operator.advance(FOREVER).to_pylist()
    assert Counter(row["n"] for row in rows) == Counter({1: 2047})


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"time": "when"}, SchemaError, "'when'.*ts, k, v"),
        ({"time": "v"}, SchemaError, "'v'.*int64.*timestamp"),
        ({"key": "segment"}, SchemaError, "'segment'.*ts, k, v"),
        ({"key": ["k", "k"]}, SchemaError, "twice"),
        ({"key": "l"}, SchemaError, "'l'.*list"),
        ({"aggregates": {"n": A.sum("speed")}}, SchemaError, "speed"),
        ({"aggregates": {"n": A.sum("k")}}, SchemaError, "string"),
        ({"aggregates": {}}, ConfigError, "none given"),
        ({"aggregates": None}, ConfigError, "aggregates=.*apply="),
        ({"apply": aion.Apply(len, "n bigint")}, ConfigError, "not both"),
        ({"aggregates": None, "apply": len}, ConfigError, "schema"),
        ({"aggregates": None, "apply": aion.Apply(len, "n dubble")}, SchemaError, "dubble"),
        ({"aggregates": None, "apply": aion.Apply(len, "kind int")}, SchemaError, "'kind'"),
        ({"aggregates": {"pane": A.count()}}, SchemaError, "'pane'"),
        ({"aggregates": {"k": A.count()}, "key": "k"}, SchemaError, "'k'"),
        ({"windows": []}, WindowError, "none"),
        ({"windows": "1 minute"}, WindowError, "not a window"),
        ({"windows": [aion.Tumbling(us(5)), aion.Tumbling(us(5))]}, WindowError, "twice"),
        ({"policy": {"distribution": {"merge_levels": -1}}}, PolicyError, "merge_levels: -1"),
        ({"policy": {"distribution": {"fan_in": 1}}}, PolicyError, "fan_in: 1"),
    ],
)
def test_a_definition_that_cannot_be(options: dict[str, Any], error: type[AionError], said: str) -> None:
    with pytest.raises(error, match=said), seconds_operator(**options) as operator:
        operator.process(EVENTS)


@pytest.mark.parametrize("policy", ["nowhere", {"memory": {"budjet": 1}}, {"lateness": {"initial_bound": "-5m"}}])
def test_a_policy_that_cannot_be_leaves_nothing_behind(policy: Any) -> None:
    with pytest.raises(PolicyError):
        seconds_operator(policy=policy)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (EVENTS.drop_columns(["v"]), "'v'"),
        (EVENTS.set_column(2, "v", pa.array(["x"])), "x"),
        (EVENTS.set_column(2, "v", pa.array([[1]])), "list"),
        (EVENTS.set_column(0, "ts", pa.array([[1]])), "list"),
    ],
    ids=["missing", "no number", "a list", "no time"],
)
def test_a_later_table_that_does_not_fit_is_refused(wrong: pa.Table, said: str) -> None:
    with seconds_operator(aggregates={"s": A.sum("v")}) as operator:
        operator.process(EVENTS)
        with pytest.raises(SchemaError, match=said):
            operator.process(wrong)
        operator.process(EVENTS)
        assert operator.advance(FOREVER)["s"].to_pylist() == [2], "and nothing has happened"


@pytest.mark.parametrize("type_", [pa.string_view(), pa.binary_view(), pa.float16()], ids=str)
def test_keys_and_values_may_have_types_of_which_pyarrow_can_compute_little(type_: pa.DataType) -> None:
    plain = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary(), pa.float16(): pa.float32()}[type_]
    values = pa.array(["1.5", "0.25", "1.5"]).cast(plain).cast(type_)
    with seconds_operator(key="k", aggregates={"n": A.count(), "last": A.max("v")}) as operator:
        operator.process(pa.table({"ts": at(1, 2, 3), "k": values, "v": values}))
        rows = operator.advance(FOREVER)
    assert rows.schema.field("k").type == plain
    assert Counter(rows["n"].to_pylist()) == Counter([1, 2]) and rows["last"].to_pylist() == rows["k"].to_pylist()


def test_two_columns_of_one_name_are_refused() -> None:
    with seconds_operator() as operator, pytest.raises(SchemaError, match="the table has 2 columns 'k'"):
        operator.process(pa.table([at(1), ["a"], ["b"]], names=["ts", "k", "k"]))


@pytest.mark.parametrize("wrong", [5, {"ts": [1]}, None, [EVENTS]])
def test_what_is_no_table_is_refused(wrong: Any) -> None:
    with seconds_operator() as operator, pytest.raises(TypeError, match="a pyarrow table or record batch is needed"):
        operator.process(wrong)


def test_a_closed_operator_says_so() -> None:
    for events in (EVENTS, None):
        with seconds_operator() as operator:
            if events is not None:
                operator.process(events)
        for call in (lambda o: o.process(EVENTS), lambda o: o.advance(FOREVER)):
            with pytest.raises(ConfigError, match="this operator is closed"):
                call(operator)
        assert operator.close().num_rows == 0


def test_a_place_where_nothing_can_be_recorded_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        seconds_operator(policy={"trace": {"folder": tmp_path / "file"}}) as operator,
        pytest.raises(ConfigError, match=r"trace.folder: .*file"),
    ):
        operator.process(EVENTS)


def test_a_watermark_that_is_no_instant() -> None:
    with seconds_operator() as operator, pytest.raises(ConfigError, match="'soon'"):
        operator.advance("soon")  # type: ignore[arg-type]


def test_a_sum_beyond_64_bits_is_an_error() -> None:
    with seconds_operator(aggregates={"s": A.sum("v")}) as operator:
        operator.process(pa.table({"ts": at(1, 2), "v": [2**63 - 1, 0]}))
        operator.process(pa.table({"ts": at(1), "v": [1]}))
        with pytest.raises(IntegerOverflow, match="9223372036854775808"):
            operator.advance(FOREVER)


def test_a_watermark_that_ends_a_window_and_the_events_after_it_come_in_one_call() -> None:
    """The segment of the window that is gone is also the segment of a window that begins with these events."""
    settings = {"lateness": {"initial_bound": 0, "coverage": None}}

    def event(time: int) -> pa.Table:
        return pa.table({"t": pa.array([time], pa.timestamp("us"))})

    with aion.LocalOperator(
        windows=aion.Sliding(us(50), us(20), us(5)), time="t", aggregates={"n": A.count()}, policy=settings
    ) as operator:
        operator.process(event(422), 435)
        rows = operator.process(event(429), 455).to_pylist()
        assert [(row["kind"], row["n"]) for row in rows if row["kind"] != "dropped"] == [("on_time", 1)]
        operator.process(event(466), 470)
        assert operator.advance(485).column("n").to_pylist() == [2]


@given(scenario=scenarios())
def test_a_watermark_with_events_is_a_watermark_and_then_events(scenario: Scenario) -> None:
    how = {"key": scenario.key, "time": "ts", "aggregates": AGGREGATES, "policy": policy("standard", scenario.bound)}
    windows = {f"w{i}": window_of(d, bound=us(d.bound)) for i, d in enumerate(scenario.definitions)}
    watermark = 0
    with aion.LocalOperator(windows=windows, **how) as one, aion.LocalOperator(windows=windows, **how) as two:
        for step in scenario.steps:
            if isinstance(step, int):
                watermark += abs(step) // 4
                continue
            apart = [*rows_of(two.advance(watermark)), *rows_of(two.process(table(step)))]
            together = rows_of(one.process(table(step), watermark))
            assert sorted(map(repr, together)) == sorted(map(repr, apart))
        assert sorted(map(repr, rows_of(one.advance(FOREVER)))) == sorted(map(repr, rows_of(two.advance(FOREVER))))


@pytest.mark.parametrize(
    ("type_", "advice"),
    [
        (
            pa.struct([("a", pa.int64()), ("b", pa.string())]),
            r"withColumns.*events\['who'\]\['a'\].*key=\['who_a', 'who_b'\]",
        ),
        (pa.list_(pa.int64()), r"to_json\('who'\).*key='who_text'"),
        (pa.map_(pa.string(), pa.int64()), r"to_json\('who'\).*key='who_text'"),
    ],
    ids=["struct", "array", "map"],
)
def test_a_nested_key_is_refused_with_what_to_write_instead(type_: pa.DataType, advice: str) -> None:
    schema = pa.schema([("who", type_), ("t", pa.timestamp("us", "UTC"))])
    with pytest.raises(SchemaError, match=advice):
        aion.LocalOperator(
            windows=aion.Tumbling("1 minute"), time="t", key="who", aggregates={"n": A.count()}, input_schema=schema
        )
