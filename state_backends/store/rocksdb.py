"""All blocks on disk, on demand: the baseline that Flink's RocksDB state is."""

from __future__ import annotations

from state_backends.store.ledger import Entry
from state_backends.store.tiered import TieredStore


class RocksStore(TieredStore):
    """A store that keeps nothing in memory but what is on its way to the disk."""

    def _keeps(self, entry: Entry, late: bool) -> bool:
        return False
