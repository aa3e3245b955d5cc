"""What a store stands on in a replay: files without bytes, and a shard's share of the simulated disk.

The store is the real one (:mod:`state_backends.store.tiered`). It decides where each block is, what moves and who
waits. The classes here only say what that costs on a machine.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import cycle
from typing import TypeVar

from aion.errors import CorruptBlock
from aion.tools.tune.disk import Machine, SimulatedDisk, SimulatedIo, Transfer
from state_backends.files.names import SstFile
from state_backends.format.block import Block, BlockKind, Codec, Compacted, Compression, Header
from state_backends.store.body_files import NoBodies
from state_backends.store.file_index import Indexed
from state_backends.store.io import Priority, Steps
from state_backends.store.sst_file import SYNC_BYTES

T = TypeVar("T")


def sized(
    slice_us: int, size_bytes: int, compacted: Compacted | None = None, *, events: int = 0, rows: int = 0
) -> Block:
    """Returns a block without bytes. Its header says what a store and an operator ask."""
    header = Header(BlockKind.EVENTS, Codec.ARROW, Compression.NONE, slice_us, rows, events, 0, 0, 0, 0, 0, compacted)
    return Block(header._replace(body_bytes=size_bytes - header.own_bytes), b"")


class SimulatedFiles:
    """Stands for :class:`state_backends.store.p_bucket.PBucket`. Reading and writing cost what the machine says."""

    def __init__(self, machine: Machine, disk: SimulatedDisk) -> None:
        self._machine, self._disk = machine, disk
        self._files: dict[int, dict[int, Block]] = {}  # file -> seq -> block
        self.next_file_no = 0
        self.bodies = NoBodies()  # no block of a trace is handed over

    def write(self, blocks: Sequence[tuple[int, Block]]) -> Steps[SstFile]:
        # Joining blocks in memory takes no time. Syncing and ingesting the file do, and come at the end.
        size_bytes = sum(block.size_bytes for _, block in blocks)
        with self._new_file(dict(blocks), "") as out:
            yield Transfer(size_bytes, size_bytes / self._machine.write_bytes_per_s)
            yield from out.seal()
        return out.file

    def writing(self, index: Sequence[Indexed], mark: str = "") -> AbstractContextManager[_NewFile]:
        # A merged file holds the same blocks as the files before it, with their numbers of rows.
        known = {seq: block for blocks in self._files.values() for seq, block in blocks.items()} if mark else {}
        blocks = {i.seq: known.get(i.seq) or sized(i.slice_us, i.size_bytes, i.compacted) for i in index}
        return self._new_file(blocks, mark)

    def fetch(self, file_no: int, blocks: Sequence[tuple[int, int]], size_bytes: int = 0) -> Steps[list[Block]]:
        (slice_us, seq), *_ = blocks
        held = self._files.get(file_no, {})
        if seq not in held:
            raise CorruptBlock(f"block {seq} of slice {slice_us}: file {file_no} does not hold it")
        found = [held[seq] for _, seq in blocks if seq in held]
        for number, block in enumerate(found):  # neighbours are read with the first
            seek_s = 0.0 if number else self._machine.read_block_s
            yield Transfer(block.size_bytes, seek_s + block.size_bytes / self._machine.read_bytes_per_s)
        return found

    def adopt(self, files: Sequence[SstFile]) -> Steps[list[list[Indexed]]]:
        yield 0
        return [[_line(seq, block) for seq, block in self._files[file.file_no].items()] for file in files]

    def is_near(self, file_no: int, slice_us: int, seq: int) -> bool:
        return True

    def complete(self, files: Sequence[SstFile]) -> Steps[None]:
        """Does nothing: all files of a trace are on this host."""
        return
        yield 0

    def trim(self) -> Steps[None]:
        """Does nothing, for the same reason."""
        return
        yield 0

    def drop(self, *file_nos: int) -> Steps[None]:
        for file_no in file_nos:
            self._files.pop(file_no, None)
        return
        yield 0

    def delete(self, file: SstFile) -> None:
        self._files.pop(file.file_no, None)

    def close(self) -> None:
        pass

    @contextmanager
    def _new_file(self, blocks: dict[int, Block], mark: str) -> Iterator[_NewFile]:
        out = _NewFile(self._machine, self._disk, blocks)
        number, self.next_file_no = self.next_file_no, self.next_file_no + 1
        yield out
        size_bytes = sum(block.size_bytes for block in blocks.values())
        out.file = SstFile(number, f"{number:010d}-0{mark}.sst", size_bytes, 0, 0, len(blocks))
        self._files[number] = blocks


def _line(seq: int, block: Block) -> Indexed:
    return Indexed(block.header.slice_us, seq, block.size_bytes, block.header.compacted)


class _NewFile:
    """Stands for :class:`state_backends.store.sst_file.NewFile`."""

    file: SstFile

    def __init__(self, machine: Machine, disk: SimulatedDisk, blocks: dict[int, Block]) -> None:
        self._machine, self._disk, self._blocks = machine, disk, blocks
        self._unsynced = 0

    def put(self, slice_us: int, seq: int, value: bytes) -> None:
        self._unsynced += self._blocks[seq].size_bytes

    def sync_due(self) -> bool:
        return self._unsynced >= SYNC_BYTES

    def sync(self) -> None:
        self._disk.spend(self._unsynced / self._machine.write_bytes_per_s)
        self._unsynced = 0

    def seal(self) -> Steps[None]:
        self.sync()
        yield 0
        yield Transfer(0, self._machine.write_file_s, goes_on=True)


class ShardDisk:
    """The host's disk as the store of one shard sees it. A prestage takes the machine's ``staging_s`` to begin.

    Real prestages are sometimes slow and sometimes fast, and a store learns from each. So each prestage takes longer or
    shorter than usual by the next factor in ``staging_times``. After the last factor the first comes again.
    """

    def __init__(self, disk: SimulatedDisk, machine: Machine, staging_times: Sequence[float]) -> None:
        self._disk, self._staging_s, self._staging_times = disk, machine.staging_s, cycle(staging_times)
        self.wait, self.wait_for_room, self.busy, self.now = disk.wait, disk.wait_for_room, disk.busy, disk.now
        self._times = 1.0
        self._begins = True

    def prestage_begins(self) -> None:
        """Call it before a prestage, which may make several requests. Only the first of them takes time to begin."""
        self._begins = True

    def submit(self, priority: Priority, steps: Steps[T]) -> SimulatedIo[T]:
        if priority is Priority.PRESTAGE:
            extra_s = 0.0
            if self._begins:
                self._begins = False
                self._times, extra_s = next(self._staging_times), self._staging_s
            steps = _slower(steps, self._times, extra_s)
        return self._disk.submit(priority, steps)


def _slower(steps: Steps[T], times: float, extra_s: float) -> Generator[int, None, T]:
    """Returns the same steps, each ``times`` as long. Before that, the first takes ``extra_s`` more."""
    try:
        while True:
            try:
                moved = next(steps)
            except StopIteration as stop:
                result: T = stop.value
                return result
            seconds = moved.seconds if isinstance(moved, Transfer) else 0.0
            yield Transfer(moved, times * (seconds + extra_s))
            extra_s = 0.0
    finally:
        steps.close()
