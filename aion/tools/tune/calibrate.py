"""Measures this machine: sends blocks through a real store to the disk and back, and through the codec."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from aion.core.ingest.encoding import About, decode, encode
from aion.tools.tune.disk import Machine
from state_backends.format.block import Block, BlockKind
from state_backends.store.io_thread import IoThread
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.options import StoreOptions
from state_backends.store.p_bucket import PBucket
from state_backends.store.tiered import TieredStore

MIB = 1 << 20
SMALL, LARGE = 4 << 10, 512 << 10
"""Sizes of the blocks to measure with. Two sizes give the cost of a block and the cost of a byte."""
FIRST = 1
"""The slice of the block that is written first."""
READ_TIMEOUT_S = 120.0


def calibrate(
    folder: Path | None = None, *, durable: bool = True, size_bytes: int = 24 * MIB, rounds: int = 3
) -> Machine:
    """Writes and reads about ``size_bytes`` in each round, and takes the median of the rounds.

    ``folder``: None for the platform's temporary folder. ``durable``: sync the files, as versions do. Reads come from
    the page cache, because the files were just written. Mostly that is also so when a window is executed again.
    """
    schema = pa.schema([("value", pa.int64()), ("pad", pa.binary())])
    first = _block(schema, SMALL, 0, FIRST)
    small = [_block(schema, SMALL, i) for i in range(512)]
    large = [_block(schema, LARGE, i) for i in range(max(2, size_bytes // LARGE))]
    _through_a_store(folder, first, small[:32], durable)  # the first time is slow
    found = [
        (_through_a_store(folder, first, small, durable), _through_a_store(folder, first, large, durable))
        for _ in range(rounds)
    ]
    (small_write, small_read, one_read), (large_write, large_read, _) = (
        [statistics.median(times[which][i] for times in found) for i in (0, 1, 2)] for which in (0, 1)
    )
    small_bytes, large_bytes = (sum(b.size_bytes for b in blocks) for blocks in (small, large))
    # Two equations for two costs: of a byte, and of a block or file. Noise must not make a cost negative.
    per_byte = max(large_read / large_bytes * 0.5, _slope(large_read, large_bytes, small_read, small_bytes))
    write_byte = max(large_write / large_bytes * 0.5, (large_write - small_write) / (large_bytes - small_bytes))
    read_block_s = max(1e-6, (small_read - per_byte * small_bytes) / len(small))
    small_s, large_s = _processing(schema, small), _processing(schema, large)
    processing_byte = max(large_s * 0.5, large_s - small_s * SMALL / LARGE)
    return Machine(
        read_bytes_per_s=1 / per_byte,
        read_block_s=read_block_s,
        write_bytes_per_s=1 / write_byte,
        write_file_s=max(1e-5, large_write - write_byte * large_bytes),
        processing_bytes_per_s=1 / processing_byte,
        execution_s=max(1e-6, (small_s - processing_byte) * SMALL),
        staging_s=max(1e-6, one_read - read_block_s - per_byte * small_bytes / len(small)),
    )


def _slope(large_s: float, large_bytes: int, small_s: float, small_bytes: int) -> float:
    """Seconds per byte, if a block of either size has the same fixed cost."""
    n_large, n_small = large_bytes / LARGE, small_bytes / SMALL
    return (large_s / n_large - small_s / n_small) / (large_bytes / n_large - small_bytes / n_small)


def _block(schema: pa.Schema, size_bytes: int, number: int, slice_us: int = 0) -> Block:
    rows = max(1, size_bytes // 256)
    rng = np.random.default_rng(number)
    pads = pa.array([rng.bytes(240) for _ in range(rows)], pa.binary())
    batch = pa.record_batch([pa.array(rng.integers(0, 1000, rows)), pads], schema=schema)
    return encode(batch, About(BlockKind.EVENTS, slice_us, rows, 0, 0))


def _through_a_store(
    folder: Path | None, first: Block, blocks: list[Block], durable: bool
) -> tuple[float, float, float]:
    """Seconds to write blocks as one durable file, to stage them, and to stage a single block."""
    size = sum(b.size_bytes for b in blocks)
    with tempfile.TemporaryDirectory(prefix="aion-tune-", dir=folder) as place:
        io = IoThread("aion-tune")
        budget = MemoryBudget(4 * size + 64 * MIB)
        p_bucket = PBucket(Path(place) / "files", Path(place) / "live", durable=durable)
        # The outbox is large enough to make one file of all blocks.
        store = TieredStore(
            p_bucket, io, budget, StoreOptions(bucket_limit_bytes=budget.limit_bytes, outbox_bytes=2 * size)
        )
        try:
            # The first file opens RocksDB, which takes longer than a file does.
            store.append(0, first, late=True)
            store.persist()
            begin = time.perf_counter()
            for seq, block in enumerate(blocks, start=1):
                store.append(seq, block, late=True)
            store.persist()
            write_s = time.perf_counter() - begin
            one_s = _staging_s(store, FIRST)
            return write_s, _staging_s(store, 0), one_s
        finally:
            store.close()
            io.close()


def _staging_s(store: TieredStore, slice_us: int) -> float:
    staged = threading.Event()
    took: list[float] = []

    def on_staged(_: int, seconds: float, __: float) -> None:
        took.append(seconds)
        staged.set()

    store.listen(on_staged)
    store.prestage([slice_us])
    if not staged.wait(READ_TIMEOUT_S):
        raise TimeoutError(f"blocks that were just written could not be read within {READ_TIMEOUT_S:g} s")
    return took[0]


def _processing(schema: pa.Schema, blocks: list[Block]) -> float:
    """Seconds per byte of a very simple function: it decodes each block and adds up a column."""
    begin = time.perf_counter()
    for block in blocks:
        pc.sum(decode(block, schema)["value"]).as_py()
    return max(time.perf_counter() - begin, 1e-6) / sum(b.size_bytes for b in blocks)
