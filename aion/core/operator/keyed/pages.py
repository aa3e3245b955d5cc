"""The bytes of a page: the windows of some keys, as fixed-width columns. Pure, vectorised over many pages.

A page holds the rows of the keys whose hashes lead to it, and the windows of these keys that were executed. Its bytes
are, as int64 unless said otherwise: the *head*, which summarises it (:data:`HEAD`), and for each key column the bytes
of its values in the two tables; the entries of the page in the due index (kind, time, events); the rows; the executed
windows; and the values of the key columns, one after the other. A row of a table has the columns of the table, a mask
of the keys that are null, and for each key column of variable length the length of its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from aion.core.operator.keyed.table import Ints, Table

HEAD = ("rows", "yielded", "entries", "live", "executed", "open_first", "early_events", "events")
"""What a page says about itself.

``rows``, ``yielded``, ``entries``: their numbers. ``live``, ``executed``: the windows that are not gone, and those of
them that have run. ``open_first``: the first event of its windows that have not ended; NEVER if there are none.
``early_events``: those of windows that have not ended and that no pane shows yet. ``events``: of all rows.
"""
_ENTRY = 3
_WORD = 8
_FLAGS = 62  # null flags of this many key columns share an integer


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages, taken apart. ``heads``: a row for each page, with the columns of HEAD.

    ``entries``: of all pages together, (kind, time, events) in a row. ``entry_place``: the place of each one's page.
    """

    heads: Ints
    index: Table
    yielded: Table
    entries: Ints
    entry_place: Ints


class PageFormat:
    """Turns pages into bytes and back. ``index``, ``yielded``: the columns of the tables."""

    def __init__(self, key_types: Sequence[pa.DataType], index: Sequence[str], yielded: Sequence[str]) -> None:
        self._keys = [_Column(type_) for type_ in key_types]
        self._tables = (tuple(index), tuple(yielded))
        self._flags = -(-len(self._keys) // _FLAGS)
        lengths = sum(column.width is None for column in self._keys)
        self._widths = [(len(names) + self._flags + lengths) * _WORD for names in self._tables]
        self._head_bytes = (len(HEAD) + 2 * len(self._keys)) * _WORD

    def encode(
        self, heads: Ints, tables: tuple[Table, Table], places: tuple[Ints, Ints], entries: Ints, entry_place: Ints
    ) -> tuple[list[bytes], Ints]:
        """The bytes of each page, and the heads.

        ``heads``: as in :class:`Pages`, without the first three columns. ``places``: for each row of both tables, the
        place of its page. Rows and entries may come in any order; those of a page keep theirs.
        """
        pages = len(heads)
        by_page = np.argsort(entry_place, kind="stable")
        bounds = [_bounds(entry_place, pages)]
        columns: list[list[tuple[memoryview, list[int]]]] = []
        for names, table, place, width in zip(self._tables, tables, places, self._widths, strict=True):
            sorted_ = table.take(np.argsort(place, kind="stable"))
            bound = _bounds(place, pages)
            bounds.append(bound)
            records, blobs = self._records(sorted_, names, bound)
            columns.append([(records, (bound * width).tolist()), *blobs])
        sizes = [np.diff(bound) for bound in bounds]
        blob_sizes = [np.diff(at) for column in columns for _, at in column[1:]]
        head = np.column_stack([sizes[1], sizes[2], sizes[0], heads, *blob_sizes]).astype(np.int64)
        parts: list[tuple[memoryview, list[int]]] = [
            (memoryview(head.tobytes()), (np.arange(pages + 1) * self._head_bytes).tolist()),
            (memoryview(entries[by_page].tobytes()), (bounds[0] * _ENTRY * _WORD).tolist()),
            *(column[0] for column in columns),
            *(blob for column in columns for blob in column[1:]),
        ]
        slices = [[data[a:b] for a, b in pairwise(at)] for data, at in parts]
        return [b"".join(pieces) for pieces in zip(*slices, strict=True)], head[:, : len(HEAD)]

    def _records(
        self, table: Table, names: Sequence[str], bound: Ints
    ) -> tuple[memoryview, list[tuple[memoryview, list[int]]]]:
        """The rows of a table, and for each key column its values, with where those of each page begin and end."""
        columns: list[Any] = [table[name] for name in names]
        nulls = [key.is_null().to_numpy(zero_copy_only=False) for key in table.keys]
        for first in range(0, len(nulls), _FLAGS):
            flags = np.zeros(len(table), np.int64)
            for bit, null in enumerate(nulls[first : first + _FLAGS]):
                flags |= null.astype(np.int64) << bit
            columns.append(flags)
        blobs = []
        for column, key in zip(self._keys, table.keys, strict=True):
            data, ends = column.flat(key)
            if column.width is None:
                columns.append(np.diff(ends))
            blobs.append((data, (ends[bound] - ends[0]).tolist()))
        records = np.empty((len(table), len(columns)), np.int64)
        for at, column in enumerate(columns):
            records[:, at] = column
        return records.data.cast("B") if len(table) else memoryview(b""), blobs

    def decode(self, pages: Sequence[bytes]) -> Pages:
        """Takes pages apart. The rows come in the order of the pages."""
        n = len(pages)
        head = np.frombuffer(b"".join([page[: self._head_bytes] for page in pages]), np.int64).reshape(
            n, self._head_bytes // _WORD
        )
        keys = len(self._keys)
        sizes = [
            head[:, 2] * (_ENTRY * _WORD),
            head[:, 0] * self._widths[0],
            head[:, 1] * self._widths[1],
            *head[:, len(HEAD) :].T,
        ]
        at = np.full(n, self._head_bytes)
        joined = []
        for size in sizes:
            ends = at + size
            joined.append(b"".join([p[a:b] for p, a, b in zip(pages, at.tolist(), ends.tolist(), strict=True)]))
            at = ends
        entries = np.frombuffer(joined[0], np.int64).reshape(-1, _ENTRY)
        index = self._table(0, joined[1], joined[3 : 3 + keys])
        yielded = self._table(1, joined[2], joined[3 + keys :])
        return Pages(head[:, : len(HEAD)], index, yielded, entries, np.repeat(np.arange(n), head[:, 2]))

    def _table(self, which: int, records: bytes, blobs: Sequence[bytes]) -> Table:
        names, width = self._tables[which], self._widths[which] // _WORD
        # A table has at least one column, so a row has at least one word.
        values = np.frombuffer(records, np.int64).reshape(-1, width).T
        columns = {name: np.ascontiguousarray(column) for name, column in zip(names, values, strict=False)}
        flags = values[len(names) : len(names) + self._flags]
        lengths = iter(values[len(names) + self._flags :])
        keys = []
        for i, (column, blob) in enumerate(zip(self._keys, blobs, strict=True)):
            null = flags[i // _FLAGS] >> (i % _FLAGS) & 1 > 0
            keys.append(column.array(blob, null, next(lengths) if column.width is None else None))
        return Table(keys, columns)


class _Column:
    """A key column as plain bytes. ``width``: of each value in bytes. None: they have different lengths."""

    def __init__(self, type_: pa.DataType) -> None:
        self._type = type_
        self.width: int | None = None
        if pa.types.is_null(type_):
            self.width = 0
        elif pa.types.is_boolean(type_):
            self.width = 1
        elif pa.types.is_primitive(type_) or pa.types.is_decimal(type_) or pa.types.is_fixed_size_binary(type_):
            self.width = type_.bit_width // 8

    def flat(self, values: pa.Array) -> tuple[memoryview, Ints]:
        """The values one after the other, and where each begins and the last one ends, from the first one's begin."""
        n = len(values)
        if self.width is None:
            large = values.cast(pa.large_binary())
            if not n:
                return memoryview(b""), np.zeros(1, np.int64)
            _, offsets, data = large.buffers()
            ends: Ints = np.frombuffer(offsets, np.int64)[large.offset : large.offset + n + 1]
            return memoryview(data or b"")[int(ends[0]) : int(ends[-1])], ends
        ends = np.arange(n + 1) * self.width
        if not self.width or not n:
            return memoryview(b""), ends
        plain = values.cast(pa.uint8()) if pa.types.is_boolean(self._type) else values
        begin = plain.offset * self.width
        return memoryview(plain.buffers()[1])[begin : begin + n * self.width], ends

    def array(self, data: bytes, null: npt.NDArray[np.bool_], lengths: Ints | None) -> pa.Array:
        """The values again. ``lengths``: of each, if they have different ones."""
        n = len(null)
        if pa.types.is_null(self._type):
            return pa.nulls(n)
        if pa.types.is_boolean(self._type):
            return pa.array(np.frombuffer(data, np.uint8) > 0, mask=null)
        valid = pa.py_buffer(np.packbits(~null, bitorder="little")) if null.any() else None
        if lengths is None:
            return pa.Array.from_buffers(self._type, n, [valid, pa.py_buffer(data)])
        offsets = np.zeros(n + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        is_text = pa.types.is_string(self._type) or pa.types.is_large_string(self._type)
        large = pa.large_string() if is_text else pa.large_binary()
        return pa.Array.from_buffers(large, n, [valid, pa.py_buffer(offsets), pa.py_buffer(data)]).cast(self._type)


def _bounds(places: Ints, pages: int) -> Ints:
    """Where the rows of each page begin and end, when they are sorted by page."""
    return np.concatenate(([0], np.cumsum(np.bincount(places, minlength=pages))))
