"""The child of a stateful processor: packs rows by shard, as Arrow, before the shuffle.

Spark hands single rows to Python one value at a time, which costs more than the processor (docs/stateful.md). So the
child sends the rows of a shard as Arrow batches in few, large rows of Spark. It also sends an empty one to each shard
in each batch: the root then knows the watermark of every batch, by which rows of the next batch are late.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
from pyspark import TaskContext

SHARD, ROWS = "__aion_shard", "__aion_rows"
SCHEMA = f"{SHARD} int, {ROWS} binary"
PACKED_BYTES = 1 << 20
_BATCH_BYTES = 4 << 20
_ARROW = pa.schema([(SHARD, pa.int32()), (ROWS, pa.binary())])


class StatefulChild:
    """A function for ``mapInArrow``. The last column is the shard. ``empty``: the shards that get an empty row."""

    def __init__(self, empty: Sequence[int]) -> None:
        self._empty = tuple(empty)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        waiting: defaultdict[int, list[pa.RecordBatch]] = defaultdict(list)
        sizes: defaultdict[int, int] = defaultdict(int)
        packed: list[tuple[int, bytes]] = []
        for batch in batches:
            for shard, part in _by_shard(batch):
                waiting[shard].append(part)
                sizes[shard] += part.nbytes
                if sizes[shard] >= PACKED_BYTES:
                    packed += ((shard, data) for data in pack(waiting.pop(shard)))
                    sizes[shard] = 0
            if sum(len(data) for _, data in packed) >= _BATCH_BYTES:
                yield packed_rows(packed)
                packed = []
        packed += ((shard, data) for shard, parts in waiting.items() for data in pack(parts))
        context = TaskContext.get()
        if context is None or context.partitionId() == 0:
            packed += ((shard, b"") for shard in self._empty)
        if packed:
            yield packed_rows(packed)


def pack(batches: Sequence[pa.RecordBatch]) -> Iterator[bytes]:
    """The rows of batches as Arrow streams of about ``PACKED_BYTES`` each."""
    table = pa.Table.from_batches(batches)
    rows = max(1, table.num_rows * PACKED_BYTES // max(table.nbytes, 1))
    for begin in range(0, table.num_rows, rows):
        sink = pa.BufferOutputStream()
        part = table.slice(begin, rows).combine_chunks()
        with pa.ipc.new_stream(sink, part.schema) as writer:
            writer.write_table(part)
        yield sink.getvalue().to_pybytes()


def unpack(packed: Sequence[bytes]) -> pa.Table:
    """The rows that were packed, in their order. There is at least one."""
    return pa.concat_tables([pa.ipc.open_stream(data).read_all() for data in packed])


def _by_shard(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    if not batch.num_rows:
        return
    shards = batch.column(batch.num_columns - 1).to_numpy(zero_copy_only=False)
    rows = batch.select(range(batch.num_columns - 1))
    order = np.argsort(shards, kind="stable")
    ordered = shards[order]
    edges = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(ordered)]
    if len(edges) > 2:
        rows = rows.take(pa.array(order))
    for begin, end in itertools.pairwise(edges):
        yield int(ordered[begin]), rows.slice(begin, end - begin)


def packed_rows(packed: Sequence[tuple[int, bytes]]) -> pa.RecordBatch:
    """A row for each shard with its packed rows."""
    shards, data = zip(*packed, strict=True)
    return pa.RecordBatch.from_arrays([pa.array(shards, pa.int32()), pa.array(data, pa.binary())], schema=_ARROW)
