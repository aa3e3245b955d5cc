"""The examples run as a user runs them, and agree with what they compute over all events."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aion.demo.flights import load_flights
from tests import notebook
from tests.sinks.databases import WITHOUT_SERVER, server

ROOT = Path(__file__).parents[2]
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


def example(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / name / "main.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_an_example_finds_a_wrong_mean_of_flights(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    flights = load_flights().table.slice(0, 100).to_pandas()
    hours = flights["scheduled"].dt.tz_convert("UTC").dt.floor("h").dt.tz_localize(None).rename("window_start")
    rows = flights.groupby(["carrier", hours])["dep_delay"].agg(flights="count", delay="mean").reset_index()
    for change, code in ((0.0, 0), (0.5, 1)):
        rows.loc[3, "delay"] += change
        with closing(sqlite3.connect(tmp_path / "db")) as db:
            rows.astype({"window_start": str}).to_sql("delays", db, if_exists="replace")
        assert example("late_flights").compare(tmp_path / "db", flights) == code


def test_an_example_finds_a_wrong_session() -> None:
    pytest.importorskip("pyspark")
    clickstream = example("clickstream")
    clicks = clickstream.made(random.Random(3))
    right = set(clickstream.sessions(clicks))
    user, start, count, pages = next(iter(right))
    assert clickstream.compare(right, clicks) == 0
    assert clickstream.compare(right - {(user, start, count, pages)} | {(user, start, count + 1, pages)}, clicks) == 1


def test_an_example_finds_a_wrong_balance(tmp_path: Path) -> None:
    for number, total in enumerate((3, 4)):
        (tmp_path / f"batch={number}").mkdir()
        table = pa.table({"account": ["a"], "total": pa.array([total], pa.int64())})
        pq.write_table(table, tmp_path / f"batch={number}" / "part.parquet")
    take_over = example("take_over")
    assert take_over.compare(tmp_path, Counter(a=4)) == 0
    assert take_over.compare(tmp_path, Counter(a=3)) == 1


@pytest.mark.proof
def test_clicks_also_go_to_postgresql(tmp_path: Path) -> None:
    with server() as uri:
        if uri is None:
            pytest.skip(WITHOUT_SERVER)
        said = run(tmp_path, str(EXAMPLES / "clickstream" / "main.py"), "--database", uri)
    assert " 0 differ from " in said[-1]


def test_the_notebook_has_what_its_cells_show() -> None:
    found = notebook.read()
    assert found["metadata"]["aion"]["run_from"] == notebook.digest(found), "python -m tests.notebook runs the cells"
    text = notebook.NOTEBOOK.read_text()
    assert text == notebook.text_of(found) and len(text) < 10_000
    shown = [output for cell in found["cells"] for output in cell.get("outputs", ())]
    assert [output["output_type"] for output in shown] == ["execute_result"] * 2
    assert not re.search(r"/(home|root|tmp|var|work)\b", json.dumps(shown))


def test_a_cell_that_has_changed_is_run_again() -> None:
    found = notebook.read()
    found["cells"][1]["source"].append("\n")
    assert notebook.digest(found) != notebook.digest(notebook.read())


@pytest.mark.proof
def test_the_cells_of_the_notebook_show_the_same_when_they_are_run_again(tmp_path: Path) -> None:
    run(tmp_path, "-m", "tests.notebook", "ran.ipynb")
    assert json.loads((tmp_path / "ran.ipynb").read_text()) == notebook.read()
