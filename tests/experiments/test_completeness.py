"""`aion experiment completeness` in miniature."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aion.cli import app


@pytest.mark.proof
def test_the_command_judges_what_was_said(tmp_path: Path) -> None:
    arguments = ["--streams", "log-normal", "--windows", "60", "--warm-up", "40", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["experiment", "completeness", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "completeness.json").read_text())["results"]["log-normal"]
    assert found["rows"] > 100 and found["known"] > 0.5
    assert 0.8 <= found["coverage"] <= 1 and abs(found["mean_error"]) < 0.1
    assert (tmp_path / "completeness.png").read_bytes().startswith(b"\x89PNG")
    assert "mean error" in done.output
