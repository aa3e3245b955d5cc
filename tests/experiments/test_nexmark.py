"""The events of Nexmark have the proportions that Nexmark says, and Flink's program reads them and answers alike."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from experiments.nexmark.command import Result, ratios
from experiments.nexmark.events import (
    AUCTION,
    BID,
    DISORDER_US,
    HOT_AMONG,
    IN_FLIGHT_AUCTIONS,
    PERSON,
    SECOND_US,
    Stream,
    generate,
)
from experiments.nexmark.flink import COLUMNS, EVENT, Flink, parsed, write_events
from experiments.nexmark.queries import QUERIES
from experiments.nexmark.shared import of_kind
from experiments.shared.flink import BACKENDS


@pytest.fixture(scope="module")
def events() -> pa.Table:
    return generate(Stream(100_000, 1_000, 4, seed=3))


def test_of_fifty_events_one_is_a_person_three_are_auctions_and_the_others_bids(events: pa.Table) -> None:
    kinds = {kind: of_kind(events, kind).num_rows for kind in (PERSON, AUCTION, BID)}
    assert kinds == {PERSON: 2_000, AUCTION: 6_000, BID: 92_000}


def test_hot_ones_have_their_share(events: pa.Table) -> None:
    def share(kind: str, column: str) -> float:
        return float((of_kind(events, kind).column(column).to_numpy() % HOT_AMONG == 0).mean())

    assert share(BID, "auction") == pytest.approx(1 / 2 + 1 / 2 / HOT_AMONG, abs=0.02)
    assert share(BID, "person") == pytest.approx(3 / 4, abs=0.03)
    assert share(AUCTION, "person") == pytest.approx(3 / 4, abs=0.03)


def test_others_are_in_flight(events: pa.Table) -> None:
    bids = of_kind(events, BID)
    auctions = bids.column("auction").to_numpy()
    newest = np.maximum.accumulate(auctions)
    assert (newest - auctions <= IN_FLIGHT_AUCTIONS + DISORDER_US // SECOND_US * 60 + HOT_AMONG).all()
    assert auctions.min() == 0


def test_an_event_comes_up_to_two_seconds_after_its_time(events: pa.Table) -> None:
    times = events.column("ts").cast(pa.int64()).to_numpy()
    behind = np.maximum.accumulate(times) - times
    assert 0 < behind.max() <= DISORDER_US


@pytest.mark.slow
def test_the_truth_of_each_query_has_results(events: pa.Table) -> None:
    assert {name for name, query in QUERIES.items() if not query.truth(events)} == set()


def test_flink_reads_the_same_events(events: pa.Table, tmp_path: Path) -> None:
    write_events(events, tmp_path / "events.bin")
    found = np.fromfile(tmp_path / "events.bin", EVENT)
    assert np.bincount(found["kind"]).tolist() == [2_000, 6_000, 92_000], "people, auctions, bids"
    assert found["ts"].tolist() == events.column("ts").cast(pa.int64()).to_pylist()
    for name in ("auction", "person", "price"):
        assert found[name].tolist() == events.column(name).fill_null(-1).to_pylist()


def test_results_of_flink_are_rows_as_those_of_spark() -> None:
    at = datetime(2026, 1, 1, tzinfo=UTC)
    us = int(at.timestamp()) * 1_000_000
    assert parsed("q5", [str(us), "3", "7;9"]) == {"at": at, "most": 3, "auctions": [7, 9]}
    assert parsed("q11", [str(us), "5", "2"]) == {"window_start": at, "person": 5, "n": 2}
    assert parsed("q12", [str(us // 1000), "5", "2"])["window_start"] == at, "the clock has milliseconds"


def test_ratios_are_of_those_that_ran() -> None:
    def result(contender: str, rate: float) -> Result:
        return Result("q7", contender, 0, rate, 1.0, 1, True)

    assert ratios([result("aion", 3.0), result("spark", 2.0), result("flink-heap", 4.0)]) == [
        "q7: Aion over stock Spark 1.50",
        "q7: Aion over Flink, heap 0.75",
    ]
    assert ratios([result("spark", 2.0)]) == []


@pytest.mark.skipif("AION_FLINK" not in os.environ, reason="AION_FLINK=WHEEL names Flink's jars")
def test_flink_answers_as_all_events_at_once_do(events: pa.Table, tmp_path: Path) -> None:
    flink = Flink(Path(os.environ["AION_FLINK"]), tmp_path)
    write_events(events, tmp_path / "events.bin")
    for name in COLUMNS:  # its program has no joins
        query = QUERIES[name]
        for contender in BACKENDS:
            run = flink.run(name, contender, tmp_path / "events.bin", events.num_rows, 50_000, 2)
            assert query.newest(run.rows) == query.truth(events), (name, contender)
            assert run.steady_events_per_s > 0
