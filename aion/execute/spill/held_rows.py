"""Rows of several batches as one sequence, and windows whose rows are copied some at a time. Pure.

Arrow cannot put more than 2 GiB of strings or bytes into one array, and a copy takes memory. So the batches stay as
they are (they may lie in a file that is mapped into memory), and only rows that are needed together are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from aion.aggregates.values import as_batch
from aion.base.numbers import at_once
from aion.core.keyed.table import Ints, Table
from state_backends.thresholds import threshold

ARRAY_BYTES = threshold(1 << 30, 512)
"""The most bytes that are copied at once, estimated from the sizes of batches: half of what fits into an array."""
CHUNK_BYTES = threshold(8 << 20, 256)
"""A window that is too large to be copied as a whole is read in chunks of about this size."""


class HeldRows:
    """The rows of batches of one schema, numbered from 0. ``forget``: see
    :class:`aion.execute.spill.spilling.Partition`.
    """

    def __init__(self, batches: Sequence[pa.RecordBatch], forget: Callable[[], None] = lambda: None) -> None:
        self._batches = [batch for batch in batches if batch.num_rows]
        self._edges = np.cumsum([batch.num_rows for batch in self._batches], dtype=np.int64)
        self.schema: pa.Schema = batches[0].schema
        self.forget = forget

    def select(self, names: Sequence[str]) -> HeldRows:
        """The same rows with some of the columns."""
        return (
            self
            if list(names) == self.schema.names
            else HeldRows([batch.select(list(names)) for batch in self._batches], self.forget)
        )

    @cached_property
    def table(self) -> pa.Table:
        """The rows as a table of one chunk for each batch. Nothing is copied."""
        return pa.Table.from_batches(self._batches, self.schema)

    def weights(self, rows: Ints) -> Ints:
        """About how many bytes each row takes: the mean of its batch."""
        sizes = np.array([-(-batch.nbytes // batch.num_rows) for batch in self._batches], np.int64)
        return np.maximum(sizes[np.searchsorted(self._edges, rows, side="right")], 1)

    def take(self, rows: Ints) -> pa.RecordBatch:
        """A copy of some rows, in the order asked for. Rows of one batch that follow each other are not copied."""
        if not len(rows):
            return as_batch(self.schema.empty_table())
        if 2 * len(rows) >= self._edges[-1] and sum(batch.nbytes for batch in self._batches) <= ARRAY_BYTES:
            return as_batch(self.table).take(pa.array(rows))  # two copies; what follows may make three
        of_batch = np.searchsorted(self._edges, rows, side="right")
        order = None if bool((of_batch[1:] >= of_batch[:-1]).all()) else np.argsort(of_batch, kind="stable")
        if order is not None:
            rows, of_batch = rows[order], of_batch[order]
        numbers, begins = np.unique(of_batch, return_index=True)
        parts = []
        for number, begin, end in zip(
            numbers.tolist(), begins.tolist(), [*begins[1:].tolist(), len(rows)], strict=True
        ):
            batch = self._batches[number]
            within = rows[begin:end] - (self._edges[number] - batch.num_rows)
            first, last = int(within[0]), int(within[-1])
            if last - first + 1 == len(within) and bool((np.diff(within) == 1).all()):
                parts.append(batch.slice(first, len(within)))
            else:
                parts.append(batch.take(pa.array(within)))
        taken = parts[0] if len(parts) == 1 else as_batch(pa.Table.from_batches(parts, self.schema))
        if order is None:
            return taken
        places = np.empty(len(order), np.int64)
        places[order] = np.arange(len(order))
        return taken.take(pa.array(places))

    def chunks(self, rows: Ints) -> Iterator[pa.RecordBatch]:
        """The rows in chunks of about ``CHUNK_BYTES``, lazily."""
        for some in at_once(self.weights(rows), CHUNK_BYTES):
            yield self.take(rows[some])
            self.forget()


class Located(NamedTuple):
    """Where the rows of windows are. The rows of window i are ``rows[begins[i] : begins[i] + lengths[i]]``.

    All lengths are above 0. Windows that overlap share rows.
    """

    windows: Table
    rows: Ints
    begins: Ints
    lengths: Ints


def stretches(located: Located, held: HeldRows, limit_bytes: int) -> Iterator[Located]:
    """Splits windows into stretches, each with its rows: at most ``limit_bytes`` of them, or those of one window."""
    limit = min(limit_bytes, ARRAY_BYTES)
    windows, rows, begins, lengths = located
    upto = np.concatenate(([0], np.cumsum(held.weights(rows))))
    if int(upto[-1]) <= limit:
        if len(begins):
            yield located
        return
    if bool((begins[1:] < begins[:-1]).any()):
        order = np.argsort(begins, kind="stable")
        windows, begins, lengths = windows.take(order), begins[order], lengths[order]
    ends = begins + lengths
    start = 0
    while start < len(begins):
        low = int(begins[start:].min())
        sizes = upto[np.maximum.accumulate(ends[start:])] - upto[low]
        some = np.arange(start, start + max(1, int(np.searchsorted(sizes, limit, side="right"))))
        high = int(ends[some].max())
        yield Located(windows.take(some), rows[low:high], begins[some] - low, lengths[some])
        start += len(some)
        held.forget()
