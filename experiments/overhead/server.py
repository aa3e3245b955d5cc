"""A state server whose commits write nothing: ``python -m experiments.overhead.server --dir DIR --watch PID HOW``.

No setting of Aion's leads here: it has to be started before the first task of an application starts the usual server.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from state_backends.server import main as server
from state_backends.server.client import StateClient
from state_backends.server.host import Host
from state_backends.server.server_folder import runtime_dir
from state_backends.versions.manifest import Manifest
from state_backends.versions.shard import Shard

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


HOW: dict[str, type[Shard]] = {"commits": Shard, "nothing": Forgetful}


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
    server.run(arguments.dir, arguments.watch, Host(shard=HOW[arguments.how]))


if __name__ == "__main__":
    main()
