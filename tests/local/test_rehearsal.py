"""The program of docs/how-to/rehearsal.md runs as it stands, and its counts are those of a plain computation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.documents import run_python

HOUR_US = 3_600_000_000
INSTANT = pa.timestamp("us", "UTC")


@pytest.mark.slow
def test_the_program_counts_what_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = np.random.default_rng(5)
    scheduled = np.sort(draw.integers(0, 150 * HOUR_US, 8_000))
    arrived = scheduled + (draw.exponential(1.5, len(scheduled)) * HOUR_US).astype(np.int64)
    history = {"origin": draw.choice(["a", "b"], len(scheduled)).tolist()}
    columns = {"scheduled": pa.array(scheduled, INSTANT), "arrived": pa.array(arrived, INSTANT)}
    pq.write_table(pa.table({**history, **columns}), tmp_path / "history.parquet")
    monkeypatch.chdir(tmp_path)
    names = run_python("docs/how-to/rehearsal.md", {}, tmp_path, {})
    after_end = arrived // HOUR_US - scheduled // HOUR_US - 1
    late = after_end[after_end >= 0]
    assert names["late"] == len(late)
    assert 0 < names["dropped"] < 0.02 * len(late), "the learnt bound covers about what was asked"
    assert names["fixed"][2] == pytest.approx((late < 2).mean()) and names["fixed"][24] == 1
    hours = names["enough"](True)
    assert (late < hours - 1).mean() < 0.99 <= (late < hours).mean()
    assert names["lost"].sum() == (late >= hours).sum() < 0.01 * len(late)
    assert f"late: {len(late):,} of 8,000" in capsys.readouterr().out
