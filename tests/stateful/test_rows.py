"""Rows that cost less behave as pyspark's own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import Row

from aion.stateful.rows import row_maker

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
