"""Stock market (paper, section 5): rolling aggregates, price warnings, mentions, their join, and a correlation.

(0) The lowest, highest and mean price of each symbol, over a third of a window, every sixth of one (10 s by 5 s).
(1) Two consecutive quotes of a symbol that differ by more than 5 % raise a warning. (2) The warnings of each symbol and
window. (3) The mentions of each symbol and window. (4) The join of both by symbol. (5) Their correlation over all
symbols.

(0) to (3) are windowed, side by side in one query. (4) and (5) are computed from the last panes of (2) and (3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from experiments.workloads.model import Int64s, Probe, Shape, Spec, Workload, arrivals, padding, timestamps

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame

    from experiments.workloads.chaining import LastPanes

SYMBOLS = 1_000
MENTIONED = 10
MENTIONS_SHARE = 0.1
"""The share of mentions in the events. A mention names 10 symbols, so there are about as many as quotes of symbols."""
THRESHOLD = 0.05
SIZE, SLIDE = 1 / 3, 1 / 6
SCHEMA = "warnings bigint, alerts array<bigint>"


def symbols(numbers: Int64s) -> pa.Array:
    return pa.array(np.char.add("SYM", np.char.zfill(np.arange(SYMBOLS).astype(str), 4))).take(pa.array(numbers))


def quotes(shape: Shape, batch: int) -> tuple[pa.Table, Int64s]:
    n = shape.events_per_batch - _mentions(shape)
    rng, ts, late = arrivals(shape, batch, n, 0)
    table = pa.table(
        {
            "ts": timestamps(ts),
            "id": np.arange(batch * n, (batch + 1) * n),
            "symbol": symbols(rng.integers(0, SYMBOLS, n)),
            "price": np.round(rng.normal(1_000, 50, n), 2),
            "pad": padding(rng, n, shape.payload_bytes),
        }
    )
    return table, late


def mentions(shape: Shape, batch: int) -> tuple[pa.Table, Int64s]:
    n = _mentions(shape)
    rng, ts, late = arrivals(shape, batch, n, 1)
    named = pa.ListArray.from_arrays(np.arange(n + 1) * MENTIONED, symbols(rng.integers(0, SYMBOLS, n * MENTIONED)))
    return pa.table({"ts": timestamps(ts), "symbols": named}), late


def _mentions(shape: Shape) -> int:
    return max(1, round(shape.events_per_batch * MENTIONS_SHARE))


def warnings(key: tuple[Any, ...], window: Any, events: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    """How many consecutive quotes of a symbol differ by more than 5 %, and which quotes those are.

    A symbol without warnings yields a row too, since it has to replace an earlier one that had some.
    """
    columns = [(batch["ts"].cast(pa.int64()), batch["id"], batch["price"]) for batch in events]
    ts, ids, prices = (np.concatenate([c[i].to_numpy() for c in columns]) for i in range(3))
    order = np.lexsort((ids, ts))
    prices = prices[order]
    jumps = np.abs(prices[1:] / prices[:-1] - 1) > THRESHOLD
    alerts = ids[order][1:][jumps]
    return {"warnings": len(alerts), "alerts": alerts.tolist()}


def with_aion(
    streams: Mapping[str, DataFrame], shape: Shape, probe: Probe, policy: Mapping[str, Any] | None = None
) -> DataFrame:
    from pyspark.sql import functions as F

    import aion
    from aion import aggregates as A

    rolling = aion.windowed(
        streams["quotes"],
        key="symbol",
        time="ts",
        windows={"rolling": aion.Sliding(shape.part(SIZE), shape.part(SLIDE))},
        aggregates={"lowest": A.min("price"), "highest": A.max("price"), "mean": A.mean("price")},
        policy=policy,
        name="rolling",
    )
    warned = aion.windowed(
        streams["quotes"],
        key="symbol",
        time="ts",
        windows={"warnings": aion.Tumbling(shape.window)},
        apply=aion.Apply(probe(warnings), probe.schema(SCHEMA)),
        policy=policy,
        name="warnings",
    )
    mentioned = aion.windowed(
        # With explode, Spark would infer a filter on rows without symbols and drop heartbeats before they move the
        # watermark.
        streams["mentions"].withColumn("symbol", F.explode_outer("symbols")),
        key="symbol",
        time="ts",
        windows={"mentions": aion.Tumbling(shape.window)},
        aggregates={"mentions": A.count()},
        policy=policy,
        name="mentions",
    )
    panes = aion.panes(rolling).unionByName(aion.panes(warned), allowMissingColumns=True)
    return panes.unionByName(aion.panes(mentioned), allowMissingColumns=True).withColumnRenamed("window", "stage")


def _branches(streams: Mapping[str, DataFrame], shape: Shape) -> list[Any]:
    from pyspark.sql import functions as F

    from experiments.workloads.collected import Branch

    return [
        Branch("rolling", streams["quotes"], shape.part(SIZE), shape.part(SLIDE)),
        Branch("warnings", streams["quotes"], shape.window),
        Branch(
            "mentions",
            streams["mentions"].select("ts", "arrived", F.explode_outer("symbols").alias("symbol")),
            shape.window,
        ),
    ]


KEPT_SCHEMA = f"lowest double, highest double, mean double, {SCHEMA}, mentions bigint"


def by_stage(key: tuple[Any, ...], window: Any, events: Iterator[pa.RecordBatch]) -> dict[str, Any]:
    """The three first stages over kept events. In one query, stock Spark can only do it this way."""
    if window.name == "warnings":
        return warnings(key, window, events)
    batches = list(events)
    if window.name == "mentions":
        return {"mentions": sum(batch.num_rows for batch in batches)}
    prices = np.concatenate([batch["price"].to_numpy() for batch in batches])
    return {"lowest": prices.min(), "highest": prices.max(), "mean": prices.mean()}


def with_window(streams: Mapping[str, DataFrame], shape: Shape) -> DataFrame:
    """The stages with built-in aggregates; for consecutive quotes, with a list of their times, ids and prices."""
    from pyspark.sql import functions as F

    from experiments.workloads.collected import tagged

    def where(stage: str, column: Any) -> Any:
        return F.when(F.col("stage") == stage, column)

    price = F.col("price")
    held = where("warnings", F.struct("ts", "id", "price"))
    rows = (
        tagged(_branches(streams, shape))
        .groupBy("stage", "w", "symbol")
        .agg(
            F.min(where("rolling", price)).alias("lowest"),
            F.max(where("rolling", price)).alias("highest"),
            F.avg(where("rolling", price)).alias("mean"),
            F.sort_array(F.collect_list(held)).alias("held"),
            F.count(F.lit(1)).alias("events"),
        )
    )
    jumped = (
        "transform(filter(sequence(2, size(held)), i -> "
        f"size(held) > 1 AND abs(held[i - 1].price / held[i - 2].price - 1) > {THRESHOLD}), i -> held[i - 1].id)"
    )
    alerts = where("warnings", F.expr(f"IF(size(held) < 2, array(), {jumped})"))
    return rows.select(
        "stage",
        F.col("w.start").alias("window_start"),
        F.col("w.end").alias("window_end"),
        "symbol",
        *("lowest", "highest", "mean"),
        F.size(alerts).cast("bigint").alias("warnings"),
        alerts.alias("alerts"),
        where("mentions", F.col("events")).alias("mentions"),
        "events",
    )


def finals(last: LastPanes, touched: set[tuple[str, int]], shape: Shape) -> dict[tuple[str, int], pd.DataFrame]:
    import pandas as pd

    found = {}
    for stage, start in touched:
        if stage == "rolling":
            found["rolling", start] = last.of("rolling", start)[["symbol", "lowest", "highest", "mean"]]
            continue
        warned, mentioned = last.of("warnings", start), last.of("mentions", start)
        if stage == "warnings":
            alerts = warned[["symbol", "alerts"]].explode("alerts").dropna()
            found["alerts", start] = alerts.astype({"alerts": "int64"})
        if len(warned) and len(mentioned):
            joined = warned[["symbol", "warnings"]].merge(mentioned[["symbol", "mentions"]], on="symbol")
            found["joined", start] = joined.astype({"warnings": "int64", "mentions": "int64"})
            found["correlation", start] = pd.DataFrame({"correlation": [correlation(joined)] if len(joined) else []})
    return found


def correlation(joined: pd.DataFrame) -> float:
    """Pearson's correlation of warnings and mentions; 0 if one of them is the same for all symbols."""
    pair = joined[["warnings", "mentions"]].to_numpy(float)
    centred = pair - pair.mean(axis=0)
    norm = float(np.sqrt((centred**2).sum(axis=0).prod()))
    return float(centred[:, 0] @ centred[:, 1] / norm) if norm else 0.0


def truth(tables: Mapping[str, pa.Table], shape: Shape) -> dict[str, pd.DataFrame]:
    import pandas as pd

    def frame(name: str, columns: list[str]) -> pd.DataFrame:
        rows: pd.DataFrame = tables[name].select(columns).to_pandas()
        rows["us"] = tables[name]["ts"].cast(pa.int64()).to_numpy()
        rows["window_start"] = rows["us"] // shape.window_us * shape.window_us
        return rows

    def pearson(pairs: pd.DataFrame) -> float:
        return pairs["warnings"].corr(pairs["mentions"]) if pairs.nunique().min() > 1 else 0.0

    quoted = frame("quotes", ["id", "symbol", "price"]).sort_values(["us", "id"])
    size_us, slide_us = round(shape.window_us * SIZE), round(shape.window_us * SLIDE)
    overlapping = [
        quoted.assign(window_start=quoted["us"] // slide_us * slide_us - k * slide_us)
        for k in range(size_us // slide_us)
    ]
    rolling = pd.concat(overlapping).groupby(["window_start", "symbol"], as_index=False)["price"]
    by = ["window_start", "symbol"]
    before = quoted.groupby(by)["price"].shift()
    quoted["jump"] = (quoted["price"] / before - 1).abs() > THRESHOLD
    warned = quoted.groupby(by, as_index=False).agg(warnings=("jump", "sum"))
    mentioned = frame("mentions", ["symbols"]).explode("symbols").rename(columns={"symbols": "symbol"})
    joined = warned.merge(mentioned.groupby(by, as_index=False).agg(mentions=("us", "size")), on=by)
    correlations = joined.groupby("window_start")[["warnings", "mentions"]].apply(pearson)
    return {
        "rolling": rolling.agg(["min", "max", "mean"]).rename(columns={"min": "lowest", "max": "highest"}),
        "alerts": quoted[quoted["jump"]][["window_start", "symbol", "id"]].rename(columns={"id": "alerts"}),
        "joined": joined,
        "correlation": correlations.fillna(0.0).rename("correlation").reset_index(),
    }


WORKLOAD = Workload(
    name="stock",
    spec=Spec(rate=10_000, window_s=30, payload_bytes=1_664, parts=6),
    streams={"quotes": quotes, "mentions": mentions},
    with_aion=with_aion,
    branches=_branches,
    function=by_stage,
    schema=KEPT_SCHEMA,
    key=("symbol",),
    held=("ts", "id", "price", "pad"),
    with_window=with_window,
    keys={"rolling": ("symbol",), "warnings": ("symbol",), "mentions": ("symbol",)},
    finals=finals,
    truth=truth,
)
