"""The histogram of lateness that metrics show, against a count of every event."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aion.core.lateness.bound import EDGES_S, LABELS, LatenessHistogram

EDGE_US = [int(edge * 1e6) for edge in EDGES_S]
LATENESS = st.integers(-10, 2**50) | st.sampled_from([us + d for us in EDGE_US for d in (-1, 0, 1)])


@given(st.lists(st.tuples(LATENESS, st.integers(1, 50))), st.integers(0, 20))
def test_it_is_what_counting_each_event_gives(observed: list[tuple[int, int]], restart_at: int) -> None:
    histogram = LatenessHistogram()
    for number, (lateness_us, events) in enumerate(observed):
        if number == restart_at:
            histogram = LatenessHistogram(histogram.to_json())
        histogram.observe(lateness_us, events)
    each = np.repeat([max(0, us) for us, _ in observed], [n for _, n in observed]).astype(np.int64)
    up_to = np.cumsum([histogram.events[label] for label in LABELS]).tolist()
    assert up_to == [*(int((each <= us).sum()) for us in EDGE_US), len(each)]
    assert np.isclose(histogram.seconds, each.sum(dtype=float) / 1e6)
