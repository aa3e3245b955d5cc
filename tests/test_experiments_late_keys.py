"""`aion experiment late-keys`, in miniature: it measures what it says, of windows that are what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from aion import cli
from experiments.late_keys import verdicts
from experiments.late_keys_runs import late_event, many_batches


@pytest.mark.parametrize("kind", ["partials", "events"])
def test_late_events_are_read_with_their_key_or_with_their_window(quick_folder: Path, kind: str) -> None:
    found = {folds: late_event(quick_folder / str(folds), kind, 30_000, 2, folds=folds) for folds in (True, False)}
    assert found[False]["bytes"] > 0.95 * found[False]["window_bytes"] > 2 * found[True]["bytes"]
    assert [len(values) for values in found[True]["all"].values()] == [2, 2, 2, 2]
    assert list(quick_folder.iterdir()) == [], "it leaves nothing"


def test_a_window_of_many_batches_takes_more_where_nothing_is_folded(quick_folder: Path) -> None:
    folded, as_it_came = (
        many_batches(quick_folder / "x", "memory", 30, 200, 400, folds=folds) for folds in (True, False)
    )
    assert folded["folded_bytes"] == pytest.approx(as_it_came["folded_bytes"], rel=0.1)
    assert max(folded["memory_ratio"], folded["disk_ratio"]) <= 2 < as_it_came["memory_ratio"]
    assert as_it_came["blocks"] == 30 > folded["blocks"]
    assert as_it_came["written_again"] == 0 < folded["written_again"]


def test_the_command_prints_and_writes_what_it_found(tmp_path: Path) -> None:
    options = ["--keys", "10,1000", "--event-keys", "", "--runs", "1", "--batches", "5", "--batch-events", "20"]
    done = CliRunner().invoke(cli.app, ["experiment", "late-keys", *options, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "late-keys.json").read_text())
    assert [(r["kind"], r["keys"], r["folds"]) for r in record["late"]] == [
        ("partials", keys, folds) for keys in (10, 1000) for folds in (True, False)
    ]
    assert [(r["store"], r["folds"]) for r in record["fed"]] == [
        (store, folds) for store in ("memory", "tiered") for folds in (True, False)
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["late-keys.json"]


def test_verdicts_follow_the_figures() -> None:
    def late(keys: int, size: int) -> dict[str, Any]:
        return {"kind": "events", "keys": keys, "folds": True, "bytes": size, "seconds": 1.0, "window_bytes": 100}

    fed = {"store": "memory", "folds": True, "batches": 9, "memory_ratio": 1.5, "disk_ratio": 2.5}
    assert "does not hold" in verdicts([late(1, 1), late(10, 4)], [])[0]
    assert verdicts([late(1, 9), late(10, 1), late(100, 3)], [])[0].startswith("events: 10 times the keys: 3.00 times")
    assert "holds" in verdicts([late(10, 1), late(100, 3)], [])[0]
    assert "at most 2.50 folded sizes" in verdicts([], [fed, {**fed, "folds": False}])[0]
    assert len(verdicts([late(1, 1)], [{**fed, "folds": False}])) == 0
