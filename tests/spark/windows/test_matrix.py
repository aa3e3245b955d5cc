"""Every kind of window with every kind of content and key, at sizes that cross every usual threshold.

Two batches of 400,000 events of 250,000 keys, then one event ten days later. No query may fail, and every event is in
the windows in which it belongs.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import aion
from aion import aggregates as A

pytestmark = [pytest.mark.proof, pytest.mark.usual_sizes]

ROWS, KEYS = 400_000, 250_000
STEP_US = 25
HOUR_US = 3_600_000_000
LAST_US = 240 * HOUR_US
UTC = pa.timestamp("us", "UTC")

KINDS: dict[str, Callable[..., Any]] = {
    "tumbling": lambda **how: aion.Tumbling("1 minute", **how),
    "sliding": lambda **how: aion.Sliding("1 minute", "30 seconds", **how),
    "cumulative": lambda **how: aion.Cumulative("30 seconds", "1 minute", **how),
    "calendar": lambda **how: aion.Calendar("1 day", zone="Europe/Paris", **how),
    "session": lambda **how: aion.Session("1 minute", **how),
    "cut session": lambda **how: aion.Session("1 minute", max_duration="1 hour", **how),
    "gaps of events": lambda **how: aion.Session(gap_column="gap", **how),
    "count": lambda **how: aion.Count(2, **how),
    "per record": lambda **how: aion.PerRecord("100 microseconds", **how),
    "punctuated": lambda **how: aion.Punctuated("mark", **how),
}


def counted(key: Any, window: Any, events: Any) -> dict[str, Any]:
    return {"n": sum(batch.num_rows for batch in events)}


CONTENTS: dict[str, dict[str, Any]] = {
    "partials": {"aggregates": {"n": A.count(), "mean": A.mean("v"), "last": A.last("v")}},
    "holistic": {"aggregates": {"n": A.count(), "values": A.collect_list("v"), "middle": A.median("v")}},
    "sketch": {"aggregates": {"n": A.count(), "distinct": A.approx_count_distinct("v")}},
    "apply": {"apply": aion.Apply(counted, "n bigint")},
}
KEY_COLUMNS: dict[str, list[str]] = {"text": ["k"], "six": ["k", "k1", "k2", "k3", "k4", "k5"], "none": []}
OPTIONS = ["as it is", "final", "early", "completeness", "levels", "files"]
CELLS = list(itertools.product(KINDS, CONTENTS, KEY_COLUMNS))
DDL = (
    "k string, k1 bigint, k2 boolean, k3 date, k4 double, k5 binary, ts timestamp, v bigint, mark boolean, "
    "gap interval day to second"
)


def events(first_us: int, rows: int) -> pa.Table:
    number = np.arange(rows) % KEYS
    text = pc.binary_join_element_wise("key ", pa.array(number).cast(pa.string()), "")
    odd = [None, "", "nul \0 in it", "\N{GRINNING FACE}"]
    text = pa.concat_arrays([pa.array(odd, pa.string()), text[4:KEYS]]).take(pa.array(number))
    return pa.table(
        {
            "k": text,
            "k1": number % 7,
            "k2": pa.array(number % 3 == 0),
            "k3": pa.array((number % 5).astype(np.int32)).cast(pa.date32()),
            "k4": number / 2,
            "k5": pc.cast(pa.array(number % 11).cast(pa.string()), pa.binary()),
            "ts": pa.array(first_us + np.arange(rows) * STEP_US).cast(UTC),
            "v": np.arange(rows),
            "mark": pa.array(np.ones(rows, np.bool_)),
            "gap": pa.array(np.full(rows, 60_000_000)).cast(pa.duration("us")),
        }
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for each batch. Spark takes them in the order of their times."""
    folder = tmp_path_factory.mktemp("matrix")
    for number, table in enumerate([events(0, ROWS), events(HOUR_US, ROWS), events(LAST_US, 1)]):
        path = folder / f"{number}.parquet"
        pq.write_table(table, path, row_group_size=ROWS // 4)
        os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    return folder


def expected(kind: str, keys: str, option: str) -> int:
    """How many events the last panes of all windows count that begin before the last event."""
    counts = 2 * np.bincount(np.arange(ROWS) % KEYS, minlength=KEYS) if keys != "none" else np.array([2 * ROWS])
    if kind in ("sliding", "cumulative"):
        return 4 * ROWS
    if kind == "count":
        return int((counts // 2 * 2).sum())
    if kind == "punctuated":
        # The last event of a key opens a window that nothing ends. The last event of all ends one, which is not final.
        return int((counts - 1).sum()) + (option != "final")
    if kind == "per record" and keys == "none":
        return 2 * (5 * ROWS - 10)
    return 2 * ROWS


@pytest.mark.parametrize(
    ("kind", "content", "keys", "option"),
    [(*cell, OPTIONS[number % len(OPTIONS)]) for number, cell in enumerate(CELLS)],
)
def test_no_query_fails_and_every_event_is_counted(
    spark: Any, folder: Path, tmp_path: Path, kind: str, content: str, keys: str, option: str
) -> None:
    what: dict[str, Any] = {**CONTENTS[content], "key": KEY_COLUMNS[keys] or None, "time": "ts"}
    what["policy"] = {"trigger": {"kind": "every_batch"}, "lateness": {"initial_bound": "1 hour", "coverage": None}}
    windows = KINDS[kind]()
    if option == "final":
        what["emit"] = "final"
    elif option == "completeness":
        what["completeness"] = True
    elif option == "levels":
        what["policy"]["distribution"] = {"merge_levels": 1, "fan_in": 2}
    elif option == "early" and kind != "per record":
        windows = KINDS[kind](early="10 seconds")
    if option == "files":
        source: Any = aion.read_files(spark, folder, schema=DDL, watermark=("ts", "0 seconds"), max_files_per_trigger=1)
    else:
        read = spark.readStream.schema(DDL).option("maxFilesPerTrigger", 1)
        source = read.parquet(str(folder)).withWatermark("ts", "0 seconds")
    panes = aion.windowed(source, windows=windows, **what)
    query = (
        panes.select(*(KEY_COLUMNS[keys]), "window_start", "window_end", "n", "pane", "kind", "events")
        .writeStream.format("parquet")
        .option("path", str(tmp_path / "out"))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    rows = pq.read_table(tmp_path / "out")
    assert pc.sum(pc.equal(rows.column("kind"), "dropped")).as_py() in (0, None)
    rows = rows.filter(pc.less(rows.column("window_start").cast(UTC).cast(pa.int64()), LAST_US // 2))
    assert pc.all(pc.equal(rows.column("n"), rows.column("events"))).as_py()
    # Windows that run early run again on time. Nothing else comes twice: no event is late.
    rows = rows.filter(pc.not_equal(rows.column("kind"), "early"))
    if option != "early":
        places = rows.group_by([*KEY_COLUMNS[keys], "window_start", "window_end"]).aggregate([])
        assert kind == "count" or places.num_rows == rows.num_rows
    assert pc.sum(rows.column("n")).as_py() == expected(kind, keys, option)
