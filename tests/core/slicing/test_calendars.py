"""Where the days, weeks, months and years of a zone begin, against plain datetime and zoneinfo."""

from __future__ import annotations

import copy
import pickle
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.base.numbers import EARLIEST_US, LATEST_US
from aion.config import load_policy
from aion.core.calendars import Steps
from aion.core.slicing.grid import SliceGrid
from aion.core.topology import Strategy, Tree, merging_strategies
from aion.errors import WindowError
from aion.execute.record.trace import Definition, read_trace, window_from_json, window_to_json
from aion.spark.api.explain import explain_plan
from tests.calendar_oracle import hours_of, window_of
from tests.local.test_calendars import us

ZONES = (
    "Europe/Berlin", "America/Sao_Paulo", "Asia/Kolkata", "Pacific/Apia", "America/New_York", "Australia/Lord_Howe",
    "UTC", "America/St_Johns", "Africa/Cairo",
)  # fmt: skip
STEPS = ((1, "day"), (3, "day"), (1, "week"), (2, "week"), (1, "month"), (2, "month"), (1, "quarter"), (1, "year"))
HOUR = 3_600_000_000
DAY = 24 * HOUR
YEAR_400 = 146_097 * DAY
"""The calendar, and so the rules, repeat after 400 years."""

times = st.integers(us(1900, 1, 1), us(2100, 1, 1))


def bounds(window: aion.Calendar, at: list[int]) -> list[tuple[int, int]]:
    numbers = window.edges.numbers(np.array(at, np.int64))
    starts, ends = window.edges.starts(numbers), window.edges.starts(numbers + 1)
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


@given(at=st.lists(times, min_size=1, max_size=20), zone=st.sampled_from(ZONES), step=st.sampled_from(STEPS))
def test_the_window_of_an_instant_is_what_datetime_says(at: list[int], zone: str, step: tuple[int, str]) -> None:
    window = aion.Calendar(f"{step[0]} {step[1]}", zone)
    found = bounds(window, at)
    assert found == [window_of(t, *step, ZoneInfo(zone)) for t in at]
    assert [next(window.covering(t)) for t in at] == found
    assert all(end - start <= window.edges.longest_us for start, end in found)


@pytest.mark.parametrize("step", ["1 hour", "3 hours", "1 day", "1 week", "1 month"])
def test_no_step_reaches_further_than_its_windows_say(step: str) -> None:
    """What waits for the last window that begins in a stretch of time waits for as long as it may be."""
    for zone in (*ZONES, "Antarctica/Troll", "Europe/Dublin"):
        window = aion.Calendar(step, zone)
        first, last = window.edges.numbers(np.array([us(2023, 1, 1), us(2026, 1, 1)], np.int64))
        assert np.diff(window.edges.starts(np.arange(first, last))).max() <= window.reach_us, zone


STARTS = st.sampled_from([0, 60, 120, 150, 180, 300, 1439]) | st.integers(0, 1439)
"""Minutes after midnight. Clocks change at about 0:00 to 3:00."""
WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")


@given(
    at=st.lists(times, min_size=1, max_size=9),
    zone=st.sampled_from(ZONES),
    step=st.sampled_from(STEPS),
    minutes=STARTS,
    weekday=st.integers(0, 6),
)
@example(at=[us(2026, 3, 29, 0, 45), us(2026, 3, 29, 1)], zone="Europe/Berlin", step=(1, "day"), minutes=150, weekday=0)
@example(
    at=[us(2026, 10, 25, 0, 45), us(2026, 10, 25, 1, 45)], zone="Europe/Berlin", step=(1, "day"), minutes=150, weekday=0
)
@example(
    at=[us(2011, 12, 29, 14, 59), us(2011, 12, 30, 15)], zone="Pacific/Apia", step=(1, "day"), minutes=300, weekday=0
)
def test_windows_begin_at_a_local_time_and_weeks_on_a_day(
    at: list[int], zone: str, step: tuple[int, str], minutes: int, weekday: int
) -> None:
    clock, is_week = f"{minutes // 60:02}:{minutes % 60:02}", step[1] == "week"
    window = aion.Calendar(f"{step[0]} {step[1]}", zone, start=f"{WEEKDAYS[weekday]} {clock}" if is_week else clock)
    found = bounds(window, at)
    assert found == [window_of(t, *step, ZoneInfo(zone), timedelta(minutes=minutes), weekday) for t in at]
    assert [next(window.covering(t)) for t in at] == found
    assert all(end - start <= window.edges.longest_us for start, end in found)
    steps = window.edges.steps
    assert Steps.of(steps.every, steps.start) == steps


HALF = [us(2026, 4, 4, 14, 59), us(2026, 4, 4, 15), us(2026, 10, 3, 15, 29), us(2026, 10, 3, 15, 30)]
"""The clocks of Lord Howe change by half an hour."""


@pytest.mark.slow
@given(
    at=st.lists(times, min_size=1, max_size=9),
    zone=st.sampled_from([*ZONES, "Asia/Kolkata", "Asia/Kathmandu", "Australia/Lord_Howe"]),
    count=st.sampled_from([1, 2, 6, 5]),
)
@example(at=HALF, zone="Australia/Lord_Howe", count=1)
@example(at=[us(2026, 10, 25, 0, 45), us(2026, 10, 25, 1, 45)], zone="Europe/Berlin", count=1)
@example(at=[us(2026, 3, 29, 0, 59), us(2026, 3, 29, 1)], zone="Europe/Berlin", count=2)
def test_hours_begin_when_the_clocks_show_them(at: list[int], zone: str, count: int) -> None:
    window = aion.Calendar(f"{count} hours", zone)
    found = bounds(window, at)
    assert found == [hours_of(t, count, ZoneInfo(zone)) for t in at]
    assert [next(window.covering(t)) for t in at] == found
    assert all(end - start <= window.edges.longest_us for start, end in found)
    assert window_from_json(window_to_json(window)).edges == window.edges
    day = aion.Calendar("1 day", zone).edges
    assert window.edges.makes_redundant(day) == (24 % count == 0) and not day.makes_redundant(window.edges)
    if 24 % count == 0:
        assert set(day.between(min(at), max(at)).tolist()) <= set(window.edges.between(min(at) - DAY, max(at)).tolist())


def test_an_hour_of_india_begins_at_half_past_by_utc() -> None:
    window = aion.Calendar("1 hour", "Asia/Kolkata")
    assert bounds(window, [us(2026, 7, 1, 12, 29)]) == [(us(2026, 7, 1, 11, 30), us(2026, 7, 1, 12, 30))]
    with pytest.raises(WindowError, match="hours begin when the clocks show a full hour; leave start='00:30' out"):
        aion.Calendar("1 hour", "Asia/Kolkata", start="00:30")


@pytest.mark.parametrize(
    ("start", "same"),
    [
        ("05:00", "5:00:00"),
        ("00:00", None),
        ("monday", None),
        (" Sunday  05:00 ", "sunday 5:00"),
        ("monday 00:00", None),
    ],
)
def test_ways_to_write_a_start(start: str, same: str | None) -> None:
    window = aion.Calendar("1 week", "UTC", start=start)
    assert window == aion.Calendar("1 week", "UTC", start=same)
    assert pickle.loads(pickle.dumps(window)) == window


def test_a_start_is_part_of_the_definition_and_of_its_name() -> None:
    window = aion.Calendar("1 week", zone="America/New_York", start="sunday 05:00")
    assert str(window) == "calendar 1 week from sunday 05:00 America/New_York"
    assert window.spec() == {
        "type": "calendar", "every": "1 week", "zone": "America/New_York", "start": "sunday 05:00",
    }  # fmt: skip
    assert "start" not in aion.Calendar("1 week", zone="America/New_York").spec()
    assert window_from_json(window_to_json(window)).edges == window.edges


@pytest.mark.parametrize("every", ["1 day", "1 week", "1 month"])
@pytest.mark.parametrize(
    "start", ["24:00", "5", "05:60", "noon", "", 5, "5 am", "-1:00", "monday sunday", "05:00 sunday"]
)
def test_what_is_no_start_is_refused(every: str, start: Any) -> None:
    with pytest.raises(
        WindowError, match=r"Calendar: start of .* is neither a time of day nor the first day of a week"
    ):
        aion.Calendar(every, "UTC", start=start)


@pytest.mark.parametrize("every", ["1 day", "2 months"])
def test_only_weeks_begin_on_a_weekday(every: str) -> None:
    with pytest.raises(WindowError, match="start of 'sunday' names a day, and only weeks begin on one"):
        aion.Calendar(every, "UTC", start="sunday")


@given(at=times, first=STARTS, second=STARTS)
def test_slices_end_where_windows_with_different_starts_end(at: int, first: int, second: int) -> None:
    def named(minutes: int) -> str:
        return f"{minutes // 60:02}:{minutes % 60:02}"

    windows = [aion.Calendar("1 day", "Europe/Berlin", start=named(first)), aion.Calendar("1 day", "Europe/Berlin")]
    windows += [aion.Calendar("1 week", "Europe/Berlin", start=f"sunday {named(second)}")]
    windows += [aion.Calendar("1 month", "Europe/Berlin", start=named(second))]
    edges = SliceGrid(windows).edges
    assert edges.starts(np.array([at], np.int64)).tolist() == [max(bounds(w, [at])[0][0] for w in windows)]
    assert edges.afters(np.array([at], np.int64)).tolist() == [min(bounds(w, [at])[0][1] for w in windows)]


@given(at=st.lists(times, min_size=1, max_size=9), zones=st.sets(st.sampled_from(ZONES), min_size=1, max_size=3))
def test_slices_end_at_the_edges_of_all_windows(at: list[int], zones: set[str]) -> None:
    windows = [aion.Calendar("1 day", zone) for zone in sorted(zones)]
    edges = SliceGrid([*windows, aion.Tumbling("7 hours"), aion.Calendar("1 month", sorted(zones)[0])]).edges
    starts = edges.starts(np.array(at, np.int64)).tolist()
    expected = [max([t // (7 * HOUR) * 7 * HOUR, *(bounds(w, [t])[0][0] for w in windows)]) for t in at]
    assert starts == expected == edges.floors(np.array(at, np.int64)).tolist()
    ends = edges.afters(np.array(at, np.int64)).tolist()
    assert ends == [min([(t // (7 * HOUR) + 1) * 7 * HOUR, *(bounds(w, [t])[0][1] for w in windows)]) for t in at]


def test_a_day_without_midnight_begins_at_its_first_instant() -> None:
    # Sao Paulo's clocks went from 24:00 to 1:00.
    assert bounds(aion.Calendar("1 day", "America/Sao_Paulo"), [us(2018, 11, 4, 12)]) == [
        (us(2018, 11, 4, 3), us(2018, 11, 5, 2))
    ]


def test_a_day_that_a_zone_left_out_has_no_window() -> None:
    window = aion.Calendar("1 day", "Pacific/Apia")
    before, after = bounds(window, [us(2011, 12, 30, 9, 59), us(2011, 12, 30, 10)])
    assert before == (us(2011, 12, 29, 10), us(2011, 12, 30, 10))
    assert after == (us(2011, 12, 30, 10), us(2011, 12, 31, 10))
    edges = window.edges.between(us(2011, 12, 29, 12), us(2012, 1, 1, 12)).tolist()
    assert edges == [us(2011, 12, 29, 10), us(2011, 12, 30, 10), us(2011, 12, 31, 10), us(2012, 1, 1, 10)]


@pytest.mark.parametrize(
    ("every", "at", "start", "end"),
    [
        ("1 week", us(2026, 7, 1), us(2026, 6, 29), us(2026, 7, 6)),
        ("2 weeks", us(1970, 1, 5), us(1970, 1, 5), us(1970, 1, 19)),
        ("2 weeks", us(1970, 1, 4), us(1969, 12, 22), us(1970, 1, 5)),
        ("2 months", us(2026, 4, 30), us(2026, 3, 1), us(2026, 5, 1)),
        ("quarter", us(1969, 12, 31), us(1969, 10, 1), us(1970, 1, 1)),
        ("3 days", us(1970, 1, 6), us(1970, 1, 4), us(1970, 1, 7)),
        ("4 years", us(1973, 12, 31), us(1970, 1, 1), us(1974, 1, 1)),
    ],
)
def test_several_units_are_counted_from_1970(every: str, at: int, start: int, end: int) -> None:
    assert bounds(aion.Calendar(every, "UTC"), [at]) == [(start, end)]


@given(at=times, cycles=st.integers(-180, 180), step=st.sampled_from([(1, "day"), (1, "week"), (1, "month")]))
def test_the_rules_go_on_beyond_the_years_that_are_known(at: int, cycles: int, step: tuple[int, str]) -> None:
    """After 2037 they repeat; long before 1900, zones had one offset."""
    window = aion.Calendar(f"{step[0]} {step[1]}", "Europe/Berlin")
    late = at - us(1900, 1, 1) + us(2100, 1, 1)
    (start, end), (moved_start, moved_end) = bounds(window, [late, late + abs(cycles) * YEAR_400])
    assert (moved_start - start, moved_end - end) == (abs(cycles) * YEAR_400,) * 2
    early = at - YEAR_400
    (start, end), (moved_start, moved_end) = bounds(window, [early, early - abs(cycles) * YEAR_400])
    assert (moved_start - start, moved_end - end) == (-abs(cycles) * YEAR_400,) * 2


@pytest.mark.parametrize("every", ["1 day", "1 week", "1 month", "1000 years", "70000 years"])
def test_every_time_in_range_has_a_window(every: str) -> None:
    for zone in ("Pacific/Kiritimati", "Pacific/Pago_Pago"):
        for t, (start, end) in zip(
            (EARLIEST_US, LATEST_US), bounds(aion.Calendar(every, zone), [EARLIEST_US, LATEST_US]), strict=True
        ):
            assert start <= t < end


SOME = [aion.Calendar("day", "Europe/Berlin"), aion.Calendar("2 months", "UTC"), aion.Calendar(" 2 Weeks ", "UTC")]


def test_definitions_are_told_apart_and_travel_to_workers() -> None:
    assert [str(w) for w in SOME] == ["calendar 1 day Europe/Berlin", "calendar 2 months UTC", "calendar 2 weeks UTC"]
    assert SOME[0].spec() == {"type": "calendar", "every": "1 day", "zone": "Europe/Berlin"}
    assert SOME[0] == aion.Calendar("1 day", zone="Europe/Berlin") != aion.Calendar("1 day", zone="Europe/Paris")
    early = aion.Calendar("1 day", zone="Europe/Berlin", early="1 hour")
    assert early.with_edges(SOME[1].edges).timing == early.with_rules().timing == early.timing != SOME[0].timing
    for window in [*SOME, early]:
        assert pickle.loads(pickle.dumps(window)) == copy.deepcopy(window) == window
        assert hash(copy.copy(window)) == hash(window)


@pytest.mark.parametrize(
    ("every", "zone", "shown"),
    [
        ("1.5 days", "UTC", "'1.5 days' is not a step of the calendar; give a whole number of hours, days"),
        ("0 days", "UTC", "'0 days' has no length"),
        ("-1 day", "UTC", "'-1 day'"),
        ("30 minutes", "UTC", r"'30 minutes' is a fixed length.*use aion.Tumbling\('30 minutes'\)"),
        ("1 fortnight", "UTC", "'1 fortnight' is not a step"),
        (86_400_000_000, "UTC", "86400000000 is not a step"),
        ("99999999 years", "UTC", "longer than times reach"),
        ("1 day", "Europe/Berln", "no time zone 'Europe/Berln'.*did you mean 'Europe/Berlin'"),
        ("1 day", "Europe", "no time zone 'Europe'"),
        ("1 day", "../etc/passwd", "no time zone"),
        ("1 day", "", "no time zone ''"),
        ("1 day", None, "no time zone None; give a name such as 'Europe/Berlin'"),
        ("1 day", ZoneInfo("UTC"), "no time zone zoneinfo"),
    ],
)
def test_what_is_no_calendar_is_refused_and_shown(every: Any, zone: Any, shown: str) -> None:
    with pytest.raises(WindowError, match=shown):
        aion.Calendar(every, zone)


SCHEMA = pa.schema([("ts", pa.timestamp("us", "UTC")), ("k", pa.string())])


def test_explain_says_where_slices_end() -> None:
    windows = {"day": SOME[0], "hours": aion.Tumbling("6 hours"), "month": aion.Calendar("1 month", "Europe/Berlin")}
    plan = aion.Spec(windows=windows, time="ts", key="k", aggregates={"n": A.count()}).plan(SCHEMA)
    decisions = merging_strategies(plan.windows)
    assert {d.strategy for d in decisions.values()} == {Strategy.CONTEXT_FREE}
    tree = Tree(levels=0, fan_in=2, children=1, shards=(0,), root_tasks=1)
    text = " ".join(explain_plan(plan, load_policy("standard"), tree, decisions, asked_levels=0).split())
    assert "day (calendar 1 day Europe/Berlin): merged as context-free" in text
    assert "Slices end every 6 hours and at midnight in Europe/Berlin (every day)." in text
    assert "once for all windows that contain it (up to 3)" in text


def test_a_trace_knows_its_calendar(tmp_path: Path) -> None:
    windows = {"day": SOME[0], "hours": aion.Tumbling("6 hours")}
    with aion.LocalOperator(
        windows=windows, time="ts", aggregates={"n": A.count()}, policy={"trace": {"folder": tmp_path / "t"}}
    ) as operator:
        operator.process(pa.table([[datetime(2026, 7, 1, tzinfo=UTC)], ["a"]], schema=SCHEMA))
        operator.advance(us(2026, 7, 3))
        operator.process(pa.table([[datetime(2026, 7, 1, 5, tzinfo=UTC)], ["a"]], schema=SCHEMA))
    trace = read_trace(tmp_path / "t")
    assert [str(w.spec()) for w in trace.definition.windows.values()] == [str(w.spec()) for w in windows.values()]
    assert trace.definition.plan().windows["day"] == trace.definition.windows["day"]
    assert Definition.from_json(trace.definition.to_json()) == trace.definition
    late, events = trace.lateness_us()
    assert late.tolist() == [0, us(2026, 7, 3) - us(2026, 7, 1, 6)] and events.tolist() == [0, 1]
