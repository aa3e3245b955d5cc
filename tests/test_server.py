"""The life of the state server: one per application, gone with its executors, replaced when it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.flight as flight
import pytest

from aion import errors
from state_backends.block import Block, Kind, decode, encode
from state_backends.client import RemoteSession, StateClient, runtime_dir
from state_backends.manifest import Identity
from state_backends.server import SOCKET
from state_backends.stores import StoreConfig

STORE = StoreConfig(backend="tiered", budget_bytes=1 << 20, bucket_limit_bytes=1 << 18)
SCHEMA = pa.schema([("x", pa.int64())])


@pytest.fixture
def executor() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for the JVM whose life the server shares."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def application(executor: subprocess.Popen[bytes]) -> Iterator[str]:
    name = f"test-{uuid.uuid4()}"
    yield name
    executor.kill()
    executor.wait()
    wait_until(lambda: not runtime_dir(name).exists())


def wait_until(condition: object, seconds: float = 20.0) -> None:
    """For what another process does: nothing but looking tells that it is done."""
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def pid_of(client: StateClient) -> int:
    return int(client.act("ping", {"executor_pid": os.getpid()})["pid"])


def block(*values: int, slice_us: int = 0) -> Block:
    batch = pa.record_batch([pa.array(values, pa.int64())], schema=SCHEMA)
    return encode(batch, kind=Kind.EVENTS, slice_us=slice_us, events=len(values), min_us=0, max_us=0)


def open_shard(client: StateClient, state: Path, token: str | None, attempt: str, **change: object) -> RemoteSession:
    identity = Identity("query", "windowed", 0, 1, {"windows": "w"})
    where = {"run": "run", "operator_uid": "uid", "state_dir": str(state), "store": STORE, **change}
    return client.open(identity, token=token, attempt=attempt, **where)  # type: ignore[arg-type]


def values(session: RemoteSession, *slices: int) -> list[int]:
    return [v for b in session.read(slices) for v in decode(b.block, SCHEMA).column(0).to_pylist()]


def test_of_many_that_start_one_it_is_the_same_one(application: str, executor: subprocess.Popen[bytes]) -> None:
    script = (
        "import sys; from state_backends.client import StateClient\n"
        "client = StateClient.connect(sys.argv[1], watch_pid=int(sys.argv[2]))\n"
        "print(client.act('ping', {'executor_pid': int(sys.argv[2])})['pid'])"
    )
    command = [sys.executable, "-c", script, application, str(executor.pid)]

    def start(_: int) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with ThreadPoolExecutor(4) as pool:
        pids = list(pool.map(start, range(4)))
    assert len(set(pids)) == 1
    folder = runtime_dir(application)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / SOCKET).stat().st_mode & 0o077 == 0


def test_it_ends_with_its_executor_and_leaves_nothing(
    application: str, executor: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    client = StateClient.connect(application, watch_pid=executor.pid)
    session = open_shard(client, tmp_path, None, "t1")
    session.append([(0, False, block(1, 2))])
    session.commit({"next_seq": 1, "counters": {}})
    server = psutil.Process(pid_of_by_file(application))
    assert list((tmp_path / ".live").iterdir())
    executor.kill()
    executor.wait()
    wait_until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)
    assert not runtime_dir(application).exists()
    assert not (runtime_dir(application).parent / f"{runtime_dir(application).name}.lock").exists()
    assert not (tmp_path / ".live").exists()


def pid_of_by_file(application: str) -> int:
    return int((runtime_dir(application) / "pid").read_text())


def test_one_that_was_killed_is_replaced_and_its_shards_come_back(
    application: str, executor: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    client = StateClient.connect(application, watch_pid=executor.pid)
    session = open_shard(client, tmp_path, None, "t1")
    session.append([(0, False, block(1, 2)), (1, True, block(3, slice_us=10))])
    session.commit({"next_seq": 2, "counters": {}})
    first = pid_of_by_file(application)
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(first) or psutil.Process(first).status() == psutil.STATUS_ZOMBIE)
    wait_until(lambda: StateClient.find(application, watch_pid=executor.pid) is None)
    with pytest.raises(errors.ServerUnreachable):
        open_shard(client, tmp_path, "t1", "t2")
    client = StateClient.connect(application, watch_pid=executor.pid)
    assert pid_of_by_file(application) != first
    session = open_shard(client, tmp_path, "t1", "t2")
    assert session.snapshot == {"next_seq": 2, "counters": {}}
    assert values(session, 0, 10) == [1, 2, 3]
    # What the killed one left of RocksDB's own files is gone.
    assert [p.name.split("-")[0] for p in (tmp_path / ".live").iterdir()] == [str(pid_of_by_file(application))]


def test_an_attempt_that_is_superseded_is_told(
    application: str, executor: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    client = StateClient.connect(application, watch_pid=executor.pid)
    zombie = open_shard(client, tmp_path, None, "t1")
    zombie.append([(0, False, block(1))])
    winner = open_shard(client, tmp_path, None, "t2")
    with pytest.raises(errors.SessionSuperseded, match="attempt t1 is not at work"):
        zombie.commit({"next_seq": 1, "counters": {}})
    with pytest.raises(errors.SessionSuperseded):
        zombie.append([(1, False, block(2))])
    winner.append([(0, False, block(5))])
    assert values(winner, 0) == [5]


def test_blocks_larger_than_a_message_come_back_whole(
    application: str, executor: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    client = StateClient.connect(application, watch_pid=executor.pid)
    session = open_shard(client, tmp_path, None, "t1")
    large = [block(*range(n * 1000, n * 1000 + 400_000)) for n in range(5)]
    session.append((seq, False, b) for seq, b in enumerate(large))
    assert values(session, 0) == [v for n in range(5) for v in range(n * 1000, n * 1000 + 400_000)]
    assert client.stats()["m_bucket_bytes"] <= STORE.budget_bytes


def test_rubbish_harms_no_one(application: str, executor: subprocess.Popen[bytes], tmp_path: Path) -> None:
    client = StateClient.connect(application, watch_pid=executor.pid)
    session = open_shard(client, tmp_path, None, "t1")
    raw = flight.FlightClient(f"grpc+unix://{runtime_dir(application) / SOCKET}")
    for action in [flight.Action("open", b"{}"), flight.Action("commit", b"\xff\x00"), flight.Action("what", b"{}")]:
        with pytest.raises(flight.FlightError):
            list(raw.do_action(action))
    with pytest.raises(flight.FlightError):
        raw.do_get(flight.Ticket(b"rubbish")).read_all()
    damaged = bytearray(block(1).data)
    damaged[3] ^= 1
    broken = Block(block(1).header, bytes(damaged))
    with pytest.raises(errors.CorruptBlock):
        session.append([(0, False, broken)])
    session.append([(0, False, block(7))])
    assert values(session, 0) == [7]
