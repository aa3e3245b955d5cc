"""The rows of a join's result: which rows are pairs, which partner is the newest, and what a batch changed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from aion.base.identity import identify
from aion.core.join.matching import Sorted
from aion.core.join.plan import CHANGES, DROPPED_BEFORE, LEFT, PAIR, PAIR_TIME, SIDE, SIDES, JoinPlan, holds
from aion.core.join.rows import NO_KEY, Hashes, JoinRows, SideRows, together
from aion.core.life.actions import PaneKind, dropped_of
from aion.core.life.arrival import UNTIMED
from aion.core.life.lifecycle import Counters
from aion.core.paged_rows import Pages
from aion.core.query.columns import OLD, PANE_SEQ
from aion.core.slicing.grid import DROPPED_SLICE

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


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

    def columns(self, left: JoinRows, a: Ints, right: JoinRows, b: Ints) -> pa.RecordBatch:
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

    def agreeing(self, left: JoinRows, a: Ints, right: JoinRows, b: Ints) -> tuple[Ints, Ints]:
        """Those rows of both sides that are pairs, of some with the same hash whose times fit."""
        same = (left.second[a] == right.second[b]) & ~left.has(NO_KEY)[a] & ~right.has(NO_KEY)[b]
        a, b = a[same], b[same]
        if self._plan.condition is not None and len(a):
            mask = holds(self._plan.condition, self.columns(left, a, right, b))
            a, b = a[mask], b[mask]
        return a, b

    def agreeing_of(self, side: int, rows: JoinRows, at: Ints, others: JoinRows, their: Ints) -> tuple[Ints, Ints]:
        """The same as :meth:`agreeing` for rows of a side and others. Returns the numbers of the others first."""
        if side == LEFT:
            at, their = self.agreeing(rows, at, others, their)
        else:
            their, at = self.agreeing(others, their, rows, at)
        return their, at

    def rows(self, left: JoinRows, a: Ints, right: JoinRows, b: Ints, kinds: pa.Array) -> pa.RecordBatch:
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


class Newest:
    """Finds partners. ``right``: the kept rows of the right side."""

    def __init__(self, plan: JoinPlan, right: SideRows) -> None:
        self._interval, self._right = plan.interval(LEFT), right

    def partners(self, left: JoinRows, *, without: JoinRows | None = None) -> tuple[JoinRows, Ints]:
        """For each row of the left side the newest kept row of the right side, as rows and the number of each; -1:
        there is none. ``without``: kept rows that do not count.
        """
        best = JoinRows.stored(self._right.schema.empty_table())
        which = np.full(len(left), -1)
        hashes = Hashes(left.hash)
        for read in self._right.pages.chunks_of(self._around(left.hash, left.time)):
            _, others = hashes.among(read)
            if without is not None:
                others = others.take(np.flatnonzero(~others.are_among(np.column_stack(without.identity))))
            best, which = self.better(left, best, which, others)
        return best, which

    def keys(self, due: Ints) -> list[bytes]:
        """Returns the keys of the pages that :meth:`partners` reads for rows that are due: see :meth:`SideRows.due`."""
        return self._right.pages.all_keys(self._around(due[:, 0], due[:, 1]))

    def _around(self, hashes: Ints, times: Ints) -> Pages:
        return self._right.around(hashes, times, *self._interval)

    def better(self, left: JoinRows, best: JoinRows, which: Ints, others: JoinRows) -> tuple[JoinRows, Ints]:
        """The newest of the best partners so far and of others."""
        first, last = self._interval
        usable = np.flatnonzero(~others.has(NO_KEY))
        # Of rows at one time, the one with the largest identity is the newest, so that each run chooses the same.
        by_id = usable[np.lexsort((others.identity[1][usable], others.identity[0][usable]))]
        others = others.take(by_id)
        at = Sorted(others.hash, others.time).newest(left.hash, left.time + first, left.time + last)
        at = np.where((at >= 0) & ~left.has(NO_KEY), at, -1)
        there = np.flatnonzero(at >= 0)
        there = there[others.second[at[there]] == left.second[there]]
        had = there[which[there] >= 0]
        newer = np.zeros(len(left), np.bool_)
        newer[there] = True
        if len(had):
            old, new = best.take(which[had]), others.take(at[had])
            keys = [(rows.time, *rows.identity) for rows in (old, new)]
            newer[had] = _exceeds(keys[1], keys[0])
        if not newer.any():
            return best, which
        chosen = np.flatnonzero(newer)
        both = together([best, others.take(at[chosen])]) if len(best) else others.take(at[chosen])
        which = which.copy()
        which[chosen] = len(best) + np.arange(len(chosen))
        kept = np.flatnonzero(which >= 0)
        result = both.take(which[kept])
        which[kept] = np.arange(len(kept))
        return result, which


def _exceeds(new: tuple[Ints, ...], old: tuple[Ints, ...]) -> Flags:
    """Whether rows of numbers come after others, by the first number that differs."""
    result, equal = np.zeros(len(new[0]), np.bool_), np.ones(len(new[0]), np.bool_)
    for new_column, old_column in zip(new, old, strict=True):
        result |= equal & (new_column > old_column)
        equal &= new_column == old_column
    return result


def differ(old: JoinRows, was: Ints, new: JoinRows, now: Ints) -> Flags:
    """Whether partners are others than before. -1: there is none."""
    result: Flags = np.not_equal(was < 0, now < 0)
    both = np.flatnonzero((was >= 0) & (now >= 0))
    for a, b in zip(old.identity, new.identity, strict=True):
        result[both] |= a[was[both]] != b[now[both]]
    return result


class Net:
    """Keeps the results of a batch until its end, because a later one may take an earlier one back."""

    def __init__(self) -> None:
        self._results: list[pa.RecordBatch] = []

    def take(self, results: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Keeps pairs. Yields dropped rows."""
        return dropped_of(results, self._results.append)

    def end_batch(self) -> Iterator[pa.RecordBatch]:
        """Yields the last row of each pair that is there now and was not before the batch, or the other way round."""
        if not self._results:
            return
        rows = pa.Table.from_batches(self._results).combine_chunks()
        self._results.clear()
        pairs = rows.column(PAIR).combine_chunks().dictionary_encode().indices.to_numpy()
        _, first = np.unique(pairs, return_index=True)
        last = len(pairs) - 1 - np.unique(pairs[::-1], return_index=True)[1]
        gone = pc.equal(rows.column("kind"), PaneKind.RETRACTED.value).to_numpy()
        # A row that is taken back first was there before the batch.
        changed = np.sort(last[gone[first] == gone[last]])
        yield from rows.take(pa.array(changed)).combine_chunks().to_batches()
