"""The classes of requests to a remote file system, and their counts for a batch. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

CLASSES = ("list", "head", "get", "range", "put", "copy", "delete")
"""``get`` reads a whole file, ``range`` a part of one. An upload in parts is a ``put`` for each part, and two more."""
BYTES = ("read_bytes", "written_bytes")


class Batch(NamedTuple):
    """The requests of a shard from the commit before a batch's to the batch's own."""

    batch: int
    counts: dict[str, int]


def newest(shards: Iterable[Batch | None]) -> dict[str, int]:
    """Adds up the counts of those shards that have committed the newest batch. ``batch`` is its number."""
    known = [found for found in shards if found is not None]
    last = max((found.batch for found in known), default=-1)
    total = {"batch": last, **dict.fromkeys((*CLASSES, *BYTES), 0)}
    for found in known:
        if found.batch == last:
            for name, number in found.counts.items():
                total[name] += number
    return total
