"""A leg of `aion experiment store`: ingested SST files compared with RocksDB's blob files, for 1 MiB and 64 KiB values.

SST files are written and read as the p-bucket does it. SstFileWriter cannot write blob files. So for blob files, values
are put without a write-ahead log, and each commit is a flush, which syncs them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any, TypeVar

from rocksdict import Cache, Rdict, WriteOptions

from experiments.store.common import MIB, drop_page_cache, encoded, random_batches
from experiments.store.settings import Settings
from state_backends.format.block import Block
from state_backends.store.io_thread import Steps
from state_backends.store.p_bucket import CACHE_BYTES, PBucket
from state_backends.store.sst_file import block_key, rocksdb_options

T = TypeVar("T")
SIZES = {"1 MiB": MIB, "64 KiB": 64 << 10}
SMALLEST_BLOB = 4096


def blobs(contender: str, settings: Settings, folder: Path) -> dict[str, Any]:
    """Bytes per second, by size of the values: writing with every commit synced, reading without page cache."""
    contend = sst_files if contender == "sst" else blob_files
    found: dict[str, Any] = {"write_bytes_per_s": {}, "read_bytes_per_s": {}, "bytes": 0, "dropped_bytes": 0}
    for name, size in SIZES.items():
        count = max(2, settings.disk_bytes // size)
        made = random_batches(min(count, 64), min(settings.payload_bytes, size // 16), settings.seed, size)
        blocks = [encoded(made[i % len(made)], 0) for i in range(count)]
        per_commit = max(1, settings.commit_blocks * MIB // size)
        commits = [list(enumerate(blocks))[i : i + per_commit] for i in range(0, count, per_commit)]
        total = sum(b.size_bytes for b in blocks)
        below = folder / name.replace(" ", "")
        below.mkdir(parents=True)
        write_s, read_s, dropped = contend(commits, below)
        found["write_bytes_per_s"][name] = total / write_s
        found["read_bytes_per_s"][name] = total / read_s
        found["bytes"] += total
        found["dropped_bytes"] += dropped
    return found


Commits = Sequence[Sequence[tuple[int, Block]]]
"""The (seq, block) pairs of each commit."""


def sst_files(commits: Commits, folder: Path) -> tuple[float, float, int]:
    p_bucket = PBucket(folder / "files", folder / "live", durable=True)
    begin = time.perf_counter()
    files = [_done(p_bucket.write(commit)).file_no for commit in commits]
    write_s = time.perf_counter() - begin
    dropped = drop_page_cache(folder)
    where = [(no, seq) for no, commit in zip(files, commits, strict=True) for seq, _ in commit]
    read_s = _read(commits, lambda: (_done(p_bucket.fetch(no, [(0, seq)]))[0].stored for no, seq in where))
    p_bucket.close()
    return write_s, read_s, dropped


def blob_files(commits: Commits, folder: Path) -> tuple[float, float, int]:
    options = rocksdb_options(Cache(CACHE_BYTES))
    options.set_enable_blob_files(True)
    options.set_min_blob_size(SMALLEST_BLOB)
    largest = max(sum(b.size_bytes for _, b in commit) for commit in commits)
    options.set_write_buffer_size(2 * largest)  # so that a commit is one flush
    db = Rdict(str(folder / "db"), options)
    no_log = WriteOptions()
    no_log.disable_wal = True
    begin = time.perf_counter()
    for file_no, commit in enumerate(commits):
        for seq, block in commit:
            db.put(block_key(file_no, 0, seq), bytes(block.stored), write_opt=no_log)
        db.flush()
    write_s = time.perf_counter() - begin
    assert list((folder / "db").glob("*.blob")), "the values are in blob files"
    dropped = drop_page_cache(folder)
    keys = [block_key(file_no, 0, seq) for file_no, commit in enumerate(commits) for seq, _ in commit]
    read_s = _read(commits, lambda: (db.get(key) for key in keys))
    db.close()
    return write_s, read_s, dropped


def _read(commits: Commits, values: Callable[[], Iterator[Sized]]) -> float:
    """Seconds to read everything. Checks the number of bytes."""
    wanted = sum(b.size_bytes for commit in commits for _, b in commit)
    begin = time.perf_counter()
    found = sum(len(value) for value in values())
    seconds = time.perf_counter() - begin
    assert found == wanted, f"{found} bytes of {wanted}"
    return seconds


def _done(steps: Steps[T]) -> T:
    """Takes all steps right here, and returns their result."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            result: T = stop.value
            return result
