"""Flink beside Aion: what its program prints becomes a run, and it does run with the jars of PyPI."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.ingest.flink import JOBS, Flink, Load, as_run
from experiments.joins import command as joins
from experiments.joins.flink import FlinkJoin, write_rows
from experiments.shared.flink import BACKENDS, FlinkError
from experiments.shared.generate import EventPlan

LOAD = Load.of(EventPlan(2_000, payload_bytes=100), batches=5, cores=2)
FOUND = {"events": 10_000, "wall_s": 4.0, "measured_s": 2.0, "panes": 9, "computed": 12_000, "dropped": 0}


@pytest.mark.parametrize("wrong", [{"events": 9_999}, {"dropped": 1}])
def test_a_run_that_lost_events_is_no_run(wrong: dict[str, int]) -> None:
    with pytest.raises(FlinkError, match="of 10,000 events"):
        as_run(JOBS["flink-heap"], LOAD, {**FOUND, **wrong})


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flink")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder)]
    subprocess.run([*pip, "apache-flink-libraries==2.3.0"], check=True, timeout=600)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def flink(wheel: Path) -> Flink:
    return Flink(wheel, wheel.parent)


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("contender", BACKENDS)
def test_an_interval_join_finds_each_pair_that_is_not_late(wheel: Path, tmp_path: Path, contender: str) -> None:
    program = FlinkJoin(wheel, wheel.parent)
    found = {}
    for share in (0.0, 0.2):
        pairs = joins.generate(tmp_path / str(share), rows=1000, batches=10, late_share=share)
        written = write_rows(tmp_path / str(share), tmp_path / "rows.bin", 10, unmeasured=2)
        seconds, found[share] = program.run(contender, tmp_path / "rows.bin", written, joins.WITHIN_S, 2)
        assert seconds > 0 and (found[share] == pairs if share == 0 else found[share] < pairs)


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", JOBS)
def test_flink_computes_all_events_and_drops_none(flink: Flink, tmp_path: Path, name: str) -> None:
    load = replace(LOAD, payload_bytes=0) if name == "flink-mean" else LOAD
    run = flink.run(JOBS[name], load, tmp_path)
    # Windows with late events are computed again, so more events than there are.
    assert run.progress[0]["computed"] > run.events == 10_000
    # 5 batches of 40 seconds in windows of 20 seconds touch 11 windows of 100 keys, and those of late events.
    assert run.progress[0]["panes"] >= 11 * 100
    assert list(tmp_path.iterdir()) == []
