"""The rows of one side of a join: what is known of each, the map that has them, and which are new. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from aion.base.identity import identify
from aion.core.join.matching import Sorted
from aion.core.join.plan import KIND_BEFORE, SEQ_BEFORE, JoinPlan
from aion.core.life.actions import PaneKind
from aion.core.paged_rows import ArrowPages, Chunks, PagedRows, Pages
from state_backends.format.ordered_map import OrderedMap
from state_backends.thresholds import threshold

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
MATCHED, NO_KEY, CAME_AFTER, LATE, NOTED, GONE = 1, 2, 4, 8, 16, 32
"""What is known of a row: it has a partner; its key has a null; it came when a row without partner was shown; it was
late; the index of what is due has it; it says that its earlier versions are gone.
"""
_PAGE_ROWS = threshold(128, 1)
_CHUNK_ROWS = threshold(4096, 2)
_SHORTEST_BIN_US = threshold(60_000_000, 7)
_DUE_BINS = 512  # in the time in which a row may find partners
_SHORTEST_DUE_US = threshold(1_000_000, 2)
_STEP = 0x1E3779B97F4A7C15  # an odd number: its multiples differ in all bits
_NUMBERS = ("hash", "second", "time", "id", "id2", "rank")
_FLAGS = "flags"
_BITS = 20
_MASK = (1 << _BITS) - 1
_ROW = len(_NUMBERS) - 1  # numbers of a row in the index of what is due


def _own(name: str) -> str:
    return "\0" + name


@dataclass
class JoinRows:
    """Rows with what is known of each, as columns (N,). ``table``: the columns of the side.

    ``hash``, ``second``: of the key. ``time``: in µs. ``id``, ``id2``: what identifies the row, but for equal rows,
    which ``rank`` numbers, or for versions of a row, whose number it is. ``flags``: see ``MATCHED``.
    """

    table: pa.Table
    hash: Ints
    second: Ints
    time: Ints
    id: Ints
    id2: Ints
    rank: Ints
    flags: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.hash)

    @classmethod
    def of(cls, plan: JoinPlan, side: int, table: pa.Table, secret: bytes) -> JoinRows:
        """Identifies rows that have come. All have a time."""
        said = plan.sides[side]
        batch = table.combine_chunks()
        columns = {name: _array(batch.column(name)) for name in (*plan.key, said.time, *said.identity)}
        flags = np.zeros(batch.num_rows, np.uint8)
        rank = np.zeros(batch.num_rows, np.int64)
        if said.is_result:
            retracted = pc.equal(_array(batch.column(KIND_BEFORE)), PaneKind.RETRACTED.value)
            flags[retracted.to_numpy(zero_copy_only=False)] = GONE
        if said.changes:
            rank = _array(batch.column(SEQ_BEFORE)).to_numpy()
        keys = identify([columns[name] for name in plan.key], secret)
        ids = identify([columns[name] for name in dict.fromkeys((*plan.key, said.time, *said.identity))], secret)
        lacks = np.zeros(len(keys), np.bool_)
        for name in plan.key:
            lacks |= columns[name].is_null().to_numpy(zero_copy_only=False)
        flags[lacks] |= NO_KEY
        return cls(
            batch.select(said.schema.names),
            np.where(lacks, ids[:, 0], keys[:, 0]),  # they match nothing, so they need not lie together
            keys[:, 1],
            columns[said.time].cast(pa.int64()).to_numpy(),
            ids[:, 0],
            ids[:, 1],
            rank,
            flags,
        )

    @classmethod
    def stored(cls, table: pa.Table) -> JoinRows:
        """The same of rows as the map has them."""
        numbers = {name: _array(table.column(_own(name))).to_numpy() for name in _NUMBERS}
        flags = _array(table.column(_own(_FLAGS))).to_numpy().copy()
        return cls(table.drop_columns([*map(_own, _NUMBERS), _own(_FLAGS)]), flags=flags, **numbers)

    def to_store(self, schema: pa.Schema) -> pa.Table:
        """The rows as the map has them."""
        numbers = [pa.array(getattr(self, name)) for name in _NUMBERS]
        return pa.table([*numbers, pa.array(self.flags), *self.table.columns], schema=schema)

    def take(self, rows: Ints) -> JoinRows:
        numbers = {name: getattr(self, name)[rows] for name in _NUMBERS}
        return JoinRows(self.table.take(pa.array(rows)), flags=self.flags[rows], **numbers)

    def pieces(self, rows: int) -> Iterator[JoinRows]:
        """Yields the rows, at most this number at a time."""
        for at in range(0, len(self), rows):
            yield self.take(np.arange(at, min(at + rows, len(self))))

    def has(self, flag: int) -> Flags:
        return np.asarray((self.flags & flag) != 0)

    def noted(self, due_us: Ints) -> Ints:
        """What an index of what is due has of each row."""
        return np.column_stack((due_us, self.hash, self.time, *self.identity))

    def are_among(self, others: Ints) -> Flags:
        """A mask of the rows whose identities are among others. ``others``: (N, 2)."""
        both = np.concatenate([others, np.column_stack(self.identity)])
        of = np.unique(both, axis=0, return_inverse=True)[1].reshape(-1)
        return np.isin(of[len(others) :], of[: len(others)])

    @property
    def identity(self) -> tuple[Ints, Ints]:
        """What tells a row from all others."""
        return self.id, self.id2 ^ (self.rank * _STEP)


def together(some: list[JoinRows]) -> JoinRows:
    """Several as one. There is at least one."""
    if len(some) == 1:
        return some[0]
    numbers = {name: np.concatenate([getattr(rows, name) for rows in some]) for name in _NUMBERS}
    table = pa.concat_tables([rows.table for rows in some]).combine_chunks()
    return JoinRows(table, flags=np.concatenate([rows.flags for rows in some]), **numbers)


class SideRows:
    """What the map has of one side."""

    def __init__(self, plan: JoinPlan, side: int, values: OrderedMap) -> None:
        self._values, self._side = values, side
        said = plan.sides[side]
        own = [*(pa.field(_own(name), pa.int64()) for name in _NUMBERS), pa.field(_own(_FLAGS), pa.uint8())]
        *earlier, self.schema = (pa.schema([*own, *schema]) for schema in (*said.earlier, said.schema))
        space = b"j" + bytes([side])
        self.pages = PagedRows(
            values,
            space,
            _own("hash"),
            ArrowPages(self.schema, earlier),
            page_rows=_PAGE_ROWS,
            chunk_rows=_CHUNK_ROWS,
        )
        span_us = plan.last_us - plan.first_us
        self.bin_us = max(span_us, _SHORTEST_BIN_US)
        self._due_us = max(span_us // _DUE_BINS, _SHORTEST_DUE_US)
        self._due = space + b"d"
        self._marked: dict[bytes, npt.NDArray[np.uint8]] = {}  # the flags of chunks that were marked since the last add

    # -- the index of what is due -------------------------------------------------------------------------

    def note(self, rows: JoinRows, due_us: Ints, batch: int) -> int | None:
        """Notes when it will be known that rows stay without a partner. ``batch``: a number for this call, which no
        earlier one has had. Returns the first such time.
        """
        if not len(rows):
            return None
        bins = due_us // self._due_us
        order = np.argsort(bins, kind="stable")
        numbers = rows.noted(due_us)[order]
        distinct, begins = np.unique(bins[order], return_index=True)
        apart = np.split(numbers, begins[1:])
        self._values.put(
            [
                (self._due_key(bin_, batch), some.tobytes(), max(bin_ * self._due_us // 1000, 0))
                for bin_, some in zip(distinct.tolist(), apart, strict=True)
            ]
        )
        return int(due_us.min())

    def due(self, at_us: int) -> Iterator[Ints]:
        """Yields what is due at a time, some rows at a time, and forgets it: hash, time and identity of each row."""
        for key, rows, is_due in self._noted(at_us):
            left = rows[~is_due]
            self._values.put([(key, left.tobytes() or None, None)])
            yield rows[is_due, 1:]

    def soon(self, at_us: int) -> Iterator[Ints]:
        """Yields what will be due at a time, as :meth:`due` will, and forgets nothing."""
        for _, rows, is_due in self._noted(at_us):
            yield rows[is_due, 1:]

    def _noted(self, at_us: int) -> Iterator[tuple[bytes, Ints, Flags]]:
        """Yields values of the index that have something due at a time: the key, the rows, and which of them are."""
        after = self._due_key(at_us // self._due_us + 1, 0)
        for key, value in self._values.scan(self._due, after):
            rows = np.frombuffer(value, np.int64).reshape(-1, _ROW)
            is_due = rows[:, 0] <= at_us
            if is_due.any():
                yield key, rows, is_due

    def next_due_us(self) -> int | None:
        """Returns a time before which no row is due, or None if no row ever is."""
        for _, value in self._values.scan(self._due, self._due + b"\xff" * 9):
            return int(np.frombuffer(value, np.int64).reshape(-1, _ROW)[:, 0].min())
        return None

    def _due_key(self, bin_: int, batch: int) -> bytes:
        return self._due + (bin_ + (1 << 63)).to_bytes(8, "big") + batch.to_bytes(8, "big")

    def found(self, due: Ints) -> Pages:
        """The pages of rows that :meth:`due` or :meth:`soon` yields."""
        return self.pages.pages(self.bins(due[:, 1]), due[:, 0])

    # -- rows ---------------------------------------------------------------------------------------------

    def bins(self, times: Ints) -> Ints:
        return times // self.bin_us

    def around(self, hashes: Ints, times: Ints, first: int, last: int) -> Pages:
        """The pages of rows with the hashes of others, whose times are from ``first`` to ``last`` after theirs."""
        begin, end = self.bins(times + first), self.bins(times + last)
        counts = end - begin + 1
        which = np.repeat(np.arange(len(hashes)), counts)
        within = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        return self.pages.pages(begin[which] + within, hashes[which])

    def add(self, found: Pages, rows: JoinRows, *, read: Chunks | None) -> None:
        """Keeps rows. ``found``: the page of each. ``read``: the first chunks of these pages, if they have been read.

        Since then, rows may have been marked, but none added or removed.
        """
        marked, self._marked = self._marked, {}
        if not len(rows):
            return
        pages = np.unique(found.page_of)
        if read is None or not read.last.all():
            read = self.pages.tails(found, pages)
        elif marked:
            flags, keys = _flags(read).copy(), self.pages.keys(found, read.pages, read.chunks)
            for begin, key in zip(np.searchsorted(read.of_chunk, np.arange(len(keys))).tolist(), keys, strict=True):
                if (now := marked.get(key)) is not None:
                    flags[begin : begin + len(now)] = now
            read = read._replace(rows=_with_flags(read.rows, flags))
        of_new = np.searchsorted(read.pages, found.page_of)
        both = pa.concat_tables([read.rows, rows.to_store(self.schema)])
        changed = np.isin(read.pages, pages)
        self.pages.write(found, read, both, np.concatenate((read.of_chunk, of_new)), changed)

    def remove(self, new: New) -> None:
        """Deletes the rows that later versions replace."""
        for read, mask in new.their_places:
            changed = np.zeros(len(read.pages), np.bool_)
            changed[read.of_chunk[mask]] = True
            self.pages.write(new.found, read, read.rows.filter(pa.array(~mask)), read.of_chunk[~mask], changed)

    def mark(self, found: Pages, read: Chunks, at: Ints, flags: npt.NDArray[np.uint8]) -> None:
        """Writes the flags of some of the rows that were read."""
        now = _flags(read).copy()
        chunks = np.zeros(len(read.pages), np.bool_)
        chunks[read.of_chunk[at[now[at] != flags]]] = True
        if chunks.any():
            now[at] = flags
            self.pages.write(found, read, _with_flags(read.rows, now), read.of_chunk, chunks)
            numbers = np.flatnonzero(chunks)
            begins, ends = (np.searchsorted(read.of_chunk, numbers, side) for side in ("left", "right"))
            keys = self.pages.keys(found, read.pages[numbers], read.chunks[numbers])
            self._marked |= {key: now[a:b] for key, a, b in zip(keys, begins, ends, strict=True)}


class Hashes:
    """Hashes, to find the rows that may have one of them. It lets a few others through."""

    def __init__(self, hashes: Ints) -> None:
        self._there = np.zeros(1 << _BITS, np.bool_)
        self._there[hashes & _MASK] = True

    def among(self, read: Chunks, *, also_gone: bool = False) -> tuple[Ints, JoinRows]:
        """The rows of chunks that may have one of the hashes: which they are, and what they are."""
        hashes = _array(read.rows.column(_own("hash"))).to_numpy()
        found = self._there[hashes & _MASK]
        if not also_gone:
            found &= _flags(read) & GONE == 0
        at = np.flatnonzero(found)
        return at, JoinRows.stored(read.rows.take(pa.array(at)).combine_chunks())


class New(NamedTuple):
    """What is new of the rows that came. ``rows``: these, and ``found``: their pages. ``first``: the first chunks of
    the pages. ``replaced``: kept rows that later versions replace. ``their_places``: in which chunks these are, and
    a mask of the rows there.
    """

    rows: JoinRows
    found: Pages
    first: Chunks | None
    replaced: JoinRows | None = None
    their_places: tuple[tuple[Chunks, Flags], ...] = ()


def numbered(stored: SideRows, rows: JoinRows, found: Pages, *, unique: bool) -> New:
    """Numbers rows that are equal to others. ``unique``: leaves them out. ``found``: the pages of the rows."""
    if not len(rows):
        return New(rows, found, None)
    ids = np.column_stack((rows.id, rows.id2))
    _, firsts, of = np.unique(ids, axis=0, return_index=True, return_inverse=True)
    of = of.reshape(-1)
    before = np.zeros(len(firsts), np.int64)
    by_id = Sorted(rows.id[firsts], np.zeros(len(firsts), np.int64))
    first_chunks = None
    hashes = Hashes(rows.hash)
    for read in stored.pages.chunks_of(found):
        first_chunks = read if first_chunks is None else first_chunks
        _, there = hashes.among(read)
        zeros = np.zeros(len(there), np.int64)
        for search, of_new in by_id.pairs(there.id, zeros, zeros):
            same = there.id2[search] == rows.id2[firsts[of_new]]
            np.maximum.at(before, of_new[same], there.rank[search[same]] + 1)
    order = np.argsort(of, kind="stable")
    counts = np.bincount(of)
    rank = np.empty(len(rows), np.int64)
    rank[order] = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    rows.rank = before[of] + rank
    if not unique or not rows.rank.any():
        return New(rows, found, first_chunks)
    fresh = np.flatnonzero(rows.rank == 0)
    return New(rows.take(fresh), found._replace(page_of=found.page_of[fresh]), first_chunks)


def newest(stored: SideRows, rows: JoinRows, found: Pages) -> New:
    """Keeps the newest version of each row. Its ``rank`` is the number of the version, so each is a row of its own.

    Versions may come in any order, so the page also keeps the newest version of a row that has gone.
    """
    if not len(rows):
        return New(rows, found, None)
    order = np.lexsort((rows.rank, rows.id2, rows.id))
    is_last = np.ones(len(order), np.bool_)
    is_last[:-1] = (np.diff(rows.id[order]) != 0) | (np.diff(rows.id2[order]) != 0)
    rows, found = _some(rows, found, np.sort(order[is_last]))
    by_id, hashes = Sorted(rows.id, np.zeros(len(rows), np.int64)), Hashes(rows.hash)
    known = np.zeros(len(rows), np.bool_)
    replaced: list[JoinRows] = []
    places: list[tuple[Chunks, Flags]] = []
    for read in stored.pages.chunks_of(found):
        at, there = hashes.among(read, also_gone=True)
        mask = np.zeros(read.rows.num_rows, np.bool_)
        zeros = np.zeros(len(there), np.int64)
        for search, of_new in by_id.pairs(there.id, zeros, zeros):
            same = there.id2[search] == rows.id2[of_new]
            search, of_new = search[same], of_new[same]
            is_older = there.rank[search] < rows.rank[of_new]
            known[of_new[~is_older]] = True
            older = search[is_older]
            mask[at[older]] = True
            replaced.append(there.take(older[~there.has(GONE)[older]]))
        if mask.any():
            places.append((read, mask))
    rows, found = _some(rows, found, np.flatnonzero(~known))
    replaced = [some for some in replaced if len(some)]
    return New(rows, found, None, together(replaced) if replaced else None, tuple(places))


def _some(rows: JoinRows, found: Pages, at: Ints) -> tuple[JoinRows, Pages]:
    if len(at) == len(rows):
        return rows, found
    return rows.take(at), found._replace(page_of=found.page_of[at])


def _flags(read: Chunks) -> npt.NDArray[np.uint8]:
    return np.asarray(_array(read.rows.column(_own(_FLAGS))).to_numpy())


def _with_flags(rows: pa.Table, flags: npt.NDArray[np.uint8]) -> pa.Table:
    number = rows.schema.get_field_index(_own(_FLAGS))
    return rows.set_column(number, rows.schema.field(number), pa.array(flags))


def _array(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
