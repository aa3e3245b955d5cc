"""What late events do to windows with several slices, and how long slices are kept."""

from __future__ import annotations

import pytest

from aion.core.periodic import Cumulative, Sliding, Tumbling
from aion.core.windows import Count, Definition, PerRecord, Session
from tests.durations import us
from tests.keyed_oracle import Event
from tests.local.slicing import FOREVER, YEAR, Player, Step, batch, brief, check, expected, instants, panes_of
from tests.slicing_oracle import Pane

# -- lateness ---------------------------------------------------------------------------------------------


def test_an_event_is_late_for_one_window_and_in_time_for_another() -> None:
    _, first, _, last = panes_of([Tumbling(us(10)), Tumbling(us(40))], [instants(3), 25, instants(4), FOREVER], bound=5)
    assert first == [Pane(0, 0, 0, 10, "on_time", 1, 1, 1, 1)]
    assert last == [Pane(1, 0, 0, 40, "on_time", 2, 2, 1, 1)]


def test_what_is_too_late_for_all_windows_is_counted() -> None:
    windows = [Tumbling(us(10)), Session(us(5))]
    steps: list[Step] = [100, instants(10, 86, 93, 97), 1_000]
    _, late, rest = panes_of(windows, steps, bound=3)
    assert brief([*late, *rest]) == [(90, 100, "late", 2), (93, 102, "on_time", 2)]
    assert expected(windows, 3, steps)[1] == {(0, 0): 2, (1, 0): 2}
    with Player(windows, 3) as player:
        for step in steps:
            player.step(step)
        assert player.operator.counters["dropped"] == 2


def test_a_late_session_does_not_come_back_through_one_that_is_gone() -> None:
    """A longer window keeps the slices of a session that is gone. No session may use them."""
    steps: list[Step] = [instants(0, 5), 20, instants(14), instants(13), 25, FOREVER]
    panes = panes_of([Session(us(10)), Tumbling(us(1_000))], steps, bound=2)
    assert brief(panes[-2], 0) == [(13, 24, "on_time", 2)]
    assert brief(panes[-1], 1) == [(0, 1_000, "on_time", 4)]


def test_no_session_is_extended_to_before_what_is_closed() -> None:
    """What lies before the closed instant comes too late, even for an open session: another may have been there."""
    steps: list[Step] = [instants(30), 25, instants(14), instants(20), FOREVER]
    panes = panes_of([Session(us(10))], steps)
    assert brief(panes[-1]) == [(20, 40, "on_time", 2)]
    assert expected([Session(us(10))], 0, steps)[1] == {(0, 0): 1}


def test_a_watermark_never_goes_back() -> None:
    panes = panes_of([Tumbling(us(10))], [instants(5), 20, 3, instants(7), 3, FOREVER], bound=100)
    assert [len(found) for found in panes] == [0, 1, 0, 1, 0, 0]


def test_a_late_event_brings_no_pane_of_a_key_that_has_none_in_the_window() -> None:
    """Several slices are stored and compacted together. The second batch brought the last window no event."""
    windows: list[Definition] = [Tumbling(us(9), us(-5)), Sliding(us(12), us(8), us(-5))]
    steps: list[Step] = [[Event(0, 11, 1)], [Event(2, 8, 1), Event(0, 8, 1)], 26, [Event(0, 0, 1), Event(2, 14, 1)]]
    late = check(windows, 30, steps, key="key")[-1]
    assert [(pane.key, pane.events) for pane in late if pane.start == 11] == [(2, 1)]


# -- what is kept -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "windows",
    [
        [Tumbling(us(10)), Sliding(us(40), us(5))],
        [Session(us(3))],
        [Tumbling(us(10)), Sliding(us(40), us(5)), Session(us(3))],
        [Tumbling(us(10)), Cumulative(us(5), us(40))],
    ],
    ids=["periodic", "sessions", "both", "growing"],
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


@pytest.mark.slow
def test_a_session_that_never_ends_comes_whole_when_it_does() -> None:
    with Player([Tumbling(us(10)), Session(us(30))]) as player:
        panes = []
        for begin in range(0, 4_000, 100):
            panes += player.step(instants(*range(begin, begin + 100)))
            panes += player.step(begin + 100)
        panes += player.step(FOREVER)
        assert player.operator.store.stats().blocks == 0
    assert brief(panes, 1) == [(0, 3_999 + 30, "on_time", 4_000)]
    assert len(brief(panes, 0)) == 400


@pytest.mark.slow
def test_events_that_are_kept_one_by_one_go_as_well() -> None:
    """They go with their slices, which are a minute long."""
    most = []
    with Player([Count(10, 3), PerRecord("20 s")], 5_000_000) as player:
        for begin in range(0, 2_000, 50):
            player.step(instants(*(second * 1_000_000 for second in range(begin, begin + 50))))
            player.step((begin + 50) * 1_000_000)
            most.append(player.operator.store.stats().m_bucket_bytes)
    assert max(most[10:]) <= max(most[:10])


def test_a_far_jump_of_the_watermark_does_not_name_empty_windows() -> None:
    panes = panes_of([Tumbling(us(1)), Tumbling("1 day")], [instants(0), instants(YEAR), 2 * YEAR])
    assert len(panes[-1]) == 4
