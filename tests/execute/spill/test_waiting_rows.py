"""Rows of a batch that wait for its end: nothing is lost or mixed up, whether they fit into memory or not."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aion.core.keyed.table import Table, hashes_of, stacked
from aion.core.keyed.waiting import RowsInMemory, WaitingRows
from aion.execute.spill.spilling import Room
from aion.execute.spill.waiting import BINS, SpilledRows

rows = st.lists(st.tuples(st.sampled_from(["a", "b", "ccc", "", None]), st.none() | st.integers(0, 3)), max_size=20)


def table(found: list[tuple[str | None, int | None]], first: int) -> Table:
    keys = [pa.array([key for key, _ in found], pa.string()), pa.array([key for _, key in found], pa.int8())]
    numbers = np.arange(first, first + len(found))
    of = Table(keys, {"first": numbers, "last": -numbers})
    return of.replaced(hash=hashes_of(of))


def listed(found: Table) -> list[tuple[object, ...]]:
    columns = [*(key.to_pylist() for key in found.keys), *(found[name].tolist() for name in ("first", "last", "hash"))]
    return list(zip(*columns, strict=True))


def make(limit_bytes: int | None) -> WaitingRows:
    return RowsInMemory() if limit_bytes is None else SpilledRows(Room(limit_bytes))


@given(batches=st.lists(st.lists(rows, max_size=4), max_size=3), limit_bytes=st.sampled_from([None, 0, 300, 1 << 20]))
def test_the_rows_of_a_key_come_together_and_in_their_order(
    batches: list[list[list[tuple[str | None, int | None]]]], limit_bytes: int | None
) -> None:
    waiting = make(limit_bytes)
    for batch in batches:
        tables = [table(found, 100 * number) for number, found in enumerate(batch)]
        for one in tables:
            waiting.add(one)
        assert len(waiting) == sum(map(len, tables))
        pieces = [*waiting.take()]
        assert len(waiting) == 0 and not [*waiting.take()]
        found = [row for piece in pieces for row in listed(piece)]
        expected = listed(stacked(tables)) if tables else []
        assert sorted(map(repr, found)) == sorted(map(repr, expected))
        bins = [{row[-1] % BINS for row in listed(piece)} for piece in pieces]
        if len(pieces) > 1:
            assert sum(map(len, bins)) == len(set().union(*bins)), "a key is in one piece"
        for key in {row[:2] for row in expected}:
            assert [row for row in found if row[:2] == key] == [row for row in expected if row[:2] == key]


def test_many_rows_leave_memory_and_no_file_is_left(tmp_path: Path) -> None:
    keys = pa.array(np.arange(1000))
    one = Table([keys], {"first": np.arange(1000)})
    one = one.replaced(hash=hashes_of(one))
    waiting = SpilledRows(Room(20_000, str(tmp_path)))
    for _ in range(5):
        waiting.add(one)
    pieces = [*waiting.take()]
    assert sum(map(len, pieces)) == 5000
    several = [piece for piece in pieces if len(np.unique(piece["hash"] % BINS)) > 1]
    assert len(pieces) > 1 and all(16 * len(piece) <= 20_000 for piece in several)
    assert not [*tmp_path.iterdir()], "the file never had a name"


@pytest.mark.filterwarnings("error::ResourceWarning")
def test_rows_that_nobody_takes_leave_no_open_file() -> None:
    waiting = SpilledRows(Room(0))
    waiting.add(table([("a", 1)], 0))
    del waiting
    gc.collect()
