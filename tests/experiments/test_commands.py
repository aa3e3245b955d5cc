"""Commands that run Spark applications, in small and as a user calls them: they end, and say what they measured."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest

from experiments.nexmark.queries import QUERIES

pytestmark = [pytest.mark.proof, pytest.mark.timeout(900)]

SMALL = ("--events", "2000", "--batches", "3", "--runs", "1", "--warm-ups", "0")


def run(folder: Path, name: str, *options: str) -> tuple[str, dict[str, Any]]:
    """What the command printed, and the JSON that it wrote."""
    words = [sys.executable, "-m", "aion.cli", "experiment", name, *options, "--out", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert {path.name for path in folder.iterdir()} <= {f"{name}.json", f"{name}.png", "data"}
    return done.stdout, json.loads((folder / f"{name}.json").read_text())


def test_ingest(tmp_path: Path) -> None:
    said, record = run(tmp_path, "ingest", *SMALL, "--contenders", "partials,stock-window")
    assert [run["contender"] for run in record["runs"]] == ["partials", "stock-window"]
    assert [run["events"] for run in record["runs"]] == [6000, 6000]
    assert "Aion, partials / Spark window().agg" in said


def test_latency(tmp_path: Path) -> None:
    said, record = run(tmp_path, "latency", *SMALL[2:], "--partitions", "1,3", "--only", "partials,token")
    assert [run["place"] for run in record["runs"]] == ["partials 1", "token 1", "partials 3", "token 3"]
    assert "partials / token, 3 partitions" in said


def test_windows(tmp_path: Path) -> None:
    said, record = run(tmp_path, "windows", *SMALL, "--legs", "20")
    assert [run["contender"] for run in record["runs"]] == ["aion", "aion-no-bound", "stock"]
    first, *others = [(run["results"], run["digest"]) for run in record["runs"]]
    assert first[0] > 0 and others == [first, first]
    assert "overlap 20: Aion / overlap 20: Spark" in said


def test_joins(tmp_path: Path) -> None:
    said, record = run(tmp_path, "joins", "--rows", "200", "--batches", "16", "--runs", "1", "--open-rows", "500,2000")
    pairs = {(r["how"], r["late_share"], r["contender"]): r["with_partner"] for r in record["runs"]}
    assert pairs["left", 0.0, "aion"] == pairs["left", 0.0, "stock"] == pairs["inner", 0.0, "aion"]
    assert pairs["left", 0.05, "aion"] > pairs["left", 0.05, "stock"], "which loses late rows"
    assert "pairs there are" in said and "open orders" in said


def test_stateful(tmp_path: Path) -> None:
    said, record = run(tmp_path, "stateful", *SMALL, "--contenders", "stock,aion,floor", "--legs", "value,session")
    contenders = [(run["leg"], run["contender"]) for run in record["runs"]]
    assert contenders == [(leg, name) for leg in ("value", "session") for name in ("stock", "aion", "floor")]
    assert "value: a count: Aion / value: a count: Spark" in said


def test_overhead(tmp_path: Path) -> None:
    said, record = run(tmp_path, "overhead", *SMALL, "--queries", "partials")
    assert len(record["runs"]) == 2
    assert "partials: versions and recovery cost" in said


def test_sessions(tmp_path: Path) -> None:
    small = ("--sizes", "50,2000", "--batches", "5", "--events", "10", "--kinds", "session,record")
    said, record = run(tmp_path, "sessions", *small)
    panes = {place: cost["panes"] for place, cost in record["costs"].items()}
    assert panes["local session 2000"] == panes["worker session 2000"] == panes["spark session 2000"] == 2000
    assert panes["local record 50"] == panes["spark record 50"] > 100, "one for each instant of a key"
    assert all(cost["worker_mib"] > 0 for place, cost in record["costs"].items() if place.startswith("worker"))
    assert "spark, session: a small batch with 2,000 keys over one with 50" in said


@pytest.mark.parametrize("far", [False, True], ids=["folder", "s3"])
def test_restart(tmp_path: Path, far: bool) -> None:
    """Not the command itself, which gives each of two states a life more: what it does with one of them."""
    from experiments.chaos.places import Bucket
    from experiments.restart.command import Settings, fill, requests, start_again

    settings = Settings(size_mib=2, payload_bytes=16_384, runs=1, policy="standard", cores=2, hands_over=not far)
    with closing(Bucket()) if far else nullcontext() as bucket:
        uri = bucket.new() if bucket else None
        filled = fill(settings, tmp_path, settings.size_mib, uri)
        assert filled["state_bytes"] >= 2 << 20 and filled["files"] > 0
        again = start_again(settings, tmp_path, 1, uri)
    assert again.panes > 0 and again.first_pane_s is not None and again.first_pane_s > 0
    assert ("range" in requests(again)) == far


def test_nexmark(tmp_path: Path) -> None:
    """It ends with an error if a result is not that of all events."""
    said, record = run(tmp_path, "nexmark", "--events", "20000", "--per-second", "500", "--batches", "3")
    assert {(found["query"], found["contender"]) for found in record["results"]} == {
        (query, contender) for query in QUERIES for contender in ("aion", "spark")
    }
    assert all(found["right"] and found["rows"] for found in record["results"])
    assert "q11: Aion over stock Spark" in said
