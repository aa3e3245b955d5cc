"""Counts the live blocks in each file of a store: how many of each slice, and how many bytes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from state_backends.files.names import SstFile


@dataclass(slots=True)
class LiveFile:
    """One file.

    ``slices``: the number of live blocks of each slice in the file, which may be 0. ``size_bytes``: bytes of all its
    blocks, including dead ones. ``newest_us``: the newest slice with a live block. ``buried``: dead blocks whose slice
    is still alive, as (slice, seq). ``damaged``: a block of the file cannot be read, so it is never merged.
    """

    slices: dict[int, int]
    size_bytes: int
    live_bytes: int
    newest_us: int
    buried: set[tuple[int, int]] = field(default_factory=set)
    damaged: bool = False


class LiveFiles:
    """The files by number, and a list of the new files that no version names yet.

    It owns the counts of live blocks. Invariant: every file here has a live block. When a file's last live block dies,
    the file is removed, and ``drop`` is called with its number. It has no lock: hold the store's lock around every
    call.
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
        """Adds a file. ``blocks``: (slice, bytes) of each of its blocks; none counts as live yet.

        ``new``: this store wrote the file, so :meth:`take_new` returns it.
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
        """Counts a block of the file as live."""
        file = self._files[file_no]
        file.slices[slice_us] += 1
        file.live_bytes += size_bytes

    def lose(self, file_no: int, slice_us: int, size_bytes: int) -> None:
        """Counts a block of the file as dead, or as moved to another file."""
        file = self._files[file_no]
        file.slices[slice_us] -= 1
        file.live_bytes -= size_bytes
        if slice_us == file.newest_us and not file.slices[slice_us]:
            # This is rare: the oldest slices mostly die first.
            file.newest_us = max((s for s, blocks in file.slices.items() if blocks), default=slice_us)

    def bury(self, file_no: int, slice_us: int, seq: int) -> None:
        """Records that a block of the file is dead although its slice is alive: other blocks replaced it."""
        self._files[file_no].buried.add((slice_us, seq))

    def buried(self) -> set[tuple[int, int]]:
        """(slice, seq) of every dead block whose slice is still alive."""
        return set().union(*(file.buried for file in self._files.values()))

    def remove_dead(self, file_nos: Iterable[int]) -> None:
        """Removes and drops files without live blocks. Skips files that have some."""
        dead = [no for no in file_nos if no in self._files and not self._files[no].live_bytes]
        for no in dead:
            del self._files[no]
        if dead:
            self._drop(dead)

    def counts(self) -> dict[int, dict[int, int]]:
        """For each file: the number of live blocks of each slice in it."""
        return {no: dict(file.slices) for no, file in self._files.items()}

    # -- new files ----------------------------------------------------------------------------------------

    def take_new(self) -> list[SstFile]:
        """The files that this store wrote since the last call."""
        files, self._new = self._new, []
        return files

    def take_new_dead(self) -> list[SstFile]:
        """The new files without live blocks. They no longer count as new."""
        dead = [file for file in self._new if file.file_no not in self._files]
        self._new = [file for file in self._new if file.file_no in self._files]
        return dead

    def new_bytes(self, skip: Iterable[int]) -> int:
        """Bytes of the new files, without the files ``skip``."""
        skipped = set(skip)
        return sum(file.size_bytes for file in self._new if file.file_no not in skipped)
