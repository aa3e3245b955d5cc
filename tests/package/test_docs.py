"""What the documents show is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from state_backends.server.metrics import METRICS, table
from tests import pictures

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


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


def test_the_readme_has_the_plain_figure_beside_the_best_one() -> None:
    said = re.search(r"Recorded.*?\n\n", (ROOT / "README.md").read_text(), re.DOTALL)
    page = (DOCS / "measured/results.md").read_text()
    section = page.partition("## Overlapping windows and sessions\n")[2].partition("\n## ")[0]
    measured = re.findall(r"^\| .* \| [\d,]+ \| ([\d.]+) \| [\d.]+ \|$", section, re.MULTILINE)
    assert said is not None and len(measured) == 3
    assert re.findall(r"([\d.]+) times", said[0]) == measured
    (command,) = re.findall(r"`(aion experiment .*?)`", said[0])
    assert command in section


def test_the_picture_of_the_readme_is_what_an_operator_yields() -> None:
    drawn = pictures.late_event()
    assert pictures.README_PICTURE.read_text() == drawn, "python -m tests.pictures writes it"
    assert ">on_time<" in drawn and ">4</tspan>" in drawn and ">late<" in drawn and ">6</tspan>" in drawn


def test_the_picture_of_the_readme_can_be_read_on_a_phone() -> None:
    drawn = pictures.late_event()
    (width,) = re.findall(r'viewBox="0 0 (\d+) \d+"', drawn)
    # A page that is 420 wide has margins: the picture is at least 350 wide.
    assert all(int(size) * 350 / int(width) >= 11 for size in re.findall(r'font-size="(\d+)"', drawn))
