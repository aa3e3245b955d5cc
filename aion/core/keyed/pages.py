"""The bytes of a page: the windows of some keys, as fixed-width columns. Pure, vectorised over many pages.

A page holds the rows of the keys whose hashes lead to it, and the windows of these keys that were executed. Its bytes
are words of 64 bits: the *head*, which summarises it (:data:`HEAD`), and the sizes of its blobs; its entries in the due
index (kind, time, events); the rows; and the executed windows. A row of a table has the columns of the table, a bit for
each key column that is null, and a word for each key column: its value if that has at most 8 bytes, else the length of
the value. Long values follow, a blob for each such column and table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from aion.core.keyed.table import Ints, Table

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
class WindowPages:
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
        self._names = (tuple(index), tuple(yielded))
        self._flags = -(-len(self._keys) // _FLAGS)
        self._widths = [len(names) + self._flags + len(self._keys) for names in self._names]
        self._blobs = 2 * sum(column.is_long for column in self._keys)
        self._head_words = len(HEAD) + self._blobs

    def encode(
        self, heads: Ints, tables: tuple[Table, Table], places: tuple[Ints, Ints], entries: Ints, entry_place: Ints
    ) -> tuple[list[bytes], Ints]:
        """The bytes of each page, and the heads.

        ``heads``: as in :class:`WindowPages`, without the first three columns. ``places``: for each row of both tables,
        the place of its page. Rows and entries may come in any order; those of a page keep theirs.
        """
        pages = len(heads)
        sizes = [np.bincount(place, minlength=pages) for place in (*places, entry_place)]
        ranked = [_ranked(place, size) for place, size in zip((*places, entry_place), sizes, strict=True)]
        blobs = [blob for which in (0, 1) for blob in self._long(tables[which], ranked[which][1], sizes[which])]
        head = np.column_stack([*sizes, heads, *(np.diff(ends) for _, ends in blobs)])
        at = np.full(pages, self._head_words)
        begins = []
        for size, width in zip((sizes[2], sizes[0], sizes[1]), (_ENTRY, *self._widths), strict=True):
            begins.append(at)
            at = at + size * width
        ends = np.concatenate(([0], np.cumsum(at)))
        words = np.empty(int(ends[-1]), np.int64)
        words[ends[:-1, None] + np.arange(self._head_words)] = head
        base = (ends[:-1] + begins[0])[entry_place] + ranked[2][0] * _ENTRY
        words[base[:, None] + np.arange(_ENTRY)] = entries
        for which, table in enumerate(tables):
            base = (ends[:-1] + begins[1 + which])[places[which]] + ranked[which][0] * self._widths[which]
            for column, values in enumerate(self._columns(which, table)):
                words[base + column] = values
        data, bounds = words.tobytes(), (ends * _WORD).tolist()
        parts: list[Sequence[bytes | memoryview]] = [[data[a:b] for a, b in pairwise(bounds)]]
        parts += [[blob[a:b] for a, b in pairwise(ends.tolist())] for blob, ends in blobs]
        encoded = [b"".join(of_page) for of_page in zip(*parts, strict=True)]
        return encoded, head[:, : len(HEAD)]

    def _columns(self, which: int, table: Table) -> Iterator[Any]:
        """The words of each row, column by column."""
        yield from (table[name] for name in self._names[which])
        nulls = [key.is_null().to_numpy(zero_copy_only=False) for key in table.keys]
        for first in range(0, len(nulls), _FLAGS):
            flags = np.zeros(len(table), np.int64)
            for bit, null in enumerate(nulls[first : first + _FLAGS]):
                flags |= null.astype(np.int64) << bit
            yield flags
        for column, key in zip(self._keys, table.keys, strict=True):
            yield np.diff(column.flat(key)[1]) if column.is_long else column.words(key)

    def _long(self, table: Table, order: Ints, sizes: Ints) -> Iterator[tuple[memoryview, Ints]]:
        """The long values of each key column in the order of the pages, and where those of each page begin and end."""
        for column, key in zip(self._keys, table.keys, strict=True):
            if column.is_long:
                data, ends = column.flat(key.take(pa.array(order)))
                yield data, ends[np.concatenate(([0], np.cumsum(sizes)))] - ends[0]

    def decode(self, pages: Sequence[bytes]) -> WindowPages:
        """Takes pages apart. The rows come in the order of the pages."""
        n, head_bytes = len(pages), self._head_words * _WORD
        head = np.frombuffer(b"".join([page[:head_bytes] for page in pages]), np.int64).reshape(n, self._head_words)
        sizes = [head[:, 2], head[:, 0], head[:, 1]]
        widths = [_ENTRY, *self._widths]
        lengths = self._head_words + sum(size * width for size, width in zip(sizes, widths, strict=True))
        if self._blobs:
            data = b"".join([page[:end] for page, end in zip(pages, (lengths * _WORD).tolist(), strict=True)])
        else:
            data = b"".join(pages)
        words = np.frombuffer(data, np.int64)
        at = np.concatenate(([0], np.cumsum(lengths)))[:-1] + self._head_words
        taken = []
        for size, width in zip(sizes, widths, strict=True):
            firsts = np.repeat(at - np.concatenate(([0], np.cumsum(size * width)))[:-1], size)
            taken.append((firsts + np.arange(len(firsts)) * width, width))
            at = at + size * width
        blobs, ends = [], lengths * _WORD
        for size in head[:, len(HEAD) :].T:
            begins, ends = ends, ends + size
            bounds = zip(pages, begins.tolist(), ends.tolist(), strict=True)
            blobs.append(b"".join([page[begin:end] for page, begin, end in bounds]))
        entries = words[taken[0][0][:, None] + np.arange(_ENTRY)]
        half = self._blobs // 2
        index = self._table(0, words, taken[1][0], blobs[:half])
        yielded = self._table(1, words, taken[2][0], blobs[half:])
        return WindowPages(head[:, : len(HEAD)], index, yielded, entries, np.repeat(np.arange(n), head[:, 2]))

    def _table(self, which: int, words: Ints, rows: Ints, blobs: Sequence[bytes]) -> Table:
        """``rows``: where each row begins."""
        names = self._names[which]
        columns = {name: words[rows + at] for at, name in enumerate(names)}
        flags = [words[rows + (len(names) + at)] for at in range(self._flags)]
        long, keys = iter(blobs), []
        for i, column in enumerate(self._keys):
            values = words[rows + (len(names) + self._flags + i)]
            null = flags[i // _FLAGS] >> (i % _FLAGS) & 1 > 0
            keys.append(column.array(values, null, next(long) if column.is_long else None))
        return Table(keys, columns)


class _Column:
    """A key column. ``is_long``: its values may have more than 8 bytes, so they are not words."""

    def __init__(self, type_: pa.DataType) -> None:
        self._type = type_
        self._plain = pa.uint8() if pa.types.is_boolean(type_) else type_
        is_short = pa.types.is_null(type_) or pa.types.is_primitive(self._plain)
        self.is_long = not is_short or (not pa.types.is_null(type_) and self._plain.bit_width > 64)

    def words(self, values: pa.Array) -> Ints:
        """The bits of each value of a short column."""
        if pa.types.is_null(self._type) or not len(values):
            return np.zeros(len(values), np.int64)
        plain = values.cast(self._plain)
        width = self._plain.bit_width // 8
        bits = np.frombuffer(plain.buffers()[1], f"u{width}")[plain.offset : plain.offset + len(plain)]
        return bits.astype(np.uint64).view(np.int64)

    def flat(self, values: pa.Array) -> tuple[memoryview, Ints]:
        """The values of a long column one after the other, and where each begins and the last one ends."""
        if not len(values):
            return memoryview(b""), np.zeros(1, np.int64)
        if not pa.types.is_decimal(self._type):
            values = values.cast(pa.large_binary())
            _, offsets, data = values.buffers()
            ends: Ints = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
        else:
            ends = (np.arange(len(values) + 1) + values.offset) * (self._type.bit_width // 8)
            data = values.buffers()[1]
        return memoryview(data or b"")[int(ends[0]) : int(ends[-1])], ends

    def array(self, words: Ints, null: npt.NDArray[np.bool_], blob: bytes | None) -> pa.Array:
        """The values again. ``words``: the values, or their lengths if there is a ``blob``."""
        n = len(null)
        if pa.types.is_null(self._type):
            return pa.nulls(n)
        valid = pa.py_buffer(np.packbits(~null, bitorder="little")) if null.any() else None
        if blob is None:
            bits = words.view(np.uint64).astype(f"u{self._plain.bit_width // 8}")
            return pa.Array.from_buffers(self._plain, n, [valid, pa.py_buffer(bits)]).cast(self._type)
        if pa.types.is_decimal(self._type):
            return pa.Array.from_buffers(self._type, n, [valid, pa.py_buffer(blob)])
        offsets = np.zeros(n + 1, np.int64)
        np.cumsum(words, out=offsets[1:])
        is_text = pa.types.is_string(self._type) or pa.types.is_large_string(self._type)
        large = pa.large_string() if is_text else pa.large_binary()
        return pa.Array.from_buffers(large, n, [valid, pa.py_buffer(offsets), pa.py_buffer(blob)]).cast(self._type)


def _ranked(places: Ints, sizes: Ints) -> tuple[Ints, Ints]:
    """The number of each row among those of its page, and the rows in the order of the pages."""
    order = np.argsort(places, kind="stable") if (places[1:] < places[:-1]).any() else np.arange(len(places))
    ranks = np.empty(len(places), np.int64)
    ranks[order] = np.arange(len(places)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return ranks, order
