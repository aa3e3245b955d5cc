"""What a batch changed of what was shown: one row for each key and window, with the values before it.

A shard keeps what it has shown of each key and window in its map, until the operator says that nothing of the window
will be shown or taken back any more. The windows of a definition that end at one time are a bin, and a bin is some
pages of rows, by the identity of key and window. So a batch reads and writes the pages of the windows that it has panes
of. A page names its columns, and is read as what they are now.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from aion.aggregates.values import combined
from aion.base.identity import Identities, identify
from aion.core.life.actions import Forget, PaneKind, dropped_of
from aion.core.paged_rows import ArrowPages, Chunks, PagedRows, Pages
from aion.core.query.columns import OLD, PANE_SEQ
from aion.core.query.evolution import widens_or_is
from aion.core.query.plan import Plan
from aion.execute.panes.rows import ENTERED
from aion.execute.spill.spilling import ROOM, HeldBatches, Room, partitions_by_key
from state_backends.format.ordered_map import OrderedMap
from state_backends.thresholds import threshold

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_PAGE_ROWS = threshold(256, 1)
_STEP = 0x1E3779B97F4A7C15
"""An odd number. Its multiples differ in all bits, so rows of a pane have identities that no others have."""
_FIRST, _SECOND, _COUNT = "\0first", "\0second", "\0rows"
"""The columns of a page beside those that are shown: the identity of a row, and how many rows its pane had."""


class Changes:
    """The panes of a batch, and what they change. ``values``: the map of the shard. ``secret``: the key of identities.

    ``over``: the numbers of definitions that have no windows any more, if the map may still have rows of them.
    ``room``: of the panes. If it is not enough, the panes of some of the keys are compared at a time.
    """

    def __init__(
        self,
        plan: Plan,
        values: OrderedMap,
        secret: bytes,
        over: Sequence[int] = (),
        room: Room = ROOM,
    ) -> None:
        self._plan = plan
        self._values = values
        self._secret = secret
        self._over = over
        self._shown = list(plan.outputs.names)
        bound = plan.layout.bound if plan.layout is not None else ()
        # The number of events of another aggregate says nothing, so the name of the aggregate is in the column's.
        self._entered = {
            b.name: f"{ENTERED}{b.name} {b.aggregate}" for b in bound if not all(p.exact for p in b.partials)
        }
        # The rows of a pane are told from each other by their places in it, if it may have several.
        self._several = plan.layout is None
        ids = (_FIRST, _SECOND, *((_COUNT,) if self._several else ()))
        counts = self._entered.values()
        self._page = pa.schema(
            [*(pa.field(n, pa.int64()) for n in ids), *plan.outputs, *(pa.field(n, pa.int64()) for n in counts)]
        )
        self._room, self._panes = room, HeldBatches(room.share(2))

    def take(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Keeps panes until the end of the batch. Yields rows of other kinds."""
        return dropped_of(rows, lambda panes: self._panes.add(self._with_entered(panes)))

    def _with_entered(self, panes: pa.RecordBatch) -> pa.RecordBatch:
        """Gives panes the columns with numbers of events, in one order. They are null where these are not known."""
        found = {name: panes.schema.get_field_index(ENTERED + name) for name in self._entered}
        counts = [pa.nulls(panes.num_rows, pa.int64()) if at < 0 else panes.column(at) for at in found.values()]
        rows = panes.select(self._plan.result_schema.names)
        return pa.RecordBatch.from_arrays(
            [*rows.columns, *counts], [*rows.schema.names, *(ENTERED + name for name in self._entered)]
        )

    def end_batch(self, forgotten: Sequence[Forget]) -> Iterator[pa.RecordBatch]:
        """Yields what the panes of the batch change. ``forgotten``: the operator's orders of the batch."""
        for number in self._over:
            self._pages(number).drop()
        self._over = ()
        with closing(partitions_by_key(self._plan.key, self._panes.take(), self._room)) as partitions:
            for partition in partitions:
                if partition.batches:
                    yield from self._changes(partition.batches)
        for order in forgotten:
            self._forget(order)

    def _changes(self, batches: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields what the panes of some of the keys change."""
        panes = pa.Table.from_batches(batches).combine_chunks()
        starts, ends = (combined(panes.column(f"window_{edge}")).cast(pa.int64()) for edge in ("start", "end"))
        numbers = self._plan.numbers_of(combined(panes.column("window")), starts.to_numpy())
        keys = [combined(panes.column(name)) for name in self._plan.key]
        ids = self._identities(keys, numbers, starts, ends)
        bins = np.column_stack((numbers, ends.to_numpy()))
        retracted = pc.equal(panes.column("kind"), PaneKind.RETRACTED.value).to_numpy()
        if self._several:
            rows = self._rows(ids, bins, panes.column(PANE_SEQ).to_numpy(), retracted)
            ids = _in_pane(ids[rows.of], rows.place)
        else:
            rows = _Rows.single(_last(ids), retracted)
            ids = Identities(ids[rows.of])
        panes, bins, gone = panes.take(pa.array(rows.of)), bins[rows.of], rows.gone
        own = [pa.array(ids[:, 0]), pa.array(ids[:, 1]), *([pa.array(rows.total)] if self._several else ())]
        shown = [*map(panes.column, self._shown), *(panes.column(ENTERED + name) for name in self._entered)]
        new = pa.table([*own, *shown], schema=self._page)
        panes = panes.select(self._plan.result_schema.names)
        old, new = self._replace(bins, ids, new, gone)
        had = old.column(_FIRST).is_valid().to_numpy()
        same = had & ~gone & _equal([(old.column(name), new.column(name)) for name in self._shown], len(had))
        # All rows of a pane come if one has changed, as those that are left out would be none of the pane.
        others = np.isin(rows.pane, rows.pane[~same & (had | ~gone)])
        changed = np.flatnonzero(others & (had | ~gone))
        if len(changed):
            for name in self._shown:
                at = panes.schema.get_field_index(OLD + name)
                panes = panes.set_column(at, panes.schema.field(at), combined(old.column(name)))
                if name in self._entered:
                    at = panes.schema.get_field_index(name)
                    panes = panes.set_column(at, panes.schema.field(at), combined(new.column(name)))
            if self._several:
                panes = _without_values(panes, self._shown, gone)
            yield from panes.take(pa.array(changed)).combine_chunks().to_batches()

    def _rows(self, ids: Identities, bins: Ints, seqs: Ints, retracted: Flags) -> _Rows:
        """Returns the rows of the newest pane of each window, and those that the pane before it had beyond them."""
        pane = np.unique(ids, axis=0, return_inverse=True)[1].reshape(-1)
        newest = np.full(int(pane.max(initial=-1)) + 1, np.iinfo(np.int64).min)
        np.maximum.at(newest, pane, seqs)
        last = np.flatnonzero(seqs == newest[pane])
        last = last[np.argsort(pane[last], kind="stable")]
        panes, firsts = np.unique(pane[last], return_index=True)
        firsts = last[firsts]
        rows = last[~retracted[last]]
        counts = np.bincount(pane[rows], minlength=len(newest))[panes]
        place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        had = self._counts(bins[firsts], Identities(ids[firsts]))
        beyond = np.maximum(had - counts, 0)
        places = np.arange(beyond.sum()) - np.repeat(np.cumsum(beyond) - beyond - counts, beyond)
        of = np.concatenate((rows, np.repeat(firsts, beyond)))
        return _Rows(
            of,
            np.concatenate((place, places)),
            np.concatenate((np.repeat(counts, counts), np.repeat(counts, beyond))),
            np.repeat((False, True), (len(rows), len(of) - len(rows))),
            pane[of],
        )

    def _counts(self, bins: Ints, ids: Identities) -> Ints:
        """Returns how many rows the panes that are kept have; 0 for windows of which none is."""
        counts = np.zeros(len(ids), np.int64)
        for kept in self._kept(bins, _in_pane(ids, np.zeros(len(ids), np.int64))):
            there = np.flatnonzero(kept.row >= 0)
            known = combined(kept.read.rows.column(_COUNT)).fill_null(1).to_numpy()
            counts[kept.at[there]] = known[kept.row[there]]
        return counts

    def _identities(self, keys: Sequence[pa.Array], numbers: Ints, starts: pa.Array, ends: pa.Array) -> Identities:
        return identify([*keys, pa.array(numbers), starts, ends], self._secret)

    # -- what is kept -------------------------------------------------------------------------------------

    def _replace(self, bins: Ints, ids: Identities, new: pa.Table, gone: Flags) -> tuple[pa.Table, pa.Table]:
        """Keeps new rows, but for those that are gone. Returns for each what was kept before, null if nothing was, and
        what is kept now. ``bins``: the definition and the end of each row's window.
        """
        none = np.empty(0, np.int64), self._page.empty_table(), self._page.empty_table()
        found: list[tuple[Ints, pa.Table, pa.Table]] = [none]
        for kept in self._kept(bins, ids, grow=True):
            stored, stays = kept.read.rows, ~gone[kept.at]
            old = stored.take(pa.array(np.where(kept.row < 0, 0, kept.row), mask=kept.row < 0))
            now = self._settled(old, new.take(pa.array(kept.at)))
            found.append((kept.at, old, now))
            others = np.ones(stored.num_rows, np.bool_)
            others[kept.row[kept.row >= 0]] = False
            everything = pa.concat_tables([stored.filter(pa.array(others)), now.filter(pa.array(stays))])
            of_chunk = np.concatenate((kept.read.of_chunk[others], kept.pages.page_of[stays]))
            changed = np.zeros(len(kept.read.pages), np.bool_)
            changed[kept.pages.page_of[stays | (kept.row >= 0)]] = True
            kept.of.write(kept.pages, kept.read, everything, of_chunk, changed)
        order = pa.array(np.argsort(np.concatenate([at for at, _, _ in found])))
        olds, news = (pa.concat_tables([both[which] for both in found]).take(order) for which in (1, 2))
        return olds, news

    def _kept(self, bins: Ints, ids: Identities, *, grow: bool = False) -> Iterator[_Kept]:
        """Finds what is kept of some rows, for one definition after the other. ``grow``: see PagedRows.pages."""
        for number in np.unique(bins[:, 0]).tolist():
            at = np.flatnonzero(bins[:, 0] == number)
            of = self._pages(number)
            pages = of.pages(bins[at, 1], ids[at, 0], grow=grow)
            (read,) = of.chunks_of(pages)  # identities differ, so a page has one chunk
            read = read._replace(rows=read.rows.combine_chunks())
            yield _Kept(at, of, pages, read, _found(Identities(ids[at]), _ids(read.rows)))

    def _pages(self, definition: int) -> PagedRows:
        space = b"s" + definition.to_bytes(4, "big")
        return PagedRows(self._values, space, _FIRST, _ShownPages(self._page), page_rows=_PAGE_ROWS)

    def _settled(self, old: pa.Table, new: pa.Table) -> pa.Table:
        """Returns the new rows, with the old results of those that round and that no event has come to since.

        Equal events that were combined in other groupings give another last digit, which is no change.
        """
        for name, count in self._entered.items():
            before, now = combined(old.column(name)), combined(new.column(name))
            same = pc.equal(combined(old.column(count)), combined(new.column(count))).fill_null(False)
            same = pc.and_(same, pc.equal(before.is_null(), now.is_null()))
            at = new.schema.get_field_index(name)
            new = new.set_column(at, new.schema.field(at), pc.if_else(same, before, now))
        return new

    def _forget(self, order: Forget) -> None:
        if order.keys is None:
            self._pages(order.definition).drop_bins(np.unique(order.end_us).tolist())
            return
        numbers = np.full(len(order.end_us), order.definition)
        ids = self._identities(order.keys, numbers, pa.array(order.start_us), pa.array(order.end_us))
        of_windows = np.column_stack((numbers, order.end_us))
        if self._several:
            counts = self._counts(of_windows, ids)
            places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            ids = _in_pane(np.repeat(ids, counts, axis=0), places)
            of_windows = np.repeat(of_windows, counts, axis=0)
        nothing = pa.table({name: pa.nulls(len(ids), self._page.field(name).type) for name in self._page.names})
        if len(ids):
            self._replace(of_windows, ids, nothing, np.ones(len(ids), np.bool_))


class _ShownPages(ArrowPages):
    """Chunks that name their columns, because what is shown may change. They are read with the columns that are shown
    now; those that were not shown then are null.
    """

    def decode(self, values: Sequence[bytes]) -> tuple[pa.Table, Ints]:
        tables = [self._conformed(pa.ipc.open_stream(value).read_all()) for value in values]
        sizes = np.array([table.num_rows for table in tables], np.int64)
        return pa.concat_tables([self.schema.empty_table(), *tables]), sizes

    def _conformed(self, stored: pa.Table) -> pa.Table:
        if stored.schema == self.schema:
            return stored
        types = {field.name: field.type for field in stored.schema}
        columns = [
            stored[field.name].cast(field.type)
            if field.name in types and widens_or_is(types[field.name], field.type)
            else pa.nulls(stored.num_rows, field.type)
            for field in self.schema
        ]
        return pa.table(columns, schema=self.schema)

    def encode(self, rows: pa.RecordBatch, begins: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        values = []
        for begin, end in zip(begins, ends, strict=True):
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, self.schema) as writer:
                # A slice would be written with all that its columns share.
                writer.write_batch(rows.take(pa.array(np.arange(begin, end))))
            values.append(bytes(sink.getvalue()))
        return values


class _Rows(NamedTuple):
    """Rows that a batch shows, or no longer does. ``of``: the row of the batch that they are, or that has their pane.

    ``place``: which row of its pane it is. ``total``: how many rows the pane has now. ``gone``: it is none of them any
    more. ``pane``: a number for each pane.
    """

    of: Ints
    place: Ints
    total: Ints
    gone: Flags
    pane: Ints

    @classmethod
    def single(cls, of: Ints, retracted: Flags) -> _Rows:
        """Those of panes with one row."""
        ones = np.ones(len(of), np.int64)
        return cls(of, ones - 1, ones, retracted[of], np.arange(len(of)))


class _Kept(NamedTuple):
    """What the map has of rows of one definition. ``at``: which rows. ``of``: all that it has of the definition.

    ``pages``, ``read``: what was read. ``row``: for each row, which row of these it is, or -1.
    """

    at: Ints
    of: PagedRows
    pages: Pages
    read: Chunks
    row: Ints


def _in_pane(ids: Ints, place: Ints) -> Identities:
    """Returns identities of rows from those of their panes. The first row has that of the pane."""
    moved = ids.copy()
    moved[:, 1] ^= place * _STEP
    return Identities(moved)


def _without_values(panes: pa.Table, shown: Sequence[str], gone: Flags) -> pa.Table:
    """Returns panes in which rows that are gone are retracted, and have no values."""
    if not gone.any():
        return panes
    mask = pa.array(gone)
    for name in shown:
        at = panes.schema.get_field_index(name)
        column = combined(panes.column(at))
        where = pa.array(np.where(gone, 0, np.arange(len(gone))), mask=gone)
        panes = panes.set_column(at, panes.schema.field(at), column.take(where))
    at = panes.schema.get_field_index("kind")
    kinds = pc.if_else(mask, pa.scalar(PaneKind.RETRACTED.value), combined(panes.column(at)))
    return panes.set_column(at, panes.schema.field(at), kinds)


def _last(ids: Identities) -> Ints:
    """The last row of each id, in the order of the rows."""
    order = np.lexsort((np.arange(len(ids)), ids[:, 1], ids[:, 0]))
    is_last = np.append((ids[order][1:] != ids[order][:-1]).any(axis=1), True)
    return np.sort(order[is_last])


def _found(ids: Identities, among: Ints) -> Ints:
    """The row of each id among others, or -1."""
    both = np.concatenate((among, ids))
    group = np.unique(both, axis=0, return_inverse=True)[1].reshape(-1)
    row_of = np.full(int(group.max(initial=-1)) + 1, -1)
    row_of[group[: len(among)]] = np.arange(len(among))
    return np.asarray(row_of[group[len(among) :]])


def _equal(pairs: Sequence[tuple[Any, Any]], rows: int) -> Flags:
    """A mask of the rows that are equal in all columns. Nulls are equal, and so are NaNs."""
    equal = np.ones(rows, np.bool_)
    for old, new in pairs:
        old, new = combined(old), combined(new)
        if pa.types.is_nested(new.type):
            pairs_of = zip(old.to_pylist(), new.to_pylist(), strict=True)
            equal &= np.array([a == b or repr(a) == repr(b) for a, b in pairs_of], np.bool_)  # no NaN equals another
            continue
        same = pc.equal(old, new).fill_null(False)
        same = pc.or_(same, pc.and_(old.is_null(), new.is_null()))
        if pa.types.is_floating(new.type):
            same = pc.or_(same, pc.and_(pc.is_nan(old), pc.is_nan(new)).fill_null(False))
        equal &= same.to_numpy(zero_copy_only=False)
    return equal


def _ids(rows: pa.Table) -> Ints:
    return np.column_stack([combined(rows.column(name)).to_numpy() for name in (_FIRST, _SECOND)])
