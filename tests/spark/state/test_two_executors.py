"""Executors that are processes of their own: the same panes, also when one is killed on the way.

The query is that of ``aion experiment hosts``, here on a cluster that needs no privileges: two executors on one host.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from experiments.hosts.command import Settings, write_events
from experiments.hosts.query import Request

EXECUTOR = "CoarseGrainedExecutorBackend"
KILLED_AFTER = 2
SETTINGS = Settings(hosts=2, batches=5, events=300, lose_after=KILLED_AFTER, seed=3)
CONF = {
    "spark.driver.host": "localhost",
    "spark.executor.memory": "1g",
    "spark.executorEnv.PYTHONPATH": str(Path.cwd()),
    "spark.sql.shuffle.partitions": "4",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}


@pytest.mark.proof
def test_an_executor_that_is_killed_takes_nothing_along(tmp_path: Path) -> None:
    write_events(SETTINGS, tmp_path / "in")
    request = Request(str(tmp_path), "local-cluster[2,1,1024]", SETTINGS.hosts, CONF)
    command = [sys.executable, "-m", "experiments.hosts.query", json.dumps(asdict(request))]
    batches: list[dict[str, Any]] = []
    last: dict[str, Any] = {}
    killed = None
    with (
        (tmp_path / "said").open("w+") as said,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=said, text=True) as query,
    ):
        assert query.stdout is not None
        for line in query.stdout:
            if line.startswith("{"):
                last = json.loads(line)
                if "batch" in last:
                    batches.append(last)
                if last.get("batch") == KILLED_AFTER:
                    killed = executors(query.pid)[0]
                    killed.kill()
        assert query.wait(60) == 0, (said.seek(0), said.read()[-3000:])
    assert killed is not None
    before, after = (set(batches[i]["places"]) for i in (KILLED_AFTER, -1))
    assert len(before) == 3 and len(after) >= 2 and before - after, "the driver is there, and one executor is no more"
    assert last["differences"] == []
    assert last["dropped"] == 0
    assert last["panes"] > 100


def executors(driver: int) -> list[psutil.Process]:
    below = psutil.Process(driver).children(recursive=True)
    found = []
    for process in below:
        with contextlib.suppress(psutil.NoSuchProcess):  # Spark's helpers end at any moment
            if process.name() == "java" and any(EXECUTOR in word for word in process.cmdline()):
                found.append(process)
    return found
