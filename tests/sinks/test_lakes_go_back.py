"""Tables of Delta Lake and Iceberg that go back to what they were after an earlier batch, and when they cannot."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field
from deltalake.schema import PrimitiveType

import aion
from aion.core.query.sink_notes import Note
from aion.errors import SinkError
from aion.sinks import going_back
from aion.sinks.delta import Delta
from aion.sinks.iceberg import Iceberg
from aion.sinks.marks import Goal, History
from aion.sinks.merge import Merge
from tests.sinks.lakes import LAKES, Lake, fresh_threads
from tests.sinks.rig import QUERY, at, panes

pytestmark = pytest.mark.filterwarnings("ignore:Delete operation did not match any records:UserWarning")
FIRST, SECOND = "1" * 12, "2" * 12
"""Names of rewinds."""


@pytest.fixture(params=LAKES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lake]:
    with fresh_threads(request.param):
        yield Lake(request.param, tmp_path)


@pytest.fixture
def delta(tmp_path: Path) -> Lake:
    return Lake("delta", tmp_path)


def one(k: str, n: int, **more: Any) -> pa.Table:
    return panes([{"k": k, "n": n, **more}])


def late(k: str, n: int) -> pa.Table:
    """A row, and one that was dropped."""
    said = {"kind": "dropped", "reason": "late", "lateness_us": 1, "event": "{}"}
    return panes([{"k": k, "n": n}, {"k": "late", "n": n, **said}])


def refused(to_write: Merge, goal: Goal, said: str) -> None:
    """The table cannot go back, and nothing changes when it is asked to."""
    reason = to_write.takes_back(QUERY, goal)
    assert reason is not None
    with pytest.raises(SinkError, match=said) as error:
        to_write.go_back(QUERY, goal)
    assert str(error.value) == reason
    with pytest.raises(SinkError, match=rf"the checkpoint went back\. .*{said}.*pass adopt="):
        to_write.write(one("z", 1), replace(at(goal.batch + 1, run="again"), goal=goal))


# -- what others do -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_what_others_changed_since_is_not_lost(place: Lake) -> None:
    """What they changed before the first batch that is undone stays. After that, the table does not go back."""
    to_write = place.sink()
    to_write.write(one("a", 0), at(0))
    place.append(place.content().slice(0, 1))
    for batch in (1, 2):
        to_write.write(one("b", batch, minute=1), at(batch))
    assert to_write.go_back(QUERY, Goal(0, FIRST))
    assert place.rows("k", "n") == [("a", 0), ("a", 0)]
    to_write.write(one("b", 1, minute=1), at(1))
    place.append(place.content().slice(0, 1))
    before = place.rows("k", "n")
    refused(to_write, Goal(0, SECOND), r"cannot go back to batch 0, because another program has changed it since")
    assert place.rows("k", "n") == before


def test_maintenance_that_rewrites_files_is_harmless_as_long_as_the_old_files_are_there(delta: Lake) -> None:
    to_write, goal = delta.sink(), Goal(1, FIRST)
    for batch in range(4):
        to_write.write(one("a", batch, minute=batch), at(batch))
    delta.table().optimize.compact()
    to_write.write(one("b", 4), at(4))
    assert to_write.takes_back(QUERY, goal) is None
    delta.table().vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    refused(to_write, goal, r"files of its version 2 have been vacuumed; go back by fewer batches")
    assert len(delta.rows("k")) == 5


def test_maintenance_may_come_first_or_last(delta: Lake) -> None:
    to_write = delta.sink()
    for batch in range(3):
        to_write.write(one("a", batch, minute=batch), at(batch))
    delta.table().optimize.compact()
    delta.table().vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    to_write.write(one("b", 3), at(3))
    delta.table().optimize.compact()
    assert to_write.go_back(QUERY, Goal(2, FIRST))
    assert delta.rows("n") == [(0,), (1,), (2,)]


@pytest.mark.parametrize("how", ["columns", "settings"])
def test_a_table_that_others_altered_since_stays(delta: Lake, how: str) -> None:
    """To restore a version of Delta Lake is to restore its columns and settings, too."""
    to_write = delta.sink()
    for batch in range(2):
        to_write.write(one("a", batch), at(batch))
    if how == "columns":
        delta.table().alter.add_columns([Field("remark", PrimitiveType("string"))])
    else:
        delta.set({"delta.logRetentionDuration": "interval 9 days"})
    refused(to_write, Goal(0, FIRST), r"changed it since \((ADD COLUMN|SET TBLPROPERTIES), version 3\)")
    if how == "settings":
        return
    assert delta.content().column_names[-1] == "remark"


def test_a_log_that_was_cleaned_up(delta: Lake) -> None:
    to_write = delta.sink()
    for batch in range(4):
        to_write.write(one("a", batch), at(batch))
    delta.table().create_checkpoint()
    for version in range(4):
        (Path(delta.name("minutes")) / "_delta_log" / f"{version:020}.json").unlink()
    assert "the log of its version 3 has been cleaned up" in str(to_write.takes_back(QUERY, Goal(2, FIRST)))
    refused(to_write, Goal(0, FIRST), "no record of what it was before; batch 2 is the oldest to which it can go")


def test_a_snapshot_that_expired(tmp_path: Path) -> None:
    with fresh_threads("iceberg"):
        lake = Lake("iceberg", tmp_path)
        to_write = lake.sink()
        for batch in range(3):
            to_write.write(one("a", batch, minute=batch), at(batch))
        first = lake.table().metadata.snapshots[0].snapshot_id
        lake.table().maintenance.expire_snapshots().by_id(first).commit()
        refused(to_write, Goal(0, FIRST), "no record of what it was before")
        assert to_write.go_back(QUERY, Goal(1, FIRST))
        assert lake.rows("n") == [(0,), (1,)]


@pytest.mark.slow
def test_the_table_is_read_again_if_somebody_commits_in_between(place: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    to_write, kind = place.sink(), Delta if place.kind == "delta" else Iceberg
    for batch in range(3):
        to_write.write(one("a", batch, minute=batch), at(batch))
    restore, calls = kind.restore, list[int]()

    def disturbed(self: Any, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            place.append(place.content().slice(0, 1))
        restore(self, *arguments)

    monkeypatch.setattr(kind, "restore", disturbed)
    with pytest.raises(SinkError, match="another program has changed it since"):
        to_write.go_back(QUERY, Goal(0, FIRST))
    assert len(calls) == 1 and len(place.rows("n")) == 4


# -- how far it goes back -------------------------------------------------------------------------------------


def test_a_table_that_was_taken_over_goes_back_no_further(place: Lake) -> None:
    for batch in range(4):
        place.sink().write(one("a", batch), at(batch))
    adopting = place.sink(adopt=f"{QUERY.digest}:3")
    for batch in (1, 2):
        adopting.write(one("b", batch), at(batch))
    assert "batch 1 is the oldest" in str(adopting.takes_back(QUERY, Goal(0, FIRST)))
    assert adopting.go_back(QUERY, Goal(1, FIRST))
    assert place.rows("k", "n") == [("a", 3), ("b", 1)]


def test_a_table_that_had_no_rows_is_empty_and_goes_on(place: Lake) -> None:
    to_write, goal = place.sink(), Goal(2, FIRST)
    for batch in (3, 4):
        to_write.write(one("a", batch), at(batch))
    assert to_write.go_back(QUERY, goal) and not to_write.go_back(QUERY, goal)
    assert place.rows("k") == []
    for batch in (3, 4):
        to_write.write(one("c", batch), replace(at(batch), goal=goal))
    assert place.rows("k", "n") == [("c", 4)]


def test_it_goes_back_over_an_earlier_rewind(place: Lake) -> None:
    to_write = place.sink()
    for batch in range(4):
        to_write.write(one("a", batch), at(batch))
    assert to_write.go_back(QUERY, Goal(1, FIRST))
    for batch in (2, 3):
        to_write.write(one("b", batch), replace(at(batch), goal=Goal(1, FIRST)))
    assert to_write.go_back(QUERY, Goal(2, SECOND))
    assert place.rows("k", "n") == [("a", 1), ("b", 2)]
    assert to_write.go_back(QUERY, Goal(0, "3" * 12))
    assert place.rows("k", "n") == [("a", 0)]
    to_write.write(panes([]), replace(at(1), goal=Goal(0, "3" * 12)))
    assert place.rows("k", "n") == [("a", 0)]


def test_batches_without_rows_are_taken_back_too(place: Lake) -> None:
    to_write = place.sink()
    to_write.write(one("a", 0), at(0))
    for batch in (1, 2):
        to_write.write(panes([]), at(batch))
    assert to_write.go_back(QUERY, Goal(1, FIRST))
    to_write.write(one("a", 2), replace(at(2), goal=Goal(1, FIRST)))
    assert place.rows("k", "n") == [("a", 2)]


def test_files_of_partitions_whose_names_are_encoded(delta: Lake) -> None:
    columns = [pa.field(f.name, f.type) for f in one("a", 0).schema if f.name != "pane_seq"]
    DeltaTable.create(delta.name("minutes"), pa.schema(columns), partition_by=["k"])
    to_write = delta.sink()
    for batch in range(3):
        to_write.write(one("a b/ä%", batch), at(batch))
    assert to_write.takes_back(QUERY, Goal(0, FIRST)) is None
    delta.table().vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    assert "have been vacuumed" in str(to_write.takes_back(QUERY, Goal(0, FIRST)))


def test_the_tables_of_other_queries_stay(place: Lake) -> None:
    to_write = place.sink()
    for batch in range(2):
        to_write.write(one("a", batch), at(batch))
    other = History("other", "file:/other")
    assert to_write.takes_back(other, Goal(0, FIRST)) is None and not to_write.go_back(other, Goal(0, FIRST))
    none = place.sink("none")
    assert none.takes_back(QUERY, Goal(0, FIRST)) is None and not none.go_back(QUERY, Goal(0, FIRST))
    assert place.rows("n") == [(1,)] and not place.exists("none")


# -- dropped rows, and what is interrupted --------------------------------------------------------------------


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("itself", [False, True])
def test_what_is_interrupted_is_completed(place: Lake, monkeypatch: pytest.MonkeyPatch, itself: bool) -> None:
    """The table of dropped rows has gone back already. ``itself``: the sink completes it with its next batch."""
    to_write, goal = place.sink(dropped=place.name("left_out")), Goal(0, FIRST)
    for batch in range(3):
        to_write.write(late("a", batch), at(batch))
    assert len(place.rows("k", table="left_out")) == 3

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Delta if place.kind == "delta" else Iceberg, "restore", dies)
        with pytest.raises(KeyboardInterrupt):
            to_write.go_back(QUERY, goal)
    assert place.rows("aion_batch", table="left_out") == [(0,)] and place.rows("n") == [(2,)]
    if not itself:
        assert to_write.go_back(QUERY, goal)
        assert place.rows("n") == [(0,)]
    to_write.write(late("b", 7), replace(at(1), goal=goal))
    assert place.rows("k", "n") == [("a", 0), ("b", 7)]
    assert place.rows("aion_batch", table="left_out") == [(0,), (1,)]


def test_a_sink_goes_back_itself_and_only_once(place: Lake, caplog: pytest.LogCaptureFixture) -> None:
    to_write, goal = place.sink(), Goal(1, FIRST)
    for batch in range(4):
        to_write.write(one("a" if batch < 2 else "b", batch), at(batch))
    with caplog.at_level(logging.INFO):
        for batch in (2, 3, 4):
            to_write.write(one("c", batch), replace(at(batch), goal=goal))
    assert place.rows("k", "n") == [("a", 1), ("c", 4)]
    assert len([record for record in caplog.records if "went back" in record.getMessage()]) == 1
    assert not to_write.go_back(QUERY, goal)
    to_write.write(one("d", 4), replace(at(4), goal=Goal(3, SECOND)))
    assert place.rows("k", "n") == [("a", 1), ("c", 3), ("d", 4)]


def test_a_table_that_had_nothing_to_take_back_goes_on(place: Lake) -> None:
    to_write, goal = place.sink(), Goal(1, FIRST)
    for batch in range(4):
        to_write.write(one("a", batch), replace(at(batch), goal=goal if batch > 1 else None))
    to_write.write(one("a", 3), replace(at(3, run="again"), goal=goal))
    assert place.rows("n") == [(3,)] and not to_write.go_back(QUERY, goal)


def test_a_note_leads_back_to_the_table(place: Lake) -> None:
    to_write = place.sink(dropped=place.name("left_out"))
    for batch in range(3):
        to_write.write(late("a", batch), at(batch))
    note = to_write.described(Note("op", to_write.table, "", ("k", "n"), False, dropped=to_write.dropped_table))
    assert going_back.of_note(note).go_back(QUERY, Goal(1, FIRST))
    assert place.rows("n") == [(1,)] and place.rows("aion_batch", table="left_out") == [(0,), (1,)]


def test_a_note_has_no_secret() -> None:
    options = {"uri": "https://me:hush@catalog/api?sig=hush", "token": "hush", "warehouse": "s3://a/b", "region": "x"}
    note = aion.sinks.merge("iceberg", "a.t", options=options).described(Note(None, "a.t", "", (), False))
    assert note.options == {"uri": "https://me@catalog/api", "warehouse": "s3://a/b", "region": "x"}
