"""``aion experiment limits``, small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aion.cli import app

ARGUMENTS = [
    "--legs",
    "memory,commit,requests,size",
    "--budget-mib",
    "16",
    "--readers",
    "2",
    "--prestage-mib",
    "40",
    "--days",
    "8",
]


def test_one_leg_is_measured_alone(tmp_path: Path) -> None:
    some = ["--legs", "commit", "--prestage-mib", "4", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["experiment", "limits", *some], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "limits.json").read_text())
    assert found["commit"]["beside_s"] > 0 and not {"memory", "requests", "size"} & found.keys()
    assert done.output.startswith("commit: one block takes")


@pytest.mark.proof
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process's memory is read from /proc")
def test_the_command_measures_and_says_what_it_found(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["experiment", "limits", *ARGUMENTS, "--out", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "limits.json").read_text())
    assert [line.partition(":")[0] for line in done.output.splitlines()][:4] == ["memory", "commit", "requests", "size"]
    memory = found["memory"]
    assert memory["peak_mib"] > 20, "a process of Python, Arrow and RocksDB"
    assert memory["above_idle_mib"] == memory["peak_mib"] - memory["idle_mib"]
    assert found["commit"]["beside_s"] > 0
    assert found["requests"]["each"]["PUT"] == 2 and found["requests"]["lists_at_opening"] == 1
    assert found["size"]["first"] > 1000
    assert [path.name for path in tmp_path.iterdir()] == ["limits.json"]


@pytest.mark.proof
@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is read from /proc")
def test_workers_of_both_daemons_are_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "aion.cli", "experiment", "limits", "--legs", "workers", "--rounds", "1"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "limits.json").read_text())["workers"]
    for daemon in ("spark", "aion"):
        assert found[daemon]["together_mib"] > found[daemon]["own_mib"] > 0
        assert found[daemon]["after_idle_s"] > 0
    assert found["aion"]["own_mib"] < found["spark"]["own_mib"]


def test_legs_that_there_are_not_are_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["experiment", "limits", "--legs", "memory,speed", "--out", str(tmp_path)])
    assert done.exit_code == 2 and "memory,speed" in done.output
