"""The state server: one per executor host and application (docs/operate/operating.md).

It keeps hot state in memory, because Python workers come and go. The server listens on a unix socket in a folder that
only its user can enter. It ends by itself when all its executors have ended (:class:`Executors`), or when its folder or
socket is gone. See also docs/operate/security.md.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.flight as flight

from state_backends.format.errors import AionError, RequestError, ServerError
from state_backends.server import processes, requests, server_folder, wire
from state_backends.server.host import Host
from state_backends.server.processes import Process
from state_backends.server.server_folder import ENDED_SECONDS, PID, SOCKET, Lease
from state_backends.server.verbs import VERBS, By, Carries, Way, address_of, request_of
from state_backends.store.io import SWITCH_SECONDS
from state_backends.store.sst_file import FILES_OF_A_SHARD
from state_backends.versions.json_values import dumps

log = logging.getLogger(__name__)

MOST_EXECUTORS = 1024
LOOK_SECONDS = 0.5
TOUCH_SECONDS = 600.0
ENDING_SECONDS = 20.0
FEW_OPEN_FILES = 4096


class StateServer(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow.flight has no types
    """Parses requests, calls the method with the verb's name, and sends back answers and errors."""

    def __init__(self, socket: Path, host: Host, watch: Executors) -> None:
        self.host = host
        self.watch = watch
        super().__init__(f"grpc+unix://{socket}")
        socket.chmod(0o600)

    def do_action(self, context: Any, action: flight.Action) -> Iterator[flight.Result]:
        with _named_errors():
            request = self._request(action.type, action.body.to_pybytes(), Way.JSON)
            match VERBS[action.type].by:
                case By.SERVER:
                    answer = getattr(self, action.type)(request)
                case By.HOST:
                    answer = getattr(self.host, action.type)(request)
                case By.SHARD:
                    answer = self.host.work(action.type, request)
            return iter([flight.Result(pa.py_buffer(dumps({} if answer is None else answer)))])

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        with _named_errors():
            name, body = address_of(descriptor.command)
            request, carries = self._request(name, body, Way.SENDS), VERBS[name].carries
            assert carries is not None
            for chunk in reader:
                self.host.work(name, request, carries.unpack(chunk.data))

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
        with _named_errors():
            name, body = address_of(ticket.ticket)
            request, carries = self._request(name, body, Way.GETS), VERBS[name].carries
            assert carries is not None
            return flight.GeneratorStream(carries.schema, _messages(carries, self.host.work(name, request)))

    def _request(self, name: str, body: bytes, way: Way) -> Any:
        """Parses a request, and does what the attempt had asked for before."""
        request = request_of(name, body, way)
        for earlier, fields in getattr(request, "before", ()):
            if earlier not in VERBS or not VERBS[earlier].waits:
                raise RequestError(f"{name}: before: {earlier[:100]!r} does not wait for other requests")
            fields = {**fields, "attempt": request.attempt, "server": request.server}
            self.host.work(earlier, request_of(earlier, dumps(fields), Way.JSON))
        return request

    def ping(self, request: requests.PingRequest) -> dict[str, Any]:
        """Answers if the server works. Raises ServerError if it does not; then the client starts another one."""
        if (failure := self.host.shared.failure) is not None:
            raise ServerError(failure)
        if request.executor_pid is not None:
            self.watch.add(request.executor_pid, request.daemon_pid)
        return {"pid": os.getpid()}


class _Served(NamedTuple):
    """An executor, and the daemons that started its workers. ``seen_s``: when one of them was last alive."""

    executor: Process
    daemons: set[Process]
    seen_s: float


class Executors:
    """The executors that a server serves. It has its own lock.

    An executor has ended if its process has, or if none of its daemons has been alive for ``ENDED_SECONDS``: a process
    can start Spark, stop it, and go on. Only one that has had a daemon ends in that way.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._executors: dict[int, _Served] = {}
        self._lock = threading.Lock()
        self._clock = clock

    def add(self, pid: int, daemon_pid: int | None = None) -> None:
        """Adds an executor, and the daemon of one of its workers.

        Raises RequestError if it is another user's process, or if there are too many.
        """
        found = processes.find(pid)
        if found is None:
            return  # it has ended already
        if processes.owner(pid) != os.geteuid():
            raise RequestError(f"ping: process {pid} belongs to another user; a server serves only its own user")
        daemon = None if daemon_pid is None else processes.find(daemon_pid)
        with self._lock:
            served = self._living().get(pid)
            if served is None and len(self._executors) >= MOST_EXECUTORS:
                raise RequestError(f"ping: the server has {MOST_EXECUTORS:,} executors already")
            daemons = (served.daemons if served else set()) | ({daemon} if daemon else set())
            self._executors[pid] = _Served(found, daemons, self._clock())

    def all_ended(self) -> bool:
        with self._lock:
            return not self._living()

    def _living(self) -> dict[int, _Served]:
        now = self._clock()
        for pid, served in list(self._executors.items()):
            living = {daemon for daemon in served.daemons if processes.is_alive(daemon)}
            if living or not served.daemons:
                served = self._executors[pid] = served._replace(daemons=living, seen_s=now)
            if not processes.is_alive(served.executor) or now - served.seen_s >= ENDED_SECONDS:
                del self._executors[pid]
        return self._executors


@contextlib.contextmanager
def _named_errors() -> Iterator[None]:
    """Turns errors into Flight errors that contain the name of their class."""
    try:
        yield
    except flight.FlightError:
        raise
    except Exception as error:
        if not isinstance(error, AionError):
            log.exception("a request failed")
        raise flight.FlightServerError(wire.encode_error(error)) from error


def _messages(carries: Carries, found: Any) -> Iterator[pa.RecordBatch]:
    with _named_errors():
        yield from carries.pack(found)


def serve(folder: Path, host: Host, watch: Executors, stop: threading.Event) -> None:
    """Serves until all executors have ended, its folder or socket is gone, or ``stop`` is set. Then closes the host.

    Raises ServerError if the folder has a server already.
    """
    server_folder.private(folder)
    lease = Lease(folder)
    try:
        server_folder.sweep(folder.parent)
        socket = folder / SOCKET
        socket.unlink(missing_ok=True)  # of a server that was killed
        server = StateServer(socket, host, watch)
        bound = socket.stat().st_ino
        serving = threading.Thread(target=server.serve, name="aion-serve", daemon=True)
        serving.start()
        threading.Thread(target=_end_after, args=(watch, stop), name="aion-end", daemon=True).start()
        part = folder / f"{PID}.part"
        part.write_text(str(os.getpid()))
        part.rename(folder / PID)  # from now on clients find it
        touch_at = time.monotonic() + TOUCH_SECONDS
        while not stop.wait(LOOK_SECONDS) and lease.is_valid and _is_at(socket, bound) and host.shared.failure is None:
            server_folder.trim_log(folder)
            host.close_idle(server_folder.ended(folder))
            if time.monotonic() >= touch_at:
                touch_at = time.monotonic() + TOUCH_SECONDS
                host.touch_folders()
                os.utime(folder / PID)
        if host.shared.failure is not None:
            log.critical("this server ends, and the next request starts another: %s", host.shared.failure)
        _end_soon()
        ending = threading.Thread(target=server.shutdown, name="aion-shutdown", daemon=True)
        ending.start()
        ending.join(ENDING_SECONDS)
    finally:
        try:
            host.close()
        except Exception:
            log.exception("the server could not close everything")
        server_folder.leave(folder, lease)
        lease.close()


def _end_after(executors: Executors, stop: threading.Event) -> None:
    """Sets ``stop`` when all executors have ended. The process then ends, even if :func:`serve` hangs.

    Only this thread decides that: if :func:`serve` looked, too, an executor that comes between the two looks would be
    served by a process that is about to end.
    """
    while True:
        time.sleep(LOOK_SECONDS)
        if executors.all_ended():
            break
    stop.set()
    _end_soon()


def _end_soon() -> None:
    """The process ends even if a request, a disk or a policy hangs. It then logs where its threads are."""
    faulthandler.dump_traceback_later(2 * ENDING_SECONDS, exit=True)


def _is_at(socket: Path, inode: int) -> bool:
    try:
        return socket.stat().st_ino == inode
    except FileNotFoundError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m state_backends.server.main")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--watch", type=int, required=True)
    arguments = parser.parse_args()
    run(arguments.dir, arguments.watch, Host())


def _raise_open_files() -> None:
    """Raises the limit on open files to what the system allows this user. Logs a warning if that is too few."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < FEW_OPEN_FILES:
        log.warning(
            "this server may open %d files, enough for about %d shards; for more shards, raise the limit (ulimit -n)",
            limit,
            limit // FILES_OF_A_SHARD,
        )


def run(folder: Path, executor_pid: int, host: Host) -> None:
    """Makes this process the state server of a folder until it ends. Raises SystemExit if it cannot serve."""
    os.umask(0o077)
    sys.setswitchinterval(SWITCH_SECONDS)
    faulthandler.enable()
    logging.basicConfig(format="%(asctime)s %(name)s %(levelname)s %(message)s")
    _raise_open_files()
    watch, stop = Executors(), threading.Event()
    watch.add(executor_pid)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        serve(folder, host, watch, stop)
    except ServerError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None


if __name__ == "__main__":
    main()
