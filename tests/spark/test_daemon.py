"""Spark's Python workers are forks of a daemon that has loaded Aion."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pyarrow as pa
import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

import aion

DAEMON = "spark.python.daemon.module"
FORKS = """
import os, sys
from aion.spark import daemon

print("ready")
before = set(sys.modules)
daemon.load()
assert "aion.spark.root" in set(sys.modules) - before
sys.stdout.flush()
for _ in range(3):
    if os.fork() == 0:
        import random
        import numpy as np
        print(np.random.randint(1 << 30), random.randrange(1 << 30), flush=True)
        np.random.seed(7)
        if os.fork() == 0:
            assert np.random.randint(1 << 30) == np.random.RandomState(7).randint(1 << 30)
            os._exit(0)
        os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
"""
NEW_MEMBER = """
import importlib, sys, zipfile
from aion.spark import daemon

with zipfile.ZipFile(sys.argv[1], "w") as archive:
    archive.writestr("of_the_archive.py", "value = 1")
sys.path.insert(1, sys.argv[1])
import of_the_archive
daemon.load()
del sys.modules["of_the_archive"]
with open(sys.argv[2] + "/added_later.py", "w") as module:
    module.write("value = 2")
sys.path.insert(1, sys.argv[2])
importlib.invalidate_caches()
import added_later, of_the_archive
print(of_the_archive.value, added_later.value)
"""


def run(script: str, *arguments: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_forks_draw_random_numbers_of_their_own() -> None:
    ready, *drawn = run(FORKS)
    assert ready == "ready"
    by_numpy, by_python = zip(*(line.split() for line in drawn), strict=True)
    assert len(set(by_numpy)) == len(set(by_python)) == 3


def test_what_is_on_the_path_is_still_found(tmp_path: object) -> None:
    assert run(NEW_MEMBER, f"{tmp_path}/a.zip", str(tmp_path)) == ["1 2"]


def command_of_the_forker(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        parent = psutil.Process().parent()
        assert parent is not None
        yield pa.record_batch({"words": [parent.cmdline()]})


def test_workers_of_a_local_session_are_forked_by_it(spark: SparkSession) -> None:
    (row,) = spark.range(1).mapInArrow(command_of_the_forker, "words array<string>").collect()
    assert row.words[-2:] == ["aion.spark.daemon", "pyspark.worker"]


@pytest.fixture
def unset(spark: SparkSession) -> Iterator[SparkContext]:
    """A context for which nobody has chosen a daemon yet."""
    context = spark.sparkContext
    java = context._conf._jconf
    java.remove(DAEMON)
    yield context
    java.set(DAEMON, "aion.spark.daemon")


def test_a_daemon_that_the_user_chose_stays(unset: SparkContext) -> None:
    unset._conf.set(DAEMON, "pyspark.daemon")
    aion.configure(SparkSession.builder).getOrCreate()
    assert unset.getConf().get(DAEMON) == "pyspark.daemon"


@pytest.mark.parametrize(("what", "value"), [("master", "yarn"), ("pythonExec", "/opt/python"), ("platform", "darwin")])
def test_it_needs_an_aion_that_is_there_from_the_start_and_linux(
    unset: SparkContext, monkeypatch: pytest.MonkeyPatch, what: str, value: str
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "python3")  # so that the context's interpreter stays
    with monkeypatch.context() as other:
        other.setattr(sys if what == "platform" else unset, what, value)
        aion.configure(SparkSession.builder).getOrCreate()
        assert unset.getConf().get(DAEMON, None) is None
    monkeypatch.delenv("PYSPARK_PYTHON")
    aion.configure(SparkSession.builder).getOrCreate()
    assert unset.getConf().get(DAEMON) == "aion.spark.daemon"
