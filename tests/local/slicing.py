"""Runs steps through LocalOperator: with and without keys, lazily and eagerly. The oracle checks each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

import aion
from aion import aggregates as A
from aion.config import Policy, load_policy
from aion.core.windows import Definition
from tests.keyed_oracle import Event
from tests.slicing_oracle import Dropped, Oracle, Pane

FOREVER = 10**17
YEAR = 365 * 24 * 3_600 * 1_000_000
AGGREGATES = {"total": A.sum("value"), "low": A.min("value"), "high": A.max("value")}
KEYS = {"no key": None, "one key": "key"}

Step = list[Event] | int
"""A batch, or a watermark."""


def policy(bound: int, preset: str = "memory_only", aggregation: str = "auto") -> Policy:
    """Fixes the bound. Late events trigger at once."""
    late = {"lateness.initial_bound": f"{bound} microseconds", "lateness.coverage": None}
    return load_policy(preset, {**late, "trigger.kind": "every_batch", "execution.aggregation": aggregation})


def table(events: Sequence[Event]) -> pa.Table:
    times = pa.array([event.t for event in events], pa.int64()).cast(pa.timestamp("us"))
    values = pa.array([event.value for event in events], pa.int64())
    return pa.table({"key": pa.array([event.key for event in events], pa.int64()), "ts": times, "value": values})


class Player:
    """Runs steps through a LocalOperator. After a batch it repeats the watermark, to get what the batch triggers."""

    def __init__(
        self, windows: Sequence[Definition], bound: int = 0, key: str | None = None, aggregation: str = "auto"
    ) -> None:
        self.operator = aion.LocalOperator(
            windows={str(n): window for n, window in enumerate(windows)},
            time="ts", key=key, aggregates=AGGREGATES, policy=policy(bound, aggregation=aggregation),
        )  # fmt: skip
        self.dropped: Dropped = Counter()
        self._watermark: int | None = None

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *_: object) -> None:
        self.operator.close()

    def step(self, step: Step) -> list[Pane]:
        """Returns the panes of a step, sorted."""
        if isinstance(step, int):
            self._watermark = step if self._watermark is None else max(step, self._watermark)
            return sorted(self._panes(self.operator.advance(step)), key=str)
        panes = self._panes(self.operator.process(table(step)))
        if self._watermark is not None:
            panes += self._panes(self.operator.advance(self._watermark))
        return sorted(panes, key=str)

    def _panes(self, found: pa.Table) -> list[Pane]:
        panes = []
        for name in ("window_start", "window_end"):
            if name in found.schema.names:
                at = found.schema.get_field_index(name)
                found = found.set_column(at, name, found.column(name).cast(pa.int64()))
        for row in found.to_pylist():
            number, key = int(row["window"]), row.get("key", 0)
            if row["kind"] == "dropped":
                self.dropped[number, key] += row["events"]
                continue
            values = (row["events"], *(row[name] for name in AGGREGATES))
            panes.append(Pane(number, key, row["window_start"], row["window_end"], row["kind"], *values))
        return panes


def expected(windows: Sequence[Definition], bound: int, steps: Sequence[Step]) -> tuple[list[list[Pane]], Dropped]:
    """Returns what the oracle says: the panes of each step, and what is dropped in all."""
    oracle = Oracle(windows, bound)
    found: list[list[Pane]] = []
    dropped: Dropped = Counter()
    for step in steps:
        if isinstance(step, int):
            found.append(oracle.advance(step))
        else:
            dropped += oracle.process(step)
            found.append([] if oracle.watermark is None else oracle.advance(oracle.watermark))
    return found, dropped


def check(windows: Sequence[Definition], bound: int, steps: Sequence[Step], **how: Any) -> list[list[Pane]]:
    """Returns the panes of each step. Checks that the oracle yields the same."""
    right, dropped = expected(windows, bound, steps)
    with Player(windows, bound, **how) as player:
        for number, (step, panes) in enumerate(zip(steps, right, strict=True)):
            assert player.step(step) == panes, f"step {number}: {step}"
        assert player.dropped == dropped
    return right


def panes_of(windows: Sequence[Definition], steps: Sequence[Step], bound: int = 0) -> list[list[Pane]]:
    """Returns the panes of each step. Checks that they are the same with and without keys, lazily and eagerly."""
    for key in KEYS.values():
        for aggregation in ("lazy", "eager"):
            found = check(windows, bound, steps, key=key, aggregation=aggregation)
    return found


def batch(*events: tuple[int, int]) -> list[Event]:
    """Makes events of one key from times and values."""
    return [Event(0, t, value) for t, value in events]


def instants(*times: int) -> list[Event]:
    return batch(*((t, 1) for t in times))


def brief(panes: Sequence[Pane], definition: int | None = None) -> list[tuple[int, int, str, int]]:
    return [(p.start, p.end, p.kind, p.events) for p in panes if definition in (None, p.definition)]
