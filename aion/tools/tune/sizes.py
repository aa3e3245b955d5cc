"""The contents of blocks in a replay: nobody looks at rows, and only time goes by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import cycle
from statistics import median

import numpy as np
import pyarrow as pa

from aion.core.compaction import Compact
from aion.core.ingest.key_ranges import MOST_KEYS, TOP, Keys, equal_ranges
from aion.core.life.actions import EmitDropped, EmitUntimed, Execute, SliceFacts
from aion.core.query.plan import Plan
from aion.execute.panes.applying import Seen
from aion.execute.panes.block_compactor import MOST_BYTES
from aion.execute.panes.keyed import KeyedExecutor
from aion.execute.record.trace import Cost
from aion.execute.spill.spilling import Room
from aion.tools.tune.disk import SimulatedDisk
from aion.tools.tune.files import sized
from state_backends.format.block import Block, Compacted
from state_backends.store.attempt import ShardAttempt
from state_backends.store.protocol import StoredBlock

_EVERYTHING = Keys(np.arange(MOST_KEYS + 1))


class SizesOnly:
    """Stands for :class:`aion.execute.panes.contents.RowContents`.

    Executions take ``processing`` and compactions ``compaction``. ``ratio``: the part that is left of as many bytes
    when they are compacted. ``target_bytes``: the size of new blocks. ``compaction_bytes``: of old blocks at once.
    """

    def __init__(
        self,
        plan: Plan,
        disk: SimulatedDisk,
        processing: Cost,
        compaction: Cost,
        ratio: Callable[[int], float],
        *,
        target_bytes: int,
        compaction_bytes: int,
    ) -> None:
        self.compacts = (plan.layout is not None or bool(plan.key)) and not plan.by_event
        self.compaction_bytes = compaction_bytes
        self.facts: SliceFacts | None = None
        """The answer of :meth:`slices` for the blocks that arrive next."""
        self._plan = plan
        self._disk = disk
        self._processing = processing
        self._times = cycle(processing.times)
        self._compaction = compaction
        self._ratio = ratio
        self._piece_bytes = min(target_bytes, MOST_BYTES)
        self._looked_at_bytes = 0  # for keys, since the last panes

    def clock(self) -> float:
        return self._disk.now()

    def slices(self, blocks: Sequence[Block]) -> SliceFacts | None:
        return self.facts

    def keyed(
        self, part: Plan, attempt: ShardAttempt, timed: Callable[[], AbstractContextManager[Seen]]
    ) -> KeyedExecutor:
        """It has nothing to do: no trace has windows of single keys."""
        return KeyedExecutor(part, attempt, None, Room(0), seeks=False, timed=timed)

    def keys(self, blocks: Iterator[StoredBlock]) -> Keys:
        found = list(self._worked_on(blocks, self._processing))
        self._looked_at_bytes += sum(stored.block.size_bytes for stored in found)
        return self.keys_of_arrived(found)

    def keys_of_arrived(self, blocks: Sequence[StoredBlock]) -> Keys:
        """Returns where the keys of blocks lie among all: anywhere, but always in the same places for the same
        block.
        """
        rows: Counter[int] = Counter()
        for stored in blocks:
            rows[stored.arrival] += stored.block.header.rows
        if rows.total() > MOST_KEYS:
            return _EVERYTHING
        hashes = [np.random.default_rng(seq).integers(0, TOP, rows[seq], endpoint=True) for seq in sorted(rows)]
        return Keys(np.concatenate(hashes) if hashes else np.zeros(0, np.int64))

    def panes(self, order: Execute, blocks: Iterator[StoredBlock], keys: Keys | None) -> Iterator[pa.RecordBatch]:
        size = sum(stored.block.size_bytes for stored in self._worked_on(blocks, self._processing))
        size, self._looked_at_bytes = size + self._looked_at_bytes, 0
        # Each execution is as much slower or faster than its line as one of the recorded ones was.
        line_s = size / self._processing.bytes_per_s
        self._pass(max(0.0, next(self._times) * (line_s + self._processing.fixed_s) - line_s))
        return iter(())

    def dropped(self, order: EmitDropped, blocks: Sequence[Block]) -> Iterator[pa.RecordBatch]:
        return iter(())

    def untimed(self, orders: Sequence[EmitUntimed], blocks: Sequence[Block]) -> Iterator[pa.RecordBatch]:
        return iter(())

    def compacted(
        self, group: Mapping[int, Compact], blocks: Iterator[StoredBlock], part: tuple[int, int] | None, owners: object
    ) -> list[tuple[Compact, Block]]:
        low, high = (0, TOP) if part is None else part
        sizes, rows = dict.fromkeys(group, 0.0), dict.fromkeys(group, 0.0)
        for stored in self._worked_on(blocks, self._compaction):
            header = stored.block.header
            share = _share(header.compacted, low, high)
            sizes[header.slice_us] += share * stored.block.size_bytes
            rows[header.slice_us] += share * header.rows
        self._pass(self._compaction.fixed_s * len(group))
        made = []
        for slice_us, compaction in sorted(group.items()):
            size = max(1, round(sizes[slice_us] * self._ratio(compaction.size_bytes)))
            pieces = max(1, round(size / self._piece_bytes))
            for i, (first, last) in enumerate(equal_ranges(pieces)):
                compacted = Compacted(compaction.until, _within(first, low, high), _within(last, low, high))
                own, own_rows = (_piece(whole, i, pieces) for whole in (size, round(rows[slice_us])))
                made.append((compaction, sized(slice_us, own, compacted, rows=own_rows)))
        return made

    def _worked_on(self, blocks: Iterator[StoredBlock], cost: Cost) -> Iterator[StoredBlock]:
        """Yields the same blocks. After each, as much time goes by as it takes to work on it."""
        for stored in blocks:
            yield stored
            self._pass(stored.block.size_bytes / cost.bytes_per_s)

    def _pass(self, seconds: float) -> None:
        self._disk.pass_to(self._disk.now() + seconds)


def compaction_ratio(compactions: Sequence[tuple[int, int]]) -> Callable[[int], float]:
    """Returns the part of compacted bytes that is left: the median of recorded compactions of about that size.

    ``compactions``: bytes before and after. Sizes within a factor of two count as the same.
    """
    by_class: dict[int, list[float]] = {}
    for size, made in compactions:
        by_class.setdefault(size.bit_length(), []).append(made / size)
    ratios = {size_class: median(found) for size_class, found in by_class.items()}

    def ratio(size: int) -> float:
        if not ratios:
            return 1.0
        return ratios[min(ratios, key=lambda c: (abs(c - size.bit_length()), c))]

    return ratio


def _share(compacted: Compacted | None, low: int, high: int) -> float:
    """Returns the part of a block whose keys lie in this range of hashes."""
    first, last = (0, TOP) if compacted is None else (compacted.low, compacted.high)
    return max(0, min(last, high) - max(first, low) + 1) / (last - first + 1)


def _within(hash_: int, low: int, high: int) -> int:
    """Returns the place in a range that corresponds to this one among all hashes."""
    return low + hash_ * (high - low) // TOP


def _piece(whole: int, i: int, pieces: int) -> int:
    return whole * (i + 1) // pieces - whole * i // pieces
