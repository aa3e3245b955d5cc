"""Shared by the legs of `aion experiment store`: blocks of events, memory samples, dropping the page cache."""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import pyarrow as pa

from aion.core.ingest.encoding import About, encode
from state_backends.backends import StoreConfig, make_cache
from state_backends.format.block import Block, BlockKind
from state_backends.server.machine import memory_limit_bytes
from state_backends.store.io_thread import IoThread
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.p_bucket import PBucket
from state_backends.store.tiered import TieredStore

MIB = 1 << 20
MINUTE_US = 60_000_000
BLOCK_BYTES = MIB
SAMPLE_S = 0.02
"""The time between two samples of resident memory: 50 a second."""


def random_batches(count: int, payload_bytes: int, seed: int, block_bytes: int = BLOCK_BYTES) -> list[pa.RecordBatch]:
    """Batches of (key, ts, value, payload) events, each about ``block_bytes`` when encoded. They do not compress."""
    rng = np.random.default_rng(seed)
    rows = max(1, block_bytes // (payload_bytes + 28))  # key, ts, value, and the offset of the payload
    return [events(rng, rows, payload_bytes) for _ in range(count)]


def events(rng: np.random.Generator, rows: int, payload_bytes: int, start_us: int = 0) -> pa.RecordBatch:
    """Random events of one minute from ``start_us`` on."""
    ends = np.arange(rows + 1, dtype=np.int32) * payload_bytes
    payload = pa.Array.from_buffers(
        pa.binary(), rows, [None, pa.py_buffer(ends), pa.py_buffer(rng.bytes(rows * payload_bytes))]
    )
    times = pa.array(start_us + rng.integers(0, MINUTE_US, rows)).cast(pa.timestamp("us"))
    keys, values = pa.array(rng.integers(0, 100, rows)), pa.array(rng.random(rows))
    return pa.record_batch([keys, times, values, payload], ["key", "ts", "value", "payload"])


def encoded(batch: pa.RecordBatch, slice_us: int) -> Block:
    """The batch, encoded as a block of kept events of one slice."""
    end_us = slice_us + MINUTE_US
    return encode(batch, About(BlockKind.EVENTS, slice_us, batch.num_rows, slice_us, end_us - 1))


@contextmanager
def opened_store(config: StoreConfig, folder: Path) -> Iterator[tuple[TieredStore, MemoryBudget]]:
    """An empty store as an operator makes one, with synced files in ``folder`` and RocksDB's cache in the budget."""
    budget = MemoryBudget(config.budget(memory_limit_bytes()))
    io: IoThread = config.make_io()
    cache = make_cache(budget)
    store = config.make_blocks(PBucket(folder / "files", folder / "live", durable=True, cache=cache), io, budget)
    try:
        yield store, budget
    finally:
        store.close()
        io.close()


def drop_page_cache(*folders: Path) -> int:
    """Syncs every file in these folders and drops it from the page cache. Returns their total size in bytes.

    Dirty pages cannot be dropped, hence the fsync. A file with several links counts once.
    """
    seen: dict[int, int] = {}
    for path in (p for folder in folders for p in folder.rglob("*") if p.is_file()):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            status = os.fstat(fd)
            seen[status.st_ino] = status.st_size
        finally:
            os.close(fd)
    return sum(seen.values())


class Sample(NamedTuple):
    """The resident bytes of the process when ``appended_bytes`` had been appended."""

    appended_bytes: int
    rss_bytes: int


class MemorySampler:
    """Samples this process's resident memory every 20 ms in a thread. A context manager.

    The measured code reports what it appends, and memory is also sampled every ``every_bytes`` of that. So every
    quarter of the run has samples, however fast it is.
    """

    def __init__(self, every_bytes: int = 1 << 62) -> None:
        self.appended_bytes = 0
        self._every_bytes = every_bytes
        self.samples: list[Sample] = []
        self._process = psutil.Process()
        self.baseline_bytes = self.resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-sampler", daemon=True)

    def resident_bytes(self) -> int:
        return int(self._process.memory_info().rss)

    def __enter__(self) -> MemorySampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def appended(self, size_bytes: int) -> None:
        before, self.appended_bytes = self.appended_bytes, self.appended_bytes + size_bytes
        if before // self._every_bytes != self.appended_bytes // self._every_bytes:
            self._look()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            self._look()

    def _look(self) -> None:
        self.samples.append(Sample(self.appended_bytes, self.resident_bytes()))


@dataclass(frozen=True, slots=True)
class Memory:
    """Resident bytes: the peak above the baseline, and the growth from the second quarter to the last."""

    peak_bytes: int
    growth_bytes: int
    samples: int


def memory_use(samples: Sequence[Sample], baseline_bytes: int, total_bytes: int) -> Memory:
    """Peak and growth of memory. Quarters are of the ``total_bytes`` appended; in the first one memory fills up.

    The growth is the difference of the medians of the last and the second quarter: 0 if memory is flat. Raises
    ValueError if one of them has no sample.
    """
    quarters: list[list[int]] = [[], [], [], []]
    for sample in samples:
        quarters[min(3, 4 * sample.appended_bytes // total_bytes)].append(sample.rss_bytes)
    if not quarters[1] or not quarters[3]:
        raise ValueError(f"{len(samples)} samples are too few to measure how memory grows; use a larger state")
    growth = statistics.median(quarters[3]) - statistics.median(quarters[1])
    return Memory(max(s.rss_bytes for s in samples) - baseline_bytes, int(growth), len(samples))
