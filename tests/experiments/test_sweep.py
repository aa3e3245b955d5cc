"""Sweeps with real cells: what is stopped goes on where it was, and who dies of memory is recorded."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from experiments.memory_pressure import run
from experiments.memory_pressure.findings import death
from experiments.memory_pressure.run import Progress, cell_key, sweep
from experiments.memory_pressure.settings import Cell, Settings, cell_spec, cells
from experiments.shared import bench

pytestmark = pytest.mark.timeout(900)

TINY = Settings(
    workload=["average"],
    backend=["spark-window"],
    past_windows=[1, 2],
    scale=0.01,
    state="1GiB",
    warm_up=1,
    measured=2,
    pace="max",
    limit="watched",
)


@pytest.mark.proof
def test_a_sweep_that_was_stopped_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    told: list[str] = []

    def stop_in_the_second_cell(text: str, progress: Progress) -> None:
        told.append(text)
        if text == "average-spark-window-02":
            raise KeyboardInterrupt

    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(KeyboardInterrupt):
        sweep(TINY, tmp_path, stop_in_the_second_cell)
    assert set(psutil.Process().children(recursive=True)) - before == set(), "nothing of the second cell is left"
    first = tmp_path / "cells" / "average-spark-window-01.json"
    result = json.loads(first.read_text())
    assert (result["status"], result["limit_kind"]) == ("done", "watched"), result
    found = result["measured"]
    assert found["batches"] == 2
    assert result["agrees"] is True, result["difference"]
    floor = json.loads((tmp_path / "cells" / "average-spark-window-floor.json").read_text())
    assert result["spec"]["floor_bytes"] == round(floor["measured"]["peak_mib"] * 2**20) > 512 << 20
    limit_bytes = result["spec"]["floor_bytes"] + result["spec"]["flight_bytes"] + (1 << 30)
    assert result["spec"]["limit_bytes"] == limit_bytes
    assert result["page_cache"]["times"] > 0 and result["page_cache"]["files"] > 0
    assert len(found["ingestion"]["normal"]) == 2 and min(found["ingestion"]["normal"]) > 0
    assert min(found["memory_mib"]["jvm"], default=1) > 0 and found["peak_mib"] > 100
    assert not (tmp_path / "cells" / "average-spark-window-02.json").exists()
    assert not (tmp_path / "cells" / "average-spark-window-01" / "work").exists()

    modified, told[:] = first.stat().st_mtime_ns, []
    with pytest.raises(KeyboardInterrupt):
        sweep(TINY, tmp_path, stop_in_the_second_cell)
    assert told[0] == "1 of 2 cells are done already"
    assert not [text for text in told if "-01" in text]
    assert first.stat().st_mtime_ns == modified


@pytest.mark.proof
def test_a_cell_that_dies_of_memory_is_recorded_and_not_asked_for_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # what is killed leaves its temporary files
    starved = TINY.model_copy(update={"state": "1MiB"})
    floor = next(cells(starved)).its_floor
    known = {"status": "done", "spec": cell_spec(starved, floor), "measured": {"peak_mib": 100.0}}
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / f"{floor.name}.json").write_text(json.dumps(known))
    first, second = sweep(starved, tmp_path, lambda text, progress: None)
    assert first["status"] == "died" and "above the limit" in first["why"]
    assert first["measured"]["peak_mib"] > 100
    assert (second["status"], second["why"]) == ("not run", "died with 1 past windows")
    assert death({1: first, 2: second}) == 1
    kept = json.loads((tmp_path / "cells" / "average-spark-window-01.json").read_text())
    assert kept["status"] == "died"
    told: list[str] = []
    sweep(starved, tmp_path, lambda text, progress: told.append(text))
    assert told == ["1 of 2 cells are done already"], "who died is not run again"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The past windows of cells that have run. With 5 or more they died. Nothing is measured."""
    asked: list[int] = []

    def run_cell(
        settings: Settings, cell: Cell, out: Path, show: object, progress: object, floor_bytes: int
    ) -> dict[str, object]:
        if not cell.floor:
            asked.append(cell.past_windows)
        died: dict[str, object] = {
            "status": "died" if cell.past_windows >= 5 else "done",
            "spec": cell_spec(settings, cell, floor_bytes),
            "commit": bench.commit(),
        }
        died["measured"] = {"peak_mib": 700.0}
        place = out / "cells" / f"{cell.name}.json"
        place.parent.mkdir(exist_ok=True)
        place.write_text(json.dumps(died | cell_key(cell)))
        return died | cell_key(cell)

    monkeypatch.setattr(run, "run_cell", run_cell)
    return asked
