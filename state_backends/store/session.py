"""What an executor works with: the blocks of one shard, for one batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from aion.core.ingest.block import Block
from state_backends.store.protocol import BlockStore, Only, StoredBlock


class ShardSession(Protocol):
    """The blocks of one shard. In LocalOperator they are in the same process; on Spark, behind the state server."""

    def append(self, blocks: Iterable[tuple[int, bool, Block]]) -> None:
        """Keeps (seq, late, block). Numbers only grow."""

    def read(self, slices: Sequence[int], *, blocking: bool = False, only: Only | None = None) -> Iterator[StoredBlock]:
        """Blocks of slices, or ``only`` some of them, lazily, by slice and in the order of arrival."""

    def prestage(self, slices: Sequence[int], only: Only | None = None) -> None:
        """Announces that these slices, or ``only`` some of their blocks, will be read soon."""

    def replace(self, spans: Mapping[int, tuple[int, int]], below: int) -> None:
        """Blocks numbered from ``below`` on replace those of these slices that came in these spans."""

    def abandon(self, from_seq: int) -> None:
        """Something failed: blocks numbered from there on replace nothing."""

    def release(self, destage: Sequence[int], purge: Sequence[int]) -> None:
        """Memory may let go of the slices ``destage``. Nobody needs the slices ``purge`` any longer."""


class StoreSession:
    """A :class:`ShardSession` on a store without versions: what is released or replaced goes at once."""

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
