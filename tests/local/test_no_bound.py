"""``lateness=0``: a window that arrives complete, behind the watermark, runs in its batch."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import aion
from aion import aggregates as A
from tests.durations import us

US = pa.timestamp("us")


def test_a_count_window_that_is_completed_behind_the_watermark() -> None:
    with aion.LocalOperator(windows=aion.Count(2, bound=0), time="t", aggregates={"n": A.count()}) as operator:
        operator.process(pa.table({"t": pa.array([100], US)}))
        operator.advance(300)
        tables = [operator.process(pa.table({"t": pa.array([us], US)})) for us in (250, 200)]
    found = [table.select(["kind", "n"]).to_pylist() for table in tables]
    assert found == [[{"kind": "final", "n": 2}], [{"kind": "dropped", "n": 1}]]


@pytest.mark.parametrize("how", ["aggregates", "apply"])
def test_four_definitions_and_windows_that_were_executed_before(how: str) -> None:
    # Found by a random search: here the trigger also plans after an execution.
    batches: list[tuple[int | None, list[tuple[int, int | None, bool]]]] = [
        (1, []), (31, []), (None, [(29, 0, False), (24, 1, True)]),
        (None, [(15, None, False), (17, 1, True), (10, 1, True), (46, 0, True)]),
        (66, [(46, None, False), (48, 1, True), (49, 2, False)]), (75, []), (None, [(52, 0, True)]),
        (136, [(115, 0, True)]),
    ]  # fmt: skip
    windows: dict[str, Any] = {
        "session": aion.Session(us(1), bound=0),
        "tumbling": aion.Tumbling(us(10), us(8), bound=0),
        "punctuated": aion.Punctuated("mark", bound=0),
        "gap": aion.Session(gap_column="gap", bound=0),
    }
    ways: dict[str, dict[str, Any]] = {
        "aggregates": {"aggregates": {"n": A.count()}},
        "apply": {
            "apply": aion.Apply(lambda key, window, events: {"n": sum(len(part) for part in events)}, "n bigint")
        },
    }
    final = 0
    with aion.LocalOperator(windows=windows, key="key", time="t", **ways[how]) as operator:
        for watermark_us, events in batches:
            times, keys, marks = ([event[i] for event in events] for i in range(3))
            table = pa.table(
                {
                    "t": pa.array(times, US),
                    "key": pa.array(keys, pa.int64()),
                    "mark": pa.array(marks, pa.bool_()),
                    "gap": pa.array([5] * len(events), pa.duration("us")),
                }
            )
            final += operator.process(table, watermark_us).column("kind").to_pylist().count("final")
    assert final
