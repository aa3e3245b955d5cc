"""The table of changes that ``aion.sinks.upsert(..., changes=)`` keeps in real databases."""

from __future__ import annotations

import re
from random import Random

import pyarrow as pa
import pytest

import aion
from aion import aggregates as A
from aion.errors import ConfigError, SchemaError
from aion.sinks.bad_values import JSON
from aion.sinks.upsert import Upsert
from tests.sinks.databases import Place
from tests.sinks.rig import MINUTE, at, panes
from tests.sinks.test_upsert import made

SHOWN = ("seq", "batch", "change", "k", "n", "old_n")


def sink(database: Place) -> Upsert:
    return aion.sinks.upsert(database.uri, "minutes", changes="minutes_changes")


def test_each_change_has_one_row_with_the_values_before(database: Place) -> None:
    write = sink(database).write
    write(panes([{"k": "a", "n": 1}, {"k": "b", "n": 2}, {"k": "a", "n": 3, "pane": 1}]), at(5))
    write(panes([{"k": "a", "n": 4}, {"k": "b", "kind": "retracted"}, {"k": "c", "n": 6}]), at(6))
    write(panes([]), at(7))
    # It comes back, and another one comes and goes within the batch.
    write(panes([{"k": "b", "n": 7}, {"k": "x", "n": 1}, {"k": "x", "kind": "retracted"}]), at(8))
    assert database.rows("minutes_changes", *SHOWN) == [
        ("0", "5", "insert", "a", "3", None),
        ("0", "5", "insert", "b", "2", None),
        ("1", "6", "delete", "b", None, "2"),
        ("1", "6", "insert", "c", "6", None),
        ("1", "6", "update", "a", "4", "3"),
        ("2", "8", "insert", "b", "7", None),
    ]
    assert database.rows("minutes", "k", "n") == [("a", "4"), ("b", "7"), ("c", "6")]
    ((kind, pane),) = database.run("SELECT old_kind, old_pane FROM minutes_changes WHERE change = 'update'")
    assert (kind, pane) == ("on_time", 1)


def test_null_keys_are_one_key(database: Place) -> None:
    write = sink(database).write
    write(panes([{"k": None, "n": 1}, {"k": "a", "n": 2}]), at(0))
    write(panes([{"k": None, "n": 3}, {"k": "a", "n": 4}, {"k": None, "minute": 1, "n": 5}]), at(1))
    assert database.rows("minutes_changes", *SHOWN)[2:] == [
        ("1", "1", "insert", None, "5", None),
        ("1", "1", "update", "a", "4", "2"),
        ("1", "1", "update", None, "3", "1"),
    ]


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("seed", range(3))
def test_the_changes_lead_from_each_state_of_the_table_to_the_next(database: Place, seed: int) -> None:
    random = Random(seed)
    write = sink(database).write
    states: list[dict[str | None, str]] = [{}]
    for batch in range(6):
        rows = [
            {"k": random.choice(["a", "b", "c", None]), "n": random.randrange(100), "kind": random.choice(KINDS)}
            for _ in range(random.randrange(5))
        ]
        write(panes(rows), at(batch))
        states.append(dict(database.rows("minutes", "k", "n")))
    state: dict[str | None, str] = {}
    made = database.rows("minutes_changes", "batch", "k", "change", "n", "old_n")
    for batch, after in enumerate(states[1:]):
        for _, key, change, new, old in (row for row in made if row[0] == str(batch)):
            assert state.pop(key, None) == old and change == what(old, new)
            state |= {key: new} if new is not None else {}
        assert state == after
    assert len({row[:2] for row in made}) == len(made)


KINDS = ("on_time", "late", "retracted")


def what(old: str | None, new: str | None) -> str:
    return "insert" if old is None else "delete" if new is None else "update"


def test_a_batch_that_is_run_again_adds_nothing(database: Place) -> None:
    for _ in range(2):
        sink(database).write(panes([{"k": "a", "n": 1}]), at(0))
    assert database.rows("minutes_changes", *SHOWN) == [("0", "0", "insert", "a", "1", None)]


@pytest.mark.slow(but_first=True)
def test_a_batch_that_fails_leaves_nothing(database: Place) -> None:
    kinds = [f"{name} {kind}" for name, kind in made(database).items()]
    database.run(f"CREATE TABLE minutes ({', '.join(kinds)}, CHECK (n < 5))")
    write = sink(database).write
    write(panes([{"k": "a", "n": 1}]), at(0))
    with pytest.raises(Exception, match=r"(?i)check|constraint"):
        write(panes([{"k": "a", "n": 4}, {"k": "b", "n": 6}]), at(1))
    write(panes([{"k": "a", "n": 2}]), at(1))
    assert database.rows("minutes_changes", *SHOWN) == [
        ("0", "0", "insert", "a", "1", None), ("1", "1", "update", "a", "2", "1"),
    ]  # fmt: skip


@pytest.mark.slow(but_first=True)
def test_a_checkpoint_that_went_back_changes_the_rows_that_are_there(database: Place) -> None:
    write = sink(database).write
    write(panes([{"k": "a", "n": 1}]), at(0))
    write(panes([{"k": "a", "n": 2}]), at(1))
    with pytest.raises(aion.errors.SinkError) as refused:
        write(panes([{"k": "a", "n": 3}]), at(0))
    adopt = re.search(r"adopt='([^']+)'", str(refused.value))
    assert adopt is not None
    again = aion.sinks.upsert(database.uri, "minutes", changes="minutes_changes", adopt=adopt[1])
    again.write(panes([{"k": "a", "n": 3}]), at(0))
    assert database.rows("minutes_changes", *SHOWN) == [
        ("0", "0", "insert", "a", "1", None), ("1", "1", "update", "a", "2", "1"), ("2", "0", "update", "a", "3", "2"),
    ]  # fmt: skip


def test_changes_from_another_batch_on(database: Place) -> None:
    """A table that was written without changes gets them from now on; values of other types are those of the table."""
    aion.sinks.upsert(database.uri, "minutes").write(panes([{"k": "a", "n": "[1]"}], JSON_N), at(0))
    sink(database).write(panes([{"k": "a", "n": "[1,2]"}], JSON_N), at(1))
    ((n, old),) = database.rows("minutes_changes", "n", "old_n")
    assert (n.replace(" ", ""), old) == ("[1,2]", "[1]")


JSON_N = pa.field("n", pa.string(), metadata=JSON)


@pytest.mark.slow(but_first=True)
def test_sessions_that_late_events_join(database: Place) -> None:
    policy = {"lateness": {"initial_bound": "1 hour", "coverage": None}, "trigger": {"kind": "every_batch"}}
    write = aion.sinks.upsert(database.uri, "visits", changes="visits_changes").write
    with aion.LocalOperator(
        windows=aion.Session("5 minutes"), time="ts", key="k", aggregates={"n": A.count()}, policy=policy
    ) as operator:

        def click(*minutes: int) -> pa.Table:
            ts = pa.array([m * MINUTE for m in minutes], pa.timestamp("us", "UTC"))
            return operator.process(pa.table({"k": ["u"] * len(minutes), "ts": ts}))

        write(click(1, 3, 12), at(0))
        write(operator.advance(30 * MINUTE), at(1))
        write(click(7), at(2))
    assert database.rows("visits_changes", "batch", "change", "n", "old_n") == [
        ("1", "insert", "1", None),
        ("1", "insert", "2", None),
        ("2", "delete", None, "1"),
        ("2", "delete", None, "2"),
        ("2", "insert", "4", None),
    ]


def test_what_cannot_be_is_refused_and_nothing_is_written(database: Place) -> None:
    with pytest.raises(ConfigError, match="is the name of another table"):
        aion.sinks.upsert(database.uri, "minutes", changes="minutes")
    with pytest.raises(ConfigError, match="is not the name of a table"):
        aion.sinks.upsert(database.uri, "minutes", changes="a.b.c")
    batch = pa.field("batch", pa.int64())
    with pytest.raises(SchemaError, match="would have the name 'batch'"):
        sink(database).write(panes([{"k": "a", "batch": 1}], batch), at(0))
    database.run("CREATE TABLE minutes_changes (seq bigint, k varchar)")
    with pytest.raises(SchemaError, match="has no column 'batch'"):
        sink(database).write(panes([{"k": "a", "n": 1}]), at(0))
