"""What an executor does with the contents of blocks: it finds keys, computes panes, drops rows and compacts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from itertools import chain
from typing import Protocol

import numpy as np
import pyarrow as pa

from aion.base.numbers import sums_by
from aion.core.compaction import Compact
from aion.core.ingest.encoding import decode
from aion.core.ingest.key_ranges import Keys, key_names, row_hashes
from aion.core.life.actions import EmitDropped, EmitUntimed, Execute, PaneKind, SliceFacts
from aion.core.query.plan import Plan
from aion.core.slicing.tree import Aggregation, ranges
from aion.execute.panes.applying import Decoded, Seen, apply_window, decode_all, dropped_events, newest_panes
from aion.execute.panes.block_compactor import BlockCompactor, Owners, compaction_bytes
from aion.execute.panes.combining import Loaded, tagged
from aion.execute.panes.keyed import KeyedExecutor
from aion.execute.panes.rows import LEFT_OUT, TOO_LATE, Dropped, RowFacts, WindowColumns, pane_rows
from aion.execute.spill.grouping import Piece
from aion.execute.spill.spilling import ROOM, Room, drained, partitions_by_key
from state_backends.format.block import Block
from state_backends.store.attempt import ShardAttempt
from state_backends.store.codec_pool import CodecPool
from state_backends.store.protocol import StoredBlock
from state_backends.thresholds import threshold

_BYTES_AT_ONCE = threshold(64 << 20, 256)
_ROWS_AT_ONCE = threshold(1 << 20)
_WINDOW = "\0window"
NO_WINDOW = WindowColumns(*(np.array([number]) for number in (-1, 0, 0)))


def dropped(plan: Plan, order: EmitDropped, blocks: Sequence[Block]) -> Iterator[pa.RecordBatch]:
    """The rows for events that came too late for the windows of the order.

    For kept events, there is a row for each event and window. For partials, there is a row for each key and window,
    over all blocks: Spark's tasks decide which events share a block, and that must not show in the output.
    """
    batches = [decode(blocks[index], plan.block_schema) for index in order.blocks]
    windows = WindowColumns(order.definition, order.start_us, order.end_us)
    reason = LEFT_OUT if order.definition[0] < 0 else TOO_LATE
    if plan.layout is None:
        for index, batch in zip(order.blocks, batches, strict=True):
            slice_us = blocks[index].header.slice_us  # a block of kept events holds a single slice
            own = np.flatnonzero((order.start_us <= slice_us) & (slice_us < order.end_us))
            # Each window repeats the text of the events.
            step = max(_BYTES_AT_ONCE // max(batch.nbytes, 1), 1)
            for begin in range(0, len(own), step):
                shown = own[begin : begin + step]
                which, rows = np.repeat(shown, batch.num_rows), np.tile(np.arange(batch.num_rows), len(shown))
                yield dropped_events(plan, batch, rows, windows.take(which), order.lateness_us[which], reason)
        return
    table = pa.Table.from_batches(batches)
    slices = plan.slices_of(table)
    if slices is None:
        counts = [batch.num_rows for batch in batches]
        slices = np.repeat([blocks[index].header.slice_us for index in order.blocks], counts)
    by_slice = np.argsort(slices, kind="stable")
    begins, ends = (np.searchsorted(slices[by_slice], us) for us in (order.start_us, order.end_us))
    upto, start = np.cumsum(ends - begins), 0
    while start < len(upto):
        done = int(upto[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(upto, done + _ROWS_AT_ONCE, side="right")))
        some = slice(start, stop)
        lengths = (ends - begins)[some]
        rows = by_slice[ranges(begins[some], lengths)]
        which = np.repeat(np.arange(start, stop), lengths)
        yield _partials(plan, table.take(pa.array(rows)), windows, which, order, reason)
        start = stop


def untimed(plan: Plan, orders: Sequence[EmitUntimed], blocks: Sequence[Block]) -> Iterator[pa.RecordBatch]:
    """The rows for events without a time in range: one for each kept event, or one for each key and reason."""
    for reason in sorted({order.reason for order in orders}):
        batches = [decode(blocks[order.index], plan.block_schema) for order in orders if order.reason == reason]
        if plan.layout is None:
            for batch in batches:
                rows, none = np.arange(batch.num_rows), np.zeros(batch.num_rows, np.int64)
                yield dropped_events(plan, batch, rows, NO_WINDOW.take(none), None, reason)
        else:
            table = pa.Table.from_batches(batches)
            yield _partials(plan, table, NO_WINDOW, np.zeros(table.num_rows, np.int64), None, reason)


def _partials(
    plan: Plan,
    rows: pa.Table,
    windows: WindowColumns,
    which: np.ndarray,
    order: EmitDropped | None,
    reason: str,
) -> pa.RecordBatch:
    """A result row for each key and window of these partials. Row i of ``rows`` belongs to window ``which[i]``."""
    assert plan.layout is not None
    keys = [field.name for field in plan.key_fields]
    states = plan.layout.combine([_WINDOW, *keys], rows.append_column(_WINDOW, pa.array(which)))
    which, events = states.column(_WINDOW).to_numpy(), states.column("p0")
    return pane_rows(
        plan,
        [states.column(name) for name in keys],
        windows.take(which),
        RowFacts(PaneKind.DROPPED, events, events if order is not None else np.zeros(len(which), np.int64)),
        list(plan.layout.lower(plan.layout.states(states)).values()),
        Dropped(reason, None if order is None else order.lateness_us[which]),
    )


class Contents(Protocol):
    """Whatever an executor cannot learn from the sizes and numbers of blocks.

    :class:`RowContents` looks at the rows. A replay of ``aion tune`` has no rows and only lets time go by
    (:class:`aion.tools.tune.sizes.SizesOnly`).
    """

    @property
    def compacts(self) -> bool:
        """Whether blocks are compacted. Then the blocks of a few keys can be found."""

    @property
    def compaction_bytes(self) -> int:
        """How many encoded bytes are compacted at once."""

    def clock(self) -> float:
        """Seconds, by which executions are timed."""

    def slices(self, blocks: Sequence[Block]) -> SliceFacts | None:
        """The events of each slice of each block. Asked only if a block may hold several slices."""

    def keys(self, blocks: Iterator[StoredBlock]) -> Keys:
        """The keys in blocks of the store."""

    def keys_of_arrived(self, blocks: Sequence[StoredBlock]) -> Keys:
        """The keys in blocks that just arrived."""

    def panes(self, order: Execute, blocks: Iterator[StoredBlock], keys: Keys | None) -> Iterator[pa.RecordBatch]:
        """The rows of windows that are computed together.

        ``keys``: see :func:`aion.execute.panes.applying.decode_all`.
        """

    def dropped(self, order: EmitDropped, blocks: Sequence[Block]) -> Iterator[pa.RecordBatch]:
        """The rows for events that came too late."""

    def untimed(self, orders: Sequence[EmitUntimed], blocks: Sequence[Block]) -> Iterator[pa.RecordBatch]:
        """The rows for events without a time."""

    def compacted(
        self,
        group: Mapping[int, Compact],
        blocks: Iterator[StoredBlock],
        part: tuple[int, int] | None,
        owners: Owners | None,
    ) -> list[tuple[Compact, Block]]:
        """New blocks for those of a group. ``part``: only the keys with hashes in this range."""

    def keyed(
        self, part: Plan, attempt: ShardAttempt, timed: Callable[[], AbstractContextManager[Seen]]
    ) -> KeyedExecutor:
        """What carries out the orders for the windows of single keys of a part of the plan."""


class RowContents:
    """The contents of blocks are their rows.

    Blocks are decoded in the threads of ``codec``; without one, in the caller's. With a ``compactor``, blocks are
    compacted, and a window that was executed before reads only what may have changed (docs/inside/window-costs.md).
    ``room``: of the rows that are worked on. ``aggregation``: how windows that overlap are combined from their slices
    (:mod:`aion.core.slicing.tree`).
    """

    def __init__(
        self,
        plan: Plan,
        codec: CodecPool | None = None,
        compactor: BlockCompactor | None = None,
        room: Room = ROOM,
        *,
        aggregation: Aggregation = "auto",
    ) -> None:
        self._plan = plan
        self._codec = codec
        self._compactor = compactor
        self._room = room
        self._aggregation = aggregation

    clock = staticmethod(time.perf_counter)

    @property
    def compacts(self) -> bool:
        return self._compactor is not None

    @property
    def compaction_bytes(self) -> int:
        assert self._compactor is not None
        return compaction_bytes(self._room.limit_bytes, self._compactor.compression)

    def keyed(
        self, part: Plan, attempt: ShardAttempt, timed: Callable[[], AbstractContextManager[Seen]]
    ) -> KeyedExecutor:
        return KeyedExecutor(part, attempt, self._codec, self._room, seeks=self.compacts, timed=timed)

    def slices(self, blocks: Sequence[Block]) -> SliceFacts | None:
        own = [index for index, block in enumerate(blocks) if self._plan.holds(block.header.slice_us)]
        if not own:
            return None
        batches = [decode(blocks[index], self._plan.block_schema) for index in own]
        table = pa.Table.from_batches(batches)
        block_of = np.repeat(own, [batch.num_rows for batch in batches])
        slices, events = self._plan.slices_of(table), table.column("p0").to_numpy()
        begins = np.concatenate(([0], np.flatnonzero((np.diff(block_of) != 0) | (np.diff(slices) != 0)) + 1))
        stretch_of = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(slices))))
        return SliceFacts(block_of[begins], slices[begins], sums_by(stretch_of, events, len(begins)))

    # -- keys ---------------------------------------------------------------------------------------------

    def keys(self, blocks: Iterator[StoredBlock]) -> Keys:
        with closing(decode_all(self._plan, blocks, self._codec)) as decoded:
            return self._keys_of([d.batch for d in decoded])

    def keys_of_arrived(self, blocks: Sequence[StoredBlock]) -> Keys:
        return self._keys_of([decode(stored.block, self._plan.block_schema) for stored in blocks])

    def _keys_of(self, batches: Sequence[pa.RecordBatch]) -> Keys:
        table = pa.Table.from_batches(batches, self._plan.block_schema)
        return Keys(row_hashes(self._plan, table.select(key_names(self._plan))))

    # -- panes --------------------------------------------------------------------------------------------

    def panes(self, order: Execute, blocks: Iterator[StoredBlock], keys: Keys | None) -> Iterator[pa.RecordBatch]:
        if self._plan.layout is None:
            (execution,) = order
            compute = apply_window if self._plan.updates is None else newest_panes
            yield from compute(self._plan, execution, blocks, self._codec, keys, self._room)
            return
        with self._plan.layout.fits(), closing(decode_all(self._plan, blocks, self._codec, keys)) as decoded:
            for loaded in self._load(decoded):
                yield from loaded.windows(order, self._room.limit_bytes, self._aggregation)

    def _load(self, decoded: Iterable[Decoded]) -> Iterator[Loaded]:
        """All partials at once. If they do not fit in memory, those of some keys at a time, through files."""
        decoded = iter(decoded)
        names = [field.name for field in self._plan.key_fields]
        held: list[Decoded] = []
        size = 0
        for block in decoded:
            held.append(block)
            size += block.batch.nbytes
            if size > self._room.limit_bytes and names:
                rows = (tagged(self._plan, d.batch, d.slice_us, d.seq) for d in chain(drained(held), decoded))
                pieces = (Piece(batch, True, False) for batch in rows)
                with closing(partitions_by_key(names, pieces, self._room)) as partitions:
                    yield from (
                        Loaded.of_tagged(self._plan, partition.batches) for partition in partitions if partition.batches
                    )
                return
        yield Loaded.of_blocks(self._plan, [block[:3] for block in held])

    # -- compaction ---------------------------------------------------------------------------------------

    def compacted(
        self,
        group: Mapping[int, Compact],
        blocks: Iterator[StoredBlock],
        part: tuple[int, int] | None,
        owners: Owners | None,
    ) -> list[tuple[Compact, Block]]:
        compactor = self._compactor
        assert compactor is not None
        with closing(decode_all(self._plan, blocks, self._codec)) as decoded:
            rows = [d if part is None else compactor.within(d, *part) for d in decoded]
        return list(compactor.compact(group, rows, owners))

    # -- too late -----------------------------------------------------------------------------------------

    def dropped(self, order: EmitDropped, blocks: Sequence[Block]) -> Iterator[pa.RecordBatch]:
        return dropped(self._plan, order, blocks)

    def untimed(self, orders: Sequence[EmitUntimed], blocks: Sequence[Block]) -> Iterator[pa.RecordBatch]:
        return untimed(self._plan, orders, blocks)
