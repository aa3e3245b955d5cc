"""The protocol of a block store, which has the blocks of one shard in memory and on disk. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple, Protocol

from state_backends.files.names import SstFile
from state_backends.format.block import Block

Runs = tuple[tuple[int, int], ...]
"""Positions of blocks in a file, from 0 on, as ascending runs (first, last) with a gap between any two."""
Alive = Callable[[int, Sequence[tuple[int, int]]], Sequence[bool]]
"""Says which blocks of a file are alive. Its arguments: the file's number, and (slice, seq) of each block in it."""


def all_alive(file_no: int, blocks: Sequence[tuple[int, int]]) -> list[bool]:
    return [True] * len(blocks)


class StoredBlock(NamedTuple):
    """A block and its number. Blocks are numbered in the order in which they are made."""

    seq: int
    block: Block

    @property
    def arrival(self) -> int:
        """The seq of the block that brought its last event: its own, unless it was compacted from other blocks."""
        compacted = self.block.header.compacted
        return self.seq if compacted is None else compacted.last_seq


class Only(NamedTuple):
    """Selects some of the blocks of slices. A field that is None excludes nothing.

    ``spans``: (after, until) by slice; selects blocks with ``after < arrival <= until``, and all blocks of slices
    without a span. ``keys``: sorted, disjoint ranges of hashes, both ends inclusive; selects blocks that may have a key
    in a range. A block with unknown keys may. ``below``: selects blocks with lower numbers.
    """

    spans: Mapping[int, tuple[int, int]] | None = None
    keys: Sequence[tuple[int, int]] | None = None
    below: int | None = None


@dataclass(slots=True)
class StagingStats:
    """How well staging served reads. A hit: a prestaged block was in memory. A miss: the read waited for the disk.

    ``ahead``: the block was not prestaged, but the read had fetched it while the function worked on earlier blocks.
    ``late``: the prestage was still under way, and the read waited until it was over. ``vain_bytes``: bytes that were
    prestaged and left memory without being read. ``blocked_s``: seconds that reads waited.
    """

    hits: int = 0
    ahead: int = 0
    misses: int = 0
    late: int = 0
    staged_bytes: int = 0
    vain_bytes: int = 0
    blocked_s: float = 0.0

    def add(self, other: StagingStats) -> None:
        for name in ("hits", "ahead", "misses", "late", "staged_bytes", "vain_bytes", "blocked_s"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(slots=True)
class StoreStats:
    """Statistics of a store. Bytes are encoded bytes of live blocks. A block in both tiers counts in both.

    ``failed_writes``: files that could not be written; their blocks stayed in memory. ``merges``: files that were made
    of others. They wrote ``merged_bytes`` again. ``failed_merges``: merges that failed and changed nothing.

    ``values``: keyed values in memory, with ``value_bytes`` of memory. ``value_hits``: keys that were looked up and did
    not need the disk; ``value_misses``: others. ``runs``: files of keyed values, with ``run_bytes``.
    """

    blocks: int = 0
    m_bucket_bytes: int = 0
    p_bucket_bytes: int = 0
    disk_only_bytes: int = 0
    failed_writes: int = 0
    merges: int = 0
    merged_bytes: int = 0
    failed_merges: int = 0
    values: int = 0
    value_bytes: int = 0
    value_hits: int = 0
    value_misses: int = 0
    runs: int = 0
    run_bytes: int = 0
    staging: StagingStats = field(default_factory=StagingStats)

    def add(self, other: StoreStats) -> None:
        for field_ in fields(self):
            if field_.name != "staging":
                setattr(self, field_.name, getattr(self, field_.name) + getattr(other, field_.name))
        self.staging.add(other.staging)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class BlockStore(Protocol):
    """The blocks of one shard. One thread writes; reads may run beside it. Appended blocks are readable at once."""

    processing_bytes_per_s: float | None
    """How fast executions process blocks, or None if it is unknown. The size of prestages depends on it."""

    def append(self, seq: int, block: Block, *, late: bool) -> None:
        """Stores a block. Waits for I/O if the memory budget is used up.

        Raises DiskError, and does not store the block, if memory is full and the disk cannot be written.
        """

    def read(self, slices: Sequence[int], *, blocking: bool = False, only: Only | None = None) -> Iterator[StoredBlock]:
        """Yields the live blocks of these slices, or ``only`` some of them, sorted by slice, then by arrival.

        The order does not depend on where a block is, so no policy changes what a function sees. Blocks on disk are
        fetched while the caller works on blocks in memory. ``blocking``: all blocks are fetched before the first is
        yielded (paper section 3.3). Raises CorruptBlock or OSError at the block that cannot be read.
        """

    def size_on_disk(self, slices: Sequence[int]) -> int:
        """Encoded bytes of the blocks of these slices that are only on disk, as the bodies of references are."""

    def tiers(self, below: int) -> dict[int, tuple[int, int]]:
        """Returns how many bytes of each slice are in memory, and how many of the others are on this host's disk.

        Only live blocks with lower numbers than ``below`` count. The rest of a slice is on a remote file system. A body
        that a worker can map without waiting for a disk is in memory. This changes nothing and waits for no I/O.
        """

    def plan(self, slices: Sequence[int], later: Sequence[int] = ()) -> None:
        """Says which slices the next batch will read, and which ``later`` ones, until it is called again.

        The destage policy learns it, too. So other slices leave memory before these, and of these, those that are read
        last leave first.
        """

    def let_go(self, size_bytes: int) -> None:
        """Frees at least this much memory, or all, of slices that only batches after the next one will read."""

    def make_room(self, room_bytes: int) -> None:
        """Frees memory of planned slices for those that the next batch reads before them. Memory has ``room_bytes``."""

    def prestage(self, slices: Sequence[int], only: Only | None = None, later: Sequence[int] = ()) -> None:
        """Starts fetching these slices, or ``only`` some of their blocks, into memory, in this order.

        Those that are read ``later`` than by the next batch come after what other shards' next batches read.
        Stops when memory is so full that blocks would have to leave it again. Does not wait.
        """

    def views(self) -> list[dict[str, Any]]:
        """Returns the fields of a policies.destage.WindowView, for each slice that has anything in memory."""

    def shrink(self, slice_us: int, keep_bytes: int) -> str | None:
        """Frees a slice's memory except for its first ``keep_bytes``. Returns the reason if it cannot free anything."""

    def destage(self, slices: Sequence[int]) -> None:
        """Frees the memory of these slices when their blocks are on disk. Does not wait."""

    def purge(self, slices: Sequence[int]) -> None:
        """Forgets the blocks of these slices. They never come back; later blocks of the same slices are others."""

    def replace(self, spans: Mapping[int, tuple[int, int]], below: int) -> None:
        """Hides blocks because others, numbered from ``below`` on, replace them.

        ``spans``: (after, until) by slice; hides older blocks with ``after < arrival <= until``. They are kept until
        :meth:`drop_replaced`. A :meth:`rollback` makes them visible again.
        """

    def drop_replaced(self) -> None:
        """Deletes the replaced blocks."""

    def persist(self, skip: Collection[int] = ()) -> list[SstFile]:
        """Waits until every live block is on disk; returns the files written since the last call.

        Does not write replaced blocks, nor the slices ``skip``, which are about to be purged. Raises OSError, or what
        RocksDB raised; then the blocks are still in memory.
        """

    def flush(self) -> None:
        """Starts writing the blocks in the outbox. Does not wait."""

    def rollback(self, from_seq: int) -> None:
        """Deletes every block from ``from_seq`` on, and files without other blocks.

        Blocks that were replaced are visible again.
        """

    def restore(self, files: Sequence[SstFile], alive: Alive = all_alive) -> None:
        """Fills an empty store with the live blocks of existing files."""

    def files(self, skip: Collection[int] = ()) -> dict[int, Runs]:
        """Returns the positions of the live blocks in each file that has some.

        Replaced blocks do not count as live, nor do those of the slices ``skip``, which are about to be purged.
        """

    def handed(self, skip: Collection[int] = ()) -> set[str]:
        """Returns the files of children with bodies of live blocks that are not replaced, nor in slices of ``skip``."""

    def trim(self) -> None:
        """Starts keeping the local copies of files within the host's budget for them, in the background."""

    def compact(self, among: Collection[int] | None = None, *, held_bytes: int = 0, disk_bytes: int = 0) -> None:
        """Puts a finished merge to use, and starts another one in the background if that is worth it.

        ``among``: the files of the last version, because their blocks will not be rolled back, or None for all files,
        for a store without versions. ``held_bytes``, ``disk_bytes``: see
        :func:`~state_backends.store.merge_choice.choose`. The next :meth:`persist` returns the merged file with the
        others.
        """

    def stats(self) -> StoreStats:
        """Returns bytes by place, and how well staging served reads."""

    def close(self) -> None:
        """Waits for I/O that is under way, then frees all memory. Published files stay."""
