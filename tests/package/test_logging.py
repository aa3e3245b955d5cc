"""What the loggers of Aion say at INFO: a line when an operator is made, and one for a batch. The rest is DEBUG."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAID = {
    "aion/spark/api/group_by.py",
    "aion/spark/api/join.py",
    "aion/spark/start/kept_state.py",
    "aion/spark/start/progress.py",
    "aion/spark/api/configure.py",
    "aion/spark/api/stream.py",
    "aion/spark/session/partials.py",  # once for each program
    "state_backends/files/local_copies.py",  # once for each file system that cannot keep within a limit
}


@pytest.mark.slow
def test_only_starts_and_batches_are_said_at_info() -> None:
    saying = set()
    for package in ("aion", "state_backends", "policies"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("log.info", "logging.info", "logger.info"):
                    saying.add(str(path.relative_to(ROOT)))
    assert saying == SAID
