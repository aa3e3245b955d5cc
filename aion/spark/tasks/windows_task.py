"""Windows in a task of their root: blocks come from the child, and panes go to Spark as frames."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark import TaskContext

from aion.base.hashing import ShardOfKeys
from aion.config import Policy
from aion.core.ingest.builder import BlockBuilder, Flagged, ShardBlock
from aion.core.ingest.encoding import decode
from aion.core.ingest.fragments import Defragmenter
from aion.core.ingest.grouped import Grouped
from aion.core.ingest.packed import is_packed, unpacked
from aion.core.life.lifecycle import EXECUTED
from aion.core.query.plan import Plan
from aion.core.slicing.grid import FLAGGED_SLICES
from aion.execute.assembly import hand_over_bytes, make_builder, make_contents
from aion.execute.record.recorder import Recorder
from aion.execute.record.trace import Definition
from aion.execute.windows import Windows
from aion.spark.session.counting import COUNTED, COUNTS
from aion.spark.session.group_counter import GroupCounter
from aion.spark.session.query_settings import CHAINED
from aion.spark.tasks.frames import frames_of
from aion.spark.tasks.hand_over import BatchFolder
from aion.spark.tasks.root_config import RootConfig
from aion.spark.tasks.running import shows_all
from aion.spark.tasks.shards import ids_here
from aion.spark.tasks.tenants import Batch, Tenants
from aion.spark.tasks.zones import plan_here, record_rules, shard_plan
from state_backends.format.block import Block
from state_backends.server.client import RemoteAttempt
from state_backends.store.codec_pool import CodecPool


class CountingWindows(Windows):
    """Windows of a shard that end a batch with rows of numbers.

    A stateful processor in Python can only yield rows. :func:`aion.spark.start.progress.observed` takes these out
    again. A shard in which no number has grown yields none, because a frame with a single row has a cost of its own.

    ``ends``: the batch may be the last one of its run, and so executes the late windows that have events, whatever
    their triggers wait for (:mod:`aion.spark.start.run_ends`).
    """

    def __init__(self, *arguments: Any, ends: bool, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._ends = ends
        self._before = self._counts()

    def end_batch(self, *, ends_run: bool = False, batch_follows: bool | None = None) -> Iterator[pa.RecordBatch]:
        yield from super().end_batch(ends_run=ends_run or self._ends, batch_follows=batch_follows)
        before, self._before = self._before, self._counts()
        grown = {name: n - before[name] for name, n in self._before.items() if n > before[name]}
        if grown:
            schema, n = self.plan.result_schema, len(grown)
            columns = {"kind": [COUNTED] * n, "reason": [*grown], "events": [*grown.values()]}
            yield pa.record_batch([pa.array(columns.get(f.name, [None] * n), f.type) for f in schema], schema=schema)

    def _counts(self) -> dict[str, int]:
        counters, conformal = self.operator.counters, self._bound.conformal
        judged = (0, 0) if conformal is None else (conformal.late, conformal.missed)
        stale = counters.staleness.missed_between_looks + counters.staleness.missed_otherwise
        executions = [counters.executions[kind] for kind in EXECUTED]
        return dict(zip(COUNTS, (*executions, stale, *judged), strict=True))


class WindowsTenants(Tenants):
    """See :class:`aion.spark.tasks.tenants.Tenants`."""

    def __init__(self, config: RootConfig, policy: Policy) -> None:
        self._config, self._policy = config, policy
        self._shards = len(ids_here(config.name, config.ids))
        self._plan = plan = plan_here(config.plan, config.name)
        self.definition = plan.definition
        self.store = {"windows": plan.windows.values(), "blocking": plan.blocking}
        together = policy.lateness.per == "query" and self._shards > 1
        self.asks = {"others": together, "disk_times": config.trace_folder is not None}
        self.rows_first = config.rows_first
        record_rules(plan, config.name)
        self._codec = CodecPool(policy.io.codec_threads)
        self._context = TaskContext.get()
        if self._context is not None and self._context.getLocalProperty(CHAINED) is not None:
            execution = policy.execution.model_copy(update={"late_share": None})
            self._policy = policy.model_copy(update={"execution": execution})

    def open(
        self, attempt: RemoteAttempt, batch: Batch
    ) -> tuple[Windows, Callable[[Iterable[pd.DataFrame]], Iterator[list[Block]]]]:
        config = self._config
        plan = shard_plan(self._plan, attempt.snapshot, config.name)
        windows = CountingWindows(
            plan,
            self._policy,
            attempt,
            attempt.snapshot,
            make_contents(plan, self._codec, self._policy),
            shards=self._shards,
            others=attempt.others,
            learnt=attempt.learnt,
            delay_us=config.watermark_delay_us,
            ends=self._context is not None and shows_all(self._context, batch.number),
        )
        if config.trace_folder is not None:
            recorder = Recorder(Path(config.trace_folder), Definition.of(plan, commits=True), batch.shard)
            recorder.begin(batch.number, windows.operator.watermark.at_us)
            windows.record(recorder)
            staged, written = attempt.disk_times
            for size_bytes, seconds, waited_s in staged:
                recorder.staged(size_bytes, seconds, waited_s)
            for size_bytes, seconds in written:
                recorder.written(size_bytes, seconds)
        if attempt.rebuilt and (active := windows.operator.active_slices()):
            # Bring back to memory, behind the I/O of this batch, what was there before.
            attempt.prestage(active)

        def blocks(rows: Iterable[pd.DataFrame]) -> Iterator[list[Block]]:
            parts, groups = Defragmenter(), None
            for frame in rows:
                sent = [*filter(len, frame["block"])]
                # All rows of a batch come in one way, which its plan decides.
                if sent and is_packed(sent[0]):
                    groups = groups or _Groups(
                        plan, make_builder(plan, self._policy, self._codec, ShardOfKeys((batch.shard,))), config.counter
                    )
                    yield from groups.blocks(sent)
                elif arrived := [attempt.mapped(block) for block in parts.blocks(sent)]:
                    yield arrived
            parts.end()
            if groups is not None:
                yield from groups.finish()

        def of_events(rows: Iterable[pd.DataFrame]) -> Iterator[list[Block]]:
            """Takes the sent blocks apart, and makes blocks of the events that have not come before."""
            builder = make_builder(plan, self._policy, self._codec, None)
            for sent in blocks(rows):
                for why, some in groupby(sorted(sent, key=_why), _why):
                    events = pa.concat_batches([decode(block, plan.sent.block_schema) for block in some])
                    fresh = events if why else windows.fresh(events)
                    n = fresh.num_rows
                    shards = pa.array(np.full(n, batch.shard, np.int32))
                    flagged = Flagged(np.ones(n, np.bool_), why) if why else None
                    yield from _listed(builder.add(fresh, shards, flagged))
            yield from _listed(builder.finish())

        return windows, of_events if plan.unique else blocks

    def results(self, results: Iterator[pa.RecordBatch]) -> Iterator[pd.DataFrame]:
        return frames_of(results)

    def committed(self) -> None:
        if hand_over_bytes(self._config.plan, self._policy) is not None:
            BatchFolder(self._config.state_dir, self._config.name).sweep()

    def close(self) -> None:
        self._codec.close()


class _Groups:
    """Makes blocks of rows of groups that have come without a child (:mod:`aion.core.ingest.packed`)."""

    def __init__(self, plan: Plan, builder: BlockBuilder, counter: GroupCounter | None) -> None:
        self._grouped, self._builder = Grouped(plan), builder
        self._types = [each.type for each in (*self._grouped.groups, *self._grouped.aggregates)]
        self._count = iter if counter is None else counter.of

    def blocks(self, rows: Sequence[bytes]) -> Iterator[list[Block]]:
        yield from _listed(self._count(self._grouped.blocks(unpacked(rows, self._types), self._builder)))

    def finish(self) -> Iterator[list[Block]]:
        yield from _listed(self._count(self._builder.finish()))


def _why(block: Block) -> int:
    """The slice that says why no window takes the events. 0: windows may take them."""
    return block.header.slice_us if block.header.slice_us in FLAGGED_SLICES else 0


def _listed(made: Iterable[ShardBlock]) -> Iterator[list[Block]]:
    if blocks := [of_shard.block for of_shard in made]:
        yield blocks
