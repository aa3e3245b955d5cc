"""`aion experiment late-keys`, in miniature."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aion import cli

pytestmark = pytest.mark.usual_sizes


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
