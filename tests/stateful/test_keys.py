"""Grouping by key: frames and rows, keys of every type, nulls."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DoubleType,
    LongType,
    Row,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from aion.stateful.keys import _ROWS_AT_ONCE, Keys, group_frames, group_table

RARELY = [0.5, 0.3, 0.19997, 0.00002, 0.00001]


def keys_of(*types: DataType) -> Keys:
    return Keys(StructType([StructField(f"k{i}", type_) for i, type_ in enumerate(types)]))


LONGS = keys_of(LongType())


def test_keys_that_spark_takes_for_equal_have_the_same_bytes() -> None:
    keys = keys_of(DoubleType())
    assert keys.to_bytes((0.0,)) == keys.to_bytes((-0.0,))
    assert keys.to_bytes((math.nan,)) == keys.to_bytes((-math.nan,)) == keys.to_bytes((float("nan") * 2,))
    nested = keys_of(ArrayType(DoubleType()))
    assert nested.to_bytes(([-0.0],)) == nested.to_bytes(([0.0],))
    assert keys_of(LongType()).to_bytes((None,)) != keys_of(LongType()).to_bytes((0,))


def test_times_are_keys() -> None:
    keys = keys_of(TimestampType())
    time = pd.Timestamp("2026-01-01 12:00")
    assert keys.to_row(keys.to_bytes((time,))) == Row(k0=time.to_pydatetime())
    assert keys.to_bytes((pd.NaT,)) == keys.to_bytes((None,))


def test_integers_stay_integers_beside_nulls() -> None:
    frames = [pd.DataFrame({"k": [1.0, math.nan, 1.0], "v": [1, 2, 3]})]
    groups = {
        group.values: next(iter(group.rows))["v"].tolist()
        for group in group_frames(frames, keys_of(LongType()), [0], slice(1, 2))
    }
    assert groups == {(1,): [1, 3], (None,): [2]}


def test_a_null_among_texts_is_none_with_every_pandas() -> None:
    """pandas 3 makes a NaN of it. State from before is found by the same key."""
    keys = keys_of(StringType())
    for nulls in ([None], [math.nan], [None, math.nan]):
        frame = pd.DataFrame({"k": pd.Series(["a", *nulls], dtype=object), "v": range(1 + len(nulls))})
        for one in (frame, frame.astype({"k": pd.Series(["a"]).dtype})):
            groups = list(group_frames([one], keys, [0], slice(1, 2)))
            assert {group.values for group in groups} == {("a",), (None,)}
            assert {group.key for group in groups} == {keys.to_bytes(("a",)), keys.to_bytes((None,))}
    (group,) = group_frames([pd.DataFrame({"k": [math.nan], "v": [1]})], keys_of(DoubleType()), [0], slice(1, 2))
    assert math.isnan(group.values[0]), "here it is a value"


texts = st.one_of(st.none(), st.sampled_from(["a", "b", ""]))


@given(rows=st.lists(st.tuples(texts, st.integers(0, 2), st.integers()), max_size=40), cut=st.integers(0, 40))
def test_each_row_is_in_the_group_of_its_key_in_the_order_of_arrival(rows: list[Any], cut: int) -> None:
    keys = keys_of(StringType(), LongType())
    expected: dict[Any, list[int]] = defaultdict(list)
    for text, number, value in rows:
        expected[text, number].append(value)
    frame = pd.DataFrame(
        {
            "k0": pd.Series([r[0] for r in rows], dtype=object),
            "v": pd.Series([r[2] for r in rows], dtype=object),
            "k1": pd.Series([r[1] for r in rows], dtype=np.int64),
            "shard": 0,
        }
    )
    frames = [part for part in (frame[:cut], frame[cut:]) if len(part)]
    found = {}
    for group in group_frames(frames, keys, [0, 2], slice(2)):
        (part,) = group.rows
        assert list(part.columns) == ["k0", "v"] and list(part.index) == list(range(group.events))
        assert group.key == keys.to_bytes(group.values)
        found[group.values] = part["v"].tolist()
    assert found == dict(expected)
    by_rows = {}
    types = pa.schema([("k0", pa.string()), ("v", pa.string()), ("k1", pa.int64())])
    columns = [[r[0] for r in rows], [str(r[2]) for r in rows], [r[1] for r in rows]]
    for group in group_table(pa.table(columns, schema=types), keys, [0, 2], ["k0", "v"]):
        listed = list(group.rows)
        assert all(list(row.asDict()) == ["k0", "v"] for row in listed) and len(listed) == group.events
        by_rows[group.values] = [int(row.v) for row in listed]
    assert by_rows == dict(expected)


def test_rows_of_arrow_have_the_keys_that_spark_takes_for_equal() -> None:
    table = pa.table({"d": [0.0, math.nan, -0.0, None, math.nan], "v": [1, 2, 3, 4, 5]})
    groups = [[row.v for row in group.rows] for group in group_table(table, keys_of(DoubleType()), [0], ["d", "v"])]
    assert sorted(groups) == [[1, 3], [2, 5], [4]]
    lists = pa.table({"k": [[1, 2], None, [1, 2], []], "v": [1, 2, 3, 4]})
    groups = [
        [row.v for row in group.rows] for group in group_table(lists, keys_of(ArrayType(LongType())), [0], ["k", "v"])
    ]
    assert sorted(groups) == [[1, 3], [2], [4]]
    assert not list(group_table(table.slice(0, 0), keys_of(DoubleType()), [0], ["d", "v"]))


@pytest.mark.slow
def test_keys_with_many_rows_and_many_keys() -> None:
    """Rows are made for several keys at once, and sorted 16 bits at a time."""
    random = np.random.default_rng(1)
    many = np.repeat(np.arange(70_000), random.choice([1, 2, 3, _ROWS_AT_ONCE, 3 * _ROWS_AT_ONCE], 70_000, p=RARELY))
    random.shuffle(many)
    table = pa.table({"k": many, "v": np.arange(len(many))})
    found = {group.values[0]: [row.v for row in group.rows] for group in group_table(table, LONGS, [0], ["k", "v"])}
    order = np.argsort(many, kind="stable")
    stretches = np.split(order, np.flatnonzero(np.diff(many[order])) + 1)
    assert found == {key: rows.tolist() for key, rows in enumerate(stretches)}
    assert max(map(len, found.values())) > _ROWS_AT_ONCE


def test_rows_need_not_be_taken() -> None:
    table = pa.table({"k": [1, 1, 2, 3, 3, 3], "v": range(6)})
    firsts = [next(iter(group.rows)).v for group in group_table(table, LONGS, [0], ["k", "v"])]
    assert firsts == [0, 2, 3]


def test_lists_are_keys() -> None:
    keys = keys_of(ArrayType(LongType()))
    frame = pd.DataFrame({"k": [np.array([1, 2]), np.array([3]), np.array([1, 2])], "v": [1, 2, 3]})
    groups = list(group_frames([frame], keys, [0], slice(1, 2)))
    assert [group.events for group in groups] == [2, 1]


def test_a_processor_may_change_the_rows_that_it_gets() -> None:
    frame = pd.DataFrame({"k": ["a", "b", "a"], "v": [1, 2, 3]})
    for group in group_frames([frame], keys_of(StringType()), [0], slice(2)):
        for part in group.rows:
            part["v"] = part["v"] * 2
            part["new"] = 1
            assert len(part) == group.events


def test_a_null_of_one_key_does_not_change_the_type_of_another_keys_rows() -> None:
    """Spark makes a frame of each key's rows. A column of booleans is one of objects only if this key has a null."""
    flags, numbers = pd.Series([True, None, False, None], dtype=object), pd.Series([1, pd.NA, 2, 3], dtype=object)
    frame = pd.DataFrame({"k": ["a", "b", "a", "c"], "flag": flags, "n": numbers, "text": ["x", None, "y", "z"]})
    types = {}
    for group in group_frames([frame], keys_of(StringType()), [0], slice(1, 4)):
        (part,) = group.rows
        types[group.values[0]] = list(map(str, part.dtypes))
        if group.values == ("a",):
            assert (~part["flag"]).tolist() == [False, True]
    text = str(pd.Series(["x"]).dtype)  # which differs between pandas 2 and 3
    assert types == {"a": ["bool", "int64", text], "b": ["object", "object", text], "c": ["object", "int64", text]}


def test_columns_are_found_whatever_their_names_are() -> None:
    """pyspark makes fields of columns, and gives those a new name whose own cannot be that of a field."""
    frame = pd.DataFrame({"_0": ["a", "b", "a"], "v": [1, 2, 3], "_2": [0, 0, 0]})
    groups = {g.values: next(g.rows) for g in group_frames([frame], keys_of(StringType()), [0], slice(0, 2))}
    assert {key: part["v"].tolist() for key, part in groups.items()} == {("a",): [1, 3], ("b",): [2]}
    twice = pa.table([["a", "b"], ["x", "y"], [1, 2]], names=["k", "k", "v"])
    rows = [next(g.rows) for g in group_table(twice, keys_of(StringType()), [1], ["own", "k", "v"])]
    assert rows == [Row(own="a", k="x", v=1), Row(own="b", k="y", v=2)]
