"""The cases of Scotty's slice manager (section VI), and ten mistakes of the original slicer by name."""

from __future__ import annotations

import random

import numpy as np
import pytest

from aion.core.periodic import Sliding, Tumbling
from aion.core.windows import Count, Definition, PerRecord, Session
from tests.durations import us
from tests.local.slicing import FOREVER, YEAR, Player, Step, batch, check, instants, panes_of
from tests.slicing_oracle import Pane

# -- the slice manager (Scotty section VI.B) --------------------------------------------------------------


def sessions_after(*batches: list[int], gap: int = 10) -> list[tuple[int, int, int]]:
    """Returns (first, last, events) of the sessions after these batches."""
    steps: list[Step] = [*(instants(*times) for times in batches), FOREVER]
    return [(pane.start, pane.end - gap, pane.events) for pane in sorted(panes_of([Session(us(gap))], steps)[-1])]


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
        with Player([Tumbling(us(50)), *map(Session, map(us, gaps))]) as player:
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
    first = panes_of([Tumbling(us(10)), Sliding(us(20), us(10))], [instants(*range(-95, 100, 10)), 5_000])[-1]
    assert sorted(pane.start for pane in first if pane.definition == 0) == list(range(-100, 100, 10))
    assert sorted(pane.start for pane in first if pane.definition == 1) == list(range(-110, 100, 10))


def test_mistake_3_a_watermark_needs_no_open_session() -> None:
    steps: list[Step] = [-5, [], 0, instants(10), 50, 60, 70, instants(100), 105, FOREVER]
    assert [len(panes) for panes in panes_of([Session(us(10))], steps)] == [0, 0, 0, 0, 1, 0, 0, 0, 0, 1]
    with Player([Session(us(10))]) as player:
        assert player.step(7) == []


def test_mistake_4_an_event_exactly_one_gap_before_a_session_belongs_to_it() -> None:
    steps: list[Step] = [batch((100, 1), (105, 2)), batch((90, 4)), FOREVER]
    assert panes_of([Session(us(10))], steps)[-1] == [Pane(0, 0, 90, 115, "on_time", 3, 7, 1, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [Tumbling(us(10)), Sliding(us(20), us(5))], ids=str)
def test_mistake_5_a_session_start_that_moves_across_a_fixed_edge_leaves_fixed_windows_alone(fixed: Definition) -> None:
    steps: list[Step] = [instants(23, 26), instants(18), instants(9), FOREVER]
    panes = panes_of([fixed, Session(us(12))], steps)[-1]
    assert [pane for pane in panes if pane.definition == 1] == [Pane(1, 0, 9, 38, "on_time", 4, 4, 1, 1)]
    rng = random.Random(5)
    for number in range(20):
        events = batch(*((rng.randint(0, 120), rng.randint(1, 9)) for _ in range(rng.randint(1, 25))))
        cuts = sorted(rng.randint(0, len(events)) for _ in range(3))
        parts = [events[a:b] for a, b in zip([0, *cuts], [*cuts, len(events)], strict=True)]
        way = {"key": "key" if number % 2 else None, "aggregation": "lazy" if number % 4 < 2 else "eager"}
        check([fixed, Session(us(rng.randint(3, 25)))], 0, [*parts, FOREVER], **way)


def test_mistake_6_sliding_windows_come_when_they_end_and_once() -> None:
    panes = panes_of([Sliding(us(10), us(3))], [instants(*range(40)), *range(1, 60)])
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
    panes = panes_of([Session(us(10))], steps, bound=50)
    assert panes[1] == [Pane(0, 0, 0, 15, "on_time", 2, 2, 1, 1)]
    assert panes[2] == [], "the session goes on up to 22"
    assert panes[3] == [Pane(0, 0, 0, 15, "retracted"), Pane(0, 0, 0, 22, "on_time", 3, 3, 1, 1)]
    assert panes[4] == [Pane(0, 0, 0, 22, "late", 4, 4, 1, 1)], "the same bounds: replaced, not retracted"
    assert panes[5] == []


def test_mistake_9_without_lateness_the_first_pane_still_comes() -> None:
    windows: list[Definition] = [Tumbling(us(10)), Session(us(5)), Count(1), PerRecord(us(5))]
    _, first, *rest = panes_of(windows, [instants(3), 10, instants(4), FOREVER])
    assert [pane.definition for pane in first] == [0, 1, 2, 3]
    assert rest == [[], []]


def test_mistake_10_an_event_at_the_start_of_the_oldest_slice_is_kept() -> None:
    for late in (20, 19, 0):
        panes = panes_of([Tumbling(us(10)), Session(us(3))], [instants(20, 25), instants(late), FOREVER])
        assert sum(pane.events for pane in panes[-1] if pane.definition == 0) == 3
