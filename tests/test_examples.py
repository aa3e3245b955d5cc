"""The examples run as a user runs them, and agree with what they compute over all events."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sinks.databases import WITHOUT_SERVER, server

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.timeout(900)


def run(folder: Path, *words: str) -> list[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout.splitlines()


def test_each_example_is_in_the_list() -> None:
    said = (EXAMPLES / "README.md").read_text()
    assert {path.parent.name for path in EXAMPLES.glob("*/main.py")} == {"late_flights", "clickstream", "take_over"}
    assert all(f"python examples/{path.parent.name}/main.py" in said for path in EXAMPLES.glob("*/main.py"))


@pytest.mark.proof
@pytest.mark.parametrize("name", ["late_flights", "clickstream", "take_over"])
def test_an_example_agrees_with_its_own_computation(name: str, tmp_path: Path) -> None:
    said = run(tmp_path, str(EXAMPLES / name / "main.py"))
    assert " 0 differ from " in said[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.proof
def test_clicks_also_go_to_postgresql(tmp_path: Path) -> None:
    with server() as uri:
        if uri is None:
            pytest.skip(WITHOUT_SERVER)
        said = run(tmp_path, str(EXAMPLES / "clickstream" / "main.py"), "--database", uri)
    assert " 0 differ from " in said[-1]


@pytest.mark.proof
def test_the_cells_of_the_notebook_run_from_top_to_bottom(tmp_path: Path) -> None:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert all(not cell.get("outputs") for cell in notebook["cells"])
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    (tmp_path / "cells.py").write_text("\n\n".join(cells))
    run(tmp_path, "cells.py")
