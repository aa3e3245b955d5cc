"""The ordered map of a shard, from bytes to bytes: one protocol for all that keep something in it or serve it. Pure.

Windows of keys, identities, what was shown, and the values of stateful processors lie in it. The store serves it
(:class:`state_backends.store.map.store.MapStore`), the server sends it, and tests have it in a dict.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

NEVER_MS = (1 << 63) - 1
"""When a value is needed that is only found by scans. It is not kept in memory, and nobody may get it."""

Change: TypeAlias = tuple[bytes, bytes | None, int | None]
"""A :class:`MapValue`, perhaps as a plain tuple."""


class MapValue(NamedTuple):
    """A value of a key. Neither is empty. ``value``: None deletes the key.

    ``needed_ms``: when the value will be needed next, for example the time of its key's next timer, or None if it is
    unknown. See also :data:`NEVER_MS`.
    """

    key: bytes
    value: bytes | None
    needed_ms: int | None = None


class Readable(Protocol):
    """What looks values up."""

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value of each key, in the order of the keys, or None if there is none."""


class OrderedMap(Readable, Protocol):
    """The map as an attempt sees it: the values of its version, and what it has put itself."""

    def put(self, values: Sequence[Change]) -> None:
        """Sets values. If a key comes twice, the last value counts."""

    def scan(self, begin: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        """Yields key and value where ``begin <= key < end``, in the order of the keys. Without ``end``, to the last.

        Lazy. It need not see what is put after it began.
        """


class LazyMap(OrderedMap, Protocol):
    """The map of a task, which works on some values while the next ones are read."""

    @property
    def on_disk(self) -> bool:
        """Whether values have to be read from disk: those of this attempt or the last one were."""

    def stream(self, keys: Sequence[bytes]) -> Iterator[bytes | None]:
        """As :meth:`get`, but lazy: the next values are read from disk while the caller works on those that it has.

        Whether it sees what is put after it began is open, so do not put a key before its value has come.
        """


class PagedMap(Protocol):
    """The map as a store has it: :meth:`get` yields the values in pages, and :meth:`put` takes any number."""

    def get(self, keys: Sequence[bytes]) -> Iterator[list[bytes | None]]: ...
    def put(self, values: Iterable[Change]) -> None: ...
    def scan(self, begin: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]: ...


class MemoryMap:
    """The map in a dict, for an operator without a store: a :class:`LazyMap`."""

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
