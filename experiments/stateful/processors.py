"""The processors of ``aion experiment stateful``, as a user writes them; each for rows and for pandas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

OUTPUT = "key bigint, result double"
MOST_KEPT = 500
GAP_MS = 5_000
PAYLOAD = "x" * 1_000


class Base(StatefulProcessor, ABC):
    """Takes rows or frames, and gives rows or frames; what it computes is in ``result``."""

    def __init__(self, pandas: bool) -> None:
        self._pandas = pandas

    @abstractmethod
    def result(self, values: list[tuple[int, float]]) -> float | None:
        """From the event times (ms) and values of a key, or None for no output."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        if self._pandas:
            values = [
                pair
                for frame in rows
                for pair in zip(frame["ts"].astype("datetime64[ms]").astype("int64"), frame["value"], strict=True)
            ]
        else:
            values = [(int(row.ts.timestamp() * 1_000), row.value) for row in rows]
        result = self.result(values)
        yield from () if result is None else self.give(key, result)

    def give(self, key: Any, result: float) -> Iterator[Any]:
        yield pd.DataFrame({"key": [key[0]], "result": [result]}) if self._pandas else Row(key=key[0], result=result)


class Count(Base):
    """A count: it is read and written once per key and batch."""

    def init(self, handle: Any) -> None:
        self._count = handle.getValueState("count", "n bigint")

    def result(self, values: list[tuple[int, float]]) -> float:
        before = self._count.get()
        n = (before[0] if before else 0) + len(values)
        self._count.update((n,))
        return float(n)


class Window(Base):
    """The last values of a key: each event is appended, and all are read in each batch."""

    def init(self, handle: Any) -> None:
        self._values = handle.getListState("values", "value double")

    def result(self, values: list[tuple[int, float]]) -> float:
        for _, value in values:
            self._values.appendValue((value,))
        kept = [value for (value,) in self._values.get()]
        if len(kept) > MOST_KEPT:
            self._values.put([(value,) for value in kept[-MOST_KEPT // 2 :]])
        return float(sum(kept))


class Histogram(Base):
    """Counts by value: one read and one write of the map for each event."""

    def init(self, handle: Any) -> None:
        self._counts = handle.getMapState("counts", "bucket int", "n bigint")

    def result(self, values: list[tuple[int, float]]) -> float:
        n = 0
        for _, value in values:
            bucket = (int(value) % 32,)
            n = (self._counts.getValue(bucket) or (0,))[0] + 1
            self._counts.updateValue(bucket, (n,))
        return float(n)


class Sessions(Base):
    """A session ends when no event came for five seconds of event time; then it is given out."""

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._session = handle.getValueState("session", "end bigint, n bigint, total double")

    def result(self, values: list[tuple[int, float]]) -> None:
        session = self._session.get()
        newest = max(at for at, _ in values) + GAP_MS
        end, n, total = session or (newest, 0, 0.0)
        if session is not None and newest > end:
            self._handle.deleteTimer(end)
        if session is None or newest > end:
            end = newest
            self._handle.registerTimer(end)
        self._session.update((end, n + len(values), total + sum(value for _, value in values)))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        session = self._session.get()
        if session is not None and session[0] == expiredTimerInfo.getExpiryTimeInMs():
            self._session.clear()
            yield from self.give(key, session[2])


class Profile(Base):
    """A profile of a kilobyte for each key, read and written in each batch: much state, little work."""

    def init(self, handle: Any) -> None:
        self._profile = handle.getValueState("profile", "n bigint, payload string")

    def result(self, values: list[tuple[int, float]]) -> float:
        before = self._profile.get()
        n = (before[0] if before else 0) + len(values)
        self._profile.update((n, PAYLOAD))
        return float(n)
