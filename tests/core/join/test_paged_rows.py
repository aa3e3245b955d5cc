"""Rows in pages: what was kept is there once, whichever pages it has gone through."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest

from aion.core.paged_rows import ArrowPages, PagedRows
from state_backends.format.ordered_map import MemoryMap


def add(pages: PagedRows, hashes: Sequence[int]) -> None:
    found = pages.pages(np.zeros(len(hashes), np.int64), np.array(hashes, np.int64), grow=True)
    tails = pages.tails(found, np.arange(len(found.places)))
    rows = pa.concat_tables([tails.rows, pa.table({"hash": hashes}, schema=pages.schema)])
    of_chunk = np.concatenate((tails.of_chunk, found.page_of))
    pages.write(found, tails, rows, of_chunk, np.ones(len(tails.pages), np.bool_))


@pytest.mark.parametrize("chunk_rows", [None, 2])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_rows_stay_what_they_are_when_their_pages_are_divided(chunk_rows: int | None, step: int) -> None:
    """With a larger step, all rows of a page go into another one."""
    pages = PagedRows(
        MemoryMap(), b"x", "hash", ArrowPages(pa.schema([("hash", pa.int64())])), page_rows=2, chunk_rows=chunk_rows
    )
    hashes = [step * number + step - 1 for number in range(20)]
    for at in range(0, 20, 5):
        add(pages, hashes[at : at + 5])
        for every in (pages.every(), pages.all(None, None)):
            there = [value for batch in every for value in batch.column("hash").to_pylist()]
            assert sorted(there) == hashes[: at + 5]
        found = pages.pages(np.zeros(20, np.int64), np.array(hashes))
        there = [value for read in pages.chunks_of(found) for value in read.rows.column("hash").to_pylist()]
        assert sorted(there) == hashes[: at + 5]
