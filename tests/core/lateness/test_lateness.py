"""What is learnt of lateness: the sketch's error, merging in any order, what is forgotten, and what nobody saw yet."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta

from aion.core.compaction import BlockFact
from aion.core.lateness.estimate import LateArrivals, arrivals
from aion.core.lateness.observe import MOST_EPOCHS, Lateness, room_us
from aion.core.lateness.sketch import EDGES_US, LatenessSketch, bin_of
from aion.core.life.actions import Arrived, WatermarkAdvanced
from aion.core.packing import pack, unpack
from aion.core.periodic import Tumbling
from aion.core.slicing.grid import SliceGrid
from aion.errors import FormatError
from tests.durations import us
from tests.late import DAY, HOUR, MINUTE, SECOND, drawn, exponential, lognormal, same_in_every_epoch
from tests.operators import bound_of, operator_of

LATE = st.lists(st.tuples(st.integers(0, 2**62), st.integers(1, 9)), min_size=1, max_size=60)


# -- the sketch ----------------------------------------------------------------------------------------------------


@given(LATE, st.floats(0.001, 1))
def test_a_quantile_is_off_by_at_most_one_percent_of_itself(late: list[tuple[int, int]], share: float) -> None:
    sketch = LatenessSketch()
    for lateness_us, events in late:
        sketch.observe(lateness_us, events)
    everyone = sorted(us for us, events in late for _ in range(events))
    true = everyone[max(0, math.ceil(share * len(everyone) * (1 - 1e-12)) - 1)]
    # Half a microsecond besides: between 99 and 101 lies a whole one.
    assert abs(sketch.quantile_us(share) - true) <= 0.01 * true * (1 + 1e-9) + 0.5


@given(st.integers(0, 2**63 - 1))
def test_a_bin_holds_its_latenesses_and_is_no_wider_than_two_percent(us: int) -> None:
    bin_ = bin_of(us)
    assert us <= EDGES_US[bin_]
    if bin_:
        low = int(EDGES_US[bin_ - 1])
        assert low < us
        assert int(EDGES_US[bin_]) == low + 1 or int(EDGES_US[bin_]) * 99 <= low * 101


def test_bins_reach_from_microseconds_to_months_and_beyond() -> None:
    assert bin_of(0) == 0 and bin_of(-5) == 0 and bin_of(2**63 - 1) == len(EDGES_US) - 1
    assert bin_of(90 * DAY) - bin_of(1) < 1400
    assert LatenessSketch().quantile_us(0.99) == 0


@given(LATE)
def test_up_to_an_edge_counts_are_exact(late: list[tuple[int, int]]) -> None:
    sketch = LatenessSketch()
    for lateness_us, events in late:
        sketch.observe(lateness_us, events)
    for bin_ in sketch.counts:
        upto = sum(n for b, n in sketch.counts.items() if b <= bin_)
        assert upto == sum(events for us, events in late if us <= EDGES_US[bin_])


@given(st.lists(st.lists(st.integers(-(2**62), 2**62), max_size=40), max_size=5))
def test_packed_columns_come_back(columns: list[list[int]]) -> None:
    found = unpack(pack(np.array(column, np.int64) for column in columns))
    assert [column.tolist() for column in found] == columns


# -- epochs --------------------------------------------------------------------------------------------------------

Observed = list[tuple[int, int, int]]
OBSERVED = st.lists(
    st.tuples(st.integers(0, 50 * DAY), st.integers(0, 2 * DAY), st.integers(1, 5)), min_size=1, max_size=25
)


def observed(events: Observed, since_us: int | None = None, half_life_us: int = DAY) -> Lateness:
    lateness = Lateness(half_life_us)
    if since_us is not None:
        lateness.forget_before(since_us)
    for end, late, count in events:
        lateness.observe_on_time(end, 3 * count)
        lateness.observe(end, end + late, count)
        lateness.observe_state(end - SECOND, end, 100 * count)
    return lateness


@given(OBSERVED, OBSERVED, OBSERVED, st.sampled_from([None, DAY, 7 * DAY]), st.sampled_from([DAY, 1000 * DAY]))
def test_shards_merge_to_the_same_in_any_order(
    a: Observed, b: Observed, c: Observed, since_us: int | None, half_life_us: int
) -> None:
    merged = []
    for order in permutations((a, b, c)):
        whole = Lateness(half_life_us)
        for shard in order:
            whole.merge(observed(shard, since_us, half_life_us))
        value = whole.to_json()
        # How many were too old when they came does depend on what came before.
        del value["forgotten"]
        merged.append(value)
    assert all(value == merged[0] for value in merged)


@given(OBSERVED, OBSERVED)
def test_merging_is_observing_everything(a: Observed, b: Observed) -> None:
    merged = observed(a, half_life_us=1000 * DAY)
    merged.merge(observed(b, half_life_us=1000 * DAY))
    together = observed(a + b, half_life_us=1000 * DAY)
    assert merged.to_json() == together.to_json()
    assert sum(n for *_, n in a + b) == sum(merged.counts.values())


@given(OBSERVED, st.sampled_from([None, DAY]))
def test_a_snapshot_comes_back(events: Observed, since_us: int | None) -> None:
    lateness = observed(events, since_us)
    value = orjson.loads(orjson.dumps(lateness.to_json()))
    again = Lateness.from_json(value, DAY)
    assert again.to_json() == lateness.to_json()
    at = max(end for end, *_ in events) + DAY
    for was, now in zip(lateness.cohorts(at), again.cohorts(at), strict=True):
        np.testing.assert_array_equal(was, now)


def test_a_snapshot_of_another_format_is_not_misread() -> None:
    assert not Lateness.from_json({"3": 5}).counts, "counts without their windows' ends teach nothing"
    with pytest.raises(FormatError, match="format 3"):
        Lateness.from_json({**Lateness().to_json(), "version": 3})
    with pytest.raises(ValueError, match="half_life_us 0"):
        Lateness(0)


@given(OBSERVED)
def test_a_snapshot_that_counts_windows_is_read_without_them(events: Observed) -> None:
    now = observed(events).to_json()
    columns = unpack(now["epochs"])
    columns.insert(2, np.full(len(columns[0]), 7))
    assert Lateness.from_json({**now, "version": 1, "epochs": pack(columns)}, DAY).to_json() == now


@given(OBSERVED)
def test_epochs_are_few_and_reach_four_half_lives_back(events: Observed) -> None:
    lateness = observed(events)
    assert max(lateness.epochs) - min(lateness.epochs) < MOST_EPOCHS
    newest = max(end for end, *_ in events)
    kept = sum(count for end, _, count in events if end > newest - 4 * DAY)
    late_events = sum(lateness.counts.values())
    assert kept <= late_events
    assert late_events + lateness.forgotten <= sum(count for *_, count in events)


def test_windows_before_the_beginning_are_not_counted() -> None:
    lateness = Lateness(DAY)
    lateness.forget_before(10 * DAY)
    lateness.observe_on_time(9 * DAY, 7)
    lateness.observe(DAY, 10 * DAY, 5)
    assert (lateness.counts, lateness.forgotten) == ({}, 5)
    # An hour that began long ago, such as a broken clock's, does not stretch the epochs.
    lateness.observe_on_time(11 * DAY, 7)
    assert lateness.width_us == 1


def test_an_epoch_counts_once_all_of_its_windows_have_ended() -> None:
    lateness, at = drawn(exponential(10), windows=640)
    width = lateness.width_us
    assert width >= MINUTE // 64
    for now in (at, at + width // 2):
        ages = lateness.cohorts(now).ages_us
        assert ages.min() >= 0
        assert len(ages) == sum((i + 1) * width - 1 <= now for i in lateness.epochs)


@pytest.mark.slow
def test_lateness_does_not_depend_on_what_the_bound_kept() -> None:
    """An operator that forgets windows at once learns the same as one that keeps them all."""
    rng = np.random.default_rng(5)
    learnt = []
    for bound in (0, 40, 10**9):
        operator = operator_of(SliceGrid((Tumbling(us(10)),)), bound_of(bound))
        rng = np.random.default_rng(5)
        for watermark in range(10, 2000, 7):
            operator.handle(WatermarkAdvanced(watermark))
            slices = (watermark - rng.exponential(60, 5)).astype(int) // 10 * 10
            operator.handle(Arrived([BlockFact(int(s), 2, 64) for s in slices]))
        assert (operator.counters.dropped > 0) == (bound < 10**9)
        learnt.append((operator.lateness.counts, operator.lateness.forgotten))
    assert learnt[0] == learnt[1] == learnt[2]


# -- what share comes later ----------------------------------------------------------------------------------------


def known_of(lateness: Lateness, at_us: int, *, of_all: bool = False) -> LateArrivals:
    found = arrivals(lateness.cohorts(at_us), of_all=of_all)
    assert found is not None
    return found


def test_nothing_is_known_of_nothing() -> None:
    lateness = Lateness()
    assert arrivals(lateness.cohorts(0)) is None
    for minute in range(100):
        lateness.observe_on_time(minute * MINUTE, 5)
    assert arrivals(lateness.cohorts(HOUR)) is None, "no late event"
    on_time = arrivals(lateness.cohorts(HOUR), of_all=True)
    assert on_time is not None and on_time.late_share == 0 and on_time.later.tolist() == [0.0]


@pytest.mark.parametrize("of_all", [False, True])
def test_without_fading_and_censoring_shares_are_shares(of_all: bool) -> None:
    late = [0, 3, 3, 8, 20, 45]
    known = known_of(*same_in_every_epoch(late, on_time=4), of_all=of_all)
    events = (4 if of_all else 0) + len(late)
    assert known.edges_us.tolist() == [-1, 0, 3, 8, 20, 45]
    assert known.later == pytest.approx([n / events for n in (6, 5, 3, 2, 1, 0)], abs=1e-9)
    assert known.late_share == pytest.approx(0.6)
    assert known.unseen == 0
    # Epochs that do not differ at all: as many independent events as there are.
    assert known.independent == pytest.approx(np.full(6, 16 * events), rel=1e-6)


@given(st.lists(st.integers(0, 49), min_size=1, max_size=40), st.floats(0.55, 0.999))
def test_its_confidence_is_that_of_order_statistics(late: list[int], confidence: float) -> None:
    known = known_of(*same_in_every_epoch(late))
    n = 16 * len(late)
    counts = [16 * sum(us > edge for us in late) for edge in known.edges_us.tolist()]
    clopper_pearson = [1.0 if k == n else beta.ppf(confidence, k + 1, n - k) for k in counts]
    assert known.at_most(confidence) == pytest.approx(clopper_pearson, rel=1e-4)


def test_windows_that_are_young_do_not_make_lateness_look_short() -> None:
    """A sixth of the windows ended less than an hour ago: who counts what has come so far, is far off."""
    late, mean = [], 30 * 60
    for seed in range(8):
        lateness, at = drawn(exponential(mean), windows=360, per_window=200, seed=seed)
        known = known_of(lateness, at)
        counts = lateness.counts
        came = sum(n for b, n in counts.items() if EDGES_US[b] > HOUR) / sum(counts.values())
        later = float(known.later_than(HOUR))
        # Without what is added for what nobody can have seen, less than 1 in 1000 here.
        late.append((later, 1 - (1 - later) / (1 - known.unseen), came))
    truth = math.exp(-HOUR / SECOND / mean)
    safe, estimated, naive = np.mean(late, axis=0)
    assert estimated == pytest.approx(truth, rel=0.04)
    assert truth < safe < 1.4 * truth
    assert naive < 0.87 * truth


def test_what_is_beyond_all_windows_ages_is_guessed_to_be_there() -> None:
    """A tail that goes on as a power law; before, near its scale, it comes down more slowly."""
    found = []
    for seed in range(10):
        lateness, at = drawn(
            lambda rng, n: 60 * rng.pareto(1.2, n), windows=120, per_window=400, late_share=0.5, seed=seed
        )
        known = known_of(lateness, at)
        found.append((known.unseen, (1 + known.watched_us / MINUTE) ** -1.2))
    unseen, truth = np.mean(found, axis=0)
    assert truth < unseen < 1.6 * truth


@pytest.mark.parametrize("together", [1, 20])
def test_events_that_are_late_together_count_less(together: int) -> None:
    """Outages: every window has as many late events in the mean, but they come in clumps of one lateness."""
    rng = np.random.default_rng(1)
    lateness = Lateness(100 * DAY)
    for window in range(4000):
        end = window * MINUTE
        lateness.observe_on_time(end, 20)
        for _ in range(int(rng.poisson(4 / together))):
            lateness.observe(end, end + int(rng.exponential(60) * SECOND), together)
    known = known_of(lateness, 4000 * MINUTE)
    worth = float(np.interp(0.05, known.later[::-1], known.independent[::-1])) / known.events
    assert (0.5 / together) < worth < (1.5 if together == 1 else 3 / together)


def test_old_observations_fade() -> None:
    half_life = 2 * DAY
    lateness, _ = drawn(lognormal(60), windows=4 * 1440, per_window=10, half_life_us=half_life)
    lateness, at = drawn(
        lognormal(600), windows=4 * 1440, per_window=10, half_life_us=half_life, into=lateness, first=4 * 1440, seed=1
    )
    known = known_of(lateness, at)
    # Two half-lives later: a fifth of the weight is the old one's.
    old, new = 0.0108, 0.5
    assert float(known.later_than(600 * SECOND)) == pytest.approx((old + 4 * new) / 5, abs=0.02)


@pytest.mark.parametrize("scale", [1 / 1024, 1024, 2**20])
def test_it_does_not_matter_what_is_a_second(scale: float) -> None:
    def history(scale: float) -> LateArrivals:
        lateness, at = drawn(
            lambda rng, n: lognormal(100)(rng, n) * scale,
            windows=2000,
            window_us=int(MINUTE * scale),
            half_life_us=int(2**40 * scale),
        )
        return known_of(lateness, at)

    one, other = history(1), history(scale)
    at = np.array([10, 100, 1000]) * SECOND
    assert other.later_than(at * scale) == pytest.approx(one.later_than(at), rel=0.03)
    assert other.watched_us == pytest.approx(one.watched_us * scale, rel=0.01)


# -- room ----------------------------------------------------------------------------------------------------------


def test_room_is_what_the_fullest_stretch_allows() -> None:
    lateness = Lateness(1000 * DAY)
    for minute in range(64):
        lateness.observe_on_time(minute << 26, 1)
        # Twice as much in the middle.
        lateness.observe_state(minute << 26, 1 << 40, 2000 if 20 <= minute < 40 else 1000)
    cohorts = lateness.cohorts(64 << 26)
    assert lateness.width_us == 1 << 26
    assert room_us(cohorts, 10_000, 0) == 5 << 26
    assert room_us(cohorts, 10_000, 2 << 26) == 3 << 26
    assert room_us(cohorts, 1000, 1 << 26) == 0
    assert room_us(cohorts, 42_000, 0) == 22 << 26
    assert room_us(cohorts, 2 * 84_000, 0) == 128 << 26, "more than there ever was: at the same rate"
    assert room_us(Lateness().cohorts(0), 1000, 0) is None
