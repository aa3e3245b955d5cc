"""A slow disk, for the state server of an experiment: each read of blocks or of a value takes its time (a seek).

It also writes down how much of what an execution reads is in memory when the execution begins.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from policies.destage import StandardDestage
from state_backends.format.block import Block
from state_backends.store import body_files, fetching
from state_backends.store.io import Steps
from state_backends.store.ledger import IN_MEMORY
from state_backends.store.map.run_files import RunFiles
from state_backends.store.p_bucket import PBucket
from state_backends.store.protocol import Only, StoredBlock
from state_backends.store.reading import Reader

_VALUES_A_STEP = 4  # between two steps, the I/O thread does what is more urgent


class SlowDisk(StandardDestage):
    """The standard policy. A policy file names it as ``destage.class``, and so the state server imports it.

    ``reads_per_s``: how many reads the disk does in a second, of rows, bodies and values, also if the system has them
    in memory. ``together``: neighbours in a file are read with one of them. ``record``: the file that gets a line for
    each read of windows: the bytes that are in memory when it begins, and all of its bytes. The rest of the arguments
    are those of StandardDestage.
    """

    def __init__(self, reads_per_s: int, together: bool = True, record: str | None = None, **others: Any) -> None:
        super().__init__(**others)
        _slow_down(1 / reads_per_s)
        if record is not None:
            _write_down(Path(record))
        if not together:
            for module in (fetching, body_files):
                vars(module)["MOST_TOGETHER_BYTES"] = 0


def _slow_down(seek_s: float) -> None:
    fetch, preadv, get = PBucket.fetch, os.preadv, RunFiles.get

    def slow_fetch(self: PBucket, *where: Any) -> Steps[list[Block]]:
        time.sleep(seek_s)
        return (yield from fetch(self, *where))

    def slow_preadv(*where: Any) -> int:
        time.sleep(seek_s)
        return preadv(*where)

    def slow_get(self: RunFiles, keys: Sequence[bytes], most_bytes: int) -> Steps[list[bytes | None]]:
        found: list[bytes | None] = []
        while len(found) < len(keys) and sum(map(len, filter(None, found))) < most_bytes:
            values = yield from get(self, keys[len(found) : len(found) + _VALUES_A_STEP], most_bytes)
            time.sleep(seek_s * len(values))
            found += values
        return found

    PBucket.fetch = slow_fetch  # type: ignore[assignment,method-assign]
    RunFiles.get = slow_get  # type: ignore[method-assign]
    os.preadv = slow_preadv


def _write_down(record: Path) -> None:
    read = Reader.read

    def recorded(self: Reader, slices: Any, *, blocking: bool, only: Only | None) -> Iterator[StoredBlock]:
        blocks, fetcher = self._blocks, self._fetcher
        with blocks.lock:
            entries = blocks.visible(slices, only)
            lacking = blocks.without_bodies(entries)
            here = sum(e.whole_bytes for e in entries if e.place in IN_MEMORY)
        # The body of a reference in memory may be in the system's page cache.
        resident = fetcher.resident([block for _, block in lacking])
        here -= sum(e.body_bytes for (e, _), is_there in zip(lacking, resident, strict=True) if not is_there)
        with record.open("a") as lines:
            lines.write(f"{here} {sum(e.whole_bytes for e in entries)}\n")
        return read(self, slices, blocking=blocking, only=only)

    Reader.read = recorded  # type: ignore[method-assign]
