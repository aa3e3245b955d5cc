"""``windowed``: turns a streaming DataFrame of events into a streaming DataFrame of panes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from aion.base.time import format_duration
from aion.config import Policy
from aion.core.ingest.fragments import fragment_bytes
from aion.core.life.actions import PaneKind
from aion.core.query.columns import DROPPED_COLUMNS, NOT_OF_DROPPED, OLD
from aion.core.query.functions import Apply
from aion.core.query.plan import Plan
from aion.core.topology import MergingDecision, Tree, levels_for, merging_strategies
from aion.errors import SchemaError
from aion.execute.assembly import block_settings, check_overlap, hand_over_bytes
from aion.execute.evolving import windows_go_on
from aion.execute.record.trace import recordable, trace_folder
from aion.installation import require_extra
from aion.spark.api.chained import described, source_of
from aion.spark.api.explain import explain_plan
from aion.spark.api.files import Files
from aion.spark.api.group_by import stock_method
from aion.spark.api.sources import Source
from aion.spark.session.sessions import parallelism
from aion.spark.session.settings import (
    conf,
    of_tasks,
    place_of_state,
    resolved_policy,
    rows_at_once,
    shard_count,
    shards_in_words,
)
from aion.spark.session.types import arrow_schema, check_case
from aion.spark.start import checks, listener
from aion.spark.start.kept_state import StartedOperator
from aion.spark.start.progress import observed
from aion.spark.tasks.child import ChildWork
from aion.spark.tasks.hand_over import HandOverConfig
from aion.spark.tasks.levels import merged
from aion.spark.tasks.root import Root
from aion.spark.tasks.root_config import RootConfig
from aion.spark.tasks.shards import shard_ids
from aion.spark.tasks.windows import WindowsDefinition
from aion.spec import Spec, of_spec

log = logging.getLogger(__name__)


@of_spec
def windowed(df: DataFrame | Files, spec: Spec) -> DataFrame:
    """Aggregates a stream by windows, including late events. For example::

        panes = aion.windowed(
            events.withWatermark("ts", "20 seconds"),
            key="segment",
            windows=aion.Tumbling("1 minute"),
            aggregates={"cars": A.count(), "speed": A.mean("speed")},
            bound="2 hours",
        )

    ``df``: a streaming DataFrame with a watermark (``withWatermark``), on the event time column or on any other column;
    or files of :func:`read_files`. The keywords are the fields of :class:`aion.Spec`, which says what they mean. You
    can also pass a ``spec``; keywords override it. :func:`explain` describes what runs where.

    The result has the key columns, ``window``, ``window_start``, ``window_end``, the aggregates, ``pane``, ``kind``
    (early, on_time, late, final, retracted, dropped), ``events``, ``late_events``, ``closes_at``, the watermark from
    which on the row cannot change, and ``pane_seq``, which orders panes. Dropped rows also have ``event_time``,
    ``lateness_us``, ``reason`` and ``event``: see :func:`panes` and :func:`dropped`. Later panes of a window replace
    earlier ones. Spark's progress of a batch has their numbers in ``observedMetrics`` (docs/operate/metrics.md). Raises
    WatermarkError, SchemaError, WindowError, PolicyError, ConfigError, MissingExtra.
    """
    source = source_of("windowed", df, spec)
    spec = source.timed(spec)
    spark = source.session
    query = _resolve(source, spec)
    plan, resolved, tree = query.plan, query.policy, query.tree
    limit_bytes = fragment_bytes(rows_at_once(spark))
    listener.watch(spark)
    hand_over = _hand_over(plan, resolved, place_of_state(spark, resolved), spec.name)
    work = ChildWork(plan.sent, block_settings(resolved), tree, limit_bytes, spec.name, hand_over)
    rows, counter = source.children(work)
    blocks = merged(rows, work)
    config = RootConfig(
        **of_tasks(spark, resolved, spec.name, tree.shards, work.key_types),
        plan=plan,
        watermark_delay_us=source.delay_us(spec.time_column),
        rows_first=source.rows_first,
        counter=counter,
        trace_folder=None if resolved.trace.folder is None else trace_folder(resolved.trace.folder, spec.name),
    )
    named = spark.conf.get("spark.aion.policy", "standard") if spec.policy is None else spec.policy
    policy = named if isinstance(named, str | Path) else "of its own"
    learns = "" if resolved.lateness.coverage is None else ", until enough is known of their lateness"
    log.info(
        "windowed %r: state in %s, %s, policy %s; windows are kept for %s after their end%s",
        spec.name, config.state_dir, shards_in_words(spark, resolved, len(tree.shards)), policy,
        format_duration(resolved.lateness.initial_bound_us), learns,
    )  # fmt: skip
    result = stock_method(blocks.groupBy("shard"), "transformWithStateInPandas")(
        Root(WindowsDefinition(config)), from_arrow_schema(plan.result_schema), "Append", "EventTime"
    )
    goes_on = partial(windows_go_on, plan, resolved, spec.on_removed)
    checks.remember(result, StartedOperator(config, plan.definition, resolved.state.shards == "auto", goes_on))
    return described(observed(result, spec.name), plan, resolved, spec.name)


@of_spec
def explain(df: DataFrame | Files, spec: Spec) -> str:
    """Describes in words what :func:`windowed` would do with the same arguments: what runs where, and what is sent.

    For example::

        print(aion.explain(events, spec))

    Starts nothing. Raises the same errors as :func:`windowed`, but for those that depend on where state is kept and on
    how keys are hashed.
    """
    source = source_of("explain", df, spec)
    spec = source.timed(spec)
    query = _resolve(source, spec)
    levels = query.policy.distribution.merge_levels
    reading = source.reading(query.plan)
    drops = block_settings(query.policy).drops_bad_texts
    return explain_plan(
        query.plan,
        query.policy,
        query.tree,
        query.decisions,
        asked_levels=levels,
        reading=reading,
        before=source.before,
        clock=source.clock,
        hand_over_bytes=hand_over_bytes(query.plan, query.policy),
        why_in_python=source.why_in_python(query.plan.sent, drops_bad_texts=drops),
    )


@dataclass(frozen=True)
class _Query:
    """The arguments of :func:`windowed`, resolved for this session."""

    plan: Plan
    policy: Policy
    tree: Tree
    decisions: dict[str, MergingDecision]


def _resolve(source: Source, spec: Spec) -> _Query:
    if spec.apply is not None:
        spec = replace(spec, apply=_applied(spec.apply, source, spec.time_column))
    plan = source.plan(spec)
    check_case(source.session, plan.result_schema.names)
    resolved = source.policy(spec, resolved_policy(source.session, spec.policy, spec.policy_overrides))
    check_overlap(spec.windows, resolved)
    if resolved.metrics.port is not None:
        require_extra("metrics", "metrics.port")
    decisions = merging_strategies(
        plan.windows,
        keys_disjoint=resolved.distribution.keys_disjoint and bool(plan.key),
        splittable=plan.sent.layout is not None,
    )
    if resolved.trace.folder is not None:
        recordable(plan.windows)
    return _Query(plan, resolved, _tree(source.session, resolved, list(decisions.values())), decisions)


def _applied(apply: Apply, source: Source, time: str) -> Apply:
    """Returns the function of a user with Arrow's types, and without the columns that it does not need."""
    if isinstance(apply.schema, StructType):
        apply = replace(apply, schema=arrow_schema(apply.schema))
    if apply.columns is None and (beside := source.marked - {time}):
        # Spark needs it up to here, so a user cannot drop it. It would be kept with each event.
        apply = replace(apply, columns=[name for name in source.schema.names if name not in beside])
    return apply


def _tree(spark: SparkSession, policy: Policy, decisions: Sequence[MergingDecision]) -> Tree:
    partitions = int(conf(spark, "spark.sql.shuffle.partitions"))
    settings = policy.distribution
    # The number of source partitions is known only when a batch begins, but the levels are planned before that.
    automatic = max(parallelism(spark), partitions)
    children = automatic if settings.children == "auto" else settings.children
    return Tree(
        levels=levels_for(settings.merge_levels, decisions),
        fan_in=settings.fan_in,
        children=children,
        shards=tuple(shard_ids(shard_count(spark, policy))),
        root_tasks=partitions,
    )


def panes(df: DataFrame) -> DataFrame:
    """Returns the panes in a result of :func:`windowed`, without the columns that only dropped rows use.

    For example::

        aion.panes(result).writeStream.format("parquet").option("path", "panes/")

    Raises SchemaError for any other DataFrame.
    """
    _check_result("panes", df)
    return df.where(F.col("kind") != PaneKind.DROPPED.value).drop(*DROPPED_COLUMNS)


def dropped(df: DataFrame) -> DataFrame:
    """Returns the dropped rows in a result of :func:`windowed`: events that came too late or had no event time.

    For example::

        aion.dropped(result).select("reason", "lateness_us", "event")

    Raises SchemaError for any other DataFrame.
    """
    _check_result("dropped", df)
    return df.where(F.col("kind") == PaneKind.DROPPED.value).drop(*NOT_OF_DROPPED)


def changes(df: DataFrame) -> DataFrame:
    """Returns what each batch changed, from a result of :func:`windowed` with ``emit="changes"``.

    For example::

        aion.changes(aion.windowed(events, spec, emit="changes"))

    A row is the newest pane of a key and window in its batch: its values, and in ``old_`` columns those that were shown
    before it. These are null for a window that is new; the others are null for one that was taken back
    (``kind = retracted``). A pane with the same values as before is no change. Raises SchemaError for any other
    DataFrame.
    """
    _check_result("changes", df)
    if not any(name.startswith(OLD) for name in df.columns):
        raise SchemaError("changes: the result has no old values; give aion.windowed(..., emit='changes')")
    return panes(df)


def _check_result(caller: str, df: DataFrame) -> None:
    if not isinstance(df, DataFrame) or "kind" not in df.columns:
        raise SchemaError(f"{caller}: a result of aion.windowed is needed, with its column 'kind', not {df!r}")


def _hand_over(plan: Plan, policy: Policy, state_dir: str, name: str) -> HandOverConfig | None:
    """Returns how children hand over kept events. None if they send all blocks as rows."""
    limit_bytes = hand_over_bytes(plan, policy)
    return None if limit_bytes is None else HandOverConfig(state_dir, name, limit_bytes)
