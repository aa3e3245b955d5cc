"""The index of a file of blocks: one entry for each block. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from state_backends.format.block import Block, Compacted
from state_backends.store.ledger import HandedBody


class Indexed(NamedTuple):
    """One block in a file's index of blocks. ``handed``: where its body is, if a child handed it over."""

    slice_us: int
    seq: int
    size_bytes: int
    compacted: Compacted | None = None
    handed: HandedBody | None = None

    @classmethod
    def of(cls, seq: int, block: Block) -> Indexed:
        header = block.header
        handed = None if block.at is None else HandedBody(block.at.file, header.body_bytes)
        return cls(header.slice_us, seq, block.size_bytes, header.compacted, handed)

    def to_json(self) -> list[int | str]:
        return [self.slice_us, self.seq, self.size_bytes, *(self.compacted or ()), *(self.handed or ())[::-1]]

    @classmethod
    def from_json(cls, line: list[Any]) -> Indexed:
        handed = HandedBody(line.pop(), line.pop()) if isinstance(line[-1], str) else None
        slice_us, seq, size_bytes, *rest = line
        return cls(slice_us, seq, size_bytes, Compacted(*rest) if rest else None, handed)
