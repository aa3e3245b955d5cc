"""The events of Nexmark have the proportions that Nexmark says."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

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
from experiments.nexmark.queries import QUERIES, of_kind


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


def test_the_truth_of_each_query_has_results(events: pa.Table) -> None:
    assert {name for name, query in QUERIES.items() if not query.truth(events)} == set()
