"""A text is the same duration for Aion as for Spark: in ``withWatermark`` and ``window``, and cast to an interval."""

from __future__ import annotations

import pytest
from py4j.java_gateway import get_field
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F

from aion.base.time import duration_us
from aion.errors import ConfigError

UNITS = ("week", "day", "hour", "minute", "second", "millisecond", "microsecond")
PLAIN = [
    *(f"{n} {unit}{s}" for n in ("0", "1", "5", "007", "-3", "+2", "- 4", "+ 1") for unit in UNITS for s in ("", "s")),
    "5 Minutes",
    "5 MINUTES",
    "\t5 \n minutes ",
    "1 day 2 hours",
    "5 minutes 30 seconds",
    "5 minutes\t-30 seconds",
    "1 week 2 days 3 hours 4 minutes 5 seconds 6 milliseconds 7 microseconds",
    "2 seconds 1 second",
    "-1 day 1 hour",
    "0.5 seconds",
    ".5 seconds",
    "5. seconds",
    "1.123456789 seconds",
    "-0.5 seconds",
    "+.25 second",
    "0.0000019 seconds",
    "-0.0000019 seconds",
    "-1.9999999 seconds 0.9999999 seconds",
    "1 minute 0.25 seconds",
    "100000 days",
    "interval 5 minutes",
    "INTERVAL 5 minutes",
    "Interval  1 day  2 hours",
    " interval\t5 minutes",
    "interval -5 minutes",
    "interval 0.5 seconds",
    "interval 1 hour -30 minutes",
    "interval - 1 hour",
]
"""What Spark takes wherever it reads an interval."""
SQL = [
    "interval '5' minute",
    "INTERVAL '5' MINUTES",
    "interval -'5' minute",
    "interval '-5' minute",
    "interval '5 minutes'",
    "interval '1 day 2 hours'",
    "interval '1' day '2' hours",
    "interval '0.5' second",
    "interval 1.5 seconds",
    "interval '1 2' day to hour",
    "INTERVAL '1 02:03' DAY TO MINUTE",
    "interval '1 02:03:04' day to second",
    "interval '1 02:03:04.567' day to second",
    "interval '-1 02:03:04' day to second",
    "interval '02:03' hour to minute",
    "interval -'1 2' day to hour",
    "interval '02:03:04' hour to second",
    "interval '03:04.5' minute to second",
]
"""What Spark takes besides as the delay of a watermark, and as the size of a window."""
REFUSED = [
    "",
    " ",
    "5",
    "interval",
    "interval 5",
    "minutes",
    "five minutes",
    "5 fortnights",
    "5 minutes 3",
    "5 min utes",
    "1:30",
    "- minutes",
    "5 minutes,",
    "--5 minutes",
    "1 month",
    "interval 2 years",
    "1 year 3 days",
    "interval '1-2' year to month",
    "5 6 minutes",
    "intervals 5 minutes",
    ". seconds",
    "1..5 seconds",
    "9223372036854775808 microseconds",
    "1e3 seconds",
]
"""What Aion refuses. Spark refuses it, too, or it has months."""


def of_casts(spark: SparkSession, texts: list[str]) -> dict[str, int | None]:
    """What Spark reads when it casts: the time from an instant to that instant plus the interval."""
    frame = spark.createDataFrame([Row(text=text) for text in texts]).select(
        "text", F.expr("try_cast(text as interval) as i")
    )
    instant = F.lit("2000-01-01 00:00:00").cast("timestamp_ntz")
    micros = F.unix_micros((instant + F.col("i")).cast("timestamp")) - F.unix_micros(instant.cast("timestamp"))
    zone = spark.conf.get("spark.sql.session.timeZone")
    spark.conf.set("spark.sql.session.timeZone", "UTC")  # a day is 24 hours
    try:
        return {row.text: row.us for row in frame.select("text", micros.alias("us")).collect()}
    finally:
        spark.conf.set("spark.sql.session.timeZone", str(zone))


def of_watermarks(spark: SparkSession, text: str) -> int | None:
    """What Spark reads when it plans. None if it refuses it."""
    intervals = spark._jvm.org.apache.spark.sql.catalyst.util.IntervalUtils  # type: ignore[union-attr]
    try:
        found = intervals.fromIntervalString(text)
    except Exception:
        return None
    months, days, micros = (get_field(found, name) for name in ("months", "days", "microseconds"))
    assert months == 0
    return int(days * 86_400_000_000 + micros)


def test_what_spark_reads_as_an_interval_is_the_same_duration(spark: SparkSession) -> None:
    ours = {text: duration_us(text) for text in PLAIN}
    assert ours == of_casts(spark, PLAIN)
    assert ours == {text: of_watermarks(spark, text) for text in PLAIN}


def test_so_is_an_interval_as_sql_writes_it(spark: SparkSession) -> None:
    assert {text: duration_us(text) for text in SQL} == {text: of_watermarks(spark, text) for text in SQL}


@pytest.mark.parametrize("text", REFUSED)
def test_what_has_no_fixed_length_or_no_meaning_is_refused(spark: SparkSession, text: str) -> None:
    with pytest.raises(ConfigError):
        duration_us(text)
    if "month" not in text and "year" not in text:
        assert of_watermarks(spark, text) is None
