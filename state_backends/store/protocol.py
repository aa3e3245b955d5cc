"""The protocol that the three stores share: the blocks of one shard, wherever they are. Pure."""

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
        """The number under which the last of its events came; its own, unless it was made of others."""
        folded = self.block.header.folded
        return self.seq if folded is None else folded.last_seq


class Only(NamedTuple):
    """Which blocks of some slices are wanted; None: it makes no difference.

    ``spans``: slice to (after, until): arrivals above the one and up to the other; all of a slice that is not named.
    ``keys``: sorted and disjoint ranges of hashes, both ends inclusive: blocks that may hold such a key, which are
    also those of which nothing is known. ``below``: blocks of lower numbers.
    """

    spans: Mapping[int, tuple[int, int]] | None = None
    keys: Sequence[tuple[int, int]] | None = None
    below: int | None = None


@dataclass(slots=True)
class StagingStats:
    """How staging served reads. A hit found in memory what was prestaged; a miss waited for the disk.

    ``late``: prestaged too late, so that the read waited for the rest of it. ``vain_bytes``: prestaged and let go
    without having been read. ``blocked_s``: seconds that reads waited.
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
    """Bytes are encoded bytes of live blocks; a block in both tiers counts in both.

    ``failed_writes``: of files; their blocks stayed in memory. ``merges``: of files, by which ``merged_bytes`` were
    written once more; ``failed_merges`` changed nothing.
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
    """Threads: one writer; reads may run beside it. Appended blocks are readable at once."""

    processing_bytes_per_s: float | None
    """How fast executions get through blocks, as far as it is known: what the size of m-buckets depends on."""

    def append(self, seq: int, block: Block, *, late: bool) -> None:
        """Keeps a block. May wait for I/O when the memory budget is used up.

        Raises DiskError, and does not keep it, if then nothing can be written.
        """

    def read(self, slices: Sequence[int], *, blocking: bool = False, only: Only | None = None) -> Iterator[StoredBlock]:
        """The live blocks of these slices, or ``only`` some of them, lazily, by slice and in the order of arrival.

        The same order whatever tier they are in, so that no policy changes what a function sees; what is on disk is
        staged behind what is in memory. ``blocking``: everything is staged before the first block is yielded (paper
        section 3.3). Raises CorruptBlock or OSError at the block that cannot be read.
        """

    def size_on_disk(self, slices: Sequence[int]) -> int:
        """Encoded bytes of these slices that only the disk has."""

    def prestage(self, slices: Sequence[int], only: Only | None = None) -> None:
        """Starts bringing these slices, or ``only`` some of their blocks, into memory, in this order.

        As far as the budget allows. Does not wait.
        """

    def views(self) -> list[dict[str, Any]]:
        """What a destage policy may know of each slice with anything in memory: see policies.destage.WindowView."""

    def shrink(self, slice_us: int, keep_bytes: int) -> str | None:
        """Frees a slice's memory but for its first ``keep_bytes``; the reason if there is nothing to free."""

    def destage(self, slices: Sequence[int]) -> None:
        """Frees the memory of these slices as soon as their blocks are on disk. Does not wait."""

    def purge(self, slices: Sequence[int]) -> None:
        """Forgets these slices; they never come back."""

    def replace(self, spans: Mapping[int, tuple[int, int]], below: int) -> None:
        """From now on the blocks of these slices that came after the first number, up to the second, are not read.

        Those numbered from ``below`` on stand for them. They are kept until :meth:`drop_replaced`, and are there
        again after a :meth:`rollback`.
        """

    def replaced(self, skip: Collection[int] = ()) -> list[tuple[int, int]]:
        """Blocks that are dead although files with live blocks hold them, as runs (first seq, last seq).

        No live block lies within a run. Slices in ``skip`` are left out: none of their blocks is alive.
        """

    def drop_replaced(self) -> None:
        """Forgets what was superseded, for good."""

    def persist(self, skip: Collection[int] = ()) -> list[SstFile]:
        """Waits until every live block is on disk; returns the files written since the last call.

        Blocks of the slices in ``skip`` are about to be purged and need not be written, nor what was superseded.
        Raises OSError, or what RocksDB raised; the blocks are then still in memory.
        """

    def flush(self) -> None:
        """Starts writing what is due to be written, without waiting for it."""

    def rollback(self, from_seq: int) -> None:
        """Forgets every block from ``from_seq`` on, and the files that hold nothing else.

        What they superseded is alive again.
        """

    def restore(
        self, files: Sequence[SstFile], purged: frozenset[int], replaced: Sequence[tuple[int, int]] = ()
    ) -> None:
        """Takes over the blocks of existing files into an empty store, but for those of purged slices.

        ``superseded``: runs of blocks that are dead, too; see :meth:`replaced`.
        """

    def files(self) -> dict[int, dict[int, int]]:
        """For each file with live blocks: every slice it holds, and how many live blocks of it (maybe 0).

        What is superseded does not count as alive.
        """

    def compact(self, among: Collection[int] | None = None, *, held_bytes: int = 0, disk_bytes: int = 0) -> None:
        """Starts merging some of these files in the background, if that is worth it, or uses what was merged.

        ``among``: the files of the last version; none of their blocks will be rolled back. None: of a store without
        versions, all. ``held_bytes``, ``disk_bytes``: see :func:`aion.core.compaction.files.choose`. A merged file is
        among those that the next :meth:`persist` returns.
        """

    def stats(self) -> StoreStats:
        """What is where, in bytes, and how staging did."""

    def staging(self, slice_us: int) -> StagingStats:
        """How staging served the reads of one live slice."""

    def close(self) -> None:
        """Waits for I/O under way and lets go of everything; files stay."""
