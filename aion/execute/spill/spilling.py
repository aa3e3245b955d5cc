"""Groups the events of a window by key. If they do not fit in memory, it uses temporary files.

A window larger than the limit is split into files by a hash of its keys, in one pass over its blocks (the first half of
a Grace hash join). A file that fits in memory is grouped there. A file with a single key is streamed to the function.
Any other file is split again by another hash. So memory stays near the limit for any window. An event is written and
read once, or a few times if the keys are very uneven.
"""

from __future__ import annotations

import mmap
import tempfile
import weakref
from collections.abc import Callable, Generator, Iterator, MutableSequence, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from typing import IO, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from aion.aggregates.values import Ints
from aion.base.hashing import Hashes, hash_rows
from aion.core.query.functions import Key
from aion.execute.spill.grouping import Group, Piece, group_in_memory, key_codes, keys_of
from state_backends.thresholds import threshold

MEMORY_LIMIT_BYTES = threshold(256 << 20, 256)
FILES = 32
"""How many files a split makes. There is one more, for a key that looks large."""
MAX_SPLITS = 12
"""After this many splits, two keys share a file with a probability of 2**-60. Then they are grouped in memory."""
_LEAST_BUFFER_BYTES = threshold(1 << 14, 64)
PAGES_AROUND_BYTES = 1 << 16
"""What a read of a mapped file brings into memory around what it asks for."""
_T = TypeVar("_T")


class Room(NamedTuple):
    """Where rows may be: about ``limit_bytes`` of them in memory, and the others in temporary files in ``folder``.

    If it is None, that is the platform's temporary folder. The files have no name, so that even a killed process leaves
    none behind. Whoever writes or reads them raises OSError if that is not possible.
    """

    limit_bytes: int = MEMORY_LIMIT_BYTES
    folder: str | None = None

    def share(self, n: int) -> Room:
        """Returns the same with an n-th of the memory."""
        return Room(self.limit_bytes // n, self.folder)


ROOM = Room()


class Partition(NamedTuple):
    """Batches that are computed together. ``forget``: call it now and then, between reads.

    It frees the memory of what has been read from a mapped file. That is read again if it is needed. ``files``: which
    file of each split the rows were in, by :func:`file_of`. There is none if the rows were not split.
    """

    batches: list[pa.RecordBatch]
    forget: Callable[[], None] = lambda: None
    files: tuple[int, ...] = ()


def group_by_key(
    names: Sequence[str],
    pieces: Iterator[Piece],
    room: Room = ROOM,
    give_back: Callable[[], None] = lambda: None,
) -> Generator[Group, None, None]:
    """The groups of the keys with a changed piece. Their order has no meaning.

    It needs about half as much memory more while it splits them into files. Events that were handed over
    (docs/inside/hand-over.md) are mapped, so a window of any size needs no files if they are large. ``give_back`` frees
    the memory of what has been read of them: it is called before they are more than the limit.
    """
    held: list[Piece] = []
    size = 0
    read = _MappedReads(room.limit_bytes, give_back)
    for piece in pieces:
        held.append(piece)
        size += piece.memory_bytes
        if size > room.limit_bytes:
            del piece
            yield from _split(names, chain(drained(held), pieces), room)
            return
        if piece.mapped:
            read.whole(piece.batch)
    for group in group_in_memory(names, held):
        yield group if read.fits else group._replace(batches=read.counted(group.batches))


class _MappedReads:
    """Gives back the pages of mapped events, so that those that are in memory stay below a limit.

    The events of a key are all over the window. So each batch of them is counted with the pages that the system maps
    around each of its columns. A window within the limit is read without that.
    """

    def __init__(self, limit_bytes: int, give_back: Callable[[], None]) -> None:
        self._limit_bytes, self._give_back = limit_bytes, give_back
        self._all_bytes = self._rows = self._in_memory_bytes = 0

    @property
    def fits(self) -> bool:
        return self._all_bytes <= self._limit_bytes

    def whole(self, batch: pa.RecordBatch) -> None:
        """Notes a batch that has been read as a whole, since its checksum has been compared."""
        self._all_bytes += batch.nbytes
        self._rows += batch.num_rows
        self._add(batch.nbytes)

    def counted(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        row_bytes = self._all_bytes / max(self._rows, 1)
        for batch in batches:
            self._add(round(batch.num_rows * row_bytes) + (1 + batch.num_columns) * PAGES_AROUND_BYTES)
            yield batch

    def _add(self, size_bytes: int) -> None:
        self._in_memory_bytes += size_bytes
        if self._in_memory_bytes > self._limit_bytes:
            self._give_back()
            self._in_memory_bytes = size_bytes


def partitions_by_key(
    names: Sequence[str], pieces: Iterator[Piece], room: Room = ROOM, *, split: bool = False
) -> Generator[Partition, None, None]:
    """Splits pieces into partitions. All rows of a key are in the same one, in their order. If all fit in
    memory, there is one.

    ``split``: they go through files even if they fit, because something that belongs to their keys does not.

    Memory and files are as in :func:`group_by_key`. A single key is one partition even if it is larger than the limit,
    and without key columns everything is. The batches of a partition that went through a file lie in that file, which
    is mapped into memory.
    """
    held: list[Piece] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += piece.memory_bytes
        if size > room.limit_bytes or split:
            del piece
            yield from _split_partitions(names, chain(drained(held), pieces), room)
            return
    yield Partition([piece.batch for piece in drained(held)])


def _split_partitions(
    names: Sequence[str], pieces: Iterator[Piece], room: Room, before: tuple[int, ...] = ()
) -> Generator[Partition, None, None]:
    """``before``: the files that the pieces went through."""
    with ExitStack() as stack:

        def new_file() -> _File:
            file = _File(names, room.share(4 * FILES))
            return stack.enter_context(closing(file))

        for number, file in _fill(names, pieces, len(before), new_file):
            with closing(file):
                if file.size_bytes <= room.limit_bytes or file.key is not None or len(before) == MAX_SPLITS:
                    yield file.mapped()._replace(files=(*before, number))
                else:
                    yield from _split_partitions(names, file.drain(), room, (*before, number))


class HeldBatches:
    """Batches that wait until all are there."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._held: list[Piece] = []
        self._size_bytes = 0
        self._file: _File | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        self._held.append(Piece(batch, True, False))
        self._size_bytes += batch.nbytes
        if self._size_bytes > self._room.limit_bytes:
            if self._file is None:
                self._file = _File([], self._room.share(4))
                weakref.finalize(self, self._file.close)  # nobody takes the batches of a batch that failed
            for piece in drained(self._held):
                self._file.add(piece)
            self._size_bytes = 0

    def take(self) -> Iterator[Piece]:
        """Yields all batches in their order, and holds none afterwards."""
        file, self._file, self._size_bytes = self._file, None, 0
        if file is not None:
            file.flush()
            yield from file.drain()
        yield from drained(self._held)


def drained(held: MutableSequence[_T]) -> Iterator[_T]:
    """Yields the items in order. Removes each from ``held``, so that its memory can be freed."""
    held.reverse()
    while held:
        yield held.pop()


def _split(names: Sequence[str], pieces: Iterator[Piece], room: Room, splits: int = 0) -> Generator[Group, None, None]:
    """The groups of pieces that do not fit in memory. ``splits``: how often they have been split before."""
    with ExitStack() as stack:

        def new_file() -> _File:
            file = _File(names, room.share(4 * FILES))
            return stack.enter_context(closing(file))

        for _, file in _fill(names, pieces, splits, new_file):
            with closing(file):
                if not file.changed:
                    continue
                if file.size_bytes <= room.limit_bytes or (file.key is None and splits == MAX_SPLITS):
                    yield from group_in_memory(names, file.drain())
                elif file.key is not None:
                    yield Group(file.key, (p.batch for p in file.drain()), file.events, file.late_events, file.seen)
                else:
                    yield from _split(names, file.drain(), room, splits + 1)


def temporary_file(folder: str | None) -> IO[bytes]:
    """Returns an open file that nobody else sees, and that is gone when it is closed."""
    return tempfile.TemporaryFile(prefix="aion-spill-", dir=folder)


def file_of(keys: Sequence[pa.Array], rows: int, splits: int) -> Ints:
    """Which of the ``FILES`` files of a split each row is in, by its key. ``splits``: how often it was split before."""
    return (_hashes(keys, rows, splits) % np.uint64(FILES)).astype(np.int64)


def _hashes(keys: Sequence[pa.Array], rows: int, seed: int) -> Hashes:
    return hash_rows(keys, seed) if keys else np.zeros(rows, np.uint64)


def _fill(
    names: Sequence[str], pieces: Iterator[Piece], seed: int, new_file: Callable[[], _File]
) -> list[tuple[int, _File]]:
    """Writes the pieces to new files. All events of a key go to the same file, in their order.

    Returns the files, each with what :func:`file_of` says of its rows.
    """
    files: dict[int, _File] = {}
    largest: np.uint64 | None = None
    for piece in pieces:
        if not piece.batch.num_rows:
            continue
        hashes = _hashes([piece.batch.column(name) for name in names], piece.batch.num_rows, seed)
        if largest is None:  # guess the largest key from the first piece: in its own file, it is not split again
            values, counts = np.unique(hashes, return_counts=True)
            largest = values[counts.argmax()]
        for number, rows in _partitions(piece.batch, hashes, largest):
            if number not in files:
                files[number] = new_file()
            files[number].add(piece._replace(batch=rows))
    for file in files.values():
        file.flush()
    own = 0 if largest is None else int(largest % np.uint64(FILES))
    return [(own if number == FILES else number, file) for number, file in files.items()]


def _partitions(batch: pa.RecordBatch, hashes: Hashes, largest: np.uint64) -> Iterator[tuple[int, pa.RecordBatch]]:
    """For each file that gets rows of the batch: its number, and those rows in their order."""
    numbers = (hashes % np.uint64(FILES)).astype(np.uint8)
    numbers[hashes == largest] = FILES
    order = np.argsort(numbers, kind="stable")
    counts = np.bincount(numbers)
    end = 0
    for number in np.flatnonzero(counts).tolist():
        start, end = end, end + int(counts[number])
        # Copy the rows: they wait in memory for more, and a slice would keep its whole batch.
        yield number, batch if end - start == batch.num_rows else batch.take(pa.array(order[start:end]))


class _File:
    """A temporary file of pieces, and what must be known about them before they are read.

    Consecutive pieces with the same ``changed`` and ``late`` are merged into batches of about the size of the buffer.
    ``key``: the key of all pieces, if they have only one. ``changed``, ``seen``: whether any piece is changed, and
    any is not. ``size_bytes``, ``events``, ``late_events``: of all pieces.
    """

    def __init__(self, names: Sequence[str], buffer: Room) -> None:
        self._names = list(names)
        self._buffer_bytes = max(buffer.limit_bytes, _LEAST_BUFFER_BYTES)
        self._file = temporary_file(buffer.folder)
        self._writer: pa.ipc.RecordBatchStreamWriter | None = None
        self._written: list[tuple[bool, bool]] = []
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._waiting_are = (False, False)
        self._first: pa.RecordBatch | None = None
        self.key: Key | None = None if names else ()
        self.size_bytes = self.events = self.late_events = 0
        self.changed = self.seen = False

    def add(self, piece: Piece) -> None:
        batch, are = piece.batch, (piece.changed, piece.late)
        if self._waiting_are != are:
            self.flush()
            self._waiting_are = are
        self._compare_keys(batch.select(self._names))
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        self.size_bytes += batch.nbytes
        self.events += batch.num_rows
        self.late_events += batch.num_rows if piece.late else 0
        self.changed |= piece.changed
        self.seen |= not piece.changed
        if self._waiting_bytes >= self._buffer_bytes:
            self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        table = pa.Table.from_batches(self._waiting).combine_chunks()
        self._waiting, self._waiting_bytes = [], 0
        if self._writer is None:
            self._writer = pa.ipc.new_stream(self._file, table.schema)
        for batch in table.to_batches():
            self._writer.write_batch(batch)
            self._written.append(self._waiting_are)

    def drain(self) -> Iterator[Piece]:
        """Yields the pieces in the order in which they were added. Deletes the file after the last one."""
        if self._writer is not None:
            self._writer.close()
            self._file.seek(0)
            reader = pa.ipc.open_stream(self._file)
            for changed, late in self._written:
                yield Piece(reader.read_next_batch(), changed, late)
        self.close()

    def mapped(self) -> Partition:
        """All batches, in the order in which they were added. They lie in the file, which lives as long as they do."""
        if self._writer is None:
            return Partition([])
        self._writer.close()
        self._file.flush()
        content = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        return Partition(list(pa.ipc.open_stream(pa.py_buffer(content))), lambda: content.madvise(mmap.MADV_DONTNEED))

    def close(self) -> None:
        self._file.close()

    def _compare_keys(self, keys: pa.RecordBatch) -> None:
        if not self._names:
            return
        if self._first is None:
            self._first = keys.take(pa.array([0]))
            [self.key] = keys_of(self._first.schema.names, self._first.columns)
        if self.key is not None and key_codes(pa.Table.from_batches([self._first, keys])).any():
            self.key = None
