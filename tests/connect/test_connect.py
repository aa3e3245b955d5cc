"""Spark Connect: what a client asks for, a server that is another process computes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.connect.conftest import PATIENCE, ROOT, Server, ask
from tests.connect.events import Event, put

BATCHES: list[list[Event]] = [
    [("a", 5, 1), ("b", 30, 2), ("a", 65, 3), ("b", 200, 4)],
    [("a", 10, 5), ("b", 70, 6), ("c", 400, 7)],
    [("a", 50, 8), ("a", 410, 9), ("b", 4000, 1)],
    [("a", 20, 2), ("c", 3990, 3), ("b", 8000, 4)],
]


@pytest.mark.slow
def test_windows_are_counted_and_a_second_client_goes_on(server: Server, tmp_path: Path) -> None:
    ask(server.url, "tolls", tmp_path, batches=BATCHES[:2])
    found = ask(server.url, "tolls", tmp_path, batches=[[("a", 6, 1), ("c", 500, 1)]])
    assert found["rows"] == [
        ["a", "1970-01-01 00:00:00.000000", 3, 2],
        ["b", "1970-01-01 00:00:00.000000", 1, 0],
        ["a", "1970-01-01 00:01:00.000000", 1, 0],
        ["b", "1970-01-01 00:01:00.000000", 1, 0],
        ["b", "1970-01-01 00:03:00.000000", 1, 0],
        ["c", "1970-01-01 00:06:00.000000", 1, 0],
    ]
    assert found["state"] == [found["query"]], "and there is none without a query"
    assert found["progress"]["windowed"]["panes"] >= 0 and found["progress"]["windowed"]["shards"] == 2
    assert found["operators"] == ["windowed"]


@pytest.mark.proof
def test_what_cannot_work_is_refused(server: Server, tmp_path: Path) -> None:
    said = (
        "ConfigError: stateful: on Spark Connect, jobs cannot run on Aion unchanged; leave it out",
        "WatermarkError: windowed: the DataFrame has no watermark",
        "ConfigError: idle_after, complete_until: this needs the JVM of the driver, to which Spark Connect",
        "ConfigError: checkpoint: '",
        "ConfigError: checkpoint: '",
        "ConfigError: two operators of this query are both named 'windowed'; give each its own",
        "WatermarkError: this query has a second withWatermark behind aion.windowed",
        "AnalysisException: A stream, such as the result of aion.windowed, has no rows before a query runs",
        "ConfigError: state.dir: 'aion-state' is in the working folder of this client",
    )
    for found, expected in zip(ask(server.url, "refused", tmp_path), said, strict=True):
        assert found.startswith(expected)


@pytest.mark.proof
def test_the_panes_are_those_of_a_session_with_a_jvm(server: Server, tmp_path: Path) -> None:
    found: dict[str, list[Any]] = {}
    for name, url in (("connect", server.url), ("classic", "local[2,3]")):
        folder = tmp_path / name
        folder.mkdir()
        put(folder, BATCHES)
        ask(url, "kept", folder)
        put(folder, [[("a", 4010, 1), ("a", 9000, 2)]])
        found[name] = [ask(url, what, folder) for what in ("kept", "columns", "files", "lines", "chained")]
    assert found["connect"] == found["classic"] and all(found["connect"])
    assert {row["kind"] for row in found["connect"][0]} == {"on_time", "late", "dropped", "retracted"}


@pytest.mark.proof
def test_a_table_is_a_stream_of_files(server: Server, tmp_path: Path) -> None:
    (found,) = ask(server.url, "table", tmp_path)
    assert (found["k"], found["n"], found["kind"]) == ("a", "1", "on_time")


@pytest.mark.proof
def test_a_join_of_panes(server: Server, tmp_path: Path) -> None:
    found = []
    for name, url in (("connect", server.url), ("classic", "local[2,3]")):
        folder = tmp_path / name
        folder.mkdir()
        put(folder, BATCHES)
        ask(url, "joined", folder)
        put(folder, [[("a", 4010, 1), ("a", 55, 7), ("b", 150, 2)]])
        found.append(ask(url, "joined", folder))
    assert found[0] == found[1]
    assert {row["kind"] for row in found[0]} >= {"early", "on_time", "late", "retracted"}


@pytest.mark.proof
def test_stateful_processors(server: Server, tmp_path: Path) -> None:
    put(tmp_path, BATCHES[:1])
    ask(server.url, "processors", tmp_path)
    put(tmp_path, BATCHES[1:2])
    rows, frames = ask(server.url, "processors", tmp_path)
    assert [(row["k"], row["n"]) for row in rows] == [("a", "102"), ("a", "103"), ("b", "2"), ("b", "3"), ("c", "1")]
    assert [(row["k"], row["n"]) for row in frames] == [("a", "2"), ("a", "3"), ("b", "2"), ("b", "3"), ("c", "1")]


@pytest.mark.proof
def test_partitions_and_windows_may_change(server: Server, tmp_path: Path) -> None:
    found = ask(server.url, "partitions", tmp_path, counts=[2, 5, 1])
    assert found["counts"] == ["3"]
    assert found["other"].startswith("ForeignState: ")
    assert found["windows"] == ["tumbling 1 minute", "tumbling 2 minutes"], "those that have begun finish"


@pytest.mark.proof
def test_a_sink_goes_on_behind_a_batch_that_only_changed_the_partitions(server: Server, tmp_path: Path) -> None:
    ask(server.url, "tolls", tmp_path, batches=BATCHES[:2])
    command = [sys.executable, "-m", "aion", "rescale", "checkpoint", "1", "--state", "state"]
    subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=200)
    found = ask(server.url, "tolls", tmp_path, batches=[[("a", 6, 1)], [("z", 9000, 1)]])
    assert ["a", "1970-01-01 00:00:00.000000", 3, 2] in found["rows"]


@pytest.mark.proof
def test_a_query_without_a_checkpoint_of_its_own(server: Server, tmp_path: Path) -> None:
    found = ask(server.url, "without_checkpoint", tmp_path)
    assert found["rows"] == [1]
    assert "ConfigError: a sink needs the checkpoint of its query: set the option checkpointLocation" in found["said"]


@pytest.mark.proof
def test_two_queries_at_once_do_not_share_state(server: Server, tmp_path: Path) -> None:
    put(tmp_path, BATCHES)
    found = ask(server.url, "at_once", tmp_path)
    assert found["one"] == found["two"] and len(found["one"]) > 5


@pytest.mark.proof
def test_a_server_that_is_killed_takes_nothing_along(tmp_path: Path) -> None:
    put(tmp_path, BATCHES[:2])
    killed = Server(tmp_path / "first")
    try:
        ask(killed.url, "endless", tmp_path)  # the client has left, and the query goes on
        for number, batch in enumerate(BATCHES[2:], 2):
            wait_for(tmp_path / f"batch-{number}", killed)
            put(tmp_path, [batch])
    finally:
        killed.kill()
    second = Server(tmp_path / "second")
    try:
        found = ask(second.url, "tolls", tmp_path, batches=[[("z", 9000, 1)]])
    finally:
        second.stop()
    assert {(k, start[11:19]): n for k, start, n, _ in found["rows"]} == {
        ("a", "00:00:00"): 3,
        ("a", "00:01:00"): 1,
        ("a", "00:06:00"): 1,
        ("b", "00:00:00"): 1,
        ("b", "00:01:00"): 1,
        ("b", "00:03:00"): 1,
        ("b", "01:06:00"): 1,
        ("c", "00:06:00"): 1,
        ("b", "02:13:00"): 1,
        ("c", "01:06:00"): 1,
    }


def wait_for(path: Path, server: Server) -> None:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert server.process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
