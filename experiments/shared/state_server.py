"""State servers that are not the usual one: ``python -m experiments.shared.state_server --dir DIR --watch PID HOW``.

No setting of Aion's leads here: such a server has to be started before the first task of an application starts the
usual one. ``nothing`` does not write what it commits. ``4-io-threads`` has more than one I/O thread, for the paper's
ablation (figure 8, "no-sqntl-io").
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from state_backends.backends import StoreConfig
from state_backends.server import main as server
from state_backends.server.client import StateClient
from state_backends.server.host import Host
from state_backends.server.server_folder import runtime_dir
from state_backends.server.shared import Shared
from state_backends.store.io import Priority, Steps
from state_backends.store.io_thread import IoRequest, IoThread
from state_backends.versions.manifest import Manifest
from state_backends.versions.shard import Shard

T = TypeVar("T")
STARTING_S = 60.0
ENDING_S = 60.0


class Forgetful(Shard):
    """A shard whose commits write nothing. The next attempt continues in memory; if the host dies, all state is lost.

    Everything else is as usual: blocks that do not fit into memory go to disk, and an attempt can be rolled back.
    """

    def commit(self, attempt: str, snapshot: dict[str, Any], due: Sequence[int] = ()) -> str:
        self._working(attempt).work.end()
        before, making = self.current, self._at_work
        assert making is not None
        self.current = made = Manifest(
            token=making.token,
            parent=before.token if before else None,
            version=before.version + 1 if before else 1,
            identity=self.identity,
            files=(),
            next_file_no=0,
            snapshot=snapshot,
        )
        self._at_work = None
        return made.token


class IoThreads(IoThread):
    """Several threads take turns at the queue, so requests run beside each other."""

    def __init__(self, threads: int, rate_limit: int | None = None) -> None:
        super().__init__(rate_limit=rate_limit)
        self._others = [threading.Thread(target=self._run, daemon=True) for _ in range(threads - 1)]
        for thread in self._others:
            thread.start()

    def close(self) -> None:
        super().close()
        for thread in self._others:
            thread.join()


class OfShard:
    """A queue for the requests of one shard, of which one at a time has a step under way.

    A step may leave the shard's RocksDB, buckets and ledger in disagreement until it ends.
    """

    def __init__(self, io: IoThread) -> None:
        self._io, self._step = io, threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._io, name)

    def submit(self, priority: Priority, steps: Steps[T]) -> IoRequest[T]:
        return self._io.submit(priority, self._in_turn(steps))

    def _in_turn(self, steps: Steps[T]) -> Steps[T]:
        try:
            while True:
                with self._step:
                    try:
                        moved = next(steps)
                    except StopIteration as stop:
                        result: T = stop.value
                        return result
                yield moved
        finally:
            with self._step:
                steps.close()


class SharedByThreads(Shared):
    """What shards share where several threads do their I/O."""

    def start(self, config: StoreConfig, tick: Callable[[], None], next_s: Callable[[], float | None]) -> None:
        super().start(config, tick, next_s)
        if type(self.io) is IoThread:
            self.io.close()
            self.io = IoThreads(4, config.rate_limit_bytes_per_s)


class HostOfThreads(Host):
    """Its shards have several I/O threads, and each a queue of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = SharedByThreads()

    def _make(self, *given: Any) -> Shard:
        io = self.shared.io
        assert io is not None
        self.shared.io = cast(IoThread, OfShard(io))  # the new shard's stores take it; everything else is as it was
        try:
            return super()._make(*given)
        finally:
            self.shared.io = io


HOW: dict[str, Callable[[], Host]] = {
    "commits": Host,
    "nothing": partial(Host, shard=Forgetful),
    "4-io-threads": HostOfThreads,
}


@contextmanager
def state_server(application: str, executor_pid: int, how: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs the state server of a Spark application on this host. Raises RuntimeError if it ends too early."""
    folder = runtime_dir(application)
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700)
    arguments = ["--dir", str(folder), "--watch", str(executor_pid), how]
    with log.open("ab") as out:
        process = subprocess.Popen([sys.executable, "-m", __name__, *arguments], stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + STARTING_S
        while (client := StateClient.find(application)) is None:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the state server ({how}) did not start: see {log}")
            time.sleep(0.02)
        client.close()
        yield process
        if process.poll() is not None:
            raise RuntimeError(f"the state server ({how}) ended too early: see {log}")
    finally:
        process.terminate()
        process.wait(ENDING_S)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--watch", type=int, required=True)
    parser.add_argument("how", choices=HOW)
    arguments = parser.parse_args()
    server.run(arguments.dir, arguments.watch, HOW[arguments.how]())


if __name__ == "__main__":
    main()
