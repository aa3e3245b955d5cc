"""Who reaches a state server, what it gives away, and what a client that sends rubbish can do: nothing."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import psutil
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aion import errors
from state_backends.files.names import OPERATOR
from state_backends.server import wire
from state_backends.server.client import StateClient, running_servers, runtime_dir
from state_backends.server.remote_attempt import RemoteAttempt
from state_backends.server.server_folder import SOCKET
from state_backends.server.verbs import VERBS, Way, request_of
from tests.server.conftest import STORE, block, listening, open_shard, server_of, snapshot, values, wait_until

SECRETS = {"PYTHON_WORKER_FACTORY_SECRET": "swordfish-1", "MY_TOKEN": "swordfish-2", "SPARK_AUTH_SECRET": "swordfish-3"}


class Victim(NamedTuple):
    """A server with somebody's attempt on it, whom nothing must harm; and a connection that can send anything."""

    application: str
    client: StateClient
    attempt: RemoteAttempt
    raw: flight.FlightClient
    state: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    application, state = f"test-{uuid.uuid4()}", tmp_path_factory.mktemp("state")
    executor = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert executor.stdin is not None
    with pytest.MonkeyPatch.context() as patch, executor.stdin:
        for name, value in SECRETS.items():
            patch.setenv(name, value)
        patch.setenv("AWS_PROFILE", "tests")
        client = StateClient.connect(application, watch_pid=executor.pid)
        attempt = open_shard(client, state, None, "0000000000-victim")
        attempt.append([(0, False, block(7))])
        raw = flight.FlightClient(f"grpc+unix://{runtime_dir(application) / SOCKET}")
        yield Victim(application, client, attempt, raw, state)
        raw.close()
        client.close()
        executor.kill()
        executor.wait()
    wait_until(lambda: not runtime_dir(application).exists())


@pytest.fixture
def victim(served: Victim) -> Iterator[Victim]:
    server = server_of(served.application)
    yield served
    # As if nothing had happened.
    assert values(served.attempt, 0) == [7]
    assert served.attempt.servers == 1
    assert server_of(served.application) == server
    committed = [p.name for p in served.state.glob("[!.]*/**/*") if p.is_file()]
    assert committed == [OPERATOR], "nothing was committed"


def test_only_its_user_can_reach_it(victim: Victim) -> None:
    folder = runtime_dir(victim.application)
    for place in (folder, folder.parent):
        assert place.lstat().st_mode & 0o777 == 0o700
        assert place.lstat().st_uid == os.getuid()
    assert (folder / SOCKET).lstat().st_mode & 0o777 == 0o600
    assert all(path.lstat().st_mode & 0o077 == 0 for path in (victim.state / ".live").rglob("*"))


def test_it_listens_on_no_port(victim: Victim) -> None:
    pid = server_of(victim.application).pid
    assert listening(pid) == []
    sockets = {c.laddr for c in psutil.Process(pid).net_connections("unix") if c.laddr}
    assert sockets == {str(runtime_dir(victim.application) / SOCKET)}


def test_it_knows_no_secret(victim: Victim) -> None:
    server = psutil.Process(server_of(victim.application).pid)
    assert not any("swordfish" in argument for argument in server.cmdline())
    assert not any("swordfish" in value for value in server.environ().values())
    assert server.environ()["AWS_PROFILE"] == "tests"  # what reaching the storage may need


@pytest.mark.parametrize("what", ["open to others", "a link", "a file"])
def test_a_place_that_is_not_the_users_alone_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    place = runtime_dir("app").parent
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    if what == "open to others":
        place.mkdir()
        place.chmod(0o770)
    elif what == "a link":
        place.symlink_to(private)
    else:
        place.touch()
    with pytest.raises((errors.ServerError, FileExistsError), match=r"that only this user can enter|File exists"):
        StateClient.connect("app", watch_pid=os.getpid())
    assert list(private.iterdir()) == []


IMPOSTOR = """
import os, socket, sys

place, user = sys.argv[1], int(sys.argv[2])
with socket.socket(socket.AF_UNIX) as server:
    server.bind(place)
    os.chmod(place, 0o777)
    os.setuid(user)
    server.listen()
    print("listens", flush=True)
    heard = 0
    while heard == 0:
        connection, _ = server.accept()
        with connection:
            heard = len(connection.recv(1 << 16))
            print(heard, flush=True)
"""


@contextlib.contextmanager
def impostor(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another user's process that listens where a server should be, and says how many bytes each client sends."""
    if os.getuid() != 0:
        pytest.skip("only root can run as somebody else")
    command = [sys.executable, "-c", IMPOSTOR, str(folder / SOCKET), "12345"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        try:
            yield process
        finally:
            process.kill()


LOOKS = {
    "connects": lambda: StateClient.connect("app", watch_pid=os.getpid()),
    "finds": lambda: StateClient.find("app"),
}


@pytest.mark.parametrize("look", LOOKS)
def test_a_folder_that_another_user_made_before_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = runtime_dir("app")
    folder.mkdir(parents=True)
    folder.parent.chmod(0o777)
    with impostor(folder) as process:
        for place in (folder, folder.parent):
            os.chown(place, 12345, 12345)
        with pytest.raises(errors.ServerError, match="that only this user can enter"):
            LOOKS[look]()
        assert running_servers() == []
        process.kill()
        assert process.communicate() == ("", None), "nobody connected"


@pytest.mark.parametrize("look", LOOKS)
def test_nothing_is_sent_to_another_users_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: str) -> None:
    """Whoever it was that let it into the user's own folder."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = runtime_dir("app")
    folder.parent.mkdir(mode=0o700)
    folder.mkdir(mode=0o700)
    with impostor(folder) as process:
        with pytest.raises(errors.ServerError, match=r"a process of another user \(12345\) listens on"):
            LOOKS[look]()
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"


# -- rubbish --------------------------------------------------------------------------------------------------


def opening(victim: Victim) -> dict[str, Any]:
    return {
        "identity": {"query": "query", "operator": "windowed", "shard": 1, "shards": 2, "definition": {}},
        "token": None,
        "makes": "0000000001-t1",
        "attempt": "0000000001-t1",
        "run": "run",
        "operator_uid": "uid",
        "others": False,
        "state_dir": str(victim.state),
        "store": STORE.to_json(),
    }


def altered(request: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    result = copy.deepcopy(request)
    inner = result
    *parents, last = path.split(".")
    for name in parents:
        inner = inner[name]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return result


def act(victim: Victim, name: str, body: bytes) -> Any:
    """As the client does, but with any bytes."""
    try:
        (result,) = victim.raw.do_action(flight.Action(name, body))
    except flight.FlightError as error:
        wire.raise_error(str(error))
    return orjson.loads(result.body.to_pybytes())


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
        *(("store.io_threads", v) for v in (0, 100_000, None)),
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
        with pytest.raises(errors.CorruptState, match=f"version {token} .*does not exist"):
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


def test_the_state_of_another_user_is_not_touched(tmp_path: Path, victim: Victim) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    folder = tmp_path / "query" / "windowed"
    folder.mkdir(parents=True)
    os.chown(folder, 12345, 12345)
    with pytest.raises(errors.ServerError, match=r"windowed belongs to another user \(12345\)"):
        act(
            victim,
            "open",
            orjson.dumps(altered(altered(opening(victim), "state_dir", str(tmp_path)), "identity.shard", 2)),
        )
    assert list(folder.iterdir()) == []


def test_processes_of_another_user_are_not_waited_for(victim: Victim) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can run as somebody else")
    other = subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, user=12345, cwd="/")
    assert other.stdin is not None
    with other.stdin, pytest.raises(errors.RequestError, match="belongs to another user"):
        act(victim, "ping", b'{"executor_pid":%d}' % other.pid)
    other.wait()
