"""Stateful processors over the real stores of keyed values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues
from pyspark.sql.types import LongType, StringType, StructType

from aion.stateful.handle import Handle
from aion.stateful.keys import Group, Keys
from aion.stateful.run import ShardRun, variables_of
from tests.versions.host import Host
from tests.versions.keyed_attempt import LocalKeyedAttempt

KEYS = Keys(StructType().add("k", LongType()))
NUMBER, TEXT = StructType().add("n", LongType()), StructType().add("s", StringType())


class Counting(StatefulProcessor):
    """Yields how many batches a key has had, and sets a timer."""

    def __init__(self, timer_ms: int) -> None:
        self._timer_ms = timer_ms

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._count = handle.getValueState("n", NUMBER)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Any]:
        count = (self._count.get() or (0,))[0] + 1
        self._count.update((count,))
        self._handle.registerTimer(self._timer_ms)
        yield count

    def close(self) -> None:
        pass


@pytest.mark.parametrize("kind", ["tiered", "memory", "rocksdb"])
@pytest.mark.parametrize("timer_ms", [2**63 - 1, 2**63 - 2, -(2**63)])
def test_a_key_with_a_timer_at_the_end_of_time_keeps_its_state(tmp_path: Path, kind: str, timer_ms: int) -> None:
    """Long.MaxValue is how many write "never"."""
    host = Host(kind, tmp_path, budget=64 << 20)
    found = run(host, [Counting(timer_ms)] * 4)
    host.stop()
    assert found == [1, 2, 3, 4]


class Filling(Counting):
    """Also has a large list and a large map, or deletes them."""

    def __init__(self, *, deletes: bool) -> None:
        super().__init__(0)
        self._deletes = deletes

    def init(self, handle: StatefulProcessorHandle) -> None:
        super().init(handle)
        if self._deletes:
            handle.deleteIfExists("list")
            handle.deleteIfExists("map")
            return
        self._list = handle.getListState("list", TEXT)
        self._map = handle.getMapState("map", NUMBER, TEXT)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: TimerValues) -> Iterator[Any]:
        self._count.update((1,))
        if not self._deletes:
            self._list.put([("x" * 1000,)] * 300)
            for n in range(300):
                self._map.updateValue((n,), ("y" * 1000,))
        yield 1


def test_pages_go_with_their_variable(tmp_path: Path) -> None:
    host = Host("tiered", tmp_path, budget=64 << 20)
    pages: list[int] = []
    run(host, [Filling(deletes=False), Filling(deletes=True), Filling(deletes=True)], pages)
    host.stop()
    assert pages[0] > 2
    assert pages[1:] == [0, 0]


def run(host: Host, processors: Sequence[StatefulProcessor], pages: list[int] | None = None) -> list[Any]:
    """A batch with a row of key 7 for each processor. ``pages``: gets how many pages there are after each."""
    token, found = None, []
    for now, processor in enumerate(processors, 1):
        attempt, snapshot = host.open(token)
        handle = Handle("eventtime", now, lambda text: pytest.fail("schemas are not text here"))
        processor.init(handle)
        handle.initialized()
        variables = variables_of(snapshot)
        handle.begin_shard(variables)
        store = LocalKeyedAttempt(host.shard, attempt)
        batch = ShardRun(processor, handle, variables, store, KEYS, TimerValues(now, now), None, snapshot)
        found += batch.arrive([Group(KEYS.to_bytes((7,)), (7,), iter([1]), 1)])
        if pages is not None:
            pages.append(len(list(store.scan(b"p", b"q"))))
        token = host.shard.commit(attempt, batch.save().snapshot)
    return found
