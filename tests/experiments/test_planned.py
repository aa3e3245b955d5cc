"""`aion experiment planned`: its stream, its modes, each once and in miniature, and what it says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from aion.core.compaction import BlockFact
from aion.core.life.actions import Arrived, BatchEnded, Prestage, WatermarkAdvanced
from aion.core.periodic import Tumbling
from aion.core.slicing.grid import SliceGrid
from aion.core.trigger.staleness import StalenessTrigger
from experiments.planned import report as planned_report
from experiments.planned.command import MINUTE_US, run, stream
from experiments.planned.settings import MODES, Settings
from tests.durations import us
from tests.operators import bound_of, operator_of

TINY = Settings(windows=4, events=600, late=40, bound_s=120, median_s=30, budget_bytes=4 << 20, staleness=0.1)


def test_the_stream_is_in_time_or_late_as_it_says() -> None:
    settings = Settings(windows=20, events=50, late=30, payload_bytes=1)
    times, lateness = [], []
    for watermark_us, table in stream(settings):
        ts = table.column("ts").cast(pa.int64()).to_numpy()
        ends = ts // MINUTE_US * MINUTE_US + MINUTE_US
        times += ts.tolist()
        lateness += (watermark_us - ends[ends <= watermark_us]).tolist()
    assert min(times) >= 0 and max(times) < 20 * MINUTE_US
    # What is late by less than a step comes while its window is still open.
    assert len(lateness) == pytest.approx(20 * 30 * 0.95, rel=0.15)
    assert np.median(lateness) / 1e6 == pytest.approx(60, rel=0.25)


@pytest.mark.slow
def test_modes_yield_the_same_panes_and_find_different_things_in_memory() -> None:
    found = {mode: run(mode, TINY) for mode in MODES}
    assert len({f["panes"] for f in found.values()}) == 1
    executions = found["none"]["executions"]
    assert executions["on_time"] == 4 and executions["late"] > 4
    assert [f["executions"] for f in found.values()] == [executions] * 3
    assert found["none"]["hits"] == found["none"]["staged_bytes"] == 0 < found["none"]["misses"]
    assert found["predictive"]["hits"] > 0
    for f in found.values():
        assert 0 < f["staleness"]["mean"] <= f["staleness"]["largest"] <= 1
        assert 0 <= f["staleness"]["kept"] <= 1 and f["late_seconds"] > 0


GRID = SliceGrid((Tumbling(us(100)),))


def test_a_late_event_announces_what_will_run_in_the_same_batch_and_no_later_one() -> None:
    def stirred(due_only: bool, events: int) -> list[Any]:
        op = operator_of(GRID, bound_of(1000), StalenessTrigger(0.3), stages_due=due_only)
        op.handle(WatermarkAdvanced(1))
        op.handle(Arrived([BlockFact(0, 10, 1)]))
        op.handle(WatermarkAdvanced(201))
        op.watermark.step_us = 0
        found = [a for a in op.handle(Arrived([BlockFact(0, events, 1)])) if isinstance(a, Prestage)]
        ran = bool(op.handle(BatchEnded()))
        assert not due_only or ran == bool(found)
        return found

    # 101 of 1000 have gone by; of all late events all are new, which is a staleness of 0.1: not yet.
    assert stirred(False, 5) == [Prestage((0,))] and stirred(True, 5) == []
    op = operator_of(GRID, bound_of(1000), StalenessTrigger(0.05), stages_due=True)
    op.handle(WatermarkAdvanced(1))
    op.handle(Arrived([BlockFact(0, 10, 1)]))
    op.handle(WatermarkAdvanced(201))
    assert Prestage((0,)) in op.handle(Arrived([BlockFact(0, 5, 1)]))


def result(hits: int, misses: int, seconds: float, panes: int = 1) -> dict[str, Any]:
    return {
        "panes": panes, "executions": {}, "late_per_window": 3.0, "late_seconds": seconds, "hits": hits,
        "ahead": 0, "late": 1, "misses": misses, "blocked_s": 0.5, "staged_bytes": 1, "vain_bytes": 0,
        "staleness": {"kept": 1.0, "largest": 0.04, "mean": 0.03},
    }  # fmt: skip


def test_the_report_judges_what_was_measured(tmp_path: Path) -> None:
    results = {"predictive": [result(9, 1, 1.0)], "on_late_event": [result(2, 8, 2.0)], "none": [result(0, 9, 3.0)]}
    assert [check.words for check in planned_report.checks(results)] == ["holds"] * 4
    worse = {"predictive": [result(1, 9, 4.0)], "on_late_event": [result(2, 8, 2.0, 2)], "none": [result(0, 9, 3.0)]}
    worse["none"][0]["staleness"]["kept"] = 0.5
    assert [check.words for check in planned_report.checks(worse)] == ["does not hold"] * 4
    paths = planned_report.write(tmp_path, {"results": worse}, worse)
    record = json.loads(paths[0].read_text())
    assert [check["verdict"] for check in record["checks"]] == ["does not hold"] * 4
    assert paths[1].stat().st_size > 10_000
    assert [table.row_count for table in planned_report.tables(results)] == [3, 3, 4]
    assert "MiB of memory" in planned_report.remarks(TINY)
