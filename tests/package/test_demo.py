"""The demo: flights as events, files for a stream, and a comparison that does find what is wrong."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

import aion
from aion.demo import command as demo
from aion.demo.flights import (
    CHOSEN_FLIGHTS,
    DAY_US,
    HOUR_US,
    SCHEMA,
    STRETCH_US,
    Flights,
    file_numbers,
    from_frame,
    load_flights,
    micros,
    write_stream,
)
from aion.demo.report import Outcome, Sample, compare, conclusion, draw, format_bytes, rated, summary
from aion.errors import ConfigError

MINUTE_US = 60_000_000


@pytest.fixture(scope="module")
def year() -> Flights:
    return load_flights()


def utc(text: str) -> pd.Timestamp:
    return pd.Timestamp(text, tz="UTC")


# -- flights ------------------------------------------------------------------------------------------


def test_a_flight_becomes_an_event() -> None:
    frame = pd.DataFrame(
        {
            "time_hour": "2013-01-01T10:00:00Z", "minute": [15, 20], "dest": "IAH", "carrier": "UA", "flight": [1, 2],
            "dep_delay": [11.0, None],
        }
    )  # fmt: skip
    data = from_frame(frame)
    assert data.table.schema == SCHEMA
    assert data.table.to_pylist() == [
        {
            "dest": "IAH", "carrier": "UA", "flight": 1, "scheduled": utc("2013-01-01 10:15"),
            "departed": utc("2013-01-01 10:26"), "dep_delay": 11,
        }
    ]  # fmt: skip
    assert data.cancelled.to_list() == [utc("2013-01-01 10:20")]


def test_the_year_is_the_one_that_is_known(year: Flights) -> None:
    assert (year.table.num_rows, len(year.cancelled)) == (328_521, 8_255)
    known = [year.table.column(name).to_pylist() for name in ("dest", "carrier")]
    data = "".join(map("".join, known)).encode() + year.scheduled_us.tobytes() + year.departed_us.tobytes()
    assert hashlib.sha256(data).hexdigest() == "5fd1d534711e8cf0d7fa0a30613aa9aeb95665e56a68175121a8734ebc387aac"
    delay_us = year.table.column("dep_delay").to_numpy() * MINUTE_US
    assert (year.scheduled_us + delay_us == year.departed_us).all()
    assert (np.diff(year.departed_us) >= 0).all()


@pytest.mark.slow
def test_choose(year: Flights) -> None:
    chosen = year.choose()
    assert chosen.table.num_rows == CHOSEN_FLIGHTS >= 100_000
    assert chosen.table.column("departed")[0].as_py() >= utc("2013-04-01")
    assert chosen.left_out() == 2_762
    assert year.choose(5).table == chosen.table.slice(0, 5)
    assert year.choose(10**9).table == year.table
    with pytest.raises(ConfigError, match="-1"):
        year.choose(-1)


# -- the stream ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_files_are_the_flights_and_a_heartbeat(year: Flights, tmp_path: Path) -> None:
    table = year.choose(3_000).table
    count = write_stream(table, tmp_path)
    paths = sorted(tmp_path.iterdir())
    assert len(paths) == count
    # Spark reads them in order of modification time.
    times = [path.stat().st_mtime for path in paths]
    assert times == sorted(set(times))
    assert all(pq.read_schema(path) == SCHEMA for path in paths)
    pieces = [pq.read_table(path) for path in paths]
    assert pa.concat_tables(pieces[:-1]).combine_chunks() == table.combine_chunks()
    assert all(np.ptp(micros(piece, "departed")) < STRETCH_US for piece in pieces[:-1])
    (heartbeat,) = pieces[-1].to_pylist()
    assert heartbeat.pop("departed") == table.column("departed")[-1].as_py() + pd.Timedelta(days=30)
    assert set(heartbeat.values()) == {None}


def test_no_flights_make_no_files(year: Flights, tmp_path: Path) -> None:
    assert write_stream(year.table.slice(0, 0), tmp_path) == 0


def test_seen_lateness_is_against_the_file_before(year: Flights) -> None:
    data = year.choose(4_000)
    files = file_numbers(data.departed_us, STRETCH_US)
    assert files[0] == 0 and set(np.diff(files)) == {0, 1}
    seen_us = data.seen_lateness_us()
    window_end_us = data.scheduled_us // HOUR_US * HOUR_US + HOUR_US
    assert (seen_us[files == 0] < -(10**17)).all()
    for file in range(1, files[-1] + 1):
        watermark = data.departed_us[files == file - 1].max()
        assert (seen_us[files == file] == watermark - window_end_us[files == file]).all()
    assert (data.lateness_us() == data.departed_us - window_end_us).all()


# -- the comparison -----------------------------------------------------------------------------------

KEY, VALUES = ["dest"], ["flights", "mean"]


def truth() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "dest": ["ATL", "ATL", "BOS"], "window_start_us": [0, HOUR_US, 0],
            "window_end_us": [HOUR_US, 2 * HOUR_US, HOUR_US],
            "flights": [2, 1, 3], "mean": [0.5, -3.0, None],
        }
    )  # fmt: skip


def right_panes() -> pd.DataFrame:
    """Two panes of the first window, of which only the later one is right; not in order."""
    last = truth().assign(pane=[1, 0, 0], kind="on_time")
    first = last.iloc[[0]].assign(pane=0, flights=1, mean=7.0)
    return pd.concat([last, first], ignore_index=True)


def test_equal_panes() -> None:
    comparison = compare("q", truth(), right_panes(), KEY, VALUES)
    assert comparison.equal and comparison.windows == 3
    assert conclusion(comparison) == ["q: the last panes of all 3 windows equal the truth"]


def faults(panes: pd.DataFrame) -> dict[str, int]:
    comparison = compare("q", truth(), panes, KEY, VALUES)
    assert not comparison.equal
    return {sort: len(frame) for sort, frame in comparison.faults.items()}


def test_a_missing_window_is_found() -> None:
    assert faults(right_panes().query("dest != 'BOS'")) == {"missing": 1}
    assert faults(right_panes().iloc[:0]) == {"missing": 3}


def test_an_extra_window_is_found() -> None:
    extra = right_panes().iloc[[0]].assign(dest="XXX")
    assert faults(pd.concat([right_panes(), extra])) == {"extra": 1}


def test_another_end_is_another_window() -> None:
    panes = right_panes()
    panes.loc[panes["dest"] == "BOS", "window_end_us"] += 1
    assert faults(panes) == {"missing": 1, "extra": 1}


@pytest.mark.parametrize(
    ("column", "row", "value"),
    [("flights", 0, 3), ("mean", 0, 0.5 + 2**-40), ("mean", 0, None), ("mean", 2, 0.0)],
)
def test_a_wrong_value_is_found(column: str, row: int, value: float | None) -> None:
    panes = right_panes()
    panes.loc[row, column] = value
    assert faults(panes) == {"different": 1}


def test_a_later_wrong_pane_is_found() -> None:
    later = right_panes().iloc[[1]].assign(pane=5, flights=9)
    assert faults(pd.concat([right_panes(), later])) == {"different": 1}


def test_a_pane_that_came_twice_is_found() -> None:
    panes = right_panes()
    assert faults(pd.concat([panes, panes.iloc[[3]]])) == {"duplicated": 2}


def test_the_conclusion_names_what_differs() -> None:
    panes = right_panes()
    panes.loc[0, "flights"] = 4
    lines = conclusion(compare("q", truth(), panes.query("dest != 'BOS'"), KEY, VALUES), dropped=7)
    text = "\n".join(lines)
    assert lines[0] == "q: does NOT equal the truth (3 windows)"
    assert "1 missing" in text and "dest=BOS" in text
    assert "1 different" in text and "flights=4" in text and "flights_truth=2" in text
    assert "1970-01-01T00:00:00Z" in text and "7 events" in text


# -- the queries --------------------------------------------------------------------------------------


def test_median_delay() -> None:
    batches = [pa.record_batch({"dep_delay": delays}) for delays in ([5, -1], [12], [2])]
    assert demo.median_delay(("UA",), SimpleNamespace(start=0, end=HOUR_US), iter(batches)) == {"median_delay": 3.5}


def pandas_truth(data: Flights, query: demo.Query) -> pd.DataFrame:
    start_us = data.scheduled_us // HOUR_US * HOUR_US
    frame = data.table.to_pandas().assign(window_start_us=start_us, window_end_us=start_us + HOUR_US)
    delays = frame.groupby([query.key, "window_start_us", "window_end_us"])["dep_delay"]
    wanted = {
        "by_destination": {"flights": "size", "mean_delay": "mean", "max_delay": "max"},
        "by_carrier": {"median_delay": "median"},
    }
    return delays.agg(**wanted[query.name]).reset_index()


@pytest.mark.slow
@pytest.mark.parametrize("query", demo.QUERIES, ids=lambda query: query.name)
def test_the_queries_without_spark(year: Flights, query: demo.Query) -> None:
    """The demo's stream, file by file with the watermark one file behind, through the local operator."""
    data = year.choose(8_000)
    files = file_numbers(data.departed_us, STRETCH_US)
    answers = []
    operator = aion.LocalOperator(
        windows=[aion.Tumbling(demo.WINDOW)], time="scheduled", key=query.key, policy="demo", completeness=True,
        **query.windowed,
    )  # fmt: skip
    with operator:
        for file in range(files[-1] + 1):
            first, last = np.flatnonzero(files == file)[[0, -1]]
            answers.append(operator.process(data.table.slice(first, last - first + 1)))
            answers.append(operator.advance(int(data.departed_us[last])))
        answers.append(operator.advance(int(data.departed_us[-1]) + 30 * DAY_US))
        counters = operator.counters
    rows = pa.concat_tables(answers)
    edges = {f"window_{edge}_us": micros(rows, f"window_{edge}") for edge in ("start", "end")}
    panes = rows.to_pandas().assign(**edges)
    assert (panes["kind"] != "dropped").all()
    comparison = compare(query.name, pandas_truth(data, query), panes, [query.key], list(query.truth))
    assert comparison.equal, conclusion(comparison)
    said = rated(panes, [query.key])
    assert len(said) > 300 and said["truth"].max() == 1
    assert (said["truth"] >= said["completeness_low"] - 1e-9).mean() > 0.9
    assert abs((said["completeness"] - said["truth"]).mean()) < 0.05
    assert counters["events"] == 8_000
    assert counters["late_events"] == (data.seen_lateness_us() >= 0).sum() > 0


# -- the report ---------------------------------------------------------------------------------------


SAID = pd.DataFrame(
    {"completeness": [0.5, 0.9, 1, 1], "completeness_low": [0.4, 0.8, 1, 1], "truth": [0.6, 0.7, 1, 0.9]}
)


def test_what_panes_said_is_compared_with_the_last_ones() -> None:
    panes = pd.DataFrame(
        {
            "dest": ["ATL", "ATL", "ATL", "BOS", "BOS"],
            "window_start_us": 0,
            "window_end_us": HOUR_US,
            "pane": [0, 1, 2, 0, 1],
            "kind": ["on_time", "late", "final", "on_time", "late"],
            "events": [6, 9, 12, 3, 4],
            "completeness": [None, 0.7, 1.0, 0.8, 0.9],
            "completeness_low": [None, 0.6, 1.0, 0.7, 0.9],
        }
    )
    said = rated(panes, ["dest"])
    assert said["completeness"].tolist() == [0.7, 0.8, 0.9]
    assert said["truth"].tolist() == [9 / 12, 3 / 4, 1.0]


def outcome(**counters: object) -> Outcome:
    comparison = compare("q", truth(), right_panes(), KEY, VALUES)
    return Outcome("q", 12.5, counters, 0, {"on_time": 3, "late": 1}, comparison, SAID)


def printed(outcomes: list[Outcome], samples: list[Sample]) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(summary(outcomes, samples, peak_m_bucket_bytes=2048))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_speed_is_that_of_the_replay() -> None:
    watch = demo.Watch(cast(Any, None), events_per_query=1000, days=110.0)
    assert watch.speed(0, 5.0) == "" == watch.speed(500, 0.0)
    assert watch.speed(500, 30.0) == " at 158,000 times real time"  # 55 days in half a minute


def test_the_counters_of_a_query_outlive_its_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the queries ends first, and its shards are closed while the other one goes on."""
    queries = {
        f"id of {query.name}": {query.name: {"counters": {"events": number}, "shards": number - 1}}
        for number, query in enumerate(demo.QUERIES, start=1)
    }
    state = SimpleNamespace(
        m_bucket_bytes=10, p_bucket_bytes=20, peak_m_bucket_bytes=30, queries=queries,
        operators={query.name: {"events": 2} for query in demo.QUERIES[1:]},
    )  # fmt: skip
    monkeypatch.setattr(aion.metrics, "state", lambda spark: state)
    watch = demo.Watch(cast(Any, None), events_per_query=1000, days=110.0)
    watch.sample(1.0)
    assert watch.counters == {"by_destination": {"events": 1}, "by_carrier": {"events": 2}}
    assert (watch.samples, watch.peak_m_bucket_bytes) == ([Sample(1.0, 10, 20)], 30)


def test_summary() -> None:
    known = outcome(events=1234, late_events=5, dropped=0, windows=7, executions={"on_time": 6, "late": 2})
    text = printed([known, outcome()], [Sample(0.0, 10, 3 << 20), Sample(1.0, 20, 1 << 20)])
    assert "1,234" in text and "3 of 3" in text and "2.0 KiB" in text and "3.0 MiB" in text and "12.5" in text
    assert "50.0%" in text and "+0.0500" in text and "50.00%" in text
    assert "–" in text  # what the second query did not tell
    wrong = compare("q", truth(), right_panes().iloc[:0], KEY, VALUES)
    assert "NO" in printed([Outcome("q", 1.0, {}, 0, {}, wrong, SAID.iloc[:0])], [])


def test_format_bytes() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 5 << 20, 3 << 30)] == [
        "0 B", "1,023 B", "1.5 KiB", "5.0 MiB", "3.0 GiB"
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("samples", [[], [Sample(0.0, 0, 0), Sample(1.0, 10, 4096), Sample(2.0, 0, 9999)]])
def test_figure(year: Flights, tmp_path: Path, samples: list[Sample]) -> None:
    data = year.choose(3_000)
    path = tmp_path / "demo.png"
    draw(
        path,
        data.lateness_us(),
        data.seen_lateness_us(),
        samples,
        {"a": {"on_time": 9}, "b": {}},
        {"a": SAID, "b": SAID.iloc[:0]},
    )
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000
    on_time = np.full(3, -1)
    draw(path, on_time, on_time, [], {"a": {"on_time": 3}}, {})
