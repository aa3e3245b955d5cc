"""Values and names that a store cannot hold."""

from __future__ import annotations

import logging
from typing import Any

import pyarrow as pa
import pytest

import aion
from aion.errors import ConfigError, SchemaError, SinkError
from aion.sinks.bad_values import JSON
from tests.sinks.databases import Place
from tests.sinks.lakes import LAKES, Lake
from tests.sinks.rig import MINUTE, UTC, at, panes
from tests.sinks.tables import Table

pytestmark = pytest.mark.filterwarnings("ignore:Delete operation did not match any records:UserWarning")
YEAR_40000_US = 1_200_112_000_000_000_000
TEXT, TIME, DAY, COUNT = (
    pa.field("x", pa.string()),
    pa.field("x", UTC),
    pa.field("x", pa.date32()),
    pa.field("n", pa.int64()),
)


def with_bytes(rows: pa.Table, column: str, *values: bytes) -> pa.Table:
    """Texts that are no UTF-8, as Spark makes them of bytes."""
    texts = pa.Array.from_buffers(pa.string(), len(values), pa.array(values, pa.binary()).buffers())
    at = rows.column_names.index(column)
    return rows.set_column(at, rows.schema.field(at), texts)


def bad(what: str, table: Table) -> tuple[pa.Table, str, str | None]:
    """Two rows, of which that of key b has a bad value, what the error says of it, and what stands there instead."""
    rows: list[dict[str, Any]] = [{"k": "a", "x": None, "n": 1}, {"k": "b", "x": None, "n": 2}]
    if what == "utf8":
        found = with_bytes(panes(rows, TEXT, COUNT), "x", b"ok", b"b\xffd")
        return (
            found,
            r"column 'x' of k='b', window='minute', window_start=1970.*: the value b'b\\xffd' is not UTF-8",
            "b�d",
        )
    if what == "nul":
        rows[1]["x"] = "b\0d"
        return panes(rows, TEXT, COUNT), r"column 'x' of k='b'.*: the value 'b\\x00d' has a NUL", "b�d"
    if what == "json":
        rows[1]["x"] = '{"v": "b\\u0000d\\\\u0000"}'
        json = pa.field("x", pa.string(), metadata=JSON)
        return panes(rows, json, COUNT), r"column 'x' of k='b'.*has a NUL", '{"v": "b�d\\\\u0000"}'
    rows[1]["x"] = -(2**62) if what == "time" else 2**31 - 1
    return panes(rows, TIME if what == "time" else DAY, COUNT), r"column 'x' of k='b'.*is a time that the store", None


def is_fine(what: str, table: Table) -> bool:
    return (what in ("nul", "json") and table.kind != "postgresql") or (what == "time" and table.kind == "duckdb")


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("what", ["utf8", "nul", "json", "time", "day"])
def test_a_value_that_cannot_be_written_is_named(table: Table, what: str) -> None:
    rows, said, _ = bad(what, table)
    if is_fine(what, table):
        table.sink().write(rows, at(0))
        return
    with pytest.raises(SinkError, match=rf"{said}.*on_bad_value='replace' or 'drop'"):
        table.sink().write(rows, at(0))
    table.sink().write(rows.slice(0, 1), at(0))
    assert table.rows("k", "n") == [("a", "1")]


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("what", ["utf8", "nul", "json", "time", "day"])
def test_it_is_replaced(table: Table, what: str, caplog: pytest.LogCaptureFixture) -> None:
    rows, _, instead = bad(what, table)
    if is_fine(what, table):
        return
    with caplog.at_level(logging.WARNING):
        table.sink(on_bad_value="replace").write(rows, at(0))
    (_, found) = table.rows("k", "x")
    assert found == ("b", instead)
    assert "column 'x' has 1 values that were replaced" in caplog.text


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("what", ["utf8", "nul", "json", "time", "day"])
def test_its_row_is_left_out_and_an_older_one_does_not_stay(table: Table, what: str) -> None:
    rows, _, _ = bad(what, table)
    if is_fine(what, table):
        return
    write = table.sink(on_bad_value="drop").write
    write(rows.set_column(rows.column_names.index("x"), rows.schema.field("x"), pa.nulls(2, rows["x"].type)), at(0))
    assert table.rows("k", "n") == [("a", "1"), ("b", "2")]
    write(rows, at(1))
    assert table.rows("k", "n") == [("a", "1")]


@pytest.mark.slow(but_first=True)
def test_a_bad_key_is_named_replaced_or_left_out(table: Table) -> None:
    rows = with_bytes(panes([{"k": "", "n": 1}, {"k": "", "n": 2}]), "k", b"a", b"b\xff")
    with pytest.raises(SinkError, match=r"column 'k' of k=b'b\\xff'"):
        table.sink().write(rows, at(0))
    for how, name, found in (("drop", "without", [("a", "1")]), ("replace", "mended", [("a", "1"), ("b�", "2")])):
        table.sink(name, on_bad_value=how).write(rows, at(0))
        assert table.rows("k", "n", table=name) == found
    gone = with_bytes(panes([{"k": "", "kind": "retracted"}]), "k", b"b\xff")
    table.sink("mended", on_bad_value="replace").write(gone, at(1))
    assert table.rows("k", "n", table="mended") == [("a", "1")]


@pytest.mark.slow(but_first=True)
def test_a_window_in_the_year_40000_is_no_window_of_another_year(table: Table) -> None:
    """Somebody has taken seconds for milliseconds. The row goes, because it cannot be found under another time."""
    rows = panes([{"k": "a", "n": 1}, {"k": "b", "n": 2, "minute": YEAR_40000_US // MINUTE}])
    if table.kind in ("postgresql", "duckdb"):
        table.sink().write(rows, at(0))
        assert table.rows("k", "n") == [("a", "1"), ("b", "2")]
        return
    with pytest.raises(SinkError, match=r"column 'window_start' of k='b'.*is a time that the store cannot hold"):
        table.sink().write(rows, at(0))
    table.sink(on_bad_value="replace").write(rows, at(0))
    assert table.rows("k", "n") == [("a", "1")]


def test_a_part_of_a_pane_is_left_out_and_the_rest_stays(table: Table) -> None:
    first = [{"k": "a", "x": None, "pane_seq": 0}, {"k": "a", "x": None, "pane_seq": 0}]
    write = table.sink(on_bad_value="drop").write
    write(panes(first, TEXT, single=False), at(0))
    second = with_bytes(panes([{**row, "pane_seq": 1} for row in first], TEXT, single=False), "x", b"\xff", b"ok")
    write(second, at(1))
    assert table.rows("k", "x") == [("a", "ok")]


def test_dropped_rows_are_looked_at_too(table: Table) -> None:
    row = {"k": "a", "n": 1, "kind": "dropped", "pane_seq": None}
    rows = with_bytes(panes([row]), "event", b"\xff")
    with pytest.raises(SinkError, match="column 'event' of a dropped row"):
        table.sink(dropped="left_out").write(rows, at(0))
    table.sink(dropped="left_out", on_bad_value="replace").write(rows, at(0))
    assert table.rows("k", "event", table="left_out") == [("a", "�")]


def test_a_wrong_choice_is_refused(table: Table) -> None:
    with pytest.raises(ConfigError, match="on_bad_value: 'skip' is none of"):
        table.sink(on_bad_value="skip")


def test_a_text_that_is_too_long_for_the_users_column(database: Place) -> None:
    write = aion.sinks.upsert(database.uri, "minutes", on_bad_value="replace").write
    write(panes([{"k": "ab", "x": "ab"}], TEXT), at(0))
    if database.kind != "postgresql":
        return  # a length says nothing there
    database.run("ALTER TABLE minutes ALTER COLUMN x TYPE varchar(3)")
    rows = panes([{"k": "ab", "x": "éé"}, {"k": "cd", "x": "éééé"}], TEXT)
    with pytest.raises(SinkError, match=r"column 'x' of k='cd'.*'éééé' has more than 3 characters"):
        aion.sinks.upsert(database.uri, "minutes").write(rows, at(1))
    write(rows, at(1))
    assert database.rows("minutes", "k", "x") == [("ab", "éé"), ("cd", "ééé")]


@pytest.mark.parametrize("table", ["delta"], indirect=True)
def test_an_empty_key_of_a_partition_is_no_null(table: Table) -> None:
    import deltalake

    assert isinstance(table.at, Lake)
    rows = panes([{"k": "", "n": 1}, {"k": None, "n": 2}])
    table.sink("pattern").write(rows, at(0))
    deltalake.DeltaTable.create(table.at.name("minutes"), table.at.content("pattern").schema, partition_by=["k"])
    with pytest.raises(SinkError, match=r"column 'k' of k=''.*which Delta Lake takes for null"):
        table.sink().write(rows, at(0))
    table.sink(on_bad_value="drop").write(rows, at(0))
    assert table.rows("k", "n") == [(None, "2")]


# -- names ----------------------------------------------------------------------------------------------------


def test_names_that_differ_only_in_case_are_two_or_refused(table: Table) -> None:
    rows = panes([{"k": "a", "Kind": 1}], pa.field("Kind", pa.int64()))
    if table.kind in ("postgresql", "iceberg"):
        table.sink().write(rows, at(0))
        assert table.rows("Kind" if table.kind == "iceberg" else '"Kind"', "kind") == [("1", "on_time")]
        return
    with pytest.raises(SchemaError, match="columns 'Kind' and 'kind' are one name in this database or lake"):
        table.sink().write(rows, at(0))


def test_an_empty_name_is_refused(table: Table) -> None:
    with pytest.raises(SchemaError, match="column '' has 0 bytes"):
        table.sink().write(panes([{"k": "a", "": 1}], pa.field("", pa.int64())), at(0))


def test_a_table_of_the_users_may_write_names_otherwise(database: Place) -> None:
    """Where case does not matter, and nowhere else."""
    write = aion.sinks.upsert(database.uri, "minutes", changes="more").write
    write(panes([{"k": "a", "n": 1}]), at(0))
    database.run('ALTER TABLE minutes RENAME COLUMN n TO "N"')
    later = panes([{"k": "a", "n": 2}])
    if database.kind == "postgresql":
        with pytest.raises(SchemaError, match="no column 'n'"):
            write(later, at(1))
        return
    write(later, at(1))
    assert database.rows("minutes", "k", "n") == [("a", "2")]
    with pytest.raises(ConfigError, match="'MINUTES' is the name of another table"):
        aion.sinks.upsert(database.uri, "minutes", changes="MINUTES")


def test_names_that_postgresql_would_cut_are_refused(database: Place) -> None:
    """Two tables whose names begin alike would be one."""
    long, fits = "é" * 32, "é" * 31 + "x"
    if database.kind != "postgresql":
        aion.sinks.upsert(database.uri, long).write(panes([{"k": "a", "n": 1}]), at(0))
        return
    for arguments in ({"table": long}, {"table": f"{long}.t"}, {"changes": long}, {"dropped": long}):
        with pytest.raises(SchemaError, match=r"has 64 bytes.*1 to 63"):
            aion.sinks.upsert(database.uri, **({"table": "t"} | arguments))
    outputs = pa.field(fits, pa.int64())
    rows = panes([{"k": "a", fits: 1}], outputs)
    aion.sinks.upsert(database.uri, fits).write(rows, at(0))
    assert database.run(f'SELECT "{fits}" FROM "{fits}"') == [(1,)]
    with pytest.raises(SchemaError, match=r"'old_é+x' has 67 bytes"):
        aion.sinks.upsert(database.uri, "t", changes="c").write(rows, at(0))


def test_question_marks_in_names(database: Place) -> None:
    schema = "main"
    if database.kind != "sqlite":
        schema = 'what? "who?"'
        database.run('CREATE SCHEMA IF NOT EXISTS "what? ""who?"""')
    name, quoted = f'{schema}.a ?"?', '"' + schema.replace('"', '""') + '"."a ?""?"'
    write = aion.sinks.upsert(database.uri, name, dropped=f"{schema}.??").write
    rows = panes([{"k": "?", "?": 1}], pa.field("?", pa.int64()))
    for batch in range(2):
        write(rows, at(batch))
    assert database.run(f'SELECT k, "?" FROM {quoted}') == [("?", 1)]
    if database.kind == "postgresql":
        database.run('DROP SCHEMA "what? ""who?""" CASCADE')


def test_lakes_hold_what_is_odd_in_sql(table: Table) -> None:
    if table.kind not in LAKES:
        return
    rows = panes([{"k": "?", 'a "b" ?': 1}], pa.field('a "b" ?', pa.int64()))
    for batch in range(2):
        table.sink().write(rows, at(batch))
    assert table.rows('a "b" ?') == [("1",)]
