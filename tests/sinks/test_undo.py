"""Tables that go back to what they were after an earlier batch: those of databases with ``undo=``, and of lakes."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aion
from aion.core.query.sink_notes import Note
from aion.errors import ConfigError, SchemaError, SinkError
from aion.sinks import going_back, undo
from aion.sinks.frames import goal_in
from aion.sinks.marks import Goal, History
from aion.sinks.sink import Sink
from aion.sinks.upsert import Upsert
from tests.sinks.databases import KINDS, Place, place
from tests.sinks.lakes import LAKES, Lake, fresh_threads
from tests.sinks.rig import QUERY, at, panes

N, M = pa.field("n", pa.int64()), pa.field("m", pa.int64())
FIRST, SECOND = "1" * 12, "2" * 12
"""Names of rewinds."""
BESIDE = {"changes": "minutes_changes", "dropped": "left_out"}
Rows = list[dict[str, Any]]


def sink(database: Place, batches: int = 100, **more: Any) -> Upsert:
    return aion.sinks.upsert(database.uri, "minutes", undo=f"{batches} batches", **more)


def one(k: str | None, n: int, **more: Any) -> pa.Table:
    return panes([{"k": k, "n": n, **more}])


def sink_of(place: Place | Lake, **more: Any) -> Sink:
    """A sink that adds columns where it can, in a table that can go back."""
    if isinstance(place, Place):
        return sink(place, add_columns=True, **more)
    return place.sink(**{name: place.name(table) for name, table in more.items()})


def content(place: Place | Lake, *tables: str) -> list[Any]:
    """All rows of tables, without the columns that are null in all rows: one may have been added later."""
    return [_content(place, table) for table in tables]


def _content(database: Place | Lake, table: str) -> list[Any]:
    if isinstance(database, Lake):
        rows = database.content(table).to_pylist() if database.exists(table) else []
        return sorted(tuple((k, str(v)) for k, v in sorted(row.items()) if v is not None) for row in rows)
    there = {"sqlite": f"SELECT name FROM pragma_table_info('{table}')"}
    of_others = "SELECT column_name FROM information_schema.columns WHERE table_name = '{}' AND {}"
    schema = "table_schema = current_schema()" if database.kind == "postgresql" else "true"
    names = [name for (name,) in database.run(there.get(database.kind, of_others.format(table, schema)))]
    rows = (
        database.run(f"SELECT {', '.join(f'{chr(34)}{name}{chr(34)}' for name in names)} FROM {table}") if names else []
    )
    known = [
        tuple((name, str(value)) for name, value in sorted(zip(names, row, strict=True)) if value is not None)
        for row in rows
    ]
    return sorted(known)


# -- what is generated ----------------------------------------------------------------------------------------


KEYS = st.sampled_from(["a", "b", None])
KIND = st.sampled_from(["on_time", "on_time", "late", "retracted", "dropped"])
ROW = st.fixed_dictionaries(
    {"k": KEYS, "n": st.integers(0, 9), "minute": st.integers(0, 2), "kind": KIND, "pane_seq": st.integers(0, 2)}
)
BATCH = st.tuples(
    st.lists(ROW, max_size=5),
    st.one_of(st.none(), st.none(), st.lists(ROW, min_size=1, max_size=3)),  # what comes if the batch is corrected
    st.booleans(),  # whether the rows have a column more
    st.booleans(),  # whether batches before it were not seen
)
PLAN = st.fixed_dictionaries({
    "single": st.booleans(),
    "changes": st.booleans(),
    "dropped": st.booleans(),
    "batches": st.lists(BATCH, min_size=1, max_size=5),
    "to": st.integers(0, 4),
    "later": st.lists(st.lists(ROW, max_size=4), max_size=3),
    "itself": st.booleans(),
})  # fmt: skip


def table_of(rows: Rows, *, wide: bool, single: bool) -> pa.Table:
    said = [dict(row) for row in rows]
    if single:  # a pane has one row
        said = [row | {"pane_seq": number} for number, row in enumerate(said)]
    for row in said:
        if row["kind"] == "dropped":
            row |= {"reason": "late", "lateness_us": 1, "event": "{}"}
        if wide:
            row["m"] = row["n"]
    return panes(said, *([N, M] if wide else [N]), single=single)


class Fresh:
    """An empty database or lake for each example."""

    def __init__(self, kind: str, folder: Path, server: str | None) -> None:
        self.kind, self._folder, self._server = kind, folder, server

    def make(self) -> Place | Lake:
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        return Lake(self.kind, folder) if self.kind in LAKES else place(self.kind, folder, self._server)


@pytest.fixture(params=KINDS)
def fresh(request: pytest.FixtureRequest, tmp_path: Path) -> Fresh:
    kind = request.param
    return Fresh(kind, tmp_path, request.getfixturevalue("postgresql") if kind == "postgresql" else None)


@pytest.fixture(params=LAKES)
def fresh_lake(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fresh]:
    with fresh_threads(request.param):
        yield Fresh(request.param, tmp_path, None)


@pytest.mark.slow
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=PLAN)
def test_a_table_that_went_back_is_as_after_that_batch_and_goes_on(fresh: Fresh, plan: dict[str, Any]) -> None:
    goes_back_and_on(fresh, plan)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Delete operation did not match any records:UserWarning")
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=PLAN)
def test_so_is_a_table_of_a_lake(fresh_lake: Fresh, plan: dict[str, Any]) -> None:
    goes_back_and_on(fresh_lake, plan)


def goes_back_and_on(fresh: Fresh, plan: dict[str, Any]) -> None:
    database, single = fresh.make(), plan["single"]
    if fresh.kind in LAKES:  # these have no table of changes, and add no columns
        batches = [(rows, corrected, False, gap) for rows, corrected, _, gap in plan["batches"]]
        plan = plan | {"changes": False, "batches": batches}
    beside = {name: table for name, table in BESIDE.items() if plan[name]}
    to_write = sink_of(database, **beside)
    tables = ["minutes", *beside.values()]
    kept: dict[int, list[Any]] = {}
    batch = -1
    for number, (rows, corrected, wide, gap) in enumerate(plan["batches"]):
        idle = 1 if gap and number else 0
        batch += 1 + idle
        for run, each in (("first", rows), ("second", corrected)):
            if each is not None:
                mark = replace(at(batch, run=run), idle=idle)
                to_write.write(table_of(each, wide=wide, single=single), mark)
        kept[batch] = content(database, *tables)
    to = min(plan["to"], batch)
    expected = kept[max(each for each in kept if each <= to)]
    goal = Goal(to, FIRST)
    if not plan["itself"]:
        assert to_write.takes_back(QUERY, goal) is None
        assert to_write.go_back(QUERY, goal) == (batch > to)
        assert content(database, *tables) == expected
        assert not to_write.go_back(QUERY, goal)
        if isinstance(database, Place):
            assert database.run("SELECT batch FROM aion_batches") == [(to,)]
    # Another database has never had the batches that were undone.
    other = fresh.make()
    to_other = sink_of(other, **beside)
    batch = -1
    for number, (rows, corrected, wide, gap) in enumerate(plan["batches"]):
        batch += 1 + (1 if gap and number else 0)
        if batch <= to:
            for run, each in (("first", rows), ("second", corrected)):
                if each is not None:
                    idle = 1 if gap and number else 0
                    mark = replace(at(batch, run=run), idle=idle)
                    to_other.write(table_of(each, wide=wide, single=single), mark)
    for number, rows in enumerate(plan["later"]):
        came = table_of(rows, wide=False, single=single)
        mark = replace(at(to + 1 + number, run="third"), goal=goal)
        to_write.write(came, mark)
        # The last batch of this one may be before the one to which the other went back.
        to_other.write(came, replace(at(to + 1 + number, run="third"), idle=1))
    if plan["later"]:
        assert content(database, *tables) == content(other, *tables)


# -- how far it goes back ---------------------------------------------------------------------------------------


@pytest.mark.slow(but_first=True)
def test_only_the_last_batches_are_kept(database: Place) -> None:
    to_write = sink(database, 2)
    for batch in range(6):
        to_write.write(panes([{"k": "a", "n": batch}, {"k": None, "n": 1, "minute": batch}]), at(batch))
    kept = {batch for (batch,) in database.run("SELECT batch FROM minutes_undo")}
    assert kept == {4, 5} == {batch for (batch,) in database.run("SELECT batch FROM aion_undo")}
    before = content(database, "minutes")
    reason = to_write.takes_back(QUERY, Goal(2, "x"))
    assert reason is not None and "batch 3 is the oldest" in reason
    with pytest.raises(SinkError, match="batch 3 is the oldest"):
        to_write.go_back(QUERY, Goal(2, "x"))
    assert content(database, "minutes") == before
    assert to_write.go_back(QUERY, Goal(3, "x"))
    assert database.rows("minutes", "k", "n")[0] == ("a", "3")


@pytest.mark.slow(but_first=True)
def test_batches_that_were_written_without_undo_cannot_be_taken_back(database: Place) -> None:
    without = aion.sinks.upsert(database.uri, "minutes")
    for batch, to_write in enumerate([without, sink(database), without, sink(database)]):
        to_write.write(one("a", batch), at(batch))
    assert "batch 2 is the oldest" in str(sink(database).takes_back(QUERY, Goal(0, "x")))
    assert sink(database).go_back(QUERY, Goal(2, "x"))
    assert database.rows("minutes", "k", "n") == [("a", "2")]
    with pytest.raises(SinkError, match=r"did not record.*undo='100 batches'"):
        without.go_back(QUERY, Goal(0, "y"))


@pytest.mark.slow(but_first=True)
def test_a_corrected_batch_without_undo_breaks_the_record(database: Place) -> None:
    sink(database).write(one("a", 1), at(0))
    sink(database).write(one("a", 2), at(1, run="first"))
    aion.sinks.upsert(database.uri, "minutes").write(one("b", 2), at(1, run="second"))
    with pytest.raises(SinkError, match="did not record"):
        sink(database).go_back(QUERY, Goal(0, "x"))


@pytest.mark.slow(but_first=True)
def test_a_table_that_was_taken_over_goes_back_no_further(database: Place) -> None:
    for batch in range(4):
        sink(database).write(one("a", batch), at(batch))
    adopting = sink(database, adopt=f"{QUERY.digest}:3")
    for batch in (1, 2):
        adopting.write(one("b", batch), at(batch))
    with pytest.raises(SinkError, match="batch 1 is the oldest"):
        adopting.go_back(QUERY, Goal(0, "x"))
    assert adopting.go_back(QUERY, Goal(1, "x"))
    assert database.rows("minutes", "k", "n") == [("a", "3"), ("b", "1")]


@pytest.mark.slow(but_first=True)
def test_a_table_that_was_not_there_is_empty(database: Place) -> None:
    to_write = sink(database)
    to_write.write(one("a", 1), at(3))
    to_write.write(one("b", 1), at(4))
    assert to_write.go_back(QUERY, Goal(2, "x"))
    assert content(database, "minutes", "aion_batches") == [[], []]
    to_write.write(one("c", 1), replace(at(3), goal=Goal(2, "x")))
    to_write.write(one("d", 1), replace(at(4), goal=Goal(2, "x")))
    assert database.rows("minutes", "k") == [("c",), ("d",)]


def test_the_tables_of_other_queries_stay(database: Place) -> None:
    to_write = sink(database)
    for batch in range(3):
        to_write.write(one("a", batch), at(batch))
    other = History("other", "file:/other")
    assert to_write.takes_back(other, Goal(0, "x")) is None and not to_write.go_back(other, Goal(0, "x"))
    assert aion.sinks.upsert(database.uri, "none").takes_back(QUERY, Goal(0, "x")) is None
    assert database.rows("minutes", "n") == [("2",)]


@pytest.mark.slow(but_first=True)
def test_columns_of_the_users_own_come_back(database: Place) -> None:
    to_write = sink(database)
    to_write.write(one("a", 1), at(0))
    database.run("ALTER TABLE minutes ADD COLUMN remark varchar(20)")
    database.run("UPDATE minutes SET remark = 'mine'")
    to_write.write(one("a", 2), at(1))
    assert database.rows("minutes", "n", "remark") == [("2", None)]
    assert to_write.go_back(QUERY, Goal(0, "x"))
    assert database.rows("minutes", "n", "remark") == [("1", "mine")]


@pytest.mark.slow(but_first=True)
def test_what_fails_leaves_all_as_it_was(database: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    to_write = sink(database, **BESIDE)
    for batch in range(3):
        to_write.write(panes([{"k": "a", "n": batch}, {"k": None, "n": 1, "minute": batch}]), at(batch))
    tables = ("minutes", "minutes_undo", "minutes_changes", "aion_batches", "aion_undo")
    before = content(database, *tables)

    def fails(*_: Any) -> None:
        raise RuntimeError("killed")

    for name in ("_patterns", "TableName"):  # before rows are deleted, and behind
        with monkeypatch.context() as patched:
            patched.setattr(undo, name, type("T", (), {"of": fails}) if name == "TableName" else fails)
            with pytest.raises(SinkError, match="killed"):
                to_write.go_back(QUERY, Goal(0, "x"))
        assert content(database, *tables) == before
    assert to_write.go_back(QUERY, Goal(0, "x"))
    assert database.rows("minutes", "k", "n") == [("a", "0"), (None, "1")]


# -- a sink whose table nobody has taken back -----------------------------------------------------------------


@pytest.mark.slow(but_first=True)
def test_a_sink_goes_back_itself_and_only_once(database: Place, caplog: pytest.LogCaptureFixture) -> None:
    to_write, goal = sink(database), Goal(1, "first")
    for batch in range(4):
        to_write.write(one("a" if batch < 2 else "b", batch), at(batch))
    with caplog.at_level(logging.INFO):
        for batch in (2, 3, 4):
            to_write.write(one("c", batch), replace(at(batch), goal=goal))
    assert database.rows("minutes", "k", "n") == [("a", "1"), ("c", "4")]
    assert len([record for record in caplog.records if "went back" in record.getMessage()]) == 1
    assert not to_write.go_back(QUERY, goal)
    to_write.write(one("d", 4), replace(at(4), goal=Goal(3, "second")))
    assert database.rows("minutes", "k", "n") == [("a", "1"), ("c", "3"), ("d", "4")]


@pytest.mark.slow(but_first=True)
def test_a_table_that_had_nothing_to_take_back_goes_on(database: Place) -> None:
    """It must not go back later, when it has batches that came after the rewind."""
    to_write, goal = sink(database), Goal(1, "first")
    for batch in range(5):
        to_write.write(one("a", batch), replace(at(batch), goal=goal if batch > 1 else None))
    assert database.rows("minutes", "n") == [("4",)] and not to_write.go_back(QUERY, goal)


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_a_table_without_undo_refuses_what_comes_after_going_back(database: Place, batch: int) -> None:
    without = aion.sinks.upsert(database.uri, "minutes")
    for each in range(3):
        without.write(one("a", each), at(each))
    mark = replace(at(batch, run="again"), goal=Goal(0, "x"))
    with pytest.raises(SinkError, match=r"the checkpoint went back\. .*undo='100 batches'.*adopt='"):
        without.write(one("b", 7), mark)
    assert database.rows("minutes", "k", "n") == [("a", "2")]
    adopting = aion.sinks.upsert(database.uri, "minutes", adopt=f"{QUERY.digest}:2")
    adopting.write(one("b", 7), mark)
    without.write(one("b", 8), replace(at(batch + 1), goal=Goal(0, "x")))
    assert database.rows("minutes", "k", "n") == [("a", "2"), ("b", "8")]


def test_what_the_checkpoint_says() -> None:
    assert goal_in('{"to": 7, "before": 9, "id": "0a0b0c0d0e0f"}') == Goal(7, "0a0b0c0d0e0f")
    for text in ('{"to"', '{"to": 7, "before": 9, "id": "x"}'):
        with pytest.raises(SinkError, match="cannot be read"):
            goal_in(text)


# -- from a note ----------------------------------------------------------------------------------------------


@pytest.mark.slow(but_first=True)
def test_a_note_leads_back_to_the_table(database: Place) -> None:
    to_write = sink(database, **BESIDE)
    for batch in range(3):
        to_write.write(one("a", batch), at(batch))
    note = to_write.described(Note("op", "minutes", "", ("k", "n"), False, dropped="left_out"))
    assert (note.kind, note.undo, note.changes) == (database.kind, 100, "minutes_changes")
    assert going_back.of_note(note).go_back(QUERY, Goal(1, "x"))
    assert database.rows("minutes", "n") == [("1",)]


def test_a_note_has_no_password_and_nobody_is_asked_for_a_file_that_is_not_there(tmp_path: Path) -> None:
    uri = "postgresql://me:hush@127.0.0.1:1/db?connect_timeout=1&sslpassword=hush&application_name=jobs"
    note = aion.sinks.upsert(uri, "t").described(Note(None, "t", "", (), False))
    assert note.connect == "postgresql://me@127.0.0.1:1/db?application_name=jobs" and "hush" not in repr(note)
    with pytest.raises(SinkError, match="table 't' of postgresql"):
        going_back.of_note(note).takes_back(QUERY, Goal(0, "x"))
    path = tmp_path / "none.db"
    to_write = aion.sinks.upsert(f"sqlite:///{path}", "t")
    assert to_write.takes_back(QUERY, Goal(0, "x")) is None and not to_write.go_back(QUERY, Goal(0, "x"))
    assert not path.exists()


def test_a_note_of_an_earlier_version() -> None:
    old = '{"operator": null, "table": "t", "uri": "", "columns": [], "adds": false}'
    with pytest.raises(SinkError, match="earlier version"):
        going_back.of_note(Note.of(old))


# -- what is asked for --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [100, "100", "0 batches", "many batches", True])
def test_what_is_no_number_of_batches(value: Any) -> None:
    with pytest.raises(ConfigError, match="write undo='100 batches'"):
        aion.sinks.upsert("sqlite:///x.db", "t", undo=value)


@pytest.mark.parametrize(
    ("table", "more"), [("t", {"changes": "t_undo"}), ("t", {"dropped": "T_undo"}), ("aion", {}), ("aion_undo", {})]
)
def test_names_that_are_taken(table: str, more: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="is the name of another table"):
        aion.sinks.upsert("sqlite:///x.db", table, undo="1 batch", **more)


def test_a_name_that_would_be_too_long() -> None:
    aion.sinks.upsert("postgresql://host/db", "t" * 60)
    with pytest.raises(SchemaError, match=r"undo: '.*_undo' has 65 bytes"):
        aion.sinks.upsert("postgresql://host/db", "t" * 60, undo="1 batch")
