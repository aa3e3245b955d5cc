"""Real state servers in processes of their own, and what tests do with them."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import psutil
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from aion.core.ingest.encoding import About, decode, encode
from state_backends.backends import StoreConfig
from state_backends.files.names import OPERATOR
from state_backends.format.block import Block, BlockKind, Compacted
from state_backends.server import processes, server_folder, wire
from state_backends.server.client import StateClient, runtime_dir
from state_backends.server.processes import Process
from state_backends.server.remote_attempt import RemoteAttempt
from state_backends.server.server_folder import SOCKET
from state_backends.versions.manifest import Identity

STORE = StoreConfig(backend="tiered", budget_bytes=1 << 20, bucket_limit_bytes=1 << 18)
SCHEMA = pa.schema([("x", pa.int64())])
Executor = subprocess.Popen[bytes]
Connect = Callable[..., StateClient]


@pytest.fixture
def executor() -> Iterator[Executor]:
    """A process that stands for the JVM whose life the server shares."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    with process.stdin:
        yield process
        process.kill()
        process.wait()


@pytest.fixture
def application(executor: Executor) -> Iterator[str]:
    name = f"test-{uuid.uuid4()}"
    yield name
    executor.kill()
    executor.wait()
    folder = runtime_dir(name)
    server = server_folder.occupant(folder)
    wait_until(lambda: server is None or is_over(server))
    wait_until(lambda: is_swept(folder))


@pytest.fixture
def connect(application: str, executor: Executor) -> Iterator[Connect]:
    """Connects to the application's server; everything is closed in the end."""
    clients: list[StateClient] = []

    def connected(**options: Any) -> StateClient:
        clients.append(StateClient.connect(application, watch_pid=executor.pid, **options))
        return clients[-1]

    yield connected
    for client in clients:
        client.close()


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """For what another process does: nothing but looking tells that it is done."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def is_swept(folder: Path) -> bool:
    """Of a server that was killed, and that nobody followed; the last of its threads may hold its lock for a while."""
    if folder.exists():
        server_folder.sweep(folder.parent)
    return not folder.exists()


def server_of(application: str) -> Process:
    found = server_folder.occupant(runtime_dir(application))
    assert found is not None
    return found


def kill(application: str) -> Process:
    """kill -9 of the application's server, and nothing left of it."""
    server = server_of(application)
    assert processes.kill(server, 30.0)
    return server


def is_over(process: Process) -> bool:
    return not processes.is_alive(process)


def block(*values: int, slice_us: int = 0, compacted: Compacted | None = None) -> Block:
    batch = pa.record_batch([pa.array(values, pa.int64())], schema=SCHEMA)
    events = len(values)
    return encode(batch, About(BlockKind.EVENTS, slice_us, events, 0, 0), compacted=compacted)


def open_shard(client: StateClient, state: Path, token: str | None, attempt: str, **change: Any) -> RemoteAttempt:
    shard = change.pop("shard", 0)
    identity = Identity("query", "windowed", shard, 1, {"windows": "w"})
    where = {"run": "run", "operator_uid": "uid", "state_dir": str(state), "store": STORE, **change}
    return client.open(identity, token=token and of_batch(token), makes=of_batch(attempt), **where)


def of_batch(attempt: str) -> str:
    """Names of attempts begin with their batch; in tests it is the number that they end with."""
    digits = re.search(r"\d*$", attempt)
    assert digits
    return attempt if re.match(r"\d{10}-", attempt) else f"{int(digits[0] or 0):010d}-{attempt}"


def snapshot(next_seq: int) -> dict[str, Any]:
    return {"next_seq": next_seq, "counters": {}}


def values(attempt: RemoteAttempt, *slices: int) -> list[int]:
    return [v for b in attempt.read(slices) for v in decode(b.block, SCHEMA).column(0).to_pylist()]


def listening(pid: int) -> list[Any]:
    return [c for c in psutil.Process(pid).net_connections("inet") if c.status == psutil.CONN_LISTEN]


SECRETS = {"PYTHON_WORKER_FACTORY_SECRET": "swordfish-1", "MY_TOKEN": "swordfish-2", "SPARK_AUTH_SECRET": "swordfish-3"}


class Victim(NamedTuple):
    """A server with somebody's attempt on it, whom nothing must harm; and a connection that can send anything."""

    application: str
    client: StateClient
    attempt: RemoteAttempt
    raw: flight.FlightClient
    state: Path


@pytest.fixture(scope="module")
def victims_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
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
def victim(victims_server: Victim) -> Iterator[Victim]:
    server = server_of(victims_server.application)
    yield victims_server
    # As if nothing had happened.
    assert values(victims_server.attempt, 0) == [7]
    assert victims_server.attempt.servers == 1
    assert server_of(victims_server.application) == server
    committed = [p.name for p in victims_server.state.glob("[!.]*/**/*") if p.is_file()]
    assert committed == [OPERATOR], "nothing was committed"


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
