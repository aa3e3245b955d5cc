"""Turns events into blocks: the work of Disco's child node on every source partition (Disco section 3). Pure.

Everything works on whole batches: a few numpy passes find the slices, Arrow's grouped kernels make partials, and kept
events take one stable sort and one gather for every few megabytes. No Python code runs for a single event.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from aion.aggregates.groups import Coded, number
from aion.aggregates.values import as_batch, combined, with_one_zero
from aion.base.hashing import ShardOfKeys
from aion.base.numbers import EARLIEST_US, LATEST_US, sum_of
from aion.core.ingest.encoding import BlockSettings, decode, encode_rows, is_quick, settled
from aion.core.ingest.key_ranges import row_hashes
from aion.core.ingest.sorting import codes_of, ranks_of, sorted_by
from aion.core.query.plan import SLICE, Plan
from aion.core.slicing.edges import EdgeSet
from aion.core.slicing.grid import BEYOND_SLICE, FLAGGED_SLICES, NO_SLICE, TEXT_SLICE
from state_backends.format.block import Block
from state_backends.thresholds import threshold

Micros = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
MIB = 1 << 20
_FEW_PARTIALS = threshold(1 << 16)
_BUFFER_BYTES = threshold(64 * MIB, 4096)
T = TypeVar("T")
R = TypeVar("R")


class Pool(Protocol):
    """Threads that encode blocks, some of them before the caller asks for them."""

    def map_ordered(
        self, function: Callable[[T], R], items: Iterable[T], *, inline: Callable[[T], bool] | None = None
    ) -> Iterator[R]: ...


Range = tuple[int, int]


class ShardBlock(NamedTuple):
    """``keys``: the range of the hashes of the rows' keys, by which they are sorted, or None if they may not be."""

    shard: int
    block: Block
    keys: Range | None = None


class Flagged(NamedTuple):
    """A mask of events that no window takes, and the slice that says why."""

    which: Flags
    slice_us: int


class _Piece(NamedTuple):
    """The rows of a block that is not encoded yet."""

    shard: int
    slice_us: int
    rows: pa.RecordBatch
    size_bytes: int
    keys: Range | None = None


class BlockBuilder:
    """Collects the batches of one task into blocks. Each block is of one shard and one slice or segment.

    ``add`` takes a RecordBatch of ``plan.schema`` and yields blocks that are full. ``finish`` yields the rest. The
    shard id of each row (int32) comes with the batch, or ``shard_of`` computes it. ``buffer_bytes``: how much input is
    held until blocks are made. With a ``pool``, its threads encode blocks, some of them before the caller asks for
    them. No window takes an event with a text that is not UTF-8 if ``settings`` drop it. Otherwise U+FFFD stands for
    the bytes that are none.

    If some windows distinguish single events and others do not (``plan.event_rows``), an inner builder makes the
    blocks for those that do.
    """

    def __init__(
        self,
        plan: Plan,
        settings: BlockSettings | None = None,
        pool: Pool | None = None,
        shard_of: ShardOfKeys | None = None,
        *,
        buffer_bytes: int = _BUFFER_BYTES,
    ) -> None:
        self.plan = plan
        self.settings = settings = settings or BlockSettings()
        self.target_bytes = settings.target_bytes
        self.buffer_bytes = buffer_bytes
        self.pool = pool
        self.shard_of = shard_of
        self._pending: list[pa.Table] = []
        self._pending_bytes = 0
        self._pending_rows = 0
        self._next_event = 0
        self._is_mixed = False  # made from several blocks: even a single pending table may have several rows of a key
        self._event_rows: BlockBuilder | None = None
        if plan.event_rows is not None:
            inner = replace(settings, drops_bad_texts=False)  # this builder does it for both
            self._event_rows = BlockBuilder(plan.event_rows, inner, pool, shard_of, buffer_bytes=buffer_bytes)

    def add(
        self, batch: pa.RecordBatch, shards: pa.Array | None = None, flagged: Flagged | None = None
    ) -> Iterator[ShardBlock]:
        batch, bad = settled(batch)
        others = () if flagged is None else (flagged,)
        if bad is not None and self.settings.drops_bad_texts:
            # Each event has one reason.
            which = bad if flagged is None else bad & ~flagged.which
            others = (*others, Flagged(which, TEXT_SLICE))
        yield from self._add(batch, shards, others)

    def add_grouped(self, slices: pa.Array, keys: pa.RecordBatch, states: Sequence[pa.Array]) -> Iterator[ShardBlock]:
        """Takes states of events that were grouped before, by slice and key and perhaps by more.

        ``slices``: an instant in the slice and its cell; where there are no cells, the start of the slice. For events
        that no window takes, the slice that says why.
        """
        keys, bad = settled(keys)
        if bad is not None and self.settings.drops_bad_texts:
            has_reason = pc.is_in(slices, pa.array(FLAGGED_SLICES))
            slices = pc.if_else(pc.and_not(pa.array(bad), has_reason), TEXT_SLICE, slices)
        assert self.plan.layout is not None
        names = [_SLICE, *(field.name for field in (*self.plan.key_fields, *self.plan.layout.fields))]
        self._is_mixed = True
        keys = with_one_zero(keys, self.plan.key)
        yield from self._collect(self._in_cells(pa.table([slices, *keys.columns, *states], names)))

    def _add(
        self, batch: pa.RecordBatch, shards: pa.Array | None, flagged: tuple[Flagged, ...]
    ) -> Iterator[ShardBlock]:
        if batch.num_rows == 0:
            return
        if batch.num_rows > 1 and batch.get_total_buffer_size() > self.buffer_bytes < batch.nbytes:
            # With what waits, its texts might be more than an array holds.
            step = max(batch.num_rows * self.buffer_bytes // batch.nbytes, 1)
            for begin in range(0, batch.num_rows, step):
                some = slice(begin, begin + step)
                flags = tuple(each._replace(which=each.which[some]) for each in flagged)
                yield from self._add(batch[some], None if shards is None else shards[some], flags)
            return
        if self._event_rows is not None:
            # An event without a time in range is dropped and counted once, with the partials. Leave it out here.
            timed = pc.and_kleene(*_within(batch.column(self.plan.time))).fill_null(False)
            for each in flagged:
                timed = pc.and_not(timed, pa.array(each.which))
            if timed.true_count == batch.num_rows:  # a filter copies
                yield from self._event_rows._add(batch, shards, ())
            else:
                of_them = None if shards is None else shards.filter(timed)
                yield from self._event_rows._add(batch.filter(timed), of_them, ())
        batch = self.plan.computed(with_one_zero(batch, self.plan.key))
        times = batch.column(self.plan.time)
        if self.plan.layout is None:
            slices = coded(self.plan.grid.edges, times, *flagged)
            if shards is None:
                shards = self._shards([batch.column(name) for name in self.plan.key], batch.num_rows)
            names = [_SHARD, _SLICE, *batch.schema.names]
            yield from self._keep(pa.table([shards, slices.values.take(pa.array(slices.codes)), *batch.columns], names))
        else:
            slices = coded(self.plan.cell_edges, times, *flagged)
            for rows in self._stretches(batch):
                part = None if shards is None else shards[rows]
                yield from self._collect(self._lift(batch[rows], part, slices[rows]))

    def add_blocks(self, blocks: Sequence[ShardBlock]) -> Iterator[ShardBlock]:
        """Takes blocks that other builders of the same plan made. A builder takes either batches or blocks, never both.

        Raises CorruptBlock.
        """
        if self._event_rows is not None:
            yield from self._event_rows.add_blocks([b for b in blocks if not self.plan.holds(b.block.header.slice_us)])
            blocks = [b for b in blocks if self.plan.holds(b.block.header.slice_us)]
        if not blocks:
            return
        schema = self.plan.block_schema
        rows = pa.Table.from_batches([decode(b.block, schema) for b in blocks], schema).combine_chunks()
        counts = [b.block.header.rows for b in blocks]
        shards = np.repeat(np.array([b.shard for b in blocks], np.int32), counts)
        slices = self.plan.slices_of(rows)
        if slices is None:
            slices = np.array([b.block.header.slice_us for b in blocks], np.int64) - self.plan.name_offset_us
            slices = np.repeat(slices, counts)
        else:
            rows = rows.drop_columns([SLICE])
        tags = {_SHARD: shards, _SLICE: slices}
        if self.plan.layout is not None and self.plan.keyed:
            firsts = self.plan.instants(rows)[0]
            if self.plan.by_event:
                tags[_CELL] = self._events(len(firsts))
            elif self.plan.cell_us is not None:
                tags[_CELL] = firsts // self.plan.cell_us
        table = pa.table([*map(pa.array, tags.values()), *rows.columns], [*tags, *rows.schema.names])
        self._is_mixed = True
        yield from self._keep(table) if self.plan.layout is None else self._collect(table)

    def _keep(self, events: pa.Table) -> Iterator[ShardBlock]:
        self._pending.append(events)
        self._pending_bytes += events.nbytes
        if self._pending_bytes >= self.buffer_bytes:
            yield from self._encoded(self._flush_events(final=False))

    def _collect(self, partials: pa.Table) -> Iterator[ShardBlock]:
        self._pending.append(partials)
        self._pending_rows += partials.num_rows
        self._pending_bytes += partials.nbytes
        # Combining only when the rows have doubled keeps the work linear and the memory bounded.
        grown = len(self._pending) > 1 and self._pending_rows > 2 * max(self._pending[0].num_rows, _FEW_PARTIALS)
        if grown and not self.plan.by_event:
            self._compact()
        if self._pending_bytes >= self.buffer_bytes:
            yield from self._encoded(self._flush_partials(final=False))

    def finish(self) -> Iterator[ShardBlock]:
        if self._event_rows is not None:
            yield from self._event_rows.finish()
        if not self._pending:
            return
        if self.plan.layout is None:
            yield from self._encoded(self._flush_events(final=True))
        else:
            yield from self._encoded(self._flush_partials(final=True))

    # -- partials -----------------------------------------------------------------------------------------

    def _shards(self, keys: Sequence[pa.Array], rows: int) -> pa.Array:
        assert self.shard_of is not None, "neither Spark nor the builder knows the shards"
        return pa.array(self.shard_of(keys, rows))

    def _stretches(self, batch: pa.RecordBatch) -> Iterator[slice]:
        """The rows to lift at once: all, unless partials hold values.

        Such values of a key are one row, and a row cannot be split, so it must not become a huge block.
        """
        assert self.plan.layout is not None
        step = batch.num_rows
        if self.plan.layout.holistic:
            size = sum(batch.column(name).nbytes for name in self.plan.layout.columns)
            step = max(step * self.target_bytes // max(size, 1), 1)
        return (slice(start, start + step) for start in range(0, batch.num_rows, step))

    def _events(self, count: int) -> npt.NDArray[np.int64]:
        """New numbers for events that each get a row of their own."""
        first = self._next_event
        self._next_event += count
        return np.arange(first, self._next_event)

    def _lift(self, batch: pa.RecordBatch, shards: pa.Array | None, slices: Coded) -> pa.Table:
        """The partials of each (shard, slice, cell, key). The cell separates rows of a key within a slice."""
        plan = self.plan
        assert plan.layout is not None
        keys: dict[str, Any] = {_SLICE: slices} if shards is None else {_SHARD: shards, _SLICE: slices}
        if plan.by_event:
            keys[_CELL] = pa.array(self._events(batch.num_rows))
        for name, field in zip(plan.key, plan.key_fields, strict=True):
            keys[field.name] = batch.column(name)
        return self._in_cells(plan.layout.lift(keys, {n: batch.column(n) for n in plan.layout.columns}))

    def _in_cells(self, partials: pa.Table) -> pa.Table:
        """Returns partials of slices and cells, whose starts are in one column, with a column for each."""
        plan = self.plan
        if plan.cell_us is None:
            return partials
        starts = combined(partials.column(_SLICE)).to_numpy()
        place = partials.schema.get_field_index(_SLICE)
        partials = partials.set_column(place, _SLICE, pa.array(plan.grid.starts_of(starts)))
        # Combined partials have the cell there, too.
        return partials.add_column(place + 1, _CELL, pa.array(starts // plan.cell_us))

    def _compact(self) -> None:
        assert self.plan.layout is not None
        together = pa.concat_tables(self._pending).combine_chunks()
        keys = [n for n in (_SHARD, _SLICE, _CELL) if n in together.schema.names] + [
            f.name for f in self.plan.key_fields
        ]
        if self.plan.layout.holistic:
            parts = pa.array(parts_of(together, keys, self.target_bytes))
            compacted = self.plan.layout.combine([*keys, _PART], together.append_column(_PART, parts))
            compacted = compacted.take(pc.sort_indices(compacted.column(_PART))).drop_columns([_PART])
        else:
            compacted = self.plan.layout.combine(keys, together)
        self._pending, self._pending_rows, self._pending_bytes = [compacted], compacted.num_rows, compacted.nbytes
        self._is_mixed = False

    def _flush_partials(self, *, final: bool) -> Iterator[_Piece]:
        """Combines the pending partials and yields them by (shard, slice, key). A small rest waits unless ``final``."""
        if self.plan.by_event:
            self._pending = [pa.concat_tables(self._pending)]
        elif len(self._pending) > 1 or self._is_mixed:
            self._compact()
        table = self._pending.pop()
        if not final and table.nbytes < self.buffer_bytes // 2:
            self._pending = [table]
            return
        if _SHARD not in table.schema.names:
            # Compute shards only now: there are fewer partials than events.
            columns = [combined(table.column(f.name)) for f in self.plan.key_fields]
            table = table.append_column(_SHARD, self._shards(columns, table.num_rows))
        order = [_SHARD, _SLICE, *(f.name for f in self.plan.key_fields)]
        if _CELL in table.schema.names:
            order.append(_CELL)
        table = table.take(pc.sort_indices(table, sort_keys=[(name, "ascending") for name in order])).combine_chunks()
        slices = table.column(_SLICE)
        segments = self.plan.grid.segments(slices.to_numpy()) + self.plan.name_offset_us
        if self.plan.grid.has_segments:
            table = table.append_column(SLICE, slices)
        rows = as_batch(table.select(self.plan.block_schema.names))
        for shard, segment_us, start, stop in _runs(table.column(_SHARD).to_numpy(), segments):
            yield from self._pieces(shard, segment_us, rows, start, stop)
        self._pending_rows = self._pending_bytes = 0

    # -- kept events --------------------------------------------------------------------------------------

    def _flush_events(self, *, final: bool) -> Iterator[_Piece]:
        """Sorts the pending events by (shard, slice, hash of the key) and yields full pieces.

        The rest waits unless ``final``.
        """
        table = pa.concat_tables(self._pending).combine_chunks()
        codes = [codes_of(table.column(name)) for name in (_SHARD, _SLICE)]
        hashes = row_hashes(self.plan, table) if self.plan.key else None
        order = sorted_by([*codes, *([] if hashes is None else [ranks_of(hashes)])], table.num_rows)
        if order is not None:
            table = table.take(pa.array(order)).combine_chunks()
            hashes = hashes[order] if hashes is not None else None
        events = as_batch(table.drop_columns([_SHARD, _SLICE]))
        rest: list[pa.Table] = []
        for shard, slice_us, start, stop in _runs(table.column(_SHARD).to_numpy(), table.column(_SLICE).to_numpy()):
            run = table.slice(start, stop - start)
            if not final and run.nbytes < self.target_bytes // 2:
                rest.append(run)
                continue
            yield from self._pieces(shard, slice_us, events, start, stop, hashes)
        self._pending = rest
        self._pending_bytes = sum(t.nbytes for t in rest)
        if self._pending_bytes > self.buffer_bytes // 2:
            # There are too many slices to fill blocks within the buffer. Small blocks are better than a growing buffer.
            yield from self._flush_events(final=True)

    # -- both ---------------------------------------------------------------------------------------------

    def _pieces(
        self,
        shard: int,
        slice_us: int,
        table: pa.RecordBatch,
        start: int,
        stop: int,
        hashes: npt.NDArray[np.int64] | None = None,
    ) -> Iterator[_Piece]:
        """``hashes``: of the keys, if the rows are sorted by them."""
        size_bytes = table.slice(start, stop - start).nbytes
        count = max(1, round(size_bytes / self.target_bytes))
        step = -(-(stop - start) // count)
        for begin in range(start, stop, step):
            count_of = min(step, stop - begin)
            keys = None if hashes is None else (int(hashes[begin]), int(hashes[begin + count_of - 1]))
            yield _Piece(shard, slice_us, table.slice(begin, count_of), size_bytes // count, keys)

    def _encoded(self, pieces: Iterator[_Piece]) -> Iterator[ShardBlock]:
        if self.pool is None:
            return map(self._encode, pieces)
        return self.pool.map_ordered(
            self._encode,
            pieces,
            inline=lambda p: is_quick(self.settings.codec, self.settings.compression, p.size_bytes),
        )

    def _encode(self, piece: _Piece) -> ShardBlock:
        """Makes a block from a piece. Runs in the pool's threads, so it must not use what changes in the builder."""
        form = self.settings
        block = encode_rows(self.plan, piece.rows, piece.slice_us, compression=form.compression, codec=form.codec)
        return ShardBlock(piece.shard, block, piece.keys)


# No user's column has these names: Spark's parser accepts no column name with a NUL. And nowhere else do these columns
# share a table with the user's.
_SHARD, _SLICE, _CELL, _PART = "\0shard", "\0slice", "\0cell", "\0part"


def parts_of(partials: pa.Table, keys: Sequence[str], target_bytes: int) -> npt.NDArray[np.int64]:
    """Numbers the partials of each key. Those with the same number together make a row of about the target size.

    A row cannot be split later, so this keeps blocks small although a key has many values.
    """
    groups = number([combined(partials.column(name)) for name in keys], partials.num_rows)
    events = partials.column("p0").to_numpy()
    event_bytes = partials.nbytes / max(sum_of(events), 1)
    before = np.cumsum(events[groups.order], dtype=np.float64) - events[groups.order]
    begins = groups.offsets[:-1]
    before -= np.repeat(before[begins], groups.counts)
    parts = np.empty(partials.num_rows, np.int64)
    parts[groups.order] = before * event_bytes // target_bytes
    return parts


def coded(edges: EdgeSet, times: pa.Array, *flagged: Flagged) -> Coded:
    """The slice of each event, as codes: it starts at the last edge at or before the event.

    Events without a time get NO_SLICE, those with a time out of range get BEYOND_SLICE, and flagged ones their own.
    """
    values = times.cast(pa.int64())
    is_null = values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None
    micros = (values.fill_null(0) if is_null is not None else values).to_numpy(zero_copy_only=False)
    is_beyond = None
    extent = (int(micros.min()), int(micros.max())) if len(micros) else (0, 0)
    if extent[0] < EARLIEST_US or extent[1] > LATEST_US:
        is_beyond = (micros < EARLIEST_US) | (micros > LATEST_US)
    named = (is_beyond, BEYOND_SLICE), (is_null, NO_SLICE), *flagged
    outside = [(flags, name) for flags, name in named if flags is not None]
    if outside:
        inside = ~np.logical_or.reduce([flags for flags, _ in outside])
        # Times outside the range must not widen the extent that the edges are computed for.
        micros = np.where(inside, micros, micros[inside][0] if inside.any() else 0)
        extent = int(micros.min()), int(micros.max())
    codes, starts = edges.slots(micros, extent)
    for flags, name in outside:
        codes = np.where(flags, len(starts), codes)
        starts = np.append(starts, name)
    return Coded(codes, pa.array(starts))


def _within(times: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Two masks: whether each time is not before the allowed range, and not after it. Null if there is no time."""
    micros = times.cast(pa.int64())
    return pc.greater_equal(micros, EARLIEST_US), pc.less_equal(micros, LATEST_US)


def _runs(shards: npt.NDArray[np.int32], slices: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, int, int]]:
    """(shard, slice, start, stop) for each stretch of rows with the same shard and slice."""
    changes = (shards[1:] != shards[:-1]) | (slices[1:] != slices[:-1])
    edges = [0, *(np.flatnonzero(changes) + 1).tolist(), len(shards)]
    for start, stop in itertools.pairwise(edges):
        yield int(shards[start]), int(slices[start]), start, stop
