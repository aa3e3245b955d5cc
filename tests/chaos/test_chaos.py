"""Nothing lost, whatever dies: a short run of ``aion experiment chaos``, with at least one fault of each kind."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from aion.cli import app
from experiments.chaos.command import run
from experiments.chaos.faults import FAULTS, FAULTS_OF_BUCKETS, KILLS, KILLS_OF_HOSTS
from experiments.chaos.going_back import FORK, REWIND
from experiments.chaos.result import Result, Settings, summary
from experiments.chaos.workloads import WORKLOADS
from experiments.shared.host_cluster import is_possible

# In an order in which each meets a query at work: after a JVM was killed it takes a while until there is one.
KINDS = (
    "server", "worker", "full disk", "hung server", "pause", "no descriptors", "JVM", "socket gone", "live folder",
    "daemon",
)  # fmt: skip


@pytest.mark.proof
@pytest.mark.timeout(1800)  # four minutes where nothing else runs
@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_row_is_that_of_an_undisturbed_run_and_of_the_events(tmp_path: Path, workload: str) -> None:
    assert set(KINDS) == KILLS.keys() | FAULTS.keys()
    others = set(psutil.Process().children(recursive=True))
    kills = sum(kind in KILLS for kind in KINDS)
    small: dict[str, Any] = {"files_of_a_kill": 1.0, "more_files": 9, "events_of_a_file": 80}
    settings = Settings(kills, seed=7, kinds=KINDS, workload=workload, **small)
    said, result = io.StringIO(), Result()
    try:
        run(settings, tmp_path, result, Console(file=said, width=200))
    finally:
        print(said.getvalue())  # for who looks into a failure
    assert result.differences == []
    assert result.kills == kills
    assert {fault.kind for fault in result.faults} == set(KINDS)
    assert result.batches > 2 * kills
    assert result.rows > 50
    assert result.too_late > 0
    assert list(summary(result))[-1].startswith(f"{kills} kills, 0 differences")
    assert set(psutil.Process().children(recursive=True)) <= others
    assert list(tmp_path.iterdir()) == []


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_bucket_may_be_busy_slow_or_silent(tmp_path: Path, workload: str) -> None:
    kinds = ("server", *FAULTS_OF_BUCKETS, "live folder", "worker", "damaged copy", "server")
    kills = sum(kind in KILLS for kind in kinds)
    small: dict[str, Any] = {"files_of_a_kill": 1.0, "more_files": 30, "events_of_a_file": 80}
    settings = Settings(kills, seed=11, kinds=kinds, workload=workload, store="s3", **small)
    result = Result()
    run(settings, tmp_path, result, Console(file=io.StringIO()))
    assert result.differences == []
    assert [fault.kind for fault in result.faults] == list(kinds)
    assert result.copies == 2 and result.rows > 50
    assert list(tmp_path.iterdir()) == []


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not is_possible(), reason="hosts are network namespaces: needs Linux, root and `ip`")
@pytest.mark.parametrize("workload", WORKLOADS)
def test_executors_and_hosts_may_die_too(tmp_path: Path, workload: str) -> None:
    kinds = (*KILLS_OF_HOSTS, *KILLS_OF_HOSTS)
    small: dict[str, Any] = {"files_of_a_kill": 1.0, "more_files": 9}
    settings = Settings(len(kinds), seed=9, kinds=kinds, hosts=2, workload=workload, **small)
    result = Result()
    run(settings, tmp_path, result, Console(file=io.StringIO()))
    assert result.differences == []
    assert [fault.kind for fault in result.faults if fault.kill] == list(kinds)
    assert sum(fault.tasks_lost for fault in result.faults) > 0
    assert result.copies == 2 and result.rows > 50
    assert list(tmp_path.iterdir()) == []


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("workload", WORKLOADS)
def test_queries_go_back_and_are_forked_between_the_kills(tmp_path: Path, workload: str) -> None:
    small: dict[str, Any] = {"files_of_a_kill": 1.0, "more_files": 26, "events_of_a_file": 80}
    kinds = ("worker", "server", "JVM", "worker")
    settings = Settings(len(kinds), seed=5, kinds=kinds, workload=workload, rewinds=3, forks=1, **small)
    result = Result()
    run(settings, tmp_path, result, Console(file=io.StringIO()))
    assert result.differences == []
    notes = {kind: [fault.note for fault in result.faults if fault.kind == kind] for kind in (REWIND, FORK)}
    assert len(notes[REWIND]) == 3 and any("to batch" in note and "not begun" not in note for note in notes[REWIND])
    assert len(notes[FORK]) == 1 and "at batch" in notes[FORK][0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--hosts", "1"),
        ("--seed", "2"),
        ("--events", "90"),
        ("--payload", "5"),
        ("--workload", "stateful"),
        ("--store", "s3"),
        ("--rewinds", "3"),
        ("--forks", "1"),
    ],
)
def test_another_run_than_the_one_that_was_cut_off_is_refused(tmp_path: Path, option: str, value: str) -> None:
    begun = {"settings": asdict(Settings(20, seed=1)), "seconds": 5.0, "result": asdict(Result(rounds=1))}
    (tmp_path / "chaos.json").write_text(json.dumps(begun))
    arguments = ["--kills", "20", "--seed", "1", "--hosts", "0", option, value, "--resume", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["experiment", "chaos", *arguments], env={"COLUMNS": "400"})
    assert done.exit_code == 2, done.output
    assert f"{option} " in done.output and f"not {value}" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["chaos.json"]
