"""What pyspark makes of the frames of panes: the same values, of every type, whatever the session's time zone."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.conversion import PandasToArrowConversion
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructField, StructType

from aion.spark.tasks.frames import to_frame

FIRST, LAST = datetime(2, 1, 1), datetime(9998, 12, 31)
PLAIN: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.int8(), st.integers(-128, 127)),
    (pa.float64(), st.floats()),
    (pa.float32(), st.floats(width=32)),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.text(max_size=3)),
    (pa.binary(), st.binary(max_size=3)),
    (pa.date32(), st.dates(date(2, 1, 1), date(9998, 12, 31))),
    (pa.decimal128(10, 2), st.integers(-(10**9), 10**9).map(lambda n: Decimal(n).scaleb(-2))),
    (pa.timestamp("us", "UTC"), st.datetimes(FIRST, LAST, timezones=st.just(UTC))),
    (pa.timestamp("us"), st.datetimes(FIRST, LAST)),
]
KEYS = [pair for pair in PLAIN if not pa.types.is_floating(pair[0])]


def listed(of: tuple[pa.DataType, st.SearchStrategy[Any]]) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    return pa.list_(of[0]), st.lists(st.none() | of[1], max_size=3)


def in_struct(
    one: tuple[pa.DataType, st.SearchStrategy[Any]], other: tuple[pa.DataType, st.SearchStrategy[Any]]
) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    values = st.fixed_dictionaries({"x": st.none() | one[1], "y": st.none() | other[1]})
    return pa.struct([("x", one[0]), ("y", other[0])]), values


def mapped(
    key: tuple[pa.DataType, st.SearchStrategy[Any]], item: tuple[pa.DataType, st.SearchStrategy[Any]]
) -> tuple[pa.DataType, st.SearchStrategy[Any]]:
    values = st.dictionaries(key[1], st.none() | item[1], max_size=3).map(lambda entries: list(entries.items()))
    return pa.map_(key[0], item[0]), values


TYPES = st.recursive(
    st.sampled_from(PLAIN),
    lambda inner: st.one_of(
        inner.map(listed),
        st.tuples(inner, inner).map(lambda pair: in_struct(*pair)),
        st.tuples(st.sampled_from(KEYS), inner).map(lambda pair: mapped(*pair)),
    ),
    max_leaves=4,
)
COLUMNS = TYPES.flatmap(
    lambda of: st.lists(st.none() | of[1], min_size=1, max_size=4).map(lambda v: pa.array(v, of[0]))
)


def by_pyspark(batch: pa.RecordBatch, zone: str) -> pa.Array:
    """The column as pyspark sends it to Spark."""
    row = from_arrow_schema(batch.schema, prefer_timestamp_ntz=True)
    sent = PandasToArrowConversion.convert(
        [to_frame(batch)],
        StructType([StructField("_0", row)]),
        timezone=zone,
        safecheck=True,
        arrow_cast=True,
        assign_cols_by_name=True,
    )
    column = sent.column(0).field(0)
    return column.cast(batch.schema.field(0).type)


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
@given(column=COLUMNS)
def test_every_value_stays_what_it_is(zone: str, column: pa.Array) -> None:
    found = by_pyspark(pa.RecordBatch.from_arrays([column], ["c"]), zone)
    assert repr(found.to_pylist()) == repr(column.to_pylist())


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
@pytest.mark.parametrize(
    ("type_", "value"),
    [
        (pa.list_(pa.timestamp("us", "UTC")), [datetime(2024, 7, 1, 12, tzinfo=UTC), None]),
        (pa.struct([("x", pa.int64()), ("y", pa.float64())]), {"x": 2**62 + 1, "y": math.nan}),
        (pa.list_(pa.list_(pa.int64())), [[2**62 + 1, None]]),
        (pa.map_(pa.string(), pa.int64()), [("a", 2**62 + 1), ("b", None)]),
    ],
)
def test_nested_values_beside_nulls(zone: str, type_: pa.DataType, value: Any) -> None:
    column = pa.array([value, None], type_)
    found = by_pyspark(pa.RecordBatch.from_arrays([column], ["c"]), zone)
    assert repr(found.to_pylist()) == repr(column.to_pylist())
