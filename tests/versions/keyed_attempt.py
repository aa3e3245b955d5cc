"""The keyed values of a shard of this process, for one attempt."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from state_backends.format.ordered_map import MapValue
from state_backends.versions.shard import Shard


class LocalKeyedAttempt:
    """A :class:`state_backends.format.ordered_map.LazyMap`. The shard is open for the attempt ``attempt``."""

    def __init__(self, shard: Shard, attempt: str) -> None:
        self._shard, self._attempt = shard, attempt

    @property
    def on_disk(self) -> bool:
        return self._shard.on_disk

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return list(self.stream(keys))

    def stream(self, keys: Sequence[bytes]) -> Iterator[bytes | None]:
        return itertools.chain.from_iterable(self._shard.get(self._attempt, keys))

    def put(self, values: Sequence[MapValue]) -> None:
        self._shard.put(self._attempt, values)

    def scan(self, begin: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        return self._shard.scan(self._attempt, begin, end)
