"""Compacts the blocks of a slice into one run: combined by key, sorted by the key's hash, cut to size. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aion.aggregates.groups import number
from aion.aggregates.values import as_batch, combined
from aion.base.numbers import at_once
from aion.core.compaction import Compact
from aion.core.ingest.builder import parts_of
from aion.core.ingest.encoding import encode_rows
from aion.core.ingest.key_ranges import row_hashes
from aion.core.keyed.table import Ints, Table
from aion.core.query.plan import SLICE, Plan
from aion.execute.spill.held_rows import ARRAY_BYTES
from state_backends.format.block import Block, Codec, Compacted, Compression
from state_backends.thresholds import threshold

if TYPE_CHECKING:
    from aion.execute.panes.applying import Decoded

MOST_BYTES = threshold(1 << 17, 256)
"""The largest block that compaction makes. It is what a read of one key takes from a run.

Reading a whole window costs little more with blocks of this size than with larger ones.
"""
_COMPACT, _PART, _APART = "\0compact", "\0part", "\0apart"
Owners = Callable[[Table], list[Ints]]
"""Given rows as a table of keys and ``first``: for each definition, the session that each row belongs to, or -1."""


def compaction_bytes(memory_bytes: int, compression: Compression) -> int:
    """How many bytes of encoded blocks to compact at once. Rows, copies of them, and the sort order need memory."""
    return max(memory_bytes // (4 if compression is Compression.NONE else 16), 1)


class BlockCompactor:
    """Compacts blocks of one plan. ``target_bytes``: how large the new blocks are, up to ``MOST_BYTES``."""

    def __init__(
        self,
        plan: Plan,
        *,
        target_bytes: int,
        compression: Compression = Compression.NONE,
        codec: Codec = Codec.ARROW,
    ) -> None:
        self._plan = plan
        self._target_bytes = min(target_bytes, MOST_BYTES)
        self.compression = compression
        self._codec = codec
        self._names = [field.name for field in plan.key_fields]

    def within(self, block: Decoded, low: int, high: int) -> Decoded:
        """The rows of a block whose keys lie in this range of hashes."""
        hashes = row_hashes(self._plan, block.batch)
        return block._replace(batch=block.batch.filter(pa.array((hashes >= low) & (hashes <= high))))

    def compact(
        self, compactions: Mapping[int, Compact], blocks: Sequence[Decoded], owners: Owners | None = None
    ) -> Iterator[tuple[Compact, Block]]:
        """Yields new blocks that replace the blocks of some slices, each with its compaction.

        ``compactions``: by slice. ``blocks``: of these slices, in the order of arrival. ``owners``: the sessions that
        rows belong to. Rows of different sessions are not combined. If the compaction sweeps, rows without a session
        are left out.

        A single key may have more rows than an array holds. Then they are compacted some at a time, and the new blocks
        of a slice have the same key more than once, in the order of arrival.
        """
        there = [d for d in blocks if d.batch.num_rows]
        for some in at_once([d.batch.nbytes for d in there], ARRAY_BYTES):
            yield from self._compacted(compactions, there[some], owners)

    def _compacted(
        self, compactions: Mapping[int, Compact], blocks: Sequence[Decoded], owners: Owners | None
    ) -> Iterator[tuple[Compact, Block]]:
        batches = [d.batch for d in blocks]
        slices = np.repeat([d.slice_us for d in blocks], [d.batch.num_rows for d in blocks])
        table = pa.Table.from_batches(batches).append_column(_COMPACT, pa.array(slices))
        if owners is not None:
            table = self._owned(compactions, table, owners)
            if not table.num_rows:
                return
        if self._plan.layout is not None:
            table = self._combined(table)
        hashes, slices = row_hashes(self._plan, table), table.column(_COMPACT).to_numpy()
        # Only partials have these columns. Events may have columns of any names.
        names = (_APART, SLICE) if self._plan.layout is not None else ()
        within = [table.column(name).to_numpy() for name in names if name in table.schema.names]
        order = np.lexsort((*within, hashes, slices))  # stable: the rows of a key stay in the order of arrival
        table = table.select(self._plan.block_schema.names)
        table = table.take(pa.array(order)).combine_chunks()
        hashes, slices = hashes[order], slices[order]
        edges = [0, *(np.flatnonzero(np.diff(slices)) + 1).tolist(), len(slices)]
        for begin, end in itertools.pairwise(edges):
            compaction = compactions[int(slices[begin])]
            for first, last in self._pieces(table, begin, end):
                compacted = Compacted(compaction.until, int(hashes[first]), int(hashes[last - 1]))
                rows = as_batch(table.slice(first, last - first))
                block = encode_rows(
                    self._plan,
                    rows,
                    compaction.slice_us,
                    compression=self.compression,
                    codec=self._codec,
                    compacted=compacted,
                )
                yield compaction, block

    def _owned(self, compactions: Mapping[int, Compact], rows: pa.Table, owners: Owners) -> pa.Table:
        """Leaves out rows that no session needs. Adds to partials a number for rows that may be combined.

        Rows of a key and slice with different numbers are not combined. Rows of different sessions get different
        numbers. If the order of combining matters, rows of different cells do, too, and so do rows of a session with
        other rows of the cell between them. Then rows can still be put in order when sessions are merged later.
        """
        plan = self._plan
        firsts = plan.instants(rows)[0]
        keys = [combined(rows.column(name)) for name in plan.block_keys]
        sessions = owners(Table(keys, {"first": firsts}))
        slices = rows.column(_COMPACT).to_numpy()
        swept = [slice_us for slice_us, compaction in compactions.items() if compaction.sweeps]
        needed = ~np.isin(slices, swept) | (np.max(sessions, axis=0) >= 0)
        if plan.layout is not None:
            apart = number([pa.array(column) for column in sessions], len(firsts)).ids
            if not plan.layout.commutative:
                assert plan.cell_us is not None
                cells = number([*keys, pa.array(slices), pa.array(firsts // plan.cell_us)], len(firsts)).ids
                order = np.argsort(cells, kind="stable")
                changes = (np.diff(cells[order]) != 0) | (np.diff(apart[order]) != 0)
                apart = np.empty(len(firsts), np.int64)
                apart[order] = np.concatenate(([0], np.cumsum(changes)))
            rows = rows.append_column(_APART, pa.array(apart))
        return rows if needed.all() else rows.filter(pa.array(needed))

    def _combined(self, partials: pa.Table) -> pa.Table:
        """Combines partials to one row for each key and slice.

        Partials that hold values get as many rows as needed to keep each row near the target size.
        """
        layout = self._plan.layout
        assert layout is not None
        keys = [name for name in (_COMPACT, SLICE, *self._names, _APART) if name in partials.schema.names]
        if not layout.holistic:
            return layout.combine(keys, partials)
        parts = pa.array(parts_of(partials, keys, self._target_bytes))
        combined_parts = layout.combine([*keys, _PART], partials.append_column(_PART, parts))
        return combined_parts.take(pc.sort_indices(combined_parts.column(_PART))).drop_columns([_PART])

    def _pieces(self, table: pa.Table, begin: int, end: int) -> Iterator[tuple[int, int]]:
        size = table.slice(begin, end - begin).nbytes
        step = -(-(end - begin) // max(1, round(size / self._target_bytes)))
        return ((first, min(first + step, end)) for first in range(begin, end, step))
