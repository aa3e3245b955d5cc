"""What an attempt has put: changes of keyed values that are in memory only. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from state_backends.thresholds import threshold

CHANGE_BYTES = 256
"""What Python needs for a change, besides the bytes of key and value."""
_FEW = threshold(64, 1)  # up to this number, new keys are sorted in one by one


class Overlay:
    """Changes by key. Without a value the key is deleted. ``size_bytes``: the memory that they take.

    It has no lock: hold the store's lock around every call.
    """

    def __init__(self) -> None:
        self.changes: dict[bytes, bytes | None] = {}
        self.needed_ms: dict[bytes, int] = {}
        self.size_bytes = 0
        self._sorted: list[bytes] = []
        self._unsorted: list[bytes] = []

    def __len__(self) -> int:
        return len(self.changes)

    def put(self, values: Iterator[tuple[bytes, bytes | None, int | None]], most_bytes: int) -> int:
        """Takes values until it has more than ``most_bytes``, or none is left. Returns by how many bytes it grew."""
        changes, needed, unsorted = self.changes, self.needed_ms, self._unsorted
        grown, room, known = 0, most_bytes - self.size_bytes, len(changes)
        for key, value, needed_ms in values:
            old = changes.get(key)
            if old is not None:
                grown -= len(old)
            changes[key] = value
            if value is not None:
                grown += len(value)
            if len(changes) > known:
                known += 1
                grown += len(key) + CHANGE_BYTES
                unsorted.append(key)
            if needed_ms is not None:
                needed[key] = needed_ms
            elif needed:
                needed.pop(key, None)
            if grown > room:
                break
        self.size_bytes += grown
        return grown

    def keys(self) -> Sequence[bytes]:
        """All keys, sorted."""
        if len(self._unsorted) <= _FEW:
            for key in self._unsorted:
                insort(self._sorted, key)
        else:
            self._sorted += self._unsorted
            self._sorted.sort()
        self._unsorted = []
        return self._sorted

    def between(self, begin: bytes, end: bytes | None) -> list[tuple[bytes, bytes | None]]:
        """The changes of the keys where ``begin <= key < end``, sorted."""
        keys = self.keys()
        upto = len(keys) if end is None else bisect_left(keys, end)
        return [(key, self.changes[key]) for key in keys[bisect_left(keys, begin) : upto]]

    def entries(self) -> Iterator[tuple[bytes, bytes | None]]:
        """All changes, sorted."""
        keys = list(self.keys())
        return zip(keys, list(map(self.changes.__getitem__, keys)), strict=True)
