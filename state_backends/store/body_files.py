"""The bodies of handed-over blocks: reading them ahead into shared memory, or at once (docs/inside/hand-over.md).

A body lies in a child's file, on a disk or on a remote file system. Staged, it is a file of its own in a folder of
shared memory, which a worker maps without a copy, and which the memory budget counts. Nothing relies on the
system's page cache: staging uses what is there, and leaves nothing there.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pyarrow as pa

from state_backends.files.bodies import Places, are_resident, by_file, find, staged_name, too_short
from state_backends.files.faults import disk_errors
from state_backends.files.names import PART
from state_backends.format.block import Block, BodyAt
from state_backends.format.errors import CorruptBlock, StateError
from state_backends.store.io import MOST_TOGETHER_BYTES, Steps
from state_backends.store.waiting import Waits, waiting_for
from state_backends.thresholds import threshold

PIECE_BYTES = threshold(1 << 20, 1000)
"""The bytes of one step; an urgent read waits for one."""
GAP_BYTES = threshold(64 << 10, 64)
"""A larger gap between two bodies is not worth reading."""
log = logging.getLogger(__name__)


class Source(Protocol):
    """Where bodies are: a shard's storage."""

    @property
    def bodies(self) -> Places: ...

    def body_of(self, at: BodyAt, size: int) -> Future[bytes] | None:
        """Starts to read ``size`` bytes at ``at``. Returns None if all files are in folders of this host."""


class BodyFiles:
    """Reads and stages the bodies of one shard. ``folder``: for staged bodies, in shared memory, or None if there is
    none.

    ``source`` finds the shard's storage. Only the I/O thread calls it, except where a docstring says otherwise.
    """

    def __init__(self, folder: Path | None, source: Callable[[], Source]) -> None:
        self._folder = folder
        self._source = source
        self._piece = memoryview(bytearray(PIECE_BYTES))
        self._warned = False
        self._lock = threading.Lock()
        self._expected: dict[str, dict[int, int]] = {}  # file -> offset -> bytes
        self._coming: dict[BodyAt, _Range] = {}

    def resident(self, references: Sequence[Block]) -> list[bool]:
        """Returns whether a worker can map each body without waiting for a disk. Any thread may ask.

        What is coming with a neighbour is in the system's memory for a moment only, and does not count.
        """
        folders = self._source().bodies.folders
        found: dict[BodyAt, bool] = {}
        for name, blocks in by_file(references).items():
            path = find(folders, name)
            ranges = [(block.at.offset, block.header.body_bytes) for block in blocks if block.at is not None]
            answers = [False] * len(ranges) if path is None else are_resident(path, ranges)
            found.update(
                (b.at, answer and b.at not in self._coming) for b, answer in zip(blocks, answers, strict=True) if b.at
            )
        return [block.at is None or found[block.at] for block in references]

    def is_near(self, file: str) -> bool:
        """Whether a file with bodies is in a folder of this host. Any thread may ask."""
        return find(self._source().bodies.folders, file) is not None

    def expect(self, reference: Block) -> None:
        """A request for this body is queued. It may be read with a neighbour. Any thread may call it."""
        if reference.at is not None:
            with self._lock:
                self._expected.setdefault(reference.at.file, {})[reference.at.offset] = reference.header.body_bytes

    def forget(self, reference: Block) -> None:
        """That request is over."""
        if reference.at is not None:
            with self._lock:
                self._coming.pop(reference.at, None)
                expected = self._expected.get(reference.at.file, {})
                expected.pop(reference.at.offset, None)
                if not expected:
                    self._expected.pop(reference.at.file, None)

    def read(self, reference: Block) -> Steps[Block]:
        """Steps that read a body. Returns the block with it. Raises CorruptBlock, DiskError or StorageError."""
        body = bytearray(reference.header.body_bytes)
        yield from self._pieces(reference, memoryview(body))
        buffer = pa.py_buffer(body)
        return Block(reference.header, b"", None, lambda: buffer)

    def stage(self, reference: Block) -> Steps[bool]:
        """Steps that copy a body to shared memory, whole or not at all. They return whether it is there then.

        They copy nothing if a worker can map the file at once, because that would cost more than it may save, and
        nothing if shared memory is full. Then the execution reads the body. Raises the errors of :meth:`read`.
        """
        if self._folder is None or reference.at is None or self.resident([reference])[0]:
            return False
        path = self._path(reference.at)
        part = path.with_name(f"{path.name}{PART}")
        try:
            self._folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as error:
            self._warn(error)
            return False
        try:
            try:
                yield from self._pieces(reference, fd)
            except MemoryError as error:
                self._warn(error)
                return False
            part.rename(path)
            return True
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):
                part.unlink()

    def unstage(self, at: BodyAt) -> None:
        """Frees a staged body. A worker that has mapped it keeps its pages until it lets go. Any thread may call it."""
        with contextlib.suppress(OSError):
            self._path(at).unlink()

    def close(self) -> None:
        """Frees all of them."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, at: BodyAt) -> Path:
        assert self._folder is not None
        return self._folder / staged_name(at)

    def _warn(self, error: Exception) -> None:
        """Once: the next body would say the same."""
        if not self._warned:
            self._warned = True
            log.warning(
                "there is no room for staged bodies in %s (%s): executions read them when they need them. "
                "Give /dev/shm as much room as memory.budget (docs/inside/hand-over.md)",
                self._folder,
                error,
            )

    def _pieces(self, reference: Block, into: memoryview | int) -> Steps[None]:
        """Steps that read a body into memory, or into a file of shared memory: alone, or with its neighbours."""
        at, size = reference.at, reference.header.body_bytes
        assert at is not None
        with self._lock:
            coming = self._coming.pop(at, None)
        if coming is None:
            coming = yield from self._begin(at, size, lets_go=isinstance(into, int))
        # A range of a local file is read by the first request. One that is here before that has become more urgent.
        if coming is not None and (coming.data.done() or not coming.is_local):
            if not coming.data.done():
                yield Waits(coming.data)
            has_failed = coming.data.cancelled() or coming.data.exception() is not None
            if not has_failed:  # otherwise one of the neighbours may be what failed
                _put(memoryview(coming.data.result())[at.offset - coming.begin :][:size], into)
                return
        yield from self._alone(at, size, into)

    def _begin(self, at: BodyAt, size: int, *, lets_go: bool) -> Steps[_Range | None]:
        """Steps that read a body with its neighbours: to the end from a local file, or else they only ask for it.

        Returns None if there are no neighbours.
        """
        end, members = self._together(at, size)
        if not members:
            return None
        source, span = self._source(), end - at.offset
        data: Future[Any] | None = None
        is_local = find(source.bodies.folders, at.file) is not None
        if not is_local:
            data = source.body_of(at, span)
        found = _Range(at.offset, data or Future(), is_local or data is None)
        with self._lock:
            self._coming.update(dict.fromkeys(members, found))
        if found.is_local:
            yield from self._range(at, span, found.data, lets_go=lets_go)
        return found

    def _together(self, at: BodyAt, size: int) -> tuple[int, list[BodyAt]]:
        """Returns which expected bodies lie right behind this one, and where the last of them ends."""
        end, members = at.offset + size, []
        with self._lock:
            expected = self._expected.get(at.file, {})
            for offset in sorted(offset for offset in expected if offset > at.offset):
                after, body = offset + expected[offset], BodyAt(at.file, offset)
                if offset - end > GAP_BYTES or after - at.offset > MOST_TOGETHER_BYTES or body in self._coming:
                    break
                members.append(body)
                end = after
        return end, members

    def _range(self, at: BodyAt, size: int, data: Future[Any], *, lets_go: bool) -> Steps[None]:
        """Steps that read a range, for several requests. They learn of an error by ``data``."""
        try:
            body = bytearray(size)
            yield from self._alone(at, size, memoryview(body))
            data.set_result(body)
            if lets_go:
                self._let_go(at, size)
        except BaseException as error:
            data.set_exception(StateError(f"reading {at.file}: {error!r}"))
            if not isinstance(error, (StateError, OSError)):
                raise

    def _alone(self, at: BodyAt, size: int, into: memoryview | int) -> Steps[None]:
        source = self._source()
        places = source.bodies
        path = find(places.folders, at.file)
        if path is not None:
            with contextlib.suppress(FileNotFoundError), disk_errors(f"reading {at.file}", path.parent):
                fd = os.open(path, os.O_RDONLY)
                try:
                    yield from self._pieces_of(fd, at, size, into)
                finally:
                    os.close(fd)
                return
        coming = source.body_of(at, size)
        if coming is None:
            where = " or ".join([*places.folders, *places.paths])
            raise CorruptBlock(f"{at.file}: a version names blocks in this file, and it is not in {where}")
        try:
            yield from waiting_for([coming])
        finally:
            coming.cancel()
        _put(memoryview(coming.result()), into)

    def _pieces_of(self, fd: int, at: BodyAt, size: int, into: memoryview | int) -> Steps[None]:
        # Exactly this range: what the system would read ahead may be another shard's.
        os.posix_fadvise(fd, at.offset, size, os.POSIX_FADV_RANDOM)
        done = 0
        while done < size:
            piece = self._piece[: size - done] if isinstance(into, int) else into[done : done + PIECE_BYTES]
            moved = os.preadv(fd, [piece], at.offset + done)
            if not moved:
                raise too_short(at, size)
            if isinstance(into, int):
                _write(into, piece[:moved])
            done += moved
            yield moved
        if isinstance(into, int):
            os.posix_fadvise(fd, at.offset, size, os.POSIX_FADV_DONTNEED)

    def _let_go(self, at: BodyAt, size: int) -> None:
        """The copy is ours; the system need not have one, too."""
        path = find(self._source().bodies.folders, at.file)
        if path is not None:
            with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), at.offset, size, os.POSIX_FADV_DONTNEED)


class _Range(NamedTuple):
    """Neighbours that are read together. ``data``: the bytes from ``begin`` on."""

    begin: int
    data: Future[Any]
    is_local: bool


def _write(fd: int, data: memoryview) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                raise
            raise MemoryError(os.strerror(error.errno)) from error


def _put(body: memoryview, into: memoryview | int) -> None:
    if isinstance(into, int):
        _write(into, body)
    else:
        into[:] = body


class NoBodies:
    """Where no block is handed over."""

    def resident(self, references: Sequence[Any]) -> list[bool]:
        return [True] * len(references)

    def is_near(self, file: str) -> bool:
        return True

    def expect(self, reference: Block) -> None: ...

    def forget(self, reference: Block) -> None: ...

    def read(self, reference: Block) -> Steps[Block]:
        return reference
        yield 0

    def stage(self, reference: Block) -> Steps[bool]:
        return False
        yield 0

    def unstage(self, at: BodyAt) -> None: ...

    def close(self) -> None: ...
