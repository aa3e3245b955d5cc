"""The rows of a join's result. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from aion.base.identity import identify
from aion.core.join.plan import CHANGES, DROPPED_BEFORE, LEFT, PAIR, PAIR_TIME, SIDE, SIDES, JoinPlan, holds
from aion.core.join.rows import NO_KEY, Rows
from aion.core.life.actions import PaneKind
from aion.core.life.arrival import UNTIMED
from aion.core.life.lifecycle import Counters
from aion.core.query.columns import OLD, PANE_SEQ
from aion.core.slicing.grid import DROPPED_SLICE

Ints = npt.NDArray[np.int64]


class Results:
    """Decides which rows are pairs. Makes rows of the result, and counts them in ``counters``.

    ``seq``: the number of the next rows. ``texts``: makes a text of each row, for dropped ones.
    """

    def __init__(
        self, plan: JoinPlan, texts: Callable[[pa.RecordBatch], pa.Array], counters: Counters, seq: int
    ) -> None:
        self._plan, self._texts = plan, texts
        self.counters = counters
        self._schema = plan.result_schema
        self.seq = seq

    def columns(self, left: Rows, a: Ints, right: Rows, b: Ints) -> pa.RecordBatch:
        """The columns of the user in pairs. -1: there is no row."""
        found: dict[str, pa.Array] = {}
        for rows, at in ((left, a), (right, b)):
            where = pa.array(at, mask=at < 0)
            for name in rows.table.schema.names:
                column = rows.table.column(name).take(where)
                column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
                if name in found:  # a column of the key
                    column = pc.if_else(pa.array(a >= 0), found[name], column)
                found[name] = column
        names = [field.name for field in self._schema if field.name in found]
        return pa.RecordBatch.from_arrays([found[name] for name in names], names)

    def agreeing(self, left: Rows, a: Ints, right: Rows, b: Ints) -> tuple[Ints, Ints]:
        """Those rows of both sides that are pairs, of some with the same hash whose times fit."""
        same = (left.second[a] == right.second[b]) & ~left.has(NO_KEY)[a] & ~right.has(NO_KEY)[b]
        a, b = a[same], b[same]
        if self._plan.condition is not None and len(a):
            mask = holds(self._plan.condition, self.columns(left, a, right, b))
            a, b = a[mask], b[mask]
        return a, b

    def agreeing_of(self, side: int, rows: Rows, at: Ints, others: Rows, their: Ints) -> tuple[Ints, Ints]:
        """The same as :meth:`agreeing` for rows of a side and others. Returns the numbers of the others first."""
        if side == LEFT:
            at, their = self.agreeing(rows, at, others, their)
        else:
            their, at = self.agreeing(others, their, rows, at)
        return their, at

    def rows(self, left: Rows, a: Ints, right: Rows, b: Ints, kinds: pa.Array) -> pa.RecordBatch:
        """Makes result rows. ``a``, ``b``: the rows of each side; -1: there is none."""
        n = len(a)
        ids: list[Ints] = []
        times = np.full((2, n), np.iinfo(np.int64).min)
        for side, (rows, at) in enumerate(((left, a), (right, b))):
            there = np.flatnonzero(at >= 0)
            for numbers in rows.identity:
                column = np.zeros(n, np.int64)
                column[there] = numbers[at[there]]
                ids.append(column)
            times[side, there] = rows.time[at[there]]
        pair = identify([*map(pa.array, ids), pa.array(a >= 0), pa.array(b >= 0)], b"\0" * 16)
        shown = self.columns(left, a, right, b)
        for kind, count in zip(*np.unique(kinds.to_numpy(zero_copy_only=False), return_counts=True), strict=True):
            if kind == PaneKind.RETRACTED.value:
                self.counters.retracted += int(count)
            else:
                self.counters.executions[kind] += int(count)
        columns = dict(zip(shown.schema.names, shown.columns, strict=True))
        columns |= {
            PAIR: _hex(pair),
            PAIR_TIME: pa.array(times.max(axis=0)).cast(self._plan.timestamp),
            "kind": kinds,
            PANE_SEQ: pa.array(np.full(n, self.seq)),
        }
        if self._plan.emit == CHANGES and n and kinds[0].as_py() == PaneKind.RETRACTED.value:
            # All rows of a call are taken back, or none is.
            columns |= {OLD + field.name: columns.pop(field.name) for field in self._plan.values}
        self.seq += 1
        return self._batch(columns, n)

    def dropped(self, side: int, rows: pa.Table, reason: str, lateness_us: Ints | None) -> pa.RecordBatch:
        said, n = self._plan.sides[side], rows.num_rows
        batch = rows.combine_chunks().to_batches()[0]
        columns = {name: batch.column(name) for name in self._plan.key}
        columns |= {
            "kind": pa.repeat(PaneKind.DROPPED.value, n),
            SIDE: pa.repeat(SIDES[side], n),
            "event_time": batch.column(said.time).cast(self._plan.timestamp),
            "reason": pa.repeat(reason, n),
            "event": batch.column(DROPPED_BEFORE)
            if reason == UNTIMED[DROPPED_SLICE]
            else self._texts(batch.select(said.schema.names)),
        }
        if lateness_us is not None:
            columns["lateness_us"] = pa.array(lateness_us)
        return self._batch(columns, n)

    def _batch(self, columns: Mapping[str, pa.Array], n: int) -> pa.RecordBatch:
        arrays = [columns[f.name] if f.name in columns else pa.nulls(n, f.type) for f in self._schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _hex(numbers: Ints) -> pa.Array:
    """Two numbers for each row as a text of 32 digits."""
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    flat = np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, 16)
    texts = np.empty((len(flat), 32), np.uint8)
    texts[:, ::2], texts[:, 1::2] = digits[flat >> 4], digits[flat & 15]
    offsets = np.arange(len(flat) + 1, dtype=np.int32) * 32
    return pa.StringArray.from_buffers(len(flat), pa.py_buffer(offsets.tobytes()), pa.py_buffer(texts.tobytes()))
