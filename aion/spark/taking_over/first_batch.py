"""The first batch of a query whose state comes from elsewhere. It only brings the state into Aion's store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.streaming.stateful_processor import TimerValues

from aion.spark.tasks.processor import ProcessorDefinition
from aion.spark.tasks.stateful_child import ROWS, packed_rows
from aion.spark.tasks.stateful_config import StatefulConfig
from aion.stateful.restore import Declaration, Declaring


@dataclass(frozen=True, kw_only=True)
class Seed:
    """What is brought. ``batch``: after this batch of the query; the versions are named by it.

    ``watermark_ms``: the watermark of that batch.
    """

    variables: tuple[Declaration, ...]
    batch: int
    watermark_ms: int


class SeedDefinition(ProcessorDefinition):
    """Leaves a shard as if the user's processor had processed all batches up to the last one.

    Its initial state is rows as :func:`aion.stateful.restore.restored_keys` reads them, packed by the child. Its input
    is one empty row for each shard, which comes after them.
    """

    def __init__(self, config: StatefulConfig, seed: Seed) -> None:
        super().__init__(config, Declaring(seed.variables))
        self._seed = seed
        self.batch, self._restored = seed.batch, seed.variables

    def now_ms(self, times: TimerValues) -> int:
        return self._seed.watermark_ms if self.time_mode == "eventtime" else super().now_ms(times)

    def soon_ms(self, now_ms: int) -> int | None:
        return None  # each shard gets a row

    def arrived(self, rows: Iterator[Any]) -> Iterable[Any]:
        return list(rows)

    def initial(self, rows: Any) -> Any:
        # pyspark gives frames of initial state other names, if the columns' names begin with an underscore.
        return list(rows.iloc[:, -1]) if self._stateful.pandas else [rows[ROWS]]


class EachShard:
    """A function for ``mapInArrow``: an empty row for each shard, instead of the rows."""

    def __init__(self, shards: Sequence[int]) -> None:
        self._shards = tuple(shards)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            pass
        context = TaskContext.get()
        if context is None or context.partitionId() == 0:
            yield packed_rows([(shard, b"") for shard in self._shards])
