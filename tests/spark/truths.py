"""Events for pages and programs, as files, and plain computations of what their windows must come to."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame

SECOND = 1_000_000
START = 1_700_000_040  # a whole minute
Event = dict[str, Any]


def write(folder: Path, events: Sequence[Event], schema: pa.Schema) -> None:
    """A file more, which appears as a whole: queries may be looking."""
    folder.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist([{**e, **_micros(e, schema)} for e in events], schema)
    part = folder / ".part"
    pq.write_table(table, part)
    part.rename(folder / f"{len(list(folder.glob('*.parquet'))):06d}.parquet")


def _micros(event: Event, schema: pa.Schema) -> Event:
    times = [f.name for f in schema if pa.types.is_timestamp(f.type)]
    return {name: None if event.get(name) is None else round(event[name] * SECOND) for name in times}


def positions() -> list[list[Event]]:
    """Ten minutes; then late ones of them, and one from long after, with which all windows before are over."""
    rng = random.Random(11)

    def some(n: int, first: int, last: int) -> list[Event]:
        return [
            {
                "ts": START + rng.randrange(first, last),
                "segment": rng.randrange(2),
                "speed": rng.randrange(200) / 2,
                "user": rng.choice("ab"),
            }
            for _ in range(n)
        ]

    end = {"ts": START + 100_000, "segment": 9, "speed": 0.0, "user": "end"}
    return [[*some(60, 0, 590), *some(1, 599, 600)], [*some(15, 200, 560), *some(10, 600, 700), end]]


def tolls(events: Sequence[Event], size_s: int, slide_s: int) -> dict[Any, Any]:
    """(segment, start, end) -> (cars, mean speed)."""
    speeds: dict[Any, list[float]] = defaultdict(list)
    for e in events:
        last = e["ts"] // slide_s * slide_s
        for start in range(last, e["ts"] - size_s, -slide_s):
            speeds[e["segment"], start, start + size_s].append(e["speed"])
    return {place: (len(found), sum(found) / len(found)) for place, found in speeds.items()}


def visits(events: Sequence[Event], gap_s: int, ts: str = "ts", key: str = "user") -> dict[Any, int]:
    """(user, start, end) -> clicks; ``key``: the column with the user."""
    found: dict[Any, int] = {}
    for user in {e[key] for e in events}:
        times = sorted(e[ts] for e in events if e[key] == user)
        starts = [t for before, t in zip([-math.inf, *times], times, strict=False) if t - before > gap_s]
        for start, after in zip(starts, [*starts[1:], math.inf], strict=True):
            inside = [t for t in times if start <= t < after]
            found[user, start, inside[-1] + gap_s] = len(inside)
    return found


def seconds(at: Any) -> int:
    return round(at.timestamp())


def instant(text: str) -> float:
    """A time in SQLite as seconds since the epoch."""
    return datetime.fromisoformat(f"{text}+00:00").timestamp()


def newest(df: DataFrame, *values: str) -> dict[Any, Any]:
    """(segment, start, end) -> values, of the last panes; the README says how to get them."""
    rows = sorted((r for r in df.collect() if r["kind"] != "dropped"), key=lambda r: r["pane"])
    last = {(r["segment"], seconds(r["window_start"]), seconds(r["window_end"])): r for r in rows}
    return {place: tuple(row[value] for value in values) for place, row in last.items()}


def equal(found: Mapping[Any, Any], truth: Mapping[Any, Any]) -> None:
    assert truth and found.keys() == truth.keys()
    for place, values in truth.items():
        assert found[place] == pytest.approx(values), place
