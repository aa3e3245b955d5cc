"""One decision about the bound: how short it may be for what was seen and asked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aion.core.lateness.bound import AdaptiveBound
from policies.cleanup import Cleanup, Reason, decide
from tests.examples import some
from tests.late import HOUR, MINUTE, drawn, exponential

ASKED = Cleanup(initial_bound_us=HOUR)


@dataclass(frozen=True)
class Told:
    """A history with the values that a test gives."""

    edges_us: npt.NDArray[np.int64]
    later: npt.NDArray[np.float64]
    margin: float = 1.2
    unseen: float = 0.0
    watched_us: int = 10 * HOUR
    events: int = 1000
    epochs: int = 20
    late_share: float = 0.3
    of_all: bool = False
    source: str = "told"

    def at_most(self, confidence: float) -> npt.NDArray[np.float64]:
        return np.minimum(1.0, self.later * (1 + (self.margin - 1) * confidence) + 1e-3 * confidence)

    def later_than(self, lateness_us: Any) -> npt.NDArray[np.float64]:
        return np.interp(lateness_us, self.edges_us, self.later)


def told(**changes: Any) -> Told:
    edges = np.array([-1, 10, 20, 30, 40, 60]) * MINUTE
    edges[0] = -1
    return replace(Told(edges, np.array([1.0, 0.2, 0.05, 0.008, 0.001, 0.0])), **changes)


def test_the_smallest_bound_that_surely_covers_enough() -> None:
    decision = decide(ASKED, told(margin=1.0))
    assert (decision.bound_us, decision.reason) == (30 * MINUTE + 1, Reason.LEARNT)
    assert decide(ASKED, told(margin=1.3)).bound_us == 40 * MINUTE + 1, "0.8 % may be 1.1 %"
    assert decide(replace(ASKED, coverage=0.9), told()).bound_us == 20 * MINUTE + 1


def test_a_decision_says_why_and_what_is_to_be_expected() -> None:
    decision = decide(ASKED, told(margin=1.0))
    assert "covers 0.99 of late events with confidence 0.95: of 1,000" in decision.why
    assert "0.80% came later (told)" in decision.why
    assert decision.late_share == 0.3
    assert decision.lost_share == pytest.approx(0.3 * 0.008)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"watched_us": HOUR - 1}, "shorter than initial_bound"),
        ({"epochs": 7}, "only 7 stretches of time"),
        ({"unseen": 0.0011}, "may be later than anything that could be observed"),
        ({"later": np.array([1.0, 0.9, 0.8, 0.5, 0.3, 0.1])}, "do not support 0.99"),
        ({"edges_us": np.array([-1, 1, 2, 320, 400, 500]) * MINUTE}, "too short to see what comes later than"),
    ],
)
def test_what_history_does_not_support_keeps_the_conservative_bound(changes: dict[str, Any], why: str) -> None:
    asked = replace(ASKED, initial_bound_us=9 * HOUR) if "edges_us" in changes else ASKED
    changes = {"watched_us": 9 * HOUR, **changes} if "edges_us" in changes else changes
    decision = decide(asked, told(**changes))
    assert decision.reason is Reason.UNSUPPORTED and why in decision.why
    assert decision.bound_us >= asked.initial_bound_us


def test_an_initial_bound_that_loses_too_much_gives_way_to_the_longest_seen() -> None:
    asked = replace(ASKED, initial_bound_us=15 * MINUTE)
    decision = decide(asked, told(epochs=3))
    assert (decision.reason, decision.bound_us) == (Reason.UNSUPPORTED, HOUR + 1)
    assert "15 minutes would lose 12.50%" in decision.why


def test_max_bound_is_never_exceeded() -> None:
    asked = replace(ASKED, initial_bound_us=20 * MINUTE, max_bound_us=25 * MINUTE)
    decision = decide(asked, told())
    assert (decision.bound_us, decision.reason) == (25 * MINUTE, Reason.MAX_BOUND)
    assert "cut to max_bound, 25 minutes" in decision.why and "of late events are expected in time" in decision.why
    assert decide(asked, None, at_least_us=HOUR).bound_us == 25 * MINUTE


def test_max_state_trades_coverage_for_room_and_says_so() -> None:
    asked = replace(ASKED, max_state_bytes=10**9)
    decision = decide(asked, told(margin=1.0), room_us=15 * MINUTE)
    assert (decision.bound_us, decision.reason) == (15 * MINUTE, Reason.MAX_STATE)
    assert "because max_state is 1,000,000,000 bytes" in decision.why
    assert "87.50% of late events are expected in time" in decision.why
    assert decide(asked, told(margin=1.0), room_us=31 * MINUTE).reason is Reason.LEARNT
    assert decide(asked, None, room_us=15 * MINUTE).bound_us == 15 * MINUTE
    assert decide(asked, told(), room_us=-5).bound_us == 0


def test_without_a_coverage_the_bound_is_fixed() -> None:
    asked = replace(ASKED, coverage=None)
    for known in (None, told()):
        decision = decide(asked, known, at_least_us=2 * HOUR)
        assert (decision.bound_us, decision.reason) == (HOUR, Reason.FIXED)


@pytest.mark.parametrize(
    "wrong",
    [{"coverage": 0.0}, {"coverage": 1.0}, {"confidence": 1.0}, {"initial_bound_us": -1}, {"max_bound_us": 1},
     {"max_state_bytes": 0}],
)  # fmt: skip
def test_what_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Cleanup(**{"initial_bound_us": HOUR, **wrong})


SHARES = st.lists(st.floats(0, 1), min_size=1, max_size=12)


@st.composite
def histories(draw: st.DrawFn) -> Told:
    later = np.array([1.0, *sorted(draw(SHARES), reverse=True)])
    edges = np.array([-1, *sorted(draw(st.sets(st.integers(0, 3 * HOUR), min_size=len(later) - 1,
                                               max_size=len(later) - 1)))])  # fmt: skip
    return Told(
        edges,
        later,
        margin=draw(st.floats(1, 3)),
        unseen=draw(st.floats(0, 0.2)),
        watched_us=draw(st.integers(int(edges[-1]), 8 * HOUR)),
        epochs=draw(st.integers(1, 20)),
        of_all=draw(st.booleans()),
    )


COVERAGES = st.lists(st.floats(0.01, 0.999), min_size=2, max_size=6).map(sorted)


@given(
    histories(),
    COVERAGES,
    st.integers(0, 4 * HOUR),
    st.one_of(st.none(), st.integers(0, 5 * HOUR)),
    st.integers(0, 3 * HOUR),
)
def test_more_coverage_or_confidence_never_gives_a_smaller_bound(
    known: Told, shares: list[float], initial_us: int, room_us: int | None, at_least_us: int
) -> None:
    for name in ("coverage", "confidence"):
        bounds = []
        for share in shares:
            asked = replace(
                Cleanup(initial_us, coverage=0.9, confidence=0.9, max_bound_us=4 * HOUR, max_state_bytes=1),
                **{name: share},
            )
            bounds.append(decide(asked, known, at_least_us=at_least_us, room_us=room_us).bound_us)
        assert bounds == sorted(bounds), name
        assert max(bounds) <= 4 * HOUR


@some(1 / 3)
@given(st.integers(0, 20), st.sampled_from(["empirical", "auto", "weibull"]))
def test_more_coverage_never_gives_a_smaller_bound_of_what_was_learnt(seed: int, model: str) -> None:
    rng = np.random.default_rng(seed)
    lateness, at = drawn(exponential(float(rng.uniform(10, 600))), windows=int(rng.integers(30, 600)), seed=seed)
    bounds = []
    for coverage in (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999):
        bound = AdaptiveBound(Cleanup(30 * MINUTE, coverage=coverage), model=model)
        bound.lateness.merge(lateness)
        bound.advance(at, at + 1)
        bounds.append(bound.decision.bound_us)
    assert bounds == sorted(bounds)
