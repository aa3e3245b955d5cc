"""``group_by``: Spark's stateful processors (``transformWithState``) on Aion's store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Never

from pyspark.sql import Column, DataFrame, GroupedData, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import (
    ArrayType,
    DataType,
    LongType,
    MapType,
    StructField,
    StructType,
    TimestampType,
    VariantType,
)

from aion.config import Policy
from aion.config.layers import Source as PolicySource
from aion.errors import ConfigError, WatermarkError
from aion.execute.assembly import prestages
from aion.spark.api.watermarks import WATERMARK, WatermarkRules
from aion.spark.session import upstream
from aion.spark.session.sessions import grouping, is_grouped
from aion.spark.session.settings import of_tasks, resolved_policy, shard_count, shards_in_words
from aion.spark.session.types import arrow_schema, check_text, quoted
from aion.spark.session.workers import in_arrow, of_aion
from aion.spark.start import checks, listener
from aion.spark.start.kept_state import StartedOperator
from aion.spark.tasks.processor import ProcessorDefinition
from aion.spark.tasks.root import Root
from aion.spark.tasks.shards import hash_column, shard_column, shard_ids
from aion.spark.tasks.stateful_child import SCHEMA as CHILD
from aion.spark.tasks.stateful_child import SHARD, Announces, StatefulChild
from aion.spark.tasks.stateful_config import Columns, StatefulConfig
from aion.spec import check_keywords, check_lossy, check_name

log = logging.getLogger(__name__)
METHODS: Mapping[str, Callable[..., DataFrame]] = {
    name: getattr(GroupedData, name) for name in ("transformWithStateInPandas", "transformWithState")
}
"""pyspark's own methods, which :mod:`aion.spark.api.patch` may replace."""
_KEY, _TEXT, _TIME = "__aion_key_", "__aion_text_", "__aion_time"


def group_by(
    df: DataFrame,
    *columns: str | Column,
    policy: PolicySource | None = None,
    on_lossy_upstream: Literal["error", "accept"] = "error",
    name: str = "stateful",
    **gone: Never,
) -> Grouped:
    """Groups a DataFrame by columns, for a stateful processor whose state is in Aion's store.

    For example::

        counts = aion.group_by(events, "user").transformWithStateInPandas(
            Count(), "user string, n long", "Update", "None"
        )

    ``df``: a DataFrame, streaming or not. ``columns``: names or expressions, as for ``DataFrame.groupBy``. ``policy``:
    a preset, a path or a mapping; it overrides the session's. ``on_lossy_upstream``: an operator before this one may
    drop late rows, which is an ``"error"``, or you ``"accept"`` it. ``name`` identifies this operator within a query.
    Keep it the same over restarts. Raises ConfigError, and TypeError for another keyword.
    """
    check_keywords("group_by", gone, ("policy", "on_lossy_upstream", "name"))
    check_lossy(on_lossy_upstream)
    return Grouped(df, columns, policy, name, is_lossy=on_lossy_upstream == "accept")


class Grouped:
    """Offers :meth:`transformWithStateInPandas` and :meth:`transformWithState` of pyspark's ``GroupedData``.

    The arguments, the processor and the rows are those of pyspark; the state is in Aion's store
    (docs/how-to/stateful.md).
    """

    def __init__(
        self,
        df: DataFrame,
        columns: Sequence[str | Column],
        policy: PolicySource | None,
        name: str,
        *,
        is_lossy: bool,
    ) -> None:
        if not isinstance(df, DataFrame):
            raise TypeError(f"group_by: {df!r} is not a DataFrame; .to_df() of a stream of aion.read_files makes one")
        check_name(name)
        if len(columns) == 1 and isinstance(columns[0], list | tuple):
            (columns,) = columns  # as DataFrame.groupBy takes them, too
        if not columns:
            raise ConfigError("group_by: it needs at least one column; state is kept for each key")
        self._df, self._columns, self._policy, self._name = df, columns, policy, name
        self._is_lossy = is_lossy

    @classmethod
    def of_spark(cls, grouped: GroupedData, name: str) -> Grouped:
        """Returns what Spark has grouped. Late rows may be lost before that, as on stock Spark."""
        return cls(*_frame_and_columns(grouped), None, name, is_lossy=True)

    def transformWithStateInPandas(
        self,
        statefulProcessor: StatefulProcessor,
        outputStructType: StructType | str,
        outputMode: str,
        timeMode: str,
        initialState: Grouped | GroupedData | None = None,
        eventTimeColumnName: str = "",
    ) -> DataFrame:
        """Runs a processor that takes and returns frames of pandas. See pyspark's ``GroupedData``.

        ``initialState`` is ``aion.group_by(...)`` or ``groupBy(...)`` of a DataFrame that is not a stream.
        """
        return self._transform(
            True, statefulProcessor, outputStructType, outputMode, timeMode, initialState, eventTimeColumnName
        )

    def transformWithState(
        self,
        statefulProcessor: StatefulProcessor,
        outputStructType: StructType | str,
        outputMode: str,
        timeMode: str,
        initialState: Grouped | GroupedData | None = None,
        eventTimeColumnName: str = "",
    ) -> DataFrame:
        """Runs a processor that takes and returns rows. See pyspark's ``GroupedData``.

        ``initialState`` is ``aion.group_by(...)`` or ``groupBy(...)`` of a DataFrame that is not a stream.
        """
        return self._transform(
            False, statefulProcessor, outputStructType, outputMode, timeMode, initialState, eventTimeColumnName
        )

    def _transform(
        self,
        pandas: bool,
        processor: StatefulProcessor,
        output: StructType | str,
        output_mode: str,
        time_mode: str,
        initial: Grouped | GroupedData | None,
        event_time: str,
    ) -> DataFrame:
        method = "transformWithStateInPandas" if pandas else "transformWithState"
        if not isinstance(processor, StatefulProcessor):
            raise ConfigError(f"{method}: {processor!r} is not a StatefulProcessor; give an object, not its class")
        if initial is not None and not isinstance(initial, Grouped) and not is_grouped(initial):
            raise ConfigError(f"{method}: initialState: {initial!r} is not grouped; give aion.group_by(df, 'key')")
        for what, text in (("timeMode", time_mode), ("outputMode", output_mode), ("eventTimeColumnName", event_time)):
            if not isinstance(text, str):
                raise ConfigError(f"{method}: {what}: {text!r} is not a text")
        if not self._df.isStreaming:  # nothing has to be kept
            stock = initial._df.groupBy(*initial._columns) if isinstance(initial, Grouped) else initial
            grouped = self._df.groupBy(*self._columns)
            return stock_method(grouped, method)(processor, output, output_mode, time_mode, stock, event_time)
        rules = WatermarkRules.of(self._df.schema)
        if rules is not None and rules.has_heartbeat:
            raise WatermarkError(
                f"{method}: idle_after and complete_until of aion.watermark are for aion.windowed, and a processor "
                "would take their rows for events; use withWatermark"
            )
        if not self._is_lossy and time_mode.lower() != "eventtime":  # with event time, it drops late rows itself
            upstream.check("group_by", self._df)
        spark = self._df.sparkSession
        policy = resolved_policy(spark, self._policy, {})
        listener.watch(spark)
        ids = tuple(shard_ids(shard_count(spark, policy)))
        packs = not pandas  # frames are made of rows by Spark itself, which then also drops late rows
        placed = None if packs else partial(shard_column, operator=self._name, ids=ids)
        rows = keyed(self._df, self._columns, placed, timed=packs and time_mode.lower() == "eventtime")
        first = None if initial is None else keyed(*_frame_and_columns(initial), placed, timed=False)
        config = stateful_config(
            spark, policy, self._name, ids, rows, None if first is None else first.columns, pandas, time_mode
        )
        grouped, initial_rows = rows.df, None if first is None else first.df
        if packs:
            announces = Announces(config.application, self._name, config.policy, rows.key, rows.columns.key)
            child = StatefulChild(
                self._name,
                ids,
                tells_each=config.event_time is not None,
                asks=True,
                announces=announces if prestages(policy) else None,
            )
            grouped = in_arrow(grouped, child, CHILD)
            if initial_rows is not None:
                initial_rows = in_arrow(initial_rows, StatefulChild(self._name, ids), CHILD)
        result = stock_method(grouped.groupBy(SHARD), method)(
            Root(ProcessorDefinition(config, processor)),
            output,
            output_mode,
            time_mode,
            None if initial_rows is None else initial_rows.groupBy(SHARD),
            event_time,
        )
        log.info("stateful %r: state in %s, %s", self._name, config.state_dir, shards_in_words(spark, policy, len(ids)))
        checks.remember(result, StartedOperator(config, config.definition, policy.state.shards == "auto"))
        return result


def stateful_config(
    spark: SparkSession,
    policy: Policy,
    name: str,
    ids: tuple[int, ...],
    rows: Keyed,
    initial: Columns | None,
    pandas: bool,
    time_mode: str,
) -> StatefulConfig:
    """Returns what the tasks of an operator need. ``rows``: its input."""
    return StatefulConfig(
        **of_tasks(spark, policy, name, ids, arrow_schema(rows.key).types),
        key=rows.key,
        columns=rows.columns,
        initial=initial,
        pandas=pandas,
        time_mode=time_mode.lower(),
        event_time=rows.time,
    )


Place = Callable[[Sequence[tuple[Column, DataType]]], Column]
"""Returns the shard of a row from the columns of its key."""


class Keyed(NamedTuple):
    """A DataFrame with the shard of each row, or with the hash of its key, as its last column.

    ``key``: the type of its keys, with the names that the user knows. ``time``: a column with the event time in µs, or
    None if it was not asked for, or the DataFrame has no watermark.
    """

    df: DataFrame
    key: StructType
    columns: Columns
    time: str | None


def keyed(df: DataFrame, by: Sequence[str | Column], placed: Place | None, *, timed: bool) -> Keyed:
    """Adds the shard of each row by the columns ``by``, which ``placed`` computes, or the hash if that is None.

    ``timed``: whether the event time is asked for. With the shard, rows will be frames of pandas, where a null makes
    doubles of a whole column of bigint. So a key of this type is sent as text, too.
    """
    own, fields, names = {}, [], []
    for number, column in enumerate(by):
        (field,) = df.select(column).schema
        _check_key(field)
        names.append(field.name)
        if field.name not in df.columns or _text(column) not in (field.name, quoted(field.name)):
            if field.name in df.columns and _text(column).endswith(f" AS {field.name}"):
                raise ConfigError(
                    f"group_by: {field.name!r} is a column of the DataFrame already, so rows would have two; give the "
                    "expression another alias"
                )
            names[-1] = f"{_KEY}{number}"
            own[names[-1]] = (F.col(column) if isinstance(column, str) else column), field.name
        fields.append(StructField(field.name, field.dataType))
    time = next((field for field in df.schema if timed and WATERMARK in field.metadata), None)
    first = [column.alias(name) for name, (column, _) in own.items()]
    last = []
    if time is not None:
        end = f"{quoted(time.name)}.end" if isinstance(time.dataType, StructType) else quoted(time.name)
        last.append(F.unix_micros(F.col(end).cast(TimestampType())).alias(_TIME))
    wider = df.select(*first, "*", *last) if first or last else df
    keys = [(F.col(quoted(n)), f.dataType) for n, f in zip(names, fields, strict=True)]
    with of_aion(df.sparkSession):
        shard = hash_column(keys) if placed is None else placed(keys)
    texts = {} if placed is None else {n: f"{_TEXT}{n}" for n, f in zip(names, fields, strict=True) if _is_lossy(f)}
    sent = wider.select(*(F.col(quoted(n)).cast("string").alias(t) for n, t in texts.items()), "*", shard.alias(SHARD))
    known = (*texts, *(name for _, name in own.values()), *df.columns)
    columns = Columns(tuple(sent.columns.index(texts.get(n, n)) for n in names), known, len(texts) + len(own))
    return Keyed(sent, StructType(fields), columns, None if time is None else _TIME)


def _is_lossy(field: StructField) -> bool:
    """Returns whether pandas may make other values of keys of this type."""
    return isinstance(field.dataType, LongType) and field.nullable


_INSTEAD = ((MapType, "array_sort(map_entries(...))"), (VariantType, "to_json(...)"))
"""Types of keys that Spark cannot hash, and what to group by instead."""


def _check_key(field: StructField) -> None:
    """Raises ConfigError or SchemaError if rows cannot be grouped by this column, on stock Spark neither."""
    check_text(field)
    for type_, instead in _INSTEAD:
        if _has(field.dataType, type_):
            raise ConfigError(
                f"group_by: the column {field.name!r} is of type {field.dataType.simpleString()}, "
                f"which cannot be a key; group by {instead} of it"
            )


def _has(data: DataType, type_: type[DataType]) -> bool:
    match data:
        case StructType():
            return any(_has(field.dataType, type_) for field in data)
        case ArrayType():
            return _has(data.elementType, type_)
    return isinstance(data, type_)


def _text(column: str | Column) -> str:
    return column if isinstance(column, str) else str(column).removeprefix("Column<'").removesuffix("'>")


def stock_method(grouped: Any, method: str) -> Callable[..., DataFrame]:
    """Returns pyspark's own method of what Spark has grouped.

    Aion's own operators call it: the patch would take their roots for processors of the user.
    """
    bound = METHODS[method].__get__(grouped) if isinstance(grouped, GroupedData) else getattr(grouped, method)

    def call(*arguments: Any) -> DataFrame:
        with of_aion(grouped._df.sparkSession):
            result: DataFrame = bound(*arguments)
        return result

    return call


def _frame_and_columns(grouped: Grouped | GroupedData) -> tuple[DataFrame, Sequence[str | Column]]:
    if isinstance(grouped, Grouped):
        return grouped._df, grouped._columns
    return grouping(grouped)
