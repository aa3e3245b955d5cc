"""Executors that are processes of their own: the same panes, also when one is killed on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.spark.truths import visits
from tests.spark.two_executors import KILLED_AFTER

FILES, EVENTS, KEYS = 5, 300, 7
END, NOBODY = 2_000, 99
"""Of an event after all others, with which the windows of all others are complete, and its key."""


def test_an_executor_that_is_killed_takes_nothing_along(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    (tmp_path / "in").mkdir()
    all_times, all_keys = [], []
    for file in range(FILES):
        late = np.where(rng.random(EVENTS) < 0.2, rng.integers(0, 60, EVENTS), 0)
        times = 1_000 + 30 * file + rng.integers(0, 30, EVENTS) - late
        keys = rng.integers(0, KEYS, EVENTS)
        if file == FILES - 1:
            times, keys = np.append(times, END), np.append(keys, NOBODY)
        path = tmp_path / "in" / f"{file}.parquet"
        pq.write_table(pa.table({"ts": pa.array(times * 1_000_000, pa.timestamp("us", "UTC")), "k": keys}), path)
        os.utime(path, (1_000_000_000 + file, 1_000_000_000 + file))  # the order in which Spark reads them
        all_times.append(times[keys != NOBODY])
        all_keys.append(keys[keys != NOBODY])
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.two_executors", str(tmp_path)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    before, after = told["executors"][KILLED_AFTER], told["executors"][-1]
    assert len(before) == 2 and told["killed"] in before
    assert told["killed"] not in after and len(after) >= 1
    times, keys = np.concatenate(all_times), np.concatenate(all_keys)
    wanted = Counter(zip(keys.tolist(), (times // 20 * 20).tolist(), strict=True))
    assert told["dropped"] == 0
    assert {(k, start): n for k, window, start, _, n in told["panes"] if window == "tumbling"} == wanted
    events = [{"user": key, "ts": at} for key, at in zip(keys.tolist(), times.tolist(), strict=True)]
    assert {(k, start, end): n for k, window, start, end, n in told["panes"] if window == "session"} == visits(
        events, 5
    )
