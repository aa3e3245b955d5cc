"""A leg of `aion experiment store`: ingests state of 20 times the budget, and measures the memory it takes."""

from __future__ import annotations

import gc
import random
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.store.common import MIB, MINUTE_US, MemorySampler, encoded, memory_use, opened_store, random_batches
from experiments.store.settings import Settings
from state_backends.backends import StoreConfig

POOL = 16
"""How many batches of random events are made beforehand. Every block is encoded from one of them."""
LATE_EVERY = 20
"""Every 20th block is late (5 %), for a random expired window."""


def ingest(backend: str, settings: Settings, folder: Path) -> dict[str, Any]:
    """Appends blocks of events, window after window. Destages expired windows, and persists regularly.

    The watermark is so far behind that the active windows need twice the budget, so memory is always full. Only the
    store's own policy frees memory (there is no pressure manager). The time includes encoding, appending, writing and
    fsync, but not the generation of random events. Rates are of encoded bytes.
    """
    batches = random_batches(POOL, settings.payload_bytes, settings.seed)
    block_bytes = encoded(batches[0], 0).size_bytes
    blocks = settings.state_bytes // block_bytes + 1
    per_window = max(1, settings.ingest_window_bytes // block_bytes)
    lag = 2 * settings.budget_bytes // (per_window * block_bytes)
    choose = random.Random(settings.seed)
    gc.collect()
    config = StoreConfig(backend=backend, budget_bytes=settings.budget_bytes)
    # The baseline is taken before the store exists, so that all of its memory counts. Sampling ends before the store.
    sampler = MemorySampler(settings.state_bytes // 16)
    with opened_store(config, folder) as (store, budget), sampler:
        expired = 0
        begin, cpu = time.perf_counter(), time.process_time()
        for seq in range(blocks):
            window = seq // per_window
            if window - lag > expired and seq % per_window == 0:
                store.destage([expired * MINUTE_US])
                store.flush()
                expired += 1
            late = bool(expired) and seq % LATE_EVERY == 0
            slice_us = (choose.randrange(expired) if late else window) * MINUTE_US
            block = encoded(batches[seq % POOL], slice_us)
            store.append(seq, block, late=late)
            sampler.appended(block.size_bytes)
            if (seq + 1) % settings.commit_blocks == 0:
                store.persist()
        store.persist()
        took, cpu = time.perf_counter() - begin, time.process_time() - cpu
        stats = store.stats()
    total = sampler.appended_bytes
    use = memory_use(sampler.samples, sampler.baseline_bytes, total)
    step = max(1, len(sampler.samples) // 200)
    return {
        "bytes_per_s": total / took,
        "seconds": took,
        "cpu_seconds": cpu,
        "state_bytes": total,
        "windows": window + 1,
        "budget_peak_bytes": budget.peak_bytes,
        "m_bucket_bytes": stats.m_bucket_bytes,
        "disk_only_bytes": stats.disk_only_bytes,
        "files_bytes": sum(f.stat().st_size for f in (folder / "files").glob("*.sst")),
        "baseline_bytes": sampler.baseline_bytes,
        "memory": asdict(use),
        "curve_mib": [
            (round(s.appended_bytes / MIB, 1), round((s.rss_bytes - sampler.baseline_bytes) / MIB, 2))
            for s in sampler.samples[::step]
        ],
    }
