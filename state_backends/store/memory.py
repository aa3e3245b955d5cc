"""All blocks in memory: the baseline that Flink's heap state is. Commits still reach the disk."""

from __future__ import annotations

from collections.abc import Sequence

from state_backends.files.names import SstFile
from state_backends.store.ledger import Entry
from state_backends.store.tiered import TieredStore


class MemoryStore(TieredStore):
    """A store whose blocks never leave memory, whatever the budget."""

    _bounded = False

    def _keeps(self, entry: Entry, late: bool) -> bool:
        return True

    def destage(self, slices: Sequence[int]) -> None:
        pass

    def shrink(self, slice_us: int, keep_bytes: int) -> str | None:
        return "this store keeps all of its blocks in memory"

    def restore(
        self, files: Sequence[SstFile], purged: frozenset[int], superseded: Sequence[tuple[int, int]] = ()
    ) -> None:
        super().restore(files, purged, superseded)
        self._load_all()
