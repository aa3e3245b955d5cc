"""Finds blocks of data in an SST file of RocksDB's by a part of its bytes (docs/reference/formats.md). Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from state_backends.format.errors import CorruptState

END = struct.Struct("<x4sIII24sI8s")
"""The last bytes of a file."""
_MARK, _MAGIC, _VERSION = bytes.fromhex("3e007a00"), bytes.fromhex("f7cff485b741e288"), 6
_TRAILER = 5  # after each block: how it is compressed, and its checksum
_COUNT = struct.Struct("<I")
_NONE, _LZ4 = 0, 4
_INDEX = b"rocksdb.index"


class Span(NamedTuple):
    """A range of a file: the offset of its first byte, and of the byte after its last."""

    begin: int
    end: int


class TableIndex:
    """Says which range of a file has a key. It reads entries when it needs them: a file may have a million.

    ``data``: the range of all blocks of data. What follows it in the file is about the table as a whole.
    """

    def __init__(self, block: bytes, data: Span) -> None:
        self._block = block
        try:
            (count,) = _COUNT.unpack(block[-_COUNT.size :])
        except struct.error:
            raise CorruptState("the index of a table is cut off") from None
        begin = len(block) - _COUNT.size * (count + 1)
        if begin < 0:
            raise CorruptState("the index of a table is cut off")
        self._entries = np.frombuffer(block, dtype="<u4", count=count, offset=begin)
        self.data = data

    def __len__(self) -> int:
        return len(self._entries)

    def span(self, at: int) -> Span:
        """Returns the range of a block of data. ``at``: its place among them."""
        return self._entry(at)[1]

    def find(self, key: bytes) -> int:
        """Returns the place of the only block of data that may have the key. The file's end if none may."""
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self._entry(middle)[0] < key:
                low = middle + 1
            else:
                high = middle
        return low

    def last_key(self, at: int) -> bytes:
        """Returns a key that no key of the block is above, and that all keys of the next block are above."""
        return self._entry(at)[0]

    def _entry(self, at: int) -> tuple[bytes, Span]:
        begin = int(self._entries[at])
        shared, size, begin = _varints(self._block, begin, 2)
        if shared:
            raise CorruptState("the index of a table is not as Aion writes it")
        key = self._block[begin : begin + size]
        offset, length, _ = _varints(self._block, begin + size, 2)
        return key, Span(offset, offset + length + _TRAILER)


def metaindex(end: bytes, size_bytes: int) -> Span:
    """Returns the range of the list of a file's parts. ``end``: the last bytes of the file.

    Raises CorruptState if it is not an SST file as Aion writes it.
    """
    if len(end) < END.size:
        raise CorruptState("it is not a complete SST file")
    mark, _, _, length, zeros, version, magic = END.unpack(end[-END.size :])
    upto = size_bytes - END.size
    if (mark, magic, version) != (_MARK, _MAGIC, _VERSION) or any(zeros) or length + _TRAILER > upto:
        raise CorruptState("it is not a complete SST file")
    return Span(upto - _TRAILER - length, upto)


def parts(block: bytes) -> tuple[Span, int]:
    """Returns the range of the index, and where the data ends. ``block``: the list of a file's parts."""
    found = {name: Span(*_handle(value)) for name, value in _entries(_plain(block))}
    if _INDEX not in found:
        raise CorruptState("it has no index")
    return found[_INDEX], min(span.begin for span in found.values())


def index_of(block: bytes, data_end: int) -> TableIndex:
    """Returns the index of a table. ``block``: its bytes."""
    return TableIndex(_plain(block), Span(0, data_end))


def _plain(block: bytes) -> bytes:
    """Returns the contents of a block with its trailer. Raises CorruptState for a way of compression of others."""
    if len(block) < _TRAILER:
        raise CorruptState("a block is cut off")
    kind, contents = block[-_TRAILER], block[:-_TRAILER]
    if kind == _NONE:
        return contents
    if kind == _LZ4:
        size, begin = _varints(contents, 0, 1)
        try:
            plain: bytes = pa.Codec("lz4_raw").decompress(contents[begin:], size, asbytes=True)
        except pa.ArrowException as error:
            raise CorruptState(f"a block cannot be decompressed: {error}") from error
        return plain
    raise CorruptState(f"a block is compressed in a way that Aion does not use: {kind}")


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields the entries of a block of data."""
    if len(block) < _COUNT.size:
        raise CorruptState("a block is cut off")
    (count,) = _COUNT.unpack(block[-_COUNT.size :])
    at, end, key = 0, len(block) - _COUNT.size * (count + 1), b""
    while at < end:
        shared, new, length, at = _varints(block, at, 3)
        key = key[:shared] + block[at : at + new]
        yield key, block[at + new : at + new + length]
        at += new + length


def _handle(value: bytes) -> tuple[int, int]:
    offset, length, _ = _varints(value, 0, 2)
    return offset, offset + length + _TRAILER


def _varints(data: bytes, at: int, count: int) -> tuple[int, ...]:
    """Returns this many integers, and where the next one begins. Raises CorruptState at the end of the data."""
    found = []
    try:
        for _ in range(count):
            value = shift = 0
            while (byte := data[at]) >= 0x80:
                value |= (byte & 0x7F) << shift
                shift += 7
                at += 1
            found.append(value | byte << shift)
            at += 1
    except IndexError:
        raise CorruptState("a block is cut off") from None
    return (*found, at)
