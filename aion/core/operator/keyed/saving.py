"""Stores the index of keyed windows with the blocks of a shard, as blocks of slices that hold no events. Pure.

Each version adds a block with the rows that changed since the version before. Once a slice would hold more than twice
as many rows as its first block, all rows are written again into a new slice, and the old slice is purged. So a version
writes about as much as changed, and the stored blocks take at most about twice the index.

A row has these columns: ``k0, k1, ...``, the key; ``role``, 0 for a row of the index, 1 for a row of what was yielded,
2 if the row ``id`` was removed; ``id``; and ``c0`` to ``c6``, the columns of its role in their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from aion.aggregates.values import as_batch
from aion.core.operator.keyed.shapes import INDEX
from aion.core.operator.keyed.table import Ints, Table
from aion.core.operator.keyed.windows import YIELDED, KeyedWindows
from aion.core.slicing.grid import NO_SLICE
from state_backends.thresholds import threshold

ROLES = {0: INDEX[1:], 1: YIELDED[1:]}
_VALUES = max(map(len, ROLES.values()))
REMOVED = 2
_FEW_ROWS = threshold(1024)


class Save(NamedTuple):
    """Rows to append under ``slice_us``. ``replaces``: the old slices that they replace."""

    slice_us: int
    rows: pa.RecordBatch
    replaces: tuple[int, ...]


class Keeper:
    """Stores and loads the index of one definition. ``snapshot``: from :meth:`snapshot`. None or empty at first."""

    def __init__(self, keyed: KeyedWindows, definitions: int, snapshot: Mapping[str, int] | None = None) -> None:
        self._keyed = keyed
        self._definitions = definitions
        state = snapshot or {"generation": -1, "all": 0, "written": 0}
        self._generation, self._all, self._written = state["generation"], state["all"], state["written"]
        self._saved = self._both()

    @property
    def schema(self) -> pa.Schema:
        keys = [pa.field(f"k{i}", type_) for i, type_ in enumerate(self._keyed.key_types)]
        values = [pa.field(f"c{i}", pa.int64()) for i in range(_VALUES)]
        return pa.schema([*keys, pa.field("role", pa.int8()), pa.field("id", pa.int64()), *values])

    @property
    def slices(self) -> tuple[int, ...]:
        """The slices that hold the index. Empty if it was never saved."""
        return () if self._generation < 0 else (self._slice(),)

    def load(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Restores the index from the blocks of ``slices``, given oldest first."""
        table = pa.Table.from_batches(list(batches), self.schema).combine_chunks()
        ids, roles = table.column("id").to_numpy(), table.column("role").to_numpy()
        _, last = np.unique(ids[::-1], return_index=True)
        rows = len(ids) - 1 - last
        for role, names in ROLES.items():
            some = table.take(pa.array(rows[roles[rows] == role]))
            keys = [some.column(f"k{i}").combine_chunks() for i in range(len(self._keyed.key_types))]
            columns = {"id": some.column("id").to_numpy()}
            columns |= {name: some.column(f"c{i}").to_numpy() for i, name in enumerate(names)}
            if role == 0:
                index = Table(keys, columns)
            else:
                yielded = Table(keys, columns)
        self._keyed.load(self._keyed.shape.sorted(index), yielded)
        self._saved = self._both()

    def save(self) -> Save | None:
        """What the next version has to write. None if nothing changed."""
        before, after = self._saved, self._both()
        rows = [_changed(before[role], after[role]) for role in ROLES]
        removed = np.concatenate([_removed(before[role]["id"], after[role]["id"]) for role in ROLES])
        changed = sum(map(len, rows)) + len(removed)
        if not changed:
            return None
        self._saved = after
        replaces: tuple[int, ...] = ()
        if self._generation < 0 or self._written + changed > 2 * max(self._all, _FEW_ROWS):
            replaces = self.slices
            rows, removed = list(after), removed[:0]
            self._generation += 1
            self._written = 0
            self._all = changed = sum(map(len, rows))
        self._written += changed
        return Save(self._slice(), self._batch(rows, removed), replaces)

    def snapshot(self) -> dict[str, int]:
        return {"generation": self._generation, "all": self._all, "written": self._written}

    def _slice(self) -> int:
        return NO_SLICE + 1 + self._generation * self._definitions + self._keyed.definition

    def _both(self) -> tuple[Table, Table]:
        return self._keyed.index, self._keyed.yielded

    def _batch(self, tables: Sequence[Table], removed: Ints) -> pa.RecordBatch:
        parts = []
        for (role, names), table in zip(ROLES.items(), tables, strict=True):
            parts.append(self._rows(table.keys, role, table["id"], [table[name] for name in names]))
        nothing = [pa.nulls(len(removed), type_) for type_ in self._keyed.key_types]
        parts.append(self._rows(nothing, REMOVED, removed, []))
        return as_batch(pa.Table.from_batches(parts))

    def _rows(self, keys: Sequence[pa.Array], role: int, ids: Ints, values: Sequence[Ints]) -> pa.RecordBatch:
        n = len(ids)
        padded = [*values, *(np.zeros(n, np.int64) for _ in range(_VALUES - len(values)))]
        columns: list[Any] = [*keys, pa.array(np.full(n, role, np.int8)), pa.array(ids), *map(pa.array, padded)]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def _removed(before: Ints, after: Ints) -> Ints:
    """The ids of ``before`` that are not in ``after``. No id occurs twice in either."""
    if np.array_equal(before, after[: len(before)]):
        return before[:0]
    if not len(after):
        return before
    order = np.sort(after, kind="stable")  # fast if they are sorted, or nearly
    missing: Ints = before[order[np.minimum(np.searchsorted(order, before), len(order) - 1)] != before]
    return missing


def _changed(before: Table, after: Table) -> Table:
    """The rows of ``after`` that are new or differ from ``before``. Rows are matched by ``id``."""
    if after is before or not len(after):
        return after.take(np.empty(0, np.int64))
    shared = min(len(before), len(after))
    if np.array_equal(before["id"][:shared], after["id"][:shared]):
        changed = np.ones(len(after), np.bool_)
        changed[:shared] = False
        for name in after.columns:
            changed[:shared] |= before[name][:shared] != after[name][:shared]
        return after.take(changed)
    order = np.argsort(before["id"], kind="stable")
    ids = before["id"][order]
    if not len(ids):
        return after
    at = np.minimum(np.searchsorted(ids, after["id"]), len(ids) - 1)
    source = order[at]
    same = ids[at] == after["id"]
    for name in after.columns:
        same &= before[name][source] == after[name]
    return after.take(~same)
