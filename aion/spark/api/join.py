"""``join``: joins two streams by key and time, and takes late rows."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from aion.base.hashing import can_hash, hashed_as
from aion.base.time import duration_us
from aion.config import Policy, policy_to_text
from aion.config.layers import Source as PolicySource
from aion.core.join.plan import PAIR, PAIR_TIME, SIDES, JoinPlan, Side, identity_of
from aion.core.life.actions import PaneKind
from aion.core.query.columns import DROPPED_COLUMNS, PANE_SEQ, Columns, key_names, unique_names
from aion.core.query.pane_parts import KIND, PART, SEQ, START, PanesSaid
from aion.errors import ConfigError, SchemaError, WatermarkError
from aion.spark.api.group_by import stock_method
from aion.spark.api.watermarks import HELPER, WATERMARK
from aion.spark.session import upstream
from aion.spark.session.sessions import application
from aion.spark.session.settings import conf, place_of_state, resolved_policy, shard_count, task_failures
from aion.spark.session.types import arrow_schema, quoted
from aion.spark.session.workers import in_arrow
from aion.spark.start import checks, listener
from aion.spark.start.kept_state import Operator
from aion.spark.tasks.join_child import JoinChild, JoinConfig
from aion.spark.tasks.join_root import JoinDefinition
from aion.spark.tasks.root import Root
from aion.spark.tasks.shards import hash_column, shard_ids
from aion.spark.tasks.stateful_child import SCHEMA as CHILD
from aion.spark.tasks.stateful_child import SHARD
from aion.spec import check_lossy, check_name

log = logging.getLogger(__name__)
Duration = str | timedelta | int
Names = str | Sequence[str]
_HASH = "__aion_hash"


def join(
    left: DataFrame,
    right: DataFrame,
    *,
    key: Columns,
    within: tuple[Duration, Duration],
    time: tuple[str, str] | None = None,
    how: Literal["inner", "left", "right", "full", "asof"] = "inner",
    on: Callable[[pa.RecordBatch], Any] | Any = None,
    unique: tuple[Names | None, Names | None] = (None, None),
    id: tuple[Names | None, Names | None] = (None, None),
    bound: Duration | tuple[Duration | None, Duration | None] | None = None,
    emit: Literal["all", "final"] = "all",
    policy: PolicySource | None = None,
    on_lossy_upstream: Literal["error", "accept"] = "error",
    name: str = "join",
) -> DataFrame:
    """Joins two streams by key and time. Late rows find their partners, too. For example::

        matched = aion.join(
            orders.withWatermark("ordered", "1 minute"), payments.withWatermark("paid", "1 minute"),
            key="order_id", within=("0 seconds", "2 hours"), how="left",
        )

    ``left``, ``right``: streaming DataFrames with watermarks. ``key``: the columns that are equal in partners; they
    have the same names and types on both sides. A null equals nothing, as in SQL. ``within``: partners are rows for
    which ``right time - left time`` lies between these two, both included. ``time``: the columns with the event times;
    by default those of the watermarks.

    ``how``: ``"inner"`` yields each pair when its second row comes. ``"left"``, ``"right"`` and ``"full"`` also yield
    the rows of one or both sides that have no partner, when the watermark has passed all that could be one; if one
    comes late, that row is taken back (``kind = retracted``), and the pair comes. ``"asof"`` yields each left row with
    the newest right row in the interval, or with nulls; a late right row takes back the pairs that it changes.

    ``on``: what else must hold for a pair: a function that takes the columns of pairs (a ``pyarrow.RecordBatch``) and
    returns a bool for each, or an expression of ``pyarrow.compute``. ``id``: for each side, the columns that identify a
    row together with the key and its time; by default all columns. ``unique``: the same, and a row that has come before
    counts once. ``bound``: how late rows may be, for both sides or for each; None: as the policy says, which learns it
    for each side from the lateness of its own rows. ``emit="final"``: a row without a partner waits until none can come
    any more, so nothing is taken back.

    The result has the columns of the key, of the left and of the right side; ``pair``, which identifies a row of the
    result; ``pair_time``, the later of both times; ``kind`` (on_time, late, final, retracted, dropped) and
    ``pane_seq``, which orders rows with the same ``pair``. A row that comes later than the bound of its side is a
    dropped row: see :func:`dropped`; its ``side`` says which. All sinks of Aion take a result as they take panes.

    ``policy``, ``on_lossy_upstream``, ``name``: as for :func:`group_by`. Raises WatermarkError, SchemaError,
    ConfigError, PolicyError.
    """
    check_name(name)
    check_lossy(on_lossy_upstream)
    sides = left, right
    for which, df in zip(SIDES, sides, strict=True):
        _check(which, df, accepts_loss=on_lossy_upstream == "accept")
    spark = left.sparkSession
    resolved = resolved_policy(spark, policy, {})
    plan = _plan(sides, key, within, time, how, on, (unique, id), bound, emit)
    listener.watch(spark)
    ids = tuple(shard_ids(shard_count(spark, resolved)))
    keys = [plan.left.schema.field(column).type for column in plan.key]
    config = JoinConfig(
        plan=plan,
        policy=policy_to_text(resolved),
        name=name,
        uid=uuid.uuid4().hex,
        application=application(spark),
        state_dir=place_of_state(spark, resolved),
        ids=ids,
        key_types=tuple(str(hashed_as(type_)) for type_ in keys),
        retain_versions=int(conf(spark, "spark.sql.streaming.minBatchesToRetain")),
        task_failures=task_failures(spark),
    )
    packed = [_packed(df, plan, number, config) for number, df in enumerate(sides)]
    log.info("join %r: state in %s, %d shards", name, config.state_dir, len(ids))
    result = stock_method(packed[0].union(packed[1]).groupBy(SHARD), "transformWithStateInPandas")(
        Root(JoinDefinition(config)), from_arrow_schema(plan.result_schema), "Append", "EventTime"
    )
    checks.remember(result, Operator(config, plan.definition, resolved.state.shards == "auto"))
    return _described(_observed(result, name), plan, name, _longest_us(plan, resolved))


def _check(which: str, df: object, *, accepts_loss: bool) -> None:
    if not isinstance(df, DataFrame):
        raise TypeError(f"join: {which}: {df!r} is not a DataFrame; .to_df() of a stream of aion.read_files makes one")
    if not df.isStreaming:
        raise ConfigError(
            f"join: {which}: it is not a stream; DataFrame.join joins a stream with rows that are there already"
        )
    if upstream.has_windows(df):
        raise ConfigError(
            f"join: {which}: it has results of another operator of Aion, and later ones would replace them; write them "
            "to a table with aion.sinks.upsert, and read them in another query"
        )
    if not any(WATERMARK in field.metadata for field in df.schema):
        raise WatermarkError(f"join: {which}: it has no watermark; give e.g. {which}.withWatermark('ts', '1 minute')")
    if not accepts_loss:
        upstream.check("join", df)


def _plan(
    sides: tuple[DataFrame, DataFrame],
    key: Columns,
    within: Any,
    time: Any,
    how: str,
    on: Any,
    identities: tuple[Any, Any],
    bound: Any,
    emit: str,
) -> JoinPlan:
    first_us, last_us = (duration_us(value, what="within") for value in _two("within", within))
    times = [_watermark_of(df) for df in sides] if time is None else _two("time", time)
    bounds = _two("bound", bound) if isinstance(bound, tuple | list) else (bound, bound)
    unique, ids = (_two(what, given) for what, given in zip(("unique", "id"), identities, strict=True))
    made = []
    for number, df in enumerate(sides):
        schema = arrow_schema(df.drop(HELPER).schema)
        asked = unique[number] if unique[number] is not None else ids[number]
        names = None if asked is None else unique_names(asked)
        bound_us = None if bounds[number] is None else duration_us(bounds[number], what="bound")
        if bound_us is not None and bound_us < 0:
            raise ConfigError(f"bound: {bounds[number]!r} is negative; give e.g. '2 hours'")
        made.append(Side(schema, str(times[number]), identity_of(schema, names), unique[number] is not None, bound_us))
    left, right = made
    return JoinPlan(left, right, key_names(key), first_us, last_us, how, on, emit)


def _two(what: str, given: Any) -> Sequence[Any]:
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise ConfigError(f"{what}: {given!r} is not two values, one for each side or end; give e.g. {_EXAMPLES[what]}")
    return given


_EXAMPLES = {
    "within": "within=('0 seconds', '2 hours')",
    "time": "time=('ordered', 'paid')",
    "bound": "bound=('1 hour', '2 hours')",
    "unique": "unique=('order_id', None)",
    "id": "id=('order_id', 'payment_id')",
}


def _watermark_of(df: DataFrame) -> str:
    return next(str(field.name) for field in df.schema if WATERMARK in field.metadata)


def _packed(df: DataFrame, plan: JoinPlan, side: int, config: JoinConfig) -> DataFrame:
    """Returns the rows of one side as its child packs them, with the shard of each."""
    schema = plan.sides[side].schema
    types = {field.name: field.dataType for field in df.schema}
    for name in plan.key:
        if not can_hash(schema.field(name).type):
            raise SchemaError(
                f"key: column {name!r} is of type {schema.field(name).type}, by which rows cannot be distributed; make "
                "a text of it"
            )
    placed = hash_column([(F.col(quoted(name)), types[name]) for name in plan.key])
    rows = df.select(*(F.col(quoted(name)) for name in schema.names), placed.alias(_HASH))
    return in_arrow(rows, JoinChild(config.name, config.ids, side), CHILD)


def _observed(result: DataFrame, name: str) -> DataFrame:
    """Returns the result with numbers in the ``observedMetrics`` of Spark's progress."""
    kind = F.col("kind")
    counted = {"late_pairs": PaneKind.LATE, "retracted": PaneKind.RETRACTED, "dropped_rows": PaneKind.DROPPED}
    return result.observe(
        f"{name}-{uuid.uuid4().hex[:6]}",
        F.count_if(~kind.isin(PaneKind.DROPPED.value, PaneKind.RETRACTED.value)).alias("pairs"),
        *(F.count_if(kind == value.value).alias(what) for what, value in counted.items()),
    )


def _longest_us(plan: JoinPlan, policy: Policy) -> int:
    """How long after its ``pair_time`` a row of the result may still come. A late row may take back one that is as much
    older as the two may be apart.
    """
    lateness = policy.lateness
    learnt_us = max(lateness.initial_bound_us, 0 if lateness.coverage is None else lateness.max_bound_us)
    left_us, right_us = (learnt_us if side.bound_us is None else side.bound_us for side in plan.sides)
    return max(left_us, left_us - plan.first_us, right_us, right_us + plan.last_us)


def _described(result: DataFrame, plan: JoinPlan, name: str, kept_us: int) -> DataFrame:
    """Returns a result that says in the metadata of its columns what they are."""
    # What a pair consists of never changes. So windows of pairs may have any of its columns as their key.
    parts = {column: f"key {column}" for column in plan.result_schema.names}
    parts |= {PAIR_TIME: START, "kind": KIND, PANE_SEQ: SEQ}
    said = PanesSaid(name, [parts[PAIR]], 0, kept_us, plan.emit, single=True)
    parts |= {column: f"dropped {column}" for column in ("side", *DROPPED_COLUMNS)}
    return result.select(
        *(
            F.col(quoted(column)).alias(column, metadata={PART: json.dumps([parts[column], said])})
            if column in parts
            else F.col(quoted(column))
            for column in result.columns
        )
    )
