"""The stages of a kept event: each byte is where the figures say it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.ingest import stages
from experiments.shared.generate import EventPlan, write_batches


@pytest.mark.slow
def test_handed_over_bytes_are_written_once_and_moved_never(tmp_path: Path) -> None:
    (path,) = write_batches(EventPlan(2_000, payload_bytes=2_304), 1, tmp_path / "data")
    found = stages.of_carriers(path, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["data"]
    moved, copied, written = (
        {carrier: sum(row[what] for row in rows) for carrier, rows in found.items()}
        for what in ("moved", "copied", "written")
    )
    assert 1 <= written["files"] < 1.1 and moved["files"] < 0.05
    # Between processes: through the shuffle, to the state server, and back to the function.
    assert moved["rows"] >= 3 and copied["rows"] > copied["files"] + 3
    stages.chart(tmp_path / "stages.png", found)
    assert (tmp_path / "stages.png").stat().st_size > 1_000
    assert stages.table(found).row_count == sum(map(len, found.values()))
