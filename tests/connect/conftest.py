"""A server of Spark Connect as a process of its own, and clients that are others: here, no test imports pyspark.

In one process, pyspark's functions are those of Spark Connect or those of a session with a JVM.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import jvm

ROOT = Path(__file__).parent.parent.parent
NEEDED = ("grpc", "grpc_status", "google.rpc", "zstandard")
PATIENCE = 120.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = [name for name in NEEDED if not _is_there(name)]
    if missing:
        skip = pytest.mark.skip(reason=f"pip install 'aion[connect]': {', '.join(missing)} is missing")
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(skip)


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


class Server:
    """A server of Spark Connect on this host."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"sc://127.0.0.1:{port}"
        home = Path(str(find_spec("pyspark").origin)).parent  # type: ignore[union-attr]
        settings = {
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": port,
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.memory": "1g",
            "spark.local.dir": folder,
            "spark.sql.codegen.factoryMode": "NO_CODEGEN",
            "spark.sql.codegen.wholeStage": "false",
            "spark.sql.shuffle.partitions": 2,
            "spark.sql.warehouse.dir": folder / "warehouse",
            "spark.ui.enabled": "false",
        }
        command = [home / "bin" / "spark-submit", "--master", "local[2,3]"]
        command += ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
        command += ["--driver-java-options", f"{jvm.OPTIONS} -Djava.io.tmpdir={folder}"]
        command += [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
        environment = os.environ | {"SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
        self._log = folder / "log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [*map(str, command), "spark-internal"], cwd=folder, env=environment, stdout=log, stderr=log
            )
        deadline = time.monotonic() + PATIENCE
        while not self._answers(port):
            assert self.process.poll() is None and time.monotonic() < deadline, self._log.read_text()[-3000:]
            time.sleep(0.1)

    def _answers(self, port: int) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    def stop(self) -> None:
        self._end(self.process.terminate)

    def kill(self) -> None:
        self._end(self.process.kill)

    def _end(self, end: Callable[[], None]) -> None:
        """Ends the server, and its processes for foreachBatch: they would ask for it for minutes."""
        batches = [
            child for child in psutil.Process(self.process.pid).children(recursive=True) if _is_for_batches(child)
        ]
        end()
        self.process.wait(PATIENCE)
        for child in batches:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def _is_for_batches(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any("foreach_batch_worker" in word for word in process.cmdline())
    return False


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = Server(tmp_path_factory.mktemp("connect"))
    yield running
    running.stop()


def ask(url: str, what: str, folder: Path, **arguments: Any) -> Any:
    """Returns what a client answers: a function of :mod:`tests.connect.client`, in a process of its own.

    ``url``: of the server, or of a master.
    """
    command = [sys.executable, "-m", "tests.connect.client", url, what, str(folder), json.dumps(arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])
