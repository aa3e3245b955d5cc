"""The cost of a record in Kafka's sliding windows, with the two designs of KIP-450, in memory and in RocksDB."""

from __future__ import annotations

import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import aion
from aion import aggregates as A
from experiments.slicing.record_designs import BucketDesign, MemoryStorage, PlainDesign, Storage, best_buckets

SPACING_US = 5_000
STORAGES = ("memory", "RocksDB")
_KEY = struct.Struct(">cQI")
_VALUE = struct.Struct("<q")


class RocksStorage:
    """A :class:`Storage` with one RocksDB entry for each value and aggregate. It keeps nothing in memory itself."""

    def __init__(self, folder: Path) -> None:
        from rocksdict import Options, Rdict

        options = Options(raw_mode=True)
        options.create_if_missing(True)
        self._db = Rdict(str(folder), options)
        self._values = 0

    def close(self) -> None:
        self._db.close()

    def add_value(self, time_us: int, value: Any) -> None:
        self._values += 1
        self._db[_key(b"v", time_us, self._values)] = _VALUE.pack(int(value))

    def values(self, low_us: int, high_us: int) -> np.ndarray:
        return np.array([value for _, value in self._scan(b"v", low_us, high_us)], np.int64)

    def put_aggregates(self, keys: np.ndarray, aggregates: np.ndarray) -> None:
        for key, value in zip(keys.tolist(), aggregates.tolist(), strict=True):
            self._db[_key(b"a", key)] = _VALUE.pack(value)

    def aggregates(self, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
        found = list(self._scan(b"a", low, high))
        return np.array([key for key, _ in found], np.int64), np.array([value for _, value in found], np.int64)

    def drop(self, times_before_us: int, keys_before: int) -> None:
        self._db.delete_range(_key(b"v", -(2**62)), _key(b"v", times_before_us))
        self._db.delete_range(_key(b"a", -(2**62)), _key(b"a", keys_before))

    def _scan(self, kind: bytes, low: int, high: int) -> Iterator[tuple[int, int]]:
        last = _key(kind, high, 2**32 - 1)
        entries = self._db.iter()
        entries.seek(_key(kind, low))
        while entries.valid() and (key := entries.key()) <= last:
            yield _KEY.unpack(key)[1] - 2**63, _VALUE.unpack(entries.value())[0]
            entries.next()


def _key(kind: bytes, number: int, tie: int = 0) -> bytes:
    return _KEY.pack(kind, number + 2**63, tie)


@contextmanager
def storage(kind: str, folder: Path) -> Iterator[Storage]:
    if kind == "memory":
        yield MemoryStorage()
        return
    with tempfile.TemporaryDirectory(dir=folder, prefix="records-") as place:
        rocks = RocksStorage(Path(place))
        try:
            yield rocks
        finally:
            rocks.close()


def measure_records(records: int, seed: int, folder: Path, measured: int = 40) -> dict[str, Any]:
    """The costs to read a value and to write an aggregate, the number of buckets they suggest, and its effect.

    The designs are measured in processor time. ``records``: in one window. ``measured``: how many records are timed,
    once the window is full. Raises AssertionError if a design yields other sums than LocalOperator.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    times = np.arange(records + measured) * SPACING_US
    values = rng.integers(0, 1_000, len(times))
    size_us = (records - 1) * SPACING_US
    found: dict[str, Any] = {"records": records, "measured": measured, "storages": {}}
    found["operator_us"], expected = in_the_operator(times, values, size_us)
    for kind in STORAGES:
        read_us, write_us = unit_costs(kind, records, folder)
        best = best_buckets(records, read_us, write_us)
        choices = sorted({max(best // 8, 1), best, min(best * 8, records), isqrt(records)})
        designs: dict[str, dict[str, float]] = {}
        for buckets in (0, *choices):
            with storage(kind, folder) as store:
                design = (
                    BucketDesign(size_us, np.add, store, buckets) if buckets else PlainDesign(size_us, np.add, store)
                )
                _fill(store, times[:records], values[:records], size_us, buckets)
                begun = time.thread_time()
                results, in_time = design.process(times[records:], values[records:])
                seconds = time.thread_time() - begun
            assert in_time.all() and (results == expected[records:]).all(), f"{kind}, {buckets} buckets: other results"
            designs[_label(buckets)] = {
                "buckets": buckets,
                "us": seconds / measured * 1e6,
                "combines": design.costs.combines / measured,
                "writes": design.costs.writes / measured,
            }
        found["storages"][kind] = {"read_us": read_us, "write_us": write_us, "best": best, "designs": designs}
    return found


def in_the_operator(times: np.ndarray, values: np.ndarray, size_us: int) -> tuple[float, np.ndarray]:
    """Microseconds of wall time per record in LocalOperator, all in one batch, and the sum of each window."""
    table = pa.table({"ts": pa.array(times, pa.timestamp("us")), "value": values})
    with aion.LocalOperator(
        windows=aion.PerRecord(timedelta(microseconds=size_us)),
        time="ts",
        aggregates={"sum": A.sum("value")},
        policy="memory_only",
    ) as operator:
        begun = time.perf_counter()
        operator.process(table)
        panes = operator.advance(int(times[-1]) + 1)
        seconds = time.perf_counter() - begun
    return seconds / len(times) * 1e6, panes.sort_by("window_end").column("sum").to_numpy()


def _label(buckets: int) -> str:
    return "plain" if not buckets else "1 bucket" if buckets == 1 else f"{buckets} buckets"


def unit_costs(kind: str, records: int, folder: Path) -> tuple[float, float]:
    """Microseconds to read one more value of a bucket, and to read and write one more aggregate.

    The difference between a few and many at once removes the fixed cost of a call.
    """
    few, many = max(records // 16, 1), max(records, 2)
    with storage(kind, folder) as store:
        for key in range(many):
            store.add_value(key, key)
        store.put_aggregates(*_one_by_one(store, many))

        def read(size: int) -> None:
            np.add.reduce(store.values(0, size - 1))

        def write(size: int) -> None:
            keys, aggregates = store.aggregates(0, size - 1)
            store.put_aggregates(keys, aggregates + 1)

        costs = []
        for step in (read, write):
            seconds = [min(_timed(step, size) for _ in range(5)) for size in (few, many)]
            costs.append(max((seconds[1] - seconds[0]) / (many - few) * 1e6, 1e-6))
    return costs[0], costs[1]


def _one_by_one(store: Storage, keys: int) -> tuple[np.ndarray, np.ndarray]:
    """Puts all keys but the last, one at a time, since a store takes one new key per call. Returns the last one."""
    for key in range(keys - 1):
        store.put_aggregates(np.array([key]), np.array([key]))
    return np.array([keys - 1]), np.array([keys - 1])


def _timed(step: Callable[[int], object], size: int) -> float:
    begun = time.thread_time()
    step(size)
    return time.thread_time() - begun


def _fill(store: Storage, times: np.ndarray, values: np.ndarray, size_us: int, buckets: int) -> None:
    """Writes the state after these records directly. With the plain design, one by one would take quadratic time."""
    totals = values[::-1].cumsum()[::-1]
    if not buckets:
        for time_us, total in zip(times, totals, strict=True):
            store.put_aggregates(np.array([time_us]), np.array([total]))
        return
    width_us = max(-(-size_us // buckets), 1)
    for time_us, value in zip(times.tolist(), values.tolist(), strict=True):
        store.add_value(time_us, value)
    keys, begins = np.unique(times // width_us, return_index=True)
    after = np.append(totals[begins[1:]], 0)
    for key, total in zip(keys, after, strict=True):
        store.put_aggregates(np.array([key]), np.array([total]))
