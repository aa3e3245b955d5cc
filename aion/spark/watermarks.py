"""``watermark``: a watermark that clocks that run ahead do not move."""

from __future__ import annotations

from datetime import timedelta

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import TimestampNTZType, TimestampType

from aion.base.time import duration_us
from aion.errors import ConfigError, SchemaError, WatermarkError
from aion.spark.types import quoted

HELPER = "__aion_watermark"
"""The column that has the watermark: the event time, or null if it is ahead of the clock."""
TIME, AHEAD_US = "aion.time", "aion.ahead_us"
"""In the metadata of that column: the column of event times, and how far ahead they may be."""


def watermark(df: DataFrame, time: str, delay: str, *, max_ahead: str | timedelta | None = None) -> DataFrame:
    """Sets a watermark as ``df.withWatermark(time, delay)`` does, except for events whose clock runs ahead.

    ``max_ahead``: how far the time of an event may be after the time at which its batch began, by Spark's clock. Events
    beyond that do not move the watermark, so they do not make the others late, and :func:`aion.windowed` yields them as
    ``dropped`` rows. A batch that is run again has the same time. Give the result to :func:`aion.windowed`, which needs
    the column that this adds. Raises SchemaError, WatermarkError, ConfigError.
    """
    if not isinstance(df, DataFrame) or not df.isStreaming:
        raise WatermarkError(f"watermark: a streaming DataFrame is needed, not {df!r}")
    if time not in df.columns:
        raise SchemaError(f"watermark: there is no column {time!r}; the columns are {', '.join(df.columns)}")
    if not isinstance(type_ := df.schema[time].dataType, TimestampType | TimestampNTZType):
        raise SchemaError(f"watermark: column {time!r} is of type {type_.simpleString()}; a timestamp is needed")
    if max_ahead is None:
        return df.withWatermark(time, delay)
    ahead_us = duration_us(max_ahead, what="max_ahead")
    if ahead_us < 0:
        raise ConfigError(f"max_ahead: {max_ahead!r} is negative; give e.g. '1 hour'")
    column = F.col(quoted(time))
    # Spark takes the time at which a batch began for the current one, and keeps it in the batch's offsets.
    usable = F.when(column <= F.current_timestamp() + F.expr(f"make_dt_interval(0, 0, 0, {ahead_us}e-6BD)"), column)
    helper = usable.alias(HELPER, metadata={TIME: time, AHEAD_US: ahead_us})
    return df.select("*", helper).withWatermark(HELPER, delay)
