"""The column ``tier``: where the bytes of live windows are, while a state server has them and after it has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import aion
from aion import aggregates as A
from aion.state import read
from state_backends.backends import StoreConfig
from state_backends.server.client import runtime_dir, tiers_here
from tests.object_store import CREDENTIALS, ObjectStore, serving
from tests.server.conftest import Connect, Executor, application, block, connect, executor, wait_until  # noqa: F401 (fixtures)
from tests.state.rig import NAME, QUERY, RunningWindows, ServedWindows, running
from tests.state.test_read import SCHEMA, S, batch_of, seconds, spec

STORE = StoreConfig(backend="tiered", budget_bytes=1 << 20, bucket_limit_bytes=8 << 10)
ASKED = ("m_bucket_bytes", "disk_only_bytes", "used_bytes", "reserved_bytes", "staging")
EVENTS = {"apply": aion.Apply(lambda *_: [], schema="x bigint")}
Served = Callable[..., ServedWindows]


@pytest.fixture
def served(tmp_path: Path, connect: Connect) -> Iterator[Served]:  # noqa: F811
    """Makes a query whose state is on a server."""
    queries: list[ServedWindows] = []

    def make(*windows: Any, place: str = "", store: StoreConfig = STORE, **more: Any) -> ServedWindows:
        asked = spec(*windows, **more)
        where = place or str(tmp_path / "state")
        queries.append(ServedWindows(tmp_path, where, asked, SCHEMA, 1, client=connect(), store=store))
        return queries[-1]

    yield make
    for query in queries:
        query.close()


@pytest.fixture
def stop(application: str, executor: Executor) -> Callable[[], None]:  # noqa: F811
    """Stops the application, and with it its server."""

    def stop() -> None:
        executor.kill()
        executor.wait()
        wait_until(lambda: not runtime_dir(application).exists())

    return stop


def tiers(place: str, **asked: Any) -> dict[int | None, str]:
    """By the start of the window. All rows of a window say the same."""
    found = {(seconds(row["window_start"]), row["tier"]) for row in read(place, **asked).read_all().to_pylist()}
    assert len(dict(found)) == len(found)
    return dict(found)


def events(start: int, many: int) -> list[tuple[int, int, int]]:
    return [(k % 7, start + k % 10, k * 7919 % 10**9) for k in range(many)]


def test_a_window_is_in_memory_on_disk_or_in_both(served: Served, stop: Callable[[], None]) -> None:
    query = served(aion.Tumbling("10 seconds"), what=EVENTS, bound="1 hour")
    query.batch(batch_of([*events(0, 20), *events(20, 20)]), None)
    for _ in range(4):  # more than the memory of one window
        query.batch(batch_of(events(10, 300)), None)
    assert tiers(query.place) == {0: "memory", 10: "both", 20: "memory"}
    query.batch(batch_of([]), 11 * S)  # the first window is over
    before = query.client.stats()
    assert tiers(query.place) == {0: "disk", 10: "both", 20: "memory"}
    after = query.client.stats()
    assert {name: after[name] for name in ASKED} == {name: before[name] for name in ASKED}, "to ask changes nothing"
    stop()
    assert tiers(query.place) == {0: "disk", 10: "disk", 20: "disk"}


def test_windows_of_keys_say_it_for_the_slices_that_they_lie_in(served: Served) -> None:
    query = served(aion.Session("3 seconds"), what=EVENTS)
    query.batch(batch_of([(1, 1, 1)]), None)
    for _ in range(4):
        query.batch(batch_of([(key, 10**5, 1) for key in range(300)]), None)
    assert tiers(query.place) == {1: "memory", 10**5: "both"}


@pytest.mark.parametrize(("backend", "tier"), [("memory", "memory"), ("rocksdb", "disk")])
def test_a_backend_that_keeps_all_or_nothing_in_memory(served: Served, backend: str, tier: str) -> None:
    query = served(aion.Tumbling("10 seconds"), store=replace(STORE, backend=backend))
    query.batch(batch_of(events(0, 300)), None)
    assert tiers(query.place) == {0: tier}


def test_what_a_later_batch_appends_does_not_count(served: Served) -> None:
    """The version that is read is older than the one that the server has, or its next batch is under way."""
    query = served(aion.Tumbling("10 seconds"), bound="1 hour")
    query.batch(batch_of([*events(0, 20), *events(10, 20)]), None)
    token, attempt, _ = query.attempt(0)
    attempt.append([(1000, False, block(7, slice_us=0)), (1001, False, block(7, slice_us=10 * S))])
    assert tiers(query.place) == {0: "memory", 10: "memory"}
    attempt.abort()
    query.batch(batch_of(events(10, 20)), 11 * S, complete=False)
    assert tiers(query.place) == tiers(query.place, batch=0) == {0: "disk", 10: "memory"}
    assert len(tiers_here(QUERY, NAME, 0, token, 10)) == 2
    assert tiers_here(QUERY, NAME, 0, "0000000007-unknown", 10) == tiers_here(QUERY, "another", 0, token, 10) == {}


def test_a_column_of_the_user_keeps_its_name(tmp_path: Path) -> None:
    """And without a state server everything is on disk."""
    asked = spec(aion.Tumbling("10 seconds"), what={"aggregates": {"tier": A.count()}})
    with running(RunningWindows(tmp_path, str(tmp_path / "state"), asked, SCHEMA)) as query:
        query.batch(batch_of([(1, 1, 1), (1, 2, 1)]), None)
        (row,) = read(query.place).read_all().to_pylist()
    assert (row["tier"], row["aion_tier"]) == (2, "disk")


@pytest.mark.slow
def test_state_in_an_object_store_is_remote_if_no_server_has_it(
    served: Served, stop: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    with serving() as port:
        query = served(aion.Tumbling("10 seconds"), place=ObjectStore(port).uri("state"), bound="1 hour")
        query.batch(batch_of([*events(0, 20), *events(10, 20)]), None)
        query.batch(batch_of([]), 11 * S)
        assert tiers(query.place) == {0: "disk", 10: "memory"}
        stop()
        assert tiers(query.place) == {0: "remote", 10: "remote"}
