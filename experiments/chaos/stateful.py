"""The stateful processor of the chaos experiment: values, lists, maps and timers of a key.

It counts the rows of a key, keeps them all in a list, counts them by window in one map and keeps their payloads in
another. A timer ends each window, and forgets half of its payloads. Another timer moves with each row, and forgets the
key when no row came for a while. One key gets a fifth of all rows, so its list and its map become pages.

What comes out depends on every row, and on the order of the list. :func:`expected` computes it by plain loops.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
from pyspark.sql import Row as SparkRow
from pyspark.sql.streaming import StatefulProcessor

from experiments.chaos.data import CLOCK, DELAY_S, FLUSH, WINDOW_S, Batches, Event, Input, Row, compared

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PARTS = 40
"""The events of each key but one are spread over this many keys."""
HOT = "key 0"
IDLE_MS = 30_000
WINDOW_MS = WINDOW_S * 1000
OUTPUT = "k string, part bigint, kind string, at bigint, n bigint, total bigint, digest bigint"


class Stateful:
    """See :class:`experiments.chaos.data.Workload`."""

    queries = ("rows", "frames")
    moments: Mapping[str, int] = {"any": 1, "append": 1, "commit": 1}
    tables: Mapping[str, Sequence[str]] = {}

    def result(self, events: DataFrame, query: str) -> DataFrame:
        import aion

        part = f"CASE WHEN k = '{HOT}' THEN 0 WHEN k IN ('{CLOCK}', '{FLUSH}') THEN NULL ELSE id % {PARTS} END"
        keyed = events.selectExpr("k", f"{part} AS part", "ts", "unix_micros(ts) DIV 1000 AS ms", "id", "payload")
        grouped = aion.group_by(keyed, "k", "part", name=query)
        if query == "frames":
            return grouped.transformWithStateInPandas(Ledger(pandas=True), OUTPUT, "Update", "eventTime")
        return grouped.transformWithState(Ledger(pandas=False), OUTPUT, "Update", "eventTime")

    def shown(self, result: DataFrame, query: str) -> DataFrame:
        return result

    def wrong(self, query: str, got: Batches, batches: Input) -> list[str]:
        of_batches = (
            compared(f"{query}: batch {batch}", got.get(batch, ()), rows, "the processor in plain Python")
            for batch, rows in enumerate(expected(batches))
        )
        return list(chain.from_iterable(of_batches))

    def too_late(self, batches: Input) -> int:
        return sum(len(events) - len(in_time) for events, (in_time, _) in zip(batches, _in_time(batches), strict=True))


class Kept(NamedTuple):
    """A row as the processor gets it."""

    id: int
    ms: int
    payload: bytes


def window_of(ms: int) -> int:
    return ms // WINDOW_MS * WINDOW_MS


def digest(pairs: Iterable[tuple[int, bytes]]) -> int:
    """A digest of ids and payloads, in their order."""
    crc = 0
    for number, payload in pairs:
        crc = zlib.crc32(payload, zlib.crc32(str(number).encode(), crc))
    return crc


class Ledger(StatefulProcessor):
    """The processor, for rows and for frames of pandas."""

    def __init__(self, pandas: bool) -> None:
        self._pandas = pandas

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._totals = handle.getValueState("totals", "n bigint, total bigint, idle bigint")
        self._log = handle.getListState("log", "id bigint, payload binary")
        self._windows = handle.getMapState("windows", "start bigint", "n bigint, total bigint")
        self._payloads = handle.getMapState("payloads", "start bigint, id bigint", "payload binary")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        if self._pandas:
            rows = (row for frame in rows for row in frame.itertuples(index=False))
        new = sorted(Kept(int(row.id), int(row.ms), bytes(row.payload)) for row in rows)
        n, total, idle = self._totals.get() or (0, 0, 0)
        for row in new:
            start = window_of(row.ms)
            in_window = self._windows.getValue((start,)) or (0, 0)
            self._windows.updateValue((start,), (in_window[0] + 1, in_window[1] + row.id))
            self._payloads.updateValue((start, row.id), (row.payload,))
            self._handle.registerTimer(start + WINDOW_MS)
        later = max(idle, *(row.ms + IDLE_MS for row in new))
        if later != idle:
            # The timer of a window may have the same time.
            if idle and not self._windows.containsKey((idle - WINDOW_MS,)):
                self._handle.deleteTimer(idle)
            self._handle.registerTimer(later)
        self._log.appendList([(row.id, row.payload) for row in new])
        self._totals.update((n + len(new), total + sum(row.id for row in new), later))
        yield self._row(key, "rows", later, n + len(new), total, digest(self._log.get()))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        at = expiredTimerInfo.getExpiryTimeInMs()
        start = at - WINDOW_MS
        counted = self._windows.getValue((start,))
        if counted is not None:
            self._windows.removeKey((start,))
            here = sorted((id_, bytes(value[0])) for (of, id_), value in self._payloads.iterator() if of == start)
            for id_, _ in here:
                if id_ % 2 == 0:
                    self._payloads.removeKey((start, id_))
            yield self._row(key, "window", start, *counted, digest(here))
        totals = self._totals.get()
        if totals is not None and totals[2] == at:
            yield self._row(key, "idle", at, totals[0], totals[1], digest(self._log.get()))
            for state in (self._totals, self._log, self._payloads):
                state.clear()

    def _row(self, key: Any, *values: Any) -> Any:
        names = [column.split(" ")[0] for column in OUTPUT.split(", ")]
        row = dict(zip(names, (*key, *values), strict=True))
        return pd.DataFrame({name: [value] for name, value in row.items()}) if self._pandas else SparkRow(**row)

    def close(self) -> None:
        pass


# -- what must come out -----------------------------------------------------------------------------------


class _Key:
    """What the processor must know about a key."""

    def __init__(self) -> None:
        self.n = self.total = self.idle = 0
        self.log: list[Event] = []
        self.windows: dict[int, list[int]] = {}
        self.payloads: dict[tuple[int, int], bytes] = {}
        self.timers: set[int] = set()


def _in_time(batches: Input) -> Iterator[tuple[list[Event], int]]:
    """For each batch, the events that Spark does not drop as late, and the watermark in ms.

    An event is late if the watermark of the batch before has reached it.
    """
    before_ms = now_ms = latest_us = 0
    for events in batches:
        yield [event for event in events if event.ts_us > before_ms * 1000], now_ms
        latest_us = max(latest_us, *(event.ts_us for event in events))
        before_ms, now_ms = now_ms, max(now_ms, latest_us // 1000 - DELAY_S * 1000)


def expected(batches: Input) -> Iterator[list[Row]]:
    """The rows of each batch."""
    keys: dict[tuple[str, int | None], _Key] = {}
    for events, watermark_ms in _in_time(batches):
        rows: list[Row] = []
        came: dict[tuple[str, int | None], list[Event]] = {}
        for event in sorted(events, key=lambda event: event.id):
            part = 0 if event.k == HOT else None if event.k in (CLOCK, FLUSH) else event.id % PARTS
            came.setdefault((event.k, part), []).append(event)
        for name, new in came.items():
            state = keys.setdefault(name, _Key())
            _take(state, new)
            rows.append(_row(name, "rows", state.idle, state.n, state.total - sum(e.id for e in new), _of(state.log)))
        for name, state in list(keys.items()):
            for at in sorted(time for time in state.timers if time <= watermark_ms):
                state.timers.remove(at)
                rows += _fired(name, state, at)
        yield rows


def _take(state: _Key, new: list[Event]) -> None:
    for event in new:
        ms = event.ts_us // 1000
        start = ms - ms % WINDOW_MS
        state.windows.setdefault(start, []).append(event.id)
        state.payloads[start, event.id] = event.payload
        state.timers.add(start + WINDOW_MS)
    idle = max(state.idle, *(event.ts_us // 1000 + IDLE_MS for event in new))
    if idle != state.idle:
        if state.idle - WINDOW_MS not in state.windows:
            state.timers.discard(state.idle)
        state.timers.add(idle)
    state.idle = idle
    state.log += new
    state.n += len(new)
    state.total += sum(event.id for event in new)


def _fired(name: tuple[str, int | None], state: _Key, at: int) -> Iterator[Row]:
    start = at - WINDOW_MS
    ids = state.windows.pop(start, None)
    if ids is not None:
        here = sorted((id_, payload) for (of, id_), payload in state.payloads.items() if of == start)
        for id_, _ in here:
            if id_ % 2 == 0:
                del state.payloads[start, id_]
        yield _row(name, "window", start, len(ids), sum(ids), digest(here))
    if state.n and state.idle == at:
        yield _row(name, "idle", at, state.n, state.total, _of(state.log))
        state.n = state.total = state.idle = 0
        state.log, state.payloads = [], {}


def _of(log: Iterable[Event]) -> int:
    return digest((event.id, event.payload) for event in log)


def _row(name: tuple[str, int | None], kind: str, at: int, n: int, total: int, crc: int) -> Row:
    return {"k": name[0], "part": name[1], "kind": kind, "at": at, "n": n, "total": total, "digest": crc}
