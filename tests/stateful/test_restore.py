"""State from elsewhere: columns of Arrow become what the user's values become, and each element keeps its expiry."""

from __future__ import annotations

import datetime
import time
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, TimerValues
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from aion.spark.session.types import arrow_schema
from aion.stateful.encoding import Codec
from aion.stateful.handle import Handle
from aion.stateful.keys import Group, Keys
from aion.stateful.reading import rows, unpacked
from aion.stateful.restore import Declaration, Declaring, plain_values, restored_keys
from aion.stateful.run import ShardRun, variables_of
from aion.stateful.variables import Kind, Variables
from state_backends.format.ordered_map import MemoryMap

NUMBER = StructType([StructField("n", LongType())])
TEXT = StructType([StructField("s", StringType())])
KEY = StructType([StructField("k", LongType())])
UTC = datetime.UTC
INSTANTS = st.datetimes(timezones=st.just(UTC))
VALUES: dict[str, tuple[DataType, st.SearchStrategy[Any]]] = {
    "bigint": (LongType(), st.integers(-(2**63), 2**63 - 1)),
    "tinyint": (ByteType(), st.integers(-128, 127)),
    "double": (DoubleType(), st.floats(allow_nan=False)),
    "float": (FloatType(), st.floats(allow_nan=False, width=32)),
    "boolean": (BooleanType(), st.booleans()),
    "string": (StringType(), st.text(max_size=5)),
    "binary": (BinaryType(), st.binary(max_size=5)),
    "date": (DateType(), st.dates()),
    "timestamp": (TimestampType(), INSTANTS),
    "timestamp without zone": (TimestampNTZType(), st.datetimes()),
    "decimal": (DecimalType(12, 3), st.decimals(-(10**8), 10**8, places=3).map(lambda d: d + Decimal(0))),
    "interval": (DayTimeIntervalType(), st.timedeltas(-datetime.timedelta(99999), datetime.timedelta(99999))),
    "array": (ArrayType(StringType()), st.lists(st.none() | st.text(max_size=3), max_size=3)),
    "map": (
        MapType(StringType(), TimestampType()),
        st.dictionaries(st.text(max_size=3), st.none() | INSTANTS, max_size=3),
    ),
}


@given(st.data())
@pytest.mark.parametrize("type_", VALUES)
def test_columns_have_the_plain_values_of_the_users_values(type_: str, data: st.DataObject) -> None:
    kind, strategy = VALUES[type_]
    schema = StructType().add("a", kind).add("b", StructType().add("c", kind))
    one = st.none() | strategy
    values = data.draw(st.lists(st.tuples(one, st.none() | st.tuples(one)), max_size=4))
    arrow = pa.struct(list(arrow_schema(schema)))
    column = pa.array([{"a": a, "b": None if b is None else {"c": b[0]}} for a, b in values], arrow)
    codec = Codec(schema)
    expected = [codec.plain(value) for value in values]
    assert plain_values(column) == expected
    assert plain_values(pa.chunked_array([column, column.slice(1)])) == expected + expected[1:]


def test_a_time_that_the_clock_shows_twice_is_read_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """01:30 of 2024-11-03 in New York, before and after the clocks went back."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        instants = [datetime.datetime(2024, 11, 3, hour, 30, tzinfo=datetime.UTC) for hour in (5, 6)]
        declared = (Declaration("at", Kind.LIST, StructType().add("at", TimestampType()), None, False),)
        type_ = pa.list_(pa.struct([("at", pa.timestamp("us", "UTC"))]))
        table = pa.table(
            {
                "key_0": pa.array([7], pa.int64()),
                "timer": pa.array([None], pa.int64()),
                "state_0": pa.array([[{"at": instant} for instant in instants]], type_),
            }
        )
        store, keys = MemoryMap(), Keys(KEY)
        restored, handle = restored_keys(table, keys, 1, 1), _handle(Declaring(declared), 0)
        snapshot = _run(store, handle, keys, None, lambda run: run.restore(restored, declared))
        ((*_, packed),) = rows(store, KEY, list(variables_of(snapshot)))
        assert unpacked(packed) == ([], {"at": [(instant,) for instant in instants]})
    finally:
        monkeypatch.undo()
        time.tzset()


def test_each_element_keeps_the_time_at_which_it_expires() -> None:
    declared = (
        Declaration("list", Kind.LIST, NUMBER, None, True),
        Declaration("map", Kind.MAP, NUMBER, TEXT, True),
        Declaration("plain", Kind.LIST, NUMBER, None, False),
        Declaration("value", Kind.VALUE, NUMBER, None, True),
    )
    number, text = pa.struct([("n", pa.int64())]), pa.struct([("s", pa.string())])
    element = pa.struct([("value", number), ("ttlExpirationMs", pa.int64())])

    def of(n: int, expires: int) -> dict[str, Any]:
        return {"value": {"n": n}, "ttlExpirationMs": expires}

    types = [pa.list_(element), pa.list_(pa.struct([("key", text), ("value", element)])), pa.list_(number), element]
    cells: list[Any] = [
        [of(1, 100), of(2, 300)],
        [{"key": {"s": "x"}, "value": of(3, 200)}, {"key": {"s": None}, "value": of(4, 400)}],
        [{"n": 5}],
        of(6, 250),
    ]
    columns: dict[str, pa.Array] = {
        "key_0": pa.array([7, 7, 7, 7, 7, None], pa.int64()),
        "timer": pa.array([None, None, None, None, 50, 60], pa.int64()),
    }
    for at, (type_, cell) in enumerate(zip(types, cells, strict=True)):
        columns[f"state_{at}"] = pa.array([cell if row == at else None for row in range(6)], type_)
    store, keys = MemoryMap(), Keys(KEY)
    restored = restored_keys(pa.table(columns), keys, 1, len(declared))
    handle = _handle(Declaring(declared), 0)
    snapshot = _run(store, handle, keys, None, lambda run: run.restore(restored, declared))

    plain = [variable for variable in variables_of(snapshot) if variable.name == "plain"]
    read = {row[0]: row[1:] for row in rows(store, KEY, plain)}
    assert {key: held for key, (*held, _) in read.items()} == {7: [[50], [(5,)]], None: [[60], None]}
    packed = {key: unpacked(packed) for key, (*_, packed) in read.items()}
    assert packed == {7: ([50], {"plain": [(5,)]}), None: ([60], {})}
    for now, expected in (
        (99, ([1, 2], [3, 4], 6)),
        (100, ([2], [3, 4], 6)),
        (249, ([2], [4], 6)),
        (300, ([], [4], None)),
    ):
        states = _Reading()
        handle = _handle(states, now)
        found = _run(store, handle, keys, snapshot, lambda run, states=states: states.look(run, keys))
        assert found is not None
        assert states.seen == expected


class _Reading(StatefulProcessor):
    """Looks at the state of the key 7."""

    def init(self, handle: Any) -> None:
        self._list, self._map = handle.getListState("list", NUMBER, 10), handle.getMapState("map", TEXT, NUMBER, 10)
        self._plain, self._value = handle.getListState("plain", NUMBER), handle.getValueState("value", NUMBER, 10)

    def look(self, run: ShardRun, keys: Keys) -> None:
        for _ in run.arrive(iter([Group(keys.to_bytes((7,)), (7,), iter(()), 0)])):
            pass

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        value = self._value.get()
        self.seen = [v for (v,) in self._list.get()], sorted(v for _, (v,) in self._map.iterator()), value and value[0]
        return iter(())

    def close(self) -> None:
        pass


def _handle(processor: StatefulProcessor, now: int) -> Handle:
    handle = Handle("processingtime", now, StructType.fromDDL)
    handle.processor = processor  # type: ignore[attr-defined]
    processor.init(handle)
    handle.initialized()
    return handle


def _run(store: MemoryMap, handle: Any, keys: Keys, snapshot: Any, act: Any) -> dict[str, Any]:
    variables = Variables(None if snapshot is None else snapshot["stateful"])
    handle.begin_shard(variables)
    run = ShardRun(handle.processor, handle, variables, store, keys, TimerValues(handle.now_ms, -1), 0, snapshot)
    act(run)
    return run.save().snapshot
