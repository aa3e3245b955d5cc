"""Carries out the orders for windows of single keys: reads rows, and computes panes.

Rows of a batch wait for its end, in a temporary file if they are many.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from aion.base.stretches import at_once
from aion.core.ingest.encoding import decode
from aion.core.ingest.key_ranges import Keys, row_hashes
from aion.core.keyed.orders import Arrivals, EmitDroppedRows, ExecuteKeyed, Retract, gap_name
from aion.core.keyed.table import Table, stacked
from aion.core.life.actions import PaneKind
from aion.core.query.plan import Plan
from aion.core.slicing.grid import is_timed
from aion.execute.applying import apply_keyed, decode_all, dropped_events
from aion.execute.grouping import Piece
from aion.execute.held_rows import HeldRows
from aion.execute.keyed_panes import panes, placed, retractions
from aion.execute.rows import TOO_LATE, WindowColumns, pane_rows
from aion.execute.spilling import parts_by_key
from state_backends.format.block import Block
from state_backends.store.protocol import Only, StoredBlock
from state_backends.thresholds import threshold

if TYPE_CHECKING:
    from aion.execute.applying import Seen
    from state_backends.store.attempt import ShardAttempt
    from state_backends.store.codec_pool import CodecPool

BINS = threshold(64, 2)
"""Into how many pieces rows in a file are split. A power of two: the lowest bits of a key's hash say which."""


class SpilledRows:
    """See :class:`aion.core.keyed.waiting.WaitingRows`. A column ``hash`` has the hash of each row's key.

    It holds up to ``limit_bytes``, and about as many again while it writes them to the file in ``folder`` (None: the
    platform's temporary folder). The file has no name, so that even a killed process leaves none behind. Raises OSError
    if it cannot be written or read.
    """

    def __init__(self, limit_bytes: int, folder: str | None) -> None:
        self._limit_bytes, self._folder = limit_bytes, folder
        self._begin()

    def _begin(self) -> None:
        self._rows = self._size_bytes = 0
        self._tables: list[Table] = []
        self._file: _File | None = None

    def __len__(self) -> int:
        return self._rows

    def add(self, rows: Table) -> None:
        self._tables.append(rows)
        self._rows += len(rows)
        self._size_bytes += sum(column.nbytes for column in (*rows.keys, *rows.columns.values()))
        if self._size_bytes > self._limit_bytes:
            self._spill()

    def take(self) -> Iterator[Table]:
        if self._file is not None:
            self._spill()
        tables, file = self._tables, self._file
        self._begin()
        if file is not None:
            yield from file.drain(self._limit_bytes)
        elif tables:
            yield stacked(tables)

    def _spill(self) -> None:
        tables, self._tables, self._size_bytes = self._tables, [], 0
        if tables:
            self._file = self._file or _File(self._folder)
            self._file.write(stacked(tables))


class _File:
    """Rows in a temporary file, by bin."""

    def __init__(self, folder: str | None) -> None:
        self._file = tempfile.TemporaryFile(prefix="aion-spill-", dir=folder)  # noqa: SIM115
        weakref.finalize(self, self._file.close)  # nobody takes the rows of a batch that failed
        self._places: list[list[tuple[int, int]]] = [[] for _ in range(BINS)]
        self._schema: pa.Schema | None = None

    def write(self, rows: Table) -> None:
        bins = rows["hash"] & (BINS - 1)
        edges = np.concatenate(([0], np.cumsum(np.bincount(bins, minlength=BINS)))).tolist()
        batch = _batch(rows.take(np.argsort(bins, kind="stable")))
        self._schema = batch.schema
        for places, (begin, end) in zip(self._places, pairwise(edges), strict=True):
            if begin < end:
                data = batch.slice(begin, end - begin).serialize()
                places.append((self._file.tell(), data.size))
                self._file.write(data)

    def drain(self, piece_bytes: int) -> Iterator[Table]:
        """Yields the rows of some bins at a time, each in the order in which they were written. Deletes the file then.

        A piece has about ``piece_bytes``, or is one bin.
        """
        sizes = [sum(size for _, size in places) for places in self._places]
        with self._file:
            for some in at_once(sizes, piece_bytes):
                parts = [self._read(*place) for places in self._places[some] for place in places]
                if parts:
                    yield stacked(parts)

    def _read(self, at: int, size: int) -> Table:
        self._file.seek(at)
        return _table(pa.ipc.read_record_batch(pa.py_buffer(self._file.read(size)), self._schema))


def _batch(rows: Table) -> pa.RecordBatch:
    names = [*(f"key {number}" for number in range(len(rows.keys))), *rows.columns]
    return pa.RecordBatch.from_arrays([*rows.keys, *map(pa.array, rows.columns.values())], names)


def _table(batch: pa.RecordBatch) -> Table:
    keys = sum(name.startswith("key ") for name in batch.schema.names)
    columns = zip(batch.schema.names[keys:], batch.columns[keys:], strict=True)
    return Table(batch.columns[:keys], {name: column.to_numpy() for name, column in columns})


_WAITING_SHARE = 8  # rows that wait for the end of their batch may take this part of the memory


class KeyedExecutor:
    """Carries out the orders for windows of single keys of one part of a plan, in one shard.

    It holds about ``memory_limit_bytes`` of rows at once. If there are more, it goes through files in ``spill_folder``
    and computes some of the keys at a time. ``seeks``: blocks may be compacted, so the blocks of a few keys can be
    found. ``timed``: notes how long executions take.
    """

    def __init__(
        self,
        plan: Plan,
        attempt: ShardAttempt,
        codec: CodecPool | None,
        *,
        memory_limit_bytes: int,
        spill_folder: str | None,
        seeks: bool,
        timed: Callable[[], AbstractContextManager[Seen]],
    ) -> None:
        self._plan = plan
        self._attempt = attempt
        self._codec = codec
        self._limit = memory_limit_bytes
        self._folder = spill_folder
        self._timed = timed
        self._seeks = seeks and bool(plan.key) and not plan.by_event

    # -- arrivals -----------------------------------------------------------------------------------------

    def waiting(self) -> SpilledRows:
        """Where the rows of one definition wait for the end of a batch."""
        return SpilledRows(self._limit // _WAITING_SHARE, self._folder)

    def arrivals(self, blocks: Sequence[Block]) -> Arrivals | None:
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
        return Arrivals(Table(keys, columns), np.repeat([i for i, _ in timed], sizes))

    def dropped(self, order: EmitDroppedRows, block: Block) -> pa.RecordBatch:
        """A result row for each row of the order, with the window that the row would be alone in.

        For a row that can be in no window this is the empty one at its time.
        """
        batch = decode(block, self._plan.block_schema).take(pa.array(order.rows))
        which = np.arange(len(order.rows))
        windows = WindowColumns(np.full(len(which), order.definition), order.starts_us, order.ends_us)
        reason = TOO_LATE if order.reason is None else order.reason
        if self._plan.layout is None:
            return dropped_events(self._plan, batch, which, windows, which, order.latenesses_us, reason)
        events = batch.column("p0")
        return pane_rows(
            self._plan,
            keys=[batch.column(name) for name in self._plan.block_keys],
            outputs=list(self._plan.layout.lower(self._plan.layout.states(batch)).values()),
            windows=windows,
            which=which,
            kind=pa.repeat(PaneKind.DROPPED.value, len(which)),
            events=events,
            late_events=events if order.reason is None else np.zeros(len(which), np.int64),
            lateness_us=order.latenesses_us,
            reason=reason,
        )

    # -- executions ---------------------------------------------------------------------------------------

    def execute(self, order: ExecuteKeyed | Retract) -> Iterator[pa.RecordBatch]:
        if isinstance(order, Retract):
            yield retractions(self._plan, order)
            return
        keys = self._keys_of(order.windows) if self._seeks else None
        only = None if keys is None else Only(keys=keys.ranges)
        with self._timed() as seen:
            blocks = seen(self._attempt.read(order.slices, blocking=self._plan.blocking, only=only))
            yield from self._over(order, blocks, keys)

    def _over(self, order: ExecuteKeyed, blocks: Iterator[StoredBlock], keys: Keys | None) -> Iterator[pa.RecordBatch]:
        fits = nullcontext() if self._plan.layout is None else self._plan.layout.fits()
        with fits, closing(decode_all(self._plan, blocks, self._codec, keys)) as decoded:
            pieces = (Piece(placed(d.batch, d.seq), True, False, d.mapped) for d in decoded)
            with closing(parts_by_key(self._plan.block_keys, pieces, self._limit, self._folder)) as parts:
                for part in parts:
                    if part.batches:
                        compute = apply_keyed if self._plan.layout is None else panes
                        yield from compute(self._plan, order, HeldRows(*part), self._limit)

    def _keys_of(self, windows: Table) -> Keys:
        keys = pa.Table.from_arrays(windows.keys, self._plan.block_keys)
        return Keys(row_hashes(self._plan, keys))
