"""The bodies of handed-over blocks: reading them ahead into shared memory, or at once (docs/hand-over.md).

A body lies in a child's file, on a disk or on a remote file system. Staged, it is a file of its own in a folder of
shared memory, which a worker maps without a copy, and which the memory budget counts. What the system happens to have
in its page cache is nobody's tier: staging leaves the cache as it found it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from state_backends.files.bodies import Places, are_resident, by_file, find, staged_name, too_short
from state_backends.files.faults import disk_errors
from state_backends.files.names import PART
from state_backends.format.block import Block, BodyAt
from state_backends.format.errors import CorruptBlock
from state_backends.store.io import Steps
from state_backends.store.waiting import waiting_for
from state_backends.thresholds import threshold

PIECE_BYTES = threshold(1 << 20, 1000)
"""The bytes of one step; an urgent read waits for one."""
log = logging.getLogger(__name__)


class Source(Protocol):
    """Where bodies are: a shard's storage."""

    @property
    def bodies(self) -> Places: ...

    def body_of(self, reference: Block) -> Future[bytes] | None:
        """Begins to read a body that is not on this host. None: there is no other file system that may have it."""


class BodyFiles:
    """Reads and stages the bodies of one shard. ``folder``: for staged bodies, in shared memory; None: there is none.

    ``source`` finds the shard's storage. Only the I/O thread calls it, except where a docstring says otherwise.
    """

    def __init__(self, folder: Path | None, source: Callable[[], Source]) -> None:
        self._folder = folder
        self._source = source
        self._piece = memoryview(bytearray(PIECE_BYTES))
        self._warned = False

    def resident(self, references: Sequence[Block]) -> list[bool]:
        """Returns whether a worker can map each body without waiting for a disk. Any thread may ask."""
        folders = self._source().bodies.folders
        found: dict[BodyAt, bool] = {}
        for name, blocks in by_file(references).items():
            path = find(folders, name)
            ranges = [(block.at.offset, block.header.body_bytes) for block in blocks if block.at is not None]
            answers = [False] * len(ranges) if path is None else are_resident(path, ranges)
            found.update((block.at, answer) for block, answer in zip(blocks, answers, strict=True) if block.at)
        return [block.at is None or found[block.at] for block in references]

    def read(self, reference: Block) -> Steps[Block]:
        """Steps that read a body. Returns the block with it. Raises CorruptBlock, DiskError or StorageError."""
        body = bytearray(reference.header.body_bytes)
        yield from self._pieces(reference, memoryview(body))
        buffer = pa.py_buffer(body)
        return Block(reference.header, b"", None, lambda: buffer)

    def stage(self, reference: Block) -> Steps[bool]:
        """Steps that bring a body to shared memory, whole or not at all. Returns whether it is there.

        It is not if a worker can map the file at once: to copy it costs more than it may save. Nor if shared memory is
        full: then whoever needs the body reads it. Raises what :meth:`read` raises.
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
            except _NoRoom as error:
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
                "Give /dev/shm as much room as memory.budget (docs/hand-over.md)",
                self._folder,
                error,
            )

    def _pieces(self, reference: Block, into: memoryview | int) -> Steps[None]:
        """Steps that read a body, piece by piece, into memory or into a file of shared memory."""
        at, size = reference.at, reference.header.body_bytes
        assert at is not None
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
        coming = source.body_of(reference)
        if coming is None:
            where = " or ".join([*places.folders, *places.paths])
            raise CorruptBlock(f"{at.file}: a version names blocks in this file, and it is not in {where}")
        try:
            yield from waiting_for([coming])
        finally:
            coming.cancel()
        body = memoryview(coming.result())
        if len(body) != size:
            raise too_short(at, size)
        if isinstance(into, int):
            _write(into, body)
        else:
            into[:] = body
        yield size

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
        if isinstance(into, int):  # the copy is ours; the system need not have one, too
            os.posix_fadvise(fd, at.offset, size, os.POSIX_FADV_DONTNEED)


class _NoRoom(Exception):
    """Shared memory is full."""


def _write(fd: int, data: memoryview) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                raise
            raise _NoRoom(os.strerror(error.errno)) from error


class NoBodies:
    """Where no block is handed over."""

    def resident(self, references: Sequence[Any]) -> list[bool]:
        return [True] * len(references)

    def read(self, reference: Block) -> Steps[Block]:
        return reference
        yield 0

    def stage(self, reference: Block) -> Steps[bool]:
        return False
        yield 0

    def unstage(self, at: BodyAt) -> None: ...

    def close(self) -> None: ...
