"""The state server: one per executor host and application (DESIGN section 2).

Hot state outlives Python workers here. It moves bytes and runs none of the user's code. It listens on a unix
socket in a folder that only its user can enter, and ends by itself when no executor it serves is left.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import select
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import psutil
import pyarrow as pa
import pyarrow.flight as flight

from aion.errors import AionError, ServerError
from state_backends import wire
from state_backends.host import Host

SOCKET, PID = "socket", "pid"


class StateServer(flight.FlightServerBase):  # type: ignore[misc]
    """The Flight face of a :class:`Host`; sessions are named by their attempt's token."""

    def __init__(self, socket: Path, host: Host, watch: Watch) -> None:
        self.host = host
        self.watch = watch
        super().__init__(f"grpc+unix://{socket}")

    def do_action(self, context: Any, action: flight.Action) -> Iterator[flight.Result]:
        with _told():
            request = orjson.loads(action.body.to_pybytes() or b"{}")
            return iter([flight.Result(pa.py_buffer(orjson.dumps(self._act(action.type, request))))])

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        with _told():
            attempt = orjson.loads(descriptor.command)["attempt"]
            shard, lock = self.host.shard(attempt)
            for chunk in reader:
                with lock:
                    shard.append(attempt, list(wire.unpack(chunk.data)))

    def do_get(self, context: Any, ticket: flight.Ticket) -> flight.FlightDataStream:
        with _told():
            request = orjson.loads(ticket.ticket)
            shard, _ = self.host.shard(request["attempt"])
            blocks = shard.read(request["attempt"], request["slices"], blocking=request["blocking"])
            return flight.GeneratorStream(wire.BLOCKS, _messages(blocks))

    def _act(self, name: str, request: dict[str, Any]) -> Any:
        match name:
            case "ping":
                self.watch.add(request["executor_pid"])
                return {"pid": os.getpid()}
            case "open":
                return self.host.open(request)
            case "stats":
                return self.host.stats()
        attempt = request["attempt"]
        shard, lock = self.host.shard(attempt)
        with lock:
            match name:
                case "release":
                    shard.destage(attempt, request["destage"])
                    shard.purge(attempt, request["purge"])
                case "prestage":
                    shard.prestage(attempt, request["slices"])
                case "commit":
                    shard.commit(attempt, request["snapshot"])
                case "abort":
                    shard.abort(attempt)
                    self.host.ended(attempt)
                case _:
                    raise ServerError(f"unknown action {name!r}")
        if name == "commit":
            self.host.plan_prestage(attempt, request["prestage"], request["executions"])
            self.host.ended(attempt)
        return {}


class Watch:
    """Ends the server when no executor that it serves is alive any more."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._fds: dict[int, int] = {}
        self._lock = threading.Lock()
        self._woken = os.pipe()
        self._poll.register(self._woken[0], select.POLLIN)

    def add(self, pid: int) -> None:
        with self._lock:
            if pid in self._fds.values():
                return
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                return
            self._fds[fd] = pid
            self._poll.register(fd, select.POLLIN)
            os.write(self._woken[1], b".")  # poll again, with the new one

    def until_alone(self) -> None:
        while True:
            with self._lock:
                if not self._fds:
                    return
            for fd, _ in self._poll.poll():
                with self._lock:
                    if fd == self._woken[0]:
                        os.read(fd, 1)
                    elif fd in self._fds:
                        self._poll.unregister(fd)
                        os.close(fd)
                        del self._fds[fd]


@contextlib.contextmanager
def elected(folder: Path) -> Iterator[None]:
    """Holds the lock of a server's folder: of several workers that want to start one, one does.

    The lock file is removed by the server that ends, so whoever waited for it must look whether the file it
    locked is still the one that others see.
    """
    path = folder.parent / f"{folder.name}.lock"
    while True:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        private(folder.parent)
        try:
            lock = path.open("w")
        except FileNotFoundError:
            continue
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _is(path, lock.fileno()):
                yield
                return


def _is(path: Path, fd: int) -> bool:
    try:
        return path.stat().st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        return False


def private(folder: Path) -> None:
    """Raises ServerError unless the folder is this user's alone."""
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ServerError(f"{folder} must belong to this user alone (mode 0700); it does not")


def _sweep_dead(parent: Path) -> None:
    """Removes folders of servers that were killed, of applications that never came back for them."""
    for pid in parent.glob("*/" + PID):
        with contextlib.suppress(OSError, ValueError):
            if not psutil.pid_exists(int(pid.read_text())):
                _leave(pid.parent)


def _leave(folder: Path) -> None:
    """Removes everything that a server has on this host."""
    with elected(folder):
        shutil.rmtree(folder, ignore_errors=True)
        (folder.parent / f"{folder.name}.lock").unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Errors reach the client under their own names."""
    try:
        yield
    except Exception as error:
        raise flight.FlightServerError(wire.encode_error(error)) from error


def _messages(blocks: Any) -> Iterator[pa.RecordBatch]:
    with _told():
        yield from wire.pack((b.seq, False, b.block) for b in blocks)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m state_backends.server")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--watch", type=int, required=True)
    arguments = parser.parse_args()
    os.umask(0o077)
    watch, host = Watch(), Host()
    watch.add(arguments.watch)
    socket = arguments.dir / SOCKET
    try:
        _sweep_dead(arguments.dir.parent)
        server = StateServer(socket, host, watch)
        (arguments.dir / PID).write_text(str(os.getpid()))
        serving = threading.Thread(target=server.serve, name="aion-serve", daemon=True)
        serving.start()
        signal.signal(signal.SIGTERM, lambda *_: _raise_exit())
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            watch.until_alone()
        server.shutdown()
    finally:
        with contextlib.suppress(AionError):
            host.close()
        _leave(arguments.dir)


def _raise_exit() -> None:
    raise SystemExit(0)


if __name__ == "__main__":
    main()
