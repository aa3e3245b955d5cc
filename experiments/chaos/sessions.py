"""Windows of keys in the chaos experiment: sessions of many keys, plain ones and ones that are cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from experiments.chaos.data import FLUSH, Batches, Input, Row

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SPLIT = 200
"""A key of the events is split into this many."""
COLUMNS = ("k", "part", "window_start", "window_end", "n", "total", "pane", "kind", "events", "late_events")
WindowOfKey = tuple[str, int, int, int]


class Sessions:
    """See :class:`experiments.chaos.data.Workload`."""

    queries = ("sessions", "cut")
    moments: Mapping[str, int] = {"any": 1, "append": 1, "commit": 1}
    # Where a session is cut depends on the batches, which are not the same in a copy.
    tables: Mapping[str, Sequence[str]] = {
        "sessions": ("k", "part", "window_start", "window_end", "n", "total"), "cut": ()
    }  # fmt: skip

    def result(self, events: DataFrame, query: str) -> DataFrame:
        from pyspark.sql import functions as F

        import aion
        from aion import aggregates as A

        gap = "12 seconds"
        window = aion.Session(gap) if query == "sessions" else aion.Session(gap, max_duration="40 seconds")
        return aion.windowed(
            events.withColumn("part", F.col("id") % SPLIT), key=["k", "part"], time="ts", windows=window,
            aggregates={"n": A.count(), "total": A.sum("id")}, name=query,
        )  # fmt: skip

    def shown(self, result: DataFrame, query: str) -> DataFrame:
        from pyspark.sql import functions as F

        times = {name: F.unix_micros(name) for name in ("window_start", "window_end")}
        return result.withColumns(times).select(*COLUMNS)

    def wrong(self, query: str, got: Batches, batches: Input) -> list[str]:
        """Checks that each event is in exactly one session that is left, or was dropped."""
        expected: Counter[str] = Counter()
        for events in batches:
            expected.update(event.k for event in events if event.k != FLUSH)
        found: Counter[str] = Counter()
        for (key, *_), row in left(got).items():
            found[key] += row["n"]
        for rows in got.values():
            for row in rows:
                if row["kind"] == "dropped" and row["k"] != FLUSH:
                    found[row["k"]] += row["events"]
        return [
            f"{query}: {key}: {found[key]} events in sessions or dropped, of {expected[key]}"
            for key in sorted(expected.keys() | found.keys())
            if found[key] != expected[key]
        ]

    def too_late(self, batches: Input) -> int:
        return sum(event.too_late for events in batches for event in events)


def left(batches: Batches) -> dict[WindowOfKey, Row]:
    """Returns what a table has after all batches: later panes replace earlier ones, and retractions delete."""
    table: dict[WindowOfKey, Row] = {}
    for _, rows in sorted(batches.items()):
        # A retraction names the pane that it withdraws, which may be of the same batch.
        for row in sorted(rows, key=lambda row: (row["pane"] or 0, row["kind"] == "retracted")):
            place = row["k"], row["part"], row["window_start"], row["window_end"]
            if row["kind"] == "dropped" or row["k"] == FLUSH:
                continue
            if row["kind"] == "retracted":
                table.pop(place, None)
            else:
                table[place] = row
    return table
