"""Carries out the orders for windows of single keys: reads rows, and computes panes.

Rows of a batch wait for its end, in a temporary file if they are many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from aion.core.ingest.encoding import decode
from aion.core.ingest.key_ranges import Keys, row_hashes
from aion.core.keyed.orders import EmitDroppedRows, ExecuteKeyed, Retract, RowArrivals, gap_name
from aion.core.keyed.table import Table
from aion.core.life.actions import PaneKind
from aion.core.query.plan import Plan
from aion.core.slicing.grid import is_timed
from aion.execute.panes.applying import apply_keyed, decode_all, dropped_events
from aion.execute.panes.keyed_panes import panes, placed, retractions
from aion.execute.panes.rows import TOO_LATE, Dropped, RowFacts, WindowColumns, pane_rows
from aion.execute.spill.grouping import Piece
from aion.execute.spill.held_rows import HeldRows
from aion.execute.spill.spilling import Room, partitions_by_key
from aion.execute.spill.waiting import SpilledRows, WaitingOrders
from state_backends.format.block import Block
from state_backends.store.protocol import Only, StoredBlock

if TYPE_CHECKING:
    from aion.execute.panes.applying import Seen
    from state_backends.store.attempt import ShardAttempt
    from state_backends.store.codec_pool import CodecPool

_WAITING_SHARE = 8  # what waits for the end of its batch may take this part of the memory


class KeyedExecutor:
    """Carries out the orders for windows of single keys of one part of a plan, in one shard.

    If ``room`` is not enough for the rows, it goes through files and computes some of the keys at a time. ``seeks``:
    blocks may be compacted, so the blocks of a few keys can be found. ``timed``: notes how long executions take.
    """

    def __init__(
        self,
        plan: Plan,
        attempt: ShardAttempt,
        codec: CodecPool | None,
        room: Room,
        *,
        seeks: bool,
        timed: Callable[[], AbstractContextManager[Seen]],
    ) -> None:
        self._plan = plan
        self._attempt = attempt
        self._codec = codec
        self._room = room
        self._timed = timed
        self._seeks = seeks and bool(plan.key) and not plan.by_event

    def waiting(self) -> SpilledRows:
        """Where the rows of one definition wait for the end of a batch."""
        return SpilledRows(self._room.share(_WAITING_SHARE))

    def orders(self, *orders: ExecuteKeyed) -> WaitingOrders:
        """These orders, which are carried out together, and a place for more of their kind and definition."""
        waiting = WaitingOrders(self._room.share(_WAITING_SHARE))
        for order in orders:
            waiting.add(order)
        return waiting

    # -- arrivals -----------------------------------------------------------------------------------------

    def arrivals(self, blocks: Sequence[Block]) -> RowArrivals | None:
        """The rows that windows of single keys depend on. None if there are no such windows or no such rows."""
        plan = self._plan
        own = [(i, b) for i, b in enumerate(blocks) if plan.holds(b.header.slice_us)] if plan.keyed else []
        timed = [(i, b) for i, b in own if is_timed(b.header.slice_us)]
        if not timed:
            return None
        batches = [decode(block, plan.block_schema) for _, block in timed]
        table = pa.Table.from_batches(batches)
        first, last = plan.instants(table)
        if plan.layout is None:
            events = np.ones(table.num_rows, np.int64)
            marks = np.concatenate([plan.marks(batch) for batch in batches])
        else:
            events = table.column("p0").to_numpy()
            marks = plan.marks(table)
        sizes = [batch.num_rows for batch in batches]
        columns = {
            "first": first,
            "last": last,
            "events": events,
            "row": np.concatenate([np.arange(n) for n in sizes]),
            "mark": marks,
            **{gap_name(number): gaps for number, gaps in plan.gaps(table).items()},
        }
        keys = [table.column(name).combine_chunks() for name in plan.block_keys]
        return RowArrivals(Table(keys, columns), np.repeat([i for i, _ in timed], sizes))

    def dropped(self, order: EmitDroppedRows, block: Block) -> pa.RecordBatch:
        """A result row for each row of the order, with the window that the row would be alone in.

        For a row that can be in no window this is the empty one at its time.
        """
        batch = decode(block, self._plan.block_schema).take(pa.array(order.rows))
        which = np.arange(len(order.rows))
        windows = WindowColumns(np.full(len(which), order.definition), order.starts_us, order.ends_us)
        reason = TOO_LATE if order.reason is None else order.reason
        if self._plan.layout is None:
            return dropped_events(self._plan, batch, which, windows, order.latenesses_us, reason)
        events = batch.column("p0")
        late_events = events if order.reason is None else np.zeros(len(windows.definition), np.int64)
        return pane_rows(
            self._plan,
            [batch.column(name) for name in self._plan.block_keys],
            windows,
            RowFacts(PaneKind.DROPPED, events, late_events),
            list(self._plan.layout.lower(self._plan.layout.states(batch)).values()),
            Dropped(reason, order.latenesses_us),
        )

    # -- executions ---------------------------------------------------------------------------------------

    def retract(self, order: Retract) -> pa.RecordBatch:
        return retractions(self._plan, order)

    def execute(self, orders: WaitingOrders) -> Iterator[pa.RecordBatch]:
        order = orders.in_memory
        keys = self._keys_of(order.windows) if self._seeks and order is not None else None
        only = None if keys is None else Only(keys=keys.ranges)
        with self._timed() as seen:
            blocks = seen(self._attempt.read(orders.slices, blocking=self._plan.blocking, only=only))
            yield from self._over(orders, blocks, keys)

    def _over(
        self, orders: WaitingOrders, blocks: Iterator[StoredBlock], keys: Keys | None
    ) -> Iterator[pa.RecordBatch]:
        fits = nullcontext() if self._plan.layout is None else self._plan.layout.fits()
        compute = apply_keyed if self._plan.layout is None else panes
        names, split = self._plan.block_keys, orders.in_memory is None
        with fits, closing(decode_all(self._plan, blocks, self._codec, keys)) as decoded:
            pieces = (Piece(placed(d.batch, d.seq), True, False, d.mapped) for d in decoded)
            with closing(partitions_by_key(names, pieces, self._room, split=split)) as partitions:
                for partition in partitions:
                    if partition.batches and len(order := orders.of(partition.files)):
                        yield from compute(
                            self._plan, order, HeldRows(partition.batches, partition.forget), self._room.limit_bytes
                        )

    def _keys_of(self, windows: Table) -> Keys:
        keys = pa.Table.from_arrays(windows.keys, self._plan.block_keys)
        return Keys(row_hashes(self._plan, keys))
