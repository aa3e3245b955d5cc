"""What a state server tells Prometheus: nothing unless asked, on loopback only, and what was done."""

from __future__ import annotations

import io
import re
import socket
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

import aion
from aion.tools.top import Look, frame
from state_backends.server.client import StateClient, runtime_dir
from state_backends.server.endpoint import LOOPBACK, RETRY_SECONDS, MetricsEndpoint
from state_backends.server.host import Host
from state_backends.server.metrics import METRICS
from state_backends.server.server_folder import LOG
from tests.durations import us
from tests.object_store import ObjectStore, serving
from tests.operators import advance, arrive, end_batch, make
from tests.server.conftest import (
    STORE,
    Connect,
    block,
    kill,
    listening,
    open_shard,
    server_of,
    snapshot,
    values,
)

WATCHED = replace(STORE, metrics_port=0)
OF = {"query": "query", "operator": "windowed"}
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(port: int) -> Samples:
    with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=60) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert {family.type for family in families} <= {"counter", "gauge", "histogram", "summary"}
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def told(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, frozenset(labels.items())))


def port_of(client: StateClient) -> int:
    port = client.stats()["metrics_port"]
    assert isinstance(port, int)
    return port


def commit(client: StateClient, state: Path, token: str | None, name: str, said: dict[str, Any], *, at: int) -> None:
    attempt = open_shard(client, state, token, name, store=WATCHED)
    attempt.append([(at, False, block(1, 2, 3))])
    attempt.commit({**said, "next_seq": at + 1})


@pytest.mark.slow
def test_a_server_listens_on_no_port_unless_asked(application: str, connect: Connect, tmp_path: Path) -> None:
    client = connect()
    attempt = open_shard(client, tmp_path, None, "t1")
    attempt.append([(0, False, block(1))])
    attempt.commit(snapshot(1))
    assert listening(server_of(application).pid) == []
    assert client.stats()["metrics_port"] is None


@pytest.mark.slow
def test_a_scrape_tells_what_was_done_and_nobody_else_can_ask(
    application: str, connect: Connect, tmp_path: Path
) -> None:
    client, operator = connect(), make(bound=50_000_000)
    arrive(operator, 0, events=5)
    advance(operator, 10)
    arrive(operator, 0, events=2)  # no time late
    end_batch(operator)
    commit(client, tmp_path, None, "t1", operator.snapshot(), at=0)
    port = port_of(client)
    (listener,) = listening(server_of(application).pid)
    assert (listener.laddr.ip, listener.laddr.port) == (LOOPBACK, port)

    samples = scrape(port)
    assert told(samples, "aion_events_total", **OF) == 7
    assert told(samples, "aion_late_events_total", **OF) == 2
    assert told(samples, "aion_dropped_events_total", **OF) == 0
    executions = [told(samples, "aion_executions_total", **OF, kind=kind) for kind in ("on_time", "late", "final")]
    assert executions == [1, 1, 0]
    assert told(samples, "aion_lateness_seconds_bucket", **OF, le="0.1") == 2
    assert told(samples, "aion_bound_seconds", **OF, which="longest") == 50
    assert (told(samples, "aion_commits_total", **OF), told(samples, "aion_restores_total", **OF)) == (1, 0)
    assert (told(samples, "aion_shards", **OF), told(samples, "aion_windows", **OF)) == (1, 1)
    places = [told(samples, "aion_state_bytes", place=place) or 0 for place in ("memory", "both", "disk")]
    assert sum(places) == told(samples, "aion_memory_used_bytes") != 0, "nothing was destaged"
    assert told(samples, "aion_memory_budget_bytes") == STORE.budget_bytes
    assert (told(samples, "aion_io_bytes_total", priority="write") or 0) > 0, "the commit wrote a file"

    # A minute later, for a window that is kept.
    advance(operator, 60_000_000)
    arrive(operator, 20_000_000, events=3)
    commit(client, tmp_path, "t1", "t2", operator.snapshot(), at=1)
    samples = scrape(port)
    assert told(samples, "aion_lateness_seconds_bucket", **OF, le="15") == 2
    assert told(samples, "aion_lateness_seconds_bucket", **OF, le="60") == 5
    assert told(samples, "aion_lateness_seconds_count", **OF) == 5
    assert told(samples, "aion_lateness_seconds_sum", **OF) == pytest.approx(3 * (40 - 10e-6))


@pytest.mark.slow
def test_bounds_are_judged_by_what_came_within_them(application: str, connect: Connect, tmp_path: Path) -> None:
    """Windows are kept for 50 s. Of the late events of one, three quarters come within that, and the rest after it."""
    client, operator = connect(), make(bound=50_000_000, coverage=0.99)
    arrive(operator, 0)
    advance(operator, 10)
    arrive(operator, 0, events=6)
    advance(operator, 60_000_000)
    arrive(operator, 0, events=2)  # dropped
    end_batch(operator)
    commit(client, tmp_path, None, "t1", operator.snapshot(), at=0)
    before = scrape(port_of(client))
    assert told(before, "aion_coverage_ratio", **OF, which="asked") == 0.99
    assert told(before, "aion_coverage_ratio", **OF, which="realised") is None, "it is too early to judge"
    assert told(before, "aion_judged_events_total", **OF, outcome="missed") == 0

    operator = make(bound=50_000_000, coverage=0.99, snapshot=operator.snapshot())
    advance(operator, 60_000_000 + 4 * 50_000_000)
    commit(client, tmp_path, "t1", "t2", operator.snapshot(), at=1)
    after = scrape(port_of(client))
    assert told(after, "aion_coverage_ratio", **OF, which="realised") == 0.75
    outcomes = [told(after, "aion_judged_events_total", **OF, outcome=outcome) for outcome in ("in_time", "missed")]
    assert outcomes == [6, 2]
    console = Console(file=io.StringIO(), width=200)
    console.print(frame({1: Look.of(client.stats(), 0.0)}, {}))
    assert isinstance(console.file, io.StringIO) and " 75.00% " in console.file.getvalue()


@pytest.mark.slow
def test_another_server_counts_what_it_committed_itself(application: str, connect: Connect, tmp_path: Path) -> None:
    client = connect()
    first = {"counters": {"events": 100, "executions": {"late": 3}}}
    second = {"counters": {"events": 130, "executions": {"late": 4}}}
    commit(client, tmp_path, None, "t1", first, at=0)
    kill(application)
    attempt = open_shard(client, tmp_path, "t1", "t2", store=WATCHED)
    assert values(attempt, 0) == [1, 2, 3]
    before = scrape(port_of(client))
    assert told(before, "aion_events_total", **OF) == 0
    assert told(before, "aion_restores_total", **OF) == 1
    assert told(before, "aion_staged_reads_total", outcome="miss") == 1
    attempt.commit({**second, "next_seq": 1})
    # Under another policy it is another store, whose counts go on where those of the one before ended.
    open_shard(client, tmp_path, "t2", "t3", store=replace(WATCHED, bucket_limit_bytes=1 << 10)).abort()
    after = scrape(port_of(client))
    assert told(after, "aion_events_total", **OF) == 30
    assert told(after, "aion_executions_total", **OF, kind="late") == 1
    assert told(after, "aion_staged_reads_total", outcome="miss") == 1
    assert told(after, "aion_restores_total", **OF) == 2
    assert client.stats()["operators"]["windowed"]["events"] == 130, "of the query, over all servers"


@pytest.mark.slow
def test_a_port_that_is_taken_is_logged_once_and_work_goes_on(
    application: str, connect: Connect, tmp_path: Path
) -> None:
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        client, token = connect(), None
        for seq, name in enumerate(("t1", "t2")):
            attempt = open_shard(client, tmp_path, token, name, store=replace(STORE, metrics_port=port))
            attempt.append([(seq, False, block(seq))])
            attempt.commit(snapshot(seq + 1))
            token = name
        assert client.stats()["metrics_port"] is None
        assert listening(server_of(application).pid) == []
    said = (runtime_dir(application) / LOG).read_text()
    assert said.count(f"metrics: cannot listen on {LOOPBACK}:{port}") == 1


def test_a_port_is_tried_again_after_a_while() -> None:
    now = 0.0
    host = Host()
    endpoint = MetricsEndpoint(host.stats, clock=lambda: now)
    with socket.socket() as taken:
        taken.bind((LOOPBACK, 0))
        taken.listen()
        port = taken.getsockname()[1]
        endpoint.serve(port)
    endpoint.serve(port)
    assert endpoint.port is None, "it is too early"
    now = RETRY_SECONDS
    endpoint.serve(port)
    try:
        assert endpoint.port == port
        endpoint.serve(0)
        assert endpoint.port == port
        assert told(scrape(port), "aion_attempts") == 0
    finally:
        endpoint.close()
        host.close()
    endpoint.serve(port)
    assert endpoint.port is None, "closed is closed"


@pytest.mark.slow
def test_everything_that_is_scraped_is_in_the_table(application: str, connect: Connect, tmp_path: Path) -> None:
    client = connect()
    operator = make(bound=50, coverage=0.9)
    arrive(operator, 0)
    commit(client, tmp_path, None, "t1", operator.snapshot(), at=0)
    names = {name.removesuffix("_created") for name, _ in scrape(port_of(client))}
    assert names == {series for metric in METRICS for series in metric.series}


# -- the table --------------------------------------------------------------------------------------------


def test_names_are_as_prometheus_wants_them() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"aion_[a-z]+(_[a-z]+)*", metric.name)
        assert metric.name.endswith("_total") == (metric.type == "counter")
        assert not re.search("_(us|ms|kb|mb|seconds_bytes|count|sum|bucket)(_|$)", metric.name)
        assert metric.help.endswith(".")
        assert all(re.fullmatch("[a-z]+", label) and label != "le" for label in metric.labels)


def test_a_server_without_shards_tells_zeros() -> None:
    host = Host()
    stats = host.stats()
    host.close()
    readings: list[Sequence[Any]] = [list(metric.read(stats)) for metric in METRICS if not metric.labels]
    assert all(len(values) == 1 for values in readings)
    assert [list(m.read(stats)) for m in METRICS if "operator" in m.labels] == [[]] * sum(
        "operator" in m.labels for m in METRICS
    )


def test_histograms_of_old_snapshots_begin_now() -> None:
    operator = make(aion.Tumbling(us(10)))
    said = operator.snapshot()
    del said["lateness"]["histogram"]
    again = make(aion.Tumbling(us(10)), snapshot=said)
    arrive(again, 0)
    advance(again, 10)
    arrive(again, 0, events=4)
    assert sum(again.snapshot()["lateness"]["histogram"]["events"].values()) == 4


@pytest.mark.slow
def test_the_server_takes_no_rubbish_for_a_histogram(connect: Connect, tmp_path: Path) -> None:
    attempt = open_shard(connect(), tmp_path, None, "t1")
    said = {**snapshot(1), "lateness": {"learnt_bound": {}, "lateness": {}, "histogram": {"events": {"1": "many"}}}}
    with pytest.raises(aion.errors.RequestError, match="histogram"):
        attempt.commit(said)


@pytest.mark.slow
def test_requests_to_an_object_store_are_told_by_class(application: str, connect: Connect) -> None:
    with serving() as port:
        bucket, client = ObjectStore(port), connect()
        for n in range(3):
            commit(client, bucket.uri("state"), f"t{n}" if n else None, f"t{n + 1}", snapshot(n), at=n)  # type: ignore[arg-type]
        told_by = client.stats()["queries"]["query"]["windowed"]
        last, total = told_by["requests"], told_by["requests_total"]
        assert last["batch"] == 3 and last["put"] == 2, "a file and a manifest"
        assert total["put"] == 2 * 3 + 1, "and operator.json"
        samples = scrape(port_of(client))
        assert told(samples, "aion_storage_requests_total", **OF, **{"class": "put"}) == total["put"]
        assert told(samples, "aion_storage_bytes_total", **OF, direction="written") == total["written_bytes"] > 0
