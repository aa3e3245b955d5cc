"""Carries out what the operator orders: reads blocks, computes windows, makes the rows of panes.

The same for LocalOperator and Spark's root; where blocks are kept is the session's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from aion.actions import (
    Action,
    Append,
    Arrived,
    BatchEnded,
    BlockFact,
    Destage,
    EmitDropped,
    Execute,
    Kind,
    Prestage,
    Purge,
    WatermarkAdvanced,
)
from aion.applying import apply_window, decode_all, dropped_events
from aion.operator import Operator
from aion.plan import Plan
from aion.rows import pane_rows
from aion.spilling import MEMORY_LIMIT_BYTES
from state_backends.block import Block, decode
from state_backends.codec_pool import CodecPool
from state_backends.store import StoredBlock

# Windows whose partials are combined in one pass: enough to share slices, few enough to stay small.
WINDOWS_AT_ONCE = 64


class Session(Protocol):
    """Somebody's turn at the blocks of one shard."""

    def append(self, blocks: Iterable[tuple[int, bool, Block]]) -> None:
        """Keeps (seq, late, block)."""

    def read(self, slices: Sequence[int], *, blocking: bool = False) -> Iterator[StoredBlock]:
        """Blocks of slices, lazily, by slice and in the order of arrival."""

    def prestage(self, slices: Sequence[int]) -> None:
        """Slices that will be read soon."""

    def release(self, destage: Sequence[int], purge: Sequence[int]) -> None:
        """Slices whose memory may go, and slices that nobody needs any more."""


class Executor:
    """One shard's operator at work. Every method yields rows of ``plan.result_schema``.

    Blocks are decoded in the threads of ``codec``, without one in line. For ``memory_limit_bytes`` and
    ``spill_folder`` see :func:`aion.applying.apply_window`.
    """

    def __init__(
        self,
        plan: Plan,
        operator: Operator,
        session: Session,
        codec: CodecPool | None = None,
        *,
        memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
        spill_folder: str | None = None,
    ) -> None:
        self.plan = plan
        self.operator = operator
        self.session = session
        self.codec = codec
        self.memory_limit_bytes = memory_limit_bytes
        self.spill_folder = spill_folder
        # Encoded bytes and seconds of each execution so far: what sizing and idle destaging learn from.
        self.executions: list[tuple[int, float]] = []

    def advance(self, watermark_us: int) -> Iterator[pa.RecordBatch]:
        """On-time and final executions that this watermark makes due."""
        yield from self._carry_out(self.operator.handle(WatermarkAdvanced(watermark_us)), ())

    def arrive(self, blocks: Sequence[Block]) -> Iterator[pa.RecordBatch]:
        """Keeps what is in time or late, and yields what is too late as dropped rows."""
        facts = [BlockFact(b.header.slice_us, b.header.events, b.size_bytes) for b in blocks]
        yield from self._carry_out(self.operator.handle(Arrived(facts)), blocks)

    def end_batch(self, *, last: bool = False) -> Iterator[pa.RecordBatch]:
        """Late executions that the trigger asks for; with ``last``, of all windows that have news."""
        yield from self._carry_out(self.operator.handle(BatchEnded(last)), ())

    def _carry_out(self, actions: Sequence[Action], blocks: Sequence[Block]) -> Iterator[pa.RecordBatch]:
        appends = [a for a in actions if isinstance(a, Append)]
        if appends:
            self.session.append((a.seq, a.late, blocks[a.index]) for a in appends)
        for action in actions:
            if isinstance(action, Prestage):
                self.session.prestage(action.slices)
        for action in actions:
            if isinstance(action, EmitDropped):
                yield self._dropped(action, blocks[action.index])
        # On-time executions stand before final ones, and both before what they make free.
        executes = [a for a in actions if isinstance(a, Execute)]
        if self.plan.layout is not None:
            for start in range(0, len(executes), WINDOWS_AT_ONCE):
                yield from self._combine(executes[start : start + WINDOWS_AT_ONCE])
        else:
            for execute in executes:
                with self._timed() as seen:
                    yield from apply_window(
                        self.plan,
                        execute,
                        seen(self.session.read(execute.slices, blocking=self.plan.blocking)),
                        self.codec,
                        memory_limit_bytes=self.memory_limit_bytes,
                        spill_folder=self.spill_folder,
                    )
        destage = [s for a in actions if isinstance(a, Destage) for s in a.slices]
        purge = [s for a in actions if isinstance(a, Purge) for s in a.slices]
        if destage or purge:
            self.session.release(destage, purge)

    def due_next(self, watermark_us: int | None) -> tuple[int, ...]:
        """Slices of the windows that will be executed when the watermark gets there."""
        plan = self.operator.plan(watermark_us) if watermark_us is not None else None
        return plan.slices if plan is not None else ()

    @contextmanager
    def _timed(self) -> Iterator[Callable[[Iterator[StoredBlock]], Iterator[StoredBlock]]]:
        """Notes the bytes that an execution read and the seconds that it took."""
        size = 0

        def seen(blocks: Iterator[StoredBlock]) -> Iterator[StoredBlock]:
            nonlocal size
            for stored in blocks:
                size += stored.block.size_bytes
                yield stored

        begin = time.perf_counter()
        yield seen
        self.executions.append((size, time.perf_counter() - begin))

    # -- partials -----------------------------------------------------------------------------------------

    def _combine(self, executes: Sequence[Execute]) -> Iterator[pa.RecordBatch]:
        """Each slice is read and decoded once, however many of the windows share it."""
        layout = self.plan.layout
        assert layout is not None
        slices = sorted({s for e in executes for s in e.slices})
        table, of_slice, seqs = self._load(slices)
        if table is None:
            return
        # The rows of each window: its slices stand next to each other.
        begins = np.searchsorted(of_slice, [e.slices[0] for e in executes], side="left")
        ends = np.searchsorted(of_slice, [e.slices[-1] for e in executes], side="right")
        lengths = ends - begins
        window_of = np.repeat(np.arange(len(executes)), lengths)
        rows = _ranges(begins, lengths)
        if len(rows) != table.num_rows or bool((rows[1:] <= rows[:-1]).any()):
            table, seqs = table.take(pa.array(rows)), seqs[rows]
        late = seqs >= np.array([e.late_from for e in executes])[window_of]
        events = table.column("p0").to_numpy()
        table = table.append_column("window", pa.array(window_of))
        table = table.append_column("late", pa.array(np.where(late, events, 0)))
        table = table.append_column("seq", pa.array(seqs))
        keys = ["window", *(f.name for f in self.plan.key_fields)]
        combined = layout.combine(keys, table, {"late": "sum", "seq": "max"})
        changed = (
            combined.column("seq").to_numpy()
            > np.array([e.changed_since for e in executes])[combined.column("window").to_numpy()]
        )
        if not changed.all():
            combined = combined.filter(pa.array(changed))
        yield self._panes(combined, executes)

    def _load(self, slices: Sequence[int]) -> tuple[pa.Table | None, Any, Any]:
        """Partials of the slices with, per row, its slice and its block's seq."""
        decoded = list(decode_all(self.plan, self.session.read(slices), self.codec))
        if not decoded:
            return None, None, None
        lengths = [d.batch.num_rows for d in decoded]
        table = pa.Table.from_batches([d.batch for d in decoded])
        return table, np.repeat([d.slice_us for d in decoded], lengths), np.repeat([d.seq for d in decoded], lengths)

    def _panes(self, combined: pa.Table, executes: Sequence[Execute]) -> pa.RecordBatch:
        layout = self.plan.layout
        assert layout is not None
        which = combined.column("window").to_numpy()
        return pane_rows(
            self.plan,
            keys=[combined.column(f.name) for f in self.plan.key_fields],
            outputs=list(layout.lower(combined).values()),
            windows=[e.window for e in executes],
            which=which,
            pane=np.array([e.pane for e in executes], np.int32)[which],
            kind=pa.array([e.kind.value for e in executes]).take(pa.array(which)),
            events=combined.column("p0"),
            late_events=combined.column("late"),
        )

    # -- too late -----------------------------------------------------------------------------------------

    def _dropped(self, action: EmitDropped, block: Block) -> pa.RecordBatch:
        batch = decode(block, self.plan.block_schema)
        if self.plan.layout is None:
            return dropped_events(self.plan, action, batch)
        partials = pa.Table.from_batches([batch])
        late = action.window is not None
        return pane_rows(
            self.plan,
            keys=[partials.column(f.name) for f in self.plan.key_fields],
            outputs=list(self.plan.layout.lower(partials).values()),
            windows=[action.window],
            which=np.zeros(partials.num_rows, np.int64),
            kind=pa.repeat(Kind.DROPPED.value, partials.num_rows),
            events=partials.column("p0"),
            late_events=partials.column("p0") if late else pa.array(np.zeros(partials.num_rows, np.int64)),
            lateness_us=action.lateness_us,
            reason=action.reason,
        )


def _ranges(begins: Any, lengths: Any) -> Any:
    """``begins[i], begins[i] + 1, ...`` of each length, one after the other."""
    if not len(lengths) or not lengths.sum():
        return np.zeros(0, np.int64)
    offsets = np.repeat(begins - np.concatenate(([0], np.cumsum(lengths)[:-1])), lengths)
    return np.arange(lengths.sum()) + offsets
