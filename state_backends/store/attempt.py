"""The way of a batch into a store: an executor works with the blocks of one shard through an attempt."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Protocol

from state_backends.format.block import Block
from state_backends.format.errors import RequestError, StateError
from state_backends.format.ordered_map import Change, OrderedMap, PagedMap
from state_backends.store.protocol import BlockStore, Only, StoredBlock


class ShardAttempt(OrderedMap, Protocol):
    """The blocks and the map of one shard, as an executor sees them.

    :class:`StoreAttempt` if the store is in this process, as in LocalOperator and inside the state server;
    :class:`state_backends.server.remote_attempt.RemoteAttempt` in Spark's workers.
    """

    def append(self, blocks: Iterable[tuple[int, bool, Block]]) -> None:
        """Stores blocks, given as (seq, late, block). Their numbers must increase."""

    def read(self, slices: Sequence[int], *, blocking: bool = False, only: Only | None = None) -> Iterator[StoredBlock]:
        """The blocks of slices, or ``only`` some of them, lazily, by slice and in the order of arrival."""

    def prestage(self, slices: Sequence[int], only: Only | None = None) -> None:
        """Starts fetching these slices, or ``only`` some of their blocks, because they will be read soon."""

    def replace(self, spans: Mapping[int, tuple[int, int]], below: int) -> None:
        """Hides the blocks of these slices that came in these spans. Blocks from ``below`` on replace them."""

    def abandon(self, from_seq: int) -> None:
        """After a failure: forgets the blocks numbered from there on. What they replaced is visible again."""

    def release(self, destage: Sequence[int], purge: Sequence[int]) -> None:
        """Memory may let go of the slices ``destage``. Nobody needs the slices ``purge`` any longer.

        The purge takes effect when the attempt ends, so an attempt that fails has purged nothing. A slice that gets
        blocks until then is not purged: its old blocks stay beside them.
        """


class StoreAttempt:
    """A :class:`ShardAttempt` on a store of this process. It serves one attempt after another.

    Until an attempt ends, everything it did can be undone: block numbers only grow, replaced blocks are only hidden,
    and purges wait for the end. To make a version of the attempt, do it before :meth:`end`.
    """

    def __init__(self, store: BlockStore, values: PagedMap | None = None) -> None:
        self.store = store
        self.map = values
        self._first_seq = 0
        self._last_seq = -1
        self._purging: list[int] = []

    def begin(self, next_seq: int) -> None:
        """Starts an attempt. ``next_seq``: the number of its first block."""
        self._first_seq, self._last_seq = next_seq, next_seq - 1
        self._purging = []

    @property
    def last_seq(self) -> int:
        """The number of the newest block."""
        return self._last_seq

    @property
    def purging(self) -> Collection[int]:
        """The slices that go when the attempt ends."""
        return self._purging

    def append(self, blocks: Iterable[tuple[int, bool, Block]]) -> None:
        """Keeps (seq, late, block). Raises RequestError, and keeps none, unless the numbers grow."""
        blocks = list(blocks)
        last = self._last_seq
        for seq, _, _ in blocks:
            if seq <= last:
                raise RequestError(f"append: block {seq} comes after block {last}; block numbers must increase")
            last = seq
        # If the store fails half-way, these numbers are still used up: no later block gets one of them.
        self._last_seq = last
        if self._purging:
            # A segment that nobody needed gets blocks again if windows that did not exist begin in it.
            kept = {block.header.slice_us for _, _, block in blocks}
            self._purging = [slice_us for slice_us in self._purging if slice_us not in kept]
        for seq, late, block in blocks:
            self.store.append(seq, block, late=late)

    def read(self, slices: Sequence[int], *, blocking: bool = False, only: Only | None = None) -> Iterator[StoredBlock]:
        return self.store.read(slices, blocking=blocking, only=only)

    def prestage(self, slices: Sequence[int], only: Only | None = None) -> None:
        self.store.prestage(slices, only)

    def replace(self, spans: Mapping[int, tuple[int, int]], below: int) -> None:
        self.store.replace(spans, below)

    def abandon(self, from_seq: int) -> None:
        self.store.rollback(from_seq)

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return list(chain.from_iterable(self._values.get(keys)))

    def put(self, values: Sequence[Change]) -> None:
        self._values.put(values)

    def scan(self, begin: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        return self._values.scan(begin, end)

    @property
    def _values(self) -> PagedMap:
        if self.map is None:
            raise StateError("this attempt has no store for keyed values")
        return self.map

    def release(self, destage: Sequence[int], purge: Sequence[int]) -> None:
        self.store.destage(destage)
        self._purging += purge

    def end(self) -> None:
        """Ends the attempt: what it purged or replaced goes for good."""
        purging, self._purging = self._purging, []
        self.store.purge(purging)
        self.store.drop_replaced()

    def undo(self) -> None:
        """Forgets everything that the attempt did."""
        self.store.rollback(self._first_seq)
        self._purging = []
