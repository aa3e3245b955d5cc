"""The cost of combining overlapping windows in the operator: ``lazy``, ``eager``, and the choice of ``auto``.

Each case is measured twice: one pass over windows whose partials are loaded
(:class:`aion.execute.panes.combining.Loaded`), and one whole call of a :class:`aion.LocalOperator` that executes such
windows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

import aion
from aion import aggregates as A
from aion.core.life.actions import Execute, Execution, PaneKind, WindowRef
from aion.core.query.plan import Plan, make_plan
from aion.core.slicing.tree import Aggregation
from aion.execute.panes.combining import Loaded, windows_at_once
from experiments.slicing.runs import Settings

WAYS: tuple[Aggregation, ...] = ("lazy", "eager", "auto")
SLIDE_US = 100_000
WINDOWS = 100
"""The windows that end at once in an on-time case. A late event executes all of its windows again."""
LIMIT_BYTES = 256 << 20
AGGREGATES = {"n": A.count(), "mean": A.mean("value"), "most": A.max("value")}
SCHEMA = pa.schema([("key", pa.int64()), ("ts", pa.timestamp("us")), ("value", pa.float64())])


@dataclass(frozen=True, slots=True)
class Case:
    """Sliding windows in which each slice has an event of each key. ``late``: executed again for one late event."""

    overlap: int
    keys: int
    late: bool = False

    @property
    def windows(self) -> int:
        return self.overlap if self.late else WINDOWS

    @property
    def slices(self) -> int:
        return self.overlap + self.windows - 1

    @property
    def label(self) -> str:
        return f"overlap {self.overlap}, {self.keys:,} keys, {'one late event' if self.late else 'on time'}"


def cases(settings: Settings) -> list[Case]:
    """All on-time cases, and late cases with the largest overlap, which execute the most windows again."""
    on_time = [Case(overlap, keys) for overlap in settings.overlaps for keys in settings.keys]
    return [*on_time, *(Case(max(settings.overlaps), keys, late=True) for keys in settings.keys)]


def measure_operator(
    wanted: Sequence[Case], runs: int, seed: int, show: Callable[[str], None] = lambda text: None
) -> list[dict[str, Any]]:
    """For each case: median processor seconds of each way, and the ratios of eager and auto to lazy.

    Raises RuntimeError if two ways yield different rows.
    """
    found = []
    for case in wanted:
        seconds: dict[str, dict[str, list[float]]] = {"pass": {}, "call": {}}
        first: dict[str, pa.Table] = {}
        for _ in range(runs):
            for way in WAYS:
                for what, run in (("pass", one_pass), ("call", one_call)):
                    took, rows = run(case, way, seed)
                    rows = rows.sort_by([("window_start", "ascending"), ("key", "ascending")])
                    if not rows.equals(first.setdefault(what, rows)):
                        raise RuntimeError(f"{case.label}: {way} and {WAYS[0]} yield different rows")
                    seconds[what].setdefault(way, []).append(took)
        result = {**asdict(case), "windows": case.windows, "label": case.label}
        for what, by_way in seconds.items():
            medians = {way: statistics.median(of) for way, of in by_way.items()}
            result[f"{what}_s"] = medians
            result[f"{what}_ratios"] = {way: medians[way] / medians["lazy"] for way in WAYS[1:]}
        found.append(result)
        show(line(result))
    return found


def line(result: Mapping[str, Any]) -> str:
    """One case in one line."""
    parts = [
        f"{what}: " + ", ".join(f"{way} / lazy {ratio:.2f}" for way, ratio in result[f"{what}_ratios"].items())
        for what in ("pass", "call")
    ]
    return f"{result['label']}: {'; '.join(parts)}"


def events_of(case: Case, seed: int) -> pa.Table:
    """The events in order of time: one for each key in each slice."""
    rng = np.random.default_rng(seed)
    times = np.repeat(np.arange(case.slices) * SLIDE_US, case.keys)
    keys = np.tile(np.arange(case.keys), case.slices)
    return pa.table([keys, pa.array(times).cast(pa.timestamp("us")), rng.random(len(times))], schema=SCHEMA)


def late_event(case: Case) -> pa.Table:
    """An event in a slice that all windows share."""
    at = pa.array([(case.overlap - 1) * SLIDE_US]).cast(pa.timestamp("us"))
    return pa.table([pa.array([case.keys // 2]), at, pa.array([0.5])], schema=SCHEMA)


# -- a pass -----------------------------------------------------------------------------------------------------


def one_pass(case: Case, way: Aggregation, seed: int) -> tuple[float, pa.Table]:
    plan = make_plan(
        SCHEMA, key="key", time="ts", windows=sliding(case), aggregates=AGGREGATES, apply=None, outputs=None
    )
    events = events_of(case, seed)
    blocks = [(0, n * SLIDE_US, lifted(plan, events.slice(n * case.keys, case.keys))) for n in range(case.slices)]
    since = -1
    if case.late:
        since = 0
        blocks.insert(case.overlap, (1, (case.overlap - 1) * SLIDE_US, lifted(plan, late_event(case))))
    kind = PaneKind.LATE if case.late else PaneKind.ON_TIME
    windows = [WindowRef(0, n * SLIDE_US, (n + case.overlap) * SLIDE_US) for n in range(case.windows)]
    order = Execute.of(
        [Execution(window, kind, 0, since, 1, 0, 0) for window in windows],
        tuple(range(0, windows[-1].end_us, SLIDE_US)),
    )
    begun = time.process_time()
    rows = []
    for some in windows_at_once(plan, order):
        slices = frozenset(some.slices)
        loaded = Loaded.of_blocks(plan, [block for block in blocks if block[1] in slices])
        rows += list(loaded.windows(some, LIMIT_BYTES, way))
    return time.process_time() - begun, pa.Table.from_batches(rows)


def sliding(case: Case) -> aion.Sliding:
    return aion.Sliding(f"{case.overlap * SLIDE_US} us", f"{SLIDE_US} us")


def lifted(plan: Plan, events: pa.Table) -> pa.RecordBatch:
    assert plan.layout is not None
    partials = plan.layout.lift({"k0": events.column("key")}, {name: events.column(name) for name in SCHEMA.names})
    return partials.combine_chunks().to_batches()[0]


# -- a call -----------------------------------------------------------------------------------------------------


def one_call(case: Case, way: Aggregation, seed: int) -> tuple[float, pa.Table]:
    policy = {
        "lateness": {"initial_bound": "1 day", "coverage": None},
        "trigger": {"kind": "every_batch"},
        "execution": {"aggregation": way},
    }
    with aion.LocalOperator(
        windows=sliding(case), time="ts", key="key", aggregates=AGGREGATES, policy=policy
    ) as operator:
        operator.process(events_of(case, seed))
        whole_us = (case.overlap - 1) * SLIDE_US
        operator.advance(whole_us)  # windows that begin before the first event
        end_us = case.slices * SLIDE_US
        if case.late:
            operator.advance(end_us)
            event = late_event(case)
            begun = time.process_time()
            rows = operator.process(event)
        else:
            begun = time.process_time()
            rows = operator.advance(end_us)
        return time.process_time() - begun, rows
