"""Reading the files in which children handed over the bodies of blocks (docs/hand-over.md).

Layout: bodies, each at a multiple of 64 bytes, then a footer: a JSON list of (offset, bytes, CRC-32) of each body, the
length of the list u32, its CRC-32 u32, and the magic "AIOH".
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pyarrow as pa

from state_backends.format.block import Block
from state_backends.format.checksum import crc32
from state_backends.format.errors import CorruptBlock, CorruptState

ALIGNMENT = 64
"""Arrow reads columns without a copy if they are aligned."""
END = struct.Struct("<II4s")
MAGIC = b"AIOH"
_STRIDE = 128 << 10  # the system reads at least as much at once


class Places(NamedTuple):
    """Where the files are: local ``folders``, or else ``paths`` on the remote file system of ``uri``.

    What is found there is downloaded to the first local folder. ``uri`` is empty if there is no such file system.
    """

    folders: Sequence[str]
    uri: str = ""
    paths: Sequence[str] = ()


class Footer(NamedTuple):
    """``size_bytes``: of the file. ``crc``: of the list of bodies. ``bodies``: (offset, bytes, CRC-32) of each."""

    size_bytes: int
    crc: int
    bodies: list[tuple[int, int, int]]


class Bodies:
    """Maps files with bodies into memory, so that nothing is copied.

    ``download(places, name)`` brings a file to the first local folder; it raises FileNotFoundError if there is none.
    """

    def __init__(self, places: Places, download: Callable[[Places, str], None] | None = None) -> None:
        self._places = places
        self._download = download
        self._maps: dict[str, Any] = {}

    def of(self, block: Block) -> Block:
        """Returns the block; if it is a reference, one that opens its body when it is first read."""
        return block if block.at is None else block._replace(opens=partial(self._body, block))

    def _body(self, block: Block) -> Any:
        """Raises CorruptBlock if the file is missing or too short."""
        assert block.at is not None
        mapped = self._maps.get(block.at.file)
        if mapped is None:
            mapped = self._maps[block.at.file] = self._map(block.at.file)
        size, offset = block.header.body_bytes, block.at.offset
        if offset + size > mapped.size:
            raise CorruptBlock(f"{block.at.file}: it ends before the block at {offset} with {size} bytes does")
        return mapped.slice(offset, size)

    def _map(self, name: str) -> Any:
        path = find(self._places.folders, name)
        if path is None and self._download is not None:
            with contextlib.suppress(FileNotFoundError):
                self._download(self._places, name)
                path = find(self._places.folders, name)
        if path is not None:
            with contextlib.suppress(FileNotFoundError):
                return pa.memory_map(str(path)).read_buffer()
        where = " or ".join([*self._places.folders, *self._places.paths]) or "this kind of place"
        raise CorruptBlock(f"{name}: a version names blocks in this file, and it is not in {where}")


def find(folders: Sequence[str], name: str) -> Path | None:
    """Returns the path of the file, in the first folder that has it."""
    paths = (Path(folder) / name for folder in folders)
    return next((path for path in paths if path.exists()), None)


def by_file(references: Iterable[Block]) -> dict[str, list[Block]]:
    """Returns the references by the file that their bodies are in."""
    found: dict[str, list[Block]] = {}
    for block in references:
        assert block.at is not None
        found.setdefault(block.at.file, []).append(block)
    return found


def advise(path: Path, references: Iterable[Block]) -> None:
    """Asks the system to read bodies of this file from disk, because they will be needed soon. Does not wait."""
    with contextlib.suppress(OSError):  # the reader of a block reports the error
        fd = os.open(path, os.O_RDONLY)
        try:
            for block in references:
                assert block.at is not None
                os.posix_fadvise(fd, block.at.offset, block.header.body_bytes, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(fd)


def wait_for_body(places: Places, block: Block, begin: int, end: int) -> bool:
    """Waits until a part of a body that :func:`advise` asked for is in memory. False: it is not on this host."""
    assert block.at is not None
    path = find(places.folders, block.at.file)
    if path is not None:
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:  # the reader of a block reports it
            for offset in range(begin, end, _STRIDE):
                os.pread(file.fileno(), 1, block.at.offset + offset)
    return path is not None


def read_footer(path: Path) -> Footer:
    """Raises CorruptState if the file is missing or not complete."""
    try:
        with path.open("rb") as file:
            fd = file.fileno()
            return footer_of(partial(os.pread, fd), os.fstat(fd).st_size, path.name)
    except FileNotFoundError as error:
        raise CorruptState(f"file {path.name} cannot be read: {error}") from error


def footer_of(read_at: Callable[[int, int], bytes], size: int, name: str) -> Footer:
    """Reads the end of a file of ``size`` bytes. Raises CorruptState if it is not complete.

    ``read_at`` takes a number of bytes and an offset.
    """
    end = read_at(END.size, max(size - END.size, 0))
    if len(end) < END.size or end[-4:] != MAGIC:
        raise CorruptState(f"file {name}: it is not complete")
    length, crc, _ = END.unpack(end)
    footer = read_at(length, max(size - END.size - length, 0))
    if crc32(footer) != crc:
        raise CorruptState(f"file {name}: the checksum of its list of bodies is not that of what was written")
    return Footer(size, crc, [tuple(body) for body in orjson.loads(footer)])


def damage(data: Any, crc: int) -> str | None:
    """Returns what is wrong with the bytes of such a file. ``crc``: of its list of bodies, from the manifest."""
    view = memoryview(data)
    length, found, magic = END.unpack(view[-END.size :])
    footer = view[-END.size - length : -END.size]
    if magic != MAGIC or found != crc or crc32(footer) != crc:
        return "its list of bodies is not what was written"
    for offset, size, body_crc in orjson.loads(footer):
        if crc32(view[offset : offset + size]) != body_crc:
            return f"the checksum of the body at {offset} is not that of the bytes that were written"
    return None
