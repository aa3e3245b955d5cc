"""Stateful processors as users write them: nothing here knows Aion.

Their input is ``k string, ts timestamp, kind string, v double`` where they do not say otherwise. Rows of a key may come
in any order, so all that depends on the order sorts them first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

DAY_MS = 86_400_000


def ms(at: Any) -> int:
    """A timestamp of a row in milliseconds; pandas has them without a time zone."""
    return int(pd.Timestamp(at).value // 1_000_000)


def in_order(rows: Any) -> list[Any]:
    return sorted(rows, key=lambda row: (row.ts, row.v, row.kind))


def of_frames(frames: Any) -> list[Any]:
    return in_order(row for frame in frames for row in frame.itertuples())


class Count(StatefulProcessor):
    """How many rows a key had. Its keys may be several columns, with nulls in them."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "n bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        before = self._count.get()[0] if self._count.exists() else 0
        self._count.update((before + sum(1 for _ in rows),))
        yield Row(key="/".join(map(str, key)), n=self._count.get()[0])


class CountInPandas(Count):
    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        before = self._count.get()
        n = (before[0] if before else 0) + sum(len(frame) for frame in rows)
        self._count.update((n,))
        yield pd.DataFrame({"key": ["/".join("None" if pd.isna(k) else str(k) for k in key)], "n": [n]})


class Extremes(StatefulProcessor):
    """The row with the largest ``n`` so far, with all its columns."""

    COLUMNS = (
        "n bigint, x double, s string, flag boolean, at timestamp, day date, price decimal(12,3), raw binary, "
        "tags array<string>, scores map<string,double>, inner struct<a:int,b:struct<c:string>>"
    )

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._best = handle.getValueState("best", self.COLUMNS)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in sorted(rows, key=lambda row: row.n):
            best = self._best.get()
            if best is None or row.n > best[0]:
                self._best.update(tuple(row)[1:])
        best = self._best.get()
        yield Row(k=key[0], **dict(zip((c.split(" ")[0] for c in self.COLUMNS.split(", ")), best, strict=True)))


class LastValues(StatefulProcessor):
    """The last three values of a key; ``reset`` forgets them, and ``only`` keeps one."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._values = handle.getListState("values", "v double, kind string")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in in_order(rows):
            match row.kind:
                case "reset":
                    self._values.clear()
                case "only":
                    self._values.put([(row.v, row.kind)])
                case "twice":
                    self._values.appendList([(row.v, row.kind), (row.v, None)])
                case _:
                    self._values.appendValue((row.v, row.kind))
            kept = list(self._values.get())
            if len(kept) > 3:
                self._values.put(kept[-3:])
        yield Row(k=key[0], what=f"{self._values.exists()} {list(self._values.get())}")


class Basket(StatefulProcessor):
    """Sums by kind; a negative sum leaves the basket, and ``pay`` empties it."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._sums = handle.getMapState("sums", "kind string", "total double, times int")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in in_order(rows):
            item = (row.kind,)
            if row.kind == "pay":
                paid = sorted(self._sums.iterator())
                yield Row(k=key[0], what=f"paid {paid} {sorted(self._sums.keys())} {sorted(self._sums.values())}")
                self._sums.clear()
            elif self._sums.containsKey(item):
                total, times = self._sums.getValue(item)
                if total + row.v < 0:
                    self._sums.removeKey(item)
                else:
                    self._sums.updateValue(item, (total + row.v, times + 1))
            else:
                self._sums.updateValue(item, (row.v, 1))
        yield Row(k=key[0], what=f"holds {self._sums.exists()} {sorted(self._sums.iterator())}")


class Sessions(StatefulProcessor):
    """Sessions of a key, as ``start, end, rows``, with a gap of five seconds; given out when the watermark passes."""

    GAP_MS = 5_000

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._open = handle.getListState("open", "start bigint, end bigint, n bigint")

    def add(self, times: list[int]) -> None:
        found = sorted([*self._open.get(), *((at, at + self.GAP_MS, 1) for at in times)])
        merged = [found[0]]
        for start, end, n in found[1:]:
            if start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], end), merged[-1][2] + n)
            else:
                merged.append((start, end, n))
        self._open.put(merged)
        ends = {end for _, end, _ in merged}
        there = set(self._handle.listTimers())
        for at in there - ends:
            self._handle.deleteTimer(at)
        for at in ends - there:
            self._handle.registerTimer(at)

    def ended(self, at: int) -> list[tuple[int, int, int]]:
        sessions = list(self._open.get())
        left = [session for session in sessions if session[1] > at]
        if left:
            self._open.put(left)
        else:
            self._open.clear()
        return [session for session in sessions if session[1] <= at]

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        self.add([ms(row.ts) for row in rows])
        return iter([])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        for start, end, n in self.ended(expiredTimerInfo.getExpiryTimeInMs()):
            yield Row(k=key[0], start=start, end=end, n=n)


class SessionsInPandas(Sessions):
    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        self.add([ms(at) for frame in rows for at in frame["ts"]])
        return iter([])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        ended = self.ended(expiredTimerInfo.getExpiryTimeInMs())
        yield pd.DataFrame([(key[0], *session) for session in ended], columns=["k", "start", "end", "n"])


class Reminders(StatefulProcessor):
    """Reminds of every row after 3, 7 and 20 seconds, and from then on every 10 seconds until ``done``."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._told = handle.getValueState("told", "times int")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in in_order(rows):
            if row.kind == "done":
                for at in list(self._handle.listTimers()):
                    self._handle.deleteTimer(at)
            else:
                for delay_ms in (3_000, 7_000, 20_000):
                    self._handle.registerTimer(ms(row.ts) + delay_ms)
        yield Row(k=key[0], what=f"waits for {sorted(self._handle.listTimers())}")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        at = expiredTimerInfo.getExpiryTimeInMs()
        times = self._told.get()[0] + 1 if self._told.exists() else 1
        self._told.update((times,))
        if times % 3 == 0:
            self._handle.registerTimer(at + 10_000)
        watermark = timerValues.getCurrentWatermarkInMs()
        yield Row(k=key[0], what=f"{at} of {watermark}, then {sorted(self._handle.listTimers())}")


class Heartbeats(StatefulProcessor):
    """An alert when a key was not seen for six seconds of event time."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._last = handle.getValueState("last", "at timestamp, timer bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        newest = max(row.ts for row in rows)
        last = self._last.get()
        if last is None or ms(newest) > ms(last[0]):
            if last is not None:
                self._handle.deleteTimer(last[1])
            self._last.update((newest, ms(newest) + 6_000))
            self._handle.registerTimer(ms(newest) + 6_000)
        return iter([])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        at, timer = self._last.get()
        assert timer == expiredTimerInfo.getExpiryTimeInMs()
        self._last.clear()
        yield Row(k=key[0], what=f"silent since {at}")


class Deduplicate(StatefulProcessor):
    """Rows whose value was not there within the TTL."""

    def __init__(self, ttl_ms: int) -> None:
        self._ttl_ms = ttl_ms

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._seen = handle.getMapState("seen", "v double, kind string", "n int", self._ttl_ms)
        self._first = handle.getValueState("first", "v double", self._ttl_ms)
        self._log = handle.getListState("log", "kind string", self._ttl_ms)
        self._all = handle.getValueState("all", "n bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        rows = in_order(rows)
        states = (self._seen, self._first, self._log, self._all)
        before = [state.exists() for state in states]
        self._all.update(((self._all.get() or (0,))[0] + len(rows),))
        for row in rows:
            self._log.appendValue((row.kind,))
            if not self._first.exists():
                self._first.update((row.v,))
            if not self._seen.containsKey((row.v, row.kind)):
                self._seen.updateValue((row.v, row.kind), (len(rows),))
                yield Row(k=key[0], what=f"new {row.v} {row.kind}")
        after = [self._first.get(), list(self._log.get()), sorted(self._seen.keys()), self._all.get()]
        yield Row(k=key[0], what=f"{before} {after}")


class Timeouts(StatefulProcessor):
    """Timers of processing time: one is due in the next batch, another one not today."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._count = handle.getValueState("count", "n bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        now_ms = timerValues.getCurrentProcessingTimeInMs()
        rows = list(rows)
        self._count.update((len(rows),))
        self._handle.registerTimer(now_ms + 1)
        self._handle.registerTimer(now_ms + DAY_MS)
        if any(row.kind == "reset" for row in rows):
            self._handle.registerTimer(now_ms)
        yield Row(k=key[0], what=f"{len(rows)} rows, {len(list(self._handle.listTimers()))} timers")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        due_now = expiredTimerInfo.getExpiryTimeInMs() == timerValues.getCurrentProcessingTimeInMs()
        yield Row(k=key[0], what=f"timeout {self._count.get()} {'at once' if due_now else 'in the next batch'}")
        self._count.clear()


class Fraud(StatefulProcessor):
    """A small payment and then a large one within ten seconds is an alert: Flink's example."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._flag = handle.getValueState("flag", "at timestamp, timer bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        alerts = []
        for row in of_frames(rows):
            flag = self._flag.get()
            if flag is not None and row.v > 70 and ms(row.ts) <= flag[1]:
                alerts.append((key[0], f"{row.v} at {ms(row.ts)}, flagged at {ms(flag[0])}"))
            if flag is not None:
                self._handle.deleteTimer(flag[1])
                self._flag.clear()
            if row.v < 20:
                self._flag.update((row.ts, ms(row.ts) + 10_000))
                self._handle.registerTimer(ms(row.ts) + 10_000)
        yield pd.DataFrame(alerts, columns=["k", "what"])

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        flag = self._flag.get()
        if flag is not None and flag[1] == expiredTimerInfo.getExpiryTimeInMs():
            self._flag.clear()
            yield pd.DataFrame({"k": [key[0]], "what": [f"no longer flagged at {flag[1]}"]})


class TopThree(StatefulProcessor):
    """The three largest values of a key, in the order of their size, whenever they change."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._top = handle.getListState("top", "v double, kind string")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        before = list(self._top.get())
        top = sorted([*before, *((row.v, row.kind) for row in rows)], reverse=True)[:3]
        if top != before:
            self._top.put(top)
            for place, (v, kind) in enumerate(self._top.get()):
                yield Row(k=key[0], what=f"{place}: {v} {kind}")


class Funnel(StatefulProcessor):
    """Goes through ``see``, ``put``, ``pay`` in this order; ignores what comes in between; ``reset`` starts over."""

    STEPS = ("see", "put", "pay")

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._step = handle.getValueState("step", "done int, since timestamp")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        for row in of_frames(rows):
            done, since = self._step.get() or (0, row.ts)
            if row.kind == "reset":
                self._step.clear()
            elif row.kind == self.STEPS[done]:
                if done + 1 == len(self.STEPS):
                    self._step.clear()
                    yield pd.DataFrame({"k": [key[0]], "what": [f"{ms(since)} to {ms(row.ts)}"]})
                else:
                    self._step.update((done + 1, since))


class Enrich(StatefulProcessor):
    """Two streams in one: ``profile`` rows say what a key is worth, others wait until this is known."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._profile = handle.getValueState("profile", "worth double")
        self._waiting = handle.getListState("waiting", "kind string, v double")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in in_order(rows):
            if row.kind == "profile":
                self._profile.update((row.v,))
            else:
                self._waiting.appendValue((row.kind, row.v))
        if self._profile.exists():
            worth = self._profile.get()[0]
            for kind, v in self._waiting.get():
                yield Row(k=key[0], what=f"{kind} {v} of {worth}")
            self._waiting.clear()


class Balance(StatefulProcessor):
    """Begins with a balance from the initial state: ``k string, start double, why string``, several rows per key."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._balance = handle.getValueState("balance", "total double")
        self._why = handle.getListState("why", "why string")

    def begin(self, start: float, why: str | None) -> None:
        self._balance.update(((self._balance.get() or (0.0,))[0] + start,))
        self._why.appendValue((why,))
        self._handle.registerTimer(1_000)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.begin(initialState.start, initialState.why)

    def add(self, key: Any, amount: float) -> str:
        self._balance.update(((self._balance.get() or (0.0,))[0] + amount,))
        return f"{self._balance.get()} {sorted(self._why.get(), key=str)}"

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        yield Row(k=key[0], what=self.add(key, sum(row.v for row in rows)))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield Row(k=key[0], what=f"timer {self._balance.get()}")


class BalanceInPandas(Balance):
    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        for row in initialState.itertuples():
            self.begin(row.start, row.why)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        yield pd.DataFrame({"k": [key[0]], "what": [self.add(key, sum(frame["v"].sum() for frame in rows))]})

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        yield pd.DataFrame({"k": [key[0]], "what": [f"timer {self._balance.get()}"]})


class Passing(StatefulProcessor):
    """Gives its rows on with their event time, for an operator behind it."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "n bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in in_order(rows):
            self._count.update(((self._count.get() or (0,))[0] + 1,))
            yield Row(k=key[0], at=row.ts, n=self._count.get()[0])


class Renamed(StatefulProcessor):
    """Three releases of a processor: the second one drops the first one's state, and the third one has it again."""

    def __init__(self, release: int) -> None:
        self._release = release

    def init(self, handle: StatefulProcessorHandle) -> None:
        if self._release == 2:
            handle.deleteIfExists("old")
            handle.deleteIfExists("never")
        self._state = handle.getValueState("new" if self._release == 2 else "old", "n bigint")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        before = self._state.get()
        self._state.update((len(list(rows)),))
        yield Row(k=key[0], what=f"release {self._release} found {before}")


class Wrong(StatefulProcessor):
    """Does something that fails, in ``init`` or when rows come."""

    def __init__(self, what: str) -> None:
        self._what = what

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._state = handle.getValueState("n", "n int", 1_000 if self._what == "ttl" else None)
        self._list = handle.getListState("list", "n int")
        match self._what:
            case "same name":
                handle.getListState("n", "n int")  # with a map Spark does not notice before the map is used
            case "negative ttl":
                handle.getListState("other", "n int", -1)
            case "name":
                handle.getValueState("$n", "n int")
            case "init":
                raise ValueError("init does not work")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        match self._what:
            case "rows":
                raise ValueError("rows are not handled")
            case "timer":
                self._handle.registerTimer(1)
            case "late state":
                self._handle.getValueState("later", "n int")
            case "late delete":
                self._handle.deleteIfExists("n")
            case "too many values":
                self._state.update((1, 2))
            case "no tuple":
                self._state.update(1)
            case "empty list":
                self._list.put([])
        yield Row(k=key[0], what="no error")


class Evolving(StatefulProcessor):
    """A release of a processor: its state variables have this schema. Gives what it finds, and then adds ``value``."""

    def __init__(self, schema: str, value: tuple[Any, ...], key: str = "at int") -> None:
        self._schema, self._value, self._key = schema, value, key

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._single = handle.getValueState("single", self._schema)
        self._list = handle.getListState("list", self._schema)
        self._map = handle.getMapState("map", self._key, self._schema)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        at = sum(1 for _ in rows)
        of_map = [(tuple(k), tuple(v)) for k, v in self._map.iterator()]
        yield Row(k=key[0], what=f"{self._single.get()} {list(self._list.get())} {of_map} {self._map.getValue((1,))}")
        self._single.update(self._value)
        self._list.appendValue(self._value)
        self._map.updateValue((at,), self._value)
