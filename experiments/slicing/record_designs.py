"""Kafka's sliding windows as KIP-450 proposes them: the plain design, and the one in O(sqrt N).

There is one window: from ``size`` before the stream time up to it, both inclusive. The stream time is the latest event
time so far. Each record that is not older than the window is added to it and yields its aggregate. Both designs can
only add a value to an aggregate, never remove one. So they keep aggregates *from* some time *to now*: the plain design
from each record on, the other one from the end of each bucket on. The operator computes the windows of all its events
at once instead. These two designs show what a single record costs in a store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import ceil, floor, sqrt
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from aion.errors import WindowError

Micros = npt.NDArray[np.int64]
Values = npt.NDArray[np.int64]

_I64 = np.iinfo(np.int64)
# The value that changes nothing when it is combined with another one.
_IDENTITY: dict[np.ufunc, int] = {np.add: 0, np.minimum: _I64.max, np.maximum: _I64.min}


class Storage(Protocol):
    """The store of a design: values by time (several may have the same time), and aggregates by key."""

    def add_value(self, time_us: int, value: Any) -> None: ...
    def values(self, low_us: int, high_us: int) -> Values:
        """The values of the records in ``[low_us, high_us]``."""

    def put_aggregates(self, keys: Micros, aggregates: Values) -> None: ...
    def aggregates(self, low: int, high: int) -> tuple[Micros, Values]:
        """The keys in ``[low, high]``, in order, and their aggregates."""

    def drop(self, times_before_us: int, keys_before: int) -> None:
        """Removes values and aggregates before these."""


@dataclass(slots=True)
class Costs:
    """The work of a design: values added to aggregates, and aggregates written."""

    combines: int = 0
    writes: int = 0


class Design(ABC):
    """The loop over records that both designs share. ``width_us``: aggregates have the key ``time // width_us``."""

    def __init__(self, size_us: int, combine: np.ufunc, storage: Storage, width_us: int) -> None:
        self._size_us = size_us
        self._width_us = width_us
        self._combine = combine
        self._storage = storage
        self._now_us: int | None = None
        self.costs = Costs()

    def process(self, times_us: Micros, values: npt.ArrayLike) -> tuple[Values, npt.NDArray[np.bool_]]:
        """For each record, in the order of arrival, the window's aggregate after it, and whether it was in time."""
        column = np.asarray(values, np.int64)
        results, in_time = column.copy(), np.ones(len(column), np.bool_)
        for n, (time_us, value) in enumerate(zip(times_us.tolist(), column, strict=True)):
            self._now_us = time_us if self._now_us is None else max(self._now_us, time_us)
            oldest_us = self._now_us - self._size_us
            if time_us < oldest_us:
                in_time[n] = False
                continue
            self._storage.drop(oldest_us, oldest_us // self._width_us)
            results[n] = self._add(time_us, value, oldest_us)
        return results, in_time

    @abstractmethod
    def _add(self, time_us: int, value: Any, oldest_us: int) -> Any:
        """Adds a record to the window that begins at ``oldest_us``, and returns the window's aggregate."""

    def _aggregates(self, oldest_us: int) -> tuple[Micros, Values]:
        assert self._now_us is not None
        return self._storage.aggregates(oldest_us // self._width_us, self._now_us // self._width_us)


class PlainDesign(Design):
    """For each record in the window, the aggregate from its time on: N combines and N writes per record, no values."""

    def __init__(self, size_us: int, combine: np.ufunc, storage: Storage) -> None:
        super().__init__(size_us, combine, storage, width_us=1)

    def _add(self, time_us: int, value: Any, oldest_us: int) -> Any:
        keys, aggregates = self._aggregates(oldest_us)
        until = int(np.searchsorted(keys, time_us, side="right"))
        changed = self._combine(aggregates[:until], value)
        self.costs.combines += until + 1
        if not until or keys[until - 1] != time_us:
            own = self._combine(aggregates[until], value) if until < len(keys) else value
            keys, changed = np.append(keys[:until], time_us), np.append(changed, own)
        self._storage.put_aggregates(keys[: len(changed)], changed)
        self.costs.writes += len(changed)
        return changed[0]


class BucketDesign(Design):
    """Values in buckets of a fixed width, and for each bucket the aggregate from its end on: cost N/M + M per record.

    ``buckets``: M, how many of them a window spans. :func:`best_buckets` finds the cheapest number.
    """

    def __init__(self, size_us: int, combine: np.ufunc, storage: Storage, buckets: int) -> None:
        if buckets < 1:
            raise WindowError(f"{buckets} buckets cannot hold a window; give at least 1")
        super().__init__(size_us, combine, storage, width_us=max(ceil(size_us / buckets), 1))

    def _add(self, time_us: int, value: Any, oldest_us: int) -> Any:
        bucket = time_us // self._width_us
        keys, aggregates = self._aggregates(oldest_us)
        until = int(np.searchsorted(keys, bucket))
        changed = self._combine(aggregates[:until], value)
        self.costs.combines += until
        if until == len(keys) or keys[until] != bucket:
            following = _IDENTITY[self._combine]
            if until < len(keys):
                following = self._combine(aggregates[until], self._bucket_total(int(keys[until]), oldest_us))
            keys, changed = np.append(keys[:until], bucket), np.append(changed, following)
        if len(changed):
            self._storage.put_aggregates(keys[: len(changed)], changed)
            self.costs.writes += len(changed)
        self._storage.add_value(time_us, value)
        keys, aggregates = self._aggregates(oldest_us)
        return self._combine(aggregates[0], self._bucket_total(int(keys[0]), oldest_us))

    def _bucket_total(self, bucket: int, oldest_us: int) -> Any:
        """The aggregate of a bucket's values that lie in the window."""
        begin_us = bucket * self._width_us
        values = self._storage.values(max(begin_us, oldest_us), begin_us + self._width_us - 1)
        self.costs.combines += len(values)
        return self._combine.reduce(values) if len(values) else _IDENTITY[self._combine]


class MemoryStorage:
    """A :class:`Storage` of sorted arrays."""

    def __init__(self) -> None:
        self._values = _Sorted()
        self._aggregates = _Sorted()

    def add_value(self, time_us: int, value: Any) -> None:
        self._values.insert(self._values.place(time_us + 1), time_us, value)

    def values(self, low_us: int, high_us: int) -> Values:
        return self._values.between(low_us, high_us)[1]

    def put_aggregates(self, keys: Micros, aggregates: Values) -> None:
        at = self._aggregates.place(int(keys[0]))
        known, known_values = self._aggregates.tail(at)
        if len(keys) > len(known) or known[len(keys) - 1] != keys[-1]:
            self._aggregates.insert(at + len(keys) - 1, int(keys[-1]), aggregates[-1])
            known, known_values = self._aggregates.tail(at)
        known_values[: len(keys)] = aggregates

    def aggregates(self, low: int, high: int) -> tuple[Micros, Values]:
        return self._aggregates.between(low, high)

    def drop(self, times_before_us: int, keys_before: int) -> None:
        self._values.drop(times_before_us)
        self._aggregates.drop(keys_before)


class _Sorted:
    """Pairs in the order of their keys. Appending is cheap, and dropping from the front costs nothing."""

    def __init__(self) -> None:
        self._keys, self._values = np.empty(64, np.int64), np.empty(64, np.int64)
        self._begin = self._end = 0

    def place(self, key: int) -> int:
        return int(np.searchsorted(self._keys[self._begin : self._end], key))

    def tail(self, at: int) -> tuple[Micros, Values]:
        where = slice(self._begin + at, self._end)
        return self._keys[where], self._values[where]

    def between(self, low: int, high: int) -> tuple[Micros, Values]:
        where = slice(self._begin + self.place(low), self._begin + self.place(high + 1))
        return self._keys[where], self._values[where]

    def insert(self, at: int, key: int, value: Any) -> None:
        if self._end == len(self._keys):
            size = self._end - self._begin
            for name in ("_keys", "_values"):
                old = getattr(self, name)
                new = np.empty(max(2 * size, 64), old.dtype)
                new[:size] = old[self._begin : self._end]
                setattr(self, name, new)
            self._begin, self._end = 0, size
        at += self._begin
        for column, item in ((self._keys, key), (self._values, value)):
            column[at + 1 : self._end + 1] = column[at : self._end]
            column[at] = item
        self._end += 1

    def drop(self, before: int) -> None:
        if self._begin < self._end and self._keys[self._begin] < before:
            self._begin += self.place(before)


def best_buckets(records: int, read_cost: float, write_cost: float) -> int:
    """The number of buckets M with the lowest cost per record, which reads N/M values and writes M aggregates.

    ``read_cost``: to add one value of a bucket. ``write_cost``: to change one aggregate. Both in the same unit,
    measured on the store: on disk a write costs more, so fewer buckets are better. With equal costs it is sqrt(N).
    """
    ideal = sqrt(records * read_cost / write_cost)
    choices = {min(max(m, 1), max(records, 1)) for m in (floor(ideal), ceil(ideal))}
    return min(choices, key=lambda m: (records / m * read_cost + m * write_cost, m))
