"""Texts that are not UTF-8: replaced, or dropped with a reason."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.core.ingest.encoding import settled

BAD = b"b\xff\xfeb"
SHOWN = "b\ufffd\ufffdb"
DEEP = pa.list_(pa.struct([("x", pa.string()), ("raw", pa.binary()), ("m", pa.map_(pa.string(), pa.string()))]))
DEEP_BYTES = pa.list_(pa.struct([("x", pa.binary()), ("raw", pa.binary()), ("m", pa.map_(pa.binary(), pa.binary()))]))


def events(texts: list[bytes | None], times: list[int] | None = None) -> pa.Table:
    count = len(texts)
    return pa.table(
        {
            "k": pa.array(texts, pa.binary()).view(pa.string()),
            "ts": pa.array(times or range(count), pa.timestamp("us", "UTC")),
            "n": pa.array(range(count), pa.int64()),
        }
    )


def spec(**changes: Any) -> aion.Spec:
    given: dict[str, Any] = {
        "key": None,
        "time": "ts",
        "windows": aion.Tumbling("1 second"),
        "aggregates": {
            "all": A.collect_list("k"), "least": A.min("k"), "top": A.max_by("k", "n"), "first": A.first("k"),
        },
        "bound": "1 minute",
    }  # fmt: skip
    return aion.Spec(**given | changes)


def run(asked: aion.Spec, table: pa.Table) -> list[dict[str, Any]]:
    operator = aion.LocalOperator(asked, input_schema=table.schema)
    rows: list[dict[str, Any]] = operator.process(table, 0).to_pylist()
    rows += operator.process(table[:0], 5_000_000).to_pylist()
    return rows + operator.close().to_pylist()


def test_they_are_replaced() -> None:
    (row,) = run(spec(), events([b"a", None, BAD]))
    assert (row["all"], row["least"], row["top"], row["first"]) == (["a", SHOWN], "a", SHOWN, "a")


def test_they_are_dropped_by_choice() -> None:
    dropped, row = run(spec(policy={"blocks": {"bad_text": "drop"}}), events([b"a", BAD, None]))
    assert (dropped["kind"], dropped["reason"], dropped["events"]) == ("dropped", "a text is not UTF-8", 1)
    assert (row["all"], row["events"]) == (["a"], 2)


def concatenated(key: Any, window: Any, events: Any) -> dict[str, Any]:
    return {"texts": [text for batch in events for text in batch.column("k").to_pylist()]}


@pytest.mark.parametrize("windows", [aion.Tumbling("1 second"), aion.Session("1 second"), aion.Count(2)])
def test_a_function_gets_them_replaced(windows: Any) -> None:
    asked = spec(
        windows=windows,
        aggregates=None,
        apply=aion.Apply(concatenated, "texts array<string>", columns=["k"]),
    )
    assert [row["texts"] for row in run(asked, events([b"a", BAD]))] == [["a", SHOWN]]


def test_a_dropped_event_can_be_read() -> None:
    policy = {"blocks": {"bad_text": "drop"}}
    asked = spec(aggregates=None, apply=aion.Apply(concatenated, "texts array<string>"), policy=policy)
    (dropped,) = (row for row in run(asked, events([BAD, b"a"])) if row["kind"] == "dropped")
    assert SHOWN in dropped["event"]


@pytest.mark.parametrize("windows", [aion.Session("1 second"), [aion.Count(2), aion.Tumbling("1 second")]])
def test_each_event_has_one_reason(windows: Any) -> None:
    table = events([BAD, BAD, b"a"]).set_column(1, "ts", pa.array([None, 1, 2], pa.timestamp("us", "UTC")))
    rows = run(
        spec(windows=windows, aggregates={"n": A.count()}, unique=["k"], policy={"blocks": {"bad_text": "drop"}}), table
    )
    dropped = {row["reason"]: row["events"] for row in rows if row["kind"] == "dropped"}
    assert sum(dropped.values()) == 2
    assert "a text is not UTF-8" in dropped


BYTES = st.none() | st.sampled_from([b"a", "ä".encode(), BAD, b"\xc3", b""])


@given(
    st.lists(
        st.none() | st.lists(st.tuples(BYTES, st.lists(st.tuples(BYTES.filter(bool), BYTES), max_size=2)), max_size=2)
    )
)
def test_all_texts_in_a_column_are_settled(values: list[Any]) -> None:
    rows = [None if row is None else [{"x": x, "raw": x, "m": m} for x, m in row] for row in values]
    column = pa.array(rows, DEEP_BYTES).view(DEEP)

    def shown(text: bytes | None) -> str | None:
        return None if text is None else text.decode("utf-8", "replace")

    wanted = [
        None if row is None else [{"x": shown(x), "raw": x, "m": [(shown(k), shown(v)) for k, v in m]} for x, m in row]
        for row in values
    ]
    batch, bad = settled(pa.record_batch({"c": column}))
    batch.validate(full=True)
    assert batch.column("c").to_pylist() == wanted
    is_bad = [
        row is not None
        and any("\ufffd" in (shown(text) or "") for x, m in row for text in (x, *(t for p in m for t in p)))
        for row in values
    ]
    assert ([False] * len(values) if bad is None else bad.tolist()) == is_bad
