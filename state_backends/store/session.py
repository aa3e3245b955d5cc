"""The store as an executor sees it: the blocks of one shard, during one batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from aion.core.ingest.block import Block
from state_backends.store.protocol import BlockStore, Only, StoredBlock


class ShardSession(Protocol):
    """The blocks of one shard. LocalOperator has them in the same process; on Spark the state server has them."""

    def append(self, blocks: Iterable[tuple[int, bool, Block]]) -> None:
        """Stores blocks, given as (seq, late, block). Their numbers must increase."""

    def read(self, slices: Sequence[int], *, blocking: bool = False, only: Only | None = None) -> Iterator[StoredBlock]:
        """Yields the blocks of slices, or ``only`` some of them, sorted by slice, then by arrival."""

    def prestage(self, slices: Sequence[int], only: Only | None = None) -> None:
        """Starts fetching these slices, or ``only`` some of their blocks, because they will be read soon."""

    def replace(self, spans: Mapping[int, tuple[int, int]], below: int) -> None:
        """Blocks numbered from ``below`` on replace others: see :meth:`BlockStore.replace`."""

    def abandon(self, from_seq: int) -> None:
        """Deletes blocks numbered from there on after a failure. What they replaced is visible again."""

    def release(self, destage: Sequence[int], purge: Sequence[int]) -> None:
        """Moves the slices ``destage`` out of memory, and deletes the slices ``purge``, which nobody needs any more."""


class StoreSession:
    """A :class:`ShardSession` on a store without versions. Purged and replaced blocks are deleted at once."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store

    def append(self, blocks: Iterable[tuple[int, bool, Block]]) -> None:
        for seq, late, block in blocks:
            self._store.append(seq, block, late=late)

    def read(self, slices: Sequence[int], *, blocking: bool = False, only: Only | None = None) -> Iterator[StoredBlock]:
        return self._store.read(slices, blocking=blocking, only=only)

    def prestage(self, slices: Sequence[int], only: Only | None = None) -> None:
        self._store.prestage(slices, only)

    def replace(self, spans: Mapping[int, tuple[int, int]], below: int) -> None:
        self._store.replace(spans, below)
        self._store.drop_replaced()

    def abandon(self, from_seq: int) -> None:
        self._store.rollback(from_seq)

    def release(self, destage: Sequence[int], purge: Sequence[int]) -> None:
        self._store.destage(destage)
        self._store.purge(purge)
