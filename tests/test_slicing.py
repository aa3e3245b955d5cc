"""The slicer against the oracle: every kind of window, any order, lateness and batches, every store, the same panes.

The cases of the slice manager (Scotty section VI) and ten mistakes of the original slicer by name.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aion.core.windows import Count, Definition, PerRecord, Punctuated, Session, Sliding, Tumbling
from aion.errors import ConfigError, IntegerOverflow, WindowError
from aion.slicing import MAX, MEAN, MIN, SUM, Kind, Slicer, slicer
from aion.slicing.stores import EAGER_FROM_SLICES, choose_store
from experiments.slicing_baselines import Buckets, FlatFat
from tests.slicing_oracle import Oracle, Row

AGGREGATES = {"sum": SUM, "min": MIN, "max": MAX}
FOREVER = 2**63 - 1

Batch = list[tuple[int, int]]
"""Times and values."""

Step = Batch | int
"""A batch, or a watermark."""

STORES: dict[str, Callable[[Sequence[Definition], int], Any]] = {
    "lazy": lambda windows, bound: Slicer(windows, AGGREGATES, bound_us=bound, store="lazy"),
    "eager": lambda windows, bound: Slicer(windows, AGGREGATES, bound_us=bound, store="eager"),
    "buckets": lambda windows, bound: Buckets(windows, AGGREGATES, bound_us=bound),
    "flatfat": lambda windows, bound: FlatFat(windows, AGGREGATES, bound_us=bound),
    "flatfat-batch": lambda windows, bound: FlatFat(windows, AGGREGATES, bound_us=bound, whole_batches=True),
}

tumblings = st.builds(Tumbling, st.integers(1, 15), st.integers(-5, 5))
slidings = st.integers(1, 15).flatmap(
    lambda size: st.builds(Sliding, st.just(size), st.integers(1, size), st.integers(-5, 5))
)
counts = st.integers(1, 6).flatmap(lambda n: st.builds(Count, st.just(n), st.integers(1, n)))
sessions = st.builds(Session, st.integers(1, 8))
definitions = tumblings | slidings | sessions | counts | st.builds(PerRecord, st.integers(1, 10))
several = st.lists(definitions, min_size=1, max_size=4)
bounds = st.sampled_from([0, 0, 1, 5, 12, 30])
batches = st.lists(st.tuples(st.integers(-30, 60), st.integers(-9, 9)), max_size=8)


@st.composite
def streams(draw: st.DrawFn) -> list[Step]:
    """Batches and watermarks in any order, events before and behind them; at the end all windows end."""
    steps: list[Step] = []
    watermark = draw(st.integers(-30, 20))
    for _ in range(draw(st.integers(1, 8))):
        batch = draw(batches)
        if draw(st.booleans()):
            batch = sorted((watermark + t // 4, v) for t, v in batch)
        steps.append(batch)
        if draw(st.integers(0, 3)):
            watermark += draw(st.integers(-3, 20))
            steps.append(watermark)
    return [*steps, FOREVER]


def arrays(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    return np.array([t for t, _ in batch], np.int64), np.array([v for _, v in batch], np.int64)


def play(operator: Any, steps: Sequence[Step]) -> list[list[Row]]:
    """The panes of each watermark, sorted."""
    found = []
    for step in steps:
        if isinstance(step, int):
            found.append(sorted(operator.advance(step).rows()))
        else:
            operator.process(*arrays(step))
    return found


def expected(windows: Sequence[Definition], bound: int, steps: Sequence[Step]) -> tuple[list[list[Row]], int]:
    oracle = Oracle(windows, bound)
    panes, dropped = [], 0
    for step in steps:
        if isinstance(step, int):
            panes.append(oracle.advance(step))
        else:
            dropped += oracle.process(step)
    return panes, dropped


def panes_of(windows: Sequence[Definition], steps: Sequence[Step], bound: int = 0) -> list[list[Row]]:
    """What both stores yield, having made sure that the oracle says so too."""
    right, dropped = expected(windows, bound, steps)
    for store in ("lazy", "eager"):
        operator = STORES[store](windows, bound)
        assert play(operator, steps) == right
        assert operator.dropped == dropped
    return right


# -- every window, every store ----------------------------------------------------------------------------


@settings(max_examples=200)
@given(several, bounds, streams())
def test_panes_are_those_of_the_definitions(windows: list[Definition], bound: int, steps: list[Step]) -> None:
    panes_of(windows, steps, bound)


@settings(max_examples=100)
@given(st.sampled_from(["buckets", "flatfat", "flatfat-batch"]), several, bounds, streams())
def test_the_baselines_yield_the_same(store: str, windows: list[Definition], bound: int, steps: list[Step]) -> None:
    assert play(STORES[store](windows, bound), steps) == expected(windows, bound, steps)[0]


@settings(max_examples=100)
@given(st.sampled_from([Slicer, Buckets, FlatFat]), several, bounds, streams())
def test_without_aggregates_there_need_be_no_values(
    kind: type[Slicer | Buckets], windows: list[Definition], bound: int, steps: list[Step]
) -> None:
    operator = kind(windows, bound_us=bound)
    found: list[list[Row]] = []
    for step in steps:
        if isinstance(step, int):
            found.append(sorted(operator.advance(step).rows()))
        else:
            operator.process(arrays(step)[0])
    assert found == [[row[:6] for row in panes] for panes in expected(windows, bound, steps)[0]]


@settings(max_examples=100)
@given(several, st.lists(st.tuples(st.integers(-200, 200), st.integers(-9, 9)), max_size=40), st.randoms())
def test_in_order_or_not_in_one_batch_or_many(windows: list[Definition], events: Batch, rng: random.Random) -> None:
    """Nothing is late before the first watermark, so order and batches must not matter; but ties go by arrival."""
    events = sorted(dict(events).items())
    in_order = play(STORES["lazy"](windows, 0), [events, FOREVER])[-1]
    shuffled = rng.sample(events, len(events))
    cut = rng.randint(0, len(events))
    for store in STORES:
        if store != "buckets":
            assert play(STORES[store](windows, 0), [shuffled[:cut], shuffled[cut:], FOREVER])[-1] == in_order


@settings(max_examples=100)
@given(several, streams())
def test_a_sink_that_follows_the_panes_ends_with_the_truth(windows: list[Definition], steps: list[Step]) -> None:
    """Keyed by window, bounds and number: a pane replaces, a retraction deletes. Nothing is later than the bound."""
    sink: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for panes in play(STORES["lazy"](windows, 10_000), steps):
        for row in sorted(panes, key=lambda row: row[4] != Kind.RETRACTED):
            if row[4] == Kind.RETRACTED:
                assert sink.pop(row[:4]) == row[5:], "what is taken back is what was given"
            else:
                sink[row[:4]] = row[5:]
    everything = [event for step in steps if not isinstance(step, int) for event in step]
    truth = expected(windows, 0, [everything, FOREVER])[0][-1]
    assert sink == {row[:4]: row[5:] for row in truth}


def test_large_batches_over_many_windows_and_sessions() -> None:
    """Sizes at which bins, tables and trees are used, against buckets, which share none of them for fixed windows."""
    rng = np.random.default_rng(6)
    windows: list[Definition] = [Tumbling(int(ms) * 1_000) for ms in np.linspace(1_000, 9_000, 60).round()]
    windows += [Sliding("7 s", "1500 ms"), Session("400 ms"), Session("900 ms")]
    operators = {name: STORES[name](windows, 1_500_000) for name in ("lazy", "eager", "buckets", "flatfat-batch")}
    sparse = np.concatenate((np.arange(0, 2_000), np.arange(3_500, 5_000), np.arange(6_100, 12_000)))
    latest = 0
    for batch in range(6):
        times = (rng.choice(sparse, 5_000) + 10_000 * batch) * 1_000 - rng.integers(0, 4_000_000, 5_000)
        values = rng.integers(-1_000, 1_000, 5_000)
        latest = max(latest, int(times.max()))
        panes = {}
        for name, operator in operators.items():
            operator.process(times, values)
            panes[name] = sorted(operator.advance(latest - 3_000_000).rows())
        assert panes["lazy"] == panes["eager"] == panes["buckets"] == panes["flatfat-batch"]
        assert {row[4] for row in panes["lazy"]} >= {0, 1} or batch == 0


# -- the slice manager (Scotty section VI.B) ------------------------------------------------------------


def session_slices(*batches: list[int], gap: int = 10) -> list[tuple[int, int, int]]:
    """(first, last, events) of the slices after these batches."""
    operator = Slicer([Session(gap)], AGGREGATES)
    for times in batches:
        operator.process(np.array(times), np.ones(len(times), np.int64))
    columns = (operator.slices[name].tolist() for name in ("first", "last", "events"))
    return list(zip(*columns, strict=True))


TWO_SESSIONS = [0, 8, 16, 20, 50, 55]


def test_case_1_1_an_event_inside_a_session_goes_into_its_slice() -> None:
    assert session_slices(TWO_SESSIONS) == [(0, 20, 4), (50, 55, 2)]
    assert session_slices(TWO_SESSIONS, [12]) == [(0, 20, 5), (50, 55, 2)]


def test_case_1_2_an_event_behind_a_session_extends_it_at_its_end() -> None:
    assert session_slices(TWO_SESSIONS, [27]) == [(0, 27, 5), (50, 55, 2)]
    assert session_slices(TWO_SESSIONS, [30]) == [(0, 30, 5), (50, 55, 2)], "exactly one gap after"


def test_case_1_3_an_event_before_a_session_moves_its_start() -> None:
    assert session_slices(TWO_SESSIONS, [43]) == [(0, 20, 4), (43, 55, 3)]
    assert session_slices(TWO_SESSIONS, [40]) == [(0, 20, 4), (40, 55, 3)], "exactly one gap before"


def test_case_2_an_event_between_two_sessions_fuses_them_and_their_slices() -> None:
    assert session_slices([0, 8, 16, 20, 35, 45]) == [(0, 20, 4), (35, 45, 2)]
    assert session_slices([0, 8, 16, 20, 35, 45], [28]) == [(0, 45, 7)]


def test_case_3_an_event_far_from_both_sessions_is_one_of_its_own() -> None:
    assert session_slices(TWO_SESSIONS, [35]) == [(0, 20, 4), (35, 35, 1), (50, 55, 2)]


@given(st.lists(st.integers(-50, 90), min_size=1, max_size=30), st.integers(1, 9), st.integers(0, 30))
def test_slices_are_as_few_as_the_sessions_of_the_smallest_gap(times: list[int], gap: int, split: int) -> None:
    truth = expected([Session(gap)], 0, [[(t, 0) for t in times], FOREVER])[0][-1]
    parts = [part for part in (times[:split], times[split:]) if part]
    assert session_slices(*parts, gap=gap) == [(start, end - gap, events) for _, _, start, end, _, events, *_ in truth]


def test_larger_gaps_add_no_slices() -> None:
    times = np.random.default_rng(7).integers(0, 3_000, 300)
    slices = []
    for gaps in ([5], [5, 7, 20, 100]):
        operator = Slicer([Tumbling(50), *map(Session, gaps)], AGGREGATES)
        operator.process(times, times)
        slices.append(len(operator.slices["edge"]))
    assert slices[0] == slices[1]


# -- ten mistakes of the original -----------------------------------------------

YEAR = 365 * 24 * 3_600 * 1_000_000


@pytest.mark.parametrize("windows", [[Tumbling("1 s")], [Sliding("5 s", "2 s"), Tumbling("1 day")], [Session("1 s")]])
def test_mistake_1_sparse_streams_lose_no_window(windows: list[Definition]) -> None:
    times = [-70 * YEAR, -69 * YEAR, 0, 3_000_000, YEAR, YEAR + 500_000, 60 * YEAR]
    at_once: list[Step] = [[(t, 1) for t in times], FOREVER]
    one_by_one: list[Step] = [step for t in times for step in ([(t, 1)], t)]
    total = panes_of(windows, at_once)[-1]
    assert sum(row[5] for row in total if row[0] == 0) >= len(times)
    assert sorted(row for panes in panes_of(windows, [*one_by_one, FOREVER]) for row in panes) == total


def test_mistake_2_the_first_watermark_skips_no_old_window() -> None:
    steps: list[Step] = [[(t, 1) for t in range(-95, 100, 10)], 5_000]
    (first,) = panes_of([Tumbling(10), Sliding(20, 10)], steps)
    assert [row[2] for row in first if row[0] == 0] == list(range(-100, 100, 10))
    assert [row[2] for row in first if row[0] == 1] == list(range(-110, 100, 10))


def test_mistake_3_a_watermark_needs_no_open_session() -> None:
    steps: list[Step] = [-5, [], 0, [(10, 1)], 50, 60, 70, [(100, 1)], 105, FOREVER]
    assert [len(panes) for panes in panes_of([Session(10)], steps)] == [0, 0, 1, 0, 0, 0, 1]
    assert len(Slicer([Session(10)], AGGREGATES).advance(7)) == 0


def test_mistake_4_an_event_exactly_one_gap_before_a_session_belongs_to_it() -> None:
    steps: list[Step] = [[(100, 1), (105, 2)], [(90, 4)], FOREVER]
    assert panes_of([Session(10)], steps)[-1] == [(0, 0, 90, 115, Kind.ON_TIME, 3, 7, 1, 4)]


@pytest.mark.parametrize("fixed", [Tumbling(10), Sliding(20, 5)])
def test_mistake_5_a_session_start_that_moves_across_a_fixed_edge_leaves_fixed_windows_alone(fixed: Definition) -> None:
    steps: list[Step] = [[(23, 1), (26, 1)], [(18, 1)], [(9, 1)], FOREVER]
    panes = panes_of([fixed, Session(12)], steps)
    assert [row for row in panes[-1] if row[0] == 1] == [(1, 0, 9, 38, Kind.ON_TIME, 4, 4, 1, 1)]
    rng = random.Random(5)
    for _ in range(100):
        events = [(rng.randint(0, 120), rng.randint(1, 9)) for _ in range(rng.randint(1, 25))]
        cuts = sorted(rng.randint(0, len(events)) for _ in range(3))
        parts = [events[a:b] for a, b in zip([0, *cuts], [*cuts, len(events)], strict=True)]
        panes_of([fixed, Session(rng.randint(3, 25))], [*parts, FOREVER])


def test_mistake_6_sliding_windows_come_when_they_end_and_once() -> None:
    window = Sliding(10, 3)
    steps: list[Step] = [[(t, 1) for t in range(0, 40)]]
    steps += list(range(1, 60))
    seen = []
    for watermark, panes in zip(range(1, 60), panes_of([window], steps), strict=True):
        assert all(row[3] == watermark for row in panes), "neither early nor late"
        seen += [row[2] for row in panes]
    assert seen == sorted(set(seen)) == list(range(-9, 40, 3))


def test_mistake_7_count_windows_come_neither_early_nor_twice_and_equal_times_stay_apart() -> None:
    steps: list[Step] = [[(5, 1), (5, 2), (5, 4), (5, 8)], 5, 6, [(7, 16)], 100, [(101, 32)], FOREVER]
    panes = panes_of([Count(2)], steps)
    assert panes[0] == [], "an event at the watermark may still come"
    assert panes[1] == [(0, 0, 5, 6, Kind.ON_TIME, 2, 3, 1, 2), (0, 1, 5, 6, Kind.ON_TIME, 2, 12, 4, 8)]
    assert panes[2] == []
    assert panes[3] == [(0, 2, 7, 102, Kind.ON_TIME, 2, 48, 16, 32)]


def test_mistake_8_a_late_event_after_a_pane_extends_the_session_instead_of_making_a_second() -> None:
    steps: list[Step] = [[(0, 1), (5, 1)], 20, [(12, 1)], 30, [(3, 1)], 31]
    panes = panes_of([Session(10)], steps, bound=50)
    assert panes[0] == [(0, 0, 0, 15, Kind.ON_TIME, 2, 2, 1, 1)]
    assert panes[1] == [(0, 0, 0, 15, Kind.RETRACTED, 2, 2, 1, 1), (0, 0, 0, 22, Kind.ON_TIME, 3, 3, 1, 1)]
    assert panes[2] == [(0, 0, 0, 22, Kind.LATE, 4, 4, 1, 1)], "the same bounds: replaced, not retracted"


def test_mistake_9_without_lateness_the_first_pane_still_comes() -> None:
    windows: list[Definition] = [Tumbling(10), Session(5), Count(1), PerRecord(5)]
    steps: list[Step] = [[(3, 1)], 10, [(4, 1)], FOREVER]
    first, second = panes_of(windows, steps, bound=0)
    assert [row[0] for row in first] == [0, 1, 2, 3]
    assert second == []


def test_mistake_10_an_event_at_the_start_of_the_oldest_slice_is_kept() -> None:
    for late in (20, 19, 0):
        steps: list[Step] = [[(20, 1), (25, 1)], [(late, 1)], FOREVER]
        panes = panes_of([Tumbling(10), Session(3)], steps)
        assert sum(row[5] for row in panes[-1] if row[0] == 0) == 3


# -- lateness ---------------------------------------------------------------------------------------------


def test_an_event_is_late_for_one_window_and_in_time_for_another() -> None:
    steps: list[Step] = [[(3, 1)], 25, [(4, 1)], FOREVER]
    first, last = panes_of([Tumbling(10), Tumbling(40)], steps, bound=5)
    assert first == [(0, 0, 0, 10, Kind.ON_TIME, 1, 1, 1, 1)]
    assert last == [(1, 0, 0, 40, Kind.ON_TIME, 2, 2, 1, 1)]


def test_what_is_too_late_for_all_windows_is_counted() -> None:
    operator = Slicer([Tumbling(10), Session(5)], AGGREGATES, bound_us=3)
    operator.advance(100)
    operator.process(np.array([10, 86, 93, 97]), np.ones(4, np.int64))
    assert operator.dropped == 2
    assert [row[:6] for row in operator.advance(1_000).rows()] == [
        (0, 0, 90, 100, Kind.LATE, 2),
        (1, 0, 93, 102, Kind.ON_TIME, 2),
    ]


def test_a_late_session_does_not_come_back_through_one_that_is_gone() -> None:
    """The slices of a session that is gone are still there for a longer window, but no session may use them."""
    steps: list[Step] = [[(0, 1), (5, 1)], 20, [(14, 1)], [(13, 1)], 25, FOREVER]
    panes = panes_of([Session(10), Tumbling(1_000)], steps, bound=2)
    assert [row[2:6] for row in panes[1] if row[0] == 0] == [(13, 24, Kind.ON_TIME, 2)]
    assert [row[5] for row in panes[-1] if row[0] == 1] == [4]


def test_a_watermark_never_goes_back() -> None:
    steps: list[Step] = [[(5, 1)], 20, 3, [(7, 1)], 3, FOREVER]
    panes = panes_of([Tumbling(10)], steps, bound=100)
    assert [len(rows) for rows in panes] == [1, 0, 1, 0]


# -- what is kept -----------------------------------------------------------------------------------------


def test_slices_go_when_no_window_needs_them() -> None:
    """Long enough for the table to be moved in its buffers, again and again."""
    windows = [Tumbling(10), Sliding(40, 5), Session(3)]
    operators = [Slicer(windows, AGGREGATES, bound_us=10, store=store) for store in ("lazy", "eager")]
    for at in range(0, 20_000, 100):
        panes = []
        for operator in operators:
            operator.process(np.arange(at, at + 90), np.arange(at, at + 90) % 7)
            panes.append(operator.advance(at + 90).rows())
            assert len(operator.slices["edge"]) < 60
        assert panes[0] == panes[1]
        for definition, _, start, end, _, _, total, *_ in panes[0]:
            assert definition == 2 or total == sum(t % 7 for t in range(max(start, 0), end) if t % 100 < 90)


def test_a_session_that_never_ends_keeps_few_slices() -> None:
    """Edges of windows that are gone do not divide it any more."""
    operator = Slicer([Tumbling(10), Session(30)], AGGREGATES)
    panes = []
    for at in range(0, 40_000, 100):
        operator.process(np.arange(at, at + 100), np.ones(100, np.int64))
        panes += operator.advance(at + 100).rows()
        assert len(operator.slices["edge"]) <= 2 * slicer._SETTLED + 20
    panes += operator.advance(FOREVER).rows()
    assert [row[2:7] for row in panes if row[0] == 1] == [(0, 39_999 + 30, Kind.ON_TIME, 40_000, 40_000)]
    assert len([row for row in panes if row[0] == 0]) == 4_000


def test_the_log_of_events_goes_as_well() -> None:
    operator = Slicer([Count(10, 3), PerRecord(20)], AGGREGATES, bound_us=5)
    for at in range(0, 20_000, 100):
        operator.process(np.arange(at, at + 100), np.ones(100, np.int64))
        operator.advance(at + 100)
    assert operator._log is not None
    assert len(operator._log.rows) < 200


def test_a_far_jump_of_the_watermark_does_not_name_empty_windows() -> None:
    operator = Slicer([Tumbling(1), Tumbling("1 day")], {})
    operator.process(np.array([0]))
    operator.process(np.array([YEAR]))
    assert len(operator.advance(2 * YEAR)) == 4


# -- aggregates -------------------------------------------------------------------------------------------


def test_results_are_lowered_and_floats_are_floats() -> None:
    operator = Slicer([Tumbling(10)], {"mean": MEAN, "sum": SUM, "low": MIN})
    operator.process(np.array([1, 2, 11]), np.array([1.5, 2.5, np.nan], np.float32))
    rows = operator.advance(20).rows()
    assert rows[0][5:] == (2, 2.0, 4.0, 1.5)
    assert rows[1][5] == 1 and all(np.isnan(value) for value in rows[1][6:])


def test_counting_needs_no_values() -> None:
    operator = Slicer([Tumbling(10), Session(2), Count(2)])
    operator.process(np.array([1, 2, 11]))
    assert operator.advance(FOREVER).rows() == [
        (0, 0, 0, 10, 0, 2), (0, 0, 10, 20, 0, 1), (1, 0, 1, 4, 0, 2), (1, 0, 11, 13, 0, 1), (2, 0, 1, 3, 0, 2),
    ]  # fmt: skip


@pytest.mark.parametrize("store", ["lazy", "eager"])
def test_a_window_whose_sum_leaves_64_bits_is_an_error_and_no_other(store: str) -> None:
    operator = Slicer([Tumbling(1), Tumbling(4)], {"sum": SUM}, store=store)
    operator.process(np.array([0, 1, 2]), np.array([2**62, 2**62, -1]))
    assert [row[6] for row in operator.advance(3).rows()] == [2**62, 2**62, -1]
    operator.process(np.array([3]), np.array([-5]))
    assert [row[6] for row in operator.advance(4).rows() if row[0] == 1] == [2**63 - 6]
    operator.process(np.array([4, 5]), np.array([2**62, 2**62]))
    with pytest.raises(IntegerOverflow):
        operator.advance(8)


# -- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("windows", "options", "error"),
    [
        ([], {}, WindowError),
        ([Punctuated("marker")], {}, WindowError),
        (["1 minute"], {}, WindowError),
        ([Tumbling(2**61)], {}, WindowError),
        ([Tumbling(1)], {"store": "heap"}, ConfigError),
        ([Tumbling(1)], {"bound_us": -1}, ConfigError),
    ],
)
def test_what_cannot_be_sliced_is_refused(windows: Any, options: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        Slicer(windows, AGGREGATES, **options)


def test_batches_that_do_not_fit_are_refused() -> None:
    operator = Slicer([Tumbling(1)], AGGREGATES)
    operator.process(np.array([1]), np.array([1]))
    for times, values in (([1, 2], [1]), ([1], [0.5]), ([2**61], [1]), ([-(2**61)], [1])):
        with pytest.raises(ConfigError):
            operator.process(np.array(times), np.array(values))
    for store in STORES:
        with pytest.raises(ConfigError, match="sum, min, max"):
            STORES[store]([Tumbling(1)], 0).process(np.array([1]))
    with pytest.raises(ConfigError, match="sum, min, max"):
        operator.process(np.array([1]))
    assert [row[5] for row in operator.advance(10).rows()] == [1]


def test_very_long_windows_over_fine_slices_get_a_tree() -> None:
    assert choose_store([Tumbling("1 s"), Sliding("1 hour", "1 s"), Session("1 s")]) == "lazy"
    assert choose_store([Sliding(EAGER_FROM_SLICES * 10, 10)]) == "eager"
    assert Slicer([Sliding(EAGER_FROM_SLICES * 10, 10), Count(5)]).store == "eager"
    assert Slicer([Session(5), PerRecord(10**12)]).store == "lazy"
