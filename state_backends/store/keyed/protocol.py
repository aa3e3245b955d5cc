"""The protocol of keyed values: a sorted space of keys, in which values are updated and deleted. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

NEVER_MS = (1 << 63) - 1
"""When a value is needed that is only found by scans. It is not kept in memory, and nobody may get it."""


class KeyedValue(NamedTuple):
    """A value of a key. Neither is empty. ``value``: None deletes the key.

    ``needed_ms``: when the value will be needed next, for example the time of its key's next timer. None: unknown. See
    also :data:`NEVER_MS`.
    """

    key: bytes
    value: bytes | None
    needed_ms: int | None = None


class KeyedReader(Protocol):
    """Looks up keyed values. Each KeyedAttempt does."""

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """See :meth:`KeyedAttempt.get`."""


class KeyedAttempt(Protocol):
    """The keyed values of one shard, as an attempt sees them: those of its version, and what it has put itself.

    Spark's workers have a :class:`state_backends.server.remote_attempt.RemoteAttempt`.
    """

    @property
    def on_disk(self) -> bool:
        """Whether values have to be read from disk: those of this attempt or the last one were."""

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The value of each key, in the order of the keys. None: there is none."""

    def stream(self, keys: Sequence[bytes]) -> Iterator[bytes | None]:
        """As :meth:`get`, but lazy: the next values are read from disk while the caller works on those that it has.

        Whether it sees what is put after it began is open, so do not put a key before its value has come.
        """

    def put(self, values: Sequence[KeyedValue]) -> None:
        """Sets values. If a key comes twice, the last value counts."""

    def scan(self, begin: bytes, end: bytes | None) -> Iterator[tuple[bytes, bytes]]:
        """Yields key and value where ``begin <= key < end``, in the order of the keys; ``end`` None: to the last key.

        Lazy. It need not see what is put after it began.
        """
