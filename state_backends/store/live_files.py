"""The files of a store that hold live blocks: how many of each slice, and how many bytes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from state_backends.files.names import SstFile


@dataclass(slots=True)
class LiveFile:
    """One file. Bytes are bytes of blocks.

    ``slices``: every slice that the file holds, and its number of live blocks, which may be 0. ``size_bytes``: all
    blocks, dead ones included. ``newest_us``: the newest slice with a live block. ``buried``: blocks that died before
    their slices, as (slice, seq). ``damaged``: a block of it cannot be read, so it is never merged.
    """

    slices: dict[int, int]
    size_bytes: int
    live_bytes: int
    newest_us: int
    buried: set[tuple[int, int]] = field(default_factory=set)
    damaged: bool = False


class LiveFiles:
    """The files by number, and those among the new ones that no version names yet.

    It owns the counts of live blocks. Invariant: a file stays here exactly as long as it holds a live block. When the
    last one dies, ``drop`` is called with the file's number. Not locked: the store's lock is held around every call.
    """

    def __init__(self, drop: Callable[[Sequence[int]], None]) -> None:
        self._drop = drop
        self._files: dict[int, LiveFile] = {}
        self._new: list[SstFile] = []

    def __contains__(self, file_no: int) -> bool:
        return file_no in self._files

    def __getitem__(self, file_no: int) -> LiveFile:
        return self._files[file_no]

    def __iter__(self) -> Iterator[int]:
        return iter(self._files)

    def add(self, file: SstFile, blocks: Iterable[tuple[int, int]], *, new: bool) -> None:
        """A file, with (slice, bytes) of its blocks; none of them counts as live yet.

        ``new``: this store wrote it, and :meth:`take_new` has to return it.
        """
        slices: dict[int, int] = {}
        size = 0
        for slice_us, size_bytes in blocks:
            slices[slice_us] = 0
            size += size_bytes
        self._files[file.file_no] = LiveFile(slices, size, 0, max(slices, default=0))
        if new:
            self._new.append(file)

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
        """A block of the file is dead, and others replace it in the same slice."""
        self._files[file_no].buried.add((slice_us, seq))

    def buried(self) -> set[tuple[int, int]]:
        """(slice, seq) of every block that died before its slice."""
        return set().union(*(file.buried for file in self._files.values()))

    def remove_dead(self, file_nos: Iterable[int]) -> None:
        """Forgets and drops those of the files in which nothing is alive."""
        dead = [no for no in file_nos if no in self._files and not self._files[no].live_bytes]
        for no in dead:
            del self._files[no]
        if dead:
            self._drop(dead)

    def counts(self) -> dict[int, dict[int, int]]:
        """For each file every slice that it holds, and its number of live blocks."""
        return {no: dict(file.slices) for no, file in self._files.items()}

    # -- new files ----------------------------------------------------------------------------------------

    def take_new(self) -> list[SstFile]:
        """The files that this store wrote since the last call."""
        files, self._new = self._new, []
        return files

    def take_new_dead(self) -> list[SstFile]:
        """The new files in which nothing is alive. They count as new no longer."""
        dead = [file for file in self._new if file.file_no not in self._files]
        self._new = [file for file in self._new if file.file_no in self._files]
        return dead

    def new_bytes(self, but: Iterable[int]) -> int:
        """Bytes of the new files, without the files ``but``."""
        left_out = set(but)
        return sum(file.size_bytes for file in self._new if file.file_no not in left_out)
