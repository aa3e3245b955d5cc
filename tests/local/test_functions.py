"""Functions of the events of a window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import aion
from aion.config import load_policy
from aion.core.ingest.builder import BlockBuilder
from aion.core.query.plan import make_plan
from aion.errors import ApplyError, ConfigError, SchemaError
from aion.execute.assembly import make_operator
from aion.execute.executor import Executor
from state_backends.format.block import Block
from state_backends.store.protocol import StoredBlock
from tests.durations import us
from tests.local.scenarios import FOREVER, policy
from tests.local.seconds import EVENTS, applying, at


def one_window(operator: aion.LocalOperator, **columns: Any) -> list[dict[str, Any]]:
    with operator:
        operator.process(pa.table({"ts": at(1, 2), **columns}))
        return operator.advance(FOREVER).to_pylist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("returned", "wanted"),
    [
        ({"n": 1}, [1]),
        ([{"n": 1}, {"n": 2}], [1, 2]),
        (({"n": i} for i in range(3)), [0, 1, 2]),
        ({}, [None]),
        ([], []),
        (pa.record_batch({"n": [5, 6]}), [5, 6]),
        (pa.record_batch({"n": pa.array([5], pa.int8())}), [5]),
        (pa.table({"n": pa.chunked_array([[1], [2]])}), [1, 2]),
        (pa.table({"n": pa.array([], pa.int64())}), []),
    ],
    ids=["a mapping", "a list", "a generator", "an empty mapping", "nothing", "a batch", "a cast", "a table", "empty"],
)
def test_what_a_function_may_return(returned: Any, wanted: list[Any]) -> None:
    rows = one_window(applying(lambda key, window, batches: returned))
    assert [row["n"] for row in rows] == wanted
    assert all((row["events"], row["kind"]) == (2, "on_time") for row in rows)


def names_of(key: Any, window: Any, events: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    return {"names": ",".join(next(events).schema.names)}


@pytest.mark.parametrize(
    ("definition", "names"),
    [
        ({}, "ts,k,a,b"),
        ({"columns": "b"}, "ts,k,b"),
        ({"columns": ["b", "a"], "key": None}, "ts,a,b"),
        ({"columns": []}, "ts,k"),
        ({"columns": ["a"], "unique": "b"}, "ts,k,a,b"),
        ({"columns": [], "windows": aion.Punctuated("flag")}, "ts,k,flag"),
    ],
)
def test_which_columns_a_function_gets(definition: dict[str, Any], names: str) -> None:
    usual: dict[str, Any] = {"windows": aion.Tumbling("1 minute"), "key": "k"}
    given = {**usual, **definition}
    applied = aion.Apply(names_of, "names string", columns=given.pop("columns", None))
    operator = aion.LocalOperator(time="ts", apply=applied, **given)
    flag = {"flag": [False, True]} if "windows" in definition else {}
    shown = one_window(operator, k=[1, 1], a=[1, 2], b=[3, 4], **flag)
    assert shown[0]["names"] == names


def test_columns_that_cannot_be_given() -> None:
    usual: dict[str, Any] = {"windows": aion.Tumbling("1 minute"), "time": "ts"}
    missing = aion.Apply(names_of, "names string", columns="c")
    with aion.LocalOperator(**usual, apply=missing) as operator, pytest.raises(SchemaError, match="no column 'c'"):
        operator.process(pa.table({"ts": at(1)}))
    with pytest.raises(SchemaError, match="Apply: columns: 7 is neither"):
        aion.Apply(names_of, "names string", columns=7)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Apply: 5 cannot be called; give a function of"):
        aion.Apply(5, "names string")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Apply: blocking of 'no' is neither True nor False"):
        aion.Apply(names_of, "names string", blocking="no")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda key, window, events: 1 / 0, "ZeroDivisionError"),
        (lambda key, window, events: None, "NoneType"),
        (lambda key, window, events: {"m": 1}, "'m'"),
        (lambda key, window, events: None, "return a mapping of column names to values, several of them, or a"),
        (lambda key, window, events: 5, "returned 5, of type int"),
        (lambda key, window, events: {"n": 1.5}, "1.5 is not an integer"),
        (lambda key, window, events: [{"n": 1}, {"n": np.float32(2.5)}], "2.5"),
        (lambda key, window, events: {"n": Decimal("0.1")}, "Decimal('0.1') is not an integer"),
        (lambda key, window, events: {"n": "many"}, "schema"),
        (lambda key, window, events: {"n": 2**63}, "schema"),
        (lambda key, window, events: ["n"], "'n'"),
        (lambda key, window, events: pa.record_batch({"m": [1]}), "m"),
        (
            lambda key, window, events: pa.table({"n": [1], "more": [2]}),
            "returned the column 'more', which the schema does not have; it has n: add the column to schema=",
        ),
        (lambda key, window, events: {"n": 1, "more": 2}, "returned the column 'more', which the schema does not have"),
        (
            lambda key, window, events: pd.DataFrame({"n": [1]}),
            "it returned a DataFrame of pandas; return pyarrow.Table.from_pandas(frame, preserve_index=False), or",
        ),
        (lambda key, window, events: pd.Series([1], name="n"), "it returned a Series of pandas"),
        (lambda key, window, events: pa.record_batch({"n": ["x"]}), "x"),
        (lambda key, window, events: ({"n": 1 // i} for i in (1, 0)), "ZeroDivisionError"),
    ],
)
def test_a_function_that_fails_is_told_with_its_key_and_window(function: Any, said: str) -> None:
    with applying(function, key="k") as operator:
        operator.process(pa.table({"ts": at(11), "k": ["berlin"]}))
        with pytest.raises(ApplyError) as caught:
            operator.advance(FOREVER)
    text = str(caught.value)
    assert "berlin" in text and "1970-01-01T00:00:10Z" in text and "1970-01-01T00:00:20Z" in text
    assert said in text


def test_a_second_row_that_does_not_fit_is_told_too() -> None:
    with applying(lambda key, window, events: [{"n": 1}, {"n": "two"}], key="k") as operator:
        operator.process(pa.table({"ts": at(11), "k": ["berlin"]}))
        with pytest.raises(ApplyError, match="schema"):
            operator.advance(FOREVER)


@pytest.mark.parametrize("as_table", [{"rome"}, {"berlin"}, set()], ids=["rome's a table", "berlin's a table", "none"])
@pytest.mark.parametrize("wrong", ["berlin", "oslo", "paris"])
def test_of_many_keys_that_whose_rows_do_not_fit_is_told(wrong: str, as_table: set[str]) -> None:
    """Rows of several keys become columns together."""

    def function(key: Any, window: Any, events: Any) -> Any:
        if key[0] == wrong:
            return [{"n": 1}, {"n": "two"}]
        return pa.table({"n": [3, 4]}) if key[0] in as_table else [{"n": 5}, {}, {"n": 6}]

    with applying(function, key="k") as operator:
        operator.process(pa.table({"ts": at(*[11] * 4), "k": ["berlin", "oslo", "paris", "rome"]}))
        with pytest.raises(ApplyError, match=rf"key \('{wrong}',\) and window \[1970-01-01T00:00:10Z.*schema"):
            operator.advance(FOREVER)


@pytest.mark.parametrize("windows", [aion.Tumbling(us(10_000_000)), aion.Session(us(5))])
@pytest.mark.parametrize(
    "key",
    [
        pa.array([2**62], pa.timestamp("us")),
        pa.array([-(2**62)], pa.timestamp("us", "UTC")),
        pa.array([10_000_000], pa.int32()).cast(pa.date32()),
    ],
)
def test_a_key_that_is_no_python_object_is_told(windows: Any, key: pa.Array) -> None:
    with applying(lambda key, window, events: {"n": 1}, windows=windows, key="k") as operator:
        operator.process(pa.table({"ts": at(1), "k": key}))
        with pytest.raises(ApplyError, match=r"key 'k' has a (timestamp|date32).* outside the years 1 to 9999"):
            operator.advance(FOREVER)


@pytest.mark.parametrize("windows", [aion.Tumbling(us(10_000_000)), aion.Session(us(5))])
def test_a_key_that_is_no_text_is_shown_as_one(windows: Any) -> None:
    """JSON and Parquet files may have such strings."""
    offsets = pa.array([0, 2], pa.int32()).buffers()[1]
    key = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(b"\xffx")])
    with applying(lambda key, window, events: {"n": 1}, windows=windows, key="k") as operator:
        operator.process(pa.table({"ts": at(1), "k": key}))
        assert operator.advance(FOREVER)["k"].to_pylist() == ["\ufffdx"]


def test_a_function_need_not_read_its_events() -> None:
    for name in ("memory_only", "disk_only", "tiny"):
        with applying(lambda key, window, events: {"n": 7}, policy=policy(name, 60_000_000)) as operator:
            for _ in range(20):
                operator.process(pa.table({"ts": at(1, 2), "x": ["x" * 100] * 2}))
            assert operator.advance(10_000_000)["n"].to_pylist() == [7]
            assert operator.process(pa.table({"ts": at(1), "x": [""]}))["n"].to_pylist() == [7]


class ListAttempt:
    """The blocks of a shard in a list; notes how many were asked for."""

    def __init__(self) -> None:
        self.blocks: list[StoredBlock] = []
        self.read_blocks = 0

    def append(self, blocks: Iterable[tuple[int, bool, Block]]) -> None:
        self.blocks += [StoredBlock(seq, block) for seq, _, block in blocks]

    def read(self, slices: Sequence[int], **_: Any) -> Iterator[StoredBlock]:
        for block in self.blocks:
            self.read_blocks += 1
            yield block

    def release(self, destage: Sequence[int], purge: Sequence[int]) -> None:
        pass

    def prestage(self, slices: Sequence[int]) -> None:
        pass


def test_events_come_lazily_without_a_key() -> None:
    """A window is not read before the function asks, and not beyond what it asks for."""
    plan = make_plan(
        EVENTS.schema,
        key=None,
        time="ts",
        windows=aion.Tumbling("10 s"),
        aggregates=None,
        apply=lambda key, window, events: {"n": next(events).num_rows},
        outputs="n bigint",
    )
    attempt = ListAttempt()
    executor = Executor(plan, make_operator(plan, load_policy("standard"), None), attempt)
    for _ in range(100):
        builder = BlockBuilder(plan)
        blocks = [*builder.add(EVENTS.to_batches()[0], pa.array([0], pa.int32())), *builder.finish()]
        assert [*executor.arrive([b.block for b in blocks])] == []
    (batch,) = executor.advance(10_000_000)
    assert (batch.column("n").to_pylist(), batch.column("events").to_pylist()) == ([1], [100])
    assert attempt.read_blocks == 1


def test_a_window_has_the_name_of_its_definition() -> None:
    windows = {"short": aion.Tumbling("10 s"), "long": aion.Tumbling("20 s")}
    rows = one_window(applying(lambda key, window, events: {"w": window.name}, "w string", windows=windows))
    assert sorted((row["window"], row["w"]) for row in rows) == [("long", "long"), ("short", "short")]


def test_more_rows_than_fit_a_batch() -> None:
    rows = one_window(applying(lambda key, window, events: [{"n": i} for i in range(5000)], key="k"), k=["a", "b"])
    assert Counter(row["n"] for row in rows) == Counter(dict.fromkeys(range(5000), 2))
    assert Counter(row["k"] for row in rows) == {"a": 5000, "b": 5000}
