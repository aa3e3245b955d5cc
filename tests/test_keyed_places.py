"""Keys and instants searched together, for times that fit into 64 bits beside the keys and for those that do not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aion.keyed.table import Places

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
