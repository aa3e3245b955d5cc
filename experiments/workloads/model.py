"""The model of a workload, its size at a scale, and the arrival of its events (paper, section 5 and table 1)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from experiments.shared.generate import lateness_shares

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame

    from experiments.workloads.chaining import LastPanes

Int64s = npt.NDArray[np.int64]
SECOND_US = 1_000_000
TIMESTAMP = pa.timestamp("us", "UTC")
ORIGIN_S = 1_700_006_400
"""The first batch begins here, rounded up to a multiple of two windows since the epoch."""
BESIDES_BYTES = 32
"""About what an event has besides its payload."""
FORMAT = 1
"""Raise it if the same shape gives other events, so that no stale file is used."""

# It includes JSON's special characters, so that a codec that does not escape them fails.
ALPHABET = np.frombuffer(rb"""abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRST0123456789,.;"\{}!""", np.uint8)


@dataclass(frozen=True, slots=True)
class Spec:
    """A row of the paper's table 1. ``parts``: a window can be divided into this many parts of whole milliseconds."""

    rate: int
    window_s: float
    payload_bytes: int
    parts: int = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """A workload at some scale: ``scale`` times the rate and ``scale`` times the windows of its :class:`Spec`.

    A batch holds the arrivals of one window's time. Times are in µs. ``past_windows``: how many windows late an event
    may be, the N of the paper.
    """

    rate: float
    window_us: int
    payload_bytes: int
    past_windows: int
    scale: float = 1.0
    seed: int = 1

    @classmethod
    def of(cls, spec: Spec, *, past_windows: int, scale: float = 1.0, seed: int = 1) -> Shape:
        step_us = spec.parts * 1_000
        window_us = max(1, round(spec.window_s * scale * 1e6 / step_us)) * step_us
        return cls(spec.rate * scale, window_us, spec.payload_bytes, past_windows, scale, seed)

    @property
    def events_per_batch(self) -> int:
        return max(1, round(self.rate * self.window_us / SECOND_US))

    @property
    def event_bytes(self) -> int:
        return self.payload_bytes + BESIDES_BYTES

    @property
    def held_bytes(self) -> int:
        """The bytes of all events that have to be kept at the end of a batch: of a window until its lateness ends."""
        shares = lateness_shares(self.past_windows)
        windows = float(np.sum(shares * (self.past_windows + 1 - np.arange(len(shares)))))
        return round(self.events_per_batch * windows * self.event_bytes)

    @property
    def window(self) -> str:
        """The size of a window as Aion and Spark read it."""
        return self.part(1)

    def part(self, of_window: float) -> str:
        """The size of a part of a window, as Aion and Spark read it."""
        return f"{round(self.window_us * of_window / 1000)} milliseconds"

    @property
    def bound(self) -> str:
        """The allowed lateness: N windows."""
        return self.part(self.past_windows)

    @property
    def origin_us(self) -> int:
        return -(-ORIGIN_S * SECOND_US // (2 * self.window_us)) * 2 * self.window_us

    def start_us(self, batch: int) -> int:
        return self.origin_us + batch * self.window_us

    def heartbeats(self, batches: int) -> range:
        """The numbers of the heartbeats after the last batch. After them, every window is final.

        Each moves the watermark by one window, as a batch does. With a single one, all windows that are left would
        become final in one batch, whose panes take memory that no other batch needs.
        """
        return range(batches, batches + self.past_windows + 3)

    def digest(self, name: str) -> str:
        text = json.dumps([FORMAT, name, asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def file_names(batches: int, heartbeats: int) -> list[str]:
    """The names of a stream's files in order, without ``.parquet``."""
    beats = (f"last-{number:05d}" for number in range(batches, batches + heartbeats))
    return [*(f"batch-{batch:05d}" for batch in range(batches)), *beats]


def arrivals(shape: Shape, batch: int, events: int, *stream: int) -> tuple[np.random.Generator, Int64s, Int64s]:
    """A random generator for this batch, the event times in order of arrival, and how many windows late each is.

    ts = now - i * W, with i = round(X) - 1, X log-normal, redrawn if above N (paper, "Event timestamps").
    """
    rng = np.random.default_rng([shape.seed, batch, *stream])
    now_us = shape.start_us(batch) + np.arange(events, dtype=np.int64) * shape.window_us // max(1, events)
    late = drawn_lateness(rng, events, shape.past_windows)
    return rng, now_us - late * shape.window_us, late


def drawn_lateness(rng: np.random.Generator, size: int, past_windows: int) -> Int64s:
    shares = lateness_shares(past_windows)
    edges = np.cumsum(shares)
    edges[-1] = 1.0
    return np.searchsorted(edges, rng.random(size), side="right").astype(np.int64)


def padding(rng: np.random.Generator, count: int, size_bytes: int) -> pa.Array:
    """``count`` strings of ``size_bytes`` printable characters of 6 bits. Compression saves at most a quarter."""
    data = ALPHABET[rng.integers(0, 64, count * size_bytes, dtype=np.uint8)]
    offsets = pa.py_buffer(np.arange(count + 1, dtype=np.int64) * size_bytes)
    return pa.LargeStringArray.from_buffers(count, offsets, pa.py_buffer(data)).cast(pa.string())


def timestamps(us: Int64s) -> pa.Array:
    return pa.array(us, pa.int64()).cast(TIMESTAMP)


class Probe:
    """A hook around a window function and its schema. This one does nothing.

    A subclass may add the columns ``began`` and ``ended``, the wall-clock seconds of an execution.
    """

    def __call__(self, function: Any) -> Any:
        return function

    def schema(self, schema: str) -> str:
        return schema


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload as functions.

    ``streams``: by name, a function that makes the events of a batch (with a column ``ts``), and how many windows
    late each is. ``with_aion``, ``with_window``: from the streams with watermarks to the panes of the first stage, with
    the columns ``stage``, ``window_start``, ``window_end``, ``events`` and, with Aion, ``pane`` and ``kind``.
    ``branches``, ``function``, ``schema``, ``key``, ``held``: what stock Spark needs for the same over kept events (see
    :func:`experiments.workloads.collected.collected`). ``keys``: the key columns of each stage. ``window_keys``:
    the same for ``with_window`` if they differ. ``finals``: the later stages, from the last panes, for the windows
    that changed. ``truth``: the same results from a batch computation.
    """

    name: str
    spec: Spec
    streams: Mapping[str, Callable[[Shape, int], tuple[pa.Table, Int64s]]]
    with_aion: Callable[[Mapping[str, DataFrame], Shape, Probe, Mapping[str, Any] | None], DataFrame]
    branches: Callable[[Mapping[str, DataFrame], Shape], list[Any]]
    function: Callable[..., Any]
    schema: str
    with_window: Callable[[Mapping[str, DataFrame], Shape], DataFrame]
    keys: Mapping[str, tuple[str, ...]]
    finals: Callable[[LastPanes, set[tuple[str, int]], Shape], dict[tuple[str, int], pd.DataFrame]]
    truth: Callable[[Mapping[str, pa.Table], Shape], dict[str, pd.DataFrame]]
    key: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    window_keys: Mapping[str, tuple[str, ...]] | None = None

    def keys_of(self, backend: str) -> Mapping[str, tuple[str, ...]]:
        return self.window_keys if backend == "spark-window" and self.window_keys is not None else self.keys
