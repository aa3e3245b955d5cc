"""Rows in pages of a shard's map: by a bin, and in a bin by a hash. Pure.

A bin has one page at first. It gets more by linear hashing (Litwin, "Linear hashing: a new tool for file and table
addressing", 1980): one page is divided after the other, so a bin of any size grows without being read as a whole. Rows
with one hash cannot be divided. A page with many of these has chunks, which are read and written one by one.

The head of a bin is an array of int64: how many rows it has, how many pages, and for each page with several chunks its
number and theirs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from aion.base.numbers import NEVER
from state_backends.format.ordered_map import Change, OrderedMap
from state_backends.thresholds import threshold

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_BIN, _ROWS = b"b", b"r"
_HEAD = struct.Struct("<qq")
_NO_LIMIT = 1 << 62
_IPC_BYTES = 8  # messages of Arrow IPC are padded to multiples of this
_MARK_BYTES = 2
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
        rows, pages = _HEAD.unpack_from(value)
        chunks = np.frombuffer(value, np.int64, offset=_HEAD.size).tolist() if len(value) > _HEAD.size else []
        return cls(rows, pages, dict(zip(chunks[::2], chunks[1::2], strict=True)))

    def dump(self) -> bytes | None:
        """Returns the value of the head. A bin without rows has none."""
        if not self.rows:
            return None
        head = _HEAD.pack(self.rows, self.pages)
        return head + np.array(sorted(self.chunks.items()), np.int64).tobytes() if self.chunks else head


class Pages(NamedTuple):
    """The pages into which some rows fall. ``bins``: their bins. ``places``: (P, 2), of each page its bin, by number,
    and its own number. ``page_of``: for each row, which of these.
    """

    bins: Sequence[bytes]
    heads: list[_Head]
    places: Ints
    page_of: Ints


class Chunks(NamedTuple):
    """One chunk of each of some pages. ``pages``, ``chunks``: (C,), which they are. ``of_chunk``: for each of the rows,
    in which chunk it is. ``last``: (C,), whether a chunk is the last one of its page. ``rows``: not put together; a few
    of many are taken faster this way.
    """

    pages: Ints
    chunks: Ints
    last: Flags
    of_chunk: Ints
    rows: pa.Table


class ArrowPages:
    """Chunks as record batches of Arrow IPC, without their schema.

    ``earlier``: the schemas that chunks were written with before, the oldest first. A chunk of the oldest schema is
    only the batch, whose bytes are a multiple of 8. One of a later schema has the schema's number behind it, in two
    bytes. Columns that rows have not had ever since are null.
    """

    def __init__(self, schema: pa.Schema, earlier: Sequence[pa.Schema] = ()) -> None:
        self.schema = schema
        self._schemas = (*earlier, schema)
        self._mark = len(earlier).to_bytes(_MARK_BYTES, "little") if earlier else b""
        self._since = _since(self._schemas)

    def decode(self, values: Sequence[bytes]) -> tuple[pa.Table, Ints]:
        """Returns the rows of some values, and how many each has."""
        # What a chunk ends with says which schema it was written with.
        numbers = [int.from_bytes(value[len(value) // _IPC_BYTES * _IPC_BYTES :], "little") for value in values]
        batches = [
            pa.ipc.read_record_batch(pa.py_buffer(value), self._schemas[number])
            for value, number in zip(values, numbers, strict=True)
        ]
        for number in {*numbers} - {len(self._schemas) - 1}:
            at = [i for i, other in enumerate(numbers) if other == number]
            for i, batch in zip(at, self._of_last([batches[i] for i in at], number), strict=True):
                batches[i] = batch
        return pa.Table.from_batches(batches, self.schema), np.array([batch.num_rows for batch in batches], np.int64)

    def _of_last(self, batches: Sequence[pa.RecordBatch], number: int) -> list[pa.RecordBatch]:
        """Returns batches of an earlier schema as those of the last one. They are converted together."""
        rows = pa.Table.from_batches(batches)
        columns = [
            pa.nulls(rows.num_rows, field.type) if since > number else rows.column(field.name).cast(field.type)
            for field, since in zip(self.schema, self._since, strict=True)
        ]
        return list(pa.table(columns, schema=self.schema).to_batches())

    def encode(self, rows: pa.RecordBatch, begins: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        """Returns values of some stretches of rows."""
        mark = self._mark
        return [rows.slice(a, b - a).serialize().to_pybytes() + mark for a, b in zip(begins, ends, strict=True)]


def _since(schemas: Sequence[pa.Schema]) -> list[int]:
    """Returns for each column of the last schema the number of the first one since which all have it."""
    found = []
    for name in schemas[-1].names:
        number = len(schemas) - 1
        while number and name in schemas[number - 1].names:
            number -= 1
        found.append(number)
    return found


class PagedRows:
    """The rows of one kind in a map. ``space``: how its keys begin. ``hash_``: the column by which rows are placed.

    ``pages``: makes rows of values and values of rows. ``page_rows``: how many rows a page has on the average.
    ``chunk_rows``: how many a chunk has at most. If it is None, a page has one chunk.
    """

    def __init__(
        self,
        values: OrderedMap,
        space: bytes,
        hash_: str,
        pages: ArrowPages,
        *,
        page_rows: int,
        chunk_rows: int | None = None,
    ) -> None:
        self._values, self._space, self._hash = values, space, hash_
        self.schema, self._codec = pages.schema, pages
        self._page_rows, self._chunk_rows = page_rows, chunk_rows or _NO_LIMIT

    # -- reading ------------------------------------------------------------------------------------------

    def pages(self, bins: Ints, hashes: Ints, *, grow: bool = False) -> Pages:
        """Finds the pages of rows. ``bins``: of each row, as a number; ``hashes``: of each row.

        ``grow``: these rows are to be kept, so their bins get the pages that they need before the rows are placed.
        """
        distinct, of_bin, counts = np.unique(bins, return_inverse=True, return_counts=True)
        names = [_number(bin_) for bin_ in distinct.tolist()]
        heads = [_Head.of(value) for value in self._values.get([self._bin(name) for name in names])]
        if grow:
            self._make_room(names, heads, counts.tolist())
        pages = np.array([head.pages for head in heads], np.int64)
        most = int(pages.max(initial=1))
        codes, page_of = np.unique(of_bin * most + _page(hashes, pages[of_bin]), return_inverse=True)
        return Pages(names, heads, np.column_stack(np.divmod(codes, most)), page_of)

    def chunks_of(self, found: Pages) -> Iterator[Chunks]:
        """Yields the rows of pages: first their first chunks, then their second ones, and so on."""
        chunks = self._chunks(found)
        for chunk in range(int(chunks.max(initial=0))):
            some = np.flatnonzero(chunks > chunk)
            yield self._read(found, some, np.full(len(some), chunk))

    def all_keys(self, found: Pages) -> list[bytes]:
        """Returns the keys of all chunks of pages."""
        chunks = self._chunks(found)
        pages = np.repeat(np.arange(len(chunks)), chunks)
        return self.keys(found, pages, np.arange(len(pages)) - np.repeat(np.cumsum(chunks) - chunks, chunks))

    def tails(self, found: Pages, pages: Ints) -> Chunks:
        """Returns the last chunks of some of the pages."""
        return self._read(found, pages, self._chunks(found)[pages] - 1)

    def _read(self, found: Pages, pages: Ints, chunks: Ints) -> Chunks:
        values = self._values.get(self.keys(found, pages, chunks))
        rows, counts = self._codec.decode([value for value in values if value is not None])
        sizes = np.zeros(len(values), np.int64)
        sizes[[at for at, value in enumerate(values) if value is not None]] = counts
        last = chunks == self._chunks(found)[pages] - 1
        return Chunks(pages, chunks, last, np.repeat(np.arange(len(pages)), sizes), rows)

    def keys(self, found: Pages, pages: Ints, chunks: Ints) -> list[bytes]:
        """Returns the keys of some chunks. ``pages``: of each, which of the pages it is in; ``chunks``: its number."""
        places = zip(found.places[pages].tolist(), chunks.tolist(), strict=True)
        return [self._page(found.bins[bin_], page, chunk) for (bin_, page), chunk in places]

    @staticmethod
    def _chunks(found: Pages) -> Ints:
        if not any(head.chunks for head in found.heads):
            return np.ones(len(found.places), np.int64)
        pairs = found.places.tolist()
        return np.array([found.heads[bin_].chunks.get(page, 1) for bin_, page in pairs], np.int64)

    def all(self, first: int | None, last: int | None, hashes: Ints | None = None) -> Iterator[pa.RecordBatch]:
        """Yields the rows of the bins from ``first`` to ``last``, a chunk of a page at a time. None is no limit.

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
                        yield from self._codec.decode([found])[0].to_batches()

    def every(self) -> Iterator[pa.RecordBatch]:
        """Yields all rows, a chunk at a time, in the order in which the map has them."""
        begin = self._space + _ROWS
        for _, value in self._values.scan(begin, self._space + bytes([_ROWS[0] + 1])):
            yield from self._codec.decode([value])[0].to_batches()

    # -- writing ------------------------------------------------------------------------------------------

    def write(self, found: Pages, read: Chunks, rows: pa.Table, of_chunk: Ints, changed: Flags) -> None:
        """Replaces the rows of chunks. ``rows``: all that they have now, and ``of_chunk``, for each in which it is.

        ``changed``: (C,), which chunks to write. A chunk with too many rows must be the last one of its page.
        """
        before = np.bincount(read.of_chunk, minlength=len(read.pages))
        after = np.bincount(of_chunk, minlength=len(read.pages))
        order = np.argsort(of_chunk, kind="stable")
        batch = _batch(rows.take(pa.array(order)), self.schema)
        edges = np.concatenate(([0], np.cumsum(after))).tolist()
        keys: list[bytes] = []
        begins: list[int] = []
        ends: list[int] = []
        touched: set[int] = set()
        for at in np.flatnonzero(changed).tolist():
            bin_, page = found.places[read.pages[at]].tolist()
            head, name = found.heads[bin_], found.bins[bin_]
            begin, end, chunk = edges[at], edges[at + 1], int(read.chunks[at])
            if after[at] != before[at]:
                head.rows += int(after[at] - before[at])
                touched.add(bin_)
            for first in range(begin, max(end, begin + 1), self._chunk_rows):
                keys.append(self._page(name, page, chunk))
                begins.append(first)
                ends.append(min(first + self._chunk_rows, end))
                chunk += 1
            if chunk > head.chunks.get(page, 1):
                head.chunks[page] = chunk
        values = self._codec.encode(batch, begins, ends)
        changes: list[Change] = [
            (key, value if begin < end else None, None)
            for key, value, begin, end in zip(keys, values, begins, ends, strict=True)
        ]
        changes += [(self._bin(found.bins[bin_]), found.heads[bin_].dump(), None) for bin_ in touched]
        self._values.put(changes)

    def _make_room(self, names: Sequence[bytes], heads: Sequence[_Head], counts: Sequence[int]) -> None:
        changes: list[Change] = []
        for name, head, count in zip(names, heads, counts, strict=True):
            wanted = -(-(head.rows + count) // self._page_rows)
            if wanted > head.pages:
                self._grow(name, head, wanted)
                changes.append((self._bin(name), head.dump(), None))
        if changes:
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
        there = [page for page, value in zip(pages, values, strict=True) if value is not None]
        if not there:
            return
        stored, counts = self._codec.decode([value for value in values if value is not None])
        rows, was = _batch(stored, self.schema), np.repeat(there, counts)
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
        kept = set(pages) - moved_from
        some = [at for at, number in enumerate(numbers.tolist()) if number not in kept]
        encoded = self._codec.encode(rows, begins[some].tolist(), [ends[at] for at in some])
        changes += [
            (self._page(name, int(numbers[at]), chunk), value, None) for at, value in zip(some, encoded, strict=True)
        ]
        self._values.put(changes)

    def drop(self, before: int = NEVER) -> None:
        """Deletes all bins before this number."""
        begin = len(self._space) + 1
        heads = self._values.scan(self._space + _BIN, self._bin(_number(before)))
        self._drop((key[begin:], _Head.of(value)) for key, value in heads)

    def drop_bins(self, bins: Sequence[int]) -> None:
        """Deletes some bins."""
        names = [_number(bin_) for bin_ in bins]
        heads = self._values.get([self._bin(name) for name in names])
        self._drop((name, _Head.of(head)) for name, head in zip(names, heads, strict=True) if head is not None)

    def _drop(self, some: Iterable[tuple[bytes, _Head]]) -> None:
        changes: list[Change] = []
        for name, head in some:
            changes.append((self._bin(name), None, None))
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
