"""The keyed values of one shard that are in memory and on disk. They share the host's memory budget with blocks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from policies.destage import leaving
from state_backends.format.ordered_map import NEVER_MS
from state_backends.store.m_bucket import MemoryBudget

VALUE_BYTES = 256
"""What Python needs for a value in memory, besides the bytes of key and value. A test measures it."""
_SHARE = 16  # when values must leave memory, at least this share of them leaves; then the next call need not search


class ValueCache:
    """Values by key, the least recently used first.

    It owns the values in memory, and the times at which they are needed. Invariants: each value is the one that the
    shard's files have, those of the attempt at work included; ``size_bytes`` is what the budget counts for them. It has
    its own lock, and holds no other.

    ``keeps_all``: no value leaves memory. ``keeps_none``: none comes.
    """

    def __init__(self, budget: MemoryBudget, *, keeps_all: bool = False, keeps_none: bool = False) -> None:
        self._budget = budget
        self.keeps_none = keeps_none
        self._lock = threading.Lock()
        self._values: OrderedDict[bytes, bytes] = OrderedDict()
        self._needed_ms: dict[bytes, int] = {}
        self._complete = not keeps_none
        self._closed = False
        self.size_bytes = 0
        self.expected_ms: int | None = None
        if not keeps_all and not keeps_none:
            budget.attach(self)

    def __len__(self) -> int:
        return len(self._values)

    def get(self, keys: Sequence[bytes]) -> tuple[list[bytes | None], bool]:
        """The values that are in memory, None for others. And whether all values that one may get were in memory."""
        with self._lock:
            values = self._values
            found = list(map(values.get, keys))
            touch, due, expected_ms = values.move_to_end, self._needed_ms, self.expected_ms
            for key, value in zip(keys, found, strict=True):
                if value is not None:
                    touch(key)
            if due and expected_ms is not None:
                for key in keys:
                    # It was needed, and it was read. It stays as long as others that were used now.
                    if due.get(key, expected_ms + 1) <= expected_ms:
                        del due[key]
            return found, self._complete

    def missing(self, keys: Sequence[bytes]) -> list[bytes]:
        """The keys whose values may be on disk only."""
        with self._lock:
            return [] if self._complete else [key for key in keys if key not in self._values]

    def put(self, values: Iterable[tuple[bytes, bytes | None]], needed_ms: Mapping[bytes, int] | None = None) -> None:
        """Sets values. None deletes the key. ``needed_ms`` is None if the times do not change."""
        if self.keeps_none:
            return
        grown = 0
        with self._lock:
            if self._closed:
                return
            cached, due, times = self._values, self._needed_ms, needed_ms or {}
            touch = cached.move_to_end
            for key, value in values:
                before, time_ms = cached.get(key), times.get(key)
                if value is None or time_ms == NEVER_MS:
                    if before is not None:
                        del cached[key]
                        grown -= len(key) + len(before) + VALUE_BYTES
                        due.pop(key, None)
                    continue
                cached[key] = value
                if before is None:
                    grown += len(key) + len(value) + VALUE_BYTES
                else:
                    touch(key)
                    grown += len(value) - len(before)
                if time_ms is not None:
                    due[key] = time_ms
                elif due and needed_ms is not None:
                    due.pop(key, None)
            self._grew(grown)
        self._budget.make_room()

    def clear(self, *, complete: bool = False) -> None:
        """Removes all. ``complete``: there are none on disk either."""
        with self._lock:
            self._values.clear()
            self._needed_ms.clear()
            self._complete = complete and not self.keeps_none
            self._grew(-self.size_bytes)

    def shrink(self, size_bytes: int) -> None:
        """See :class:`state_backends.store.m_bucket.ValuesInMemory`. Frees a bit more than it must."""
        with self._lock:
            most = max(size_bytes, self.size_bytes // _SHARE)
            freed, victims = 0, []
            for key in leaving(self._values, self._needed_ms, self.expected_ms):
                if freed >= most:
                    break
                victims.append(key)
                freed += len(key) + len(self._values[key]) + VALUE_BYTES
            self._drop(victims)

    def close(self) -> None:
        """Removes all, for good."""
        self._budget.detach(self)
        self._closed = True
        self.clear()

    def validate(self) -> None:
        """Raises AssertionError if the bytes are not those of the values."""
        with self._lock:
            assert self.size_bytes == sum(len(k) + len(v) + VALUE_BYTES for k, v in self._values.items())
            assert self._needed_ms.keys() <= self._values.keys()

    def _drop(self, keys: Iterable[bytes]) -> None:
        freed = 0
        for key in keys:
            value = self._values.pop(key, None)
            if value is not None:
                self._complete = False
                freed += len(key) + len(value) + VALUE_BYTES
                self._needed_ms.pop(key, None)
        self._grew(-freed)

    def _grew(self, size_bytes: int) -> None:
        self.size_bytes += size_bytes
        self._budget.cached(size_bytes)
