"""What a join reads for the rows that are due next is known when a batch ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from aion.config import load_policy
from aion.core.join.plan import ASOF, FULL, OUTER_LEFT, JoinPlan, Side
from aion.execute import joining
from aion.execute.joining import Joined
from state_backends.format.ordered_map import MemoryMap
from state_backends.thresholds import threshold

SECOND_US = 1_000_000
STEP_US = 60 * SECOND_US
ROWS = threshold(200, 10)
LEFTS = pa.schema([("k", pa.int64()), ("lt", pa.timestamp("us", "UTC")), ("v", pa.int64())])
RIGHTS = pa.schema([("k", pa.int64()), ("rt", pa.timestamp("us", "UTC")), ("w", pa.int64())])


class MapOnDisk(MemoryMap):
    """``found``: the keys of the values that were looked up and are there."""

    on_disk = True

    def __init__(self) -> None:
        super().__init__()
        self.found: set[bytes] = set()

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        self.found |= {key for key in keys if key in self.values}
        return super().get(keys)


def plan(how: str, **other: Any) -> JoinPlan:
    sides = (Side(schema, time, ("k",), False, STEP_US) for schema, time in ((LEFTS, "lt"), (RIGHTS, "rt")))
    first_us = -5 * STEP_US if how == ASOF else 0
    return JoinPlan(*sides, ("k",), first_us, first_us + 5 * STEP_US, how, **other)


def rows(schema: pa.Schema, keys: Sequence[int], times: Any) -> pa.Table:
    stamps = pa.array(times).cast(pa.timestamp("us", "UTC"))
    return pa.table([pa.array(keys, pa.int64()), stamps, pa.array(range(len(keys)), pa.int64())], schema=schema)


def batch(joined: Joined, at_us: int, random: np.random.Generator) -> tuple[int, list[bytes]]:
    """Runs a batch. Returns how many results it has, and which keys the next one needs."""
    results = sum(found.num_rows for found in joined.advance(at_us))
    for side, schema in enumerate((LEFTS, RIGHTS)):
        keys = random.integers(0, 5_000, ROWS)
        times = at_us + random.integers(0, STEP_US, len(keys))
        results += sum(found.num_rows for found in joined.arrive((side, rows(schema, keys, times))))
    results += sum(found.num_rows for found in joined.end_batch())
    return results, list(joined.save().next_keys)


@pytest.mark.parametrize(
    "join",
    [plan(OUTER_LEFT), plan(FULL), plan(ASOF), plan(FULL, emit="final"), plan(OUTER_LEFT, early=True)],
    ids=lambda join: f"{join.how}-{join.emit}-{join.early}",
)
def test_exactly_what_is_due_next_is_named(join: JoinPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_NEXT_KEYS", 1 << 16)
    random, values = np.random.default_rng(3), MapOnDisk()
    joined = Joined(join, load_policy("standard", {}), values)
    named: list[bytes] = []
    for number in range(1, 10):
        _, named = batch(joined, number * STEP_US, random)
    assert named, "rows are due"
    assert len({*named}) == len(named)
    there = {*named} & values.values.keys()  # a page may have no row
    values.found.clear()
    assert sum(found.num_rows for found in joined.advance(10 * STEP_US)) == 0
    assert sum(found.num_rows for found in joined.end_batch()) > 0
    # Nothing came, so this batch reads pages only for what is due, and the heads of the bins that they lie in.
    assert {key for key in values.found if key[2:3] == b"r"} == there


def test_no_more_is_named_than_a_request_should_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_NEXT_KEYS", 3)
    random = np.random.default_rng(3)
    joined = Joined(plan(OUTER_LEFT), load_policy("standard", {}), MapOnDisk())
    assert max(len(batch(joined, number * STEP_US, random)[1]) for number in range(1, 10)) == 3


def test_nothing_is_named_that_is_in_memory_or_is_not_to_be_fetched() -> None:
    random, never = np.random.default_rng(3), load_policy("standard", {"prestage": {"mode": "none"}})
    for policy, values in ((load_policy("standard", {}), MemoryMap()), (never, MapOnDisk())):
        joined = Joined(plan(OUTER_LEFT), policy, values)
        named = [batch(joined, number * STEP_US, random)[1] for number in range(1, 10)]
        assert not any(named)
