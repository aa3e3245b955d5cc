"""`aion inspect --key`: what a stateful processor keeps for one key."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, TimerValues
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)
from typer.testing import CliRunner, Result

from aion.base.hashing import ShardOfKeys
from aion.cli import app
from aion.spark.session.types import arrow_schema
from aion.spark.tasks.shards import shard_ids
from aion.stateful.handle import Handle
from aion.stateful.keys import Group, Keys
from aion.stateful.run import ShardRun
from aion.stateful.variables import Variables
from state_backends.backends import Stores
from state_backends.files.storage import LocalStorage
from state_backends.store.io_thread import IoThread
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.options import StoreOptions
from state_backends.versions.manifest import Identity
from state_backends.versions.shard import Shard
from tests.object_store import CREDENTIALS, ObjectStore, serving
from tests.versions.keyed_attempt import LocalKeyedAttempt

SHARDS = 3
NOW_MS = 1_700_000_000_000
DAY_MS = 86_400_000


def schema(**fields: DataType) -> StructType:
    return StructType([StructField(name, type_) for name, type_ in fields.items()])


LONG = schema(n=LongType())
VALUE = schema(n=LongType(), at=TimestampType(), price=DecimalType(8, 2), tags=ArrayType(StringType()),
               counts=MapType(StringType(), LongType()))  # fmt: skip
UTC = datetime.UTC
AT = datetime.datetime(2024, 5, 1, 12, 30, tzinfo=UTC)


class Everything(StatefulProcessor):
    """Does what the row of a key says, in each kind of state."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._value = handle.getValueState("profile", VALUE)
        self._list = handle.getListState("seen", LONG)
        self._map = handle.getMapState("pages", schema(page=StringType(), part=IntegerType()), LONG, DAY_MS)
        handle.getValueState("unused", LONG)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        for many in rows:
            self._value.update((many, AT, Decimal("1.50"), ["a", None], {"x": many}))
            self._list.appendList([(n,) for n in range(many)])
            for n in range(min(many, 3)):
                self._map.updateValue((f"page {n}", n), (n,))
            self._handle.registerTimer(NOW_MS + 60_000 * many)
            self._handle.registerTimer(NOW_MS + 60_000)
        yield from ()

    def close(self) -> None:
        pass


Rows = Iterable[tuple[tuple[Any, ...], int]]


def write(state: Path, live: Path, key: StructType, rows: Rows, name: str = "visits") -> None:
    """A version of each shard that has one of the keys. ``rows``: keys, and the number of elements of each."""
    ids = shard_ids(SHARDS)
    keys, arrow = Keys(key), arrow_schema(key)
    shard_of = ShardOfKeys(ids)
    covered = ShardOfKeys.covers(arrow.types)
    groups: dict[int, list[Group]] = {}
    for values, many in rows:
        columns = [pa.array([value], type_) for value, type_ in zip(values, arrow.types, strict=True)]
        shard = int(shard_of(columns, 1)[0]) if covered else ids[many % SHARDS]
        groups.setdefault(shard, []).append(Group(keys.to_bytes(values), values, iter([many]), many))
    io = IoThread()
    for shard, of_shard in groups.items():
        definition = {"kind": "stateful", "key": json.loads(key.json())["fields"]}
        identity = Identity("query", name, shard, SHARDS, definition, tuple(ids), tuple(map(str, arrow.types)))
        kept = Shard(
            identity,
            LocalStorage(state / "query" / name / f"shard-{shard:05d}"),
            live / name / str(shard),
            lambda p: Stores.of("tiered", p, io, MemoryBudget(1 << 20), StoreOptions(bucket_limit_bytes=1 << 20)),
            retain=10,
        )
        try:
            attempt = "0000000007-a"
            kept.open(None, attempt, identity)
            processor, handle = Everything(), Handle("processingTime", NOW_MS, lambda text: pytest.fail(text))
            processor.init(handle)
            handle.initialized()
            variables = Variables(None)
            handle.begin_shard(variables)
            store = LocalKeyedAttempt(kept, attempt)
            run = ShardRun(processor, handle, variables, store, keys, TimerValues(NOW_MS, -1), NOW_MS, None)
            list(run.arrive(of_shard))
            kept.commit(attempt, run.save().snapshot)
        finally:
            kept.close()
    io.close()


Inspect = Callable[..., Result]


@pytest.fixture
def inspect(tmp_path: Path) -> Inspect:
    def call(key: object, *options: str) -> Result:
        text = key if isinstance(key, str) else json.dumps(key)
        before = sorted((tmp_path / "state").rglob("*"))
        found = CliRunner().invoke(app, ["inspect", str(tmp_path / "state"), "--key", text, *options],
                                   env={"COLUMNS": "200"})  # fmt: skip
        assert sorted((tmp_path / "state").rglob("*")) == before, "it leaves nothing, and changes nothing"
        return found

    return call


def plain(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return " ".join(result.output.replace("│", " ").replace("┃", " ").split())


def test_values_lists_maps_ttl_and_timers_of_a_key(tmp_path: Path, inspect: Inspect) -> None:
    write(tmp_path / "state", tmp_path / "live", schema(user=StringType()), [((f"u{n}",), n) for n in range(1, 20)])
    said = plain(inspect({"user": "u4"}))
    assert '{"user": "u4"} in operator visits of query query, shard ' in said and "as of batch 7" in said
    assert "timers: 2023-11-14T22:14:20Z, 2023-11-14T22:17:20Z" in said
    value = '{"n": 4, "at": "2024-05-01T12:30:00Z", "price": "1.50", "tags": ["a", null], "counts": {"x": 4}}'
    assert value in said
    assert "list seen" in said and ' 3 {"n": 3}' in said and "the first" not in said
    assert '{"page": "page 2", "part": 2} {"n": 2} 2023-11-15T22:13:20Z' in said
    assert "value unused: empty" in said
    assert '{"n": 12, ' in plain(inspect({"user": "u12"}))


@pytest.mark.slow
@pytest.mark.usual_sizes
def test_a_large_list_is_cut(tmp_path: Path, inspect: Inspect) -> None:
    write(tmp_path / "state", tmp_path / "live", schema(user=StringType()), [(("big",), 60_000), (("small",), 30)])
    said = plain(inspect({"user": "big"}, "--values", "5"))
    about = re.search(r"list seen: the first 5 of about ([\d,]+), --values N shows more", said)
    assert about is not None and abs(int(about[1].replace(",", "")) - 60_000) < 6_000, said
    assert ' 4 {"n": 4}' in said and ' 5 {"n": 5}' not in said
    assert "list seen: the first 20 of 30, --values N shows more" in plain(inspect({"user": "small"}))
    assert "the first 0 of 3" in plain(inspect({"user": "small"}, "--values", "0"))


KEYS: dict[str, tuple[StructType, list[tuple[tuple[Any, ...], Any]]]] = {
    "null": (schema(user=StringType()), [((None,), {"user": None}), (("null",), {"user": "null"})]),
    "several columns": (
        schema(user=StringType(), n=IntegerType()),
        [
            (("a", 1), {"n": 1, "user": "a"}),
            (("a", None), {"user": "a", "n": None}),
            ((None, None), {"user": None, "n": None}),
        ],
    ),
    "numbers": (
        schema(x=DoubleType(), d=DecimalType(5, 2)),
        [((1.0, Decimal("2.50")), {"x": 1, "d": "2.5"}), ((math.nan, None), {"x": math.nan, "d": None})],
    ),
    "times": (
        schema(at=TimestampType(), day=DateType()),
        [((AT, datetime.date(2024, 5, 1)), {"at": "2024-05-01T14:30:00+02:00", "day": "2024-05-01"})],
    ),
    "bytes": (schema(b=BinaryType()), [((b"\x00\xff",), {"b": "AP8="})]),
    # The shard of such a key is not computed here, so all are searched.
    "a list": (schema(l=ArrayType(LongType())), [(([1, 2],), {"l": [1, 2]}), (([],), {"l": []})]),
    "a struct": (schema(s=schema(a=LongType(), b=StringType())), [(((1, "x"),), {"s": {"a": 1, "b": "x"}})]),
}


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("name", KEYS)
def test_keys_of_any_type(tmp_path: Path, inspect: Inspect, name: str) -> None:
    key, given = KEYS[name]
    rows = [(values, number) for number, (values, _) in enumerate(given, 1)]
    write(tmp_path / "state", tmp_path / "live", key, rows)
    for number, (_, asked) in enumerate(given, 1):
        assert f'{{"n": {number}, "at"' in plain(inspect(asked)), asked


def test_a_key_that_is_not_there(tmp_path: Path, inspect: Inspect) -> None:
    write(tmp_path / "state", tmp_path / "live", schema(user=StringType()), [((f"u{n}",), n) for n in range(1, 9)])
    said = plain(inspect({"user": "nobody"}))
    assert said.startswith('{"user": "nobody"}: no state in operator visits of query query')


WRONG = {
    "anna": "is not JSON",
    r'{"user": "\ud800"}': "is not JSON",
    '"anna"': "is not an object with the columns of the key",
    '{"name": "anna"}': "the column user is missing; it has no column name",
    '{"user": 1}': "column user: 1 is no string: it must be a text",
    '{"user": "a", "n": 1}': "it has no column n",
}


@pytest.mark.parametrize("given", WRONG)
def test_a_wrong_key_is_refused(tmp_path: Path, inspect: Inspect, given: str) -> None:
    write(tmp_path / "state", tmp_path / "live", schema(user=StringType()), [(("a",), 1)])
    result = inspect(given)
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert WRONG[given] in said
    assert "operator visits of query query, whose key is (user string)" in said or "JSON" in said or "object" in said


def test_wrong_values_of_types(tmp_path: Path, inspect: Inspect) -> None:
    key = schema(n=IntegerType(), at=TimestampType(), d=DecimalType(5, 2))
    write(tmp_path / "state", tmp_path / "live", key, [((1, AT, Decimal("1.00")), 1)])
    right = {"n": 1, "at": "2024-05-01T12:30:00Z", "d": "1.00"}
    for wrong, says in (
        ({"n": 2**31}, "needs more than 32 bits"),
        ({"n": True}, "true is no int: it must be a number"),
        ({"at": "2024-05-01T12:30:00"}, "it needs a time zone, as in 2024-05-01T12:00:00Z"),
        ({"at": "yesterday"}, "column at"),
        ({"d": "1.001"}, "more than 2 digits after the point"),
        ({"d": "12345.00"}, "cannot be represented as Decimal(5, 2)"),
        ({"d": "1,0"}, "column d"),
    ):
        result = inspect(right | wrong)
        assert result.exit_code == 2, result.output
        assert says in " ".join(result.output.split())


def test_several_operators(tmp_path: Path, inspect: Inspect) -> None:
    state, live = tmp_path / "state", tmp_path / "live"
    write(state, live, schema(user=StringType()), [(("a",), 1)], "visits")
    write(state, live, schema(user=StringType()), [(("a",), 2)], "orders")
    write(state, live, schema(user=LongType()), [((5,), 3)], "numbered")
    said = plain(inspect({"user": "a"}))
    assert "in operator orders" in said and "in operator visits" in said and "numbered" not in said
    said = plain(inspect({"user": "a"}, "--operator", "orders"))
    assert '{"n": 2, ' in said and "visits" not in said
    assert '{"n": 3, ' in plain(inspect({"user": 5}))
    result = inspect({"user": "a"}, "--operator", "payments")
    assert result.exit_code == 2 and "no stateful processor of the name 'payments'" in result.output


@pytest.mark.parametrize("option", ["--repair", "--lineages", "--forget=x"])
def test_options_that_exclude_each_other(tmp_path: Path, option: str) -> None:
    (tmp_path / "state").mkdir()
    result = CliRunner().invoke(app, ["inspect", str(tmp_path / "state"), "--key", "{}", option])
    assert result.exit_code == 2 and "exclude each other" in result.output


def test_a_damaged_run_is_named(tmp_path: Path, inspect: Inspect) -> None:
    write(tmp_path / "state", tmp_path / "live", schema(user=StringType()), [(("a",), 3_000)])
    (run,) = (tmp_path / "state").rglob("*.sst")
    data = bytearray(run.read_bytes())
    data[200] ^= 1
    run.write_bytes(data)
    result = inspect({"user": "a"})
    assert result.exit_code == 2 and run.name in result.output, result.output


@pytest.mark.usual_sizes
def test_a_key_in_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    write(tmp_path / "state", tmp_path / "live", schema(user=StringType()), [(("a",), 3_000), (("b",), 2)])
    with serving() as port:
        bucket = ObjectStore(port)
        for path in (tmp_path / "state").rglob("*"):
            if path.is_file():
                bucket.put(f"state/{path.relative_to(tmp_path / 'state')}", path.read_bytes())
        before = bucket.objects()
        command = ["inspect", bucket.uri("state"), "--key", '{"user": "a"}']
        said = plain(CliRunner().invoke(app, command, env={"COLUMNS": "200"}))
        assert '"counts": {"x": 3000}' in said and "the first 20 of 3,000" in said
        assert bucket.objects() == before
