"""Linear Road (paper, section 5): cars report their positions, and pay tolls in jams.

(1) The number of cars and their mean speed, for each segment and window (a minute). (2) A car with at least 4 equal
positions is stopped. (3) Two stopped cars at one place are an accident. (4) The toll of a segment: nothing if its mean
speed is above 40, or it has at most 50 cars, or an accident; else 2 * (cars - 50)^2.

A car reports twice a minute, so four reports take two minutes. So (2) and (3) use windows of two minutes, every minute,
which is the benchmark's own rule of four consecutive reports. (1) to (3) are windows of one operator over the same kept
events. (4) joins their last panes by segment and end of the window.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from experiments.workloads.model import (
    Int64s,
    Probe,
    Shape,
    Spec,
    Workload,
    drawn_lateness,
    padding,
    timestamps,
)

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame

    from experiments.workloads.chaining import LastPanes

REPORTS = 2
"""The reports of a car in a window: every 30 s in a minute."""
SEGMENTS, SEGMENT_FEET, LANES = 64, 5_280, 3
CARS_OF_AN_EXPRESSWAY = 6_000
"""The paper's prototype had 100, on more expressways. So no segment ever had more than 50 cars, and no toll was due."""
TRIP = 16
"""The reports in one trip of a car. Then it enters again somewhere else."""
STOPS_AFTER, STOPS_FOR = 3, 8
BREAKDOWNS, ACCIDENTS = 0.02, 0.01
"""The share of trips on which a car stops alone, and the share of pairs of cars that stop together."""
FEET_OF_A_REPORT = 30 * SEGMENT_FEET / 3_600
STOPPED_REPORTS = 4
SEGMENT = ("expressway", "direction", "segment")
SCHEMA = "cars bigint, speed double, stopped bigint, accidents bigint"


def cars_of(shape: Shape) -> int:
    return max(2, shape.events_per_batch // REPORTS // 2 * 2)


def reports(shape: Shape, batch: int) -> tuple[pa.Table, Int64s]:
    """The arrivals of one window's time: its own reports, and late reports of earlier windows."""
    cars, every_us = cars_of(shape), shape.window_us // REPORTS
    phase_us = np.random.default_rng([shape.seed, 1]).integers(0, every_us, cars)
    parts: list[dict[str, Int64s]] = []
    for behind in range(shape.past_windows + 1):
        for report in range((batch - behind) * REPORTS, (batch - behind + 1) * REPORTS):
            rng = np.random.default_rng([shape.seed, 2, report + (1 << 20)])
            of = np.flatnonzero(drawn_lateness(rng, cars, shape.past_windows) == behind)
            ts = shape.origin_us + report * every_us + phase_us[of]
            where = {name: values[of] for name, values in positions(shape, cars, report).items()}
            parts.append({"ts": ts, "late": np.full(len(of), behind), "car": of, **where})
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    late = columns.pop("late")
    order = np.lexsort((columns["car"], columns["ts"] + late * shape.window_us))
    columns = {name: values[order] for name, values in columns.items()}
    rng = np.random.default_rng([shape.seed, 3, batch])
    table = pa.table(
        {
            "ts": timestamps(columns.pop("ts")),
            **columns,
            "pad": padding(rng, len(order), shape.payload_bytes),
        }
    )
    return table, late[order]


def positions(shape: Shape, cars: int, report: int) -> dict[str, Int64s]:
    """The position of each car at its ``report``-th report. Two cars that have an accident drive and stop together."""
    trip, at = divmod(report, TRIP)
    rng = np.random.default_rng([shape.seed, 4, trip + (1 << 20)])
    expressways = max(1, round(cars / CARS_OF_AN_EXPRESSWAY))
    route = {
        "expressway": rng.integers(0, expressways, cars),
        "direction": rng.integers(0, 2, cars),
        "lane": rng.integers(0, LANES, cars),
        # More cars at the beginning of the road, so that some segments are jammed and most are not.
        "start": (rng.random(cars) ** 2 * SEGMENTS * SEGMENT_FEET).astype(np.int64),
        "speed": rng.integers(16, 35, cars),
    }
    together = np.repeat(rng.random(cars // 2) < ACCIDENTS, 2)
    leader = np.where(together, np.arange(cars) // 2 * 2, np.arange(cars))
    route = {name: values[leader] for name, values in route.items()}
    stops = together | (rng.random(cars) < BREAKDOWNS)
    stopped = stops & (STOPS_AFTER <= at < STOPS_AFTER + STOPS_FOR)
    moved = np.where(stops, min(at, STOPS_AFTER) + max(0, at - STOPS_AFTER - STOPS_FOR), at)
    feet = route.pop("start") + (route["speed"] * moved * FEET_OF_A_REPORT).astype(np.int64)
    feet %= SEGMENTS * SEGMENT_FEET
    return {**route, "speed": np.where(stopped, 0, route["speed"]), "segment": feet // SEGMENT_FEET, "position": feet}


def of_segment(key: tuple[Any, ...], window: Any, events: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    """One window of a segment: its cars and their mean speed, or its standing cars and accidents."""
    batches = list(events)
    columns = ("car", "speed") if window.name == "minute" else ("car", "lane", "position")
    car, *others = (np.concatenate([batch[name].to_numpy() for batch in batches]) for name in columns)
    if window.name == "minute":
        return {"cars": len(np.unique(car)), "speed": float(others[0].mean())}
    places, times = np.unique(np.stack([*others, car]), axis=1, return_counts=True)
    standing = places[:, times >= STOPPED_REPORTS]
    _, together = np.unique(standing[:2], axis=1, return_counts=True)
    return {"stopped": standing.shape[1], "accidents": int((together >= 2).sum())}


def with_aion(
    streams: Mapping[str, DataFrame], shape: Shape, probe: Probe, policy: Mapping[str, Any] | None = None
) -> DataFrame:
    import aion

    panes = aion.windowed(
        streams["reports"],
        key=SEGMENT,
        time="ts",
        windows={"minute": aion.Tumbling(shape.window), "standing": aion.Sliding(shape.part(2), shape.window)},
        apply=aion.Apply(probe(of_segment), probe.schema(SCHEMA)),
        policy=policy,
        name="segments",
    )
    return aion.panes(panes).withColumnRenamed("window", "stage")


def _branches(streams: Mapping[str, DataFrame], shape: Shape) -> list[Any]:
    from experiments.workloads.collected import Branch

    reported = streams["reports"]
    return [
        Branch("minute", reported, shape.window),
        Branch("standing", reported, shape.part(2), shape.window),
    ]


def with_window(streams: Mapping[str, DataFrame], shape: Shape) -> DataFrame:
    """The stages with built-in aggregates; for standing cars, with lists of positions."""
    from pyspark.sql import functions as F

    from experiments.workloads.collected import tagged

    def where(stage: str, column: Any) -> Any:
        return F.when(F.col("stage") == stage, column)

    rows = (
        tagged(_branches(streams, shape))
        .groupBy("stage", "w", *SEGMENT)
        .agg(
            F.size(F.collect_set(where("minute", F.col("car")))).cast("bigint").alias("cars"),
            F.avg(where("minute", F.col("speed"))).alias("speed"),
            F.collect_list(where("standing", F.struct("lane", "position", "car"))).alias("held"),
            F.count(F.lit(1)).alias("events"),
        )
    )
    equal = f"filter(array_distinct(held), p -> size(filter(held, q -> q = p)) >= {STOPPED_REPORTS})"
    place = "named_struct('lane', p.lane, 'position', p.position)"
    meeting = f"filter(array_distinct(transform(s, p -> {place})), x -> size(filter(s, p -> {place} = x)) >= 2)"
    standing = F.expr(equal)
    return rows.withColumn("s", standing).select(
        "stage",
        F.col("w.start").alias("window_start"),
        F.col("w.end").alias("window_end"),
        *SEGMENT,
        where("minute", F.col("cars")).alias("cars"),
        "speed",
        where("standing", F.size("s").cast("bigint")).alias("stopped"),
        where("standing", F.size(F.expr(meeting)).cast("bigint")).alias("accidents"),
        "events",
    )


def finals(last: LastPanes, touched: set[tuple[str, int]], shape: Shape) -> dict[tuple[str, int], pd.DataFrame]:
    found = {}
    minutes = {start if stage == "minute" else start + shape.window_us for stage, start in touched}
    for stage, start in touched:
        if stage == "standing":
            rows = last.of("standing", start)[[*SEGMENT, "stopped", "accidents"]]
            found["accidents", start] = rows[rows["accidents"] > 0].astype("int64")
    for start in minutes:
        cars = last.of("minute", start)
        if not len(cars):
            continue
        rows = cars[[*SEGMENT, "cars", "speed"]].astype({"cars": "int64"})
        standing = last.of("standing", start - shape.window_us)
        if len(standing):
            rows = rows.merge(standing[[*SEGMENT, "accidents"]], on=list(SEGMENT), how="left")
        else:
            rows["accidents"] = 0
        free = (rows["speed"] > 40) | (rows["cars"] <= 50) | (rows["accidents"].fillna(0) > 0)
        rows["toll"] = (2 * (rows["cars"] - 50) ** 2).where(~free, 0)
        found["tolls", start] = rows.drop(columns="accidents")
    return found


def truth(tables: Mapping[str, pa.Table], shape: Shape) -> dict[str, pd.DataFrame]:
    import pandas as pd

    events = tables["reports"].drop_columns("pad").to_pandas()
    us = tables["reports"]["ts"].cast(pa.int64()).to_numpy()
    events["window_start"] = us // shape.window_us * shape.window_us
    by = ["window_start", *SEGMENT]
    minutes = events.groupby(by, as_index=False).agg(cars=("car", "nunique"), speed=("speed", "mean"))
    twice = pd.concat([events, events.assign(window_start=events["window_start"] - shape.window_us)])
    counts = twice.groupby([*by, "lane", "position", "car"], as_index=False).size()
    stopped = counts[counts["size"] >= STOPPED_REPORTS]
    places = stopped.groupby([*by, "lane", "position"], as_index=False).agg(here=("car", "size"))
    accidents = places[places["here"] >= 2].groupby(by, as_index=False).agg(accidents=("here", "size"))
    accidents = stopped.groupby(by, as_index=False).agg(stopped=("car", "size")).merge(accidents, on=by)
    at_end = accidents.assign(window_start=accidents["window_start"] + shape.window_us)
    tolls = minutes.merge(at_end[[*by, "accidents"]], on=by, how="left").fillna({"accidents": 0})
    charged = (tolls["speed"] <= 40) & (tolls["cars"] > 50) & (tolls["accidents"] == 0)
    tolls["toll"] = np.where(charged, 2 * (tolls["cars"] - 50) ** 2, 0)
    return {"accidents": accidents, "tolls": tolls.drop(columns="accidents")}


WORKLOAD = Workload(
    name="linear-road",
    spec=Spec(rate=10_000, window_s=60, payload_bytes=1_536),
    streams={"reports": reports},
    with_aion=with_aion,
    branches=_branches,
    function=of_segment,
    schema=SCHEMA,
    key=SEGMENT,
    held=("ts", "car", "lane", "speed", "position", "pad"),
    with_window=with_window,
    keys={"minute": SEGMENT, "standing": SEGMENT},
    finals=finals,
    truth=truth,
)
