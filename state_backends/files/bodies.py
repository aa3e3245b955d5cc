"""Reading the files in which children handed over the bodies of blocks (docs/inside/hand-over.md).

Layout: bodies, each at a multiple of 64 bytes, then a footer: a JSON list of (offset, bytes, CRC-32) of each body, the
length of the list u32, its CRC-32 u32, and the magic "AIOH".
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pyarrow as pa

from state_backends.format.block import Block, BodyAt
from state_backends.format.checksum import crc32
from state_backends.format.errors import CorruptBlock, CorruptState

ALIGNMENT = 64
"""Arrow reads columns without a copy if they are aligned."""
END = struct.Struct("<II4s")
MAGIC = b"AIOH"
_PAGE = mmap.PAGESIZE
_AROUND = max(1 << 16, _PAGE)
"""Linux maps this much around a page that is read."""


class Places(NamedTuple):
    """Where the files are: local ``folders``, or else ``paths`` on the remote file system of ``uri``.

    ``uri`` is empty if there is no such file system. ``staged``: the folder of shared memory with staged bodies, each
    in a file of its own (:func:`staged_name`); empty if there is none.
    """

    folders: Sequence[str]
    uri: str = ""
    paths: Sequence[str] = ()
    staged: str = ""


class Footer(NamedTuple):
    """``size_bytes``: of the file. ``crc``: of the list of bodies. ``bodies``: (offset, bytes, CRC-32) of each."""

    size_bytes: int
    crc: int
    bodies: list[tuple[int, int, int]]


_files: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()


def give_back_pages() -> None:
    """Gives back the pages of all bodies that this process maps, also of those that somebody still reads."""
    for file in list(_files):
        file.madvise(mmap.MADV_DONTNEED)


class _Read:
    """A body in a mapped file, as long as somebody reads it. Then its pages are given back.

    Pages of a mapped file count as the process's memory for as long as they are mapped, and an attempt maps the files
    of all windows that it executes. What is read again comes from the page cache.
    """

    def __init__(self, file: mmap.mmap, offset: int, size: int) -> None:
        self._file = file
        self._first = offset - offset % _AROUND
        self._length = min(-(-(offset + size) // _AROUND) * _AROUND, len(file)) - self._first

    def __del__(self) -> None:
        self._file.madvise(mmap.MADV_DONTNEED, self._first, self._length)


class Bodies:
    """Maps bodies into memory, so that nothing is copied: a staged body, or the file that has it.

    ``fetch(places, reference)`` reads the body of a file that is not on this host; it raises FileNotFoundError if there
    is none.
    """

    def __init__(self, places: Places, fetch: Callable[[Places, Block], bytes] | None = None) -> None:
        self._places = places
        self._fetch = fetch
        self._maps: dict[str, tuple[mmap.mmap, Any]] = {}

    def of(self, block: Block) -> Block:
        """Returns the block; if it is a reference, one that opens its body when it is first read."""
        return block if block.at is None else block._replace(opens=partial(self._body, block))

    def _body(self, block: Block) -> Any:
        """Raises CorruptBlock if the file is missing or too short."""
        assert block.at is not None
        size, (name, offset) = block.header.body_bytes, block.at
        if (staged := self._staged(block.at, size)) is not None:
            return staged
        mapped = self._maps.get(name) or self._map(name)
        if mapped is not None:
            self._maps[name] = mapped
            file, content = mapped
            if offset + size > content.size:
                raise too_short(block.at, size)
            return pa.foreign_buffer(content.address + offset, size, _Read(file, offset, size))
        if self._fetch is not None:
            with contextlib.suppress(FileNotFoundError):
                return pa.py_buffer(self._fetch(self._places, block))
        where = " or ".join([*self._places.folders, *self._places.paths]) or "this kind of place"
        raise CorruptBlock(f"{name}: a version names blocks in this file, and it is not in {where}")

    def _staged(self, at: BodyAt, size: int) -> Any:
        """The staged body. Its memory is freed when nobody uses the buffer, so this keeps none."""
        if self._places.staged:
            with contextlib.suppress(FileNotFoundError):
                mapped = pa.memory_map(f"{self._places.staged}/{staged_name(at)}").read_buffer()
                if mapped.size == size:
                    return mapped
        return None

    def _map(self, name: str) -> tuple[mmap.mmap, Any] | None:
        """A file, and its bytes, or None if it is not there, or it is empty."""
        path = find(self._places.folders, name)
        if path is not None:
            with contextlib.suppress(FileNotFoundError, ValueError), path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                _files.add(mapped)
                return mapped, pa.py_buffer(mapped)
        return None


def staged_name(at: BodyAt) -> str:
    """The name of a staged body's file."""
    return f"{at.file}.{at.offset}"


def too_short(at: BodyAt, size: int) -> CorruptBlock:
    return CorruptBlock(f"{at.file}: it ends before the block at {at.offset} with {size} bytes does")


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


def are_resident(path: Path, ranges: Sequence[tuple[int, int]]) -> list[bool]:
    """Returns whether the system has each range (offset, bytes) of a file in memory. False if it cannot say."""
    found = [False] * len(ranges)
    with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:  # the reader of a block reports it
        size = os.fstat(file.fileno()).st_size
        base = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0) if size and _libc else None
        if _libc is None or base in (None, _FAILED):
            return found
        for number, (offset, length) in enumerate(ranges):
            begin = offset - offset % _PAGE
            pages = -(-(offset + length - begin) // _PAGE)
            flags = ctypes.create_string_buffer(pages)
            if offset + length <= size and not _libc.mincore(base + begin, pages * _PAGE, flags):
                found[number] = flags.raw.count(b"\x01") == pages  # the system sets the lowest bit only
        _libc.munmap(base, size)
    return found


def _system() -> ctypes.CDLL | None:
    """The C library, where it can tell what is in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_longlong]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    except AttributeError:
        return None
    return libc


_libc = _system()
_FAILED = ctypes.c_void_p(-1).value


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
