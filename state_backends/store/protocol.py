"""The protocol of a block store: the blocks of one shard, wherever they are. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple, Protocol

from aion.core.ingest.block import Block
from state_backends.files.names import SstFile


class StoredBlock(NamedTuple):
    """A block and its number in the order of arrival."""

    seq: int
    block: Block

    @property
    def arrival(self) -> int:
        """The number under which the last of its events came. Its own, unless it was compacted from other blocks."""
        compacted = self.block.header.compacted
        return self.seq if compacted is None else compacted.last_seq


class Only(NamedTuple):
    """Which blocks of some slices are wanted. None: this field excludes nothing.

    ``spans``: by slice (after, until), arrivals above the first number and up to the second. A slice without a span is
    wanted whole. ``keys``: sorted and disjoint ranges of hashes, both ends inclusive. A block is wanted if it may hold
    such a key; a block with unknown keys may. ``below``: blocks with lower numbers.
    """

    spans: Mapping[int, tuple[int, int]] | None = None
    keys: Sequence[tuple[int, int]] | None = None
    below: int | None = None


@dataclass(slots=True)
class StagingStats:
    """How staging served reads. A hit found a prestaged block in memory. A miss waited for the disk.

    ``late``: the prestage was still under way, and the read waited for its end. ``vain_bytes``: prestaged, and gone
    from memory without a read. ``blocked_s``: seconds that reads waited.
    """

    hits: int = 0
    misses: int = 0
    late: int = 0
    staged_bytes: int = 0
    vain_bytes: int = 0
    blocked_s: float = 0.0

    def add(self, other: StagingStats) -> None:
        for name in ("hits", "misses", "late", "staged_bytes", "vain_bytes", "blocked_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class StoreStats:
    """Bytes are encoded bytes of live blocks. A block in both tiers counts in both.

    ``failed_writes``: files that could not be written; their blocks stayed in memory. ``merges``: files made of others,
    which wrote ``merged_bytes`` once more. ``failed_merges`` changed nothing.
    """

    blocks: int = 0
    m_bucket_bytes: int = 0
    p_bucket_bytes: int = 0
    disk_only_bytes: int = 0
    failed_writes: int = 0
    merges: int = 0
    merged_bytes: int = 0
    failed_merges: int = 0
    staging: StagingStats = field(default_factory=StagingStats)

    def add(self, other: StoreStats) -> None:
        for field_ in fields(self):
            if field_.name != "staging":
                setattr(self, field_.name, getattr(self, field_.name) + getattr(other, field_.name))
        self.staging.add(other.staging)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class BlockStore(Protocol):
    """One thread writes; reads may run beside it. Appended blocks are readable at once."""

    processing_bytes_per_s: float | None
    """How fast executions get through blocks, if that is known. The size of prestages depends on it."""

    def append(self, seq: int, block: Block, *, late: bool) -> None:
        """Keeps a block. Waits for I/O when the memory budget is used up.

        Raises DiskError, and does not keep the block, if memory is full and the disk takes nothing.
        """

    def read(self, slices: Sequence[int], *, blocking: bool = False, only: Only | None = None) -> Iterator[StoredBlock]:
        """The live blocks of these slices, or ``only`` some of them, lazily, by slice and in the order of arrival.

        The order does not depend on where a block is, so no policy changes what a function sees. Blocks on disk are
        fetched while the caller works on blocks in memory. ``blocking``: all are fetched before the first is yielded
        (paper section 3.3). Raises CorruptBlock or OSError at the block that cannot be read.
        """

    def size_on_disk(self, slices: Sequence[int]) -> int:
        """Encoded bytes of the blocks of these slices that only the disk has."""

    def prestage(self, slices: Sequence[int], only: Only | None = None) -> None:
        """Starts bringing these slices, or ``only`` some of their blocks, into memory, in this order.

        Stops where the budget is used up. Does not wait.
        """

    def views(self) -> list[dict[str, Any]]:
        """What a destage policy may know of each slice with anything in memory. See policies.destage.WindowView."""

    def shrink(self, slice_us: int, keep_bytes: int) -> str | None:
        """Frees a slice's memory except for its first ``keep_bytes``. Returns why there is nothing to free, or None."""

    def destage(self, slices: Sequence[int]) -> None:
        """Frees the memory of these slices as soon as their blocks are on disk. Does not wait."""

    def purge(self, slices: Sequence[int]) -> None:
        """Forgets these slices. They never come back."""

    def replace(self, spans: Mapping[int, tuple[int, int]], below: int) -> None:
        """Hides the blocks of these slices that came after the first number and up to the second.

        Blocks numbered from ``below`` on replace them. The hidden blocks are kept until :meth:`drop_replaced`; a
        :meth:`rollback` shows them again.
        """

    def replaced(self, skip: Collection[int] = ()) -> list[tuple[int, int]]:
        """Replaced blocks that are still in files with live blocks, as runs (first seq, last seq).

        No live block lies within a run. Slices in ``skip`` are left out: none of their blocks is alive.
        """

    def drop_replaced(self) -> None:
        """Forgets the replaced blocks for good."""

    def persist(self, skip: Collection[int] = ()) -> list[SstFile]:
        """Waits until every live block is on disk; returns the files written since the last call.

        Slices in ``skip`` are about to be purged: they need not be written, nor replaced blocks. Raises OSError, or
        what RocksDB raised; the blocks are then still in memory.
        """

    def flush(self) -> None:
        """Starts writing what waits to be written. Does not wait."""

    def rollback(self, from_seq: int) -> None:
        """Forgets every block from ``from_seq`` on, and the files that hold nothing else.

        What these blocks replaced is visible again.
        """

    def restore(
        self, files: Sequence[SstFile], purged: frozenset[int], replaced: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Takes over the blocks of existing files into an empty store, without those of purged slices.

        ``replaced``: runs of blocks that are dead, too; see :meth:`replaced`.
        """

    def files(self) -> dict[int, dict[int, int]]:
        """For each file with live blocks: every slice that it holds, and its number of live blocks, which may be 0.

        Replaced blocks do not count as live.
        """

    def compact(self, among: Collection[int] | None = None, *, held_bytes: int = 0, disk_bytes: int = 0) -> None:
        """Starts merging some of these files in the background, if that is worth it. Or uses what was merged.

        ``among``: the files of the last version; none of their blocks will be rolled back. None: all files, in a store
        without versions. ``held_bytes``, ``disk_bytes``: see :func:`aion.core.compaction.files.choose`. The next
        :meth:`persist` returns a merged file with the others.
        """

    def stats(self) -> StoreStats:
        """What is where, in bytes, and how staging did."""

    def close(self) -> None:
        """Waits for I/O under way and frees everything. Files stay."""
