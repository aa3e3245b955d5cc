"""A state server whose commits write nothing: ``python -m experiments.overhead_server --dir DIR --watch PID HOW``.

This is the only way to one: no setting of Aion's leads here. Whoever starts it before the first task of an application
does decides what serves it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from state_backends.server import main as server
from state_backends.server.client import StateClient
from state_backends.server.host import Host
from state_backends.server.server_folder import runtime_dir
from state_backends.versions.manifest import Identity, Manifest
from state_backends.versions.shard import Shard

STARTING_S = 60.0
ENDING_S = 60.0


class Forgetful(Shard):
    """A shard whose commits write nothing: the next attempt goes on in memory, and a host that dies loses it all.

    Everything else is a shard's: what memory has no room for goes to disk, and what an attempt did can be undone.
    """

    def commit(self, attempt: str, snapshot: dict[str, Any]) -> str:
        self._working(attempt).end()
        before = self._held
        self._held = Manifest(
            token=self._makes,
            parent=before.token if before else None,
            version=before.version + 1 if before else 1,
            identity=self.identity,
            files=(),
            purged=(),
            next_file_no=0,
            snapshot=snapshot,
        )
        self._attempt = None
        return self._held.token

    def _claim(self, attempt: str, identity: Identity, *, begins: bool) -> None:
        """Nobody will come back to ask whose state this was."""


HOW: dict[str, type[Shard]] = {"commits": Shard, "nothing": Forgetful}


@contextmanager
def state_server(application: str, executor_pid: int, how: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The state server of a Spark application on this host. Raises RuntimeError if it does not serve all the time."""
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
                raise RuntimeError(f"no state server that writes {how}: see {log}")
            time.sleep(0.02)
        client.close()
        yield process
        if process.poll() is not None:
            raise RuntimeError(f"the state server that writes {how} did not live to the end: see {log}")
    finally:
        process.terminate()
        process.wait(ENDING_S)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--watch", type=int, required=True)
    parser.add_argument("how", choices=HOW)
    arguments = parser.parse_args()
    server.run(arguments.dir, arguments.watch, Host(shard=HOW[arguments.how]))


if __name__ == "__main__":
    main()
