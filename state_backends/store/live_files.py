"""The files of a store that hold live blocks: how many of each slice, and how many bytes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class LiveFile:
    """``slices``: every slice that the file holds, and how many live blocks of it, maybe 0. Bytes are of blocks.

    ``size_bytes``: dead ones included. ``newest_us``: the newest slice with a live block. ``buried``: blocks that died
    before their slices, as (slice, seq).
    """

    slices: dict[int, int]
    size_bytes: int
    live_bytes: int
    newest_us: int
    buried: set[tuple[int, int]] = field(default_factory=set)


class LiveFiles:
    """By file number. Not locked: the store's lock is held around every call."""

    def __init__(self) -> None:
        self._files: dict[int, LiveFile] = {}

    def __contains__(self, file_no: int) -> bool:
        return file_no in self._files

    def __getitem__(self, file_no: int) -> LiveFile:
        return self._files[file_no]

    def __iter__(self) -> Iterator[int]:
        return iter(self._files)

    def add(self, file_no: int, blocks: Iterable[tuple[int, int]]) -> None:
        """A new file, with (slice, bytes) of its blocks; none of them counts as live yet."""
        slices: dict[int, int] = {}
        size = 0
        for slice_us, size_bytes in blocks:
            slices[slice_us] = 0
            size += size_bytes
        self._files[file_no] = LiveFile(slices, size, 0, max(slices, default=0))

    def gain(self, file_no: int, slice_us: int, size_bytes: int) -> None:
        """A block of the file is live."""
        file = self._files[file_no]
        file.slices[slice_us] += 1
        file.live_bytes += size_bytes

    def lose(self, file_no: int, slice_us: int, size_bytes: int) -> None:
        """A block of the file is dead, or lives in another one."""
        file = self._files[file_no]
        file.slices[slice_us] -= 1
        file.live_bytes -= size_bytes
        if slice_us == file.newest_us and not file.slices[slice_us]:
            # Slices mostly die oldest first: this is rare.
            file.newest_us = max((s for s, blocks in file.slices.items() if blocks), default=slice_us)

    def bury(self, file_no: int, slice_us: int, seq: int) -> None:
        """A block of the file is dead, and others stand for it in the same slice."""
        self._files[file_no].buried.add((slice_us, seq))

    def buried(self) -> set[tuple[int, int]]:
        """(slice, seq) of every block that died before its slice."""
        return set().union(*(file.buried for file in self._files.values()))

    def remove_if_dead(self, file_no: int) -> bool:
        """Forgets the file if nothing in it is alive, and says so."""
        if self._files[file_no].live_bytes:
            return False
        del self._files[file_no]
        return True

    def counts(self) -> dict[int, dict[int, int]]:
        """For each file every slice that it holds, and how many live blocks of it."""
        return {no: dict(file.slices) for no, file in self._files.items()}
