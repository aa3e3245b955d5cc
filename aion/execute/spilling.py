"""The events of each key of a window that may not fit in memory: by way of files, if it does not.

A window larger than the limit is split by a hash of its keys into temporary files, in one pass over its blocks
(the first half of a Grace hash join). A file that fits in memory is grouped there; one of a single key is
streamed to the function; any other is split again by another hash. So memory stays near the limit whatever the
window, and an event is written and read once, or a few times where keys are very uneven.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Generator, Iterator, MutableSequence, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from typing import TypeVar

import numpy as np
import pyarrow as pa

from aion.core.plan import Key
from aion.core.row_hash import Hashes, hash_rows
from aion.execute.grouping import Group, Piece, group_in_memory, key_codes

MEMORY_LIMIT_BYTES = 256 << 20
FILES = 32
"""Into how many files a window is split at once, and one more for a key that looks large."""
MAX_SPLITS = 12
"""Two keys share a file after as many splits with a probability of 2**-60; memory has to do for them then."""
_LEAST_BUFFER_BYTES = 1 << 14
_T = TypeVar("_T")


def group_by_key(
    names: Sequence[str],
    pieces: Iterator[Piece],
    limit_bytes: int = MEMORY_LIMIT_BYTES,
    folder: str | None = None,
) -> Generator[Group, None, None]:
    """The groups of the keys of which any piece is changed, in no order that means anything.

    ``limit_bytes`` of events are held at most, and about half as much again while they are sorted into files.
    Those lie in ``folder`` (None: where the platform keeps such) and have no name, so that not even a killed
    process leaves any behind. Raises OSError if they cannot be written or read.
    """
    held: list[Piece] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += piece.batch.nbytes
        if size > limit_bytes:
            del piece
            yield from _split(names, chain(drained(held), pieces), limit_bytes, folder)
            return
    yield from group_in_memory(names, held)


def parts_by_key(
    names: Sequence[str],
    batches: Iterator[pa.RecordBatch],
    limit_bytes: int = MEMORY_LIMIT_BYTES,
    folder: str | None = None,
) -> Generator[list[pa.RecordBatch], None, None]:
    """The batches in parts, all rows of a key in the same one and in the same order; one part if they fit in memory.

    Memory and files are as in :func:`group_by_key`. A single key that is larger than the limit is a part all the same,
    and so is everything where there is no key.
    """
    held: list[Piece] = []
    size = 0
    for batch in batches:
        held.append(Piece(batch, True, False))
        size += batch.nbytes
        if size > limit_bytes and names:
            del batch
            rest = (Piece(b, True, False) for b in batches)
            yield from _split_parts(names, chain(drained(held), rest), limit_bytes, folder)
            return
    yield [piece.batch for piece in drained(held)]


def _split_parts(
    names: Sequence[str], pieces: Iterator[Piece], limit_bytes: int, folder: str | None, splits: int = 0
) -> Generator[list[pa.RecordBatch], None, None]:
    with ExitStack() as stack:

        def new_file() -> _File:
            file = _File(names, folder, max(limit_bytes // (4 * FILES), _LEAST_BUFFER_BYTES))
            return stack.enter_context(closing(file))

        for file in _fill(names, pieces, splits, new_file):
            with closing(file):
                if file.size_bytes <= limit_bytes or file.key is not None or splits == MAX_SPLITS:
                    yield [piece.batch for piece in file.drain()]
                else:
                    yield from _split_parts(names, file.drain(), limit_bytes, folder, splits + 1)


def drained(held: MutableSequence[_T]) -> Iterator[_T]:
    """The first ones first, each let go of as it is handed over."""
    held.reverse()
    while held:
        yield held.pop()


def _split(
    names: Sequence[str], pieces: Iterator[Piece], limit_bytes: int, folder: str | None, splits: int = 0
) -> Generator[Group, None, None]:
    """The groups of more pieces than fit in memory; ``splits`` is how often they have been split before."""
    with ExitStack() as stack:

        def new_file() -> _File:
            file = _File(names, folder, max(limit_bytes // (4 * FILES), _LEAST_BUFFER_BYTES))
            return stack.enter_context(closing(file))

        for file in _fill(names, pieces, splits, new_file):
            with closing(file):
                if not file.changed:
                    continue
                if file.size_bytes <= limit_bytes or (file.key is None and splits == MAX_SPLITS):
                    yield from group_in_memory(names, file.drain())
                elif file.key is not None:
                    yield Group(file.key, (p.batch for p in file.drain()), file.events, file.late_events)
                else:
                    yield from _split(names, file.drain(), limit_bytes, folder, splits + 1)


def _fill(names: Sequence[str], pieces: Iterator[Piece], seed: int, new_file: Callable[[], _File]) -> Collection[_File]:
    """Writes the pieces into new files, all events of a key into the same one and in the same order."""
    files: dict[int, _File] = {}
    largest: np.uint64 | None = None
    for piece in pieces:
        if not piece.batch.num_rows:
            continue
        hashes = hash_rows([piece.batch.column(name) for name in names], seed)
        if largest is None:  # as far as the first piece tells; in a file of its own it is not split again
            values, counts = np.unique(hashes, return_counts=True)
            largest = values[counts.argmax()]
        for number, rows in _parts(piece.batch, hashes, largest):
            if number not in files:
                files[number] = new_file()
            files[number].add(piece._replace(batch=rows))
    for file in files.values():
        file.flush()
    return files.values()


def _parts(batch: pa.RecordBatch, hashes: Hashes, largest: np.uint64) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The number of each file that gets rows of the batch, and those rows, in their order."""
    numbers = (hashes % np.uint64(FILES)).astype(np.uint8)
    numbers[hashes == largest] = FILES
    order = np.argsort(numbers, kind="stable")
    counts = np.bincount(numbers)
    end = 0
    for number in np.flatnonzero(counts).tolist():
        start, end = end, end + int(counts[number])
        # Copied, because a slice that waits for more would keep all of its batch in memory.
        yield number, batch if end - start == batch.num_rows else batch.take(pa.array(order[start:end]))


class _File:
    """Pieces on their way through a temporary file, and what is to be known of them before they are read.

    Neighbours that agree in ``changed`` and ``late`` are joined until they make a batch worth writing, of
    ``buffer_bytes``. ``key`` is the key of all of them, if it is one.
    """

    def __init__(self, names: Sequence[str], folder: str | None, buffer_bytes: int) -> None:
        self._names = list(names)
        self._buffer_bytes = buffer_bytes
        self._file = tempfile.TemporaryFile(prefix="aion-spill-", dir=folder)  # noqa: SIM115
        self._writer: pa.ipc.RecordBatchStreamWriter | None = None
        self._written: list[tuple[bool, bool]] = []
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        self._waiting_are = (False, False)
        self._first: pa.RecordBatch | None = None
        self.key: Key | None = None
        self.size_bytes = self.events = self.late_events = 0
        self.changed = False

    def add(self, piece: Piece) -> None:
        batch, *are = piece
        if self._waiting_are != tuple(are):
            self.flush()
            self._waiting_are = (piece.changed, piece.late)
        self._compare_keys(batch.select(self._names))
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes
        self.size_bytes += batch.nbytes
        self.events += batch.num_rows
        self.late_events += batch.num_rows if piece.late else 0
        self.changed |= piece.changed
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
        """The pieces, lazily, in the order in which they came; the file is gone when they have been read."""
        if self._writer is not None:
            self._writer.close()
            self._file.seek(0)
            reader = pa.ipc.open_stream(self._file)
            for changed, late in self._written:
                yield Piece(reader.read_next_batch(), changed, late)
        self.close()

    def close(self) -> None:
        self._file.close()

    def _compare_keys(self, keys: pa.RecordBatch) -> None:
        if self._first is None:
            self._first = keys.take(pa.array([0]))
            self.key = tuple(column[0].as_py() for column in self._first.columns)
        if self.key is not None and key_codes(pa.Table.from_batches([self._first, keys])).any():
            self.key = None
