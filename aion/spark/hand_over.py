"""The child's side of handing blocks over: large ones go to a file, and only references to it become rows.

See :mod:`state_backends.files.handed` and docs/hand-over.md.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext

from aion.core.ingest.block import UNNUMBERED, Block, BlockKind, Compacted
from aion.core.ingest.builder import ShardBlock
from aion.spark.blocks import BlockRows
from aion.spark.starts import checkpoint_of
from state_backends.files.handed import HandedFile, name_of, sweep
from state_backends.files.names import HANDED_FOLDER
from state_backends.versions.lineage import digest_of

LEAST_BODY_BYTES = 1 << 16
"""Smaller blocks are sent as rows. They may be of a slice that lives long, and a file lives as long as any block."""


@dataclass(frozen=True)
class HandOverConfig:
    """``state_dir``: a local or mounted folder. ``name``: of the operator. ``limit_bytes``: the policy's
    ``distribution.hand_over``.
    """

    state_dir: str
    name: str
    limit_bytes: int


class BatchFolder:
    """The folder in which the tasks of a batch hand over files. Must be created inside a task."""

    def __init__(self, state_dir: str, name: str) -> None:
        context = TaskContext.get()
        assert context is not None
        query = context.getLocalProperty("sql.streaming.queryId") or "no-query"
        self.path = Path(state_dir) / query / name / HANDED_FOLDER
        self.lineage = digest_of(checkpoint_of(context))
        self.batch = int(context.getLocalProperty("streaming.sql.batchId") or "0")

    def new_name(self) -> str:
        """A name that no other attempt of any task uses."""
        return name_of(self.batch, self.lineage, uuid.uuid4().hex[:16])

    def sweep(self) -> None:
        """Deletes the files of earlier batches. All earlier batches are complete."""
        sweep(self.path, self.lineage, self.batch)


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
        self._file: HandedFile | None = None

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
                self._hand_over(self._waiting.pop(shard))

    def finish(self) -> Iterator[ShardBlock]:
        """Yields the blocks of shards with few bytes, then references to all others. Their file is durable by then."""
        for waiting in self._waiting.values():
            yield from waiting
        if self._file is not None:
            self._file.seal()
        yield from self._references

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _hand_over(self, blocks: Iterable[ShardBlock]) -> None:
        if self._file is None:
            self._file = HandedFile(self._folder.path, self._folder.new_name())
        for shard, block, keys in blocks:
            reference = self._file.add(block)
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
        """The last blocks of the task."""
        yield from self.of(blocks)
        if self._hand_over is not None:
            yield from self._rows.of(self._hand_over.finish())

    def close(self) -> None:
        if self._hand_over is not None:
            self._hand_over.close()
