"""Tables of key columns and integer columns, and how to compare keys across several of them. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from aion.aggregates.groups import number
from aion.aggregates.values import combined, one_zero
from aion.base.hashing import hash_rows
from state_backends.thresholds import threshold

Ints = npt.NDArray[np.int64]


class Table:
    """``keys``: an Arrow array for each key column. ``columns``: integers by name. All have the same length."""

    __slots__ = ("columns", "keys", "rows")

    def __init__(self, keys: Sequence[pa.Array], columns: Mapping[str, Ints]) -> None:
        self.keys = list(keys)
        self.columns = dict(columns)
        self.rows = len(next(iter(self.columns.values())))

    @classmethod
    def empty(cls, types: Sequence[pa.DataType], names: Sequence[str]) -> Table:
        return cls([pa.array([], type_) for type_ in types], {name: np.empty(0, np.int64) for name in names})

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, name: str) -> Ints:
        return self.columns[name]

    def take(self, which: npt.NDArray[Any]) -> Table:
        """Some of the rows. ``which``: a mask, or row numbers."""
        if which.dtype == np.bool_:
            if which.all():
                return self
            which = np.flatnonzero(which)
        rows = pa.array(which)
        return Table([key.take(rows) for key in self.keys], {n: c[which] for n, c in self.columns.items()})

    def replaced(self, **columns: Ints) -> Table:
        """The same table with some columns added or replaced."""
        return Table(self.keys, {**self.columns, **columns})


def stacked(tables: Sequence[Table]) -> Table:
    """All rows of the tables, in order. The result has the columns of the first table."""
    some = [table for table in tables if len(table)] or list(tables[:1])
    if len(some) == 1:
        return some[0]
    keys = [combined(pa.chunked_array(columns)) for columns in zip(*(t.keys for t in some), strict=True)]
    return Table(keys, {name: np.concatenate([t[name] for t in some]) for name in tables[0].columns})


def coded(*keys: tuple[Sequence[pa.Array], int]) -> list[Ints]:
    """Numbers the keys: a small integer for each row. Equal keys get the same number in all arguments.

    ``keys``: pairs of key columns and their number of rows.
    """
    rows = [n for _, n in keys]
    columns = [combined(pa.chunked_array(list(parts))) for parts in zip(*(k for k, _ in keys), strict=True)]
    ids = number(columns, sum(rows)).ids
    bounds = np.concatenate(([0], np.cumsum(rows)))
    return [ids[begin:end] for begin, end in itertools.pairwise(bounds)]


def codes_of(*tables: Table) -> list[Ints]:
    """The same as :func:`coded`, for tables."""
    return coded(*((table.keys, len(table)) for table in tables))


def hashes_of(table: Table) -> Ints:
    """A hash of each row's key, at least 0. State is stored by it, so it must never change."""
    if not table.keys:
        return np.zeros(len(table), np.int64)
    return (hash_rows([*map(one_zero, table.keys)], _SEED) >> np.uint64(1)).astype(np.int64)


_SEED = 0x70616765  # differs from the seeds that split windows into files, and sort compacted blocks


class Places:
    """Rows in the order of (key, instant), to be searched for many keys at once.

    Key and instant are packed into one integer. ``codes``: the keys, as numbers from :func:`codes_of`.
    """

    def __init__(self, codes: Ints, times_us: Ints) -> None:
        self._low, self._high = (int(times_us.min()), int(times_us.max())) if len(times_us) else (0, 0)
        self._beyond = int(codes.max(initial=-1)) + 1
        self._width = self._high - self._low + 3
        self._times: Ints | None = None
        if self._width > _ROOM // (self._beyond + 1):
            # Key and time do not fit into 64 bits together. A key and a time's rank always do.
            self._times = np.unique(times_us)
            self._width = len(self._times) + 2
        self.placed = codes * self._width + self._ranks(times_us)

    @classmethod
    def ordering(cls, codes: Ints, times_us: Ints, seqs: Ints) -> tuple[Ints, Places]:
        """Makes it from rows in any order. Also returns their order by (key, instant, seq). The sort is stable."""
        places = cls(codes, times_us)
        order = np.lexsort((seqs, places.placed))
        places.placed = places.placed[order]
        return order, places

    def before(self, codes: Ints, times_us: Ints) -> Ints:
        """For each key and instant: the number of the key's first row at or after it.

        If there is none, it is the number of the first row of the next key.
        """
        return self._found(codes, self._ranks(times_us))

    def after(self, codes: Ints, times_us: Ints) -> Ints:
        """The same as :meth:`before`, for the first row after the instant."""
        if self._times is None:
            return self._found(codes, np.clip(times_us, self._low - 1, self._high) + (2 - self._low))
        return self._found(codes, np.searchsorted(self._times, times_us, side="right") + 1)

    def _ranks(self, times_us: Ints) -> Ints:
        """The rank of each instant: from 1 on for the rows' instants, 0 for earlier ones."""
        if self._times is None:
            return np.asarray(np.clip(times_us, self._low - 1, self._high + 1) + (1 - self._low))
        return np.asarray(np.searchsorted(self._times, times_us) + 1)

    def _found(self, codes: Ints, ranks: Ints) -> Ints:
        return np.asarray(np.searchsorted(self.placed, np.minimum(codes, self._beyond) * self._width + ranks))


_ROOM = threshold(2**62, 256)
