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

from aion.spark.session.workers import LOADS, in_arrow, of_aion
from aion.spark.tasks.worker import begin_task
from tests.server.conftest import wait_until

DAEMON = "spark.python.daemon.module"
FORKS = """
import os, sys
from aion.spark.tasks import preload

print("ready")
before = set(sys.modules)
preload.load()
assert "aion.spark.tasks.root" in set(sys.modules) - before
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
from aion.spark.tasks import preload

with zipfile.ZipFile(sys.argv[1], "w") as archive:
    archive.writestr("of_the_archive.py", "value = 1")
sys.path.insert(1, sys.argv[1])
import of_the_archive
preload.load()
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


def hoarding(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """A task of Aion that holds much for a while. Yields where it ran, and how large it was."""
    for _ in batches:
        begin_task()
        small = [bytes(100_000) for _ in range(600)]
        arrays = [pa.array(range(20_000)).cast(pa.string()) for _ in range(300)]
        here = psutil.Process()
        largest = here.memory_info().rss
        left_over.append((small[::60], arrays[::60]))
        del small, arrays
        yield pa.record_batch({"pid": [here.pid], "largest": [largest]})


left_over: list[object] = []


@pytest.mark.slow
def test_a_worker_gives_memory_back_after_a_task(spark: SparkSession) -> None:
    (row,) = spark.range(1, numPartitions=1).mapInArrow(hoarding, "pid bigint, largest bigint").collect()
    worker = psutil.Process(row["pid"])
    limit = row["largest"] - (80 << 20)
    wait_until(lambda: worker.memory_info().rss < limit)


def environment(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """What the daemon has loaded that has forked the worker, and the interpreter."""
    for _ in batches:
        parent = psutil.Process().parent()
        assert parent is not None
        loads = "AION_LOADS" in parent.environ()
        yield pa.record_batch({"words": [parent.cmdline()], "loads": [loads], "python": [sys.executable]})


SEEN = "words array<string>, loads boolean, python string"


def test_workers_for_aion_are_forked_by_a_daemon_that_has_loaded_it(spark: SparkSession) -> None:
    """Those of other functions are not, and nothing of the context has changed afterwards."""
    before = dict(spark.sparkContext.environment)
    (own,) = in_arrow(spark.range(1), environment, SEEN).collect()
    (other,) = spark.range(1).mapInArrow(environment, SEEN).collect()
    assert (own.words[-2:], own.loads) == (["pyspark.daemon", "pyspark.worker"], True)
    assert not other.loads
    assert own.words[0] != other.words[0] or own.python == other.python
    assert spark.sparkContext.environment == before


def modules(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        yield pa.record_batch({"there": ["aion.spark.tasks.root" in sys.modules]})


def test_a_worker_begins_with_everything_loaded(spark: SparkSession) -> None:
    (own,) = in_arrow(spark.range(1), modules, "there boolean").collect()
    assert own.there


@pytest.fixture
def unset(spark: SparkSession) -> Iterator[SparkContext]:
    """A context for which a test may choose a daemon."""
    context = spark.sparkContext
    yield context
    context._conf._jconf.remove(DAEMON)


def test_a_daemon_that_the_user_chose_stays(spark: SparkSession, unset: SparkContext) -> None:
    unset._conf.set(DAEMON, "pyspark.daemon")
    with of_aion(spark):
        assert LOADS not in unset.environment


@pytest.mark.parametrize(("what", "value"), [("master", "yarn"), ("pythonExec", "/opt/python"), ("platform", "darwin")])
def test_it_needs_an_aion_that_is_there_from_the_start_and_linux(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch, what: str, value: str
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "python3")  # so that the context's interpreter stays
    with monkeypatch.context() as other:
        other.setattr(sys if what == "platform" else spark.sparkContext, what, value)
        with of_aion(spark):
            assert LOADS not in spark.sparkContext.environment
    with of_aion(spark):
        assert LOADS in spark.sparkContext.environment


def test_functions_of_aion_run_in_the_interpreter_that_has_its_packages(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", "python3")
    with of_aion(spark):
        assert spark.sparkContext.pythonExec == sys.executable
    assert spark.sparkContext.pythonExec == "python3"
    monkeypatch.setenv("PYSPARK_PYTHON", "/opt/python")
    monkeypatch.setattr(spark.sparkContext, "pythonExec", "/opt/python")
    with of_aion(spark):
        assert spark.sparkContext.pythonExec == "/opt/python"
