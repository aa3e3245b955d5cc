"""Local copies that have a part of a remote file's bytes, so that a shard can be opened before its files are here.

Such a copy has the size of the file, and holes. RocksDB ingests it like any other: it reads the first and the last
block of data, and what follows them. Before it reads another block, :class:`PartialCopy` fetches the block's range.
When all bytes are here, they are compared with the checksum of the manifest. Until then RocksDB's checksums of blocks,
and those of Aion's blocks in them, find what is damaged; a hole never passes for data.

A copy has one of two states, and its folder says which: with a mark beside it, it may have holes or has not been
compared; without one, it is whole. The mark comes before the first byte or hole, and goes after the comparison.

A copy may lose parts again, so that the host's disk is enough (:meth:`PartialCopy.shrink`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from state_backends.files.faults import disk_errors
from state_backends.files.names import HOLES, SstFile
from state_backends.files.punching import punch
from state_backends.format.checksum import crc32
from state_backends.format.errors import AionError, CorruptState, StorageError
from state_backends.format.sst_table import END, Span, TableIndex, index_of, metaindex, parts
from state_backends.thresholds import threshold

PIECE_BYTES = threshold(64 << 10, 64)
"""The unit of what is here or not."""
LEAST_BYTES = threshold(512 << 10, 256)
"""A smaller file is fetched whole, by one request."""
AHEAD_BYTES = threshold(512 << 10, 128)
"""The least that is fetched for a block of a file of blocks: its neighbours are of the same slice or the next."""
MOST_BYTES = threshold(4 << 20, 512)
"""The most that one request asks for."""
DISK_BLOCK_BYTES = threshold(4096, 64)
"""Holes begin and end at multiples of it: a file system gives back whole blocks of the disk."""
_INDEX_ENTRY_BYTES = 64  # about, with some to spare: of a block of data in the index,
_KEY_BYTES = 2  # and of a key in the filter
_ABOUT_BYTES = 2048  # of the other parts of a table that are not data
_BLOCK_BYTES = 4096
_FIRST_BYTES = _BLOCK_BYTES + 256  # of the first block of data, unless it lists many blocks
log = logging.getLogger(__name__)

ReadAt = Callable[[int, int], bytes]
"""Reads this many bytes from this offset on. Raises StorageError."""


def is_large(file: SstFile, *, fits: bool = True) -> bool:
    """Whether it is worth fetching parts of a file. ``fits``: the host has the disk for all of it."""
    return file.size_bytes >= (LEAST_BYTES if fits else 4 * PIECE_BYTES)


class _Request:
    """Neighbouring pieces that one request is to fetch. ``ahead``: nobody waits for them, as far as is known."""

    __slots__ = ("ahead", "begun", "future", "pieces")

    def __init__(self, pieces: list[int], *, ahead: bool) -> None:
        self.pieces, self.ahead = pieces, ahead
        self.begun = False
        self.future: Future[None]


class PartialCopy:
    """A local copy of one file. Threads may use it together.

    ``read_at`` reads from the remote file, and ``end`` is called when it is not read any more, and perhaps again.
    ``pool`` serves those who wait, and ``ahead`` those who do not. ``checked`` is called when all of the file is here,
    with the answer whether it has the right checksum. ``grew`` is called with the bytes that have come, or, below zero,
    have gone.
    """

    def __init__(
        self,
        file: SstFile,
        read_at: ReadAt,
        pool: ThreadPoolExecutor,
        ahead: ThreadPoolExecutor | None = None,
        end: Callable[[], None] = lambda: None,
        checked: Callable[[bool], None] = lambda right: None,
        grew: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:
        self.file = file
        self._end = end
        self.is_whole = False
        self.index: TableIndex | None = None
        """Known when the file can be ingested. None again when it is whole: it may be large."""
        self._checked, self._grew = checked, grew
        self._was_kept = False
        self._path = Path(file.path)
        self._mark = mark_of(self._path)
        self._read_at = read_at
        self._pool, self._ahead = pool, ahead or pool
        self._lock = threading.Lock()
        self._here = bytearray(-(-file.size_bytes // PIECE_BYTES))
        self._coming: dict[int, _Request] = {}  # by piece; the last one until the file is compared, too
        self._checking: Future[None] | None = None
        self._closed = False

    def begin(self, *, is_here: bool = False) -> None:
        """Makes the mark, and then the file, unless all of it is here already. Raises DiskError."""
        with disk_errors("keeping a copy of remote state", self._path.parent):
            self._mark.touch(0o600)
            if is_here:
                self._here = bytearray(b"\1" * len(self._here))
                return
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                os.ftruncate(fd, self.file.size_bytes)
            finally:
                os.close(fd)

    def fetch_whole(self) -> int:
        """Fetches all of the file in this thread. Returns its checksum; unless it is right, no copy stays.

        Raises CorruptState, DiskError, StorageError.
        """
        crc = 0
        try:
            self.begin()
            for begin, end in self.spans():
                data = self._read_at(end - begin, begin)
                self._write(data, begin, end)
                crc = crc32(data, crc)
        except BaseException:
            remove(self._path)
            raise
        finally:
            self._end()
        if crc == self.file.crc:
            self._mark.unlink()
        else:
            remove(self._path)
        return crc

    def check_kept(self) -> None:
        """Begins to compare a file that was here with its checksum. Does not wait.

        If the file turns out to be damaged, all of it is fetched after all.
        """
        self._was_kept = True
        with contextlib.suppress(RuntimeError):  # the connection is closed
            self._checking = self._ahead.submit(self._check)

    def first_spans(self) -> list[Span]:
        """Returns the ranges to begin with: what is needed to read the index, if it is as large as one expects."""
        size = self.file.size_bytes
        blocks = min(self.file.blocks, size // _BLOCK_BYTES) + 2
        tail = _ABOUT_BYTES + _INDEX_ENTRY_BYTES * blocks + _KEY_BYTES * self.file.blocks
        return [Span(max(size - tail, 0), size), Span(0, min(_FIRST_BYTES, size))]

    def open_index(self) -> list[Span]:
        """Reads the index, or returns the ranges that it needs first. Raises CorruptState.

        What RocksDB reads when it ingests the file is here, too, when this returns nothing.
        """
        size = self.file.size_bytes
        listed = metaindex(self._bytes(Span(size - END.size, size)), size)
        if self.missing(listed):
            return [listed]
        where, data_end = parts(self._bytes(listed))
        if self.missing(Span(data_end, size)):
            return [Span(data_end, size)]
        index = self.index = index_of(self._bytes(where), data_end)
        if not len(index):
            raise CorruptState("it has no blocks of data")
        needed = [index.span(0), index.span(len(index) - 1)]
        return [span for span in needed if self.missing(span)]

    def around(self, key: bytes) -> Span:
        """Returns the range of the block of data with a key, and of some that follow it."""
        index = self.index
        if index is None or (at := index.find(key)) == len(index):
            return Span(0, 0)
        begin, end = index.span(at)
        return Span(begin, max(end, min(begin + AHEAD_BYTES, index.data.end)))

    def bring(self, span: Span, *, ahead: bool = False) -> list[Future[None]]:
        """Starts fetching what is missing of a range. Returns what to wait for. Does not wait.

        ``ahead``: nobody waits for it yet. Then comparing the file with its checksum is waited for, too; and ask again
        after waiting, because a reader may have taken over a part of the range.
        """
        if self.is_whole:
            return []
        with self._lock:
            if self._closed:
                return []
            if ahead and self._checking is not None and not self._checking.done():
                return [self._checking]
            wanted = [piece for piece in self._pieces(span) if not self._here[piece]]
            if not ahead:
                self._take_over(wanted)
            waited = self._pieces(span) if ahead else wanted
            found = {id(coming): coming for piece in waited if (coming := self._coming.get(piece)) is not None}
            for run in _runs((piece for piece in wanted if piece not in self._coming), MOST_BYTES // PIECE_BYTES):
                request = _Request(run, ahead=ahead)
                try:
                    request.future = (self._ahead if ahead else self._pool).submit(self._fetch, request)
                except RuntimeError as error:
                    raise StorageError(f"{self._path.name}: the connection is closed") from error
                self._coming.update(dict.fromkeys(run, request))
                found[id(request)] = request
            return [request.future for request in found.values()]

    def _take_over(self, wanted: Iterable[int]) -> None:
        """Takes pieces out of requests ahead that have not begun: these may be behind those of many other files."""
        for piece in wanted:
            request = self._coming.get(piece)
            if request is not None and request.ahead and not request.begun:
                request.pieces.remove(piece)
                del self._coming[piece]

    def missing(self, span: Span) -> bool:
        return not self.is_whole and any(not self._here[piece] for piece in self._pieces(span))

    def shrink(self, spared: Iterable[Span], most_bytes: int, path: Path | None = None) -> int:
        """Makes holes in the blocks of data, from the first on, until this many bytes are gone. Returns how many went.

        The first and the last block stay, because RocksDB reads them when it ingests the file, and so do the ranges
        ``spared``. Does nothing while a part of the file is coming, or is compared. Only the I/O thread may call it,
        while nobody reads the file through RocksDB. ``path``: another name of the file. Raises DiskError.
        """
        # A request for a part that is to go must not write it before it goes. So the lock is held until the holes are
        # made, which takes no reading or writing of data.
        with self._lock:
            index, checking = self.index, self._checking
            if index is None or self._coming or self._was_kept or (checking is not None and not checking.done()):
                return 0
            pieces = self._pieces(self._punched(index))
            if not any(self._here[pieces.start : pieces.stop]):
                return 0
            stays = {piece for span in spared for piece in self._pieces(span)}
            freed, going = 0, []
            for piece in pieces:
                if freed >= most_bytes:
                    break
                if self._here[piece] and piece not in stays:
                    going.append(piece)
                    freed += self._counted([piece])
            for piece in going:
                self._here[piece] = 0
            with disk_errors("giving back the disk of a copy of remote state", self._path.parent):
                fd = os.open(path or self._path, os.O_WRONLY)
                try:
                    for run in _runs(going, len(going)):
                        span = self._span_of(run, index)
                        punch(fd, span.begin, span.end)
                finally:
                    os.close(fd)
        self._grew(-freed)
        return freed

    def _punched(self, index: TableIndex) -> Span:
        """The range in which holes may be made."""
        begin, end = index.span(0).end, index.span(len(index) - 1).begin
        begin = -(-begin // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES
        return Span(begin, max(begin, end // DISK_BLOCK_BYTES * DISK_BLOCK_BYTES))

    def _span_of(self, run: list[int], index: TableIndex) -> Span:
        """The range of neighbouring pieces, without what of them must stay."""
        begin, end = self._punched(index)
        return Span(max(run[0] * PIECE_BYTES, begin), min((run[-1] + 1) * PIECE_BYTES, end))

    def _counted(self, run: list[int]) -> int:
        """How many bytes of the disk neighbouring pieces take when they come, and give back when they go."""
        span = Span(run[0] * PIECE_BYTES, min((run[-1] + 1) * PIECE_BYTES, self.file.size_bytes))
        if (index := self.index) is not None:
            span = self._span_of(run, index)
        return max(span.end - span.begin, 0)

    def spans(self) -> Iterator[Span]:
        """Yields the whole file in ranges that take one request each."""
        for begin in range(0, self.file.size_bytes, MOST_BYTES):
            yield Span(begin, min(begin + MOST_BYTES, self.file.size_bytes))

    def close(self) -> None:
        """Nothing more is fetched."""
        with self._lock:
            self._closed = True
        self._end_if_unused()

    def _pieces(self, span: Span) -> range:
        return range(span.begin // PIECE_BYTES, -(-min(span.end, self.file.size_bytes) // PIECE_BYTES))

    def _bytes(self, span: Span) -> bytes:
        """Reads from the local file."""
        with disk_errors("reading a copy of remote state", self._path.parent), self._path.open("rb") as file:
            return os.pread(file.fileno(), span.end - span.begin, span.begin)

    def _fetch(self, request: _Request) -> None:
        """Fetches the pieces of a request that no reader has taken over."""
        with self._lock:
            request.begun = True
        try:
            for run in _runs(request.pieces, len(request.pieces)):
                begin, end = run[0] * PIECE_BYTES, min((run[-1] + 1) * PIECE_BYTES, self.file.size_bytes)
                if self._closed:
                    break
                self._write(self._read_at(end - begin, begin), begin, end)
                with self._lock:
                    for piece in run:
                        self._here[piece] = 1
                    complete = all(self._here)
                self._grew(self._counted(run))
                if complete:
                    self._check()
        finally:
            with self._lock:
                for piece in request.pieces:
                    del self._coming[piece]
        self._end_if_unused()

    def _end_if_unused(self) -> None:
        with self._lock:
            is_used = self._coming or not (self._closed or self.is_whole)
        if not is_used:
            self._end()

    def _write(self, data: bytes, begin: int, end: int) -> None:
        if len(data) != end - begin:
            raise StorageError(f"file {self.file.name}: {len(data)} of {end - begin} bytes came")
        with disk_errors("keeping a copy of remote state", self._path.parent):
            fd = os.open(self._path, os.O_WRONLY)
            try:
                rest, at = memoryview(data), begin
                while rest:
                    written = os.pwrite(fd, rest, at)
                    rest, at = rest[written:], at + written
            finally:
                os.close(fd)

    def _check(self) -> None:
        """Compares the whole file with the checksum of the manifest."""
        crc = 0
        try:
            for span in self.spans():
                crc = crc32(self._bytes(span), crc)
        except AionError as error:  # who reads it next reports it
            log.debug("the copy of %s could not be checked: %s", self.file.name, error)
            return
        right = crc == self.file.crc
        with self._lock:
            if right and not self._closed:  # else the path may already be that of another copy
                self._mark.unlink(missing_ok=True)
        self._checked(right)
        was_kept, self._was_kept = self._was_kept, False
        if not right and was_kept:
            log.warning(
                "the copy of file %s that was kept on this host is damaged; it is fetched again", self.file.name
            )
            with self._lock:
                self._here = bytearray(len(self._here))
            return
        self.is_whole, self.index = True, None
        if not right and not self._closed:
            log.error(
                "file %s is damaged: its CRC-32 is %08x, but its manifest says %08x; reading a damaged block fails",
                self.file.name,
                crc,
                self.file.crc,
            )
            self._path.unlink(missing_ok=True)  # the next opening fetches it again


class Copies:
    """The copies of a shard's files, for who reads the files. If the shard's folder is on this host, there are none."""

    def partial(self, name: str) -> PartialCopy | None:
        """Returns the copy of a file, if a part of it may be missing, or None if it is whole. Any thread may call."""
        return None

    def room(self) -> int | None:
        """Returns how many bytes of copies this host may still have. None is no limit. Any thread may call it."""
        return None

    def excess(self) -> int:
        """Returns how many bytes of its copies this shard has to give back. Any thread may call it."""
        return 0

    def shrink(self, file: SstFile, spared: Callable[[TableIndex], Iterable[Span]], most_bytes: int, links: int) -> int:
        """Makes holes in the copy of a file that a version names, until this many bytes are gone.

        ``spared`` returns the ranges that stay. ``links``: how many other names RocksDB and its shard have given the
        copy. If it has more, it stays whole: another process uses it. Returns how many bytes went. Only the I/O thread
        may call it, while nobody reads the file. Raises OSError or StateError; then some may have gone.
        """
        return 0


def mark_of(path: Path) -> Path:
    """Returns the path of the mark of a copy that may have holes."""
    return path.with_name(path.name + HOLES)


def remove(path: Path) -> None:
    """Removes a copy, and then its mark, if the disk lets it."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        mark_of(path).unlink(missing_ok=True)


def _runs(pieces: Iterable[int], most: int) -> list[list[int]]:
    """Returns ascending numbers as runs of neighbours, of at most this many."""
    runs: list[list[int]] = []
    for piece in pieces:
        if runs and runs[-1][-1] + 1 == piece and len(runs[-1]) < most:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs
