"""Starts and watches the process that runs the queries of the chaos experiment."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from experiments.chaos.faults import Application
    from experiments.chaos.places import Place
    from experiments.shared.host_cluster import Cluster

STALLED_S = 300.0
STARTING_S = 300.0
LEAVING_S = 60.0
ARCHIVED_S = 300.0
"""How long a JVM may take to end while it writes an archive: over a minute where others use the processors, too."""


class ChaosError(RuntimeError):
    """The experiment itself cannot continue: the queries are stuck, or the child does not start."""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p or str(Path.cwd()) for p in sys.path)}


def start(
    folder: Path, state: Place, out: IO[bytes], cluster: Cluster | None, workload: str, *more: str
) -> subprocess.Popen[bytes]:
    """Starts :mod:`experiments.chaos.query` in ``folder``, here or on the cluster's host of the drivers."""
    from experiments.chaos.query import CLUSTER, cluster_settings, jvm_options

    command = [sys.executable, "-m", "experiments.chaos.query", str(folder), state.uri, workload, *more]
    if cluster is None:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment(), cwd=folder
        )
    jvm = jvm_options(folder.parent)
    settings = cluster_settings(cluster.master, cluster.driver.address, len(cluster.workers), jvm)
    (folder / CLUSTER).write_text(json.dumps(settings))
    paths = {"PYTHONPATH": environment()["PYTHONPATH"]}
    return cluster.driver.start(command, out, paths, stdin=subprocess.DEVNULL, cwd=folder)


class Child:
    """One life of the process with the queries, which works in ``folder``. ``state``: where its state is.

    ``cluster``: where Spark runs; None: in the process itself. ``name``: of the workload.
    """

    def __init__(self, folder: Path, state: Place, cluster: Cluster | None, name: str) -> None:
        from experiments.chaos.query import STARTED
        from experiments.chaos.workloads import workload_of

        self.folder, self.state, self.cluster = folder, state, cluster
        self._queries = workload_of(name).queries
        (folder / STARTED).unlink(missing_ok=True)
        self.log = folder / "log"
        self._out = self.log.open("ab")
        self.process = start(folder, state, self._out, cluster, name)
        self._application: Application | None = None
        self._lost = False
        self.lost_at = 0.0
        self.batch_s = 1.0
        self._before = self.by_query()
        self._progress = self.batches(), time.monotonic()

    @property
    def application(self) -> Application:
        assert self._application is not None
        return self._application

    @property
    def is_lost(self) -> bool:
        """Whether its JVM was killed on purpose."""
        return self._lost

    @is_lost.setter
    def is_lost(self, lost: bool) -> None:
        self._lost = lost
        self.lost_at = time.monotonic()

    def wait_until_started(self) -> None:
        from experiments.chaos.faults import Application
        from experiments.chaos.query import SPARK, STARTED
        from state_backends.server import processes

        deadline = time.monotonic() + STARTING_S
        while not (self.folder / STARTED).exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise ChaosError(f"the child did not start: {self.last_words()}")
            time.sleep(0.05)
        started = json.loads((self.folder / STARTED).read_text())
        driver, jvm = processes.find(started["driver"]), processes.find(started["jvm"])
        if driver is None or jvm is None:
            raise ChaosError(f"the child ended at once: {self.last_words()}")
        local = self.state.folder or self.folder / SPARK
        self._application = Application(started["application"], driver, jvm, local, self.state.bucket, self.cluster)
        self._progress = self.batches(), time.monotonic()

    def wait_for_first_batches(self) -> None:
        """Waits until each query has made a batch, or until the process has ended. Raises ChaosError if none comes."""
        while self.process.poll() is None and any(n == b for n, b in zip(self.by_query(), self._before, strict=True)):
            self.note_progress()
            time.sleep(0.05)

    def by_query(self) -> list[int]:
        return [sum(1 for _ in (self.folder / query).glob("??????.json")) for query in self._queries]

    def batches(self) -> int:
        return sum(self.by_query())

    def note_progress(self) -> None:
        """Measures how long a batch takes. Raises ChaosError if there was no batch for a long time."""
        batches, since = self._progress
        now, count = time.monotonic(), self.batches()
        if count > batches:
            self.batch_s = 0.8 * self.batch_s + 0.2 * min(5.0, (now - since) / (count - batches) * 2)
            self._progress = count, now
        elif now - since > STALLED_S:
            raise ChaosError(f"no batch for {STALLED_S:g} s: {self.last_words()}")

    def seen(self) -> dict[str, int]:
        """Counts so far, from the logs: lost tasks and executors, tasks that changed servers, query failures."""
        log = self.log.read_text(errors="replace")
        for host in self.cluster.workers if self.cluster else ():
            for path in host.temporary.glob("app-*/*/stderr"):
                log += path.read_text(errors="replace")
        return {
            "lost": log.count("Lost task") + log.count("Lost executor"),
            "turns": log.count(" continues on another server as "),
            "failures": len(self.failures()),
        }

    def failures(self) -> list[str]:
        from experiments.chaos.query import FAILURES

        path = self.folder / FAILURES
        return path.read_text().splitlines() if path.exists() else []

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def wait_for_jvm(self) -> None:
        """Waits until the JVM of an undisturbed run has ended, too. Its archive of classes takes a while."""
        from experiments.chaos.query import STARTED

        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(json.loads((self.folder / STARTED).read_text())["jvm"]).wait(ARCHIVED_S)

    def end(self) -> None:
        """Ends the process and everything that it started. Raises ChaosError if its state server does not end."""
        from experiments.chaos import faults as chaos_faults
        from state_backends.server import processes, server_folder

        app = self._application
        if app is not None:
            chaos_faults.end(app.jvm)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._out.close()
        if app is None:
            return
        deadline = time.monotonic() + LEAVING_S
        while servers := [(server, place) for server, place in app.servers() if processes.is_alive(server)]:
            if time.monotonic() > deadline:
                server, place = servers[0]
                log = place / server_folder.LOG
                said = log.read_text(errors="replace")[-3000:] if log.exists() else "it has no log"
                raise ChaosError(f"the state server {server.pid} still runs after its executor has ended: {said}")
            time.sleep(0.05)
        for place in app.places:
            shutil.rmtree(place, ignore_errors=True)
