"""Timers of a stateful processor over the real stores of keyed values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle, TimerValues
from pyspark.sql.types import LongType, StructType

from aion.stateful.handle import Handle
from aion.stateful.keys import Group, Keys
from aion.stateful.run import ShardRun, variables_of
from tests.versions.host import Host
from tests.versions.keyed_attempt import LocalKeyedAttempt

KEYS = Keys(StructType().add("k", LongType()))
NUMBER = StructType().add("n", LongType())


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
    host, token, found = Host(kind, tmp_path, budget=64 << 20), None, []
    for now in range(1, 5):
        attempt, snapshot = host.open(token)
        handle = Handle("eventtime", now, lambda text: pytest.fail("schemas are not text here"))
        processor = Counting(timer_ms)
        processor.init(handle)
        handle.initialized()
        variables = variables_of(snapshot)
        handle.begin_shard(variables)
        store = LocalKeyedAttempt(host.shard, attempt)
        batch = ShardRun(processor, handle, variables, store, KEYS, TimerValues(now, now), None, snapshot)
        found += batch.rows([Group(KEYS.to_bytes((7,)), (7,), iter([1]), 1)])
        token = host.shard.commit(attempt, batch.snapshot())
    host.stop()
    assert found == [1, 2, 3, 4]
