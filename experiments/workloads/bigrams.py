"""Counts all pairs of adjacent words in short texts: one window function without key, and much work.

The paper's tweets are not available. These are texts of 3 to 30 words from a vocabulary whose frequencies follow Zipf's
law, with punctuation and letters beyond ASCII.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from experiments.workloads.model import Int64s, Probe, Shape, Spec, Workload, arrivals, padding, timestamps

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame

    from experiments.workloads.chaining import LastPanes

SCHEMA = "first string, second string, times bigint"
WORDS = 5_000
FEWEST, MOST = 3, 30
SYLLABLES = ("ka", "lo", "mi", "te", "su", "ra", "né", "vo", "ŝi", "du")
MARKS = ("", "", "", "", ",", ".", "!", "?", ";", '"', "'s", "\\", "}", "{", ":)", "#", "…")


@cache
def vocabulary() -> pa.Array:
    """Distinct words: a syllable for each digit of their number, some with a punctuation mark at the end."""
    digits = [[SYLLABLES[int(digit)] for digit in f"{number:04d}"] for number in range(WORDS)]
    return pa.array(["".join(word) + MARKS[number % len(MARKS)] for number, word in enumerate(digits)])


def texts(shape: Shape, batch: int) -> tuple[pa.Table, Int64s]:
    n = shape.events_per_batch
    rng, ts, late = arrivals(shape, batch, n)
    lengths = rng.integers(FEWEST, MOST + 1, n)
    frequencies = np.cumsum(1.0 / np.arange(1, WORDS + 1))
    drawn = np.searchsorted(frequencies, rng.random(int(lengths.sum())) * frequencies[-1], side="right")
    words = pa.ListArray.from_arrays(np.concatenate([[0], np.cumsum(lengths)]), vocabulary().take(pa.array(drawn)))
    table = pa.table(
        {"ts": timestamps(ts), "text": pc.binary_join(words, " "), "pad": padding(rng, n, shape.payload_bytes)}
    )
    return table, late


def pairs(lines: pa.Array) -> pa.Table:
    """How often each pair of adjacent words occurs in these texts."""
    split = pc.split_pattern(lines, " ")
    words, text = split.flatten(), pc.list_parent_indices(split).to_numpy()
    within = pa.array(text[:-1] == text[1:])
    both = pa.table({"first": words[:-1].filter(within), "second": words[1:].filter(within)})
    counted = both.group_by(["first", "second"]).aggregate([([], "count_all")])
    return counted.rename_columns(["first", "second", "times"])


def count_pairs(key: tuple[Any, ...], window: Any, events: Iterator[pa.RecordBatch]) -> pa.Table:
    """Counts the pairs of each batch, so that its texts can be freed, then adds up the counts."""
    counted = [pairs(batch["text"]) for batch in events]
    sums = pa.concat_tables(counted).group_by(["first", "second"]).aggregate([("times", "sum")])
    return sums.rename_columns(["first", "second", "times"])


def with_aion(
    streams: Mapping[str, DataFrame], shape: Shape, probe: Probe, policy: Mapping[str, Any] | None = None
) -> DataFrame:
    import aion

    panes = aion.windowed(
        streams["texts"],
        time="ts",
        windows={"bigrams": aion.Tumbling(shape.window)},
        apply=aion.Apply(probe(count_pairs), probe.schema(SCHEMA), blocking=False),
        policy=policy,
        name="bigrams",
    )
    return aion.panes(panes).withColumnRenamed("window", "stage")


def _branches(streams: Mapping[str, DataFrame], shape: Shape) -> list[Any]:
    from experiments.workloads.collected import Branch

    return [Branch("bigrams", streams["texts"], shape.window)]


def with_window(streams: Mapping[str, DataFrame], shape: Shape) -> DataFrame:
    from pyspark.sql import functions as F

    words = streams["texts"].select("ts", F.split("text", " ", -1).alias("words"))
    adjacent = F.arrays_zip(
        F.slice("words", 1, F.size("words") - 1).alias("first"),
        F.slice("words", 2, F.size("words") - 1).alias("second"),
    )
    both = words.select("ts", F.explode(adjacent).alias("pair")).select("ts", "pair.first", "pair.second")
    counts = both.groupBy(F.window("ts", shape.window).alias("w"), "first", "second").agg(
        F.count(F.lit(1)).alias("times")
    )
    window = (F.col("w.start").alias("window_start"), F.col("w.end").alias("window_end"))
    return counts.select(
        F.lit("bigrams").alias("stage"), *window, "first", "second", "times", F.col("times").alias("events")
    )


def finals(last: LastPanes, touched: set[tuple[str, int]], shape: Shape) -> dict[tuple[str, int], pd.DataFrame]:
    return {where: last.of(*where)[["first", "second", "times"]] for where in touched}


def truth(tables: Mapping[str, pa.Table], shape: Shape) -> dict[str, pd.DataFrame]:
    import pandas as pd

    starts = tables["texts"]["ts"].cast(pa.int64()).to_numpy() // shape.window_us * shape.window_us
    seen: Counter[tuple[int, str, str]] = Counter()
    for start, text in zip(starts.tolist(), tables["texts"]["text"].to_pylist(), strict=True):
        words = text.split(" ")
        seen.update((start, a, b) for a, b in pairwise(words))
    rows = [(*where, times) for where, times in seen.items()]
    return {"bigrams": pd.DataFrame(rows, columns=["window_start", "first", "second", "times"])}


WORKLOAD = Workload(
    name="bigrams",
    spec=Spec(rate=5_000, window_s=30, payload_bytes=3_584),
    streams={"texts": texts},
    with_aion=with_aion,
    branches=_branches,
    function=count_pairs,
    schema=SCHEMA,
    with_window=with_window,
    keys={"bigrams": ()},
    window_keys={"bigrams": ("first", "second")},
    finals=finals,
    truth=truth,
)
