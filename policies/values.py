"""Which keyed values leave memory first: the least recently used, but not those that are needed soon. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping


def leaving(
    least_recent_first: Iterable[bytes], needed_ms: Mapping[bytes, int], expected_ms: int | None
) -> Iterator[bytes]:
    """Yields keys in the order in which their values should leave memory. Lazy.

    ``needed_ms``: when a value is needed next, for the keys that have such a time. ``expected_ms``: the next attempt
    needs values up to this time, or None if it is unknown. The values that it needs leave last.
    """
    if expected_ms is None or not needed_ms:
        yield from least_recent_first
        return
    never = expected_ms + 1
    needed_soon = []
    for key in least_recent_first:
        if needed_ms.get(key, never) <= expected_ms:
            needed_soon.append(key)
        else:
            yield key
    yield from needed_soon
