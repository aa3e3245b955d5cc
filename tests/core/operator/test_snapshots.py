"""A version can be written whatever the numbers are, and what is read again goes on as if nothing had been."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.base.hashing import ShardOfKeys
from aion.base.numbers import EARLIEST_US, LATEST_US, LONGEST_US, MOST, plus, sum_of, sums_by
from aion.config import load_policy
from aion.core.compaction import BlockFact, Compact, CompactionDone
from aion.core.ingest.encoding import About, decode, encode
from aion.core.keyed.orders import RowArrivals
from aion.core.keyed.table import Table
from aion.core.life.actions import Arrived, BatchEnded, Event, Forget, SliceFacts, WatermarkAdvanced
from aion.core.operator.operator import Operator
from aion.core.packing import table, untable
from aion.core.query.plan import Plan, make_plan
from aion.core.slicing.grid import BEYOND_SLICE, NO_SLICE
from aion.execute.assembly import make_builder, make_operator
from aion.local import LocalOperator
from state_backends.format.ordered_map import MemoryMap
from state_backends.server import requests
from state_backends.server.verbs import Way, request_of
from state_backends.store.codec_pool import CodecPool
from state_backends.versions.json_values import dumps
from state_backends.versions.manifest import Identity, Manifest, dump, load
from tests.durations import us

DAY = 86_400_000_000


def written(snapshot: dict[str, Any]) -> dict[str, Any]:
    """As it comes out of the manifest of a commit: from the client, over the server's border, into a file and back."""
    request = {"attempt": "s", "snapshot": snapshot, "prestage": [], "executions": []}
    taken = request_of("commit", dumps(request), Way.JSON)
    assert isinstance(taken, requests.CommitRequest)
    identity = Identity("q", "o", 0, 1, {})
    found = load(dump(Manifest("t", None, 1, identity, (), 0, taken.snapshot)), "t").snapshot
    assert found == json.loads(json.dumps(snapshot)), "every number is read as it was"
    return found


def numbers_of(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [n for inner in value.values() for n in numbers_of(inner)]
    if isinstance(value, list | tuple):
        return [n for inner in value for n in numbers_of(inner)]
    return [value] if isinstance(value, int | float) else []


# -- one shard, from version to version -------------------------------------------------------------------------


class Life:
    """An operator that lives on, and one that starts again from its versions: both say the same."""

    def __init__(self, windows: Any, policy: dict[str, Any]) -> None:
        schema = pa.schema([("ts", pa.timestamp("us")), ("k", pa.string())])
        how: dict[str, Any] = {"aggregates": {"n": A.count()}, "apply": None, "outputs": None}
        self.plan: Plan = make_plan(schema, windows=windows, time="ts", key="k", **how)
        self.policy = load_policy(policy)
        self.straight = make_operator(self.plan, self.policy, None)
        self.restarted = make_operator(self.plan, self.policy, None)
        self.values = MemoryMap()
        self.restarted.keep_in(self.values)

    def tell(self, event: Event) -> None:
        assert self.handle(self.straight, event) == self.handle(self.restarted, event)

    def handle(self, of: Operator, event: Event) -> list[str]:
        said = []
        for action in of.handle(event):
            brief = hasattr(action, "windows") or isinstance(action, Forget)
            said.append(type(action).__name__ if brief else repr(action))
            if isinstance(action, Compact):
                of.number(1)
                said += self.handle(of, CompactionDone(action, action.size_bytes // 2))
        return said

    def arrive(self, events: Sequence[tuple[int, int]]) -> None:
        times = np.array([t for t, _ in events], np.int64)
        counts = np.array([n for _, n in events], np.int64)
        slices = self.plan.grid.starts(times)
        segments = self.plan.grid.segments(slices)
        facts = [BlockFact(int(s), n, 100) for s, (_, n) in zip(segments, events, strict=True)]
        facts += [BlockFact(NO_SLICE, MOST, 100), BlockFact(BEYOND_SLICE, 2**62, 100)]
        own = SliceFacts(np.arange(len(events)), slices, counts) if self.plan.grid.has_segments else None
        nothing = np.zeros(len(events), np.int64)
        rows = {"first": times, "last": times, "events": counts, "row": nothing, "mark": nothing}
        keys = pa.array(["ab"[int(t) % 2] for t in times], pa.string())
        arrivals = RowArrivals(Table([keys], rows), np.arange(len(events))) if self.plan.keyed and events else None
        self.tell(Arrived(facts, [arrivals], own))

    def commit(self) -> None:
        """A version, from which one of the two starts again."""
        snapshot = self.restarted.snapshot()
        assert all(-(2**63) <= n < 2**63 if isinstance(n, int) else math.isfinite(n) for n in numbers_of(snapshot))
        assert snapshot == self.straight.snapshot()
        again = make_operator(self.plan, self.policy, written(snapshot))
        again.keep_in(self.values)
        assert again.snapshot() == snapshot
        self.restarted = again


COUNTS = st.integers(1, 9) | st.integers(1, 2**62)
NEAR = st.integers(-3, 3).map(lambda n: n * 20_000_000)
TIMES = st.builds(
    lambda at, by: min(max(at + by, EARLIEST_US), LATEST_US),
    st.sampled_from([0, EARLIEST_US, LATEST_US, 2**53, -(2**40)]) | st.integers(EARLIEST_US, LATEST_US),
    NEAR,
)
WATERMARKS = TIMES | st.sampled_from([-(2**63), 2**63 - 1, 2**70])
STEPS = st.lists(st.tuples(WATERMARKS, st.lists(st.tuples(TIMES, COUNTS), max_size=5)), min_size=1, max_size=6)
WINDOWS = {
    "periodic": [aion.Tumbling("10 s"), aion.Sliding("1 min", "20 s"), aion.Cumulative("20 s", "1 min")],
    "long": [aion.Tumbling(us(LONGEST_US)), aion.Tumbling("1 day")],
    "sessions": [aion.Session("30 s"), aion.Tumbling("1 h")],
    "per record": [aion.PerRecord("1 min")],
    "counts": [aion.Count(2)],
}
TRIGGERS: list[dict[str, Any]] = [
    {"kind": "every_batch"},
    {"kind": "interval", "interval": "1 day"},
    {"kind": "count", "count": 1000},
    {"kind": "staleness", "bound": 0.05},
]


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
@given(
    steps=STEPS,
    trigger=st.sampled_from(TRIGGERS),
    bound=st.sampled_from(["1 min", "4 days", "3652500 days"]),
    learns=st.booleans(),
)
def test_any_count_at_any_time_can_be_written_and_read_again(
    windows: Any, steps: list[Any], trigger: dict[str, Any], bound: str, learns: bool
) -> None:
    lateness = {"initial_bound": bound, "max_bound": bound, "coverage": 0.9 if learns else None}
    life = Life(windows, {"lateness": lateness, "trigger": trigger})
    for watermark, events in steps:
        life.tell(WatermarkAdvanced(watermark))
        life.arrive(events)
        life.tell(BatchEnded())
        life.commit()


@pytest.mark.parametrize(
    ("events", "late_us"),
    [(80_000_000, 3 * DAY), (1_000_000, 365 * DAY), (5_000_000_000, DAY), (2**62, 4_000 * 365 * DAY)],
    ids=["three days late", "a year late", "many", "as many and as late as there is room for"],
)
@pytest.mark.parametrize("trigger", TRIGGERS, ids=lambda trigger: trigger["kind"])
def test_a_backlog_that_comes_late_can_be_committed(events: int, late_us: int, trigger: dict[str, Any]) -> None:
    """Each batch of it, whether its windows are executed or wait; and what it found is known after a restart."""
    bound = f"{2 * late_us} us"
    lateness = {"initial_bound": bound, "max_bound": bound, "coverage": None}
    life = Life([aion.Tumbling("1 day")], {"lateness": lateness, "trigger": trigger})
    life.arrive([(-DAY, events)])
    life.tell(WatermarkAdvanced(1))
    for part in range(4):
        life.arrive([(-DAY, events)])
        life.tell(WatermarkAdvanced(late_us + part))
        life.arrive([(-DAY, events)])
        life.tell(BatchEnded(ends_run=part == 3))
        life.commit()
    windows = life.restarted.windows
    assert windows["events"].tolist() == [min(9 * events, MOST)]
    assert windows["late_events"].tolist() == [min(8 * events, MOST)]
    assert windows["stalest"][0] >= 0.99 * float(late_us) * events


# -- blocks that stand for many events ----------------------------------------------------------------------------


def claimed(plan: Plan, policy: Any, at_us: Sequence[int], events: int) -> list[Any]:
    """Blocks of partials as if so many events had come at each of these times, half of them of either key."""
    pool = CodecPool(0)
    builder = make_builder(plan, policy, pool, ShardOfKeys([0]))
    columns = {"ts": pa.array([t for t in at_us for _ in "ab"], pa.timestamp("us")), "k": list("ab" * len(at_us))}
    rows = pa.table({name: columns[name] for name in plan.schema.names})
    made = [b.block for batch in rows.to_batches() for b in builder.add(batch)]
    made += [b.block for b in builder.finish()]
    pool.close()
    found = []
    for block in made:
        batch = decode(block, plan.block_schema)
        counts = pa.array([events // 2] * batch.num_rows, pa.int64())
        named = zip(batch.schema.names, batch.columns, strict=True)
        columns = [counts if name == "p0" else column for name, column in named]
        header = block.header
        many = pa.RecordBatch.from_arrays(columns, schema=batch.schema)
        found.append(
            encode(many, About(header.kind, header.slice_us, sum_of(counts.to_numpy()), header.min_us, header.max_us))
        )  # fmt: skip
    return found


@pytest.mark.parametrize("events", [80_000_000, 10**10, 2**62])
@pytest.mark.parametrize("windows", [aion.Tumbling("1 day"), aion.Session("1 h")], ids=str)
def test_windows_of_many_events_are_computed_compacted_and_counted(windows: Any, events: int) -> None:
    """Through all of a local operator but the input: blocks that stand for the events are handed to its executor."""
    lateness = {"initial_bound": "1000 days", "max_bound": "1000 days", "coverage": None}
    execution = {"late_share": None}  # so many late events would wait
    policy = load_policy({"lateness": lateness, "trigger": {"kind": "every_batch"}, "execution": execution})
    with LocalOperator(windows=windows, time="ts", key="k", aggregates={"n": A.count()}, policy=policy) as local:
        local.process(pa.table({"ts": pa.array([400 * DAY], pa.timestamp("us")), "k": ["z"]}))
        windows = local._windows
        assert windows is not None
        last: dict[str, tuple[int, int]] = {}
        for batch in range(6):
            rows = list(windows.advance(DAY - 1 if batch == 0 else (100 + batch) * DAY))
            rows += windows.arrive(claimed(windows.plan, policy, [5, 6], events))
            rows += windows.end_batch()
            windows.save()
            written(windows.operator.snapshot())
            for row in pa.Table.from_batches(rows, windows.plan.result_schema).to_pylist():
                if row["kind"] != "retracted":
                    last[row["k"]] = (row["n"], row["events"])
        compacted = [b for _, b in local.store.read([0])]
        assert any(b.header.compacted is not None for b in compacted)
        # Both times are in one slice, so a batch has one row for each key.
        assert last == {key: (min(6 * (events // 2), MOST),) * 2 for key in "ab"}


def test_an_event_whose_time_is_out_of_range_is_dropped_and_the_query_goes_on() -> None:
    with LocalOperator(windows=aion.Tumbling("1 min"), time="ts", aggregates={"n": A.count()}) as local:
        far = [2**63 - 1, -(2**63), LATEST_US + 1, EARLIEST_US - 1]
        rows = local.process(pa.table({"ts": pa.array([*far, 5, None], pa.timestamp("us"))})).to_pylist()
        told = {(row["reason"], row["events"]) for row in rows}
        assert told == {("the event time is out of range", 4), ("the event time is null", 1)}
        assert [row["n"] for row in local.advance(2**63 - 1).to_pylist()] == [1]
        assert local._windows is not None
        written(local._windows.operator.snapshot())


# -- the numbers themselves ----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, MOST) | st.integers(0, 9)), max_size=20))
def test_counts_stop_where_there_is_no_room(counts: list[tuple[int, int]]) -> None:
    of, numbers = (np.array([pair[i] for pair in counts], np.int64) for i in (0, 1))
    exact = [sum(n for group, n in counts if group == wanted) for wanted in range(4)]
    assert sums_by(of, numbers, 4).tolist() == [min(total, MOST) for total in exact]
    assert sum_of(numbers) == min(sum(exact), MOST)
    one_by_one = 0
    for _, n in counts:
        one_by_one = plus(one_by_one, n)
    assert one_by_one == sum_of(numbers)


def test_no_integer_stops_the_encoder() -> None:
    value = {"a": [1, 2**64, {"b": -(2**100)}], "c": 10**400, "d": (2**63, True, None, "x", 0.5)}
    found = json.loads(dumps(value))
    assert found == {"a": [1, 2.0**64, {"b": -(2.0**100)}], "c": 2.0**1000, "d": [2**63, True, None, "x", 0.5]}
    manifest = Manifest("t", None, 1, Identity("q", "o", 0, 1, {}), (), 0, {"next_seq": 1, "odd": 2**64})
    assert load(dump(manifest), "t").snapshot == {"next_seq": 1, "odd": 2.0**64}


@given(
    st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 5), st.floats(allow_nan=False)), max_size=30),
    st.sampled_from([1, 1000, 60_000_000]),
)
def test_packed_columns_are_read_as_they_were(rows: list[tuple[int, int, float]], step: int) -> None:
    columns = {
        "any": [n for n, _, _ in rows],
        "few": [n * step for _, n, _ in rows],
        "runs": [7 + n * step for n in range(len(rows))],
        "measured": [x for _, _, x in rows],
    }
    assert untable(json.loads(json.dumps(table(columns, {"measured"})))) == columns
