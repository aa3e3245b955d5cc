"""Values of every type: to bytes and back, and what Spark makes of values of another type."""

from __future__ import annotations

import math
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    CalendarIntervalType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    Row,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from aion.errors import SchemaError
from aion.stateful.encoding import Codec
from aion.stateful.packing import pack, unpack
from aion.stateful.variables import converter


def schema(*types: DataType) -> StructType:
    return StructType([StructField(f"f{i}", type_) for i, type_ in enumerate(types)])


def stored(value: Any, *types: DataType) -> tuple[Any, ...]:
    codec = Codec(schema(*types))
    return codec.value(unpack(pack(codec.plain(value))))


POINT = schema(LongType(), StringType())


@pytest.mark.parametrize(
    ("type_", "values"),
    [
        (BooleanType(), [True, False]),
        (ByteType(), [-128, 127]),
        (ShortType(), [-(1 << 15), (1 << 15) - 1]),
        (IntegerType(), [-(1 << 31), (1 << 31) - 1]),
        (LongType(), [-(1 << 63), (1 << 63) - 1, 0]),
        (FloatType(), [0.5, -0.0, math.inf]),
        (DoubleType(), [0.1, -math.inf, 5e-324]),
        (StringType(), ["", "ä€😀", "\0"]),
        (BinaryType(), [b"", b"\0\xff"]),
        (DecimalType(10, 2), [Decimal("1.50"), Decimal("-99999999.99")]),
        (DateType(), [date(1, 1, 1), date(9999, 12, 31)]),
        (TimestampType(), [datetime(1970, 1, 1), datetime(2026, 7, 1, 12, 30, 0, 123456)]),
        (TimestampNTZType(), [datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999999)]),
        (DayTimeIntervalType(), [timedelta(days=-1, microseconds=1)]),
        (ArrayType(LongType()), [[], [1, None, 3]]),
        (ArrayType(DateType()), [[date(2020, 2, 29)]]),
        (MapType(StringType(), DoubleType()), [{}, {"a": 1.0, "b": None}]),
        (MapType(LongType(), ArrayType(StringType())), [{1: ["x"], 2: []}]),
        (POINT, [Row(f0=1, f1="x"), Row(f0=None, f1=None)]),
        (ArrayType(POINT), [[Row(f0=1, f1="x"), None]]),
        (MapType(POINT, LongType()), [{Row(f0=1, f1="x"): 5}]),
    ],
)
def test_values_come_back_as_they_were(type_: DataType, values: list[Any]) -> None:
    for value in [*values, None]:
        (found,) = stored((value,), type_)
        assert found == value and type(found) is type(value)
        if isinstance(value, Row):
            assert found.f1 == value.f1, "a nested struct keeps the names of its fields"


def test_nan_comes_back() -> None:
    assert math.isnan(stored((math.nan,), DoubleType())[0])


@pytest.mark.parametrize(
    ("type_", "value", "expected"),
    [
        (LongType(), 1.5, None),
        (LongType(), True, None),
        (LongType(), 1 << 63, None),
        (LongType(), -(1 << 63) - 1, None),
        (IntegerType(), 1 << 31, -(1 << 31)),
        (ByteType(), 200, -56),
        (DoubleType(), 1, None),
        (FloatType(), 0.1, float(np.float32(0.1))),
        (FloatType(), 1e300, math.inf),
        (StringType(), 5, "5"),
        (StringType(), True, "true"),
        (StringType(), [1, None, {"a": 0.5}], "[1, null, {a=0.5}]"),
        (StringType(), 1e20, "1.0E20"),
        (StringType(), 1.25e-5, "1.25E-5"),
        (StringType(), 12345678.9, "1.23456789E7"),
        (DecimalType(38, 10), Decimal("1" * 28), Decimal("1" * 28 + ".0000000000")),
        (DecimalType(10, 2), Decimal("-0.001"), Decimal("0.00")),
        (DecimalType(10, 2), Decimal("NaN"), None),
        (BinaryType(), "ä", "ä".encode()),
        (DecimalType(10, 2), Decimal("1.555"), Decimal("1.56")),
        (LongType(), np.int64(7), 7),
        (DoubleType(), np.float64(7.5), 7.5),
        (TimestampType(), pd.Timestamp("2026-01-02 03:04:05.000006"), datetime(2026, 1, 2, 3, 4, 5, 6)),
        (ArrayType(LongType()), (1, 2), [1, 2]),
    ],
)
def test_values_of_another_type_become_what_spark_makes_of_them(type_: DataType, value: Any, expected: Any) -> None:
    assert stored((value,), type_) == (expected,)


def test_what_cannot_be_stored_says_so() -> None:
    with pytest.raises(PySparkRuntimeError, match="2 fields are required while 1 values are provided"):
        stored((1,), LongType(), LongType())
    with pytest.raises(TypeError):
        stored(5, LongType())
    with pytest.raises(PySparkRuntimeError, match="cannot be represented as Decimal"):
        stored((Decimal("1000"),), DecimalType(3, 1))
    with pytest.raises(SchemaError, match="interval"):
        Codec(schema(CalendarIntervalType()))


def test_values_of_an_older_schema_are_converted() -> None:
    old = StructType([StructField("a", IntegerType()), StructField("b", POINT), StructField("gone", StringType())])
    wider = schema(LongType(), StringType(), BooleanType())
    new = StructType([StructField("b", wider), StructField("a", DoubleType()), StructField("new", LongType())])
    assert converter(old, new)([1, [2, "x"], "y"]) == [[2, "x", None], 1.0, None]
    assert converter(old, new)([None, None, None]) == [None, None, None]
    assert converter(ArrayType(IntegerType()), ArrayType(LongType()))([1, None]) == [1, None]
    assert converter(MapType(StringType(), IntegerType()), MapType(StringType(), DoubleType()))([["a", 1]]) == [
        ["a", 1.0]
    ]


@pytest.mark.parametrize(
    ("old", "new", "value", "expected"),
    [
        (IntegerType(), FloatType(), (1 << 24) + 1, float(1 << 24)),
        (
            LongType(),
            FloatType(),
            (1 << 60) + (1 << 36) + 1,
            float((1 << 60) + (1 << 37)),
        ),  # 1 << 60 by way of a double
        (LongType(), DoubleType(), (1 << 40) + 1, float((1 << 40) + 1)),
        (FloatType(), DoubleType(), 1.100000023841858, 1.100000023841858),
        (StringType(), BinaryType(), "ü", b"\xc3\xbc"),
        (BinaryType(), StringType(), b"ab", "ab"),
        (DateType(), IntegerType(), 19844, 19844),
        (DateType(), LongType(), 19844, 19844),
        (LongType(), TimestampType(), 1_714_564_800_000_000, 1_714_564_800_000_000),
        (TimestampType(), LongType(), 1_714_564_800_000_000, 1_714_564_800_000_000),
        (TimestampType(), DoubleType(), 1_714_564_800_000_000, 1.7145648e15),
        (DecimalType(5, 2), DecimalType(6, 2), "1.25", "1.25"),
    ],
)
def test_an_older_type_becomes_what_avro_makes_of_it(old: DataType, new: DataType, value: Any, expected: Any) -> None:
    convert = converter(old, new)
    assert convert(value) == expected and type(convert(value)) is type(expected)
    assert convert(None) is None


def test_who_changes_a_list_that_he_got_does_not_change_the_state() -> None:
    codec = Codec(schema(ArrayType(LongType()), MapType(StringType(), ArrayType(LongType())), ArrayType(POINT)))
    mine: Any = ([1], {"a": [1]}, [(1, "x")])
    plain = codec.plain(mine)
    before = pack(plain)
    for items, of_map, points in (mine, codec.value(plain), codec.row(plain)):
        items.append(2)
        of_map["a"].append(2)
        of_map["b"] = []
        points.clear()
    assert pack(plain) == before
