"""The runs of ``aion experiment slicing``: sensor data like that of a football match, and one contender at a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import aion
from aion import aggregates as A
from aion.config import Policy, load_policy
from aion.core.periodic import Tumbling
from aion.core.windows import Definition, Session
from experiments.slicing.baselines import Buckets, FlatFat, Panes

SENSOR_HZ = 200
GAPS_PER_MINUTE = 5
GAP_US = 1_500_000
DELAY_US = 2_000_000
SESSION_US = 1_000_000
SHORTEST_MS, LONGEST_MS = 1_000, 20_000
EPOCH_US = 1_372_000_000_000_000
"""June 2013, when the data of Scotty's reference 16 were recorded."""

# FlatFAT inserts single events. Batches of this size are small enough to stop it in time.
FEW = 1_000
FILL_S = LONGEST_MS // 1_000 + 4


@dataclass(frozen=True, slots=True)
class Settings:
    """``rate``: events per second of event time. ``seconds``: how long a baseline is measured in each run."""

    events: int = 4_000_000
    batch: int = 4_000_000
    small_batch: int = 100_000
    """The batch size of the leg ``batches``, and the largest batch of a baseline."""
    rate: int = 15_000
    rates: tuple[int, ...] = (1_000, 15_000, 100_000)
    windows: tuple[int, ...] = (1, 20, 100, 1_000)
    out_of_order: float = 0.2
    fractions: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    concurrent: int = 20
    """The number of windows in the leg ``disorder``."""
    runs: int = 5
    seconds: float = 0.3
    records: int = 4_096
    """The records in one window, in the leg ``records``."""
    overlaps: tuple[int, ...] = (20, 100, 600)
    """The overlaps of the sliding windows in the leg ``operator``."""
    keys: tuple[int, ...] = (10, 1_000)
    seed: int = 1


class Stream(NamedTuple):
    """Events in the order of arrival."""

    times_us: np.ndarray
    values: np.ndarray


class Batch(NamedTuple):
    """``table``: the same columns as a user would pass them, without a copy."""

    times_us: np.ndarray
    values: np.ndarray
    table: pa.Table
    watermark_us: int
    """The watermark after the batch: no later event is older."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of a figure: the stream and windows that all contenders get."""

    rate: int
    windows: int
    session: bool
    out_of_order: float
    batch: int

    @property
    def definitions(self) -> list[Definition]:
        tumbling: list[Definition] = [Tumbling(timedelta(microseconds=size_us)) for size_us in sizes_us(self.windows)]
        return [*tumbling, Session(timedelta(microseconds=SESSION_US))] if self.session else tumbling


@dataclass(slots=True)
class Result:
    """The result of one run. ``checksum``: of all its panes.

    ``seconds``: wall time. ``processor_seconds``: processor time of all threads.
    """

    contender: str
    events: int
    seconds: float
    processor_seconds: float
    panes: int
    checksum: int
    batches: int = field(repr=False)


# Policies of LocalOperator: two presets, and memory_only with a fixed way to combine overlapping windows.
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
    """Window sizes, evenly spaced from 1 to 20 seconds, in whole milliseconds."""
    if windows == 1:
        return [SHORTEST_MS * 1_000]
    return [int(ms) * 1_000 for ms in np.linspace(SHORTEST_MS, LONGEST_MS, windows).round()]


def generate(events: int, rate: int, out_of_order: float, seed: int) -> Stream:
    """Readings of ``rate / 200`` sensors, each every 5 ms, with 5 gaps a minute that end sessions.

    A share of the events is delayed by up to 2 seconds, uniformly distributed. That makes the disorder.
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
    """Batches from event ``begin`` on. The watermark after each is two seconds before the latest event."""
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
    """LocalOperator as a user calls it, with a sum and no key."""

    def __init__(self, windows: Sequence[Definition], policy: Policy) -> None:
        self._operator = aion.LocalOperator(
            windows={str(n): window for n, window in enumerate(windows)},
            time="ts",
            aggregates={"sum": A.sum("value")},
            policy=policy,
        )
        self._outputs: list[pa.Table] = []

    def step(self, batch: Batch) -> None:
        self._outputs.append(self._operator.process(batch.table))
        self._outputs.append(self._operator.advance(batch.watermark_us))

    def panes(self) -> list[Panes]:
        """The panes of all steps. Closes the operator."""
        self._outputs.append(self._operator.close())
        return [_panes(table) for table in self._outputs if table.num_rows]


def _panes(table: pa.Table) -> Panes:
    if set(table.column("kind").to_pylist()) != {"on_time"}:
        raise RuntimeError("an event was late or dropped, although the stream has no late events")
    columns = [pc.cast(table.column("window"), pa.int64())]
    columns += [table.column(name).cast(pa.int64()) for name in ("window_start", "window_end", "events", "sum")]
    return Panes(*(column.to_numpy() for column in columns))


class Baseline:
    """A baseline with the same interface as :class:`Local`."""

    def __init__(self, operator: Buckets | FlatFat) -> None:
        self.operator = operator
        self._outputs: list[Panes] = []

    def step(self, batch: Batch) -> None:
        self.operator.process(batch.times_us, batch.values)
        self._outputs.append(self.operator.advance(batch.watermark_us))

    def panes(self) -> list[Panes]:
        return self._outputs


def make(contender: str, windows: Sequence[Definition]) -> Local | Baseline:
    if contender == "buckets":
        return Baseline(Buckets(windows))
    if contender in ("flatfat", "flatfat-batch"):
        return Baseline(FlatFat(windows, whole_batches=contender == "flatfat-batch"))
    return Local(windows, POLICIES[contender])


def measure(contender: str, cell: Cell, stream: Stream, settings: Settings) -> Result:
    """One run over the whole stream. A baseline stops when its time is up.

    Only the steps are timed, not the generation of events. FlatFAT is first filled with the events of the longest
    window, in one batch and untimed, since an empty tree would be too fast.
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
    """The number and checksum of the panes that LocalOperator yields for the batches of a run. Not timed."""
    operator = make("aion", cell.definitions)
    filled = filled_before(result.contender, cell, stream)
    if filled:
        _fill(operator, stream, filled)
    for batch in batches_of(stream, _batch_size(result.contender, cell, settings), filled)[: result.batches]:
        operator.step(batch)
    panes = operator.panes()
    return sum(len(part.events) for part in panes), checksum(panes)


def filled_before(contender: str, cell: Cell, stream: Stream) -> int:
    """How many events a contender gets before it is measured."""
    return min(FILL_S * cell.rate, len(stream.times_us) // 2) if contender == "flatfat" else 0


def _fill(operator: Local | Baseline, stream: Stream, events: int) -> None:
    (batch,) = batches_of(Stream(stream.times_us[:events], stream.values[:events]), events)
    operator.step(batch)


def _batch_size(contender: str, cell: Cell, settings: Settings) -> int:
    if contender in POLICIES:
        return cell.batch
    return FEW if contender == "flatfat" else min(cell.batch, settings.small_batch)


def checksum(panes: Sequence[Panes]) -> int:
    """A checksum of panes that does not depend on their order."""
    total = 0
    for part in panes:
        mixed = np.zeros(len(part.events), np.uint64)
        for column in part:
            mixed = (mixed ^ column.astype(np.int64).view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
        total += int(mixed.sum(dtype=np.uint64))
    return total % 2**64
