"""``watermark``: a watermark that clocks that run ahead do not move, and that does not wait for silent sources."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from weakref import WeakSet

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StructType, TimestampType

from aion.base.time import duration_us, format_duration, format_instant, instant_us
from aion.core.heartbeat import RUN
from aion.core.query.columns import column_name
from aion.errors import ConfigError, SchemaError, WatermarkError
from aion.spark import SOURCES_FROM, numbers
from aion.spark.session.plans import plan_of
from aion.spark.session.sessions import refuse
from aion.spark.session.types import meant, quoted
from aion.spark.session.workers import of_aion
from aion.spark.start import positions
from aion.spark.tasks.child import AHEAD, NO_EVENT

WATERMARK = "spark.watermarkDelayMs"
"""The key of a column's metadata under which Spark keeps the delay of its watermark."""
HELPER = "__aion_watermark"
"""The column that has the watermark. It is null in a row that does not move it."""
FLAG = "__aion_flag"
"""The column that says which rows are ``AHEAD`` of the clock, and which are ``NO_EVENT`` but move the watermark."""
_BEAT = "__aion_beat"
_TIME, _AHEAD_US, _IDLE_US, _CLOSE_US, _UNTIL = (
    f"aion.{name}" for name in ("time", "ahead_us", "idle_us", "close_us", "until")
)
_PASSED = ("Project", "SubqueryAlias", "View")
"""The operators of Spark's plan that keep all rows."""
_registered: WeakSet[SparkSession] = WeakSet()
"""The sessions that know the source of heartbeats."""


def watermark(
    df: DataFrame,
    time: str | Column,
    delay: str,
    *,
    max_ahead: str | timedelta | None = None,
    idle_after: str | timedelta | None = None,
    complete_until: str | datetime | None = None,
) -> DataFrame:
    """Sets a watermark as ``df.withWatermark(time, delay)`` does, and says what else moves it, and what does not.

    For example::

        panes = aion.windowed(aion.watermark(events, "ts", "20 seconds", max_ahead="10 minutes"), spec)

    ``max_ahead``: how far the time of an event may be after the time at which its batch began, by Spark's clock. Events
    beyond that do not move the watermark, so they do not make the others late, and :func:`aion.windowed` yields them as
    ``dropped`` rows.

    ``idle_after``: windows of a silent source close. When the sources of the query have nothing more to read, the
    watermark is at least the clock minus ``idle_after`` minus ``delay``. This begins when an event was once within
    ``max_ahead`` of the clock, or within ``idle_after`` if that is not given: a backfill is not made late.

    ``complete_until``: a time up to which the events are complete. Windows that end before it close in this run, after
    all events of the run; it takes ``.trigger(availableNow=True)``. A text without a zone is a time of the session's
    zone. Or the name of a column of timestamps: where it is not null, all events before that time have come with this
    batch. A row with such a promise and without an event time is no event.

    A batch that is run again decides the same. Give the result to :func:`aion.windowed`, which needs the columns that
    this adds. Raises SchemaError, WatermarkError, ConfigError.
    """
    time = _checked(df, time)
    rules = WatermarkRules.read(df, time, max_ahead, idle_after, complete_until)
    if rules is None:
        return df.withWatermark(time, delay)
    if any(WATERMARK in field.metadata for field in df.schema):
        raise WatermarkError(
            "watermark: the DataFrame has a watermark already, and Spark would use the smaller one; leave out "
            "withWatermark, or for files read them with spark.readStream, not with aion.read_files"
        )
    rows, column = df, F.col(quoted(time))
    as_spark_reads_it = df.select(column.alias(HELPER)).withWatermark(HELPER, delay).schema[HELPER].metadata
    delay_us = int(as_spark_reads_it[WATERMARK]) * 1000
    # Spark takes the time at which a batch began for the current one, and keeps it in the batch's offsets.
    is_ahead = F.lit(False)
    if rules.ahead_us is not None:
        is_ahead = column > F.current_timestamp() + _interval(rules.ahead_us)
    times = [F.when(~is_ahead, column)]
    if rules.has_heartbeat:
        rows = _with_heartbeat(df, rules, delay_us)
        times.append(F.col(_BEAT))
    if rules.promise is not None:
        times.append(F.col(quoted(rules.promise)) + _interval(delay_us))
    latest = times[0] if len(times) == 1 else F.greatest(*times)
    helper = latest.alias(HELPER, metadata=rules.metadata())
    flag = F.when(is_ahead, AHEAD).when(column.isNull() & latest.isNotNull(), NO_EVENT).otherwise(0).cast("tinyint")
    return rows.select("*", helper, flag.alias(FLAG)).drop(_BEAT).withWatermark(HELPER, delay)


@dataclass(frozen=True)
class WatermarkRules:
    """What :func:`watermark` was given besides a delay. The column with the watermark has it as metadata.

    ``until``: the time until which events are complete, in microseconds, or the name of the column that says so.
    """

    time: str
    ahead_us: int | None
    idle_us: int | None
    close_us: int
    until: int | str | None

    @classmethod
    def read(
        cls, df: DataFrame, time: str, max_ahead: Any, idle_after: Any, complete_until: Any
    ) -> WatermarkRules | None:
        """Reads the arguments of a user. Returns None if there are none. Raises ConfigError and SchemaError."""
        if max_ahead is None and idle_after is None and complete_until is None:
            return None
        ahead_us = None if max_ahead is None else duration_us(max_ahead, what="max_ahead")
        if ahead_us is not None and ahead_us < 0:
            raise ConfigError(f"max_ahead: {max_ahead!r} is negative; give e.g. '1 hour'")
        idle_us = None if idle_after is None else duration_us(idle_after, what="idle_after")
        if idle_us is not None and idle_us <= 0:
            raise ConfigError(f"idle_after: {idle_after!r} is not positive; give e.g. '5 minutes'")
        close_us = (idle_us or 0) if ahead_us is None else ahead_us
        until = None if complete_until is None else _until(df, complete_until)
        return cls(time, ahead_us, idle_us, close_us, until)

    @classmethod
    def of(cls, schema: StructType) -> WatermarkRules | None:
        """Returns the rules of a DataFrame with this schema, or None if it has no column of :func:`watermark`."""
        found = next((field.metadata for field in schema if field.name == HELPER), None)
        if found is None:
            return None
        return cls(found[_TIME], found.get(_AHEAD_US), found.get(_IDLE_US), found.get(_CLOSE_US, 0), found.get(_UNTIL))

    def metadata(self) -> dict[str, Any]:
        values = (self.time, self.ahead_us, self.idle_us, self.close_us, self.until)
        names = (_TIME, _AHEAD_US, _IDLE_US, _CLOSE_US, _UNTIL)
        return {name: value for name, value in zip(names, values, strict=True) if value is not None}

    @property
    def has_heartbeat(self) -> bool:
        return self.idle_us is not None or isinstance(self.until, int)

    @property
    def promise(self) -> str | None:
        """The column that says up to where events are complete."""
        return self.until if isinstance(self.until, str) else None

    def sentences(self) -> list[str]:
        """Says what the rules do, for :func:`aion.explain`."""
        said = []
        if self.ahead_us is not None:
            said.append(
                f"events more than {format_duration(self.ahead_us)} after the start of their batch do not move the "
                "watermark, and are dropped."
            )
        if self.idle_us is not None:
            said.append(
                f"while the sources are silent, the watermark follows the clock, {format_duration(self.idle_us)} and "
                f"its delay behind it, once an event was within {format_duration(self.close_us)} of the clock."
            )
        if isinstance(self.until, int):
            said.append(
                f"windows that end at {format_instant(self.until)} or before close at the end of an availableNow run."
            )
        if self.promise is not None:
            said.append(f"windows close when {self.promise} says that events are complete up to their end.")
        return said


def check_behind(df: DataFrame, rules: WatermarkRules) -> None:
    """Raises WatermarkError if something behind :func:`watermark` takes rows away that move it.

    Spark would even do it before they have moved it.
    """
    if rules.idle_us is None and rules.until is None:
        return
    for name in (node.name for node in plan_of(df)):
        if name == "EventTimeWatermark":
            return
        if name not in _PASSED:
            raise WatermarkError(
                f"windowed: {name} comes behind aion.watermark, and may take away rows by which idle_after or "
                "complete_until move the watermark; do it before aion.watermark. Only columns may be selected or added "
                "behind it"
            )


def _checked(df: DataFrame, given: str | Column) -> str:
    """Returns the name of the column with the event time."""
    if not isinstance(df, DataFrame) or not df.isStreaming:
        raise WatermarkError(
            f"watermark: a streaming DataFrame is needed, not {df!r}; what aion.read_files returns has a watermark of "
            "its own"
        )
    time = meant(df.sparkSession, df.columns, str(column_name(given, "time", "'ts'")))
    if time not in df.columns:
        raise SchemaError(f"watermark: there is no column {time!r}; the columns are {', '.join(df.columns)}")
    _check_timestamp("watermark", time, df.schema[time].dataType)
    return time


def _check_timestamp(what: str, name: str, type_: DataType) -> None:
    if not isinstance(type_, TimestampType):
        raise SchemaError(f"{what}: column {name!r} is of type {type_.simpleString()}; Spark needs a timestamp")


def _until(df: DataFrame, given: object) -> int | str:
    """Returns the time that a user gave, in microseconds, or the name of a column."""
    if isinstance(given, str) and (column := meant(df.sparkSession, df.columns, given)) in df.columns:
        _check_timestamp("complete_until", column, df.schema[column].dataType)
        return column
    when = given
    with suppress(ValueError):
        when = datetime.fromisoformat(given) if isinstance(given, str) else given
    if not isinstance(when, datetime) or when != when:  # NaT of pandas does not equal itself
        raise ConfigError(
            f"complete_until: {given!r} is neither a time nor a column; give e.g. '2026-01-31T00:00:00Z', a datetime, "
            "or the name of a column of timestamps"
        )
    if when.tzinfo is not None:
        return instant_us(when)
    # As Spark reads it, in the session's zone.
    row = df.sparkSession.sql("SELECT unix_micros(CAST(? AS timestamp_ltz))", [when.isoformat()]).first()
    assert row is not None
    return int(row[0])


def _interval(us: int) -> Column:
    return F.expr(f"make_dt_interval(0, 0, 0, {us}e-6BD)")


def _with_heartbeat(df: DataFrame, rules: WatermarkRules, delay_us: int) -> DataFrame:
    """Returns the rows of a DataFrame with heartbeats, which have only the column ``_BEAT``."""
    spark = df.sparkSession
    how = "leave out idle_after, and give complete_until the name of a column"
    refuse(spark, "idle_after, complete_until", how)
    if numbers(spark.version) < SOURCES_FROM:
        raise ConfigError(f"idle_after, complete_until: they need Spark 4.2, and this is Spark {spark.version}; {how}")
    from aion.spark.api.heartbeat import AT, HeartbeatSource

    if spark not in _registered:
        with of_aion(spark):
            spark.dataSource.register(HeartbeatSource)
        _registered.add(spark)
    options = {"socket": str(positions.address()), "delay_us": delay_us}
    if rules.idle_us is not None:
        options |= {"idle_us": rules.idle_us, "close_us": rules.close_us}
    if isinstance(rules.until, int):
        options["until_us"] = rules.until // 1000 * 1000 + delay_us  # Spark's watermark has milliseconds
    beats = spark.readStream.format(RUN).options(**options).load()
    nothing = [F.lit(None).cast(field.dataType).alias(field.name) for field in df.schema]
    rows = df.select("*", F.lit(None).cast(TimestampType()).alias(_BEAT))
    return rows.unionAll(beats.select(*nothing, F.col(AT).alias(_BEAT)))
