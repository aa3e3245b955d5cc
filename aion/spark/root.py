"""The root of windows: it opens a shard, appends blocks, executes windows and commits.

This module imports :mod:`aion.spark.work` when the first shard comes: without that import a query starts in half the
time (:mod:`aion.spark.shard_root`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from aion.spark.root_config import RootConfig
from aion.spark.shard_root import ShardRoot

if TYPE_CHECKING:
    import pandas as pd

    from aion.spark.work import ShardWork


class Root(ShardRoot):
    """See :class:`ShardRoot`."""

    def __init__(self, config: RootConfig) -> None:
        super().__init__(config)
        self._root = config

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        with self._failing_cleanly():
            watermark_ms = timerValues.getCurrentWatermarkInMs()
            work, timer_ms = self._open(int(key[0]))
            yield from work.advance(watermark_ms)
            for frame in rows:
                yield from work.arrive(frame["block"])
            yield from work.end_batch()
            self._leave(work, timer_ms, watermark_ms)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        with self._failing_cleanly():
            shard = int(key[0])
            if shard not in self._work:
                watermark_ms = timerValues.getCurrentWatermarkInMs()
                work, timer_ms = self._open(shard)
                yield from work.advance(watermark_ms)
                yield from work.end_batch()
                self._leave(work, timer_ms, watermark_ms)

    def _open(self, shard: int) -> tuple[ShardWork, int | None]:
        """Opens a shard. Returns its work in this batch, and its timer."""
        if self._task is None:
            from aion.spark.work import RootTask

            self._task = RootTask(self._root)
        token, timer_ms = self._state.get() or (None, None)
        self._work[shard] = work = self._task.work(shard, token)
        return work, timer_ms
