"""The map in which windows of keys are kept: the part of a shard's store that the operator reads and writes. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Protocol

Change = tuple[bytes, bytes | None, int | None]
"""A key, its value, and when it will be needed: :class:`state_backends.store.keyed.protocol.KeyedValue`."""


class Values(Protocol):
    """An ordered map of bytes. :class:`state_backends.store.keyed.protocol.KeyedAttempt` is one."""

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value of each key, None if there is none."""

    def put(self, values: Sequence[Change]) -> None:
        """Sets values; None deletes the key."""

    def scan(self, begin: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        """Yields key and value where ``begin <= key < end``, in the order of the keys; ``end`` None: to the last."""


class MemoryValues:
    """A map in a dict, for an operator without a store."""

    on_disk = False

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self.values.get(key) for key in keys]

    def stream(self, keys: Sequence[bytes]) -> Iterator[bytes | None]:
        return map(self.values.get, keys)

    def put(self, values: Sequence[Change]) -> None:
        for key, value, _ in values:
            if value is None:
                self.values.pop(key, None)
            else:
                self.values[key] = value

    def scan(self, begin: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        keys = sorted(self.values)
        for key in keys[bisect_left(keys, begin) : None if end is None else bisect_left(keys, end)]:
            yield key, self.values[key]
