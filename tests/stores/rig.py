"""A block store with everything that it stands on, for tests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from aion.core.ingest.encoding import encode
from state_backends.backends import STORES
from state_backends.files.names import SstFile
from state_backends.format.block import Block, BlockKind, Compacted
from state_backends.store.io_thread import IoThread, Priority, Steps
from state_backends.store.m_bucket import MemoryBudget, Stretches
from state_backends.store.merge_choice import DEFAULTS, Limits
from state_backends.store.p_bucket import PBucket
from state_backends.store.protocol import BlockStore, Runs
from tests.io_thread.rig import result
from tests.simulated_disk import Disk, OnDisk

KIB = 1 << 10


def make_block(slice_us: int, number: int, size: int = 0, compacted: Compacted | None = None) -> Block:
    """A block of about ``size`` bytes, each of its own contents, which do not compress."""
    payload = hashlib.shake_128(str(number).encode()).digest(max(size - 400, 8))
    batch = pa.record_batch({"payload": [payload]})
    return encode(
        batch, kind=BlockKind.EVENTS, slice_us=slice_us, events=1, min_us=slice_us, max_us=slice_us, compacted=compacted
    )


def nothing() -> Steps[None]:
    return
    yield 0


def flags(runs: Runs, count: int) -> list[bool]:
    return [any(first <= at <= last for first, last in runs) for at in range(count)]


class Rig:
    """A store with everything that it stands on. Blocks are (seq, slice)."""

    def __init__(
        self,
        kind: str,
        folder: Path,
        *,
        budget: int = 1 << 30,
        bucket_limit: int = 1 << 30,
        keep: float = 0.0,
        limits: Limits = DEFAULTS,
        windows: Sequence[Stretches] = (),
        blocking: bool = True,
    ) -> None:
        self.kind, self.folder = kind, folder
        self.options: dict[str, Any] = {
            "bucket_limit_bytes": min(bucket_limit, budget),
            "keep_fraction": keep,
            "limits": limits,
            "windows": windows,
            **({} if blocking else {"blocking": False}),
        }
        self.io = IoThread()
        self.budget = MemoryBudget(budget)
        self.blocks: dict[int, Block] = {}
        self.numbers = 0
        self.store = self.open()

    def open(self, disk: Disk | None = None) -> BlockStore:
        self.p_bucket = PBucket(self.folder / "files", self.folder / "live", durable=True)
        p_bucket: Any = OnDisk(self.p_bucket, disk) if disk else self.p_bucket
        return STORES[self.kind](p_bucket, self.io, self.budget, **self.options)

    def reopen(
        self,
        files: Sequence[SstFile],
        holds: Mapping[int, Runs] | None = None,
    ) -> None:
        """Of these files the blocks at these positions are alive, or all blocks."""
        self.store.close()
        self.store = self.open()
        if holds is None:
            self.store.restore(files)
            return
        self.store.restore([f for f in files if f.file_no in holds], lambda no, blocks: flags(holds[no], len(blocks)))

    def append(
        self, *blocks: tuple[int, int], late: bool = False, size: int = 0, compacted: Compacted | None = None
    ) -> None:
        for seq, slice_us in blocks:
            self.numbers += 1
            self.blocks[seq] = make_block(slice_us, self.numbers, size, compacted)
            self.store.append(seq, self.blocks[seq], late=late)

    def read(self, *slices: int, blocking: bool = False) -> list[int]:
        """The seqs of the blocks of these slices; their bytes are those that were appended."""
        return [self.check(stored) for stored in self.store.read(slices, blocking=blocking)]

    def check(self, stored: Any) -> int:
        seq, block = stored
        assert block.header == self.blocks[seq].header
        assert bytes(block.stored) == bytes(self.blocks[seq].stored), f"block {seq} is another one"
        return int(seq)

    def settle(self) -> None:
        """Waits until the I/O thread has nothing more to do."""
        result(self.io.submit(Priority.MAINTENANCE, nothing()))

    def to_disk(self, *slices: int) -> None:
        self.store.destage(slices)
        self.store.flush()
        self.settle()

    def validate(self) -> None:
        self.store.validate()  # type: ignore[attr-defined]
        assert self.budget.used_bytes == self.store.stats().m_bucket_bytes

    def close(self) -> None:
        self.store.close()
        self.io.close()
        assert self.budget.used_bytes == 0, "what is closed holds no memory"
        assert not (self.folder / "live").exists(), "RocksDB's folder goes with the store"

    def break_disk(self) -> None:
        """Nothing can be written from now on: where the files' folder was, there is a file."""
        (self.folder / "files").mkdir(exist_ok=True)
        (self.folder / "files").rename(self.folder / "away")
        (self.folder / "files").write_text("in the way")

    def heal_disk(self) -> None:
        (self.folder / "files").unlink()
        (self.folder / "away").rename(self.folder / "files")

    def rocksdb_bytes(self) -> int:
        """Bytes of the files that RocksDB has, dead blocks included."""
        return sum(path.stat().st_size for path in (self.folder / "live").rglob("*.sst"))

    def durable(self) -> dict[str, bytes]:
        """The files that are kept for good, by name, and what is in them."""
        return {p.name: p.read_bytes() for p in (self.folder / "files").glob("*")}


WHEREVER: dict[str, Callable[[Rig], object]] = {
    "as it is": lambda rig: None,
    "flushed": lambda rig: (rig.store.flush(), rig.settle()),
    "destaged": lambda rig: rig.to_disk(0, 10),
    "partly destaged": lambda rig: rig.to_disk(10),
    "persisted": lambda rig: rig.store.persist(),
    "restored": lambda rig: rig.reopen(rig.store.persist()),
}


EAGER = Limits(fan_in=2, worth_bytes=1, file_share=1.0, disk=100.0)
"""Merges whatever there is."""
