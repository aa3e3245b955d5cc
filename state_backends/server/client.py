"""The client of the state server, in a Python worker: finds the host's server, or starts it, and sends requests."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import orjson
import psutil
import pyarrow as pa
import pyarrow.flight as flight

from state_backends.backends import StoreConfig
from state_backends.format.errors import OutOfMemory, ServerError, ServerUnreachable
from state_backends.server import processes, wire
from state_backends.server.remote_attempt import REPLAY_BYTES, RemoteAttempt, ReplayRoom, ToSend
from state_backends.server.server_folder import (
    LOG,
    PID,
    SOCKET,
    elected,
    evict,
    occupant,
    private,
    runtime_dir,
    trim_log,
    trusted,
)
from state_backends.server.verbs import VERBS, Way, addressed
from state_backends.server.watchdog import Watchdog
from state_backends.versions.json_values import dumps
from state_backends.versions.manifest import Identity

START_SECONDS = 60.0
REQUEST_TIMEOUT_SECONDS = 30.0
PING_SECONDS = 10.0
EXPECT_SECONDS = TIERS_SECONDS = 5.0
MOST_SOCKET_BYTES = 107
T = TypeVar("T")
_FAILED = "Unexpected error in RPC handling"  # gRPC's message for a C++ exception: most likely out of memory

# The environment variables that the server inherits: those that it needs to run, and those that pyarrow's file systems
# read. Nothing else, because a worker's environment has the secret by which Spark identifies it.
_INHERITED = frozenset(
    {"HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PYTHONHOME", "PYTHONPATH", "SHELL",
     "SPARK_LOCAL_DIRS", "SSL_CERT_DIR", "SSL_CERT_FILE", "TMPDIR", "TZ", "USER", "VIRTUAL_ENV",
     "CLASSPATH", "JAVA_HOME", "KRB5CCNAME", "KRB5_CONFIG",
     "OMP_NUM_THREADS", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"}
)  # fmt: skip
_INHERITED_PREFIXES = ("ARROW_", "AWS_", "AZURE_", "GOOGLE_", "HADOOP_", "LC_", "LIBHDFS", "MALLOC_")

# The server's threads share one heap. With a heap for each thread, other threads cannot use memory that one has freed:
# with eight readers and a budget of 48 MiB the server grew by 101 MiB instead of 59. Arrow's own allocator has a heap
# for each thread, too: with two writers of keyed values and a budget of 256 MiB the server grew by 360 MiB instead of
# 331.
_ALLOCATION = {"MALLOC_ARENA_MAX": "1", "ARROW_DEFAULT_MEMORY_POOL": "system"}

_children: list[subprocess.Popen[bytes]] = []


def running_servers() -> list[tuple[int, dict[str, Any]]]:
    """Pid and statistics of each state server of this user that answers on this host."""
    return list(_asked(lambda client: client.stats()))


def tiers_here(query: str, operator: str, shard: int, token: str, below: int) -> dict[int, tuple[int, int]]:
    """Returns where a state server of this user on this host has the bytes of a version of a shard now.

    By slice: how many are in memory, and how many only on disk. Nothing if no server has the shard open at this version
    or a later one. ``below``: the version has no block with this number or a higher one.
    """
    request = {"query": query, "operator": operator, "shard": shard, "token": token, "below": below}
    answers = _asked(lambda client: client.call("tiers", request, timeout=TIERS_SECONDS))
    return {slice_us: (memory, disk) for slice_us, memory, disk in next((found for _, found in answers if found), ())}


def _asked(ask: Callable[[StateClient], T]) -> Iterator[tuple[int, T]]:
    """Yields the pid of each state server of this user that answers on this host, and its answer."""
    for pid in runtime_dir("").parent.glob("*/" + PID):
        with contextlib.suppress(ServerError):
            if not _answers(pid.parent, None, PING_SECONDS) or (server := occupant(pid.parent)) is None:
                continue
            with contextlib.closing(StateClient(pid.parent, None)) as client:
                answer = ask(client)
            yield server.pid, answer


def executor_pid() -> int:
    """Returns the pid of the JVM that this worker belongs to. If there is none, of the process that started this one.

    If that process has ended, of this process: a worker whose daemon was killed still serves its executor, but its
    parent is now the system's first process, and a server that waits for the end of that one never ends. Spark's
    daemon and its workers are a process group of their own.
    """
    for process in psutil.Process().parents():
        with contextlib.suppress(psutil.Error):
            if process.name().startswith("java"):
                return process.pid
    parent = os.getppid()
    with contextlib.suppress(OSError):
        if parent and os.getpgid(parent) == os.getpgrp():
            return parent
    return os.getpid()


def daemon_pid() -> int | None:
    """Returns the pid of Spark's daemon, if that forked this worker. Spark ends its daemons when it is stopped."""
    return os.getpgrp() if os.getpgrp() == os.getppid() else None


class Watched(NamedTuple):
    """What the server's life is bound to: see :class:`state_backends.server.main.Executors`."""

    executor_pid: int
    daemon_pid: int | None = None


class StateClient:
    """A connection to the state server of this host. If the server dies, :meth:`reconnect` connects to the next one.

    Raises ServerUnreachable if the server cannot be reached, or gives no sign of life for ``timeout_s``: see
    :mod:`state_backends.server.watchdog`. Close it. ``watched``: what the server's life is bound to, or None if this
    client only observes; it neither starts a server nor keeps it alive. ``replay_bytes``: the most that its attempts
    keep to send again. At most ``REPLAY_BYTES``.
    """

    def __init__(
        self,
        folder: Path,
        watched: Watched | None,
        timeout_s: float = REQUEST_TIMEOUT_SECONDS,
        replay_bytes: int | None = None,
    ) -> None:
        self._folder = folder
        self._watched = watched
        self._lock = threading.Lock()
        self._watchdog = Watchdog(folder, timeout_s, lambda seconds: _answers(folder, watched, seconds))
        self._flight = _connection(folder)
        self.generation = 0
        self.replay = ReplayRoom(REPLAY_BYTES if replay_bytes is None else min(replay_bytes, REPLAY_BYTES))

    @classmethod
    def connect(
        cls,
        application: str,
        *,
        watch_pid: int,
        daemon_pid: int | None = None,
        timeout_s: float = REQUEST_TIMEOUT_SECONDS,
        replay_bytes: int | None = None,
    ) -> StateClient:
        """Connects. Starts the server if there is none; if several clients try to, a lock file elects one.

        Kills a server that does not answer. ``watch_pid``: the executor that the server serves. ``daemon_pid``: see
        :func:`daemon_pid`. Raises ServerError if no server can be started, or if the folder or the socket is another
        user's.
        """
        folder = runtime_dir(application)
        watched = Watched(watch_pid, daemon_pid)
        _ensure(folder, watched, timeout_s)
        return cls(folder, watched, timeout_s, replay_bytes)

    @classmethod
    def find(cls, application: str, *, timeout_s: float = REQUEST_TIMEOUT_SECONDS) -> StateClient | None:
        """Returns a connection to the server if one answers, otherwise None. It only observes: it keeps no server
        alive.

        Raises ServerError if the folder or the socket is another user's.
        """
        folder = runtime_dir(application)
        if not _answers(folder, None, min(PING_SECONDS, timeout_s)):
            return None
        return cls(folder, None, timeout_s)

    def reconnect(self, seen: int) -> None:
        """Connects to the current server. Starts one if there is none. ``seen``: the generation that was lost.

        Raises ServerError if no server can be started.
        """
        with self._lock:
            if self.generation != seen:
                return  # another attempt of this client has reconnected already
            if self._watched is None:
                raise ServerUnreachable("the state server is gone, and a client that only observes does not start one")
            _ensure(self._folder, self._watched, self._watchdog.timeout_s)
            with contextlib.suppress(flight.FlightError, pa.ArrowException, OSError):
                self._flight.close()
            self._flight = _connection(self._folder)
            self.generation += 1

    def call(
        self, name: str, request: dict[str, Any], sent: ToSend | None = None, *, timeout: float | None = None
    ) -> Any:
        """Sends a request for a verb of :data:`state_backends.server.verbs.VERBS`.

        Returns the answer, or an iterator of blocks, values or entries. ``sent``: the blocks or values that follow the
        request. Raises what the server raised, or ServerUnreachable if it cannot be reached.
        """
        verb, body = VERBS[name], dumps(request)
        if verb.way is Way.GETS:
            return self._found(name, addressed(name, body))
        options = flight.FlightCallOptions(timeout=timeout or self._watchdog.limit_s)
        try:
            with self._watchdog.waiting(name):
                if verb.carries is not None:
                    descriptor = flight.FlightDescriptor.for_command(addressed(name, body))
                    writer, _ = self._flight.do_put(descriptor, verb.carries.schema, options)
                    with writer:
                        for message in verb.carries.pack(sent or ()):
                            writer.write_batch(message)
                    return None
                (result,) = self._flight.do_action(flight.Action(name, pa.py_buffer(body)), options)
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            self._raise(error, name, given_up=timeout is None and isinstance(error, flight.FlightTimedOutError))
        return orjson.loads(result.body.to_pybytes())

    def stats(self) -> dict[str, Any]:
        result: dict[str, Any] = self.call("stats", {}, timeout=PING_SECONDS)
        return result

    def expect(self, query: str, operator: str, shard: int, keys: Sequence[bytes] = ()) -> bool:
        """Says which keyed values the next attempt on a shard will read, so that they come to memory before it.

        Returns whether that is of use: the shard is on this host, and its last attempt read values from disk, but not
        more than memory holds.
        """
        request = {"query": query, "operator": operator, "shard": shard, "keys": wire.pack_keys(list(keys))}
        return bool(self.call("expect", request, timeout=EXPECT_SECONDS))

    def open(
        self,
        identity: Identity,
        *,
        token: str | None,
        makes: str,
        run: str,
        operator_uid: str,
        place: tuple[int, int] | None = None,
        next_start: tuple[float, float] | None = None,
        state_dir: str,
        store: StoreConfig,
        others: bool = False,
        disk_times: bool = False,
        committed: int = -1,
        asked: bool = False,
    ) -> RemoteAttempt:
        """Starts an attempt on the version ``token``, which is None if there is none yet. The new version will be
        ``makes``.

        ``place``: Spark's stage and the partition in it, where the task is, or None if the attempt only reads.
        ``next_start``: see OpenRequest. ``others``: whether the answer contains what the operator's other shards have
        learnt. ``disk_times``: whether it contains how long the disk took to stage and to write. ``committed``,
        ``asked``: see OpenRequest.
        """
        opening = {
            "identity": asdict(identity),
            "token": token,
            "makes": makes,
            "run": run,
            "operator_uid": operator_uid,
            "place": place,
            "next_start": next_start,
            "state_dir": state_dir,
            "store": store.to_json(),
            "others": others,
            "disk_times": disk_times,
            "committed": committed,
            "asked": asked,
        }
        return RemoteAttempt(self, opening)

    def _found(self, name: str, request: bytes) -> Iterator[Any]:
        """Yields the blocks, values or entries that answer a verb."""
        carries = VERBS[name].carries
        assert carries is not None
        ticket = flight.Ticket(request)
        reader: Any = None
        given_up = threading.Event()

        def give_up() -> None:
            given_up.set()
            reader.cancel()

        try:
            with self._watchdog.waiting(name):
                reader = self._flight.do_get(ticket)
            while True:
                # There is no limit for the whole read, because its time depends on the reader too.
                with self._watchdog.waiting(name, give_up):
                    chunk = reader.read_chunk()
                yield from carries.unpack(chunk.data)
        except StopIteration:
            return
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            self._raise(error, name, given_up=given_up.is_set())
        finally:
            if reader is not None:
                reader.cancel()  # if the caller stops early, the server can stop too

    def close(self) -> None:
        self._watchdog.close()
        self._flight.close()

    def _raise(self, error: Exception, what: str, *, given_up: bool) -> NoReturn:
        if given_up:
            raise ServerError(
                f"the state server answers, but {what!r} has made no progress for {self._watchdog.limit_s:g} s: "
                "its disk may be stuck; io.request_timeout sets how long a task waits"
            ) from error
        try:
            if _FAILED in str(error):
                raise OutOfMemory(
                    f"the state server failed at {what!r} and could not say why: most likely it has no memory left; "
                    "lower memory.budget, or give the host or container more"
                )
            wire.raise_error(str(error))
        except OutOfMemory as lack:
            # Anything in that process may be broken: locks, threads, memory. It must not go on.
            with contextlib.suppress(ServerError):
                if (server := occupant(self._folder)) is not None:
                    processes.kill(server, PING_SECONDS)
            raise ServerUnreachable(f"{lack}. The server was killed") from None


def _connection(folder: Path) -> flight.FlightClient:
    # Without this option, gRPC remembers for all connections that nobody answered at this address.
    return flight.FlightClient(
        f"grpc+unix://{folder / SOCKET}", generic_options=[("grpc.use_local_subchannel_pool", 1)]
    )


def _answers(folder: Path, watched: Watched | None, seconds: float) -> bool:
    """Returns whether the server of this folder answers. ``watched``: whom it serves from now on.

    Raises ServerError if what is there is another user's.
    """
    if not trusted(folder, seconds):
        return False
    connection = _connection(folder)
    try:
        body = pa.py_buffer(orjson.dumps(watched._asdict() if watched else {"executor_pid": None}))
        list(connection.do_action(flight.Action("ping", body), flight.FlightCallOptions(timeout=seconds)))
    except (flight.FlightError, pa.ArrowException, OSError):
        return False
    finally:
        connection.close()
    return True


def _ensure(folder: Path, watched: Watched, timeout_s: float) -> None:
    """Makes sure that a server answers: starts one if necessary. Raises ServerError."""
    seconds = min(PING_SECONDS, timeout_s)
    if _answers(folder, watched, seconds):
        return
    with elected(folder):
        if _answers(folder, watched, seconds):
            return
        evict(folder)
        _start(folder, watched.executor_pid)
        if not _answers(folder, watched, PING_SECONDS):
            raise ServerUnreachable(f"the state server in {folder} was started but does not answer")


def _start(folder: Path, watch_pid: int) -> None:
    if (size := len(os.fsencode(folder / SOCKET))) > MOST_SOCKET_BYTES:
        raise ServerError(
            f"the state server's socket {folder / SOCKET} would have a path of {size} bytes, and the system allows "
            f"{MOST_SOCKET_BYTES}: set TMPDIR to a folder with a shorter path"
        )
    folder.mkdir(mode=0o700, exist_ok=True)
    private(folder)
    for stale in (PID, SOCKET):  # of a server that was killed
        (folder / stale).unlink(missing_ok=True)
    log = folder / LOG
    trim_log(folder)
    with log.open("ab") as out:
        server = subprocess.Popen(
            # -P: the server finds modules where this process finds them, not in the working folder.
            [sys.executable, "-P", "-m", "state_backends.server.main", "--dir", str(folder), "--watch", str(watch_pid)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env=_environment(os.environ),
        )
    _children[:] = [server, *(child for child in _children if child.poll() is None)]
    deadline = time.monotonic() + START_SECONDS
    while not (folder / PID).exists():
        if server.poll() is not None or time.monotonic() > deadline:
            code = server.poll()
            if code is None:
                server.kill()
                server.wait()
            output = log.read_text(errors="replace")[-2000:] if log.exists() else ""
            raise ServerError(f"the state server did not start (exit code {code}): {output}")
        time.sleep(0.02)


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    """Returns the server's environment."""
    inherited = {k: v for k, v in own.items() if k in _INHERITED or k.startswith(_INHERITED_PREFIXES)}
    return {**_ALLOCATION, **inherited, "PYTHONPATH": os.pathsep.join(p or str(Path.cwd()) for p in sys.path)}


__all__ = ["RemoteAttempt", "StateClient", "daemon_pid", "executor_pid", "running_servers", "runtime_dir", "tiers_here"]
