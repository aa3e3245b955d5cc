"""`aion experiment slicing`: its data, its verdicts, its checks, and all of it once, in miniature."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from aion.core.windows import Session, Tumbling
from experiments import app, slicing_report, slicing_runs
from experiments.slicing import cells, take_turns
from experiments.slicing_operator import Case, measure_operator
from experiments.slicing_operator import cases as operator_cases
from experiments.slicing_records import RocksStorage, measure_records, storage, unit_costs
from experiments.slicing_runs import (
    CONTENDERS,
    DELAY_US,
    GAP_US,
    SENSOR_HZ,
    Cell,
    Result,
    Settings,
    batches_of,
    checksum,
    generate,
    make,
    measure,
    reference,
    sizes_us,
)

TINY = Settings(
    events=6_000, batch=1_000, rate=1_000, rates=(1_000,), windows=(1, 3), fractions=(0.0, 1.0), concurrent=2, runs=1,
    seconds=0.01, records=64, overlaps=(3, 5), keys=(2,),
)  # fmt: skip


def of(rate: float, contender: str = "lazy") -> Result:
    return Result(contender, int(rate), 1.0, 2.0, 1, 1, 1)


# --- data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [200, 1_000, 15_000])
def test_sensors_report_200_times_a_second_with_5_gaps_a_minute(rate: int) -> None:
    events = rate * 150
    stream = generate(events, rate, 0.0, seed=3)
    times = stream.times_us
    assert (np.diff(times) >= 0).all(), "nothing is out of order"
    assert len(times) == len(stream.values) == events
    jumps = np.flatnonzero(np.diff(times) >= GAP_US)
    minutes = (times[-1] - times[0]) / 60e6
    assert len(jumps) == pytest.approx(5 * minutes, abs=1)
    active_s = (times[-1] - times[0] - len(jumps) * GAP_US) / 1e6
    assert events / active_s == pytest.approx(rate, rel=0.01)
    assert len(np.unique(times % (1_000_000 // SENSOR_HZ))) <= rate // SENSOR_HZ


def test_a_share_of_the_events_is_late_by_up_to_two_seconds() -> None:
    stream = generate(100_000, 5_000, 0.2, seed=3)
    assert (np.sort(stream.times_us) == generate(100_000, 5_000, 0.0, seed=3).times_us).all(), "the same events"
    behind = np.maximum.accumulate(stream.times_us) - stream.times_us
    assert 0.17 < (behind > 0).mean() <= 0.21
    assert 1.9e6 < behind.max() <= DELAY_US
    assert (generate(100_000, 5_000, 0.2, seed=3).times_us == stream.times_us).all()


def test_no_event_is_behind_the_watermark() -> None:
    stream = generate(20_000, 1_000, 1.0, seed=3)
    batches = batches_of(stream, 3_000, begin=500)
    assert sum(len(batch.times_us) for batch in batches) == 19_500
    for number, (batch, following) in enumerate(pairwise(batches), 1):
        assert batch.watermark_us <= following.times_us.min()
        assert batch.watermark_us == stream.times_us[: 500 + 3_000 * number].max() - DELAY_US


def test_window_lengths_are_equally_distributed_in_milliseconds() -> None:
    assert sizes_us(1) == [1_000_000]
    assert sizes_us(20) == [s * 1_000_000 for s in range(1, 21)]
    assert len(set(sizes_us(1_000))) == 1_000
    assert {size % 1_000 for size in sizes_us(1_000)} == {0}
    assert Cell(1, 1, True, 0).definitions == [Tumbling("1 s"), Session("1 s")]


# --- running ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contender", CONTENDERS)
def test_every_contender_yields_the_panes_of_the_lazy_store(contender: str) -> None:
    cell = Cell(200, 7, True, 0.3)
    stream = generate(8_000, 200, 0.3, seed=1)
    found = measure(contender, cell, stream, TINY)
    assert (found.panes, found.checksum) == reference(found, cell, stream, TINY)
    assert found.panes > 10 and found.seconds > 0
    assert found.events == len(stream.times_us) - slicing_runs.filled_before(contender, cell, stream)


def test_a_slow_contender_stops_when_its_time_is_up() -> None:
    stream = generate(8_000, 200, 0.3, seed=1)
    found = measure("flatfat", Cell(200, 3, False, 0.3), stream, TINY, seconds=0.0)
    assert (found.events, found.batches) == (1_000, 1)


def test_the_checksum_tells_panes_apart_but_not_their_order() -> None:
    stream = generate(8_000, 200, 0.3, seed=1)
    cell = Cell(200, 7, True, 0.3)
    panes = {}
    for wrong in (0, 1):
        operator = make("lazy", cell.definitions)
        panes[wrong] = []
        for batch in batches_of(stream, 1_000):
            operator.process(batch.times_us, batch.values + wrong * (batch.times_us == stream.times_us[0]))
            panes[wrong].append(operator.advance(batch.watermark_us))
    assert checksum(panes[0]) == checksum(panes[0][::-1]) != checksum(panes[1])
    assert checksum(panes[0][:-1]) != checksum(panes[0])


def test_other_panes_end_the_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    monkeypatch.setattr(slicing_runs, "reference", lambda *_: (0, 0))
    with pytest.raises(RuntimeError, match="lazy yields other panes"):
        take_turns(TINY, ["windows"], Console(quiet=True))


def test_cells_are_those_of_the_figures() -> None:
    found = list(cells(Settings(), ["windows", "disorder", "rates"]))
    assert len([leg for leg, _ in found if leg == "windows"]) == 8
    assert [cell.out_of_order for leg, cell in found if leg == "disorder"] == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert {(cell.windows, cell.session) for leg, cell in found if leg == "disorder"} == {(20, True)}


# --- verdicts -----------------------------------------------------------------------------------------------


def test_every_target_is_judged() -> None:
    def at(windows: int, session: bool, rate: int = 15_000) -> Cell:
        return Cell(rate, windows, session, 0.2)

    results = {
        "windows": [
            (at(1, False), [of(100e6), of(90e6), of(200e6)]),
            (at(1_000, False), [of(49.9e6)]),
            (at(1, True), [of(26e6), of(1e9, "eager")]),
            (at(1_000, True), [of(25e6), of(1e9, "eager")]),
        ],
        "rates": [(at(1_000, False), [of(1e9)]), (at(1_000, False, 1_000), [of(10e6)])],
    }
    found = slicing_report.checks(results)
    assert [(check.what, check.words) for check in found] == [
        ("1 window, 15,000/s", "holds"),
        ("1,000 windows, 15,000/s", "does not hold"),
        ("1 window, 1 s session, 15,000/s", "holds"),
        ("1,000 windows, 1 s session, 15,000/s", "does not hold"),
        ("1,000 windows, 1,000/s", "holds"),
    ]
    assert (found[0].measured, found[0].by_the_clock) == (100e6, 50e6)
    assert slicing_report.checks({}) == []


# --- windows per record -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "RocksDB"])
def test_designs_agree_and_their_costs_are_counted(kind: str, tmp_path: Path) -> None:
    found = measure_records(64, 1, tmp_path, measured=10)["storages"][kind]
    assert found["read_us"] > 0 and found["write_us"] > 0
    designs = found["designs"]
    assert designs["plain"]["writes"] == 64
    assert designs["8 buckets"]["writes"] < 12
    assert any(costs["buckets"] == found["best"] for costs in designs.values())
    assert list(tmp_path.iterdir()) == []


def test_rocksdb_keeps_what_it_is_given(tmp_path: Path) -> None:
    with storage("RocksDB", tmp_path) as store:
        assert isinstance(store, RocksStorage)
        for time_us, value in ((-5, 1), (3, 2), (3, 4), (7, 8)):
            store.add_value(time_us, value)
        store.put_aggregates(np.array([-1, 0]), np.array([-10, 20]))
        store.put_aggregates(np.array([0]), np.array([30]))
        assert store.values(-5, 3).tolist() == [1, 2, 4]
        assert [column.tolist() for column in store.aggregates(-9, 9)] == [[-1, 0], [-10, 30]]
        store.drop(3, 0)
        assert store.values(-9, 9).tolist() == [2, 4, 8]
        assert [column.tolist() for column in store.aggregates(-9, 9)] == [[0], [30]]


def test_unit_costs_are_of_one_more(tmp_path: Path) -> None:
    read_us, write_us = unit_costs("RocksDB", 256, tmp_path)
    assert 0 < read_us < 1_000 and 0 < write_us < 10_000


# --- all of it ----------------------------------------------------------------------------------------------


def test_tables_json_and_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slicing_runs, "Settings", lambda **_: TINY)
    done = CliRunner().invoke(app, ["slicing", "--out", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    for words in (
        "figure 5a",
        "figure 5b",
        "FlatFAT",
        "Scotty, Java",
        "kept in RocksDB",
        "(chosen)",
        "checksum",
        "in the operator",
    ):
        assert words in done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["slicing.json", "slicing.png"]
    record = json.loads((tmp_path / "slicing.json").read_text())
    assert set(record["results"]) == {"windows", "disorder", "rates"}
    runs = record["results"]["windows"][0]["runs"]
    assert {run["contender"] for run in runs} == set(CONTENDERS)
    assert (tmp_path / "slicing.png").stat().st_size > 20_000


def test_an_unknown_leg_is_refused() -> None:
    done = CliRunner().invoke(app, ["slicing", "--legs", "window"])
    assert done.exit_code == 2
    assert "there are windows, disorder, rates, records" in " ".join(done.output.split())


# --- lazy and eager in the operator ---------------------------------------------------------------------------


def test_the_operators_ways_are_compared_in_passes_and_calls() -> None:
    said: list[str] = []
    cases = [Case(6, 3), Case(9, 2, late=True)]
    assert operator_cases(TINY) == [Case(3, 2), Case(5, 2), Case(5, 2, late=True)]
    found = measure_operator(cases, 1, 1, said.append)
    assert [(of["windows"], of["late"]) for of in found] == [(100, False), (9, True)]
    for of in found:
        assert of["call_ratios"]["auto"] == pytest.approx(of["call_s"]["auto"] / of["call_s"]["lazy"])
        assert set(of["pass_s"]) == {"lazy", "eager", "auto"}
    assert said[1].startswith("overlap 9, 2 keys, one late event: pass: eager / lazy ")
    (table,) = slicing_report.tables({}, TINY, operator=found)
    assert table.row_count == 2


def test_rows_that_differ_by_way_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments import slicing_operator

    real = slicing_operator.one_pass

    def wrong(case: Case, way: Any, seed: int) -> Any:
        took, rows = real(case, way, seed)
        return took, rows if way == "lazy" else rows.slice(1)

    monkeypatch.setattr(slicing_operator, "one_pass", wrong)
    with pytest.raises(RuntimeError, match="overlap 3, 1 keys, on time: eager yields other rows than lazy"):
        measure_operator([Case(3, 1)], 1, 1)
