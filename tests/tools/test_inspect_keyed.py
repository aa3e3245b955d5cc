"""`aion inspect` of windows that each key has its own of: sessions, counts, per record, punctuated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from typer.testing import CliRunner

import aion
from aion import aggregates as A
from aion.base.hashing import ShardOfKeys
from aion.cli import app
from aion.config import load_policy
from aion.core.keyed.summary import LISTED
from aion.core.operator.overview import KeyedWindow, keyed_windows
from aion.core.query.plan import make_plan
from aion.execute.assembly import make_builder, make_operator
from state_backends.backends import Stores
from state_backends.files.storage import LocalStorage
from state_backends.store.codec_pool import CodecPool
from state_backends.store.io_thread import IoThread
from state_backends.store.m_bucket import MemoryBudget
from state_backends.store.options import StoreOptions
from state_backends.versions.manifest import Identity
from state_backends.versions.shard import Shard
from tests.durations import us
from tests.format.test_state_format import OfShard
from tests.operators import make_executor

SECOND = 1_000_000
SCHEMA = pa.schema([("user", pa.string()), ("ts", pa.timestamp("us", "UTC")), ("mark", pa.bool_())])
WINDOWS = {
    "visit": aion.Session("5 seconds"),
    "minute": aion.Tumbling("1 minute"),
    "pairs": aion.Count(2, bound="3 hours"),
    "recent": aion.PerRecord("3 seconds"),
    "trips": aion.Punctuated("mark"),
}
PLAN = make_plan(
    SCHEMA, key="user", time="ts", windows=WINDOWS, aggregates={"n": A.count()}, apply=None, outputs=None
)  # fmt: skip
# Who, when in seconds, and whether a trip begins; "a" has been idle when the watermark is at 20 seconds.
EVENTS = [("a", 1, True), ("a", 4, False), ("b", 17, True), ("a", 18, True), ("b", 18, False), ("c", 30, True)]


def version(
    state: Path, live: Path, shard: int, events: list[tuple[str, int, bool]], watermark_s: int
) -> dict[str, Any]:
    """Of a batch of events, and of one in which the watermark got somewhere; the snapshot as it is stored."""
    identity = Identity("query", "visits", shard, 2, PLAN.definition)
    folder = state / "query" / "visits" / f"shard-{shard:05d}"
    policy = load_policy({"lateness": {"initial_bound": "1 hour", "coverage": None}})
    io, pool = IoThread(), CodecPool(0)
    kept = Shard(
        identity,
        LocalStorage(folder),
        live / str(shard),
        lambda p: Stores.of("tiered", p, io, MemoryBudget(1 << 20), StoreOptions(bucket_limit_bytes=1 << 20)),
        retain=10,
    )
    token = None
    try:
        for number in range(2):
            attempt = f"{number:010d}-a"
            operator = make_operator(PLAN, policy, kept.open(token, attempt, identity))
            executor = make_executor(PLAN, operator, OfShard(kept, attempt), pool, policy)
            if number:
                list(executor.advance(watermark_s * SECOND))
            else:
                columns = [[e[0] for e in events], [e[1] * SECOND for e in events], [e[2] for e in events]]
                builder = make_builder(PLAN, policy, pool, ShardOfKeys([0]))
                made = [*builder.add(pa.record_batch(columns, schema=SCHEMA)), *builder.finish()]
                list(executor.arrive([b.block for b in made]))
            list(executor.end_batch())
            executor.save()
            snapshot = operator.snapshot()
            kept.commit(attempt, snapshot)
            token = attempt
    finally:
        kept.close()
        pool.close()
        io.close()
    return orjson.loads(orjson.dumps(snapshot))  # type: ignore[no-any-return]


def inspected(state: Path, *options: str) -> str:
    found = CliRunner().invoke(app, ["inspect", str(state), *options], env={"COLUMNS": "220"})
    assert found.exit_code == 0, found.output
    return " ".join(found.output.replace("│", " ").split())


def test_keys_that_look_like_markup_are_shown_as_they_are(tmp_path: Path) -> None:
    version(tmp_path / "state", tmp_path / "live", 0, [("[/a]", 1, True), ("[red]b", 17, True)], 0)
    said = inspected(tmp_path / "state")
    assert "visit [/a] 0 1970-01-01T00:00:01Z" in said and "visit [red]b 0 1970-01-01T00:00:17Z" in said, said


def test_a_version_tells_the_windows_of_single_keys(tmp_path: Path) -> None:
    snapshot = version(tmp_path / "state", tmp_path / "live", 0, EVENTS, 20)
    visits, pairs, recent, trips = keyed_windows(snapshot, PLAN.definition)
    assert [told.definition for told in (visits, pairs, recent, trips)] == [0, 2, 3, 4]
    assert [told.windows for told in (visits, pairs, recent, trips)] == [4, 2, 6, 4]
    assert [told.executed for told in (visits, pairs, recent, trips)] == [1, 2, 5, 1]
    assert [told.bound_us // (3600 * SECOND) for told in (visits, pairs, recent, trips)] == [1, 3, 1, 1]
    assert {told.events for told in (visits, pairs, recent, trips)} == {6}
    assert (visits.first_end_us, visits.last_end_us) == (9 * SECOND, 35 * SECOND)
    assert visits.listed[:3] == (
        KeyedWindow(("a",), 1 * SECOND, 9 * SECOND, 2, 0, True),
        KeyedWindow(("b",), 17 * SECOND, 23 * SECOND, 2, 0, False),
        KeyedWindow(("a",), 18 * SECOND, 23 * SECOND, 1, 0, False),
    )
    assert [(w.key, w.start_us, w.end_us) for w in pairs.listed] == [
        (("a",), 1 * SECOND, 4 * SECOND + 1),
        (("b",), 17 * SECOND, 18 * SECOND + 1),
    ]
    assert (recent.first_end_us, recent.last_end_us) == (1 * SECOND, 30 * SECOND)
    assert (trips.first_end_us, trips.last_end_us) == (18 * SECOND, 18 * SECOND)
    assert [w.end_us for w in trips.listed] == [18 * SECOND, None, None, None]


def test_inspect_shows_them(tmp_path: Path) -> None:
    version(tmp_path / "state", tmp_path / "live", 0, EVENTS, 20)
    version(tmp_path / "state", tmp_path / "live", 1, [("d", 2, True), ("e", 100, False)], 20)
    said = inspected(tmp_path / "state")
    assert "windows of single keys of visits" in said
    assert "visit 6 2 8 1970-01-01T00:00:07Z 1970-01-01T00:01:45Z 1 hour" in said
    assert "pairs 2 2 8 1970-01-01T00:00:04.000001Z 1970-01-01T00:00:18.000001Z 3 hours" in said
    assert "trips 6 1 8 1970-01-01T00:00:18Z 1970-01-01T00:00:18Z 1 hour" in said
    assert "22 of single keys" in said
    assert "; the first 20 of 22 to end" in said
    assert "visit d 1 1970-01-01T00:00:02Z 1970-01-01T00:00:07Z 1 0 yes" in said
    first = inspected(tmp_path / "state", "--windows", "1")
    assert (
        "the first 1 of 22 to end" in first and "recent a 0 1969-12-31T23:59:58Z 1970-01-01T00:00:01Z 1 0 yes" in first
    )
    none = inspected(tmp_path / "state", "--windows", "0")
    assert "windows of single keys of visits" in none and "each of them" not in none


def test_of_many_windows_the_first_are_listed(tmp_path: Path) -> None:
    events = [(f"u{n}", 1000 - n, False) for n in range(50)]
    snapshot = version(tmp_path / "state", tmp_path / "live", 0, events, 20)
    visits = keyed_windows(snapshot, PLAN.definition)[0]
    assert (visits.windows, visits.events, visits.executed) == (50, 50, 0)
    assert [w.key for w in visits.listed] == [(f"u{n}",) for n in range(49, 49 - LISTED, -1)]


@pytest.mark.parametrize("windows", [{"visit": aion.Session(us(5))}, {"ten": aion.Tumbling(us(10))}])
def test_versions_of_before_it_was_told_say_nothing(windows: dict[str, Any]) -> None:
    definitions = [(name, window.spec()) for name, window in windows.items()]
    kept = [{"closed_us": 0} for _, spec in definitions if spec["type"] != "periodic"]
    assert keyed_windows({"keyed": kept}, {"windows": definitions}) == []
