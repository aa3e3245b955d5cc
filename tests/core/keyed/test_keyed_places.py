"""Keys and instants searched together, for times that fit into 64 bits beside the keys and for those that do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion.core.keyed.orders import ExecuteKeyed, Members
from aion.core.keyed.table import Places, Table
from aion.core.life.actions import PaneKind
from aion.core.query.plan import make_plan
from aion.execute.panes.keyed_panes import locate, placed

rows = st.lists(st.tuples(st.integers(0, 4), st.integers(-6, 6), st.integers(0, 3)), max_size=20)
asked = st.lists(st.tuples(st.integers(0, 6), st.integers(-9, 9)), min_size=1, max_size=10)


# Times as they are, and so far apart that only their ranks fit beside a key.
@pytest.mark.parametrize("scale", [1, 2**56])
@given(rows, asked)
def test_places_are_those_of_counting(scale: int, of: list[tuple[int, int, int]], at: list[tuple[int, int]]) -> None:
    codes, times, seqs = (np.array([row[i] for row in of], np.int64) for i in range(3))
    times = times * scale
    order, places = Places.ordering(codes, times, seqs)
    told = list(zip(codes.tolist(), times.tolist(), seqs.tolist(), range(len(of)), strict=True))
    assert order.tolist() == [row[3] for row in sorted(told)]
    for key, instant in at:
        one = np.array([key]), np.array([instant * scale])
        assert places.before(*one)[0] == sum((k, t) < (key, instant * scale) for k, t, *_ in told)
        assert places.after(*one)[0] == sum((k, t) <= (key, instant * scale) for k, t, *_ in told)
    beyond = np.array([1]), np.array([2**62])
    assert places.before(*beyond)[0] == sum(k <= 1 for k, *_ in told)


def test_rows_of_blocks_are_told_apart_however_many_blocks_there_were() -> None:
    """A window of an event that came first, and one of an event that came four thousand million blocks later."""
    schema = pa.schema([("ts", pa.timestamp("us")), ("k", pa.string())])
    how: dict[str, Any] = {"aggregates": None, "apply": lambda key, window, events: {}, "outputs": "n long"}
    plan = make_plan(schema, windows=aion.Count(1), time="ts", key="k", **how)
    seqs = [1, 1 + 2**32]
    blocks = [placed(pa.record_batch([[t], [k]], schema=schema), s) for t, k, s in zip([5, 6], "ab", seqs, strict=True)]
    table = pa.Table.from_batches(blocks).combine_chunks()
    one = np.ones(2, np.int64)
    windows = Table([pa.array(["b", "a"])], {"start": np.array([6, 5]), "last": np.array([6, 5])})
    members = Members(np.array([0, 1]), one, np.array(seqs[::-1]), np.zeros(2, np.int64))
    found = locate(plan, ExecuteKeyed(0, PaneKind.ON_TIME, windows, members), table)
    assert table.column("k").take(pa.array(found.rows[found.begins])).to_pylist() == ["b", "a"]
    assert found.lengths.tolist() == [1, 1]
