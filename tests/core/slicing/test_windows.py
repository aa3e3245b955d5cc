"""Windows and slices against brute force: which windows an instant is in, and which slice."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aion import Cumulative, Sliding, Tumbling
from aion.core.periodic import Periodic, periodic_of
from aion.core.slicing.aligned import AlignedWindows
from aion.core.slicing.grid import BEYOND_SLICE, NO_SLICE, SliceGrid
from aion.core.windows import named
from aion.errors import WindowError
from aion.execute.record.trace import window_from_json, window_to_json
from tests.durations import us
from tests.oracle import Definition, slice_of

SECOND = 1_000_000

tumblings = st.builds(Tumbling, st.integers(1, 30).map(us), st.integers(-60, 60).map(us))
slidings = st.integers(1, 30).flatmap(
    lambda size: st.builds(Sliding, st.just(us(size)), st.integers(1, size).map(us), st.integers(-60, 60).map(us))
)
cumulatives = st.integers(1, 15).flatmap(
    lambda step: st.builds(
        Cumulative, st.just(us(step)), st.integers(1, 6).map(lambda n: us(n * step)), st.integers(-60, 60).map(us)
    )
)
windows = tumblings | slidings | cumulatives
several = st.lists(windows, min_size=1, max_size=4)
instants = st.integers(-100, 100) | st.integers(-(10**15), 10**15)


def brute(window: Periodic) -> Definition:
    return Definition(window.size_us, window.slide_us, window.offset_us, grows=isinstance(window, Cumulative))


# -- definitions ------------------------------------------------------------------------------------------


@given(windows, instants)
def test_the_windows_of_an_instant_are_those_that_contain_it(window: Periodic, t: int) -> None:
    found = list(window.covering(t))
    ends = [end for _, end in found]
    assert ends == sorted(ends, reverse=True), "latest first"
    assert sorted(found) == sorted(brute(window).containing(t))
    assert len(found) <= window.overlap


@given(tumblings, instants)
def test_tumbling_windows_neither_overlap_nor_leave_gaps(window: Tumbling, t: int) -> None:
    ((_, end),) = window.covering(t)
    assert [start for start, _ in window.covering(end)] == [end]


@given(slidings, instants)
def test_every_instant_is_in_a_sliding_window(window: Sliding, t: int) -> None:
    assert list(window.covering(t))


@given(windows)
def test_an_offset_of_a_whole_period_is_none(window: Periodic) -> None:
    size, slide, offset = window.size_us, window.slide_us, window.offset_us
    shifted: Periodic
    if isinstance(window, Cumulative):
        shifted = Cumulative(us(slide), us(size), us(offset + size))
    elif isinstance(window, Tumbling):
        shifted = Tumbling(us(size), us(offset + size))
    else:
        shifted = Sliding(us(size), us(slide), us(offset + slide))
    assert shifted == window
    assert shifted.spec() == window.spec()
    assert str(shifted) == str(window)


@given(windows)
def test_windows_travel_to_workers(window: Periodic) -> None:
    assert pickle.loads(pickle.dumps(window)) == window
    assert copy.deepcopy(window) == window


@given(windows)
def test_windows_are_made_again_of_what_is_stored(window: Periodic) -> None:
    made = periodic_of(window.spec())
    assert made.spec() == window.spec()
    assert list(made.covering(7)) == list(window.covering(7))
    assert window_from_json(window_to_json(window)).spec() == window.spec()


@given(cumulatives, instants)
def test_windows_that_grow_share_their_start_and_no_end(window: Cumulative, t: int) -> None:
    found = [*window.covering(t)]
    assert len({start for start, _ in found}) == 1
    assert found[0][1] - found[0][0] == window.size_us
    ends = np.array([end for _, end in found], np.int64)
    starts = np.array([start for start, _ in found], np.int64)
    values = window.run_values(starts, ends).tolist()
    assert values == [values[0] - n * window.run_step for n in range(len(values))], "neighbours are one run"
    assert [value <= window.ended_run_value(int(ends[-1])) for value in values] == (ends <= ends[-1]).tolist()


def test_windows_are_called_by_their_own_words() -> None:
    assert str(Tumbling("60 s")) == "tumbling 1 minute"
    assert str(Sliding(timedelta(minutes=5), "90s", offset="30 s")) == (
        "sliding 5 minutes by 90 seconds offset 30 seconds"
    )
    assert str(Cumulative("10 minutes", "1 hour")) == "cumulative 1 hour by 10 minutes"
    assert str(Cumulative("1 minute", "1 day", offset="-5 hours")) == "cumulative 1 day by 1 minute offset 19 hours"
    assert str(Tumbling("1 day", offset="-5 hours")) == "tumbling 1 day offset 19 hours"


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (lambda: Tumbling(0), "0"),
        (lambda: Tumbling("0 s"), "'0 s'"),
        (lambda: Tumbling("-1 minute"), "'-1 minute'"),
        (lambda: Tumbling("1 month"), "month"),
        (lambda: Tumbling("soon"), "'soon'"),
        (lambda: Tumbling(60), "Tumbling: size of 60 has no unit; write e.g. '60 seconds'"),  # type: ignore[arg-type]
        (lambda: Tumbling(1.5), "1.5 has no unit"),  # type: ignore[arg-type]
        (lambda: Tumbling(np.int64(5)), "size of 5 has no unit"),  # type: ignore[arg-type]
        (lambda: Tumbling("1m", offset=5), "offset of 5 has no unit"),  # type: ignore[arg-type]
        (lambda: Tumbling("1m", early=5), "early of 5 has no unit"),  # type: ignore[arg-type]
        (lambda: Tumbling("1m", bound=5.0), "bound of 5.0 has no unit"),  # type: ignore[arg-type]
        (lambda: Tumbling("1m", offset="later"), "'later'"),
        (lambda: Sliding("1m", 0), "0"),
        (lambda: Sliding("0.4 us", "1m"), "'0.4 us'"),
        (lambda: Sliding("1m", "-1s"), "'-1s'"),
        (lambda: Sliding("1m", "61 s"), "61 seconds"),
        (lambda: Cumulative("40 s", "1m"), "a size of 1 minute is not a multiple of the step of 40 seconds"),
        (lambda: Cumulative("1 hour", "1m"), "a size of 1 minute is not a multiple of the step of 1 hour"),
        (lambda: Cumulative(0, "1m"), "step of 0 is not positive"),
        (lambda: Cumulative("1m", "-1m"), "size of '-1m' is not positive"),
    ],
)
def test_a_window_that_cannot_be_is_refused_and_shown(make: Any, shown: str) -> None:
    with pytest.raises(WindowError) as caught:
        make()
    assert shown in str(caught.value)


def test_definitions_have_names() -> None:
    minute, hour = Tumbling("1 minute"), Tumbling("1 hour")
    assert named(minute) == {"tumbling 1 minute": minute}
    assert list(named([hour, minute])) == ["tumbling 1 hour", "tumbling 1 minute"], "in the order given"
    assert named({"short": minute, "also short": minute}) == {"short": minute, "also short": minute}


@pytest.mark.parametrize("wrong", [[], {}, [Tumbling(us(1)), Tumbling(us(1))], ["1 minute"], {"w": "1 minute"}, [None]])
def test_definitions_that_cannot_be(wrong: Any) -> None:
    with pytest.raises(WindowError, match="windows"):
        named(wrong)


# -- slices -----------------------------------------------------------------------------------------------


def starts(grid: SliceGrid, times: Sequence[int]) -> list[int]:
    return grid.starts(np.array(times, np.int64)).tolist()  # type: ignore[no-any-return]


@given(several, st.lists(st.integers(-100, 100), min_size=1, max_size=20))
def test_the_slice_of_an_event_starts_at_the_last_edge_of_any_window(
    definitions: list[Periodic], times: list[int]
) -> None:
    grid = SliceGrid(definitions, segmented=False)
    assert starts(grid, times) == [slice_of([brute(w) for w in definitions], t) for t in times]


@given(several, st.lists(instants, min_size=1, max_size=20))
def test_an_event_is_in_exactly_one_slice(definitions: list[Periodic], times: list[int]) -> None:
    grid = SliceGrid(definitions, segmented=False)
    for t, start in zip(times, starts(grid, times), strict=True):
        end = grid.end(start)
        assert start <= t < end
        # The slice begins where it begins, and the next one where it ends: neighbours neither overlap nor gape.
        assert starts(grid, [start, end - 1, end]) == [start, start, end]


@given(several, instants)
def test_a_slice_is_part_of_the_windows_that_its_events_are_in(definitions: list[Periodic], t: int) -> None:
    start = np.array(starts(SliceGrid(definitions), [t]), np.int64)
    expected = [
        (end, number, window_start)
        for number, window in enumerate(definitions)
        for window_start, end in brute(window).containing(t)
    ]
    found = AlignedWindows(dict(enumerate(definitions))).covering(start)
    rows = zip(found.end_us.tolist(), found.definition.tolist(), found.start_us.tolist(), strict=True)
    assert [*rows] == sorted(expected)


@given(several, st.sets(st.integers(-100, 100) | st.integers(10**6, 10**6 + 50), min_size=1, max_size=20))
def test_windows_of_many_slices_are_each_there_once(definitions: list[Periodic], times: set[int]) -> None:
    grid = SliceGrid(definitions)
    slices = np.unique(grid.starts(np.array([*times], np.int64)))
    found = AlignedWindows(dict(enumerate(definitions))).covering(slices)
    expected = {
        (end, number, start): sum(start <= s < end for s in slices.tolist())
        for number, window in enumerate(definitions)
        for s in slices.tolist()
        for start, end in brute(window).containing(s)
    }
    rows = zip(found.end_us.tolist(), found.definition.tolist(), found.start_us.tolist(), strict=True)
    assert [*rows] == sorted(expected)
    assert (found.ends - found.begins).tolist() == [expected[row] for row in sorted(expected)]


@given(several, st.lists(st.integers(-100, 100), min_size=1, max_size=20))
def test_a_segment_is_made_of_whole_slices(definitions: list[Periodic], times: list[int]) -> None:
    grid = SliceGrid(definitions)
    slices = grid.starts(np.array(times, np.int64))
    segments = grid.segments(slices)
    ends = grid.ends(segments)
    assert [grid.end(s) for s in segments.tolist()] == ends.tolist()
    assert (segments <= slices).all() and (grid.starts(ends - 1) < ends).all()
    assert (grid.segments(grid.starts(segments)) == segments).all() and (grid.starts(ends) == ends).all()
    assert ends.max() - segments.min() >= 1 and (ends - segments <= grid.longest_us).all()


@given(several, instants)
def test_a_window_is_made_of_whole_slices(definitions: list[Periodic], t: int) -> None:
    grid = SliceGrid(definitions)
    for window in definitions:
        for start, end in window.covering(t):
            assert starts(grid, [start, end]) == [start, end]


@given(several, st.integers(-100, 100))
def test_slices_are_as_few_as_the_windows_allow(definitions: list[Periodic], t: int) -> None:
    """Where a slice ends, the windows change: otherwise the edge would be for nothing."""
    grid = SliceGrid(definitions, segmented=False)
    (start,) = starts(grid, [t])
    brutes = [brute(w) for w in definitions]
    here, after = ([d.containing(x) for d in brutes] for x in (start, grid.end(start)))
    assert here != after


def test_windows_of_one_length_share_their_edges() -> None:
    assert len(SliceGrid([Tumbling(us(10)), Tumbling(us(20)), Sliding(us(40), us(10)), Tumbling(us(30))]).families) == 1
    assert len(SliceGrid([Sliding(us(25), us(10))], segmented=False).families) == 2
    assert len(SliceGrid([Sliding(us(25), us(10))]).families) == 3, "and those of the segments"
    grows = SliceGrid([Cumulative(us(10), us(60)), Tumbling(us(10)), Sliding(us(30), us(10))])
    assert len(grows.families) == 1 and not grows.has_segments
    beside = SliceGrid([Cumulative(us(10), us(60)), Tumbling(us(15))])
    assert beside.longest_us == 10, "segments are as long as the shortest window"


def test_events_without_a_time_are_in_a_segment_of_their_own() -> None:
    for definitions in ([Tumbling(us(10))], [Sliding(us(25), us(10))]):
        slices = np.array([NO_SLICE, 7, BEYOND_SLICE], np.int64)
        assert SliceGrid(definitions).segments(slices)[[0, 2]].tolist() == [NO_SLICE, BEYOND_SLICE]


def test_the_input_is_left_alone() -> None:
    times = np.arange(-20, 20)
    for definitions in ([Tumbling(us(7))], [Tumbling(us(7)), Sliding(us(5), us(3))], [Tumbling(us(7), us(3))]):
        SliceGrid(definitions).starts(times)
        assert times.tolist() == list(range(-20, 20))
