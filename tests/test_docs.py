"""What the documents show is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from aion.config import load_policy
from state_backends.ledger import diagram
from state_backends.metrics import METRICS, table

DOCS = Path(__file__).parent.parent / "docs"


def test_the_diagram_of_places_is_the_ledgers_own() -> None:
    assert f"```mermaid\n{diagram()}\n```" in (DOCS / "store.md").read_text()


def test_the_table_of_metrics_is_the_codes_own() -> None:
    show = "python -c 'from state_backends.metrics import table; print(table())'"
    page = (DOCS / "metrics.md").read_text()
    assert f"\n{table()}\n" in page, show
    names = {series for metric in METRICS for series in metric.series} | {metric.name for metric in METRICS}
    assert set(re.findall(r"\baion_[a-z_]+[a-z]", page)) <= names


def test_the_settings_of_the_page_of_metrics_fit_together() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (DOCS / "metrics.md").read_text(), re.DOTALL)
    policy, prometheus = map(yaml.safe_load, blocks)
    port = load_policy(policy).metrics.port
    (job,) = prometheus["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"127.0.0.1:{port}"]}]
