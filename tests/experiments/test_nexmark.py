"""The events of Nexmark have the proportions that Nexmark says, and Flink answers alike."""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pytest

from experiments.nexmark.events import (
    AUCTION,
    BID,
    PERSON,
    Stream,
    generate,
)
from experiments.nexmark.flink import COLUMNS, Flink, write_events
from experiments.nexmark.queries import QUERIES
from experiments.nexmark.shared import of_kind
from experiments.shared.flink import BACKENDS


@pytest.fixture(scope="module")
def events() -> pa.Table:
    return generate(Stream(100_000, 1_000, 4, seed=3))


def test_of_fifty_events_one_is_a_person_three_are_auctions_and_the_others_bids(events: pa.Table) -> None:
    kinds = {kind: of_kind(events, kind).num_rows for kind in (PERSON, AUCTION, BID)}
    assert kinds == {PERSON: 2_000, AUCTION: 6_000, BID: 92_000}


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
