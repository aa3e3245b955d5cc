"""What a client that sends rubbish can do to a state server: nothing."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aion import errors
from state_backends.server import wire
from state_backends.server.verbs import VERBS, Way, request_of
from tests.server.conftest import Victim, act, altered, block, opening, snapshot


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [b"", b"\xff\x00", b"null", b"[]", b"{", b'{"attempt": 1}', b"[" * 100_000, b'{"attempt": "a", "attempt2": "b"}'],
    ids=["nothing", "no JSON", "null", "a list", "half", "a number for a name", "deeply nested", "more"],
)
@pytest.mark.parametrize("name", ["ping", "open", "prestage", "release", "commit", "abort", "stats"])
def test_bodies_that_are_no_requests(victim: Victim, name: str, body: bytes) -> None:
    with pytest.raises(errors.RequestError, match=f"^{name}: "):
        act(victim, name, body)


@pytest.mark.parametrize("name", ["", "what", "OPEN", "__init__", "../open"])
def test_actions_that_there_are_not(victim: Victim, name: str) -> None:
    with pytest.raises(errors.RequestError, match="unknown action"):
        act(victim, name, b"{}")


TRICKS = [
    "",
    ".",
    "..",
    "../x",
    "/etc/passwd",
    "a/b",
    "a\\b/c",
    ".hidden",
    "a\0b",
    "a\nb",
    "ü",
    "x" * 200,
    " ",
    "~",
    "*",
]


@pytest.mark.parametrize("trick", TRICKS)
@pytest.mark.parametrize("field", ["identity.query", "identity.operator", "token", "makes", "attempt"])
def test_names_that_are_paths(victim: Victim, field: str, trick: str) -> None:
    with pytest.raises(errors.RequestError, match=f"open: {field}: .*not a plain name"):
        act(victim, "open", orjson.dumps(altered(opening(victim), field, trick)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((f, ...) for f in ("identity", "identity.shard", "token", "makes", "attempt", "state_dir", "store", "run")),
        *(("identity.shard", v) for v in (-1, 2**31, 2**70, 1.5, "0", True, None)),
        *(("identity.shards", v) for v in (0, -5, 2**64)),
        *(("identity.definition", v) for v in (None, [], "x")),
        *(("state_dir", v) for v in ("", "relative", "/a/../../etc", "/a\0b", 5, None, "/" + "x" * 5000)),
        *(("store.backend", v) for v in ("", "what", None, "tiered\n")),
        *(("store.budget_bytes", v) for v in (0, -1, 2**63, 2**70, "1GiB", 1.5)),
        *(("store.keep_fraction", v) for v in (-0.1, 1.1, "x")),
        ("store.retain_versions", 0),
        ("store.destage_class", 5),
        ("store.destage", []),
        ("store.more", 1),
        ("more", 1),
        ("run", "x" * 2000),
    ],
)  # fmt: skip
def test_openings_that_cannot_be(victim: Victim, field: str, value: Any) -> None:
    with pytest.raises(errors.RequestError, match=r"^open: "):
        act(victim, "open", json.dumps(altered(opening(victim), field, value)).encode())


def test_a_number_too_large_for_json_libraries(victim: Victim) -> None:
    body = orjson.dumps(opening(victim)).replace(b'"shard":1', b'"shard":' + b"9" * 5000)
    with pytest.raises(errors.RequestError, match=r"^open: "):
        act(victim, "open", body)


@pytest.mark.parametrize("pid", [0, -1, 2**31, 2**70, "1", 1.0, True])
def test_executors_that_are_no_processes(victim: Victim, pid: Any) -> None:
    body = json.dumps({"executor_pid": pid}).encode()
    with pytest.raises(errors.RequestError, match=r"^ping: executor_pid: "):
        act(victim, "ping", body)


@pytest.mark.parametrize(
    "change",
    [
        {"snapshot": {}},
        {"snapshot": {"next_seq": -1, "counters": {}}}, {"snapshot": {"next_seq": "1", "counters": {}}},
        {"snapshot": {"next_seq": 1}}, {"snapshot": {"next_seq": 1, "counters": {"events": "many"}}},
        {"snapshot": {"next_seq": 1, "counters": {}, "lateness": []}},
        {"snapshot": {"next_seq": 1, "counters": {}, "lateness": {"lateness": {}, "learnt_bound": 5}}},
        {"snapshot": {"next_seq": 1, "counters": {}, "lateness": {"learnt_bound": {}}}},
        {"snapshot": {"next_seq": 0, "counters": {}}}, {"prestage": [0.5]}, {"prestage": [2**64]}, {"prestage": 5},
        {"before": [["abort", {}]]}, {"before": [["commit", {}]]}, {"before": [["no verb", {}]]},
        {"before": [["release"]]},
        {"executions": [[1]]}, {"executions": [[-1, 0.5]]}, {"executions": [[1, -0.5]]}, {"executions": [[1, "x"]]},
    ],
)  # fmt: skip
def test_commits_that_would_poison_the_shard(victim: Victim, change: dict[str, Any]) -> None:
    request = {"attempt": "0000000000-victim", "snapshot": snapshot(1), "prestage": [], "executions": [], **change}
    body = json.dumps(request).encode()
    with pytest.raises(errors.RequestError, match=r"^commit: "):
        act(victim, "commit", body)


def test_what_waited_is_checked_as_any_request(victim: Victim) -> None:
    for fields in ({}, {"destage": [], "purge": "all"}, {"destage": [], "purge": [], "more": 1}):
        request = {"attempt": "0000000000-victim", "slices": [0], "before": [["release", fields]]}
        with pytest.raises(errors.RequestError, match=r"^release: "):
            act(victim, "prestage", orjson.dumps(request))


@pytest.mark.parametrize("attempt", ["never", "victim.2"])
def test_attempts_of_nobody(victim: Victim, attempt: str) -> None:
    request = {"attempt": attempt, "slices": [0]}
    with pytest.raises(errors.ServerUnreachable, match="never began here"):
        act(victim, "prestage", orjson.dumps(request))


def test_the_name_of_an_attempt_on_another_shard(victim: Victim) -> None:
    with pytest.raises(errors.RequestError, match="attempt 0000000000-victim works on another shard"):
        act(victim, "open", orjson.dumps(altered(opening(victim), "attempt", "0000000000-victim")))


def test_a_version_that_there_is_not(victim: Victim) -> None:
    for token in ("nothing", "0000000000-victim"):
        with pytest.raises(errors.MissingState, match=f"version {token} .*does not exist"):
            act(victim, "open", orjson.dumps({**opening(victim), "token": token}))


def put(victim: Victim, command: bytes | None, schema: pa.Schema, *messages: pa.RecordBatch) -> None:
    descriptor = (
        flight.FlightDescriptor.for_command(b"append\n" + command)
        if command is not None
        else flight.FlightDescriptor.for_path("../../etc/passwd")
    )
    try:
        writer, _ = victim.raw.do_put(descriptor, schema)
        with writer:
            for message in messages:
                writer.write_batch(message)
    except (flight.FlightError, pa.ArrowException) as error:
        wire.raise_error(str(error))


MINE = b'{"attempt":"0000000000-victim"}'


@pytest.mark.parametrize(
    "command", [b"", b"rubbish", b"{}", b'{"attempt":"../x"}', b'{"attempt":["0000000000-victim"]}']
)
def test_puts_for_nobody(victim: Victim, command: bytes | None) -> None:
    with pytest.raises(errors.RequestError, match=r"^append: "):
        put(victim, command, wire.BLOCKS)


def test_puts_without_a_verb(victim: Victim) -> None:
    with pytest.raises(errors.RequestError, match="unknown action ''; there are append, put"):
        put(victim, None, wire.BLOCKS)


def message(*rows: tuple[Any, Any, Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), wire.BLOCKS, strict=True)],
        schema=wire.BLOCKS,
    )


def damaged() -> bytes:
    data = bytearray(block(1).stored)
    data[3] ^= 1
    return bytes(data)


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        ([(1, False, None)], errors.RequestError),
        ([(None, False, bytes(block(1).stored))], errors.RequestError),
        ([(1, None, bytes(block(1).stored))], errors.RequestError),
        ([(0, False, bytes(block(1).stored))], errors.RequestError),
        ([(-5, False, bytes(block(1).stored))], errors.RequestError),
        ([(2, False, bytes(block(1).stored)), (1, False, bytes(block(1).stored))], errors.RequestError),
        ([(1, False, b"")], errors.CorruptBlock),
        ([(1, False, b"rubbish" * 100)], errors.CorruptBlock),
        ([(1, False, bytes(block(1).stored)[:-1])], errors.CorruptBlock),
        ([(1, False, damaged())], errors.CorruptBlock),
    ],
    ids=["null", "no number", "no lateness", "taken", "negative", "backwards", "empty", "bytes", "short", "torn"],
)  # fmt: skip
def test_blocks_that_are_none(victim: Victim, rows: list[tuple[Any, Any, Any]], error: type[Exception]) -> None:
    with pytest.raises(error):
        put(victim, MINE, wire.BLOCKS, message(*rows))


def test_tables_that_are_no_blocks(victim: Victim) -> None:
    for schema in (pa.schema([]), pa.schema([("x", pa.int32())]), wire.BLOCKS.remove(2)):
        row = pa.RecordBatch.from_arrays([pa.array([1]).cast(field.type) for field in schema], schema=schema)
        with pytest.raises(errors.RequestError, match=r"^append: "):
            put(victim, MINE, schema, row)


@pytest.mark.parametrize(
    "ticket",
    [
        b"",
        b"rubbish",
        b"{}",
        b'{"attempt":"0000000000-victim"}',
        b'{"attempt":"0000000000-victim","slices":"all","blocking":false}',
    ],
)
def test_reads_of_nothing(victim: Victim, ticket: bytes) -> None:
    with pytest.raises(flight.FlightError, match=r"RequestError.*read: "):
        victim.raw.do_get(flight.Ticket(b"read\n" + ticket)).read_all()


def test_other_calls_of_flight_are_not_served(victim: Victim) -> None:
    for call in (
        lambda: list(victim.raw.list_flights()),
        lambda: victim.raw.get_flight_info(flight.FlightDescriptor.for_path("/etc/passwd")),
        lambda: victim.raw.get_schema(flight.FlightDescriptor.for_command(b"x")),
        lambda: victim.raw.do_exchange(flight.FlightDescriptor.for_command(b"x"))[1].read_all(),
    ):
        with pytest.raises((NotImplementedError, flight.FlightError)):
            call()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(
    kind=st.sampled_from([name for name, verb in VERBS.items() if verb.way is Way.JSON]),
    body=JSON | st.binary(max_size=50),
    data=st.data(),
)
def test_whatever_is_sent_is_either_a_request_or_refused_by_name(kind: str, body: Any, data: st.DataObject) -> None:
    """At the border itself, without a server: nothing else comes out of it than requests and RequestError."""
    if isinstance(body, dict):  # with some of the right names
        fields = list(VERBS[kind].request.model_fields)
        body = {**body, **{name: data.draw(JSON) for name in fields}}
    raw = body if isinstance(body, bytes) else str.encode(json.dumps(body))
    try:
        found = request_of(kind, raw, Way.JSON)
    except errors.RequestError as error:
        assert str(error).startswith(f"{kind}: ")
    else:
        assert type(found) is VERBS[kind].request
