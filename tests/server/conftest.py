"""Real state servers in processes of their own, and what tests do with them."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest

from aion.core.ingest.encoding import decode, encode
from state_backends.backends import StoreConfig
from state_backends.format.block import Block, BlockKind, Compacted
from state_backends.server import processes, server_folder
from state_backends.server.client import StateClient, runtime_dir
from state_backends.server.processes import Process
from state_backends.server.remote_attempt import RemoteAttempt
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
    return encode(
        batch, kind=BlockKind.EVENTS, slice_us=slice_us, events=events, min_us=0, max_us=0, compacted=compacted
    )


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
