"""Joins in the chaos experiment: events with even numbers with those with odd ones, outer and as-of."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from experiments.chaos.data import BOUND_S, CLOCK, FLUSH, SECOND_US, Batches, Event, Input

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SPLIT = 20
"""A key of the events is split into this many."""
WITHIN_S = {"left": (-5, 20), "asof": (-30, 0)}
"""The queries, and how far the right row may be from the left one."""
Pair = tuple[int, int | None]
"""The numbers of a left event and of its partner."""


class Joins:
    """See :class:`experiments.chaos.data.Workload`."""

    queries = tuple(WITHIN_S)
    moments: Mapping[str, int] = {"any": 1, "append": 1, "commit": 1}
    tables: Mapping[str, Sequence[str]] = {}

    def result(self, events: DataFrame, query: str) -> DataFrame:
        from pyspark.sql import functions as F

        import aion

        both, low, high = F.col("k").isin(CLOCK, FLUSH), *WITHIN_S[query]
        events = events.drop("payload").withColumn("part", F.expr(f"id div 2 % {SPLIT}"))
        sides = (events.where((F.col("id") % 2 == number) | both) for number in (0, 1))
        left, right = (
            side.select("k", "part", F.col("ts").alias(time), F.col("id").alias(name))
            for side, time, name in zip(sides, ("ts", "right_ts"), ("a", "b"), strict=True)
        )
        joined = aion.join(
            left, right, key=["k", "part"], time=("ts", "right_ts"), within=(f"{low} seconds", f"{high} seconds"),
            how="left" if query == "left" else "asof", bound=f"{BOUND_S} seconds", name=query,
        )  # fmt: skip
        return joined.select("k", "part", "a", "b", "kind", "side", "event")

    def shown(self, result: DataFrame, query: str) -> DataFrame:
        return result

    def wrong(self, query: str, got: Batches, batches: Input) -> list[str]:
        """Checks that what was shown and not taken back is the join of all events that were not dropped."""
        shown: Counter[Pair] = Counter()
        dropped = 0
        for rows in got.values():
            for row in rows:
                if row["k"] in (CLOCK, FLUSH):
                    continue
                if row["kind"] == "dropped":
                    dropped += 1
                else:
                    shown[row["a"], row["b"]] += -1 if row["kind"] == "retracted" else 1
        expected = Counter(pairs(query, batches))
        found = [
            f"{query}: {pair}: there {shown[pair]} times, from the events {expected[pair]}"
            for pair in sorted(expected.keys() | shown.keys(), key=str)
            if shown[pair] != expected[pair]
        ]
        if dropped != (late := self.too_late(batches)):
            found.append(f"{query}: {dropped} events came out as dropped, {late} were too late")
        return found

    def too_late(self, batches: Input) -> int:
        return sum(event.too_late for events in batches for event in events)


def pairs(query: str, batches: Input) -> list[Pair]:
    """The join, by plain loops over all events."""
    sides: tuple[dict[tuple[str, int], list[Event]], ...] = defaultdict(list), defaultdict(list)
    for events in batches:
        for event in events:
            if event.k not in (CLOCK, FLUSH) and not event.too_late:
                sides[event.id % 2][event.k, event.id // 2 % SPLIT].append(event)
    low, high = (seconds * SECOND_US for seconds in WITHIN_S[query])
    found: list[Pair] = []
    for key, lefts in sides[0].items():
        for left in lefts:
            partners = [right for right in sides[1].get(key, ()) if low <= right.ts_us - left.ts_us <= high]
            if query == "asof" and partners:
                partners = [max(partners, key=lambda right: right.ts_us)]
            found += [(left.id, right.id) for right in partners] or [(left.id, None)]
    return found
