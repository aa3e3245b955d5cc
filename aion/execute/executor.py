"""Carries out what the operator orders: reads blocks, computes windows, makes the rows of panes.

The same for LocalOperator and Spark's root; where blocks are kept is the session's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from itertools import chain

import numpy as np
import pyarrow as pa

from aion.core.compaction.blocks import Compact
from aion.core.ingest.block import Block, decode
from aion.core.ingest.key_ranges import Keys, key_names, row_hashes
from aion.core.numbers import sums_by, within
from aion.core.operator.actions import (
    Action,
    Append,
    Arrived,
    BatchEnded,
    BlockFact,
    Destage,
    EmitDropped,
    EmitUntimed,
    Execute,
    Prestage,
    Purge,
    SliceFacts,
    WatermarkAdvanced,
)
from aion.core.operator.keyed.orders import EmitDroppedRows, ExecuteKeyed, Order, Retract
from aion.core.operator.operator import Operator
from aion.core.plan import Plan
from aion.core.slicing.tree import Aggregation
from aion.execute.applying import Decoded, apply_window, decode_all
from aion.execute.block_compactor import BlockCompactor, compaction_bytes
from aion.execute.combining import Loaded, tagged, windows_at_once
from aion.execute.compactions import carry_out
from aion.execute.dropping import dropped, untimed
from aion.execute.keyed import KeyedExecutor
from aion.execute.spilling import MEMORY_LIMIT_BYTES, drained, parts_by_key
from aion.execute.trace import Recorder
from policies.sizing import Execution
from state_backends.store.codec_pool import CodecPool
from state_backends.store.protocol import Only, StoredBlock
from state_backends.store.session import ShardSession

Seen = Callable[[Iterator[StoredBlock]], Iterator[StoredBlock]]
_NO_END = 2**63 - 1


def _unseen(blocks: Iterator[StoredBlock]) -> Iterator[StoredBlock]:
    return blocks


class Executor:
    """One shard's operator at work. Every method yields rows of ``plan.result_schema``.

    Blocks are decoded in the threads of ``codec``, without one in line. With a ``compactor``, blocks are compacted,
    and a window that was executed before reads only what may have changed (docs/compaction.md). For
    ``memory_limit_bytes`` and ``spill_folder`` see :func:`aion.execute.applying.apply_window`. ``aggregation``: how
    windows that overlap are combined of their slices (:mod:`aion.core.slicing.tree`).
    """

    def __init__(
        self,
        plan: Plan,
        operator: Operator,
        session: ShardSession,
        codec: CodecPool | None = None,
        compactor: BlockCompactor | None = None,
        *,
        memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
        spill_folder: str | None = None,
        aggregation: Aggregation = "auto",
    ) -> None:
        self.plan = plan
        self.operator = operator
        self.session = session
        self.codec = codec
        self.compactor = compactor
        self.memory_limit_bytes = memory_limit_bytes
        self.spill_folder = spill_folder
        self.aggregation = aggregation
        self._keyed = [
            KeyedExecutor(
                part,
                session,
                codec,
                memory_limit_bytes=memory_limit_bytes,
                spill_folder=spill_folder,
                seeks=compactor is not None,
                timed=self._timed,
            )
            for part in plan.parts
        ]
        self._keyed_of = {
            number: keyed for keyed, part in zip(self._keyed, plan.parts, strict=True) for number in part.keyed
        }
        # Encoded bytes and seconds of each execution so far: what sizing and idle destaging learn from. Windows
        # that are computed together are one.
        self.executions: list[Execution] = []
        # Notes what comes, without payload, if the user asked for a trace (docs/tuning.md).
        self.recorder: Recorder | None = None

    def advance(self, watermark_us: int) -> Iterator[pa.RecordBatch]:
        """On-time and final executions that this watermark makes due."""
        watermark_us = within(watermark_us)
        if self.recorder is not None:
            self.recorder.advanced(watermark_us)
        yield from self._carry_out(self.operator.handle(WatermarkAdvanced(watermark_us)), ())
        self._dealt()

    def arrive(self, blocks: Sequence[Block]) -> Iterator[pa.RecordBatch]:
        """Keeps what is in time or late, and yields what is too late as dropped rows."""
        slices = self._slices(blocks)
        if self.recorder is not None:
            self.recorder.arrived(blocks, slices)
        facts = [BlockFact(b.header.slice_us, b.header.events, b.size_bytes) for b in blocks]
        arrived = Arrived(facts, [keyed.arrivals(blocks) for keyed in self._keyed], slices)
        yield from self._carry_out(self.operator.handle(arrived), blocks)
        self._dealt()

    def _slices(self, blocks: Sequence[Block]) -> SliceFacts | None:
        """The events of each slice of each block, where a block may hold several."""
        own = [index for index, block in enumerate(blocks) if self.plan.holds(block.header.slice_us)]
        if not self.plan.grid.has_segments or not own:
            return None
        batches = [decode(blocks[index], self.plan.block_schema) for index in own]
        table = pa.Table.from_batches(batches)
        block_of = np.repeat(own, [batch.num_rows for batch in batches])
        slices, events = self.plan.slices_of(table), table.column("p0").to_numpy()
        begins = np.concatenate(([0], np.flatnonzero((np.diff(block_of) != 0) | (np.diff(slices) != 0)) + 1))
        of = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(slices))))
        return SliceFacts(block_of[begins], slices[begins], sums_by(of, events, len(begins)))

    def end_batch(self, *, last: bool = False) -> Iterator[pa.RecordBatch]:
        """Late executions that the trigger asks for; with ``last``, of all windows that have news."""
        yield from self._carry_out(self.operator.handle(BatchEnded(last)), ())

    def load(self) -> None:
        """After a restart: what the operator keeps beside its snapshot."""
        self._keyed[0].load(self.operator.keyed.kept)

    def save(self) -> None:
        """Before the operator's snapshot is taken: keeps what it has beside it."""
        self.operator.next_seq += self._keyed[0].save(self.operator.keyed.save(), self.operator.next_seq)

    def _dealt(self) -> None:
        if self.recorder is not None:
            self.recorder.dealt()

    def _carry_out(self, actions: Sequence[Action | Order], blocks: Sequence[Block]) -> Iterator[pa.RecordBatch]:
        appends = [a for a in actions if isinstance(a, Append)]
        if appends:
            self.session.append((a.seq, a.late, blocks[a.index]) for a in appends)
        for action in actions:
            if isinstance(action, Prestage):
                self._prestage(action.slices, [blocks[a.index] for a in appends])
        yield from untimed(self.plan, [a for a in actions if isinstance(a, EmitUntimed)], blocks)
        for action in actions:
            if isinstance(action, EmitDropped):
                yield from dropped(self.plan, action, blocks)
        for action in actions:
            if isinstance(action, EmitDroppedRows):
                yield self._keyed_of[action.definition].dropped(action, blocks[action.index])
        # On-time executions stand before final ones, and both before what they make free.
        for order in actions:
            if isinstance(order, Execute):
                yield from self._apply(order) if self.plan.layout is None else self._combine_all(order)
        for order in actions:
            if isinstance(order, ExecuteKeyed | Retract):
                yield from self._keyed_of[order.definition].execute(order)
        compactions = [a for a in actions if isinstance(a, Compact)]
        if compactions and self.compactor is not None:
            # By the index as it is now, which is what the compactions were decided from.
            sessions = self.operator.keyed.parts[0]
            owners = sessions.owners if sessions else None
            with (
                nullcontext(self.operator)
                if self.recorder is None
                else self.recorder.compactions(self.operator) as operator
            ):
                carry_out(
                    compactions,
                    operator,
                    self.session,
                    self.compactor,
                    self._decode_all,
                    self._compaction_bytes,
                    owners,
                )
        destage = [s for a in actions if isinstance(a, Destage) for s in a.slices]
        purge = [s for a in actions if isinstance(a, Purge) for s in a.slices]
        if destage or purge:
            self.session.release(destage, purge)

    def _apply(self, order: Execute) -> Iterator[pa.RecordBatch]:
        """One window after the other."""
        for i, execution in enumerate(order):
            window = execution.window
            slices = tuple(s for s in order.slices if window.start_us <= s < window.end_us)
            with self._timed() as seen:
                blocks, keys = self._read(order.some(slice(i, i + 1), slices), seen)
                yield from apply_window(
                    self.plan,
                    execution,
                    blocks,
                    self.codec,
                    keys,
                    memory_limit_bytes=self.memory_limit_bytes,
                    spill_folder=self.spill_folder,
                )

    def due_next(self, watermark_us: int | None) -> tuple[int, ...]:
        """Slices of the windows that will be executed when the watermark gets there."""
        plan = self.operator.plan(watermark_us) if watermark_us is not None else None
        return plan.slices if plan is not None else ()

    # -- what is read -------------------------------------------------------------------------------------

    def _read(self, order: Execute, seen: Seen = _unseen) -> tuple[Iterator[StoredBlock], Keys | None]:
        """The blocks of windows and, if all of them were executed before, which keys have changed since."""
        slices = order.slices
        blocking = self.plan.blocking
        if self.compactor is None or not self.plan.key or bool((order.changed_since < 0).any()):
            return seen(self.session.read(slices, blocking=blocking)), None
        since: dict[int, tuple[int, int]] = {}
        for s, end_us in zip(slices, self.plan.grid.ends(np.array(slices, np.int64)).tolist(), strict=True):
            of = order.changed_since[(order.start_us < end_us) & (order.end_us > s)]
            since[s] = (int(of.min(initial=_NO_END)), _NO_END)
        with closing(self._decode_all(seen(self.session.read(slices, only=Only(since))))) as decoded:
            keys = self._keys_of([d.batch for d in decoded])
        return seen(self.session.read(slices, blocking=blocking, only=Only(keys=keys.ranges))), keys

    def _decode_all(self, blocks: Iterable[StoredBlock], keys: Keys | None = None) -> Generator[Decoded, None, None]:
        return decode_all(self.plan, blocks, self.codec, keys)

    def _prestage(self, slices: Sequence[int], arrived: Sequence[Block]) -> None:
        """What late events announce (paper 3.2): of windows that were executed before, blocks of their keys."""
        if self.compactor is None or not self.plan.key:
            self.session.prestage(slices)
            return
        wanted = frozenset(slices)
        batches = [decode(b, self.plan.block_schema) for b in arrived if b.header.slice_us in wanted]
        self.session.prestage(slices, Only(keys=self._keys_of(batches).ranges))

    def _keys_of(self, batches: Sequence[pa.RecordBatch]) -> Keys:
        table = pa.Table.from_batches(batches, self.plan.block_schema)
        return Keys(row_hashes(self.plan, table.select(key_names(self.plan))))

    @property
    def _compaction_bytes(self) -> int:
        assert self.compactor is not None
        return compaction_bytes(self.memory_limit_bytes, self.compactor.compression)

    @contextmanager
    def _timed(self) -> Iterator[Seen]:
        """Notes the bytes that an execution read, the seconds that it took, and those that it waited."""
        size, waited_s = 0, 0.0

        def seen(blocks: Iterator[StoredBlock]) -> Iterator[StoredBlock]:
            nonlocal size, waited_s
            asked = time.perf_counter()
            for stored in blocks:
                waited_s += time.perf_counter() - asked
                size += stored.block.size_bytes
                yield stored
                asked = time.perf_counter()

        begin = time.perf_counter()
        yield seen
        self.executions.append(Execution(size, time.perf_counter() - begin, waited_s))
        if self.recorder is not None:
            self.recorder.executed(*self.executions[-1])

    # -- partials -----------------------------------------------------------------------------------------

    def _combine_all(self, order: Execute) -> Iterator[pa.RecordBatch]:
        """Of windows that were executed before less is read than of others."""
        before = order.changed_since >= 0
        for among in (~before, before):
            if among.any():
                for some in windows_at_once(self.plan, order.some(among)):
                    yield from self._combine(some)

    def _combine(self, order: Execute) -> Iterator[pa.RecordBatch]:
        """Each segment is read and decoded once, however many of the windows share it."""
        with self._timed() as seen, closing(self._decode_all(*self._read(order, seen))) as decoded:
            for loaded in self._load(decoded):
                yield from loaded.windows(order, self.memory_limit_bytes, self.aggregation)

    def _load(self, decoded: Iterator[Decoded]) -> Iterator[Loaded]:
        """All partials, or if they do not fit in memory those of some keys at a time, by way of files."""
        names, limit = [field.name for field in self.plan.key_fields], self.memory_limit_bytes
        held: list[Decoded] = []
        size = 0
        for block in decoded:
            held.append(block)
            size += block.batch.nbytes
            if size > limit and names:
                batches = (tagged(self.plan, d.batch, d.slice_us, d.seq) for d in chain(drained(held), decoded))
                with closing(parts_by_key(names, batches, limit, self.spill_folder)) as parts:
                    yield from (Loaded.of_tagged(self.plan, part) for part in parts if part)
                return
        yield Loaded.of_blocks(self.plan, held)
