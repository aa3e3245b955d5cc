"""What ``aion.sinks.upsert`` leaves in real databases."""

from __future__ import annotations

import math
import subprocess
import sys
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import aion
from aion import aggregates as A
from aion.errors import ConfigError, MissingExtra, SchemaError, SinkError
from aion.sinks.bad_values import JSON
from aion.sinks.marks import History
from tests.sinks.databases import Place
from tests.sinks.lakes import LAKES
from tests.sinks.rig import MINUTE, QUERY, at, panes
from tests.sinks.tables import Table

COLUMNS = ("k", "n")


def test_the_newest_row_of_each_window_stays(database: Place) -> None:
    write = aion.sinks.upsert(database.uri, "minutes").write
    write(panes([{"k": "a", "n": 1}, {"k": "b", "n": 2}, {"k": "a", "n": 3, "pane": 1}]), at(0))
    assert database.rows("minutes", *COLUMNS) == [("a", "3"), ("b", "2")]
    write(panes([{"k": "a", "n": 4, "pane": 2}, {"k": "a", "minute": 1, "n": 5}]), at(1))
    assert database.rows("minutes", *COLUMNS, "pane") == [("a", "4", "2"), ("a", "5", "0"), ("b", "2", "0")]


def test_null_keys_are_one_key(database: Place) -> None:
    write = aion.sinks.upsert(database.uri, "minutes").write
    write(panes([{"k": None, "n": 1}, {"k": "a", "n": 2}, {"k": None, "n": 3}]), at(0))
    write(panes([{"k": None, "n": 4}, {"k": "a", "n": 5}, {"k": None, "minute": 1, "n": 6}]), at(1))
    assert database.rows("minutes", *COLUMNS) == [("a", "5"), (None, "4"), (None, "6")]
    write(panes([{"k": None, "kind": "retracted"}]), at(2))
    assert database.rows("minutes", *COLUMNS) == [("a", "5"), (None, "6")]


def test_windows_without_a_key_are_one_row_each(database: Place) -> None:
    write = aion.sinks.upsert(database.uri, "minutes").write
    for batch in range(2):
        write(panes([{"n": batch}, {"n": batch + 1, "minute": 1}], keyed=False), at(batch))
    assert database.rows("minutes", "n") == [("1",), ("2",)]


def test_several_null_keys_side_by_side(database: Place) -> None:
    def rows(n: int) -> pa.Table:
        keys = [("a", "x"), ("a", None), (None, "x"), (None, None)]
        table = panes([{"k": k, "n": n} for k, _ in keys])
        return table.add_column(1, "j", pa.array([j for _, j in keys]))

    write = aion.sinks.upsert(database.uri, "minutes", key=["k", "j"]).write
    write(rows(1), at(0))
    write(rows(2), at(1))
    found = database.run("SELECT k, j, n FROM minutes")
    assert len(found) == 4 and set(found) == {("a", None, 2), ("a", "x", 2), (None, None, 2), (None, "x", 2)}


def test_retracted_rows_go_and_may_come_back(database: Place) -> None:
    write = aion.sinks.upsert(database.uri, "minutes").write
    write(panes([{"k": "a", "n": 1}, {"k": "a", "n": 1, "length": 2}, {"k": "b", "n": 1}]), at(0))
    write(panes([{"k": "a", "kind": "retracted"}, {"k": "b", "kind": "retracted"}, {"k": "b", "n": 7}]), at(1))
    assert database.rows("minutes", *COLUMNS) == [("a", "1"), ("b", "7")]


def test_dropped_rows_are_not_written(database: Place) -> None:
    write = aion.sinks.upsert(database.uri, "minutes").write
    write(panes([{"k": "a", "n": 1}, {"k": "a", "n": 9, "kind": "dropped", "reason": "late"}]), at(0))
    write(panes([{"k": "a", "n": 9, "kind": "dropped", "reason": "late"}]), at(1))
    assert database.rows("minutes", *COLUMNS) == [("a", "1")]


def test_sessions_that_late_events_join(database: Place) -> None:
    policy = {"lateness": {"initial_bound": "1 hour", "coverage": None}, "trigger": {"kind": "every_batch"}}
    write = aion.sinks.upsert(database.uri, "visits").write
    with aion.LocalOperator(
        windows=aion.Session("5 minutes"), time="ts", key="k", aggregates={"n": A.count()}, policy=policy
    ) as operator:

        def click(*minutes: int) -> pa.Table:
            ts = pa.array([m * MINUTE for m in minutes], pa.timestamp("us", "UTC"))
            return operator.process(pa.table({"k": ["u"] * len(minutes), "ts": ts}))

        write(click(1, 3, 12), at(0))
        write(operator.advance(30 * MINUTE), at(1))
        assert database.rows("visits", "n") == [("1",), ("2",)]
        write(click(7), at(2))
        assert database.rows("visits", "n") == [("4",)]


# -- a batch is one transaction, once -------------------------------------------------------------------


def test_a_batch_that_is_run_again_changes_nothing(database: Place) -> None:
    write = aion.sinks.upsert(database.uri, "minutes").write
    write(panes([{"k": "a", "n": 1}]), at(0))
    database.run("UPDATE minutes SET n = 7")  # to see whether it is written again
    write(panes([{"k": "a", "n": 1}]), at(0))
    assert database.rows("minutes", *COLUMNS) == [("a", "7")]
    assert database.run("SELECT name, batch FROM aion_batches") == [("minutes", 0)]


def test_a_batch_that_fails_leaves_nothing(database: Place) -> None:
    write = aion.sinks.upsert(database.uri, "minutes").write
    kinds = [f"{name} {kind}" for name, kind in made(database).items()]
    database.run(f"CREATE TABLE minutes ({', '.join(kinds)}, CHECK (n < 5))")
    write(panes([{"k": "a", "n": 1}]), at(1))
    with pytest.raises(Exception, match=r"(?i)check|constraint"):
        write(panes([{"k": "a", "n": 4}, {"k": "b", "n": 6}]), at(2))
    assert database.rows("minutes", *COLUMNS) == [("a", "1")]
    write(panes([{"k": "a", "n": 2}, {"k": "b", "n": 3}]), at(2))
    assert database.rows("minutes", *COLUMNS) == [("a", "2"), ("b", "3")]


def made(database: Place) -> dict[str, str]:
    """The columns of a table that a sink makes, as SQL."""
    aion.sinks.upsert(database.uri, "other").write(panes([]), at(0))
    text, number, time = ("text", "bigint", "timestamp with time zone")
    if database.kind == "duckdb":
        text = "varchar"
    if database.kind == "sqlite":
        number, time = "INTEGER", "TEXT"
    kinds = {"k": text, '"window"': text, "window_start": time, "window_end": time, "n": number, "kind": text}
    return kinds | {"pane": number, "events": number, "late_events": number, "closes_at": time}


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize(
    ("now", "said"),
    [
        (at(1, History("other", "file:/other")), "has batch 3 of another query"),
        (at(4, History(QUERY.query, "file:/copy")), "of the same query from another checkpoint location"),
        (at(1), "has batch 3 of this query already, and this is batch 1: the checkpoint went back"),
        (at(6), "has batch 3 of this query, and this is batch 6: it lacks those between"),
    ],
)
def test_a_batch_that_does_not_follow_is_refused_until_it_is_adopted(database: Place, now: Any, said: str) -> None:
    aion.sinks.upsert(database.uri, "minutes").write(panes([{"k": "a", "n": 1}, {"k": "b", "n": 1}]), at(3))
    with pytest.raises(SinkError) as error:
        aion.sinks.upsert(database.uri, "minutes").write(panes([{"k": "a", "n": 2}]), now)
    first = str(error.value).splitlines()[0]
    adopt = f"{QUERY.digest}:3"
    assert said in first and f"adopt='{adopt}'" in first
    assert database.rows("minutes", *COLUMNS) == [("a", "1"), ("b", "1")]
    adopting = aion.sinks.upsert(database.uri, "minutes", adopt=adopt)
    adopting.write(panes([{"k": "a", "n": 2}]), now)
    adopting.write(panes([{"k": "a", "n": 3}]), at(now.batch + 1, now.history))
    assert database.rows("minutes", *COLUMNS) == [("a", "3"), ("b", "1")]
    with pytest.raises(SinkError):  # it was taken over once, from that batch, and not for ever
        adopting.write(panes([{"k": "a", "n": 4}]), at(0, History("third", "")))


def test_a_table_with_rows_of_others_is_refused_until_it_is_adopted(database: Place) -> None:
    kinds = [f"{name} {kind}" for name, kind in made(database).items()]
    database.run(f"CREATE TABLE minutes ({', '.join(kinds)})")
    database.run("INSERT INTO minutes (k, n) VALUES ('old', 1)")
    with pytest.raises(SinkError, match="adopt='unmarked'"):
        aion.sinks.upsert(database.uri, "minutes").write(panes([{"k": "a", "n": 2}]), at(5))
    aion.sinks.upsert(database.uri, "minutes", adopt="unmarked").write(panes([{"k": "a", "n": 2}]), at(5))
    assert database.rows("minutes", *COLUMNS) == [("a", "2"), ("old", "1")]


def test_a_table_that_was_emptied_takes_any_query(database: Place) -> None:
    write = aion.sinks.upsert(database.uri, "minutes").write
    write(panes([{"k": "a", "n": 1}]), at(3))
    database.run("DELETE FROM minutes")
    write(panes([{"k": "b", "n": 1}]), at(0, History("other", "")))
    write(panes([{"k": "b", "n": 2}]), at(1, History("other", "")))
    assert database.rows("minutes", *COLUMNS) == [("b", "2")]


def test_tables_of_one_database_have_marks_of_their_own(database: Place) -> None:
    aion.sinks.upsert(database.uri, "one").write(panes([{"k": "a", "n": 1}]), at(3))
    aion.sinks.upsert(database.uri, "two").write(panes([{"k": "a", "n": 1}]), at(0, History("other", "")))
    assert sorted(database.run("SELECT name, batch FROM aion_batches")) == [("one", 3), ("two", 0)]


# -- tables -----------------------------------------------------------------------------------------------


@pytest.mark.slow(but_first=True)
def test_a_table_of_another_shape_is_refused_before_a_row_is_written(database: Place) -> None:
    kinds = made(database)
    for lacking, said in (
        ({**kinds, "n": kinds["window_start"]}, "column 'n'"),
        ({name: kind for name, kind in kinds.items() if name != "n"}, "no column 'n'"),
    ):
        database.run("DROP TABLE IF EXISTS minutes")
        database.run(f"CREATE TABLE minutes ({', '.join(f'{name} {kind}' for name, kind in lacking.items())})")
        with pytest.raises(SchemaError, match=said):
            aion.sinks.upsert(database.uri, "minutes").write(panes([{"k": "a", "n": 1}]), at(0))
        assert database.run("SELECT * FROM minutes") == []


def test_a_table_may_have_more_columns_and_no_index(database: Place) -> None:
    kinds = [f"{name} {kind}" for name, kind in made(database).items()]
    database.run(f"CREATE TABLE minutes ({', '.join(kinds)}, remark varchar(20) DEFAULT 'none')")
    write = aion.sinks.upsert(database.uri, "minutes").write
    write(panes([{"k": "a", "n": 1}, {"k": "b", "n": 2}]), at(0))
    write(panes([{"k": "a", "n": 3}]), at(1))
    assert database.rows("minutes", *COLUMNS, "remark") == [("a", "3", "none"), ("b", "2", "none")]


def test_a_table_in_a_schema_and_names_that_need_quotes(database: Place) -> None:
    schema = "main"
    if database.kind != "sqlite":
        schema = f"my {uuid.uuid4().hex}"
        database.run(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
    outputs = (pa.field('a "b"', pa.int64()), pa.field("select", pa.int64()))
    write = aion.sinks.upsert(database.uri, f"{schema}.the table").write
    for batch in range(2):
        write(panes([{"k": "a", 'a "b"': batch, "select": 2}], *outputs), at(batch))
    assert database.run(f'SELECT "a ""b""", "select" FROM "{schema}"."the table"') == [(1, 2)]
    assert database.run(f'SELECT batch FROM "{schema}".aion_batches') == [(1,)]


def test_the_key_can_be_named(database: Place) -> None:
    table = panes([{"k": "a", "n": 1}, {"k": "b", "n": 1}])
    plain = pa.table({name: table[name] for name in table.column_names})  # without what the columns say
    aion.sinks.upsert(database.uri, "one", key="k").write(plain, at(0))
    assert len(database.run("SELECT * FROM one")) == 2
    with pytest.raises(SchemaError, match="no column 'x'"):
        aion.sinks.upsert(database.uri, "two", key=["x"]).write(plain, at(0))
    with pytest.raises(SchemaError, match=r"no column says which part of a pane it is.*pass key="):
        aion.sinks.upsert(database.uri, "two").write(plain, at(0))


@pytest.mark.slow(but_first=True)
def test_the_key_is_the_columns_that_say_so(database: Place) -> None:
    """Wherever they are, whatever stands before them, and under any name."""
    table = panes([{"k": "a", "n": 1}, {"k": "b", "n": 2}])
    moved = table.select([*table.column_names[1:], "k"]).add_column(0, "joined", pa.array(["x", "y"]))
    aion.sinks.upsert(database.uri, "moved").write(moved, at(0))
    later = panes([{"k": "a", "n": 3}, {"k": "b", "n": 4}]).add_column(0, "joined", pa.array(["other", "z"]))
    aion.sinks.upsert(database.uri, "moved").write(later, at(1))
    assert database.rows("moved", "joined", *COLUMNS) == [("other", "a", "3"), ("z", "b", "4")]
    renamed = table.rename_columns([{"k": "road", "window_start": "begins"}.get(n, n) for n in table.column_names])
    aion.sinks.upsert(database.uri, "renamed").write(renamed, at(0))
    aion.sinks.upsert(database.uri, "renamed").write(renamed, at(1))
    assert database.rows("renamed", "road", "n") == [("a", "1"), ("b", "2")]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("k", "column 0 of the key"),
        ("window", "window"),
        ("window_start", "window_start"),
        ("window_end", "window_end"),
        ("kind", "kind"),
        ("pane_seq", "pane_seq"),
    ],
)
def test_a_part_of_the_panes_that_is_missing_is_refused(database: Place, part: str, said: str) -> None:
    """A select that left out a key column would make one row of three keys."""
    table = panes([{"k": "a", "n": 1}, {"k": "b", "n": 2}])
    with pytest.raises(SchemaError, match=rf"^{said} of the windows 'minutes' is missing.*keep these columns"):
        aion.sinks.upsert(database.uri, "minutes").write(table.drop([part]), at(0))
    lost = table.set_column(table.column_names.index(part), part, table[part])  # another column of the same name
    with pytest.raises(SchemaError, match=rf"^{said} of the windows"):
        aion.sinks.upsert(database.uri, "minutes").write(lost, at(0))


def test_the_newest_pane_counts_wherever_it_stands(database: Place) -> None:
    """A repartition mixes the rows of a batch."""
    rows = [{"k": "a", "n": 1}, {"k": "b", "n": 2}, {"k": "a", "n": 3}, {"k": "b", "kind": "retracted"}]
    for order in ([3, 2, 1, 0], [1, 3, 0, 2]):
        table = f"minutes{order[0]}"
        aion.sinks.upsert(database.uri, table).write(panes(map(dict, rows)).take(order), at(0))
        assert database.rows(table, *COLUMNS) == [("a", "3")]


@pytest.mark.slow(but_first=True)
def test_a_pane_replaces_all_rows_of_its_key_and_window(database: Place) -> None:
    """A function may return several rows: the three best, and later two."""

    def best(*counts: int, pane_seq: int, **more: Any) -> list[dict[str, Any]]:
        return [{"k": "a", "n": n, "pane_seq": pane_seq, **more} for n in counts]

    write = aion.sinks.upsert(database.uri, "minutes").write
    other = [{"k": "b", "n": 9, "pane_seq": 0}]
    write(panes(best(1, 1, 1, pane_seq=0) + other, single=False), at(0))
    assert database.rows("minutes", *COLUMNS) == [("a", "1"), ("a", "1"), ("a", "1"), ("b", "9")]
    write(panes(best(2, 3, 4, pane_seq=1) + best(5, 6, pane_seq=2), single=False), at(1))
    assert database.rows("minutes", *COLUMNS) == [("a", "5"), ("a", "6"), ("b", "9")]
    write(panes(best(0, pane_seq=3, kind="retracted"), single=False), at(2))
    assert database.rows("minutes", *COLUMNS) == [("b", "9")]


def test_changes_of_panes_with_several_rows(database: Place) -> None:
    """All rows that were there go, and all that come are new: also for the null key."""
    write = aion.sinks.upsert(database.uri, "best", changes="best_changes").write
    for number, rows in enumerate(
        [
            [{"k": k, "n": n, "pane_seq": seq} for k, n, seq in [("a", 3, 0), ("a", 2, 0), (None, 5, 1), (None, 5, 1)]],
            [{"k": "a", "n": 4, "pane_seq": 2}, {"k": None, "kind": "retracted", "pane_seq": 3}],
        ]
    ):
        write(panes(rows, single=False), at(number))
    assert database.rows("best", "k", "n") == [("a", "4")]
    assert database.rows("best_changes", "seq", "change", "k", "n", "old_n") == sorted(
        [
            ("0", "insert", "a", "3", None), ("0", "insert", "a", "2", None), ("0", "insert", None, "5", None),
            ("0", "insert", None, "5", None), ("1", "delete", "a", None, "3"), ("1", "delete", "a", None, "2"),
            ("1", "insert", "a", "4", None), ("1", "delete", None, None, "5"), ("1", "delete", None, None, "5"),
        ],
        key=repr,
    )  # fmt: skip


@pytest.mark.slow(but_first=True)
def test_old_values_are_not_written(database: Place) -> None:
    """They would be stale from the next batch on."""
    with aion.LocalOperator(
        windows=aion.Tumbling("1 minute"), time="ts", key="k", aggregates={"n": A.count()}, emit="changes"
    ) as operator:
        times = pa.array([0, 61_000_000], pa.timestamp("us", "UTC"))
        operator.process(pa.table({"k": ["a", "a"], "ts": times}))
        aion.sinks.upsert(database.uri, "minutes").write(operator.advance(2 * MINUTE), at(0))
    assert database.rows("minutes", *COLUMNS) == [("a", "1"), ("a", "1")]
    for left_out in ("old_n", "pane_seq", "reason"):
        with pytest.raises(Exception, match=left_out):
            database.run(f"SELECT t.{left_out} FROM minutes AS t")


VALUES: Sequence[tuple[str, pa.DataType, Any, dict[str, Any]]] = [
    ("flag", pa.bool_(), True, {"sqlite": 1}),
    ("tiny", pa.int8(), -128, {}),
    ("short", pa.int16(), 32_767, {}),
    ("int", pa.int32(), -(2**31), {}),
    ("long", pa.int64(), 2**63 - 1, {}),
    ("single", pa.float32(), 1.5, {}),
    ("double", pa.float64(), 0.1, {}),
    ("infinite", pa.float64(), -math.inf, {}),
    ("text", pa.string(), "ä'\"\\\n", {}),
    ("nothing", pa.string(), "", {}),
    ("bytes", pa.binary(), b"\0\xff", {}),
    ("day", pa.date32(), date(1969, 12, 31), {"sqlite": "1969-12-31"}),
    (
        "instant",
        pa.timestamp("us", "UTC"),
        datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC),
        {"sqlite": "1969-12-31 23:59:59.999999"},
    ),
    ("clock", pa.timestamp("us"), datetime(2026, 1, 1), {"sqlite": "2026-01-01 00:00:00.000000"}),
    ("money", pa.decimal128(38, 2), Decimal("123456789012345678901234567890.10"), {}),
    ("span", pa.duration("us"), timedelta(days=1, microseconds=1), {"sqlite": 86_400_000_001}),
]


@pytest.mark.slow(but_first=True)
def test_every_type_comes_back_as_it_was(database: Place) -> None:
    outputs = [pa.field(name, type_) for name, type_, _, _ in VALUES]
    write = aion.sinks.upsert(database.uri, "types").write
    for batch in range(2):  # the second finds the table that the first has made
        rows = [{"k": "a"} | {name: value for name, _, value, _ in VALUES}, {"k": "b"}]
        write(panes(rows, *outputs), at(batch))
    for name, _, value, other in VALUES:
        ((found,), (null,)) = database.run(f'SELECT "{name}" FROM types ORDER BY k')
        assert null is None
        wanted = other.get(database.kind, value)
        if isinstance(value, Decimal) and not isinstance(found, Decimal):
            found, wanted = str(found), str(wanted)
        if name == "span" and database.kind == "postgresql":
            assert (found.months, found.days, found.nanoseconds) == (0, 0, 86_400_000_001_000)
            continue
        assert found == wanted and (name != "instant" or database.kind == "sqlite" or found.utcoffset() == timedelta())


def test_nan_is_not_null(database: Place) -> None:
    write = aion.sinks.upsert(database.uri, "types").write
    for batch in range(2):
        rows = [{"k": math.nan, "x": math.nan}, {"k": None, "x": None}, {"k": 1.0, "x": 1.0}]
        write(panes(rows, pa.field("x", pa.float64()), key=pa.float64()), at(batch))
    found = database.run("SELECT k, x FROM types")
    assert sorted(str(k).lower() for k, _ in found) == ["1.0", "nan", "none"]
    assert sorted(str(x).lower() for _, x in found) == ["1.0", "nan", "none"]


@pytest.mark.slow(but_first=True)
@pytest.mark.filterwarnings("ignore:Delete operation did not match any records:UserWarning")
@pytest.mark.parametrize(
    "key",
    [
        pa.array([True, False, None]),
        pa.array([1, 2, None], pa.int8()),
        pa.array([b"a", b"b", None]),
        pa.array([date(2026, 1, 1), date(2026, 1, 2), None]),
        pa.array([Decimal("1.10"), Decimal("1.20"), None]),
        pa.array([1, 2, None], pa.timestamp("us")),
        pa.array([1, 2, None], pa.duration("us")),
    ],
    ids=lambda key: str(key.type),
)
def test_keys_of_every_type(table: Table, key: pa.Array) -> None:
    if table.kind in LAKES and pa.types.is_duration(key.type):
        return  # they have no such type
    write = table.sink().write
    for batch in range(2):
        rows = panes(({"n": batch} for _ in range(3)), key=key.type)
        write(rows.set_column(0, rows.schema.field(0), key), at(batch))
    assert table.rows("n") == [("1",)] * 3


def test_lists_and_structs_are_the_databases_own_or_json(database: Place) -> None:
    if database.kind == "duckdb":
        nested = pa.field("x", pa.struct([("a", pa.list_(pa.int64()))]))
        rows = [{"k": "a", "x": {"a": [1, None]}}]
    else:
        nested = pa.field("x", pa.string(), metadata=JSON)
        rows = [{"k": "a", "x": '{"a": [1, null]}'}]
    write = aion.sinks.upsert(database.uri, "nested").write
    for batch in range(2):
        write(panes(rows, nested), at(batch))
    ask = {
        "duckdb": "SELECT x.a[1] FROM nested",
        "sqlite": "SELECT x ->> '$.a[0]' FROM nested",
        "postgresql": "SELECT CAST(x -> 'a' ->> 0 AS bigint) FROM nested",
    }
    assert database.run(ask[database.kind]) == [(1,)]


# -- what is refused at once ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "table", "said"),
    [
        ("mysql://root@host/db", "t", "'mysql' is no database that upsert knows"),
        ("visits.db", "t", "sqlite:///PATH"),
        ("sqlite://visits.db", "t", "names no file"),
        ("sqlite:///visits.db", "a.b.c", "schema.table"),
    ],
)
def test_a_wrong_call_says_what_to_write(uri: str, table: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        aion.sinks.upsert(uri, table)


def test_files_are_found_by_relative_and_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    here = aion.sinks.upsert("sqlite:///here.db", "t")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    here.write(panes([]), at(0))
    aion.sinks.upsert(f"sqlite:///{tmp_path}/there.db", "t").write(panes([]), at(0))
    assert {path.name for path in tmp_path.glob("**/*.db")} == {"here.db", "there.db"}
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("duckdb", lambda: aion.sinks.upsert("duckdb:///t.duckdb", "t")),
        ("adbc_driver_postgresql", lambda: aion.sinks.upsert("postgresql://host/db", "t")),
        ("deltalake", lambda: aion.sinks.merge("delta", "t")),
        ("pyiceberg", lambda: aion.sinks.merge("iceberg", "a.t")),
    ],
)
def test_a_missing_driver_is_named_at_once(module: str, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == module or name.startswith("aion.sinks."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        MissingExtra, match=r"needs the package '\w+', which is not installed: pip install 'aion\[\w+\]'"
    ):
        call()


@pytest.mark.slow
def test_a_sink_waits_for_another_process_that_has_the_file(tmp_path: Path) -> None:
    """DuckDB lets either one process write or several read; SQLite's own wait is like that."""
    uri = f"duckdb:///{tmp_path / 'db'}"
    write = aion.sinks.upsert(uri, "minutes").write
    write(panes([{"k": "a", "n": 1}]), at(0))
    opening = "import duckdb, sys; db = duckdb.connect(sys.argv[1], read_only=True)"
    program = f"{opening}; print('open', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(tmp_path / "db")]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader,
        ThreadPoolExecutor(1) as pool,
    ):
        assert reader.stdin is not None and reader.stdout is not None
        assert reader.stdout.readline() == "open\n"
        waiting = pool.submit(write, panes([{"k": "a", "n": 2}]), at(1))
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.5)
        reader.stdin.close()
        waiting.result(timeout=60)
    assert Place("duckdb", uri).rows("minutes", *COLUMNS) == [("a", "2")]


@pytest.mark.slow(but_first=True)
def test_columns_are_added_if_that_is_asked_for(database: Place) -> None:
    n, speed = pa.field("n", pa.int64()), pa.field("speed", pa.float64())
    asked = aion.sinks.upsert(database.uri, "minutes", changes="made", add_columns=True).write
    asked(panes([{"k": "a", "n": 1}, {"k": "b", "n": 2}], n), at(0))
    more = panes([{"k": "a", "n": 5, "speed": 0.5}, {"k": "c", "n": 7, "speed": 1.5}], n, speed)
    with pytest.raises(SchemaError, match=r"has no column 'speed'.*or let the sink do it \(add_columns=True\)"):
        aion.sinks.upsert(database.uri, "minutes", changes="made").write(more, at(1))
    asked(more, at(1))
    assert database.rows("minutes", "k", "n", "speed") == [("a", "5", "0.5"), ("b", "2", None), ("c", "7", "1.5")]
    made = database.rows("made", "batch", "k", "change", "speed", "old_speed")
    assert made[-2:] == [("1", "a", "update", "0.5", None), ("1", "c", "insert", "1.5", None)]
    asked(more, at(1))  # run again
    assert len(database.rows("minutes", "k")) == 3
    database.run("ALTER TABLE minutes RENAME COLUMN k TO other")
    with pytest.raises(SchemaError, match="has no column 'k'"):
        asked(panes([{"k": "a", "n": 1}], n), at(2))
    with pytest.raises(ConfigError, match="add_columns: 1 is neither True nor False"):
        aion.sinks.upsert(database.uri, "minutes", add_columns=1)  # type: ignore[arg-type]
