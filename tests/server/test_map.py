"""Keyed values through a state server: what an attempt gets, puts and scans, and what happens if the server is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.flight as flight
import pytest

from aion import errors
from state_backends.backends import StoreConfig
from state_backends.format.ordered_map import MapValue
from state_backends.server import remote_attempt, wire
from state_backends.server.remote_attempt import RemoteAttempt
from state_backends.server.verbs import addressed
from state_backends.versions.json_values import dumps
from tests.server.conftest import Connect, kill, open_shard, server_of, snapshot, wait_until


def keyed(*numbers: int, mark: bytes = b"") -> list[MapValue]:
    return [MapValue(b"key-%06d" % n, b"value %d " % n + mark) for n in numbers]


def entries(*numbers: int, mark: bytes = b"") -> list[tuple[bytes, bytes]]:
    return [(key, value) for key, value, _ in keyed(*numbers, mark=mark) if value is not None]


def everything(attempt: RemoteAttempt) -> dict[bytes, bytes]:
    return dict(attempt.scan(b"", None))


@pytest.mark.slow
def test_values_go_from_attempt_to_attempt(connect: Connect, tmp_path: Path) -> None:
    client = connect()
    first = open_shard(client, tmp_path, None, "t1")
    assert first.get([b"a", b"b"]) == [None, None] and first.get([]) == []
    assert everything(first) == {}
    first.put(keyed(*range(100)))
    first.put([])
    first.put([MapValue(b"key-000007", b"again"), MapValue(b"key-000008", None, 5), MapValue(b"\xff" * 9, b"x", 1)])
    first.commit(snapshot(0))
    second = open_shard(client, tmp_path, "t1", "t2")
    asked = [b"key-000007", b"key-000008", b"nothing", b"key-000009", b"\xff" * 9, b"key-000009"]
    assert second.get(asked) == [b"again", None, None, b"value 9 ", b"x", b"value 9 "]
    assert list(second.stream(asked)) == second.get(asked) and list(second.stream([])) == []
    assert list(second.scan(b"key-000090", b"key-000093")) == entries(90, 91, 92)
    assert [key for key, _ in second.scan(b"key-000099", None)] == [b"key-000099", b"\xff" * 9]
    second.put(keyed(5, mark=b"gone"))
    second.abort()
    third = open_shard(client, tmp_path, "t1", "t3")
    assert third.get([b"key-000005"]) == [b"value 5 "]
    stats = client.stats()
    assert stats["runs"] == 1 and stats["run_bytes"] > 1000 and stats["values"] == 100
    assert stats["value_hits"] > 0 and stats["cached_bytes"] == stats["value_bytes"] > 0


@pytest.mark.slow
def test_large_answers_come_in_pages(connect: Connect, tmp_path: Path) -> None:
    """More than a message, more than the budget; and values larger than a message."""
    client = connect()
    store = StoreConfig(backend="tiered", budget_bytes=1 << 20, bucket_limit_bytes=1 << 18)
    first = open_shard(client, tmp_path, None, "t1", store=store)
    wanted = {b"%05d" % n: bytes([n % 251]) * (3_000_000 if n == 50 else 20_000) for n in range(200)}
    first.put([MapValue(key, value) for key, value in wanted.items()])
    assert first.get(list(wanted)) == list(wanted.values())
    first.commit(snapshot(0))
    second = open_shard(client, tmp_path, "t1", "t2", store=store)
    assert second.get([*wanted, b"none"]) == [*wanted.values(), None]
    assert everything(second) == wanted
    assert client.stats()["cached_bytes"] <= 1 << 20


@pytest.mark.slow
def test_what_is_expected_is_in_memory_before_the_attempt_begins(connect: Connect, tmp_path: Path) -> None:
    client = connect()
    store = StoreConfig(backend="tiered", budget_bytes=1 << 20, bucket_limit_bytes=1 << 18)

    def expect(*numbers: int) -> bool:
        return client.expect("query", "windowed", 0, [b"%05d" % n for n in numbers])

    assert not expect(1), "no shard is here"
    first = open_shard(client, tmp_path, None, "t1", store=store)
    first.put([MapValue(b"%05d" % n, bytes(20_000)) for n in range(20)])
    first.commit(snapshot(0))
    assert not expect(), "nothing was read from disk"
    second = open_shard(client, tmp_path, "t1", "t2", store=store)
    second.put([MapValue(b"%05d" % n, bytes(20_000)) for n in range(20, 100)])
    assert not second.on_disk
    assert second.get([b"00000"]) == [bytes(20_000)]
    assert expect(), "now it was"
    second.commit(snapshot(0))
    assert expect()

    def asks_for_nothing_more() -> bool:
        before = client.stats()["io"]["by_priority"]["prestage"]["requests"]
        return expect(0, 1, 2, 3) and client.stats()["io"]["by_priority"]["prestage"]["requests"] == before

    assert not asks_for_nothing_more(), "they were not in memory"
    wait_until(asks_for_nothing_more)
    misses = client.stats()["value_misses"]
    third = open_shard(client, tmp_path, "t2", "t3", store=store)
    assert third.on_disk
    assert third.get([b"%05d" % n for n in range(4)]) == [bytes(20_000)] * 4
    assert client.stats()["value_misses"] == misses, "they were in memory"
    assert third.get([b"%05d" % n for n in range(100)]) == [bytes(20_000)] * 100
    third.commit(snapshot(0))
    assert not expect(), "it read more than memory holds, so what comes early would leave before it is read"
    fourth = open_shard(client, tmp_path, "t3", "t4", store=store)
    assert fourth.on_disk, "but its values are on disk"
    fourth.abort()


@pytest.mark.slow
def test_a_commit_says_what_the_next_attempt_needs(connect: Connect, tmp_path: Path) -> None:
    client = connect()
    store = StoreConfig(backend="tiered", budget_bytes=1 << 20, bucket_limit_bytes=1 << 18)
    first = open_shard(client, tmp_path, None, "t1", store=store)
    first.put([MapValue(b"%05d" % n, bytes(20_000)) for n in range(100)])
    first.commit(snapshot(0))
    second = open_shard(client, tmp_path, "t1", "t2", store=store)
    assert second.get([b"00099", b"00000"]) == [bytes(20_000)] * 2, "not all of them can be in memory"
    wanted = [b"%05d" % n for n in range(40, 46)]
    second.commit(snapshot(0), keys=wanted)

    def nothing_waits() -> bool:
        """Whether what has been asked for is in memory: it is asked for again, and nothing is read."""
        before = client.stats()["io"]["by_priority"]["prestage"]["requests"]
        return (
            client.expect("query", "windowed", 0, wanted)
            and client.stats()["io"]["by_priority"]["prestage"]["requests"] == before > 0
        )

    wait_until(nothing_waits)
    misses = client.stats()["value_misses"]
    third = open_shard(client, tmp_path, "t2", "t3", store=store)
    assert third.get(wanted) == [bytes(20_000)] * len(wanted)
    assert client.stats()["value_misses"] == misses, "they were in memory"
    third.abort()


@pytest.mark.slow
@pytest.mark.parametrize("lost_before", ["put", "get", "scan", "commit"])
def test_an_attempt_goes_on_when_its_server_is_lost(
    application: str, connect: Connect, tmp_path: Path, lost_before: str
) -> None:
    first = open_shard(connect(), tmp_path, None, "t1")
    first.put(keyed(*range(50)))
    first.commit(snapshot(0))
    attempt = open_shard(connect(), tmp_path, "t1", "t2")

    def step(what: str) -> None:
        if what == lost_before:
            kill(application)

    attempt.put(keyed(1, 2, 60, mark=b"new"))
    step("put")
    attempt.put([MapValue(b"key-000002", b"newer"), MapValue(b"key-000003", None)])
    step("get")
    assert attempt.get([b"key-000001", b"key-000002", b"key-000003"]) == [b"value 1 new", b"newer", None]
    step("scan")
    assert list(attempt.scan(b"key-000049", None)) == entries(49) + entries(60, mark=b"new")
    step("commit")
    attempt.commit(snapshot(0))
    assert attempt.servers == 2
    last = open_shard(connect(), tmp_path, "t2", "t3")
    assert last.get([b"key-000001", b"key-000002", b"key-000003"]) == [b"value 1 new", b"newer", None]


@pytest.mark.slow
def test_a_scan_goes_on_behind_what_it_yielded(application: str, connect: Connect, tmp_path: Path) -> None:
    attempt = open_shard(connect(), tmp_path, None, "t1")
    values = [MapValue(b"%06d" % n, bytes(30_000)) for n in range(1000)]
    attempt.put(values[::2])
    attempt.put(values[1::2])
    scan: Iterator[tuple[bytes, bytes]] = attempt.scan(b"", None)
    found = [next(scan) for _ in range(3)]
    kill(application)
    found += scan
    assert [key for key, _ in found] == [value.key for value in values]
    assert attempt.servers == 2


@pytest.mark.slow
@pytest.mark.parametrize("first_notices", ["stream", "put"])
def test_a_stream_goes_on_behind_what_it_yielded(
    application: str, connect: Connect, tmp_path: Path, first_notices: str
) -> None:
    attempt = open_shard(connect(), tmp_path, None, "t1")
    values = [MapValue(b"%06d" % n, b"%06d" % n * 5000) for n in range(1000)]
    attempt.put(values)
    wanted = [*values[::-1], MapValue(b"none", None)]
    stream = attempt.stream([value.key for value in wanted])
    found = [next(stream) for _ in range(3)]
    kill(application)
    if first_notices == "put":
        attempt.put([MapValue(value.key, b"new") for value in wanted[:3]])
    found += stream
    assert found == [value.value for value in wanted]
    assert attempt.servers == 2, "the other one sees that the attempt is on the next server already"


def test_what_was_put_is_kept_to_be_sent_again_up_to_a_limit(
    application: str, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("state_backends.server.client.REPLAY_BYTES", 2000)
    client = connect()
    attempt = open_shard(client, tmp_path, None, "t1")
    attempt.put(keyed(1, 2))
    left = client.replay.left_bytes
    assert 0 < left < 2000
    attempt.put(keyed(*range(100)))
    kill(application)
    with pytest.raises(errors.ServerUnreachable, match="had sent more"):
        attempt.get([b"key-000001"])
    assert client.replay.left_bytes == 2000 and remote_attempt.REPLAY_BYTES > 2000


@pytest.mark.slow
def test_requests_that_are_none(application: str, connect: Connect, tmp_path: Path) -> None:
    client = connect()
    attempt = open_shard(client, tmp_path, None, "t1")
    server = server_of(application)
    for name, field, value, message in (
        ("get", "keys", "rubbish", "are not keys"),
        ("get", "keys", wire.pack_key(b"rubbish" * 30), "are not keys"),
        ("get", "keys", wire.pack_keys([b"a", b""]), "a key is empty"),
        ("get", "keys", None, "keys: "),
        ("scan", "begin", "*", "begin: "),
        ("scan", "begin", None, "begin: "),
        ("get", "keys", "==", "are not keys"),
    ):
        request = {"attempt": "0000000001-t1", field: value, **({"end": None} if name == "scan" else {})}
        with pytest.raises(errors.RequestError, match=f"^{name}: .*{message}"):
            found = client.call(name, request)
            list(found or ())
    for row, message in (
        (([b""], [b"x"], [1]), "a key is empty"),
        (([b"k"], [b""], [1]), "a value is empty"),
        (([None], [b"x"], [1]), "a key is null"),
    ):
        batch = pa.record_batch(
            [pa.array(c, f.type) for c, f in zip(row, wire.VALUES, strict=True)], schema=wire.VALUES
        )
        with pytest.raises(errors.RequestError, match=message):
            _put(client, batch)
    with pytest.raises(errors.RequestError, match="the columns of the message are not those"):
        _put(client, pa.record_batch({"key": [b"a"]}))
    assert attempt.get([b"k", b"a"]) == [None, None] and server_of(application) == server


def _put(client: object, batch: pa.RecordBatch) -> None:
    connection: flight.FlightClient = client._flight  # type: ignore[attr-defined]
    descriptor = flight.FlightDescriptor.for_command(addressed("put", dumps({"attempt": "0000000001-t1"})))
    try:
        writer, _ = connection.do_put(descriptor, batch.schema)
        with writer:
            writer.write_batch(batch)
    except (flight.FlightError, pa.ArrowException) as error:
        wire.raise_error(str(error))
