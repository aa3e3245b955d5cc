"""`aion experiment slicing`: its data, its verdicts, its checks, and all of it once, in miniature."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from aion.core.periodic import Sliding, Tumbling
from aion.core.windows import Definition, Session
from aion.errors import WindowError
from experiments import app
from experiments.slicing import CONTENDERS_OF, LEGS, cells, report, runs, take_turns
from experiments.slicing.baselines import LONG_AGO, Buckets, FlatFat, SumTree
from experiments.slicing.operator import Case, measure_operator
from experiments.slicing.operator import cases as operator_cases
from experiments.slicing.records import RocksStorage, measure_records, storage, unit_costs
from experiments.slicing.runs import (
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
from tests.durations import us
from tests.slicing_oracle import Event, Oracle

TINY = Settings(
    events=6_000, batch=6_000, small_batch=1_000, rate=1_000, rates=(1_000,), windows=(1, 3), fractions=(0.0, 1.0),
    concurrent=2, runs=1, seconds=0.01, records=64, overlaps=(3, 5), keys=(2,),
)  # fmt: skip


def of(rate: float, contender: str = "aion") -> Result:
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
    assert Cell(1, 1, True, 0, 1).definitions == [Tumbling("1 s"), Session("1 s")]


# --- running ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("contender", CONTENDERS)
def test_every_contender_yields_the_panes_of_the_operator(contender: str) -> None:
    cell = Cell(200, 7, True, 0.3, 1_500)
    stream = generate(8_000, 200, 0.3, seed=1)
    settings = replace(TINY, seconds=60.0)  # to the end of the stream, however slow the machine is
    found = measure(contender, cell, stream, settings)
    assert (found.panes, found.checksum) == reference(found, cell, stream, settings)
    assert found.panes > 10 and found.seconds > 0
    if contender in runs.POLICIES:
        assert (found.events, found.batches) == (8_000, 6)


def test_a_baseline_stops_when_its_time_is_up() -> None:
    stream = generate(8_000, 200, 0.3, seed=1)
    found = measure("flatfat", Cell(200, 3, False, 0.3, 8_000), stream, replace(TINY, seconds=0.0))
    assert (found.events, found.batches) == (1_000, 1)


def test_the_checksum_tells_panes_apart_but_not_their_order() -> None:
    stream = generate(8_000, 200, 0.3, seed=1)
    panes = {}
    for wrong in (0, 1):
        operator = make("aion", Cell(200, 7, True, 0.3, 1_000).definitions)
        changed = stream._replace(values=stream.values + wrong * (stream.times_us == stream.times_us[0]))
        for batch in batches_of(changed, 1_000):
            operator.step(batch)
        panes[wrong] = operator.panes()
    assert checksum(panes[0]) == checksum(panes[0][::-1]) != checksum(panes[1])
    assert checksum(panes[0][:-1]) != checksum(panes[0])


def test_other_panes_end_the_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "reference", lambda *_: (0, 0))
    with pytest.raises(RuntimeError, match="aion and LocalOperator yield different panes"):
        take_turns(TINY, ["windows"], Console(quiet=True))


def test_legs_share_a_cell_only_with_the_same_contenders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "generate", lambda *_: None)
    monkeypatch.setattr(runs, "measure", lambda contender, *_: of(1.0, contender))
    monkeypatch.setattr(runs, "reference", lambda found, *_: (found.panes, found.checksum))
    settings = replace(TINY, small_batch=TINY.batch)
    for leg, measured in take_turns(settings, ["batches", "rates", "disorder"], Console(quiet=True)).items():
        for _, results in measured:
            assert {result.contender for result in results} == set(CONTENDERS_OF[leg])


def test_cells_are_those_of_the_figures() -> None:
    found = list(cells(Settings(), ["windows", "batches", "disorder", "rates"]))
    for leg, batch in (("windows", 4_000_000), ("batches", 100_000)):
        assert [(cell.windows, cell.batch) for of, cell in found if of == leg] == [
            (windows, batch) for windows in 2 * (1, 20, 100, 1_000)
        ]
    assert [cell.out_of_order for leg, cell in found if leg == "disorder"] == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert {(cell.windows, cell.session) for leg, cell in found if leg == "disorder"} == {(20, True)}
    assert {name for leg in CONTENDERS_OF.values() for name in leg} == set(CONTENDERS)
    assert set(CONTENDERS_OF) < set(LEGS)


# --- baselines ----------------------------------------------------------------------------------------------

windows = st.lists(
    st.builds(Tumbling, st.integers(1, 15).map(us), st.integers(-5, 5).map(us))
    | st.builds(Session, st.integers(1, 8).map(us)),
    min_size=1, max_size=4,
)  # fmt: skip
BASELINES: dict[str, Callable[[Sequence[Definition]], Buckets | FlatFat]] = {
    "buckets": Buckets,
    "flatfat": FlatFat,
    "flatfat-batch": lambda windows: FlatFat(windows, whole_batches=True),
}


@pytest.mark.parametrize("name", BASELINES)
@given(windows, st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 40), max_size=8)), max_size=8))
@example(
    [Tumbling(us(2), us(1)), Session(us(1))], [(1, [8]), (9, [0])]
)  # an event just behind a session that has ended
def test_baselines_yield_each_window_once_when_it_ends(
    name: str, windows: list[Definition], steps: list[tuple[int, list[int]]]
) -> None:
    """The watermark goes on by so much before each batch, whose events are so far behind it."""
    baseline, oracle = BASELINES[name](windows), Oracle(windows, 0)
    watermark = -20
    for progress, behind in [*steps, (10**6, [])]:
        watermark += progress
        found = zip(*(column.tolist() for column in baseline.advance(watermark)), strict=True)
        expected = [(p.definition, p.start, p.end, p.events, p.total) for p in oracle.advance(watermark)]
        assert sorted(found) == sorted(expected)
        events = [Event(0, watermark + t, 7 * n - 20) for n, t in enumerate(behind)]
        baseline.process(np.array([e.t for e in events], np.int64), np.array([e.value for e in events], np.int64))
        oracle.process(events)


@pytest.mark.parametrize("name", BASELINES)
def test_baselines_know_no_other_windows(name: str) -> None:
    with pytest.raises(WindowError, match="the baselines only support"):
        BASELINES[name]([Sliding(us(10), us(5))])


def test_a_baseline_without_events_yields_nothing() -> None:
    for make_one in BASELINES.values():
        panes = make_one([Tumbling(us(5)), Session(us(5))]).advance(LONG_AGO + 1)
        assert [len(column) for column in panes] == [0] * 5


@given(
    st.lists(st.tuples(st.integers(0, 60), st.lists(st.integers(-9, 9), min_size=1, max_size=30)), max_size=6),
    st.randoms(use_true_random=False),
)
def test_a_tree_is_the_column_that_was_written(writes: list[tuple[int, list[int]]], rng: Random) -> None:
    tree = SumTree()
    column: list[int] = []
    for at, items in writes:
        at = min(at, len(column))  # a tail is written anew, from somewhere on
        column[at:] = items
        tree.write(at, np.array(items))
        ranges = [sorted(rng.sample(range(len(column) + 1), 2)) for _ in range(40)]
        begins, ends = np.array(ranges).T
        assert tree.ranges(begins, ends).tolist() == [sum(column[begin:end]) for begin, end in ranges]


# --- verdicts -----------------------------------------------------------------------------------------------


def test_every_target_is_judged() -> None:
    def at(windows: int, session: bool) -> Cell:
        return Cell(15_000, windows, session, 0.2, 4_000_000)

    results = {
        "windows": [
            (at(1, False), [of(50e6), of(40e6), of(200e6)]),
            (at(20, False), [of(50e6)]),
            (at(100, False), [of(40e6)]),
            (at(1_000, False), [of(14.9e6)]),
            (at(1, True), [of(25e6), of(1e9, "eager")]),
            (at(20, True), [of(25e6)]),
            (at(100, True), [of(20e6)]),
            (at(1_000, True), [of(7.9e6), of(1e9, "eager")]),
        ],
        "batches": [(at(1, False), [of(1e9)])],
    }
    found = report.checks(results)
    assert [(check.what, check.words) for check in found] == [
        ("1 window", "holds"),
        ("20 windows", "holds"),
        ("100 windows", "holds"),
        ("1,000 windows", "does not hold"),
        ("1 window, 1 s session", "holds"),
        ("20 windows, 1 s session", "holds"),
        ("100 windows, 1 s session", "holds"),
        ("1,000 windows, 1 s session", "does not hold"),
    ]
    assert (found[0].measured, found[0].by_processor) == (50e6, 25e6)
    assert report.checks({}) == []


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


@pytest.mark.proof
def test_tables_json_and_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "Settings", lambda **_: TINY)
    done = CliRunner().invoke(app, ["slicing", "--out", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    for words in (
        "figure 5a",
        "figure 5b",
        "FlatFAT",
        "Scotty, Java",
        "LocalOperator, standard",
        "kept in RocksDB",
        "(chosen)",
        "checksum",
        "in the operator",
        "batches of 6,000",
        "batches of 1,000",
    ):
        assert words in done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["slicing.json", "slicing.png"]
    record = json.loads((tmp_path / "slicing.json").read_text())
    assert set(record["results"]) == {"windows", "batches", "disorder", "rates"}
    measured = record["results"]["windows"][0]["runs"]
    assert {run["contender"] for run in measured} == set(CONTENDERS)
    assert (tmp_path / "slicing.png").stat().st_size > 20_000


def test_an_unknown_leg_is_refused() -> None:
    done = CliRunner().invoke(app, ["slicing", "--legs", "window"])
    assert done.exit_code == 2
    assert "use windows, batches, disorder, rates," in " ".join(done.output.split())


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
    (table,) = report.tables({}, TINY, operator=found)
    assert table.row_count == 2


def test_rows_that_differ_by_way_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from experiments.slicing import operator

    real = operator.one_pass

    def wrong(case: Case, way: Any, seed: int) -> Any:
        took, rows = real(case, way, seed)
        return took, rows if way == "lazy" else rows.slice(1)

    monkeypatch.setattr(operator, "one_pass", wrong)
    with pytest.raises(RuntimeError, match="overlap 3, 1 keys, on time: eager and lazy yield different rows"):
        measure_operator([Case(3, 1)], 1, 1)
