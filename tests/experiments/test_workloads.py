"""The events of the four workloads, their window functions, and what happens to later panes. No Spark."""

from __future__ import annotations

import dataclasses
import tracemalloc
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from aion.core.ingest.encoding import About, decode, encode
from aion.core.query.functions import Window
from experiments.shared.generate import lateness_shares
from experiments.workloads import NAMES, bigrams, kept, linear_road, load, sources, stock
from experiments.workloads.chaining import LastPanes, Results, newest
from experiments.workloads.model import Shape, Spec, file_names
from state_backends.format.block import BlockKind, Codec

SMALL = Shape.of(Spec(1_000, 6, 40, parts=12), past_windows=3)


# --- events -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_decides_everything_and_another_one_too(name: str) -> None:
    for make in load(name).streams.values():
        assert make(SMALL, 2)[0].equals(make(SMALL, 2)[0])
        assert not make(SMALL, 2)[0].equals(make(SMALL, 3)[0])
        assert not make(SMALL, 2)[0].equals(make(dataclasses.replace(SMALL, seed=2), 2)[0])


@pytest.mark.parametrize("name", NAMES)
def test_events_are_as_late_as_they_say_and_as_the_paper_says(name: str) -> None:
    late_of_all = np.zeros(4, np.int64)
    for make in load(name).streams.values():
        table, late = make(SMALL, 5)
        arrival = table["ts"].cast(pa.int64()).to_numpy() + late * SMALL.window_us
        assert np.all(np.diff(arrival) >= 0), "events come in the order of their arrival"
        assert np.all((arrival >= SMALL.start_us(5)) & (arrival < SMALL.start_us(6)))
        late_of_all += np.bincount(late, minlength=4)
    shares = late_of_all / late_of_all.sum()
    assert shares.tolist() == pytest.approx(lateness_shares(3).tolist(), abs=0.03)
    assert late_of_all.sum() == pytest.approx(SMALL.events_per_batch, rel=0.05)


def test_shapes_at_scale_one_are_the_papers_table_and_smaller_ones_shrink_rate_and_window() -> None:
    rows = {name: Shape.of(load(name).spec, past_windows=5) for name in NAMES}
    table = {name: (shape.rate, shape.window_us / 1e6, shape.payload_bytes) for name, shape in rows.items()}
    assert table == {
        "average": (10_000, 20, 2_304),
        "bigrams": (5_000, 30, 3_584),
        "stock": (10_000, 30, 1_664),
        "linear-road": (10_000, 60, 1_536),
    }
    fifth = Shape.of(load("stock").spec, past_windows=5, scale=0.2)
    assert (fifth.rate, fifth.window, fifth.bound) == (2_000, "6000 milliseconds", "30000 milliseconds")
    assert fifth.origin_us % (2 * fifth.window_us) == 0


@pytest.mark.parametrize("name", NAMES)
def test_payloads_have_the_size_of_the_paper(name: str) -> None:
    spec = load(name).spec
    shape = dataclasses.replace(SMALL, payload_bytes=spec.payload_bytes, rate=20)
    tables = [make(shape, 0)[0] for make in load(name).streams.values()]
    (padded,) = [table for table in tables if "pad" in table.column_names]
    assert set(map(len, padded["pad"].to_pylist())) == {spec.payload_bytes}


def test_files_are_kept_and_what_is_missing_is_added(tmp_path: Path) -> None:
    workload = load("average")
    counts = sources.write_files(workload, SMALL, 2, tmp_path)
    first = (tmp_path / "numbers" / "batch-00000.parquet").stat().st_ino
    assert sources.write_files(workload, SMALL, 3, tmp_path)[:2] == counts
    assert (tmp_path / "numbers" / "batch-00000.parquet").stat().st_ino == first
    events = sources.events_of(tmp_path, workload, 3)["numbers"]
    assert events.num_rows == 3 * SMALL.events_per_batch
    assert [sum(of) for of in counts] == [SMALL.events_per_batch] * 2
    paths = [tmp_path / "numbers" / f"{name}.parquet" for name in file_names(3, SMALL.past_windows + 3)[3:]]
    (*_, beat) = beats = [pq.read_table(path).to_pylist() for path in paths]
    assert [row["ts"] for of in beats for row in of] == [None] * len(beats)
    assert beat[0]["arrived"].timestamp() * 1e6 > SMALL.start_us(3 + SMALL.past_windows)
    arrived = [SMALL.start_us(2 + 1), *(of[0]["arrived"].timestamp() * 1e6 for of in beats)]
    assert set(np.diff(arrived)) == {SMALL.window_us}, "one window becomes final at a time, as with a batch"


@pytest.mark.parametrize("codec", [Codec.ARROW, Codec.JSON])
def test_texts_survive_every_codec(codec: Codec) -> None:
    table = bigrams.texts(dataclasses.replace(SMALL, rate=100), 0)[0]
    words = set(" ".join(table["text"].to_pylist()))
    assert words >= set('",.!?;\\{}…é'), "punctuation, JSON's own, and letters beyond ASCII"
    batch = table.combine_chunks().to_batches()[0]
    block = encode(batch, About(BlockKind.EVENTS, 0, batch.num_rows, 0, 1), codec=codec)
    assert decode(block, batch.schema).equals(batch)


# --- functions of windows -----------------------------------------------------------------------------------


def test_all_pairs_of_adjacent_words_are_counted_over_batches_but_not_over_texts() -> None:
    batches = [pa.record_batch({"text": ["a b a b", "b c"]}), pa.record_batch({"text": ["a b"]})]
    found = bigrams.count_pairs((), None, iter(batches)).to_pylist()
    assert {(row["first"], row["second"]): row["times"] for row in found} == {
        ("a", "b"): 3,
        ("b", "a"): 1,
        ("b", "c"): 1,
    }


def test_about_48_percent_of_consecutive_quotes_raise_a_warning() -> None:
    shape = dataclasses.replace(SMALL, rate=100_000)
    table = stock.quotes(shape, 0)[0]
    table = table.filter(pa.compute.equal(table["symbol"], "SYM0007"))
    found = stock.warnings((), None, iter(table.to_batches()))
    assert found["warnings"] / (table.num_rows - 1) == pytest.approx(0.48, abs=0.06)


def test_quotes_are_consecutive_by_time_whatever_order_they_came_in() -> None:
    ts = pa.array([3, 1, 2], pa.int64()).cast(pa.timestamp("us", "UTC"))
    late = pa.record_batch({"ts": ts, "id": [30, 10, 20], "price": [106.0, 100.0, 101.0]})
    assert stock.warnings((), None, iter([late])) == {"warnings": 0, "alerts": []}
    ts = pa.array([3, 1], pa.int64()).cast(pa.timestamp("us", "UTC"))
    before = pa.record_batch({"ts": ts, "id": [30, 10], "price": [106.0, 100.0]})
    assert stock.warnings((), None, iter([before])) == {"warnings": 1, "alerts": [30]}


def reports_of(rows: list[tuple[int, int, int]]) -> pa.RecordBatch:
    car, lane, position = zip(*rows, strict=True)
    return pa.record_batch({"car": car, "lane": lane, "position": position, "speed": [10] * len(rows)})


@pytest.mark.parametrize(
    ("rows", "stopped", "accidents"),
    [
        ([(1, 0, 5)] * 4 + [(2, 0, 5)] * 4, 2, 1),
        ([(1, 0, 5)] * 4 + [(2, 1, 5)] * 4, 2, 0),  # in another lane
        ([(1, 0, 5)] * 4 + [(2, 0, 5)] * 3, 1, 0),  # not for long enough
        ([(1, 0, 5)] * 4 + [(1, 0, 6)] * 4, 2, 0),  # one car in two places
    ],
)
def test_two_stopped_cars_at_one_place_are_an_accident(
    rows: list[tuple[int, int, int]], stopped: int, accidents: int
) -> None:
    found = linear_road.of_segment((), Window(0, 1, "learnt_bound"), iter([reports_of(rows)]))
    assert found == {"stopped": stopped, "accidents": accidents}


def test_cars_move_stop_and_meet() -> None:
    shape = Shape.of(Spec(2_000, 12, 0), past_windows=1)
    cars = linear_road.cars_of(shape)
    at = [linear_road.positions(shape, cars, report) for report in range(linear_road.TRIP)]
    steps = np.diff([places["position"] for places in at], axis=0) % (linear_road.SEGMENTS * linear_road.SEGMENT_FEET)
    still = steps == 0
    assert 0.01 < (still.sum(axis=0) == linear_road.STOPS_FOR).mean() < 0.1
    assert (still.sum(axis=0) == 0).mean() > 0.9
    speeds = np.unique([places["speed"] for places in at])
    assert speeds[0] == 0 and speeds[1:].tolist() == list(range(16, 35))


# --- later panes replace --------------------------------------------------------------------------------------


def panes(*rows: tuple[str, int, int, int]) -> pa.Table:
    """(key, start of the window in s, pane, value)"""
    key, start, pane, value = zip(*rows, strict=True)
    times = [pa.array([(s + more) * 1_000_000 for s in start], pa.timestamp("us", "UTC")) for more in (0, 10)]
    columns = {"stage": ["s"] * len(rows), "window_start": times[0], "window_end": times[1], "k": key}
    return pa.table({**columns, "pane": pa.array(pane, pa.int32()), "value": value})


def values(last: LastPanes, start_s: int) -> dict[str, int]:
    frame = last.of("s", start_s * 1_000_000)
    return dict(zip(frame["k"], frame["value"], strict=True)) if len(frame) else {}


def test_a_later_pane_replaces_that_of_its_key_and_leaves_the_others() -> None:
    last = LastPanes({"s": ("k",)})
    assert last.upsert(panes(("a", 0, 0, 1), ("b", 0, 0, 2), ("a", 10, 0, 3))) == {("s", 0), ("s", 10_000_000)}
    assert last.upsert(panes(("a", 0, 1, 5))) == {("s", 0)}
    assert (values(last, 0), values(last, 10)) == ({"a": 5, "b": 2}, {"a": 3})


def test_an_earlier_pane_changes_nothing_and_a_batch_that_comes_again_neither() -> None:
    last = LastPanes({"s": ("k",)})
    second = panes(("a", 0, 1, 5), ("a", 0, 2, 6), ("c", 0, 0, 7))
    last.upsert(second)
    last.upsert(panes(("a", 0, 0, 1)))
    last.upsert(second)
    assert values(last, 0) == {"a": 6, "c": 7}


def test_without_key_all_rows_of_a_pane_are_replaced_together() -> None:
    last = LastPanes({"s": ()})
    last.upsert(panes(("x", 0, 0, 1), ("y", 0, 0, 2)))
    last.upsert(panes(("y", 0, 1, 3), ("z", 0, 1, 4)))
    assert values(last, 0) == {"y": 3, "z": 4}


def test_what_was_taken_in_is_there_after_a_restart(tmp_path: Path) -> None:
    last = LastPanes({"s": ("k",)}, folder=tmp_path)
    last.upsert(panes(("a", 0, 0, 1), ("b", 0, 0, 2)))
    last.upsert(panes(("a", 0, 1, 5)))
    again = LastPanes({"s": ("k",)}, folder=tmp_path)
    again.upsert(panes(("a", 0, 1, 5)))
    assert values(again, 0) == {"a": 5, "b": 2}


def test_the_driver_keeps_no_pane(tmp_path: Path) -> None:
    """Each has a million bytes. It keeps where they are."""
    last = LastPanes({"s": ("k",)}, folder=tmp_path, keep_us=1_000_000_000)
    last.upsert(panes(("a" * 1_000_000, 0, 0, 1)))
    tracemalloc.start()
    try:
        for batch in range(1, 20):
            last.upsert(panes(("a" * 1_000_000, batch * 10, 0, 1)))
        assert tracemalloc.get_traced_memory()[0] < 500_000
    finally:
        tracemalloc.stop()
    assert len(values(last, 30)) == 1


def test_files_of_windows_long_gone_are_deleted(tmp_path: Path) -> None:
    last = LastPanes({"s": ("k",)}, folder=tmp_path, keep_us=25_000_000)
    last.upsert(panes(("a", 0, 0, 1), ("a", 10, 0, 2), ("a", 30, 0, 3)))
    assert len(list(tmp_path.rglob("*.parquet"))) == 2


def test_windows_long_gone_are_forgotten() -> None:
    last = LastPanes({"s": ("k",)}, keep_us=25_000_000)
    last.upsert(panes(("a", 0, 0, 1), ("a", 10, 0, 2), ("a", 30, 0, 3)))
    assert [values(last, s) for s in (0, 10, 30)] == [{}, {"a": 2}, {"a": 3}]


def test_keys_of_several_columns() -> None:
    rows = pd.DataFrame({"a": [1, 1], "b": [1, 2], "pane": [0, 0], "value": [10, 20]})
    later = pd.DataFrame({"a": [1], "b": [2], "pane": [1], "value": [30]})
    found = newest(rows, later, ("a", "b")).sort_values("b")
    assert found["value"].tolist() == [10, 30]


def test_a_window_without_warnings_any_more_replaces_its_alerts_and_its_correlation() -> None:
    def stocks(pane: int, warnings: int, alerts: list[int]) -> pa.Table:
        times = [pa.array([at, at], pa.timestamp("us", "UTC")) for at in (0, 10)]
        return pa.table(
            {
                "stage": ["warnings", "mentions"], "window_start": times[0], "window_end": times[1],
                "symbol": ["A", "A"], "pane": pa.array([pane] * 2, pa.int32()), "warnings": [warnings, None],
                "alerts": pa.array([alerts, None], pa.list_(pa.int64())), "mentions": [None, 3],
            }
        )  # fmt: skip

    last = LastPanes(stock.WORKLOAD.keys)
    found = stock.finals(last, last.upsert(stocks(0, 1, [7])), SMALL)
    assert found["alerts", 0]["alerts"].tolist() == [7]
    found = stock.finals(last, last.upsert(stocks(1, 0, [])), SMALL)
    assert found["alerts", 0]["alerts"].tolist() == []
    assert found["joined", 0][["warnings", "mentions"]].to_numpy().tolist() == [[0, 3]]


def test_results_are_replaced_window_by_window(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.put({("tolls", 0): pd.DataFrame({"toll": [1, 2]}), ("tolls", 10): pd.DataFrame({"toll": [3]})})
    results.put({("tolls", 0): pd.DataFrame({"toll": [9]})})
    assert results.read()["tolls"].to_dict("list") == {"toll": [9, 3], "window_start": [0, 10]}
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".parquet"]


def test_there_is_a_name_for_each_workload_and_no_other() -> None:
    assert [load(name).name for name in NAMES] == list(NAMES)
    with pytest.raises(ValueError, match="use average, bigrams"):
        load("averge")


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 6, 7])
def test_events_of_a_list_state_come_in_batches(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "BATCH_ROWS", 3)
    schema = pa.schema([("ts", pa.timestamp("us")), ("value", pa.int64())])
    events = [(datetime(2026, 1, 1, second=n), n) for n in range(rows)]
    batches = kept.Batches(SimpleNamespace(get=lambda: iter(events)), schema)
    found = list(batches)
    assert [v for batch in found for v in batch["value"].to_pylist()] == [*range(rows)]
    assert [batch.num_rows for batch in found] == [3] * (rows // 3) + ([rows % 3] if rows % 3 else [])
    assert batches.count == rows
