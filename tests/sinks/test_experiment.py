"""``aion experiment sinks`` in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aion.cli import app
from tests.sinks.databases import place


@pytest.mark.slow
def test_the_command_measures_each_database(tmp_path: Path, postgresql: str) -> None:
    server = place("postgresql", tmp_path, postgresql)
    small = ["--rows", "2000", "--batches", "2", "--runs", "1", "--warm-ups", "0", "--postgresql", server.uri]
    done = CliRunner().invoke(app, ["experiment", "sinks", *small, "--out", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "sinks.json").read_text())
    kinds = ("sqlite", "duckdb", "postgresql")
    contenders = ("new upsert", "again upsert", "new bulk load")
    assert record["rates"].keys() == {f"{kind} {contender}" for kind in kinds for contender in contenders}
    assert "postgresql new upsert / postgresql new bulk load" in record["ratios"]
    assert {path.name for path in tmp_path.iterdir()} == {"sinks.json", "sinks.png"}
    assert server.run("SELECT to_regclass('aion_experiment')") == [(None,)]
