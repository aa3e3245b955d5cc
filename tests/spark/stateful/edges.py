"""Processors that give what they see, exactly: names and types of what they get, and when their timers fire."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

OUT = "k string, what string"


def one_row(pandas: bool, what: str) -> Any:
    return pd.DataFrame({"k": ["-"], "what": [what]}) if pandas else Row(k="-", what=what)


def shown(rows: Any) -> str:
    """A frame, with the types of its columns, or rows. In the order of their text: rows of a key may come in any."""
    if isinstance(rows, pd.DataFrame):
        types = [f"{name} {dtype}" for name, dtype in rows.dtypes.items()]
        return f"{types} {sorted(map(repr, rows.values.tolist()))} {rows.index.tolist()}"
    return str(sorted(map(repr, rows)))


class Shows(StatefulProcessor):
    """Its key, its initial state and its rows."""

    def __init__(self, pandas: bool) -> None:
        self._pandas = pandas

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._began = handle.getListState("began", "what string")
        self._seen = handle.getValueState("seen", "n bigint")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self._began.appendValue((f"{key!r} {shown(initialState) if self._pandas else initialState!r}",))

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        found = pd.concat(list(rows)) if self._pandas else list(rows)
        self._seen.update(((self._seen.get() or (0,))[0] + len(found),))
        began = sorted(what for (what,) in self._began.get())
        yield one_row(self._pandas, f"{key!r} {self._seen.get()} {began} {shown(found)}")


class SetsTimersInThePast(StatefulProcessor):
    """Each timer that fires sets one a millisecond before itself, which is due at once, but not in the same batch."""

    def __init__(self, pandas: bool) -> None:
        self._pandas = pandas

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._fired = handle.getValueState("fired", "n bigint")

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self._handle.registerTimer(0)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        for _ in rows:
            pass
        now_ms = timerValues.getCurrentWatermarkInMs()
        if key[0].startswith("p"):
            self._handle.registerTimer(now_ms - 500)
            self._handle.registerTimer(now_ms + 500)
        if key[0].startswith("q"):
            self._handle.registerTimer(now_ms)
            self._handle.registerTimer(-5)
        yield one_row(self._pandas, f"{key} at {now_ms}: {sorted(self._handle.listTimers())}")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:
        now_ms, at_ms = timerValues.getCurrentWatermarkInMs(), expiredTimerInfo.getExpiryTimeInMs()
        fired = (self._fired.get() or (0,))[0] + 1
        self._fired.update((fired,))
        if fired < 5:
            self._handle.registerTimer(at_ms - 1)
        yield one_row(self._pandas, f"{key!r} at {now_ms}: {at_ms}, then {sorted(self._handle.listTimers())}")
