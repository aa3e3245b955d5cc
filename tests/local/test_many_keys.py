"""More keys and rows than one block, batch or page holds: what is rare with a few is usual with thousands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import aion
from aion import aggregates as A
from tests.durations import us
from tests.local.test_restarts import restart

SECOND = 1_000_000
DAY = 86_400 * SECOND
GAP = 10 * SECOND
SUMS = {"n": A.count(), "sum": A.sum("v")}
POLICY = {"trigger": {"kind": "every_batch"}, "lateness": {"initial_bound": "1h", "coverage": None}}
KINDS: dict[str, Any] = {
    "session": aion.Session(us(GAP)),
    "cut session": aion.Session(us(GAP), max_duration=us(3 * GAP)),
    "gaps of the events": aion.Session(gap_column="gap"),
    "count": aion.Count(2),
    "per record": aion.PerRecord(us(GAP)),
    "punctuated": aion.Punctuated("mark"),
}


def events(keys: np.ndarray[Any, Any], t: int) -> pa.Table:
    n = len(keys)
    return pa.table(
        {
            "k": pa.array([f"key {key}" for key in keys]),
            "t": pa.array(np.full(n, t), pa.timestamp("us", "UTC")),
            "v": np.arange(n),
            "gap": pa.array(np.full(n, GAP), pa.duration("us")),
            "mark": np.ones(n, np.bool_),
        }
    )


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("emit", ["all", "final"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_windows_of_thousands_of_keys_close_in_one_batch(kind: str, emit: str) -> None:
    """The events of other shards have moved the watermark beyond everything that is here."""
    with aion.LocalOperator(
        windows=KINDS[kind], key="k", time="t", aggregates=SUMS, policy=POLICY, emit=emit
    ) as operator:
        found = []
        for batch in range(3):
            keys = np.arange(4000) if not batch else np.arange(7 * batch, 7 * batch + 5)
            found.append(operator.process(events(keys, batch * SECOND)))
            restart(operator)
        found.append(operator.advance(9 * DAY))
        restart(operator)
        found.append(operator.process(events(np.array([4001]), 10 * DAY)))
        restart(operator)
        found.append(operator.advance(11 * DAY))
        restart(operator)
    panes = pa.concat_tables(found).to_pandas()
    panes = panes.groupby(["k", "window_start"]).last()
    if kind in ("session", "cut session", "gaps of the events"):
        assert len(panes) == 4001
        assert panes["n"].sum() == 4000 + 5 + 5 + 1
    if kind == "count":
        assert panes["n"].sum() == 2 * len(panes)
        assert len(panes) > 0


@pytest.mark.slow
@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("kind", [k for k in KINDS if k.endswith("session")])
def test_a_task_may_have_more_partial_rows_than_wait_to_be_combined(kind: str, files: int) -> None:
    rows = 400_000
    keys = np.arange(rows) % 250_000
    table = pa.table(
        {
            "k": keys,
            "t": pa.array(np.arange(rows) // 250_000 * SECOND, pa.timestamp("us", "UTC")),
            "v": np.ones(rows, np.int64),
        }
    )
    chunks = pa.concat_tables([table.slice(i, 65_536) for i in range(0, rows, 65_536)])
    windows = [KINDS[kind]] if files == 1 else [KINDS[kind], aion.Tumbling(us(GAP)), aion.Count(2)]
    with aion.LocalOperator(windows=windows, key="k", time="t", aggregates=SUMS, policy=POLICY) as operator:
        operator.process(chunks)
        panes = operator.advance(10 * DAY).to_pandas()
    for name, some in panes.groupby("window"):
        assert some["n"].sum() == (300_000 if "count" in name else rows)
