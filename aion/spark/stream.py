"""``windowed``: turns a streaming DataFrame of events into a streaming DataFrame of panes."""

from __future__ import annotations

import re
import uuid
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack
from urllib.parse import unquote, urlsplit

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from aion.config import SPARK_PREFIX, Policy, policy_to_text, resolve
from aion.config.layers import Source as PolicySource
from aion.config.values import location
from aion.core.ingest.fragments import fragment_bytes
from aion.core.ingest.hashing import hashed_as
from aion.core.operator.actions import PaneKind
from aion.core.plan import DROPPED_COLUMNS, Plan
from aion.core.spec import Keywords, Spec, spec_of
from aion.core.topology import MergingDecision, Tree, levels_for, merging_strategies
from aion.errors import ConfigError
from aion.execute.assembly import block_settings, hand_over_bytes
from aion.execute.trace import Definition
from aion.installation import require_extra
from aion.spark import starts
from aion.spark.child import ChildWork
from aion.spark.explain import explain_plan
from aion.spark.files import Files
from aion.spark.hand_over import HandOverConfig
from aion.spark.levels import merged
from aion.spark.root import Root
from aion.spark.root_config import RootConfig
from aion.spark.session import REQUIRED
from aion.spark.shards import shard_ids
from aion.spark.sources import Rows, Source
from aion.spark.types import arrow_schema

_WORKER_LIMIT = "spark.executor.pyspark.memory"


def windowed(df: DataFrame | Files, spec: Spec | None = None, /, **definition: Unpack[Keywords]) -> DataFrame:
    """Aggregates a stream by windows, including late events.

    ``df``: a streaming DataFrame with a watermark (``withWatermark``), on the event time column or on any other column;
    or files of :func:`read_files`. The keywords are the fields of :class:`aion.Spec`: ``windows``, ``time``, ``key``,
    ``aggregates`` or ``apply`` and ``schema``, ``policy``, ``name`` and so on. You can also pass a ``spec``; keywords
    override it. :func:`explain` describes what runs where.

    The result has the key columns, ``window``, ``window_start``, ``window_end``, the aggregates, ``pane``, ``kind``
    (on_time, late, final, retracted, dropped), ``events`` and ``late_events``. Dropped rows also have ``event_time``,
    ``lateness_us``, ``reason`` and ``event``: see :func:`panes` and :func:`dropped`. Later panes of a window replace
    earlier ones. Raises WatermarkError, SchemaError, WindowError, PolicyError, ConfigError, MissingExtra.
    """
    source, asked = _source(df), spec_of("windowed", spec, definition)
    spark = source.session
    query = _resolve(source, asked)
    plan, resolved, tree = query.plan, query.policy, query.tree
    limit_bytes = fragment_bytes(int(_conf(spark, "spark.sql.execution.arrow.maxRecordsPerBatch")))
    state_dir = _state_dir(spark, resolved)
    starts.watch(spark)
    hand_over = _hand_over(plan, resolved, state_dir, asked.name)
    work = ChildWork(plan, block_settings(resolved), tree, limit_bytes, asked.name, hand_over)
    blocks = merged(source.children(work), work)
    root = Root(
        RootConfig(
            plan=plan,
            policy=policy_to_text(resolved),
            name=asked.name,
            uid=uuid.uuid4().hex,
            application=spark.sparkContext.applicationId,
            state_dir=state_dir,
            ids=tree.shards,
            key_types=tuple(str(hashed_as(type_)) for type_ in work.key_types),
            retain_versions=int(_conf(spark, "spark.sql.streaming.minBatchesToRetain")),
            watermark_delay_us=source.delay_us(asked.time),
            task_failures=_task_failures(spark),
            record=None if asked.record is None else str(Path(asked.record).resolve()),
        )
    )
    return blocks.groupBy("shard").transformWithStateInPandas(
        root, from_arrow_schema(plan.result_schema), "Append", "EventTime"
    )


def explain(df: DataFrame | Files, spec: Spec | None = None, /, **definition: Unpack[Keywords]) -> str:
    """Describes in words what :func:`windowed` would do with the same arguments: what runs where, and what is sent.

    Starts nothing. Raises the same errors as :func:`windowed`.
    """
    source = _source(df)
    query = _resolve(source, spec_of("explain", spec, definition))
    levels = query.policy.distribution.merge_levels
    reading = source.reading(query.plan)
    return explain_plan(
        query.plan,
        query.policy,
        query.tree,
        query.decisions,
        asked_levels=levels,
        reading=reading,
        hand_over_bytes=hand_over_bytes(query.plan, query.policy),
    )


@dataclass(frozen=True)
class _Query:
    """The arguments of :func:`windowed`, resolved for this session."""

    plan: Plan
    policy: Policy
    tree: Tree
    decisions: dict[str, MergingDecision]


def _source(stream: DataFrame | Files) -> Source:
    return stream if isinstance(stream, Files) else Rows(stream)


def _resolve(source: Source, spec: Spec) -> _Query:
    if isinstance(spec.schema, StructType):
        spec = replace(spec, schema=arrow_schema(spec.schema))
    plan = spec.plan(source.schema)
    if spec.record is not None:
        Definition.of(plan, commits=True)  # raises now if these windows cannot be recorded
    keyword = {"distribution_merge_levels": spec.merge_levels, "distribution_fan_in": spec.fan_in}
    resolved = _policy(source.session, spec.policy, {k: v for k, v in keyword.items() if v is not None})
    if resolved.metrics.port is not None:
        require_extra("metrics", "metrics.port")
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}", spec.name):
        raise ConfigError(
            f"name: {spec.name!r} becomes a folder name; use only letters, digits, '_', '-' and '.', and do not start "
            "with '.'"
        )
    if spec.keys_disjoint and not plan.key:
        raise ConfigError("keys_disjoint: it requires a key; it means that each key is in one source partition only")
    decisions = merging_strategies(plan.windows, keys_disjoint=spec.keys_disjoint, splittable=plan.layout is not None)
    return _Query(plan, resolved, _tree(source.session, resolved, list(decisions.values())), decisions)


def _tree(spark: SparkSession, policy: Policy, decisions: Sequence[MergingDecision]) -> Tree:
    partitions = int(_conf(spark, "spark.sql.shuffle.partitions"))
    shards = partitions if policy.state.shards == "auto" else int(policy.state.shards)
    settings = policy.distribution
    # The number of source partitions is known only when a batch begins, but the levels are planned before that.
    automatic = max(spark.sparkContext.defaultParallelism, partitions)
    children = automatic if settings.children == "auto" else settings.children
    return Tree(
        levels=levels_for(settings.merge_levels, decisions),
        fan_in=settings.fan_in,
        children=children,
        shards=tuple(shard_ids(shards)),
        root_tasks=partitions,
    )


def panes(df: DataFrame) -> DataFrame:
    """The panes in a result of :func:`windowed`, without the columns that only dropped rows use."""
    return df.where(F.col("kind") != PaneKind.DROPPED.value).drop(*DROPPED_COLUMNS)


def dropped(df: DataFrame) -> DataFrame:
    """The dropped rows in a result of :func:`windowed`: events that came too late or had no event time."""
    return df.where(F.col("kind") == PaneKind.DROPPED.value).drop("pane")


def _hand_over(plan: Plan, policy: Policy, state_dir: str, name: str) -> HandOverConfig | None:
    """How children hand over kept events. None if they send all blocks as rows."""
    limit_bytes = hand_over_bytes(plan, policy)
    return None if limit_bytes is None else HandOverConfig(state_dir, name, limit_bytes)


def _task_failures(spark: SparkSession) -> int:
    """How often a task may fail. Local mode ignores the setting: the master's URL has the number, by default 1."""
    local = re.fullmatch(r"local(\[[^,\]]*(?:,\s*(\d+)\s*)?\])?", spark.sparkContext.master)
    if local is not None:
        return int(local[2] or 1)
    return int(spark.conf.get("spark.task.maxFailures", "4") or 4)


def _policy(spark: SparkSession, policy: PolicySource | None, keyword: Mapping[str, object]) -> Policy:
    for key, value in REQUIRED.items():
        if _conf(spark, key) != value:
            raise ConfigError(
                f"{key} is {_conf(spark, key)!r} and must be {value!r}; "
                "build the session with aion.configure(SparkSession.builder...)"
            )
    if spark.sparkContext.getConf().contains(_WORKER_LIMIT):
        warnings.warn(
            f"{_WORKER_LIMIT} is set: Spark turns it into a limit on the address space of every Python worker. The "
            "state server is started by one of them and inherits the limit. Leave it unset (docs/operating.md, Sizes)",
            stacklevel=4,
        )
    # Read the session, not the context: getOrCreate sets its options on a session that already runs.
    conf = {key: value for key, value in spark.conf.getAll.items() if key.startswith(SPARK_PREFIX)}
    return resolve(policy, keyword=keyword, spark_conf=conf)


def _conf(spark: SparkSession, key: str) -> str:
    value: str = spark.conf.get(key)
    return value


def _state_dir(spark: SparkSession, policy: Policy) -> str:
    """The place of the versions: the policy's folder, or a folder beside the checkpoints, or in the working folder.

    A path or a URI. The state servers connect to it with the credentials that they find on their hosts. Raises
    ConfigError if the executors run on other hosts and no place is set that all of them can reach.
    """
    place = policy.state.dir
    if place is None:
        checkpoints = spark.conf.get("spark.sql.streaming.checkpointLocation", None)
        master = spark.sparkContext.master
        if not master.startswith("local") and ":/" not in (checkpoints or ""):
            raise ConfigError(
                f"state.dir: it is not set, and on the cluster {master} each executor would keep its own state, "
                "which the others could not find; set spark.aion.state.dir to a folder that all executors mount, or "
                "to a URI such as s3://bucket/folder"
            )
        try:
            place = location(f"{checkpoints.rstrip('/')}/aion-state") if checkpoints else "aion-state"
        except ConfigError as error:
            raise ConfigError(
                f"state.dir: it is not set, and the state cannot be stored beside the checkpoints: {error}; "
                "set spark.aion.state.dir"
            ) from None
    if place.startswith("file:"):
        place = unquote(urlsplit(place).path)
    return place if "://" in place else str(Path(place).resolve())
