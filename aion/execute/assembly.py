"""What a policy means in objects: the operator and the store that it describes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from aion.config import Policy, Share
from aion.core.compaction.blocks import BlockCompaction
from aion.core.ingest.block import Codec, Compression
from aion.core.ingest.builder import BlockBuilder
from aion.core.ingest.hashing import ShardOfKeys
from aion.core.lateness.bound import AdaptiveBound, Expected
from aion.core.operator.keyed.shapes import shape_of
from aion.core.operator.keyed.shard import KeyedPart, KeyedShard
from aion.core.operator.keyed.windows import KeyedWindows
from aion.core.operator.operator import SNAPSHOT_VERSION, Operator
from aion.core.plan import Plan
from aion.core.slicing.grid import slices_from_json
from aion.core.trigger.triggers import (
    CountTrigger,
    EveryBatchTrigger,
    Forecast,
    IntervalTrigger,
    StalenessTrigger,
    Trigger,
)
from aion.core.windows import Definition, Periodic
from aion.errors import FormatError
from aion.execute.block_compactor import BlockCompactor, compaction_bytes
from aion.execute.executor import Executor
from policies.cleanup import Cleanup
from state_backends.store.backends import StoreConfig
from state_backends.store.codec_pool import CodecPool
from state_backends.store.session import ShardSession


def make_operator(
    plan: Plan, policy: Policy, snapshot: Mapping[str, Any] | None, bound: AdaptiveBound | None = None
) -> Operator:
    """The operator of one shard, new or as it was at ``snapshot``. Raises FormatError for a newer Aion's.

    ``bound``: of :func:`make_bound`, for those who have more to tell it than the operator does.
    """
    if snapshot is not None and snapshot["version"] != SNAPSHOT_VERSION:
        raise FormatError(
            f"the operator's snapshot was written in format {snapshot['version']}; "
            f"this Aion reads format {SNAPSHOT_VERSION}"
        )
    bound = make_bound(plan, policy, snapshot) if bound is None else bound
    trigger = make_trigger(policy, Expected(bound))
    staleness_bound = policy.trigger.bound if policy.trigger.kind == "staleness" else None
    numbers = sorted(number for part in plan.parts for number in part.keyed)
    known = snapshot["keyed"] if snapshot is not None else []
    before = dict(zip(numbers, known, strict=True)) if known else {}
    types = [plan.schema.field(name).type for name in plan.key]
    parts = [
        KeyedPart(
            [
                KeyedWindows(
                    number, shape_of(window), types,
                    bound=bound, trigger=trigger, staleness_bound=staleness_bound, snapshot=before.get(number),
                )
                for number, window in part.keyed.items()
            ]
        )
        for part in plan.parts
    ]  # fmt: skip
    return Operator(
        plan.grid,
        bound=bound,
        trigger=trigger,
        # Late events announce an execution. Where executions are predicted, only one in the same batch is news: blocks
        # for a later one would be in the way of what is due before.
        prestages_late=prestages(policy),
        prestages_due=predicts(policy),
        staleness_bound=staleness_bound,
        keyed=KeyedShard(parts, known),
        event_grid=None if plan.event_rows is None else plan.event_rows.grid,
        compaction=make_compaction(plan, policy, snapshot),
        snapshot=snapshot,
    )


def make_compaction(plan: Plan, policy: Policy, snapshot: Mapping[str, Any] | None) -> BlockCompaction | None:
    """What decides when blocks are compacted.

    None for kept events without a key, of which everything is read anyway; and where windows tell single events apart
    by the blocks that they are in.
    """
    if (plan.layout is None and not plan.key) or plan.by_event:
        return None
    runs = snapshot.get("runs") if snapshot is not None else None
    compaction = BlockCompaction(
        open_too=plan.layout is not None,
        limit_bytes=compaction_bytes(policy.apply.memory_bytes, Compression[policy.state.compression.upper()]),
        snapshot=runs,
    )
    if snapshot is not None and runs is None:
        compaction.leave(filter(plan.holds, slices_from_json(snapshot["slices"])), snapshot["next_seq"])
    return compaction


def make_bound(plan: Plan, policy: Policy, snapshot: Mapping[str, Any] | None, *, shards: int = 1) -> AdaptiveBound:
    """What learns how late events come, and says how long new windows are kept; ``shards``: of the query."""
    told = policy.lateness
    asked = Cleanup(
        told.initial_bound_us,
        coverage=told.coverage,
        confidence=told.confidence,
        max_bound_us=max(told.max_bound_us, told.initial_bound_us),
        max_state_bytes=told.max_state_bytes,
    )
    longest_us = max(w.size_us if isinstance(w, Periodic) else w.reach_us for w in plan.windows.values())
    known = snapshot["lateness"] if snapshot is not None else None
    return AdaptiveBound(
        asked,
        half_life_us=told.half_life_us,
        model=told.model,
        ahead_us=longest_us,
        together=told.per == "query" and shards > 1,
        snapshot=known,
    )


def make_trigger(policy: Policy, forecast: Forecast | None = None) -> Trigger:
    """What decides when a late window runs again; ``forecast``: what is known of the late events of this shard."""
    told = policy.trigger
    match told.kind:
        case "every_batch":
            return EveryBatchTrigger()
        case "interval":
            return IntervalTrigger(told.interval_us)
        case "count":
            return CountTrigger(told.count)
        case "staleness":
            bound = told.bound if told.executions is None else None
            return StalenessTrigger(bound, executions=told.executions, solver=told.solver, forecast=forecast)


def make_builder(plan: Plan, policy: Policy, pool: CodecPool, shard_of: ShardOfKeys | None) -> BlockBuilder:
    """What makes blocks of one task's events, or of one table's."""
    return BlockBuilder(
        plan,
        target_bytes=policy.blocks.target_bytes,
        compression=Compression[policy.state.compression.upper()],
        codec=Codec[policy.state.codec.upper()],
        pool=pool,
        shard_of=shard_of,
    )


def make_executor(plan: Plan, operator: Operator, session: ShardSession, codec: CodecPool, policy: Policy) -> Executor:
    """What carries out an operator's orders within what the policy allows."""
    compactor = BlockCompactor(
        plan,
        target_bytes=policy.blocks.target_bytes,
        compression=Compression[policy.state.compression.upper()],
        codec=Codec[policy.state.codec.upper()],
    )
    return Executor(
        plan,
        operator,
        session,
        codec,
        compactor,
        memory_limit_bytes=policy.apply.memory_bytes,
        spill_folder=policy.apply.spill_dir or _local_dir(),
        aggregation=policy.execution.aggregation,
    )


def _local_dir() -> str | None:
    """Spark tells its workers where its own temporary files belong; None: there is no Spark, or it said nothing."""
    told = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    return told if told and Path(told).is_dir() else None


def prestages(policy: Policy) -> bool:
    return policy.state.backend == "tiered" and policy.prestage.mode != "none"


def predicts(policy: Policy) -> bool:
    """Whether what the next batch will execute is staged in the gap before it."""
    return prestages(policy) and policy.prestage.mode == "predictive"


def store_config(
    policy: Policy, *, windows: Iterable[Definition] = (), blocking: bool = True, retain_versions: int = 100
) -> StoreConfig:
    """The part of a policy, and of an operator's definition, that the stores need, in plain values."""
    memory, destage = policy.memory, policy.destage
    share = memory.budget.percent / 100 if isinstance(memory.budget, Share) else 0.0
    arguments: dict[str, Any] = dict(destage.arguments)
    if destage.class_path is None:
        arguments = {
            "keep_fraction": destage.keep_fraction,
            "idle_after_s": destage.idle_after_us / 1e6 if destage.idle_after_us is not None else None,
            "idle_multiple": destage.idle_multiple,
            "moderate": memory.moderate,
            "resume": memory.resume,
            "scarce": memory.scarce,
            "victim": memory.victim,
        }
    return StoreConfig(
        backend=policy.state.backend,
        budget_bytes=None if isinstance(memory.budget, Share) else memory.budget,
        budget_share=share,
        bucket_limit_bytes=memory.bucket_limit_bytes,
        windows=tuple((w.size_us, w.slide_us, w.offset_us) for w in windows if isinstance(w, Periodic)),
        keep_fraction=destage.keep_fraction,
        prestages=prestages(policy),
        blocking=blocking,
        io_threads=policy.io.threads,
        rate_limit_bytes_per_s=policy.io.rate_limit_bytes_per_s,
        retain_versions=retain_versions,
        destage=arguments,
        destage_class=destage.class_path,
        prestage=dict(policy.prestage.arguments),
        prestage_class=policy.prestage.class_path,
        metrics_port=policy.metrics.port,
    )
