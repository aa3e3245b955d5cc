"""Nothing lost, whatever dies: a short run of ``aion experiment chaos``, with at least one fault of each kind."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from aion.cli import app
from experiments.chaos import Result, Settings, run, summary
from experiments.chaos_faults import FAULTS, KILLS, KILLS_OF_HOSTS
from experiments.host_cluster import is_possible

# In an order in which each meets a query at work: after a JVM was killed it takes a while until there is one.
KINDS = (
    "server", "worker", "full disk", "hung server", "pause", "no descriptors", "JVM", "socket gone", "daemon",
)  # fmt: skip


@pytest.mark.proof
@pytest.mark.timeout(1800)  # four minutes where nothing else runs
def test_every_pane_is_that_of_an_undisturbed_run_and_of_the_events(tmp_path: Path) -> None:
    assert set(KINDS) == KILLS.keys() | FAULTS.keys()
    others = set(psutil.Process().children(recursive=True))
    kills = sum(kind in KILLS for kind in KINDS)
    settings = Settings(kills, seed=7, kinds=KINDS, files_of_a_kill=1.0, more_files=9, events_of_a_file=80)
    said, result = io.StringIO(), Result()
    try:
        run(settings, tmp_path, result, Console(file=said, width=200))
    finally:
        print(said.getvalue())  # for who looks into a failure
    assert result.differences == []
    assert result.kills == kills
    assert {fault.kind for fault in result.faults} == set(KINDS)
    assert result.batches > 2 * kills
    assert result.panes > 50
    assert result.too_late > 0
    assert list(summary(result))[-1].startswith(f"{kills} kills, 0 differences")
    assert set(psutil.Process().children(recursive=True)) <= others
    assert list(tmp_path.iterdir()) == []


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not is_possible(), reason="hosts are network namespaces: needs Linux, root and `ip`")
def test_executors_and_hosts_may_die_too(tmp_path: Path) -> None:
    kinds = (*KILLS_OF_HOSTS, *KILLS_OF_HOSTS)
    settings = Settings(len(kinds), seed=9, kinds=kinds, files_of_a_kill=1.0, more_files=9, hosts=2)
    result = Result()
    run(settings, tmp_path, result, Console(file=io.StringIO()))
    assert result.differences == []
    assert [fault.kind for fault in result.faults if fault.kill] == list(kinds)
    assert sum(fault.tasks_lost for fault in result.faults) > 0
    assert result.copies == 2 and result.panes > 50
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("option", "value"), [("--hosts", "1"), ("--seed", "2"), ("--events", "90"), ("--payload", "5")]
)
def test_another_run_than_the_one_that_was_cut_off_is_refused(tmp_path: Path, option: str, value: str) -> None:
    begun = {"settings": asdict(Settings(20, seed=1)), "seconds": 5.0, "result": asdict(Result(rounds=1))}
    (tmp_path / "chaos.json").write_text(json.dumps(begun))
    arguments = ["--kills", "20", "--seed", "1", option, value, "--resume", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["experiment", "chaos", *arguments], env={"COLUMNS": "400"})
    assert done.exit_code == 2, done.output
    assert f"{option} " in done.output and f"not {value}" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["chaos.json"]
