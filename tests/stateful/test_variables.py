"""State variables over restarts: their numbers, their schemas, and the errors of the handle."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql.types import DoubleType, FloatType, IntegerType, LongType, StringType, StructField, StructType

from aion.errors import ForeignState
from aion.stateful.handle import Handle
from aion.stateful.layout import MIN_MS, pages_of, record_key
from aion.stateful.record import KeyRecord
from aion.stateful.variables import Kind, Variables
from state_backends.format.ordered_map import MapValue, MemoryMap

INT = StructType([StructField("n", IntegerType())])
LONG = StructType([StructField("n", LongType()), StructField("s", StringType())])
KEY = b"k"


def handle_with(
    known: dict[str, Any] | None, *calls: tuple[Any, ...], mode: str = "none", by_name: bool = False
) -> tuple[Handle, Any, Variables]:
    handle = Handle(mode, 1, lambda text: pytest.fail("no text"))
    made = [getattr(handle, name)(*arguments) for name, *arguments in calls]
    handle.initialized()
    variables = Variables(known, by_name)
    handle.begin_shard(variables)
    return handle, made, variables


def test_stored_values_are_read_by_the_schema_they_were_written_with() -> None:
    store = MemoryMap()
    calls = ("getValueState", "v"), ("getListState", "l"), ("getMapState", "m", INT)
    handle, (value, items, table), variables = handle_with(None, *((*call, INT) for call in calls))
    record = KeyRecord(KEY, None, store)
    handle.enter(record)
    value.update((1,))
    items.appendList([(2,), (3,)])
    table.updateValue((4,), (5,))
    values, grown = record.changes(variables.numbers, MIN_MS)
    assert grown == 1
    store.put(values)
    known = variables.to_json()

    handle, (value, items, table), variables = handle_with(known, *((*call, LONG) for call in calls))
    record = KeyRecord(KEY, store.get([values[-1].key])[0], store)
    handle.enter(record)
    assert value.get() == (1, None)
    items.appendValue((6, "new"))
    assert list(items.get()) == [(2, None), (3, None), (6, "new")]
    assert table.getValue((4,)) == (5, None)
    assert variables.to_json()["variables"]["v"]["schemas"] == [known["variables"]["v"]["schemas"][0], LONG.jsonValue()]


@pytest.mark.parametrize("many", [1, 3_000], ids=["in the record", "in pages"])
def test_each_element_is_converted_once_from_the_schema_it_was_written_with(many: int) -> None:
    """A field that a release has not comes back, and a value is not rounded by the type of a release between."""
    store, known, data = MemoryMap(), None, None
    fields = [("n", LongType()), ("s", StringType())], [("n", FloatType())], [("s", StringType()), ("n", DoubleType())]
    exact = (1 << 40) + 1
    for release, named in enumerate(fields):
        schema = StructType([StructField(*field) for field in named])
        handle, (items, table), variables = handle_with(
            known, ("getListState", "l", schema), ("getMapState", "m", INT, schema)
        )
        record = KeyRecord(KEY, data, store)
        handle.enter(record)
        if release == 0:
            items.appendList([(exact, "x" * 40)] * many)
            for at in range(many):
                table.updateValue((at,), (exact, "x" * 40))
        elif release == 1:
            assert next(items.get()) == (float(1 << 40),) == table.getValue((0,))
            items.appendValue((0.5,))
            for at in range(many):
                table.updateValue((many + at,), (0.5,))
        else:
            assert list(items.get()) == [("x" * 40, float(exact))] * many + [(None, 0.5)]
            assert [tuple(table.getValue((at,))) for at in range(many)] == [("x" * 40, float(exact))] * many
            assert tuple(table.getValue((many,))) == (None, 0.5)
            assert len(list(table.iterator())) == 2 * many
        store.put(record.changes(variables.numbers, MIN_MS)[0])
        known, data = variables.to_json(), store.values[record_key(KEY)]


def test_a_variable_that_was_deleted_starts_empty() -> None:
    store = MemoryMap()
    handle, (value,), variables = handle_with(None, ("getValueState", "v", INT))
    record = KeyRecord(KEY, None, store)
    handle.enter(record)
    value.update((1,))
    store.put(record.changes(variables.numbers, MIN_MS)[0])
    (stored,) = store.values.values()

    handle, (_, other), variables = handle_with(
        variables.to_json(), ("deleteIfExists", "v"), ("getListState", "v", INT)
    )
    record = KeyRecord(KEY, stored, store)
    handle.enter(record)
    assert list(other.get()) == []
    other.appendValue((7,))
    store.put(record.changes(variables.numbers, MIN_MS)[0])
    assert variables.to_json()["next"] == 2
    assert len(KeyRecord(KEY, next(iter(store.values.values())), store)._packed) == 1, "the old content is gone"


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 65_534, 65_535, 65_536, 1 << 33])
def test_a_variable_that_each_init_deletes_and_defines_goes_on_for_ever(number: int) -> None:
    """Each batch takes another number. Its pages are its own, and those that went are deleted."""
    store, data = MemoryMap(), None
    known: dict[str, Any] = {"next": number, "variables": {}}
    for batch in range(3):
        handle, (_, table), variables = handle_with(known, ("deleteIfExists", "m"), ("getMapState", "m", INT, LONG))
        handle.enter(record := KeyRecord(KEY, data, store))
        assert not list(table.iterator())
        for at in range(3_000):
            table.updateValue((at,), (batch, "x" * 40))
        values, _ = record.changes(variables.numbers, MIN_MS)
        assert record.forgotten == ([] if batch == 0 else [number + batch - 1])
        gone = [page for old in record.forgotten for page, _ in store.scan(*pages_of(KEY, old))]
        store.put([*values, *(MapValue(page, None) for page in gone)])
        known, data = variables.to_json(), store.values[record_key(KEY)]
        handle.enter(KeyRecord(KEY, data, store))
        assert {tuple(value) for _, value in table.iterator()} == {(batch, "x" * 40)}
    assert len(list(store.scan(*pages_of(KEY, number + 2)))) == len(store.values) - 1 > 1


@pytest.mark.parametrize("by_name", [False, True])
def test_fields_get_other_names(by_name: bool) -> None:
    """Spark finds fields by their places, or by their names if its encoding is Avro. Those of map keys by places."""
    store = MemoryMap()
    inner = StructType([StructField("x", IntegerType())])
    before = StructType([StructField("n", IntegerType()), StructField("i", inner)])
    renamed = StructType([StructField("x", IntegerType(), nullable=False)])
    after = StructType([StructField("m", IntegerType()), StructField("i", renamed)])
    value = (1, (2,))
    handle, (single, table), variables = handle_with(
        None, ("getValueState", "v", before), ("getMapState", "m", INT, before), by_name=by_name
    )
    handle.enter(record := KeyRecord(KEY, None, store))
    single.update(value)
    table.updateValue((7,), value)
    store.put(record.changes(variables.numbers, MIN_MS)[0])
    for _ in range(2):  # the second start finds the new names
        handle, (single, table), variables = handle_with(
            variables.to_json(), ("getValueState", "v", after), ("getMapState", "m", renamed, after), by_name=by_name
        )
        handle.enter(KeyRecord(KEY, store.get([record_key(KEY)])[0], store))
        expected = (None, (2,)) if by_name else value
        assert single.get() == expected and table.getValue((7,)) == expected
        assert list(table.iterator()) == [((7,), expected)]
    with pytest.raises(ForeignState, match="cannot become a map with the keys"):
        variables.define("m", Kind.MAP, after, LONG, None)


def test_a_variable_of_another_kind_is_refused() -> None:
    _, _, variables = handle_with(None, ("getValueState", "v", INT))
    with pytest.raises(ForeignState, match=r"'v' is stored as a value .* cannot become a list"):
        variables.define("v", Kind.LIST, INT, None, None)


@pytest.mark.parametrize(
    ("mode", "calls", "message"),
    [
        ("none", [("getValueState", "v", INT), ("getValueState", "v", INT)], "Value state v already exists"),
        ("none", [("getValueState", "v", INT), ("getListState", "v", INT)], "List state v already exists"),
        ("none", [("getValueState", "$v", INT)], "WITH_RESERVED_CHARS"),
        ("none", [("getValueState", "", INT)], "WITH_INVALID_NAME"),
        ("processingtime", [("getListState", "v", INT, -1)], "DURATION_MUST_BE_POSITIVE"),
        ("none", [("getListState", "v", INT, 5)], "INCORRECT_TIME_MODE_TO_ASSIGN_TTL"),
        ("eventtime", [("getMapState", "v", INT, INT, 5)], "INCORRECT_TIME_MODE_TO_ASSIGN_TTL"),
        ("eventtime", [("registerTimer", 5)], "INVALID_HANDLE_STATE"),
        ("none", [("registerTimer", 5)], "INVALID_TIME_MODE"),
    ],
)
def test_wrong_calls_in_init_are_refused(mode: str, calls: list[Any], message: str) -> None:
    with pytest.raises(PySparkRuntimeError, match=message):
        handle_with(None, *calls, mode=mode)


def test_wrong_calls_later_are_refused() -> None:
    handle, (value, items), _ = handle_with(None, ("getValueState", "v", INT), ("getListState", "l", INT))
    with pytest.raises(PySparkRuntimeError, match="Implicit key not found"):
        value.get()
    handle.enter(KeyRecord(KEY, None, MemoryMap()))
    for call in (lambda: handle.getValueState("w", INT), lambda: handle.deleteIfExists("v")):
        with pytest.raises(PySparkRuntimeError, match="INVALID_HANDLE_STATE"):
            call()
    assert list(handle.listTimers()) == []
    for call in (lambda: items.put([]), lambda: items.appendList([])):
        with pytest.raises(PySparkRuntimeError, match="EMPTY_LIST_VALUE"):
            call()


def test_a_variable_that_init_deletes_cannot_be_used() -> None:
    calls = ("getValueState", "v", INT), ("getListState", "l", INT), ("getMapState", "m", INT, INT)
    deletes = [("deleteIfExists", name) for name in ("v", "l", "m", "never")]
    handle, (value, items, table, *_), variables = handle_with(None, *calls, *deletes)
    assert handle.undone == {"v", "l", "m"} and handle.deleted == {"v", "l", "m", "never"}
    assert not variables.names and not handle.variables
    handle.enter(KeyRecord(KEY, None, MemoryMap()))
    for kind, call in (
        ("Value", value.get),
        ("Value", value.exists),
        ("Value", lambda: value.update((1,))),
        ("List", lambda: list(items.get())),
        ("List", lambda: items.appendValue((1,))),
        ("Map", lambda: list(table.keys())),
        ("Map", lambda: table.updateValue((1,), (1,))),
        ("Map", lambda: table.removeKey((1,))),
    ):
        with pytest.raises(PySparkRuntimeError, match=f"{kind} state . is not initialized: init deletes it"):
            call()
    with pytest.raises(PySparkRuntimeError, match="already exists"):
        handle_with(None, calls[0], deletes[0], calls[0])


def test_a_variable_that_init_deletes_first_is_new() -> None:
    _, _, variables = handle_with(None, ("getValueState", "v", INT))
    known = variables.to_json()
    _, _, variables = handle_with(known, ("deleteIfExists", "v"), ("getListState", "v", LONG))
    (new,) = variables
    assert (new.kind, new.number) == (Kind.LIST, known["variables"]["v"]["number"] + 1)


def test_a_ttl_may_be_an_integer_of_numpy() -> None:
    calls = ("getValueState", "v", INT, np.int64(5)), ("getListState", "l", INT, np.int64(0))
    _, _, variables = handle_with(None, *calls, mode="processingtime")
    known = json.loads(json.dumps(variables.to_json()))["variables"]
    assert (known["v"]["ttl_ms"], known["l"]["ttl_ms"]) == (5, None)


def test_doubles_of_the_schema() -> None:
    _, (value,), _ = (found := handle_with(None, ("getValueState", "v", StructType([StructField("d", DoubleType())]))))
    found[0].enter(KeyRecord(KEY, None, MemoryMap()))
    value.update((0.5,))
    assert value.get() == (0.5,) and value.exists()
