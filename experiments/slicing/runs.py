"""What ``aion experiment slicing`` runs: sensor data as at a football match, and one contender over it at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import aion
from aion import aggregates as A
from aion.config import Policy, load_policy
from aion.core.windows import Definition, Session, Tumbling
from experiments.slicing.baselines import Buckets, FlatFat, Panes

SENSOR_HZ = 200
GAPS_PER_MINUTE = 5
GAP_US = 1_500_000
DELAY_US = 2_000_000
SESSION_US = 1_000_000
SHORTEST_MS, LONGEST_MS = 1_000, 20_000
EPOCH_US = 1_372_000_000_000_000
"""June 2013, when the data of Scotty reference 16 were recorded."""

# FlatFAT inserts single events; with batches of this size its clock is looked at often enough.
FEW = 1_000
FILL_S = LONGEST_MS // 1_000 + 4


@dataclass(frozen=True, slots=True)
class Settings:
    """``rate``: events per second of event time. ``seconds``: that a baseline is measured for, in each run."""

    events: int = 4_000_000
    batch: int = 4_000_000
    small_batch: int = 100_000
    """Of the leg of small batches, and the most that a baseline is given at once."""
    rate: int = 15_000
    rates: tuple[int, ...] = (1_000, 15_000, 100_000)
    windows: tuple[int, ...] = (1, 20, 100, 1_000)
    out_of_order: float = 0.2
    fractions: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    concurrent: int = 20
    """Windows while the fraction changes."""
    runs: int = 5
    seconds: float = 0.3
    records: int = 4_096
    """In a window per record."""
    overlaps: tuple[int, ...] = (20, 100, 600)
    """Of the sliding windows that the two aggregate stores are compared on."""
    keys: tuple[int, ...] = (10, 1_000)
    seed: int = 1


class Stream(NamedTuple):
    """Events in the order of arrival."""

    times_us: np.ndarray
    values: np.ndarray


class Batch(NamedTuple):
    """``table``: the same columns once more, as a user has them; nothing is copied."""

    times_us: np.ndarray
    values: np.ndarray
    table: pa.Table
    watermark_us: int
    """After it: no event that is still to come is older."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of a figure: what all contenders are given."""

    rate: int
    windows: int
    session: bool
    out_of_order: float
    batch: int

    @property
    def definitions(self) -> list[Definition]:
        tumbling: list[Definition] = [Tumbling(size_us) for size_us in sizes_us(self.windows)]
        return [*tumbling, Session(SESSION_US)] if self.session else tumbling


@dataclass(slots=True)
class Result:
    """Of one run: what was timed, and all panes that came out, as one number.

    ``seconds``: by the clock. ``processor_seconds``: of all threads.
    """

    contender: str
    events: int
    seconds: float
    processor_seconds: float
    panes: int
    checksum: int
    batches: int = field(repr=False)


# Policies of LocalOperator: the presets as they are, and memory_only with one way to combine overlapping windows.
POLICIES = {
    "aion": load_policy("memory_only"),
    "standard": load_policy("standard"),
    "lazy": load_policy("memory_only", {"execution.aggregation": "lazy"}),
    "eager": load_policy("memory_only", {"execution.aggregation": "eager"}),
}
CONTENDERS = {
    "aion": "LocalOperator, memory_only",
    "standard": "LocalOperator, standard",
    "lazy": "LocalOperator, memory_only, lazy",
    "eager": "LocalOperator, memory_only, eager",
    "buckets": "buckets",
    "flatfat-batch": "FlatFAT, whole batches",
    "flatfat": "FlatFAT",
}


def sizes_us(windows: int) -> list[int]:
    """Lengths equally distributed from 1 to 20 seconds, in whole milliseconds."""
    if windows == 1:
        return [SHORTEST_MS * 1_000]
    return [int(ms) * 1_000 for ms in np.linspace(SHORTEST_MS, LONGEST_MS, windows).round()]


def generate(events: int, rate: int, out_of_order: float, seed: int) -> Stream:
    """Readings of ``rate / 200`` sensors, each every 5 ms, with 5 gaps a minute that end sessions.

    A share of the events arrives late by up to 2 seconds, equally distributed; what they overtake makes the disorder.
    """
    rng = np.random.default_rng(seed)
    sensors = max(rate // SENSOR_HZ, 1)
    period_us = 1_000_000 // SENSOR_HZ * sensors * SENSOR_HZ // rate
    ticks = -(-events // sensors)
    phases = np.sort(rng.integers(0, period_us, sensors))
    active_us = (np.arange(ticks)[:, None] * period_us + phases).ravel()[:events]
    stretch_us = 60_000_000 // GAPS_PER_MINUTE - GAP_US
    times_us = EPOCH_US + active_us + active_us // stretch_us * GAP_US
    delayed = rng.random(events) < out_of_order
    arrivals = times_us + np.where(delayed, rng.integers(0, DELAY_US + 1, events), 0)
    order = np.argsort(arrivals, kind="stable")
    speeds = rng.integers(0, 12_000_000, events)  # of a player or the ball, in micrometres per second
    return Stream(times_us[order], speeds)


def batches_of(stream: Stream, size: int, begin: int = 0) -> list[Batch]:
    """Batches from event ``begin`` on, each with the watermark behind it: two seconds before the latest event."""
    bounds = [*range(begin, len(stream.times_us), size), len(stream.times_us)]
    found = []
    latest_us = int(stream.times_us[:begin].max()) if begin else EPOCH_US
    for low, high in pairwise(bounds):
        times_us, values = stream.times_us[low:high], stream.values[low:high]
        table = pa.table({"ts": pa.array(times_us, pa.timestamp("us")), "value": pa.array(values)})
        latest_us = max(latest_us, int(times_us.max()))
        found.append(Batch(times_us, values, table, latest_us - DELAY_US))
    return found


class Local:
    """LocalOperator, as a user calls it: a sum, no key."""

    def __init__(self, windows: Sequence[Definition], policy: Policy) -> None:
        self._operator = aion.LocalOperator(
            windows={str(n): window for n, window in enumerate(windows)},
            time="ts",
            aggregates={"sum": A.sum("value")},
            policy=policy,
        )
        self._came_out: list[pa.Table] = []

    def step(self, batch: Batch) -> None:
        self._came_out.append(self._operator.process(batch.table))
        self._came_out.append(self._operator.advance(batch.watermark_us))

    def panes(self) -> list[Panes]:
        """Of all steps; closes the operator."""
        self._came_out.append(self._operator.close())
        return [_panes(table) for table in self._came_out if table.num_rows]


def _panes(table: pa.Table) -> Panes:
    if set(table.column("kind").to_pylist()) != {"on_time"}:
        raise RuntimeError("an event was late, or dropped, in a stream that has no such event")
    columns = [pc.cast(table.column("window"), pa.int64())]
    columns += [table.column(name).cast(pa.int64()) for name in ("window_start", "window_end", "events", "sum")]
    return Panes(*(column.to_numpy() for column in columns))


class Baseline:
    """One of the baselines, behind the same calls."""

    def __init__(self, operator: Buckets | FlatFat) -> None:
        self.operator = operator
        self._came_out: list[Panes] = []

    def step(self, batch: Batch) -> None:
        self.operator.process(batch.times_us, batch.values)
        self._came_out.append(self.operator.advance(batch.watermark_us))

    def panes(self) -> list[Panes]:
        return self._came_out


def make(contender: str, windows: Sequence[Definition]) -> Local | Baseline:
    if contender == "buckets":
        return Baseline(Buckets(windows))
    if contender in ("flatfat", "flatfat-batch"):
        return Baseline(FlatFat(windows, whole_batches=contender == "flatfat-batch"))
    return Local(windows, POLICIES[contender])


def measure(contender: str, cell: Cell, stream: Stream, settings: Settings) -> Result:
    """One run from the beginning of the stream to its end; a baseline stops when its time is up.

    Only taking batches and yielding panes is timed. FlatFAT is first filled with what the longest window holds, in
    one batch and untimed: an empty tree would flatter it.
    """
    operator = make(contender, cell.definitions)
    filled = filled_before(contender, cell, stream)
    if filled:
        assert isinstance(operator, Baseline) and isinstance(operator.operator, FlatFat)
        operator.operator.whole_batches = True
        _fill(operator, stream, filled)
        operator.operator.whole_batches = False
    batches = batches_of(stream, _batch_size(contender, cell, settings), filled)
    limit = float("inf") if contender in POLICIES else settings.seconds
    events, done, seconds, processor = 0, 0, 0.0, 0.0
    for batch in batches:
        begun, begun_processor = time.perf_counter(), time.process_time()
        operator.step(batch)
        seconds += time.perf_counter() - begun
        processor += time.process_time() - begun_processor
        events, done = events + len(batch.times_us), done + 1
        if seconds > limit:
            break
    panes = operator.panes()
    return Result(contender, events, seconds, processor, sum(len(part.events) for part in panes), checksum(panes), done)


def reference(result: Result, cell: Cell, stream: Stream, settings: Settings) -> tuple[int, int]:
    """Number and checksum of the panes that LocalOperator yields for the batches of a run; not timed."""
    operator = make("aion", cell.definitions)
    filled = filled_before(result.contender, cell, stream)
    if filled:
        _fill(operator, stream, filled)
    for batch in batches_of(stream, _batch_size(result.contender, cell, settings), filled)[: result.batches]:
        operator.step(batch)
    panes = operator.panes()
    return sum(len(part.events) for part in panes), checksum(panes)


def filled_before(contender: str, cell: Cell, stream: Stream) -> int:
    """How many events a contender is given before it is measured."""
    return min(FILL_S * cell.rate, len(stream.times_us) // 2) if contender == "flatfat" else 0


def _fill(operator: Local | Baseline, stream: Stream, events: int) -> None:
    (batch,) = batches_of(Stream(stream.times_us[:events], stream.values[:events]), events)
    operator.step(batch)


def _batch_size(contender: str, cell: Cell, settings: Settings) -> int:
    if contender in POLICIES:
        return cell.batch
    return FEW if contender == "flatfat" else min(cell.batch, settings.small_batch)


def checksum(panes: Sequence[Panes]) -> int:
    """The same for the same panes in any order, and hardly for any others."""
    total = 0
    for part in panes:
        mixed = np.zeros(len(part.events), np.uint64)
        for column in part:
            mixed = (mixed ^ column.astype(np.int64).view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
        total += int(mixed.sum(dtype=np.uint64))
    return total % 2**64
