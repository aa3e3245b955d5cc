"""A block: the events, or the partial aggregates, of one slice from one input batch. Pure.

A block is columnar and immutable. It is encoded once when it is made, moved and stored as those bytes, and decoded when
it is read. Layout, little endian: a header of 64 bytes, then the body. A store never looks into the body: whoever
appends blocks encodes rows, and decodes them again. In Aion it is an Arrow record batch message without its schema, or
lines of JSON. It is compressed as a whole or not at all.

    magic "AION" | version u8 | kind u8 | codec u8 | compression u8 | slice i64 | rows u32 | events u32 |
    min time i64 | max time i64 | raw length u64 | body length u64 | body crc32 u32 | header crc32 u32

A block that compaction made from others (docs/inside/window-costs.md) has version 2. Between the two checksums it has:
last seq i64 | lowest hash of a key i64 | highest hash of a key i64. So its header has 88 bytes.

Versions 3 and 4 are versions 1 and 2 with events u64, so they are 4 bytes longer. They are used only if the number of
events does not fit in 32 bits, so that an older Aion can read all other blocks. (Arrow writes no batch of 2**31 rows.)

A large block may be handed over: its body lies in a file that a child wrote, and only a *reference* is moved and stored
(docs/inside/hand-over.md). A reference is the header, then

    magic "AIOR" | offset of the body u64 | length of the name u16 | name of the file | crc32 of these fields u32
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa

from state_backends.format.checksum import crc32
from state_backends.format.errors import CorruptBlock, FormatError
from state_backends.format.plain_names import is_plain
from state_backends.thresholds import threshold

VERSION = 4
_NARROW = struct.Struct("<4sBBBBqIIqqQQI")
_WIDE = struct.Struct("<4sBBBBqIQqqQQI")
_COMPACTED = struct.Struct("<qqq")
_CRC = struct.Struct("<I")
HEADER_BYTES = _NARROW.size + _CRC.size
_MAGIC = b"AION"
_PLACE = struct.Struct("<4sQH")
_PLACE_MAGIC = b"AIOR"
_MOST_NARROW = 2**32 - 1
_LEAST_APART = threshold(1 << 16, 64)
"""A body of this size is not copied behind its header. Copying less takes some microseconds."""

Buffer: TypeAlias = Any  # bytes, pyarrow.Buffer or memoryview


class BlockKind(IntEnum):
    EVENTS = 0
    PARTIALS = 1


class Codec(IntEnum):
    ARROW = 0
    JSON = 1


class Compression(IntEnum):
    NONE = 0
    LZ4 = 1
    ZSTD = 2


UNNUMBERED = -1


class Compacted(NamedTuple):
    """What a block holds that is sorted by key: arrivals up to ``last_seq``, of keys with hashes in ``[low, high]``.

    Hashes are from 0 to 2**63 - 1 (docs/inside/window-costs.md). ``last_seq`` is UNNUMBERED in a block that a child has
    sorted and that has no number yet.
    """

    last_seq: int
    low: int
    high: int


class Header(NamedTuple):
    """What is known about a block without decoding it. Times are in µs.

    ``events``: the number of events that its rows stand for. ``compacted``: None for a block as it arrived.
    """

    kind: BlockKind
    codec: Codec
    compression: Compression
    slice_us: int
    rows: int
    events: int
    min_us: int
    max_us: int
    raw_bytes: int
    body_bytes: int
    crc: int
    compacted: Compacted | None = None

    @property
    def version(self) -> int:
        """The version of the header's layout as bytes."""
        return 1 + (self.compacted is not None) + 2 * (self.events > _MOST_NARROW)

    @property
    def own_bytes(self) -> int:
        if self.compacted is None and self.events <= _MOST_NARROW:
            return HEADER_BYTES
        return _covered(self.version) + _CRC.size

    @property
    def size_bytes(self) -> int:
        return self.own_bytes + self.body_bytes


class BodyAt(NamedTuple):
    """Where the body of a block lies: the name of a file, and the offset in it."""

    file: str
    offset: int


class Block(NamedTuple):
    """``data``: header and body, unless ``opens`` finds the body.

    Then ``data`` is empty. A block that was just encoded has its body elsewhere, since a large one should not be copied
    to put a header in front of it. If a block was handed over (``at``), its body is in a file. It is opened when it is
    first read: few of the blocks that come are read at once.
    """

    header: Header
    data: Buffer
    at: BodyAt | None = None
    opens: Callable[[], Any] | None = None

    @property
    def size_bytes(self) -> int:
        """The bytes that are moved and stored. See ``header.size_bytes`` for the size of the whole block."""
        return self.header.size_bytes if self.at is None else len(_reference(self.header, self.at))

    @property
    def stored(self) -> Buffer:
        """The bytes that are moved and stored: the block, or a reference to it. :func:`parse` reads both."""
        if self.at is not None:
            return _reference(self.header, self.at)
        return self.data if self.opens is None else b"".join((_pack(self.header), self.body))

    @property
    def body(self) -> Any:
        """The encoded rows, as a pyarrow.Buffer. Raises CorruptBlock if the file with them is missing or too short."""
        if self.opens is not None:
            return self.opens()
        data = pa.py_buffer(self.data)
        return data.slice(min(self.header.own_bytes, data.size)) if self.at is None else data


def from_body(
    body: Buffer,
    *,
    kind: BlockKind,
    slice_us: int,
    rows: int,
    events: int,
    min_us: int,
    max_us: int,
    codec: Codec = Codec.ARROW,
    compression: Compression = Compression.NONE,
    raw_bytes: int | None = None,
    compacted: Compacted | None = None,
) -> Block:
    """A block with this body. ``raw_bytes``: the size of the body before it was compressed."""
    size = len(body)
    header = Header(
        kind, codec, compression, slice_us, rows, events, min_us, max_us,
        size if raw_bytes is None else raw_bytes, size, crc32(body), compacted,
    )  # fmt: skip
    if size < _LEAST_APART:
        return Block(header, b"".join((_pack(header), body)))
    buffer = pa.py_buffer(body)
    return Block(header, b"", None, lambda: buffer)


def numbered(block: Block, seq: int) -> Block:
    """A block that gets its number. If a child sorted it, its header has to know the number."""
    compacted = block.header.compacted
    if compacted is None or block.at is None or compacted.last_seq != UNNUMBERED:
        return block
    return block._replace(header=block.header._replace(compacted=compacted._replace(last_seq=seq)))


def _reference(header: Header, at: BodyAt) -> bytes:
    name = at.file.encode()
    place = _PLACE.pack(_PLACE_MAGIC, at.offset, len(name)) + name
    return b"".join((_pack(header), place, _CRC.pack(crc32(place))))


def _place(view: memoryview) -> BodyAt | None:
    """The place in a reference; ``view``: what follows its header. None if a body follows, and not a place.

    Raises CorruptBlock if the file does not have a plain name.
    """
    if view[: len(_PLACE_MAGIC)] != _PLACE_MAGIC or len(view) < _PLACE.size:
        return None
    _, offset, length = _PLACE.unpack_from(view)
    end = _PLACE.size + length
    if len(view) != end + _CRC.size or _CRC.unpack_from(view, end)[0] != crc32(view[:end]):
        return None
    file = bytes(view[_PLACE.size : end]).decode(errors="replace")
    if not is_plain(file):
        raise CorruptBlock(f"its body is in a file with the name {file[:200]!r}, which is not a plain name")
    return BodyAt(file, offset)


def parse(data: Buffer, name: str = "block") -> Block:
    """Reads and checks the header of a block or of a reference. Raises CorruptBlock or FormatError with its name."""
    view = memoryview(data).cast("B")
    if len(view) < HEADER_BYTES:
        raise CorruptBlock(f"{name}: {len(view)} bytes are fewer than a header's {HEADER_BYTES}")
    version = view[len(_MAGIC)]
    covered = _covered(version)
    crc = _CRC.unpack_from(view, covered)[0] if len(view) >= covered + _CRC.size else None
    if view[: len(_MAGIC)] != _MAGIC or crc32(view[:covered]) != crc:
        raise CorruptBlock(f"{name}: the header is not one that Aion wrote, or was damaged")
    if version > VERSION:
        raise FormatError(f"{name}: written in block format {version}; this Aion reads up to {VERSION}")
    fields = _fields(version)
    _, _, kind, codec, compression, *rest = fields.unpack_from(view)
    try:
        header = Header(BlockKind(kind), Codec(codec), Compression(compression), *rest)
        if covered > fields.size:
            header = header._replace(compacted=Compacted(*_COMPACTED.unpack_from(view, fields.size)))
    except ValueError as error:
        raise FormatError(f"{name}: {error}; a newer Aion wrote it") from None
    try:
        at = _place(view[header.own_bytes :])
    except CorruptBlock as error:
        raise CorruptBlock(f"{name}: {error}") from None
    if at is not None:
        return Block(header, b"", at)
    if len(view) != header.size_bytes:
        raise CorruptBlock(f"{name}: {len(view)} bytes where its header says {header.size_bytes}")
    return Block(header, data)


def check(block: Block, name: str = "block") -> Any:
    """Returns the body. Raises CorruptBlock if its checksum is wrong."""
    body = block.body
    if crc32(body) != block.header.crc:
        raise CorruptBlock(f"{name}: the body's checksum differs from the one it was written with")
    return body


def _fields(version: int) -> struct.Struct:
    return _WIDE if version in (3, 4) else _NARROW


def _covered(version: int) -> int:
    """How many bytes of a header its checksum covers. An unknown version counts as version 1."""
    return _fields(version).size + (_COMPACTED.size if version in (2, 4) else 0)


def _pack(header: Header) -> bytes:
    packed = _fields(header.version).pack(
        _MAGIC, header.version, header.kind, header.codec, header.compression, header.slice_us, header.rows,
        header.events, header.min_us, header.max_us, header.raw_bytes, header.body_bytes, header.crc,
    )  # fmt: skip
    if header.compacted is not None:
        packed += _COMPACTED.pack(*header.compacted)
    return packed + _CRC.pack(crc32(packed))
