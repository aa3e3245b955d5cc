"""A leg of `aion experiment store`: writing to the p-bucket and reading back, compared with a plain file."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.store.common import MINUTE_US, drop_page_cache, encoded, opened_store, random_batches
from experiments.store.settings import MIB, Settings
from state_backends.backends import StoreConfig
from state_backends.format.block import Block

WINDOW_BLOCKS = 32
READ_TIMEOUT_S = 300


def disk(contender: str, settings: Settings, folder: Path) -> dict[str, Any]:
    """Writes blocks, synced, and reads them back after dropping the page cache."""
    count = max(2, settings.disk_bytes // MIB)
    blocks = [
        encoded(batch, i // WINDOW_BLOCKS * MINUTE_US)
        for i, batch in enumerate(random_batches(count, settings.payload_bytes, settings.seed))
    ]
    size = sum(b.size_bytes for b in blocks)
    folder.mkdir(parents=True, exist_ok=True)
    write_s, read_s, dropped = (p_bucket if contender == "p-bucket" else plain)(blocks, folder)
    return {
        "write_bytes_per_s": size / write_s,
        "read_bytes_per_s": size / read_s,
        "bytes": size,
        "dropped_bytes": dropped,
    }


def plain(blocks: list[Block], folder: Path) -> tuple[float, float, int]:
    """Seconds to write one file sequentially and sync it, and to read it into blocks that are kept, as staging does."""
    path = folder / "plain"
    begin = time.perf_counter()
    with path.open("wb", buffering=0) as out:
        for block in blocks:
            out.write(block.stored)
        os.fsync(out.fileno())
    write_s = time.perf_counter() - begin
    sizes = [b.size_bytes for b in blocks]
    blocks.clear()
    dropped = drop_page_cache(folder)
    begin = time.perf_counter()
    with path.open("rb", buffering=0) as source:
        kept = [source.read(size) for size in sizes]
    read_s = time.perf_counter() - begin
    assert sum(map(len, kept)) == sum(sizes), "the file has another size than what was written"
    return write_s, read_s, dropped


def p_bucket(blocks: list[Block], folder: Path) -> tuple[float, float, int]:
    """Seconds from the first append to the end of the commit, and from the order to prestage until all is in memory."""
    size = sum(b.size_bytes for b in blocks)
    config = StoreConfig(budget_bytes=2 * size, bucket_limit_bytes=2 * size)
    slices = slices_of(blocks)
    with opened_store(config, folder) as (store, _budget):
        begin = time.perf_counter()
        for seq, block in enumerate(blocks):
            store.append(seq, block, late=True)  # straight to the p-bucket
        store.persist()
        write_s = time.perf_counter() - begin
        del block
        blocks.clear()
        dropped = drop_page_cache(folder / "files", folder / "live")
        staged = threading.Event()
        store.listen(lambda _bytes, _seconds, _waited: staged.set())
        begin = time.perf_counter()
        store.prestage(slices)
        if not staged.wait(READ_TIMEOUT_S):
            raise RuntimeError(f"nothing was staged within {READ_TIMEOUT_S} s")
        read_s = time.perf_counter() - begin
        left = store.size_on_disk(slices)
        assert not left, f"{left} bytes were not staged"
    return write_s, read_s, dropped


def slices_of(blocks: Sequence[Block]) -> list[int]:
    return sorted({b.header.slice_us for b in blocks})
