"""Rows of a batch that wait for its end, in a temporary file if they are many."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa

from aion.base.stretches import at_once
from aion.core.keyed.table import Table, stacked
from state_backends.thresholds import threshold

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
