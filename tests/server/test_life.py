"""The life of the state server: one per application, gone with its executors, replaced when it dies."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from aion import errors
from state_backends.server import processes, server_folder
from state_backends.server.client import StateClient, running_servers, runtime_dir
from state_backends.server.main import Executors
from state_backends.server.server_folder import ENDED_SECONDS, LEASE, LOG, LOG_BYTES, OLD_LOG, SOCKET, Lease
from state_backends.store.io import SWITCH_SECONDS
from state_backends.versions.manifest import Identity
from tests.server.conftest import (
    STORE,
    Connect,
    Executor,
    block,
    is_over,
    kill,
    open_shard,
    server_of,
    snapshot,
    values,
    wait_until,
)  # fmt: skip

DAEMON = """
import os, sys
from state_backends.server.client import executor_pid

os.setpgid(0, 0)  # as Spark's daemon does
daemon = os.getpid()
if os.fork() == 0:  # a worker
    print(executor_pid() - daemon, flush=True)
    sys.stdin.read()  # until the test has closed it
    while os.getppid() == daemon:
        pass
    print(executor_pid() - os.getpid(), flush=True)
else:
    sys.stdin.readline()  # until the test says so, or has closed it
    os._exit(0)
"""

ASKS = """
import sys
class Asks:
    def __init__(self): raise ValueError(f"gives way after {sys.getswitchinterval()} s")
"""


@pytest.mark.slow
def test_a_worker_whose_daemon_has_ended_is_its_own_executor() -> None:
    """Its parent is then the system's first process, and a server that waits for that one stays for good."""
    with subprocess.Popen(
        [sys.executable, "-c", DAEMON], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as daemon:
        assert daemon.stdin is not None
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == "0\n"
        daemon.stdin.write("end\n")
        daemon.stdin.close()
        assert daemon.stdout.readline() == "0\n"


@pytest.mark.slow
def test_of_many_that_start_one_it_is_the_same_one(application: str, executor: Executor) -> None:
    script = (
        "import sys; from state_backends.server.client import StateClient\n"
        "client = StateClient.connect(sys.argv[1], watch_pid=int(sys.argv[2]))\n"
        "print(client.call('ping', {'executor_pid': int(sys.argv[2])})['pid'])\n"
        "client.close()"
    )
    command = [sys.executable, "-c", script, application, str(executor.pid)]

    def start(_: int) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with ThreadPoolExecutor(4) as pool:
        pids = list(pool.map(start, range(4)))
    assert set(pids) == {str(server_of(application).pid)}


@pytest.mark.slow
def test_it_ends_with_its_executor_and_leaves_nothing(
    application: str, executor: Executor, connect: Connect, tmp_path: Path
) -> None:
    attempt = open_shard(connect(), tmp_path, None, "t1")
    attempt.append([(0, False, block(1, 2))])
    attempt.commit(snapshot(1))
    server, folder = server_of(application), runtime_dir(application)
    assert list((tmp_path / ".live").iterdir())
    executor.kill()
    executor.wait()
    wait_until(lambda: is_over(server))
    assert not folder.exists()
    assert not (folder.parent / f"{folder.name}.lock").exists()
    assert not (tmp_path / ".live").exists()


@pytest.mark.slow
def test_it_lives_as_long_as_any_of_its_executors(application: str, executor: Executor, connect: Connect) -> None:
    client = connect()
    server = server_of(application)
    second = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert second.stdin is not None
    client.call("ping", {"executor_pid": second.pid})
    executor.kill()
    executor.wait()
    for _ in range(3):
        assert client.call("ping", {"executor_pid": second.pid}) == {"pid": server.pid}
    with second.stdin:
        second.stdin.write(b"\n")
    second.wait()
    wait_until(lambda: is_over(server))


def process() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def ended(started: subprocess.Popen[bytes]) -> None:
    started.communicate(b"\n")


def test_an_executor_whose_daemons_have_ended_is_over_a_little_later() -> None:
    """Python in local mode stops Spark, and goes on; Java's process then goes on as well."""
    now = 0.0
    executors = Executors(lambda: now)
    executor, first, second = process(), process(), process()
    executors.add(executor.pid)
    now = 1000.0
    assert not executors.all_ended(), "its first worker may still come"
    for daemon in (first, second):
        executors.add(executor.pid, daemon.pid)
    ended(first)
    now = 2000.0
    assert not executors.all_ended()
    ended(second)
    assert not executors.all_ended(), "Spark starts another daemon if one dies"
    now += ENDED_SECONDS
    third = process()
    executors.add(executor.pid, third.pid)
    now += ENDED_SECONDS
    assert not executors.all_ended()
    ended(third)
    now += ENDED_SECONDS
    assert executors.all_ended()
    ended(executor)


@pytest.mark.proof
def test_it_ends_with_the_daemon_of_its_executor(application: str, executor: Executor) -> None:
    daemon = process()
    StateClient.connect(application, watch_pid=executor.pid, daemon_pid=daemon.pid).close()
    server = server_of(application)
    ended(daemon)
    wait_until(lambda: is_over(server))
    assert executor.poll() is None


@pytest.mark.slow
def test_who_only_looks_neither_keeps_it_alive_nor_starts_one(
    application: str, executor: Executor, connect: Connect, tmp_path: Path
) -> None:
    assert StateClient.find(application) is None
    connect()
    looker = StateClient.find(application)
    assert looker is not None
    assert looker.stats()["shards"] == 0
    assert server_of(application).pid in [pid for pid, _ in running_servers()]
    server = server_of(application)
    executor.kill()
    executor.wait()
    wait_until(lambda: is_over(server))  # this process, which looked, lives
    with pytest.raises(errors.ServerUnreachable):
        open_shard(looker, tmp_path, None, "t1")
    assert not runtime_dir(application).exists()
    looker.close()


def test_one_that_is_told_to_end_does_so_cleanly(application: str, connect: Connect, tmp_path: Path) -> None:
    open_shard(connect(), tmp_path, None, "t1").append([(0, False, block(1))])
    server = server_of(application)
    os.kill(server.pid, signal.SIGTERM)
    wait_until(lambda: is_over(server))
    assert not runtime_dir(application).exists()
    assert not (tmp_path / ".live").exists()


@pytest.mark.slow
def test_one_that_was_killed_is_replaced_and_its_shards_come_back(
    application: str, connect: Connect, tmp_path: Path
) -> None:
    attempt = open_shard(connect(), tmp_path, None, "t1")
    attempt.append([(0, False, block(1, 2)), (1, True, block(3, slice_us=10))])
    attempt.commit(snapshot(2))
    first = kill(application)
    assert StateClient.find(application) is None
    attempt = open_shard(connect(), tmp_path, "t1", "t2")
    assert server_of(application) != first
    assert attempt.snapshot == snapshot(2)
    assert values(attempt, 0, 10) == [1, 2, 3]
    # What the killed one left of RocksDB's own files is gone.
    assert [p.name.split("-")[1] for p in (tmp_path / ".live").iterdir()] == [str(server_of(application).pid)]


@pytest.mark.slow
def test_its_log_stays_short_however_much_is_written(application: str, connect: Connect) -> None:
    """Whatever writes to it: Python's logging, or what a library says on stderr."""
    client = connect()
    folder = runtime_dir(application)
    for number in range(3):
        with (folder / LOG).open("a") as log:
            log.writelines(f"{number} {line}\n" for line in range(200_000))
        wait_until(lambda: (folder / LOG).stat().st_size <= LOG_BYTES)
        assert (folder / OLD_LOG).stat().st_size <= LOG_BYTES
        # On a slow machine it may be cut while it is written. The newest lines are never lost.
        assert ((folder / OLD_LOG).read_text() + (folder / LOG).read_text()).endswith(f"{number} 199999\n")
    assert client.stats()["shards"] == 0


HANGS = """
import sys, threading
from pathlib import Path
from state_backends.server import main, server_folder

def hang(folder):
    print("hangs", flush=True)
    threading.Event().wait()

main.ENDING_SECONDS = 0.2
server_folder.trim_log = hang
main.run(Path(sys.argv[1]), int(sys.argv[2]), main.Host())
"""


@pytest.mark.slow
def test_one_that_hangs_ends_after_its_executor_and_says_where(executor: Executor, tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o700)
    command = [sys.executable, "-c", HANGS, str(folder), str(executor.pid)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "hangs\n"
        executor.kill()
        executor.wait()
        try:
            _, said = server.communicate(timeout=60)
        finally:
            server.kill()
    assert server.returncode == 1
    assert "in hang" in said


@pytest.mark.slow
def test_a_second_one_in_the_same_folder_gives_up(application: str, executor: Executor, connect: Connect) -> None:
    client = connect()
    server, folder = server_of(application), runtime_dir(application)
    command = [sys.executable, "-m", "state_backends.server.main", "--dir", str(folder), "--watch", str(executor.pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"ServerError: another state server uses {folder}\n")
    assert client.call("ping", {"executor_pid": executor.pid}) == {"pid": server.pid}


@pytest.mark.slow
@pytest.mark.parametrize("gone", ["the socket", "the folder"])
def test_one_that_nobody_can_find_any_more_ends_and_is_replaced(
    application: str, connect: Connect, tmp_path: Path, gone: str
) -> None:
    attempt = open_shard(connect(), tmp_path, None, "t1")
    attempt.append([(0, False, block(1))])
    first, folder = server_of(application), runtime_dir(application)
    if gone == "the socket":
        (folder / SOCKET).unlink()
    else:
        shutil.rmtree(folder)
    values_before = values(attempt, 0)  # who is connected is served, by the one or by the other
    wait_until(lambda: is_over(first))
    second = connect()
    assert server_of(application) != first
    assert values_before == values(attempt, 0) == [1]
    attempt.commit(snapshot(1))
    assert values(open_shard(second, tmp_path, "t1", "t2"), 0) == [1]


@pytest.mark.slow
def test_one_that_ends_late_leaves_its_successor_alone(application: str, executor: Executor, connect: Connect) -> None:
    folder = runtime_dir(application)
    with server_folder.elected(folder):
        folder.mkdir(mode=0o700)
    lease = Lease(folder)  # of one that ends
    shutil.rmtree(folder)
    client = connect()  # another moved in
    server_folder.leave(folder, lease)
    lease.close()
    assert client.call("ping", {"executor_pid": executor.pid}) == {"pid": server_of(application).pid}


def test_a_folder_that_a_dead_application_left_is_swept_by_the_next_server(connect: Connect) -> None:
    dead = runtime_dir(f"dead-{uuid.uuid4()}")
    with server_folder.elected(dead):
        dead.mkdir(mode=0o700)
        (dead / SOCKET).touch()
        (dead / "pid").write_text("1")  # a number that has become another process's
        (dead / LEASE).write_text("1-0-0")
    connect()
    assert not dead.exists()
    assert not (dead.parent / f"{dead.name}.lock").exists()


@pytest.mark.slow
def test_a_stale_lock_and_folder_do_not_keep_a_server_from_starting(
    application: str, executor: Executor, connect: Connect
) -> None:
    folder = runtime_dir(application)
    with server_folder.elected(folder):
        folder.mkdir(mode=0o700)
    me = processes.me()
    for name in (SOCKET, "pid", "log"):
        (folder / name).write_text(str(os.getpid()))
    (folder / LEASE).write_text(str(me))  # claims that this very process is the server; nobody holds the lock
    assert connect().call("ping", {"executor_pid": executor.pid}) == {"pid": server_of(application).pid}
    assert server_of(application) != me


def test_a_number_that_has_become_another_process_is_not_killed() -> None:
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert bystander.stdin is not None
    with bystander.stdin:
        now = processes.find(bystander.pid)
        assert now is not None
        assert processes.kill(now._replace(started=now.started - 1), 1.0)  # that one is over: nothing to do
        assert processes.is_alive(now)
        assert not processes.is_alive(now._replace(started=now.started - 1))
        assert processes.kill(now, 30.0)
    assert bystander.wait() == -signal.SIGKILL
    assert processes.find(bystander.pid) is None


def test_who_waits_for_a_starter_that_stands_still_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "place" / "app"
    with (
        server_folder.elected(folder),
        pytest.raises(errors.ServerError, match=r"another process has locked .*app\.lock for 0\.1 s"),
        server_folder.elected(folder, timeout_s=0.1),
    ):
        raise AssertionError("two are elected")


def test_a_server_that_cannot_start_says_why(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (tmp_path / "state_backends").mkdir()
    (tmp_path / "state_backends" / "__init__.py").write_text("raise ImportError('a broken installation')")
    application = f"test-{uuid.uuid4()}"
    with pytest.raises(errors.ServerError, match=r"did not start \(exit code 1\)(.|\n)*a broken installation"):
        StateClient.connect(application, watch_pid=executor.pid)
    server_folder.sweep(runtime_dir(application).parent)


def test_a_folder_whose_path_is_too_long_for_a_socket_is_refused(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("long" * 25)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with pytest.raises(errors.ServerError, match="the system allows 107: set TMPDIR to a folder with a shorter path"):
        StateClient.connect(f"test-{uuid.uuid4()}", watch_pid=executor.pid)


@pytest.mark.slow
def test_an_attempt_that_is_superseded_is_told(connect: Connect, tmp_path: Path) -> None:
    client = connect()
    zombie = open_shard(client, tmp_path, None, "t1")
    zombie.append([(0, False, block(1))])
    winner = open_shard(client, tmp_path, None, "t2")
    with pytest.raises(errors.AttemptSuperseded, match="t1 has ended"):
        zombie.commit(snapshot(1))
    with pytest.raises(errors.AttemptSuperseded):
        zombie.append([(1, False, block(2))])
    winner.append([(0, False, block(5))])
    assert values(winner, 0) == [5]


def test_an_attempt_that_comes_back_after_many_others_is_told_too(connect: Connect, tmp_path: Path) -> None:
    """It must not open the shard anew, as after the loss of a server: that would end the attempt at work."""
    client, token = connect(), None
    zombie = open_shard(client, tmp_path, None, "t0")
    for number in range(40):
        attempt = open_shard(client, tmp_path, token, f"t{number}-live")
        attempt.commit(snapshot(number + 1))
        token = attempt.makes
    winner = open_shard(client, tmp_path, token, "t40")
    with pytest.raises(errors.AttemptSuperseded):
        zombie.append([(0, False, block(1))])
    winner.commit(snapshot(41))


@pytest.mark.slow
def test_blocks_larger_than_a_message_come_back_whole(connect: Connect, tmp_path: Path) -> None:
    client = connect()
    attempt = open_shard(client, tmp_path, None, "t1")
    large = [block(*range(n * 1000, n * 1000 + 400_000)) for n in range(5)]
    attempt.append((seq, False, b) for seq, b in enumerate(large))
    assert values(attempt, 0) == [v for n in range(5) for v in range(n * 1000, n * 1000 + 400_000)]
    assert client.stats()["m_bucket_bytes"] <= STORE.budget_bytes


def test_giving_up_says_nothing_of_its_own(connect: Connect, tmp_path: Path) -> None:
    """A task fails with what went wrong in it, not with what it hears when it tidies up behind that."""
    client = connect()
    zombie = open_shard(client, tmp_path, None, "t1")
    open_shard(client, tmp_path, None, "t2")
    with pytest.raises(ValueError, match="the user's function"):
        try:
            raise ValueError("the user's function")
        except ValueError:
            zombie.abort()
            raise


@pytest.mark.slow
def test_an_operator_that_is_twice_in_a_query_is_refused(connect: Connect, tmp_path: Path) -> None:
    """Its copies would write the same state. A task that runs again is in the same partition of its stage."""
    client = connect()
    open_shard(client, tmp_path, None, "a0", place=(7, 3))
    open_shard(client, tmp_path, None, "b0", place=(7, 3))
    advice = r"'windowed' is used twice in this query.*foreachBatch.*aion.panes.*aion.windowed\(..., name='...'\)"
    with pytest.raises(errors.ServerError, match=advice):
        open_shard(client, tmp_path, None, "c0", place=(7, 4))
    processor = Identity("query", "counts", 0, 1, {"kind": "stateful"})
    where = {"run": "run", "operator_uid": "uid", "state_dir": str(tmp_path), "store": STORE}
    client.open(processor, token=None, makes="0000000000-a", place=(7, 0), **where)
    advice = r"'counts' is used twice in this query.*use the batch there.*aion.group_by\(..., name='...'\)"
    with pytest.raises(errors.ServerError, match=advice):
        client.open(processor, token=None, makes="0000000000-b", place=(7, 1), **where)
    open_shard(client, tmp_path, None, "d0", place=(7, 4), run="another run").abort()
    # A function of foreachBatch that uses its batch twice, and makes one partition of it once.
    open_shard(client, tmp_path, None, "e0", place=(8, 0)).commit(snapshot(0))


def test_a_thread_that_is_busy_gives_way_to_a_request_soon(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asks.py").write_text(ASKS)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(errors.AionError, match=f"gives way after {SWITCH_SECONDS} s"):
        open_shard(connect(), tmp_path, None, "a0", store=replace(STORE, destage_class="asks:Asks"))
