"""The events of the four workloads, their window functions, and what happens to later panes. No Spark."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import pytest

from aion.core.query.functions import Window
from experiments.shared.generate import lateness_shares
from experiments.workloads import NAMES, bigrams, linear_road, load, stock
from experiments.workloads.chaining import LastPanes
from experiments.workloads.model import Shape, Spec

SMALL = Shape.of(Spec(1_000, 6, 40, parts=12), past_windows=3)


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
