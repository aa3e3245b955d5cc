"""Which rows are the same: different values have different identities, and equal ones, as Spark sees it, the same."""

from __future__ import annotations

import itertools
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aion.base import identity
from aion.base.hashing import xxhash64
from aion.base.identity import can_identify, identify

SECRET = bytes(range(16))
TYPES: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int64(), [None, 0, 1, 5, -1, 2**53, 2**53 + 1, -(2**63)]),
    (pa.int32(), [None, 0, 1, 5, -1]),
    (pa.float64(), [None, 0.0, -0.0, 1.0, 5.0, math.nan, math.inf]),
    (pa.string(), [None, "", "a", "ab", "b", "a\0", "\0", "x" * 7, "x" * 8, "x" * 9, "x" * 300]),
    (pa.binary(), [None, b"", b"a", b"\0", b"\0\0"]),
    (pa.bool_(), [None, False, True]),
    (pa.decimal128(38, 10), [None, *map(Decimal, (0, 5, -5, "0.5", "12345678901234567890"))]),
    (pa.date32(), [None, 0, 5]),
    (pa.timestamp("us", "UTC"), [None, 0, 5]),
    (pa.null(), [None]),
]  # fmt: skip


def ids(columns: list[pa.Array], secret: bytes = SECRET) -> list[tuple[int, ...]]:
    return [tuple(pair) for pair in identify(columns, secret).tolist()]


def spelled(value: Any) -> str:
    """How Spark's equality sees a value."""
    if isinstance(value, float):
        value = "nan" if math.isnan(value) else value + 0.0  # the sum makes 0.0 of -0.0
    return repr(value)


@given(st.data())
def test_rows_have_one_identity_if_and_only_if_they_are_equal(data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=4))
    rows = data.draw(st.lists(st.tuples(*(st.sampled_from(values) for _, values in chosen)), min_size=1, max_size=30))
    columns = [pa.array(column, type_) for column, (type_, _) in zip(zip(*rows, strict=True), chosen, strict=True)]
    found = ids(columns)
    assert found == ids([pa.concat_arrays([column, column]).slice(len(column)) for column in columns])
    for (left, a), (right, b) in itertools.combinations(zip(rows, found, strict=True), 2):
        equal = [*map(spelled, left)] == [*map(spelled, right)]
        assert (a == b) == equal, (left, right)


@pytest.mark.parametrize("type_", [pa.int64(), pa.string(), pa.float64(), pa.binary()])
def test_a_null_in_one_column_is_not_a_null_in_another(type_: pa.DataType) -> None:
    """The hash that places rows skips nulls, so to it these are the same row."""
    value = pa.array([5], pa.int64()).cast(pa.string()).cast(type_) if type_ != pa.float64() else pa.array([5.0])
    columns = [pa.array([value[0].as_py(), None], type_), pa.array([None, value[0].as_py()], type_)]
    assert len(set(xxhash64(columns).tolist())) == 1
    assert len({*ids(columns)}) == 2


def test_the_type_of_a_column_counts_and_its_width_does_not() -> None:
    five = [pa.array([5], type_) for type_ in (pa.int8(), pa.int16(), pa.int32(), pa.int64())]
    assert len({ids([column])[0] for column in five}) == 1
    assert ids([pa.array([5.5], pa.float32())]) == ids([pa.array([5.5])])
    decimals = [pa.array([Decimal("5.50")], pa.decimal128(p, s)) for p, s in ((3, 2), (38, 2), (38, 37))]
    assert len({ids([column])[0] for column in decimals}) == 1
    others = [pa.array(["5"]), pa.array([b"5"]), pa.array([5.0]), pa.array([5], pa.date32()), pa.array([True])]
    assert len({ids([column])[0] for column in (five[-1], decimals[0], *others)}) == 2 + len(others)


def test_the_hash_is_siphash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three vectors of its authors, who took more rounds (key 00 01 .. 0f, messages of 0, 1 and 8 bytes)."""
    monkeypatch.setattr(identity, "_ROUNDS", 2)
    monkeypatch.setattr(identity, "_LAST_ROUNDS", 4)
    vectors = {
        0: "a3817f04ba25a8e66df67214c7550293",
        1: "da87c1d86b99af44347659119b22fc45",
        8: "3b62a9ba6258f5610f83e264f31497b4",
    }
    for length, digest in vectors.items():
        column = pa.array([bytes(range(length))], pa.large_binary())
        first, second = (int(word[0]) for word in identity._digests(column, SECRET))
        assert (first.to_bytes(8, "little") + second.to_bytes(8, "little")).hex() == digest, length


def test_another_secret_gives_other_identities() -> None:
    column = pa.array(np.arange(100))
    assert not {*ids([column])} & {*ids([column], bytes(16))}


def test_only_values_that_can_be_compared_are_taken() -> None:
    assert not can_identify(pa.list_(pa.int64())) and not can_identify(pa.struct([("a", pa.int64())]))
    assert all(can_identify(type_) for type_, _ in TYPES)
