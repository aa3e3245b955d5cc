"""The child's side of handing blocks over: large ones go to a file, and only references to it become rows.

See :mod:`state_backends.files.handed` and docs/inside/hand-over.md.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark import TaskContext

from aion.core.ingest.builder import ShardBlock
from aion.spark.tasks.blocks import BlockRows
from aion.spark.tasks.running import Running, checkpoint_of
from state_backends.files.handed import HandedFile, name_of, sweep
from state_backends.files.names import HANDED_FOLDER
from state_backends.files.storage import local_path
from state_backends.format.block import UNNUMBERED, Block, BlockKind, Compacted
from state_backends.thresholds import threshold
from state_backends.versions.lineage import digest_of

LEAST_BODY_BYTES = threshold(1 << 16, 64)
"""Smaller blocks are sent as rows. They may be of a slice that lives long, and a file lives as long as any block."""


@dataclass(frozen=True)
class HandOverConfig:
    """``name``: of the operator. ``limit_bytes``: the policy's ``distribution.hand_over``."""

    state_dir: str
    name: str
    limit_bytes: int


class BatchFolder:
    """Where the tasks of a batch hand over files. Must be created inside a task."""

    def __init__(self, state_dir: str, name: str) -> None:
        context = TaskContext.get()
        assert context is not None
        query, _, self._batch = Running.of(context)
        self._lineage = digest_of(checkpoint_of(context))
        self._names = query, name
        self._state_dir = state_dir
        local = local_path(state_dir)
        self._folder = None if local is None else local.joinpath(*self._names, HANDED_FOLDER)
        self._swept = False

    def owner(self, shard: int) -> int | None:
        """Returns the shard that the file of a shard's blocks belongs to, or None if it belongs to all."""
        return shard if self._folder is None else None

    def create(self, shard: int) -> HandedFile:
        """Returns a new file, for the :meth:`owner` of this shard. No other attempt of any task uses its name."""
        name = name_of(self._batch, self._lineage, uuid.uuid4().hex[:16])
        if self._folder is not None:
            return HandedFile(self._folder, name)
        from state_backends.files import handed_remote  # only here: it takes 0.2 s to import
        from state_backends.files.location import scratch

        names = *self._names, f"shard-{shard:05d}"
        place = handed_remote.HandedPlace.of(scratch(), names, self._lineage)
        if not self._swept:
            self._swept = True
            handed_remote.sweep_copies(place, self._lineage, self._batch)
        return handed_remote.create(handed_remote.shared(self._state_dir), place, name)

    def sweep(self) -> None:
        """Deletes the files of earlier batches, which are complete.

        On a remote file system, the shards do that, and children delete their host's copies.
        """
        if self._folder is not None:
            sweep(self._folder, self._lineage, self._batch)


class HandOver:
    """Hands over the kept events of one task. Must be created inside the task. Close it.

    Blocks of a shard wait until there are ``limit_bytes`` of them. From then on they go to the file.
    """

    def __init__(self, config: HandOverConfig) -> None:
        self._config = config
        self._folder = BatchFolder(config.state_dir, config.name)
        self._waiting: dict[int, list[ShardBlock]] = {}
        self._bytes: dict[int, int] = {}
        self._references: list[ShardBlock] = []
        self._files: dict[int | None, HandedFile] = {}  # by the shard that owns it

    def of(self, blocks: Iterable[ShardBlock]) -> Iterator[ShardBlock]:
        """Takes blocks, and yields those that are sent as rows."""
        least = min(LEAST_BODY_BYTES, self._config.limit_bytes)
        for made in blocks:
            shard, block, _ = made
            if block.header.kind is not BlockKind.EVENTS or block.header.body_bytes < least:
                yield made
                continue
            self._bytes[shard] = self._bytes.get(shard, 0) + block.size_bytes
            self._waiting.setdefault(shard, []).append(made)
            if self._bytes[shard] >= self._config.limit_bytes:
                self._hand_over(shard, self._waiting.pop(shard))

    def finish(self) -> Iterator[ShardBlock]:
        """Yields the blocks of shards with few bytes, then references to all others, which are durable by then."""
        for file in self._files.values():
            file.end()
        for waiting in self._waiting.values():
            yield from waiting
        for file in self._files.values():
            file.seal()
        yield from self._references

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _hand_over(self, shard: int, blocks: Iterable[ShardBlock]) -> None:
        owner = self._folder.owner(shard)
        if owner not in self._files:
            self._files[owner] = self._folder.create(shard)
        file = self._files[owner]
        for _, block, keys in blocks:
            reference = file.add(block)
            if keys is not None:
                header = reference.header._replace(compacted=Compacted(UNNUMBERED, *keys))
                reference = Block(header, b"", reference.at)
            self._references.append(ShardBlock(shard, reference))


class Sending:
    """Sends the blocks of one task: as rows, or handed over. Must be created inside the task. Close it."""

    def __init__(self, rows: BlockRows, config: HandOverConfig | None) -> None:
        self._rows = rows
        self.schema = rows.schema
        self._hand_over = None if config is None else HandOver(config)

    def of(self, blocks: Iterator[ShardBlock]) -> Iterator[pa.RecordBatch]:
        return self._rows.of(blocks if self._hand_over is None else self._hand_over.of(blocks))

    def finish(self, blocks: Iterator[ShardBlock]) -> Iterator[pa.RecordBatch]:
        """Yields the last rows of the task."""
        yield from self.of(blocks)
        if self._hand_over is not None:
            yield from self._rows.of(self._hand_over.finish())
        yield from self._rows.asking()

    def close(self) -> None:
        if self._hand_over is not None:
            self._hand_over.close()
