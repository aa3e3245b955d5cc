"""Rows that cost less behave as pyspark's own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row

from aion.stateful.rows import python_values, row_maker

NAMES = ("key", "ts", "count", "index", "asDict", "_id", "class", "a b", "__fields__x", "field0", "key")
VALUES = (1, "2024", 3.0, None, [5], 6, 7, 8, 9, 10, 11)


def both() -> tuple[Any, Any]:
    return Row(*NAMES)(*VALUES), row_maker(NAMES)(VALUES)


@pytest.mark.parametrize(
    "read",
    [
        repr,
        tuple,
        len,
        lambda row: row.asDict(),
        lambda row: row[0],
        lambda row: row[1:3],
        lambda row: row["a b"],
        lambda row: row["key"],
        lambda row: [name in row for name in (*NAMES, "other")],
        lambda row: list(row.__fields__),
        lambda row: [getattr(row, name) for name in ("key", "ts", "_id", "class", "a b", "field0")],
        lambda row: row == Row(*NAMES)(*VALUES),
        lambda row: isinstance(row, Row),
        lambda row: [callable(getattr(row, name)) for name in ("count", "index", "asDict")],
        lambda row: row.count(6),
        lambda row: pickle.loads(pickle.dumps(row)),
        lambda row: type(pickle.loads(pickle.dumps(row))),
        lambda row: copy.copy(row).ts,
        lambda row: Row(row, 1),
    ],
)
def test_what_is_read_of_a_row_is_the_same(read: Callable[[Any], Any]) -> None:
    theirs, ours = map(read, both())
    assert ours == theirs and repr(ours) == repr(theirs)


@pytest.mark.parametrize(
    "use",
    [
        lambda row: row.other,
        lambda row: row.__fields__x,
        lambda row: row["other"],
        lambda row: row[99],
        lambda row: setattr(row, "ts", 1),
        lambda row: setattr(row, "other", 1),
        lambda row: delattr(row, "ts"),
        hash,  # a list is among the values
    ],
)
def test_what_a_row_refuses_is_the_same(use: Callable[[Any], Any]) -> None:
    theirs, ours = both()
    with pytest.raises(Exception) as expected:
        use(theirs)
    with pytest.raises(expected.type):
        use(ours)


def test_rows_without_fields_and_of_other_names() -> None:
    assert row_maker(())(()) == Row()
    assert row_maker(("a",))((1,)).a == 1
    assert row_maker(("b",))((2,)).b == 2


ZONES = (None, "UTC", "Europe/Berlin", "America/St_Johns", "Australia/Lord_Howe", "+05:30")
YEARS_0001_TO_9999_US = (-62_135_510_400_000_000, 253_402_214_400_000_000)  # less a day at both ends
CLOCKS_SET_BACK_US = 1_729_990_000_000_000  # on 27 October 2024 in Berlin


@given(
    st.sampled_from(ZONES),
    st.lists(
        st.none()
        | st.integers(*YEARS_0001_TO_9999_US)
        | st.integers(CLOCKS_SET_BACK_US - 10**10, CLOCKS_SET_BACK_US + 10**10)
    ),
)
def test_times_are_those_of_pyarrow(zone: str | None, times_us: list[int | None]) -> None:
    column = pa.chunked_array([pa.array(times_us, pa.int64()).cast(pa.timestamp("us", zone))])
    ours, theirs = python_values(column), column.to_pylist()
    assert ours == theirs
    for mine, other in zip(ours, theirs, strict=True):
        if mine is not None:
            assert (mine.fold, mine.utcoffset(), mine.replace(tzinfo=None)) == (
                other.fold,
                other.utcoffset(),
                other.replace(tzinfo=None),
            )
            assert type(mine.tzinfo) is type(other.tzinfo)


@pytest.mark.parametrize(
    "column",
    [
        pa.chunked_array([pa.array([0, None, 20_000, -700_000], pa.date32())]),
        pa.chunked_array([pa.array([], pa.timestamp("us", "UTC"))]),
        pa.chunked_array([], pa.timestamp("us", "UTC")),
        pa.chunked_array([pa.array([1.5, None]), pa.array([float("inf")])]),
        pa.chunked_array([pa.array([1, None])]),
        pa.chunked_array([pa.array([[1], None, []])]),
        pa.chunked_array([pa.array([{"a": 1}, None])]),
        pa.chunked_array([pa.array([1, 2], pa.timestamp("ms"))]),
    ],
    ids=lambda column: str(column.type),
)
def test_values_are_those_of_pyarrow(column: pa.ChunkedArray) -> None:
    assert python_values(column) == column.to_pylist()


@pytest.mark.parametrize(
    "far",
    [
        pa.array([0, 2**62]).cast(pa.timestamp("us")),
        pa.array([0, 2**62]).cast(pa.timestamp("us", "Europe/Berlin")),
        pa.array([0, 2_000_000_000], pa.int32()).cast(pa.date32()),
    ],
    ids=lambda far: str(far.type),
)
def test_a_time_that_python_does_not_have_is_the_error_of_pyarrow(far: pa.Array) -> None:
    with pytest.raises(Exception) as expected:
        far.to_pylist()
    with pytest.raises(expected.type):
        python_values(pa.chunked_array([far]))
