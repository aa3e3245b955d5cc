"""A query with windows is started in one way and then in another: its windows go on, with the same panes."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.connect import job
from tests.connect.conftest import ROOT, Server
from tests.connect.events import Event, put

WAYS = ("plain", "stateful", "run", "conf", "connect")
BATCHES: list[list[Event]] = [
    [("a", 5, 1), ("b", 30, 2), ("c", 7, 3), ("d", 65, 4)],  # no shard has more than one version after it
    [("a", 10, 5), ("b", 70, 6), ("c", 400, 7)],
    [("a", 50, 8), ("a", 410, 9), ("b", 4000, 1)],
    [("a", 20, 2), ("d", 3990, 3), ("c", 8, 4), ("b", 7000, 4)],
]


def start(way: str, url: str, folder: Path, batches: list[list[Event]]) -> list[list[str]]:
    """Gives a job new events, starts it, and returns all its panes until now."""
    put(folder, batches)
    run = ["-m", "aion.run"] if way == "run" else []
    done = subprocess.run(
        [sys.executable, *run, job.__file__, way, url, str(folder)], cwd=folder, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    found: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def undisturbed(server: Server, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """The panes of a query that is started once."""
    return start("plain", server.url, tmp_path_factory.mktemp("undisturbed"), BATCHES)


@pytest.fixture(scope="module")
def started(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a job that was started once, in a way. It is always the same, as a checkpoint's is."""
    folder, kept = tmp_path_factory.mktemp("job"), tmp_path_factory.mktemp("kept")

    def restored(way: str) -> Path:
        shutil.rmtree(folder)
        if not (kept / way).exists():
            folder.mkdir()
            start(way, server.url, folder, BATCHES[:1])
            shutil.copytree(folder, kept / way)
        else:
            shutil.copytree(kept / way, folder)
        return folder

    return restored


@pytest.mark.proof
def test_windows_go_on_when_each_start_is_another(server: Server, tmp_path: Path, undisturbed: Any) -> None:
    for way, batches in (("run", BATCHES[:1]), ("connect", BATCHES[1:2]), ("conf", BATCHES[2:])):
        found = start(way, server.url, tmp_path, batches)
    assert found == undisturbed and len(found) > 10


@pytest.mark.proof
@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(WAYS, 2)))
def test_windows_go_on_in_another_way(
    server: Server, started: Callable[[str], Path], undisturbed: Any, first: str, second: str
) -> None:
    assert start(second, server.url, started(first), BATCHES[1:]) == undisturbed
