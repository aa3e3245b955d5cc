"""The protocol that the three stores share: the blocks of one shard, wherever they are."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple, Protocol

from state_backends.block import Block


class StoredBlock(NamedTuple):
    """A block and its number in the order of arrival."""

    seq: int
    block: Block


class SstFile(NamedTuple):
    """An immutable file of blocks: its number, path, size, and the CRC of its index of blocks."""

    file_no: int
    path: str
    size_bytes: int
    index_crc: int
    blocks: int


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Bytes are encoded bytes of live blocks; a block in both tiers counts in both."""

    blocks: int
    m_bucket_bytes: int
    p_bucket_bytes: int
    disk_only_bytes: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)


class BlockStore(Protocol):
    """Threads: one writer; reads may run beside it. Appended blocks are readable at once."""

    def append(self, seq: int, block: Block, *, late: bool) -> None:
        """Keeps a block. May wait for I/O when the memory budget is used up."""

    def read(self, slices: Sequence[int]) -> Iterator[StoredBlock]:
        """The live blocks of these slices, lazily, by slice and in the order of arrival.

        The same order whatever tier they are in, so that no policy changes what a function sees.
        Raises CorruptBlock or OSError at the block that cannot be read.
        """

    def destage(self, slices: Sequence[int]) -> None:
        """Frees the memory of these slices as soon as their blocks are on disk. Does not wait."""

    def purge(self, slices: Sequence[int]) -> None:
        """Forgets these slices; they never come back."""

    def persist(self, skip: Collection[int] = ()) -> list[SstFile]:
        """Waits until every live block is on disk; returns the files written since the last call.

        Blocks of the slices in ``skip`` are about to be purged and need not be written. Raises OSError, or
        what RocksDB raised; the blocks are then still in memory.
        """

    def flush(self) -> None:
        """Starts writing what is due to be written, without waiting for it."""

    def rollback(self, from_seq: int) -> None:
        """Forgets every block from ``from_seq`` on, and the files that hold nothing else."""

    def restore(self, files: Sequence[SstFile], purged: frozenset[int]) -> None:
        """Takes over the blocks of existing files, but for those of purged slices, into an empty store."""

    def files(self) -> dict[int, dict[int, int]]:
        """For each file with live blocks: every slice it holds, and how many live blocks of it (maybe 0)."""

    def stats(self) -> StoreStats:
        """What is where, in bytes."""

    def close(self) -> None:
        """Waits for I/O under way and lets go of everything; files stay."""
