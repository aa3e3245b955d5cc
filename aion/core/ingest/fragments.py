"""Large blocks as several rows of a shuffle, and whole again behind it. Pure.

Spark collects rows into an Arrow batch before it hands them to Python. It can bound such a batch in bytes, but then
adds up the sizes of all columns after each row, which costs more than anything else that is done with an event
(docs/operating.md). So batches are bounded in rows, and rows that carry blocks in bytes, here.

A block that fits goes as it is. Of another, each fragment begins with, little endian:

    magic "AIOF" | number u32 | of u32 | serial u32 | sender i64

``sender`` and ``serial`` name the block, ``number`` the fragment, from 0 to ``of - 1``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from aion.core.ingest.block import Block, parse
from aion.errors import CorruptBlock

# What an Arrow batch of as many fragments as rows are allowed in it comes to.
BATCH_BYTES = 32 << 20
# A row costs some microseconds on its way; of smaller ones it would be more than what is in them.
LEAST_BYTES = 1 << 10
# Spark's own default, for those who lifted it.
_ROWS_OF_SPARK = 10_000
_HEADER = struct.Struct("<4sIIIq")
_MAGIC = b"AIOF"


class _Name(NamedTuple):
    """Of a block that came in parts."""

    sender: int
    serial: int
    of: int

    def __str__(self) -> str:
        return f"block {self.serial} of sender {self.sender}"


def fragment_bytes(rows_per_batch: int) -> int:
    """The most that a fragment may take where an Arrow batch has so many rows; none or fewer means any number."""
    return max(BATCH_BYTES // (rows_per_batch if rows_per_batch > 0 else _ROWS_OF_SPARK), LEAST_BYTES)


class Fragmenter:
    """Takes the blocks of one sender apart, into rows of at most ``limit_bytes``.

    ``sender``: a number that no other fragmenter has whose rows reach the same defragmenter. ``serial``: of its first
    block that does not fit.
    """

    def __init__(self, sender: int, limit_bytes: int, serial: int = 0) -> None:
        if limit_bytes <= _HEADER.size:
            raise ValueError(f"limit_bytes is {limit_bytes}; a fragment's header alone takes {_HEADER.size}")
        self._sender = sender
        self._limit = limit_bytes
        self._serial = serial

    def rows(self, block: Block) -> Iterator[bytes]:
        """One row, or as many as it takes."""
        if block.size_bytes <= self._limit:
            yield bytes(block.data)
            return
        data = memoryview(block.data)
        step = self._limit - _HEADER.size
        of = -(-len(data) // step)
        for number in range(of):
            header = _HEADER.pack(_MAGIC, number, of, self._serial, self._sender)
            yield b"".join((header, data[number * step : (number + 1) * step]))
        # It names the block among those that are on their way: long before it comes again, the first one is whole.
        self._serial = (self._serial + 1) % 2**32


class Defragmenter:
    """Puts blocks together again, from fragments in any order, those of many blocks and senders between each other."""

    def __init__(self) -> None:
        self._waiting: dict[_Name, dict[int, memoryview]] = {}

    def blocks(self, rows: Iterable[Any]) -> Iterator[Block]:
        """The blocks that are whole with these rows. Raises CorruptBlock, FormatError."""
        for row in rows:
            view = memoryview(row)
            if view[:4] != _MAGIC:
                yield parse(row)
            elif (whole := self._whole(view)) is not None:
                yield parse(whole)

    def end(self) -> None:
        """Raises CorruptBlock if blocks are not whole when there are no more rows."""
        for name, parts in self._waiting.items():
            raise CorruptBlock(f"{name}: only {len(parts)} of its {name.of} fragments came")

    def _whole(self, row: memoryview) -> bytes | None:
        if len(row) < _HEADER.size:
            raise CorruptBlock(f"a fragment: {len(row)} bytes are fewer than its header's {_HEADER.size}")
        _, number, of, serial, sender = _HEADER.unpack_from(row)
        name = _Name(sender, serial, of)
        parts = self._waiting.setdefault(name, {})
        if number >= of or number in parts:
            raise CorruptBlock(f"{name}: fragment {number} of {of} came{' twice' if number < of else ''}")
        parts[number] = row[_HEADER.size :]
        if len(parts) < of:
            return None
        del self._waiting[name]
        return b"".join(parts[i] for i in range(of))
