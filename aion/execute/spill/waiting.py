"""What waits in a shard until the batch has told all of it: rows of windows of keys, and orders to execute windows.

Both may be more than fits in memory, so they wait in temporary files, by bins of keys. A file has no name, so that even
a killed process leaves none behind.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa

from aion.base.numbers import at_once
from aion.core.keyed.orders import ExecuteKeyed, Members, together
from aion.core.keyed.table import Table, stacked
from aion.execute.spill.spilling import Room, file_of, temporary_file
from state_backends.thresholds import threshold

BINS = threshold(64, 2)
"""Into how many pieces rows in a file are split. A power of two: the lowest bits of a key's hash say which."""


class SpilledRows:
    """See :class:`aion.core.keyed.waiting.WaitingRows`. A column ``hash`` has the hash of each row's key.

    It needs about as much memory again while it writes them to a file.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
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
        if self._size_bytes > self._room.limit_bytes:
            self._spill()

    def take(self) -> Iterator[Table]:
        if self._file is not None:
            self._spill()
        tables, file = self._tables, self._file
        self._begin()
        if file is not None:
            yield from file.drain(self._room.limit_bytes)
        elif tables:
            yield stacked(tables)

    def _spill(self) -> None:
        tables, self._tables, self._size_bytes = self._tables, [], 0
        if tables:
            self._file = self._file or _File(self._room.folder)
            self._file.write(stacked(tables))


class _File:
    """Rows in a temporary file, by bin."""

    def __init__(self, folder: str | None) -> None:
        self._file = temporary_file(folder)
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
                parts = [rows for bin_ in range(BINS)[some] if (rows := self.read(bin_)) is not None]
                if parts:
                    yield stacked(parts)

    def read(self, bin_: int) -> Table | None:
        """Returns the rows of a bin, in the order in which they were written, or None if the bin is empty."""
        parts = [self._read(*place) for place in self._places[bin_]]
        return stacked(parts) if parts else None

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


class WaitingOrders:
    """Orders of one kind for windows of one definition, which the operator gives for some pages at a time.

    They are carried out together, so that blocks are read once. What has no room in memory waits in files.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._orders: list[ExecuteKeyed] = []
        self._size_bytes = self._members = 0
        self._slices: set[int] = set()
        self._files: tuple[_File, _File] | None = None  # windows, and the rows that are their members
        self._like: ExecuteKeyed | None = None

    def add(self, order: ExecuteKeyed) -> None:
        self._orders.append(order)
        windows, members = order.windows, order.members
        arrays = [] if members is None else [members.begins, members.lengths, members.seqs, members.rows]
        self._size_bytes += sum(column.nbytes for column in (*windows.keys, *windows.columns.values(), *arrays))
        if self._size_bytes > self._room.limit_bytes:
            self._spill()

    @property
    def in_memory(self) -> ExecuteKeyed | None:
        """All windows as one order. It is None if some are in a file: then :meth:`of` has them."""
        if self._files is not None:
            return None
        self._orders = [together(self._orders)]
        return self._orders[0]

    @property
    def slices(self) -> tuple[int, ...]:
        """The slices that hold the rows of any window."""
        return tuple(sorted(self._slices.union(*(order.slices for order in self._orders))))

    def of(self, files: Sequence[int]) -> ExecuteKeyed:
        """The windows whose rows are in a partition. ``files``: see :class:`aion.execute.spill.spilling.Partition`.

        Without any file, all windows; that is only possible while they are in memory.
        """
        order = self.in_memory
        if order is None:
            self._spill()
            order = self._read(files[0])
        for splits, number in enumerate(files):
            order = order.some(file_of(order.windows.keys, len(order), splits) == number)
        return order

    def _spill(self) -> None:
        if not self._orders:
            return
        self._slices.update(self.slices)
        order = together(self._orders)
        self._orders, self._size_bytes, self._like = [], 0, order.some(np.zeros(len(order), np.bool_))
        if self._files is None:
            self._files = _File(self._room.folder), _File(self._room.folder)
        windows = order.windows.replaced(hash=file_of(order.windows.keys, len(order), 0))
        if (members := order.members) is not None:
            windows = windows.replaced(begin=members.begins + self._members, length=members.lengths)
            # All rows of a key follow each other, so a row is of the same key as the window that begins last before it.
            by_begin = np.argsort(members.begins, kind="stable")
            rows = np.arange(len(members.seqs))
            owner = by_begin[np.searchsorted(members.begins[by_begin], rows, side="right") - 1]
            columns = {"at": rows + self._members, "seq": members.seqs, "row": members.rows}
            self._files[1].write(Table([], {**columns, "hash": windows["hash"][owner]}))
            self._members += len(rows)
        self._files[0].write(windows)

    def _read(self, number: int) -> ExecuteKeyed:
        assert self._files is not None
        assert self._like is not None
        windows, rows = (file.read(number & (BINS - 1)) for file in self._files)
        if windows is None:
            return self._like
        members = None
        if rows is not None:
            begins = np.searchsorted(rows["at"], windows["begin"])
            members = Members(begins, windows["length"], rows["seq"], rows["row"])
        return replace(self._like, windows=windows, members=members, slices=self.slices)
