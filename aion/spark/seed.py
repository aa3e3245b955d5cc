"""The first batch of a query whose state comes from elsewhere. It only brings the state into Aion's store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark import TaskContext

from aion.spark.stateful_child import ROWS, packed_rows
from aion.spark.stateful_config import StatefulConfig
from aion.spark.stateful_root import StatefulRoot
from aion.stateful.restore import Declaration, Declaring

if TYPE_CHECKING:
    from aion.spark.stateful_work import StatefulTask


@dataclass(frozen=True, kw_only=True)
class Seed:
    """What is brought. ``batch``: after this batch of the query; the versions are named by it.

    ``watermark_ms``: the watermark of that batch.
    """

    variables: tuple[Declaration, ...]
    batch: int
    watermark_ms: int


class SeedRoot(StatefulRoot):
    """Leaves a shard as if the user's processor had processed all batches up to the last one.

    Its initial state is rows as :func:`aion.stateful.restore.restored_keys` reads them, packed by the child. Its input
    is one empty row for each shard, which comes after them.
    """

    def __init__(self, config: StatefulConfig, seed: Seed) -> None:
        super().__init__(config, Declaring(seed.variables))
        self._seed = seed
        self._packed: defaultdict[int, list[bytes]] = defaultdict(list)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        # pyspark gives frames of initial state other names, if the columns' names begin with an underscore.
        found = initialState.iloc[:, -1] if self._stateful.pandas else [initialState[ROWS]]
        self._packed[int(key[0])] += list(found)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        for _ in rows:
            pass
        with self._failing_cleanly():
            shard = int(key[0])
            work = self._open(shard, timerValues)
            work.restore(self._packed.pop(shard, []), self._seed.variables)
            self._commit(shard, timerValues)
        return iter(())

    def _make_task(self) -> StatefulTask:
        task = super()._make_task()
        task.batch = self._seed.batch
        return task

    def _now(self, times: Any) -> int:
        return self._seed.watermark_ms if self._stateful.time_mode == "eventtime" else super()._now(times)


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
