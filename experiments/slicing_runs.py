"""What ``aion experiment slicing`` runs: sensor data as at a football match, and one contender over it at a time."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from aion.core.windows import Definition, Session, Tumbling
from aion.slicing import SUM, Panes, Slicer
from experiments.slicing_baselines import Buckets, FlatFat

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
    """``rate``: events per second of event time. ``seconds``: that a slow contender is measured for, in each run."""

    events: int = 4_000_000
    batch: int = 100_000
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
    """Of the windows that the operator itself is given."""
    keys: tuple[int, ...] = (10, 1_000)
    seed: int = 1


class Stream(NamedTuple):
    """Events in the order of arrival."""

    times_us: np.ndarray
    values: np.ndarray


class Batch(NamedTuple):
    times_us: np.ndarray
    values: np.ndarray
    watermark_us: int
    """After it: no event that is still to come is older."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of a figure: what all contenders are given."""

    rate: int
    windows: int
    session: bool
    out_of_order: float

    @property
    def definitions(self) -> list[Definition]:
        tumbling: list[Definition] = [Tumbling(size_us) for size_us in sizes_us(self.windows)]
        return [*tumbling, Session(SESSION_US)] if self.session else tumbling


@dataclass(slots=True)
class Result:
    """Of one run: what was timed, and all of the panes that came out of it, told in one number.

    ``seconds``: of the processor, which is what one core needs, whatever else the machine does; ``clock_seconds``:
    that went by meanwhile.
    """

    contender: str
    events: int
    seconds: float
    clock_seconds: float
    panes: int
    checksum: int
    batches: int = field(repr=False)

    @property
    def rate(self) -> float:
        return self.events / self.seconds


CONTENDERS = {
    "lazy": "Aion, lazy",
    "eager": "Aion, eager",
    "buckets": "buckets",
    "flatfat-batch": "FlatFAT, whole batches",
    "flatfat": "FlatFAT",
}
FAST = ("lazy", "eager")


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
        latest_us = max(latest_us, int(stream.times_us[low:high].max()))
        found.append(Batch(stream.times_us[low:high], stream.values[low:high], latest_us - DELAY_US))
    return found


def make(contender: str, windows: Sequence[Definition]) -> Slicer | Buckets:
    if contender == "buckets":
        return Buckets(windows, {"sum": SUM})
    if contender in ("flatfat", "flatfat-batch"):
        return FlatFat(windows, {"sum": SUM}, whole_batches=contender == "flatfat-batch")
    return Slicer(windows, {"sum": SUM}, store=contender)


def measure(contender: str, cell: Cell, stream: Stream, settings: Settings, seconds: float | None = None) -> Result:
    """One run from the beginning of the stream to its end, or until the time is up.

    Only taking batches and yielding panes is timed. FlatFAT is first filled with what the longest window holds, in
    batches and untimed: an empty tree would flatter it.
    """
    operator = make(contender, cell.definitions)
    filled = filled_before(contender, cell, stream)
    if isinstance(operator, FlatFat) and filled:
        operator.whole_batches = True
        fill(operator, stream, filled)
        operator.whole_batches = False
    batches = batches_of(stream, FEW if contender == "flatfat" else settings.batch, filled)
    found: list[Panes] = []
    events, used, clock = 0, 0.0, 0.0
    gc.disable()  # What others left behind is not for this contender to be looked through.
    try:
        for batch in batches:
            begun, begun_clock = time.thread_time(), time.perf_counter()
            operator.process(batch.times_us, batch.values)
            found.append(operator.advance(batch.watermark_us))
            used += time.thread_time() - begun
            clock += time.perf_counter() - begun_clock
            events += len(batch.times_us)
            if seconds is not None and clock > seconds:
                break
    finally:
        gc.enable()
    return Result(contender, events, used, clock, sum(map(len, found)), checksum(found), len(found))


def reference(result: Result, cell: Cell, stream: Stream, settings: Settings) -> tuple[int, int]:
    """Number and checksum of the panes that the lazy store yields for the batches of a run; not timed."""
    operator = make("lazy", cell.definitions)
    if filled := filled_before(result.contender, cell, stream):
        fill(operator, stream, filled)
    batches = batches_of(stream, FEW if result.contender == "flatfat" else settings.batch, filled)
    found = []
    for batch in batches[: result.batches]:
        operator.process(batch.times_us, batch.values)
        found.append(operator.advance(batch.watermark_us))
    return sum(map(len, found)), checksum(found)


def filled_before(contender: str, cell: Cell, stream: Stream) -> int:
    """How many events a contender is given before it is measured."""
    return min(FILL_S * cell.rate, len(stream.times_us) // 2) if contender == "flatfat" else 0


def fill(operator: Slicer | Buckets, stream: Stream, events: int) -> None:
    for batch in batches_of(Stream(stream.times_us[:events], stream.values[:events]), events):
        operator.process(batch.times_us, batch.values)
        operator.advance(batch.watermark_us)


def checksum(panes: Sequence[Panes]) -> int:
    """The same for the same panes in any order, and hardly for any others."""
    total = 0
    for part in panes:
        mixed = np.zeros(len(part), np.uint64)
        columns = (part.definition, part.start_us, part.end_us, part.kind, part.events, part.values["sum"])
        for column in columns:
            mixed = (mixed ^ column.astype(np.int64).view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            mixed ^= mixed >> np.uint64(29)
        total += int(mixed.sum(dtype=np.uint64))
    return total % 2**64
