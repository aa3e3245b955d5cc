"""A block store with everything that it stands on, for tests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa

from aion.core.ingest.encoding import About, encode
from state_backends.backends import STORES
from state_backends.files.bodies import Bodies, Places
from state_backends.files.handed import HandedFile, name_of
from state_backends.files.names import SstFile
from state_backends.format.block import Block, BlockKind, BodyAt, Compacted
from state_backends.store.body_files import BodyFiles
from state_backends.store.io_thread import IoThread, Priority, Steps
from state_backends.store.m_bucket import MemoryBudget, PeriodicWindows
from state_backends.store.merge_choice import DEFAULTS, Limits
from state_backends.store.options import StoreOptions
from state_backends.store.p_bucket import PBucket
from state_backends.store.protocol import BlockStore, Runs
from tests.io_thread.rig import result
from tests.simulated_disk import Disk, OnDisk

KIB = 1 << 10


def make_block(slice_us: int, number: int, size: int = 0, compacted: Compacted | None = None) -> Block:
    """A block of about ``size`` bytes, each of its own contents, which do not compress."""
    payload = hashlib.shake_128(str(number).encode()).digest(max(size - 400, 8))
    batch = pa.record_batch({"payload": [payload]})
    return encode(batch, About(BlockKind.EVENTS, slice_us, 1, slice_us, slice_us), compacted=compacted)


def nothing() -> Steps[None]:
    return
    yield 0


def flags(runs: Runs, count: int) -> list[bool]:
    return [any(first <= at <= last for first, last in runs) for at in range(count)]


class WatchedBudget(MemoryBudget):
    """A budget that remembers how little of it was left at worst."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(limit_bytes)
        self.least_left_bytes = limit_bytes

    def make_room(self) -> None:  # each change of what is used ends with this
        super().make_room()
        with self._lock:
            self.least_left_bytes = min(self.least_left_bytes, self.left())


class HandedFiles:
    """A shard's storage of handed-over files. A host that has no folder with them asks another one for ranges."""

    def __init__(self, folder: Path, *, is_local: bool) -> None:
        self.folder = folder
        self.bodies = Places([str(folder)] if is_local else [])

    def body_of(self, at: BodyAt, size: int) -> Future[bytes]:
        future: Future[bytes] = Future()
        future.set_result((self.folder / at.file).read_bytes()[at.offset :][:size])
        return future


class Rig:
    """A store with everything that it stands on. Blocks are (seq, slice).

    ``is_local``: whether handed-over files are in a folder of this host.
    """

    def __init__(
        self,
        kind: str,
        folder: Path,
        *,
        budget: int = 1 << 30,
        bucket_limit: int = 1 << 30,
        keep: float = 0.0,
        limits: Limits = DEFAULTS,
        windows: Sequence[PeriodicWindows] = (),
        blocking: bool = True,
        is_local: bool = True,
    ) -> None:
        self.kind, self.folder = kind, folder
        self.handed = HandedFiles(folder / "handed", is_local=is_local)
        self.staged = folder / "staged"
        self.options: dict[str, Any] = {
            "bucket_limit_bytes": min(bucket_limit, budget),
            "keep_fraction": keep,
            "limits": limits,
            "windows": windows,
            **({} if blocking else {"blocking": False}),
        }
        self.io = IoThread()
        self.budget = WatchedBudget(budget)
        self.blocks: dict[int, Block] = {}
        self.bodies: dict[BodyAt, bytes] = {}
        self.numbers = 0
        self.store = self.open()

    def open(self, disk: Disk | None = None) -> BlockStore:
        self.p_bucket = PBucket(self.folder / "files", self.folder / "live", durable=True)
        self.p_bucket.bodies = BodyFiles(self.staged, lambda: self.handed)
        p_bucket: Any = OnDisk(self.p_bucket, disk) if disk else self.p_bucket
        return STORES[self.kind](p_bucket, self.io, self.budget, StoreOptions(**self.options))

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

    def hand_over(self, *blocks: tuple[int, int], late: bool = False, size: int = 0) -> None:
        """Appends references to blocks, whose bodies are neighbours in a file."""
        with closing(HandedFile(self.handed.folder, name_of(0, "rig", f"{self.numbers:06d}"))) as file:
            for seq, slice_us in blocks:
                self.numbers += 1
                block = make_block(slice_us, self.numbers, size)
                self.blocks[seq] = reference = file.add(block)
                assert reference.at is not None
                self.bodies[reference.at] = bytes(block.body)
            file.end()
            file.seal()
        for seq, _ in blocks:
            self.store.append(seq, self.blocks[seq], late=late)

    def read(self, *slices: int, blocking: bool = False) -> list[int]:
        """The seqs of the blocks of these slices; their bytes are those that were appended."""
        return [self.check(stored) for stored in self.store.read(slices, blocking=blocking)]

    def check(self, stored: Any) -> int:
        seq, block = stored
        original = self.blocks[seq]
        assert block.header == original.header
        if original.at is None:
            assert bytes(block.stored) == bytes(original.stored), f"block {seq} is another one"
        else:  # whole, or a reference that a worker follows, to a staged body or to the file
            assert block.at in (None, original.at)
            worker = Bodies(Places([str(self.handed.folder)], staged=str(self.staged)))
            assert bytes(worker.of(block).body) == self.bodies[original.at], f"the body of {seq} is another one"
        return int(seq)

    def whole_bytes(self, seq: int) -> int:
        """Of a block, with its body if that was handed over."""
        block = self.blocks[seq]
        return block.size_bytes + (0 if block.at is None else block.header.body_bytes)

    def bytes_in_memory(self) -> int:
        """Of the blocks that the store holds, and of the staged files: not what anyone has counted."""
        held = self.store.blocks.memory  # type: ignore[attr-defined]
        blocks = sum(len(bytes(held[seq].stored)) for seq in held.seqs())
        return blocks + sum(path.stat().st_size for path in self.staged.glob("*"))

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
