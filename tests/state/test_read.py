"""``aion.state.read``: what lies in a state folder, compared with what the events say."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aion
from aion import aggregates as A
from aion.core.join.plan import ASOF, OUTER_LEFT, JoinPlan, Side
from aion.errors import ConfigError, MissingState
from aion.spec import Spec
from aion.state import read
from state_backends.server.reading import VersionReader
from tests import documents
from tests.object_store import CREDENTIALS, ObjectStore, serving
from tests.state.rig import RunningJoin, RunningWindows, running

S = 1_000_000
TS = pa.timestamp("us", "UTC")
SCHEMA = pa.schema([("k", pa.int64()), ("ts", TS), ("v", pa.int64())])
Event = tuple[int, int, int]


def spec(*windows: Any, bound: str = "20 seconds", **more: Any) -> Spec:
    what = more.pop("what", {"aggregates": {"n": A.count(), "total": A.sum("v"), "middle": A.median("v")}})
    return Spec(key="k", time="ts", windows=windows, bound=bound, **what, **more)


def batch_of(events: list[Event]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [{"k": k, "ts": datetime.fromtimestamp(s, UTC), "v": v} for k, s, v in events], SCHEMA
    )


def random_batches(seed: int, batches: int = 4, many: int = 40) -> list[tuple[int | None, list[Event]]]:
    """Batches of events, with the watermark before each, in seconds. No event is too late for a bound of 20 s."""
    chance = random.Random(seed)
    found: list[tuple[int | None, list[Event]]] = []
    for number in range(batches):
        at = 10 * number
        found.append(
            (
                at or None,
                [(chance.randrange(6), at + chance.randrange(-8, 25), chance.randrange(100)) for _ in range(many)],
            )
        )
    return found


def seconds(value: datetime | None) -> int | None:
    return None if value is None else int(value.timestamp())


def shown(rows: pa.Table) -> dict[tuple[int, int, int | None], tuple[int, int, float]]:
    return {
        (row["k"], seconds(row["window_start"]), seconds(row["window_end"])): (row["n"], row["total"], row["middle"])
        for row in rows.to_pylist()
    }


def aggregates_of(values: list[int]) -> tuple[int, int, float]:
    ordered, n = sorted(values), len(values)
    return n, sum(values), (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def live_windows(events: list[Event], at: int | None, size: int, slide: int, bound: int) -> dict[Any, Any]:
    found = defaultdict(list)
    for k, s, v in events:
        start = s - s % slide
        while start > s - size:
            found[k, start, start + size].append(v)
            start -= slide
    return {w: aggregates_of(vs) for w, vs in found.items() if at is None or w[2] + bound > at}


@pytest.mark.slow
@given(seed=st.integers(0, 10_000))
def test_live_windows_hold_what_their_events_say_as_of_each_batch(
    seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("state")
    query = RunningWindows(folder, str(folder / "state"), spec(aion.Sliding("20 seconds", "10 seconds")), SCHEMA)
    with running(query):
        so_far: list[Event] = []
        wanted = []
        for at, events in random_batches(seed):
            query.batch(batch_of(events), None if at is None else at * S)
            so_far += events
            wanted.append(live_windows(so_far, at, 20, 10, 20))
            assert shown(read(query.place).read_all()) == wanted[-1]
        for number, live in enumerate(wanted):
            assert shown(read(query.place, batch=number).read_all()) == live


def sessions_of(events: list[Event], gap: int, at: int, bound: int) -> dict[Any, Any]:
    by_key = defaultdict(list)
    for k, s, v in sorted(events):
        by_key[k].append((s, v))
    found = {}
    for k, own in by_key.items():
        parts: list[list[tuple[int, int]]] = []
        for s, v in own:
            if parts and s - parts[-1][-1][0] <= gap:
                parts[-1].append((s, v))
            else:
                parts.append([(s, v)])
        for part in parts:
            if part[-1][0] + gap + bound > at:
                found[k, part[0][0], part[-1][0] + gap] = aggregates_of([v for _, v in part])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_open_sessions_hold_what_their_events_say(tmp_path: Path, seed: int) -> None:
    query = RunningWindows(tmp_path, str(tmp_path / "state"), spec(aion.Session("3 seconds")), SCHEMA)
    with running(query):
        so_far: list[Event] = []
        for at, events in random_batches(seed, many=12):
            query.batch(batch_of(events), None if at is None else at * S)
            so_far += events
            assert shown(read(query.place).read_all()) == sessions_of(so_far, 3, at or -(10**6), 20)


def test_a_row_says_how_long_its_window_is_kept_and_what_it_takes(tmp_path: Path) -> None:
    query = RunningWindows(tmp_path, str(tmp_path / "state"), spec(aion.Tumbling("10 seconds")), SCHEMA)
    with running(query):
        query.batch(batch_of([(1, 3, 1), (1, 12, 2)]), None)
        query.batch(batch_of([(1, 4, 5)]), 11 * S)
        late, active = sorted(read(query.place).read_all().to_pylist(), key=lambda row: row["window_start"])
    assert (late["status"], late["events"], late["late_events"]) == ("late", 2, 1)
    assert (active["status"], active["events"], active["late_events"]) == ("active", 1, 0)
    assert late["bound"] == timedelta(seconds=20) and seconds(late["closes_at"]) == 30
    assert late["window"] == "tumbling 10 seconds" and late["bytes"] > active["bytes"] > 0


def test_events_that_are_kept_for_a_function_are_counted(tmp_path: Path) -> None:
    what = {"apply": aion.Apply(lambda *_: None, schema="x bigint")}
    query = RunningWindows(tmp_path, str(tmp_path / "state"), spec(aion.Tumbling("10 seconds"), what=what), SCHEMA)
    with running(query):
        query.batch(batch_of([(1, 3, 1), (1, 4, 2), (2, 3, 1)]), None)
        rows = read(query.place).read_all()
    assert sorted((row["k"], row["events"]) for row in rows.to_pylist()) == [(1, 2), (2, 1)]
    assert "n" not in rows.schema.names


def test_windows_of_a_number_of_events_and_those_beside_them(tmp_path: Path) -> None:
    asked = spec(aion.Count(3), aion.Tumbling("1 hour"))
    with running(RunningWindows(tmp_path, str(tmp_path / "state"), asked, SCHEMA)) as query:
        query.batch(batch_of([(1, second, 1) for second in range(5)]), None)
        rows = read(query.place).read_all().to_pylist()
    found = [(row["window"], row["n"], seconds(row["window_end"])) for row in rows]
    assert sorted(found, key=str) == [("count 3", 2, None), ("count 3", 3, 2), ("tumbling 1 hour", 5, 3600)]
    assert all(row["bytes"] > 0 for row in rows)


def test_a_session_takes_the_bytes_of_its_own_slices(tmp_path: Path) -> None:
    with running(RunningWindows(tmp_path, str(tmp_path / "state"), spec(aion.Session("3 seconds")), SCHEMA)) as query:
        query.batch(batch_of([(1, 1, 1), *((key, 10**5, 1) for key in range(50))]), None)
        rows = read(query.place).read_all().to_pylist()
    few, *many = sorted(rows, key=lambda row: row["window_start"])
    assert 0 < few["bytes"] < many[0]["bytes"] and len({row["bytes"] for row in many}) == 1


class Counted:
    """Counts the blocks and the keys that are read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.readers: list[VersionReader] = []
        before = VersionReader.__init__

        def init(reader: VersionReader, *arguments: Any) -> None:
            before(reader, *arguments)
            self.readers.append(reader)

        monkeypatch.setattr(VersionReader, "__init__", init)

    def take(self) -> tuple[int, int, int]:
        """Returns the shards, blocks and keys that have been read since the last call."""
        readers, self.readers = self.readers, []
        return len(readers), sum(r.blocks_read for r in readers), sum(r.keys_read for r in readers)


def test_what_is_not_asked_for_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = spec(aion.Tumbling("10 seconds"))
    with running(RunningWindows(tmp_path, str(tmp_path / "state"), asked, SCHEMA, shards=4)) as query:
        events = [(k, s, k) for k in range(40) for s in range(0, 100, 5)]
        query.batch(batch_of(events), None)
        counted = Counted(monkeypatch)
        assert read(query.place).read_all().num_rows == 400
        shards, blocks, _ = counted.take()
        assert shards == 4 and blocks >= 4
        rows = read(query.place, key={"k": 7}, window=(30 * S, 50 * S)).read_all().to_pylist()
        assert [(row["k"], seconds(row["window_start"]), row["total"]) for row in rows] == [(7, 30, 14), (7, 40, 14)]
        shards, some, _ = counted.take()
        assert shards == 1 and some <= blocks // 4
        assert read(query.place, key=[{"k": 7}, {"k": 8}]).read_all().num_rows == 20
        with pytest.raises(ConfigError, match="give all of its columns"):
            read(query.place, key={"segment": 7})


def test_a_stretch_of_time_begins_with_its_start(tmp_path: Path) -> None:
    """An event at the end of a session, or of a window per record, is in it; no other window has its end."""
    asked = spec(aion.Tumbling("10 seconds"), aion.Session("3 seconds"), aion.PerRecord("5 seconds"))
    with running(RunningWindows(tmp_path, str(tmp_path / "state"), asked, SCHEMA)) as query:
        query.batch(batch_of([(1, 7, 1)]), None)
        query.batch(batch_of([(2, 30, 1)]), 20)
        found = {}
        for at in (7, 8, 9, 10, 11):
            rows = read(query.place, key={"k": 1}, window=(at * S, (at + 1) * S)).read_all()
            found[at] = sorted(end.timestamp() for end in rows["window_end"].to_pylist())
    assert found == {7: [7, 10, 10], 8: [10, 10], 9: [10, 10], 10: [10], 11: []}


@pytest.mark.slow(if_tiny=True)
def test_of_sessions_only_the_pages_of_a_key_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = spec(aion.Session("3 seconds"))
    with running(RunningWindows(tmp_path, str(tmp_path / "state"), asked, SCHEMA, shards=1)) as query:
        query.batch(batch_of([(k, 1, k) for k in range(400)]), None)
        counted = Counted(monkeypatch)
        assert read(query.place).read_all().num_rows == 400
        pages = counted.take()[2]
        (row,) = read(query.place, key={"k": 123}).read_all().to_pylist()
        assert row["total"] == 123 and counted.take()[2] == 1 < pages


def test_a_read_goes_on_when_its_versions_are_deleted(tmp_path: Path) -> None:
    asked = spec(aion.Tumbling("10 seconds"))
    with running(RunningWindows(tmp_path, str(tmp_path / "state"), asked, SCHEMA, retain=1)) as query:
        for number in range(3):
            query.batch(batch_of([(k, 1, number) for k in range(10)]), None)
        rows = read(query.place)
        for _ in range(5):
            query.batch(batch_of([(k, 1, 100) for k in range(10)]), None)
        assert {row["total"] for row in rows.read_all().to_pylist()} == {3}
        with pytest.raises(MissingState, match=r"later batch|deleted"):
            read(query.place, batch=2).read_all()


def test_a_batch_that_is_not_complete_is_not_read(tmp_path: Path) -> None:
    asked = spec(aion.Tumbling("10 seconds"))
    with running(RunningWindows(tmp_path, str(tmp_path / "state"), asked, SCHEMA)) as query:
        query.batch(batch_of([(k, 1, 1) for k in range(10)]), None)
        query.batch(batch_of([(k, 1, 1) for k in range(10)]), None, complete=False)
        assert {row["total"] for row in read(query.place).read_all().to_pylist()} == {1}
        with pytest.raises(ConfigError, match="not complete"):
            read(query.place, batch=1)


def test_the_version_of_the_attempt_that_won_is_read(tmp_path: Path) -> None:
    asked = spec(aion.Tumbling("10 seconds"))
    with running(RunningWindows(tmp_path, str(tmp_path / "state"), asked, SCHEMA, shards=1)) as query:
        query.batch(batch_of([(1, 1, 1)]), None)
        before = list(query.tokens)
        query.batch(batch_of([(1, 1, 10)]), None, complete=False)
        # Spark gives that attempt up, and another one runs the batch.
        query.tokens = before
        token, attempt, snapshot = query.attempt(0, "z")
        attempt.append([])
        query.tokens[0] = query.shards[0].commit(token, dict(snapshot))
        query.complete()
        with pytest.raises(MissingState, match="only Spark knows"):
            read(query.place)
        query.batch(batch_of([(1, 1, 100)]), None)
        assert [row["total"] for row in read(query.place, batch=1).read_all().to_pylist()] == [1]


def test_functions_are_given_again(tmp_path: Path) -> None:
    import pyarrow.compute as pc

    own = A.aggregate(
        "v", lift=lambda v: v, combine=lambda a, b: [pc.add(a[0], b[0])], lower=lambda t: t,
        partial="t bigint", result="bigint", name="adding",
    )  # fmt: skip
    asked = spec(aion.Tumbling("10 seconds"), what={"aggregates": {"mine": own}})
    with running(RunningWindows(tmp_path, str(tmp_path / "state"), asked, SCHEMA)) as query:
        query.batch(batch_of([(1, 1, 4), (1, 2, 5)]), None)
        with pytest.raises(ConfigError, match="give aggregates="):
            read(query.place)
        assert read(query.place, aggregates={"mine": own}).read_all().column("mine").to_pylist() == [9]
        with pytest.raises(ConfigError, match="not the aggregates"):
            read(query.place, aggregates={"mine": A.max("v")})


@pytest.mark.slow
@pytest.mark.usual_sizes
def test_a_large_state_comes_in_batches(tmp_path: Path) -> None:
    asked = spec(aion.Tumbling("10 seconds"))
    with running(RunningWindows(tmp_path, str(tmp_path / "state"), asked, SCHEMA, shards=1)) as query:
        events = pa.RecordBatch.from_arrays(
            [pa.array(range(200_000)), pa.array([S] * 200_000).cast(TS), pa.array(range(200_000))], schema=SCHEMA
        )
        query.batch(events, None)
        batches = list(read(query.place))
    assert sum(batch.num_rows for batch in batches) == 200_000
    assert max(batch.num_rows for batch in batches) <= 1 << 16


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with serving() as port:
        yield ObjectStore(port)


@pytest.mark.slow
def test_a_place_may_be_an_object_store(tmp_path: Path, store: ObjectStore) -> None:
    asked = spec(aion.Tumbling("10 seconds"), aion.Session("3 seconds"))
    with running(RunningWindows(tmp_path, store.uri("state"), asked, SCHEMA)) as query:
        query.batch(batch_of([(k, 1, k) for k in range(10)]), None)
        there = store.objects()
        assert read(query.place).read_all().num_rows == 20
        assert store.objects() == there


SIDES = [pa.schema([("k", pa.int64()), (f"{n}_ts", TS), (n, pa.int64())]) for n in ("left", "right")]


def rows_of(side: int, rows: list[Event]) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else ((), (), ())
    k, s, v = map(list, columns)
    times = pa.array([x * S for x in s], pa.int64()).cast(TS)
    return pa.table([pa.array(k, pa.int64()), times, pa.array(v, pa.int64())], schema=SIDES[side])


@pytest.mark.parametrize("how", [OUTER_LEFT, ASOF])
def test_open_rows_of_a_join_are_those_that_may_still_match(tmp_path: Path, how: str) -> None:
    left, right = (Side(s, s.names[1], (s.names[2],), False, 10 * S) for s in SIDES)
    plan = JoinPlan(left, right, ("k",), 0, 5 * S, how)
    kept = {"left": 15, "right": 15 if how == ASOF else 10}
    chance = random.Random(7)
    with running(RunningJoin(tmp_path, str(tmp_path / "state"), plan)) as query:
        all_rows: list[tuple[str, int, int, int]] = []
        for at in (None, 20, 40, 200):
            base = at or 0
            new = [
                [(chance.randrange(4), base + chance.randrange(0, 20), chance.randrange(10**9)) for _ in range(30)]
                for _ in SIDES
            ]
            query.batch(rows_of(0, new[0]), rows_of(1, new[1]), None if at is None else at * S)
            all_rows += [(n, *row) for n, rows in zip(("left", "right"), new, strict=True) for row in rows]
            found = read(query.place).read_all().to_pylist()
            line = -(10**9) if at is None else at - 10
            wanted = [r for r in all_rows if r[2] >= line + 10 - kept[r[0]]]
            closes = {r["closes_at"] - r["event_time"] - timedelta(seconds=kept[r["side"]]) for r in found}
            assert closes == {timedelta(microseconds=1)}
            assert sorted((r["side"], r["k"], seconds(r["event_time"]), r[r["side"]]) for r in found) == sorted(wanted)
            assert all(r["matched"] is None for r in found if r["side"] == "right")
            pairs = {
                (k, v) for n, k, s, v in all_rows if n == "left"
                if any(m == "right" and k == j and s <= t <= s + 5 for m, j, t, _ in all_rows)
            }  # fmt: skip
            assert {(r["k"], r["left"]) for r in found if r["matched"]} <= pairs
            one = read(query.place, key={"k": 2}, window=(base * S, (base + 9) * S)).read_all().to_pylist()
            assert sorted((r["side"], r["k"], seconds(r["event_time"]), r[r["side"]]) for r in one) == sorted(
                r for r in wanted if r[1] == 2 and base <= r[2] < base + 9
            )


@pytest.mark.slow
def test_the_page_about_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("duckdb")
    schema = pa.schema([("segment", pa.int64()), ("ts", TS)])
    asked = Spec(key="segment", time="ts", windows=aion.Tumbling("1 minute"), aggregates={"cars": A.count()})
    monkeypatch.chdir(tmp_path)
    with running(RunningWindows(tmp_path, "state/", asked, schema)) as query:
        times = pa.array([S, 2 * S, 3 * S]).cast(TS)
        query.batch(pa.RecordBatch.from_arrays([pa.array([7, 7, 8]), times], schema=schema), None)
        (block,) = (b for b in documents.blocks("python") if documents.is_in(b, "docs/how-to/looking-into-state.md"))
        # DuckDB reads in threads of its own, which stay.
        path = os.pathsep.join([str(documents.ROOT), os.environ.get("PYTHONPATH", "")])
        said = subprocess.run(
            [sys.executable, "-c", block.text], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
        )
    assert "segment" in said.stdout, said.stderr


def test_several_operators_are_listed(tmp_path: Path) -> None:
    asked = spec(aion.Tumbling("10 seconds"))
    with running(RunningWindows(tmp_path, str(tmp_path / "state"), asked, SCHEMA)) as query:
        query.batch(batch_of([(1, 1, 1)]), None)
        with pytest.raises(ConfigError, match="name='traffic'"):
            read(query.place, name="other")
