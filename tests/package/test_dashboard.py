"""The Grafana dashboard asks for what the state servers tell, and for nothing else."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

from state_backends.server.metrics import METRICS, Metric

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "dashboards" / "aion.json").read_text())
SERIES = {series: metric for metric in METRICS for series in metric.series}
OF_PROMETHEUS = {"instance"}
NAME = r"\baion_[a-z_]+[a-z]\b"

Panel = dict[str, Any]


def panels() -> list[Panel]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    """Of the panels, of the variables, and of the page."""
    variables = [v["query"]["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    page = (ROOT / "docs/operate/metrics.md").read_text()
    asked = [code for code in re.findall(r"`([^`\n]+)`", page) if "(" in code and "aion_" in code]
    assert len(asked) >= 4
    return [*variables, *asked, *(target["expr"] for panel in panels() for target in panel["targets"])]


def labels_of(metric: Metric) -> set[str]:
    return {*metric.labels, *OF_PROMETHEUS, *(["le"] if metric.type == "histogram" else [])}


def test_it_asks_for_names_and_labels_of_the_table_only() -> None:
    for query in queries():
        names = re.findall(NAME, query)
        assert names and set(names) <= set(SERIES), query
        for name, selector in re.findall(rf"({NAME})\{{([^}}]*)\}}", query):
            asked = {part.partition("=")[0].strip() for part in selector.split(",")}
            assert asked <= labels_of(SERIES[name]), query
        known = set.intersection(*(labels_of(SERIES[name]) for name in names))
        for by in re.findall(r"(?:by|without|ignoring) \(([^)]*)\)", query.replace("ignoring(", "ignoring (")):
            assert {label.strip() for label in by.split(",")} <= known, query


def test_values_of_labels_are_some_that_there_are() -> None:
    told = {
        "which": {"shortest", "longest", "asked", "realised"},
        "outcome": {"hit", "late", "miss", "done", "failed", "refused", "in_time", "missed"},
    }
    for query in queries():
        for label, value in re.findall(r'([a-z]+)="([^"$]*)"', query):
            assert value in told[label], query


def test_what_only_grows_is_asked_for_its_growth() -> None:
    for panel in panels():
        for target in panel["targets"]:
            for name in re.findall(NAME, target["expr"]):
                grows = SERIES[name].type != "gauge"
                asked = re.search(rf"\b(rate|increase)\({name}\{{[^}}]*\}}\[", target["expr"]) is not None
                assert asked == grows, target["expr"]


def test_variables_are_defined() -> None:
    defined = {variable["name"] for variable in DASHBOARD["templating"]["list"]} | {"__rate_interval", "__all"}
    used = set(re.findall(r"\$\{?([a-z_]+)", json.dumps(DASHBOARD)))
    assert used <= defined
    assert {"datasource", "instance", "query", "operator"} <= used


def test_panels_have_places_of_their_own() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for at in [panel["gridPos"]]
        for x, y in itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"]))
    ]
    assert len(set(cells)) == len(cells)
    assert all(0 <= x < 24 for x, _ in cells)
    assert all(panel["title"] and panel["targets"] for panel in panels())


def test_legends_use_labels_that_are_left() -> None:
    for panel in panels():
        for target in panel["targets"]:
            kept = {label.strip() for by in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in by.split(",")}
            used = set(re.findall(r"\{\{([a-z]+)\}\}", target["legendFormat"]))
            assert used <= (kept or OF_PROMETHEUS), target
