"""`aion experiment restart`: the parts that need no Spark."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from aion import cli
from experiments.restart.command import FAR_MINUTES, Settings, report, write_file
from experiments.restart.query import KEYS, MINUTE_US, ORIGIN_US, Answer, events, size_of

SETTINGS = Settings(size_mib=1, payload_bytes=1_280, runs=1, policy="standard", cores=2)


def micros(column: pa.ChunkedArray) -> list[int]:
    return column.cast(pa.int64()).to_pylist()  # type: ignore[no-any-return]


def test_events_arrive_at_once_and_fall_into_as_many_windows() -> None:
    table = events(1_000, 500, ORIGIN_US, 8, ORIGIN_US + MINUTE_US)
    assert ORIGIN_US % MINUTE_US == 0
    assert {due // MINUTE_US for due in micros(table["due"])} == {ORIGIN_US // MINUTE_US + n for n in range(8)}
    assert set(micros(table["arrived"])) == {ORIGIN_US + MINUTE_US}
    assert table["id"].to_pylist() == list(range(1_000, 1_500))
    assert len(pc.unique(table["key"])) == KEYS


def test_no_window_of_the_bulk_ends_before_the_last_start() -> None:
    """Starts are eight at most, and let the watermark come a minute further each."""
    table = events(0, 100, ORIGIN_US + FAR_MINUTES * MINUTE_US, 8, ORIGIN_US)
    assert min(micros(table["due"])) > ORIGIN_US + 9 * MINUTE_US


def test_files_come_in_their_order_with_a_part_for_every_core(tmp_path: Path) -> None:
    for number in (0, 1):
        write_file(tmp_path, number, events(number, 5, ORIGIN_US, 1, ORIGIN_US), 2)
    first, second = sorted(tmp_path.iterdir())
    assert first.stat().st_mtime < second.stat().st_mtime
    assert pq.ParquetFile(first).num_row_groups == 2


def test_a_pane_tells_what_it_is_of() -> None:
    batches = [pa.record_batch({"payload": ["abc", "de"]}), pa.record_batch({"payload": ["f"]})]
    assert size_of((), None, iter(batches)) == {"n": 3, "bytes": 6}


def start(first_pane_s: float, batch_ms: int) -> dict[str, Any]:
    answer = Answer(
        application="local-1", first_pane_s=first_pane_s, panes=1, windows_us=[0], seconds=9.0,
        batches=[{"rows": 1, "durationMs": {"addBatch": batch_ms}}], rebuilds=2, blocks=1, disk_bytes=1,
        peak_m_bucket_bytes=1,
    )  # fmt: skip
    return asdict(answer)


@pytest.mark.parametrize(("large_s", "verdict"), [(14.0, "holds"), (16.0, "does not hold")])
def test_the_verdict_is_that_of_the_medians(tmp_path: Path, large_s: float, verdict: str) -> None:
    state = {"state_bytes": 1, "files": 1, "fill_s": 1.0}
    results = {
        "large": {**state, "starts": [start(large_s, 4_000), start(large_s, 4_000), start(99.0, 4_000)]},
        "empty": {**state, "starts": [start(10.0, 2_000), start(1.0, 2_000), start(11.0, 2_000)]},
    }
    console = Console(record=True, width=200)
    report(SETTINGS, results, {}, tmp_path, console)
    said = console.export_text()
    assert f"{large_s / 10:.2f} times the time to the first pane (target: at most 1.5; {verdict})" in said
    assert "the batch alone 2.00 times" in said
    assert json.loads((tmp_path / "restart.json").read_text())["verdict"] == verdict


def test_the_payload_is_a_number_of_digests() -> None:
    done = CliRunner().invoke(cli.app, ["experiment", "restart", "--payload", "100"])
    assert done.exit_code == 2
    assert "128" in done.output


def test_a_fork_is_only_of_states_in_folders(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        cli.app,
        ["experiment", "restart", "--fork", "--request-ms", "1", "--out", str(tmp_path)],
        env={"COLUMNS": "200"},
    )
    assert done.exit_code == 2 and "--fork" in done.output and "leave --request-ms out" in done.output
