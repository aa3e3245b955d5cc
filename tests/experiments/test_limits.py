"""``aion experiment limits``, small."""

from __future__ import annotations

import json
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
