"""``join``: joins two streams by key and time, and takes late rows."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from aion.base.hashing import can_hash
from aion.base.time import duration_us, format_duration
from aion.config import Policy
from aion.config.layers import Source as PolicySource
from aion.core.join.plan import (
    CHANGES,
    DROPPED_BEFORE,
    KIND_BEFORE,
    LEFT,
    PAIR,
    PAIR_BEFORE,
    PAIR_TIME,
    RIGHT,
    SEQ_BEFORE,
    SIDES,
    JoinPlan,
    Side,
    identity_of,
)
from aion.core.life.actions import PaneKind
from aion.core.query.columns import DROPPED_COLUMNS, OLD, PANE_SEQ, Columns, column_name, key_names, unique_names
from aion.core.query.pane_columns import END, KIND, MEANING, NAME, SEQ, START, PanesSaid, is_key
from aion.errors import ConfigError, SchemaError, WatermarkError
from aion.execute.evolving import join_goes_on
from aion.spark.api.group_by import stock_method
from aion.spark.api.results import PaneResults, are_results
from aion.spark.api.watermarks import HELPER, WATERMARK
from aion.spark.session import upstream
from aion.spark.session.settings import of_tasks, resolved_policy, shard_count, shards_in_words
from aion.spark.session.types import arrow_schema, check_case, check_text, is_case_sensitive, quoted, with_names
from aion.spark.session.workers import in_arrow
from aion.spark.start import checks, listener
from aion.spark.start.kept_state import StartedOperator
from aion.spark.tasks.join_child import JoinChild, JoinConfig
from aion.spark.tasks.join_root import JoinDefinition
from aion.spark.tasks.root import Root
from aion.spark.tasks.shards import hash_column, shard_ids
from aion.spark.tasks.stateful_child import SCHEMA as CHILD
from aion.spark.tasks.stateful_child import SHARD
from aion.spec import check_lossy, check_name

log = logging.getLogger(__name__)
Duration = str | timedelta | int
_HASH = "__aion_hash"


def join(
    left: DataFrame,
    right: DataFrame,
    *,
    key: Columns,
    within: tuple[Duration, Duration],
    time: tuple[str | Column | None, str | Column | None] | None = None,
    how: Literal["inner", "left", "right", "full", "asof"] = "inner",
    on: str | Callable[[pa.RecordBatch], Any] | pc.Expression | None = None,
    unique: tuple[Columns | None, Columns | None] = (None, None),
    id: tuple[Columns | None, Columns | None] = (None, None),
    bound: Duration | tuple[Duration | None, Duration | None] | None = None,
    emit: Literal["all", "final", "changes"] = "all",
    early: Literal["batch"] | None = None,
    policy: PolicySource | None = None,
    on_lossy_upstream: Literal["error", "accept"] = "error",
    name: str = "join",
) -> DataFrame:
    """Joins two streams by key and time. Late rows find their partners, too. For example::

        matched = aion.join(
            orders.withWatermark("ordered", "1 minute"), payments.withWatermark("paid", "1 minute"),
            key="order_id", within=("0 seconds", "2 hours"), how="left",
        )

    ``left``, ``right``: streaming DataFrames with watermarks, or results of :func:`windowed` or of another join, whose
    later rows replace earlier ones. ``key``: the columns (or their names) that are equal in partners; they have the
    same names and types on both sides. A null equals nothing, as in SQL. ``within``: partners are rows for which
    ``right time - left time`` lies between these two, both included. ``time``: the columns with the event times; None:
    that of the watermark. Of panes it is ``window_start`` or ``window_end``, of pairs ``pair_time``.

    ``how``: ``"inner"`` yields each pair when its second row comes. ``"left"``, ``"right"`` and ``"full"`` also yield
    the rows of one or both sides that have no partner, when the watermark has passed all that could be one; if one
    comes late, that row is taken back (``kind = retracted``), and the pair comes. ``"asof"`` yields each left row with
    the newest right row in the interval, or with nulls; a late right row takes back the pairs that it changes.

    ``on``: what else must hold for a pair: a text in SQL such as ``"price < limit"`` (it needs ``aion[sql]``), an
    expression of ``pyarrow.compute``, or a function that takes the columns of pairs (a ``pyarrow.RecordBatch``) and
    returns a bool for each. ``id``: for each side, the columns that identify a row together with the key and its time;
    by default all columns. ``unique``: the same, and a row that has come before counts once. ``bound``: how late rows
    may be, for both sides or for each, or None for that of the policy, which learns it for each side from the lateness
    of its own rows.

    ``emit="final"``: a row without a partner waits until none can come any more, so nothing is taken back.
    ``emit="changes"``: a batch yields each pair once, if it is new or taken back, and a pair that is taken back has its
    values in columns that begin with ``old_`` (:func:`changes`). ``early="batch"``: a row without a partner, and with
    ``"asof"`` each left row, comes out at the end of its batch with ``kind = early``, and once more when it would have
    come without this.

    The result has the columns of the key, of the left and of the right side; ``pair``, which identifies a row of the
    result; ``pair_time``, the later of both times; ``kind`` (early, on_time, late, final, retracted, dropped) and
    ``pane_seq``, which orders rows with the same ``pair``. A row that comes later than the bound of its side is a
    dropped row: see :func:`dropped`; its ``side`` says which. All sinks of Aion take a result as they take panes.

    ``policy``, ``on_lossy_upstream``, ``name``: as for :func:`group_by`. Raises WatermarkError, SchemaError,
    ConfigError, PolicyError.
    """
    check_name(name)
    check_lossy(on_lossy_upstream)
    sides = [
        _Input(which, df, name, accepts_loss=on_lossy_upstream == "accept")
        for which, df in zip(SIDES, (left, right), strict=True)
    ]
    spark = left.sparkSession
    resolved = resolved_policy(spark, policy, {})
    if early not in (None, "batch"):
        raise ConfigError(f"early: {early!r} is neither 'batch' nor None")
    plan = replace(_plan(sides, key, within, time, how, on, (unique, id), bound, emit), early=early is not None)
    check_case(spark, plan.result_schema.names)
    listener.watch(spark)
    ids = shard_ids(shard_count(spark, resolved))
    keys = [plan.left.schema.field(column).type for column in plan.key]
    config = JoinConfig(**of_tasks(spark, resolved, name, ids, keys), plan=plan)
    packed = [_packed(side, plan, number, config) for number, side in enumerate(sides)]
    log.info("join %r: state in %s, %s", name, config.state_dir, shards_in_words(spark, resolved, len(ids)))
    result = stock_method(packed[0].union(packed[1]).groupBy(SHARD), "transformWithStateInPandas")(
        Root(JoinDefinition(config)), from_arrow_schema(plan.result_schema), "Append", "EventTime"
    )
    follows, goes_on = resolved.state.shards == "auto", partial(join_goes_on, plan)
    checks.remember(result, StartedOperator(config, plan.definition, follows, goes_on))
    return _described(_observed(result, name), plan, name, _longest_us(plan, resolved))


class _Input:
    """What is known of one side before the join is: a stream with a watermark, or results of another operator."""

    def __init__(self, which: str, df: object, name: str, *, accepts_loss: bool) -> None:
        if not isinstance(df, DataFrame):
            raise TypeError(
                f"join: {which}: {df!r} is not a DataFrame; .to_df() of a stream of aion.read_files makes one"
            )
        if not df.isStreaming:
            raise ConfigError(
                f"join: {which}: it is not a stream; DataFrame.join joins a stream with rows that are there already"
            )
        self.df, self._which = df, which
        self.results = PaneResults(df, f"join: {which}") if are_results(df) else None
        marked = [str(field.name) for field in df.schema if WATERMARK in field.metadata]
        if self.results is None:
            if upstream.has_windows(df):
                raise WatermarkError(
                    f"join: {which}: it has results of another operator of Aion and a watermark of its own; leave this "
                    "withWatermark out, because results bring the watermark of that operator"
                )
            if HELPER in marked:
                raise WatermarkError(
                    f"join: {which}: max_ahead, idle_after and complete_until of aion.watermark are for aion.windowed, "
                    "and a join would take their rows for events; use withWatermark"
                )
            if not marked:
                raise WatermarkError(
                    f"join: {which}: it has no watermark; give e.g. {which}.withWatermark('ts', '1 minute')"
                )
            if not accepts_loss:
                upstream.check("join", df)
        elif self.results.said.name == name:
            raise ConfigError(
                f"name: the operator before is called {name!r}, too; give this join another name, e.g. name='joined'"
            )
        elif not self.results.is_final and not self.results.said.single:
            raise ConfigError(
                f"join: {which}: a function of {self.results.said.name!r} may make several rows of a window, which are "
                "replaced together; give these windows emit='final'"
            )
        self.watermark = marked[0] if marked else None

    def side(self, key: tuple[str, ...], time: str | None, asked: Any, unique: Any, bound: Any) -> Side:
        """Returns the side of the plan. ``asked``, ``unique``: the columns that identify a row, or None."""
        bound_us = None if bound is None else duration_us(bound, what="bound")
        if bound_us is not None and bound_us < 0:
            raise ConfigError(f"bound: {bound!r} is negative; give e.g. '2 hours'")
        if asked is not None and unique is not None:
            raise ConfigError(
                f"id, unique: both name columns that identify rows of the {self._which} side; give one of them"
            )
        named = unique if unique is not None else asked
        names = None if named is None else unique_names(named)
        for field in self.df.schema:
            check_text(field)
            if self.df.columns.count(field.name) > 1:
                raise SchemaError(f"join: the {self._which} side has two columns named {field.name!r}; rename one")
        self.df = with_names(self.df, [*key, *(names or ()), *([] if time is None else [time])])
        if self.results is not None:
            self.results = PaneResults(self.df, f"join: {self._which}")
            return self._side_of_results(self.results, key, time, named, bound_us)
        schema = arrow_schema(self.df.schema)
        when = time if time is not None else self.watermark
        return Side(schema, str(when), identity_of(schema, names), unique is not None, bound_us)

    def _side_of_results(
        self, results: PaneResults, key: tuple[str, ...], time: str | None, asked: Any, bound_us: int | None
    ) -> Side:
        said, parts = results.said, results.meaning
        if asked is not None:
            raise ConfigError(
                f"id, unique: rows of the {self._which} side are results of {said.name!r}, which says what identifies "
                "them; give None for this side"
            )
        if time is None:
            raise SchemaError(
                f"time: the {self._which} side has results of {said.name!r}, which have no watermark; give e.g. "
                f"time=({parts.columns.get(END) or parts.columns.get(START) or 'window_end'!r}, ...) for it"
            )
        results.check_time(time)
        if not results.is_final:
            for column in key:
                part = results.meanings.get(column, "")
                if not is_key(part) and part != NAME:
                    raise SchemaError(
                        f"key: {column!r} is not part of the key of {said.name!r}, so a later pane might have another "
                        f"value there than the one that it replaces; give {said.name!r} this column as a key, too"
                    )
        needed_us = results.kept_us(time)
        if bound_us is not None and bound_us < needed_us:
            needed = format_duration(needed_us)
            raise ConfigError(
                f"bound: {format_duration(bound_us)} is too short for the {self._which} side: results of {said.name!r} "
                f"may come {needed} after their time; give {needed} or more, or leave it out"
            )
        own = {*parts.besides, parts.columns.get(KIND), PAIR}
        schema = arrow_schema(self.df.select(*(quoted(name) for name in self.df.columns if name not in own)).schema)
        if results.is_final:
            identity = identity_of(schema, None)
        else:
            named = [parts.columns[part] for part in said.identity]
            identity = tuple(PAIR_BEFORE if name == PAIR else name for name in named if name not in (*key, time))
        return Side(schema, time, identity, False, max(bound_us or 0, needed_us), said.emit, results.delay_us(time))

    def rows(self, side: Side) -> DataFrame:
        """Returns the rows with the columns that arrive in the join."""
        columns = [F.col(quoted(name)) for name in side.schema.names]
        if (results := self.results) is not None:
            more = {KIND_BEFORE: results.kind, DROPPED_BEFORE: results.said_of_dropped, SEQ_BEFORE: results.order}
            if PAIR_BEFORE in side.identity:
                more[PAIR_BEFORE] = self.df[PAIR]
            columns += [more[name].alias(name) for name in side.arriving.names if name not in side.schema.names]
        return self.df.select(*columns)


def _plan(
    sides: Sequence[_Input],
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
    timed = (None, None) if time is None else _two("time", time)
    times = [None if each is None else str(column_name(each, "time", "('ordered', 'paid')")) for each in timed]
    bounds = _two("bound", bound) if isinstance(bound, tuple | list) else (bound, bound)
    unique, ids = (_two(what, given) for what, given in zip(("unique", "id"), identities, strict=True))
    names = tuple(map(str, key_names(key)))  # a Column cannot go to a task
    left, right = (
        side.side(names, times[number], ids[number], unique[number], bounds[number])
        for number, side in enumerate(sides)
    )
    condition = _condition(on, left, right, names, case_sensitive=is_case_sensitive(sides[0].df.sparkSession))
    text = on if isinstance(on, str) else None
    return JoinPlan(left, right, names, first_us, last_us, how, condition, emit, on=text)


def _condition(on: Any, left: Side, right: Side, key: tuple[str, ...], *, case_sensitive: bool) -> Any:
    if isinstance(on, str):
        from aion.core.join.condition import expression_of

        return expression_of(on, (left.schema, right.schema), key, case_sensitive=case_sensitive)
    if on is not None and (isinstance(on, Column) or not (callable(on) or isinstance(on, pc.Expression))):
        raise ConfigError(
            f"on: {on!r} is none of a text in SQL, an expression of pyarrow.compute, and a function that takes a "
            "pyarrow.RecordBatch; give e.g. on='price < limit'"
        )
    return on


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


def _packed(given: _Input, plan: JoinPlan, side: int, config: JoinConfig) -> DataFrame:
    """Returns the rows of one side as its child packs them, with the shard of each."""
    schema = plan.sides[side].schema
    rows = given.rows(plan.sides[side])
    types = {field.name: field.dataType for field in rows.schema}
    for name in plan.key:
        if not can_hash(schema.field(name).type):
            raise SchemaError(
                f"key: column {name!r} is of type {schema.field(name).type}, by which rows cannot be distributed; make "
                "a text of it"
            )
    placed = hash_column([(F.col(quoted(name)), types[name]) for name in plan.key])
    # Under names that pyspark need not quote.
    columns = [F.col(quoted(name)).alias(f"column{number}") for number, name in enumerate(rows.columns)]
    child = JoinChild(config.name, config.ids, side, (*rows.columns, _HASH))
    return in_arrow(rows.select(*columns, placed.alias(_HASH)), child, CHILD)


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
    # What a pair consists of never changes. So windows of pairs may have any of its columns as their key, if these are
    # there when the pair is taken back.
    keys = (*plan.key, PAIR) if plan.emit == CHANGES else plan.result_schema.names
    parts = {column: f"key {column}" for column in keys}
    parts |= {OLD + field.name: f"old {field.name}" for field in plan.values if plan.emit == CHANGES}
    parts |= {PAIR_TIME: START, "kind": KIND, PANE_SEQ: SEQ}
    # A row without a partner comes so long after its time.
    waits_us = max([0, *(plan.due_after(side) for side in (LEFT, RIGHT) if plan.outer[side])])
    said = PanesSaid(name, [parts[PAIR]], waits_us, max(kept_us - waits_us, 0), plan.emit, single=True)
    parts |= {column: f"dropped {column}" for column in ("side", *DROPPED_COLUMNS)}
    return result.select(
        *(
            F.col(quoted(column)).alias(column, metadata={MEANING: json.dumps([parts[column], said])})
            if column in parts
            else F.col(quoted(column))
            for column in result.columns
        )
    )
