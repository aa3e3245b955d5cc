"""Keeps track of where each block is: a table of places and of the moves between them. Pure.

Every row keeps one invariant: a live block is in memory, on disk, or both.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple

from state_backends.format.block import Compacted
from state_backends.store.protocol import Only

NO_FILE = -1
_ARRIVAL_ORDER = attrgetter("arrival", "seq")
_FILE_ORDER = attrgetter("slice_us", "seq")


class Place(StrEnum):
    MEMORY = "memory"  # only in memory
    DESTAGING = "destaging"  # in memory, being written
    BOTH = "both"  # in memory and on disk
    DISK = "disk"  # only on disk
    STAGING = "staging"  # on disk, being read back
    PURGED = "purged"  # deleted


class Move(StrEnum):
    WRITE = "write"
    WRITTEN = "written"
    WRITE_FAILED = "write_failed"
    EVICT = "evict"
    STAGE = "stage"
    STAGED = "staged"
    STAGE_FAILED = "stage_failed"
    CANCEL = "cancel"
    RELOCATE = "relocate"  # to another file
    PURGE = "purge"


TRANSITIONS: dict[tuple[Place, Move], Place] = {
    (Place.MEMORY, Move.WRITE): Place.DESTAGING,
    (Place.DESTAGING, Move.WRITTEN): Place.BOTH,
    (Place.DESTAGING, Move.WRITE_FAILED): Place.MEMORY,
    (Place.BOTH, Move.EVICT): Place.DISK,
    (Place.DISK, Move.STAGE): Place.STAGING,
    (Place.STAGING, Move.STAGED): Place.BOTH,
    (Place.STAGING, Move.STAGE_FAILED): Place.DISK,
    (Place.STAGING, Move.CANCEL): Place.DISK,
    (Place.BOTH, Move.RELOCATE): Place.BOTH,
    (Place.DISK, Move.RELOCATE): Place.DISK,
    (Place.STAGING, Move.RELOCATE): Place.STAGING,
    **{(place, Move.PURGE): Place.PURGED for place in Place if place is not Place.PURGED},
}

IN_MEMORY = frozenset({Place.MEMORY, Place.DESTAGING, Place.BOTH})
ON_DISK = frozenset({Place.BOTH, Place.DISK, Place.STAGING})


ENTRY_BYTES = 256
SLICE_BYTES = 512
"""The memory that a ledger needs for each live block, and for each slice with a live block. A test measures both."""

_MOVES = list(Move)


class IllegalMove(AssertionError):
    """A move that is not in the table. This is a bug in the store. The message has the block's latest moves."""


class HandedBody(NamedTuple):
    """The body of a block that was handed over: the file of a child that has it, and its size."""

    file: str
    size_bytes: int


@dataclass(slots=True, eq=False)
class Entry:
    """A live block: its number, slice, size, place, and the file that has it (NO_FILE if it is not on disk).

    If it was handed over, all this is about the reference to its body.

    There is one for each block, so it must be small. ``story``: the last two moves, in four bits each. Python caches
    integers up to 256, so this takes no memory.
    """

    seq: int
    slice_us: int
    size_bytes: int
    place: Place
    file_no: int = NO_FILE
    story: int = 0
    compacted: Compacted | None = None
    handed: HandedBody | None = None

    @property
    def arrival(self) -> int:
        """The seq of the block that brought its last event: its own, unless it was compacted from other blocks."""
        return self.seq if self.compacted is None else self.compacted.last_seq

    @property
    def whole_bytes(self) -> int:
        """The bytes that a function needs: of a reference, with its body."""
        return self.size_bytes + self.body_bytes

    @property
    def body_bytes(self) -> int:
        """The bytes of the body elsewhere, if this is a reference."""
        return 0 if self.handed is None else self.handed.size_bytes

    def moved(self, move: Move, place: Place) -> None:
        self.place = place
        self.story = (self.story << 4 | _MOVES.index(move) + 1) & 0xFF

    def history(self) -> str:
        """Returns its latest moves and its place, for messages."""
        moves = [_MOVES[code - 1] for code in (self.story >> 4, self.story & 0xF) if code]
        return " ".join([*(f"-{move}->" for move in moves), self.place])


class Ledger:
    """All live blocks of a shard, by seq and by slice."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._slices: dict[int, list[Entry]] = {}
        self.memory_bytes = 0
        self.disk_bytes = 0
        self.handed_bytes = 0  # of bodies, wherever they are

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, seq: int) -> bool:
        return seq in self._entries

    def __getitem__(self, seq: int) -> Entry:
        return self._entries[seq]

    @property
    def own_bytes(self) -> int:
        """The memory that the ledger itself takes."""
        return ENTRY_BYTES * len(self._entries) + SLICE_BYTES * len(self._slices)

    def has_slice(self, slice_us: int) -> bool:
        """Returns whether any block of the slice is alive."""
        return slice_us in self._slices

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def add(
        self,
        seq: int,
        slice_us: int,
        size_bytes: int,
        place: Place,
        file_no: int = NO_FILE,
        compacted: Compacted | None = None,
        handed: HandedBody | None = None,
    ) -> Entry:
        assert seq not in self._entries, f"block {seq} exists already"
        neighbours = self._slices.setdefault(slice_us, [])
        # All entries of a slice share one int object, to save memory.
        shared_us = neighbours[0].slice_us if neighbours else slice_us
        entry = Entry(seq, shared_us, size_bytes, place, file_no, compacted=compacted, handed=handed)
        self._entries[seq] = entry
        neighbours.append(entry)
        self._count(entry, +1)
        return entry

    def move(self, seq: int, move: Move, *, file_no: int | None = None) -> Entry:
        """Moves a block. ``file_no``: its file from now on. Raises IllegalMove if the table does not have the move."""
        entry = self._entries[seq]
        place = TRANSITIONS.get((entry.place, move))
        if place is None:
            raise IllegalMove(f"block {seq} cannot {move} from {entry.place}; its latest moves: {entry.history()}")
        self._count(entry, -1)
        entry.moved(move, place)
        if file_no is not None:
            entry.file_no = file_no
        if place is Place.PURGED:
            del self._entries[seq]
            neighbours = self._slices[entry.slice_us]
            neighbours.remove(entry)
            if not neighbours:
                del self._slices[entry.slice_us]
        else:
            self._count(entry, +1)
        return entry

    def of_slices(self, slices: Iterable[int], only: Only | None = None) -> list[Entry]:
        """Live blocks of these slices, or ``only`` some of them, sorted by slice, then by arrival."""
        found = [entry for s in sorted(set(slices)) for entry in sorted(self._slices.get(s, ()), key=_ARRIVAL_ORDER)]
        return found if only is None else _select(found, only)

    def of_files(self, files: Collection[int], slices: Set[int]) -> list[Entry]:
        """Live blocks of these files, sorted as in a file: by slice, then by seq.

        ``slices``: all slices that the files have.
        """
        found = (entry for s in slices for entry in self._slices.get(s, ()) if entry.file_no in files)
        return sorted(found, key=_FILE_ORDER)

    def _count(self, entry: Entry, sign: int) -> None:
        if entry.handed is not None:
            self.handed_bytes += sign * entry.handed.size_bytes
        if entry.place in IN_MEMORY:
            self.memory_bytes += sign * entry.size_bytes
        if entry.place in ON_DISK:
            self.disk_bytes += sign * entry.size_bytes

    def validate(self) -> None:
        """Raises AssertionError unless the totals match the blocks, and both indexes have the same blocks."""
        entries = list(self._entries.values())
        assert self.memory_bytes == sum(e.size_bytes for e in entries if e.place in IN_MEMORY)
        assert self.disk_bytes == sum(e.size_bytes for e in entries if e.place in ON_DISK)
        assert self.handed_bytes == sum(e.handed.size_bytes for e in entries if e.handed is not None)
        assert {s: {e.seq for e in b} for s, b in self._slices.items()} == {
            s: {e.seq for e in entries if e.slice_us == s} for s in {e.slice_us for e in entries}
        }
        for e in entries:
            assert e.place is not Place.PURGED
            assert (e.place in ON_DISK) == (e.file_no != NO_FILE), f"{e}"


def _select(entries: list[Entry], only: Only) -> list[Entry]:
    if only.spans is not None:
        everything = (-1, 2**63 - 1)
        spans = ((entry, *only.spans.get(entry.slice_us, everything)) for entry in entries)
        entries = [entry for entry, after, until in spans if after < entry.arrival <= until]
    if only.below is not None:
        entries = [e for e in entries if e.seq < only.below]
    if only.keys is not None:
        lows = [low for low, _ in only.keys]
        entries = [e for e in entries if e.compacted is None or _overlaps(e.compacted, lows, only.keys)]
    return entries


def _overlaps(compacted: Compacted, lows: list[int], ranges: Sequence[tuple[int, int]]) -> bool:
    """Returns whether any of the sorted, disjoint ranges of hashes overlaps the range of a compacted block."""
    last = bisect_right(lows, compacted.high) - 1
    return last >= 0 and ranges[last][1] >= compacted.low
