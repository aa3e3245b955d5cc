"""The child of a stateful processor: packs rows by shard, as Arrow, before the shuffle, and says which keys they have.

Spark hands single rows to Python one value at a time, which costs more than the processor (docs/how-to/stateful.md). So
the child sends the rows of a shard as Arrow batches in few, large rows of Spark. It also sends an empty one to each
shard in each batch: the root then knows the watermark of every batch, by which rows of the next batch are late. Without
event times it does so in the first batch of a run, in which each shard without a version is looked at.

If the last batch of a shard of this host read state from disk, and memory holds what it read, the child tells the state
server which keys are coming. Their state is then in memory when the root asks for it ("keyed prefetching", arXiv
2603.19890).
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.types import BinaryType, IntegerType, StructField, StructType

from aion.base.hashing import ShardOfKeys
from aion.config import policy_from_text
from aion.errors import ServerError
from aion.spark.tasks.running import Running, is_first
from aion.spark.tasks.shards import ids_here
from aion.spark.tasks.task import client_of
from aion.spark.tasks.worker import begin_task
from aion.stateful.keys import Keys, distinct_keys
from aion.stateful.layout import record_key
from state_backends.thresholds import threshold

log = logging.getLogger("aion")

SHARD, ROWS = "__aion_shard", "__aion_rows"
SCHEMA = StructType([StructField(SHARD, IntegerType()), StructField(ROWS, BinaryType())])
"""Not as text, here and elsewhere: what a word of it means is a setting of the session."""
PACKED_BYTES = threshold(1 << 20, 256)
_BATCH_BYTES = threshold(4 << 20, 512)
_ARROW = pa.schema([(SHARD, pa.int32()), (ROWS, pa.binary())])


@dataclass(frozen=True)
class Announces:
    """How a child tells the state server which keys are coming. ``key``: their type; ``columns``: where they are."""

    application: str
    operator: str
    policy: str
    key: StructType
    columns: tuple[int, ...]


class StatefulChild:
    """A function for ``mapInArrow``. The last column is the hash of the key.

    ``operator``, ``ids``: its name, and the ids of its shards when it was planned. ``tells_each``: whether each shard
    gets an empty row in each batch; ``asks``: in the first batch of a run. Without ``announces`` the child says
    nothing about keys.
    """

    def __init__(
        self,
        operator: str,
        ids: tuple[int, ...],
        *,
        tells_each: bool = False,
        asks: bool = False,
        announces: Announces | None = None,
    ) -> None:
        self._operator, self._ids = operator, ids
        self._tells_each, self._asks = tells_each, asks
        self._announces = announces

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        begin_task()
        context = TaskContext.get()
        ids = ids_here(self._operator, self._ids)
        shard_of = ShardOfKeys(ids)
        announced = None if self._announces is None or context is None else _Announced(self._announces, context)
        waiting: defaultdict[int, list[pa.RecordBatch]] = defaultdict(list)
        sizes: defaultdict[int, int] = defaultdict(int)
        packed: list[tuple[int, bytes]] = []
        for batch in batches:
            for shard, part in _by_shard(batch, shard_of):
                waiting[shard].append(part)
                sizes[shard] += part.nbytes
                if announced is not None:
                    announced.tell(shard, part)
                if sizes[shard] >= PACKED_BYTES:
                    packed += ((shard, data) for data in pack(waiting.pop(shard)))
                    sizes[shard] = 0
            if sum(len(data) for _, data in packed) >= _BATCH_BYTES:
                yield packed_rows(packed)
                packed = []
        packed += ((shard, data) for shard, parts in waiting.items() for data in pack(parts))
        tells_each = self._tells_each or (self._asks and context is not None and is_first(context))
        if tells_each and (context is None or context.partitionId() == 0):
            packed += ((shard, b"") for shard in ids)
        if packed:
            yield packed_rows(packed)


class _Announced:
    """What one task has told the state server."""

    def __init__(self, announces: Announces, context: TaskContext) -> None:
        self._announces = announces
        self._query = Running.of(context).query
        self._keys = Keys(announces.key)
        self._useful: dict[int, bool] = {}

    def tell(self, shard: int, rows: pa.RecordBatch) -> None:
        """Says which keys these rows have, if that is of use."""
        if self._useful.get(shard, True):
            try:
                self._useful[shard] = self._told(shard, rows)
            except ServerError as error:
                log.debug("the state server was not told which keys are coming: %s", error)
                self._useful[shard] = False

    def _told(self, shard: int, rows: pa.RecordBatch) -> bool:
        said = self._announces
        client = client_of(said.application, policy_from_text(said.policy))
        if shard not in self._useful and not client.expect(self._query, said.operator, shard):
            return False
        keys = distinct_keys(pa.Table.from_batches([rows]), self._keys, said.columns)
        return client.expect(self._query, said.operator, shard, sorted(map(record_key, keys)))


def pack(batches: Sequence[pa.RecordBatch]) -> Iterator[bytes]:
    """Yields the rows of batches as Arrow streams of about ``PACKED_BYTES`` each."""
    table = pa.Table.from_batches(batches)
    rows = max(1, table.num_rows * PACKED_BYTES // max(table.nbytes, 1))
    for begin in range(0, table.num_rows, rows):
        sink = pa.BufferOutputStream()
        part = table.slice(begin, rows).combine_chunks()
        with pa.ipc.new_stream(sink, part.schema) as writer:
            writer.write_table(part)
        yield sink.getvalue().to_pybytes()


def unpack(packed: Sequence[bytes]) -> pa.Table:
    """Returns the rows that were packed, in their order. There is at least one."""
    return pa.concat_tables([pa.ipc.open_stream(data).read_all() for data in packed])


def _by_shard(batch: pa.RecordBatch, shard_of: ShardOfKeys) -> Iterator[tuple[int, pa.RecordBatch]]:
    if not batch.num_rows:
        return
    shards = shard_of.of_hashes(batch.column(batch.num_columns - 1).to_numpy())
    rows = batch.select(range(batch.num_columns - 1))
    order = np.argsort(shards, kind="stable")
    ordered = shards[order]
    edges = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(ordered)]
    if len(edges) > 2:
        rows = rows.take(pa.array(order))
    for begin, end in itertools.pairwise(edges):
        yield int(ordered[begin]), rows.slice(begin, end - begin)


def packed_rows(packed: Sequence[tuple[int, bytes]]) -> pa.RecordBatch:
    """Returns a row for each shard with its packed rows."""
    shards, data = zip(*packed, strict=True)
    return pa.RecordBatch.from_arrays([pa.array(shards, pa.int32()), pa.array(data, pa.binary())], schema=_ARROW)
