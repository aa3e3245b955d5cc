"""The hash of a key, 63 bits. Compacted blocks are sorted by it and have ranges of it (docs/inside/window-costs.md).
Pure.

The headers of stored blocks contain these ranges, so the hash must never change.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from aion.aggregates.values import Ints, Mask, combined
from aion.base.hashing import as_narrower, hash_rows
from aion.core.query.plan import Plan
from state_backends.thresholds import threshold

MOST_KEYS = threshold(4096, 2)
"""With more keys than this, nearly every block of a window has one of them. So they are not looked up one by one."""
TOP = 2**63 - 1
_SEED = 0x666F6C64  # differs from the seeds that split windows into files


def key_names(plan: Plan) -> list[str]:
    """The names of the key columns in blocks."""
    return list(plan.key) if plan.layout is None else [field.name for field in plan.key_fields]


def row_hashes(plan: Plan, rows: pa.RecordBatch | pa.Table) -> Ints:
    """The hash of each row's key, from 0 to 2**63 - 1. Without key columns, all rows have the same key."""
    if not plan.key or not rows.num_rows:
        return np.zeros(rows.num_rows, np.int64)
    columns = [combined(rows.column(name)) for name in key_names(plan)]
    if plan.history is not None and plan.history.keys:
        columns = [as_narrower(column, type_) for column, type_ in zip(columns, plan.history.keys, strict=True)]
    hashes = hash_rows(columns, _SEED)
    return (hashes >> np.uint64(1)).astype(np.int64)


class Keys:
    """A set of keys, by their hashes. More than ``MOST_KEYS`` keys count as all keys."""

    def __init__(self, hashes: Ints) -> None:
        distinct = np.unique(hashes)
        self._hashes = distinct if len(distinct) <= MOST_KEYS else None

    @property
    def ranges(self) -> list[tuple[int, int]] | None:
        """The sorted ranges of hashes, each of a single one, or None for all hashes."""
        return None if self._hashes is None else [(h, h) for h in self._hashes.tolist()]

    def among(self, hashes: Ints) -> Mask | None:
        """A mask of the rows whose keys are in the set, or may be, by their hashes, or None for all rows."""
        if self._hashes is None or not len(hashes):
            return None
        if not len(self._hashes):
            return np.zeros(len(hashes), bool)
        at = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        mask: Mask = self._hashes[at] == hashes
        return None if bool(mask.all()) else mask


def equal_ranges(parts: int) -> list[tuple[int, int]]:
    """Splits all hashes into this many ranges of equal size. Keys are spread evenly over them."""
    edges = [TOP * i // parts for i in range(1, parts)]
    return list(zip([0, *(e + 1 for e in edges)], [*edges, TOP], strict=True))
