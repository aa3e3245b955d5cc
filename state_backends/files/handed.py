"""Files in which children hand over the bodies of large blocks to roots (docs/hand-over.md).

A child writes one such file for a task and batch, for all shards: the encoded rows of blocks, one after another. The
file is durable before anyone learns its name. Then only references to it are moved: through the shuffle, and into the
SST files of versions. A version that needs the file links it into its shard's folder. So each shard keeps the bytes as
long as its own versions need them, and nobody counts the shards that do.

Layout: bodies, each at a multiple of 64 bytes, then a footer: a JSON list of (offset, bytes, CRC-32) of each body, the
length of the list u32, its CRC-32 u32, and the magic "AIOH".
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pyarrow as pa

from aion.core.checksum import crc32
from aion.core.ingest.block import Block, BodyAt
from aion.errors import CorruptBlock, CorruptState
from state_backends.files.faults import disk_errors
from state_backends.files.names import HANDED, PART
from state_backends.files.storage import make_folder, sync

ALIGNMENT = 64
"""Arrow reads columns without a copy if they are aligned."""
SYNC_BYTES = 32 << 20
MOST_WAITING = 64
_END = struct.Struct("<II4s")
_MAGIC = b"AIOH"


class Footer(NamedTuple):
    """``size_bytes``: of the file. ``crc``: of the list of bodies. ``bodies``: (offset, bytes, CRC-32) of each."""

    size_bytes: int
    crc: int
    bodies: list[tuple[int, int, int]]


class HandedFile:
    """A file that a child writes. A thread writes and syncs what has been added while the child makes more.

    Every method raises DiskError. Close it: a file that was not sealed is deleted.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
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

    def seal(self) -> None:
        """Completes the file. It is durable when this returns."""
        footer = orjson.dumps(self._bodies)
        self._write([footer, _END.pack(len(footer), crc32(footer), _MAGIC)])
        with disk_errors("handing over blocks", self._path.parent):
            for write in self._writes:
                write.result()
            assert self._fd is not None
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = None
            self._part.rename(self._path)
            sync(self._path.parent)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
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
        while views:
            written = os.writev(self._fd, views)
            while views and written >= views[0].nbytes:
                written -= views.pop(0).nbytes
            if views and written:
                views[0] = views[0][written:]
        if syncs:
            os.fdatasync(self._fd)


class Bodies:
    """Maps the files of bodies into memory, so that nothing is copied. ``folders``: where to look for them."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._maps: dict[str, Any] = {}

    def of(self, block: Block) -> Block:
        """The block with its body, if it is a reference. Raises CorruptBlock if the file is missing or too short."""
        if block.at is None or len(block.data):
            return block
        mapped = self._maps.get(block.at.file)
        if mapped is None:
            mapped = self._maps[block.at.file] = self._map(block.at.file)
        size, offset = block.header.body_bytes, block.at.offset
        if offset + size > mapped.size:
            raise CorruptBlock(f"{block.at.file}: it ends before the block at {offset} with {size} bytes does")
        return block._replace(data=mapped.slice(offset, size))

    def _map(self, name: str) -> Any:
        for folder in self._folders:
            with contextlib.suppress(FileNotFoundError):
                return pa.memory_map(str(folder / name)).read_buffer()
        where = " or ".join(map(str, self._folders)) or "this kind of place"
        raise CorruptBlock(f"{name}: a version names blocks in this file, and it is not in {where}")


def advise(folders: Sequence[Path], block: Block) -> None:
    """Asks the system to read the body of a reference from disk, because it will be needed soon. Does not wait."""
    assert block.at is not None
    for folder in folders:
        with contextlib.suppress(OSError):  # the reader of the block reports the error
            fd = os.open(folder / block.at.file, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, block.at.offset, block.header.body_bytes, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(fd)
            return


def read_footer(path: Path) -> Footer:
    """Raises CorruptState if the file is missing or not complete."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - _END.size, 0))
            end = file.read()
            if len(end) < _END.size or end[-4:] != _MAGIC:
                raise CorruptState(f"file {path.name}: it is not complete")
            length, crc, _ = _END.unpack(end)
            file.seek(max(size - _END.size - length, 0))
            footer = file.read(length)
    except FileNotFoundError as error:
        raise CorruptState(f"file {path.name} cannot be read: {error}") from error
    if crc32(footer) != crc:
        raise CorruptState(f"file {path.name}: the checksum of its list of bodies is not that of what was written")
    return Footer(size, crc, [tuple(body) for body in orjson.loads(footer)])


def damage(data: Any, crc: int) -> str | None:
    """What is wrong with the bytes of such a file. ``crc``: of its list of bodies, from the manifest."""
    view = memoryview(data)
    length, found, magic = _END.unpack(view[-_END.size :])
    footer = view[-_END.size - length : -_END.size]
    if magic != _MAGIC or found != crc or crc32(footer) != crc:
        return "its list of bodies is not what was written"
    for offset, size, body_crc in orjson.loads(footer):
        if crc32(view[offset : offset + size]) != body_crc:
            return f"the checksum of the body at {offset} is not that of the bytes that were written"
    return None


def name_of(batch: int, lineage: str, attempt: str) -> str:
    """The name of a file. ``lineage``, ``attempt``: which checkpoint's query and which attempt of a task wrote it."""
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
