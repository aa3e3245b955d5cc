"""The worker's side: finds the host's state server or starts it, and works on shards through it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import psutil
import pyarrow as pa
import pyarrow.flight as flight

from aion.errors import ServerError
from state_backends import wire
from state_backends.block import Block
from state_backends.manifest import Identity
from state_backends.server import PID, SOCKET, elected, private
from state_backends.store import StoredBlock
from state_backends.stores import StoreConfig

START_SECONDS = 30.0


def runtime_dir(application: str) -> Path:
    """Where the server of an application lives on this host: short, since a socket's path is limited."""
    digest = hashlib.sha256(application.encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"aion-{os.getuid()}" / digest


def running_servers() -> list[tuple[int, dict[str, Any]]]:
    """Pid and statistics of every state server of this user on this host that answers."""
    found = []
    for pid in runtime_dir("").parent.glob("*/" + PID):
        client = StateClient(pid.parent)
        with contextlib.suppress(ServerError, OSError, ValueError):
            found.append((int(pid.read_text()), client.stats()))
        client.close()
    return found


def executor_pid() -> int:
    """The JVM that this worker belongs to; without one, the process that started it."""
    for process in psutil.Process().parents():
        with contextlib.suppress(psutil.Error):
            if process.name().startswith("java"):
                return process.pid
    return os.getppid()


class StateClient:
    """A connection to the state server of this host."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._flight = flight.FlightClient(f"grpc+unix://{folder / SOCKET}")

    @classmethod
    def connect(cls, application: str, *, watch_pid: int) -> StateClient:
        """Connects, starting the server if there is none; of several at once a lock file elects one.

        ``watch_pid``: the executor in whose absence the server has no reason to live.
        Raises ServerError when none can be started.
        """
        folder = runtime_dir(application)
        client = cls.find(application, watch_pid=watch_pid)
        if client is not None:
            return client
        with elected(folder):
            client = cls.find(application, watch_pid=watch_pid)
            if client is None:
                _start(folder, watch_pid)
                client = cls.find(application, watch_pid=watch_pid)
        if client is None:
            raise ServerError(f"the state server in {folder} was started and does not answer")
        return client

    @classmethod
    def find(cls, application: str, *, watch_pid: int) -> StateClient | None:
        """A connection to the server if one answers, else None."""
        folder = runtime_dir(application)
        if not (folder / SOCKET).exists():
            return None
        client = cls(folder)
        try:
            client.act("ping", {"executor_pid": watch_pid}, timeout=10.0)
        except ServerError:
            client.close()
            return None
        return client

    def act(self, name: str, request: dict[str, Any], timeout: float | None = None) -> Any:
        """Raises what the server raised, or ServerError when it cannot be reached."""
        options = flight.FlightCallOptions(timeout=timeout) if timeout else flight.FlightCallOptions()
        try:
            body = pa.py_buffer(orjson.dumps(request))
            (result,) = self._flight.do_action(flight.Action(name, body), options)
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            wire.raise_error(str(error))
        return orjson.loads(result.body.to_pybytes())

    def stats(self) -> dict[str, Any]:
        result: dict[str, Any] = self.act("stats", {}, timeout=10.0)
        return result

    def open(
        self,
        identity: Identity,
        *,
        token: str | None,
        attempt: str,
        run: str,
        operator_uid: str,
        state_dir: str,
        store: StoreConfig,
    ) -> RemoteSession:
        answer = self.act(
            "open",
            {
                "identity": asdict(identity),
                "token": token,
                "attempt": attempt,
                "run": run,
                "operator_uid": operator_uid,
                "state_dir": state_dir,
                "store": store.to_json(),
            },
        )
        return RemoteSession(self, attempt, answer["snapshot"], rebuilt=answer["rebuilt"])

    def put(self, attempt: str, blocks: Iterable[tuple[int, bool, Block]]) -> None:
        descriptor = flight.FlightDescriptor.for_command(orjson.dumps({"attempt": attempt}))
        try:
            writer, _ = self._flight.do_put(descriptor, wire.BLOCKS)
            with writer:
                for message in wire.pack(blocks):
                    writer.write_batch(message)
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            wire.raise_error(str(error))

    def get(self, attempt: str, slices: Sequence[int], *, blocking: bool) -> Iterator[StoredBlock]:
        request = {"attempt": attempt, "slices": list(slices), "blocking": blocking}
        ticket = flight.Ticket(orjson.dumps(request))
        try:
            for chunk in self._flight.do_get(ticket):
                yield from wire.stored(chunk.data)
        except (flight.FlightError, pa.ArrowException, OSError) as error:
            wire.raise_error(str(error))

    def close(self) -> None:
        self._flight.close()


class RemoteSession:
    """An attempt's work on one shard, through the server. The executor's ``Session`` protocol."""

    def __init__(
        self, client: StateClient, attempt: str, snapshot: dict[str, Any] | None, *, rebuilt: bool = False
    ) -> None:
        self._client = client
        self.attempt = attempt
        self.snapshot = snapshot
        self.rebuilt = rebuilt  # from its version's files: nothing of it is in memory

    def append(self, blocks: Iterable[tuple[int, bool, Block]]) -> None:
        self._client.put(self.attempt, blocks)

    def read(self, slices: Sequence[int], *, blocking: bool = False) -> Iterator[StoredBlock]:
        return self._client.get(self.attempt, slices, blocking=blocking)

    def prestage(self, slices: Sequence[int]) -> None:
        self._client.act("prestage", {"attempt": self.attempt, "slices": list(slices)})

    def release(self, destage: Sequence[int], purge: Sequence[int]) -> None:
        self._client.act("release", {"attempt": self.attempt, "destage": list(destage), "purge": list(purge)})

    def commit(
        self, snapshot: dict[str, Any], prestage: Sequence[int] = (), executions: Sequence[tuple[int, float]] = ()
    ) -> None:
        """``prestage``: slices that the next attempt is expected to read; ``executions``: bytes and seconds of each."""
        self._client.act(
            "commit",
            {
                "attempt": self.attempt,
                "snapshot": snapshot,
                "prestage": list(prestage),
                "executions": list(executions),
            },
        )

    def abort(self) -> None:
        with contextlib.suppress(ServerError):
            self._client.act("abort", {"attempt": self.attempt})


def _start(folder: Path, watch_pid: int) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    private(folder)
    for stale in (PID, SOCKET):  # of a server that was killed
        (folder / stale).unlink(missing_ok=True)
    log = folder / "log"
    with log.open("ab") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "state_backends.server", "--dir", str(folder), "--watch", str(watch_pid)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
    deadline = time.monotonic() + START_SECONDS
    while not (folder / PID).exists():
        if server.poll() is not None or time.monotonic() > deadline:
            said = log.read_text(errors="replace")[-2000:] if log.exists() else ""
            raise ServerError(f"the state server did not start (exit code {server.poll()}): {said}")
        time.sleep(0.02)
