"""Groups the events of a window by key, in memory. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from aion.aggregates.values import combined
from aion.base.hashing import hash_rows
from aion.core.query.functions import Key
from aion.errors import ApplyError
from state_backends.thresholds import threshold

# Runs are searched in this many rows at a time. The arrays for a whole window would take more room than small events.
_ROWS_AT_ONCE = threshold(1 << 17)
_KEYS_AT_ONCE = threshold(1024, 2)
_RUN_BYTES = 64  # at most: a run may be a single row
_I64_MAX = 2**63 - 1


class Piece(NamedTuple):
    """Events of one block. ``changed``: whether they are pending. ``late``: whether they came late.

    ``mapped``: they lie in a file that is mapped into memory.
    """

    batch: pa.RecordBatch
    changed: bool
    late: bool
    mapped: bool = False

    @property
    def memory_bytes(self) -> int:
        """The memory that grouping needs for it. For mapped events, that is what describes runs of their keys."""
        size: int = self.batch.nbytes
        return min(size, _RUN_BYTES * self.batch.num_rows) if self.mapped else size


class Group(NamedTuple):
    """The events of one key, in the order of arrival. Read ``batches`` once, before you take the next group.

    ``seen``: whether some of them were there when the window was last executed.
    """

    key: Key
    batches: Iterator[pa.RecordBatch]
    events: int
    late_events: int
    seen: bool


class _Runs(NamedTuple):
    """Stretches of rows of one key in one batch: the number of the batch, first row, length, and the key as a code."""

    of_batch: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    codes: npt.NDArray[np.int64]
    keys: pa.Table


def keys_of(names: Sequence[str], columns: Sequence[pa.Array | pa.ChunkedArray]) -> list[Key]:
    """The keys of rows as Python objects.

    Raises:
        ApplyError: a value cannot be a Python object: a date or timestamp outside the years 1 to 9999, or a string that
            is not UTF-8.
    """
    lists = []
    for name, column in zip(names, columns, strict=True):
        try:
            lists.append(column.to_pylist())
        except UnicodeDecodeError as error:
            raise ApplyError(
                f"key {name!r} has a string that is not UTF-8, and an `apply` function gets keys as Python objects. "
                "Leave these events out, or make the column binary"
            ) from error
        except (OverflowError, ValueError) as error:
            raise ApplyError(
                f"key {name!r} has a {column.type} outside the years 1 to 9999, and an `apply` function gets keys as "
                "Python objects. Leave these events out, or make the column a string"
            ) from error
    return list(zip(*lists, strict=True))


def group_in_memory(names: Sequence[str], pieces: Iterable[Piece]) -> Iterator[Group]:
    """The groups of the keys with a changed piece. Their order has no meaning, but is always the same.

    No event is copied. Blocks are sorted by key when they are made, so a key has few runs, and runs are slices.
    """
    held = [piece for piece in pieces if piece.batch.num_rows]
    if not held:
        return
    batches = [piece.batch for piece in held]
    runs = _find_runs(names, batches)
    order = np.argsort(runs.codes, kind="stable")
    codes, of_batch, starts, sizes = runs.codes[order], runs.of_batch[order], runs.starts[order], runs.sizes[order]
    begins = np.flatnonzero(np.diff(codes, prepend=-1))
    ends = np.append(begins[1:], len(codes))
    events = np.add.reduceat(sizes, begins)
    late_events = np.add.reduceat(np.where(np.array([p.late for p in held])[of_batch], sizes, 0), begins)
    is_changed = np.array([p.changed for p in held])[of_batch]
    seen = np.logical_or.reduceat(~is_changed, begins)
    changed = np.flatnonzero(np.logical_or.reduceat(is_changed, begins))
    if not len(changed):
        return
    # Sort by a hash of the keys, so that the order does not depend on how blocks were compacted.
    keys_changed = runs.keys.take(pa.array(order[begins[changed]]))
    changed = changed[np.argsort(hash_rows([combined(c) for c in keys_changed.columns], 0), kind="stable")]
    for start in range(0, len(changed), _KEYS_AT_ONCE):
        some = changed[start : start + _KEYS_AT_ONCE]
        rows = pa.array(order[begins[some]])
        keys = keys_of(names, [runs.keys.column(name).take(rows) for name in names])
        numbers = (a[some].tolist() for a in (begins, ends, events, late_events, seen))
        for key, begin, end, count, late, before in zip(keys, *numbers, strict=True):
            where = zip(
                of_batch[begin:end].tolist(), starts[begin:end].tolist(), sizes[begin:end].tolist(), strict=True
            )
            yield Group(key, (batches[b].slice(first, size) for b, first, size in where), count, late, before)


def _find_runs(names: Sequence[str], batches: list[pa.RecordBatch]) -> _Runs:
    """The runs of all batches. Looks at some batches at a time."""
    found: list[_Runs] = []
    first = rows = 0
    for number, batch in enumerate(batches, 1):
        rows += batch.num_rows
        if rows >= _ROWS_AT_ONCE or number == len(batches):
            found.append(_runs_of(names, batches[first:number], first))
            first, rows = number, 0
    if len(found) == 1:
        return found[0]
    # Combine the chunks once. Otherwise every take() below would do it again.
    keys = pa.concat_tables([r.keys for r in found]).combine_chunks()
    of_batch, starts, sizes = (np.concatenate([r[i] for r in found]) for i in range(3))
    return _Runs(of_batch, starts, sizes, key_codes(keys), keys)


def _runs_of(names: Sequence[str], batches: list[pa.RecordBatch], number: int) -> _Runs:
    keys = pa.Table.from_batches([batch.select(names) for batch in batches])
    codes = key_codes(keys)
    edges = np.cumsum([batch.num_rows for batch in batches])
    is_start = np.concatenate(([True], codes[1:] != codes[:-1]))
    is_start[edges[:-1]] = True
    starts = np.flatnonzero(is_start)
    of_batch = np.searchsorted(edges, starts, side="right")
    begins = np.concatenate(([0], edges[:-1]))
    sizes = np.diff(starts, append=len(codes))
    return _Runs(of_batch + number, starts - begins[of_batch], sizes, codes[starts], keys.take(pa.array(starts)))


def key_codes(keys: pa.Table) -> npt.NDArray[np.int64]:
    """An integer of at least 0 for each row. Rows have the same integer if and only if they have the same key."""
    codes, total = np.zeros(keys.num_rows, np.int64), 1
    for column in keys.columns:
        chunks = column.dictionary_encode(null_encoding="encode").chunks  # they share one dictionary
        distinct = max(len(chunks[0].dictionary), 1) if chunks else 1
        if total * distinct > _I64_MAX:  # the product would overflow: number them again
            codes = np.unique(codes, return_inverse=True)[1]
            total = keys.num_rows
        total *= distinct
        indices = [chunk.indices.to_numpy(zero_copy_only=False) for chunk in chunks]
        codes = codes * distinct + (np.concatenate(indices) if indices else 0)
    return codes
