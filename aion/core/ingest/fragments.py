"""Splits large blocks into several rows for a shuffle, and puts them together again after it. Pure.

Spark collects rows into an Arrow batch before it hands them to Python. It can limit the bytes of such a batch, but then
it adds up the sizes of all columns after each row, which costs more than all other work on an event
(docs/operate/operating.md). So Spark limits the number of rows in a batch, and this module limits the bytes of each
row.

A block that fits in a row is sent as it is. Any other is sent in fragments. Each begins with, little endian:

    magic "AIOF" | number u32 | of u32 | serial u32 | sender i64

``sender`` and ``serial`` identify the block. ``number`` is the number of the fragment, from 0 to ``of - 1``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from aion.errors import CorruptBlock
from state_backends.format.block import Block, parse
from state_backends.thresholds import threshold

# The size of an Arrow batch that has as many fragments as it may have rows.
BATCH_BYTES = threshold(32 << 20, 512)
# Each row costs some microseconds on its way. With smaller fragments, that would cost more than their bytes.
LEAST_BYTES = threshold(1 << 10, 64)
# Spark's default for the rows of a batch. Used if the user set no limit.
_ROWS_OF_SPARK = 10_000
_HEADER = struct.Struct("<4sIIIq")
_MAGIC = b"AIOF"


class _Name(NamedTuple):
    """Identifies a block that arrives in fragments. ``of``: the number of its fragments."""

    sender: int
    serial: int
    of: int

    def __str__(self) -> str:
        return f"block {self.serial} of sender {self.sender}"


def fragment_bytes(rows_per_batch: int) -> int:
    """The most bytes of a fragment if an Arrow batch has at most this many rows. 0 or less: there is no such limit."""
    return max(BATCH_BYTES // (rows_per_batch if rows_per_batch > 0 else _ROWS_OF_SPARK), LEAST_BYTES)


class Fragmenter:
    """Splits the blocks of one sender into rows of at most ``limit_bytes``.

    ``sender``: a number that is unique among the fragmenters whose rows reach the same defragmenter. ``serial``: the
    serial number for the first block that does not fit. Raises ValueError if ``limit_bytes`` has no room for a
    fragment's header and one byte.
    """

    def __init__(self, sender: int, limit_bytes: int, serial: int = 0) -> None:
        if limit_bytes <= _HEADER.size:
            raise ValueError(f"limit_bytes is {limit_bytes}; a fragment's header alone takes {_HEADER.size}")
        self._sender = sender
        self._limit = limit_bytes
        self._serial = serial

    def rows(self, block: Block) -> Iterator[bytes]:
        """The block as one row, or as fragments if it does not fit."""
        if block.size_bytes <= self._limit:
            yield bytes(block.stored)
            return
        data = memoryview(block.stored)
        step = self._limit - _HEADER.size
        of = -(-len(data) // step)
        for number in range(of):
            header = _HEADER.pack(_MAGIC, number, of, self._serial, self._sender)
            yield b"".join((header, data[number * step : (number + 1) * step]))
        # The serial identifies a block among those on their way. It may wrap around: by then the old block has arrived.
        self._serial = (self._serial + 1) % 2**32


class Defragmenter:
    """Puts blocks together again. Fragments come in any order, and those of several blocks and senders may be mixed."""

    def __init__(self) -> None:
        self._waiting: dict[_Name, dict[int, memoryview]] = {}

    def blocks(self, rows: Iterable[Any]) -> Iterator[Block]:
        """The blocks that these rows complete. Raises CorruptBlock or FormatError."""
        for row in rows:
            view = memoryview(row)
            if view[:4] != _MAGIC:
                yield parse(row)
            elif (whole := self._whole(view)) is not None:
                yield parse(whole)

    def end(self) -> None:
        """Ends the input. Raises CorruptBlock if fragments of a block are missing."""
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
