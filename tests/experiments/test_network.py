"""The parts of `aion experiment network` that need no Spark: its events, its arithmetic, its verdicts, its figure."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from rich.console import Console

from experiments.network import report as network_report
from experiments.network.command import _compare, check_levels
from experiments.network.settings import Rate, Settings
from experiments.network.streams import AGGREGATES, CONTENDERS, Hop, Run, Sources
from experiments.shared import bench

SOURCES = Sources(children=4, events_per_child=500, batches=2, keys=10, span_s=20, seed=3)
SETTINGS = Settings(2_000, 2, 10, 4, 2, (1, 5), (1, 2), (1,), 1, 3)


def run(contender: str, aggregate: str, hops: list[int], rate: float = 1e6, checksum: float = 1.0) -> Run:
    made = tuple(Hop(tasks=2**i, bytes=size, rows=10) for i, size in enumerate(hops))
    return Run(contender, aggregate, len(hops), 100, made, rate, 7, checksum)


def both(aggregate: str, central: int, distributed: int, levels: int) -> list[Run]:
    return [
        run("central", aggregate, [central] * levels),
        run("distributed", aggregate, [distributed] * levels),
    ]


def test_all_sources_see_the_same_stretch_of_time_and_the_same_keys() -> None:
    for batch in range(2):
        times = [SOURCES.table(batch, child)["ts"].cast(pa.int64()).to_numpy() for child in range(4)]
        starts = {int(t[0] // 20_000_000) for t in times} | {int(t[-1] // 20_000_000) for t in times}
        assert starts == {85_000_000 + batch}
        assert all(len(t) == 500 and np.all(np.diff(t) >= 0) for t in times)
    keys = [set(SOURCES.table(0, child)["key"].to_pylist()) for child in range(4)]
    assert all(found == set(range(10)) for found in keys)
    assert SOURCES.table(1, 2).equals(SOURCES.table(1, 2))
    assert not SOURCES.table(1, 2).equals(SOURCES.table(1, 3))


def test_a_batch_is_one_file_of_one_row_group_for_each_source(tmp_path: Path) -> None:
    files = sorted(SOURCES.write(tmp_path / "data").iterdir())
    assert len(files) == 8
    assert sum(pq.read_metadata(f).num_rows for f in files) == SOURCES.events == 4_000
    assert {pq.read_metadata(f).num_row_groups for f in files} == {1}
    modified = [f.stat().st_mtime for f in files]
    assert modified == sorted(set(modified)), "Spark takes files in the order of their times"


def test_bytes_are_added_up_over_all_hops_for_both_ways() -> None:
    runs = [*both("mean", 2_000, 50, 5), *both("mean", 2_000, 100, 1)]
    one, five = network_report.by_level(runs, "mean")
    assert (one.levels, one.central, one.distributed, one.ratio) == (1, 20.0, 1.0, 20.0)
    assert (five.central, five.distributed, five.ratio) == (100.0, 2.5, 40.0)
    # 5 hops and the sensors' against a little more than the sensors': less than 6 times, as the paper counts.
    assert five.ratio_with_sensors == pytest.approx(120 / 22.5)
    assert network_report.by_level(runs, "median") == []


def test_the_papers_ratios_are_those_of_its_bytes() -> None:
    assert network_report.paper_ratio("mean") == pytest.approx(6.0)
    assert network_report.paper_ratio("median") == pytest.approx(1.65, abs=0.01)


@pytest.mark.parametrize(
    ("aggregate", "distributed", "holds"),
    [("mean", 333, True), ("mean", 334, False), ("median", 1_333, True), ("median", 1_334, False)],
)
def test_targets_are_judged_at_five_levels(aggregate: str, distributed: int, holds: bool) -> None:
    runs = [*both(aggregate, 2_000, distributed, 5), *both(aggregate, 2_000, 10, 4)]
    (check,) = network_report.checks(runs)
    assert (check.aggregate, check.holds) == (aggregate, holds)
    assert network_report.checks(runs[2:]) == []


def test_other_results_for_the_same_events_are_an_error() -> None:
    runs = both("mean", 1, 1, 2)
    _compare(runs)
    with pytest.raises(RuntimeError, match=r"stock, 1 levels: 7 results with sum 1\.1"):
        _compare([*runs, run("stock", "mean", [1], checksum=1.1)])
    _compare([*runs, run("stock", "median", [1], checksum=1.1)])


@pytest.mark.parametrize("text", ["", "0", "1,x", "1,-2", "1.5"])
def test_what_is_no_list_of_numbers_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="not a list of positive numbers"):
        bench.numbers(text)
    assert bench.numbers("1, 2,4") == (1, 2, 4)


def test_a_tree_that_is_too_narrow_for_its_levels_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match=r"4 sources with a fan-in of 2 .* more than 16 --children"):
        check_levels(SETTINGS)
    check_levels(replace(SETTINGS, children=17))
    check_levels(replace(SETTINGS, levels=(1, 2)))


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
