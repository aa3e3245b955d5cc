"""Writing the files in which children hand over the bodies of large blocks to roots (docs/inside/hand-over.md).

A child writes one such file for a task and batch, for all shards: the encoded rows of blocks, one after another. The
file is durable before anyone learns its name. Then only references to it are moved: through the shuffle, and into the
SST files of versions. A version that needs the file links it into its shard's folder. So each shard keeps the bytes as
long as its own versions need them, and nobody counts the shards that do.

Remote file systems have no links. There a child uploads a file for each shard while it writes it, and the version
copies it (:mod:`state_backends.files.handed_remote`). :mod:`state_backends.files.bodies` reads the files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import orjson

from state_backends.files.bodies import ALIGNMENT, END, MAGIC
from state_backends.files.faults import disk_errors
from state_backends.files.names import HANDED, PART
from state_backends.files.storage import make_folder, sync
from state_backends.format.block import Block, BodyAt
from state_backends.format.checksum import crc32
from state_backends.thresholds import threshold

SYNC_BYTES = threshold(32 << 20, 256)
MOST_WAITING = threshold(64, 2)


class Upload(Protocol):
    """A file on a remote file system. Every method raises StorageError."""

    def write(self, data: Any) -> None: ...

    def finish(self) -> None:
        """The file is there, whole, when this returns."""

    def discard(self) -> None:
        """Deletes what was written. Does nothing after :meth:`finish`."""


class HandedFile:
    """A file that a child writes. A thread writes and syncs what has been added while the child makes more.

    ``upload``: gets the same bytes. Then this file is only a copy for readers on this host, and is not synced.
    Every method raises DiskError or StorageError. Close it: a file that was not sealed is deleted.
    """

    def __init__(self, folder: Path, name: str, upload: Upload | None = None) -> None:
        self.name = name
        self._upload = upload
        self._path = folder / name
        self._part = self._path.with_suffix(PART)
        with disk_errors("handing over blocks", folder):
            make_folder(folder)
            self._fd: int | None = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._thread = ThreadPoolExecutor(1, "aion-hand-over")
        self._writes: list[Future[None]] = []
        self._offset = 0
        self._unsynced = 0
        self._bodies: list[tuple[int, int, int]] = []

    def add(self, block: Block) -> Block:
        """Adds the body of a block. Returns the block as a reference to it."""
        body, header = block.body, block.header
        at = BodyAt(self.name, self._offset)
        self._bodies.append((self._offset, body.size, header.crc))
        gap = -body.size % ALIGNMENT
        self._write([body, bytes(gap)])
        self._offset += body.size + gap
        return Block(header, b"", at)

    def end(self) -> None:
        """No more blocks follow. Does not wait; :meth:`seal` does."""
        footer = orjson.dumps(self._bodies)
        self._write([footer, END.pack(len(footer), crc32(footer), MAGIC)])
        self._writes.append(self._thread.submit(self._complete))

    def seal(self) -> None:
        """After :meth:`end`: the file is complete and durable when this returns."""
        with disk_errors("handing over blocks", self._path.parent):
            for write in self._writes:
                write.result()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        if self._upload is not None:
            self._upload.discard()
        if self._fd is not None:
            os.close(self._fd)
            with contextlib.suppress(OSError):
                self._part.unlink()

    def _write(self, parts: Sequence[Any]) -> None:
        size = sum(memoryview(part).nbytes for part in parts)
        self._unsynced += size
        due = self._unsynced >= SYNC_BYTES
        if due:
            self._unsynced = 0
        self._writes.append(self._thread.submit(self._do_write, parts, due))
        with disk_errors("handing over blocks", self._path.parent):
            # What waits to be written is in memory. A slow disk must not let it grow.
            while self._writes[0].done() or len(self._writes) > MOST_WAITING:
                self._writes.pop(0).result()
                if not self._writes:
                    break

    def _do_write(self, parts: Sequence[Any], syncs: bool) -> None:
        assert self._fd is not None
        views = [memoryview(part) for part in parts if len(part)]
        if self._upload is not None:
            for view in views:
                self._upload.write(view)
        while views:
            written = os.writev(self._fd, views)
            while views and written >= views[0].nbytes:
                written -= views.pop(0).nbytes
            if views and written:
                views[0] = views[0][written:]
        if syncs and self._upload is None:
            os.fdatasync(self._fd)

    def _complete(self) -> None:
        assert self._fd is not None
        if self._upload is None:
            os.fsync(self._fd)
        os.close(self._fd)
        self._fd = None
        self._part.rename(self._path)
        if self._upload is None:
            sync(self._path.parent)
        else:
            self._upload.finish()


def name_of(batch: int, lineage: str, attempt: str) -> str:
    """Returns the name of a file. ``lineage``, ``attempt``: which checkpoint's query and which attempt of a task wrote
    it.
    """
    return f"{0:010d}-{batch:010d}-{lineage}-{attempt}{HANDED}"


def sweep(folder: Path, lineage: str, batch: int) -> None:
    """Deletes what the children of a lineage wrote for batches before ``batch``. Never raises.

    Those batches are complete: each of their versions has linked the files that it needs, and a task of theirs that
    still runs, because Spark has lost sight of it, writes files that nobody will ask for.
    """
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            parts = path.name.split("-")
            if len(parts) > 3 and parts[2] == lineage and parts[1].isdecimal() and int(parts[1]) < batch:
                with contextlib.suppress(OSError):
                    path.unlink()
