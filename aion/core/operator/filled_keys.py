"""The keys that have rows in windows without events, and in which windows. Pure, vectorised.

The spans of a key (:mod:`aion.core.timed.filled`) are rows of the shard's map, in pages by the hash of the key. A batch
reads the pages of the keys that came, and writes those whose spans are longer now. When windows end, all pages are
read: each key there has a row in them, or has been silent for so long that it is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from aion.aggregates.values import combined
from aion.core.keyed.table import Ints, Table, codes_of, stacked
from aion.core.paged_rows import ArrowPages, PagedRows
from aion.core.slicing.sessions import Intervals, merge_intervals, merge_sessions
from state_backends.format.ordered_map import OrderedMap
from state_backends.thresholds import threshold

_SPACE = b"f"
_PAGE_ROWS = threshold(64, 1)
_AT_ONCE = threshold(1 << 17, 2)
_HASH, _FIRST, _UNTIL = "hash", "first", "until"


class Gaps(NamedTuple):
    """Stretches of ends that keys did not have before, ``(after_us, by_us]``. ``of``: the key of each, by its row in
    the table of :meth:`FilledKeys.add`.
    """

    of: Ints
    after_us: Ints
    by_us: Ints


class FilledKeys:
    """The spans of the keys of one definition. ``types``: of the key columns."""

    def __init__(self, values: OrderedMap, definition: int, types: Sequence[pa.DataType]) -> None:
        self._types = list(types)
        numbers = [pa.field(name, pa.int64()) for name in (_HASH, _FIRST, _UNTIL)]
        self._schema = pa.schema([*numbers, *(pa.field(f"k{i}", type_) for i, type_ in enumerate(types))])
        self._pages = PagedRows(
            values,
            _SPACE + definition.to_bytes(4, "big"),
            _HASH,
            ArrowPages(self._schema),
            page_rows=_PAGE_ROWS,  # keys with one hash are rare, and a key has few spans, so a page is one chunk
        )
        self.forgotten_us = np.iinfo(np.int64).min
        """Spans that are over by then are not kept."""

    def add(self, keys: Table) -> Gaps:
        """Adds spans. ``keys``: each key once or more, with its ``hash`` and the columns ``first`` and ``until``.

        Returns what its keys did not have before. A key with several rows is the one of its first row there.
        """
        (codes,) = codes_of(keys)
        _, rows = np.unique(codes, return_index=True)
        came = merge_intervals(Intervals(codes, keys[_FIRST], keys[_UNTIL]), 0).made
        hashes = keys[_HASH][rows]
        bins = np.zeros(len(rows), np.int64)
        found = self._pages.pages(bins, hashes, grow=True)
        (read,) = self._pages.chunks_of(found)
        stored = self._table(read.rows)
        known, mine = codes_of(stored, keys.take(rows))
        # The number of a key that came, by its code among those that are stored. -1: it did not come.
        number_of = np.full(int(max(known.max(initial=-1), mine.max(initial=-1))) + 1, -1)
        number_of[mine] = np.arange(len(mine))
        of_known = number_of[known]
        touched = of_known >= 0
        old = Intervals(of_known[touched], stored[_FIRST][touched], stored[_UNTIL][touched])
        merged = merge_sessions(old, came, 0)
        gaps = _gaps(old, merged.sessions, merged.of_old)
        # A span that stays as it was, and is not over, need not be written.
        changed_keys = np.zeros(len(rows), np.bool_)
        changed_keys[gaps.of] = True
        keep = ~touched | ~changed_keys[of_known]
        keep &= stored[_UNTIL] > self.forgotten_us
        new = changed_keys[merged.sessions.keys] & (merged.sessions.lasts > self.forgotten_us)
        of_key = merged.sessions.keys[new]
        table = keys.take(rows).take(of_key)
        added = table.replaced(
            **{_HASH: hashes[of_key], _FIRST: merged.sessions.firsts[new], _UNTIL: merged.sessions.lasts[new]}
        )
        page_of = np.concatenate((read.of_chunk[keep], np.searchsorted(read.pages, found.page_of[of_key])))
        pages = np.zeros(len(read.pages), np.bool_)
        pages[page_of[int(keep.sum()) :]] = True
        pages[read.of_chunk[~keep]] = True
        if pages.any():
            both = pa.concat_tables([self._stored(stored.take(keep)), self._stored(added)])
            self._pages.write(found, read, both, page_of, pages)
        return Gaps(rows[gaps.of], gaps.after_us, gaps.by_us)

    def every(self) -> Iterator[Table]:
        """Yields all spans with their keys, some pages at a time, with the columns ``first`` and ``until``.

        Forgets those that are over.
        """
        over: list[Table] = []
        for pages in _at_once(self._pages.every()):
            table = self._table(pa.Table.from_batches(pages, self._schema))
            gone = table[_UNTIL] <= self.forgotten_us
            if gone.any():
                over.append(table.take(gone))
            yield table.take(~gone)
        if over:
            self._prune(stacked(over))

    def drop(self) -> None:
        """Deletes all spans."""
        self._pages.drop()

    def _prune(self, over: Table) -> None:
        found = self._pages.pages(np.zeros(len(over), np.int64), over[_HASH])
        (read,) = self._pages.chunks_of(found)
        keep = combined(read.rows.column(_UNTIL)).to_numpy() > self.forgotten_us
        pages = np.zeros(len(read.pages), np.bool_)
        pages[read.of_chunk[~keep]] = True
        self._pages.write(found, read, read.rows.filter(pa.array(keep)), read.of_chunk[keep], pages)

    def _table(self, rows: pa.Table) -> Table:
        keys = [combined(rows.column(f"k{i}")) for i in range(len(self._types))]
        return Table(keys, {name: combined(rows.column(name)).to_numpy() for name in (_HASH, _FIRST, _UNTIL)})

    def _stored(self, table: Table) -> pa.Table:
        numbers = [pa.array(table[name]) for name in (_HASH, _FIRST, _UNTIL)]
        return pa.table([*numbers, *table.keys], schema=self._schema)


def drop_all(values: OrderedMap, definition: int) -> None:
    """Deletes what is kept of a definition that has no windows any more."""
    FilledKeys(values, definition, ()).drop()


def _at_once(pages: Iterator[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Yields some pages at a time."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for page in pages:
        held.append(page)
        rows += page.num_rows
        if rows >= _AT_ONCE:
            yield held
            held, rows = [], 0
    if held:
        yield held


def _gaps(old: Intervals, now: Intervals, of_old: Ints) -> Gaps:
    """Returns the parts of intervals that none of the old ones in them has. ``of_old``: which each of these is in."""
    order = np.lexsort((old.firsts, of_old))
    counts = np.bincount(of_old, minlength=len(now.keys)) + 1
    begins = np.cumsum(counts) - counts
    after, by = np.empty(int(counts.sum()), np.int64), np.empty(int(counts.sum()), np.int64)
    after[begins], by[begins + counts - 1] = now.firsts, now.lasts
    inner = np.arange(len(order)) + of_old[order]
    after[inner + 1], by[inner] = old.lasts[order], old.firsts[order]
    of = np.repeat(now.keys, counts)
    there = after < by
    return Gaps(of[there], after[there], by[there])
