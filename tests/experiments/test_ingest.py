"""The events of `aion experiment ingest`: as many are late as the paper says, and files are the same every time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from experiments.shared.generate import (
    EventPlan,
    event_times,
    events,
    lateness_shares,
    write_batches,
)

PLAN = EventPlan(events_per_batch=20_000)


def times(plan: EventPlan, index: int) -> np.ndarray:
    return events(plan, index)["ts"].cast(pa.int64()).to_numpy()


@pytest.mark.parametrize(
    ("past_windows", "percent"),
    [
        (1, [80.2, 19.8]),
        (5, [67.8, 16.8, 7.7, 4.0, 2.3, 1.4]),
        (10, [66.2, 16.4, 7.5, 3.9, 2.2, 1.4, 0.9, 0.6, 0.4, 0.3, 0.2]),
    ],
)
def test_lateness_shares_are_the_papers(past_windows: int, percent: list[float]) -> None:
    assert np.round(lateness_shares(past_windows) * 100, 1).tolist() == pytest.approx(percent, abs=0.11)


@pytest.mark.parametrize("index", [0, 1, 2, 7])
@pytest.mark.parametrize("share", [0.0, 0.05, 1.0])
def test_exactly_the_late_share_is_behind_the_watermark(index: int, share: float) -> None:
    plan = dataclasses.replace(PLAN, late_share=share)
    t = event_times(plan, index, np.random.default_rng(index))
    window_end = t // plan.window_us * plan.window_us + plan.window_us
    lateness_us = plan.watermark_us(index) - window_end
    late = lateness_us[lateness_us >= 0]
    assert late.size == round(share * plan.events_per_batch)
    assert np.all(late < plan.past_windows * plan.window_us)
    on_time = t[lateness_us < 0]
    assert np.all(np.diff(on_time) >= 0), "on-time events arrive in the order of their times"
    assert np.all((on_time >= plan.start_us(index)) & (on_time < plan.start_us(index + 1)))


def test_files_are_the_same_bytes_every_time_and_read_in_order(tmp_path: Path) -> None:
    plan = EventPlan(events_per_batch=1_000, payload_bytes=100)
    first = write_batches(plan, 3, tmp_path / "a")
    again = write_batches(plan, 3, tmp_path / "b")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    modified = [path.stat().st_mtime for path in first]
    assert modified == sorted(modified)
    assert len(set(modified)) == 3, "Spark orders files by modification time: no two may share one"
    assert pq.ParquetFile(first[0]).num_row_groups == plan.row_groups
    assert pq.read_table(first[1]).drop_columns("payload").equals(events(plan, 1))
