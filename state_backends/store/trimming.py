"""Keeps the local copies of a shard's files within the host's budget for them (``state.local_copies``).

When all copies of the host take too much, this shard makes holes in its own, down to its share. What a hole had is read
from the remote file system again when it is needed. The order says what goes first:

- blocks of slices for which no batch is planned, from the oldest file on: a window whose end is near, or has just
  passed, is executed sooner and more often than an old one, which waits for its last execution;
- blocks of slices that the next batches will read, the latest first: those of the second half of the plan, then of
  its second quarter, and so on;
- keyed values: any key may come in the next batch.

Rule: a file gets holes in a step of the I/O thread, and no step that reads the file through RocksDB runs meanwhile. A
reader that goes on after a step holds the file (:meth:`Trimmer.reading`). So RocksDB never meets a hole of a range that
was fetched for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from state_backends.files.names import SstFile
from state_backends.files.partial import Copies, PartialCopy
from state_backends.format.errors import StateError
from state_backends.format.sst_table import Span, TableIndex
from state_backends.store.io import Steps
from state_backends.store.sst_file import block_key
from state_backends.thresholds import threshold

_FILES_AT_ONCE = threshold(16, 2)  # of one step
_SLACK_BYTES = threshold(1 << 20, 256)
"""So much more than a commit left may come before a read makes room."""
_LAST_SEQ = (1 << 64) - 1
log = logging.getLogger(__name__)


class _Plan(NamedTuple):
    """The files of the current version, and the slices that the next batches will read, the soonest first."""

    blocks: Sequence[SstFile] = ()
    runs: Sequence[SstFile] = ()
    due: Sequence[int] = ()


class Trimmer:
    """``live``: RocksDB's folder. All other names that this shard's files have here are in it or beside it."""

    def __init__(self, live: Path) -> None:
        self.copies = Copies()
        self.shrunk = 0
        """How many times copies have got holes. Whoever knows which copies have holes asks again when it changes."""
        self._live = live
        self._plan = _Plan()
        self._partial: dict[int, PartialCopy] = {}  # of files with blocks that RocksDB has, if a part was missing
        self._slices: dict[int, frozenset[int]] = {}  # of files with blocks
        self._held: Counter[int] = Counter()
        self._left_bytes = 0  # that the last turn could not free

    # -- what is known of files ---------------------------------------------------------------------------

    def add(self, file_no: int, slices: Iterable[int]) -> None:
        """RocksDB has a file with blocks of these slices."""
        self._slices[file_no] = frozenset(slices)

    def add_partial(self, file: SstFile) -> None:
        """RocksDB has this file with blocks, and its copy may have holes."""
        copy = self.copies.partial(file.name)
        if copy is None:
            return
        self._partial[file.file_no] = copy
        if self.copies.room() is not None:
            with contextlib.suppress(OSError):
                os.link(file.path, self._name(file.file_no))

    def partial(self, file_no: int) -> PartialCopy | None:
        """Returns the copy of a file with blocks, or None if all of it is here."""
        copy = self._partial.get(file_no)
        return None if copy is None or copy.is_whole else copy

    def drop(self, file_no: int) -> bool:
        """No version needs this file with blocks any more. Returns whether it has holes, so that RocksDB must keep it.

        Then it gives back what is here of it.
        """
        self._slices.pop(file_no, None)
        copy, name = self.partial(file_no), self._name(file_no)
        self._partial.pop(file_no, None)
        if copy is not None:
            try:
                if name.exists():
                    copy.shrink((), copy.file.size_bytes, name)
            except (StateError, OSError) as error:
                log.debug("what is left of file %d stays until its shard is closed: %s", file_no, error)
        name.unlink(missing_ok=True)
        return copy is not None

    def clear(self) -> None:
        """There is no RocksDB any more."""
        self._partial.clear()
        self._slices.clear()

    # -- who reads ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def reading(self, *file_nos: int) -> Iterator[None]:
        """A context in which these files get no holes. It may last several steps."""
        self._held.update(file_nos)
        try:
            yield
        finally:
            self._held.subtract(file_nos)

    @property
    def is_read(self) -> bool:
        """Whether anybody reads several steps long."""
        return any(self._held.values())

    # -- making room --------------------------------------------------------------------------------------

    def plan(self, blocks: Sequence[SstFile], runs: Sequence[SstFile], due: Sequence[int]) -> None:
        """Says which files a version has, and which slices the next batches will read. Any thread may call it."""
        self._plan = _Plan(blocks, runs, due)

    def make_room(self) -> Steps[None]:
        """Steps before a read that brings more, if what has come since the last commit is too much already."""
        if self._partial and self.copies.excess() > self._left_bytes + _SLACK_BYTES:
            yield from self.trim()

    def trim(self) -> Steps[None]:
        """Steps that make holes until the shard has its share, or nothing is left to go."""
        blocks, runs, due = self._plan
        ordered = sorted(blocks, key=lambda file: max(self._slices.get(file.file_no, ()), default=0))
        spared = len(due)
        while True:
            files = [*ordered, *runs] if not spared else ordered
            for at in range(0, len(files), _FILES_AT_ONCE):
                links = self._links()
                for file in files[at : at + _FILES_AT_ONCE]:
                    if (excess := self.copies.excess()) <= 0:
                        self._left_bytes = 0
                        return
                    self._shrink(file, frozenset(due[:spared]), excess, links)
                yield 0
            if not spared:
                break
            spared //= 2
        self._left_bytes = self.copies.excess()

    def _shrink(self, file: SstFile, due: frozenset[int], most_bytes: int, links: Counter[int]) -> None:
        no, slices = file.file_no, self._slices.get(file.file_no)
        if self._held[no]:
            return
        was_partial = self.copies.partial(file.name) is not None

        def spared(index: TableIndex) -> Iterator[Span]:
            for slice_us in due.intersection(slices or ()):
                first, last = index.find(block_key(no, slice_us, 0)), index.find(block_key(no, slice_us, _LAST_SEQ))
                if first < len(index):
                    yield Span(index.span(first).begin, index.span(min(last, len(index) - 1)).end)

        try:
            found = Path(file.path).stat()
            self.copies.shrink(file, spared, most_bytes, links[found.st_ino])
        except (StateError, OSError) as error:
            log.debug("%s gives back no disk now: %s", file.name, error)
        if not was_partial and self.copies.partial(file.name) is not None:
            self.shrunk += 1
            if slices is not None:
                self.add_partial(file)

    def _links(self) -> Counter[int]:
        """How many names each file has in the folders of the shard, by its number in the file system."""
        folders = [folder for folder, _, _ in os.walk(self._live.parent)]
        with contextlib.suppress(OSError):
            return Counter(entry.inode() for folder in folders for entry in os.scandir(folder))
        return Counter()  # so all seem to have other names, too, and stay whole

    def _name(self, file_no: int) -> Path:
        """A name by which :meth:`drop` finds a file when its copy has gone."""
        return self._live / f"{file_no}.holes"
