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
from state_backends.checkpoint import Shard
from state_backends.io_thread import IoThread
from state_backends.manifest import Identity
from state_backends.p_bucket import PBucket
from state_backends.store import BlockStore
from state_backends.stores import StoreConfig, make_store
from state_backends.tiered import MemoryBudget

SOCKET, PID = "socket", "pid"


class Host:
    """Every shard that this host holds, the budget they share, and the one I/O thread."""

    def __init__(self) -> None:
        self.io = IoThread()
        self.budget = MemoryBudget(0)
        self._lock = threading.Lock()
        self._shards: dict[tuple[str, str, int], tuple[Shard, threading.Lock]] = {}
        self._attempts: dict[str, tuple[str, str, int]] = {}
        self._owners: dict[tuple[str, str], tuple[str, str]] = {}
        self._live_roots: set[Path] = set()
        self._id = f"{os.getpid()}-{int(psutil.Process().create_time() * 1000)}"

    def open(self, request: dict[str, Any]) -> dict[str, Any]:
        identity = Identity(**request["identity"])
        config = StoreConfig(**request["store"])
        key = (identity.query, identity.operator, identity.shard)
        with self._lock:
            self._check_owner(identity, request["run"], request["operator_uid"])
            self.budget.raise_to(config.budget_bytes)
            if key not in self._shards:
                self._shards[key] = self._make(identity, Path(request["state_dir"]), config), threading.Lock()
            shard, lock = self._shards[key]
            self._attempts[request["attempt"]] = key
        with lock:
            snapshot = shard.open(request["token"], request["attempt"], identity)
        return {"snapshot": snapshot}

    def shard(self, attempt: str) -> tuple[Shard, threading.Lock]:
        with self._lock:
            key = self._attempts.get(attempt)
            if key is None:
                raise ServerError(f"attempt {attempt} was never opened here; the state server was restarted")
            return self._shards[key]

    def ended(self, attempt: str) -> None:
        with self._lock:
            self._attempts.pop(attempt, None)

    def stats(self) -> dict[str, Any]:
        with self._lock:
            shards = list(self._shards.items())
        totals = {"blocks": 0, "m_bucket_bytes": 0, "p_bucket_bytes": 0, "disk_only_bytes": 0}
        operators: dict[str, Any] = {}
        rebuilds = 0
        for (_, operator, _), (shard, _) in shards:
            rebuilds += shard.rebuilds
            if shard.store is not None:
                for name, value in shard.store.stats().to_json().items():
                    totals[name] += value
            if shard.snapshot is not None:
                _add(operators.setdefault(operator, {}), shard.snapshot["counters"])
        return {
            **totals,
            "peak_m_bucket_bytes": self.budget.peak_bytes,
            "budget_bytes": self.budget.limit_bytes,
            "shards": len(shards),
            "rebuilds": rebuilds,
            "operators": operators,
            "io": {
                "requests": self.io.stats.requests,
                "steps": self.io.stats.steps,
                "busy_seconds": self.io.stats.busy_seconds,
                "queued": self.io.stats.queued,
            },
        }

    def close(self) -> None:
        with self._lock:
            for shard, lock in self._shards.values():
                with lock, contextlib.suppress(Exception):
                    shard.close()
            self._shards.clear()
        self.io.close()
        for root in self._live_roots:
            shutil.rmtree(root, ignore_errors=True)
            with contextlib.suppress(OSError):
                root.parent.rmdir()

    def _make(self, identity: Identity, state_dir: Path, config: StoreConfig) -> Shard:
        # RocksDB's own folder stands beside the versions, so that ingesting is a hard link.
        live_root = state_dir / ".live" / self._id
        if live_root not in self._live_roots:
            _sweep(state_dir / ".live")
            live_root.mkdir(parents=True, mode=0o700)
            self._live_roots.add(live_root)
        name = f"shard-{identity.shard:05d}"

        def store(p_bucket: PBucket) -> BlockStore:
            return make_store(config, p_bucket, self.io, self.budget)

        return Shard(
            identity,
            state_dir / identity.query / identity.operator / name,
            live_root / identity.query / identity.operator / name,
            store,
            retain=config.retain_versions,
        )

    def _check_owner(self, identity: Identity, run: str, uid: str) -> None:
        """Two operators of one query must not share a name: they would share their state."""
        key = (identity.query, identity.operator)
        owner = self._owners.get(key)
        if owner is not None and owner[0] == run and owner[1] != uid:
            raise ServerError(
                f"two operators of this query are both named {identity.operator!r}; "
                "give each its own: aion.windowed(..., name='...')"
            )
        self._owners[key] = (run, uid)


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
            blocks = shard.read(request["attempt"], request["slices"])
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
                case "commit":
                    shard.commit(attempt, request["snapshot"])
                    self.host.ended(attempt)
                case "abort":
                    shard.abort(attempt)
                    self.host.ended(attempt)
                case _:
                    raise ServerError(f"unknown action {name!r}")
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


def _add(total: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if isinstance(value, dict):
            _add(total.setdefault(name, {}), value)
        else:
            total[name] = total.get(name, 0) + value


def _sweep(live: Path) -> None:
    """Removes what servers that were killed left behind: folders named by a process that is no more."""
    for folder in live.glob("*-*"):
        pid, _, born = folder.name.partition("-")
        try:
            alive = int(psutil.Process(int(pid)).create_time() * 1000) == int(born)
        except (psutil.Error, ValueError):
            alive = False
        if not alive:
            shutil.rmtree(folder, ignore_errors=True)


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
