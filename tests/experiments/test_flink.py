"""Flink beside Aion: what its program prints becomes a run, and it does run with the jars of PyPI."""

from __future__ import annotations

import itertools
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.ingest.flink import JOBS, Flink, Load, as_run
from experiments.joins import command as joins
from experiments.joins import flink as of_joins
from experiments.joins.flink import END, ROW, FlinkJoin, write_rows
from experiments.shared.flink import BACKENDS, FlinkError
from experiments.shared.generate import EventPlan

LOAD = Load.of(EventPlan(2_000, payload_bytes=100), batches=5, cores=2)
FOUND = {"events": 10_000, "wall_s": 4.0, "measured_s": 2.0, "panes": 9, "computed": 12_000, "dropped": 0}


def test_the_rate_is_that_of_the_events_after_the_skipped_batches() -> None:
    run = as_run(JOBS["flink-heap"], LOAD, {**FOUND, "checkpoints": 3})
    assert (run.steady_events_per_s, run.whole_events_per_s, run.events) == (3_000, 2_500, 10_000)
    assert run.progress[0]["checkpoints"] == 3


@pytest.mark.parametrize("wrong", [{"events": 9_999}, {"dropped": 1}])
def test_a_run_that_lost_events_is_no_run(wrong: dict[str, int]) -> None:
    with pytest.raises(FlinkError, match="of 10,000 events"):
        as_run(JOBS["flink-heap"], LOAD, {**FOUND, **wrong})


def test_what_is_not_flink_is_refused_with_the_way_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no wheel")
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as wheel:
        wheel.writestr("lib/other.jar", "")
    for jars in (tmp_path / "text", tmp_path / "missing", tmp_path / "other.whl"):
        with pytest.raises(FlinkError, match="pip download --no-deps -d out apache-flink-libraries"):
            Flink(jars, tmp_path)


def test_rows_of_a_join_are_those_of_the_batches_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    joins.generate(tmp_path, rows=10, batches=3, late_share=0)
    written = write_rows(tmp_path, tmp_path / "rows.bin", 3, unmeasured=1)
    rows = np.fromfile(tmp_path / "rows.bin", ROW)
    ends = np.flatnonzero(rows["side"] == END)
    assert written.rows == len(rows) == ends[-1] + 1 and written.skipped == ends[0] + 1
    assert written.events == len(rows) - 3
    for begin, end in itertools.pairwise([-1, *ends]):
        batch = rows[begin + 1 : end]
        latest = [batch["time"][batch["side"] == side].max() for side in (0, 1)]
        assert len(batch) > 10 and rows["time"][end] == min(latest)
    monkeypatch.setattr(of_joins, "MOST_ROWS", len(rows) - 1)
    with pytest.raises(FlinkError, match=f"program reads at most {len(rows) - 1}"):
        write_rows(tmp_path, tmp_path / "rows.bin", 3, unmeasured=1)


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
