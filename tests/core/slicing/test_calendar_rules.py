"""The rules of a time zone change while windows live: an operator that starts again, from its versions, each time.

The zone has rules from real files, which a folder on zoneinfo's path holds: its clocks are those of Berlin, then of a
country that gave up summer time, or moved to the other side of the date line.
"""

from __future__ import annotations

import itertools
import pickle
import zoneinfo
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.base.hashing import ShardOfKeys
from aion.config import load_policy
from aion.core.life.window_table import WindowTable
from aion.core.packing import untable
from aion.core.query.plan import Plan, make_plan
from aion.core.slicing.grid import SliceGrid
from aion.core.timed.calendar_state import calendars_to_json, plan_of_snapshot
from aion.core.timed.purged import Purged
from aion.errors import StateError
from aion.execute.assembly import make_builder, make_operator
from aion.execute.files.zone_rules import FOLDER, ZoneFiles
from aion.zones import zone_rules
from tests.compaction_rig import OfShard, Rig
from tests.examples import some
from tests.operators import make_executor

HOUR = 3_600_000_000
DAY = 24 * HOUR
ZONE = "Somewhere/Here"
SUMMER = (datetime(2026, 7, 1, tzinfo=UTC) - datetime(1970, 1, 1, tzinfo=UTC)).days * DAY
CLOCKS = ("Europe/Berlin", "Etc/GMT-1", "Pacific/Apia", "America/St_Johns")
FILES = {name: zone_rules(name).tzif for name in CLOCKS}
SCHEMA = pa.schema([("ts", pa.timestamp("us", "UTC")), ("k", pa.string())])
DEFINITIONS: dict[str, dict[str, Any]] = {
    "days": {"day": "1 day"},
    "days and months": {"day": "1 day", "month": "1 month"},
    "days and hours": {"day": "1 day", "hour": aion.Tumbling("1 hour")},
    "days and sessions": {"day": "1 day", "visit": aion.Session("3 hours")},
    "weeks in the long": {"week": "1 week", "long": aion.Tumbling("30 days")},
}


@pytest.fixture
def tzpath(tmp_path: Path) -> Iterator[Path]:
    before = zoneinfo.TZPATH
    zoneinfo.reset_tzpath(to=[str(tmp_path)])
    yield tmp_path
    zoneinfo.reset_tzpath(to=before)


def put(folder: Path, clocks: str) -> None:
    path = folder / ZONE
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(FILES[clocks])


class Changing(Rig):
    """A shard whose query starts again with other rules. Children and shard get the plan as Spark's tasks do."""

    def __init__(self, tzpath: Path, windows: dict[str, Any], *, bound: str, kept: bool) -> None:
        self.tzpath, self.windows, self.kept = tzpath, windows, kept
        put(tzpath, CLOCKS[0])
        policy = load_policy(
            {"lateness": {"initial_bound": bound, "coverage": None}, "trigger": {"kind": "every_batch"}}
        )
        super().__init__(self.made(), policy)

    def made(self) -> Plan:
        windows = {
            name: aion.Calendar(window, ZONE) if isinstance(window, str) else window
            for name, window in self.windows.items()
        }
        how: dict[str, Any] = {"aggregates": {"n": A.count()}, "apply": None, "outputs": None}
        if self.kept:
            how = {"aggregates": None, "apply": counted, "outputs": "n long"}
        return make_plan(SCHEMA, key="k", time="ts", windows=windows, **how)

    def restart(self, clocks: str) -> None:
        put(self.tzpath, clocks)
        self.plan = self.made()
        self.crash()

    def run(self, times: list[int], watermark: int | None) -> list[dict[str, Any]]:
        """A batch with these events. Returns its rows."""
        files = ZoneFiles(str(self.folder / "checkpoint"), "windowed")
        builder = make_builder(files.sliced(self.plan), self.policy, self.pool, ShardOfKeys([0]))
        events = pa.record_batch([pa.array(times, pa.int64()).cast(SCHEMA[0].type), ["a"] * len(times)], schema=SCHEMA)
        blocks = [made.block for made in [*builder.add(events), *builder.finish()]]
        self.attempts += 1
        attempt = f"{self.attempts:010d}-0"
        files.add(self.plan)
        snapshot = self.shard.open(self.token, attempt, self.shard.identity)
        plan = plan_of_snapshot(self.plan, snapshot)
        if plan is not self.plan:
            files.check(snapshot)
        operator = make_operator(plan, self.policy, snapshot)
        executor = make_executor(plan, operator, OfShard(self.shard, attempt), self.pool, self.policy)
        batches = list(executor.advance(watermark)) if watermark is not None else []
        batches += [*executor.arrive(blocks), *executor.end_batch()]
        operator.validate()
        executor.save()
        self.operator = operator
        self.shard.commit(attempt, operator.snapshot())
        self.token = attempt
        rows = pa.Table.from_batches(batches, plan.result_schema)
        for name in ("window_start", "window_end"):
            column = rows.column(name).cast(pa.int64())
            rows = rows.set_column(rows.column_names.index(name), name, column)
        return rows.to_pylist()

    def live(self, name: str) -> set[tuple[int, int]]:
        """The windows of a definition that live."""
        number = list(self.windows).index(name)
        return {(ref.start_us, ref.end_us) for ref in self.operator.windows.refs() if ref.definition == number}


def counted(key: Any, window: aion.Window, batches: Any) -> dict[str, int]:
    return {"n": sum(batch.num_rows for batch in batches)}


times = st.integers(-5 * 24 * 4, 5 * 24 * 4).map(lambda quarters: SUMMER + quarters * HOUR // 4)
batches = st.lists(
    st.tuples(st.sampled_from([None, None, *CLOCKS]), st.lists(times, max_size=6), st.none() | times),
    min_size=2,
    max_size=8,
)


def scenario(tzpath: Path, name: str, kept: bool, bound: str, steps: Any) -> tuple[list[int], list[dict[str, Any]]]:
    """All events, and all rows. A window that lives keeps its edges from one batch to the next."""
    rig = Changing(tzpath, DEFINITIONS[name], bound=bound, kept=kept)
    events: list[int] = []
    rows: list[dict[str, Any]] = []
    try:
        for clocks, more, watermark in [*steps, (None, [], SUMMER + 400 * DAY)]:
            if clocks is not None:
                rig.restart(clocks)
            events += more
            rows += rig.run(more, watermark)
    finally:
        rig.close()
    return events, rows


@pytest.mark.parametrize("kept", [False, True], ids=["partials", "events"])
@pytest.mark.parametrize("name", DEFINITIONS)
@some(1 / 8)
@given(steps=batches)
def test_each_event_is_in_one_window_of_each_definition(name: str, kept: bool, steps: Any) -> None:
    with TemporaryDirectory() as folder:
        before = zoneinfo.TZPATH
        zoneinfo.reset_tzpath(to=[folder])
        try:
            events, rows = scenario(Path(folder), name, kept, "60 days", steps)
        finally:
            zoneinfo.reset_tzpath(to=before)
    assert not [row for row in rows if row["kind"] == "dropped"]
    for window in DEFINITIONS[name]:
        last: dict[tuple[int, int], int] = {}
        for row in rows:
            if row["window"] == window:
                place = row["window_start"], row["window_end"]
                last[place] = row["n"]
                if row["kind"] == "retracted":
                    del last[place]
        inclusive = window == "visit"  # an event at the end of a session moves it
        held = {(s, e): sum(s <= t < e or (inclusive and t == e) for t in events) for s, e in last}
        assert last == held, "a window has the events between its edges"
        assert sum(held.values()) == len(events), "no event is in two windows, or in none"


@pytest.mark.parametrize("name", ["days", "days and hours"])
@some(1 / 4)
@given(steps=batches)
@example(  # the day of both events is gone by the old rules, and would not be by the new ones
    steps=[
        (None, [SUMMER + 22 * HOUR], None),
        (None, [], SUMMER + 51 * HOUR),
        ("Etc/GMT-1", [SUMMER + 23 * HOUR], None),
    ]
)
def test_what_is_gone_stays_gone(name: str, steps: Any) -> None:
    with TemporaryDirectory() as folder:
        before = zoneinfo.TZPATH
        zoneinfo.reset_tzpath(to=[folder])
        try:
            events, rows = scenario(Path(folder), name, False, "5 hours", steps)
        finally:
            zoneinfo.reset_tzpath(to=before)
    for window in DEFINITIONS[name]:
        own = [row for row in rows if row["window"] == window]
        last = {(row["window_start"], row["window_end"]): row["n"] for row in own if row["kind"] != "dropped"}
        dropped = sum(row["events"] for row in own if row["kind"] == "dropped")
        assert sum(last.values()) + dropped == len(events)
        ends = sorted(last)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends)), "windows do not overlap"


def test_windows_that_live_keep_their_edges_and_others_follow_the_new_rules(tzpath: Path) -> None:
    rig = Changing(tzpath, DEFINITIONS["days"], bound="10 days", kept=False)
    rig.run([SUMMER + 12 * HOUR], None)
    first = (SUMMER - 2 * HOUR, SUMMER + 22 * HOUR)
    assert rig.live("day") == {first}
    rig.restart("Etc/GMT-1")  # an hour less: days begin an hour later
    rig.run([SUMMER - 2 * HOUR, SUMMER + 22 * HOUR - 1, SUMMER + 22 * HOUR, SUMMER + 3 * DAY], None)
    after = (SUMMER + 22 * HOUR, SUMMER + 47 * HOUR)
    later = (SUMMER + 71 * HOUR, SUMMER + 95 * HOUR)
    assert rig.live("day") == {first, after, later}, "the day between has 25 hours"
    rig.restart("Europe/Berlin")
    rig.run([SUMMER + 47 * HOUR - 1, SUMMER + 5 * DAY], None)
    assert rig.live("day") == {first, after, later, (SUMMER + 118 * HOUR, SUMMER + 142 * HOUR)}
    rows = rig.run([], SUMMER + 20 * DAY)
    found = Counter({(row["window_start"], row["window_end"]): row["n"] for row in rows})
    assert found == {first: 3, after: 2, later: 1, (SUMMER + 118 * HOUR, SUMMER + 142 * HOUR): 1}
    rig.close()


def test_what_a_session_still_needs_is_found_although_its_day_is_gone(tzpath: Path) -> None:
    rig = Changing(tzpath, {"day": "1 day", "visit": aion.Session("3 days")}, bound="1 hour", kept=False)
    rig.run([SUMMER + 20 * HOUR], None)
    (row,) = rig.run([], SUMMER + 30 * HOUR)
    assert (row["window"], row["kind"], rig.live("day")) == ("day", "on_time", set())
    rig.restart("Etc/GMT-1")
    rows = rig.run([], SUMMER + 10 * DAY)
    assert [(row["window"], row["n"]) for row in rows] == [("visit", 1)]
    rig.close()


def test_a_window_that_is_gone_keeps_its_edges_while_it_is_remembered(tzpath: Path) -> None:
    put(tzpath, "Europe/Berlin")
    grid = SliceGrid([aion.Calendar("1 day", ZONE)])
    gone = Purged(grid.aligned)
    starts = np.array([SUMMER - 2 * HOUR])
    gone.add(np.zeros(1, np.int64), starts, starts + DAY)
    (kept,) = calendars_to_json(grid, WindowTable(1), gone, [])["calendars"].values()
    assert untable(kept["edges"])["start_us"] == [SUMMER - 2 * HOUR, SUMMER + 22 * HOUR]
    gone.close(SUMMER + 22 * HOUR)
    assert gone.contains(np.zeros(1, np.int64), starts, starts + DAY).all()
    assert not gone.contains(np.zeros(1, np.int64), starts + DAY, starts + 2 * DAY).any()
    (kept,) = calendars_to_json(grid, WindowTable(1), gone, [])["calendars"].values()
    assert untable(kept["edges"])["start_us"] == [SUMMER + 22 * HOUR], "the end of the last window that is gone"


def test_rules_that_say_the_same_pin_nothing(tzpath: Path) -> None:
    rig = Changing(tzpath, DEFINITIONS["days and months"], bound="10 days", kept=False)
    rig.run([SUMMER], None)
    put(tzpath, "Etc/GMT-1")
    winter = Changing(tzpath, DEFINITIONS["days and months"], bound="10 days", kept=False)
    assert plan_of_snapshot(rig.plan, rig.operator.snapshot()) is rig.plan
    assert plan_of_snapshot(winter.plan, None) is winter.plan
    rig.close()
    winter.close()


def test_a_query_whose_earlier_rules_are_lost_says_so(tzpath: Path) -> None:
    rig = Changing(tzpath, DEFINITIONS["days"], bound="10 days", kept=False)
    rig.run([SUMMER], None)
    for file in (rig.folder / "checkpoint" / FOLDER / "windowed").iterdir():
        file.unlink()
    rig.restart("Etc/GMT-1")
    with pytest.raises(StateError, match=r"lacks the earlier ones.*copy the folder aion-zones"):
        rig.run([SUMMER], None)
    rig.close()


def test_a_damaged_file_is_noticed(tzpath: Path) -> None:
    rig = Changing(tzpath, DEFINITIONS["days"], bound="10 days", kept=False)
    rig.run([SUMMER], None)
    (file,) = (rig.folder / "checkpoint" / FOLDER / "windowed").iterdir()
    assert file.name.startswith("Somewhere%2FHere-") and file.read_bytes() == FILES["Europe/Berlin"]
    file.write_bytes(b"TZif")
    rig.restart("Etc/GMT-1")
    with pytest.raises(StateError, match="damaged"):
        rig.run([SUMMER], None)
    rig.close()


def test_without_a_zone_database_a_plan_still_knows_its_edges(tzpath: Path) -> None:
    """An executor may have none, or another one."""
    put(tzpath, "Europe/Berlin")
    data = pickle.dumps(aion.Calendar("1 day", ZONE))
    (tzpath / ZONE).unlink()
    window = pickle.loads(data)
    assert window.edges.floors(np.array([SUMMER])).tolist() == [SUMMER - 2 * HOUR]
