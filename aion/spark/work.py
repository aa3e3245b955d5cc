"""The work of a root's task: for each of its shards one attempt of one batch, through the host's state server."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path

import pandas as pd
import pyarrow as pa

from aion.config import Policy, policy_from_text
from aion.core.ingest.fragments import Defragmenter
from aion.core.operator.operator import Operator
from aion.core.slicing.grid import NO_SLICE
from aion.execute.assembly import hand_over_bytes, make_bound, make_executor, make_operator, predicts, store_config
from aion.execute.trace import Definition, Recorder
from aion.spark.frames import to_frame
from aion.spark.hand_over import BatchFolder
from aion.spark.root_config import RootConfig
from aion.spark.task import ShardTask, in_background
from aion.spark.zones import record_rules, shard_plan
from state_backends.server.client import RemoteAttempt
from state_backends.store.codec_pool import CodecPool
from state_backends.thresholds import threshold

log = logging.getLogger(__name__)
FRAME_ROWS = threshold(1024)
FRAME_BYTES = threshold(1 << 20, 256)


class RootTask(ShardTask):
    """One task of the root, and what its shards share: see ShardTask, and codec threads. Close it."""

    def __init__(self, config: RootConfig) -> None:
        policy = policy_from_text(config.policy)
        store = store_config(
            policy,
            windows=config.plan.windows.values(),
            blocking=config.plan.blocking,
            retain_versions=config.retain_versions,
        )
        super().__init__(config, policy, store, config.plan.definition)
        self._root = config
        record_rules(config.plan, config.name)
        self._codec = CodecPool(policy.io.codec_threads)
        self._hands_over = hand_over_bytes(config.plan, policy) is not None

    def work(self, shard: int, token: str | None) -> ShardWork:
        """Starts an attempt on a shard, at the version ``token``. None: the shard has no version yet."""
        together = self.policy.lateness.per == "query" and len(self._root.ids) > 1
        attempt = self.open(shard, token, others=together, moved=self._root.record is not None)
        return ShardWork(self._root, self.policy, attempt, self._codec, shard, self.batch)

    def committed(self) -> None:
        """All shards of the task have committed."""
        if self._hands_over:
            BatchFolder(self._root.state_dir, self._root.name).sweep()

    def close(self) -> None:
        self._codec.close()


class ShardWork:
    """One attempt of one batch on one shard."""

    def __init__(
        self,
        config: RootConfig,
        policy: Policy,
        attempt: RemoteAttempt,
        codec: CodecPool,
        shard: int,
        batch: int,
    ) -> None:
        self.attempt = attempt
        self._commit: Future[None] | None = None
        plan = shard_plan(config.plan, attempt.snapshot, config.name)
        self.bound = make_bound(plan, policy, attempt.snapshot, shards=len(config.ids))
        if self.bound.together:
            self.bound.receive(*attempt.others)
        self.operator: Operator = make_operator(plan, policy, attempt.snapshot, self.bound)
        self.executor = make_executor(plan, self.operator, attempt, codec, policy)
        self._recorder: Recorder | None = None
        if config.record is not None:
            self._recorder = Recorder(Path(config.record), Definition.of(config.plan, commits=True), shard)
            self._recorder.begin(batch, self.operator.watermark.at_us)
            self.executor.recorder = self._recorder
            staged, written = attempt.moved
            for size_bytes, seconds, waited_s in staged:
                self._recorder.staged(size_bytes, seconds, waited_s)
            for size_bytes, seconds in written:
                self._recorder.written(size_bytes, seconds)
        self._predicts = predicts(policy)
        if attempt.rebuilt and (active := self.operator.active_slices()):
            # Bring back to memory, behind the I/O of this batch, what was there before.
            attempt.prestage(active)
        self._delay_us = config.watermark_delay_us
        self._latest_us: int | None = None
        self._parts = Defragmenter()
        self._rows: list[pa.RecordBatch] = []

    def advance(self, watermark_ms: int) -> Iterator[pd.DataFrame]:
        # Spark says 0 while there is no watermark.
        if watermark_ms > 0:
            at_us, to_us = self.operator.watermark.at_us, watermark_ms * 1000
            if self.bound.together and at_us != to_us and self.bound.asks(at_us):
                self.bound.learn(*self.attempt.learnt())
            yield from self._frames(self.executor.advance(to_us))

    def arrive(self, rows: Iterable[bytes]) -> Iterator[pd.DataFrame]:
        blocks = [self.attempt.mapped(block) for block in self._parts.blocks(rows)]
        if not blocks:
            return
        times = [b.header.max_us for b in blocks if b.header.slice_us != NO_SLICE]
        self._latest_us = max([*times, self._latest_us] if self._latest_us is not None else times, default=None)
        yield from self._frames(self.executor.arrive(blocks))

    def end_batch(self) -> Iterator[pd.DataFrame]:
        self._parts.end()
        yield from self._frames(self.executor.end_batch())
        if self._rows:
            yield self._frame()

    @property
    def makes(self) -> str:
        """The token of the version that the commit makes."""
        return self.attempt.makes

    def begin_commit(self) -> None:
        """Commits in another thread. Meanwhile the task goes on with what does not need this shard."""
        next_slices = self._next_slices()
        self.executor.save()
        if self._recorder is not None:
            try:
                self._recorder.write()
            except OSError as error:
                # A query does not fail because its trace cannot be written.
                log.warning("a batch was not recorded: %s", error)
        made = self.operator.snapshot(), next_slices, self.executor.executions
        self._commit = in_background(self.attempt.commit, *made)

    def committed(self) -> None:
        """Waits for the commit. Raises what it raised."""
        assert self._commit is not None
        self._commit.result()

    def abort(self) -> None:
        """Undoes the attempt. If it has committed, nobody will name its version."""
        if self._commit is not None:
            wait([self._commit])
        self.attempt.abort()

    def _next_slices(self) -> tuple[int, ...]:
        """Returns the slices that the next batch will read. Its watermark follows from the events of this batch.

        See docs/operating.md.
        """
        if not self._predicts:
            return ()
        expected = [self.operator.watermark.expected_next()]
        if self._delay_us is not None and self._latest_us is not None:
            expected.append(self._latest_us - self._delay_us)
        return self.executor.due_next(max((e for e in expected if e is not None), default=None))

    @property
    def due_ms(self) -> int | None:
        """The next watermark that makes something due, in milliseconds."""
        due = self.operator.next_due_us
        return None if due is None else -(-due // 1000)

    def _frames(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pd.DataFrame]:
        """Yields rows as frames. Few rows wait for more, since a frame has a cost of its own, in pandas and in
        pyspark.
        """
        for batch in batches:
            if batch.num_rows:
                self._rows.append(batch)
                if sum(waiting.num_rows for waiting in self._rows) >= FRAME_ROWS or batch.nbytes >= FRAME_BYTES:
                    yield self._frame()

    def _frame(self) -> pd.DataFrame:
        batches, self._rows = self._rows, []
        return to_frame(batches[0] if len(batches) == 1 else pa.concat_batches(batches))
