"""The parts of `aion experiment ingest` that need no Spark: its events, its arithmetic, its verdicts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import typer

from experiments.ingest.command import choose, overlap, remarks, targets_for
from experiments.ingest.contenders import mean_of_events
from experiments.ingest.curve import Curve, chart, table
from experiments.ingest.settings import Settings
from experiments.shared import bench
from experiments.shared.generate import (
    SECOND_US,
    EventPlan,
    event_times,
    events,
    lateness_shares,
    payloads,
    windows_late,
    write_batches,
)

PLAN = EventPlan(events_per_batch=20_000)


def times(plan: EventPlan, index: int) -> np.ndarray:
    return events(plan, index)["ts"].cast(pa.int64()).to_numpy()


# --- events -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("past_windows", "percent"),
    [
        (1, [80.2, 19.8]),
        (5, [67.8, 16.8, 7.7, 4.0, 2.3, 1.4]),
        (10, [66.2, 16.4, 7.5, 3.9, 2.2, 1.4, 0.9, 0.6, 0.4, 0.3, 0.2]),
    ],
)
def test_lateness_shares_are_the_papers(past_windows: int, percent: list[float]) -> None:
    assert np.round(lateness_shares(past_windows) * 100, 1).tolist() == pytest.approx(percent, abs=0.11)


def test_lateness_shares_are_those_of_drawing_and_redrawing() -> None:
    i = np.maximum(np.round(np.random.default_rng(0).lognormal(0, 1, 400_000)) - 1, 0).astype(int)
    drawn = np.bincount(i[i <= 5]) / (i <= 5).sum()
    assert drawn.tolist() == pytest.approx(lateness_shares(5).tolist(), abs=0.005)


def test_late_events_are_late_by_at_least_one_window() -> None:
    late = windows_late(np.random.default_rng(0), 50_000, 5)
    shares = np.bincount(late, minlength=6) / late.size
    assert shares[0] == 0
    expected = lateness_shares(5)[1:]
    assert shares[1:].tolist() == pytest.approx((expected / expected.sum()).tolist(), abs=0.01)


@pytest.mark.parametrize("index", [0, 1, 2, 7])
@pytest.mark.parametrize("share", [0.0, 0.05, 1.0])
def test_exactly_the_late_share_is_behind_the_watermark(index: int, share: float) -> None:
    plan = dataclasses.replace(PLAN, late_share=share)
    t = event_times(plan, index, np.random.default_rng(index))
    window_end = t // plan.window_us * plan.window_us + plan.window_us
    lateness_us = plan.watermark_us(index) - window_end
    late = lateness_us[lateness_us >= 0]
    assert late.size == round(share * plan.events_per_batch)
    assert np.all(late < plan.past_windows * plan.window_us)
    on_time = t[lateness_us < 0]
    assert np.all(np.diff(on_time) >= 0), "on-time events arrive in the order of their times"
    assert np.all((on_time >= plan.start_us(index)) & (on_time < plan.start_us(index + 1)))


def test_the_watermark_is_the_newest_event_two_batches_ago_minus_the_delay() -> None:
    assert PLAN.watermark_us(5) == max(times(PLAN, 3)) - PLAN.delay_us


def test_events_have_the_asked_for_shape() -> None:
    table = events(PLAN, 0)
    assert table.schema == pa.schema(
        [("key", pa.int64()), ("ts", pa.timestamp("us", tz="UTC")), ("value", pa.float64())]
    )
    assert table.num_rows == PLAN.events_per_batch
    assert sorted(pc.unique(table["key"]).to_pylist()) == list(range(PLAN.keys))
    values = table["value"].to_numpy()
    assert np.array_equal(values, np.round(values)), "whole numbers: their sums do not hang on the order"


def test_a_seed_decides_everything_and_another_one_too() -> None:
    assert events(PLAN, 1).equals(events(PLAN, 1))
    assert not events(PLAN, 1).equals(events(PLAN, 2))
    assert not events(PLAN, 1).equals(events(dataclasses.replace(PLAN, seed=2), 1))


def test_files_are_the_same_bytes_every_time_and_read_in_order(tmp_path: Path) -> None:
    plan = EventPlan(events_per_batch=1_000, payload_bytes=100)
    first = write_batches(plan, 3, tmp_path / "a")
    again = write_batches(plan, 3, tmp_path / "b")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    modified = [path.stat().st_mtime for path in first]
    assert modified == sorted(modified)
    assert len(set(modified)) == 3, "Spark orders files by modification time: no two may share one"
    assert pq.ParquetFile(first[0]).num_row_groups == plan.row_groups
    assert pq.read_table(first[1]).drop_columns("payload").equals(events(plan, 1))


def test_files_are_kept_and_only_missing_ones_are_made(tmp_path: Path) -> None:
    plan = EventPlan(events_per_batch=100)
    (only,) = write_batches(plan, 1, tmp_path)
    inode = only.stat().st_ino
    paths = write_batches(plan, 2, tmp_path)
    assert paths[0].stat().st_ino == inode
    assert sorted(path.name for path in only.parent.iterdir()) == [path.name for path in paths]


def test_other_parameters_lie_in_another_folder() -> None:
    base = Path("data")
    others = [
        dataclasses.replace(PLAN, seed=2),
        dataclasses.replace(PLAN, payload_bytes=1),
        dataclasses.replace(PLAN, span_us=SECOND_US),
    ]
    assert len({plan.folder(base) for plan in [PLAN, *others]}) == 4


def test_payloads_have_their_size_and_do_not_compress() -> None:
    values = payloads(np.random.default_rng(0), 50, 2_304)
    assert values.type == pa.binary()
    assert pc.unique(pc.binary_length(values)).to_pylist() == [2_304]
    data = b"".join(values.to_pylist())
    assert len(pa.compress(data, codec="zstd", asbytes=True)) >= len(data)


@pytest.mark.parametrize(
    "wrong",
    [{"events_per_batch": 0}, {"late_share": 1.5}, {"past_windows": 0}, {"payload_bytes": -1}, {"keys": 0}],
)
def test_plans_that_make_no_sense_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        dataclasses.replace(PLAN, **wrong)


# --- arithmetic ---------------------------------------------------------------------------------------------


def test_contenders_take_turns() -> None:
    order = list(bench.turns(["a", "b"], runs=2, warm_ups=1))
    assert [turn.contender for turn in order] == ["a", "b"] * 3
    assert [turn.warm_up for turn in order] == [True, True, False, False, False, False]
    assert [turn.round for turn in order] == [0, 0, 1, 1, 2, 2]


def test_medians_and_ranges() -> None:
    rates = bench.summarise({"a": [3.0, 100.0, 1.0], "b": [2.0, 4.0], "c": []})
    assert rates == {"a": bench.Summary(3.0, 1.0, 100.0, 3), "b": bench.Summary(3.0, 2.0, 4.0, 2)}


@pytest.mark.parametrize(
    ("over", "at_least", "words"),
    [(24.0, 12.0, "holds"), (23.9, 12.0, "does not hold"), (1.0, None, "no target")],
)
def test_verdicts(over: float, at_least: float | None, words: str) -> None:
    rates = bench.summarise({"ours": [over], "theirs": [2.0]})
    (verdict,) = bench.verdicts([bench.Target("ours", "theirs", at_least)], rates)
    assert verdict.ratio == over / 2
    assert verdict.words == words


@pytest.mark.parametrize(
    ("ratio", "limit", "shown"),
    [(0.5, 0.45, "0.50"), (0.446, 0.45, "0.446"), (1.1008, 1.1, "1.101"), (1.1, 1.1, "1.10"), (0.446, None, "0.45")],
)
def test_a_ratio_never_looks_like_the_target_that_it_misses(ratio: float, limit: float | None, shown: str) -> None:
    assert bench.beside(ratio, limit) == shown


def test_no_verdict_on_what_did_not_run() -> None:
    assert bench.verdicts([bench.Target("a", "b", 1.0)], bench.summarise({"a": [1.0]})) == []


def batch(rows: int, ms: int) -> dict[str, object]:
    return {"numInputRows": rows, "durationMs": {"triggerExecution": ms}}


def test_steady_rate_leaves_out_the_start_and_the_empty_batches() -> None:
    progress = [batch(100, 9_000), batch(100, 500), batch(300, 1_500), batch(0, 700)]
    assert bench.steady_rate(progress, skip=1) == pytest.approx(200)
    assert bench.steady_rate(progress, skip=2) == pytest.approx(200)
    with pytest.raises(ValueError, match="run more batches"):
        bench.steady_rate(progress, skip=3)


@pytest.mark.parametrize(
    ("payload", "slide", "events", "wanted"),
    [
        (0, None, 2_000_000, {"list-state": 12.0, "stock-window": 0.7, "flink-heap": 1.2}),
        (0, None, 1_000, {"list-state": 12.0, "stock-window": 0.7}),
        (2304, None, 100_000, {"list-state": 2.0, "scan": 0.45, "stock-window": 0.7, "flink-rocksdb": 2.0}),
        (2304, None, 200_000, {"list-state": 2.0, "scan": 0.45, "stock-window": 0.7, "flink-heap": 0.8}),
        (100, None, 1_000, {"stock-window": 0.7}),
        (0, "1 second", 1_000, {"list-state": 12.0, "stock-window": 2.0}),
        (0, "5 seconds", 1_000, {"list-state": 12.0}),
    ],
)
def test_targets_belong_to_the_settings_they_were_set_for(
    payload: int, slide: str | None, events: int, wanted: dict[str, float]
) -> None:
    targets = targets_for(payload, overlap(slide), events)
    assert {target.under: target.at_least for target in targets if target.at_least is not None} == {
        "apply": 0.67,  # of unique, whatever the settings
        **wanted,
    }


@pytest.mark.parametrize("slide", ["0 seconds", "21 seconds", "1 parsec", ""])
def test_a_wrong_slide_is_refused(slide: str) -> None:
    with pytest.raises(typer.BadParameter):
        overlap(slide)


def test_contenders_are_chosen_by_name() -> None:
    assert list(choose("")) == ["partials", "apply", "stock-window", "tuned-window", "list-state", "scan"]
    assert "apply-rows" in choose("", payload_bytes=2304)
    assert "flink-mean" in choose("", flink=True) and "flink-mean" not in choose("", payload_bytes=2304, flink=True)
    assert list(choose("list-state, apply")) == ["apply", "list-state"]
    assert list(choose("", sliding=True)) == ["partials", "stock-window", "tuned-window", "scan"]
    with pytest.raises(typer.BadParameter, match="unknown: nonsense; use partials, apply"):
        choose("nonsense")
    for refused in ("list-state", "flink-heap"):
        with pytest.raises(typer.BadParameter, match="use partials, stock-window, tuned-window, scan"):
            choose(refused, sliding=True, flink=True)


def test_a_curve_has_a_fixed_and_a_marginal_cost(tmp_path: Path) -> None:
    ours = Curve("Aion", 0.05, {1_000: 400.0, 2_000_000: 700.0, 8_000_000: 1_900.0})
    assert (ours.fixed_ms, ours.marginal_ms) == (400.0, 200.0)
    curves = [
        ours,
        ours._replace(late_share=0.0),
        Curve("Spark", 0.0, {1_000: 200.0, 2_000_000: 500.0, 8_000_000: 9e3}),
    ]
    shown = bench.wide_console()
    with shown.capture() as capture:
        shown.print(table("title", curves))
    assert ["Aion", "5%", "400", "700", "1,900", "200"] in [
        [cell.strip() for cell in line.strip("│ ").split("│")] for line in capture.get().splitlines()
    ]
    chart(tmp_path / "curve.png", "title", curves)
    assert (tmp_path / "curve.png").stat().st_size > 10_000


def test_remarks_say_that_list_state_reads_less() -> None:
    settings = Settings(1_000, {"apply": 5, "list-state": 3}, 3, 1, 0, None, "standard", 2)
    assert "first 3 of the 5 files" in remarks(settings)
    assert "3,000 events" in remarks(settings)
    assert "ListState" not in remarks(dataclasses.replace(settings, batches={"apply": 5, "list-state": 5}))


def test_the_mean_an_apply_function_computes() -> None:
    def batches(*parts: list[float | None]) -> Iterator[pa.RecordBatch]:
        for part in parts:
            yield pa.record_batch({"value": pa.array(part, pa.float64())})

    assert mean_of_events((1,), None, batches([1.0, None], [], [2.0, 6.0])) == {"mean": 3.0}
    assert mean_of_events((1,), None, batches([None])) == {"mean": None}
    assert mean_of_events((1,), None, batches()) == {"mean": None}


# --- files --------------------------------------------------------------------------------------------------


def test_json_is_written_whole_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result.json"
    bench.write_json(path, {"versions": bench.versions(["pyarrow", "no-such-package"]), "at": bench.machine()})
    read = json.loads(path.read_text())
    assert read["versions"]["pyarrow"] == pa.__version__
    assert read["versions"]["no-such-package"] is None
    assert read["at"]["memory_bytes"] > 0
    assert [file.name for file in path.parent.iterdir()] == ["result.json"]


def test_the_chart_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "out" / "chart.png"
    bench.bar_chart(path, "title", {"a": "Contender A"}, {"a": [1.0, 2.0], "b": []}, "events/s")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_names_are_picked_in_the_order_that_is_known() -> None:
    assert bench.pick(" b,a ", ["a", "b", "c"]) == ["a", "b"]
    assert bench.pick("", ["a", "b", "c"]) == ["a", "b", "c"]
    assert bench.pick("", ["a", "b", "c"], ["c"]) == ["c"]
    with pytest.raises(typer.BadParameter, match="unknown: d, e; use a, b"):
        bench.pick("d,a,e", ["a", "b"])
