"""Calendar windows in LocalOperator against an oracle that asks zoneinfo about each event."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.errors import SchemaError
from tests.calendar_oracle import window_of
from tests.durations import us as micros
from tests.examples import some
from tests.local.scenarios import (
    AGGREGATES,
    SCHEMA,
    Scenario,
    aggregated,
    drops_of,
    expected_drops,
    expected_panes,
    panes_of,
    policy,
    rows_of,
    run,
    table,
    truth,
)
from tests.oracle import Definition, Event

HOUR = 3_600_000_000
DAY = 24 * HOUR


def us(*instant: int) -> int:
    return (datetime(*instant, tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)) // datetime.resolution  # type: ignore[misc]


@dataclass(frozen=True)
class Dates:
    """The oracle's calendar windows."""

    count: int
    unit: str
    zone: str
    early: int | None = None
    bound: int | None = None

    def containing(self, t: int) -> list[tuple[int, int]]:
        return [window_of(t, self.count, self.unit, ZoneInfo(self.zone))]


@dataclass(frozen=True)
class Mixed(Scenario):
    def windows(self) -> dict[str, Any]:
        return {
            f"w{i}": aion.Calendar(f"{d.count} {d.unit}", d.zone, early=micros(d.early), bound=micros(d.bound))
            if isinstance(d, Dates)
            else aion.Sliding(micros(d.size), micros(d.slide), micros(d.offset))
            for i, d in enumerate(self.definitions)
        }


INSTANTS = {
    "Europe/Berlin": (us(2026, 3, 29), us(2026, 10, 25)),
    "America/Sao_Paulo": (us(2018, 11, 4, 3), us(2018, 2, 18, 3)),
    "Pacific/Apia": (us(2011, 12, 30, 10),),
    "America/St_Johns": (us(2006, 10, 29, 2, 30),),
    "Australia/Lord_Howe": (us(2026, 4, 4, 15),),
}
"""Instants at which the clocks of a zone change."""


@st.composite
def scenarios(draw: st.DrawFn) -> Mixed:
    zone = draw(st.sampled_from(sorted(INSTANTS)))
    at = draw(st.sampled_from(INSTANTS[zone]))
    times = st.integers(-60, 60).map(lambda hours: at + hours * HOUR) | st.integers(at - 60 * HOUR, at + 60 * HOUR)
    any_time = st.one_of(*[times] * 8, st.integers(us(1900, 1, 1), us(2100, 1, 1)), st.none())
    event = st.fixed_dictionaries(
        {
            "ts": any_time,
            "k": st.sampled_from(["a", "b", None]),
            "g": st.just(0),
            "v": st.none() | st.integers(-100, 100),
            "f": st.none() | st.sampled_from([0.0, -1.5, 2.0]),
        }
    )
    steps: list[list[Event] | int] = []
    number = 0
    for step in draw(st.lists(st.lists(event, max_size=8) | times, min_size=1, max_size=10)):
        if isinstance(step, list):
            step = [{**each, "id": number + i} for i, each in enumerate(step)]
            number += len(step)
        steps.append(step)
    day, month = Dates(1, "day", zone), Dates(1, "month", zone)
    definitions: Any = draw(
        st.sampled_from(
            [
                (day,),
                (day, month),
                (Dates(1, "day", zone, 6 * HOUR, DAY), month),
                (Dates(1, "week", zone), Dates(1, "day", "Asia/Kolkata")),
                (Definition(6 * HOUR, 6 * HOUR), day),
                (Definition(25 * HOUR, 5 * HOUR), Dates(3, "day", zone), month),
                (Definition(24 * HOUR, 24 * HOUR), day),
            ]
        )
    )
    return Mixed(definitions, draw(st.sampled_from([0, 5 * HOUR, 3 * DAY])), ("k",), (*steps, us(2100, 3, 1)))


@pytest.mark.parametrize("name", ["standard", "tiny"])
@some(1 / 2)
@given(scenario=scenarios())
def test_calendar_windows_are_what_the_oracle_says(name: str, scenario: Mixed) -> None:
    calls, _ = run(scenario, policy(name, scenario.bound), aggregates=AGGREGATES)
    for rows, (panes, dropped) in zip(calls, truth(scenario, aggregated), strict=True):
        assert panes_of(rows, scenario, list(AGGREGATES)) == expected_panes(panes)
        assert drops_of(rows, scenario) == expected_drops(dropped)


def total(key: Any, window: aion.Window, batches: Any) -> dict[str, int]:
    return {"total": sum(v or 0 for batch in batches for v in batch.column("v").to_pylist())}


@some(1 / 4)
@given(scenario=scenarios())
def test_functions_get_the_events_of_their_calendar_windows(scenario: Mixed) -> None:
    calls, _ = run(
        scenario,
        policy("tiny", scenario.bound),
        apply=aion.Apply(total, "total long"),
    )
    said = truth(scenario, lambda events: {"total": sum(e["v"] or 0 for e in events)})
    for rows, (panes, dropped) in zip(calls, said, strict=True):
        assert panes_of(rows, scenario, ["total"]) == expected_panes(panes)
        assert drops_of(rows, scenario) == expected_drops(dropped)


def test_days_have_23_24_and_25_hours_and_share_slices_with_sessions() -> None:
    days = [us(2026, 3, 28, 22), us(2026, 3, 28, 23), us(2026, 3, 29, 21, 59), us(2026, 10, 25, 12)]
    events = table([{"id": i, "ts": t, "k": "a", "v": 1} for i, t in enumerate(days)])
    with aion.LocalOperator(
        windows={"day": aion.Calendar("1 day", "Europe/Berlin"), "visit": aion.Session("2 hours")},
        time="ts",
        key="k",
        aggregates={"n": A.count()},
    ) as operator:
        operator.process(events)
        rows = rows_of(operator.advance(us(2027, 1, 1)))
    found = {
        (r["window_start"], (r["window_end"] - r["window_start"]) / HOUR, r["n"]) for r in rows if r["window"] == "day"
    }
    assert found == {(us(2026, 3, 27, 23), 24, 1), (us(2026, 3, 28, 23), 23, 2), (us(2026, 10, 24, 22), 25, 1)}
    visits = [(r["window_start"], r["n"]) for r in rows if r["window"] == "visit"]
    assert sorted(visits) == [(days[0], 2), (days[2], 1), (days[3], 1)]


def test_a_time_without_a_zone_is_refused() -> None:
    naive = pa.schema([f if f.name != "ts" else pa.field("ts", pa.timestamp("us")) for f in SCHEMA])
    with pytest.raises(SchemaError, match=r"'ts' have no time zone.*timestamp_ntz"):
        aion.LocalOperator(
            windows=aion.Calendar("1 day", "UTC"), time="ts", aggregates={"n": A.count()}, input_schema=naive
        )
