"""Knows which blocks of each file of a store are alive. Pure."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from state_backends.files.names import SstFile
from state_backends.store.protocol import Runs


@dataclass(slots=True)
class LiveFile:
    """One file. Its blocks have positions: 0, 1, ... in the order of the file, which is by slice, then by seq.

    ``slices``, ``seqs``: of each block. ``alive``: 1 for each live block, 0 for others. ``size_bytes``: bytes of all
    its blocks, including dead ones. ``damaged``: a block of the file cannot be read, so it is never merged.
    """

    slices: array[int]
    seqs: array[int]
    alive: bytearray
    size_bytes: int
    live_bytes: int = 0
    damaged: bool = False
    _runs: Runs | None = field(default=None, repr=False)  # until they change

    @property
    def newest_us(self) -> int:
        """The newest slice with a live block."""
        return self.slices[self.alive.rfind(1)]

    @property
    def live_slices(self) -> set[int]:
        """The slices with live blocks."""
        return {self.slices[at] for first, last in self.runs for at in range(first, last + 1)}

    @property
    def runs(self) -> Runs:
        """The positions of the live blocks."""
        if self._runs is None:
            self._runs = runs_of_flags(self.alive)
        return self._runs

    def runs_without(self, hidden: Iterable[tuple[int, int]]) -> Runs:
        """Returns the positions of the live blocks, without some that are given as (slice, seq)."""
        alive = bytearray(self.alive)
        for slice_us, seq in hidden:
            alive[self.position(slice_us, seq)] = 0
        return runs_of_flags(alive)

    def position(self, slice_us: int, seq: int) -> int:
        begin = bisect_left(self.slices, slice_us)
        return bisect_left(self.seqs, seq, begin, bisect_right(self.slices, slice_us, begin))

    def mark(self, slice_us: int, seq: int, alive: bool) -> None:
        self.alive[self.position(slice_us, seq)] = alive
        self._runs = None


class LiveFiles:
    """The files by number, and a list of the new files that no version names yet.

    It owns the record of live blocks. Invariant: every file here has a live block. When a file's last live block dies,
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

    def add(self, file: SstFile, blocks: Iterable[tuple[int, int, int]], *, new: bool) -> None:
        """Adds a file. ``blocks``: (slice, seq, bytes) of each of its blocks; none counts as live yet.

        ``new``: this store wrote the file, so :meth:`take_new` returns it.
        """
        ordered = sorted(blocks)
        slices, seqs = array("q", [block[0] for block in ordered]), array("q", [block[1] for block in ordered])
        size = sum(block[2] for block in ordered)
        self._files[file.file_no] = LiveFile(slices, seqs, bytearray(len(ordered)), size)
        if new:
            self._new.append(file)

    def gain(self, file_no: int, slice_us: int, seq: int, size_bytes: int) -> None:
        """Counts a block of the file as live."""
        file = self._files[file_no]
        file.mark(slice_us, seq, True)
        file.live_bytes += size_bytes

    def lose(self, file_no: int, slice_us: int, seq: int, size_bytes: int) -> None:
        """Counts a block of the file as dead, or as moved to another file."""
        file = self._files[file_no]
        file.mark(slice_us, seq, False)
        file.live_bytes -= size_bytes

    def remove_dead(self, file_nos: Iterable[int]) -> None:
        """Removes and drops files without live blocks. Skips files that have some."""
        dead = [no for no in file_nos if no in self._files and not self._files[no].live_bytes]
        for no in dead:
            del self._files[no]
        if dead:
            self._drop(dead)

    # -- new files ----------------------------------------------------------------------------------------

    def take_new(self) -> list[SstFile]:
        """Returns the files that this store wrote since the last call."""
        files, self._new = self._new, []
        return files

    def take_new_dead(self) -> list[SstFile]:
        """Returns the new files without live blocks. They no longer count as new."""
        dead = [file for file in self._new if file.file_no not in self._files]
        self._new = [file for file in self._new if file.file_no in self._files]
        return dead

    def new_bytes(self, skip: Iterable[int]) -> int:
        """Returns bytes of the new files, without the files ``skip``."""
        skipped = set(skip)
        return sum(file.size_bytes for file in self._new if file.file_no not in skipped)


def runs_of_flags(alive: bytearray) -> Runs:
    """Returns the positions of the ones among zeros and ones, as runs (first, last)."""
    runs: list[tuple[int, int]] = []
    begin = alive.find(1)
    while begin >= 0:
        end = alive.find(0, begin)
        if end < 0:
            end = len(alive)
        runs.append((begin, end - 1))
        begin = alive.find(1, end)
    return tuple(runs)
