"""`aion experiment prestage`, in miniature."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from experiments.prestage.runs import Cell
from experiments.prestage.settings import MODES, TRIGGERS, Disk


def cell(mode: str, late_s: Sequence[float], *, disk: str = "120", gap_s: float = 2.0, checksum: int = 7) -> Cell:
    return Cell(
        mode,
        Disk.of(disk).name,
        gap_s,
        "planned",
        {"late": [*late_s]},
        {"late": [0.0]},
        {"late": 1},
        9,
        0,
        1,
        0.0,
        100,
        5,
        checksum,
    )


@pytest.mark.proof
def test_a_run_in_miniature(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "aion.cli",
        "experiment",
        "prestage",
        "--window",
        "1",
        "--parts",
        "4",
        "--past",
        "8",
    ]
    command += ["--batches", "3", "--gaps", "1", "--disks", "120", "--triggers", "planned,own", "--runs", "1"]
    command += ["--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "all runs have the same panes: holds" in done.stdout
    cells = json.loads((tmp_path / "out" / "prestage.json").read_text())["cells"]
    assert [(cell["trigger"], cell["mode"]) for cell in cells] == [*itertools.product(TRIGGERS, MODES)]
    for trigger in TRIGGERS:
        for pane in ("final", "late"):
            waited = {c["mode"]: sum(c["waited_s"][pane]) for c in cells if c["trigger"] == trigger}
            assert waited["with"] < waited["without"] < waited["apart"], (trigger, pane)
