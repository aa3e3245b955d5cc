"""More I/O threads change how long it takes, and nothing else (``io.threads``)."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

import aion
from aion import aggregates as A

MINUTE = 60_000_000


def rows(threads: int, backend: str, seed: int) -> list[str]:
    rng = random.Random(seed)
    policy: dict[str, Any] = {
        "io": {"threads": threads},
        "state": {"backend": backend},
        "memory": {"budget": "64KiB", "bucket_limit": "4KiB"},
        "lateness": {"initial_bound": "20 minutes", "coverage": None},
        "trigger": {"kind": "every_batch"},
    }
    windows, aggregates = aion.Sliding("2 minutes", "1 minute"), {"n": A.count(), "middle": A.median("v")}
    found: list[str] = []
    with aion.LocalOperator(windows=windows, time="ts", key="k", aggregates=aggregates, policy=policy) as operator:
        for batch in range(8):
            times = [batch * MINUTE + rng.randrange(-3 * MINUTE, MINUTE) for _ in range(40)]
            events = {"k": [rng.randrange(3) for _ in times], "ts": pa.array(times, pa.timestamp("us", "UTC"))}
            values = [rng.randrange(100) for _ in times]
            found += map(str, operator.process(pa.table({**events, "v": values}), batch * MINUTE).to_pylist())
        found += map(str, operator.close().to_pylist())
    return sorted(found)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["tiered", "rocksdb"])
def test_several_threads_give_the_rows_of_one(backend: str) -> None:
    for seed in range(2):
        assert rows(3, backend, seed) == rows(1, backend, seed)
