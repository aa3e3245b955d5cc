"""Servers that die, hang, run out of memory or of disk, in the middle of a task; every fault is a real one."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from aion import errors
from state_backends.backends import StoreConfig
from state_backends.format.block import Compacted
from state_backends.server import remote_attempt
from state_backends.server.client import StateClient, runtime_dir
from state_backends.server.processes import Process
from state_backends.server.remote_attempt import MOST_SERVERS
from state_backends.store.protocol import Only
from tests.server.conftest import (
    Connect,
    Executor,
    block,
    is_over,
    kill,
    of_batch,
    open_shard,
    server_of,
    snapshot,
    values,
    wait_until,
)  # fmt: skip

FAST = 0.3  # seconds after which a server that gives no sign of life is killed


def hang(application: str) -> Process:
    server = server_of(application)
    os.kill(server.pid, signal.SIGSTOP)
    return server


FATES = pytest.mark.parametrize(
    "fate", [pytest.param(kill, id="killed"), pytest.param(hang, id="hung", marks=pytest.mark.proof)]
)
Fate = Callable[[str], Process]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fate", "moments"),
    [
        (kill, ["append", "read", "commit"]),
        (hang, ["commit"]),
        pytest.param(kill, ["open", "append", "read", "release", "commit"], marks=pytest.mark.proof),
        pytest.param(hang, ["append", "commit"], marks=pytest.mark.proof),
    ],
    ids=["killed", "hung", "killed at any moment", "hung at any moment"],
)
def test_a_task_goes_on_where_it_was_whenever_its_server_is_lost(
    application: str, connect: Connect, tmp_path: Path, fate: Fate, moments: list[str]
) -> None:
    first = open_shard(connect(), tmp_path, None, "t1")
    first.append([(0, False, block(1)), (1, False, block(2, slice_us=10))])
    first.commit(snapshot(2))
    client = connect(timeout_s=FAST)
    for number, lost_before in enumerate(moments):
        base, name = f"t{number + 1}", f"t{number + 2}"
        lost: list[Process] = []

        def step(what: str, at: str = lost_before, lost: list[Process] = lost) -> None:
            if what == at:
                lost.append(fate(application))

        step("open")
        attempt = open_shard(client, tmp_path, base, name)
        attempt.append([(10 * number + 2, False, block(100 + number))])
        step("append")
        attempt.append([(10 * number + 3, True, block(200 + number, slice_us=10 * number + 20))])
        step("read")
        assert values(attempt, 0) == [1, *range(100, 101 + number)]
        step("release")
        attempt.release([0], [10 * number + 20])
        step("commit")
        attempt.commit(snapshot(10 * number + 10))
        assert is_over(lost[0])
        assert attempt.servers == 2
    last = open_shard(client, tmp_path, f"t{len(moments) + 1}", "last")
    assert values(last, 0, 10) == [1, *range(100, 100 + len(moments)), 2]
    assert values(last, *range(20, 80)) == []  # purged with the commits


@pytest.mark.slow
@FATES
def test_a_read_goes_on_behind_what_it_yielded(application: str, connect: Connect, tmp_path: Path, fate: Fate) -> None:
    """Every block of a window comes once, although the server is lost between two of them."""
    session_ = open_shard(connect(timeout_s=FAST), tmp_path, None, "t1")
    large = [block(*range(n, n + 300_000)) for n in range(16)]  # more than is under way when the server is lost
    session_.append((seq, seq % 2 == 1, b) for seq, b in enumerate(large))
    reading = session_.read([0])
    found = [next(reading), next(reading)]
    fate(application)
    found += reading
    assert [b.seq for b in found] == list(range(len(large)))
    assert [bytes(b.block.stored) for b in found] == [bytes(b.stored) for b in large]
    assert session_.servers == 2


@pytest.mark.slow
def test_replaced_blocks_stay_replaced_on_any_server(application: str, connect: Connect, tmp_path: Path) -> None:
    """A compacted block is replayed together with what it replaces. And a reader can ask for only some blocks."""
    first = open_shard(connect(), tmp_path, None, "t1")
    first.append([(seq, False, block(seq)) for seq in range(4)])
    first.commit(snapshot(4))
    client = connect()
    attempt = open_shard(client, tmp_path, "t1", "t2")
    attempt.append([(4, False, block(4))])
    attempt.append([(5 + n, False, block(10 + n, compacted=Compacted(2, 100 * n, 100 * n + 99))) for n in range(2)])
    attempt.replace({0: (0, 2)}, 5)
    kill(application)
    assert values(attempt, 0) == [0, 10, 11, 3, 4]
    kill(application)  # now another server has replaced them already
    assert values(attempt, 0) == [0, 10, 11, 3, 4]
    assert attempt.servers == 3

    def some(only: Only) -> list[int]:
        return [stored.seq for stored in attempt.read([0], only=only)]

    assert some(Only(keys=[(5, 5), (99, 99)])) == [0, 5, 3, 4], "of others nothing is known"
    assert some(Only({0: (2, 9)})) == [3, 4] and some(Only({0: (0, 2)}, [(100, 100)])) == [6]
    assert some(Only(below=5)) == [0, 3, 4]
    attempt.prestage([0], Only(keys=[(5, 5)]))
    attempt.commit(snapshot(7))
    kill(application)
    last = open_shard(client, tmp_path, "t2", "t3")
    assert values(last, 0) == [0, 10, 11, 3, 4]
    with pytest.raises(errors.RequestError, match="sorted and disjoint"):
        list(last.read([0], only=Only(keys=[(5, 9), (7, 8)])))


@pytest.mark.slow
def test_two_attempts_of_a_worker_both_go_on(application: str, connect: Connect, tmp_path: Path) -> None:
    client = connect()
    one, two = (open_shard(client, tmp_path, None, f"t{n}", shard=n) for n in range(2))
    one.append([(0, False, block(1))])
    two.append([(0, False, block(2))])
    kill(application)
    one.append([(1, False, block(3))])
    two.append([(1, False, block(4))])
    assert (values(one, 0), values(two, 0)) == ([1, 3], [2, 4])
    one.commit(snapshot(2))
    two.commit(snapshot(2))
    assert client.replay.left_bytes == remote_attempt.REPLAY_BYTES


@pytest.mark.slow
def test_a_server_that_somebody_else_replaced_is_found(application: str, connect: Connect, tmp_path: Path) -> None:
    """gRPC connects to the new server by itself; it does not know the attempt."""
    attempt = open_shard(connect(), tmp_path, None, "t1")
    attempt.append([(0, False, block(1))])
    kill(application)
    other = connect()
    attempt.append([(1, False, block(2))])
    attempt.commit(snapshot(2))
    assert values(open_shard(other, tmp_path, "t1", "t2"), 0) == [1, 2]


@pytest.mark.slow
def test_what_is_too_much_to_send_again_fails_cleanly(
    application: str, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("state_backends.server.client.REPLAY_BYTES", 2000)
    client = connect()
    first = open_shard(client, tmp_path, None, "t1")
    first.append([(0, False, block(1))])
    first.commit(snapshot(1))
    attempt = open_shard(client, tmp_path, "t1", "t2")
    for seq in range(1, 10):
        attempt.append([(seq, False, block(*range(50)))])
    kill(application)
    with pytest.raises(errors.ServerUnreachable, match="this task had sent more than"):
        attempt.commit(snapshot(10))
    attempt.abort()
    # Spark runs the task again: it finds everything as it was.
    again = open_shard(client, tmp_path, "t1", "t3")
    assert values(again, 0) == [1]
    assert client.replay.left_bytes == 2000


@pytest.mark.slow
@pytest.mark.parametrize(("given", "kept"), [(2000, 2000), (1 << 40, remote_attempt.REPLAY_BYTES)])
def test_what_is_kept_to_send_again_follows_the_memory_of_a_worker(
    application: str, executor: Executor, given: int, kept: int
) -> None:
    with contextlib.closing(StateClient.connect(application, watch_pid=executor.pid, replay_bytes=given)) as client:
        assert client.replay.left_bytes == kept


@pytest.mark.slow
def test_a_server_that_dies_of_every_request_is_not_tried_for_ever(
    application: str, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect()
    attempt = open_shard(client, tmp_path, None, "t1")
    attempt.append([(0, False, block(1))])
    reconnect, killed = client.reconnect, []

    def reconnect_to_one_that_dies(seen: int) -> None:
        reconnect(seen)
        killed.append(kill(application))

    kill(application)
    monkeypatch.setattr(client, "reconnect", reconnect_to_one_that_dies)
    with pytest.raises(errors.ServerUnreachable, match=f"lost {MOST_SERVERS} times in one task"):
        attempt.append([(1, False, block(2))])
    assert len(killed) == MOST_SERVERS - 1


@pytest.mark.slow
def test_an_older_turn_of_an_attempt_is_over(connect: Connect, tmp_path: Path) -> None:
    """A put of before that still hangs about in the server changes nothing any more."""
    client = connect()
    attempt = open_shard(client, tmp_path, None, "t1")
    attempt.append([(0, False, block(1))])
    attempt._resume(errors.ServerUnreachable("the connection broke, and the server lives"), 0)
    with pytest.raises(errors.AttemptSuperseded):
        client.call("append", {**attempt._me, "attempt": of_batch("t1")}, [(1, False, block(66))])
    attempt.append([(1, False, block(2))])
    assert values(attempt, 0) == [1, 2]
    attempt.commit(snapshot(2))
    assert values(open_shard(client, tmp_path, "t1", "t2"), 0) == [1, 2]


@pytest.mark.slow
def test_a_commit_whose_answer_was_lost_is_made_again(connect: Connect, tmp_path: Path) -> None:
    client = connect()
    attempt = open_shard(client, tmp_path, None, "t1")
    attempt.append([(0, False, block(1)), (1, True, block(2, slice_us=10))])
    call = client.call

    def call_and_lose_the_answer(name: str, *more: Any, **options: Any) -> Any:
        answer = call(name, *more, **options)
        if name == "commit":
            client.call = call  # type: ignore[method-assign]
            raise errors.ServerUnreachable("the answer was lost")
        return answer

    client.call = call_and_lose_the_answer  # type: ignore[method-assign]
    attempt.commit(snapshot(2))
    assert attempt.servers == 2
    kill_all = open_shard(client, tmp_path, "t1", "t2")
    assert values(kill_all, 0, 10) == [1, 2]
    kill_all.append([(2, False, block(3))])
    kill_all.commit(snapshot(3))
    assert values(open_shard(client, tmp_path, "t2", "t3"), 0, 10) == [1, 3, 2]


@pytest.mark.slow
def test_a_server_that_pauses_is_waited_for(application: str, connect: Connect, tmp_path: Path) -> None:
    attempt = open_shard(connect(timeout_s=30.0), tmp_path, None, "t1")
    server = hang(application)
    resume = threading.Timer(0.3, os.kill, (server.pid, signal.SIGCONT))
    resume.start()
    attempt.append([(0, False, block(1))])
    resume.join()
    assert values(attempt, 0) == [1]
    assert attempt.servers == 1
    assert server_of(application) == server


SLOW_DISK = """
import gc, pathlib, time
from state_backends.store.io import Priority
from state_backends.store.io_thread import IoThread
class Destage:
    '''A disk that takes long for what the I/O thread of its server asks next, once.'''
    def __init__(self, asked, seconds): self.asked, self.seconds = pathlib.Path(asked), seconds
    def suggest(self, view):
        if not self.asked.exists():
            (io,) = [found for found in gc.get_objects() if isinstance(found, IoThread)]
            io.submit(Priority.READ, self.steps())
        return []
    def steps(self):
        self.asked.write_text("it is asked")
        time.sleep(self.seconds)
        yield 0
"""


def slow_disk(folder: Path, seconds: float) -> tuple[StoreConfig, Path]:
    """A store on such a disk, and the file that tells that the disk is at it."""
    (folder / "slow.py").write_text(SLOW_DISK)
    asked = folder / "asked"
    arguments = {"asked": str(asked), "seconds": seconds}
    return StoreConfig(
        budget_bytes=1 << 20, bucket_limit_bytes=1 << 18, destage_class="slow:Destage", destage=arguments
    ), asked


@pytest.mark.slow
def test_a_slow_disk_is_no_reason_to_kill(
    application: str, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit takes several timeouts; the server answers pings meanwhile."""
    monkeypatch.syspath_prepend(tmp_path)
    slow, asked = slow_disk(tmp_path, 3.0)
    attempt = open_shard(connect(timeout_s=1), tmp_path, None, "t1", store=slow)
    wait_until(asked.exists)
    attempt.append((seq, True, block(*range(40_000), slice_us=seq)) for seq in range(5))
    attempt.commit(snapshot(5))
    assert attempt.servers == 1
    assert len(values(open_shard(connect(), tmp_path, "t1", "t2"), *range(5))) == 200_000


@pytest.mark.slow
def test_a_server_that_answers_and_does_not_get_on_is_given_up(
    application: str, connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    stuck, asked = slow_disk(tmp_path, 3600.0)
    attempt = open_shard(connect(timeout_s=0.5), tmp_path, None, "t1", store=stuck)
    wait_until(asked.exists)
    attempt.append((seq, True, block(*range(8_000), slice_us=seq)) for seq in range(2))
    server = server_of(application)
    with pytest.raises(
        errors.ServerError, match=r"answers, but 'commit' has made no progress for 5 s.*request_timeout"
    ):
        attempt.commit(snapshot(2))
    assert server_of(application) == server
    kill(application)


# -- disk and memory ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def limited(pid: int, what: int, soft: int) -> Iterator[None]:
    """A limit of the kernel on a living process, for a while."""
    process = psutil.Process(pid)
    before = process.rlimit(what)
    process.rlimit(what, (soft, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.rlimit(what, before)


@pytest.mark.slow
def test_a_full_disk_fails_the_task_and_not_the_one_after(application: str, connect: Connect, tmp_path: Path) -> None:
    client = connect()
    attempt = open_shard(client, tmp_path, None, "t1")
    attempt.append([(0, False, block(1))])
    attempt.commit(snapshot(1))
    pid = server_of(application).pid
    with limited(pid, psutil.RLIMIT_FSIZE, 1000):
        attempt = open_shard(client, tmp_path, "t1", "t2")
        attempt.append([(1, False, block(2))])
        with pytest.raises(errors.DiskError, match=r"File too large"):
            attempt.commit(snapshot(2))
        attempt.abort()
    attempt = open_shard(client, tmp_path, "t1", "t3")
    attempt.append([(1, False, block(3))])
    attempt.commit(snapshot(2))
    assert values(open_shard(client, tmp_path, "t3", "t4"), 0) == [1, 3]
    assert server_of(application).pid == pid


@pytest.mark.slow
def test_rocksdb_that_refuses_to_write_after_a_full_disk_is_opened_anew(
    application: str, connect: Connect, tmp_path: Path
) -> None:
    """What it could not append to its own list of files it would not touch again."""
    client = connect()
    tiny = StoreConfig(backend="tiered", budget_bytes=1, bucket_limit_bytes=1)  # each block becomes a file at once
    attempt = open_shard(client, tmp_path, None, "t1", store=tiny)
    manifest, largest, seq = 0, 1, 0
    while manifest < largest + 200:
        attempt.append([(seq, True, block(seq, slice_us=seq))])
        seq += 1
        manifest = max(p.stat().st_size for p in (tmp_path / ".live").rglob("MANIFEST-*"))
        largest = max(p.stat().st_size for p in tmp_path.rglob("*.sst"))
    attempt.commit(snapshot(seq))
    with (
        limited(server_of(application).pid, psutil.RLIMIT_FSIZE, manifest + 20),
        pytest.raises(errors.DiskError, match=r"File too large"),
    ):
        attempt = open_shard(client, tmp_path, "t1", "failing")
        attempt.append([(seq, True, block(seq, slice_us=seq))])
        attempt.commit(snapshot(seq + 1))
    attempt = open_shard(client, tmp_path, "t1", "again")
    attempt.append([(seq, True, block(seq, slice_us=seq))])
    attempt.commit(snapshot(seq + 1))
    assert values(open_shard(client, tmp_path, "again", "more"), *range(seq + 1)) == list(range(seq + 1))


@pytest.mark.slow
def test_a_server_without_memory_says_so_or_dies_and_the_next_task_goes_on(
    application: str, connect: Connect, tmp_path: Path
) -> None:
    client = connect()
    attempt = open_shard(client, tmp_path, None, "t1", store=StoreConfig(backend="memory"))
    attempt.append([(0, False, block(1))])
    attempt.commit(snapshot(1))
    pid = server_of(application).pid
    attempt = open_shard(client, tmp_path, "t1", "t2", store=StoreConfig(backend="memory"))
    # Not of address space: allocators have some reserved, and more or less of it is left.
    room = psutil.Process(pid).memory_info().data + (64 << 20)
    large = block(*range(1_000_000))
    with limited(pid, resource.RLIMIT_DATA, room):
        try:
            for seq in range(1, 25):
                attempt.append([(seq, False, large)])
        except errors.ServerError as error:
            assert "no memory left" in str(error)
        else:
            assert attempt.servers > 1  # it died of it, and another without that limit took over
        attempt.abort()
    again = open_shard(client, tmp_path, "t1", "t3", store=StoreConfig(backend="memory"))
    again.append([(1, False, block(2))])
    again.commit(snapshot(2))
    assert values(open_shard(client, tmp_path, "t3", "t4", store=StoreConfig(backend="memory")), 0) == [1, 2]


def test_its_last_words_are_kept(application: str, connect: Connect) -> None:
    """A server that crashes writes where it was into its log."""
    connect()
    server, log = server_of(application), runtime_dir(application) / "log"
    os.kill(server.pid, signal.SIGSEGV)
    wait_until(lambda: is_over(server))
    assert "Fatal Python error: Segmentation fault" in log.read_text()
