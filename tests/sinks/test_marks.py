"""What tables remember of batches: reruns, corrected programs, several calls, and tables that have lost their rows."""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow as pa
import pytest

import aion
from aion.errors import SinkError
from aion.sinks.marks import History
from tests.sinks.databases import KINDS, place
from tests.sinks.lakes import LAKES
from tests.sinks.rig import QUERY, at, panes
from tests.sinks.tables import Table

pytestmark = pytest.mark.filterwarnings("ignore:Delete operation did not match any records:UserWarning")
OTHER = History("other", "file:/other")


def rows_of(*rows: tuple[str, int]) -> pa.Table:
    return panes([{"k": k, "n": n} for k, n in rows])


@pytest.mark.slow(but_first=True)
def test_a_second_call_in_one_run_is_refused(table: Table) -> None:
    """It would lose rows: nobody knows whether they are the rest of the batch or the whole of it again."""
    write = table.sink().write
    write(rows_of(("a", 1), ("b", 1)), at(0, run="first"))
    write(rows_of(("a", 1), ("b", 1)).take([1, 0]), at(0, run="first"))  # the same rows again do no harm
    with pytest.raises(SinkError, match=r"batch 0 twice in one run, with other rows.*batch\.where\(a \| b\)"):
        write(rows_of(("c", 1)), at(0, run="first"))
    table.sink().write(panes([]), at(0, run="first"))
    assert table.rows("k", "n") == [("a", "1"), ("b", "1")]
    # The query starts again with the same program, which fails again, and then with the corrected one.
    write(rows_of(("a", 1), ("b", 1)), at(0, run="second"))
    with pytest.raises(SinkError, match="twice in one run"):
        write(rows_of(("c", 1)), at(0, run="second"))
    write(rows_of(("a", 1), ("b", 1), ("c", 1)), at(0, run="third"))
    write(rows_of(("a", 2)), at(1, run="third"))
    assert table.rows("k", "n") == [("a", "2"), ("b", "1"), ("c", "1")]


@pytest.mark.slow(but_first=True)
def test_a_batch_without_rows_is_no_call_at_all(table: Table) -> None:
    """Half of a batch may have no rows, in either order."""
    write = table.sink().write
    for batch, run in enumerate(("first", "second")):
        write(panes([]), at(batch, run=run))
        write(rows_of(("a", batch)), at(batch, run=run))
        write(panes([]), at(batch, run=run))
        assert table.rows("k", "n") == [("a", str(batch))]
    write(panes([]), at(1, run="third"))
    write(rows_of(("a", 1)), at(1, run="third"))
    with pytest.raises(SinkError, match="twice in one run"):
        write(rows_of(("b", 1)), at(1, run="third"))


@pytest.mark.slow(but_first=True)
def test_corrected_rows_replace_those_of_a_batch_that_comes_again(table: Table) -> None:
    """The sink had committed when the driver died. The program that starts again is a corrected one."""
    write = table.sink().write
    write(rows_of(("a", 1)), at(0, run="first"))
    write(rows_of(("a", 2), ("b", 2)), at(1, run="first"))
    write(rows_of(("a", 3), ("b", 3)), at(1, run="second"))
    assert table.rows("k", "n") == [("a", "3"), ("b", "3")]
    write(rows_of(("a", 4)), at(2, run="second"))
    with pytest.raises(SinkError, match="the checkpoint went back"):
        write(rows_of(("a", 5)), at(1, run="third"))
    assert table.rows("k", "n") == [("a", "4"), ("b", "3")]


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("how", ["emptied", "deleted"])
def test_a_table_that_lost_its_rows_is_not_begun_again_in_silence(
    table: Table, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    write = table.sink().write
    write(rows_of(("a", 1)), at(3))
    table.lose(how)
    if how == "deleted" and table.kind in LAKES:
        with caplog.at_level(logging.WARNING):  # its mark is gone with the table
            write(rows_of(("b", 1)), at(4))
        assert "begins with batch 4 of query query" in caplog.text
        return
    said = "has no rows any more" if how == "emptied" else "does not exist any more"
    for mark in (at(4), at(3), at(5, OTHER)):
        with pytest.raises(SinkError, match=rf"{said}, and had batch 3 .*adopt='{QUERY.digest}:3'"):
            write(rows_of(("b", 1)), mark)
    table.sink(adopt=f"{QUERY.digest}:3").write(rows_of(("b", 1)), at(4))
    write(rows_of(("b", 2)), at(5))
    assert table.rows("k", "n") == [("b", "2")]


@pytest.mark.slow(but_first=True)
def test_rows_may_be_taken_away_on_purpose(table: Table) -> None:
    """By somebody who moves them elsewhere."""
    write = table.sink(adopt="empty").write
    write(rows_of(("a", 1)), at(3))
    for batch in (4, 5):
        table.lose("emptied")
        write(rows_of(("b", batch)), at(batch))
        assert table.rows("k", "n") == [("b", str(batch))]
    table.lose("emptied")
    with pytest.raises(SinkError, match="the checkpoint went back"):
        write(rows_of(("c", 1)), at(2))
    if table.kind not in LAKES:
        table.lose("deleted")
        with pytest.raises(SinkError, match="does not exist any more"):
            write(rows_of(("c", 1)), at(6))


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("how", ["emptied", "deleted"])
def test_the_first_batch_of_a_query_begins_a_table_that_lost_its_rows(table: Table, how: str) -> None:
    table.sink().write(rows_of(("a", 1)), at(3))
    table.lose(how)
    table.sink().write(rows_of(("b", 1)), at(0, OTHER))
    table.sink().write(rows_of(("b", 2)), at(1, OTHER))
    assert table.rows("k", "n") == [("b", "2")]


@pytest.mark.slow(but_first=True)
def test_a_table_that_has_no_rows_yet_lost_none(table: Table, caplog: pytest.LogCaptureFixture) -> None:
    write = table.sink().write
    write(panes([]), at(0))
    write(panes([{"k": "a", "kind": "retracted"}]), at(1))
    write(rows_of(("a", 1)), at(2))
    write(panes([{"k": "a", "kind": "retracted"}]), at(3))
    write(rows_of(("a", 2)), at(4))
    assert table.rows("k", "n") == [("a", "2")] and not caplog.records


def test_a_table_that_begins_in_the_middle_of_a_query_says_so(table: Table, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        table.sink().write(rows_of(("a", 1)), at(7))
    (record,) = caplog.records
    assert "has no rows and no mark, and begins with batch 7" in record.getMessage()


# -- marks of earlier versions --------------------------------------------------------------------------------


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("kind", KINDS)
def test_marks_of_an_earlier_version_are_read(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    database = place(kind, tmp_path, request.getfixturevalue("postgresql") if kind == "postgresql" else None)
    write = aion.sinks.upsert(database.uri, "minutes").write
    write(rows_of(("a", 1)), at(0))
    database.run("DROP TABLE aion_batches")
    database.run(
        "CREATE TABLE aion_batches (name text PRIMARY KEY, query text NOT NULL, checkpoint text NOT NULL, "
        "batch bigint NOT NULL)"
    )
    database.run(f"INSERT INTO aion_batches VALUES ('minutes', '{QUERY.query}', '{QUERY.checkpoint}', 5)")
    write(rows_of(("a", 2)), at(5, run="second"))  # nobody knows what it wrote, so it is not written again
    assert database.rows("minutes", "k", "n") == [("a", "1")]
    with pytest.raises(SinkError, match="twice in one run"):
        write(rows_of(("a", 3)), at(5, run="second"))
    write(rows_of(("a", 4)), at(6, run="second"))
    assert database.rows("minutes", "k", "n") == [("a", "4")]
    with pytest.raises(SinkError, match="lacks those between"):
        write(rows_of(("a", 5)), at(9))
