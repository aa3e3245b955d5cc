"""What the documents show is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from state_backends.server.metrics import METRICS, table

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_of_metrics_is_the_codes_own() -> None:
    show = "python -c 'from state_backends.server.metrics import table; print(table())'"
    page = (DOCS / "operate/metrics.md").read_text()
    assert f"\n{table()}\n" in page, show
    names = {series for metric in METRICS for series in metric.series} | {metric.name for metric in METRICS}
    assert set(re.findall(r"\baion_[a-z_]+[a-z]", page)) <= names


def test_figures_of_the_comparison_are_those_of_the_page_that_measured_them() -> None:
    compared = re.findall(r"Aion ([\d.]+), stock Spark ([\d.]+)", (DOCS / "start/comparison.md").read_text())
    page = (DOCS / "inside/distribution.md").read_text()
    (one,) = re.findall(r"^\| 1 \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    (stock,) = re.findall(r"for the mean \(([\d.]+)\).*?and ([\d.]+) for the median", page, re.DOTALL)
    assert compared == list(zip(one, stock, strict=True))
