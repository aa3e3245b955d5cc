"""Which batches the queries of the chaos experiment go back to, and what it finds in tables that differ."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from experiments.chaos.data import FLUSH, FLUSHES
from experiments.chaos.going_back import MOST_FILES, REWIND, compared_tables, files_of, targets
from experiments.chaos.result import Fault, Result
from experiments.chaos.windows import Windows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A query that has written fifteen batches, of a file each. Spark has the last twelve."""
    checkpoint = tmp_path / "checkpoint-aggregates"
    for name in ("sources/0", "offsets", "commits"):
        (checkpoint / name).mkdir(parents=True)
    (tmp_path / "aggregates").mkdir()
    for batch in range(15):
        (tmp_path / "aggregates" / f"{batch:06d}.offset").write_text(str(batch))
        name = "9.compact" if batch == 9 else str(batch)
        (checkpoint / "sources" / "0" / name).touch()
        for log in ("offsets", "commits") if batch > 2 else ():
            (checkpoint / log / str(batch)).touch()
    return tmp_path


def test_a_query_goes_back_over_few_files_and_never_over_the_last_ones(folder: Path) -> None:
    assert files_of(folder, "aggregates") == 15
    assert targets(folder, "aggregates", 40, 0) == list(range(14 - MOST_FILES, 14))
    assert targets(folder, "aggregates", 40, 11) == [11, 12, 13]
    assert targets(folder, "aggregates", 15 + FLUSHES, 11) == [11, 12, 13]
    assert targets(folder, "aggregates", 14 + FLUSHES, 11) == []
    (folder / "checkpoint-aggregates" / "commits" / "12").unlink()
    (folder / "checkpoint-aggregates" / "offsets" / "10").unlink()
    assert targets(folder, "aggregates", 40, 9) == [9, 13]


def test_there_are_as_many_as_were_asked_for_spread_over_the_kills() -> None:
    result, before = Result(), list[int]()
    for kill in range(6):
        while result.is_due(REWIND, 3, 6):
            result.faults.append(Fault(REWIND, 0, None, 0, "", []))
        before.append(len(result.faults) - kill)
        result.faults.append(Fault("server", 0, kill + 1, 0, "", []))
    assert before == [1, 1, 2, 2, 3, 3]


def test_tables_that_differ_are_found(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("disturbed", "calm", "fork-0")]
    for number, each in enumerate(folders):
        each.mkdir()
        with closing(sqlite3.connect(each / "aggregates.db")) as database, database:
            database.execute(
                "CREATE TABLE aggregates (k text, window_start text, n int, total int, low int, high int, x)"
            )
            database.execute(
                "INSERT INTO aggregates VALUES ('a', 'now', 1, 1, 1, 1, ?)", (number if number > 1 else 0,)
            )
            database.execute("INSERT INTO aggregates VALUES (?, 'now', 1, 1, 1, 1, ?)", (FLUSH, number))
    disturbed, calm, fork = folders
    assert compared_tables(Windows(), "aggregates", disturbed, calm, [fork]) == []
    for where in (calm, fork):
        with closing(sqlite3.connect(where / "aggregates.db")) as database, database:
            database.execute("UPDATE aggregates SET n = 2 WHERE k = 'a'")
        (said,) = compared_tables(Windows(), "aggregates", disturbed, calm, [fork])
        assert "aggregates: the tables differ" in said and said.startswith("fork-0") == (where is fork)
        with closing(sqlite3.connect(where / "aggregates.db")) as database, database:
            database.execute("UPDATE aggregates SET n = 1 WHERE k = 'a'")
