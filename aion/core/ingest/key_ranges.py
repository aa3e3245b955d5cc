"""Where a key lies: a hash of 63 bits, by which compacted blocks are sorted and bounded (docs/compaction.md). Pure.

Stored blocks name the range of their keys' hashes, so the hash must stay what it is.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from aion.aggregates.values import Ints, Mask, combined
from aion.core.plan import Plan
from aion.core.row_hash import hash_rows

MOST_KEYS = 4096
"""So many keys lie in most blocks of any window: more are not looked for one by one."""
TOP = 2**63 - 1
_SEED = 0x666F6C64  # not one of those by which windows are split into files


def key_names(plan: Plan) -> list[str]:
    """The key columns as they stand in blocks."""
    return list(plan.key) if plan.layout is None else [field.name for field in plan.key_fields]


def row_hashes(plan: Plan, rows: pa.RecordBatch | pa.Table) -> Ints:
    """The hash of the key of each row of a block, 0 to 2**63 - 1; without key columns there is one key."""
    if not plan.key or not rows.num_rows:
        return np.zeros(rows.num_rows, np.int64)
    hashes = hash_rows([combined(rows.column(name)) for name in key_names(plan)], _SEED)
    return (hashes >> np.uint64(1)).astype(np.int64)


class Keys:
    """Some keys, by their hashes; or, if they are too many, all that there are."""

    def __init__(self, hashes: Ints) -> None:
        found = np.unique(hashes)
        self._hashes = found if len(found) <= MOST_KEYS else None

    @property
    def ranges(self) -> list[tuple[int, int]] | None:
        """Sorted, each a single hash; None: everything."""
        return None if self._hashes is None else [(h, h) for h in self._hashes.tolist()]

    def among(self, hashes: Ints) -> Mask | None:
        """Which rows are of these keys, or may be; None: all of them."""
        if self._hashes is None or not len(hashes):
            return None
        if not len(self._hashes):
            return np.zeros(len(hashes), bool)
        at = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        found: Mask = self._hashes[at] == hashes
        return None if bool(found.all()) else found


def equal_ranges(parts: int) -> list[tuple[int, int]]:
    """All hashes in so many ranges; keys fall into each equally often."""
    edges = [TOP * i // parts for i in range(1, parts)]
    return list(zip([0, *(e + 1 for e in edges)], [*edges, TOP], strict=True))
