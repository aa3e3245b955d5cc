"""LocalOperator against the oracle of all definitions: every kind of window together, any order, lateness, batches.

The cases of Scotty's slice manager (section VI), and ten mistakes of the original slicer by name. Each runs without
keys and with a key, lazily and eagerly.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.config import Policy, load_policy
from aion.core.windows import Count, Definition, PerRecord, Session, Sliding, Tumbling
from aion.errors import IntegerOverflow, WindowError
from tests.examples import some
from tests.keyed_oracle import Event
from tests.slicing_oracle import Dropped, Oracle, Pane

FOREVER = 10**17
YEAR = 365 * 24 * 3_600 * 1_000_000
AGGREGATES = {"total": A.sum("value"), "low": A.min("value"), "high": A.max("value")}
KEYS = {"no key": None, "one key": "key"}

Step = list[Event] | int
"""A batch, or a watermark."""


def policy(bound: int, preset: str = "memory_only", aggregation: str = "auto") -> Policy:
    """A fixed bound; late events trigger at once."""
    late = {"lateness.initial_bound": f"{bound} microseconds", "lateness.coverage": None}
    return load_policy(preset, {**late, "trigger.kind": "every_batch", "execution.aggregation": aggregation})


def table(events: Sequence[Event]) -> pa.Table:
    times = pa.array([event.t for event in events], pa.int64()).cast(pa.timestamp("us"))
    values = pa.array([event.value for event in events], pa.int64())
    return pa.table({"key": pa.array([event.key for event in events], pa.int64()), "ts": times, "value": values})


class Player:
    """A LocalOperator over steps. What a batch triggers is asked for at once, by the same watermark again."""

    def __init__(
        self, windows: Sequence[Definition], bound: int = 0, key: str | None = None, aggregation: str = "auto"
    ) -> None:
        self.operator = aion.LocalOperator(
            windows={str(n): window for n, window in enumerate(windows)},
            time="ts", key=key, aggregates=AGGREGATES, policy=policy(bound, aggregation=aggregation),
        )  # fmt: skip
        self.dropped: Dropped = Counter()
        self._watermark: int | None = None

    def __enter__(self) -> Player:
        return self

    def __exit__(self, *_: object) -> None:
        self.operator.close()

    def step(self, step: Step) -> list[Pane]:
        """What comes out, sorted."""
        if isinstance(step, int):
            self._watermark = step if self._watermark is None else max(step, self._watermark)
            return sorted(self._panes(self.operator.advance(step)), key=str)
        panes = self._panes(self.operator.process(table(step)))
        if self._watermark is not None:
            panes += self._panes(self.operator.advance(self._watermark))
        return sorted(panes, key=str)

    def _panes(self, found: pa.Table) -> list[Pane]:
        panes = []
        for name in ("window_start", "window_end"):
            if name in found.schema.names:
                at = found.schema.get_field_index(name)
                found = found.set_column(at, name, found.column(name).cast(pa.int64()))
        for row in found.to_pylist():
            number, key = int(row["window"]), row.get("key", 0)
            if row["kind"] == "dropped":
                self.dropped[number, key] += row["events"]
                continue
            values = (row["events"], *(row[name] for name in AGGREGATES))
            panes.append(Pane(number, key, row["window_start"], row["window_end"], row["kind"], *values))
        return panes


def expected(windows: Sequence[Definition], bound: int, steps: Sequence[Step]) -> tuple[list[list[Pane]], Dropped]:
    """What the oracle says of each step; of what is dropped, in all."""
    oracle = Oracle(windows, bound)
    found: list[list[Pane]] = []
    dropped: Dropped = Counter()
    for step in steps:
        if isinstance(step, int):
            found.append(oracle.advance(step))
        else:
            dropped += oracle.process(step)
            found.append([] if oracle.watermark is None else oracle.advance(oracle.watermark))
    return found, dropped


def check(windows: Sequence[Definition], bound: int, steps: Sequence[Step], **how: Any) -> list[list[Pane]]:
    """The panes of each step, having made sure that the oracle says so, too."""
    right, dropped = expected(windows, bound, steps)
    with Player(windows, bound, **how) as player:
        for number, (step, panes) in enumerate(zip(steps, right, strict=True)):
            assert player.step(step) == panes, f"step {number}: {step}"
        assert player.dropped == dropped
    return right


def panes_of(windows: Sequence[Definition], steps: Sequence[Step], bound: int = 0) -> list[list[Pane]]:
    """The panes of each step, which are the same without keys and with one, lazily and eagerly."""
    for key in KEYS.values():
        for aggregation in ("lazy", "eager"):
            found = check(windows, bound, steps, key=key, aggregation=aggregation)
    return found


def batch(*events: tuple[int, int]) -> list[Event]:
    """Events of one key, as times and values."""
    return [Event(0, t, value) for t, value in events]


def instants(*times: int) -> list[Event]:
    return batch(*((t, 1) for t in times))


def brief(panes: Sequence[Pane], definition: int | None = None) -> list[tuple[int, int, str, int]]:
    return [(p.start, p.end, p.kind, p.events) for p in panes if definition in (None, p.definition)]


# -- every window together --------------------------------------------------------------------------------

tumblings = st.builds(Tumbling, st.integers(1, 15), st.integers(-5, 5))
slidings = st.integers(1, 15).flatmap(
    lambda size: st.builds(Sliding, st.just(size), st.integers(1, size), st.integers(-5, 5))
)
counts = st.integers(1, 6).flatmap(lambda n: st.builds(Count, st.just(n), st.integers(1, n)))
sessions = st.builds(Session, st.integers(1, 8))
of_partials = tumblings | slidings | sessions
of_any_kind = of_partials | counts | st.builds(PerRecord, st.integers(1, 10))
bounds = st.sampled_from([0, 0, 1, 5, 12, 30])


def several(kinds: st.SearchStrategy[Definition]) -> st.SearchStrategy[list[Definition]]:
    return st.lists(kinds, min_size=1, max_size=4, unique_by=repr)


@st.composite
def sessions_among_others(draw: st.DrawFn) -> list[Definition]:
    """Several gaps, a tumbling and a sliding window."""
    gaps = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3, unique=True))
    return [draw(tumblings), draw(slidings.filter(lambda w: w.slide_us < w.size_us)), *map(Session, gaps)]


@st.composite
def streams(draw: st.DrawFn, keys: int) -> list[Step]:
    """Batches and watermarks in any order, events before and behind them; at the end all windows end."""
    events = st.builds(Event, st.integers(0, keys - 1), st.integers(-30, 60), st.integers(-9, 9))
    steps: list[Step] = []
    watermark = draw(st.integers(-30, 20))
    for _ in range(draw(st.integers(1, 8))):
        batch = draw(st.lists(events, max_size=8))
        if draw(st.booleans()):
            batch = sorted((event._replace(t=watermark + event.t // 4) for event in batch), key=lambda e: e.t)
        steps.append(batch)
        if draw(st.integers(0, 3)):
            watermark += draw(st.integers(-3, 20))
            steps.append(watermark)
    return [*steps, FOREVER]


ways = st.sampled_from(["lazy", "eager"])
key_counts = st.sampled_from([1, 3])


@given(sessions_among_others(), bounds, key_counts, ways, st.data())
def test_sessions_of_several_gaps_among_fixed_and_sliding_windows(
    windows: list[Definition], bound: int, keys: int, way: str, data: st.DataObject
) -> None:
    check(windows, bound, data.draw(streams(keys)), key="key" if keys > 1 else None, aggregation=way)


@pytest.mark.parametrize("kinds", [of_partials, of_any_kind], ids=["of partials", "of any kind"])
@given(bound=bounds, keys=key_counts, way=ways, data=st.data())
def test_panes_are_those_of_the_definitions(
    kinds: st.SearchStrategy[Definition], bound: int, keys: int, way: str, data: st.DataObject
) -> None:
    windows, steps = data.draw(several(kinds)), data.draw(streams(keys))
    check(windows, bound, steps, key="key" if keys > 1 else None, aggregation=way)


@some(1 / 2)
@given(
    several(of_any_kind),
    st.lists(st.tuples(st.integers(-200, 200), st.integers(-9, 9)), max_size=40),
    st.randoms(use_true_random=False),
)
def test_in_order_or_not_in_one_batch_or_many(
    windows: list[Definition], events: list[tuple[int, int]], rng: random.Random
) -> None:
    """Nothing is late before the first watermark, so order and batches must not matter; but ties go by arrival."""
    in_order = batch(*sorted(dict(events).items()))
    shuffled = rng.sample(in_order, len(in_order))
    cut = rng.randint(0, len(events))
    results = []
    for steps in ([in_order], [shuffled[:cut], shuffled[cut:]]):
        with Player(windows) as player:
            for step in steps:
                assert player.step(step) == []
            results.append(player.step(FOREVER))
    assert results[0] == results[1]


@some(1 / 2)
@given(several(of_partials | st.builds(PerRecord, st.integers(1, 10))), streams(2))
def test_a_sink_that_follows_the_panes_ends_with_the_truth(windows: list[Definition], steps: list[Step]) -> None:
    """Keyed by window and bounds: a pane replaces, a retraction deletes. Nothing is later than the bound."""
    sink: dict[tuple[Any, ...], Pane] = {}
    with Player(windows, 10_000, "key") as player:
        for step in steps:
            for pane in sorted(player.step(step), key=lambda pane: pane.kind != "retracted"):
                if pane.kind == "retracted":
                    assert sink.pop(pane[:4]), "what is taken back was given"
                else:
                    sink[pane[:4]] = pane
    everything = [event for step in steps if not isinstance(step, int) for event in step]
    truth = expected(windows, 0, [everything, FOREVER])[0][-1]
    assert {at: pane[5:] for at, pane in sink.items()} == {pane[:4]: pane[5:] for pane in truth}


@pytest.mark.parametrize(
    "key", [pytest.param(key, id=name, marks=[pytest.mark.proof] * (key is None)) for name, key in KEYS.items()]
)
def test_large_batches_over_many_windows_and_sessions(key: str | None) -> None:
    """Sizes at which tables, trees and stretches of windows are used: lazily, eagerly and as is chosen the same."""
    rng = np.random.default_rng(6)
    windows: list[Definition] = [Tumbling(int(ms) * 1_000) for ms in np.linspace(1_000, 9_000, 60).round()]
    windows += [Sliding("7 s", "1500 ms"), Session("400 ms"), Session("900 ms")]
    players = [Player(windows, 1_500_000, key, aggregation) for aggregation in ("auto", "lazy", "eager")]
    sparse = np.concatenate(
        (np.arange(2_000), np.arange(3_500, 5_000), np.arange(6_100, 8_000), np.arange(9_400, 12_000))
    )
    latest, kinds = 0, set()
    last: dict[tuple[Any, ...], Pane] = {}
    seen, judged = [], []
    watermark = -(10**18)
    for number in range(6):
        times = (rng.choice(sparse, 2_000) + 10_000 * number) * 1_000
        # Late events, most of them of the batch before; some are where no session was that had not ended.
        times[:200] -= 10_000_000
        times[:5] = (8_300 + 10_000 * (number - 1)) * 1_000
        rng.shuffle(times)
        values_of = rng.integers(-1_000, 1_000, 2_000).tolist()
        events = [Event(0, t, v) for t, v in zip(times.tolist(), values_of, strict=True)]
        seen += events
        judged += [watermark] * len(events)
        latest = max(latest, int(times.max()))
        watermark = FOREVER if number == 5 else latest - 3_000_000
        found = [[player.step(events), player.step(watermark)] for player in players]
        assert found[0] == found[1] == found[2]
        for pane in (pane for panes in found[0] for pane in panes):
            last[pane[:4]] = pane
            kinds.add(pane.kind)
    for player in players:
        player.operator.close()
    assert kinds == {"on_time", "late", "retracted"}
    times_us, values, at = np.array([e.t for e in seen]), np.array([e.value for e in seen]), np.array(judged)
    for definition, window in enumerate(windows[:60]):
        assert isinstance(window, Tumbling)
        starts = times_us // window.size_us * window.size_us
        in_time = starts + window.size_us + 1_500_000 > at
        totals = {start: int(values[in_time & (starts == start)].sum()) for start in np.unique(starts[in_time])}
        assert {pane.start: pane.total for pane in last.values() if pane.definition == definition} == totals


# -- the slice manager (Scotty section VI.B) --------------------------------------------------------------


def sessions_after(*batches: list[int], gap: int = 10) -> list[tuple[int, int, int]]:
    """(first, last, events) of the sessions after these batches."""
    steps: list[Step] = [*(instants(*times) for times in batches), FOREVER]
    return [(pane.start, pane.end - gap, pane.events) for pane in sorted(panes_of([Session(gap)], steps)[-1])]


TWO_SESSIONS = [0, 8, 16, 20, 50, 55]


def test_case_1_1_an_event_inside_a_session_goes_into_its_slice() -> None:
    assert sessions_after(TWO_SESSIONS) == [(0, 20, 4), (50, 55, 2)]
    assert sessions_after(TWO_SESSIONS, [12]) == [(0, 20, 5), (50, 55, 2)]


def test_case_1_2_an_event_behind_a_session_extends_it_at_its_end() -> None:
    assert sessions_after(TWO_SESSIONS, [27]) == [(0, 27, 5), (50, 55, 2)]
    assert sessions_after(TWO_SESSIONS, [30]) == [(0, 30, 5), (50, 55, 2)], "exactly one gap after"


def test_case_1_3_an_event_before_a_session_moves_its_start() -> None:
    assert sessions_after(TWO_SESSIONS, [43]) == [(0, 20, 4), (43, 55, 3)]
    assert sessions_after(TWO_SESSIONS, [40]) == [(0, 20, 4), (40, 55, 3)], "exactly one gap before"


def test_case_2_an_event_between_two_sessions_fuses_them_and_their_slices() -> None:
    assert sessions_after([0, 8, 16, 20, 35, 45]) == [(0, 20, 4), (35, 45, 2)]
    assert sessions_after([0, 8, 16, 20, 35, 45], [28]) == [(0, 45, 7)]


def test_case_3_an_event_far_from_both_sessions_is_one_of_its_own() -> None:
    assert sessions_after(TWO_SESSIONS, [35]) == [(0, 20, 4), (35, 35, 1), (50, 55, 2)]


def test_larger_gaps_add_no_slices() -> None:
    times = np.random.default_rng(7).integers(0, 3_000, 300).tolist()
    kept = []
    for gaps in ([5], [5, 7, 20, 100]):
        with Player([Tumbling(50), *map(Session, gaps)]) as player:
            player.step(instants(*times))
            kept.append(player.operator.store.stats().m_bucket_bytes)
    assert kept[0] == kept[1]


# -- ten mistakes of the original -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "windows", [[Tumbling("1 s")], [Sliding("5 s", "2 s"), Tumbling("1 day")], [Session("1 s")]], ids=str
)
def test_mistake_1_sparse_streams_lose_no_window(windows: list[Definition]) -> None:
    times = [-70 * YEAR, -69 * YEAR, 0, 3_000_000, YEAR, YEAR + 500_000, 60 * YEAR]
    at_once: list[Step] = [instants(*times), FOREVER]
    one_by_one: list[Step] = [step for t in times for step in (instants(t), t)]
    total = panes_of(windows, at_once)[-1]
    assert sum(pane.events for pane in total if pane.definition == 0) >= len(times)
    assert sorted((p for panes in panes_of(windows, [*one_by_one, FOREVER]) for p in panes), key=str) == total


def test_mistake_2_the_first_watermark_skips_no_old_window() -> None:
    first = panes_of([Tumbling(10), Sliding(20, 10)], [instants(*range(-95, 100, 10)), 5_000])[-1]
    assert sorted(pane.start for pane in first if pane.definition == 0) == list(range(-100, 100, 10))
    assert sorted(pane.start for pane in first if pane.definition == 1) == list(range(-110, 100, 10))


def test_mistake_3_a_watermark_needs_no_open_session() -> None:
    steps: list[Step] = [-5, [], 0, instants(10), 50, 60, 70, instants(100), 105, FOREVER]
    assert [len(panes) for panes in panes_of([Session(10)], steps)] == [0, 0, 0, 0, 1, 0, 0, 0, 0, 1]
    with Player([Session(10)]) as player:
        assert player.step(7) == []


def test_mistake_4_an_event_exactly_one_gap_before_a_session_belongs_to_it() -> None:
    steps: list[Step] = [batch((100, 1), (105, 2)), batch((90, 4)), FOREVER]
    assert panes_of([Session(10)], steps)[-1] == [Pane(0, 0, 90, 115, "on_time", 3, 7, 1, 4)]


@pytest.mark.parametrize("fixed", [Tumbling(10), Sliding(20, 5)], ids=str)
def test_mistake_5_a_session_start_that_moves_across_a_fixed_edge_leaves_fixed_windows_alone(fixed: Definition) -> None:
    steps: list[Step] = [instants(23, 26), instants(18), instants(9), FOREVER]
    panes = panes_of([fixed, Session(12)], steps)[-1]
    assert [pane for pane in panes if pane.definition == 1] == [Pane(1, 0, 9, 38, "on_time", 4, 4, 1, 1)]
    rng = random.Random(5)
    for number in range(20):
        events = batch(*((rng.randint(0, 120), rng.randint(1, 9)) for _ in range(rng.randint(1, 25))))
        cuts = sorted(rng.randint(0, len(events)) for _ in range(3))
        parts = [events[a:b] for a, b in zip([0, *cuts], [*cuts, len(events)], strict=True)]
        way = {"key": "key" if number % 2 else None, "aggregation": "lazy" if number % 4 < 2 else "eager"}
        check([fixed, Session(rng.randint(3, 25))], 0, [*parts, FOREVER], **way)


def test_mistake_6_sliding_windows_come_when_they_end_and_once() -> None:
    panes = panes_of([Sliding(10, 3)], [instants(*range(40)), *range(1, 60)])
    seen = []
    for watermark, found in enumerate(panes):
        assert all(pane.end == watermark for pane in found), "neither early nor late"
        seen += [pane.start for pane in found]
    assert seen == sorted(set(seen)) == list(range(-9, 40, 3))


def test_mistake_7_count_windows_come_neither_early_nor_twice_and_equal_times_stay_apart() -> None:
    steps: list[Step] = [
        batch((5, 1), (5, 2), (5, 4), (5, 8)), 5, 6, batch((7, 16)), 100, batch((101, 32)), FOREVER,
    ]  # fmt: skip
    panes = panes_of([Count(2)], steps)
    assert panes[1] == [], "an event at the watermark may still come"
    assert panes[2] == [Pane(0, 0, 5, 6, "on_time", 2, 12, 4, 8), Pane(0, 0, 5, 6, "on_time", 2, 3, 1, 2)]
    assert panes[4] == []
    assert panes[6] == [Pane(0, 0, 7, 102, "on_time", 2, 48, 16, 32)]


def test_mistake_8_a_late_event_after_a_pane_extends_the_session_instead_of_making_a_second() -> None:
    steps: list[Step] = [batch((0, 1), (5, 1)), 20, batch((12, 1)), 30, batch((3, 1)), 31]
    panes = panes_of([Session(10)], steps, bound=50)
    assert panes[1] == [Pane(0, 0, 0, 15, "on_time", 2, 2, 1, 1)]
    assert panes[2] == [], "the session goes on up to 22"
    assert panes[3] == [Pane(0, 0, 0, 15, "retracted"), Pane(0, 0, 0, 22, "on_time", 3, 3, 1, 1)]
    assert panes[4] == [Pane(0, 0, 0, 22, "late", 4, 4, 1, 1)], "the same bounds: replaced, not retracted"
    assert panes[5] == []


def test_mistake_9_without_lateness_the_first_pane_still_comes() -> None:
    windows: list[Definition] = [Tumbling(10), Session(5), Count(1), PerRecord(5)]
    _, first, *rest = panes_of(windows, [instants(3), 10, instants(4), FOREVER])
    assert [pane.definition for pane in first] == [0, 1, 2, 3]
    assert rest == [[], []]


def test_mistake_10_an_event_at_the_start_of_the_oldest_slice_is_kept() -> None:
    for late in (20, 19, 0):
        panes = panes_of([Tumbling(10), Session(3)], [instants(20, 25), instants(late), FOREVER])
        assert sum(pane.events for pane in panes[-1] if pane.definition == 0) == 3


# -- lateness ---------------------------------------------------------------------------------------------


def test_an_event_is_late_for_one_window_and_in_time_for_another() -> None:
    _, first, _, last = panes_of([Tumbling(10), Tumbling(40)], [instants(3), 25, instants(4), FOREVER], bound=5)
    assert first == [Pane(0, 0, 0, 10, "on_time", 1, 1, 1, 1)]
    assert last == [Pane(1, 0, 0, 40, "on_time", 2, 2, 1, 1)]


def test_what_is_too_late_for_all_windows_is_counted() -> None:
    windows = [Tumbling(10), Session(5)]
    steps: list[Step] = [100, instants(10, 86, 93, 97), 1_000]
    _, late, rest = panes_of(windows, steps, bound=3)
    assert brief([*late, *rest]) == [(90, 100, "late", 2), (93, 102, "on_time", 2)]
    assert expected(windows, 3, steps)[1] == {(0, 0): 2, (1, 0): 2}
    with Player(windows, 3) as player:
        for step in steps:
            player.step(step)
        assert player.operator.counters["dropped"] == 2


def test_a_late_session_does_not_come_back_through_one_that_is_gone() -> None:
    """The slices of a session that is gone are still there for a longer window, but no session may use them."""
    steps: list[Step] = [instants(0, 5), 20, instants(14), instants(13), 25, FOREVER]
    panes = panes_of([Session(10), Tumbling(1_000)], steps, bound=2)
    assert brief(panes[-2], 0) == [(13, 24, "on_time", 2)]
    assert brief(panes[-1], 1) == [(0, 1_000, "on_time", 4)]


def test_no_session_is_extended_to_before_what_is_closed() -> None:
    """An event that only an open session could hold comes too late: there may have been another one before that."""
    steps: list[Step] = [instants(30), 25, instants(14), instants(20), FOREVER]
    panes = panes_of([Session(10)], steps)
    assert brief(panes[-1]) == [(20, 40, "on_time", 2)]
    assert expected([Session(10)], 0, steps)[1] == {(0, 0): 1}


def test_a_watermark_never_goes_back() -> None:
    panes = panes_of([Tumbling(10)], [instants(5), 20, 3, instants(7), 3, FOREVER], bound=100)
    assert [len(found) for found in panes] == [0, 1, 0, 1, 0, 0]


def test_a_late_event_brings_no_pane_of_a_key_that_has_none_in_the_window() -> None:
    """Several slices are kept, and compacted, together; the second batch brought the last window nothing."""
    windows: list[Definition] = [Tumbling(9, -5), Sliding(12, 8, -5)]
    steps: list[Step] = [[Event(0, 11, 1)], [Event(2, 8, 1), Event(0, 8, 1)], 26, [Event(0, 0, 1), Event(2, 14, 1)]]
    late = check(windows, 30, steps, key="key")[-1]
    assert [(pane.key, pane.events) for pane in late if pane.start == 11] == [(2, 1)]


# -- what is kept -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "windows",
    [[Tumbling(10), Sliding(40, 5)], [Session(3)], [Tumbling(10), Sliding(40, 5), Session(3)]],
    ids=["periodic", "sessions", "both"],
)
def test_slices_go_when_no_window_needs_them(windows: list[Definition]) -> None:
    most = []
    with Player(windows, 10) as player:
        for begin in range(0, 4_000, 100):
            player.step(batch(*((t, t % 7) for t in range(begin, begin + 90))))
            for pane in player.step(begin + 90):
                inside = (t % 7 for t in range(max(pane.start, 0), pane.end) if t % 100 < 90)
                assert isinstance(windows[pane.definition], Session) or pane.total == sum(inside)
            most.append(player.operator.store.stats().blocks)
    assert max(most[20:]) <= max(most[:20]), "no more than in the beginning"


def test_a_session_that_never_ends_comes_whole_when_it_does() -> None:
    with Player([Tumbling(10), Session(30)]) as player:
        panes = []
        for begin in range(0, 4_000, 100):
            panes += player.step(instants(*range(begin, begin + 100)))
            panes += player.step(begin + 100)
        panes += player.step(FOREVER)
        assert player.operator.store.stats().blocks == 0
    assert brief(panes, 1) == [(0, 3_999 + 30, "on_time", 4_000)]
    assert len(brief(panes, 0)) == 400


def test_events_that_are_kept_one_by_one_go_as_well() -> None:
    """With the slices that they are in, which are a minute long."""
    most = []
    with Player([Count(10, 3), PerRecord("20 s")], 5_000_000) as player:
        for begin in range(0, 2_000, 50):
            player.step(instants(*(second * 1_000_000 for second in range(begin, begin + 50))))
            player.step((begin + 50) * 1_000_000)
            most.append(player.operator.store.stats().m_bucket_bytes)
    assert max(most[10:]) <= max(most[:10])


def test_a_far_jump_of_the_watermark_does_not_name_empty_windows() -> None:
    panes = panes_of([Tumbling(1), Tumbling("1 day")], [instants(0), instants(YEAR), 2 * YEAR])
    assert len(panes[-1]) == 4


# -- aggregates -------------------------------------------------------------------------------------------


def test_results_are_lowered_and_floats_are_floats() -> None:
    aggregates = {"mean": A.mean("value"), "sum": A.sum("value"), "low": A.min("value")}
    with aion.LocalOperator(windows=Tumbling(10), time="ts", aggregates=aggregates, policy=policy(0)) as operator:
        times = pa.array([1, 2, 11]).cast(pa.timestamp("us"))
        operator.process(pa.table({"ts": times, "value": pa.array([1.5, 2.5, float("nan")], pa.float32())}))
        rows = operator.advance(20).sort_by("window_start").to_pylist()
    assert [rows[0][name] for name in ("events", *aggregates)] == [2, 2.0, 4.0, 1.5]
    assert rows[1]["events"] == 1 and all(np.isnan(rows[1][name]) for name in aggregates)


def test_counting_needs_no_values() -> None:
    windows = {"tumbling": Tumbling(10), "session": Session(2), "count": Count(2)}
    with aion.LocalOperator(windows=windows, time="ts", aggregates={"n": A.count()}, policy=policy(0)) as operator:
        operator.process(pa.table({"ts": pa.array([1, 2, 11]).cast(pa.timestamp("us"))}))
        rows = operator.advance(FOREVER).select(["window", "window_start", "window_end", "n"]).to_pylist()
    micros = [(row["window"], row["window_start"].microsecond, row["window_end"].microsecond, row["n"]) for row in rows]
    assert sorted(micros) == [
        ("count", 1, 3, 2), ("session", 1, 4, 2), ("session", 11, 13, 1), ("tumbling", 0, 10, 2),
        ("tumbling", 10, 20, 1),
    ]  # fmt: skip


@pytest.mark.parametrize("aggregation", ["lazy", "eager"])
def test_a_window_whose_sum_leaves_64_bits_is_an_error_and_no_other(aggregation: str) -> None:
    with Player([Tumbling(1), Tumbling(4)], aggregation=aggregation) as player:
        player.step(batch((0, 2**62), (1, 2**62), (2, -1)))
        assert sorted(pane.total or 0 for pane in player.step(3)) == [-1, 2**62, 2**62]
        player.step(batch((3, -5)))
        assert [pane.total for pane in player.step(4) if pane.definition == 1] == [2**63 - 6]
        player.step(batch((4, 2**62), (5, 2**62)))
        with pytest.raises(IntegerOverflow):
            player.step(8)


# -- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize("windows", [[], ["1 minute"], [Tumbling(5), Tumbling(5)]], ids=str)
def test_what_are_no_windows_is_refused(windows: Any) -> None:
    with pytest.raises(WindowError):
        aion.LocalOperator(windows=windows, time="ts", aggregates={"n": A.count()})
