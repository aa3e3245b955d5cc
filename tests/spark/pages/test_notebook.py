"""The cells of docs/start/notebook.md in kernels of their own: they are run again, and a kernel is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from aion.cli import app
from tests import documents
from tests.leaks import wait_for_the_servers_in
from tests.spark.truths import Event, positions, tolls, write

SCHEMA = pa.schema([("ts", pa.timestamp("us", "UTC")), ("segment", pa.int32()), ("speed", pa.float64())])

# What is typed in beside the cells of the page. Each line is a cell; its answer is what it gave, or the error.
KERNEL = """
import ast, json, sys
from pathlib import Path
from tests import documents

page = "docs/start/notebook.md"
cells = [block.text for block in documents.read(page)[0] if block.language == "python"]
names = {"__name__": "__main__"}
in_folder = documents._Elsewhere(Path.cwd(), {})
for line in sys.stdin:
    told = json.loads(line)
    text = cells[told] if isinstance(told, int) else told
    try:
        try:
            answer = eval(text, names)
        except SyntaxError:
            tree = ast.fix_missing_locations(in_folder.visit(ast.parse(text)))
            names[documents.SAID] = []
            exec(compile(tree, page, "exec"), names)
            answer = None
    except Exception as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps(answer), file=sys.__stdout__, flush=True)
"""
SETTINGS = {
    "spark.master": "local[1]",
    "spark.sql.shuffle.partitions": "1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "OFF",
}
ACTIVE = "len(spark.streams.active)"


class Kernel:
    def __init__(self, folder: Path) -> None:
        submit = " ".join(f"--conf {key}={value}" for key, value in SETTINGS.items())
        environment = os.environ | {"PYTHONPATH": str(documents.ROOT), "PYSPARK_SUBMIT_ARGS": f"{submit} pyspark-shell"}
        self._log = (folder / "kernel.log").open("a")
        self.process = subprocess.Popen(
            [sys.executable, "-c", KERNEL], cwd=folder, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip

    def run(self, cell: int | str) -> Any:
        """Runs a cell of the page by its number, or other code."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(cell), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)
        self._close()

    def end(self) -> None:
        self.process.communicate(timeout=60)
        self._close()

    def _close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout, self._log):
            if stream is not None:
                stream.close()


@contextmanager
def kernel(folder: Path) -> Iterator[Kernel]:
    with ExitStack() as stack:
        running = Kernel(folder)
        stack.callback(running.kill)
        yield running
        stack.pop_all()


def strip(events: list[Event]) -> list[Event]:
    return [{name: event[name] for name in SCHEMA.names} for event in events]


@pytest.mark.proof
def test_cells_are_run_again_and_a_kernel_is_killed(tmp_path: Path, temporary: Path) -> None:
    first, second = positions()
    write(tmp_path / "positions", strip(first), SCHEMA)
    with kernel(tmp_path) as notebook:
        assert [notebook.run(0), notebook.run(1)] == [None, None]
        assert notebook.run("query.processAllAvailable()") is None
        # All cells again: the query has been replaced, and nothing was counted twice.
        assert [notebook.run(0), notebook.run("old = query"), notebook.run(1)] == [None] * 3
        assert [notebook.run("old.isActive"), notebook.run("query.isActive"), notebook.run(ACTIVE)] == [False, True, 1]
        assert notebook.run("query.id == old.id") is True
        # Without the loop that stops it, Spark refuses a second query of the name; without a name, it stops the first.
        again = 'writer.option("checkpointLocation", "tolls-cp/").start()'
        refused = notebook.run(f"{again}.name")
        assert "Cannot start query with name tolls as a query with that name is already active" in refused
        notebook.run("query.stop()")
        unnamed = (
            'panes.writeStream.format("parquet").option("path", "tolls/").option("checkpointLocation", "tolls-cp/")'
        )
        notebook.run(f"one = {unnamed}.start()")
        notebook.run(f"two = {unnamed}.start()")
        assert [notebook.run("one.isActive"), notebook.run("two.isActive"), notebook.run(ACTIVE)] == [False, True, 1]
        # Another definition on the same checkpoint.
        notebook.run(
            'other = aion.windowed(events.withWatermark("ts", "20 seconds"), key="segment", time="ts", emit="final", '
            'windows=aion.Tumbling("1 minute"), aggregates={"cars": A.count()}, name="tolls")'
        )
        changed = 'other.writeStream.format("noop").option("checkpointLocation", "tolls-cp/").start().name'
        assert notebook.run(changed).startswith("ForeignState: ")
        assert notebook.run(ACTIVE) == 0
        assert notebook.run(1) is None
        assert notebook.run("query.processAllAvailable()") is None
        notebook.kill()
    assert not wait_for_the_servers_in(temporary / f"aion-{os.getuid()}"), (
        "they end with the JVM, and it with the kernel"
    )
    write(tmp_path / "positions", strip(second), SCHEMA)
    with kernel(tmp_path) as notebook:
        assert [notebook.run(0), notebook.run(1), notebook.run("query.processAllAvailable()")] == [None] * 3
        notebook.run("query.stop()")
        notebook.end()
    events = [event for event in (*first, *second) if event["user"] != "end"]
    truth = {place: cars for place, (cars, _) in tolls(events, 60, 60).items()}
    newest = {}
    for row in sorted(pq.read_table(tmp_path / "tolls").to_pylist(), key=lambda row: row["pane"] or 0):
        if row["kind"] != "dropped":
            newest[row["segment"], row["window_start"].timestamp(), row["window_end"].timestamp()] = row["cars"]
    assert newest == truth
    clean_up(tmp_path)


def clean_up(folder: Path) -> None:
    """As the page says: the checkpoint goes first, and the commands of the page do the rest."""
    said = [command.words[2:] for command in documents.commands(("aion",)) if command.page == "docs/start/notebook.md"]
    lineages, forget = (
        [str(folder / "state") if word == "STATE_DIR" else word for word in words]
        for words in said
        if "STATE_DIR" in words
    )
    listed = CliRunner().invoke(app, ["inspect", *lineages])
    assert listed.exit_code == 0 and "tolls-cp" in listed.output.replace("\n", "")
    assert CliRunner().invoke(app, ["inspect", *forget]).exit_code == 0
    assert list((folder / "state").rglob("*.manifest")) or list((folder / "state").rglob("shard-*")), "it is in use"
    shutil.rmtree(folder / "tolls-cp")
    assert CliRunner().invoke(app, ["inspect", *forget]).exit_code == 0
    assert not list((folder / "state").rglob("shard-*"))
