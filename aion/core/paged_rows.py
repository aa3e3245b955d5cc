"""Rows in pages of a shard's map: by a bin, and in a bin by a hash. Pure.

A bin has one page at first. It gets more by linear hashing (Litwin, "Linear hashing: a new tool for file and table
addressing", 1980): one page is divided after the other, so a bin of any size grows without being read as a whole. Rows
with one hash cannot be divided. A page with many of these has chunks, which are read and written one by one.

The head of a bin is an array of int64: how many rows it has, how many pages, and for each page with several chunks its
number and theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from state_backends.format.ordered_map import Change, OrderedMap
from state_backends.thresholds import threshold

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_BIN, _ROWS = b"b", b"r"
_DROPPED_AT_ONCE = threshold(1 << 14, 2)


@dataclass(slots=True)
class _Head:
    rows: int = 0
    pages: int = 1
    chunks: dict[int, int] = field(default_factory=dict)
    """The number of chunks, by page. A page that is not in it has one."""

    @classmethod
    def of(cls, value: bytes | None) -> _Head:
        if value is None:
            return cls()
        rows, pages, *chunks = np.frombuffer(value, np.int64).tolist()
        return cls(rows, pages, dict(zip(chunks[::2], chunks[1::2], strict=True)))

    def dump(self) -> bytes | None:
        flat = [number for pair in sorted(self.chunks.items()) for number in pair]
        return np.array([self.rows, self.pages, *flat], np.int64).tobytes()


class Pages(NamedTuple):
    """The pages into which some rows fall. ``bins``: their bins. ``places``: (P, 2), of each page its bin, by number,
    and its own number. ``page_of``: for each row, which of these.
    """

    bins: Sequence[bytes]
    heads: list[_Head]
    places: Ints
    page_of: Ints


class Part(NamedTuple):
    """One chunk of each of some pages. ``pages``, ``chunks``: (C,), which they are. ``of_chunk``: for each of the rows,
    in which chunk it is. ``last``: (C,), whether a chunk is the last one of its page. ``rows``: not put together; a few
    of many are taken faster this way.
    """

    pages: Ints
    chunks: Ints
    last: Flags
    of_chunk: Ints
    rows: pa.Table


class PagedRows:
    """The rows of one kind in a map. ``space``: how its keys begin. ``hash_``: the column by which rows are placed.

    ``decode``, ``encode``: make rows of a value and a value of rows. ``page_rows``: how many rows a page has on the
    average. ``chunk_rows``: how many a chunk has at most.
    """

    def __init__(
        self,
        values: OrderedMap,
        space: bytes,
        schema: pa.Schema,
        hash_: str,
        decode: Callable[[bytes], pa.RecordBatch],
        encode: Callable[[pa.RecordBatch], bytes],
        *,
        page_rows: int,
        chunk_rows: int,
    ) -> None:
        self._values, self._space, self._hash = values, space, hash_
        self.schema = schema
        self._decode, self._encode = decode, encode
        self._page_rows, self._chunk_rows = page_rows, chunk_rows

    # -- reading ------------------------------------------------------------------------------------------

    def pages(self, bins: Ints, hashes: Ints) -> Pages:
        """Finds the pages of rows. ``bins``: of each row, as a number; ``hashes``: of each row."""
        distinct, of_bin = np.unique(bins, return_inverse=True)
        names = [_number(bin_) for bin_ in distinct.tolist()]
        heads = [_Head.of(value) for value in self._values.get([self._bin(name) for name in names])]
        counts = np.array([head.pages for head in heads], np.int64)
        most = int(counts.max(initial=1))
        codes, page_of = np.unique(of_bin * most + _page(hashes, counts[of_bin]), return_inverse=True)
        return Pages(names, heads, np.column_stack(np.divmod(codes, most)), page_of)

    def parts(self, found: Pages) -> Iterator[Part]:
        """Yields the rows of pages: first their first chunks, then their second ones, and so on."""
        chunks = self._chunks(found)
        for chunk in range(int(chunks.max(initial=0))):
            yield self._part(found, np.flatnonzero(chunks > chunk), chunk)

    def tails(self, found: Pages, pages: Ints) -> Part:
        """Returns the last chunks of some of the pages."""
        return self._read(found, pages, self._chunks(found)[pages] - 1)

    def _part(self, found: Pages, pages: Ints, chunk: int) -> Part:
        return self._read(found, pages, np.full(len(pages), chunk))

    def _read(self, found: Pages, pages: Ints, chunks: Ints) -> Part:
        places = zip(found.places[pages].tolist(), chunks.tolist(), strict=True)
        keys = [self._page(found.bins[bin_], page, chunk) for (bin_, page), chunk in places]
        batches = [None if value is None else self._decode(value) for value in self._values.get(keys)]
        rows = pa.Table.from_batches([b for b in batches if b is not None], self.schema)
        sizes = [0 if batch is None else batch.num_rows for batch in batches]
        last = chunks == self._chunks(found)[pages] - 1
        return Part(pages, chunks, last, np.repeat(np.arange(len(pages)), sizes), rows)

    @staticmethod
    def _chunks(found: Pages) -> Ints:
        pairs = found.places.tolist()
        return np.array([found.heads[bin_].chunks.get(page, 1) for bin_, page in pairs], np.int64)

    def all(self, first: int | None, last: int | None, hashes: Ints | None = None) -> Iterator[pa.RecordBatch]:
        """Yields the rows of the bins from ``first`` to ``last``, a chunk of a page at a time. None: no limit.

        ``hashes``: only the pages with rows of these hashes.
        """
        begin = self._space + _BIN if first is None else self._bin(_number(first))
        end = self._space + _ROWS if last is None else self._bin(_number(last + 1))
        for key, value in self._values.scan(begin, end):
            head, name = _Head.of(value), key[len(self._space) + 1 :]
            numbers = np.arange(head.pages)
            if hashes is not None:
                numbers = np.unique(_page(hashes, np.full(len(hashes), head.pages)))
            for page in numbers.tolist():
                for chunk in range(head.chunks.get(page, 1)):
                    (found,) = self._values.get([self._page(name, page, chunk)])
                    if found is not None:
                        yield self._decode(found)

    def every(self) -> Iterator[pa.RecordBatch]:
        """Yields all rows, a chunk at a time, in the order in which the map has them."""
        begin = self._space + _ROWS
        for _, value in self._values.scan(begin, self._space + bytes([_ROWS[0] + 1])):
            yield self._decode(value)

    # -- writing ------------------------------------------------------------------------------------------

    def write(self, found: Pages, part: Part, rows: pa.Table, of_chunk: Ints, changed: Flags) -> None:
        """Replaces the rows of chunks. ``rows``: all that they have now, and ``of_chunk``, for each in which it is.

        ``changed``: (C,), which chunks to write. A chunk with too many rows must be the last one of its page.
        """
        before = np.bincount(part.of_chunk, minlength=len(part.pages))
        after = np.bincount(of_chunk, minlength=len(part.pages))
        order = np.argsort(of_chunk, kind="stable")
        batch = _batch(rows.take(pa.array(order)), self.schema)
        edges = np.concatenate(([0], np.cumsum(after))).tolist()
        changes: list[Change] = []
        touched: set[int] = set()
        for at in np.flatnonzero(changed).tolist():
            bin_, page = found.places[part.pages[at]].tolist()
            head, name = found.heads[bin_], found.bins[bin_]
            begin, end, chunk = edges[at], edges[at + 1], int(part.chunks[at])
            if after[at] != before[at]:
                head.rows += int(after[at] - before[at])
                touched.add(bin_)
            for first in range(begin, max(end, begin + 1), self._chunk_rows):
                some = batch.slice(first, min(self._chunk_rows, end - first))
                changes.append((self._page(name, page, chunk), self._encode(some) if some.num_rows else None, None))
                chunk += 1
            if chunk > head.chunks.get(page, 1):
                head.chunks[page] = chunk
        changes += [(self._bin(found.bins[bin_]), found.heads[bin_].dump(), None) for bin_ in touched]
        self._values.put(changes)

    def make_room(self, bins: Ints) -> None:
        """Gives bins the pages that they need for more rows. ``bins``: of each of these rows. Call it before they are
        placed, because rows that have filled a page would then be moved.
        """
        distinct, counts = np.unique(bins, return_counts=True)
        names = [_number(bin_) for bin_ in distinct.tolist()]
        heads = [_Head.of(value) for value in self._values.get([self._bin(name) for name in names])]
        changes: list[Change] = []
        for name, head, count in zip(names, heads, counts.tolist(), strict=True):
            wanted = -(-(head.rows + count) // self._page_rows)
            if wanted > head.pages:
                self._grow(name, head, wanted)
                changes.append((self._bin(name), head.dump(), None))
        self._values.put(changes)

    def _grow(self, name: bytes, head: _Head, pages: int) -> None:
        """Divides pages of a bin until it has this number of them."""
        new = np.arange(head.pages, pages)
        if not head.rows:
            head.pages = pages
            return
        divided = np.unique(_page(new, np.full(len(new), head.pages)))
        chunks = {page: head.chunks.pop(page, 1) for page in divided.tolist()}
        head.pages = pages
        for chunk in range(max(chunks.values())):
            here = [page for page, count in chunks.items() if count > chunk]
            for at in range(0, len(here), self._chunk_rows):
                self._divide(name, head, here[at : at + self._chunk_rows], chunk)

    def _divide(self, name: bytes, head: _Head, pages: Sequence[int], chunk: int) -> None:
        values = self._values.get([self._page(name, page, chunk) for page in pages])
        there = [(page, self._decode(value)) for page, value in zip(pages, values, strict=True) if value is not None]
        if not there:
            return
        rows = _batch(pa.Table.from_batches([batch for _, batch in there]), self.schema)
        was = np.repeat([page for page, _ in there], [batch.num_rows for _, batch in there])
        now = _page(rows.column(self._hash).to_numpy(), np.full(len(was), head.pages))
        order = np.argsort(now, kind="stable")
        rows, to = rows.take(pa.array(order)), now[order]
        numbers, begins = np.unique(to, return_index=True)
        ends = [*begins[1:].tolist(), len(to)]
        moved_from = set(was[was != now].tolist())
        emptied = moved_from - set(numbers.tolist())
        changes: list[Change] = [(self._page(name, page, chunk), None, None) for page in emptied]
        if chunk:
            head.chunks |= dict.fromkeys(numbers.tolist(), chunk + 1)
        for number, begin, end in zip(numbers.tolist(), begins.tolist(), ends, strict=True):
            if number in moved_from or number not in pages:
                changes.append((self._page(name, number, chunk), self._encode(rows.slice(begin, end - begin)), None))
        self._values.put(changes)

    def drop(self, before: int) -> None:
        """Deletes all bins before this number."""
        changes: list[Change] = []
        for key, value in self._values.scan(self._space + _BIN, self._bin(_number(before))):
            head, name = _Head.of(value), key[len(self._space) + 1 :]
            changes.append((key, None, None))
            for page in range(head.pages):
                changes += [(self._page(name, page, chunk), None, None) for chunk in range(head.chunks.get(page, 1))]
            if len(changes) >= _DROPPED_AT_ONCE:
                self._values.put(changes)
                changes = []
        if changes:
            self._values.put(changes)

    def _bin(self, name: bytes) -> bytes:
        return self._space + _BIN + name

    def _page(self, name: bytes, page: int, chunk: int) -> bytes:
        key = self._space + _ROWS + name + page.to_bytes(4, "big")
        return key + chunk.to_bytes(4, "big") if chunk else key


def _page(hashes: Ints, pages: Ints) -> Ints:
    """Returns the page of each hash. ``pages``: how many pages its bin has."""
    low = (1 << np.floor(np.log2(pages)).astype(np.int64)) - 1
    wide = hashes & (2 * low + 1)
    return np.where(wide < pages, wide, hashes & low)


def _number(bin_: int) -> bytes:
    return (bin_ + (1 << 63)).to_bytes(8, "big")


def _batch(rows: pa.Table, schema: pa.Schema) -> pa.RecordBatch:
    """The rows as one batch."""
    batches = rows.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema)
