"""`aion experiment late-keys`, in miniature: it measures what it says, of windows that are what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from aion import cli
from experiments.late_keys.command import verdicts
from experiments.late_keys.runs import late_event, many_batches

pytestmark = pytest.mark.usual_sizes


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["partials", "events"])
def test_late_events_are_read_with_their_key_or_with_their_window(quick_folder: Path, kind: str) -> None:
    found = {
        compactions: late_event(quick_folder / str(compactions), kind, 30_000, 2, compactions=compactions)
        for compactions in (True, False)
    }
    assert found[False]["bytes"] > 0.95 * found[False]["window_bytes"] > 2 * found[True]["bytes"]
    assert [len(values) for values in found[True]["all"].values()] == [2, 2, 2, 2]
    assert list(quick_folder.iterdir()) == [], "it leaves nothing"


def test_a_window_of_many_batches_takes_more_where_nothing_is_compacted(quick_folder: Path) -> None:
    compacted, as_it_came = (
        many_batches(quick_folder / "x", "memory", 30, 200, 400, compactions=compactions)
        for compactions in (True, False)
    )
    assert compacted["compacted_bytes"] == pytest.approx(as_it_came["compacted_bytes"], rel=0.1)
    assert max(compacted["memory_ratio"], compacted["disk_ratio"]) <= 2 < as_it_came["memory_ratio"]
    assert as_it_came["blocks"] == 30 > compacted["blocks"]
    assert as_it_came["written_again"] == 0 < compacted["written_again"]


@pytest.mark.slow
def test_the_command_prints_and_writes_what_it_found(tmp_path: Path) -> None:
    options = ["--keys", "10,1000", "--event-keys", "", "--runs", "1", "--batches", "5", "--batch-events", "20"]
    done = CliRunner().invoke(cli.app, ["experiment", "late-keys", *options, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "late-keys.json").read_text())
    assert [(r["kind"], r["keys"], r["compactions"]) for r in record["late"]] == [
        ("partials", keys, compactions) for keys in (10, 1000) for compactions in (True, False)
    ]
    assert [(r["store"], r["compactions"]) for r in record["fed"]] == [
        (store, compactions) for store in ("memory", "tiered") for compactions in (True, False)
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["late-keys.json"]


def test_verdicts_follow_the_figures() -> None:
    def late(keys: int, size: int) -> dict[str, Any]:
        return {"kind": "events", "keys": keys, "compactions": True, "bytes": size, "seconds": 1.0, "window_bytes": 100}

    fed = {"store": "memory", "compactions": True, "batches": 9, "memory_ratio": 1.5, "disk_ratio": 2.5}
    assert "does not hold" in verdicts([late(1, 1), late(10, 4)], [])[0]
    assert verdicts([late(1, 9), late(10, 1), late(100, 3)], [])[0].startswith("events: 10 times the keys: 3.00 times")
    assert "holds" in verdicts([late(10, 1), late(100, 3)], [])[0]
    assert "at most 2.50 times the compacted size" in verdicts([], [fed, {**fed, "compactions": False}])[0]
    assert len(verdicts([late(1, 1)], [{**fed, "compactions": False}])) == 0
