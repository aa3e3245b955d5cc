"""What docs/metrics.md says of Spark's own progress, by running its example."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_example_of_the_page(spark: SparkSession, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    run: dict[str, Any] = {}
    exec(compile(example, str(PAGE), "exec"), run)
    query, metrics = run["query"], run["metrics"]
    try:
        progress = query.recentProgress
        assert len(capsys.readouterr().out.splitlines()) == len(progress) + 1 >= 5
        observed: Counter[str] = Counter()
        for batch in progress:
            observed.update(batch["observedMetrics"]["panes"].asDict())
        written = {row["kind"]: row["count"] for row in spark.table("watched").groupBy("kind").count().collect()}
        assert +observed == written
        assert {"on_time", "late"} <= written.keys()
        # One window's result has no key, and so is a row for each execution.
        told = metrics.queries[query.id]["watched"]["counters"]
        assert told["executions"] == metrics.operators["watched"]["executions"]
        assert {kind: n for kind, n in told["executions"].items() if n} == {**written}
        assert told["events"] == 4_000
        assert sum(told["lateness"]["events"].values()) == told["late_events"] > 0
        # Spark sees of the state what the page says.
        (stateful,) = progress[-1]["stateOperators"]
        assert stateful["numRowsTotal"] == metrics.queries[query.id]["watched"]["shards"]
    finally:
        spark.sql("drop view if exists watched")
