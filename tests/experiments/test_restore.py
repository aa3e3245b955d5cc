"""`aion experiment restore`, in miniature."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from aion import cli


def test_the_command_prints_and_writes_what_it_found(tmp_path: Path) -> None:
    options = ["--sizes-mib", "1,2", "--files", "2", "--file-counts", "1,3", "--size-mib", "1", "--runs", "1"]
    done = CliRunner().invoke(cli.app, ["experiment", "restore", *options, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "2 times the bytes in as many files" in done.output
    results = json.loads((tmp_path / "restore.json").read_text())["results"]
    assert [(r["files"], r["mib"]) for part in results.values() for r in part] == [(2, 1), (2, 2), (1, 1), (3, 1)]
