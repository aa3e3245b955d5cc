"""The windows of the chaos experiment: aggregates, and a function of the kept events."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from experiments.chaos.data import FLUSH, SECOND_US, WINDOW_S, Batches, Event, Input, Row

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

WindowOfKey = tuple[str, int]
"""A key, and the start of its window in microseconds."""
COLUMNS = {"aggregates": ("n", "total", "low", "high"), "apply": ("n", "total", "digest")}
"""The queries, and the value columns of their panes."""


class Windows:
    """See :class:`experiments.chaos.data.Workload`."""

    queries = tuple(COLUMNS)
    moments: Mapping[str, int] = {"any": 1, "hand-over": 1, "append": 1, "commit": 1}
    tables: Mapping[str, Sequence[str]] = {query: ("k", "window_start", *COLUMNS[query]) for query in COLUMNS}

    def result(self, events: DataFrame, query: str) -> DataFrame:
        return _panes(events, query)

    def shown(self, result: DataFrame, query: str) -> DataFrame:
        from pyspark.sql import functions as F

        columns = ["k", "window_start", *COLUMNS[query], "pane", "kind", "events", "late_events"]
        return result.withColumn("window_start", F.unix_micros("window_start")).select(*columns)

    def wrong(self, query: str, got: Batches, batches: Input) -> list[str]:
        truth = Truth()
        for events in batches:
            truth.add(events)
        panes, expected = last_panes(got, query), truth.last_panes(query)
        found = [
            f"{query}: {key}: last pane {panes.get(key)}, from the events {expected.get(key)}"
            for key in sorted(panes.keys() | expected.keys())
            if panes.get(key) != expected.get(key)
        ]
        if (dropped := dropped_events(got)) != len(truth.too_late):
            found.append(f"{query}: {dropped} events came out as dropped, {len(truth.too_late)} were too late")
        return found

    def too_late(self, batches: Input) -> int:
        return sum(event.too_late for events in batches for event in events)


def _panes(events: DataFrame, query: str) -> DataFrame:
    import aion
    from aion import aggregates as A

    windows = aion.Tumbling(f"{WINDOW_S} seconds")
    if query == "aggregates":
        aggregates = {"n": A.count(), "total": A.sum("id"), "low": A.min("id"), "high": A.max("id")}
        return aion.windowed(events, key="k", time="ts", windows=windows, aggregates=aggregates)

    def seen(key: Any, window: Any, batches: Any) -> dict[str, Any]:
        ids = [i for batch in batches for i in batch.column("id").to_pylist()]
        return {"n": len(ids), "total": sum(ids), "digest": digest(ids)}

    schema = "n bigint, total bigint, digest string"
    return aion.windowed(events, key="k", time="ts", windows=windows, apply=aion.Apply(seen, schema), name="apply")


def digest(ids: Iterable[int]) -> str:
    """A digest of the set of events; their order does not matter."""
    return hashlib.sha256(",".join(map(str, sorted(ids))).encode()).hexdigest()[:16]


@dataclass
class Truth:
    """Computed by plain loops over all events: the ids in each window of each key, and the ids that came too late."""

    windows: dict[WindowOfKey, list[int]] = field(default_factory=dict)
    too_late: list[int] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.k == FLUSH:
                continue
            if event.too_late:
                self.too_late.append(event.id)
                continue
            start_us = event.ts_us // (WINDOW_S * SECOND_US) * (WINDOW_S * SECOND_US)
            self.windows.setdefault((event.k, start_us), []).append(event.id)

    def last_panes(self, query: str) -> dict[WindowOfKey, list[Any]]:
        """The expected values of the last pane of each window of each key."""
        if query == "aggregates":
            return {k: [len(ids), sum(ids), min(ids), max(ids)] for k, ids in self.windows.items()}
        return {k: [len(ids), sum(ids), digest(ids)] for k, ids in self.windows.items()}


def last_panes(batches: Batches, query: str) -> dict[WindowOfKey, list[Any]]:
    """The values of the last pane of each window of each key."""
    last: dict[WindowOfKey, Row] = {}
    for _, rows in sorted(batches.items()):
        for row in rows:
            key = row["k"], row["window_start"]
            if row["kind"] == "dropped" or row["k"] == FLUSH:
                continue
            if key not in last or row["pane"] > last[key]["pane"]:
                last[key] = row
    return {key: [row[c] for c in COLUMNS[query]] for key, row in last.items()}


def dropped_events(batches: Batches) -> int:
    return sum(row["events"] for rows in batches.values() for row in rows if row["kind"] == "dropped")
