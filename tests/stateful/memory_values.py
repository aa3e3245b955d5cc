"""Keyed values in memory, with the protocol of the real ones (state_backends/store/keyed/protocol.py)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from state_backends.store.keyed.protocol import KeyedValue


class MemoryValues:
    """Keyed values in a dict: not durable, not bounded."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    on_disk = False

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self.values.get(key) for key in keys]

    def stream(self, keys: Sequence[bytes]) -> Iterator[bytes | None]:
        return map(self.values.get, keys)

    def put(self, values: Sequence[KeyedValue]) -> None:
        for key, value, _ in values:
            if value is None:
                self.values.pop(key, None)
            else:
                self.values[key] = value

    def scan(self, begin: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        keys = sorted(self.values)
        for key in keys[bisect_left(keys, begin) : None if end is None else bisect_left(keys, end)]:
            yield key, self.values[key]
