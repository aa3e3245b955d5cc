"""Commands that run Spark applications, in small and as a user calls them: they end, and say what they measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)

SMALL = ("--events", "2000", "--batches", "3", "--runs", "1", "--warm-ups", "0")


def run(folder: Path, name: str, *options: str) -> tuple[str, dict[str, Any]]:
    """What the command printed, and the JSON that it wrote."""
    words = [sys.executable, "-m", "aion.cli", "experiment", name, *options, "--out", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert {path.name for path in folder.iterdir()} <= {f"{name}.json", f"{name}.png", "data"}
    return done.stdout, json.loads((folder / f"{name}.json").read_text())


def test_ingest(tmp_path: Path) -> None:
    said, record = run(tmp_path, "ingest", *SMALL, "--contenders", "partials,stock-window")
    assert [run["contender"] for run in record["runs"]] == ["partials", "stock-window"]
    assert all(found["median"] > 0 for found in record["events_per_s"].values())
    assert "Aion, partials / Spark window().agg" in said


def test_windows(tmp_path: Path) -> None:
    said, record = run(tmp_path, "windows", *SMALL, "--legs", "20")
    assert [run["contender"] for run in record["runs"]] == ["aion", "aion-no-bound", "stock"]
    first, *others = [(run["results"], run["digest"]) for run in record["runs"]]
    assert first[0] > 0 and others == [first, first]
    assert "overlap 20: Aion / overlap 20: Spark" in said


def test_overhead(tmp_path: Path) -> None:
    said, record = run(tmp_path, "overhead", *SMALL, "--queries", "partials")
    assert len(record["runs"]) == 2
    assert "partials: versions and recovery cost" in said


def test_restart(tmp_path: Path) -> None:
    said, record = run(tmp_path, "restart", "--size-mib", "2", "--runs", "1")
    large, empty = (record["results"][state] for state in ("large", "empty"))
    assert large["state_bytes"] >= 2 << 20 > empty["state_bytes"]
    assert all(start["first_pane_s"] > 0 for state in (large, empty) for start in state["starts"])
    assert f"{record['ratio']:.2f} times the time to the first pane" in said
