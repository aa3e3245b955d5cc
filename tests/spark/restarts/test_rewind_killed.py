"""``aion rewind`` is killed for real, at random moments. Table and state are those of a job that nobody disturbed."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import aion
from aion.spark.session.rewound import NOTE
from tests.spark.conftest import FileStream
from tests.spark.restarts.test_rewind import Tables

KILLS = 3
PANES = "k, window, window_start, window_end, n, total"


class Command:
    """The command in a process group of its own. What it leaves when it is killed is in ``folder``."""

    def __init__(self, checkpoint: Path, to: int, state: str, folder: Path) -> None:
        self._note = checkpoint / NOTE
        words = ["rewind", str(checkpoint), "--to", str(to), "--state", state]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "aion", *words], start_new_session=True, stdout=subprocess.PIPE, text=True,
            stderr=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(folder), "SPARK_LOCAL_DIRS": str(folder)},
        )  # fmt: skip

    def wait_until_begun(self) -> None:
        while self._process.poll() is None and not self._note.exists():
            time.sleep(0.001)

    def kill_after(self, seconds: float) -> str:
        """Returns whether it had not begun, was interrupted, or had ended."""
        try:
            self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            return "interrupted" if self._note.exists() else "not begun, or just done"
        assert self._process.returncode == 0
        return "done"


def panes(query: Tables) -> list[Any]:
    with closing(sqlite3.connect(query.file)) as database:
        late = database.execute("SELECT k, sum(events) FROM late GROUP BY k ORDER BY k").fetchall()
        return [*database.execute(f"SELECT {PANES} FROM panes ORDER BY {PANES}"), *late]


def state(spark: SparkSession, query: Tables) -> list[Any]:
    rows = aion.read_state(spark, str(query.checkpoint)).select(*PANES.split(", ")).collect()
    return sorted(map(tuple, rows), key=repr)


@pytest.mark.proof
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_command_that_is_killed_is_taken_back_or_completed(
    spark: SparkSession, stream: FileStream, tmp_path: Path, seed: int
) -> None:
    rng, place = random.Random(seed), spark.conf.get("spark.aion.state.dir")
    assert place is not None
    folders = [tmp_path / name for name in ("disturbed", "calm")]
    for folder in folders:
        folder.mkdir()
    disturbed, calm = (Tables(stream, folder) for folder in folders)
    seen = []
    for number in range(2 + KILLS):
        last = disturbed.run(number)
        calm.start()
        if number < 2:
            continue
        command = Command(disturbed.checkpoint, rng.randrange(max(0, last - 4), last), place, tmp_path)
        if rng.random() < 0.2:
            seen.append(command.kill_after(rng.uniform(0.0, 20.0)))
        else:
            command.wait_until_begun()
            seen.append(command.kill_after(rng.uniform(0.0, 0.2) if "interrupted" in seen else 0.0))
        disturbed.start()
        assert not (disturbed.checkpoint / NOTE).exists()
        assert panes(disturbed) == panes(calm), seen
        assert state(spark, disturbed) == state(spark, calm), seen
    assert "interrupted" in seen
    assert len(panes(calm)) > 20 and len(state(spark, calm)) > 20
