"""Stateful processors that count the rows of each key: one that takes rows, and one that takes frames."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle


class Counter(StatefulProcessor):
    """Yields a row for each key of a batch: the number of its rows so far. An initial state is where it begins."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._n = handle.getValueState("n", "n long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        yield Row(k=key[0], n=self._add(sum(1 for _ in rows)))

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self._n.update((initialState["n"],))

    def close(self) -> None: ...

    def _add(self, rows: int) -> int:
        n = int((self._n.get() or (0,))[0]) + rows
        self._n.update((n,))
        return n


class FrameCounter(Counter):
    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        yield pd.DataFrame({"k": [key[0]], "n": [self._add(sum(map(len, rows)))]})
