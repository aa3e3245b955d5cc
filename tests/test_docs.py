"""What the documents show is what the code says."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa

import aion
from aion import aggregates as A
from state_backends.server.metrics import METRICS, table

DOCS = Path(__file__).parent.parent / "docs"


def test_the_sink_of_the_windows_page_ends_right() -> None:
    """Its own code, fed with the rows of late events that make sessions longer and join them."""
    code = re.findall(r"```python\n(.*?)```", (DOCS / "windows.md").read_text(), re.DOTALL)[0]
    sink: dict[str, Any] = {}
    exec(code, sink)
    policy = {"lateness": {"initial_bound": "1 hour", "coverage": None}, "trigger": {"kind": "every_batch"}}
    minute = 60_000_000
    with (
        closing(sqlite3.connect(":memory:")) as db,
        aion.LocalOperator(
            windows=aion.Session("5 minutes"),
            time="ts",
            key="user",
            aggregates={"clicks": A.count()},
            policy=policy,
        ) as operator,
    ):

        def click(*minutes: int) -> Any:
            ts = pa.array([m * minute for m in minutes], pa.timestamp("us", "UTC"))
            return pa.table({"user": ["u"] * len(minutes), "ts": ts})

        outs = [operator.process(click(1, 3, 12)), operator.advance(30 * minute)]
        sink["apply_rows"](db, [row for out in outs for row in out.to_pylist()])
        assert _visits(db) == [("00:01", "00:08", 2), ("00:12", "00:17", 1)]
        rows = operator.process(click(7)).to_pylist()  # as in the page: one in between
        assert sorted(row["kind"] for row in rows) == ["late", "retracted", "retracted"]
        sink["apply_rows"](db, rows)
        assert _visits(db) == [("00:01", "00:17", 4)]
        # A batch that is run again.
        sink["apply_rows"](db, rows)
        assert _visits(db) == [("00:01", "00:17", 4)]


def _visits(db: sqlite3.Connection) -> list[tuple[str, str, int]]:
    found = db.execute("SELECT window_start, window_end, clicks FROM visits ORDER BY window_start")
    return [(start[11:16], end[11:16], clicks) for start, end, clicks in found]


def test_the_table_of_metrics_is_the_codes_own() -> None:
    show = "python -c 'from state_backends.server.metrics import table; print(table())'"
    page = (DOCS / "metrics.md").read_text()
    assert f"\n{table()}\n" in page, show
    names = {series for metric in METRICS for series in metric.series} | {metric.name for metric in METRICS}
    assert set(re.findall(r"\baion_[a-z_]+[a-z]", page)) <= names


def test_figures_of_the_comparison_are_those_of_the_page_that_measured_them() -> None:
    compared = re.findall(r"Aion ([\d.]+), stock Spark ([\d.]+)", (DOCS / "comparison.md").read_text())
    page = (DOCS / "distribution.md").read_text()
    (one,) = re.findall(r"^\| 1 \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    (stock,) = re.findall(r"for the mean \(([\d.]+)\).*?and ([\d.]+) for the median", page, re.DOTALL)
    assert compared == list(zip(one, stock, strict=True))
