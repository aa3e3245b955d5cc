"""`aion experiment network`: other results for the same events are an error; its report."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from experiments.network import report as network_report
from experiments.network.command import _compare
from experiments.network.settings import Rate, Settings
from experiments.network.streams import AGGREGATES, CONTENDERS, Hop, Run

SETTINGS = Settings(2_000, 2, 10, 4, 2, (1, 5), (1, 2), (1,), 1, 3)


def run(contender: str, aggregate: str, hops: list[int], rate: float = 1e6, checksum: float = 1.0) -> Run:
    made = tuple(Hop(tasks=2**i, bytes=size, rows=10) for i, size in enumerate(hops))
    return Run(contender, aggregate, len(hops), 100, made, rate, 7, checksum)


def both(aggregate: str, central: int, distributed: int, levels: int) -> list[Run]:
    return [
        run("central", aggregate, [central] * levels),
        run("distributed", aggregate, [distributed] * levels),
    ]


def test_other_results_for_the_same_events_are_an_error() -> None:
    runs = both("mean", 1, 1, 2)
    _compare(runs)
    with pytest.raises(RuntimeError, match=r"stock, 1 levels: 7 results with sum 1\.1"):
        _compare([*runs, run("stock", "mean", [1], checksum=1.1)])
    _compare([*runs, run("stock", "median", [1], checksum=1.1)])


@pytest.mark.slow
def test_the_report_prints_tables_and_writes_json_and_a_figure(tmp_path: Path) -> None:
    counted = [
        r for a in AGGREGATES for r in (*both(a, 2_000, 900, 1), *both(a, 2_000, 100, 5), run("stock", a, [300]))
    ]
    rates = [Rate(1, n, run(c, a, [1], 1e6 * n)) for a in AGGREGATES for n in (1, 2) for c in CONTENDERS]
    console = Console(width=120, record=True, file=io.StringIO())
    network_report.report(SETTINGS, counted, rates, tmp_path, {"experiment": "network"}, console)
    text = console.export_text()
    assert "figure 6, median: bytes shuffled per event" in text
    assert text.count("holds") == 2
    assert "1,000,000" in text and "2,000,000" in text
    record = json.loads((tmp_path / "network.json").read_text())
    assert record["ratios"]["mean"][1]["ratio"] == 20.0
    assert [c["holds"] for c in record["checks"]] == [True, True]
    assert len(record["bytes"]) == len(counted) and len(record["rates"]) == len(rates)
    assert (tmp_path / "network.png").read_bytes().startswith(b"\x89PNG")
